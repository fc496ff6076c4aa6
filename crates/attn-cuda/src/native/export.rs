//! Rows of floats from pages, on the device: what a prefix's K and V are to a kernel that reads no pages.

use attn_core::{Error, PageLayout, arithmetic::TILE, error::refuse, layout::Side};
use attn_kernels::cuda::{Instance, params::ExportParams};

use super::{
    dtype,
    grid::{COPY_THREADS, Grid},
    kv::{PagedSequences, check_scale_address},
    kv_rows::KvRows,
    op::Op,
};
use crate::{
    handles::DeviceAddress,
    sizes::{self, check_heads},
};

/// Cached tokens to rows of floats, as they were before they were rotated: a range of tokens of each of `batch` sequences, as rows one behind the other. The
/// values are those of [`convert::dequantize`](attn_core::convert::dequantize), rounded once to the rows' number format.
///
/// Prepared for the pages' layout. Refused are token strides that are no multiples of 8, ranges of more than 4194000 tokens, more than 65535 sequences or KV
/// heads, pages that overlap, and residual pages or static scales that are missing.
///
/// # Safety
/// On the device, ranges end inside their sequences, none is longer than `max_tokens`, and every page that they reach, and the residual page of each that
/// the sequence's last token reads with residuals, is in the pool.
#[derive(Debug, Clone, Copy)]
pub struct ExportArgs {
    /// Where the rows go; K or V is null for the other alone. 16-bit rows are the f32 ones rounded to nearest even, infinite where f16 has no more
    /// room. Token strides are multiples of 8.
    pub rows: KvRows,
    /// The sequences. Their first tile and their newest tokens are read with residuals, as a query of the last token would.
    pub sequences: PagedSequences,
    /// i32 `[batch + 1]`: the first row of each sequence's range in `k` and `v`, then their end.
    pub row_starts: DeviceAddress,
    /// i32 `[batch]`: the first token of each range; null for ranges that begin with their sequence.
    pub first_tokens: DeviceAddress,
    /// Sequences.
    pub batch: usize,
    /// No range has more tokens. Up to 4194000.
    pub max_tokens: usize,
}

/// Their tiles, and one more, are the second axis of a grid.
const MOST_TOKENS: usize = 4_194_000;

// SAFETY: `attn_export` takes one ExportParams, asserted on both sides, and writes the rows of the ranges alone.
unsafe impl Op for ExportArgs {
    type Shape = PageLayout;
    type Params = ExportParams;
    const DOING: &'static str = "exporting";

    fn instances(layout: &PageLayout) -> Result<Vec<Instance>, Error> {
        check_heads(layout.num_kv_heads())?;
        Ok(vec![Instance::Export {
            format: layout.format(),
            head_dim: layout.head_dim(),
            page_size: layout.page_size(),
        }])
    }

    fn params(&self, layout: &PageLayout) -> Result<ExportParams, Error> {
        if self.max_tokens > MOST_TOKENS {
            let allowed =
                "up to 4194000, as grids have no more rows of tiles; export longer ranges in parts";
            return refuse("max_tokens", self.max_tokens, allowed);
        }
        let allowed = "at most 65535, as a CUDA grid has no more layers; export some at a time";
        sizes::check_grid("sequences to export", self.batch, allowed)?;
        let (rows, sequences) = (&self.rows, &self.sequences);
        let tables = sequences.check(layout)?;
        let (format, [k_scales, v_scales]) = (layout.format(), sequences.tensor_scales);
        for (to, side, scales) in [
            (rows.k, (Side::K, format.k), k_scales),
            (rows.v, (Side::V, format.v), v_scales),
        ] {
            if !to.is_null() {
                check_scale_address(side, scales, layout.num_kv_heads())?;
            }
        }
        for stride in [rows.k_token_stride, rows.v_token_stride] {
            if !stride.is_multiple_of(8) {
                let allowed = "multiples of 8 elements: rows are written by vectors";
                return refuse("token stride", stride, allowed);
            }
        }
        let [k_token_stride, v_token_stride] = rows.token_strides();
        let [k_tensor_scales, v_tensor_scales] = sequences.tensor_scales.map(DeviceAddress::get);
        let [page_stride] = sizes::strides([sequences.pool.stride]);
        Ok(ExportParams {
            k: rows.k.get(),
            v: rows.v.get(),
            pool: sequences.pool.at.get(),
            page_table: sequences.page_table.get(),
            page_table_stride: tables.page_table_stride,
            residual_pages: sequences.residual_pages.get(),
            residual_ring: tables.residual_ring,
            kv_lens: sequences.kv_lens.get(),
            row_starts: self.row_starts.get(),
            first_tokens: self.first_tokens.get(),
            k_tensor_scales,
            v_tensor_scales,
            k_token_stride,
            v_token_stride,
            page_stride,
            dtype: dtype::code(rows.dtype),
            ..ExportParams::default()
        })
    }

