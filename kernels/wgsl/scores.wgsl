// scores.wgsl: K's codes, and the scores of a tile (docs/arithmetic.md, section 3). A lane has the score of its token, one for each row.

// The codes of dims 16 u .. 16 u + 15, one byte each (a nibble scheme's as 0..15).
#if K_BITS == 8 || K == CHANNEL
fn k_bytes(place: TokenAddr, u: u32) -> vec4<u32> {
    return k_vec(place, u);
}
#end
#if K_BITS == 4
// The codes of token 16 a + i (i < 8) in the low nibbles, of token 16 a + 8 + i in the high ones.
fn k_pair(place: TokenAddr, u: u32) -> vec4<u32> {
    return load_vec(place.buffer, place.at + u * $(PS / 2)u + (place.token >> 4u) * 8u + (place.token & 7u));
}

fn nibbles_of(place: TokenAddr, pairs: vec4<u32>) -> vec4<u32> {
    return (pairs >> vec4<u32>(((place.token >> 3u) & 1u) * 4u)) & vec4<u32>(0x0F0F0F0Fu);
}

fn k_nibbles(place: TokenAddr, u: u32) -> vec4<u32> {
    return nibbles_of(place, k_pair(place, u));
}
#end

#if !VIEW && (K == TOKEN || K == G32 || K == GROUPS)
// The word with a token's parameters of group g.
fn k_word(place: TokenAddr, g: u32) -> u32 {
#if K == GROUPS
    return load_word(place.buffer, place.at * 4u + $(K_PARAMS)u + g * $(PS)u + place.token);
#else
    return load_word(place.buffer, place.at * 4u + $(K_PARAMS)u + ((g * $(PS)u + place.token) >> 1u));
#end
}
#end

// A token's scale and (centred, in the integer arithmetic) shift in group g.
#if K == TOKEN || K == G32
fn k_scale(place: TokenAddr, g: u32) -> f32 {
#if VIEW
    return f16_value(k_word(place, g) & 0xFFFFu);
#else
    return load_f16(place.buffer, place.at * 4u + $(K_PARAMS)u, g * $(PS)u + place.token);
#end
}
#elif K == GROUPS
fn k_param(place: TokenAddr, g: u32) -> vec2<f32> {
    let word = load_word(place.buffer, place.at * 4u + $(K_PARAMS)u + g * $(PS)u + place.token);
    return vec2<f32>(f16_value(word & 0xFFFFu), f16_value(word >> 16u));
}
#elif K == CHANNEL
fn k_scale_open(place: TokenAddr) -> f32 {
    return load_f16(place.buffer, place.at * 4u + $(D * PS / 4)u, place.token);
}

// The scale and shift of dim d in a sealed page.
fn k_channel(place: TokenAddr, d: u32) -> vec2<f32> {
    let word = load_word(place.buffer, place.at * 4u + $(K_PARAMS)u + d);
    return vec2<f32>(f16_value(word & 0xFFFFu), f16_value(word >> 16u));
}
#end

#if INTEGER
// acc + the dot product of 16 signed bytes.
fn dot16(a: vec4<u32>, b: vec4<u32>, acc: i32) -> i32 {
    return dot4I8Packed(a.w, b.w) + (dot4I8Packed(a.z, b.z) + (dot4I8Packed(a.y, b.y) + (dot4I8Packed(a.x, b.x) + acc)));
}
#else
fn fp8_value(b: u32) -> f32 {
    let magnitude = b & 0x7Fu;
    let normal = bitcast<f32>((magnitude << 20u) + 0x3C000000u);
    let value = select(normal, f32(magnitude) * exp2i(-9), magnitude < 8u);
    return bitcast<f32>(bitcast<u32>(value) | ((b & 0x80u) << 24u));
}

fn fp8_values(word: u32) -> vec4<f32> {
    return vec4<f32>(fp8_value(word & 0xFFu), fp8_value((word >> 8u) & 0xFFu), fp8_value((word >> 16u) & 0xFFu), fp8_value(word >> 24u));
}

fn int8_values(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(word));
}

#if K == F16 || K == BF16
fn half_values(a: u32, b: u32) -> vec4<f32> {
#if K == BF16
    return bitcast<vec4<f32>>(vec4<u32>(a << 16u, a & 0xFFFF0000u, b << 16u, b & 0xFFFF0000u));
#else
    return vec4<f32>(f16_value(a & 0xFFFFu), f16_value(a >> 16u), f16_value(b & 0xFFFFu), f16_value(b >> 16u));
#end
}
#end

