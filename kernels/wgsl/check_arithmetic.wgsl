// check_arithmetic.wgsl: each function of arithmetic.wgsl on given inputs, one per thread, to compare with the CPU's bits (crates/attn-wgpu/src/arithmetic.rs).
#include "arithmetic_params"

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> inputs: array<vec4<f32>>;      // x, y, z, function
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
#include "arithmetic.wgsl"

@compute @workgroup_size(64)
fn check_arithmetic(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= arrayLength(&inputs) {
        return;
    }
    let i = inputs[id.x];
    let x = i.x;
    let y = i.y;
    let z = i.z;
    var v = 0.0;
    switch u32(i.w) {
        case 0u: { v = exp2w(min(-x, 64.0)); }
        case 1u: { v = exp2f(x); }
        case 2u: { v = rcp(y); }
        case 3u: { v = log_sum_exp(ceil(x), y); }
        case 4u: { v = softcap(x, y, z); }
        case 5u: { v = product(x, y) + z; }
        case 6u: { v = f32(rhe(product(x, y))); }
        case 7u: { v = f32(bitcast<i32>(z)); }
        case 8u: { v = f16_value(bitcast<u32>(z) & 0x7FFFu); }
        case 9u: { v = ftz(x * exp2i(-20)) + z * exp2i(-3); }
        case 10u: { v = from_order_key(order_key(ceil(x))); }
        case 11u: { v = pow2(-ceil(x)); }
        case 12u: { v = f32(weight_units(exp2w(min(-x, 64.0)))); }
        // Not specified: shows whether the compiler contracts a product and a sum.
        case 13u: { v = x * y + z; }
        case 14u: { v = 2.0 - x * y; }
        case 15u: { v = bitcast<f32>(bitcast<u32>(x * y + ROUND)); }
        case 16u: { v = z * (2.0 - x * y); }
        case 17u: { v = (x + params.round_up) - params.round_down; }
        case 18u: { v = query_step(y).x; }
        case 19u: { v = query_step(y).y; }
        case 20u: { v = weight_step(y, COARSE_STEP); }
        case 21u: { v = weight_step(y, FINE_STEP); }
        default: { v = f32(weight_byte(-x, 2.0, threshold(u32(y))) >> 8u); }

    }
    results[id.x] = bitcast<u32>(v);
}
