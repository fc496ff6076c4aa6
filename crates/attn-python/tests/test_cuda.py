"""Caches of torch tensors on the GPU: the same bytes and bits as on the CPU."""

import attn
import pytest
from conftest import require, rows
from cuda_device import FORMATS, float_bound, is_integer, needs_gpu, on_gpu, pair, same, torch  # noqa: F401


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_bytes_and_bits_are_the_cpus(rng, format, kind):
    gpu, cpu = pair(format)
    dtype = getattr(torch, kind)
    for step, counts in enumerate([[200, 3], [1, 70], [5, 1], [1, 1]]):
        n = sum(counts)
        k, v, q = (on_gpu(rows(rng, n, heads, 128)).to(dtype) for heads in (2, 2, 16))
        for cache, of in ((gpu, lambda x: x), (cpu, lambda x: x.cpu())):
            cache.append(of(k), of(v), sequences=[2, 0], tokens=counts)
        for sequence in (0, 2):
            assert gpu.save(sequence) == cpu.save(sequence), (step, sequence)
        a, a_lse = gpu.attend(q, sequences=[2, 0], q_lens=counts, return_lse=True)
        b, b_lse = cpu.attend(q.cpu(), sequences=[2, 0], q_lens=counts, return_lse=True)
        assert a.dtype == dtype and a.is_cuda and a_lse.dtype == torch.float32
        if is_integer(format):
            assert torch.equal(a.cpu(), b), step
            assert (a_lse.cpu() - b_lse).abs().max() < 1e-5
        else:
            b = b.float()
            assert (a.cpu().float() - b).norm() < float_bound(format, kind) * b.norm(), step


@pytest.mark.parametrize("options", [{"softcap": 20.0}, {"window_left": 50}, {"sinks": [1.0] * 8}, {"alibi_slopes": [0.1] * 8}, {"scale": 0.2}])
def test_modifiers_reach_the_kernels(rng, options):
    gpu, cpu = pair("int8")
    k, v, q = rows(rng, 300, 2, 128), rows(rng, 300, 2, 128), rows(rng, 40, 8, 128)
    gpu.append(on_gpu(k), on_gpu(v))
    cpu.append(k, v)
    assert same(gpu.attend(on_gpu(q), **options), cpu.attend(q, **options))
    assert not same(gpu.attend(on_gpu(q)), cpu.attend(q, **options))


