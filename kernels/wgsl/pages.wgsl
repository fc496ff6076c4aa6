// pages.wgsl: the buffers that a pool of pages lies in, and the addresses of runs, tokens, vectors and words (FORMATS.md).
//
// A pool larger than one binding lies in several buffers of `pages_per_pool` pages each. A kernel that WRITES sees the pool as words, since
// writing one word of a vector may write all of them.
#for i in 0..POOLS
#if !WRITES
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

#if !WRITES
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

#if !WRITES
// A token of K or V: its KV head's run, and the token's index inside the page.
struct TokenAddr {
    buffer: u32,
    at: u32,
    token: u32,
}

fn place_of(pages_at: u32, head: u32, token: u32) -> TokenAddr {
    let run = run_of(tables[pages_at + token / $(PS)u], head);
    return TokenAddr(run.buffer, run.at, token % $(PS)u);
}

// The place of token `index` of a tile: a tile lies inside one page, whose tokens past the end have weight 0, or `pages` are the tables'
// place of the sequence's pages, and a token past the end reads the bytes of the last one.
fn k_place(pages: u32, head: u32, kv_len: u32, tile: u32, index: u32) -> TokenAddr {
#if PS >= 64
    let run = run_of(pages, head);
    return TokenAddr(run.buffer, run.at, (tile % $(PS / 64)u) * 64u + index);
#else
    return place_of(pages, head, min(tile * 64u + index, kv_len - 1u));
#end
}

// The 16 bytes of a token in K's panel `unit`.
fn k_vec(place: TokenAddr, unit: u32) -> vec4<u32> {
    return load_vec(place.buffer, place.at + unit * $(PS)u + place.token);
}
#end
