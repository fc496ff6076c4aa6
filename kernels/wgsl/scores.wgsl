// scores.wgsl: K's codes, and the scores of a tile (docs/arithmetic.md, section 4). A lane has the score of its token, one for each row.

#if K_INTEGER
// The codes of dims 16 u .. 16 u + 15, one byte each (a nibble scheme's as 0..15).
fn k_bytes(place: TokenAddr, u: u32) -> vec4<u32> {
#if K_BITS == 4
    // The codes of token 16 a + i (i < 8) are low nibbles, those of token 16 a + 8 + i high ones.
    let pairs = load_vec(place.buffer, place.at + u * $(PS / 2)u + (place.token >> 4u) * 8u + (place.token & 7u));
    return (pairs >> vec4<u32>(((place.token >> 3u) & 1u) * 4u)) & vec4<u32>(0x0F0F0F0Fu);
#else
    return k_vec(place, u);
#end
}
#end

#if !VIEW && K_SCALED
// The word with a token's parameters of group g.
fn k_word(place: TokenAddr, g: u32) -> u32 {
#if K == GROUPS
    return load_word(place.buffer, place.at * 4u + $(K_PARAMS)u + g * $(PS)u + place.token);
#else
    return load_word(place.buffer, place.at * 4u + $(K_PARAMS)u + ((g * $(PS)u + place.token) >> 1u));
#end
}
#end

#if K_SCALED
// A token's scale and shift of its word.
fn k_param(word: u32, token: u32) -> vec2<f32> {
#if K == GROUPS
    return vec2<f32>(f16_value(word & 0xFFFFu), f16_value(word >> 16u));
#else
    return vec2<f32>(f16_value((word >> ((token & 1u) * 16u)) & 0xFFFFu), 0.0);
#end
}
#end

#if K == FP8 || V == FP8
fn fp8_value(b: u32) -> f32 {
    let magnitude = b & 0x7Fu;
    let normal = bitcast<f32>((magnitude << 20u) + 0x3C000000u);
    let value = select(normal, f32(magnitude) * exp2i(-9), magnitude < 8u);
    return bitcast<f32>(bitcast<u32>(value) | ((b & 0x80u) << 24u));
}

fn fp8_values(word: u32) -> vec4<f32> {
    return vec4<f32>(fp8_value(word & 0xFFu), fp8_value((word >> 8u) & 0xFFu), fp8_value((word >> 16u) & 0xFFu), fp8_value(word >> 24u));
}
#end

#if K_INTEGER
// acc + the dot product of 16 signed bytes.
fn dot16(a: vec4<u32>, b: vec4<u32>, acc: i32) -> i32 {
    return dot4I8Packed(a.w, b.w) + (dot4I8Packed(a.z, b.z) + (dot4I8Packed(a.y, b.y) + (dot4I8Packed(a.x, b.x) + acc)));
}
#elif K == FP8
// 16 dims of one token, without the per-tensor scale.
fn k_values(place: TokenAddr, u: u32) -> array<vec4<f32>, 4> {
    let c = k_vec(place, u);
    return array<vec4<f32>, 4>(fp8_values(c.x), fp8_values(c.y), fp8_values(c.z), fp8_values(c.w));
}
#else
fn half_values(a: u32, b: u32) -> vec4<f32> {
#if K == BF16
    return bitcast<vec4<f32>>(vec4<u32>(a << 16u, a & 0xFFFF0000u, b << 16u, b & 0xFFFF0000u));
#else
    return vec4<f32>(f16_value(a & 0xFFFFu), f16_value(a >> 16u), f16_value(b & 0xFFFFu), f16_value(b >> 16u));
#end
}

// 16 dims of one token.
fn k_values(place: TokenAddr, u: u32) -> array<vec4<f32>, 4> {
    let a = k_vec(place, 2u * u);
    let b = k_vec(place, 2u * u + 1u);
    return array<vec4<f32>, 4>(
        half_values(a.x, a.y), half_values(a.z, a.w),
        half_values(b.x, b.y), half_values(b.z, b.w),
    );
}
#end