// K dequantized: 16 dims of one token, without a per-tensor scale.
fn k_values(place: TokenAddr, open: bool, u: u32) -> array<vec4<f32>, 4> {
#if K == F16 || K == BF16
    let a = k_vec(place, 2u * u);
    let b = k_vec(place, 2u * u + 1u);
    return array<vec4<f32>, 4>(
        half_values(a.x, a.y), half_values(a.z, a.w),
        half_values(b.x, b.y), half_values(b.z, b.w),
    );
#elif K == FP8
    let c = k_bytes(place, u);
    return array<vec4<f32>, 4>(fp8_values(c.x), fp8_values(c.y), fp8_values(c.z), fp8_values(c.w));
#elif K == TENSOR
    let c = k_bytes(place, u);
    return array<vec4<f32>, 4>(int8_values(c.x), int8_values(c.y), int8_values(c.z), int8_values(c.w));
#elif K == TOKEN || K == G32
    let c = k_bytes(place, u);
    let s = k_scale(place, $(K == G32 ? 1 : 0)u * (u >> 1u));
    return array<vec4<f32>, 4>(int8_values(c.x) * s, int8_values(c.y) * s, int8_values(c.z) * s, int8_values(c.w) * s);
#elif K == GROUPS
    let c = k_nibbles(place, u);
    let s = k_param(place, u / $(UNITS / KG)u);
    return array<vec4<f32>, 4>(int8_values(c.x) * s.x + s.y, int8_values(c.y) * s.x + s.y, int8_values(c.z) * s.x + s.y, int8_values(c.w) * s.x + s.y);
#else
    if open {
        let c = k_bytes(place, u);
        let s = k_scale_open(place);
        return array<vec4<f32>, 4>(int8_values(c.x) * s, int8_values(c.y) * s, int8_values(c.z) * s, int8_values(c.w) * s);
    }
    let c = k_nibbles(place, u);
    var out: array<vec4<f32>, 4>;
#for w in 0..4
    {
        let v = int8_values(c[$(w)]);
        let p0 = k_channel(place, u * 16u + $(4 * w)u);
        let p1 = k_channel(place, u * 16u + $(4 * w + 1)u);
        let p2 = k_channel(place, u * 16u + $(4 * w + 2)u);
        let p3 = k_channel(place, u * 16u + $(4 * w + 3)u);
        out[$(w)] = v * vec4<f32>(p0.x, p1.x, p2.x, p3.x) + vec4<f32>(p0.y, p1.y, p2.y, p3.y);
    }
#end
    return out;
#end
}
#end

// Loads the codes and parameters of K that the lane multiplies.
#def load_k(): place, pages, tail_page, head, kv_len, tile, lane, open -> first_unit, k_*
#if K == TOKEN || K == G32 || K == GROUPS
#for g in 0..KG
let k_word_$(g) = k_word(place, $(g)u);
#end
#end
let place_0 = place;
#if HALVES
let place_1 = k_place(pages, tail_page, head, kv_len, tile, lane ^ 32u);
let first_unit = (lane >> 5u) * $(HALF)u;
#else
let first_unit = 0u;
#end
#for j in 0..TOKENS
#for n in 0..HALF
#if K_BITS == 8
let k_$(j)_$(n) = k_bytes(place_$(j), first_unit + $(n)u);
#elif K != CHANNEL
let k_$(j)_$(n) = nibbles_of(place_$(j), k_pair(place_$(j), first_unit + $(n)u));
#else
var k_$(j)_$(n): vec4<u32>;
#end
#end
#end
#if K == CHANNEL
if open {
#for j in 0..TOKENS
#for n in 0..HALF
    k_$(j)_$(n) = k_bytes(place_$(j), first_unit + $(n)u);
#end
#end
} else {
#for j in 0..TOKENS
#for n in 0..HALF
    k_$(j)_$(n) = nibbles_of(place_$(j), k_pair(place_$(j), first_unit + $(n)u));
#end
#end
}
#end
#end

// K's parameters of the lane's token.
#def load_k_params(): lane, open, place, k_word_* -> code_zero, open_scale, k_scale_*, k_param_*
#if K == CHANNEL
// In a sealed page codes are biased by 8; in an open page each token has its own scale.
let code_zero = select(8, 0, open);
var open_scale = 1.0;
if open {
    open_scale = k_scale_open(place);
}
#elif K == TOKEN || K == G32
#for g in 0..KG
let k_scale_$(g) = f16_value((k_word_$(g) >> ((lane & 1u) * 16u)) & 0xFFFFu);
#end
#elif K == GROUPS
#for g in 0..KG
var k_param_$(g) = vec2<f32>(f16_value(k_word_$(g) & 0xFFFFu), f16_value(k_word_$(g) >> 16u));
k_param_$(g).y = k_param_$(g).y + 8.0 * k_param_$(g).x;
#end
#end
#end

