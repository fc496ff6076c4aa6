// append.wgsl: quantizes new tokens, writes them into pages and seals full Int4 Channel pages: the bytes of FORMATS.md.
//
// Grid       (grid_x of jobs * num_kv_heads, the rest, {K, V}); a job is the new tokens of one page, so tokens that share bytes share a workgroup.
// Reads      k, v f32 [tokens, num_kv_heads, head_dim] as bits; all finite.
// Writes     pool [page][kv_head][run], words that hold bytes of other tokens included.
// Numerics   integers alone (quantize.wgsl), except one float subtraction, x - shift of int4.
// Tail page  jobs that seal read a tail page that other jobs of the call overwrite, so they run in an earlier dispatch.
// Shared     extremes and parameters of up to page_size tokens.
// Host       kernels/src/wgsl/append.rs chooses the constants, crates/attn-wgpu/src/append.rs the jobs.
#let WRITES = 1
#let THREADS = 128

#include "append_params"

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> jobs: array<u32>;
@group(0) @binding(2) var<storage, read> source_0: array<u32>;
@group(0) @binding(3) var<storage, read> source_1: array<u32>;
#include "arithmetic.wgsl"
#include "pages.wgsl"
#include "quantize.wgsl"

// A job: tokens [first, end) of a page, which are tokens `source` and on of k and v.
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
var<workgroup> param: array<u32, $(PS * AG)>;             // (token, group): f16 scale in the low half, shift in the high half
#if K == CHANNEL
var<workgroup> channel: array<u32, $(D)>;                 // the same for each dim of a sealed page
#end

#for SIDE in 0..2
// The parameters and codes of new tokens' K (SIDE 0) or V (SIDE 1).
#let OPEN = SIDE == 0 && K == CHANNEL
#let S = OPEN ? TOKEN : SIDE == 0 ? K : V
#let G = S == G32 || S == GROUPS ? (SIDE == 0 ? KG : VG) : 1
#let SCALED = S == TOKEN || S == G32 || S == GROUPS
#let BITS = S == GROUPS ? 4 : S == F16 || S == BF16 ? 16 : 8
#let CODES = SIDE == 0 ? 0 : V_CODES * 4
#let PARAMS = OPEN ? D * PS / 4 : SIDE == 0 ? K_PARAMS : V_PARAMS

fn element_$(SIDE)(job: Job, head: u32, t: u32, d: u32) -> u32 {
    return source_$(SIDE)[((job.source + t - job.first) * params.num_kv_heads + head) * $(D)u + d];
}

fn place_$(SIDE)(job: Job, head: u32) -> Run {
#if OPEN
    return run_of(job.tail, head);
#else
    return run_of(job.page, head);
#end
}

