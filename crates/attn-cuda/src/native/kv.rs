//! Where the K and V of a batch lie in device memory: sequences in the library's pages, and rows of other caches.

use attn_core::{Error, KvFormat, PageLayout, Scheme, error::refuse, layout::Side};
use attn_kernels::cuda::{KvLayout, params::DecodeParams};

use super::pages::Pages;
use crate::{handles::DeviceAddress, sizes};

/// Sequences in the library's pages: what appends write, decodes attend and exports read.
///
/// Row b of each table belongs to sequence b, so addresses of later rows take a part of a batch. Launches read tables and lengths on the device, where
/// a captured graph finds other ones each time that it runs. The caller keeps pool, tables, lengths and scales alive and in place until the work that reads
/// them has run, and for as long as a graph that names them may run.
///
/// ```
/// use attn_core::{Error, KvFormat, PageLayout};
/// use attn_cuda::native::{DeviceAddress, PagedSequences, Pages};
///
/// // Up to 64 pages of 64 tokens for each sequence, in a pool of 256: int8 has neither residuals nor static scales.
/// let layout = PageLayout::new(KvFormat::INT8, 128, 64, 8)?;
/// let [pool, page_table, kv_lens] = [0x7f00_0000_0000, 0x7f10_0000_0000, 0x7f10_0000_1000].map(DeviceAddress::new);
/// let sequences = PagedSequences {
///     pool: Pages::new(pool, &layout, 256),
///     page_table,
///     page_table_stride: 64,
///     residual_pages: DeviceAddress::NULL,
///     residual_slots: 0,
///     kv_lens,
///     tensor_scales: [DeviceAddress::NULL; 2],
/// };
/// # let _ = sequences;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct PagedSequences {
    /// The pool, `[page][kv_head][run]`.
    pub pool: Pages,
    /// u32 `[batch][page_table_stride]`: the home pages of each sequence, in order; entries behind its last page mean nothing.
    pub page_table: DeviceAddress,
    /// Entries per sequence: at least the tokens of the longest one / `page_size`, rounded up.
    pub page_table_stride: usize,
    /// u32 `[batch][residual_slots]`: the residual page of a sequence's home page i at [`KvFormat::residual_slot`](attn_core::KvFormat::residual_slot), for those of its first and
    /// last home pages that have one; other entries mean nothing. Null where no scheme has a window.
    pub residual_pages: DeviceAddress,
    /// [`KvFormat::residual_slots`](attn_core::KvFormat::residual_slots) of the most query tokens that a sequence has in a step. Not read where no
    /// scheme has a window.
    pub residual_slots: usize,
    /// i32 `[batch]`: the tokens of each sequence; for an append, its new ones among them.
    pub kv_lens: DeviceAddress,
    /// f32 `[num_kv_heads]` of K, then of V: the static scales; null for schemes without.
    pub tensor_scales: [DeviceAddress; 2],
}

/// The sizes of the tables of [`PagedSequences`], as kernels take them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TableSizes {
    pub page_table_stride: i32,
    /// 0 where no scheme has a window.
    pub residual_ring: u32,
}

impl PagedSequences {
    /// Refuses pages that overlap, residual pages that are missing or in another number of slots, and a table whose entries kernels cannot count.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub(super) fn check(&self, layout: &PageLayout) -> Result<TableSizes, Error> {
        self.pool.check(layout.page_bytes())?;
        check_residual_pages(layout, self.residual_pages)?;
        Ok(TableSizes {
            page_table_stride: sizes::int("page_table_stride", self.page_table_stride)?,
            residual_ring: self.residual_ring(layout)?,
        })
    }

    /// The slots behind those of the first tile's pages, which the last pages share.
    fn residual_ring(&self, layout: &PageLayout) -> Result<u32, Error> {
        let (format, page_size) = (layout.format(), layout.page_size());
        let (least, slots) = (format.residual_slots(page_size, 0), self.residual_slots);
        let ring = slots.saturating_sub(format.first_residual_pages(page_size));
        if least == 0 {
            return Ok(0);
        }
        if slots < least || !ring.is_power_of_two() || ring > 1 << 20 {
            return Err(Error::parameter(
                "residual_slots",
                slots,
                "what KvFormat::residual_slots gives for the page size and the most query tokens of a sequence",
            ));
        }
        Ok(ring as u32)
    }

    /// The tables, lengths and scales in a decode's parameter block; all other fields are 0.
    pub(super) fn decode_params(&self, layout: &PageLayout) -> Result<DecodeParams, Error> {
        let tables = self.check(layout)?;
        let [k_tensor_scales, v_tensor_scales] = self.tensor_scales.map(DeviceAddress::get);
        Ok(DecodeParams {
            page_table: self.page_table.get(),
            page_table_stride: tables.page_table_stride,
            residual_pages: self.residual_pages.get(),
            residual_ring: tables.residual_ring,
            kv_lens: self.kv_lens.get(),
            k_tensor_scales,
            v_tensor_scales,
            ..DecodeParams::default()
        })
    }
}

