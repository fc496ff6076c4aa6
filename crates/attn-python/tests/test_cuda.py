"""torch on the GPU: the same bytes and bits as on the CPU, in graphs and under torch.compile. `ATTN_REQUIRE=cuda` makes a missing GPU a failure."""

import attn
import numpy
import pytest
from conftest import require, rows

try:
    import torch

    REASON = None if torch.cuda.is_available() else "torch sees no CUDA device"
except ImportError as error:
    torch, REASON = None, str(error)

FORMATS = ["int8", "int4", "int8/int4", "int4-g1", "bf16", "f16", "fp8"]


@pytest.fixture(autouse=True)
def gpu():
    if REASON is not None:
        require("cuda", REASON)


def on_gpu(x):
    return torch.from_numpy(numpy.ascontiguousarray(x)).cuda()


def same(a, b):
    """Whether a GPU's result has the bits of a CPU's."""
    return (a.cpu().numpy().view("uint32") == numpy.ascontiguousarray(b).view("uint32")).all()


def pair(format, **options):
    options = dict(dict(heads=2, dim=128, max_tokens=1024, sequences=4, max_q_len=200), **options)
    return attn.Cache(format, device="cuda", **options), attn.Cache(format, device="cpu", **options)


def is_integer(format):
    return format.startswith("int")


def float_bound(format, kind):
    """Relative L2 error that docs/cuda.md states for a float format, and the rounding of two outputs."""
    return (4e-3 if format == "bf16" else 5e-4) + {"float32": 0, "float16": 2**-10, "bfloat16": 2**-7}[kind]


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
    gpu, cpu = pair(format, max_q_len=64)
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
    with pytest.raises(attn.ShapeError, match="strides"):
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


def plan_of(format, q_lens, **options):
    import attn.torch

    options = dict(dict(heads=8, kv_heads=2, dim=128, max_kv_len=512), **options)
    return attn.torch.Plan(format, q_lens=q_lens, **options)


