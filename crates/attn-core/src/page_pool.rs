//! Pages of the library's formats in host memory that the caller owns, such as an engine's pool of blocks: read through the caller's page table and lengths, written
//! by slots. A cache ([`crate::KvCache`]) owns its pages instead, and checks who has which.

use crate::{
    cache::{PageTable, TokenWrite, check_count, check_pool},
    error::{Error, Unsupported, refuse, reserve},
    format::{KvFormat, Window},
    layout::PageLayout,
    rows::Rows,
    wide_rows::{WideRows, Widened, check_written},
};

/// Sequences in pages of a caller's pool: what a step reads in place of a cache ([`KvSource::Pool`](crate::KvSource::Pool)).
///
/// Formats keep all of a token in its page: those with a window ([`Window`]) and with static scales are refused. Bytes that no append has written are read
/// as codes like others: results then mean nothing, and nothing else comes of it.
///
/// ```
/// use attn_core::{Error, KvFormat, PageLayout, PagePool};
///
/// let layout = PageLayout::new(KvFormat::INT8, 64, 16, 1)?;
/// let bytes = vec![0; 4 * layout.page_bytes()];
/// // Two sequences: 20 tokens in pages 3 and 0, and 5 in page 2.
/// let pool = PagePool::new(&layout, &bytes, &[3, 0, 2, 2], &[20, 5])?;
/// assert_eq!(pool.kv_lens(), [20, 5]);
/// // A page that the pool does not have is refused.
/// assert!(PagePool::new(&layout, &bytes, &[4, 0, 2, 2], &[20, 5]).is_err());
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PagePool<'a> {
    layout: PageLayout,
    bytes: &'a [u8],
    table: PageTable,
}

impl<'a> PagePool<'a> {
    /// Sequences of `kv_lens` tokens in a pool of whole pages, `bytes`; `page_table` is `[sequences, pages of each]`, of which those behind a sequence's last
    /// token are not looked at.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a format that needs more than its pages, and for a page that the pool does not have; [`Error::Length`] for bytes that are no whole
    /// pages, a table without as many pages for each sequence, or fewer than a length takes; [`Error::OutOfMemory`].
    pub fn new(
        layout: &PageLayout,
        bytes: &'a [u8],
        page_table: &[u32],
        kv_lens: &[usize],
    ) -> Result<Self, Error> {
        check_format(layout.format())?;
        let num_pages = pages_of(layout, bytes.len())?;
        let each = page_table.len().checked_div(kv_lens.len()).unwrap_or(0);
        if each * kv_lens.len() != page_table.len() {
            return Err(Error::Length {
                what: "page_table",
                given: page_table.len(),
                needed: each * kv_lens.len(),
            });
        }
        let mut pages = Vec::new();
        reserve("the page table", &mut pages, kv_lens.len())?;
        for (b, len) in kv_lens.iter().enumerate() {
            let needed = layout.pages_of(*len);
            check_count("pages of a sequence", each, needed)?;
            let own = &page_table[b * each..][..needed];
            check_pool(own.iter(), num_pages)?;
            pages.push(own.to_vec());
        }
        Ok(PagePool {
            layout: *layout,
            bytes,
            table: PageTable {
                pages,
                lens: kv_lens.to_vec(),
                ..PageTable::default()
            },
        })
    }

    /// For backends that read no pages of a caller's in host memory: the refusal.
    #[must_use]
    pub fn refused_by(backend: &'static str) -> Error {
        Error::Unsupported(Unsupported::NoKernel {
            backend,
            what: "pages of the caller's in host memory".into(),
            built: "caches and views; backend cpu reads such pages, and attn_cuda::native those in a GPU's memory".into(),
        })
    }

    /// Cached tokens of each sequence.
    #[must_use]
    pub fn kv_lens(&self) -> &[usize] {
        &self.table.lens
    }

    /// How a page is laid out.
    #[must_use]
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// The pool, page after page.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The pages and lengths of the sequences.
    #[must_use]
    pub fn table(&self) -> &PageTable {
        &self.table
    }
}

/// Tokens on their way to the slots of a caller's pool, checked: what a backend with pages in host memory writes.
#[must_use = "an append is written by a backend"]
pub struct SlotAppend<'a> {
    kv: [Widened<'a>; 2],
    writes: Vec<TokenWrite>,
}

impl<'a> SlotAppend<'a> {
    /// Tokens `k` and `v`, `[tokens, num_kv_heads, head_dim]`, and the slot of each: page · page_size + token of the page; a negative one is nowhere, and
    /// its token may have any values. `pool_bytes`: of the whole pool. Of tokens with the same slot, the last one stays.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a format that needs more than its pages, and for a slot that the pool does not have; [`Error::Length`], or [`Error::Shape`] for
    /// strided rows; [`Error::NotFinite`], [`Error::Magnitude`]; [`Error::OutOfMemory`].
    pub fn new(
        layout: &PageLayout,
        pool_bytes: usize,
        slots: &[i64],
        k: Rows<'a>,
        v: Rows<'a>,
    ) -> Result<Self, Error> {
        check_format(layout.format())?;
        let (num_pages, page_size) = (pages_of(layout, pool_bytes)?, layout.page_size());
        let mut writes = Vec::new();
        reserve("the tokens of an append", &mut writes, slots.len())?;
        for (source, slot) in slots.iter().enumerate() {
            let Ok(slot) = usize::try_from(*slot) else {
                continue;
            };
            let page = match u32::try_from(slot / page_size) {
                Ok(page) if (page as usize) < num_pages => page,
                _ => {
                    return refuse(
                        "slot",
                        slot,
                        "negative, or one of the pool: smaller than its number of pages times the page size",
                    );
                }
            };
            writes.push(TokenWrite {
                source,
                page,
                residual_page: None,
                token: slot % page_size,
                sequence: 0,
                position: slot % page_size,
            });
        }
        let [in_k, in_v] = layout.shapes(slots.len());
        let (in_k, in_v) = (k.check_host("k", in_k)?, v.check_host("v", in_v)?);
        let kv = [k.widened(in_k, "K in f32")?, v.widened(in_v, "V in f32")?];
        let KvFormat { k: of_k, v: of_v } = layout.format();
        for (what, rows, scheme) in [("k", &kv[0], of_k), ("v", &kv[1], of_v)] {
            check_written(what, rows.rows(), scheme, |token| slots[token] >= 0)?;
        }
        Ok(SlotAppend { kv, writes })
    }

    /// Where each token goes that goes anywhere.
    #[must_use]
    pub fn writes(&self) -> &[TokenWrite] {
        &self.writes
    }

    /// K and V of all tokens.
    #[must_use]
    pub fn rows(&self) -> [WideRows<'_>; 2] {
        [self.kv[0].rows(), self.kv[1].rows()]
    }
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

/// The pages of a pool of so many bytes.
fn pages_of(layout: &PageLayout, bytes: usize) -> Result<usize, Error> {
    let page = layout.page_bytes();
    if bytes.is_multiple_of(page) {
        return Ok(bytes / page);
    }
    Err(Error::Length {
        what: "the pool, in whole pages",
        given: bytes,
        needed: bytes / page * page,
    })
}
