// load_v.wgsl: asks for the V codes of chunk $(C) of the tile. Included by tile.wgsl or fold.wgsl.
#if VIEW
// Four tokens of four dims at a time, transposed: a word has the tokens of one dim.
#for n in 0..4
#for c in 0..4
#for e in 0..4
let w_$(C)_$(n)_$(c)_$(e) = pool_1[view_row(pages_at + 3u, head, min(tile * 64u + $(16 * n + 2 * c + e % 2 + e / 2 * 8)u, last)) + min(lane + $(T * C)u, $(D / 4 - 1)u)];
#end
#for h in 0..2
let even_$(C)_$(n)_$(c)_$(h) = (w_$(C)_$(n)_$(c)_$(2 * h) & 0x00FF00FFu) | ((w_$(C)_$(n)_$(c)_$(2 * h + 1) & 0x00FF00FFu) << 8u);
let odd_$(C)_$(n)_$(c)_$(h) = ((w_$(C)_$(n)_$(c)_$(2 * h) >> 8u) & 0x00FF00FFu) | (w_$(C)_$(n)_$(c)_$(2 * h + 1) & 0xFF00FF00u);
#end
#end
#for i in 0..4
let v_raw_$(C)_$(n)_$(i) = vec4<u32>(
#for c in 0..4
#if i == 0
    (even_$(C)_$(n)_$(c)_0 & 0xFFFFu) | (even_$(C)_$(n)_$(c)_1 << 16u),
#elif i == 1
    (odd_$(C)_$(n)_$(c)_0 & 0xFFFFu) | (odd_$(C)_$(n)_$(c)_1 << 16u),
#elif i == 2
    (even_$(C)_$(n)_$(c)_0 >> 16u) | (even_$(C)_$(n)_$(c)_1 & 0xFFFF0000u),
#else
    (odd_$(C)_$(n)_$(c)_0 >> 16u) | (odd_$(C)_$(n)_$(c)_1 & 0xFFFF0000u),
#end
#end
);
#end
#end
#else
#for n in 0..4
#if PAGED
let v_at_$(C)_$(n) = v_tile.at + $(V_CODES)u + ((tile % $(PS / 64)u) * 4u + $(n)u) * $(V_ROWS)u;
let v_buffer_$(C)_$(n) = v_tile.buffer;
#else
let v_place_$(C)_$(n) = place_of(pages_at, head, min(tile * 64u + $(n * 16)u, last));
let v_at_$(C)_$(n) = v_place_$(C)_$(n).at + $(V_CODES)u + (v_place_$(C)_$(n).token / 16u) * $(V_ROWS)u;
let v_buffer_$(C)_$(n) = v_place_$(C)_$(n).buffer;
#end
#for i in 0..RPL
let v_raw_$(C)_$(n)_$(i) = load_vec(v_buffer_$(C)_$(n), v_at_$(C)_$(n) + min(lane + $((C * RPL + i) * T)u, $(V_ROWS - 1)u));
#end
#end
#end
