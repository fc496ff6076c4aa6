//! Caches of other engines, in and out, without going through floats.
//!
//! | other engine's rows ([`RowFormat`]) | page scheme | import | export |
//! |---|---|---|---|
//! | contiguous or paged f16, bf16, e4m3, int8 ([`RowFormat::Plain`]) | the same scheme | exact | exact |
//! | FBGEMM int4 rows, 1, 2, 4, 8 groups | `int4-g1` … `int4-g8` | exact | exact |
//! | llama.cpp `q8_0` | `int8-g32` | exact | exact |
//! | llama.cpp `q4_0` | `int4-g2`, `-g4` or `-g8`: a group per 32 dims | shift rounded where `d` is negative | exact for imported groups |
//!
//! [`import`] makes the pages that [`KvCache::restore`](crate::KvCache::restore) puts into a cache on any backend; [`export`] and [`dequantize`] take
//! the pages that [`KvCache::read_back`](crate::KvCache::read_back) gives. [`rows`] describes how each row is laid out, and which quantizer writes it.
//!
//! ```
//! use attn_core::{
//!     CacheConfig, Heads, HostPages, KvCache, KvFormat, Scheme, StridedRows,
//!     convert::{self, ExternalRows, Order, RowFormat, Side},
//! };
//!
//! // 3 tokens of another engine's bf16 cache, [1 KV head, 3 tokens, 64 dims], all ones.
//! let ones = [0x80, 0x3f].repeat(3 * 64);
//! let rows = ExternalRows {
//!     format: RowFormat::Plain(Scheme::Bf16),
//!     rows: StridedRows::bnsh(&ones, &[], 1, 3, 64 * 2, 0),
//!     blocks: None,
//! };
//! let heads = Heads::new(1, 1, 64);
//! let config = CacheConfig::builder(KvFormat::same(Scheme::Bf16), heads).max_len(64).build();
//! let layout = config.layout()?;
//! let pages = convert::import(&layout, 0, 3, &rows, &rows)?;
//! // Into a cache of any backend, and out of it.
//! let store = HostPages::new(&config)?;
//! let mut cache = KvCache::new(config, Box::new(store))?;
//! cache.restore_pages(0, 3, &pages)?;
//! let k = convert::export(&layout, &cache.read_back(0)?, 3, Side::K, rows.format, Order::Bnsh)?;
//! assert_eq!(k.codes, ones);
//! # Ok::<(), attn_core::Error>(())
//! ```
//!
//! Not here: rotated schemes, which no other engine stores; use [`dequantize`] and `append`.

use half::bf16;

use crate::{
    centres::{CENTRES, centre_of},
    error::{Error, filled, refuse, reserve},
    format::Scheme,
    layout::PageLayout,
    page_bytes::SequencePages,
    quant::{self, Param},
    rotation::rotate_back,
    segments::TILE,
    view::{StridedRows, offset},
};

pub mod rows;

pub use crate::head_dim::Side;
pub use rows::RowFormat;

/// Rows of another engine's cache: how each is coded, and where it lies.
#[derive(Debug, Clone, Copy)]
pub struct ExternalRows<'a> {
    /// How each row is coded.
    pub format: RowFormat,
    /// The rows' bytes. [`RowFormat::Plain`] int8 has f16 scales beside them; the other formats hold their scales inside the row.
    pub rows: StridedRows<'a>,
    /// The block table of a paged cache; the first stride of `rows` then goes from block to block.
    pub blocks: Option<Blocks<'a>>,
}

/// Another engine's page table for one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    /// The block of each run of tokens.
    pub table: &'a [u32],
    /// Tokens per block; 1 or more.
    pub tokens: usize,
}

/// The order in which exported rows lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// `[num_kv_heads, tokens, row]`, also called HND.
    Bnsh,
    /// `[tokens, num_kv_heads, row]`, also called NHD.
    Bsnh,
}

/// K or V of one sequence as rows of another engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The rows.
    pub codes: Vec<u8>,
    /// The bits of f16 scales `[…][group]` in the same order, for [`RowFormat::Plain`] int8; else empty.
    pub scales: Vec<u16>,
}