// Loads the codes and parameters of K that the lane multiplies.
#def load_k(): place, pages, head, kv_len, tile, lane -> first_unit, place_*, k_*
#if K_SCALED
#for g in 0..KG
let k_word_$(g) = k_word(place, $(g)u);
#end
#end
let place_0 = place;
#if HALVES
let place_1 = k_place(pages, head, kv_len, tile, lane ^ 32u);
let first_unit = (lane >> 5u) * $(HALF)u;
#else
let first_unit = 0u;
#end
#for j in 0..TOKENS
#for n in 0..HALF
let k_$(j)_$(n) = k_bytes(place_$(j), first_unit + $(n)u);
#end
#end
#end

// K's parameters of the lane's token.
#def load_k_params(): lane, k_word_* -> k_param_*
#if K_SCALED
#for g in 0..KG
var k_param_$(g) = k_param(k_word_$(g), lane);
#if K == GROUPS
k_param_$(g).y = k_param_$(g).y + 8.0 * k_param_$(g).x;
#elif K == STEPS
k_param_$(g).x = k_param_$(g).x * 0.0625;
#end
#end
#end
#end

// Products of row r with the lane's codes; half steps count 16.
#def integer_products(r): first_unit, scratch_of_other, k_* -> dot_*
{
#for j in 0..TOKENS
#for g in 0..SGROUPS
var sum_$(j)_$(g) = 0;
#end
#end
#for n in 0..HALF
#let FIRST = K_GROUP_DIMS / 16 - (HALVES ? HALF : 0)
#let g = SGROUPS == 1 ? 0 : (HALVES ? (n < FIRST ? 0 : 1) : n / FIRST)
{
    let bytes = query_bytes[$(r * UNITS + n)u + first_unit];
#for j in 0..TOKENS
    sum_$(j)_$(g) = dot16(bytes, k_$(j)_$(n), sum_$(j)_$(g));
#end
}
#end
#if HALVES && QUERY_PARTS > 1
// The second part of a query begins among the units of the second half.
if first_unit == 0u {
#for j in 0..TOKENS
    sum_$(j)_0 += sum_$(j)_1;
    sum_$(j)_1 = 0;
#end
}
#end
#let SHIFT = K == STEPS ? 4 : 0
#for g in 0..SGROUPS
dot_$(r)_$(g) = sum_0_$(g) << $(SHIFT)u;
#if HALVES
scratch[$((g * R + r) * RS)u + scratch_of_other] = bitcast<u32>(sum_1_$(g) << $(SHIFT)u);
#end
#end
}
#end

// Adds the products of residuals, for the rows that read the tile fine.
#def residual_products(): head, kv_len, tile, lane, residuals_at, k_fine, first_unit, scratch_of_other -> dot_*
if k_fine > 0u {
    let residuals_0 = residual_place(residuals_at, head, kv_len, tile, lane);
#if HALVES
    let residuals_1 = residual_place(residuals_at, head, kv_len, tile, lane ^ 32u);
#end
#for r in 0..R
    if $(r)u < k_fine {
#for j in 0..TOKENS
#for g in 0..SGROUPS
        var fine_$(j)_$(g) = 0;
#end
#end
#for n in 0..HALF
#let g = n * SGROUPS / UNITS
#for j in 0..TOKENS
        fine_$(j)_$(g) = dot16(query_bytes[$(r * UNITS + n)u + first_unit], k_bytes(residuals_$(j), first_unit + $(n)u), fine_$(j)_$(g));
#end
#end
#for g in 0..SGROUPS
        dot_$(r)_$(g) += fine_0_$(g);
#end
#if HALVES
        scratch[$(r * RS)u + scratch_of_other] += bitcast<u32>(fine_1_0);
#end
    }
#end
}
#end

