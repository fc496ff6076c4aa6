// pool.wgsl: the buffers that a pool lies in, and how runs, vectors and words of it are addressed.
//
// A pool larger than one binding lies in several buffers of `pages_per_pool` pages each. READS_POOL is 0 for a kernel without one, 1 for
// one that reads it, 2 for one that writes words of it: it sees words, as writing one of a vector may write them all.
#if READS_POOL
#for i in 0..POOLS
#if READS_POOL == 1
@group(0) @binding($(4 + i)) var<storage, read> pool_$(i): array<vec4<u32>>;
#else
@group(0) @binding($(4 + i)) var<storage, read_write> pool_$(i): array<u32>;
#end
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

#if READS_POOL == 1
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
#else
fn load_word(buffer: u32, at: u32) -> u32 {
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

fn store_word(buffer: u32, at: u32, word: u32) {
#if POOLS == 1
    pool_0[at] = word;
#else
    switch buffer {
#for i in 1..POOLS
        case $(i)u: { pool_$(i)[at] = word; }
#end
        default: { pool_0[at] = word; }
    }
#end
}
#end
#end
