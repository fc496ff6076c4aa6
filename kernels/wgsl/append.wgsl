// append.wgsl: quantizes new tokens and writes them into pages: the bytes of FORMATS.md.
//
// Grid       (grid_x of jobs * num_kv_heads, the rest, {K, V}); a job is the new tokens of one page, so tokens that share bytes share a workgroup.
// Reads      k, v f32 [tokens, num_kv_heads, head_dim] as bits; all finite.
// Writes     pool [page][kv_head][run], words that hold bytes of other tokens included; first centres of K, by jobs whose token makes one.
// Numerics   integers alone (quantize.wgsl), except the sums of rotations, x - centre of K, and x - shift of int4.
// Shared     extremes, parameters and rotated rows of a chunk of tokens.
// Host       kernels/src/wgsl/append.rs chooses the constants, crates/attn-wgpu/src/append.rs the jobs.
#let WRITES = 1
#let THREADS = 128

#include "append_params"

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> jobs: array<u32>;
@group(0) @binding(2) var<storage, read> source_0: array<u32>;
@group(0) @binding(3) var<storage, read> source_1: array<u32>;
#if CENTRES
@group(0) @binding($(4 + POOLS)) var<storage, read_write> centres: array<u32>;      // [sequence][kv_head][first, second][head_dim] in bf16
#end
#include "arithmetic.wgsl"
#include "pages.wgsl"
#include "quantize.wgsl"

// A job: tokens [first, end) of a page, which are tokens `source` and on of k and v.
struct Job {
    page: u32,
    first: u32,
    end: u32,
    source: u32,
    // The page of the residuals, if they are kept.
    residual_page: u32,
    has_residuals: bool,
#if CENTRES
    // What its tokens' keys lack: the sequence's first centre (2 * sequence) or its second one, and whether the job's only token makes it.
    centre: u32,
    makes_centre: bool,
#end
}

#let ROTATES = K_STRIDES + V_STRIDES > 0
// Tokens that are quantized together: even numbers, so that no parameters of two tokens in a word are apart.
#let MOST_DIMS = KD > VD ? KD : VD
#let CHUNK = !ROTATES || MOST_DIMS <= 128 ? 16 : MOST_DIMS <= 256 ? 8 : 4
var<workgroup> low: array<atomic<u32>, $(CHUNK * AG)>;       // (token of the chunk, group): keys of the extremes
var<workgroup> high: array<atomic<u32>, $(CHUNK * AG)>;
var<workgroup> param: array<u32, $(CHUNK * AG)>;             // (token of the chunk, group): f16 scale in the low half, shift in the high half
#if ROTATES
var<workgroup> rows: array<f32, $(CHUNK * MOST_DIMS)>;               // (token of the chunk, dim)

// The butterflies of all strides in rows of so many elements together, and the product with a power of two.
fn rotate_rows(elements: u32, strides: u32, factor: f32, tid: u32) {
    for (var s = 0u; s < strides; s++) {
        let stride = 1u << s;
        workgroupBarrier();
        for (var i = tid; i < elements / 2u; i += $(THREADS)u) {
            let at = ((i >> s) << (s + 1u)) + (i & (stride - 1u));
            let a = rows[at];
            let b = rows[at + stride];
            rows[at] = a + b;
            rows[at + stride] = a - b;
        }
    }
    workgroupBarrier();
    for (var i = tid; i < elements; i += $(THREADS)u) {
        rows[i] = rows[i] * factor;
    }
    workgroupBarrier();
}
#end

#if CENTRES
// Takes the centre off the chunk's rotated rows of K.
fn centre_rows(job: Job, head: u32, tid: u32) {
    let centre = (((job.centre >> 1u) * params.num_kv_heads + head) * 2u + (job.centre & 1u)) * $(KD / 2)u;
    for (var i = tid; i < (job.end - job.first) * $(KD / 2)u; i += $(THREADS)u) {
        let at = centre + i % $(KD / 2)u;
        let low = rows[2u * i];
        let high = rows[2u * i + 1u];
        var pair = 0u;
        if job.makes_centre {
            pair = centre_of(bitcast<u32>(low)) | (centre_of(bitcast<u32>(high)) << 16u);
            centres[at] = pair;
        } else {
            pair = centres[at];
        }
        rows[2u * i] = low - bitcast<f32>(pair << 16u);
        rows[2u * i + 1u] = high - bitcast<f32>(pair & 0xFFFF0000u);
    }
    workgroupBarrier();
}
#end

