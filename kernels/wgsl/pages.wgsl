// pages.wgsl: the bindings of the decode kernels, and where a page's bytes lie (FORMATS.md).
//
// Host: crates/attn-wgpu/src/launch.rs::Params has the same fields.

struct Params {
    num_items: u32,
    grid_x: u32,
    row_blocks: u32,
    items_at: u32,
    sequences_at: u32,
    scales_at: u32,          // f32 bits: k_tensor_scale, v_tensor_scale per KV head, slope * log2 e per query head
    num_q_heads: u32,
    num_kv_heads: u32,
    heads_per_kv: u32,
    q_len: u32,
    causal: u32,
    window_left: i32,        // -1 without
    pages_per_pool: u32,
    unused: u32,
    maxima_at: u32,          // where the states' (m, l) begin
    log2_scale: f32,
    softcap_inner: f32,
    softcap_outer: f32,
    batch: u32,
    round_up: f32,           // both 12582912, see arithmetic.wgsl
    round_down: f32,
    weight_up: f32,          // both 12582913
    weight_down: f32,
    zero: u32,               // 0, see arithmetic.wgsl
}

// An item is a segment or a tile of a sequence: {sequence, its index there, kv_len, its tiles, its pages' place, tail page, 2 unused}; a
// sequence {first item, items, 6 unused}.
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tables: array<u32>;

#if READS_POOL && VIEW
#include "view.wgsl"
#else
#include "pool.wgsl"
#end
