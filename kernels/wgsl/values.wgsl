// values.wgsl: V's codes and parameters, and the product of a tile's weights with V, folded into the state (docs/arithmetic.md, sections 5 and 6).
// The number of lanes that have a dim.
#let DIM_LANES = V_BY_WORDS ? VD / 4 : V_ROWS

// The place of a token of a tile in V's slot order.
fn slot_of(token: u32) -> u32 {
    return (token >> 4u) * 16u + 4u * ((token & 7u) >> 1u) + 2u * ((token >> 3u) & 1u) + (token & 1u);
}

// The lane's j-th dim, which may lie past the end. A lane has the four dims of a word of bytes that lie along the dims (V_BY_WORDS: in views and latents), and pairs of
// dims that share bytes of 4-bit V.
fn dim_of(lane: u32, j: u32) -> u32 {
#if V_BY_WORDS
    return 4u * (lane + $(T)u * (j >> 2u)) + (j & 3u);
#elif V_BITS == 4
    let row = lane + $(T)u * (j >> 1u);
    return (row >> 3u) * 16u + (row & 7u) + 8u * (j & 1u);
#else
    return lane + $(T)u * j;
#end
}

#if V_SCALED && !VIEW
// The word with a token's parameters of V's group g; v_param gives its scale and shift.
fn v_word(place: TokenAddr, g: u32) -> u32 {
#if V == GROUPS
    return load_word(place.buffer, place.at * 4u + $(V_PARAMS)u + g * $(PS)u + place.token);
#else
    return load_word(place.buffer, place.at * 4u + $(V_PARAMS)u + ((g * $(PS)u + place.token) >> 1u));
#end
}
#end

#if V_SCALED
fn v_param(word: u32, token: u32) -> vec2<f32> {
#if V == GROUPS
    return vec2<f32>(f16_value(word & 0xFFFFu), f16_value(word >> 16u));
#else
    return vec2<f32>(f16_value((word >> ((token & 1u) * 16u)) & 0xFFFFu), 0.0);
#end
}
#end

#if V == FP8 && !VIEW && !LATENTS
// The 16 bytes of dim d in the panel of `place.token`: 16 tokens in slot order.
fn v_panel(place: TokenAddr, d: u32) -> vec4<u32> {
    return load_vec(place.buffer, place.at + $(V_CODES)u + (place.token / 16u) * $(VD)u + d);
}
#elif V == FP8 && !VIEW
// The byte of dim d, where bytes lie along the dims.
fn v_byte(place: TokenAddr, d: u32) -> u32 {
    let word = load_word(place.buffer, (place.at + $(V_CODES)u + (d >> 4u) * $(PS)u + place.token) * 4u + ((d & 15u) >> 2u));
    return (word >> ((d & 3u) * 8u)) & 0xFFu;
}
#elif V_BITS == 16
// One element of 16-bit V.
fn v_element(place: TokenAddr, d: u32) -> f32 {
#if VIEW
    let word = pool_1[place.at + (d >> 1u)];
#else
    let word = load_word(place.buffer, (place.at + $(V_CODES)u + (d >> 3u) * $(PS)u + place.token) * 4u + ((d & 7u) >> 1u));
#end
    let half = (word >> ((d & 1u) * 16u)) & 0xFFFFu;
#if V == BF16
    return bitcast<f32>(half << 16u);
#else
    return f16_value(half);
#end
}
#end

#if V_INTEGER
// acc + the dot product of 16 unsigned bytes.
fn dot16u(a: vec4<u32>, b: vec4<u32>, acc: u32) -> u32 {
    return dot4U8Packed(a.w, b.w) + (dot4U8Packed(a.z, b.z) + (dot4U8Packed(a.y, b.y) + (dot4U8Packed(a.x, b.x) + acc)));
}
#end

// Loads the words with V's parameters of the lane's token.
#def load_v_params(): place, pages, head, tile, lane, last -> v_word_*
#if V_SCALED
#if VIEW
let of_v = place_of(pages, head, min(tile * 64u + lane, last));
#else
let of_v = place;
#end
#for g in 0..VG
let v_word_$(g) = v_word(of_v, $(g)u);
#end
#end
#end

