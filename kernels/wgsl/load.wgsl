// load.wgsl: the lane's K codes and both parameters of the tile; of an open page of Int4 Channel, whose codes are wider, V's parameters
// alone. Included by tile.wgsl.
#if V_SCALED
let of_v = v_place(pages, head, kv_len, tile, lane);
#for g in 0..VG
let v_word_$(g) = v_word(of_v, $(g)u);
#end
#end
#if INTEGER
#if K == TOKEN || K == G32 || K == GROUPS
#for g in 0..KG
let k_word_$(g) = k_word(place, $(g)u);
#end
#end
let place_0 = place;
#if HALVES
let place_1 = k_place(pages, tail_page, head, kv_len, tile, lane ^ 32u);
let first_unit = (lane >> 5u) * $(HALF)u;
#else
let first_unit = 0u;
#end
#for j in 0..TOKENS
#for n in 0..HALF
#if K_BITS == 8
let k_$(j)_$(n) = k_bytes(place_$(j), first_unit + $(n)u);
#elif K != CHANNEL
let k_$(j)_$(n) = nibbles_of(place_$(j), k_pair(place_$(j), first_unit + $(n)u));
#else
var k_$(j)_$(n): vec4<u32>;
#end
#end
#end
#if K == CHANNEL
if open {
#for j in 0..TOKENS
#for n in 0..HALF
    k_$(j)_$(n) = k_bytes(place_$(j), first_unit + $(n)u);
#end
#end
} else {
#for j in 0..TOKENS
#for n in 0..HALF
    k_$(j)_$(n) = nibbles_of(place_$(j), k_pair(place_$(j), first_unit + $(n)u));
#end
#end
}
#end
#end
