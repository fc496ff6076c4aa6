"""Tokens sharded over ranks: processes on the CPU, over gloo, and on GPUs, over NCCL."""

import copy
import multiprocessing
import pickle

import attn
import pytest
from conftest import require

try:
    import torch
    import torch.distributed as dist

    REASON = None if dist.is_available() and dist.is_gloo_available() else "torch was built without gloo"
except ImportError as error:
    torch, REASON = None, str(error)

HEADS, DIM, TOKENS = 2, 64, 2500


@pytest.fixture(autouse=True, scope="module")
def has_gloo():
    if REASON is not None:
        require("torch", REASON)


def random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_ranks(ranks, work, folder, *arguments, backend="gloo"):
    """What `work(rank, …)` returns on each rank of a group, each a process; with NCCL each has a GPU."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_run, args=(rank, ranks, f"{folder}/group", queue, work, arguments, backend)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        found = dict(queue.get(timeout=100) for _ in processes)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    errors = [f"rank {rank}: {found[rank]}" for rank in range(ranks) if isinstance(found[rank], str)]
    assert not errors, "\n".join(errors)
    return [found[rank] for rank in range(ranks)]


def _run(rank, ranks, file, queue, work, arguments, backend):
    import traceback

    torch.set_num_threads(1)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks)
        queue.put((rank, work(rank, *arguments)))
        # Whoever leaves first closes connections that others may still read from.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, traceback.format_exc()))


SINKS = [0.5 * i - 2 for i in range(4 * HEADS)]
STEPS = (1000, 100, 1, 1200, 199)
FORMATS = ("int8", "int4", "int8/int4", "f16", "fp8")


def _tokens():
    return random(1, TOKENS, HEADS, DIM), random(2, TOKENS, HEADS, DIM), random(3, TOKENS, 4 * HEADS, DIM)


def _options(format, device="cpu"):
    scales = dict(k_scales=[0.05, 0.02], v_scales=[0.02, 0.05]) if format == "fp8" else {}
    return dict(heads=HEADS, dim=DIM, max_tokens=4096, sequences=3, max_q_len=1200, device=device, **scales)


def _decode(cache, device="cpu"):
    """A prompt in pieces that cross shards, two sequences, drafts, a fork: all results as numpy arrays."""
    k, v, q = (x.to(device) for x in _tokens())
    options = dict(sinks=SINKS, softcap=20.0, return_lse=True)
    found, start = [], 0
    for n in STEPS:
        part = slice(start, start + n)
        # Another sequence of 7 tokens a step is attended beside it.
        cache.append(torch.cat([k[:7], k[part]]), torch.cat([v[:7], v[part]]), sequences=[2, 0], tokens=[7, n])
        found.append(cache.attend(torch.cat([q[:7], q[part]]), sequences=[2, 0], q_lens=[7, n], **options))
        start += n
    found.append(cache.attend(q[-1:], window_left=1500, alibi_slopes=[0.01 * i for i in range(4 * HEADS)], return_lse=True))
    found.append(cache.attend(q[-9:], causal=False, scale=0.3, return_lse=True))
    # Each of the newest tokens alone has the bits that it has among others.
    cache.fork(0, 1)
    cache.append(k[:5], v[:5], sequences=1)
    drafts = cache.attend(q[:5], sequences=1, **options)
    cache.truncate(1, TOKENS)
    for i in range(5):
        cache.append(k[i : i + 1], v[i : i + 1], sequences=1)
        alone = cache.attend(q[i : i + 1], sequences=1, **options)
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, drafts)), i
    found.append(drafts)
    cache.free(1)
    narrow = cache.attend(q[-1:].bfloat16())
    assert narrow.dtype == torch.bfloat16
    found.append((narrow.float(), narrow.float()))
    return [tuple(x.cpu().numpy() for x in pair) for pair in found]


def _on_rank(rank, share):
    """Of every format, as processes take longer to start than to attend."""
    from attn.distributed import ContextParallelCache

    found = {}
    for format in FORMATS:
        cache = ContextParallelCache(format, share=share, **_options(format))
        found[format] = _decode(cache), cache.lens, cache.cache.lens
    return found


@pytest.fixture(scope="module")
def of_one_cache():
    return {format: _decode(attn.Cache(format, **_options(format))) for format in FORMATS}


@pytest.mark.parametrize("ranks, share", [(2, 1024), (2, None), (4, 1024)])
def test_ranks_together_have_the_bits_of_one_cache(ranks, share, tmp_path, of_one_cache):
    results = on_ranks(ranks, _on_rank, tmp_path, share)
    most = share or 2048
    for format, wanted in of_one_cache.items():
        for rank, of_rank in enumerate(results):
            found, lens, own = of_rank[format]
            for step, pairs in enumerate(zip(found, wanted)):
                for what, got, want in zip(("out", "lse"), *pairs):
                    assert (got.view("uint32") == want.view("uint32")).all(), (format, f"rank {rank}", f"step {step}", what)
            behind = max(0, TOKENS - most * rank)
            assert lens == [TOKENS, 0, 35] and own == [behind if rank == ranks - 1 else min(most, behind), 0, 35 if rank == 0 else 0], (format, rank)


def _on_gpu(rank):
    """A rank's steps and one GPU's, whose bits differ in nothing; and a graph that captures an exchange and a merge."""
    from attn.distributed import ContextParallelCache, merge_spans_over

    device, ranks = f"cuda:{rank}", dist.get_world_size()
    for format in ("int8", "int4", "int8/int4"):
        options = _options(format, device)
        found, wanted = _decode(ContextParallelCache(format, share=1024, **options), device), _decode(attn.Cache(format, **options), device)
        for step, pairs in enumerate(zip(found, wanted)):
            for what, got, want in zip(("out", "lse"), *pairs):
                assert (got.view("uint32") == want.view("uint32")).all(), (format, f"step {step}", what)
    k, v, q = (x.to(device) for x in _tokens())
    cache = attn.Cache("int8", **_options("int8", device))
    first, last = (min(TOKENS, 2048 * i) if i < ranks else TOKENS for i in (rank, rank + 1))
    cache.append(k[first:last], v[first:last])
    states = cache.attend_spans(q[-1:], tokens_before=[first // 1024 * 1024], tokens_after=[TOKENS - last], spans=3)
    merge = lambda: merge_spans_over("int8", *states, kv_heads=HEADS, own_heads=True)
    wanted = merge()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = merge()
    graph.replay()
    torch.cuda.synchronize()
    return all(torch.equal(a, b) for a, b in zip(out, wanted))


@pytest.mark.parametrize("ranks", [1, 2])
def test_gpus_together_have_the_bits_of_one_gpu(ranks, tmp_path):
    if not torch.cuda.is_available():
        require("cuda", "torch sees no CUDA device")
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks over NCCL need as many GPUs; torch sees {torch.cuda.device_count()}")
    assert all(on_ranks(ranks, _on_gpu, tmp_path, backend="nccl"))


def _own_heads(rank, ranks):
    """A rank's share of the heads, of states that lie on all ranks: heads as an output projection that is sharded by them takes them."""
    from attn.distributed import merge_spans_over

    k, v, q = _tokens()
    first = rank * 1024
    last = TOKENS if rank == ranks - 1 else min(TOKENS, first + 1024)
    found = {}
    for format in FORMATS:
        cache = attn.Cache(format, **_options(format))
        if first and cache.centres:
            first_tile = attn.Cache(format, **_options(format))
            first_tile.append(k[:64], v[:64])
            cache.begin_shard(0, first, first_tile.shard_centres(0))
        cache.append(k[first:last], v[first:last])
        states = cache.attend_spans(q[-3:], tokens_before=[first], tokens_after=[TOKENS - max(first, last)], spans=2)
        scales = _options(format).get("v_scales")
        options = dict(kv_heads=HEADS, sinks=torch.tensor(SINKS), v_scales=None if scales is None else torch.tensor(scales))
        own = merge_spans_over(format, *states, own_heads=True, dtype=torch.bfloat16, **options)
        everyone = merge_spans_over(format, *states, **options)
        found[format] = [x.float().numpy() for x in (*own, *everyone)]
    for kv_heads, own_heads, error in ((3, False, attn.ParameterError), (1, True, attn.ShapeError)):
        with pytest.raises(error):
            merge_spans_over("int8", *states, kv_heads=kv_heads, own_heads=own_heads)
    return found


