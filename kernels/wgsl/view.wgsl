// view.wgsl: the buffers of a contiguous cache of another engine, and the addresses of its rows; decode_split.wgsl includes it instead of pages.wgsl.
//
// A sequence's 12 words in the tables: {first row, KV head to KV head, token to token} of K in vec4, of V in words, of both scales in f16.
@group(0) @binding(4) var<storage, read> pool_0: array<vec4<u32>>;       // K's codes
@group(0) @binding(5) var<storage, read> pool_1: array<u32>;             // V's codes
#if K_SCALED
@group(0) @binding(6) var<storage, read> k_scales: array<u32>;
#end
#if V_SCALED
@group(0) @binding(7) var<storage, read> v_scales: array<u32>;
#end

// A token of K or V: its row of codes, and the first of its scales.
struct TokenAddr {
    at: u32,
    scale: u32,
}

// A scale comes twice in its word, so that any token finds it.
fn place_token(place: TokenAddr) -> u32 {
    return 0u;
}

fn view_row(rows_at: u32, head: u32, token: u32) -> u32 {
    return tables[rows_at] + head * tables[rows_at + 1u] + token * tables[rows_at + 2u];
}

// The place of token `index` of a tile in K. A token past the end reads the last one, and has weight 0.
fn k_place(rows_at: u32, head: u32, kv_len: u32, tile: u32, index: u32) -> TokenAddr {
    let token = min(tile * 64u + index, kv_len - 1u);
    return TokenAddr(view_row(rows_at, head, token), view_row(rows_at + 6u, head, token));
}

fn place_of(rows_at: u32, head: u32, token: u32) -> TokenAddr {
    return TokenAddr(view_row(rows_at + 3u, head, token), view_row(rows_at + 9u, head, token));
}

// The 16 bytes at `unit` of a row of K.
fn k_vec(place: TokenAddr, unit: u32) -> vec4<u32> {
    return pool_0[place.at + unit];
}

#if K_SCALED
// A row's scale of group g, twice in a word.
fn k_word(place: TokenAddr, g: u32) -> u32 {
    let at = place.scale + g;
    return ((k_scales[at >> 1u] >> ((at & 1u) * 16u)) & 0xFFFFu) * 0x10001u;
}
#end
#if V_SCALED
fn v_word(place: TokenAddr, g: u32) -> u32 {
    let at = place.scale + g;
    return ((v_scales[at >> 1u] >> ((at & 1u) * 16u)) & 0xFFFFu) * 0x10001u;
}
#end

// The byte of dim d in a row of V.
fn v_byte(place: TokenAddr, d: u32) -> u32 {
    return (pool_1[place.at + (d >> 2u)] >> ((d & 3u) * 8u)) & 0xFFu;
}