// The score of row r before its product with the row's step, from its products with whole dims.
#def integer_score(r): dot_*, k_param_*, k_fine -> score_*
#for g in 0..SGROUPS
{
#if K == TENSOR
    let term = f32(dot_$(r)_$(g));
#elif K == GROUPS
    let sum = posted_sum($(QUERY_SUM + r * KG + g)u);
    let term = product(f32(dot_$(r)_$(g) - 8 * sum), k_param_$(g).x) + product(f32(sum), k_param_$(g).y);
#elif K == STEPS
    let middle = posted_sum($(QUERY_SUM + r * KG + g)u) * select(240, 255, $(r)u < k_fine);
    let term = product(f32(2 * dot_$(r)_$(g) - middle), k_param_$(g).x);
#else
    let term = product(f32(dot_$(r)_$(g)), k_param_$(g).x);
#end
#if g == 0
    score_$(r) = term;
#else
#if QUERY_PARTS > 1
    score_$(r) = score_$(r) + product(term, row_ratio[$(r)]);
#else
    score_$(r) = score_$(r) + term;
#end
#end
}
#end
#end

// The scores of all rows in f32.
#def float_scores(): place -> score_*
for (var u = 0u; u < $(UNITS)u; u++) {
    let k = k_values(place, u);
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

// Step, centre, soft cap, ALiBi and mask of row r's score, and its key in the row's slot.
#def finish_score(r): row0, tile, token, position_0 -> score_*, ties
#if TIES
let whole_$(r) = score_$(r);
#end
#if CENTRES && !BASED
score_$(r) = far_score(score_$(r), row_step[$(r)], base_of(tile, $(r)u));
#elif K_INTEGER && !BASED
score_$(r) = product(score_$(r), row_step[$(r)]);
#end
#if SOFTCAP
score_$(r) = softcap(score_$(r), params.softcap_inner, params.softcap_outer);
#end
#if ALIBI
{
    let position = position_0 + i32((row0 + $(r)u) / params.heads_per_kv);
    score_$(r) = score_$(r) + product(row_slope[$(r)], f32(i32(token) - position));
}
#end
score_$(r) = select(NONE, score_$(r), token - row_sees[$(r)].x < row_sees[$(r)].y);
#if TIES
if is_tie(score_$(r)) {
    // The product's side of the middle decides its place on the grid; rows that are off the grid take the step back.
    let step = tie_step(whole_$(r), row_step[$(r)], score_$(r));
    score_$(r) = bitcast<f32>(bitcast<i32>(score_$(r)) + step);
    ties |= (bitcast<u32>(step) & 3u) << $(2 * r)u;
}
#end
#if BASED
post_max($(ROW_MAX + r)u, key_of(bitcast<u32>(score_$(r))));
#elif INTEGER
post_max($(ROW_MAX + r)u, score_key(score_$(r)));
#else
post_max($(ROW_MAX + r)u, key_of(bitcast<u32>(ceil(score_$(r)))));
#end
#end

// The scores of all rows, and their maxima in the slots of reduce.wgsl. Rows are spelled out, RU at a time: a loop would keep the lane's
// values of them in memory, and in registers that it moves.
#def score_tile(): tile, token, place, kv_len, position_0, head, row0, num_rows, lane, residuals_at, k_fine, scratch_of_other, first_unit, k_* -> score_*, ties
#for r in 0..R
var score_$(r) = 0.0;
#end
#if TIES
var ties = 0u;        // for each row two bits: the step that its score took
#end
#if K_INTEGER
#use load_k_params()
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
#if K_WINDOW > 0
#use residual_products()
#end
#if HALVES
workgroupBarrier();
#end
#else
#use float_scores()
#end
#for b in 0..(R / RU)
if $(b * RU)u < num_rows {
#if K_INTEGER
#for r in (b * RU)..(b * RU + RU)
#if HALVES
#for g in 0..SGROUPS
    dot_$(r)_$(g) += bitcast<i32>(scratch[$((g * R + r) * RS)u + lane]);
#end
#end
#use integer_score(r)
#end
#end
#for r in (b * RU)..(b * RU + RU)
#use finish_score(r)
#end
}
#end
#end