fn check_scheme(format: RowFormat, layout: &PageLayout, side: Side) -> Result<Scheme, Error> {
    let part = layout.part(side);
    let (scheme, stored) = (format.scheme(part.dim())?, part.scheme);
    if stored.is_rotated() {
        return refuse(
            "scheme of the pages",
            format_args!("{stored}"),
            "schemes that are not rotated, such as int8-plain; `append` rotates rows, `dequantize` turns them back",
        );
    }
    if scheme != stored {
        return Err(Error::RowScheme {
            rows: scheme,
            pages: stored,
        });
    }
    Ok(scheme)
}

impl ExternalRows<'_> {
    /// Refuses rows that do not hold the last token of the last head, and a block table that is too short, so that a call allocates no more
    /// pages than its rows fill.
    fn check(
        &self,
        layout: &PageLayout,
        side: Side,
        [sequence, tokens]: [usize; 2],
    ) -> Result<(), Error> {
        if self.blocks.is_some_and(|blocks| blocks.tokens == 0) {
            return refuse("tokens per block", 0, "1 or more");
        }
        let Some(last) = tokens.checked_sub(1) else {
            return Ok(());
        };
        let heads = layout.num_kv_heads();
        let row_bytes = self.format.row_bytes(layout.head_dim().of(side));
        // Strides of 0 would let one row stand for any number of them.
        let (given, needed) = (
            self.rows.codes.len() / row_bytes,
            tokens.saturating_mul(heads),
        );
        if needed > given {
            return Err(Error::Length {
                what: "rows",
                given,
                needed,
            });
        }
        let at = place(self, sequence, heads - 1, last)?;
        let start = offset(at, self.rows.code_strides);
        slice("rows", self.rows.codes, start, row_bytes)?;
        Ok(())
    }
}

/// Zeroed pages for `tokens` tokens.
fn blank_pages(layout: &PageLayout, tokens: usize) -> Result<Vec<Vec<u8>>, Error> {
    let count = tokens.div_ceil(layout.page_size());
    (0..count)
        .map(|_| filled("a page", layout.page_bytes(), 0))
        .collect()
}

/// Where the bytes of row (head, token) of `sequence` lie, as an index triple for the strides.
fn place(
    external: &ExternalRows<'_>,
    sequence: usize,
    head: usize,
    t: usize,
) -> Result<[usize; 3], Error> {
    let Some(blocks) = external.blocks else {
        return Ok([sequence, head, t]);
    };
    match blocks.table.get(t / blocks.tokens) {
        Some(block) => Ok([*block as usize, head, t % blocks.tokens]),
        None => Err(Error::Length {
            what: "block table",
            given: blocks.table.len(),
            needed: t / blocks.tokens + 1,
        }),
    }
}

fn slice<'a, T>(
    what: &'static str,
    x: &'a [T],
    start: usize,
    len: usize,
) -> Result<&'a [T], Error> {
    let end = start.saturating_add(len);
    x.get(start..end).ok_or(Error::Length {
        what,
        given: x.len(),
        needed: end,
    })
}

/// Converts the first `tokens` tokens of `sequence` to pages of `layout`.
///
/// # Errors
/// [`Error::RowScheme`] if the rows' scheme is not the layout's; [`Error::Length`] if rows are missing;
/// [`Error::BadBytes`] for a NaN, an infinity, a negative scale or a code outside the scheme; [`Error::Parameter`] for blocks of no tokens,
/// for rotated schemes, and for latents; [`Error::OutOfMemory`].
pub fn import(
    layout: &PageLayout,
    sequence: usize,
    tokens: usize,
    k: &ExternalRows<'_>,
    v: &ExternalRows<'_>,
) -> Result<Vec<Vec<u8>>, Error> {
    let page_size = layout.page_size();
    layout
        .format()
        .check_not_latents("format to import rows into")?;
    for (side, external) in [(Side::K, k), (Side::V, v)] {
        check_scheme(external.format, layout, side)?;
        external.check(layout, side, [sequence, tokens])?;
    }
    let mut pages = blank_pages(layout, tokens)?;
    for (side, external) in [(Side::K, k), (Side::V, v)] {
        let part = layout.part(side);
        let scheme = part.scheme;
        let groups = part.groups().count();
        let row_bytes = external.format.row_bytes(part.dim());
        let outside = external.format.scales_outside();
        let (mut codes, mut params) = (vec![0; part.dim()], vec![Param::default(); groups]);
        for head in 0..layout.num_kv_heads() {
            for t in 0..tokens {
                let at = place(external, sequence, head, t)?;
                let start = offset(at, external.rows.code_strides);
                let row = slice("rows", external.rows.codes, start, row_bytes)?;
                let scales = if outside {
                    let start = offset(at, external.rows.scale_strides);
                    slice("scales", external.rows.scales, start, groups)?
                } else {
                    &[]
                };
                external
                    .format
                    .unpack(row, scales, &mut codes, &mut params)
                    .map_err(|what| Error::BadBytes {
                        what,
                        offset: start,
                        scheme,
                    })?;
                let run = &mut pages[t / page_size][layout.run(0, head)];
                part.store_codes(run, t % page_size, &codes);
                part.store_params(run, t % page_size, &params);
            }
        }
    }
    Ok(pages)
}

