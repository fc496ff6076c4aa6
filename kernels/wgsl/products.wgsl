// products.wgsl: packed dot products of bytes and nothing else: the ceiling of decode_split.wgsl where query rows are many.
//
// Grid       (any); 64 threads.
// Reads      words: {rounds, 16 words of codes}.
// Writes     sums: of each lane, all of its sums in one word.
// Numerics   i32; a sum wraps. Each sum is an operand of its own next product, so that no product can leave the loop; a product and its
//            addition are those of dot16 in scores.wgsl.
// Host       crates/attn-wgpu/src/internals.rs; crates/attn-bench/src/wgpu/products.rs counts CHAINS · UNROLLED products for each lane and round.
#let CHAINS = 16
#let UNROLLED = 4
@group(0) @binding(0) var<storage, read> words: array<u32>;
@group(0) @binding(1) var<storage, read_write> sums: array<u32>;

@compute @workgroup_size(64)
fn products(@builtin(global_invocation_id) id: vec3<u32>) {
    let rounds = words[0];
    let last = arrayLength(&words) - 1u;
#for c in 0..CHAINS
    let code_$(c) = words[min($(c + 1)u, last)];
    var sum_$(c) = i32(id.x + $(c)u);
#end
    for (var i = 0u; i < rounds; i++) {
#for n in 0..UNROLLED
#for c in 0..CHAINS
        sum_$(c) = dot4I8Packed(code_$((c + n) % CHAINS), bitcast<u32>(sum_$(c))) + sum_$(c);
#end
#end
    }
    var all = 0;
#for c in 0..CHAINS
    all ^= sum_$(c);
#end
    if id.x < arrayLength(&sums) {
        sums[id.x] = bitcast<u32>(all);
    }
}