// Scales (and shifts) of the job's tokens into `param`, and into the page unless the job seals it.
fn parameters_$(SIDE)(job: Job, head: u32, tid: u32) {
#if SCALED
    for (var i = job.first * $(G)u + tid; i < job.end * $(G)u; i += $(THREADS)u) {
        atomicStore(&low[i], 0xFFFFFFFFu);
        atomicStore(&high[i], 0u);
    }
    workgroupBarrier();
    for (var i = tid; i < (job.end - job.first) * $(D / 4)u; i += $(THREADS)u) {
        let t = job.first + i / $(D / 4)u;
        let d = i % $(D / 4)u * 4u;
        let at = t * $(G)u + d / $(D / G)u;
        let x = vec4<u32>(element_$(SIDE)(job, head, t, d), element_$(SIDE)(job, head, t, d + 1u), element_$(SIDE)(job, head, t, d + 2u), element_$(SIDE)(job, head, t, d + 3u));
#if S == GROUPS
        let keys = vec4<u32>(key_of(x.x), key_of(x.y), key_of(x.z), key_of(x.w));
        atomicMin(&low[at], min(min(keys.x, keys.y), min(keys.z, keys.w)));
        atomicMax(&high[at], max(max(keys.x, keys.y), max(keys.z, keys.w)));
#else
        let sizes = x & vec4<u32>(0x7FFFFFFFu);
        atomicMax(&high[at], max(max(sizes.x, sizes.y), max(sizes.z, sizes.w)));
#end
    }
    workgroupBarrier();
    for (var i = job.first * $(G)u + tid; i < job.end * $(G)u; i += $(THREADS)u) {
#if S == GROUPS
        param[i] = int4_param(bitcast<f32>(bits_of_key(atomicLoad(&low[i]))), bitcast<f32>(bits_of_key(atomicLoad(&high[i]))));
#else
        param[i] = f16_of_part(atomicLoad(&high[i]), 127u);
#end
    }
    workgroupBarrier();
#if OPEN
    if job.seals {
        return;
    }
#end
    let run = place_$(SIDE)(job, head);
#if S == GROUPS
    for (var i = tid; i < (job.end - job.first) * $(G)u; i += $(THREADS)u) {
        let t = job.first + i / $(G)u;
        store_word(run.buffer, run.at * 4u + $(PARAMS)u + i % $(G)u * $(PS)u + t, param[t * $(G)u + i % $(G)u]);
    }
#else
    // A word holds the parameters of two tokens.
    let words = (job.end + 1u) / 2u - job.first / 2u;
    for (var i = tid; i < words * $(G)u; i += $(THREADS)u) {
        let g = i / words;
        let t = (job.first / 2u + i % words) * 2u;
        let at = run.at * 4u + $(PARAMS)u + (g * $(PS)u + t) / 2u;
        var word = load_word(run.buffer, at);
#for n in 0..2
        if t + $(n)u >= job.first && t + $(n)u < job.end {
            word = insertBits(word, param[(t + $(n)u) * $(G)u + g], $(16 * n)u, 16u);
        }
#end
        store_word(run.buffer, at, word);
    }
#end
#end
}

fn code_$(SIDE)(job: Job, head: u32, t: u32, d: u32) -> u32 {
    let x = element_$(SIDE)(job, head, t, d);
#if S == F16
    return f16_of_magnitude(x & 0x7FFFFFFFu) | ((x >> 16u) & 0x8000u);
#elif S == BF16
    return bf16_of(x);
#elif S == FP8
    return fp8_code(x, jobs[params.scales_at + 2u * head + $(SIDE)u]);
#elif S == TENSOR
    return int8_code(x, jobs[params.scales_at + 2u * head + $(SIDE)u]);
#elif S == GROUPS
    return int4_code(bitcast<f32>(x), param[t * $(G)u + d / $(D / G)u]);
#else
    return int8_code(x, bitcast<u32>(f16_value(param[t * $(G)u + d / $(D / G)u])));
#end
}

