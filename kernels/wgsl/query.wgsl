// query.wgsl: the query rows in f32, and as planes of bytes (docs/arithmetic.md, section 2; sealed Int4 Channel pages: section 3).

// q' of 16 dims of one row.
fn query_unit(sequence: u32, head: u32, row: u32, unit: u32) -> array<vec4<f32>, 4> {
    let heads = params.heads_per_kv;
    let rows = heads * params.q_len;
    let safe = min(row, rows - 1u);
    let i = safe / heads;
    let h = head * heads + (safe - i * heads);
    let at = ((sequence * params.q_len + i) * params.num_q_heads + h) * $(D / 4)u + unit * 4u;
    let c = params.log2_scale * bitcast<f32>(tables[params.scales_at + 2u * head]);
#if INTEGER && K == CHANNEL
    return array<vec4<f32>, 4>(round_13(q[at] * c), round_13(q[at + 1u] * c), round_13(q[at + 2u] * c), round_13(q[at + 3u] * c));
#else
    return array<vec4<f32>, 4>(q[at] * c, q[at + 1u] * c, q[at + 2u] * c, q[at + 3u] * c);
#end
}

fn largest_of(x: vec4<f32>) -> f32 {
    return max(max(x.x, x.y), max(x.z, x.w));
}

fn largest(x: array<vec4<f32>, 4>) -> f32 {
    return largest_of(max(max(abs(x[0]), abs(x[1])), max(abs(x[2]), abs(x[3]))));
}

#if INTEGER
// A row as 15-bit integers in two planes of bytes, q15 = 128 hi + lo.
// Stores 16 dims of it at `at` (hi) and `at + 1` (lo); returns the sum of q15.
fn store_plane(at: u32, x: array<vec4<f32>, 4>, scale: f32) -> i32 {
#for w in 0..4
    let q$(w) = rhe4(x[$(w)] * scale);
#end
    planes[at] = vec4<u32>(pack4xI8(q0 >> vec4<u32>(7u)), pack4xI8(q1 >> vec4<u32>(7u)), pack4xI8(q2 >> vec4<u32>(7u)), pack4xI8(q3 >> vec4<u32>(7u)));
    planes[at + 1u] = vec4<u32>(pack4xI8(q0 & vec4<i32>(127)), pack4xI8(q1 & vec4<i32>(127)), pack4xI8(q2 & vec4<i32>(127)), pack4xI8(q3 & vec4<i32>(127)));
    let sum = (q0 + q1) + (q2 + q3);
    return (sum.x + sum.y) + (sum.z + sum.w);
}
#end

// The lane's units of the query rows, in f32 and (but for Int4 Channel) as planes with the sums that the scores need.
#def load_query(): lane, sequence, head, row0, num_pairs -> pair_*, row_*, unit_*, query_*
for (var slot = lane; slot < $(SLOTS)u; slot += $(T)u) {
    clear(slot);
}
workgroupBarrier();
#for n in 0..PAIRS
let pair_$(n) = lane + $(n * T)u;
let row_$(n) = pair_$(n) / $(UNITS)u;
let unit_$(n) = pair_$(n) % $(UNITS)u;
var query_$(n): array<vec4<f32>, 4>;
if pair_$(n) < num_pairs {
    query_$(n) = query_unit(sequence, head, row0 + row_$(n), unit_$(n));
#if INTEGER
    post_max($(QUERY_MAX)u + row_$(n), bitcast<u32>(largest(query_$(n))));
#else
#for w in 0..4
    queries[pair_$(n) * 4u + $(w)u] = query_$(n)[$(w)];
#end
#end
}
#end
workgroupBarrier();
#if INTEGER && K != CHANNEL
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
    let e = plane_exponent(bitcast<f32>(posted($(QUERY_MAX)u + row_$(n))));
    let sum = store_plane(pair_$(n) * 2u, query_$(n), exp2i(e));
    if unit_$(n) == 0u {
        row_unit[row_$(n)] = exp2i(-e);
    }
