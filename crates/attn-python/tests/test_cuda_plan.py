"""`attn.torch` on the GPU: plans over pages that torch allocates, in graphs and under torch.compile, merges and copies."""

import attn
import pytest
from conftest import rows
from cuda_device import needs_gpu, on_gpu, same, torch  # noqa: F401


def plan_of(format, q_lens, **options):
    import attn.torch

    options = dict(dict(heads=8, kv_heads=2, dim=128, max_kv_len=512), **options)
    return attn.torch.Plan(format, q_lens=q_lens, **options)


@pytest.mark.parametrize("options", [{}, {"window_left": 70}])
@pytest.mark.parametrize("format", ["int8", "int4-g1", "bf16"])
def test_a_graph_replays_growing_sequences(rng, format, options):
    """From nothing to lengths beyond a tile and a window, by the graph that was captured at the first."""
    plan = plan_of(format, [1] * 3, **options)
    pool = plan.new_pool(3 * 8)
    table = torch.randperm(24, dtype=torch.int32).view(3, 8).cuda()
    lens = torch.zeros(3, dtype=torch.int32, device="cuda")
    q, k, v = (torch.zeros(3, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    cache = attn.Cache(format, heads=2, dim=128, max_tokens=512, sequences=3, device="cuda", centres=False)

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
        wanted = cache.attend(q, sequences=[0, 1, 2], q_lens=[1, 1, 1], **options)
        assert torch.equal(out, wanted), i
    assert lens.tolist() == [150] * 3


@pytest.mark.parametrize("format", ["int8", "int8/int4-w0", "bf16", "fp8"])
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("offset", [16, 32, 48, 128])
def test_a_pool_begins_at_any_multiple_of_16_bytes(rng, format, q_len, offset):
    """As those of a model's layers do that lie behind one another, whose pages are no multiples of 256 bytes."""
    scales = {"k_scales": [0.5, 0.25], "v_scales": [1.0, 2.0]} if format == "fp8" else {}
    plan = plan_of(format, [q_len] * 2, page_size=16, **scales)
    memory = torch.zeros(offset + 64 * plan.page_bytes, dtype=torch.uint8, device="cuda")
    pools = plan.new_pool(64), memory[offset:].view(64, plan.page_bytes)
    table = torch.randperm(64, dtype=torch.int32).view(2, 32).cuda()
    k, v, q = (on_gpu(rows(rng, n, heads, 128)) for n, heads in ((200, 2), (200, 2), (2 * q_len, 8)))
    position, sequence = torch.arange(100).repeat(2), torch.arange(2).repeat_interleave(100)
    slots = (table.cpu()[sequence, position // 16].long() * 16 + position % 16).cuda()
    lens = torch.full((2,), 100, dtype=torch.int32, device="cuda")
    results = []
    for pool in pools:
        plan.append_slots(k, v, pool, slots)
        results.append(plan.attend(q, pool, table, lens))
    assert torch.equal(*pools)
    for a, b in zip(*results):
        assert torch.equal(a, b)
    with pytest.raises(attn.ShapeError, match="multiple of 16 bytes"):
        plan.attend(q, memory[8 : 8 + plan.page_bytes], table, lens)


@pytest.mark.parametrize("format", ["int8", "int8/int4-w0", "int4-g1", "bf16"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_pages_beyond_4_gib_are_pages_like_others(rng, format, q_len):
    import attn.torch

    plan = plan_of(format, [q_len] * 2, page_size=16, max_kv_len=112)
    last = (5 << 30) // plan.page_bytes
    pool, small = torch.empty(last + 1, plan.page_bytes, dtype=torch.uint8, device="cuda"), plan.new_pool(14)
    far = [last, 0, (1 << 32) // plan.page_bytes, (1 << 31) // plan.page_bytes, 70_000, *range(last - 9, last)]
    position, sequence = torch.arange(100).repeat(2), torch.arange(2).repeat_interleave(100)
    k, v, q = (on_gpu(rows(rng, n, heads, 128)) for n, heads in ((200, 2), (200, 2), (2 * q_len, 8)))
    lens, results = torch.full((2,), 100, dtype=torch.int32, device="cuda"), []
    starts, first = torch.tensor([0, 100, 200], dtype=torch.int32, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")
    for memory, numbers in ((small, list(range(14))), (pool, far)):
        memory[numbers] = 0
        table = torch.tensor(numbers, dtype=torch.int32).view(2, 7)
        plan.append_slots(k, v, memory, (table[sequence, position // 16].long() * 16 + position % 16).cuda())
        exported = [torch.empty(200, 2, 128, device="cuda") for _ in "kv"]
        plan.export(*exported, memory, table.cuda(), lens, starts, 100, first, None)
        results.append([*plan.attend(q, memory, table.cuda(), lens), *exported, memory[numbers]])
    for given, wanted in zip(*results):
        assert torch.equal(given, wanted)
    attn.torch.copy_pages(pool, pool, torch.tensor([[last, last - 20]], device="cuda"))
    assert torch.equal(pool[last - 20], small[0])


@pytest.mark.parametrize("format", ["int8", "int8/int4-w0", "int4-g1", "bf16"])
@pytest.mark.parametrize("heads", [8, 32])
def test_pages_chosen_for_each_kv_head_have_the_bits_of_these_pages_alone(rng, format, heads):
    """As a block-sparse selector chooses them: 16 pages of 128 tokens for each KV head, the newest among them."""
    lens, blocks = [6000, 2048, 700], 47
    plan = plan_of(format, [1] * 3, heads=heads, page_size=128, max_kv_len=128 * blocks)
    of_heads = plan_of(format, [1] * 6, heads=heads // 2, kv_heads=1, page_size=128, max_kv_len=128 * 16)
    pool, table = plan.new_pool(3 * blocks), torch.randperm(3 * blocks, dtype=torch.int32).view(3, blocks)
    position, sequence = torch.cat([torch.arange(n) for n in lens]), torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    k, v, q = (on_gpu(rows(rng, n, h, 128)) for n, h in ((sum(lens), 2), (sum(lens), 2), (3, heads)))
    plan.append_slots(k, v, pool, (table[sequence, position // 128].long() * 128 + position % 128).cuda())
    chosen = [torch.cat([torch.randperm((n - 1) // 128)[:15].sort().values, torch.tensor([(n - 1) // 128])]) for n in lens for _ in range(2)]
    # Another pool has only them, in pages of one head.
    alone, numbers = of_heads.new_pool(6 * 16), torch.arange(6 * 16, dtype=torch.int32).view(6, 16)
    selected, selected_lens = torch.zeros(3, 2, 16, dtype=torch.int32), []
    for i, pages in enumerate(chosen):
        n, head = lens[i // 2], i % 2
        selected[i // 2, head, : len(pages)] = table[i // 2, pages]
        tokens = (pages[:, None] * 128 + torch.arange(128)).flatten()
        tokens = tokens[tokens < n]
        selected_lens.append(len(tokens))
        at, slots = (tokens + sum(lens[: i // 2])).cuda(), torch.arange(len(tokens)).cuda() + 16 * 128 * i
        of_heads.append_slots(k[at, head : head + 1].contiguous(), v[at, head : head + 1].contiguous(), alone, slots)
    selected_lens = torch.tensor(selected_lens, dtype=torch.int32, device="cuda")
    q = q.view(6, heads // 2, 128)
    given = of_heads.attend(q, pool, (selected * 2 + torch.arange(2, dtype=torch.int32)[:, None]).view(6, 16).cuda(), selected_lens)
    wanted = of_heads.attend(q, alone, numbers.cuda(), selected_lens)
    assert all(torch.equal(a, b) for a, b in zip(given, wanted)) and given[0].abs().max() > 0


def test_slots_and_ragged_queries(rng):
    q_lens, lens = [1, 70, 5], [40, 100, 5]
    plan = plan_of("int8", q_lens, softcap=30.0, sinks=[0.5] * 8)
    pool, cache = plan.new_pool(24), attn.Cache("int8", heads=2, dim=128, max_tokens=512, sequences=3, device="cuda", centres=False)
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
    with pytest.raises(attn.ParameterError, match="a ragged plan"):
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
    cache = attn.Cache(format, device="cpu", heads=2, dim=128, max_tokens=640, sequences=2, centres=False, **({"k_scales": scales, "v_scales": scales} if scales else {}))
    lens, slots = [600, 70], plan.residual_slots(600)
    pool = plan.new_pool(20 + 2 * max(slots, 1))
    table = torch.arange(20, dtype=torch.int32).view(2, 10).flip(1).contiguous()
    own = torch.arange(20, 20 + 2 * slots, dtype=torch.int32).view(2, slots) if slots else None
    for b, n in enumerate(lens):
        k, v = rows(rng, n, 2, 128), rows(rng, n, 2, 128)
        cache.append(k, v, sequences=b)
        at = torch.arange(n)
        places = table[b, at // 64].long() * 64 + at % 64
        residuals = None if own is None else own[b, plan.residual_slot(at // 64, slots)].int().cuda()
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
    whole = attn.Cache(format, heads=2, dim=128, max_tokens=2560, sequences=2, device="cuda", centres=False, **scales)
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
            # The pages of the first and of the newest tokens keep residuals.
            ring = slots - plan.first_residual_pages
            keeps = (at // 64 < plan.first_residual_pages) | (at // 64 + ring > (last - first - 1) // 64)
            kept = torch.where(keeps, residual[b][plan.residual_slot(at // 64, slots)], -1).int() if slots else None
            chosen = slice(firsts[b] + first, firsts[b] + last)
            if last > first:
                plan.append_slots(k[chosen], v[chosen], pool, places, kept)
        shards = (own, [n - b for n, (_, b) in zip(lens, of)], [start] * 2)
        own_lens, after, before = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in shards)
        states.append(plan.attend_spans(q, pool, table, own_lens, after, residual, before))
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
    with pytest.raises(attn.ParameterError, match="a plan for spans"):
        plan.attend(q, pool, table, own_lens, residual)


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


@pytest.mark.parametrize("format", ["int8", "int4-g1", "bf16"])
def test_plans_share_what_launches_leave_nothing_in(rng, format):
    """Plans of unlike sizes in turn, over memory that a launch has filled: each as by itself, also those that a graph has captured."""
    dims, batches = dict(heads=8, kv_heads=2, dim=64, max_kv_len=4096, page_size=64), [96, 40, 64]
    scratch = attn.torch.Scratch()
    alone, shared = ([attn.torch.Plan(format, q_lens=[1] * n, **dims, **options) for n in batches] for options in ({}, {"scratch": scratch}))
    # Made largest first, all have the first one's memory, but for plans whose launches split no sequence.
    pieces = [plan._scratch for plan in shared if plan._scratch is not None]
    assert pieces and scratch.bytes == pieces[0].numel() and len({piece.data_ptr() for piece in pieces}) == 1
    pool = alone[0].new_pool(4 * 64)
    table = torch.randperm(4 * 64, device="cuda").int().view(4, 64)
    lens = torch.randint(1, 4097, (96,), dtype=torch.int32, device="cuda")
    k, v = (torch.from_numpy(rng.standard_normal((4096, 2, 64), dtype="float32")).cuda() for _ in range(2))
    for i in range(4):
        slots = (table[i][:, None] * 64 + torch.arange(64, device="cuda")).flatten().long()
        alone[0].append_slots(k.roll(i, 0), v.roll(-i, 0), pool, slots)
    # Sequence by sequence the same four, at lengths of their own.
    table = table.repeat(24, 1)
    q = torch.from_numpy(rng.standard_normal((96, 8, 64), dtype="float32")).cuda()

    def attend(plan, n):
        return plan.attend(q[:n], pool, table[:n], lens[:n])

    wanted = [attend(plan, n) for plan, n in zip(alone, batches)]
    scratch._memory.fill_(255)
    for _ in range(2):
        for plan, n, (out, lse) in zip(shared, batches, wanted):
            got = attend(plan, n)
            assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [attend(plan, n) for plan, n in zip(shared, batches)]
    scratch._memory.fill_(255)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(got[0], out) for got, (out, _) in zip(captured, wanted))
    # A larger plan gets memory of its own; the others keep theirs.
    larger = attn.torch.Plan(format, q_lens=[1] * 256, scratch=scratch, **dims)
    assert scratch.bytes > pieces[0].numel() and larger._scratch.numel() == scratch.bytes
    assert larger.load_smaller() >= 1
    assert torch.equal(attend(shared[2], 64)[0], wanted[2][0])
    with pytest.raises(attn.ParameterError, match="scratch"):
        attn.torch.Plan(format, q_lens=[1], scratch=scratch._memory, **dims)


def test_latents_are_appended_as_k_alone(rng):
    """A cache's and a plan's, by a step and by slots: the bits of the CPU."""
    shape = dict(dim=576, v_dim=512)
    ours, cpu = (attn.Cache("int8-latents", heads=1, max_tokens=512, device=device, **shape) for device in ("cuda", "cpu"))
    plan = plan_of("int8-latents", [1], heads=16, kv_heads=1, **shape)
    pool, tokens = plan.new_pool(8), 300
    table, slots = torch.arange(7, -1, -1, dtype=torch.int32).cuda()[None], torch.arange(tokens).cuda()
    slots = table[0].long()[slots // 64] * 64 + slots % 64
    k, q = on_gpu(rows(rng, tokens, 1, 576)), on_gpu(rows(rng, 1, 16, 576))
    ours.append(k[:-1])
    ours.append(k[-1:])
    cpu.append(k.cpu().numpy())
    wanted = cpu.attend(q.cpu().numpy())
    assert ours.save(0) == cpu.save(0) and (ours.attend(q).cpu().numpy() == wanted).all()
    lens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    plan.append_slots(k[:-1], None, pool, slots[:-1])
    assert (plan.step(q, k[-1:], None, pool, table, lens).cpu().numpy() == wanted).all()
    with pytest.raises(attn.ParameterError, match="needed: None"):
        plan.append_slots(k, k[..., :512], pool, slots)
    with pytest.raises(attn.ParameterError, match="needed: V beside K"):
        plan_of("int8", [1], heads=16, kv_heads=1, **shape).append_slots(k, None, pool, slots)


def test_tables_at_strides_are_read_as_they_lie_or_refused(rng):
    """Rows of a wider table lie further apart than they are long; an expanded row, and residual pages of a wider one, are refused."""
    lens, pages = [100, 70, 128], 2
    for format in ("int8", "int4"):
        plan = plan_of(format, [1] * 3, max_kv_len=128)
        pool, kv_lens = plan.new_pool(64), torch.tensor(lens, dtype=torch.int32, device="cuda")
        table = torch.arange(3 * pages, dtype=torch.int32, device="cuda").view(3, pages)
        slots = plan.residual_slots(1)
        residuals = (torch.arange(3 * slots, dtype=torch.int32, device="cuda").view(3, slots) + 6) if slots else None
        k, v, q = (on_gpu(rows(rng, n, heads, 128)) for n, heads in ((3, 2), (3, 2), (3, 8)))
        plan.step(q, k, v, pool, table, kv_lens, residuals)
        wanted = plan.attend(q, pool, table, kv_lens, residuals)
        wide = torch.full((3, 6), 10**6, dtype=torch.int32, device="cuda")
        wide[:, 4:] = table
        # The last row of the view ends where the tensor does.
        given = plan.attend(q, pool, wide[:, 4:], kv_lens, residuals)
        assert all(torch.equal(a, b) for a, b in zip(given, wanted))
        with pytest.raises(attn.ShapeError, match="page_table has the shape .* rows 0 entries apart"):
            plan.attend(q, pool, table[:1].expand(3, pages), kv_lens, residuals)
        with pytest.raises(attn.ShapeError, match="page_table has 1 pages"):
            plan.attend(q, pool, wide[:, 4:5], kv_lens, residuals)
        if slots:
            wide = torch.zeros(3, 2 * slots, dtype=torch.int32, device="cuda")
            with pytest.raises(attn.ShapeError, match="residual_pages has the shape .* side by side"):
                plan.attend(q, pool, table, kv_lens, wide[:, :slots])