// Writes codes into panels, a word at a time; a word that holds several tokens keeps the bytes of the others.
fn codes_$(SIDE)(job: Job, head: u32, tid: u32) {
    let run = place_$(SIDE)(job, head);
    let base = run.at * 4u + $(CODES)u;
#if BITS == 16 || (SIDE == 0 && BITS == 8)
#let PER = 32 / BITS
    for (var i = tid; i < (job.end - job.first) * $(D / PER)u; i += $(THREADS)u) {
        let t = job.first + i / $(D / PER)u;
        let d = i % $(D / PER)u * $(PER)u;
        var word = 0u;
#for n in 0..PER
        word |= code_$(SIDE)(job, head, t, d + $(n)u) << $(n * BITS)u;
#end
        store_word(run.buffer, base + (d / $(4 * PER)u * $(PS)u + t) * 4u + d % $(4 * PER)u / $(PER)u, word);
    }
#elif SIDE == 0
    // Row 8 a + i holds tokens 16 a + i and, in the high nibbles, 16 a + 8 + i. A low nibble that is written clears the high one.
    let rows = (job.end + 15u) / 16u * 8u - job.first / 16u * 8u;
    for (var i = tid; i < rows * $(D / 4)u; i += $(THREADS)u) {
        let row = job.first / 16u * 8u + i / $(D / 4)u;
        let d = i % $(D / 4)u * 4u;
        let t = row / 8u * 16u + row % 8u;
        let writes_low = t >= job.first && t < job.end;
        let writes_high = t + 8u >= job.first && t + 8u < job.end;
        if writes_low || writes_high {
            let at = base + (d / 16u * $(PS / 2)u + row) * 4u + d % 16u / 4u;
            var word = load_word(run.buffer, at) & 0x0F0F0F0Fu;
            if writes_low {
                word = 0u;
#for n in 0..4
                word |= code_$(SIDE)(job, head, t, d + $(n)u) << $(8 * n)u;
#end
            }
            if writes_high {
#for n in 0..4
                word |= code_$(SIDE)(job, head, t + 8u, d + $(n)u) << $(8 * n + 4)u;
#end
            }
            store_word(run.buffer, at, word);
        }
    }
#else
    // A word has the tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of a panel; of one dim, or of dims 16 a + i and, in the high nibbles, 16 a + 8 + i.
#let ROWS = D * BITS / 8
    let panels = (job.end + 15u) / 16u - job.first / 16u;
    for (var i = tid; i < panels * $(4 * ROWS)u; i += $(THREADS)u) {
        let panel = job.first / 16u + i / $(4 * ROWS)u;
        let row = i % $(4 * ROWS)u / 4u;
        let t = panel * 16u + i % 4u * 2u;
#if BITS == 8
        let d = row;
#else
        let d = row / 8u * 16u + row % 8u;
#end
        if job.first < t + 10u && job.end > t {
            let at = base + (panel * $(ROWS)u + row) * 4u + i % 4u;
            var word = load_word(run.buffer, at);
#for n in 0..4
            {
                let token = t + $(n % 2 + n / 2 * 8)u;
                if token >= job.first && token < job.end {
#if BITS == 8
                    word = insertBits(word, code_$(SIDE)(job, head, token, d), $(8 * n)u, 8u);
#else
                    word = insertBits(word, code_$(SIDE)(job, head, token, d) | (code_$(SIDE)(job, head, token, d + 8u) << 4u), $(8 * n)u, 8u);
#end
                }
            }
#end
            store_word(run.buffer, at, word);
        }
    }
#end
}
#end
#if K == CHANNEL
// A full page's K is coded again per channel, from the Int8 Token values of its tokens.

// A token's K as int8 code times scale: from the tail page, or from the new tokens of this call.
fn open_value(job: Job, head: u32, tail: Run, t: u32, d: u32) -> f32 {
    var code = 0;
    if t < job.first {
        let word = load_word(tail.buffer, tail.at * 4u + (d / 16u * $(PS)u + t) * 4u + d % 16u / 4u);
        code = extractBits(bitcast<i32>(word), d % 4u * 8u, 8u);
    } else {
        code = extractBits(bitcast<i32>(code_0(job, head, t, d)), 0u, 8u);
    }
    return f32(code) * f16_value(param[t]);
}

fn seal(job: Job, head: u32, tid: u32) {
    let home = run_of(job.page, head);
    let tail = run_of(job.tail, head);
    for (var t = tid; t < job.first; t += $(THREADS)u) {
        param[t] = (load_word(tail.buffer, tail.at * 4u + $(D * PS / 4)u + t / 2u) >> (t % 2u * 16u)) & 0xFFFFu;
    }
    workgroupBarrier();
    for (var d = tid; d < $(D)u; d += $(THREADS)u) {
        var least = open_value(job, head, tail, 0u, d);
        var most = least;
        for (var t = 1u; t < $(PS)u; t++) {
            let x = open_value(job, head, tail, t, d);
            least = min(least, x);
            most = max(most, x);
        }
        channel[d] = int4_param(least, most);
        store_word(home.buffer, home.at * 4u + $(K_PARAMS)u + d, channel[d]);
    }
    workgroupBarrier();
    for (var i = tid; i < $(PS * D / 8)u; i += $(THREADS)u) {
        let row = i / 4u % $(PS / 2)u;
        let d = i / $(PS * 2)u * 16u + i % 4u * 4u;
        let t = row / 8u * 16u + row % 8u;
        var word = 0u;
#for n in 0..4
        word |= int4_code(open_value(job, head, tail, t, d + $(n)u), channel[d + $(n)u]) << $(8 * n)u;
        word |= int4_code(open_value(job, head, tail, t + 8u, d + $(n)u), channel[d + $(n)u]) << $(8 * n + 4)u;
#end
        store_word(home.buffer, home.at * 4u + i, word);
    }
}
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
