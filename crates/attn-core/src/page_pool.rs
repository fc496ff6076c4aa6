//! Pages of the library's formats in host memory that the caller owns, such as an engine's pool of blocks: read through the caller's page table and lengths, written
//! by slots. A cache ([`crate::KvCache`]) owns its pages instead, and checks who has which.

mod pages;

use half::bf16;

use crate::{
    cache::{PageTable, TokenWrite, check_count, check_pool},
    centres::{CENTRES, mean, sum_of_tile, to_centre},
    error::{Error, Unsupported, filled, refuse, reserve},
    format::KvFormat,
    layout::PageLayout,
    rotation::rotate_stored,
    rows::Rows,
    segments::TILE,
    wide_rows::{WideRows, Widened, check_written},
};

pub use pages::PoolPages;
use pages::store_centre;

/// Sequences in pages of a caller's pool: what a step reads in place of a cache ([`KvSource::Pool`](crate::KvSource::Pool)).
///
/// Formats keep all of a token in its page: those with a window ([`Window`](crate::Window)) and with static scales are refused. Bytes that no append has written are read
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
    pages: PoolPages,
    bytes: &'a [u8],
    table: PageTable,
    /// Centres of K, `[sequences, num_kv_heads, 2, head_dim.k]`; nothing without.
    centres: Vec<bf16>,
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
        PagePool::of(&PoolPages::new(layout)?, bytes, page_table, kv_lens)
    }

    /// As [`PagePool::new`], for pages that lie so, which may have centres of K.
    ///
    /// # Errors
    /// Those of [`PagePool::new`].
    ///
    /// ```
    /// use attn_core::{Error, KvFormat, PageLayout, PagePool, PoolPages};
    ///
    /// let pages = PoolPages::new(&PageLayout::new(KvFormat::INT8, 64, 64, 1)?)?.with_centres()?;
    /// let bytes = vec![0; 4 * pages.stride()];
    /// let pool = PagePool::of(&pages, &bytes, &[3, 0], &[70])?;
    /// assert_eq!(pool.centres(0, 0).unwrap()[0].len(), 64);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn of(
        pages: &PoolPages,
        bytes: &'a [u8],
        page_table: &[u32],
        kv_lens: &[usize],
    ) -> Result<Self, Error> {
        let num_pages = pages.count(bytes.len())?;
        let each = page_table.len().checked_div(kv_lens.len()).unwrap_or(0);
        if each * kv_lens.len() != page_table.len() {
            return Err(Error::Length {
                what: "page_table",
                given: page_table.len(),
                needed: each * kv_lens.len(),
            });
        }
        let mut of_sequences = Vec::new();
        reserve("the page table", &mut of_sequences, kv_lens.len())?;
        for (b, len) in kv_lens.iter().enumerate() {
            let needed = pages.layout.pages_of(*len);
            check_count("pages of a sequence", each, needed)?;
            let own = &page_table[b * each..][..needed];
            check_pool(own.iter(), num_pages)?;
            of_sequences.push(own.to_vec());
        }
        let table = PageTable {
            pages: of_sequences,
            lens: kv_lens.to_vec(),
            ..PageTable::default()
        };
        let each = if pages.has_centres {
            pages.centres_len()
        } else {
            0
        };
        let elements = kv_lens.len().saturating_mul(each);
        let mut centres = filled("centres of K", elements, bf16::ZERO)?;
        let sequences = centres.chunks_exact_mut(each.max(1)).zip(&table.pages);
        for (centres, own) in sequences {
            if let Some(page) = own.first() {
                pages.load_centres(bytes, *page, centres);
            }
        }
        Ok(PagePool {
            pages: *pages,
            bytes,
            table,
            centres,
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
        &self.pages.layout
    }

    /// Bytes from where a page begins to where the next one does.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.pages.stride
    }

    /// The centres of K of one KV head of a sequence, first and second; `None` in pools without, and for sequences without tokens.
    #[must_use]
    pub fn centres(&self, sequence: usize, head: usize) -> Option<[&[bf16]; CENTRES]> {
        let has_tokens = self.table.lens.get(sequence).is_some_and(|len| *len > 0);
        let dim = self.layout().head_dim().k;
        let first = (sequence * self.layout().num_kv_heads() + head) * CENTRES * dim;
        let both = self.centres.get(first..first + CENTRES * dim)?;
        let (first, second) = both.split_at(dim);
        has_tokens.then_some([first, second])
    }

    /// The pool, page after page, each [`PagePool::stride`] bytes behind the one before.
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

/// What an append by slots takes beside them where pages have centres of K ([`PoolPages::with_centres`]): an entry for each token. Those of tokens without a
/// slot may be anything.
#[derive(Debug, Clone, Copy)]
pub struct SlotCentres<'a> {
    /// The page that has the first tokens of the token's sequence, and its centres.
    pub first_pages: &'a [i32],
    /// The token's number in its sequence.
    pub positions: &'a [i32],
}