@pytest.mark.parametrize("format", ["int8", "int4-g1", "bf16"])
def test_a_graph_replays_growing_sequences(rng, format):
    plan = plan_of(format, [1] * 3)
    pool = plan.new_pool(3 * 8)
    table = torch.randperm(24, dtype=torch.int32).view(3, 8).cuda()
    lens = torch.zeros(3, dtype=torch.int32, device="cuda")
    q, k, v = (torch.zeros(3, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    cache = attn.Cache(format, heads=2, dim=128, max_tokens=512, sequences=3, device="cuda")

    def step():
        lens.add_(1)
        return plan.step(q, k, v, pool, table, lens)

    # Custom operators are set up outside of the capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    lens.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lens.zero_()
    for i in range(150):
        for x in (q, k, v):
            x.copy_(on_gpu(rows(rng, *x.shape)))
        graph.replay()
        cache.append(k, v, sequences=[0, 1, 2], tokens=[1, 1, 1])
        wanted = cache.attend(q, sequences=[0, 1, 2], q_lens=[1, 1, 1])
        assert torch.equal(out, wanted), i
    assert lens.tolist() == [150] * 3


def test_slots_and_ragged_queries(rng):
    q_lens, lens = [1, 70, 5], [40, 100, 5]
    plan = plan_of("int8", q_lens, softcap=30.0, sinks=[0.5] * 8)
    pool, cache = plan.new_pool(24), attn.Cache("int8", heads=2, dim=128, max_tokens=512, sequences=3, device="cuda")
    table = torch.arange(23, -1, -1, dtype=torch.int32).view(3, 8).cuda()
    k, v = (on_gpu(rows(rng, sum(lens), 2, 128)) for _ in range(2))
    cache.append(k, v, sequences=[0, 1, 2], tokens=lens)
    position = torch.cat([torch.arange(n) for n in lens])
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    slots = (table.cpu()[sequence, position // 64].long() * 64 + position % 64).cuda()
    # A padded token behind them is skipped.
    slots = torch.cat([slots, torch.full((1,), -1, device="cuda")])
    k, v = (torch.cat([x, torch.full((1, 2, 128), 9.0, device="cuda")]) for x in (k, v))
    plan.append_slots(k, v, pool, slots)
    q = on_gpu(rows(rng, sum(q_lens), 8, 128))
    out, lse = plan.attend(q, pool, table, torch.tensor(lens, dtype=torch.int32, device="cuda"))
    wanted = cache.attend(q, sequences=[0, 1, 2], q_lens=q_lens, softcap=30.0, sinks=[0.5] * 8, return_lse=True)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    # A plan for any shares of as many tokens, which the device lists.
    plan = plan_of("int8", [74, 1, 1], ragged=True, softcap=30.0, sinks=[0.5] * 8)
    for q_lens in ([1, 70, 5], [0, 3, 0], [40, 31, 5]):
        starts = torch.tensor([0] + q_lens, dtype=torch.int32, device="cuda").cumsum(0).int()
        plan.set_query_starts(starts)
        out, lse = plan.attend(q, pool, table, torch.tensor(lens, dtype=torch.int32, device="cuda"))
        rows_of = sum(q_lens)
        wanted = cache.attend(q[:rows_of], sequences=[0, 1, 2], q_lens=q_lens, softcap=30.0, sinks=[0.5] * 8, return_lse=True)
        assert torch.equal(out[:rows_of], wanted[0]) and torch.equal(lse[:rows_of], wanted[1]), q_lens
    with pytest.raises(attn.ParameterError, match="prepare_ragged"):
        plan_of("int8", [1, 1, 1]).set_query_starts(starts)
    with pytest.raises(attn.ShapeError, match="cu_seqlens_q"):
        plan.set_query_starts(starts[:3])


@pytest.mark.parametrize("interleaved", [False, True])
def test_slots_with_rotary_positions(rng, interleaved):
    import attn.torch

    plan = plan_of("int8", [1], rotary=True)
    without = plan_of("int8", [1])
    dim, tokens = 64, 70
    frequencies = 1e4 ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.arange(512)[:, None] * frequencies
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float().cuda()
    positions = (torch.arange(tokens) * 7).cuda()

    def turned(x):
        # Each product and sum of float32 is rounded by itself.
        cos, sin = (part[:, None] for part in cos_sin[positions].chunk(2, 1))
        a, b = (x[..., :dim:2], x[..., 1:dim:2]) if interleaved else (x[..., : dim // 2], x[..., dim // 2 : dim])
        pairs = (a * cos - b * sin, b * cos + a * sin)
        first = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
        return torch.cat([first, x[..., dim:]], -1)

    k, v = (on_gpu(rows(rng, tokens, 2, 128)) for _ in "kv")
    fused = on_gpu(rows(rng, tokens, 9, 128))
    q, behind = fused[:, :8], fused[:, 8:].clone()
    slots = torch.arange(tokens).cuda()
    pool, wanted, q_wanted = plan.new_pool(2), plan.new_pool(2), turned(q)
    plan.append_slots(k, v, pool, slots, rotary=attn.torch.Rotary(cos_sin, positions, q, interleaved))
    without.append_slots(turned(k), v, wanted, slots)
    assert torch.equal(pool, wanted) and torch.equal(q, q_wanted) and torch.equal(fused[:, 8:], behind)
    alone = plan.new_pool(2)
    plan.append_slots(k, v, alone, slots, rotary=attn.torch.Rotary(cos_sin, positions, interleaved=interleaved))
    assert torch.equal(alone, wanted)
    with pytest.raises(attn.ParameterError, match="rotary"):
        without.append_slots(k, v, pool, slots, rotary=attn.torch.Rotary(cos_sin, positions))
    for wrong in [(cos_sin[0], positions), (cos_sin, positions[1:]), (cos_sin, positions.int()), (cos_sin, positions, q[:, 1:])]:
        with pytest.raises(attn.ShapeError):
            plan.append_slots(k, v, pool, slots, rotary=attn.torch.Rotary(*wrong))
    with pytest.raises(attn.ParameterError, match="rotary_dim"):
        plan.append_slots(k, v, pool, slots, rotary=attn.torch.Rotary(cos_sin[:, :6].contiguous(), positions))


@pytest.mark.parametrize("numbered", [False, True])
def test_steps_with_rotary_positions(rng, numbered):
    import attn.torch

    plan, without = plan_of("int8", [1] * 2, rotary=True), plan_of("int8", [1] * 2)
    angles = torch.arange(512)[:, None] * 1e4 ** (-torch.arange(0, 128, 2) / 128)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float().cuda()
    table = torch.arange(16, dtype=torch.int32).view(2, 8).cuda()
    pool, wanted = plan.new_pool(16), plan.new_pool(16)
    for length in range(60, 70):
        lens = torch.tensor([length, length - 50], dtype=torch.int32, device="cuda")
        positions = (lens - 1).long() if numbered else torch.tensor([length + 7, 3]).cuda()
        q, k, v = on_gpu(rows(rng, 2, 8, 128)), *(on_gpu(rows(rng, 2, 2, 128)) for _ in "kv")

        def turned(x):
            cos, sin = (part[:, None] for part in cos_sin[positions].chunk(2, 1))
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q_wanted = turned(q)
        out_wanted = without.step(q_wanted, turned(k), v, wanted, table, lens)
        rotary = attn.torch.Rotary(cos_sin, None if numbered else positions)
        out = plan.step(q, k, v, pool, table, lens, rotary=rotary)
        assert torch.equal(out, out_wanted) and torch.equal(q, q_wanted) and torch.equal(pool, wanted), length
    with pytest.raises(attn.ParameterError, match="rotary.q"):
        plan.step(q, k, v, pool, table, lens, rotary=attn.torch.Rotary(cos_sin, q=q))
    with pytest.raises(attn.ParameterError, match="positions"):
        plan.append_slots(k, v, pool, torch.arange(2).cuda(), rotary=attn.torch.Rotary(cos_sin))
    with pytest.raises(attn.ParameterError, match="rotary"):
        without.step(q, k, v, pool, table, lens, rotary=rotary)


def test_torch_compile_keeps_the_operator(rng):
    plan = plan_of("int8", [1] * 2)
    pool, table = plan.new_pool(16), torch.arange(16, dtype=torch.int32).view(2, 8).cuda()
    lens = torch.tensor([70, 3], dtype=torch.int32, device="cuda")
    q = on_gpu(rows(rng, 2, 8, 128))
    slots = torch.cat([torch.arange(70), torch.arange(512, 515)]).cuda()
    k, v = (on_gpu(rows(rng, 73, 2, 128)) for _ in range(2))
    plan.append_slots(k, v, pool, slots)

    def layer(q, scale):
        return plan.attend(q * scale, pool, table, lens)[0] + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, 2.0), layer(q, 2.0))


def test_a_plans_arrays_are_checked(rng):
    plan = plan_of("int8", [1] * 2)
    pool, table = plan.new_pool(16), torch.arange(16, dtype=torch.int32).view(2, 8).cuda()
    lens = torch.ones(2, dtype=torch.int32, device="cuda")
    q = on_gpu(rows(rng, 2, 8, 128))
    for arrays in (
        (q[:1], pool, table, lens),
        (q[:, :4].contiguous(), pool, table, lens),
        (q.double(), pool, table, lens),
        (q.cpu(), pool, table, lens),
        (q, pool.view(-1)[: plan.page_bytes + 1], table, lens),
        (q, pool.float(), table, lens),
        (q, pool, table.long(), lens),
        (q, pool, table[:1], lens),
        (q, pool, table[:, :7].contiguous(), lens),
        (q, pool, table, lens[:1]),
        (q, pool, table, lens.float()),
    ):
        with pytest.raises(attn.AttnError) as error:
            plan.attend(*arrays)
        assert len(str(error.value)) > 20
    for wrong in (dict(heads=3), dict(dim=72), dict(max_kv_len=1 << 40), dict(device="cpu"), dict(page_size=8)):
        with pytest.raises(attn.AttnError):
            plan_of("int8", [1], **wrong)
    plan.close()
    with pytest.raises(attn.ParameterError, match="closed"):
        plan.attend(q, pool, table, lens)


@pytest.mark.parametrize("format", ["bf16", "f16", "fp8", "int8-tensor"])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_another_engines_pages_are_attended_as_they_lie(rng, format, page_size):
    import attn.torch

    lens, kv_heads, dim = [1, 700, 64, 0], 2, 128
    count = sum(-(-n // page_size) for n in lens)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.float8_e4m3fn, "int8-tensor": torch.int8}[format]
    values = torch.from_numpy(rows(rng, 2 * count * page_size, kv_heads, dim)).cuda()
    values = (values * 20).round() if format == "int8-tensor" else values
    # K and V in one tensor, as vLLM has them.
    cache = values.view(2, count, page_size, kv_heads, dim).to(kind)
    scale = 0.05 if format in ("fp8", "int8-tensor") else None
    scales = None if scale is None else [scale] * kv_heads
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).int().tolist()
    table = torch.full((len(lens), -(-max(lens) // page_size)), -1, dtype=torch.int32)
    for b, n in enumerate(lens):
        for i in range(-(-n // page_size)):
            table[b, i] = order.pop()
    table, kv_lens = table.cuda(), torch.tensor(lens, dtype=torch.int32, device="cuda")
    q = on_gpu(rows(rng, len(lens), 8, dim)).to(torch.bfloat16)
    plan = attn.torch.Plan(
        format, heads=8, kv_heads=kv_heads, dim=dim, q_lens=[1] * 4, max_kv_len=700, page_size=page_size, rows=True, k_scales=scales, v_scales=scales
    )
    out, lse = plan.attend_rows(q, cache[0], cache[1], table, kv_lens)
    for b, n in enumerate(lens):
        if n == 0:
            assert (out[b] == 0).all() and (lse[b] == float("-inf")).all()
            continue
        pages = table[b, : -(-n // page_size)].long()
        k, v = (x[pages].double().flatten(0, 1)[:n].repeat_interleave(4, 1) * (scale or 1.0) for x in cache)
        scores = torch.einsum("hd,thd->ht", q[b].double(), k) / dim**0.5
        want = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
        assert (lse[b] - scores.logsumexp(-1)).abs().max() < 2e-2
        assert (out[b].double() - want).abs().max() < 2e-2 * v.abs().max()
    # The other order of dims has the same bits, in a graph, too.
    other = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in cache]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again, _ = plan.attend_rows(q, *other, table, kv_lens)
    graph.replay()
    assert torch.equal(again, out)


def test_plans_for_rows_refuse_what_they_do_not_take(rng):
    import attn.torch

    options = dict(heads=8, kv_heads=2, dim=128, q_lens=[1], max_kv_len=64)
    plan = attn.torch.Plan("bf16", rows=True, **options)
    q, kv = torch.zeros(1, 8, 128, device="cuda"), torch.zeros(3, 64, 2, 128, dtype=torch.bfloat16, device="cuda")
    table, lens = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.int32, device="cuda")
    plan.attend_rows(q, kv, kv, table, lens)
    for bad in [(kv.half(), kv), (kv, kv[:2]), (kv[:, :32], kv[:, :32]), (kv.float(), kv.float()), (kv.cpu(), kv.cpu())]:
        with pytest.raises(attn.ShapeError):
            plan.attend_rows(q, *bad, table, lens)
    with pytest.raises(attn.ParameterError, match="rows"):
        plan.append_slots(kv[0], kv[0], plan.new_pool(1), torch.zeros(64, dtype=torch.int64, device="cuda"))
    with pytest.raises(attn.AttnError):
        attn.torch.Plan("int4", rows=True, **options)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_ranges_of_tokens_are_exported(rng, format):
    import attn.torch

    scales = [0.05] * 2 if format == "fp8" else None
    plan = attn.torch.Plan(format, heads=8, kv_heads=2, dim=128, q_lens=[1, 1], max_kv_len=640, k_scales=scales, v_scales=scales)
    cache = attn.Cache(format, device="cpu", heads=2, dim=128, max_tokens=640, sequences=2, **({"k_scales": scales, "v_scales": scales} if scales else {}))
    lens, slots = [600, 70], plan.residual_slots(600)
    pool = plan.new_pool(20 + 2 * max(slots, 1))
    table = torch.arange(20, dtype=torch.int32).view(2, 10).flip(1).contiguous()
    own = torch.arange(20, 20 + 2 * slots, dtype=torch.int32).view(2, slots) if slots else None
    for b, n in enumerate(lens):
        k, v = rows(rng, n, 2, 128), rows(rng, n, 2, 128)
        cache.append(k, v, sequences=b)
        at = torch.arange(n)
        places = table[b, at // 64].long() * 64 + at % 64
        residuals = None if own is None else own[b, at // 64 % slots].int().cuda()
        plan.append_slots(on_gpu(k), on_gpu(v), pool, places.cuda(), residuals)
    first, count = [100, 0], [500, 70]
    starts = torch.tensor([0, 500, 570], dtype=torch.int32, device="cuda")
    k, v = (torch.full((570, 2, 128), float("nan"), device="cuda") for _ in "kv")
    kv_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    residuals = None if own is None else own.cuda()
    plan.export(k, v, pool, table.cuda(), kv_lens, starts, 500, torch.tensor(first, dtype=torch.int32, device="cuda"), residuals)
    for b in range(2):
        want = cache.export(b)
        for got, all_rows in zip((k, v), want):
            own_rows = got[int(starts[b]) : int(starts[b + 1])]
            assert same(own_rows, all_rows[first[b] : first[b] + count[b]])


@pytest.mark.parametrize("format, options", [("int8", {}), ("int4", {}), ("int8-tensor", dict(k_scales=[0.01, 0.02], v_scales=[0.02, 0.01])), ("int8", dict(window_left=900, softcap=20.0))])
def test_shards_have_the_bits_of_one_gpu(rng, format, options):
    lens, q_lens, cuts = [2500, 2049], [3, 1], [0, 1024, 2048, 4096]
    scales = {name: options[name] for name in options if name.endswith("scales")}
    sinks = torch.linspace(-2, 2, 8, device="cuda")
    k, v = (on_gpu(rows(rng, sum(lens), 2, 128)) for _ in range(2))
    q = on_gpu(rows(rng, 4, 8, 128))
    whole = attn.Cache(format, heads=2, dim=128, max_tokens=2560, sequences=2, device="cuda", **scales)
    whole.append(k, v, sequences=[0, 1], tokens=lens)
    modifiers = {name: options[name] for name in options if name not in scales}
    wanted = whole.attend(q, sequences=[0, 1], q_lens=q_lens, sinks=sinks.tolist(), return_lse=True, **modifiers)
    firsts = [0, lens[0]]
    states = []
    for start, end in zip(cuts, cuts[1:]):
        of = [(min(start, n), min(end, n)) for n in lens]
        own = [b - a for a, b in of]
        plan = plan_of(format, q_lens, max_kv_len=max(own), spans=True, **options)
        pool = plan.new_pool(64)
        table = torch.arange(32, dtype=torch.int32, device="cuda").view(2, 16)
        slots = plan.residual_slots(3)
        residual = torch.arange(32, 32 + 2 * slots, dtype=torch.int32, device="cuda").view(2, slots) if slots else None
        for b, (first, last) in enumerate(of):
            at = torch.arange(last - first, device="cuda")
            places = table[b].long()[at // 64] * 64 + at % 64
            # The pages of the newest tokens keep residuals.
            newest = at // 64 + slots > (last - first - 1) // 64
            kept = torch.where(newest, residual[b][at // 64 % slots], -1).int() if slots else None
            chosen = slice(firsts[b] + first, firsts[b] + last)
            if last > first:
                plan.append_slots(k[chosen], v[chosen], pool, places, kept)
        own_lens, after = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (own, [n - b for n, (_, b) in zip(lens, of)]))
        states.append(plan.attend_spans(q, pool, table, own_lens, after, residual))
    max_sums, o = (torch.cat(x) for x in zip(*states))
    v_scales = torch.tensor(scales["v_scales"], device="cuda") if scales else None
    out, lse = attn.torch.merge_spans(format, max_sums, o, kv_heads=2, sinks=sinks, v_scales=v_scales)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    # Heads apart, as an all-to-all shares them.
    for head in (0, 4):
        mine = slice(head, head + 4)
        scale = None if v_scales is None else v_scales[head // 4 : head // 4 + 1].clone()
        part, _ = attn.torch.merge_spans(
            format, max_sums[:, :, mine].contiguous(), o[:, :, mine].contiguous(), kv_heads=1, sinks=sinks[mine].clone(), v_scales=scale, dtype=torch.bfloat16
        )
        assert torch.equal(part, wanted[0][:, mine].bfloat16())
    with pytest.raises(attn.ParameterError, match="prepare_spans"):
        plan.attend(q, pool, table, own_lens, residual)


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
            on_gpus.append(k[rows_of], v[rows_of], sequences=sequence)
            on_cpu.append(k[rows_of].cpu(), v[rows_of].cpu(), sequences=sequence)
        after = [n - last for n, (_, last) in zip(lens, parts)]
        # As many spans as needed, and more: states that see no token.
        for spans in (None, 4):
            max_sums, o = on_gpus.attend_spans(q, tokens_after=after, spans=spans, **chosen, **modifiers)
            of_cpu, o_of_cpu = on_cpu.attend_spans(q.cpu(), tokens_after=after, spans=spans, **chosen, **modifiers)
            seen = of_cpu[..., 0] > float("-inf")
            assert torch.equal(max_sums[..., 0].cpu(), of_cpu[..., 0]), (start, spans)
            assert torch.equal(max_sums.cpu()[seen], of_cpu[seen]) and torch.equal(o.cpu()[seen], o_of_cpu[seen]), (start, spans)
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
        (attn.ParameterError, lambda: attn.torch.merge_spans(format, max_sums, o, kv_heads=2, v_scales=torch.ones(2, device="cuda"))),
        (attn.ParameterError, lambda: attn.merge_spans(format, max_sums, o, kv_heads=2)),
        (attn.UnsupportedError, lambda: gpu.attend_spans(q.cpu(), **chosen)),
    ):
        with pytest.raises(error) as refusal:
            call()
        assert len(str(refusal.value)) > 20


def test_pages_are_copied_and_swapped(rng):
    import attn.torch

    pool = torch.randint(0, 256, (9, 4160), dtype=torch.uint8, device="cuda")
    before, host = pool.cpu(), torch.zeros(4, 4160, dtype=torch.uint8, pin_memory=True)
    pairs = torch.tensor([[8, 0], [3, 2], [-1, 1], [5, 99]], device="cuda")
    attn.torch.copy_pages(pool, host, pairs)
    torch.cuda.synchronize()
    assert torch.equal(host[[0, 2]], before[[8, 3]]) and not host[[1, 3]].any()
    attn.torch.copy_pages(host, pool, torch.tensor([[2, 7], [0, 1]], device="cuda"))
    attn.torch.copy_pages(pool, pool, torch.tensor([[4, 6]], device="cuda"))
    after = pool.cpu()
    assert torch.equal(after[[7, 1, 6]], before[[3, 8, 4]])
    assert torch.equal(after[[0, 2, 3, 4, 5, 8]], before[[0, 2, 3, 4, 5, 8]])
    with pytest.raises(attn.ShapeError, match="pages"):
        attn.torch.copy_pages(pool, host[:, :64], pairs)
    with pytest.raises(attn.ParameterError, match="pinned"):
        attn.torch.copy_pages(pool, torch.zeros(4, 4160, dtype=torch.uint8), pairs)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_shards_are_merged_by_a_kernel(rng, kind):
    import attn.torch

    dtype = getattr(torch, kind)
    outs, lses = on_gpu(rows(rng, 5 * 7, 3, 128)).view(5, 7, 3, 128).to(dtype), on_gpu(rows(rng, 5, 7, 3)) * 3
    lses[2, 4], lses[:, 6] = float("-inf"), float("-inf")
    outs[2, 4], outs[:, 6] = 0, 0
    out, lse = attn.torch.merge(outs, lses)
    want, want_lse = attn.torch.merge(outs.cpu(), lses.cpu())
    assert out.dtype == dtype and (out[6] == 0).all() and (lse[6] == float("-inf")).all()
    assert (out.cpu().float() - want.float()).abs().max() < (1e-5 if kind == "float32" else 2e-2)
    assert (lse.cpu() - want_lse)[:6].abs().max() < 1e-5
    again, _ = torch.compile(lambda a, b: attn.torch.merge(a, b), fullgraph=True)(outs, lses)
    assert torch.equal(again, out)
