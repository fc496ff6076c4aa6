// load_params.wgsl: asks for both parameters of tile `load_at`. Included by load.wgsl and matrix_load.wgsl.
#if V_SCALED
#for j in 0..2
let v_place_$(j) = v_place(pages_at, head, kv_len, load_at, mine + $(8 * j)u);
#for g in 0..VG
v_word_$(g)_$(j) = v_word(v_place_$(j), $(g)u);
#end
#end
#end
#if INTEGER
#if K == CHANNEL
if load_at / $(PS / 64)u != kv_len / $(PS)u {
#else
{
#end
#for j in 0..2
    let place_$(j) = k_place(pages_at, tail_page, head, kv_len, load_at, mine + $(8 * j)u);
#if K == TOKEN || K == G32 || K == GROUPS
#for g in 0..KG
    k_word_$(g)_$(j) = k_word(place_$(j), $(g)u);
#end
#end
#end
#if K == CHANNEL
#for n in 0..((UNITS * 4 + T - 1) / T)
    channel_raw_$(n) = load_vec(place_0.buffer, place_0.at + $(K_PARAMS / 4)u + min(tid + $(T * n)u, $(UNITS * 4 - 1)u));
#end
#end
}
#end
