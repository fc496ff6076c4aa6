// ahead.wgsl: the registers in which a tile's codes wait. Included by decode_split.wgsl.
#if INTEGER
var load_k_at = tile;
#for j in 0..2
#for n in 0..K_LOADS
var k_raw_$(n)_$(j) = vec4<u32>(0u);
#end
#end
#end
