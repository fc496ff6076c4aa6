// score_integer.wgsl: row $(r)'s products with the lane's dims of its token, by both planes of q. Included by tile.wgsl.
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
