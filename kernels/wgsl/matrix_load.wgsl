// matrix_load.wgsl: asks for K's codes and both parameters of tile `load_at`; the subgroup has 16 of its tokens. Included by matrix_split.wgsl.
{
#include "load_params.wgsl"
#if K == CHANNEL
    if load_at / $(PS / 64)u != kv_len / $(PS)u {
#else
    {
#end
#if K_BITS == 8
        let place = k_place(pages_at, tail_page, head, kv_len, load_at, part * 16u + (lane & 15u));
#for n in 0..K_VECS
        k_raw_$(n) = k_bytes(place, min($(2 * n)u + (lane >> 4u), $(UNITS - 1)u));
#end
#else
        let place = k_place(pages_at, tail_page, head, kv_len, load_at, part * 16u + (lane & 7u));
#for n in 0..K_VECS
        k_raw_$(n) = k_pair(place, min($(4 * n)u + (lane >> 3u), $(UNITS - 1)u));
#end
#end
    }
}
