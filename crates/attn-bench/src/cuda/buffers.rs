//! Device memory on a stream of its own: typed uploads and downloads.

use std::sync::Arc;

use attn_core::Error;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr};

use attn_cuda::{
    internals::{WaitOnDrop, address_of, failed, stream_of},
    native::{DeviceAddress, Stream},
};

/// A stream of the backend's context, and copies on it.
pub struct Buffers {
    /// The stream.
    pub stream: Arc<CudaStream>,
}

impl Buffers {
    /// On a new stream.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, Error> {
        context
            .bind_to_thread()
            .map_err(failed("binding the context"))?;
        let stream = context.new_stream().map_err(failed("making a stream"))?;
        Ok(Buffers { stream })
    }

    /// Waits for the stream once it is dropped.
    pub(super) fn wait(&self) -> Result<WaitOnDrop<'_>, Error> {
        let context = self.stream.context().bind_to_thread();
        context.map_err(failed("binding the context"))?;
        // SAFETY: `self`, which the value borrows, keeps the stream; its context is current.
        Ok(unsafe { WaitOnDrop::on(self.stream.cu_stream()) })
    }

    /// The stream as the native entry takes it.
    pub fn raw(&self) -> Stream {
        stream_of(&self.stream)
    }

    /// Numbers on the device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn upload<T: DeviceRepr + Clone>(&self, x: &[T]) -> Result<CudaSlice<T>, Error> {
        let wait = self.wait()?;
        let there = self.stream.clone_htod(x).map_err(failed("uploading"))?;
        wait.finish().map_err(failed("uploading"))?;
        Ok(there)
    }

    /// Zeroed bytes, at least one.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn bytes(&self, bytes: usize) -> Result<CudaSlice<u8>, Error> {
        let slice = self.stream.alloc_zeros(bytes.max(1));
        slice.map_err(failed("allocating"))
    }

    /// Zeroes, at least one.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn floats(&self, count: usize) -> Result<CudaSlice<f32>, Error> {
        let slice = self.stream.alloc_zeros(count.max(1));
        slice.map_err(failed("allocating"))
    }

    /// Where a slice lies.
    pub fn address<T>(&self, slice: &CudaSlice<T>) -> DeviceAddress {
        address_of(slice, &self.stream)
    }

    /// A slice on the host, after all work before.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn download<T: DeviceRepr + Clone>(&self, slice: &CudaSlice<T>) -> Result<Vec<T>, Error> {
        // Pageable: the copy has ended when this returns.
        let host = self.stream.clone_dtoh(slice).map_err(failed("downloading"));
        self.wait()?.finish().map_err(failed("downloading"))?;
        host
    }

    /// Overwrites the beginning of a slice.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn copy<T: DeviceRepr>(&self, from: &[T], to: &mut CudaSlice<T>) -> Result<(), Error> {
        let wait = self.wait()?;
        self.stream
            .memcpy_htod(from, to)
            .map_err(failed("uploading"))?;
        wait.finish().map_err(failed("uploading"))
    }
}