#for SIDE in 0..2
// The parameters and codes of new tokens' K (SIDE 0) or V (SIDE 1).
#let S = SIDE == 0 ? K : V
#let D = SIDE == 0 ? KD : VD
#let G = SIDE == 0 ? KG : VG
#let GROUP_DIMS = SIDE == 0 ? K_GROUP_DIMS : V_GROUP_DIMS
#let SCALED = SIDE == 0 ? K_SCALED : V_SCALED
#let BITS = SIDE == 0 ? K_BITS : V_BITS
#let STRIDES = SIDE == 0 ? K_STRIDES : V_STRIDES
#let WINDOW = SIDE == 0 ? K_WINDOW : V_WINDOW
#let CODES = SIDE == 0 ? 0 : V_CODES * 4
#let RESIDUALS = SIDE == 0 ? 0 : V_RESIDUALS * 4
#let PARAMS = SIDE == 0 ? K_PARAMS : V_PARAMS

fn source_$(SIDE)_at(job: Job, head: u32, t: u32, d: u32) -> u32 {
    return source_$(SIDE)[((job.source + t - job.first) * params.num_kv_heads + head) * $(D)u + d];
}

fn element_$(SIDE)(job: Job, head: u32, t: u32, d: u32) -> u32 {
#if STRIDES > 0
    return bitcast<u32>(rows[(t - job.first) * $(D)u + d]);
#else
    return source_$(SIDE)_at(job, head, t, d);
#end
}

// The place of a token's group among the chunk's.
fn place_$(SIDE)(job: Job, t: u32, g: u32) -> u32 {
    return (t - job.first) * $(G)u + g;
}

