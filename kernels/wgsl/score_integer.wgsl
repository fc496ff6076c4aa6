// score_integer.wgsl: row r's scores of the lane's two tokens, by both planes of q. Included by tile.wgsl.
var s_0 = 0.0;
var s_1 = 0.0;
#let SGROUPS = K == G32 || K == GROUPS ? KG : 1
#for g in 0..SGROUPS
{
#for j in 0..2
    var hi_$(j) = 0;
    var lo_$(j) = 0;
#end
#for u in (g * UNITS / SGROUPS)..((g + 1) * UNITS / SGROUPS)
    {
        let hi = planes[r * $(2 * UNITS)u + $(2 * u)u];
        let lo = planes[r * $(2 * UNITS)u + $(2 * u + 1)u];
#for j in 0..2
        hi_$(j) = dot16(hi, k_$(u)_$(j), hi_$(j));
        lo_$(j) = dot16(lo, k_$(u)_$(j), lo_$(j));
#end
    }
#end
#for j in 0..2
    let dot_$(j) = (hi_$(j) << 7u) + lo_$(j);
#if K == TOKEN
    s_$(j) = f32(dot_$(j)) * k_scale_0_$(j);
#elif K == TENSOR
    s_$(j) = f32(dot_$(j));
#elif K == G32
#if g == 0
    s_$(j) = f32(dot_$(j)) * k_scale_$(g)_$(j);
#else
    s_$(j) = s_$(j) + product(f32(dot_$(j)), k_scale_$(g)_$(j));
#end
#elif K == GROUPS
    {
        let sum = group_sum[r * $(KG)u + $(g)u];
        let term = product(f32(dot_$(j) - 8 * sum), k_param_$(g)_$(j).x);
#if g == 0
        s_$(j) = term + product(f32(sum), k_param_$(g)_$(j).y);
#else
        s_$(j) = (s_$(j) + term) + product(f32(sum), k_param_$(g)_$(j).y);
#end
    }
#else
    s_$(j) = select(f32(dot_$(j) - 8 * row_sum[r]) * row_unit[r] + row_shift[r], (f32(dot_$(j)) * open_scale_$(j)) * row_unit[r], open);
#end
#end
}
#end
#if K != CHANNEL
s_0 = s_0 * row_unit[r];
s_1 = s_1 * row_unit[r];
#end
