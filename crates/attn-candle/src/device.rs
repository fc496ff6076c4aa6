//! Tensors in a GPU's memory as rows of the library, on the stream of candle's device.

use attn::{
    Dtype, Rows, RowsMut,
    backends::cuda::{
        CudaMemory,
        native::{DeviceAddress, Stream},
    },
};
use candle_core::{
    CudaDevice, CudaStorage, DType, DeviceLocation, Shape, Storage, Tensor, WithDType,
    backend::BackendDevice,
    cuda_backend::{
        CudaDType, CudaStorageSlice,
        cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr},
    },
    op::BackpropOp,
};

use crate::Error;

/// Calls `work` with the rows of a tensor `[batch, tokens, heads, head_dim]` of which token after token begins `token_stride` elements further on. What `work` enqueues on
/// the stream comes behind what other streams write there, and ahead of the memory's end.
pub fn read<R>(
    tensor: &Tensor,
    token_stride: usize,
    work: impl FnOnce(Rows<'_>) -> Result<R, Error>,
) -> Result<R, Error> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        unreachable!("the caller has seen that the tensor is on a GPU");
    };
    let (batch, tokens, heads, dim) = layout.shape().dims4()?;
    let (device, start) = (&storage.device, layout.start_offset());
    let (dtype, stream) = (number_format(tensor.dtype()), device.cuda_stream());
    let rows = |at: DeviceAddress, elements: usize| {
        // SAFETY: a live stream of the device's primary context; the tensor has the numbers, of its type, and its memory is freed in the stream's order.
        let memory =
            unsafe { CudaMemory::to_read(ordinal(device), at, elements, dtype, handle(&stream)) };
        let (shape, strides) = ([1, batch * tokens, heads, dim], [0, token_stride, dim]);
        work(Rows::on_device(&memory, shape, strides)?)
    };
    match &storage.slice {
        CudaStorageSlice::F32(x) => from(x, start, &stream, rows),
        CudaStorageSlice::F16(x) => from(x, start, &stream, rows),
        CudaStorageSlice::BF16(x) => from(x, start, &stream, rows),
        _ => unreachable!("`TensorRows::new` takes tensors of these types alone"),
    }
}

/// Calls `work` with the address of element `start`, and the number of elements from it on.
fn from<T, R>(
    memory: &CudaSlice<T>,
    start: usize,
    stream: &CudaStream,
    work: impl FnOnce(DeviceAddress, usize) -> R,
) -> R {
    let (first, _read) = memory.device_ptr(stream);
    // A tensor without elements may begin behind its memory's end.
    let start = start.min(memory.len());
    let at = DeviceAddress::new(first + (start * size_of::<T>()) as u64);
    work(at, memory.len() - start)
}

/// A new tensor of this shape `[batch, tokens, heads, head_dim]`, of which `work` writes every row, or fails.
pub fn results<T: WithDType + CudaDType + DeviceRepr>(
    device: &CudaDevice,
    shape: Shape,
    work: impl FnOnce(RowsMut<'_>) -> Result<(), Error>,
) -> Result<Tensor, Error> {
    let (batch, tokens, heads, dim) = shape.dims4()?;
    let (elements, stream) = (shape.elem_count(), device.cuda_stream());
    // SAFETY: `work` writes every element; if it fails, the memory is freed unread.
    let mut out = unsafe { device.alloc::<T>(elements) }?;
    {
        let (at, _written) = out.device_ptr_mut(&stream);
        let (at, dtype) = (DeviceAddress::new(at), number_format(T::DTYPE));
        // SAFETY: a live stream of the device's primary context; new memory of so many numbers, which is freed in the stream's order.
        let memory =
            unsafe { CudaMemory::to_write(ordinal(device), at, elements, dtype, handle(&stream)) };
        let (shape, strides) = ([1, batch * tokens, heads, dim], [0, heads * dim, dim]);
        work(RowsMut::on_device(&memory, shape, strides)?)?;
    }
    let storage = CudaStorage::wrap_cuda_slice(out, device.clone());
    let (storage, none) = (Storage::Cuda(storage), BackpropOp::none());
    Ok(Tensor::from_storage(storage, shape, none, false))
}

/// The device's index among those that the library sees, too.
fn ordinal(device: &CudaDevice) -> usize {
    match device.location() {
        DeviceLocation::Cuda { gpu_id } => gpu_id,
        _ => unreachable!("a CUDA device"),
    }
}

fn handle(stream: &CudaStream) -> Stream {
    Stream::from_raw(stream.cu_stream().cast())
}

/// The library's name of a type that `TensorRows` takes.
fn number_format(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::Bf16,
        _ => Dtype::F32,
    }
}
