//! Codes and parameters of one (sequence, KV head), read from pages or from a contiguous view.

pub use attn_core::layout::Side;
use attn_core::{
    Error, HostPages, KvFormat, KvMemory, KvSource, KvView, PageLayout, PageTable, Scheme,
    centres::CENTRES,
    layout::{k_code, load_param, v_code},
    quant::Param,
};
use half::{bf16, f16};

/// One KV head of one sequence.
#[derive(Clone, Copy)]
pub struct Reader<'a> {
    location: Location<'a>,
    sequence: usize,
    head: usize,
    /// Static scales of K and V; 1 for schemes without.
    pub tensor_scales: [f32; 2],
    /// The sequence's centres of K, if its cache or pool has some.
    pub centres: Option<[&'a [bf16]; CENTRES]>,
}

/// Offsets of one head's codes and parameters inside a page, computed once instead of for every tile.
#[derive(Clone, Copy)]
struct RunOffsets {
    page_bytes: usize,
    /// Bytes from where a page begins to where the next one does.
    stride: usize,
    /// log2 of the page size.
    page_shift: u32,
    /// Start of the codes, start and end of the parameters: K, V.
    sides: [[usize; 3]; 2],
    /// Start of K's and of V's residuals in a residual page.
    residuals: [usize; 2],
}

impl RunOffsets {
    fn new(layout: &PageLayout, stride: usize, head: usize) -> Self {
        let run = head * layout.run_bytes();
        let side = |codes: std::ops::Range<usize>, params: std::ops::Range<usize>| {
            [run + codes.start, run + params.start, run + params.end]
        };
        RunOffsets {
            page_bytes: layout.page_bytes(),
            stride,
            page_shift: layout.page_size().trailing_zeros(),
            sides: [
                side(layout.k_codes(), layout.k_params()),
                side(layout.v_codes(), layout.v_params()),
            ],
            residuals: [Side::K, Side::V].map(|side| {
                let part = layout.residual(side);
                run + part.map_or(0, |part| part.codes.start)
            }),
        }
    }
}

/// One side of one page's run.
#[derive(Clone, Copy)]
pub(crate) struct PagePart<'a> {
    pub codes: &'a [u8],
    pub params: &'a [u8],
    pub page_size: usize,
}

/// One head's rows of a view.
#[derive(Clone, Copy)]
pub(crate) struct ViewRows<'a> {
    codes: &'a [u8],
    token: usize,
}

impl<'a> ViewRows<'a> {
    /// The bytes of one token's row.
    pub fn row(&self, t: usize, bytes: usize) -> &'a [u8] {
        &self.codes[t * self.token..][..bytes]
    }
}

#[derive(Clone, Copy)]
enum Location<'a> {
    Pages {
        pool: &'a [u8],
        layout: PageLayout,
        offsets: RunOffsets,
        pages: &'a [u32],
        /// Where residual pages are looked up.
        table: &'a PageTable,
    },
    View(&'a KvView<'a>),
}

impl<'a> Location<'a> {
    /// One KV head of one sequence of the table, in the pages of a pool, which begin `stride` bytes apart.
    fn pages(
        pool: &'a [u8],
        layout: &PageLayout,
        stride: usize,
        table: &'a PageTable,
        [sequence, head]: [usize; 2],
    ) -> Self {
        Location::Pages {
            pool,
            layout: *layout,
            offsets: RunOffsets::new(layout, stride, head),
            pages: &table.pages[sequence],
            table,
        }
    }
}

