// score.wgsl: K's codes as the scores read them, 16 dims of one token at a time.

#if !VIEW
// Where a token's K lies: its run, and the token's index inside the page.
struct Place {
    buffer: u32,
    at: u32,
    token: u32,
}

fn place_of(pages_at: u32, head: u32, token: u32) -> Place {
    let run = run_of(tables[pages_at + token / $(PS)u], head);
    return Place(run.buffer, run.at, token % $(PS)u);
}

#if PS >= 64
// Of token `index` of a tile, past the end or not: a tile lies inside one page.
fn k_place(page: u32, tail_page: u32, head: u32, kv_len: u32, tile: u32, index: u32) -> Place {
#if K == CHANNEL
    let run = run_of(select(page, tail_page, tile / $(PS / 64)u == kv_len / $(PS)u), head);
#else
    let run = run_of(page, head);
#end
    return Place(run.buffer, run.at, (tile % $(PS / 64)u) * 64u + index);
}
#else
// Of token `index` of a tile; one past the end is read as the last one's bytes, and weighs nothing.
fn k_place(pages_at: u32, tail_page: u32, head: u32, kv_len: u32, tile: u32, index: u32) -> Place {
    return place_of(pages_at, head, min(tile * 64u + index, kv_len - 1u));
}
#end
#end

// Where a token of a tile stands in V's slot order.
fn slot_of(token: u32) -> u32 {
    return (token >> 4u) * 16u + 4u * ((token & 7u) >> 1u) + 2u * ((token >> 3u) & 1u) + (token & 1u);
}

#if !VIEW
// The same of V, whose open page is no other than its page.
fn v_place(pages: u32, head: u32, kv_len: u32, tile: u32, index: u32) -> Place {
#if PS >= 64
    let run = run_of(pages, head);
    return Place(run.buffer, run.at, (tile % $(PS / 64)u) * 64u + index);
#else
    return place_of(pages, head, min(tile * 64u + index, kv_len - 1u));
#end
}

// The 16 bytes of a token in K's panel `unit`.
fn k_vec(place: Place, unit: u32) -> vec4<u32> {
    return load_vec(place.buffer, place.at + unit * $(PS)u + place.token);
}
#end

// The codes of dims 16 u .. 16 u + 15, one byte each (a nibble scheme's as 0..15).
#if K_BITS == 8 || K == CHANNEL
fn k_bytes(place: Place, u: u32) -> vec4<u32> {
    return k_vec(place, u);
}
#end
#if K_BITS == 4
// Of token 16 a + i (i < 8) in the low nibbles, of token 16 a + 8 + i in the high ones.
fn k_pair(place: Place, u: u32) -> vec4<u32> {
    return load_vec(place.buffer, place.at + u * $(PS / 2)u + (place.token >> 4u) * 8u + (place.token & 7u));
}

fn nibbles_of(place: Place, pairs: vec4<u32>) -> vec4<u32> {
    return (pairs >> vec4<u32>(((place.token >> 3u) & 1u) * 4u)) & vec4<u32>(0x0F0F0F0Fu);
}

fn k_nibbles(place: Place, u: u32) -> vec4<u32> {
    return nibbles_of(place, k_pair(place, u));
}
#end

#if !VIEW && (K == TOKEN || K == G32 || K == GROUPS)
// The word with a token's parameters of group g.
fn k_word(place: Place, g: u32) -> u32 {
#if K == GROUPS
    return load_word(place.buffer, place.at * 4u + $(K_PARAMS)u + g * $(PS)u + place.token);
#else
    return load_word(place.buffer, place.at * 4u + $(K_PARAMS)u + ((g * $(PS)u + place.token) >> 1u));
#end
}
#end

// A token's scale and (centred, in the integer arithmetic) shift in group g.
#if K == TOKEN || K == G32
fn k_scale(place: Place, g: u32) -> f32 {
#if VIEW
    return f16_value(k_word(place, g) & 0xFFFFu);
#else
    return load_f16(place.buffer, place.at * 4u + $(K_PARAMS)u, g * $(PS)u + place.token);
#end
}
#elif K == GROUPS
fn k_param(place: Place, g: u32) -> vec2<f32> {
    let word = load_word(place.buffer, place.at * 4u + $(K_PARAMS)u + g * $(PS)u + place.token);
    return vec2<f32>(f16_value(word & 0xFFFFu), f16_value(word >> 16u));
}
#elif K == CHANNEL
fn k_scale_open(place: Place) -> f32 {
    return load_f16(place.buffer, place.at * 4u + $(D * PS / 4)u, place.token);
}