// Scales (and shifts) of the job's tokens, which are a chunk's, into `param` and into the page.
fn parameters_$(SIDE)(job: Job, head: u32, tid: u32) {
#if SCALED
    let places = (job.end - job.first) * $(G)u;
    for (var i = tid; i < places; i += $(THREADS)u) {
        atomicStore(&low[i], 0xFFFFFFFFu);
        atomicStore(&high[i], 0u);
    }
    workgroupBarrier();
    for (var i = tid; i < (job.end - job.first) * $(D / 4)u; i += $(THREADS)u) {
        let t = job.first + i / $(D / 4)u;
        let d = i % $(D / 4)u * 4u;
        let at = place_$(SIDE)(job, t, d / $(GROUP_DIMS)u);
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
    for (var i = tid; i < places; i += $(THREADS)u) {
#if S == GROUPS
        param[i] = int4_param(bitcast<f32>(bits_of_key(atomicLoad(&low[i]))), bitcast<f32>(bits_of_key(atomicLoad(&high[i]))));
#elif S == STEPS
        param[i] = f16_of_sixteenth(atomicLoad(&high[i]));
#else
        param[i] = f16_of_part(atomicLoad(&high[i]), 127u);
#end
    }
    workgroupBarrier();
    let run = run_of(job.page, head);
#if S == GROUPS
    for (var i = tid; i < places; i += $(THREADS)u) {
        let t = job.first + i / $(G)u;
        store_word(run.buffer, run.at * 4u + $(PARAMS)u + i % $(G)u * $(PS)u + t, param[i]);
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
            word = insertBits(word, param[place_$(SIDE)(job, t + $(n)u, g)], $(16 * n)u, 16u);
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
    return int4_code(bitcast<f32>(x), param[place_$(SIDE)(job, t, d / $(GROUP_DIMS)u)]);
#elif S == STEPS
    return half_step_code(x, bitcast<u32>(f16_value(param[place_$(SIDE)(job, t, d / $(GROUP_DIMS)u)])));
#else
    return int8_code(x, bitcast<u32>(f16_value(param[place_$(SIDE)(job, t, d / $(GROUP_DIMS)u)])));
#end
}

// Codes (PART 0), and the residuals of half steps (PART 1).
#for PART in 0..(WINDOW > 0 ? 2 : 1)
// The bits of a code that this part stores.
fn stored_$(SIDE)_$(PART)(job: Job, head: u32, t: u32, d: u32) -> u32 {
#if S == STEPS
    return (code_$(SIDE)(job, head, t, d) >> $(4 - 4 * PART)u) & 15u;
#else
    return code_$(SIDE)(job, head, t, d);
#end
}

// Writes them into panels, a word at a time; a word that holds several tokens keeps the bytes of the others.
fn codes_$(SIDE)_$(PART)(job: Job, head: u32, tid: u32) {
#if PART == 0
    let run = run_of(job.page, head);
    let base = run.at * 4u + $(CODES)u;
#else
    let run = run_of(job.residual_page, head);
    let base = run.at * 4u + $(RESIDUALS)u;
#end
#if BITS == 16 || (SIDE == 0 && BITS == 8)
#let PER = 32 / BITS
    for (var i = tid; i < (job.end - job.first) * $(D / PER)u; i += $(THREADS)u) {
        let t = job.first + i / $(D / PER)u;
        let d = i % $(D / PER)u * $(PER)u;
        var word = 0u;
#for n in 0..PER
        word |= stored_$(SIDE)_$(PART)(job, head, t, d + $(n)u) << $(n * BITS)u;
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
                word |= stored_$(SIDE)_$(PART)(job, head, t, d + $(n)u) << $(8 * n)u;
#end
            }
            if writes_high {
#for n in 0..4
                word |= stored_$(SIDE)_$(PART)(job, head, t + 8u, d + $(n)u) << $(8 * n + 4)u;
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
                    word = insertBits(word, stored_$(SIDE)_$(PART)(job, head, token, d), $(8 * n)u, 8u);
#else
                    word = insertBits(word, stored_$(SIDE)_$(PART)(job, head, token, d) | (stored_$(SIDE)_$(PART)(job, head, token, d + 8u) << 4u), $(8 * n)u, 8u);
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

fn append_$(SIDE)(job: Job, head: u32, tid: u32) {
    parameters_$(SIDE)(job, head, tid);
    codes_$(SIDE)_0(job, head, tid);
#if WINDOW > 0
    if job.has_residuals {
        codes_$(SIDE)_1(job, head, tid);
    }
#end
}

// The job's tokens, chunk by chunk where they have parameters.
fn append_chunks_$(SIDE)(job: Job, head: u32, tid: u32) {
#if SCALED
    for (var first = job.first; first < job.end;) {
        var chunk = job;
        chunk.first = first;
        chunk.end = min(job.end, (first / $(CHUNK)u + 1u) * $(CHUNK)u);
        chunk.source = job.source + first - job.first;
#if STRIDES > 0
        for (var i = tid; i < (chunk.end - first) * $(D)u; i += $(THREADS)u) {
            rows[i] = bitcast<f32>(source_$(SIDE)_at(chunk, head, first + i / $(D)u, i % $(D)u));
        }
        rotate_rows((chunk.end - first) * $(D)u, $(STRIDES)u, exp2i(-$(STRIDES / 2)), tid);
#end
#if CENTRES && SIDE == 0
        centre_rows(chunk, head, tid);
#end
        append_$(SIDE)(chunk, head, tid);
        // The next chunk reads words that this one wrote.
        storageBarrier();
        workgroupBarrier();
        first = chunk.end;
    }
#else
    append_$(SIDE)(job, head, tid);
#end
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
#if CENTRES
    let job = Job(jobs[at], jobs[at + 1u], jobs[at + 2u], jobs[at + 3u], jobs[at + 4u], jobs[at + 5u] != 0u, jobs[at + 6u], jobs[at + 7u] != 0u);
#else
    let job = Job(jobs[at], jobs[at + 1u], jobs[at + 2u], jobs[at + 3u], jobs[at + 4u], jobs[at + 5u] != 0u);
#end
    if workgroup.z == 0u {
        append_chunks_0(job, head, tid);
    }
#if LATENTS
    // A binding that nothing reads would be in no layout.
    _ = arrayLength(&source_1);
#else
    else {
        append_chunks_1(job, head, tid);
    }
#end
}
