//! candle's tensors as rows `[tokens, heads, head_dim]`, sequence after sequence.

use attn::Rows;
use candle_core::{CpuStorage, DType, DeviceLocation, Storage, Tensor};

use crate::Error;

/// What a tensor is called, the heads that it must have, and where the cache is.
#[derive(Clone, Copy)]
pub struct Expected {
    pub what: &'static str,
    pub heads: usize,
    pub dim: usize,
    pub device: DeviceLocation,
    /// Whether kernels read tokens that lie apart: those of K and V.
    #[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code))]
    pub tokens_apart: bool,
}

/// A tensor `[batch, heads, tokens, head_dim]` whose last dimension is contiguous.
pub struct TensorRows {
    tensor: Tensor,
    pub tokens: usize,
    #[cfg(any(test, feature = "cuda"))]
    tokens_apart: bool,
}

impl TensorRows {
    /// The tensor's rows: in place in any order of the other dimensions, such as after `reshape((batch, tokens, heads, dim))?.transpose(1, 2)`,
    /// behind `rope`, or as a part of a fused projection; a copy where a row's elements lie apart.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::DType`], [`Error::Shape`], [`Error::Batch`].
    pub fn new(expected: Expected, tensor: &Tensor, sequences: usize) -> Result<Self, Error> {
        let Expected {
            what,
            heads,
            dim,
            device,
            ..
        } = expected;
        let given = tensor.device().location();
        if given != device {
            return Err(Error::Device {
                what,
                given,
                allowed: device,
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
        Ok(TensorRows {
            tensor,
            tokens,
            #[cfg(any(test, feature = "cuda"))]
            tokens_apart: expected.tokens_apart,
        })
    }

    /// The type of the numbers.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// Calls `work` with the rows, which are not copied on the CPU; on a GPU as [`TensorRows::on_device`] says.
    pub fn read<T>(&self, work: impl FnOnce(Rows<'_>) -> Result<T, Error>) -> Result<T, Error> {
        #[cfg(feature = "cuda")]
        if self.tensor.device().is_cuda() {
            let (rows, stride) = self.on_device()?;
            return crate::device::read(&rows, stride, work);
        }
        let (storage, layout) = self.tensor.storage_and_layout();
        let (batch, heads, tokens, dim) = layout.shape().dims4()?;
        let [of_batch, of_head, of_token, _] = *layout.stride() else {
            unreachable!("`new` takes tensors of four dimensions alone");
        };
        let (shape, strides) = ([batch, tokens, heads, dim], [of_batch, of_token, of_head]);
        let start = layout.start_offset();
        let rows = match &*storage {
            Storage::Cpu(CpuStorage::F32(x)) => Rows::strided_batch(from(x, start), shape, strides),
            Storage::Cpu(CpuStorage::F16(x)) => Rows::strided_batch(from(x, start), shape, strides),
            Storage::Cpu(CpuStorage::BF16(x)) => {
                Rows::strided_batch(from(x, start), shape, strides)
            }
            _ => unreachable!("`new` takes tensors of these types alone, on devices with caches"),
        };
        work(rows?)
    }

    /// The rows as kernels of a GPU read them, and the elements from one token to the next: a tensor `[batch, tokens, heads, head_dim]` whose heads lie side by
    /// side and whose tokens lie equally far apart, sequence after sequence. In place where it lies so and rows begin at multiples of 16 bytes, such
    /// as projections leave it; else a copy.
    ///
    /// # Errors
    /// [`Error::Candle`] if the copy fails.
    #[cfg(any(test, feature = "cuda"))]
    pub fn on_device(&self) -> Result<(Tensor, usize), Error> {
        let rows = self.tensor.transpose(1, 2)?;
        let (batch, tokens, heads, dim) = rows.dims4()?;
        let (layout, side_by_side) = (rows.layout(), heads * dim);
        let [of_batch, of_token, of_head, _] = *layout.stride() else {
            unreachable!("`new` takes tensors of four dimensions alone");
        };
        let stride = match (batch, tokens) {
            (_, 2..) => of_token,
            (2.., _) => of_batch,
            _ => side_by_side,
        };
        let is_aligned =
            |elements: usize| (elements * rows.dtype().size_in_bytes()).is_multiple_of(16);
        let lies = (self.tokens_apart || stride == side_by_side)
            && (heads == 1 || of_head == dim)
            && (batch <= 1 || tokens <= 1 || of_batch == tokens * of_token)
            && is_aligned(layout.start_offset())
            && is_aligned(stride);
        if lies {
            return Ok((rows, stride));
        }
        Ok((rows.force_contiguous()?, side_by_side))
    }
}

/// The elements from `start` on. A tensor without elements may begin behind its memory's end, as a part of none of another part does.
fn from<T>(elements: &[T], start: usize) -> &[T] {
    elements.get(start..).unwrap_or_default()
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
        device: DeviceLocation::Cpu,
        tokens_apart: true,
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
            Some(Elements::F32(x)) => Ok((rows.len(), x.as_ptr())),
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

    #[test]
    fn a_tensor_without_elements_may_begin_behind_its_memory() {
        let counted = Tensor::arange(0f32, 96.0, &Device::Cpu).unwrap();
        let all = counted.reshape((1, 2, 12, 4)).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let all = all.to_dtype(dtype).unwrap();
            let none = all.narrow(0, 1, 0).unwrap().narrow(2, 12, 0).unwrap();
            assert_eq!(none.layout().start_offset(), 96 + 48);
            let rows = TensorRows::new(EXPECTED, &none, 0).unwrap();
            assert_eq!(rows.read(|rows| Ok(rows.len())).unwrap(), 0);
        }
    }

    /// Whether a GPU's kernels read the tensor in place, and the elements from token to token.
    fn lies(tensor: &Tensor) -> (bool, usize) {
        let rows = TensorRows::new(EXPECTED, tensor, tensor.dims()[0]).unwrap();
        let (found, stride) = rows.on_device().unwrap();
        let wanted = tensor.transpose(1, 2).unwrap();
        let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(values(&found), values(&wanted));
        // Token n of all sequences begins n strides behind the first.
        let (storage, layout) = found.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(all)) = &*storage else {
            panic!("an f32 tensor of the CPU");
        };
        for (n, token) in values(&wanted).chunks(8).enumerate() {
            assert_eq!(all[layout.start_offset() + n * stride..][..8], *token);
        }
        let own = tensor.storage_and_layout().0;
        let Storage::Cpu(CpuStorage::F32(given)) = &*own else {
            panic!("an f32 tensor of the CPU");
        };
        (all.as_ptr() == given.as_ptr(), stride)
    }

    #[test]
    fn kernels_read_rows_in_place_where_heads_lie_side_by_side() {
        let counted = Tensor::arange(0f32, 96.0, &Device::Cpu).unwrap();
        let projected = counted.reshape((4, 3, 2, 4)).unwrap();
        assert_eq!(lies(&projected.transpose(1, 2).unwrap()), (true, 8));
        let second = projected.narrow(0, 1, 1).unwrap();
        assert_eq!(lies(&second.transpose(1, 2).unwrap()), (true, 8));
        // One token of each sequence; K of a fused projection, one sequence and several.
        assert_eq!(lies(&counted.reshape((12, 2, 1, 4)).unwrap()), (true, 8));
        let fused = counted.reshape((2, 3, 4, 4)).unwrap();
        let part = fused.narrow(2, 2, 2).unwrap().transpose(1, 2).unwrap();
        assert_eq!(lies(&part), (true, 16));
        let queries = Expected {
            tokens_apart: false,
            ..EXPECTED
        };
        let copied = TensorRows::new(queries, &part, 2).unwrap().on_device();
        assert_eq!(copied.unwrap().1, 8);
        // Heads before tokens; a sequence left out between two; tokens that begin within 16 bytes.
        assert_eq!(lies(&counted.reshape((4, 2, 3, 4)).unwrap()), (false, 8));
        let tokens = projected.narrow(1, 0, 2).unwrap();
        assert_eq!(lies(&tokens.transpose(1, 2).unwrap()), (false, 8));
        let odd = counted.narrow(0, 1, 72).unwrap().reshape((1, 9, 2, 4));
        assert_eq!(lies(&odd.unwrap().transpose(1, 2).unwrap()), (false, 8));
    }
}
