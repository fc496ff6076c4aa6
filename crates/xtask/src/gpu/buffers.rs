//! Device memory for the native checks: typed uploads on one stream.

use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, sys};

use crate::driver;

/// A stream of the backend's context, and copies on it.
pub struct Buffers {
    pub stream: Arc<CudaStream>,
}

impl Buffers {
    pub fn new(context: &Arc<CudaContext>) -> Result<Self> {
        driver(context.bind_to_thread())?;
        Ok(Buffers {
            stream: driver(context.new_stream())?,
        })
    }

    pub fn raw(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    pub fn upload<T: DeviceRepr + Clone>(&self, x: &[T]) -> Result<CudaSlice<T>> {
        driver(self.stream.clone_htod(x))
    }

    pub fn bytes(&self, bytes: usize) -> Result<CudaSlice<u8>> {
        driver(self.stream.alloc_zeros(bytes.max(1)))
    }

    pub fn floats(&self, count: usize) -> Result<CudaSlice<f32>> {
        driver(self.stream.alloc_zeros(count.max(1)))
    }

    pub fn address<T>(&self, slice: &CudaSlice<T>) -> u64 {
        slice.device_ptr(&self.stream).0
    }

    pub fn download<T: DeviceRepr + Clone>(&self, slice: &CudaSlice<T>) -> Result<Vec<T>> {
        let host = driver(self.stream.clone_dtoh(slice))?;
        driver(self.stream.synchronize())?;
        Ok(host)
    }

    pub fn copy<T: DeviceRepr>(&self, from: &[T], to: &mut CudaSlice<T>) -> Result<()> {
        driver(self.stream.memcpy_htod(from, to))
    }
}