/// Refuses static scales that are null where the format has some: kernels would take 1.
///
/// # Errors
/// [`Error::MissingScales`].
pub(super) fn check_scale_addresses(
    format: KvFormat,
    [k, v]: [DeviceAddress; 2],
    num_kv_heads: usize,
) -> Result<(), Error> {
    check_scale_address((Side::K, format.k), k, num_kv_heads)?;
    check_scale_address((Side::V, format.v), v, num_kv_heads)
}

/// Refuses static scales of one side as [`check_scale_addresses`] does.
///
/// # Errors
/// [`Error::MissingScales`].
pub(super) fn check_scale_address(
    (side, scheme): (Side, Scheme),
    scales: DeviceAddress,
    num_kv_heads: usize,
) -> Result<(), Error> {
    match scales.is_null() {
        true => scheme.check_scale_count(side, 0, num_kv_heads),
        false => Ok(()),
    }
}

/// Refuses a format with a window whose table of residual pages is null.
///
/// # Errors
/// [`Error::Parameter`].
pub(super) fn check_residual_pages(
    layout: &PageLayout,
    residual_pages: DeviceAddress,
) -> Result<(), Error> {
    let has_window = layout.format().residual_slots(layout.page_size(), 0) > 0;
    if has_window && residual_pages.is_null() {
        return Err(Error::parameter(
            "residual_pages",
            format_args!("null"),
            "a table for formats with a window (int4, int8/int4), as PagedSequences and SlotAppendArgs say",
        ));
    }
    Ok(())
}

/// Rows of K and V of another cache, `head_dim` codes side by side in each: contiguous, or in pages. The caller keeps them alive as those of
/// [`PagedSequences`].
#[derive(Debug, Clone, Copy)]
pub struct ViewRows {
    /// K's codes and f16 scales (null for schemes without). Where a decode reads codes, they begin at multiples of 16 bytes.
    pub k: [DeviceAddress; 2],
    /// V's codes and f16 scales (null for schemes without).
    pub v: [DeviceAddress; 2],
    /// Bytes from one sequence (one page where there are pages), KV head, token to the next, for K's and V's codes; for a decode multiples of 16.
    pub code_strides: [[usize; 3]; 2],
    /// Elements from one sequence (one page), KV head, token to the next, for K's and V's scales; from page to page an even number.
    pub scale_strides: [[usize; 3]; 2],
    /// i32 `[batch]`: the tokens of each sequence.
    pub kv_lens: DeviceAddress,
    /// f32 `[num_kv_heads]` of K, then of V: the static scales; null for schemes without.
    pub tensor_scales: [DeviceAddress; 2],
}

impl ViewRows {
    /// The rows in a decode's parameter block; all other fields are 0.
    pub(super) fn decode_params(&self) -> DecodeParams {
        let [k, k_scales] = self.k.map(DeviceAddress::get);
        let [v, v_scales] = self.v.map(DeviceAddress::get);
        let [k_strides, v_strides] = self.code_strides.map(sizes::strides);
        let [k_scale_strides, v_scale_strides] = self.scale_strides.map(sizes::strides);
        let [k_tensor_scales, v_tensor_scales] = self.tensor_scales.map(DeviceAddress::get);
        DecodeParams {
            k,
            v,
            k_scales,
            v_scales,
            k_strides,
            v_strides,
            k_scale_strides,
            v_scale_strides,
            kv_lens: self.kv_lens.get(),
            k_tensor_scales,
            v_tensor_scales,
            ..DecodeParams::default()
        }
    }

    /// Refuses strides at which the kernels' vectors do not find the rows of a page.
    fn check_in_pages(&self) -> Result<(), Error> {
        for stride in self.code_strides.into_iter().flatten() {
            if !stride.is_multiple_of(16) {
                return refuse("stride of rows", stride, "multiples of 16 bytes");
            }
        }
        // A kernel reads the word that a scale lies in, and knows which half it is without the page's number.
        for [of_page, ..] in self.scale_strides {
            if !of_page.is_multiple_of(2) {
                return refuse(
                    "stride of scales from page to page",
                    of_page,
                    "even numbers",
                );
            }
        }
        Ok(())
    }
}