/// Tokens on their way to the slots of a caller's pool, checked: what a backend with pages in host memory writes.
///
/// A pool with centres of K is written in this order: [`SlotAppend::begin`], the tokens of first tiles, [`SlotAppend::end_first_tiles`], the tokens behind.
#[must_use = "an append is written by a backend"]
pub struct SlotAppend<'a> {
    kv: [Widened<'a>; 2],
    pages: PoolPages,
    /// With centres, those of first tiles come first.
    writes: Vec<TokenWrite>,
    in_first_tiles: usize,
    /// The first pages of the sequences that the writes name, in pools with centres.
    first_pages: Vec<u32>,
    /// The centres of these, `[first pages, num_kv_heads, 2, head_dim.k]`.
    centres: Vec<bf16>,
}

impl<'a> SlotAppend<'a> {
    /// Tokens `k` and `v`, `[tokens, num_kv_heads, head_dim]`, and the slot of each: page · page_size + token of the page; a negative one is nowhere, and
    /// its token may have any values. `pool_bytes`: of the whole pool. Of tokens with the same slot, the last one stays. `centres`: of pools that have some.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a format that needs more than its pages, and for a slot that the pool does not have; [`Error::Length`], or [`Error::Shape`] for
    /// strided rows; [`Error::NotFinite`], [`Error::Magnitude`]; [`Error::OutOfMemory`]. [`Error::Parameter`] for centres
    /// of pages without, and for pages with centres without; for a first page that the pool does not have and for a negative position, of tokens with a slot.
    pub fn new(
        pages: &PoolPages,
        pool_bytes: usize,
        slots: &[i64],
        k: Rows<'a>,
        v: Rows<'a>,
        centres: Option<SlotCentres<'_>>,
    ) -> Result<Self, Error> {
        let (pages, layout) = (*pages, pages.layout());
        if pages.has_centres != centres.is_some() {
            let given = if pages.has_centres { "none" } else { "some" };
            return refuse(
                "first pages and positions of an append by slots",
                given,
                "those of each token where pages have centres of K, and none where they have none",
            );
        }
        let num_pages = pages.count(pool_bytes)?;
        let mut writes = writes_of(layout, num_pages, slots)?;
        let first_pages = match centres {
            Some(centres) => centres.place(num_pages, slots.len(), &mut writes)?,
            None => Vec::new(),
        };
        let in_first_tiles = match centres {
            Some(_) => writes.partition_point(|write| write.position < TILE),
            None => writes.len(),
        };
        layout.format().check_appended_v(v.len())?;
        let [in_k, in_v] = layout.shapes(slots.len());
        let (in_k, in_v) = (k.check_host("k", in_k)?, v.check_host("v", in_v)?);
        let kv = [k.widened(in_k, "K in f32")?, v.widened(in_v, "V in f32")?];
        let KvFormat {
            k: of_k, v: of_v, ..
        } = layout.format();
        for (what, rows, scheme) in [("k", &kv[0], of_k), ("v", &kv[1], of_v)] {
            check_written(what, rows.rows(), scheme, |token| slots[token] >= 0)?;
        }
        let elements = first_pages.len().saturating_mul(pages.centres_len());
        Ok(SlotAppend {
            kv,
            pages,
            writes,
            in_first_tiles,
            centres: filled("centres of K", elements, bf16::ZERO)?,
            first_pages,
        })
    }

    /// Where each token goes that goes anywhere: those of first tiles, and those behind. Without centres all are among the former.
    #[must_use]
    pub fn writes(&self) -> [&[TokenWrite]; 2] {
        let (first, behind) = self.writes.split_at(self.in_first_tiles);
        [first, behind]
    }

    /// K and V of all tokens.
    #[must_use]
    pub fn rows(&self) -> [WideRows<'_>; 2] {
        [self.kv[0].rows(), self.kv[1].rows()]
    }

