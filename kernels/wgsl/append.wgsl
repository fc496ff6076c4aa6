// append.wgsl: quantizes new tokens, writes them into pages and seals full Int4 Channel pages: the bytes of FORMATS.md.
//
// Grid       (jobs * num_kv_heads by grid_x, the rest, {K, V}); a job is the new tokens of one page, so bytes that tokens share share a workgroup.
// Reads      k, v f32 [tokens, num_kv_heads, head_dim] by their bits, finite.
// Writes     pool [page][kv_head][run], words that hold bytes of other tokens included.
// Numerics   integers alone (quantize.wgsl), but for x - shift of int4, one subtraction.
// Tail page  jobs that seal read the tail page that other jobs of the call write: they go in an earlier dispatch.
// Shared     extremes and parameters of up to page_size tokens.
// Host       crates/attn-wgpu/src/append.rs.
#let READS_POOL = 2
#let THREADS = 128

#include "append_params"

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> jobs: array<u32>;
@group(0) @binding(2) var<storage, read> source_0: array<u32>;
@group(0) @binding(3) var<storage, read> source_1: array<u32>;
#include "arithmetic.wgsl"
#include "pool.wgsl"
#include "quantize.wgsl"

// Tokens `first` to `end` of a page, from token `source` of k and v on.
struct Job {
    page: u32,
    tail: u32,
    first: u32,
    end: u32,
    source: u32,
    seals: bool,
}

var<workgroup> low: array<atomic<u32>, $(PS * AG)>;       // (token, group): keys of the extremes
var<workgroup> high: array<atomic<u32>, $(PS * AG)>;
var<workgroup> param: array<u32, $(PS * AG)>;             // (token, group): f16 scale, and shift above it
#if K == CHANNEL
var<workgroup> channel: array<u32, $(D)>;                 // the same of a sealed page's dims
#end

#for SIDE in 0..2
#include "append_side.wgsl"
#end
#if K == CHANNEL
#include "seal.wgsl"
#end

@compute @workgroup_size($(THREADS))
fn append(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    let linear = workgroup.x + workgroup.y * params.grid_x;
    if linear >= params.num_jobs * params.num_kv_heads {
        return;
    }
    let head = linear % params.num_kv_heads;
    let at = linear / params.num_kv_heads * 8u;
    let job = Job(jobs[at], jobs[at + 1u], jobs[at + 2u], jobs[at + 3u], jobs[at + 4u], jobs[at + 5u] != 0u);
    if workgroup.z == 0u {
        parameters_0(job, head, tid);
#if K == CHANNEL
        if job.seals {
            seal(job, head, tid);
        } else {
            codes_0(job, head, tid);
        }
#else
        codes_0(job, head, tid);
#end
    } else {
        parameters_1(job, head, tid);
        codes_1(job, head, tid);
    }
}
