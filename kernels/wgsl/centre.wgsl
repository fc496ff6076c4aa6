// centre.wgsl: the second centres of K, which are the means of sequences' first tiles (docs/arithmetic.md, section 12).
//
// Grid       (grid_x of tiles * num_kv_heads, the rest, 1); 64 threads: a lane has four dims of the tile's 64 tokens.
// Reads      K's codes, residuals and scales of the tiles' pages; first centres.
// Writes     second centres.
// Numerics   values of codes are exact; their sum in f32 is in the order of the tokens.
// Host       kernels/src/wgsl/append.rs chooses the constants, crates/attn-wgpu/src/append.rs the tiles.
#let WRITES = 0
#let THREADS = 64

#include "centre_params"

// For each tile {sequence, 3 unused, 4 pages, 4 residual pages}; of each as many as a tile has.
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tables: array<u32>;
@group(0) @binding($(4 + POOLS)) var<storage, read_write> centres: array<u32>;      // [sequence][kv_head][first, second][head_dim] in bf16
#include "arithmetic.wgsl"
#include "pages.wgsl"
#include "quantize.wgsl"

// The codes of dims d to d + 3 of a token of K, or their residuals, one byte each.
fn k_codes(place: TokenAddr, d: u32) -> u32 {
#if K_BITS == 4
    // The codes of token 16 a + i (i < 8) are low nibbles, those of token 16 a + 8 + i high ones.
    let row = (place.token >> 4u) * 8u + (place.token & 7u);
    let pairs = load_word(place.buffer, (place.at + d / 16u * $(PS / 2)u + row) * 4u + d % 16u / 4u);
    return (pairs >> (((place.token >> 3u) & 1u) * 4u)) & 0x0F0F0F0Fu;
#else
    return load_word(place.buffer, (place.at + d / 16u * $(PS)u + place.token) * 4u + d % 16u / 4u);
#end
}

// What the sequence stores of dims d to d + 3 of token t.
fn k_values(tile: u32, head: u32, t: u32, d: u32) -> vec4<f32> {
    let place = place_of(tile + 4u, head, t);
    let scale = load_f16(place.buffer, place.at * 4u + $(K_PARAMS)u, d / $(K_GROUP_DIMS)u * $(PS)u + place.token);
    let codes = k_codes(place, d);
#if K_BITS == 4
    let half_steps = (codes << 4u) | k_codes(place_of(tile + 8u, head, t), d);
    return vec4<f32>(2 * vec4<i32>(unpack4xU8(half_steps)) - 255) * (scale * 0.0625);
#else
    return vec4<f32>(unpack4xI8(codes)) * scale;
#end
}

@compute @workgroup_size($(THREADS))
fn centre(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    let linear = workgroup.x + workgroup.y * params.grid_x;
    if linear >= params.num_tiles * params.num_kv_heads {
        return;
    }
    let head = linear % params.num_kv_heads;
    let tile = linear / params.num_kv_heads * 12u;
    let first = (tables[tile] * params.num_kv_heads + head) * $(KD)u;
    for (var i = tid; i < $(KD / 4)u; i += $(THREADS)u) {
        var sum = vec4<f32>(0.0);
        for (var t = 0u; t < 64u; t++) {
            sum += k_values(tile, head, t, 4u * i);
        }
        let pairs = vec2<u32>(centres[first + 2u * i], centres[first + 2u * i + 1u]);
        let of_first = bitcast<vec4<f32>>(vec4<u32>(pairs.x << 16u, pairs.x & 0xFFFF0000u, pairs.y << 16u, pairs.y & 0xFFFF0000u));
        let mean = bitcast<vec4<u32>>(of_first + sum * 0.015625);
        centres[first + $(KD / 2)u + 2u * i] = centre_of(mean.x) | (centre_of(mean.y) << 16u);
        centres[first + $(KD / 2)u + 2u * i + 1u] = centre_of(mean.z) | (centre_of(mean.w) << 16u);
    }
}
