// load.wgsl: asks for K's codes and both parameters of tile `load_at`. Included by decode_split.wgsl;
// of an open page of Int4 Channel, whose codes are wider, for V's parameters alone.
{
#include "load_params.wgsl"
#if INTEGER
#if K == CHANNEL
    if load_at / $(PS / 64)u != kv_len / $(PS)u {
#else
    {
#end
#for j in 0..2
        let place_$(j) = k_place(pages_at, tail_page, head, kv_len, load_at, mine + $(8 * j)u);
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
