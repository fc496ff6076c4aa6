// load_v.wgsl: asks for the V codes of chunk $(C) of the tile. Included by tile.wgsl or fold.wgsl.
#for n in 0..V_LOADS
#if PS >= 64
let v_at_$(C)_$(n) = v_tile.at + $(V_CODES)u + ((tile % $(PS / 64)u) * $(V_LOADS)u + $(n)u) * $(D)u;
let v_buffer_$(C)_$(n) = v_tile.buffer;
#else
let v_place_$(C)_$(n) = place_of(pages_at, head, min(tile * 64u + $(n * 64 / V_LOADS)u, last));
let v_at_$(C)_$(n) = v_place_$(C)_$(n).at + $(V_CODES)u + (v_place_$(C)_$(n).token / $(64 / V_LOADS)u) * $(D)u;
let v_buffer_$(C)_$(n) = v_place_$(C)_$(n).buffer;
#end
#for i in 0..DPL
let v_raw_$(C)_$(n)_$(i) = load_vec(v_buffer_$(C)_$(n), v_at_$(C)_$(n) + min(lane + $((C * DPL + i) * 32)u, $(D - 1)u));
#end
#end