    /// Bytes from where a page begins to where the next one does.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.pages.stride
    }

    /// The centres of K of the sequences that [`TokenWrite::sequence`] counts, `[sequences, num_kv_heads, 2, head_dim.k]`; nothing without.
    #[must_use]
    pub fn centres(&self) -> &[bf16] {
        &self.centres
    }

    /// Reads the centres of K, and makes the first ones of sequences whose first token is among the append's.
    ///
    /// # Panics
    /// For a pool of other than the checked size, as [`SlotAppend::end_first_tiles`].
    pub fn begin(&mut self, pool: &mut [u8]) {
        if self.first_pages.is_empty() {
            return;
        }
        let (pages, k) = (self.pages, self.kv[0].rows());
        let (each, dim) = (pages.centres_len(), pages.layout.head_dim().k);
        let places = self.centres.chunks_exact_mut(each).zip(&self.first_pages);
        places.for_each(|(centres, page)| pages.load_centres(pool, *page, centres));
        for write in &self.writes[..self.in_first_tiles] {
            if write.position > 0 {
                continue;
            }
            let centres = &mut self.centres[write.sequence * each..][..each];
            for (head, both) in centres.chunks_exact_mut(CENTRES * dim).enumerate() {
                let mut row = k.row(write.source, head).to_vec();
                rotate_stored(&mut row);
                let elements = both[..dim].iter_mut().zip(&row);
                elements.for_each(|(c, x)| *c = to_centre(*x));
                let at = pages.centre_at(self.first_pages[write.sequence], head, 0);
                store_centre(&both[..dim], &mut pool[at]);
            }
        }
    }

    /// Makes the second centres of sequences whose token 63 is among the append's, of what the pool stores of their first tiles.
    ///
    /// # Panics
    /// As [`SlotAppend::begin`].
    pub fn end_first_tiles(&mut self, pool: &mut [u8]) {
        let pages = self.pages;
        let (each, dim) = (pages.centres_len(), pages.layout.head_dim().k);
        let made = match self.first_pages.is_empty() {
            true => &[],
            false => &self.writes[..self.in_first_tiles],
        };
        for write in made {
            if write.position + 1 < TILE {
                continue;
            }
            let first_page = self.first_pages[write.sequence];
            let centres = &mut self.centres[write.sequence * each..][..each];
            for (head, both) in centres.chunks_exact_mut(CENTRES * dim).enumerate() {
                let run = &pool[pages.run(first_page, head)];
                let sum = sum_of_tile(&pages.layout, |_| (run, None));
                let (first, second) = both.split_at_mut(dim);
                let elements = second.iter_mut().zip(first).zip(sum);
                elements.for_each(|((second, first), sum)| *second = mean(*first, sum));
                store_centre(second, &mut pool[pages.centre_at(first_page, head, 1)]);
            }
        }
    }
}

impl SlotCentres<'_> {
    /// Gives the writes of a call of `tokens` tokens their sequences, which are numbers in the list of first pages that is returned, and their positions; then
    /// sorts them so that first tiles come first.
    fn place(
        &self,
        num_pages: usize,
        tokens: usize,
        writes: &mut [TokenWrite],
    ) -> Result<Vec<u32>, Error> {
        for (what, given) in [
            ("first_pages", self.first_pages.len()),
            ("positions", self.positions.len()),
        ] {
            if given != tokens {
                return Err(Error::Length {
                    what,
                    given,
                    needed: tokens,
                });
            }
        }
        let mut first_pages = Vec::new();
        reserve("the first pages of an append", &mut first_pages, tokens)?;
        for write in &mut *writes {
            let page = self.first_pages[write.source];
            match u32::try_from(page) {
                Ok(page) if (page as usize) < num_pages => first_pages.push(page),
                _ => {
                    return refuse(
                        "first page",
                        format_args!("{page} of {num_pages}"),
                        "a page of the pool, counted from 0, for each token with a slot",
                    );
                }
            }
            let position = self.positions[write.source];
            let Ok(position) = usize::try_from(position) else {
                return refuse(
                    "position",
                    format_args!("{position}"),
                    "0 and more, for each token with a slot",
                );
            };
            write.position = position;
        }
        first_pages.sort_unstable();
        first_pages.dedup();
        for write in &mut *writes {
            let page = self.first_pages[write.source].cast_unsigned();
            write.sequence = first_pages.partition_point(|first| *first < page);
        }
        // Tokens of each part stay in their order, since no two have the same source.
        writes.sort_unstable_by_key(|write| (write.position >= TILE, write.source));
        Ok(first_pages)
    }
}

/// Where the tokens go that have a slot, as if each page were a sequence's first.
fn writes_of(
    layout: &PageLayout,
    num_pages: usize,
    slots: &[i64],
) -> Result<Vec<TokenWrite>, Error> {
    let page_size = layout.page_size();
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
    Ok(writes)
}
