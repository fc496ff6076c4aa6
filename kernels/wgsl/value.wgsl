// value.wgsl: V's codes and parameters, as the second product reads them.

// The lane's j-th dim, past the end for some: of a view's bytes four of a word, of 4-bit V pairs that share bytes.
fn dim_of(lane: u32, j: u32) -> u32 {
#if VIEW && V_BITS == 8
    return 4u * (lane + $(T)u * (j >> 2u)) + (j & 3u);
#elif V_BITS == 4
    let row = lane + $(T)u * (j >> 1u);
    return (row >> 3u) * 16u + (row & 7u) + 8u * (j & 1u);
#else
    return lane + $(T)u * j;
#end
}

#if V_SCALED && !VIEW
// The word with a token's parameters of V's group g, and what it says: scale and shift.
fn v_word(place: Place, g: u32) -> u32 {
#if V == GROUPS
    return load_word(place.buffer, place.at * 4u + $(V_PARAMS)u + g * $(PS)u + place.token);
#else
    return load_word(place.buffer, place.at * 4u + $(V_PARAMS)u + ((g * $(PS)u + place.token) >> 1u));
#end
}
#end

#if V_SCALED
fn v_param(word: u32, token: u32) -> vec2<f32> {
#if V == GROUPS
    return vec2<f32>(f16_value(word & 0xFFFFu), f16_value(word >> 16u));
#else
    return vec2<f32>(f16_value((word >> ((token & 1u) * 16u)) & 0xFFFFu), 0.0);
#end
}
#end

#if V_BITS < 16 && !VIEW
// The 16 bytes of dim d in the panel of `place.token`: 16 tokens in slot order; of 4 bits, those of dims 16 a + i and 16 a + 8 + i.
fn v_panel(place: Place, d: u32) -> vec4<u32> {
#if V_BITS == 8
    return load_vec(place.buffer, place.at + $(V_CODES)u + (place.token / 16u) * $(V_ROWS)u + d);
#else
    return load_vec(place.buffer, place.at + $(V_CODES)u + (place.token / 16u) * $(V_ROWS)u + (d >> 4u) * 8u + (d & 7u));
#end
}
#elif V_BITS == 16
// One element of 16-bit V.
fn v_element(place: Place, d: u32) -> f32 {
#if VIEW
    let word = pool_1[place.at + (d >> 1u)];
#else
    let word = load_word(place.buffer, (place.at + $(V_CODES)u + (d >> 3u) * $(PS)u + place.token) * 4u + ((d & 7u) >> 1u));
#end
    let half = (word >> ((d & 1u) * 16u)) & 0xFFFFu;
#if V == BF16
    return bitcast<f32>(half << 16u);
#else
    return f16_value(half);
#end
}
#end

#if INTEGER
// acc + the dot product of 16 unsigned bytes.
fn dot16u(a: vec4<u32>, b: vec4<u32>, acc: u32) -> u32 {
    return dot4U8Packed(a.w, b.w) + (dot4U8Packed(a.z, b.z) + (dot4U8Packed(a.y, b.y) + (dot4U8Packed(a.x, b.x) + acc)));
}
#end
