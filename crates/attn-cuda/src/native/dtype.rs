//! Number formats of rows on the device.

pub use attn_core::Dtype;

/// The kernels' number of a type of numbers: `Dtype` of `dtype.cuh`.
pub(super) fn code(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
    }
}