    fn grid(&self, layout: &PageLayout) -> Grid {
        // A range may begin inside a tile, so it touches up to this many.
        let tiles = match self.max_tokens {
            0 => 0,
            tokens => tokens.saturating_add(TILE - 2) / TILE + 1,
        };
        Grid::new([layout.num_kv_heads(), tiles, self.batch], COPY_THREADS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::KvFormat;

    use crate::native::{Dtype, Pages};

    #[test]
    fn what_a_grid_has_no_room_for_and_strides_of_no_vectors_are_refused() {
        let layout = PageLayout::new(KvFormat::INT8, 64, 16, 2).unwrap();
        let good = ExportArgs {
            rows: KvRows {
                k: DeviceAddress::NULL,
                v: DeviceAddress::NULL,
                dtype: Dtype::F32,
                k_token_stride: 128,
                v_token_stride: 136,
            },
            sequences: PagedSequences {
                pool: Pages::new(DeviceAddress::NULL, &layout, 1),
                page_table: DeviceAddress::NULL,
                page_table_stride: 3,
                residual_pages: DeviceAddress::NULL,
                residual_slots: 0,
                kv_lens: DeviceAddress::NULL,
                tensor_scales: [DeviceAddress::NULL; 2],
            },
            row_starts: DeviceAddress::NULL,
            first_tokens: DeviceAddress::NULL,
            batch: 65_535,
            max_tokens: MOST_TOKENS,
        };
        let params = good.params(&layout).unwrap();
        assert_eq!((params.k_token_stride, params.v_token_stride), (128, 136));
        let [_, tiles, layers] = good.grid(&layout).ctas;
        assert!(tiles.max(layers) <= 65_535, "{tiles}, {layers}");
        type Change = fn(&mut ExportArgs);
        let changes: [(&str, Change); 4] = [
            ("sequences to export is 65536", |a| a.batch += 1),
            ("max_tokens is 4194001", |a| a.max_tokens += 1),
            ("token stride is 132", |a| a.rows.k_token_stride += 4),
            ("token stride is 140", |a| a.rows.v_token_stride += 4),
        ];
        for (what, change) in changes {
            let mut args = good;
            change(&mut args);
            let said = args.params(&layout).unwrap_err().to_string();
            assert!(said.contains(what), "{said}");
        }
    }

    #[test]
    fn static_scales_are_needed_for_the_rows_that_are_asked_for() {
        let layout = PageLayout::new("fp8".parse().unwrap(), 64, 16, 2).unwrap();
        let (none, at) = (DeviceAddress::NULL, DeviceAddress::new(0x100));
        let missing = |k, v, tensor_scales| {
            let args = ExportArgs {
                rows: KvRows {
                    k,
                    v,
                    dtype: Dtype::F32,
                    k_token_stride: 128,
                    v_token_stride: 128,
                },
                sequences: PagedSequences {
                    pool: Pages::new(none, &layout, 1),
                    page_table: none,
                    page_table_stride: 3,
                    residual_pages: none,
                    residual_slots: 0,
                    kv_lens: none,
                    tensor_scales,
                },
                row_starts: none,
                first_tokens: none,
                batch: 1,
                max_tokens: 1,
            };
            match args.params(&layout) {
                Ok(_) => None,
                Err(Error::MissingScales { what, .. }) => Some(what),
                Err(other) => panic!("{other}"),
            }
        };
        assert_eq!(missing(at, at, [none, at]), Some("k_scales"));
        assert_eq!(missing(at, at, [at, none]), Some("v_scales"));
        assert_eq!(missing(at, none, [at, none]), None);
        assert_eq!(missing(none, at, [none, at]), None);
    }
}
