//! Host memory on its way into the arena.

use attn_core::Error;
use attn_kernels::cuda::params::QueryBlock;
use cudarc::driver::{DriverError, result, sys};

use crate::handles::DeviceAddress;

/// Parts of the arena, each aligned; some are copied from the host.
#[derive(Default)]
pub(crate) struct Upload<'a> {
    parts: Vec<(usize, &'a [u8])>,
    bytes: usize,
}

impl<'a> Upload<'a> {
    /// Offset of a part of so many bytes.
    ///
    /// # Errors
    /// [`Error::Parameter`] if all parts together need more than 64 bits.
    pub(crate) fn reserve(&mut self, bytes: usize) -> Result<usize, Error> {
        let at = self.bytes;
        let end = at.checked_add(bytes);
        let end = end.and_then(|end| end.checked_next_multiple_of(256));
        self.bytes = end.ok_or_else(|| {
            Error::parameter(
                "bytes of device memory",
                format_args!("{at} + {bytes}"),
                "less than 2^64; decode fewer sequences at once",
            )
        })?;
        Ok(at)
    }

    /// Offset of a part to copy.
    ///
    /// # Errors
    /// Those of [`Upload::reserve`].
    pub(crate) fn add(&mut self, bytes: &'a [u8]) -> Result<usize, Error> {
        let at = self.reserve(bytes.len())?;
        self.parts.push((at, bytes));
        Ok(at)
    }

    /// Bytes of all parts.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Enqueues the copies to `base` and behind.
    ///
    /// # Safety
    /// From `base` on there are [`Upload::bytes`] bytes of device memory until the copies have run on `stream`, which is alive; the
    /// parts stay as they are until then. The driver may return before: it does where the host's memory is pinned.
    pub(crate) unsafe fn copy(
        &self,
        base: DeviceAddress,
        stream: sys::CUstream,
    ) -> Result<(), DriverError> {
        for (offset, bytes) in self.parts.iter().filter(|(_, bytes)| !bytes.is_empty()) {
            // SAFETY: this function's contract; `reserve` gave the part its own place below `bytes`.
            unsafe { result::memcpy_htod_async(base.offset(*offset).get(), bytes, stream) }?;
        }
        Ok(())
    }
}

/// Numbers without padding, which any bytes are.
pub(crate) trait Words: Copy {}
impl Words for f32 {}
impl Words for i32 {}
impl Words for i64 {}
impl Words for u32 {}
impl Words for u16 {}
impl Words for QueryBlock {}

/// A slice's memory as bytes.
pub(crate) fn bytes_of<T: Words>(x: &[T]) -> &[u8] {
    // SAFETY: `Words` are plain numbers without padding, and a byte has no alignment.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_behind_the_other() {
        let mut upload = Upload::default();
        let parts = [&[1u8; 3][..], &[], &[2; 256], &[3; 257]];
        let at: Vec<usize> = parts.iter().map(|part| upload.add(part).unwrap()).collect();
        assert_eq!(at, [0, 256, 256, 512]);
        assert_eq!(upload.bytes(), 1024);
        assert_eq!(bytes_of(&[0x0102_0304u32, 5]), [4, 3, 2, 1, 5, 0, 0, 0]);
    }

    #[test]
    fn parts_that_no_memory_holds_are_refused() {
        for bytes in [usize::MAX, usize::MAX - 512] {
            let mut upload = Upload::default();
            upload.reserve(512).unwrap();
            assert!(matches!(
                upload.reserve(bytes),
                Err(Error::Parameter { .. })
            ));
            assert_eq!(upload.bytes(), 512, "nothing is reserved");
        }
    }
}