@pytest.mark.parametrize("format", ["int8", "int4", "int8/int4", "int4-g1"])
def test_fast_prompts_are_near_the_cpus_and_few_tokens_have_its_bits(rng, format):
    # Over centres of K fast steps are exact.
    gpu, cpu = pair(format, max_q_len=64, centres=False)
    for count in [64, 64, 16]:
        k, v, q = (on_gpu(rows(rng, count, heads, 128)).bfloat16() for heads in (2, 2, 16))
        gpu.append(k, v)
        cpu.append(k.cpu(), v.cpu())
        fast, want = gpu.attend(q, arithmetic="fast").cpu().float(), cpu.attend(q.cpu()).float()
        assert torch.equal(gpu.attend(q).cpu().float(), want)
        if count == 16 or torch.cuda.get_device_capability() != (9, 0):
            assert torch.equal(fast, want)
        else:
            # The exact answer's weights and queries of 8 bits; of windows, the tiles that rows of a block read with residuals.
            bound = 8e-2 if format == "int4" else 2e-2
            assert 0 < (fast - want).norm() < bound * want.norm()


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_forks_drafts_and_growth(rng, format):
    gpu, cpu = pair(format, heads=1)
    k, v, q = rows(rng, 400, 1, 128), rows(rng, 400, 1, 128), rows(rng, 1, 4, 128)

    def both(work):
        work(gpu, on_gpu)
        work(cpu, lambda x: x)

    both(lambda c, of: c.append(of(k[:100]), of(v[:100])))
    both(lambda c, of: c.fork(0, 3))
    # The open page is copied on the store's stream, behind the append above.
    both(lambda c, of: c.append(of(k[100:140]), of(v[100:140]), sequences=3))
    both(lambda c, of: c.append(of(k[200:205]), of(v[200:205])))
    both(lambda c, of: c.truncate(0, 102))
    both(lambda c, of: c.append(of(k[300:301]), of(v[300:301])))
    for sequence in (0, 3):
        assert gpu.save(sequence) == cpu.save(sequence)
        assert same(gpu.attend(on_gpu(q), sequences=sequence), cpu.attend(q, sequences=sequence))
    both(lambda c, of: c.free(3))
    image = gpu.save(0)
    gpu.restore(1, image)
    cpu.restore(1, image)
    for i in range(200, 240):
        both(lambda c, of: c.append(of(k[i : i + 1]), of(v[i : i + 1]), sequences=1))
        assert same(gpu.attend(on_gpu(q), sequences=1), cpu.attend(q, sequences=1)), i


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_layers_are_the_cpus(rng, format):
    gpu, cpu = pair(format, layers=3)
    for counts in ([100, 3], [1, 1], [1, 1]):
        for cache in (gpu, cpu):
            cache.reserve([2, 0], counts)
        for layer in (1, 2, 0):
            k, v, q = (on_gpu(rows(rng, sum(counts), heads, 128)) for heads in (2, 2, 8))
            if layer == 2:
                with pytest.raises(attn.ShapeError):
                    gpu.write(2, k[1:], v[1:])
            gpu.write(layer, k, v)
            cpu.write(layer, k.cpu(), v.cpu())
            a, b = (c.attend(x, layer=layer, sequences=[2, 0], q_lens=counts) for c, x in ((gpu, q), (cpu, q.cpu())))
            assert torch.equal(a.cpu(), b)
    # A step that is taken back, whose open page a fork shares.
    for cache in (gpu, cpu):
        cache.fork(2, 1)
        cache.reserve([1], [70])
    k, v = (on_gpu(rows(rng, 70, 2, 128)) for _ in "kv")
    gpu.write(1, k, v)
    gpu.cancel_step()
    cpu.cancel_step()
    assert gpu.lens == cpu.lens == [5, 102, 102, 0] and all(gpu.save(i) == cpu.save(i) for i in range(3))
    with pytest.raises(attn.ShapeError, match="no step is open"):
        gpu.write(0, k, v)
    gpu.add_sequences(1)
    with pytest.raises(attn.AttnError):
        gpu.add_pages(1)
    assert gpu.lens == [5, 102, 102, 0, 0]


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_window_keeps_its_bits_while_pages_stay_bounded(rng, format):
    options = dict(heads=2, dim=128)
    kept = attn.Cache(format, max_tokens=2048, device="cuda", **options)
    few = kept.pages_for(100 + 64 + 64)
    dropped = attn.Cache(format, max_tokens=0, pages=few, device="cuda", **options)
    for n in [60] * 15 + [1] * 70:
        k, v, q = (on_gpu(rows(rng, n, heads, 128)) for heads in (2, 2, 8))
        outs = []
        for cache in (kept, dropped):
            cache.append(k, v)
            outs.append(cache.attend(q, window_left=99))
        assert torch.equal(*outs)
        dropped.drop_before(0, max(0, dropped.lens[0] - 99))
    assert dropped.first_tokens == [832] and dropped.lens == [970]


def test_streams_are_ordered(rng):
    gpu, cpu = pair("int8", max_tokens=8192)
    k, v, q = rows(rng, 4000, 2, 128), rows(rng, 4000, 2, 128), rows(rng, 1, 8, 128)
    cpu.append(k, v)
    other = torch.cuda.Stream()
    k, v, gpu_q = on_gpu(k), on_gpu(v), on_gpu(q)
    torch.cuda.synchronize()
    gpu.append(k, v)
    with torch.cuda.stream(other):
        out = gpu.attend(gpu_q)
        other.synchronize()
    assert same(out, cpu.attend(q))


def test_rows_of_a_fused_projection_are_read_in_place(rng):
    gpu, cpu = pair("int8")
    fused = on_gpu(rows(rng, 50, 12, 128)).to(torch.bfloat16)
    k, v = fused[:, 8:10], fused[:, 10:12]
    gpu.append(k, v)
    cpu.append(k.cpu(), v.cpu())
    assert gpu.save() == cpu.save()