def test_ranks_merge_heads_of_their_own(tmp_path):
    k, v, q = _tokens()
    results = on_ranks(2, _own_heads, tmp_path, 2)
    for format in FORMATS:
        whole = attn.Cache(format, **_options(format))
        whole.append(k, v)
        wanted, wanted_lse = whole.attend(q[-3:], sinks=SINKS, return_lse=True)
        for rank, of_rank in enumerate(results):
            own, own_lse, out, lse = of_rank[format]
            heads = slice(4 * rank, 4 * rank + 4)
            assert (own == wanted[:, heads].bfloat16().float().numpy()).all() and (own_lse == wanted_lse[:, heads].numpy()).all(), format
            assert (out == wanted.numpy()).all() and (lse == wanted_lse.numpy()).all(), format


def _exchange(rank, ranks):
    from attn.distributed import exchanged, gathered

    x, y = (torch.arange(2 * 4 * n).view(2, 4, n).float() + 1000 * rank for n in (3, 1))
    for of_all, of_own in zip(gathered((x, y)), exchanged((x, y))):
        each = 4 // ranks
        assert of_own.shape == (ranks, 2, each, of_all.shape[-1])
        assert torch.equal(of_own, of_all[:, :, rank * each : (rank + 1) * each])
    with pytest.raises(attn.ShapeError, match="needed"):
        exchanged((x[:, :3],))


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_exchange_is_a_gather_of_a_ranks_own_heads(ranks, tmp_path):
    on_ranks(ranks, _exchange, tmp_path, ranks)


