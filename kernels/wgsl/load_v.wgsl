// load_v.wgsl: asks for the V codes of chunk $(C) of the tile. Included by tile.wgsl or fold.wgsl.
#for n in 0..4
#if PS >= 64
let v_at_$(C)_$(n) = v_tile.at + $(V_CODES)u + ((tile % $(PS / 64)u) * 4u + $(n)u) * $(V_ROWS)u;
let v_buffer_$(C)_$(n) = v_tile.buffer;
#else
let v_place_$(C)_$(n) = place_of(pages_at, head, min(tile * 64u + $(n * 16)u, last));
let v_at_$(C)_$(n) = v_place_$(C)_$(n).at + $(V_CODES)u + (v_place_$(C)_$(n).token / 16u) * $(V_ROWS)u;
let v_buffer_$(C)_$(n) = v_place_$(C)_$(n).buffer;
#end
#for i in 0..RPL
let v_raw_$(C)_$(n)_$(i) = load_vec(v_buffer_$(C)_$(n), v_at_$(C)_$(n) + min(lane + $((C * RPL + i) * 32)u, $(V_ROWS - 1)u));
#end
#end
