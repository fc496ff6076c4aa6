//! The caller's stream and device memory, as plain handles: no CUDA library's types are needed to pass them.

use std::ffi::c_void;

use cudarc::driver::sys;

/// A caller's CUDA stream.
///
/// ```
/// use attn_cuda::native::Stream;
///
/// /// `raw` is what `cudaStreamCreate` or `cuStreamCreate` gave.
/// fn of(raw: *mut std::ffi::c_void) -> Stream {
///     Stream::from_raw(raw)
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Stream(sys::CUstream);

impl Stream {
    /// Takes a `CUstream`, which is also a `cudaStream_t`.
    ///
    /// Nothing is done with the handle here. The functions that enqueue on it are unsafe, and ask that it is a live stream of the backend's
    /// context, the device's primary one.
    #[must_use]
    pub const fn from_raw(raw: *mut c_void) -> Self {
        Stream(raw.cast())
    }

    /// The handle.
    #[must_use]
    pub const fn as_raw(self) -> *mut c_void {
        self.0.cast()
    }

    pub(crate) const fn of(stream: sys::CUstream) -> Self {
        Stream(stream)
    }

    pub(crate) const fn raw(self) -> sys::CUstream {
        self.0
    }
}

/// An address in device memory: a `CUdeviceptr`, or a pointer that `cudaMalloc` gave.
///
/// ```
/// use attn_cuda::native::DeviceAddress;
///
/// let pool = DeviceAddress::new(0x7f00_0000_0000);
/// assert_eq!(pool.offset(256).get(), 0x7f00_0000_0100);
/// assert!(DeviceAddress::NULL.is_null());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct DeviceAddress(u64);

impl DeviceAddress {
    /// No memory: what is not given.
    pub const NULL: DeviceAddress = DeviceAddress(0);

    /// The address of this number.
    #[must_use]
    pub const fn new(address: u64) -> Self {
        DeviceAddress(address)
    }

    /// The address so many bytes further on; beyond 64 bits it wraps, as no memory lies there.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        DeviceAddress(self.0.wrapping_add(bytes as u64))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Whether it is [`DeviceAddress::NULL`].
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address if it is given, else [`DeviceAddress::NULL`].
    #[must_use]
    pub(crate) const fn given(self, is_given: bool) -> Self {
        if is_given { self } else { DeviceAddress::NULL }
    }
}
