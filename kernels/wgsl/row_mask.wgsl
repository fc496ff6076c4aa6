// row_mask.wgsl: of row r_$(n) soft cap, ALiBi and masks of the lane's two scores, and the maximum of their ceilings.
// Included by tile.wgsl and matrix_tile.wgsl.
#for j in 0..2
#if SOFTCAP
s_$(n)_$(j) = softcap(s_$(n)_$(j), params.softcap_inner, params.softcap_outer);
#end
#if ALIBI
{
    let position = i32(kv_len) - i32(params.q_len) + i32((row0 + r_$(n)) / params.heads_per_kv);
    s_$(n)_$(j) = s_$(n)_$(j) + product(row_slope[r_$(n)], f32(i32(token_$(j)) - position));
}
#end
#end
#for j in 0..2
let seen_$(n)_$(j) = i32(token_$(j)) >= row_first[r_$(n)] && i32(token_$(j)) < row_end[r_$(n)];
#end
let key_$(n) = max(select(0u, order_key(ceil(s_$(n)_0)), seen_$(n)_0), select(0u, order_key(ceil(s_$(n)_1)), seen_$(n)_1));
