//! Queries and outputs in an engine's number format.

use attn_cuda::native::Dtype;
use half::{bf16, f16};

/// The numbers, rounded to nearest even, as they lie in memory.
pub fn bytes(dtype: Dtype, numbers: &[f32]) -> Vec<u8> {
    let narrow = |bits: &dyn Fn(f32) -> u16| -> Vec<u8> {
        numbers
            .iter()
            .flat_map(|&x| bits(x).to_le_bytes())
            .collect()
    };
    match dtype {
        Dtype::F32 => bytemuck::cast_slice(numbers).to_vec(),
        Dtype::F16 => narrow(&|x| f16::from_f32(x).to_bits()),
        Dtype::Bf16 => narrow(&|x| bf16::from_f32(x).to_bits()),
    }
}

/// The numbers that bytes hold, in f32.
pub fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let widen = |number: &dyn Fn(u16) -> f32| -> Vec<f32> {
        bytes
            .chunks_exact(2)
            .map(|x| number(u16::from_le_bytes([x[0], x[1]])))
            .collect()
    };
    match dtype {
        Dtype::F32 => bytes
            .chunks_exact(4)
            .map(bytemuck::pod_read_unaligned)
            .collect(),
        Dtype::F16 => widen(&|bits| f16::from_bits(bits).to_f32()),
        Dtype::Bf16 => widen(&|bits| bf16::from_bits(bits).to_f32()),
    }
}

/// Numbers rounded to the format.
pub fn rounded(dtype: Dtype, x: &[f32]) -> Vec<f32> {
    numbers(dtype, &bytes(dtype, x))
}