#if K == GROUPS
    post_sum($(QUERY_SUM)u + row_$(n) * $(KG)u + unit_$(n) / $(UNITS / KG)u, sum);
#end
}
#end
workgroupBarrier();
#end
#end

// The parameters of the lane's channels of the sealed page `page_ahead`.
#def load_channels(): page_ahead, head, lane -> channel_raw_*
let of_page = run_of(page_ahead, head);
#for n in 0..((UNITS * 4 + T - 1) / T)
channel_raw_$(n) = load_vec(of_page.buffer, of_page.at + $(K_PARAMS / 4)u + min(lane + $(T * n)u, $(UNITS * 4 - 1)u));
#end
#end

// Planes of q' times the scales of a sealed page's channels, and the term of its shifts; the next page's channels are loaded ahead.
// An open page holds int8 codes with a scale per token: its channels count as scale 1, shift 0.
#def fold_channels(): open, tile, tile_end, kv_len, page_ahead, head, lane, num_pairs, pair_*, row_*, unit_*, query_* -> channel_raw_*
#for n in 0..((UNITS * 4 + T - 1) / T)
if lane + $(T * n)u < $(UNITS * 4)u {
    var scale = vec4<f32>(1.0);
    var shift = vec4<f32>(0.0);
    if !open {
        let pairs = channel_raw_$(n);
        scale = vec4<f32>(f16_value(pairs.x & 0xFFFFu), f16_value(pairs.y & 0xFFFFu), f16_value(pairs.z & 0xFFFFu), f16_value(pairs.w & 0xFFFFu));
        shift = vec4<f32>(f16_value(pairs.x >> 16u), f16_value(pairs.y >> 16u), f16_value(pairs.z >> 16u), f16_value(pairs.w >> 16u)) + 8.0 * scale;
    }
    let to = (lane & 3u) * $(UNITS)u + ((lane + $(T * n)u) >> 2u);
    channel_scale[to] = scale;
    channel_shift[to] = shift;
}
#end
if tile + 1u < tile_end && (tile + 1u) / $(PS / 64)u != kv_len / $(PS)u {
#use load_channels()
}
workgroupBarrier();
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
    var bound = 0.0;
    var largest_shift = vec4<f32>(0.0);
#for w in 0..4
    bound = max(bound, largest_of(abs(query_$(n)[$(w)])) * largest_of(channel_scale[$(w * UNITS)u + unit_$(n)]));
    largest_shift = max(largest_shift, abs(channel_shift[$(w * UNITS)u + unit_$(n)]));
#end
    post_max($(BOUND)u + row_$(n), bitcast<u32>(bound));
    if row_$(n) == 0u {
        post_max($(LARGEST_SHIFT)u, bitcast<u32>(largest_of(largest_shift)));
    }
}
#end
workgroupBarrier();
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
    let e = plane_exponent(bitcast<f32>(posted($(BOUND)u + row_$(n))));
    let a = bitcast<f32>(posted($(QUERY_MAX)u + row_$(n)));
    let b = bitcast<f32>(posted($(LARGEST_SHIFT)u));
    let j = select(clamp(20 - exponent(a) - exponent(b), -100, 100), 0, a == 0.0 || b == 0.0);
    let unit_j = exp2i(j);
    var x = query_$(n);
    var y = vec4<i32>(0);
#for w in 0..4
    x[$(w)] = query_$(n)[$(w)] * channel_scale[$(w * UNITS)u + unit_$(n)];
    y += rhe4((query_$(n)[$(w)] * channel_shift[$(w * UNITS)u + unit_$(n)]) * unit_j);
#end
    post_sum($(QUERY_SUM)u + row_$(n), store_plane(pair_$(n) * 2u, x, exp2i(e)));
    post_sum($(SHIFT_SUM)u + row_$(n), (y.x + y.y) + (y.z + y.w));
    if unit_$(n) == 0u {
        row_unit[row_$(n)] = exp2i(-e);
        row_shift[row_$(n)] = exp2i(-j);
    }
}
#end
workgroupBarrier();
#end