// Products of row r with the lane's codes, by both planes of the query.
#def integer_products(r): first_unit, scratch_of_other, k_* -> dot_*
{
#for j in 0..TOKENS
#for g in 0..SGROUPS
var hi_$(j)_$(g) = 0;
var lo_$(j)_$(g) = 0;
#end
#end
#for n in 0..HALF
#let g = n * SGROUPS / UNITS
{
    let hi = planes[$(2 * (r * UNITS + n))u + 2u * first_unit];
    let lo = planes[$(2 * (r * UNITS + n) + 1)u + 2u * first_unit];
#for j in 0..TOKENS
    hi_$(j)_$(g) = dot16(hi, k_$(j)_$(n), hi_$(j)_$(g));
    lo_$(j)_$(g) = dot16(lo, k_$(j)_$(n), lo_$(j)_$(g));
#end
}
#end
#for g in 0..SGROUPS
dot_$(r)_$(g) = (hi_0_$(g) << 7u) + lo_0_$(g);
#end
#if HALVES
scratch[$(r * RS)u + scratch_of_other] = bitcast<u32>((hi_1_0 << 7u) + lo_1_0);
#end
}
#end

// The score of row r, from its products with whole dims.
#def integer_score(r): dot_*, k_scale_*, k_param_*, code_zero, open_scale -> score_*
#for g in 0..SGROUPS
#if K == TOKEN
score_$(r) = f32(dot_$(r)_$(g)) * k_scale_0;
#elif K == TENSOR
score_$(r) = f32(dot_$(r)_$(g));
#elif K == G32
#if g == 0
score_$(r) = product(f32(dot_$(r)_$(g)), k_scale_$(g));
#else
score_$(r) = score_$(r) + product(f32(dot_$(r)_$(g)), k_scale_$(g));
#end
#elif K == GROUPS
{
    let sum = posted_sum($(QUERY_SUM + r * KG + g)u);
    let term = product(f32(dot_$(r)_$(g) - 8 * sum), k_param_$(g).x);
#if g == 0
    score_$(r) = term + product(f32(sum), k_param_$(g).y);
#else
    score_$(r) = (score_$(r) + term) + product(f32(sum), k_param_$(g).y);
#end
}
#else
{
    let shifts = product(f32(posted_sum($(SHIFT_SUM + r)u)), row_shift[$(r)]);  // 0 for an open page
    score_$(r) = (f32(dot_$(r)_0 - code_zero * posted_sum($(QUERY_SUM + r)u)) * open_scale) * row_unit[$(r)] + shifts;
}
#end
#end
#if K != CHANNEL
score_$(r) = score_$(r) * row_unit[$(r)];
#end
#end

// The scores of all rows in f32, of dequantized K.
#def float_scores(): place, open -> score_*
for (var u = 0u; u < $(UNITS)u; u++) {
    let k = k_values(place, open, u);
#for w in 0..4
    let k_$(w) = k[$(w)];
#end
#for r in 0..R
#for w in 0..4
    let q_$(r)_$(w) = queries[($(r * UNITS)u + u) * 4u + $(w)u];
#end
    score_$(r) += (dot(q_$(r)_0, k_0) + dot(q_$(r)_1, k_1)) + (dot(q_$(r)_2, k_2) + dot(q_$(r)_3, k_3));
#end
}
#end

// Soft cap, ALiBi and mask of row r's score.
#def apply_score_mods(r): row0, token, kv_len -> score_*
#if SOFTCAP
score_$(r) = softcap(score_$(r), params.softcap_inner, params.softcap_outer);
#end
#if ALIBI
{
    let position = i32(kv_len) - i32(params.q_len) + i32((row0 + $(r)u) / params.heads_per_kv);
    score_$(r) = score_$(r) + product(row_slope[$(r)], f32(i32(token) - position));
}
#end
score_$(r) = select(NONE, score_$(r), token - row_sees[$(r)].x < row_sees[$(r)].y);
#end

// The scores of all rows, and their maxima in the slots of reduce.wgsl. Rows are spelled out, RU at a time: a loop would keep the lane's
// values of them in memory, and in registers that it moves.
#def score_tile(): tile, tile_end, token, open, place, kv_len, page_ahead, head, row0, num_rows, num_pairs, lane, scratch_at, scratch_of_other, first_unit, k_*, pair_*, row_*, unit_*, query_* -> score_*, channel_raw_*
#for r in 0..R
var score_$(r) = 0.0;
#end
#if INTEGER
#if K == CHANNEL
#use fold_channels()
#end
#use load_k_params()
#else
#use float_scores()
#end
#if INTEGER
#for r in 0..R
#for g in 0..SGROUPS
var dot_$(r)_$(g) = 0;
#end
#end
#for b in 0..(R / RU)
if $(b * RU)u < num_rows {
#for r in (b * RU)..(b * RU + RU)
#use integer_products(r)
#end
}
#end
#if HALVES
workgroupBarrier();
#end
#end
#for b in 0..(R / RU)
if $(b * RU)u < num_rows {
#if INTEGER
#for r in (b * RU)..(b * RU + RU)
#if HALVES
    dot_$(r)_0 += bitcast<i32>(scratch[$(r * RS)u + scratch_at]);
#end
#use integer_score(r)
#end
#end
#for r in (b * RU)..(b * RU + RU)
#use apply_score_mods(r)
    post_max($(ROW_MAX + r)u, order_key(ceil(score_$(r))));
#end
}
#end
#end