impl<'a> Reader<'a> {
    /// Opens one KV head of one sequence.
    ///
    /// # Errors
    /// [`Error::WrongBackend`] if the cache's pages are not in host memory.
    pub fn new(kv: KvSource<'a>, sequence: usize, head: usize) -> Result<Self, Error> {
        let pick = |scales: &[f32]| scales.get(head).copied().unwrap_or(1.0);
        Ok(match kv.memory() {
            KvMemory::Pages(layer, table) => {
                let cache = layer.cache();
                let store = cache.store().as_any().downcast_ref::<HostPages>();
                let pool = store.and_then(|store| store.pool(layer.index()));
                let of_cache = table.sequences.get(sequence).copied();
                let entries = table.entries_of_page(cache.layout().num_kv_heads());
                let centres = store.zip(of_cache).and_then(|(store, sequence)| {
                    let head = head + sequence % entries;
                    store.centres(layer.index(), sequence / entries, head)
                });
                let pool = pool.ok_or(Error::WrongBackend {
                    backend: crate::BACKEND,
                    what: "cache",
                })?;
                let (layout, at) = (layer.layout_of(table), [sequence, head]);
                Reader {
                    location: Location::pages(pool, &layout, layout.page_bytes(), table, at),
                    sequence,
                    head,
                    tensor_scales: layer.tensor_scales().map(pick),
                    centres,
                }
            }
            KvMemory::Pool(pool) => Reader {
                location: Location::pages(
                    pool.bytes(),
                    pool.layout(),
                    pool.stride(),
                    pool.table(),
                    [sequence, head],
                ),
                sequence,
                head,
                tensor_scales: [1.0; 2],
                centres: pool.centres(sequence, head),
            },
            KvMemory::View(view) => Reader {
                location: Location::View(view),
                sequence,
                head,
                tensor_scales: [pick(view.k_tensor_scales()), pick(view.v_tensor_scales())],
                centres: None,
            },
        })
    }

    /// The schemes of both sides.
    #[must_use]
    pub fn format(&self) -> KvFormat {
        match &self.location {
            Location::View(view) => view.format(),
            Location::Pages { layout, .. } => layout.format(),
        }
    }

    /// The scheme of one side.
    #[must_use]
    pub fn scheme(&self, side: Side) -> Scheme {
        let format = self.format();
        match side {
            Side::K => format.k,
            Side::V => format.v,
        }
    }

    /// The side in whose order the codes of a side lie in pages: K's, of latents.
    #[inline]
    pub(crate) fn order(&self, side: Side) -> Side {
        match &self.location {
            Location::View(_) => side,
            Location::Pages { layout, .. } => layout.order(side),
        }
    }

    /// End of the page (or of the whole view) that holds token `t`.
    #[must_use]
    pub fn page_end(&self, t: usize) -> usize {
        match self.location {
            Location::Pages { layout, .. } => (t / layout.page_size() + 1) * layout.page_size(),
            Location::View(_) => usize::MAX,
        }
    }

    /// Whether the reader reads native pages, not a view.
    pub(crate) fn is_paged(&self) -> bool {
        matches!(self.location, Location::Pages { .. })
    }

