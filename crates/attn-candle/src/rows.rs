//! candle's tensors as rows `[tokens, heads, head_dim]`, sequence after sequence.

use attn::Elements;
use candle_core::{CpuStorage, DType, Storage, Tensor};

use crate::Error;

/// What a tensor is called, and the heads that it must have.
#[derive(Clone, Copy)]
pub struct Expected {
    pub what: &'static str,
    pub heads: usize,
    pub dim: usize,
}

/// A tensor `[batch, heads, tokens, head_dim]` whose memory is `[batch, tokens, heads, head_dim]`.
pub struct Rows {
    tensor: Tensor,
    pub tokens: usize,
}

impl Rows {
    /// The tensor's rows: in place where they lie side by side, such as after `reshape((batch, tokens, heads, dim))?.transpose(1, 2)`, or with one
    /// token per sequence; else a copy.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::DType`], [`Error::Shape`], [`Error::Batch`].
    pub fn new(expected: Expected, tensor: &Tensor, sequences: usize) -> Result<Self, Error> {
        let Expected { what, heads, dim } = expected;
        if !tensor.device().is_cpu() {
            return Err(Error::Device {
                what,
                given: tensor.device().location(),
            });
        }
        if !matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::DType {
                what,
                given: tensor.dtype(),
                allowed: "f32, f16, bf16; convert it with to_dtype",
            });
        }
        let (batch, tokens) = match *tensor.dims() {
            [batch, h, tokens, d] if h == heads && d == dim => (batch, tokens),
            _ => {
                return Err(Error::Shape {
                    what,
                    given: tensor.dims().to_vec(),
                    allowed: format!("[batch, {heads} heads, tokens, {dim}]"),
                });
            }
        };
        if batch != sequences {
            return Err(Error::Batch {
                what,
                given: batch,
                needed: sequences,
            });
        }
        Ok(Rows {
            tensor: tensor.transpose(1, 2)?.contiguous()?,
            tokens,
        })
    }

    /// Calls `work` with the elements, which are not copied.
    pub fn read<T>(&self, work: impl FnOnce(Elements<'_>) -> Result<T, Error>) -> Result<T, Error> {
        let (storage, layout) = self.tensor.storage_and_layout();
        let own = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
        match &*storage {
            Storage::Cpu(CpuStorage::F32(x)) => work(x[own].into()),
            Storage::Cpu(CpuStorage::F16(x)) => work(x[own].into()),
            Storage::Cpu(CpuStorage::BF16(x)) => work(x[own].into()),
            _ => unreachable!("`new` takes tensors of these types on the CPU alone"),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    const EXPECTED: Expected = Expected {
        what: "k",
        heads: 2,
        dim: 4,
    };

    fn address(tensor: &Tensor) -> *const f32 {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(all)) = &*storage else {
            panic!("an f32 tensor of the CPU");
        };
        all[layout.start_offset()..].as_ptr()
    }

    fn is_in_place(tensor: &Tensor) -> bool {
        let rows = Rows::new(EXPECTED, tensor, tensor.dims()[0]).unwrap();
        rows.read(|elements| match elements {
            Elements::F32(x) => Ok(x.as_ptr() == address(tensor)),
            _ => panic!("an f32 tensor"),
        })
        .unwrap()
    }

    #[test]
    fn rows_that_lie_side_by_side_are_read_in_place_and_others_are_copied() {
        let counted = Tensor::arange(0f32, 48.0, &Device::Cpu).unwrap();
        let projected = counted.reshape((2, 3, 2, 4)).unwrap();
        assert!(is_in_place(&projected.transpose(1, 2).unwrap()));
        let second = projected.narrow(0, 1, 1).unwrap();
        assert!(is_in_place(&second.transpose(1, 2).unwrap()));
        assert!(is_in_place(&counted.reshape((6, 2, 1, 4)).unwrap()));
        assert!(!is_in_place(&counted.reshape((2, 2, 3, 4)).unwrap()));
    }

    #[test]
    fn a_copy_has_the_order_of_the_rows() {
        let counted = Tensor::arange(0f32, 24.0, &Device::Cpu).unwrap();
        let tensor = counted.reshape((1, 2, 3, 4)).unwrap();
        let rows = Rows::new(EXPECTED, &tensor, 1).unwrap();
        rows.read(|elements| {
            let firsts: Vec<f32> = elements.widened("k")?.iter().step_by(4).copied().collect();
            assert_eq!(firsts, [0.0, 12.0, 4.0, 16.0, 8.0, 20.0]);
            Ok(())
        })
        .unwrap();
    }
}
