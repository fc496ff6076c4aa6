//! Codes and parameters of one (sequence, KV head), whatever holds them: pages or a contiguous view.

pub use attn_core::layout::Side;
use attn_core::{
    Error, HostPages, Int4Scale, KvSource, KvView, PageLayout, Scheme,
    layout::{k_code, load_param, v_code},
    quant::Param,
};
use half::f16;

/// One KV head of one sequence.
#[derive(Clone, Copy)]
pub struct Reader<'a> {
    source: Source<'a>,
    sequence: usize,
    head: usize,
    /// Static scales of K and V, 1 for schemes without.
    pub tensor_scales: [f32; 2],
}

/// Where one head's parts lie in a page: worked out once, not for every tile.
#[derive(Clone, Copy)]
struct Parts {
    page_bytes: usize,
    /// log2 of the page size.
    page_shift: u32,
    /// Start of the codes, start and end of the parameters: K, V, K in a tail page.
    sides: [[usize; 3]; 3],
}

impl Parts {
    fn new(layout: &PageLayout, head: usize) -> Self {
        let run = head * layout.run_bytes();
        let tail = layout.tail_k();
        let side = |codes: std::ops::Range<usize>, params: std::ops::Range<usize>| {
            [run + codes.start, run + params.start, run + params.end]
        };
        Parts {
            page_bytes: layout.page_bytes(),
            page_shift: layout.page_size().trailing_zeros(),
            sides: [
                side(layout.k_codes(), layout.k_params()),
                side(layout.v_codes(), layout.v_params()),
                side(tail.k_codes(), tail.k_params()),
            ],
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
pub(crate) struct Rows<'a> {
    codes: &'a [u8],
    token: usize,
}

impl<'a> Rows<'a> {
    /// The bytes of one token's row.
    pub fn row(&self, t: usize, bytes: usize) -> &'a [u8] {
        &self.codes[t * self.token..][..bytes]
    }
}

#[derive(Clone, Copy)]
enum Source<'a> {
    Pages {
        pool: &'a [u8],
        layout: PageLayout,
        parts: Parts,
        pages: &'a [u32],
        tail: Option<u32>,
        len: usize,
    },
    View(&'a KvView<'a>),
}

impl<'a> Reader<'a> {
    /// Opens one KV head of one sequence.
    ///
    /// # Errors
    /// [`Error::Foreign`] if the cache's pages are not in host memory.
    pub fn new(kv: KvSource<'a>, sequence: usize, head: usize) -> Result<Self, Error> {
        let pick = |scales: &[f32]| scales.get(head).copied().unwrap_or(1.0);
        Ok(match kv {
            KvSource::Cache(cache) => {
                let store = cache.store().as_any().downcast_ref::<HostPages>();
                let store = store.ok_or(Error::Foreign {
                    backend: "cpu",
                    what: "cache",
                })?;
                let (config, table) = (cache.config(), cache.table());
                let layout = *cache.layout();
                Reader {
                    source: Source::Pages {
                        pool: store.pool(),
                        layout,
                        parts: Parts::new(&layout, head),
                        pages: &table.pages[sequence],
                        tail: table.tail_pages[sequence],
                        len: table.lens[sequence],
                    },
                    sequence,
                    head,
                    tensor_scales: [pick(&config.k_tensor_scales), pick(&config.v_tensor_scales)],
                }
            }
            KvSource::View(view) => Reader {
                source: Source::View(view),
                sequence,
                head,
                tensor_scales: [pick(view.k_tensor_scales()), pick(view.v_tensor_scales())],
            },
        })
    }

    /// The scheme that holds token `t`: an open page of `Int4 Channel` holds K as `Int8 Token`.
    pub fn scheme(&self, side: Side, t: usize) -> Scheme {
        match self.source {
            Source::View(view) if side == Side::K => view.format().k,
            Source::View(view) => view.format().v,
            Source::Pages { layout, .. } if side == Side::V => layout.format().v,
            Source::Pages { layout, .. } if self.is_open(t) => layout.tail_k().format().k,
            Source::Pages { layout, .. } => layout.format().k,
        }
    }

    fn is_open(&self, t: usize) -> bool {
        match &self.source {
            Source::Pages {
                tail, parts, len, ..
            } => tail.is_some() && t >> parts.page_shift == len >> parts.page_shift,
            Source::View(_) => false,
        }
    }

