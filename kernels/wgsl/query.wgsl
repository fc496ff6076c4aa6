// query.wgsl: the query rows in f32, rotated where K is, and as bytes (docs/arithmetic.md, sections 2 and 3).

// q' of 16 dims of one row, before the rotation, whose sums must not swallow the products.
fn query_unit(first_query: u32, num_queries: u32, head: u32, row: u32, unit: u32) -> array<vec4<f32>, 4> {
    let heads = params.heads_per_kv;
    let rows = heads * num_queries;
    let safe = min(row, rows - 1u);
    let i = safe / heads;
    let h = head * heads + (safe - i * heads);
    let at = ((first_query + i) * params.num_q_heads + h) * $(KD / 4)u + unit * 4u;
    let c = params.log2_scale * bitcast<f32>(tables[params.scales_at + 2u * head]);
#if K_STRIDES > 0
    return array<vec4<f32>, 4>(product4(q[at], c), product4(q[at + 1u], c), product4(q[at + 2u], c), product4(q[at + 3u], c));
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

#if K_STRIDES > 0
// The butterflies of strides 1 and 2.
fn rotate_4(x: vec4<f32>) -> vec4<f32> {
    let y = vec4<f32>(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
    return vec4<f32>(y.x + y.z, y.y + y.w, y.x - y.z, y.y - y.w);
}

// The butterflies of strides 1, 2, 4 and 8.
fn rotate_16(x: array<vec4<f32>, 4>) -> array<vec4<f32>, 4> {
    let a = rotate_4(x[0]);
    let b = rotate_4(x[1]);
    let c = rotate_4(x[2]);
    let d = rotate_4(x[3]);
    let ab = a + b;
    let a_b = a - b;
    let cd = c + d;
    let c_d = c - d;
    return array<vec4<f32>, 4>(ab + cd, a_b + c_d, ab - cd, a_b - c_d);
}
#end

// The lane's units of the query rows in f32, rotated: the longer strides are between units, four numbers at a time.
#def rotate_query(): num_pairs, pair_*, unit_* -> query_*
#for n in 0..PAIRS
query_$(n) = rotate_16(query_$(n));
#end
#for s in 0..(K_STRIDES - 4)
#for w in 0..4
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
    query_bytes[pair_$(n)] = bitcast<vec4<u32>>(query_$(n)[$(w)]);
}
#end
workgroupBarrier();
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
    let sign = select(1.0, -1.0, (unit_$(n) & (1u << $(s)u)) != 0u);
    query_$(n)[$(w)] = bitcast<vec4<f32>>(query_bytes[pair_$(n) ^ (1u << $(s)u)]) + sign * query_$(n)[$(w)];
}
#end
workgroupBarrier();
#end
#end
#for n in 0..PAIRS
#for w in 0..4
query_$(n)[$(w)] = query_$(n)[$(w)] * exp2i(-$((K_STRIDES + 1) / 2));
#end
#end
#end

#if CENTRES
// Four elements of a centre of K.
fn centre_elements(pairs: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(pairs.x << 16u, pairs.x & 0xFFFF0000u, pairs.y << 16u, pairs.y & 0xFFFF0000u));
}

// The rows' G of both centres (section 12), a lane for each: the query's elements, rounded to 16 bits, pass through workgroup memory, four of every 16 at
// a time. The products are exact, so that their sums may contract.
#def score_bases(): lane, sequence, head, num_rows, num_pairs, pair_*, query_* ->
let row_of_base = lane % $(R)u;
let has_base = lane < $(2 * R)u && row_of_base < num_rows;
let centre = ((sequence * params.num_kv_heads + head) * 2u + lane / $(R)u) * $(KD / 4)u;
#for w in 0..4
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
    query_bytes[pair_$(n)] = (bitcast<vec4<u32>>(query_$(n)[$(w)]) + vec4<u32>(128u)) & vec4<u32>(0xFFFFFF00u);
}
#end
workgroupBarrier();
var sums_$(w) = vec4<f32>(0.0);
if has_base {
    for (var u = 0u; u < $(UNITS)u; u++) {
        sums_$(w) += bitcast<vec4<f32>>(query_bytes[row_of_base * $(UNITS)u + u]) * centre_elements(centres[centre + 4u * u + $(w)u]);
    }
}
workgroupBarrier();
#end
if has_base {
    let sums = hidden4(hidden4(sums_0 + sums_2) + hidden4(sums_1 + sums_3));
    row_base[lane] = SCORE_BASE + hidden(hidden(sums.x + sums.z) + hidden(sums.y + sums.w));
}
#end
#end

#if K_INTEGER
// Where a row's largest element is sought of the part that has a unit.
fn part_slot(row: u32, unit: u32) -> u32 {
#if QUERY_PARTS > 1
    return $(QUERY_MAX)u + row * 2u + select(0u, 1u, unit >= $(K_GROUP_DIMS / 16)u);
#else
    return $(QUERY_MAX)u + row;
#end
}

fn posted_part(row: u32, part: u32) -> f32 {
    return bitcast<f32>(posted($(QUERY_MAX)u + row * $(QUERY_PARTS)u + part));
}
#end

// The query rows in workgroup memory: as bytes, with their steps and the sums that the scores need, or in f32.
#def load_query(): lane, first_query, num_queries, sequence, head, row0, num_rows, num_pairs ->
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
    query_$(n) = query_unit(first_query, num_queries, head, row0 + row_$(n), unit_$(n));
}
#end
#if K_STRIDES > 0
#use rotate_query()
#end
#if CENTRES
#use score_bases()
#end
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
#if K_INTEGER
    post_max(part_slot(row_$(n), unit_$(n)), bitcast<u32>(largest(query_$(n))));
#else
#for w in 0..4
    queries[pair_$(n) * 4u + $(w)u] = query_$(n)[$(w)];
#end
#end
}
#end
workgroupBarrier();
#if K_INTEGER
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
#if QUERY_PARTS > 1
    let steps = query_parts(posted_part(row_$(n), 0u), posted_part(row_$(n), 1u));
    let step = vec2<f32>(steps.x, select(steps.y, steps.z, unit_$(n) >= $(K_GROUP_DIMS / 16)u));
#else
    let step = query_step(posted_part(row_$(n), 0u));
#end
#for w in 0..4
    let q8_$(w) = clamp(rhe4(product4(query_$(n)[$(w)], step.y)), vec4<i32>(-127), vec4<i32>(127));
#end
    query_bytes[pair_$(n)] = vec4<u32>(pack4xI8(q8_0), pack4xI8(q8_1), pack4xI8(q8_2), pack4xI8(q8_3));
    if unit_$(n) == 0u {
        row_step[row_$(n)] = step.x;
#if QUERY_PARTS > 1
        row_ratio[row_$(n)] = steps.w;
#end
    }
#if K_CENTRED
    let sum = (q8_0 + q8_1) + (q8_2 + q8_3);
    post_sum($(QUERY_SUM)u + row_$(n) * $(KG)u + unit_$(n) / $(K_GROUP_DIMS / 16)u, (sum.x + sum.y) + (sum.z + sum.w));
#end
}
#end
workgroupBarrier();
#end
#end
