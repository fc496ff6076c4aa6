// score_scale.wgsl: row $(r)'s score of the lane's token, from its products with whole dims. Included by tile.wgsl.
#for g in 0..SGROUPS
#if K == TOKEN
s_$(r) = f32(dot_$(r)_$(g)) * k_scale_0;
#elif K == TENSOR
s_$(r) = f32(dot_$(r)_$(g));
#elif K == G32
#if g == 0
s_$(r) = product(f32(dot_$(r)_$(g)), k_scale_$(g));
#else
s_$(r) = s_$(r) + product(f32(dot_$(r)_$(g)), k_scale_$(g));
#end
#elif K == GROUPS
{
    let sum = posted_sum($(QUERY_SUM + r * KG + g)u);
    let term = product(f32(dot_$(r)_$(g) - 8 * sum), k_param_$(g).x);
#if g == 0
    s_$(r) = term + product(f32(sum), k_param_$(g).y);
#else
    s_$(r) = (s_$(r) + term) + product(f32(sum), k_param_$(g).y);
#end
}
#else
{
    let shifts = product(f32(posted_sum($(SHIFT_SUM + r)u)), row_shift[$(r)]);  // 0 of an open page
    s_$(r) = (f32(dot_$(r)_0 - code_zero * posted_sum($(QUERY_SUM + r)u)) * open_scale) * row_unit[$(r)] + shifts;
}
#end
#end
#if K != CHANNEL
s_$(r) = s_$(r) * row_unit[$(r)];
#end