    /// Tokens up to which one page (or the whole view) goes on from `t`.
    pub fn page_end(&self, t: usize) -> usize {
        match self.source {
            Source::Pages { layout, .. } => (t / layout.page_size() + 1) * layout.page_size(),
            Source::View(_) => usize::MAX,
        }
    }

    /// Whether it reads native pages, not a view.
    pub(crate) fn is_paged(&self) -> bool {
        matches!(self.source, Source::Pages { .. })
    }

    /// One side of the page of token `t`.
    ///
    /// # Panics
    /// For a view.
    #[inline]
    pub(crate) fn page(&self, side: Side, t: usize) -> PagePart<'a> {
        let Source::Pages {
            pool,
            parts,
            pages,
            tail,
            ..
        } = &self.source
        else {
            unreachable!("a view has no pages");
        };
        let (page, part) = match (side, tail) {
            (Side::K, Some(tail)) if self.is_open(t) => (*tail, 2),
            _ => (pages[t >> parts.page_shift], side as usize),
        };
        let page = &pool[page as usize * parts.page_bytes..][..parts.page_bytes];
        let [codes, params, end] = parts.sides[part];
        PagePart {
            codes: &page[codes..params],
            params: &page[params..end],
            page_size: 1 << parts.page_shift,
        }
    }

    /// The run of the page of token `t`: all that a tile of a sealed page reads.
    ///
    /// # Panics
    /// For a view.
    pub(crate) fn run(&self, t: usize) -> &'a [u8] {
        let Source::Pages {
            pool, parts, pages, ..
        } = &self.source
        else {
            unreachable!("a view has no pages");
        };
        let page = pages[t >> parts.page_shift] as usize * parts.page_bytes;
        &pool[page + parts.sides[0][0]..page + parts.sides[1][2]]
    }

    /// One side's rows of a view.
    pub(crate) fn rows(&self, side: Side) -> Option<Rows<'a>> {
        let Source::View(view) = self.source else {
            return None;
        };
        let rows = if side == Side::K { view.k() } else { view.v() };
        let [sequence, head, token] = rows.code_strides;
        Some(Rows {
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
        let Source::View(view) = self.source else {
            unreachable!("pages hold their scales");
        };
        let rows = if side == Side::K { view.k() } else { view.v() };
        let [sequence, head, token] = rows.scale_strides;
        let first = self.sequence * sequence + self.head * head + t * token;
        (&rows.scales[first..], token)
    }

    /// One part of the page of token `t`: its codes, its parameters, and the cache's layout.
    fn part(&self, side: Side, t: usize) -> Option<(&'a [u8], &'a [u8], PageLayout)> {
        let Source::Pages { layout, .. } = self.source else {
            return None;
        };
        let page = self.page(side, t);
        Some((page.codes, page.params, layout))
    }

    /// The stored code of `(t, d)`.
    pub fn code(&self, side: Side, t: usize, d: usize) -> u16 {
        let bits = self.scheme(side, t).code_bits();
        match (self.part(side, t), self.source) {
            (Some((codes, _, layout)), _) => {
                let address = if side == Side::K { k_code } else { v_code };
                let at = address(
                    bits,
                    layout.head_dim(),
                    layout.page_size(),
                    t % layout.page_size(),
                    d,
                );
                at.load(codes, bits)
            }
            (None, Source::View(view)) => {
                let rows = if side == Side::K { view.k() } else { view.v() };
                rows.code(bits, [self.sequence, self.head, t], d)
            }
            (None, Source::Pages { .. }) => unreachable!("pages always have parts"),
        }
    }

    /// The parameters of group `g` of token `t`; of dim `g` in a sealed `Int4 Channel` page.
    pub fn param(&self, side: Side, t: usize, g: usize) -> Param {
        let scheme = self.scheme(side, t);
        match (self.part(side, t), self.source) {
            (Some((_, params, layout)), _) => load_param(
                params,
                scheme,
                layout.page_size(),
                t % layout.page_size(),
                g,
            ),
            (None, Source::View(_)) if !scheme.has_row_scales() => Param {
                scale: f16::ONE,
                shift: f16::ZERO,
            },
            (None, Source::View(view)) => {
                let rows = if side == Side::K { view.k() } else { view.v() };
                rows.param([self.sequence, self.head, t], g)
            }
            (None, Source::Pages { .. }) => unreachable!("pages always have parts"),
        }
    }

    /// Whether token `t` lies in a sealed page whose K has a scale per channel.
    pub fn is_channel(&self, t: usize) -> bool {
        self.scheme(Side::K, t) == Scheme::Int4(Int4Scale::Channel)
    }
}
