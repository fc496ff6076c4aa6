//! Number formats of rows on the device.

/// Number format of an engine's rows: K and V to append, queries, outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// Single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// The kernels' number of the format: `Dtype` of `dtype.cuh`.
    pub(super) fn code(self) -> i32 {
        match self {
            Dtype::F32 => 0,
            Dtype::F16 => 1,
            Dtype::Bf16 => 2,
        }
    }
}
