//! Arrays on a GPU: compared with what a launch needs, before it gets their addresses.

use std::sync::Arc;

use attn::{
    BackendId, Device, Scheme,
    backends::cuda::{
        CallersContext, CudaBackend,
        native::{DeviceAddress, Dtype as CudaDtype, Op, Prepared},
    },
    layout::Side,
};
use pyo3::{prelude::*, types::PyCapsule};

use crate::{
    dlpack::{Array, Dtype},
    engine, errors,
};

pub use crate::dlpack::stream_of;

/// A GPU that launches run on.
pub struct Gpu {
    device: Arc<Device>,
    ordinal: i32,
}

/// An array's address, and how many bytes of device memory it has.
pub struct OnDevice {
    pub address: DeviceAddress,
    pub bytes: usize,
}

impl Gpu {
    /// Opens `"cuda"`, `"cuda:1"` and so on.
    ///
    /// # Errors
    /// `ParameterError` for other devices; those of opening the device.
    pub fn open(py: Python<'_>, device: &str) -> PyResult<Self> {
        let name = engine::parse(device)?;
        if name.id != BackendId::Cuda {
            return Err(errors::parameter(format!(
                "device is {name}; allowed: \"cuda\", \"cuda:1\" and so on"
            )));
        }
        Ok(Gpu {
            device: py.detach(|| engine::open(name))?,
            ordinal: i32::try_from(name.ordinal).unwrap_or(-1),
        })
    }

    pub fn cuda(&self) -> PyResult<&CudaBackend> {
        self.device.cuda("launch").map_err(errors::of)
    }

    /// The backend, whose device is this thread's as long as the second value lives: the caller's library may have another one.
    pub fn current(&self) -> PyResult<(&CudaBackend, CallersContext)> {
        let gpu = self.cuda()?;
        Ok((gpu, gpu.make_current().map_err(errors::of)?))
    }

    /// Enqueues a small launch on the caller's stream.
    ///
    /// # Safety
    /// Those of [`CudaBackend::enqueue`] but for the context.
    pub unsafe fn enqueue<O: Op>(
        &self,
        py: Python<'_>,
        prepared: &Prepared<O>,
        stream: u64,
        op: &O,
    ) -> PyResult<()> {
        let (gpu, _callers) = self.current()?;
        // SAFETY: this function's contract; the device's context is current.
        py.detach(|| unsafe { gpu.enqueue(prepared, stream_of(stream), op) })
            .map_err(errors::of)
    }

    /// The array's memory; refuses one of another device, of other types than `allowed`, with gaps between elements from dim `first` on, or that is
    /// not aligned.
    pub fn memory(&self, array: &Array<'_>, allowed: &[Dtype], first: usize) -> PyResult<OnDevice> {
        if array.cuda != Some(self.ordinal) {
            return Err(errors::shape(format!(
                "{} does not lie on the device of the launch, cuda:{}",
                array.what, self.ordinal
            )));
        }
        elements(array, allowed, first)
    }

    /// The memory of an optional array of at least `needed` bytes; null where nothing is needed.
    pub fn list(
        &self,
        what: &'static str,
        capsule: Option<&Bound<'_, PyCapsule>>,
        (dtype, needed): (Dtype, usize),
    ) -> PyResult<DeviceAddress> {
        if needed == 0 {
            return Ok(DeviceAddress::NULL);
        }
        let capsule = capsule
            .ok_or_else(|| errors::shape(format!("{what} is missing; the launch needs it")))?;
        let memory = self.memory(&Array::new(what, capsule)?, &[dtype], 0)?;
        if memory.bytes < needed {
            return Err(errors::shape(format!(
                "{what} has {} bytes, but the launch needs {needed}",
                memory.bytes
            )));
        }
        Ok(memory.address)
    }

    /// Static scales of K or of V, one for each of so many KV heads; null where the scheme has none.
    ///
    /// # Errors
    /// `ParameterError` for scales that are missing, `ShapeError` for another number of them.
    pub fn scales(
        &self,
        (side, scheme): (Side, Scheme),
        capsule: Option<&Bound<'_, PyCapsule>>,
        heads: usize,
    ) -> PyResult<DeviceAddress> {
        let what = side.scales();
        let given = match capsule {
            Some(capsule) => Array::new(what, capsule)?.len(),
            None => 0,
        };
        scheme
            .check_scale_count(side, given, heads)
            .map_err(errors::of)?;
        self.list(what, capsule, (Dtype::F32, 4 * given))
    }

    /// An array of floats with gaps before dim `first` at most, and its number format.
    pub fn floats(&self, array: &Array<'_>, first: usize) -> PyResult<(OnDevice, CudaDtype)> {
        let memory = self.memory(array, &[Dtype::F32, Dtype::F16, Dtype::Bf16], first)?;
        let dtype = match array.dtype {
            Dtype::F32 => CudaDtype::F32,
            Dtype::F16 => CudaDtype::F16,
            _ => CudaDtype::Bf16,
        };
        Ok((memory, dtype))
    }
}

/// The array's memory, wherever it lies; refuses other types than `allowed`, gaps between elements from dim `first` on, and memory that is not
/// aligned.
pub fn elements(array: &Array<'_>, allowed: &[Dtype], first: usize) -> PyResult<OnDevice> {
    if !allowed.contains(&array.dtype) {
        return Err(errors::shape(format!(
            "{} has elements of type {:?}; allowed: {allowed:?}",
            array.what, array.dtype
        )));
    }
    if !array.is_contiguous_from(first) || array.strides.iter().any(|stride| *stride < 0) {
        return Err(errors::shape(format!(
            "{} has the strides {:?}; pass a contiguous tensor",
            array.what, array.strides
        )));
    }
    let bytes = array.len().saturating_mul(array.dtype.bytes());
    if bytes > 0 && !array.address().is_multiple_of(16) {
        return Err(errors::shape(format!(
            "{} begins at an address that is no multiple of 16 bytes; copy it",
            array.what
        )));
    }
    Ok(OnDevice {
        address: DeviceAddress::new(array.address()),
        bytes,
    })
}