/// Codes of one token of one head, and its parameters per group.
fn get(
    layout: &PageLayout,
    side: Side,
    page: &[u8],
    head: usize,
    t: usize,
) -> (Vec<u16>, Vec<Param>) {
    let part = layout.part(side);
    let run = &page[layout.run(0, head)];
    let codes = (0..part.dim()).map(|d| part.load_code(run, t, d));
    let params = (0..part.groups().count()).map(|g| part.load_param(run, t, g));
    (codes.collect(), params.collect())
}

/// The row of token `t` of its page, of one head, as it was before it was rotated: with the residuals of a residual page, if there is one to read, and with
/// the centre that was taken off, if one was.
fn row(
    layout: &PageLayout,
    side: Side,
    (home, residuals): (&[u8], Option<&[u8]>),
    (head, t): (usize, usize),
    tensor_scale: f32,
    centre: &[bf16],
) -> Vec<f32> {
    let scheme = layout.part(side).scheme;
    let (codes, params) = get(layout, side, home, head, t);
    let groups = layout.groups(side);
    let mut row: Vec<f32> = match layout.residual(side).zip(residuals) {
        None => {
            let values = codes.iter().enumerate();
            values
                .map(|(d, &c)| quant::decode(scheme, c, params[groups.of_dim(d)], tensor_scale))
                .collect()
        }
        Some((part, page)) => {
            let run = &page[layout.run(0, head)];
            let residual = |d| part.load_code(run, t, d);
            let values = codes.iter().enumerate();
            values
                .map(|(d, &u)| {
                    quant::half_step_value(u, residual(d), params[groups.of_dim(d)].scale)
                })
                .collect()
        }
    };
    let elements = row.iter_mut().zip(centre);
    elements.for_each(|(x, c)| *x += c.to_f32());
    let blocks = layout.format().rotated_blocks(layout.head_dim());
    if let Some(block) = blocks[side as usize] {
        rotate_back(&mut row, block);
    }
    row
}

/// The keys of a tile whose pages these are, from token `first` of the first one on, as their codes have them: without residuals, and without centres that were
/// taken off. `[num_kv_heads, 64, head_dim]`.
///
/// # Errors
/// [`Error::BadBytes`] for damaged pages.
pub(crate) fn tile_keys(
    layout: &PageLayout,
    pages: &[&[u8]],
    first: usize,
    scales: &[f32],
) -> Result<Vec<f32>, Error> {
    let (heads, page_size) = (layout.num_kv_heads(), layout.page_size());
    let mut keys = Vec::new();
    reserve("keys", &mut keys, heads * TILE * layout.head_dim().k)?;
    for head in 0..heads {
        let scale = scales.get(head).copied().unwrap_or(1.0);
        for t in first..first + TILE {
            let page = (pages[t / page_size], None);
            keys.extend(row(
                layout,
                Side::K,
                page,
                (head, t % page_size),
                scale,
                &[],
            ));
        }
    }
    Ok(keys)
}

