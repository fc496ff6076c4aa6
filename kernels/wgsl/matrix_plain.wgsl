// matrix_plain.wgsl: cooperative matrices and subgroups of 32 in plain WGSL, for adapters without them: what matrix_split.wgsl computes, slowly.
// Included by matrix.wgsl; the four parts of the workgroup pass here together.
var<private> thread: u32;
var<workgroup> lanes: array<u32, 128>;
var<workgroup> planes: array<u32, $(16 * A_STRIDE)>;         // of q, where the kernel keeps matrices in registers

// Lane l of a part has elements 8 l .. 8 l + 7 of 16 rows of 16.
alias Matrix = array<f32, 8>;

fn lanes_max(x: u32) -> u32 {
    workgroupBarrier();
    lanes[thread] = x;
    workgroupBarrier();
    var m = 0u;
    for (var i = 0u; i < 32u + params.zero; i++) {
        m = max(m, lanes[(thread & 96u) + i]);
    }
    return m;
}

fn lanes_sum(x: i32) -> i32 {
    workgroupBarrier();
    lanes[thread] = bitcast<u32>(x);
    workgroupBarrier();
    var sum = 0u;
    for (var i = 0u; i < 32u + params.zero; i++) {
        sum += lanes[(thread & 96u) + i];
    }
    return bitcast<i32>(sum);
}

fn lanes_swap(x: u32) -> u32 {
    workgroupBarrier();
    lanes[thread] = x;
    workgroupBarrier();
    return lanes[thread ^ 1u];
}

fn bytes_of(word: u32) -> Bytes {
    return word;
}

fn small(x: vec4<i32>) -> Bytes {
    return pack4xI8(x);
}

// The k-th of 16 bytes from word `at`.
fn signed_byte(word: u32, k: u32) -> f32 {
    return f32(extractBits(bitcast<i32>(word), 8u * (k & 3u), 8u));
}

// u * 2^-24, as a subnormal f16 is.
fn unsigned_byte(word: u32, k: u32) -> f32 {
    return f32(extractBits(word, 8u * (k & 3u), 8u)) * exp2i(-24);
}

// c + q times the staged codes of `count` units from `first`. Bounds are no constants: unrolled, compilers take minutes.
fn add_scores(first: u32, count: u32, c: Matrix) -> Matrix {
    var sum = c;
    for (var k = 0u; k < 16u * count + params.zero; k++) {
        for (var j = 0u; j < 8u + params.zero; j++) {
            let e = (thread & 31u) * 8u + j;
            let code = stage[((thread >> 5u) * 16u + (e & 15u)) * $(S_STRIDE)u + (k >> 2u)];
            sum[j] += signed_byte(planes[(e >> 4u) * $(A_STRIDE)u + first * 4u + (k >> 2u)], k) * unsigned_byte(code, k);
        }
    }
    return sum;
}

// c + weights times the staged codes of `count` panels of 16 tokens from `first`.
fn add_values(first: u32, count: u32, c: Matrix) -> Matrix {
    var sum = c;
    for (var k = 0u; k < 16u * count + params.zero; k++) {
        for (var j = 0u; j < 8u + params.zero; j++) {
            let e = (thread & 31u) * 8u + j;
            let code = stage[((thread >> 5u) * 16u + (e & 15u)) * $(S_STRIDE)u + (k >> 2u)];
            sum[j] += unsigned_byte(weights[(e >> 4u) * $(W_STRIDE)u + first * 4u + (k >> 2u)], k) * unsigned_byte(code, k);
        }
    }
    return sum;
}

fn store_sums(m: Matrix) {
    for (var j = 0u; j < 8u + params.zero; j++) {
        let e = (thread & 31u) * 8u + j;
        sums[(thread >> 5u) * $(SUMS)u + (e >> 4u) * 20u + (e & 15u)] = m[j];
    }
}
