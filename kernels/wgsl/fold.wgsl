// fold.wgsl: group after group of V, the four tiles' values, folded in order into the segment's state (docs/arithmetic.md, sections 4 and 5).
// Included by decode_split.wgsl behind tile.wgsl.

#for g in 0..VG
#if g > 0
workgroupBarrier();
#end
#if INTEGER
#if V_SCALED
#if SG != 32
let v_top_$(g) = posted(slot + $(2 * R + g * (2 + 3 * R))u);
#end
let f_$(g) = select(15 - exponent(bitcast<f32>(v_top_$(g))), 0, v_top_$(g) == 0u);
let scale_$(g)_0 = v_$(g)_0.x * exp2i(f_$(g));
let scale_$(g)_1 = v_$(g)_1.x * exp2i(f_$(g));
#else
// A per-tensor scale stays outside: v_scale = 1, so f = 15; unwritten tokens weigh 0 as none sees them.
let f_$(g) = 15;
let scale_$(g)_0 = 32768.0;
let scale_$(g)_1 = 32768.0;
#end
#for r in 0..R
let w_$(g)_$(r)_0 = rhe(product(p_$(r)_0, scale_$(g)_0));
let w_$(g)_$(r)_1 = rhe(product(p_$(r)_1, scale_$(g)_1));
scratch[(team * $(R)u + $(r)u) * 32u + lane] = u32(w_$(g)_$(r)_0) | (u32(w_$(g)_$(r)_1) << 16u);
#if SG == 32
let sum_$(g)_$(r) = subgroupAdd(w_$(g)_$(r)_0 + w_$(g)_$(r)_1);
#else
post_sum(sg_lane, slot + $(2 * R + g * (2 + 3 * R) + 2 + r)u, w_$(g)_$(r)_0 + w_$(g)_$(r)_1);
#end
#end
#if V == GROUPS
#if SG != 32
let v_far_$(g) = posted(slot + $(2 * R + g * (2 + 3 * R) + 1)u);
#end
let h_$(g) = select(14 - exponent(bitcast<f32>(v_far_$(g))), 0, v_far_$(g) == 0u);
let shift_$(g)_0 = rhe(v_$(g)_0.y * exp2i(h_$(g)));
let shift_$(g)_1 = rhe(v_$(g)_1.y * exp2i(h_$(g)));
#for r in 0..R
let p15_$(g)_$(r)_0 = bitcast<i32>(p_$(r)_0 + 256.0) - 0x43800000;
let p15_$(g)_$(r)_1 = bitcast<i32>(p_$(r)_1 + 256.0) - 0x43800000;
let z_hi_$(g)_$(r) = p15_$(g)_$(r)_0 * (shift_$(g)_0 >> 8u) + p15_$(g)_$(r)_1 * (shift_$(g)_1 >> 8u);
let z_lo_$(g)_$(r) = p15_$(g)_$(r)_0 * (shift_$(g)_0 & 255) + p15_$(g)_$(r)_1 * (shift_$(g)_1 & 255);
#if SG == 32
let z_$(g)_$(r) = (f32(subgroupAdd(z_hi_$(g)_$(r))) * 256.0 + f32(subgroupAdd(z_lo_$(g)_$(r)))) * exp2i(-15 - h_$(g));
#else
post_sum(sg_lane, slot + $(2 * R + g * (2 + 3 * R) + 2 + R + r)u, z_hi_$(g)_$(r));
post_sum(sg_lane, slot + $(2 * R + g * (2 + 3 * R) + 2 + 2 * R + r)u, z_lo_$(g)_$(r));
#end
#end
#end
workgroupBarrier();
// Weights as bytes: a word has the four tokens of one word of V's slot order.
for (var task = lane; task < $(R * 8)u; task += 32u) {
    let r = task >> 3u;
    let half = (task >> 2u) & 1u;
    let c = task & 3u;
    let source = (team * $(R)u + r) * 32u + half * 16u + 2u * c;
    let a = vec4<u32>(scratch[source], scratch[source + 1u], scratch[source + 8u], scratch[source + 9u]);
    let near = (a.xyzw & vec4<u32>(0xFFu)) << vec4<u32>(0u, 8u, 16u, 24u);
    let near_hi = ((a >> vec4<u32>(8u)) & vec4<u32>(0xFFu)) << vec4<u32>(0u, 8u, 16u, 24u);
    let far = ((a >> vec4<u32>(16u)) & vec4<u32>(0xFFu)) << vec4<u32>(0u, 8u, 16u, 24u);
    let far_hi = (a >> vec4<u32>(24u)) << vec4<u32>(0u, 8u, 16u, 24u);
    let to = (team * $(R)u + r) * 8u + half * 2u;
    weights[to][c] = near_hi.x | near_hi.y | near_hi.z | near_hi.w;
    weights[to + 1u][c] = near.x | near.y | near.z | near.w;
    weights[to + 4u][c] = far_hi.x | far_hi.y | far_hi.z | far_hi.w;
    weights[to + 5u][c] = far.x | far.y | far.z | far.w;
}
workgroupBarrier();
#if SG != 32
#for r in 0..R
let sum_$(g)_$(r) = posted_sum(slot + $(2 * R + g * (2 + 3 * R) + 2 + r)u);
#if V == GROUPS
let z_$(g)_$(r) = (f32(posted_sum(slot + $(2 * R + g * (2 + 3 * R) + 2 + R + r)u)) * 256.0 + f32(posted_sum(slot + $(2 * R + g * (2 + 3 * R) + 2 + 2 * R + r)u))) * exp2i(-15 - h_$(g));
#end
#end
#end
#else
{
    let at = team * 64u + (lane >> 4u) * 16u + 4u * ((lane & 7u) >> 1u) + 2u * ((lane >> 3u) & 1u) + (lane & 1u);
#if V_SCALED
    v_params[at] = v_$(g)_0;
    v_params[at + 32u] = v_$(g)_1;
#else
    v_params[at] = select(vec2<f32>(0.0), vec2<f32>(1.0, 0.0), token_0 < kv_len);
    v_params[at + 32u] = select(vec2<f32>(0.0), vec2<f32>(1.0, 0.0), token_1 < kv_len);
#end
#if g == 0
    let slot_word = at & 63u;
#for r in 0..R
    weights[(team * $(R)u + $(r)u) * 16u + (slot_word >> 2u)][slot_word & 3u] = bitcast<u32>(p_$(r)_0);
    weights[(team * $(R)u + $(r)u) * 16u + 8u + (slot_word >> 2u)][slot_word & 3u] = bitcast<u32>(p_$(r)_1);
#end
#end
}
workgroupBarrier();
#end

