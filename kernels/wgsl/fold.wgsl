// fold.wgsl: the tile's value, folded into the segment's state (docs/arithmetic.md, section 5).

// Folds m and l, and computes the factors of O. No lane writes the slots of reduce.wgsl in this phase, so they are reset as they are read.
#def fold_maxima(): lane, f_*, h_* -> m, l
if lane < $(R)u {
    let row_max = from_order_key(posted($(ROW_MAX)u + lane));
#if INTEGER
    let tile_max = select(row_max - 1.0, NONE, row_max == NONE);
#else
    let tile_max = row_max;
#end
    let tile_sum = posted_sum($(ROW_SUM)u + lane);
    clear($(ROW_MAX)u + lane);
    clear($(ROW_SUM)u + lane);
    if tile_max == NONE {
        fold_beta[lane] = -1.0;
    } else {
        let top = max(m, tile_max);
        let alpha = pow2(top - m);
        let beta = pow2(top - tile_max);
        l = l * alpha + (f32(tile_sum) * exp2i(-22)) * beta;
        m = top;
        fold_alpha[lane] = alpha;
        fold_beta[lane] = beta;
    }
#if INTEGER
#if K == CHANNEL
    clear($(BOUND)u + lane);
    clear($(QUERY_SUM)u + lane);
    clear($(SHIFT_SUM)u + lane);
#end
#for g in 0..VG
#let OF_ROW = GROUPS_AT + g * OF_GROUP + 2
    weight_sum[$(g * R)u + lane] = posted_sum($(OF_ROW)u + lane);
    clear($(OF_ROW)u + lane);
#if V == GROUPS
    shift_term[$(g * R)u + lane] = (f32(posted_sum($(OF_ROW + R)u + lane)) * 256.0 + f32(posted_sum($(OF_ROW + 2 * R)u + lane))) * exp2i(-14 - h_$(g));
    clear($(OF_ROW + R)u + lane);
    clear($(OF_ROW + 2 * R)u + lane);
#end
#end
#end
}
#if INTEGER
if lane == 0u {
#if K == CHANNEL
    clear($(LARGEST_SHIFT)u);
#end
#for g in 0..VG
    clear($(GROUPS_AT + g * OF_GROUP)u);
    clear($(GROUPS_AT + g * OF_GROUP + 1)u);
#if VG > 1
    value_unit[$(g)] = exp2i(-f_$(g));
#end
#end
}
#end
#end

// Packs weights as bytes: a vec4 holds one plane of 16 tokens in slot order, four tokens to a word.
#def pack_weights(): lane, num_weights ->
for (var vector = lane; vector < num_weights; vector += $(T)u) {
    let row = vector >> 3u;            // of a group
#if VG == 1
    let source = row * $(RS)u + ((vector >> 1u) & 3u) * 17u;
    let down = (~vector & 1u) * 8u;
#else
    let group = row / $(R)u;
    let source = ((group >> 1u) * $(R)u + row % $(R)u) * $(RS)u + ((vector >> 1u) & 3u) * 17u;
    let down = (~vector & 1u) * 8u + (group & 1u) * 16u;
#end
#for c in 0..4
    let word_$(c) = ((scratch[source + $(2 * c)u] >> down) & 255u) | (((scratch[source + $(2 * c + 1)u] >> down) & 255u) << 8u)
        | (((scratch[source + $(2 * c + 8)u] >> down) & 255u) << 16u) | ((scratch[source + $(2 * c + 9)u] >> down) << 24u);
#end
    weights[vector] = vec4<u32>(word_0, word_1, word_2, word_3);
}
#end

#def fold_tile(): lane, num_rows, num_weights, pages_at, head, kv_len, tile, last, v_tile, v_raw_*, f_*, h_* -> m, l, o_*
workgroupBarrier();
#use fold_maxima()
#if INTEGER
#use pack_weights()
#end
workgroupBarrier();
#for C in 0..CH
#if INTEGER
#use fold_integer_values(C)
#else
{
#use fold_float_values(C)
}
#end
#end
#end
