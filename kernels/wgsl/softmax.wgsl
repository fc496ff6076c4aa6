// softmax.wgsl: the weights of a tile (docs/arithmetic.md, section 5). A lane has the weights of its token, one for each row.

// The weights of all rows in f32, their sums and the largest of them times V's scales in the slots of reduce.wgsl.
#def softmax_tile(): tile, num_rows, lane, slot, score_*, ties, v_* -> p_*
workgroupBarrier();
#for r in 0..R
var p_$(r) = 0.0;
#end
#for b in 0..(R / RU)
if $(b * RU)u < num_rows {
#for r in (b * RU)..(b * RU + RU)
    {
#if INTEGER
        // A token that is not seen has the least weight, which adds to no sum.
#if BASED
        let top = bitcast<f32>(bits_of_key(posted($(ROW_MAX + r)u)));
        let point = select(LEAST_POINT, based_point(score_$(r), row_step[$(r)], base_of(tile, $(r)u), top), score_$(r) > NONE);
#else
#if TIES
        let step = bitcast<i32>(ties << $(30 - 2 * r)u) >> 30u;
#else
        let step = 0;
#end
        let point = weight_point(score_$(r), step, posted($(ROW_MAX + r)u));
#end
        p_$(r) = point_value(point);
        let units = f16_units(point, p_$(r));
        post_sum($(ROW_SUM + r)u, units);
#else
        let row_max = bitcast<f32>(bits_of_key(posted($(ROW_MAX + r)u)));
        let weight = exp2f(max(score_$(r) - row_max, -125.0));
        p_$(r) = select(0.0, weight, score_$(r) > NONE);
        post_sum($(ROW_SUM + r)u, weight_units(p_$(r)));
#end
#if V_INTEGER
#for g in 0..VG
#if V_SCALED
        post_max($(LARGEST + g * R + r)u, bitcast<u32>(p_$(r) * v_$(g).x));
#else
        post_max($(LARGEST + g * R + r)u, bitcast<u32>(p_$(r)));
#end
#end
#if V == GROUPS && INTEGER
        scratch[$(r * RS)u + lane] = bitcast<u32>(f32(units) * exp2i(-24));
#elif V == GROUPS
        scratch[$(r * RS)u + lane] = bitcast<u32>(p_$(r));
#end
#else
        weights_f32[$(r * 64)u + slot] = p_$(r);
#end
    }
#end
}
#end
#end

// The tile's weights as bytes, those of four rows in a word, and their sums, of two rows in a slot.
#def weigh_tile(): theta, slot, p_*, v_* ->
workgroupBarrier();
#for g in 0..VG
#for quad in 0..QUADS
{
    var word = 0u;
#for r in (4 * quad)..(4 * quad + 4 < R ? 4 * quad + 4 : R)
    {
#if V_SCALED
        let x = p_$(r) * v_$(g).x;
#else
        let x = p_$(r);
#end
        let byte = weight_byte(x, weight_step_of[$(g * R + r)].y, theta);
#if r % 4 == 0
        word = byte >> 8u;
#else
        word |= byte << $(r % 4 * 8 - 8)u;
#end
    }
#end
    post_sum($(WEIGHTS + g * PAIRS_OF_ROWS + 2 * quad)u, bitcast<i32>((word & 0xFFu) | ((word & 0xFF00u) << 8u)));
#if 4 * quad + 2 < R
    post_sum($(WEIGHTS + g * PAIRS_OF_ROWS + 2 * quad + 1)u, bitcast<i32>(((word >> 16u) & 0xFFu) | ((word >> 8u) & 0xFF0000u)));
#end
    weight_bytes[$((g * QUADS + quad) * 80)u + slot + (slot >> 4u) * 4u] = word;
}
#end
#end
#end

// Transposes the bytes: a vec4 holds 16 tokens of one row in slot order.
#def pack_weights(): lane ->
workgroupBarrier();
if lane < $(VG * QUADS * 4)u {
#for c in 0..4
    let a_$(c) = weight_bytes[20u * lane + $(4 * c)u];
    let b_$(c) = weight_bytes[20u * lane + $(4 * c + 1)u];
    let c_$(c) = weight_bytes[20u * lane + $(4 * c + 2)u];
    let d_$(c) = weight_bytes[20u * lane + $(4 * c + 3)u];
    let even_ab_$(c) = (a_$(c) & 0x00FF00FFu) | ((b_$(c) & 0x00FF00FFu) << 8u);
    let even_cd_$(c) = (c_$(c) & 0x00FF00FFu) | ((d_$(c) & 0x00FF00FFu) << 8u);
    let odd_ab_$(c) = ((a_$(c) >> 8u) & 0x00FF00FFu) | (b_$(c) & 0xFF00FF00u);
    let odd_cd_$(c) = ((c_$(c) >> 8u) & 0x00FF00FFu) | (d_$(c) & 0xFF00FF00u);
#end
    // The lane's group and four rows, and its 16 tokens.
    let group = lane >> 2u;
    let to = ((group / $(QUADS)u) * $(R)u + (group % $(QUADS)u) * 4u) * 4u + (lane & 3u);
#for r in 0..(R < 4 ? R : 4)
    weights[to + $(4 * r)u] = vec4<u32>(
#for c in 0..4
#if r == 0
        (even_ab_$(c) & 0xFFFFu) | (even_cd_$(c) << 16u),
#elif r == 1
        (odd_ab_$(c) & 0xFFFFu) | (odd_cd_$(c) << 16u),
#elif r == 2
        (even_ab_$(c) >> 16u) | (even_cd_$(c) & 0xFFFF0000u),
#else
        (odd_ab_$(c) >> 16u) | (odd_cd_$(c) & 0xFFFF0000u),
#end
#end
    );
#end
}
#end