def test_arrays_of_cupy_come_and_go_through_dlpack(rng):
    try:
        import cupy
    except ImportError as error:
        require("cupy", str(error))
    gpu, cpu = pair("int8")
    fused, q = rows(rng, 50, 12, 128), rows(rng, 2, 8, 128)
    cpu.append(fused[:, 8:10], fused[:, 10:12])
    wanted, wanted_lse = cpu.attend(q, return_lse=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # Tokens lie apart, as in a fused projection; what is enqueued before is seen.
        on_device = cupy.asarray(fused) * 2 / 2
        gpu.append(on_device[:, 8:10], on_device[:, 10:12])
        out, lse = gpu.attend(cupy.asarray(q), return_lse=True)
        again = cupy.empty_like(out)
        assert gpu.attend(cupy.asarray(q), out=again) is again
    stream.synchronize()
    assert gpu.save() == cpu.save()
    assert isinstance(out, cupy.ndarray) and (cupy.asnumpy(out) == wanted).all() and (cupy.asnumpy(again) == wanted).all()
    assert abs(cupy.asnumpy(lse) - wanted_lse).max() < 1e-5
    # On the default stream, a batch, 16 bits.
    halves = cupy.asarray(rows(rng, 2, 3, 8, 128)).astype("float16")
    gpu.append(halves[:, :, :2].copy(), halves[:, :, 2:4].copy(), sequences=[2, 3])
    out = gpu.attend(halves, sequences=[2, 3])
    assert out.dtype == cupy.float16 and out.shape == halves.shape
    alone = gpu.attend(halves[1], sequences=3)
    assert (out[1] == alone).all()
    with pytest.raises(attn.ShapeError, match="heads that lie apart"):
        gpu.append(on_device[:, ::2][:, :2], on_device[:, 10:12])
    with pytest.raises(attn.ShapeError, match="lies on"):
        gpu.append(on_device[:, 8:10], fused[:, 10:12])
    assert gpu.lens == [50, 0, 3, 3]


def test_what_does_not_belong_together_is_refused(rng):
    gpu, cpu = pair("int8")
    x = rows(rng, 1, 2, 128)
    for call in (
        lambda: gpu.append(on_gpu(x), x),
        lambda: cpu.append(on_gpu(x), on_gpu(x)),
        lambda: gpu.append(on_gpu(x), on_gpu(x).half()),
        lambda: gpu.append(on_gpu(x).double(), on_gpu(x).double()),
        lambda: gpu.attend(on_gpu(x), out=x.copy()),
        lambda: gpu.attend(on_gpu(x), out=on_gpu(x).half()),
    ):
        with pytest.raises(attn.AttnError) as error:
            call()
        assert len(str(error.value)) > 20
    assert gpu.lens == cpu.lens == [0, 0, 0, 0]
    graph = torch.cuda.CUDAGraph()
    y = on_gpu(x)
    with pytest.raises(attn.ParameterError, match="captured"), torch.cuda.graph(graph):
        gpu.append(y, y)
    assert gpu.lens[0] == 0


@pytest.mark.parametrize("format, modifiers", [("int8", {}), ("int4", dict(softcap=20.0)), ("int8/int4", dict(causal=False)), ("int8", dict(window_left=700))])
def test_shards_in_caches_have_the_bits_of_one_cache(rng, format, modifiers):
    import attn.torch

    lens, q_lens, cuts = [2500, 1029], [3, 200], [0, 1024, 1024, 4096]
    k, v, q = (on_gpu(rows(rng, n, heads, 128)) for n, heads in ((sum(lens), 2), (sum(lens), 2), (sum(q_lens), 8)))
    gpu, cpu = pair(format, max_tokens=2500)
    for cache, of in ((gpu, lambda x: x), (cpu, lambda x: x.cpu())):
        for sequence, part in enumerate((slice(0, 2500), slice(2500, None))):
            cache.append(of(k[part]), of(v[part]), sequences=sequence)
    sinks = torch.linspace(-2, 2, 8)
    chosen = dict(sequences=[0, 1], q_lens=q_lens)
    wanted = gpu.attend(q, sinks=sinks.tolist(), return_lse=True, **chosen, **modifiers)
    states = []
    for start, end in zip(cuts, cuts[1:]):
        parts = [(min(start, n), min(end, n)) for n in lens]
        on_gpus, on_cpu = pair(format, max_tokens=2500)
        for sequence, (first, last) in enumerate(parts):
            rows_of = slice(2500 * sequence + first, 2500 * sequence + last)
            for cache in (on_gpus, on_cpu) if start and first < last else ():
                cache.begin_shard(sequence, start, gpu.shard_centres(sequence))
            on_gpus.append(k[rows_of], v[rows_of], sequences=sequence)
            on_cpu.append(k[rows_of].cpu(), v[rows_of].cpu(), sequences=sequence)
        others = dict(tokens_before=[start if first < last else 0 for first, last in parts], tokens_after=[n - last for n, (_, last) in zip(lens, parts)])
        # As many spans as needed, and more: states that see no token.
        for spans in (None, 4):
            max_sums, o = on_gpus.attend_spans(q, spans=spans, **others, **chosen, **modifiers)
            of_cpu, o_of_cpu = on_cpu.attend_spans(q.cpu(), spans=spans, **others, **chosen, **modifiers)
            seen = of_cpu[..., 0] > float("-inf")
            assert torch.equal(max_sums[..., 0].cpu(), of_cpu[..., 0]), (start, spans)
            assert torch.equal(max_sums.cpu()[seen], of_cpu[seen]) and torch.equal(o.cpu()[seen], o_of_cpu[seen]), (start, spans)
        # Rows in host memory.
        max_sums_here, o_here = on_gpus.attend_spans(q.cpu(), spans=4, **others, **chosen, **modifiers)
        assert torch.equal(max_sums_here[seen], of_cpu[seen]) and torch.equal(o_here[seen], o_of_cpu[seen]), start
        states.append((max_sums, o))
    max_sums, o = (torch.cat(x) for x in zip(*states))
    out, lse = attn.torch.merge_spans(format, max_sums, o, kv_heads=2, sinks=sinks.cuda())
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    # States do not care where they are merged.
    out, _ = attn.torch.merge_spans(format, max_sums.cpu(), o.cpu(), kv_heads=2, sinks=sinks, dtype=torch.bfloat16)
    assert torch.equal(out, wanted[0].bfloat16().cpu())
    for error, call in (
        (attn.ParameterError, lambda: gpu.attend_spans(q, tokens_after=[1024, 0], **chosen)),
        (attn.ParameterError, lambda: gpu.attend_spans(q, spans=2, **chosen)),
        (attn.ShapeError, lambda: attn.torch.merge_spans(format, max_sums, o, kv_heads=2, v_scales=torch.ones(2, device="cuda"))),
        (attn.ParameterError, lambda: attn.merge_spans(format, max_sums, o, kv_heads=2)),
    ):
        with pytest.raises(error) as refusal:
            call()
        assert len(str(refusal.value)) > 20


@pytest.mark.parametrize("format", ["int8", "int4", "int8/int4", "int4-g1"])
def test_selected_pages_have_the_cpus_bits(rng, format):
    gpu, cpu = pair(format)
    counts = [500, 130]
    k, v, q = (rows(rng, n, heads, 128) for n, heads in ((630, 2), (630, 2), (2, 16)))
    gpu.append(on_gpu(k), on_gpu(v), sequences=[2, 0], tokens=counts)
    cpu.append(k, v, sequences=[2, 0], tokens=counts)
    # The first tile and the newest ones, as centres and windows need them.
    pages = torch.tensor([[[0, 2, 5, 6, 7], [0, 6, 7, 5, -1]], [[0, 1, 2, -1, -1], [2, 1, 0, -1, -1]]], device="cuda")
    options = dict(sequences=[2, 0], q_lens=[1, 1], return_lse=True, softcap=20.0)
    out, lse = gpu.attend(on_gpu(q), pages=pages, **options)
    wanted, wanted_lse = cpu.attend(q, pages=pages.tolist(), **options)
    assert same(out, wanted) and (lse.cpu() - torch.from_numpy(wanted_lse)).abs().max() < 1e-5
    # Rows in host memory.
    assert (gpu.attend(q, pages=pages, **options)[0] == wanted).all()
    assert not same(gpu.attend(on_gpu(q), **options)[0], wanted)
