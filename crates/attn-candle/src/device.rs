//! Steps of a cache on a GPU, over candle's memory and on the stream of candle's device.

use attn::{
    Append, CacheLayer, KvCache, Problem,
    backends::cuda::{
        DeviceSteps, QueryRows,
        native::{DeviceAddress, Dtype, KvRows, Stream},
    },
};
use candle_core::{
    CudaDevice, CudaStorage, DType, Shape, Storage, Tensor,
    cuda_backend::{
        CudaDType, CudaStorageSlice,
        cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr},
    },
    op::BackpropOp,
};

use crate::{Error, rows::TensorRows};

/// What the steps of a cache keep on its GPU.
pub struct Steps {
    steps: DeviceSteps,
    device: CudaDevice,
}

impl Steps {
    /// # Errors
    /// [`Error::Attention`] with those of [`attn::backends::cuda::CudaBackend::prepare_steps`].
    pub fn new(device: &CudaDevice, own: &attn::Device, cache: &KvCache) -> Result<Self, Error> {
        Ok(Steps {
            steps: own.cuda("the cache")?.prepare_steps(cache)?,
            device: device.clone(),
        })
    }

    pub fn append(
        &mut self,
        cache: &mut KvCache,
        appends: &[Append],
        rows: [&TensorRows; 2],
    ) -> Result<(), Error> {
        self.with_tokens(rows, |steps, tokens, stream| {
            // SAFETY: `with_tokens` gives a live stream of the device's primary context and as many rows as K has tokens, which the caller has made the
            // appends of; memory is freed in the stream's order. Numbers that are not finite give rows that mean nothing.
            Ok(unsafe { steps.append(cache, appends, tokens, stream) }?)
        })
    }

    pub fn reserve(&mut self, cache: &mut KvCache, appends: &[Append]) -> Result<(), Error> {
        Ok(self.steps.reserve(cache, appends)?)
    }

    pub fn write(
        &mut self,
        cache: &mut KvCache,
        layer: usize,
        rows: [&TensorRows; 2],
    ) -> Result<(), Error> {
        let given = rows[0].tokens;
        // Without an open step the write is refused, whatever its rows.
        let mut appends = cache.open_step().into_iter().flatten();
        if let Some(append) = appends.find(|append| append.tokens != given) {
            return Err(Error::Tokens {
                what: "k",
                given,
                needed: append.tokens,
            });
        }
        self.with_tokens(rows, |steps, tokens, stream| {
            // SAFETY: as for appends; each sequence of the open step has as many tokens as K, and K a row of the batch for each of them.
            Ok(unsafe { steps.write(cache, layer, tokens, stream) }?)
        })
    }

    /// Waits for the steps before, which a change of what they write needs.
    pub fn wait(&self) -> Result<(), Error> {
        Ok(self.steps.wait()?)
    }

    /// One step of a layer, into a new tensor of this shape, whose numbers are the queries'.
    pub fn attend<T: CudaDType + DeviceRepr>(
        &mut self,
        layer: CacheLayer<'_>,
        sequences: &[usize],
        problem: &Problem,
        rows: &TensorRows,
        shape: Shape,
    ) -> Result<Tensor, Error> {
        let chosen = layer.sequences(sequences)?;
        let (q, stride) = rows.on_device()?;
        let q = match stride == problem.num_q_heads * problem.head_dim {
            true => q,
            false => q.contiguous()?,
        };
        let dtype = number_format(q.dtype());
        let stream = self.device.cuda_stream();
        // SAFETY: the step below writes every element: a row for each query token and head, of sequences without tokens, too. If it is refused, the memory
        // is freed unread.
        let mut out = unsafe { self.device.alloc::<T>(shape.elem_count()) }?;
        with_address(&q, &stream, |q| {
            let (address, _written) = out.device_ptr_mut(&stream);
            let rows = QueryRows {
                q,
                out: DeviceAddress::new(address),
                dtype,
                lse: DeviceAddress::NULL,
            };
            // SAFETY: a live stream of the device's primary context; the queries are a tensor `[batch, tokens, heads, dim]` of the problem's, side by side and at
            // a multiple of 16 bytes, and the output is new memory of the same size; both are freed in the stream's order.
            unsafe { self.steps.attend(&chosen, problem, &rows, handle(&stream)) }
        })?;
        let storage = CudaStorage::wrap_cuda_slice(out, self.device.clone());
        let (storage, none) = (Storage::Cuda(storage), BackpropOp::none());
        Ok(Tensor::from_storage(storage, shape, none, false))
    }

    /// Calls `work` with rows of K and V in the cache's memory, and the stream.
    fn with_tokens(
        &mut self,
        [k, v]: [&TensorRows; 2],
        work: impl FnOnce(&mut DeviceSteps, &KvRows, Stream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if v.tokens != k.tokens {
            return Err(Error::Tokens {
                what: "v",
                given: v.tokens,
                needed: k.tokens,
            });
        }
        let ((k, k_token_stride), (v, v_token_stride)) = (k.on_device()?, v.on_device()?);
        if v.dtype() != k.dtype() {
            return Err(Error::DType {
                what: "v",
                given: v.dtype(),
                allowed: "on a GPU that of k; convert one with to_dtype",
            });
        }
        let (dtype, stream) = (number_format(k.dtype()), self.device.cuda_stream());
        with_address(&k, &stream, |k| {
            with_address(&v, &stream, |v| {
                let tokens = KvRows {
                    k,
                    v,
                    dtype,
                    k_token_stride,
                    v_token_stride,
                };
                work(&mut self.steps, &tokens, handle(&stream))
            })
        })
    }
}

fn handle(stream: &CudaStream) -> Stream {
    Stream::from_raw(stream.cu_stream().cast())
}

/// The number format of a tensor that is a [`TensorRows`].
fn number_format(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// Calls `work` with the address of a tensor's first element. What `work` enqueues on the stream comes behind what other streams write there, and ahead of
/// the memory's end.
fn with_address<R>(
    tensor: &Tensor,
    stream: &CudaStream,
    work: impl FnOnce(DeviceAddress) -> R,
) -> R {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        unreachable!("`TensorRows::new` has compared the tensor's device with the cache's");
    };
    let start = layout.start_offset();
    match &storage.slice {
        CudaStorageSlice::F32(x) => at(x, start, stream, work),
        CudaStorageSlice::F16(x) => at(x, start, stream, work),
        CudaStorageSlice::BF16(x) => at(x, start, stream, work),
        _ => unreachable!("`TensorRows::new` takes tensors of these types alone"),
    }
}

fn at<T, R>(
    memory: &CudaSlice<T>,
    start: usize,
    stream: &CudaStream,
    work: impl FnOnce(DeviceAddress) -> R,
) -> R {
    let (first, _read) = memory.device_ptr(stream);
    work(DeviceAddress::new(first + (start * size_of::<T>()) as u64))
}