    /// One side of the page of token `t`.
    ///
    /// # Panics
    /// For a view.
    #[inline]
    pub(crate) fn page(&self, side: Side, t: usize) -> PagePart<'a> {
        let Location::Pages {
            pool,
            offsets,
            pages,
            ..
        } = &self.location
        else {
            unreachable!("a view has no pages");
        };
        let page = pages[t >> offsets.page_shift] as usize;
        let page = &pool[page * offsets.stride..][..offsets.page_bytes];
        let [codes, params, end] = offsets.sides[side as usize];
        PagePart {
            codes: &page[codes..params],
            params: &page[params..end],
            page_size: 1 << offsets.page_shift,
        }
    }

    /// One side's residuals in the residual page of token `t`.
    ///
    /// # Panics
    /// For a view, and for a token whose residuals are not kept.
    #[inline]
    pub(crate) fn residual_page(&self, side: Side, t: usize) -> PagePart<'a> {
        let Location::Pages {
            pool,
            offsets,
            table,
            ..
        } = &self.location
        else {
            unreachable!("a view has no residuals");
        };
        let page = table.residual_page(self.sequence, t >> offsets.page_shift);
        let page =
            page.expect("a cache refuses queries that read residuals which it lacks") as usize;
        let page = &pool[page * offsets.stride..][..offsets.page_bytes];
        PagePart {
            codes: &page[offsets.residuals[side as usize]..],
            params: &[],
            page_size: 1 << offsets.page_shift,
        }
    }

    /// The run of the page of token `t`, which holds everything that a tile reads of it.
    ///
    /// # Panics
    /// For a view.
    pub(crate) fn run(&self, t: usize) -> &'a [u8] {
        let Location::Pages {
            pool,
            offsets,
            pages,
            ..
        } = &self.location
        else {
            unreachable!("a view has no pages");
        };
        let page = pages[t >> offsets.page_shift] as usize * offsets.stride;
        &pool[page + offsets.sides[0][0]..page + offsets.sides[0][2].max(offsets.sides[1][2])]
    }

    /// One side's rows of a view.
    pub(crate) fn rows(&self, side: Side) -> Option<ViewRows<'a>> {
        let Location::View(view) = self.location else {
            return None;
        };
        let rows = if side == Side::K { view.k() } else { view.v() };
        let [sequence, head, token] = rows.code_strides;
        Some(ViewRows {
            codes: &rows.codes
                [(self.sequence * sequence + self.head * head).min(rows.codes.len())..],
            token,
        })
    }

    /// f16 scales of a view from token `t` on, and how far apart two tokens' are.
    ///
    /// # Panics
    /// For pages.
    pub(crate) fn view_scales(&self, side: Side, t: usize) -> (&'a [u16], usize) {
        let Location::View(view) = self.location else {
            unreachable!("pages hold their scales");
        };
        let rows = if side == Side::K { view.k() } else { view.v() };
        let [sequence, head, token] = rows.scale_strides;
        let first = self.sequence * sequence + self.head * head + t * token;
        (&rows.scales[first..], token)
    }

    /// One part of the page of token `t`: its codes, its parameters, and the cache's layout.
    fn part(&self, side: Side, t: usize) -> Option<(&'a [u8], &'a [u8], PageLayout)> {
        let Location::Pages { layout, .. } = self.location else {
            return None;
        };
        let page = self.page(side, t);
        Some((page.codes, page.params, layout))
    }

    /// The stored code of `(t, d)`.
    #[must_use]
    pub fn code(&self, side: Side, t: usize, d: usize) -> u16 {
        let bits = self.scheme(side).code_bits();
        match (self.part(side, t), self.location) {
            (Some((codes, _, layout)), _) => {
                let is_k = layout.order(side) == Side::K;
                let address = if is_k { k_code } else { v_code };
                let at = address(
                    bits,
                    layout.head_dim().of(side),
                    layout.page_size(),
                    t % layout.page_size(),
                    d,
                );
                at.load(codes, bits)
            }
            (None, Location::View(view)) => {
                let rows = if side == Side::K { view.k() } else { view.v() };
                rows.code(bits, [self.sequence, self.head, t], d)
            }
            (None, Location::Pages { .. }) => unreachable!("pages always have offsets"),
        }
    }

    /// The parameters of group `g` of token `t`.
    #[must_use]
    pub fn param(&self, side: Side, t: usize, g: usize) -> Param {
        let scheme = self.scheme(side);
        match (self.part(side, t), self.location) {
            (Some((_, params, layout)), _) => load_param(
                params,
                scheme,
                layout.page_size(),
                t % layout.page_size(),
                g,
            ),
            (None, Location::View(_)) if !scheme.has_row_scales() => Param {
                scale: f16::ONE,
                shift: f16::ZERO,
            },
            (None, Location::View(view)) => {
                let rows = if side == Side::K { view.k() } else { view.v() };
                rows.param([self.sequence, self.head, t], g)
            }
            (None, Location::Pages { .. }) => unreachable!("pages always have offsets"),
        }
    }

    /// The residual of `(t, d)`, whose page is one of the sequence's first or last.
    ///
    /// # Panics
    /// For a view, and for a token whose residuals are not kept.
    #[must_use]
    pub fn residual(&self, side: Side, t: usize, d: usize) -> u16 {
        let Location::Pages { layout, .. } = &self.location else {
            unreachable!("a view has no residuals");
        };
        let page = self.residual_page(side, t);
        let address = if side == Side::K { k_code } else { v_code };
        let page_size = layout.page_size();
        let at = address(4, layout.head_dim().of(side), page_size, t % page_size, d);
        at.load(page.codes, 4)
    }
}