/// K and V of a decode launch.
#[derive(Debug, Clone, Copy)]
pub enum DeviceKv {
    /// The library's pages.
    Paged(PagedSequences),
    /// Rows of a contiguous cache.
    Rows(ViewRows),
    /// Rows of another engine's paged cache, such as `[pages, page_size, num_kv_heads, head_dim]`.
    PagedRows {
        /// The rows of all pages.
        rows: ViewRows,
        /// Pages in the pool.
        num_pages: usize,
        /// u32 or i32 `[batch][page_table_stride]`.
        page_table: DeviceAddress,
        /// Entries per sequence: at least `max_kv_len / page_size`, rounded up.
        page_table_stride: usize,
    },
}

impl DeviceKv {
    /// K and V in the parameter block of a plan for `layout`, whose pages, where they are the library's, are `pages`; all other fields are 0.
    ///
    /// # Errors
    /// [`Error::Parameter`] for K and V that lie otherwise, and for sizes that kernels do not take.
    pub(super) fn decode_params(
        &self,
        layout: KvLayout,
        pages: Option<&PageLayout>,
    ) -> Result<DecodeParams, Error> {
        match (self, layout, pages) {
            (DeviceKv::Paged(sequences), KvLayout::Pages(_), Some(pages)) => Ok(DecodeParams {
                k: sequences.pool.at.get(),
                page_stride: sizes::int("page stride", sequences.pool.stride)?,
                ..sequences.decode_params(pages)?
            }),
            (DeviceKv::Rows(rows), KvLayout::Rows, _) => Ok(rows.decode_params()),
            (
                DeviceKv::PagedRows {
                    rows,
                    page_table,
                    page_table_stride,
                    ..
                },
                KvLayout::PagedRows(_),
                _,
            ) => {
                rows.check_in_pages()?;
                Ok(DecodeParams {
                    page_table: page_table.get(),
                    page_table_stride: sizes::int("page_table_stride", *page_table_stride)?,
                    ..rows.decode_params()
                })
            }
            _ => {
                let given = match self {
                    DeviceKv::Paged(_) => kind(KvLayout::Pages(0)),
                    DeviceKv::Rows(_) => kind(KvLayout::Rows),
                    DeviceKv::PagedRows { .. } => kind(KvLayout::PagedRows(0)),
                };
                Err(Error::parameter(
                    "K and V",
                    format_args!("{given} for a plan of {}", kind(layout)),
                    "what the plan is for; prepare one with the KvLayout of what is decoded",
                ))
            }
        }
    }

    /// The static scales of K and of V; null for schemes without.
    pub(super) fn tensor_scales(&self) -> [DeviceAddress; 2] {
        match self {
            DeviceKv::Paged(sequences) => sequences.tensor_scales,
            DeviceKv::Rows(rows) | DeviceKv::PagedRows { rows, .. } => rows.tensor_scales,
        }
    }

    /// Pages that its table may name; 0 without one.
    pub(super) fn num_pages(&self) -> usize {
        match self {
            DeviceKv::Paged(sequences) => sequences.pool.num_pages,
            DeviceKv::Rows(_) => 0,
            DeviceKv::PagedRows { num_pages, .. } => *num_pages,
        }
    }
}

