// pages.wgsl: the bindings of the decode kernels, and where a page's bytes lie (FORMATS.md).
//
// A pool larger than one binding lies in several buffers of `pages_per_pool` pages each.
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
    zero: u32,               // 0, see arithmetic.wgsl
}

// An item is {sequence, first segment, segments, kv_len, segment_tiles, its pages' place, tail page, -}; a sequence {first item, items, 6 unused}.
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tables: array<u32>;

#if READS_POOL
#for i in 0..POOLS
@group(0) @binding($(4 + i)) var<storage, read> pool_$(i): array<vec4<u32>>;
#end

// One KV head's run of one page: its buffer, and its first vec4.
struct Run {
    buffer: u32,
    at: u32,
}

fn run_of(page: u32, head: u32) -> Run {
#if POOLS == 1
    return Run(0u, (page * params.num_kv_heads + head) * $(RUN_VECS)u);
#else
    let buffer = page / params.pages_per_pool;
    return Run(buffer, ((page - buffer * params.pages_per_pool) * params.num_kv_heads + head) * $(RUN_VECS)u);
#end
}

fn load_vec(buffer: u32, at: u32) -> vec4<u32> {
#if POOLS == 1
    return pool_0[at];
#else
    switch buffer {
#for i in 1..POOLS
        case $(i)u: { return pool_$(i)[at]; }
#end
        default: { return pool_0[at]; }
    }
#end
}

fn load_word(buffer: u32, at: u32) -> u32 {
#if POOLS == 1
    return pool_0[at >> 2u][at & 3u];
#else
    switch buffer {
#for i in 1..POOLS
        case $(i)u: { return pool_$(i)[at >> 2u][at & 3u]; }
#end
        default: { return pool_0[at >> 2u][at & 3u]; }
    }
#end
}

// The f16 at `index` of an array that starts at word `at`.
fn load_f16(buffer: u32, at: u32, index: u32) -> f32 {
    let word = load_word(buffer, at + (index >> 1u));
    return f16_value((word >> ((index & 1u) * 16u)) & 0xFFFFu);
}
#end