// V's parameters of the lane's token; past the end they are 0. The integer arithmetic reads scales on its grid.
#def v_params(): v_word_*, lane, token, kv_len -> v_*
#if V_SCALED
#for g in 0..VG
var v_$(g) = v_param(v_word_$(g), lane);
#if V == GROUPS
v_$(g).y = v_$(g).y + 8.0 * v_$(g).x;
#end
#if INTEGER
v_$(g).x = grid_scale(v_$(g).x);
#end
#if V == STEPS
v_$(g).x = v_$(g).x * 0.0625;
#end
v_$(g) = select(vec2<f32>(0.0), v_$(g), token < kv_len);
#if V == GROUPS
shifts[$(64 * g)u + lane] = v_$(g).y;
#end
#end
#end
#end

// Loads the V codes of chunk C of the tile.
#def load_v(C): pages_at, head, kv_len, tile, lane, last, v_tile -> v_raw_*
#if V_BY_WORDS
// Four tokens of four dims at a time, transposed: a word has the tokens of one dim.
let word_$(C) = min(lane + $(T * C)u, $(VD / 4 - 1)u);
#for n in 0..4
#if VIEW
#elif PAGED
let latents_$(C)_$(n) = TokenAddr(v_tile.buffer, v_tile.at, (tile % $(PS / 64)u) * 64u + $(16 * n)u);
#else
// The first token of a panel; of one past the end, the last panel's.
let latents_$(C)_$(n) = place_of(pages_at, head, min(tile * 64u + $(16 * n)u, last) & ~15u);
#end
#for c in 0..4
#for e in 0..4
#let TOKEN = 2 * c + e % 2 + e / 2 * 8
#if VIEW
let w_$(C)_$(n)_$(c)_$(e) = pool_1[view_row(pages_at + 3u, head, min(tile * 64u + $(16 * n + TOKEN)u, last)) + word_$(C)];
#else
let w_$(C)_$(n)_$(c)_$(e) = load_word(latents_$(C)_$(n).buffer, (latents_$(C)_$(n).at + (word_$(C) >> 2u) * $(PS)u + latents_$(C)_$(n).token + $(TOKEN)u) * 4u + (word_$(C) & 3u));
#end
#end
#for h in 0..2
let even_$(C)_$(n)_$(c)_$(h) = (w_$(C)_$(n)_$(c)_$(2 * h) & 0x00FF00FFu) | ((w_$(C)_$(n)_$(c)_$(2 * h + 1) & 0x00FF00FFu) << 8u);
let odd_$(C)_$(n)_$(c)_$(h) = ((w_$(C)_$(n)_$(c)_$(2 * h) >> 8u) & 0x00FF00FFu) | (w_$(C)_$(n)_$(c)_$(2 * h + 1) & 0xFF00FF00u);
#end
#end
#for i in 0..4
let v_raw_$(C)_$(n)_$(i) = vec4<u32>(
#for c in 0..4
#if i == 0
    (even_$(C)_$(n)_$(c)_0 & 0xFFFFu) | (even_$(C)_$(n)_$(c)_1 << 16u),
#elif i == 1
    (odd_$(C)_$(n)_$(c)_0 & 0xFFFFu) | (odd_$(C)_$(n)_$(c)_1 << 16u),
#elif i == 2
    (even_$(C)_$(n)_$(c)_0 >> 16u) | (even_$(C)_$(n)_$(c)_1 & 0xFFFF0000u),
#else
    (odd_$(C)_$(n)_$(c)_0 >> 16u) | (odd_$(C)_$(n)_$(c)_1 & 0xFFFF0000u),
#end
#end
);
#end
#end
#else
#for n in 0..4
#if PAGED
let v_at_$(C)_$(n) = v_tile.at + $(V_CODES)u + ((tile % $(PS / 64)u) * 4u + $(n)u) * $(V_ROWS)u;
let v_buffer_$(C)_$(n) = v_tile.buffer;
#else
let v_place_$(C)_$(n) = place_of(pages_at, head, min(tile * 64u + $(n * 16)u, last));
let v_at_$(C)_$(n) = v_place_$(C)_$(n).at + $(V_CODES)u + (v_place_$(C)_$(n).token / 16u) * $(V_ROWS)u;
let v_buffer_$(C)_$(n) = v_place_$(C)_$(n).buffer;
#end
#for i in 0..RPL
let v_raw_$(C)_$(n)_$(i) = load_vec(v_buffer_$(C)_$(n), v_at_$(C)_$(n) + min(lane + $((C * RPL + i) * T)u, $(V_ROWS - 1)u));
#end
#end
#end
#end