def _refuse(rank):
    from attn.distributed import ContextParallelCache, merge_spans_over, tokens_of_rank

    options = dict(heads=HEADS, dim=DIM, max_tokens=2048, device="cpu")
    cache = ContextParallelCache(sequences=2, **options)
    assert cache.share == tokens_of_rank(2048, 2) == 1024
    x, q = torch.ones(3, HEADS, DIM), torch.ones(1, 2 * HEADS, DIM)
    cache.append(x, x)
    said = []
    for error, call in (
        (attn.ParameterError, lambda: ContextParallelCache(share=100, **options)),
        (attn.ParameterError, lambda: ContextParallelCache(layers=2, **options)),
        (attn.ParameterError, lambda: ContextParallelCache("int5", **options)),
        (attn.CacheFullError, lambda: cache.append(x.repeat(700, 1, 1), x.repeat(700, 1, 1))),
        # Rank 1 has none of the rows.
        (attn.NumberError, lambda: cache.append(x / 0, x)),
        (attn.ShapeError, lambda: cache.append(x[:, :1], x[:, :1])),
        (attn.ShapeError, lambda: cache.append(x, x[:2])),
        (attn.ShapeError, lambda: cache.append(x, x, sequences=[0, 1], tokens=[1, 1])),
        (attn.ParameterError, lambda: cache.append(x, x, sequences=[0, 0], tokens=[1, 2])),
        (attn.SequenceError, lambda: cache.append(x, x, sequences=2)),
        (attn.ShapeError, lambda: cache.attend(q[0])),
        (attn.ParameterError, lambda: cache.truncate(0, 4)),
        (attn.SequenceError, lambda: cache.free(2)),
        (attn.ParameterError, lambda: cache.fork(0, 0)),
        (attn.ShapeError, lambda: merge_spans_over("int8", q[None, ..., :2], q, kv_heads=HEADS)),
        (attn.ParameterError, lambda: cache.attend(q, alibi_slopes=[0.1, None])),
    ):
        try:
            call()
            said.append(f"not refused: {error}")
        except error as refusal:
            assert len(str(refusal)) > 20
    assert cache.lens == [3, 0] and cache.cache.lens == ([3, 0] if rank == 0 else [0, 0])
    return said


