// matrix_stage_k.wgsl: units PU p .. of the subgroup's 16 tokens, widened. Included by matrix_tile.wgsl.
#if K_BITS == 4
#if K == CHANNEL
if open {
    // Wider codes, asked for only now: one page of a sequence.
    let place = k_place(pages_at, tail_page, head, kv_len, tile, part * 16u + (lane & 15u));
#for h in 0..(PU / 2)
    {
        let at = $(2 * h)u + (lane >> 4u);
        if at + $(PU * p)u < $(UNITS)u {
            stage_codes(part, lane & 15u, at, k_bytes(place, at + $(PU * p)u) ^ vec4<u32>(0x80808080u));
        }
    }
#end
} else {
#else
{
#end
    // A group of lanes per unit; with narrow stages half of them at a time.
    let unit = $(PU * p / 4 * 4)u + (lane >> 3u);
    if unit < $(UNITS)u && unit / $(PU)u == $(p)u {
        stage_codes(part, lane & 7u, unit - $(PU * p)u, k_raw_$(PU * p / 4) & vec4<u32>(0x0F0F0F0Fu));
        stage_codes(part, (lane & 7u) + 8u, unit - $(PU * p)u, (k_raw_$(PU * p / 4) >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu));
    }
}
#else
#for h in 0..(PU / 2)
#if PU * p + 2 * h < UNITS
if $(PU * p + 2 * h)u + (lane >> 4u) < $(UNITS)u {
    stage_codes(part, lane & 15u, $(2 * h)u + (lane >> 4u), k_raw_$(PU * p / 2 + h) ^ vec4<u32>(0x80808080u));
}
#end
#end
#end