/// Converts pages, as [`KvCache::read_back`](crate::KvCache::read_back) gives them, to rows of another engine.
///
/// # Errors
/// [`Error::RowScheme`] if the scheme is another; [`Error::Length`], [`Error::BadBytes`] for damaged pages;
/// [`Error::Parameter`] for an int4 group that is no `q4_0`, and for rotated schemes.
pub fn export(
    layout: &PageLayout,
    pages: &[Vec<u8>],
    tokens: usize,
    side: Side,
    format: RowFormat,
    order: Order,
) -> Result<Exported, Error> {
    let scheme = check_scheme(format, layout, side)?;
    layout.check_pages(pages, tokens)?;
    let (heads, page_size) = (layout.num_kv_heads(), layout.page_size());
    let dim = layout.head_dim().of(side);
    let row_bytes = format.row_bytes(dim);
    let groups = if format.scales_outside() {
        scheme.groups(dim).count()
    } else {
        0
    };
    let rows = heads.saturating_mul(tokens);
    let mut exported = Exported {
        codes: filled("exported rows", rows.saturating_mul(row_bytes), 0)?,
        scales: filled("exported scales", rows.saturating_mul(groups), 0)?,
    };
    for head in 0..heads {
        for t in 0..tokens {
            let (codes, params) = get(layout, side, &pages[t / page_size], head, t % page_size);
            let i = match order {
                Order::Bnsh => head * tokens + t,
                Order::Bsnh => t * heads + head,
            };
            format.pack(
                &codes,
                &params,
                &mut exported.codes[i * row_bytes..][..row_bytes],
                &mut exported.scales[i * groups..][..groups],
            )?;
        }
    }
    Ok(exported)
}

/// Values of pages, as [`KvCache::read_back`](crate::KvCache::read_back) gives them: K and V, each `[tokens, num_kv_heads, head_dim]` with its own head_dim, with residuals
/// where the sequence's newest token reads them: those of the first tile, and of the window. Pages do not say that they are a later shard's, whose first tile is read as
/// any other: [`CacheLayer::dequantize`](crate::CacheLayer::dequantize) knows it.
///
/// # Errors
/// [`Error::Length`], [`Error::BadBytes`] for damaged pages; those of [`Scheme::check_scales`] for scales that no cache has; [`Error::OutOfMemory`].
pub fn dequantize(
    layout: &PageLayout,
    pages: &[Vec<u8>],
    tokens: usize,
    k_tensor_scales: &[f32],
    v_tensor_scales: &[f32],
) -> Result<[Vec<f32>; 2], Error> {
    let scales = [k_tensor_scales, v_tensor_scales];
    dequantize_centred(layout, pages, [tokens, 0], scales, &[])
}

/// [`dequantize`] of pages whose K lacks the centres of a sequence's layer, `[num_kv_heads, 2, head_dim]`; none of a cache without. Of a later shard, `before` tokens
/// lie ahead in other shards.
pub(crate) fn dequantize_centred(
    layout: &PageLayout,
    pages: &[Vec<u8>],
    [tokens, before]: [usize; 2],
    scales: [&[f32]; 2],
    centres: &[bf16],
) -> Result<[Vec<f32>; 2], Error> {
    layout
        .format()
        .check_scales(scales, layout.num_kv_heads())?;
    layout.check_pages(pages, tokens)?;
    let held = SequencePages::of_lists(*layout, tokens, pages)?;
    let (heads, page_size) = (layout.num_kv_heads(), layout.page_size());
    let newest = tokens.saturating_sub(1) / TILE;
    let dim = layout.head_dim().k;
    let centre = |head: usize, t: usize| {
        let first = (head * CENTRES + centre_of(t)) * dim;
        centres.get(first..first + dim).unwrap_or_default()
    };
    let side = |side: Side| -> Result<Vec<f32>, Error> {
        let scales = scales[side as usize];
        let mut x = Vec::new();
        let elements = tokens * heads * layout.head_dim().of(side);
        reserve("dequantized rows", &mut x, elements)?;
        for t in 0..tokens {
            let scheme = layout.part(side).scheme;
            let is_fine = scheme.reads_fine(t / TILE, newest, before);
            let at = t;
            let (page, t) = (t / page_size, t % page_size);
            let residuals = held.residual_of(page).filter(|_| is_fine);
            let page = (&pages[page][..], residuals.map(|i| &pages[i][..]));
            for head in 0..heads {
                let scale = scales.get(head).copied().unwrap_or(1.0);
                let centre = match side {
                    Side::K => centre(head, at),
                    Side::V => &[],
                };
                x.extend(row(layout, side, page, (head, t), scale, centre));
            }
        }
        Ok(x)
    };
    Ok([side(Side::K)?, side(Side::V)?])
}
