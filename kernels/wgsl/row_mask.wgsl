// row_mask.wgsl: of row $(r) soft cap, ALiBi and mask of the lane's score. Included by tile.wgsl.
#if SOFTCAP
s_$(r) = softcap(s_$(r), params.softcap_inner, params.softcap_outer);
#end
#if ALIBI
{
    let position = i32(kv_len) - i32(params.q_len) + i32((row0 + $(r)u) / params.heads_per_kv);
    s_$(r) = s_$(r) + product(row_slope[$(r)], f32(i32(token) - position));
}
#end
s_$(r) = select(NONE, s_$(r), token - row_sees[$(r)].x < row_sees[$(r)].y);
