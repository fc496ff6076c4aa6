// ahead.wgsl: the registers in which a tile's codes and parameters wait. Included by decode_split.wgsl.
var load_at = tile;
#for j in 0..2
#if V_SCALED
#for g in 0..VG
var v_word_$(g)_$(j) = 0u;
#end
#end
#if INTEGER
#if K == TOKEN || K == G32 || K == GROUPS
#for g in 0..KG
var k_word_$(g)_$(j) = 0u;
#end
#end
#if K_BITS == 8 || j == 0
#for n in 0..UNITS
var k_raw_$(n)_$(j) = vec4<u32>(0u);
#end
#end
#end
#end
#if INTEGER && K == CHANNEL
#for n in 0..((UNITS * 4 + T - 1) / T)
var channel_raw_$(n) = vec4<u32>(0u);
#end
#end