#if V_WINDOW > 0
// Adds the products with residuals to sums of row r, in units of a residual's step.
#def residual_values(C, b): lane, head, kv_len, tile, residuals_at, v_fine, group_* -> sum_*
if $(b * RU)u < v_fine {
#for t in 0..4
    let panel_$(t) = residual_place(residuals_at, head, kv_len, tile, $(16 * t)u);
#for i in 0..RPL
    let r_$(t)_$(i) = load_vec(panel_$(t).buffer, panel_$(t).at + $(V_RESIDUALS)u + (panel_$(t).token / 16u) * $(V_ROWS)u + min(lane + $((C * RPL + i) * T)u, $(V_ROWS - 1)u));
#end
#end
#for r in (b * RU)..(b * RU + RU)
    if $(r)u < v_fine {
#for i in 0..DPL
        var fine_$(i) = 0u;
#for t in 0..4
#if i % 2 == 0
        fine_$(i) = dot16u(weights[(group_$(i) * $(R)u + $(r)u) * 4u + $(t)u], r_$(t)_$(i / 2) & vec4<u32>(0x0F0F0F0Fu), fine_$(i));
#else
        fine_$(i) = dot16u(weights[(group_$(i) * $(R)u + $(r)u) * 4u + $(t)u], r_$(t)_$(i / 2) & vec4<u32>(0xF0F0F0F0u), fine_$(i));
#end
#end
        sum_$(r)_$(i) += fine_$(i) >> $(i % 2 * 4)u;
#end
    }
#end
}
#end
#end

