// load_k.wgsl: asks for the K codes of tile `load_k_at`. Included by decode_split.wgsl; not for open pages of Int4 Channel, whose codes are wider.
{
#for j in 0..2
    let place_$(j) = k_place(pages_at, tail_page, head, kv_len, load_k_at, lane + $(32 * j)u);
#end
#for n in 0..K_LOADS
#for j in 0..2
#if K_BITS == 8
    k_raw_$(n)_$(j) = k_bytes(place_$(j), $(n)u);
#elif D % 32 != 0 && 2 * n + 1 == UNITS
    k_raw_$(n)_$(j) = k_half_panel(place_$(j));
#else
    k_raw_$(n)_$(j) = load_vec(place_$(j).buffer, place_$(j).at + $(n * PS)u + place_$(j).token);
#end
#end
#end
}
