// fold.wgsl: the factors by which a tile's value is folded into the state (docs/arithmetic.md, sections 5 and 6).

// Folds m and l, and computes the factors of O. No lane writes the slots of reduce.wgsl in this phase, so they are reset as they are read.
#def fold_maxima(): lane, tile -> m, l
workgroupBarrier();
if lane < $(R)u {
    let key = posted($(ROW_MAX)u + lane);
    let tile_sum = posted_sum($(ROW_SUM)u + lane);
    clear($(ROW_MAX)u + lane);
    clear($(ROW_SUM)u + lane);
    if key == NONE_KEY {
        fold_beta[lane] = -1.0;
    } else {
#if BASED
        let factors = fold_factors(m, based_exponent(bitcast<f32>(bits_of_key(key)), row_step[lane], base_of(tile, lane)));
        let unit = exp2i(-24);
#elif INTEGER
        let factors = fold_factors(m, tile_exponent(key));
        let unit = exp2i(-24);
#else
        let factors = fold_factors(m, bitcast<f32>(bits_of_key(key)));
        let unit = exp2i(-22);
#end
        m = factors.x;
        l = l * factors.y + (f32(tile_sum) * unit) * factors.z;
        fold_alpha[lane] = factors.y;
        fold_beta[lane] = factors.z;
    }
}
#end

#if V_INTEGER
// The steps of the tile's weights for each group of V and row, and what counts them.
#def find_steps(): lane, v_fine ->
if lane < $(VG * R)u {
    let low = select(COARSE_STEP, FINE_STEP, lane % $(R)u < v_fine);
    let step = weight_step(bitcast<f32>(posted($(LARGEST)u + lane)), low);
    weight_step_of[lane] = vec2<f32>(step, step_inverse(step));
    clear($(LARGEST)u + lane);
}
if lane < $(VG * PAIRS_OF_ROWS)u {
    clear($(WEIGHTS)u + lane);
}
#end
#end

#if V_INTEGER
// All that a group's sums of a row are folded with, in one vector: alpha, beta, the step and the sum of weights.
#def join_factors(): lane ->
if lane < $(VG * R)u {
    let group = lane / $(R)u;
    let row = lane % $(R)u;
    let sum = (posted($(WEIGHTS)u + group * $(PAIRS_OF_ROWS)u + (row >> 1u)) >> ((row & 1u) * 16u)) & 0xFFFFu;
    folds[lane] = vec4<u32>(bitcast<u32>(fold_alpha[row]), bitcast<u32>(fold_beta[row]), bitcast<u32>(weight_step_of[lane].x), sum);
}
#end
#end

#if V == GROUPS
// The partial sums of V's shifts: lane 8 r + k has those of row r over the tokens that are k modulo 8.
#def sum_shifts(): lane ->
if lane < $(8 * R)u {
#for j in 0..8
    let p_$(j) = bitcast<f32>(scratch[(lane >> 3u) * $(RS)u + (lane & 7u) + $(8 * j)u]);
#end
#for g in 0..VG
    {
        var z = 0.0;
#for j in 0..8
        z = z + product(p_$(j), shifts[$(64 * g + 8 * j)u + (lane & 7u)]);
#end
        shift_parts[$(8 * R * g)u + lane] = z;
    }
#end
}
#end

#def join_shifts(): lane ->
if lane < $(VG * R)u {
#for k in 0..8
    let z_$(k) = shift_parts[8u * lane + $(k)u];
#end
    shift_term[lane] = ((z_0 + z_1) + (z_2 + z_3)) + ((z_4 + z_5) + (z_6 + z_7));
}
#end
#end

#def fold_tile(): lane, num_rows, pages_at, residuals_at, head, kv_len, tile, last, v_tile, v_fine, theta, slot, p_*, v_* -> m, l, o_*
#use fold_maxima()
#if V_INTEGER
#use find_steps()
#if V == GROUPS
#use sum_shifts()
#end
#use weigh_tile()
#if V == GROUPS
#use join_shifts()
#end
#use pack_weights()
#use join_factors()
#end
workgroupBarrier();
#for C in 0..CH
#if V_INTEGER
#use fold_integer_values(C)
#else
{
#use fold_float_values(C)
}
#end
#end
#end
