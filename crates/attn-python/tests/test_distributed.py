"""Tokens sharded over ranks: processes on the CPU, over gloo."""

import multiprocessing

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


@pytest.fixture(autouse=True)
def has_gloo():
    if REASON is not None:
        require("torch", REASON)


def random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_ranks(ranks, work, folder, *arguments):
    """What `work(rank, …)` returns on each rank of a group, each a process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_run, args=(rank, ranks, f"{folder}/group", queue, work, arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        found = dict(queue.get(timeout=300) for _ in processes)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    for rank in range(ranks):
        assert not isinstance(found[rank], str), found[rank]
    return [found[rank] for rank in range(ranks)]


def _run(rank, ranks, file, queue, work, arguments):
    import traceback

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
        queue.put((rank, work(rank, *arguments)))
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, traceback.format_exc()))


def _decode(rank, format):
    """A prompt in pieces that cross shards, two sequences, drafts, a fork: results as numpy arrays."""
    from attn.distributed import ContextParallelCache

    k, v, q = random(1, TOKENS, HEADS, DIM), random(2, TOKENS, HEADS, DIM), random(3, TOKENS, 4 * HEADS, DIM)
    cache = ContextParallelCache(format, heads=HEADS, dim=DIM, max_tokens=4096, sequences=3, share=1024, max_q_len=1024, device="cpu")
    options = dict(sinks=[0.5] * 4 * HEADS, softcap=20.0, return_lse=True)
    found, start = [], 0
    for n in (1000, 100, 1, 1200, 199):
        part = slice(start, start + n)
        # Another sequence of 7 tokens a step is attended beside it.
        cache.append(torch.cat([k[:7], k[part]]), torch.cat([v[:7], v[part]]), sequences=[2, 0], tokens=[7, n])
        out, lse = cache.attend(torch.cat([q[:7], q[part]]), sequences=[2, 0], q_lens=[7, n], **options)
        found.append((out[7:].numpy(), lse[7:].numpy()))
        start += n
    lens = (cache.lens, cache.cache.lens)
    last = cache.attend(q[-1:], **options)
    # Each of the newest tokens alone has the bits that it has among others.
    cache.fork(0, 1)
    cache.append(k[:5], v[:5], sequences=1)
    drafts = cache.attend(q[:5], sequences=1, **options)
    alone = []
    cache.truncate(1, TOKENS)
    for i in range(5):
        cache.append(k[i : i + 1], v[i : i + 1], sequences=1)
        alone.append(cache.attend(q[i : i + 1], sequences=1, **options))
    cache.free(1)
    same = all(torch.equal(drafts[j][i], alone[i][j][0]) for i in range(5) for j in range(2))
    again = cache.attend(q[-1:], **options)
    same = same and all(torch.equal(a, b) for a, b in zip(last, again))
    narrow = cache.attend(q[-1:].bfloat16())
    assert narrow.dtype == torch.bfloat16
    return found, last[0].numpy(), lens, same, (drafts[0].numpy(), drafts[1].numpy())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("format, bound", [("f16", 2e-5), ("int8", 2e-2)])
def test_ranks_together_are_one_cache(ranks, format, bound, tmp_path):
    results = on_ranks(ranks, _decode, tmp_path, format)
    k, v, q = random(1, TOKENS, HEADS, DIM), random(2, TOKENS, HEADS, DIM), random(3, TOKENS, 4 * HEADS, DIM)
    whole = attn.Cache(format, heads=HEADS, dim=DIM, max_tokens=4096, device="cpu")
    options = dict(sinks=[0.5] * 4 * HEADS, softcap=20.0, return_lse=True)
    start = 0
    for step, n in enumerate((1000, 100, 1, 1200, 199)):
        whole.append(k[start : start + n], v[start : start + n])
        wanted, wanted_lse = (x.numpy() for x in whole.attend(q[start : start + n], **options))
        for rank, (found, *_) in enumerate(results):
            out, lse = found[step]
            assert abs(out - wanted).max() < bound and abs(lse - wanted_lse).max() < bound, (step, rank)
            assert (out == results[0][0][step][0]).all() and (lse == results[0][0][step][1]).all(), "every rank has the same bits"
        start += n
    whole.append(k[:5], v[:5])
    wanted, wanted_lse = (x.numpy() for x in whole.attend(q[:5], **options))
    held = 0
    for rank, (found, last, (lens, own), same, (drafts, drafts_lse)) in enumerate(results):
        assert lens == [TOKENS, 0, 35] and same
        # The newest token alone, and among 199 of its sequence and 7 of another.
        assert (last == found[-1][0][-1:]).all()
        behind = max(0, TOKENS - 1024 * rank)
        assert own == [behind if rank == ranks - 1 else min(1024, behind), 0, 35 if rank == 0 else 0]
        held += own[0]
        assert abs(drafts - wanted).max() < bound and abs(drafts_lse - wanted_lse).max() < bound
    assert held == TOKENS


def _refuse(rank):
    from attn.distributed import ContextParallelCache, merge_over, tokens_of_rank

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
        (attn.ShapeError, lambda: merge_over(q, torch.ones(2, 2))),
    ):
        try:
            call()
            said.append(f"not refused: {error}")
        except error as refusal:
            assert len(str(refusal)) > 20
    assert cache.lens == [3, 0] and cache.cache.lens == ([3, 0] if rank == 0 else [0, 0])
    # A rank's own heads of the merged results.
    out, lse = torch.full((1, 4, DIM), float(rank)), torch.zeros(1, 4)
    merged, merged_lse = merge_over(out, lse, heads=slice(2 * rank, 2 * rank + 2))
    assert merged.shape == (1, 2, DIM) and torch.equal(merged, torch.full_like(merged, 0.5))
    return said


def test_every_rank_refuses_alike(tmp_path):
    assert on_ranks(2, _refuse, tmp_path) == [[], []]


def test_a_group_is_needed():
    from attn.distributed import ContextParallelCache

    with pytest.raises(attn.UnsupportedError, match="init_process_group"):
        ContextParallelCache(heads=HEADS, dim=DIM, max_tokens=64, device="cpu")