// Chunk C of the tile's value from weights of one byte, folded into O.
#def fold_integer_values(C): lane, num_rows, pages_at, residuals_at, head, kv_len, tile, last, v_tile, v_fine, v_raw_* -> o_*
#if DIM_LANES < T
if lane < $(DIM_LANES)u {
#else
{
#end
#if !V_FIRST
#use load_v(C)
#end
#for n in 0..4
#for i in 0..DPL
#if V_BITS == 8
let v_$(n)_$(i) = v_raw_$(C)_$(n)_$(i) ^ vec4<u32>(0x80808080u);
#elif i % 2 == 0
let v_$(n)_$(i) = v_raw_$(C)_$(n)_$(i / 2) & vec4<u32>(0x0F0F0F0Fu);
#else
// The high nibbles stay in place: codes times 16.
let v_$(n)_$(i) = v_raw_$(C)_$(n)_$(i / 2) & vec4<u32>(0xF0F0F0F0u);
#end
#end
#end
#for i in 0..DPL
#if VG == 1
let group_$(i) = 0u;
#else
let group_$(i) = min(dim_of(lane, $(C * DPL + i)u), $(VD - 1)u) / $(V_GROUP_DIMS)u;
#end
#end
#for b in 0..(R / RU)
if $(b * RU)u < num_rows {
#for r in (b * RU)..(b * RU + RU)
#for i in 0..DPL
    var sum_$(r)_$(i) = 0u;
#end
#for t in 0..4
    {
#if VG == 1
        let bytes = weights[$(r * 4 + t)];
#end
#for i in 0..DPL
#if VG == 1
        sum_$(r)_$(i) = dot16u(bytes, v_$(t)_$(i), sum_$(r)_$(i));
#else
        sum_$(r)_$(i) = dot16u(weights[(group_$(i) * $(R)u + $(r)u) * 4u + $(t)u], v_$(t)_$(i), sum_$(r)_$(i));
#end
#end
    }
#end
#if V == STEPS
#for i in 0..DPL
    sum_$(r)_$(i) <<= $(i % 2 == 0 ? 4 : 0)u;
#end
#end
#end
#if V_WINDOW > 0
#use residual_values(C, b)
#end
#for r in (b * RU)..(b * RU + RU)
    {
#for i in 0..(VG == 1 ? 1 : DPL)
        let with_$(i) = folds[group_$(i) * $(R)u + $(r)u];
#end
        if bitcast<f32>(with_0.y) >= 0.0 {
#for i in 0..DPL
#let w = VG == 1 ? 0 : i
            {
                let sum_of_weights = bitcast<i32>(with_$(w).w);
#if V == STEPS
                let total = bitcast<i32>(2u * sum_$(r)_$(i)) - select(240, 255, $(r)u < v_fine) * sum_of_weights;
#else
                let total = bitcast<i32>(sum_$(r)_$(i) >> $(V_BITS == 4 && i % 2 == 1 ? 4 : 0)u) - $(V_BITS == 8 ? 128 : 8) * sum_of_weights;
#end
#if V == GROUPS
                let value = f32(total) * bitcast<f32>(with_$(w).z) + shift_term[group_$(i) * $(R)u + $(r)u];
#else
                let value = f32(total) * bitcast<f32>(with_$(w).z);
#end
                o_$(r)_$(C * DPL + i) = ftz(o_$(r)_$(C * DPL + i) * bitcast<f32>(with_$(w).x)) + value * bitcast<f32>(with_$(w).y);
            }
#end
        }
    }
#end
}
#end
}
#end

// Chunk C of the tile's value in f32, folded into O.
#def fold_float_values(C): lane, pages_at, head, tile, last -> o_*
#for i in 0..DPL
let dim_$(i) = min(dim_of(lane, $(C * DPL + i)u), $(VD - 1)u);
#for r in 0..R
var value_$(r)_$(i) = 0.0;
#end
#end
for (var quad = 0u; quad < 16u; quad++) {
    // Tokens of a slot quad: 2c, 2c + 1, 2c + 8, 2c + 9 of 16; unwritten ones may hold NaN.
    let first = tile * 64u + (quad >> 2u) * 16u + 2u * (quad & 3u);
    let unwritten = vec4<u32>(first, first + 1u, first + 8u, first + 9u) > vec4<u32>(last);
#if V_BITS == 16 || VIEW || LATENTS
    let place_0 = place_of(pages_at, head, min(first, last));
    let place_1 = place_of(pages_at, head, min(first + 1u, last));
    let place_2 = place_of(pages_at, head, min(first + 8u, last));
    let place_3 = place_of(pages_at, head, min(first + 9u, last));
#else
    let place = place_of(pages_at, head, min(first, last));
#end
#for i in 0..DPL
#if V_BITS == 16
    let code_$(i) = vec4<f32>(v_element(place_0, dim_$(i)), v_element(place_1, dim_$(i)), v_element(place_2, dim_$(i)), v_element(place_3, dim_$(i)));
#elif VIEW || LATENTS
    let code_$(i) = fp8_values(v_byte(place_0, dim_$(i)) | (v_byte(place_1, dim_$(i)) << 8u) | (v_byte(place_2, dim_$(i)) << 16u) | (v_byte(place_3, dim_$(i)) << 24u));
#else
    let code_$(i) = fp8_values(v_panel(place, dim_$(i))[quad & 3u]);
#end
    let v_$(i) = select(code_$(i), vec4<f32>(0.0), unwritten);
#end
#for r in 0..R
    {
        let at = $(r * 64)u + quad * 4u;
        let p = vec4<f32>(weights_f32[at], weights_f32[at + 1u], weights_f32[at + 2u], weights_f32[at + 3u]);
#for i in 0..DPL
        value_$(r)_$(i) += dot(p, v_$(i));
#end
    }
#end
}
#for r in 0..R
if fold_beta[$(r)] >= 0.0 {
#for i in 0..DPL
    {
        o_$(r)_$(C * DPL + i) = ftz(o_$(r)_$(C * DPL + i) * fold_alpha[$(r)]) + value_$(r)_$(i) * fold_beta[$(r)];
    }
#end
}
#end
#end