#for c in 0..CH
// The tile's value over dims $(g * GD + c * CD) + lane + 32 i.
#for i in 0..DPL
let dim_$(g)_$(c)_$(i) = min(lane + $(32 * i + c * CD)u, $(GD - 1)u) + $(g * GD)u;
#for r in 0..R
#if INTEGER
var acc_$(g)_$(c)_$(r)_$(i) = 0u;
#else
var value_$(g)_$(c)_$(r)_$(i) = 0.0;
#end
#end
#end
#if INTEGER
for (var panel = 0u; panel < $(V_BITS == 8 ? 4 : 2)u; panel += $(VU)u) {
#for n in 0..VU
    let place_$(n) = place_of(pages_at, head, min(tile * 64u + (panel + $(n)u) * $(V_BITS == 8 ? 16 : 32)u, last));
#for i in 0..DPL
    let panel_$(n)_$(i) = v_panel(place_$(n), dim_$(g)_$(c)_$(i));
#end
#end
#for n in 0..VU
#for half in 0..(V_BITS == 8 ? 1 : 2)
    {
#for i in 0..DPL
#if V_BITS == 8
        let v_$(i) = panel_$(n)_$(i) ^ vec4<u32>(0x80808080u);
#else
        let v_$(i) = (panel_$(n)_$(i) >> vec4<u32>($(4 * half)u)) & vec4<u32>(0x0F0F0F0Fu);
#end
#end
#for r in 0..R
        {
            let at = (team * $(R)u + $(r)u) * 8u + ((panel + $(n)u) * $(V_BITS == 8 ? 1 : 2)u + $(half)u) * 2u;
            let hi = weights[at];
            let lo = weights[at + 1u];
#for i in 0..DPL
            acc_$(g)_$(c)_$(r)_$(i) = dot16u(lo, v_$(i), acc_$(g)_$(c)_$(r)_$(i) + (dot16u(hi, v_$(i), 0u) << 8u));
#end
        }
#end
    }
#end
#end
}
#for r in 0..R
#for i in 0..DPL
#if V == GROUPS
let value_$(g)_$(c)_$(r)_$(i) = f32(bitcast<i32>(acc_$(g)_$(c)_$(r)_$(i)) - 8 * sum_$(g)_$(r)) * exp2i(-f_$(g)) + z_$(g)_$(r);
#else
let value_$(g)_$(c)_$(r)_$(i) = f32(bitcast<i32>(acc_$(g)_$(c)_$(r)_$(i)) - 128 * sum_$(g)_$(r)) * exp2i(-f_$(g));
#end
#end
#end
#else
for (var quad = 0u; quad < 16u; quad++) {
    // Tokens of a slot quad: 2c, 2c + 1, 2c + 8, 2c + 9 of 16.
    let first = tile * 64u + (quad >> 2u) * 16u + 2u * (quad & 3u);
    let param_0 = v_params[team * 64u + quad * 4u];
    let param_1 = v_params[team * 64u + quad * 4u + 1u];
    let param_2 = v_params[team * 64u + quad * 4u + 2u];
    let param_3 = v_params[team * 64u + quad * 4u + 3u];
    let scale = vec4<f32>(param_0.x, param_1.x, param_2.x, param_3.x);
    let shift = vec4<f32>(param_0.y, param_1.y, param_2.y, param_3.y);
#if V_BITS == 16
    let place_0 = place_of(pages_at, head, min(first, last));
    let place_1 = place_of(pages_at, head, min(first + 1u, last));
    let place_2 = place_of(pages_at, head, min(first + 8u, last));
    let place_3 = place_of(pages_at, head, min(first + 9u, last));
#else
    let place = place_of(pages_at, head, min(first, last));
#end
#for i in 0..DPL
#if V_BITS == 16
    let code_$(i) = vec4<f32>(v_element(place_0, dim_$(g)_$(c)_$(i)), v_element(place_1, dim_$(g)_$(c)_$(i)), v_element(place_2, dim_$(g)_$(c)_$(i)), v_element(place_3, dim_$(g)_$(c)_$(i)));
    let v_$(i) = select(code_$(i), vec4<f32>(0.0), scale == vec4<f32>(0.0));
#else
    let word_$(i) = v_panel(place, dim_$(g)_$(c)_$(i))[quad & 3u];
#if V == FP8
    let v_$(i) = select(fp8_values(word_$(i)), vec4<f32>(0.0), scale == vec4<f32>(0.0));
#elif V_BITS == 8
    let v_$(i) = int8_values(word_$(i)) * scale;
#else
    let v_$(i) = int8_values((word_$(i) >> (((quad >> 2u) & 1u) * 4u)) & 0x0F0F0F0Fu) * scale + shift;
#end
#end
#end
#for r in 0..R
    {
        let p = bitcast<vec4<f32>>(weights[(team * $(R)u + $(r)u) * 16u + quad]);
#for i in 0..DPL
        value_$(g)_$(c)_$(r)_$(i) += dot(p, v_$(i));
#end
    }
#end
}
#end