def test_every_rank_refuses_alike(tmp_path):
    assert on_ranks(2, _refuse, tmp_path) == [[], []]


def _refuse_numbers(rank):
    """Numbers that the cache of one of two ranks would refuse, alone; then the same tokens without them."""
    from attn.distributed import ContextParallelCache

    options, found = dict(heads=HEADS, dim=DIM, max_tokens=2048, sequences=2, device="cpu"), {}
    for format, dtype, largest in (("int8", torch.float32, 2.0**100), ("int8", torch.bfloat16, 2.0**100), ("bf16", torch.float32, 2.0**50), ("fp8", torch.float32, None)):
        scales = dict(k_scales=[0.05] * HEADS, v_scales=[0.05] * HEADS) if format == "fp8" else {}
        cache = ContextParallelCache(format, **options, **scales)
        x = random(5, 1300, HEADS, DIM).to(dtype)
        said = []
        for what, token in ((0, 1200), (1, 1200), (0, 3), (1, 100)):
            kv = [x.clone(), x.clone()]
            kv[what][token, 1, 7] = 1e31 if largest else float("inf")
            with pytest.raises(attn.NumberError) as refusal:
                cache.append(torch.cat([x[:9], kv[0]]), torch.cat([x[:9], kv[1]]), sequences=[1, 0], tokens=[9, 1300])
            said.append(str(refusal.value))
            assert cache.lens == [0, 0] and cache.cache.lens == [0, 0], (format, what, token)
            assert cache._first_tiles is None or cache._first_tiles.lens == [0, 0], (format, what, token)
        # What the format takes just so.
        if largest:
            x[1200] = x[3] = largest
        cache.append(x, x)
        assert cache.lens == [1300, 0] and cache.cache.lens == [(1024, 276)[rank], 0], format
        found[format, str(dtype)] = said
    return found


def test_numbers_that_one_rank_would_refuse_all_refuse(tmp_path):
    first, second = on_ranks(2, _refuse_numbers, tmp_path)
    assert first == second
    assert [said.split(" ")[0] for said in first["int8", "torch.float32"]] == ["k", "v", "k", "v"]
    assert all("int8 takes magnitudes up to 1.26765e+30" in said for said in first["int8", "torch.float32"])


def _warn(rank):
    """A warning of one rank's tokens, of which a filter makes an error, and a device that fails in the first tile."""
    import warnings

    from attn.distributed import ContextParallelCache

    scales = dict(k_scales=[0.05] * HEADS, v_scales=[0.05] * HEADS)
    cache = ContextParallelCache("fp8", heads=HEADS, dim=DIM, max_tokens=2048, device="cpu", **scales)
    x = torch.ones(1100, HEADS, DIM)
    x[1050] = 500.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            cache.append(x, x)
            told = False
        except RuntimeWarning:
            told = True
    # The tokens are there, on both ranks.
    assert told == (rank == 1) and cache.lens == [1100] and cache.cache.lens == [(1024, 76)[rank]]

    cache = ContextParallelCache("int8", heads=HEADS, dim=DIM, max_tokens=2048, sequences=2, device="cpu")
    if rank == 1:
        def fails(*_):
            raise KeyboardInterrupt

        cache.cache.begin_shard = fails
        with pytest.raises(KeyboardInterrupt):
            cache.append(torch.cat([x[:7], x[:70]]), torch.cat([x[:7], x[:70]]), sequences=[1, 0], tokens=[7, 70])
        assert cache._first_tiles.lens == [0, 0] and cache.lens == [0, 0]
    return True


def test_what_ends_an_append_leaves_ranks_with_the_same_tokens(tmp_path):
    assert on_ranks(2, _warn, tmp_path) == [True, True]