// Of dim d, whatever the token.
fn k_channel(place: Place, d: u32) -> vec2<f32> {
    let word = load_word(place.buffer, place.at * 4u + $(K_PARAMS)u + d);
    return vec2<f32>(f16_value(word & 0xFFFFu), f16_value(word >> 16u));
}
#end

#if INTEGER
// acc + the dot product of 16 signed bytes.
fn dot16(a: vec4<u32>, b: vec4<u32>, acc: i32) -> i32 {
    return dot4I8Packed(a.w, b.w) + (dot4I8Packed(a.z, b.z) + (dot4I8Packed(a.y, b.y) + (dot4I8Packed(a.x, b.x) + acc)));
}
#else
fn fp8_value(b: u32) -> f32 {
    let magnitude = b & 0x7Fu;
    let normal = bitcast<f32>((magnitude << 20u) + 0x3C000000u);
    let value = select(normal, f32(magnitude) * exp2i(-9), magnitude < 8u);
    return bitcast<f32>(bitcast<u32>(value) | ((b & 0x80u) << 24u));
}

fn fp8_values(word: u32) -> vec4<f32> {
    return vec4<f32>(fp8_value(word & 0xFFu), fp8_value((word >> 8u) & 0xFFu), fp8_value((word >> 16u) & 0xFFu), fp8_value(word >> 24u));
}

fn int8_values(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(word));
}

#if K == F16 || K == BF16
fn half_values(a: u32, b: u32) -> vec4<f32> {
#if K == BF16
    return bitcast<vec4<f32>>(vec4<u32>(a << 16u, a & 0xFFFF0000u, b << 16u, b & 0xFFFF0000u));
#else
    return vec4<f32>(f16_value(a & 0xFFFFu), f16_value(a >> 16u), f16_value(b & 0xFFFFu), f16_value(b >> 16u));
#end
}
#end

// K dequantized: 16 dims of one token, without a per-tensor scale.
fn k_values(place: Place, open: bool, u: u32) -> array<vec4<f32>, 4> {
#if K == F16 || K == BF16
    let a = k_vec(place, 2u * u);
    let b = k_vec(place, 2u * u + 1u);
    return array<vec4<f32>, 4>(
        half_values(a.x, a.y), half_values(a.z, a.w),
        half_values(b.x, b.y), half_values(b.z, b.w),
    );
#elif K == FP8
    let c = k_bytes(place, u);
    return array<vec4<f32>, 4>(fp8_values(c.x), fp8_values(c.y), fp8_values(c.z), fp8_values(c.w));
#elif K == TENSOR
    let c = k_bytes(place, u);
    return array<vec4<f32>, 4>(int8_values(c.x), int8_values(c.y), int8_values(c.z), int8_values(c.w));
#elif K == TOKEN || K == G32
    let c = k_bytes(place, u);
    let s = k_scale(place, $(K == G32 ? 1 : 0)u * (u >> 1u));
    return array<vec4<f32>, 4>(int8_values(c.x) * s, int8_values(c.y) * s, int8_values(c.z) * s, int8_values(c.w) * s);
#elif K == GROUPS
    let c = k_nibbles(place, u);
    let s = k_param(place, u / $(UNITS / KG)u);
    return array<vec4<f32>, 4>(int8_values(c.x) * s.x + s.y, int8_values(c.y) * s.x + s.y, int8_values(c.z) * s.x + s.y, int8_values(c.w) * s.x + s.y);
#else
    if open {
        let c = k_bytes(place, u);
        let s = k_scale_open(place);
        return array<vec4<f32>, 4>(int8_values(c.x) * s, int8_values(c.y) * s, int8_values(c.z) * s, int8_values(c.w) * s);
    }
    let c = k_nibbles(place, u);
    var out: array<vec4<f32>, 4>;
#for w in 0..4
    {
        let v = int8_values(c[$(w)]);
        let p0 = k_channel(place, u * 16u + $(4 * w)u);
        let p1 = k_channel(place, u * 16u + $(4 * w + 1)u);
        let p2 = k_channel(place, u * 16u + $(4 * w + 2)u);
        let p3 = k_channel(place, u * 16u + $(4 * w + 3)u);
        out[$(w)] = v * vec4<f32>(p0.x, p1.x, p2.x, p3.x) + vec4<f32>(p0.y, p1.y, p2.y, p3.y);
    }
#end
    return out;
#end
}
#end
