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
        case 0u: { v = exp2f(x); }
        case 1u: { v = rcp(y); }
        case 2u: { v = log_sum_exp(ceil(x), y); }
        case 3u: { v = softcap(x, y, z); }
        case 4u: { v = product(x, y) + z; }
        case 5u: { v = f32(rhe(product(x, y))); }
        case 6u: { v = f32(bitcast<i32>(z)); }
        case 7u: { v = f16_value(bitcast<u32>(z) & 0x7FFFu); }
        case 8u: { v = ftz(x * exp2i(-20)) + z * exp2i(-3); }
        case 9u: { v = bitcast<f32>(bits_of_key(key_of(bitcast<u32>(ceil(x))))); }
        case 10u: { v = pow2(ceil(x) + 40.0); }
        case 11u: { v = f32(weight_units(exp2f(x))); }
        // Not specified: shows whether the compiler contracts a product and a sum.
        case 12u: { v = x * y + z; }
        case 13u: { v = 2.0 - x * y; }
        case 14u: { v = bitcast<f32>(bitcast<u32>(x * y + ROUND)); }
        case 15u: { v = z * (2.0 - x * y); }
        case 16u: { v = (x + params.round_up) - params.round_down; }
        case 17u: { v = query_step(y).x; }
        case 18u: { v = query_step(y).y; }
        case 19u: {
            let factors = fold_factors(ceil(x), ceil(x) + ceil(z));
            v = select(factors.x, factors.y * factors.z, y < 4.0);
        }
        case 20u: {
            let factors = merge_factors(ceil(x), ceil(x) + ceil(z));
            v = select(factors.x, factors.y * factors.z, y < 4.0);
        }
        case 21u: {
            var s = product(x, y);
            if is_tie(s) {
                s = bitcast<f32>(bitcast<i32>(s) + tie_step(x, y, s));
            }
            v = bitcast<f32>(grid_bits(s));
        }
        case 22u: { v = tile_exponent(score_key(x)); }
        case 23u: { v = f32(weight_point(bitcast<f32>(bitcast<i32>(y) + i32(z)), i32(z), score_key(x))); }
        case 24u: { v = point_value(i32(x)); }
        case 25u: { v = f32(f16_units(i32(x), point_value(i32(x)))); }
        case 26u: { v = f32(scale_point(x)); }
        case 27u: { v = weight_step(point_value(i32(x)), select(COARSE_STEP, FINE_STEP, y == 2.0)); }
        case 28u: { v = step_inverse(weight_step(point_value(i32(x)), select(COARSE_STEP, FINE_STEP, y == 2.0))); }
        case 29u: { v = bitcast<f32>(min(based_bits(x, y, z), GRID_START_BITS + GRID_BITS)); }
        case 30u: { v = based_exponent(x, y, z); }
        case 31u: { v = far_score(x, y, z); }
        default: {
            // Of a weight and a scale whose points add up to x.
            let scale = (i32(x) * 7) & 63;
            let scaled = point_value(i32(x) - scale) * point_value(scale);
            v = f32(weight_byte(scaled, step_inverse(y), threshold(u32(z))) >> 8u);
        }
    }
    results[id.x] = bitcast<u32>(v);
}