/// What a plan for this layout attends.
fn kind(layout: KvLayout) -> &'static str {
    match layout {
        KvLayout::Pages(_) => "the library's pages",
        KvLayout::Rows => "rows",
        KvLayout::PagedRows(_) => "pages of rows",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::KvFormat;

    const NULL: DeviceAddress = DeviceAddress::NULL;

    fn layout(format: KvFormat) -> PageLayout {
        PageLayout::new(format, 128, 64, 2).unwrap()
    }

    fn sequences(layout: &PageLayout) -> PagedSequences {
        PagedSequences {
            pool: Pages::new(DeviceAddress::new(0x400), layout, 7),
            page_table: DeviceAddress::new(0x500),
            page_table_stride: 3,
            residual_pages: DeviceAddress::new(0x100),
            residual_slots: 5,
            kv_lens: DeviceAddress::new(0x600),
            tensor_scales: [NULL, DeviceAddress::new(0x700)],
        }
    }

    fn rows() -> ViewRows {
        ViewRows {
            k: [0x100, 0x200].map(DeviceAddress::new),
            v: [0x300, 0x400].map(DeviceAddress::new),
            code_strides: [[512, 128, 256], [1024, 256, 512]],
            scale_strides: [[8, 1, 2], [16, 2, 4]],
            kv_lens: DeviceAddress::new(0x600),
            tensor_scales: [NULL, DeviceAddress::new(0x700)],
        }
    }

    fn refused<T: std::fmt::Debug>(result: Result<T, Error>, of: &str) {
        match result {
            Err(Error::Parameter { what, .. }) => assert_eq!(what, of),
            other => panic!("{of}: {other:?}"),
        }
    }

    #[test]
    fn tables_that_kernels_cannot_read_are_refused() {
        let (int4, int8) = (layout(KvFormat::INT4), layout(KvFormat::INT8));
        let given = sequences(&int4);
        let sizes = |residual_ring| TableSizes {
            page_table_stride: 3,
            residual_ring,
        };
        assert_eq!(given.check(&int4).unwrap(), sizes(4));
        let missing = PagedSequences {
            residual_pages: NULL,
            residual_slots: 0,
            ..given
        };
        refused(missing.check(&int4), "residual_pages");
        // No scheme of int8 has a window, so there is nothing to miss; its pages are larger, too.
        let of_int8 = PagedSequences {
            pool: Pages::new(NULL, &int8, 7),
            ..missing
        };
        assert_eq!(of_int8.check(&int8).unwrap(), sizes(0));
        refused(missing.check(&int8), "page stride");
        for residual_slots in [0, 1, 4, 7, (1 << 21) + 1, usize::MAX] {
            let other = PagedSequences {
                residual_slots,
                ..given
            };
            refused(other.check(&int4), "residual_slots");
        }
        for page_table_stride in [1 << 31, usize::MAX] {
            let long = PagedSequences {
                page_table_stride,
                ..given
            };
            refused(long.check(&int4), "page_table_stride");
        }
    }

    #[test]
    fn k_and_v_reach_kernels_as_the_plan_has_them_or_are_refused() {
        let int4 = layout(KvFormat::INT4);
        let kinds = [
            (KvLayout::Pages(64), DeviceKv::Paged(sequences(&int4))),
            (KvLayout::Rows, DeviceKv::Rows(rows())),
            (
                KvLayout::PagedRows(16),
                DeviceKv::PagedRows {
                    rows: rows(),
                    num_pages: 9,
                    page_table: DeviceAddress::new(0x500),
                    page_table_stride: 3,
                },
            ),
        ];
        for (i, (layout, _)) in kinds.iter().enumerate() {
            let pages = (i == 0).then_some(&int4);
            for (j, (_, kv)) in kinds.iter().enumerate() {
                let params = kv.decode_params(*layout, pages);
                if i != j {
                    refused(params, "K and V");
                    continue;
                }
                let params = params.unwrap();
                let scales = (params.k_tensor_scales, params.v_tensor_scales);
                assert_eq!((params.kv_lens, scales), (0x600, (0, 0x700)));
                let table = (params.page_table, params.page_table_stride);
                assert_eq!(table, if j == 1 { (0, 0) } else { (0x500, 3) });
            }
        }
        let [paged, rows, in_pages] = kinds.map(|(_, kv)| kv.num_pages());
        assert_eq!([paged, rows, in_pages], [7, 0, 9]);
        let params =
            DeviceKv::Paged(sequences(&int4)).decode_params(KvLayout::Pages(64), Some(&int4));
        let params = params.unwrap();
        assert_eq!((params.k, params.residual_pages), (0x400, 0x100));
        assert_eq!(params.page_stride as usize, int4.page_bytes());
        assert_eq!(params.residual_ring, 4);
    }

    #[test]
    fn static_scales_are_needed_by_the_side_that_has_them() {
        let refused = |format: &str, scales: [DeviceAddress; 2]| match check_scale_addresses(
            format.parse().unwrap(),
            scales,
            2,
        ) {
            Err(Error::MissingScales {
                what, needed: 2, ..
            }) => Some(what),
            Ok(()) => None,
            other => panic!("{other:?}"),
        };
        let at = DeviceAddress::new(0x700);
        assert_eq!(refused("int8/fp8", [at, NULL]), Some("v_scales"));
        assert_eq!(refused("int8/fp8", [NULL, at]), None);
        assert_eq!(refused("int8-tensor", [NULL, at]), Some("k_scales"));
        assert_eq!(refused("fp8", [at; 2]), None);
        assert_eq!(refused("int8", [NULL; 2]), None);
    }

    #[test]
    fn rows_in_pages_lie_at_strides_that_vectors_divide() {
        let of = |rows: ViewRows| {
            let kv = DeviceKv::PagedRows {
                rows,
                num_pages: 1,
                page_table: NULL,
                page_table_stride: 1,
            };
            kv.decode_params(KvLayout::PagedRows(16), None)
        };
        let params = of(rows()).unwrap();
        assert_eq!([params.k, params.k_scales], [0x100, 0x200]);
        assert_eq!([params.v, params.v_scales], [0x300, 0x400]);
        assert_eq!(
            (params.k_strides, params.v_scale_strides),
            ([512, 128, 256], [16, 2, 4])
        );
        for side in [0, 1] {
            let (mut codes, mut scales) = (rows(), rows());
            codes.code_strides[side][2] += 8;
            refused(of(codes), "stride of rows");
            scales.scale_strides[side][0] += 1;
            refused(of(scales), "stride of scales from page to page");
        }
    }
}
