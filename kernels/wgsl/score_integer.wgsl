// score_integer.wgsl: row r_$(n)'s scores of the lane's two tokens, by both planes of q. Included by tile.wgsl and matrix_tile.wgsl.
var s_$(n)_0 = 0.0;
var s_$(n)_1 = 0.0;
#if MATRIX
#for j in 0..2
{
    let total = score_total(r_$(n), mine + $(8 * j)u);
#if K == CHANNEL
    let sum = row_sum[r_$(n)];
    s_$(n)_$(j) = select(f32(total - 8 * sum) * row_unit[r_$(n)] + row_shift[r_$(n)], (f32(total - 128 * sum) * open_scale_$(j)) * row_unit[r_$(n)], open);
#else
    let sum = group_sum[r_$(n)];
#if K == TOKEN
    s_$(n)_$(j) = f32(total - 128 * sum) * k_scale_0_$(j);
#elif K == TENSOR
    s_$(n)_$(j) = f32(total - 128 * sum);
#else
    s_$(n)_$(j) = product(f32(total - 8 * sum), k_param_0_$(j).x) + product(f32(sum), k_param_0_$(j).y);
#end
#end
}
#end
#else
#let SGROUPS = K == G32 || K == GROUPS ? KG : 1
#for g in 0..SGROUPS
{
#for j in 0..2
    var hi_$(j) = 0;
    var lo_$(j) = 0;
#end
#for u in (g * UNITS / SGROUPS)..((g + 1) * UNITS / SGROUPS)
    {
        let hi = planes[r_$(n) * $(2 * UNITS)u + $(2 * u)u];
        let lo = planes[r_$(n) * $(2 * UNITS)u + $(2 * u + 1)u];
#for j in 0..2
        hi_$(j) = dot16(hi, k_$(u)_$(j), hi_$(j));
        lo_$(j) = dot16(lo, k_$(u)_$(j), lo_$(j));
#end
    }
#end
#for j in 0..2
#if K_BITS == 4 && K != CHANNEL && j == 1
    // Already centred, and 16 times as large.
    let dot_1 = ((hi_1 << 7u) + lo_1) >> 4u;
#else
    let dot_$(j) = (hi_$(j) << 7u) + lo_$(j);
#end
#if K == TOKEN
    s_$(n)_$(j) = f32(dot_$(j)) * k_scale_0_$(j);
#elif K == TENSOR
    s_$(n)_$(j) = f32(dot_$(j));
#elif K == G32
#if g == 0
    s_$(n)_$(j) = product(f32(dot_$(j)), k_scale_$(g)_$(j));
#else
    s_$(n)_$(j) = s_$(n)_$(j) + product(f32(dot_$(j)), k_scale_$(g)_$(j));
#end
#elif K == GROUPS
    {
        let sum = group_sum[r_$(n) * $(KG)u + $(g)u];
        let term = product(f32(dot_$(j) - $(j == 0 ? 8 : 0) * sum), k_param_$(g)_$(j).x);
#if g == 0
        s_$(n)_$(j) = term + product(f32(sum), k_param_$(g)_$(j).y);
#else
        s_$(n)_$(j) = (s_$(n)_$(j) + term) + product(f32(sum), k_param_$(g)_$(j).y);
#end
    }
#else
#if j == 0
    let sealed_0 = dot_0 - 8 * row_sum[r_$(n)];
#else
    let sealed_1 = dot_1 >> 4u;
#end
    s_$(n)_$(j) = select(f32(sealed_$(j)) * row_unit[r_$(n)] + row_shift[r_$(n)], (f32(dot_$(j)) * open_scale_$(j)) * row_unit[r_$(n)], open);
#end
#end
}
#end
#end
#if K != CHANNEL
s_$(n)_0 = s_$(n)_0 * row_unit[r_$(n)];
s_$(n)_1 = s_$(n)_1 * row_unit[r_$(n)];
#end
