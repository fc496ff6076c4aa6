//! Pools of pages in device memory.

use attn_core::{Error, PageLayout};

use crate::handles::DeviceAddress;

/// A pool of pages. Between pages there may be more bytes, such as padding, or the pages of other layers.
///
/// ```
/// use attn_core::{Error, KvFormat, PageLayout};
/// use attn_cuda::native::{DeviceAddress, Pages};
///
/// // 1000 pages of 32 layers, page after page, and in each layer after layer: the pool of layer 5.
/// let layout = PageLayout::new(KvFormat::INT8, 128, 64, 8)?;
/// let all = DeviceAddress::new(0x7f00_0000_0000);
/// let pool = Pages {
///     at: all.offset(5 * layout.page_bytes()),
///     stride: 32 * layout.page_bytes(),
///     num_pages: 1000,
/// };
/// # let _ = pool;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages {
    /// The first page, at a multiple of 16 bytes, which bulk copies and vectors of the kernels need: device memory, or for copies also pinned host memory
    /// that the device can address (`cuMemHostAlloc`).
    pub at: DeviceAddress,
    /// Bytes from one page to the next, a multiple of 16; at least the bytes of a page.
    pub stride: usize,
    /// How many there are.
    pub num_pages: usize,
}

impl Pages {
    /// Pages that lie side by side.
    #[must_use]
    pub fn new(at: DeviceAddress, layout: &PageLayout, num_pages: usize) -> Self {
        Pages {
            at,
            stride: layout.page_bytes(),
            num_pages,
        }
    }

    /// Refuses strides at which pages of `bytes` overlap, and addresses and strides that the kernels' vectors do not divide.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub(crate) fn check(&self, bytes: usize) -> Result<(), Error> {
        if !self.at.get().is_multiple_of(16) {
            return Err(Error::parameter(
                "address of the first page",
                format_args!("{:#x}", self.at.get()),
                "a multiple of 16",
            ));
        }
        for (what, given, least) in [
            ("bytes of a page", bytes, 1),
            ("page stride", self.stride, bytes),
        ] {
            if given < least || !given.is_multiple_of(16) {
                return Err(Error::parameter(
                    what,
                    given,
                    "a multiple of 16: PageLayout::page_bytes, and strides of at least that",
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_begin_and_follow_each_other_at_multiples_of_16_bytes() {
        let check = |at, stride| {
            let pages = Pages {
                at: DeviceAddress::new(at),
                stride,
                num_pages: 2,
            };
            pages.check(8320)
        };
        for at in [0x7f00_0000_0010, 0x7f00_0000_0080, 0x7f00_0000_0100] {
            check(at, 8320).unwrap();
            check(at, 8336).unwrap();
        }
        for (at, stride, said) in [
            (
                0x7f00_0000_0008,
                8320,
                "address of the first page is 0x7f0000000008",
            ),
            (0x7f00_0000_0010, 8328, "page stride is 8328"),
            (0x7f00_0000_0010, 8304, "page stride is 8304"),
        ] {
            let refusal = check(at, stride).unwrap_err().to_string();
            assert!(refusal.starts_with(said), "{refusal}");
        }
    }
}
