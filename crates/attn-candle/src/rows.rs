//! candle's tensors as rows `[tokens, heads, head_dim]`, sequence after sequence.

use attn::Rows;
use candle_core::{CpuStorage, DType, Storage, Tensor};

use crate::Error;

/// What a tensor is called, and the heads that it must have.
#[derive(Clone, Copy)]
pub struct Expected {
    pub what: &'static str,
    pub heads: usize,
    pub dim: usize,
}

/// A tensor `[batch, heads, tokens, head_dim]` whose last dimension is contiguous.
pub struct TensorRows {
    tensor: Tensor,
    pub tokens: usize,
}

impl TensorRows {
    /// The tensor's rows: in place in any order of the other dimensions, such as after `reshape((batch, tokens, heads, dim))?.transpose(1, 2)`,
    /// behind `rope`, or as a part of a fused projection; a copy where a row's elements lie apart.
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
        let tensor = match *tensor.stride() {
            [.., 1] => tensor.clone(),
            _ => tensor.contiguous()?,
        };
        Ok(TensorRows { tensor, tokens })
    }

    /// Calls `work` with the rows, which are not copied.
    pub fn read<T>(&self, work: impl FnOnce(Rows<'_>) -> Result<T, Error>) -> Result<T, Error> {
        let (storage, layout) = self.tensor.storage_and_layout();
        let (batch, heads, tokens, dim) = layout.shape().dims4()?;
        let [of_batch, of_head, of_token, _] = *layout.stride() else {
            unreachable!("`new` takes tensors of four dimensions alone");
        };
        let (shape, strides) = ([batch, tokens, heads, dim], [of_batch, of_token, of_head]);
        let start = layout.start_offset();
        let rows = match &*storage {
            Storage::Cpu(CpuStorage::F32(x)) => Rows::strided_batch(&x[start..], shape, strides),
            Storage::Cpu(CpuStorage::F16(x)) => Rows::strided_batch(&x[start..], shape, strides),
            Storage::Cpu(CpuStorage::BF16(x)) => Rows::strided_batch(&x[start..], shape, strides),
            _ => unreachable!("`new` takes tensors of these types on the CPU alone"),
        };
        work(rows?)
    }
}

#[cfg(test)]
mod tests {
    use attn::Elements;
    use candle_core::Device;

    use super::*;

    const EXPECTED: Expected = Expected {
        what: "k",
        heads: 2,
        dim: 4,
    };

    /// Whether the rows are the tensor's own memory.
    fn is_in_place(tensor: &Tensor) -> bool {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(all)) = &*storage else {
            panic!("an f32 tensor of the CPU");
        };
        let own = all[layout.start_offset()..].as_ptr();
        let rows = TensorRows::new(EXPECTED, tensor, tensor.dims()[0]).unwrap();
        let found = rows.read(|rows| match rows.elements() {
            Elements::F32(x) => Ok((rows.len(), x.as_ptr())),
            _ => panic!("an f32 tensor"),
        });
        let (len, address) = found.unwrap();
        assert_eq!(len, tensor.elem_count());
        address == own
    }

    #[test]
    fn rows_are_read_in_place_unless_their_elements_lie_apart() {
        let counted = Tensor::arange(0f32, 96.0, &Device::Cpu).unwrap();
        let projected = counted.reshape((4, 3, 2, 4)).unwrap();
        assert!(is_in_place(&projected.transpose(1, 2).unwrap()));
        let second = projected.narrow(0, 1, 1).unwrap();
        assert!(is_in_place(&second.transpose(1, 2).unwrap()));
        assert!(is_in_place(&counted.reshape((12, 2, 1, 4)).unwrap()));
        // As `rope` leaves them: heads before tokens.
        assert!(is_in_place(&counted.reshape((4, 2, 3, 4)).unwrap()));
        let fused = counted.reshape((2, 3, 4, 4)).unwrap();
        let part = fused.narrow(2, 1, 2).unwrap().transpose(1, 2).unwrap();
        assert!(is_in_place(&part));
        let apart = counted.reshape((4, 2, 4, 3)).unwrap();
        assert!(!is_in_place(&apart.transpose(2, 3).unwrap()));
    }
}