#for rc in 0..(R / TROWS)
workgroupBarrier();
#for rr in 0..TROWS
#for i in 0..DPL
scratch[(team * $(TROWS)u + $(rr)u) * $(CD)u + $(32 * i)u + lane] = bitcast<u32>(value_$(g)_$(c)_$(rc * TROWS + rr)_$(i));
#end
#end
#if g == 0 && c == 0 && rc == 0
if tid < $(R)u {
#for k in 0..4
    {
        let tile_top = tile_m[$(k * R)u + tid];
#if SG == 32
        let tile_sum = tile_l[$(k * R)u + tid];
#else
        let tile_sum = posted_sum($(k * SLOTS + R)u + tid);
#end
        if tile_top == NONE {
            fold_beta[$(k * R)u + tid] = -1.0;
        } else {
            let top = max(m, tile_top);
            let alpha = pow2(top - m);
            let beta = pow2(top - tile_top);
            l = l * alpha + (f32(tile_sum) * exp2i(-22)) * beta;
            m = top;
            fold_alpha[$(k * R)u + tid] = alpha;
            fold_beta[$(k * R)u + tid] = beta;
        }
    }
#end
}
#end
workgroupBarrier();
#for n in 0..CHUNK_ELEMS
{
    let e = min(tid + $(128 * n)u, $(TROWS * CD - 1)u);
    let row = $(rc * TROWS)u + e / $(CD)u;
    var x = o_$(g)_$(c)_$(rc * CHUNK_ELEMS + n);
#for k in 0..4
    {
        let beta = fold_beta[$(k * R)u + row];
        let folded = ftz(x * fold_alpha[$(k * R)u + row]) + bitcast<f32>(scratch[$(k * TROWS * CD)u + e]) * beta;
        x = select(folded, x, beta < 0.0);
    }
#end
    o_$(g)_$(c)_$(rc * CHUNK_ELEMS + n) = x;
}
#end
#end
#end
#end