def _refuse_for_one(rank):
    """Residuals that one of two ranks has given up: each, whoever holds them, refuses for both, with one error, and nothing is changed."""
    from attn.distributed import ContextParallelCache

    k, v, q = _tokens()
    options = dict(heads=HEADS, dim=DIM, max_tokens=2048, device="cpu")
    found = {}
    for format in ("int4", "int8/int4", "int8"):
        cache, whole = ContextParallelCache(format, **options), attn.Cache(format, **options)
        for start in range(0, 1400, 40):
            part = slice(start, start + 40)
            cache.append(k[part], v[part])
            whole.append(k[part], v[part])
        said = []
        # Of the first shard's 1024 tokens 600 stay, and none of the other's; of the other's 376 there stay 100; queries that reach back as far.
        for call in (lambda: cache.truncate(0, 600), lambda: cache.truncate(0, 1124), lambda: cache.attend(q[1200:1400])):
            if format == "int8":
                continue
            with pytest.raises(attn.ShapeError) as refusal:
                call()
            said.append(str(refusal.value))
            assert cache.lens == [1400] and cache.cache.lens == [(1024, 376)[rank]], said
        steps = [(cache.attend(q[1399:1400]), whole.attend(q[1399:1400]))]
        # What no rank refuses: the latest tokens, and all of them.
        for kept in (1380, 1355):
            cache.truncate(0, kept)
            whole.truncate(0, kept)
            cache.append(k[:7], v[:7])
            whole.append(k[:7], v[:7])
            steps.append((cache.attend(q[:7]), whole.attend(q[:7])))
            # More than the last append brought, whose residuals all ranks have.
            steps.append((cache.attend(q[:9]), whole.attend(q[:9])))
        cache.truncate(0, 0)
        assert cache.lens == [0] and cache.cache.lens == [0]
        assert all(torch.equal(got, want) for got, want in steps), format
        found[format] = said
    return found


def test_what_one_rank_refuses_all_refuse(tmp_path):
    first, second = on_ranks(2, _refuse_for_one, tmp_path)
    assert first == second and first["int8"] == []
    for format in ("int4", "int8/int4"):
        assert [said.split(":")[0] for said in first[format]] == [
            "rank 0, whose tokens begin at 0",
            "rank 1, whose tokens begin at 1024",
            "rank 1, whose tokens begin at 1024",
        ]
        assert all("keeps residuals" in said for said in first[format])


def test_a_group_is_needed():
    from attn.distributed import ContextParallelCache

    with pytest.raises(attn.UnsupportedError, match="init_process_group"):
        ContextParallelCache(heads=HEADS, dim=DIM, max_tokens=64, device="cpu")


def test_a_cache_over_ranks_is_copied_whole_and_not_pickled():
    from attn.distributed import ContextParallelCache

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        k, v, q = (x[:70] for x in _tokens())
        # A group that is named can be neither copied nor pickled itself.
        for group in (None, dist.group.WORLD):
            cache = ContextParallelCache("int8", group=group, **_options("int8"))
            cache.append(k, v)
            for copied in (copy.deepcopy(cache), copy.copy(cache)):
                copied.append(k[:5], v[:5])
                assert cache.lens == [70, 0, 0] and copied.lens == [75, 0, 0]
                assert torch.equal(copied.attend(q[:1], causal=False), _straight(k, v, q))
            with pytest.raises(attn.UnsupportedError, match="over ranks cannot be pickled"):
                pickle.dumps(cache)
    finally:
        dist.destroy_process_group()


def _straight(k, v, q):
    """The first query's result over the tokens and five more."""
    cache = attn.Cache("int8", **_options("int8"))
    cache.append(torch.cat([k, k[:5]]), torch.cat([v, v[:5]]))
    return cache.attend(q[:1], causal=False)


def test_a_plan_is_refused_to_whatever_copies_it():
    import attn.torch

    # As one that a GPU has made, but for the GPU.
    plan = attn.torch.Plan.__new__(attn.torch.Plan)
    for copies in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(attn.UnsupportedError, match="neither copied nor pickled"):
            copies(plan)
