// matrix_stage_v.wgsl: the subgroup's 16 dims of block $(j), tokens PU p * 16 .. of the tile, widened. Included by matrix_tile.wgsl.
#if V_BITS == 8
#for h in 0..(PU / 2)
stage_codes(part, lane & 15u, $(2 * h)u + (lane >> 4u), v_raw_$(j)_$(PU * p / 2 + h));
#end
#else
if (lane >> 3u) / $(PU)u == $(p)u {
    stage_codes(part, lane & 7u, (lane >> 3u) - $(PU * p)u, v_raw_$(j)_0 & vec4<u32>(0x0F0F0F0Fu));
    stage_codes(part, (lane & 7u) + 8u, (lane >> 3u) - $(PU * p)u, (v_raw_$(j)_0 >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu));
}
#end
