"""Pages of the caller's in host memory: the bits of a cache, and what is refused."""

import attn
import numpy as np
import pytest

KV_HEADS, HEADS, DIM = 2, 6, 64


def rows(seed, tokens, heads, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((tokens, heads, DIM)).astype(dtype)


def two_sequences(format, page_size, dtype=np.float32, lens=(90, 17)):
    """Sequences in a pool and in a cache, the longer one first: (pages, pool, table, lens, cache)."""
    pages = attn.HostPages(format, kv_heads=KV_HEADS, dim=DIM, page_size=page_size)
    bare = {} if format in ("int4-g1", "bf16") else {"centres": False}
    cache = attn.Cache(format, heads=KV_HEADS, dim=DIM, max_tokens=640, sequences=2, page_size=page_size, device="cpu", **bare)
    lens, each = list(lens), -(-lens[0] // page_size)
    table = np.random.default_rng(1).permutation(2 * each).astype(np.int32).reshape(2, each)
    slots = np.array([int(table[s, t // page_size]) * page_size + t % page_size for s in (0, 1) for t in range(lens[s])])
    k, v = rows(2, sum(lens), KV_HEADS, dtype), rows(3, sum(lens), KV_HEADS, dtype)
    pool = np.zeros((2 * each, pages.page_bytes), np.uint8)
    pages.append_slots(k, v, pool, slots)
    cache.append(k, v, sequences=[0, 1], tokens=lens)
    return pages, pool, table, lens, cache


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("format, page_size", [("int8", 16), ("int8/int4-w0", 32), ("int4-g1", 64), ("bf16", 128)])
def test_they_have_the_bits_of_a_cache(format, page_size, dtype):
    pages, pool, table, lens, cache = two_sequences(format, page_size, dtype)
    assert pages.page_bytes == cache.stats().page_bytes
    for q_lens, options in (([1, 1], {}), ([5, 0], {"window_left": 20}), ([1, 17], {"softcap": 30.0, "sinks": [0.5] * HEADS}), ([3, 3], {"causal": False, "scale": 0.2})):
        q = rows(4, sum(q_lens), HEADS, dtype)
        wanted, wanted_lse = cache.attend(q, sequences=[0, 1], q_lens=q_lens, return_lse=True, **options)
        given, lse = pages.attend(q, pool, table, lens, q_lens=q_lens, return_lse=True, **options)
        assert given.dtype == q.dtype and np.array_equal(given, wanted) and np.array_equal(lse, wanted_lse)
        out = np.empty_like(q)
        assert pages.attend(q, pool.reshape(-1), table, lens, q_lens=q_lens, out=out, **options) is out and np.array_equal(out, wanted)


@pytest.mark.parametrize("format, page_size", [("int8", 128), ("int8/int4-w0", 64), ("int4-g1", 16), ("bf16", 32)])
def test_pages_chosen_for_each_kv_head_have_the_bits_of_these_pages_alone(format, page_size):
    """As a block-sparse selector chooses them: a page of all KV heads is a page of one for each, one behind the other."""
    pages, pool, table, lens, _ = two_sequences(format, page_size, lens=(600, 530))
    of_head = attn.HostPages(format, kv_heads=1, dim=DIM, page_size=page_size)
    assert of_head.page_bytes * KV_HEADS == pages.page_bytes
    k, v, q = rows(2, sum(lens), KV_HEADS), rows(3, sum(lens), KV_HEADS), rows(4, 2, HEADS)
    random, most, chosen = np.random.default_rng(5), table.shape[1], []
    for sequence, tokens in enumerate(lens):
        for _ in range(KV_HEADS):
            behind = (tokens - 1) // page_size
            chosen.append([*sorted(random.permutation(behind)[: max(behind // 2, 1)]), behind])
    selected, selected_lens = np.zeros((2, KV_HEADS, most), np.int32), np.zeros((2, KV_HEADS), np.int32)
    wanted = []
    for i, blocks in enumerate(chosen):
        sequence, head = divmod(i, KV_HEADS)
        selected[sequence, head, : len(blocks)] = table[sequence, blocks]
        tokens = [t for block in blocks for t in range(block * page_size, min((block + 1) * page_size, lens[sequence]))]
        selected_lens[sequence, head] = len(tokens)
        at = sum(lens[:sequence]) + np.array(tokens)
        bare = {} if format in ("int4-g1", "bf16") else {"centres": False}
        alone = attn.Cache(format, heads=1, dim=DIM, max_tokens=640, sequences=1, page_size=page_size, device="cpu", **bare)
        alone.append(k[at, head : head + 1], v[at, head : head + 1], sequences=[0], tokens=[len(tokens)])
        group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
        wanted.append(alone.attend(q[sequence : sequence + 1, group], sequences=[0], q_lens=[1]))
    assert len({tuple(blocks) for blocks in chosen}) > 2
    table_of_heads = (selected * KV_HEADS + np.arange(KV_HEADS, dtype=np.int32)[:, None]).reshape(2 * KV_HEADS, most)
    given = of_head.attend(q.reshape(2 * KV_HEADS, HEADS // KV_HEADS, DIM), pool, table_of_heads, selected_lens.ravel().tolist())
    assert np.array_equal(given, np.concatenate(wanted))


@pytest.mark.parametrize("format", ["int8", "int8/int4-w0", "int4-g1", "bf16"])
def test_pages_beyond_4_gib_are_pages_like_others(format):
    """Bytes, elements and numbers of pages beyond 32, 31 and 16 bits; the system gives memory to the pages that are touched alone."""
    pages = attn.HostPages(format, kv_heads=KV_HEADS, dim=DIM, page_size=16)
    last = (5 << 30) // pages.page_bytes
    pool = np.zeros((last + 1, pages.page_bytes), np.uint8)
    far = np.array([[last, 0, last - 1], [(1 << 32) // pages.page_bytes, (1 << 31) // pages.page_bytes, 70_000]], np.int32)
    near, lens, q_lens = np.arange(6, dtype=np.int32).reshape(2, 3), [48, 33], [3, 17]
    small = np.zeros((6, pages.page_bytes), np.uint8)
    k, v, q = rows(2, sum(lens), KV_HEADS), rows(3, sum(lens), KV_HEADS), rows(4, sum(q_lens), HEADS)
    results = []
    for table, memory in ((near, small), (far, pool)):
        slots = np.array([int(table[s, t // 16]) * 16 + t % 16 for s in (0, 1) for t in range(lens[s])])
        pages.append_slots(k, v, memory, slots)
        results.append(pages.attend(q, memory, table, lens, q_lens=q_lens, return_lse=True))
    assert np.array_equal(pool[far.ravel()], small)
    for given, wanted in zip(*results):
        assert np.array_equal(given, wanted)


@pytest.mark.parametrize("format, page_size", [("int8", 16), ("int8/int4-w0", 32), ("int4-g1", 64), ("bf16", 128)])
def test_what_no_token_has_written_changes_no_bit(format, page_size):
    """Tails of pages, pages of nobody and entries of the table behind a sequence's last page hold NaN, as codes and as scales."""
    pages, pool, table, lens, _ = two_sequences(format, page_size)
    poisoned = np.full((3 * table.size, pages.page_bytes), 0xFF, np.uint8)
    slots = np.array([int(table[s, t // page_size]) * page_size + t % page_size for s in (0, 1) for t in range(lens[s])])
    pages.append_slots(rows(2, sum(lens), KV_HEADS), rows(3, sum(lens), KV_HEADS), poisoned, slots)
    behind = np.concatenate([table, np.full_like(table, 2 * table.size)], axis=1)
    behind[1, -(-lens[1] // page_size) :] = -1
    for q_lens, options in (([1, 1], {}), ([20, 17], {"window_left": 20, "sinks": [0.5] * HEADS}), ([3, 3], {"causal": False})):
        q = rows(4, sum(q_lens), HEADS)
        wanted = pages.attend(q, pool, table, lens, q_lens=q_lens, return_lse=True, **options)
        given = pages.attend(q, poisoned, behind, lens, q_lens=q_lens, return_lse=True, **options)
        for a, b in zip(given, wanted):
            assert np.isfinite(a).all() and np.array_equal(a, b)


def test_a_table_may_have_more_rows_than_there_are_sequences():
    pages, pool, table, lens, _ = two_sequences("int8", 16)
    q = rows(4, 2, HEADS)
    wanted = pages.attend(q, pool, table, lens)
    # Rows of sequences that are not attended, with any entries.
    more = np.concatenate([table, np.full((3, table.shape[1]), -1, np.int32)])
    assert np.array_equal(pages.attend(q, pool, more, lens), wanted)
    assert np.array_equal(pages.attend(q[:1], pool, more, lens[:1]), wanted[:1])
    # As many entries as two sequences need, in rows of other sequences.
    for wrong, said in ((table[:1].repeat(2, 1), "1 rows, but kv_lens has 2 sequences"), (table.ravel(), "needed: .sequences, pages."), (table[None], "needed: .sequences, pages.")):
        with pytest.raises(attn.ShapeError, match=f"page_table has .*{said}"):
            pages.attend(q, pool, wrong, lens)


def test_a_negative_slot_is_nowhere():
    pages, pool, _, _, _ = two_sequences("int8", 16)
    k, v = rows(5, 3, KV_HEADS), rows(6, 3, KV_HEADS)
    before = pool.copy()
    k[1], k[2] = np.nan, np.inf
    pages.append_slots(k, v, pool, np.array([0, -1, -7]))
    changed = (pool != before).any(axis=1)
    assert changed[0] and not changed[1:].any()


def test_what_does_not_fit_is_refused_by_name():
    pages, pool, table, lens, _ = two_sequences("int8", 16)
    before, k, v, q = pool.copy(), rows(5, 2, KV_HEADS), rows(6, 2, KV_HEADS), rows(7, 2, HEADS)
    bad = k.copy()
    bad[1, 0, 0] = np.nan
    refused = [
        (attn.NumberError, lambda: pages.append_slots(bad, v, pool, np.array([0, 1]))),
        (attn.ParameterError, lambda: pages.append_slots(k, v, pool, np.array([0, pool.shape[0] * 16]))),
        (attn.ShapeError, lambda: pages.append_slots(k, v, pool, np.array([0]))),
        (attn.ShapeError, lambda: pages.append_slots(k, v, pool, np.array([0, 1], np.int32))),
        (attn.ShapeError, lambda: pages.append_slots(k, v, pool[:, :-1], np.array([0, 1]))),
        (attn.ShapeError, lambda: pages.append_slots(k, v, pool.view(np.int32), np.array([0, 1]))),
        (attn.ShapeError, lambda: pages.append_slots(k[:, :1], v, pool, np.array([0, 1]))),
        (attn.ParameterError, lambda: pages.attend(q, pool, table - 100, lens)),
        (attn.ShapeError, lambda: pages.attend(q, pool, table[:, :1], lens)),
        (attn.ShapeError, lambda: pages.attend(q, pool, table.astype(np.int64), lens)),
        (attn.AttnError, lambda: pages.attend(q, pool, table, lens, q_lens=[1])),
        (attn.ShapeError, lambda: pages.attend(q, pool, table, lens, out=np.empty((1, HEADS, DIM), np.float32))),
    ]
    for i, (kind, call) in enumerate(refused):
        with pytest.raises(kind):
            call()
        assert np.array_equal(pool, before), i
    for format in ("int4", "int8/int4", "fp8", "int8-tensor"):
        with pytest.raises(attn.ParameterError, match="int8/int4-w0"):
            attn.HostPages(format, kv_heads=KV_HEADS, dim=DIM)


def centred(format, page_size, dim, slack=0):
    """Pages with centres of K, and an empty pool and cache for three sequences: of 4 pages each, but the last shares the first one's first."""
    pages = attn.HostPages(format, kv_heads=KV_HEADS, dim=dim, page_size=page_size, centres=True)
    if slack:
        pages = attn.HostPages(format, kv_heads=KV_HEADS, dim=dim, page_size=page_size, centres=True, page_stride=pages.page_bytes + slack)
    cache = attn.Cache(format, heads=KV_HEADS, dim=dim, max_tokens=768, sequences=3, page_size=page_size, device="cpu", centres=True)
    table = np.random.default_rng(1).permutation(12).astype(np.int32).reshape(3, 4)
    table[2, 0] = table[0, 0]
    return pages, np.full((12, pages.page_stride), 0xEE, np.uint8), table, cache


@pytest.mark.parametrize("slack", [0, 4096])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("format", ["int8", "int8/int4-w0"])
def test_with_centres_they_have_the_bits_of_a_cache_with_centres(format, page_size, dim, slack):
    """A prompt at once, one token at a time around the end of another's first tile, both in one call, and a third sequence that begins with a page of the first one's."""
    pages, pool, table, cache = centred(format, page_size, dim, slack)
    bare = attn.HostPages(format, kv_heads=KV_HEADS, dim=dim, page_size=page_size).page_bytes
    centres = KV_HEADS * 2 * dim * 2
    assert pages.page_bytes == bare + centres and pages.page_stride == pages.page_bytes + slack
    random, lens, shared = np.random.default_rng(2), [0, 0, 0], False

    def numbers(tokens, heads, seed=None):
        made = random if seed is None else np.random.default_rng(seed)
        return (made.standard_normal((tokens, heads, dim)) + np.arange(dim) % 5).astype(np.float32)

    calls = [[200, 0, 0], [0, 62, 0]] + [[0, 1, 0]] * 5 + [[3, 70, 0], [0, 0, 1], [1, 2, 90]]
    for call in calls:
        if call[2] and not shared:
            cache.fork(0, 2)
            cache.truncate(2, page_size)
            shared, lens[2] = True, page_size
        chosen = [s for s in range(3) if call[s]]
        k, v = numbers(sum(call), KV_HEADS), numbers(sum(call), KV_HEADS)
        cache.append(k, v, sequences=chosen, tokens=[call[s] for s in chosen])
        sequence = np.concatenate([np.full(call[s], s) for s in chosen])
        positions = np.concatenate([np.arange(lens[s], lens[s] + call[s], dtype=np.int32) for s in chosen])
        slots = table[sequence, positions // page_size].astype(np.int64) * page_size + positions % page_size
        order = random.permutation(len(slots))
        pages.append_slots(k[order], v[order], pool, slots[order], table[sequence, 0][order], positions[order])
        lens = [have + new for have, new in zip(lens, call)]
        for q_lens in ([1 if n else 0 for n in lens], [min(n, 20) for n in lens]):
            q = numbers(sum(q_lens), HEADS, seed=3)
            wanted = cache.attend(q, sequences=[0, 1, 2], q_lens=q_lens, return_lse=True)
            given = pages.attend(q, pool, table, lens, q_lens=q_lens, return_lse=True)
            for a, b in zip(given, wanted):
                assert np.array_equal(a, b)
    for sequence in range(3):
        first = pool[table[sequence, 0], bare : bare + centres]
        assert first.tobytes() == cache.shard_centres(sequence)
    others = np.setdiff1d(np.arange(12), table[:, 0])
    assert (pool[others, bare:] == 0xEE).all() and (pool[:, bare + centres :] == 0xEE).all()


def test_with_centres_a_negative_slot_is_nowhere():
    pages, pool, _, _ = centred("int8", 64, DIM)
    before, k = pool.copy(), rows(5, 3, KV_HEADS)
    k[1], k[2] = np.nan, np.inf
    pages.append_slots(k, k, pool, np.array([0, -1, -7]), np.array([0, 99, -1], np.int32), np.array([0, -1, 64], np.int32))
    changed = (pool != before).any(axis=1)
    assert changed[0] and not changed[1:].any()


def test_what_does_not_fit_centres_is_refused_by_name():
    pages, pool, table, _ = centred("int8", 64, DIM)
    before, k, slots = pool.copy(), rows(5, 2, KV_HEADS), np.array([0, 1])
    firsts, positions = np.zeros(2, np.int32), np.arange(2, dtype=np.int32)
    refused = [
        (attn.ParameterError, "first_pages", lambda: pages.append_slots(k, k, pool, slots)),
        (attn.ParameterError, "positions", lambda: pages.append_slots(k, k, pool, slots, firsts)),
        (attn.ParameterError, "first page", lambda: pages.append_slots(k, k, pool, slots, firsts + 12, positions)),
        (attn.ParameterError, "first page", lambda: pages.append_slots(k, k, pool, slots, firsts - 1, positions)),
        (attn.ParameterError, "position", lambda: pages.append_slots(k, k, pool, slots, firsts, -positions)),
        (attn.ShapeError, "first_pages", lambda: pages.append_slots(k, k, pool, slots, firsts[:1], positions)),
        (attn.ShapeError, "first_pages", lambda: pages.append_slots(k, k, pool, slots, slots, positions)),
        (attn.ShapeError, "positions", lambda: pages.append_slots(k, k, pool, slots, firsts, positions[:1])),
        (attn.ShapeError, "positions", lambda: pages.append_slots(k, k, pool, slots, firsts, slots)),
        (attn.ShapeError, "pool", lambda: pages.append_slots(k, k, pool[:, :-64], slots, firsts, positions)),
    ]
    for i, (kind, name, call) in enumerate(refused):
        with pytest.raises(kind, match=name):
            call()
        assert np.array_equal(pool, before), i
    bare = attn.HostPages("int8", kv_heads=KV_HEADS, dim=DIM)
    without = np.zeros((2, bare.page_bytes), np.uint8)
    with pytest.raises(attn.ParameterError, match="first_pages"):
        bare.append_slots(k, k, without, slots, firsts, positions)
    for name, options in [
        ("page_size", {"page_size": 32}),
        ("page_size", {"page_size": 16}),
        ("centres", {"format": "bf16"}),
        ("centres", {"format": "int4-g1"}),
        ("int8/int4-w0", {"format": "int8/int4"}),
        ("stride", {"page_stride": pages.page_bytes - 16}),
        ("stride", {"page_stride": pages.page_bytes + 1}),
        ("page_stride", {"page_stride": 0}),
        ("centres", {"centres": 1}),
    ]:
        with pytest.raises(attn.ParameterError, match=name):
            attn.HostPages(**{"format": "int8", "kv_heads": KV_HEADS, "dim": DIM, "centres": True, **options})
