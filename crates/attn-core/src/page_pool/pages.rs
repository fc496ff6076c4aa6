//! How pages of a caller's pool lie: their layout, how far they are apart, and where a sequence's centres of K are among them.

use std::ops::Range;

use half::bf16;

use crate::{
    centres::{CENTRES, centres_bytes},
    error::{Error, refuse},
    format::{KvFormat, Window},
    layout::PageLayout,
    segments::TILE,
};

/// How the pages of a caller's pool lie, and whether they have centres of K.
///
/// ```
/// use attn_core::{Error, KvFormat, PageLayout, PoolPages};
///
/// let layout = PageLayout::new(KvFormat::INT8, 64, 64, 1)?;
/// let side_by_side = PoolPages::new(&layout)?;
/// // With more bytes behind each, such as an engine's own, and with the centres of the sequences whose first pages they are.
/// let apart = side_by_side.apart(layout.page_bytes() + 32)?;
/// let centred = side_by_side.with_centres()?;
/// assert_eq!(centred.bytes(), layout.page_bytes() + 4 * 64);
/// assert_eq!((apart.stride(), centred.stride()), (apart.bytes() + 32, centred.bytes()));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolPages {
    pub(super) layout: PageLayout,
    pub(super) stride: usize,
    pub(super) has_centres: bool,
}

impl PoolPages {
    /// Pages that lie side by side.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a format that needs more than its pages.
    pub fn new(layout: &PageLayout) -> Result<Self, Error> {
        check_format(layout.format())?;
        Ok(PoolPages {
            layout: *layout,
            stride: layout.page_bytes(),
            has_centres: false,
        })
    }

    /// The same pages with the centres of K of the sequence whose first page it is behind each [`PageLayout::page_bytes`], [`centres_bytes`] of them: bf16 `[num_kv_heads, 2,
    /// head_dim.k]`, first and second. Pages that are no sequence's first have room for some, which nobody looks at. They are as far apart as they have bytes, if they were.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a format that has no centres ([`KvFormat::check_centres`]), for pages of fewer than 64 tokens, and for a stride without room for them.
    pub fn with_centres(self) -> Result<Self, Error> {
        self.layout.format().check_centres()?;
        if self.layout.page_size() < TILE {
            return refuse(
                "page_size of pages with centres of K",
                self.layout.page_size(),
                "64, 128: a sequence's first 64 tokens, of which its second centre is made, lie in one page",
            );
        }
        let side_by_side = self.stride == self.bytes();
        let pages = PoolPages {
            has_centres: true,
            ..self
        };
        let stride = if side_by_side {
            pages.bytes()
        } else {
            self.stride
        };
        pages.apart(stride)
    }

    /// The same pages, which begin `stride` bytes apart.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a stride that has no room for a page, and, but for that of pages side by side, that is no multiple of 16.
    pub fn apart(self, stride: usize) -> Result<Self, Error> {
        let needed = self.bytes();
        if stride < needed || stride != needed && !stride.is_multiple_of(16) {
            return refuse(
                "stride of pages",
                format_args!("{stride} bytes where a page has {needed}"),
                "those of a page, or a larger multiple of 16",
            );
        }
        Ok(PoolPages { stride, ..self })
    }

    /// How K and V of a page are laid out.
    #[must_use]
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// Bytes from where a page begins to where the next one does.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Bytes of a page, its centres among them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let centres = if self.has_centres {
            self.centres_bytes()
        } else {
            0
        };
        self.layout.page_bytes().saturating_add(centres)
    }

    /// Whether pages have centres of K.
    #[must_use]
    pub fn has_centres(&self) -> bool {
        self.has_centres
    }

    /// The pages of a pool of so many bytes.
    pub(super) fn count(&self, bytes: usize) -> Result<usize, Error> {
        if bytes.is_multiple_of(self.stride) {
            return Ok(bytes / self.stride);
        }
        Err(Error::Length {
            what: "the pool, in whole pages",
            given: bytes,
            needed: bytes / self.stride * self.stride,
        })
    }

    /// Where a KV head's run of a page lies in the pool.
    pub(super) fn run(&self, page: u32, head: usize) -> Range<usize> {
        let first = page as usize * self.stride + head * self.layout.run_bytes();
        first..first + self.layout.run_bytes()
    }

    /// Bytes of a sequence's centres.
    fn centres_bytes(&self) -> usize {
        centres_bytes(self.layout.num_kv_heads(), self.layout.head_dim().k)
    }

    /// Elements of a sequence's centres.
    pub(super) fn centres_len(&self) -> usize {
        self.centres_bytes() / size_of::<bf16>()
    }

    /// Where a centre of one KV head lies in the pool, of the sequence whose first page it is.
    pub(super) fn centre_at(&self, page: u32, head: usize, centre: usize) -> Range<usize> {
        let bytes = self.layout.head_dim().k * size_of::<bf16>();
        let centres = page as usize * self.stride + self.layout.page_bytes();
        let first = centres + (head * CENTRES + centre) * bytes;
        first..first + bytes
    }

    /// Reads the centres of the sequence whose first page it is.
    pub(super) fn load_centres(&self, pool: &[u8], page: u32, centres: &mut [bf16]) {
        let (elements, _) = pool[self.centre_at(page, 0, 0).start..].as_chunks();
        let places = centres.iter_mut().zip(elements);
        places.for_each(|(c, bytes)| *c = bf16::from_le_bytes(*bytes));
    }
}

/// Writes a centre to its bytes of a pool.
pub(super) fn store_centre(centre: &[bf16], bytes: &mut [u8]) {
    let places = bytes.as_chunks_mut().0.iter_mut().zip(centre);
    places.for_each(|(bytes, c)| *bytes = c.to_le_bytes());
}

/// Refuses formats of which a page does not hold all.
fn check_format(format: KvFormat) -> Result<(), Error> {
    let scales = [format.k, format.v].map(|scheme| scheme.has_tensor_scale());
    if format.window() == Window::None && scales == [false; 2] {
        return Ok(());
    }
    refuse(
        "format of a caller's pages",
        format_args!("{format}"),
        "formats without a window and without static scales: int8, int8/int4-w0, int4-g1, int4-g4, bf16, f16; a cache keeps what others need beside their pages",
    )
}
