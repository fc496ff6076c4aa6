// load.wgsl: asks for K's codes and both parameters of tile `load_at`. Included by decode_split.wgsl;
// of an open page of Int4 Channel, whose codes are wider, for V's parameters alone.
{
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
#for n in 0..((UNITS * 4 + 31) / 32)
        channel_raw_$(n) = load_vec(place_0.buffer, place_0.at + $(K_PARAMS / 4)u + min(lane + $(32 * n)u, $(UNITS * 4 - 1)u));
#end
#end
#for n in 0..UNITS
#for j in 0..2
#if K_BITS == 8
        k_raw_$(n)_$(j) = k_bytes(place_$(j), $(n)u);
#elif j == 0
        k_raw_$(n)_0 = k_pair(place_0, $(n)u);
#end
#end
#end
    }
#end
}
