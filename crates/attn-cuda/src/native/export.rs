//! Rows of floats from pages, on the device: what a prefix's K and V are to a kernel that reads no pages.

use std::{ffi::c_void, sync::Arc};

use attn_core::{Error, PageLayout, arithmetic::TILE};
use attn_kernels::cuda::{Instance, params::ExportParams};

use super::{COPY_THREADS, DeviceAddress, KvRows, PagedSequences, Stream, check_heads};
use crate::{device::LoadedKernel, error::failed, gpu::CudaBackend, sizes};

/// Device addresses of one export launch: a range of tokens of each of `batch` sequences, as rows one behind the other.
#[derive(Debug, Clone, Copy)]
pub struct ExportArgs {
    /// Where the rows go; K or V is null for the other alone. 16-bit rows are the f32 ones rounded to nearest even, infinite where f16 has no more
    /// room. Token strides are multiples of 8.
    pub rows: KvRows,
    /// The sequences. Their newest tokens are read with residuals, as a query of the last token would.
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

/// A prepared export launch.
#[derive(Debug, Clone)]
pub struct NativeExport {
    layout: PageLayout,
    kernel: Arc<LoadedKernel>,
}

/// Their tiles, and one more, are the second axis of a grid.
const MOST_TOKENS: usize = 4_194_000;

/// The kernel's parameter block.
///
/// # Errors
/// [`Error::Parameter`] for a number that needs more than 31 bits, for token strides that are no multiples of 8, for ranges of more than 4194000
/// tokens, for more than 65535 sequences, for pages that overlap, and for residual pages that are missing.
pub fn export_params(args: &ExportArgs, layout: &PageLayout) -> Result<ExportParams, Error> {
    if args.max_tokens > MOST_TOKENS {
        return Err(Error::parameter(
            "max_tokens",
            args.max_tokens,
            "up to 4194000, as grids have no more rows of tiles; export longer ranges in parts",
        ));
    }
    let allowed = "at most 65535, as a CUDA grid has no more layers; export some at a time";
    sizes::check_grid("sequences to export", args.batch, allowed)?;
    let (rows, sequences) = (&args.rows, &args.sequences);
    let tables = sequences.check(layout)?;
    for stride in [rows.k_token_stride, rows.v_token_stride] {
        if !stride.is_multiple_of(8) {
            return Err(Error::parameter(
                "token stride",
                stride,
                "multiples of 8 elements: rows are written by vectors",
            ));
        }
    }
    let [k_token_stride, v_token_stride] = rows.token_strides();
    let [k_tensor_scales, v_tensor_scales] = sequences.tensor_scales.map(DeviceAddress::get);
    let [page_stride, ..] = sizes::strides([sequences.pool.stride, 0, 0]);
    Ok(ExportParams {
        k: rows.k.get(),
        v: rows.v.get(),
        pool: sequences.pool.at.get(),
        page_table: sequences.page_table.get(),
        page_table_stride: tables.page_table_stride,
        residual_pages: sequences.residual_pages.get(),
        residual_ring: tables.residual_ring,
        kv_lens: sequences.kv_lens.get(),
        row_starts: args.row_starts.get(),
        first_tokens: args.first_tokens.get(),
        k_tensor_scales,
        v_tensor_scales,
        k_token_stride,
        v_token_stride,
        page_stride,
        dtype: super::dtype::code(rows.dtype),
        ..ExportParams::default()
    })
}

/// Grid and threads of `export.cu`.
#[must_use]
pub fn export_grid(layout: &PageLayout, batch: usize, max_tokens: usize) -> ([usize; 3], usize) {
    // A range may begin inside a tile, so it touches up to this many.
    let tiles = max_tokens.saturating_add(TILE - 2) / TILE + 1;
    ([layout.num_kv_heads(), tiles, batch], COPY_THREADS)
}

impl CudaBackend {
    /// Prepares export launches from pages of this layout.
    ///
    /// # Errors
    /// [`Error::Parameter`] for more KV heads than a grid has rows; [`Error::Device`].
    pub fn prepare_export(&self, layout: PageLayout) -> Result<NativeExport, Error> {
        check_heads(layout.num_kv_heads())?;
        let instance = Instance::Export {
            format: layout.format(),
            head_dim: layout.head_dim(),
            page_size: layout.page_size(),
        };
        let kernel = self.device.kernel(&instance, 0)?;
        Ok(NativeExport { layout, kernel })
    }

    /// Enqueues the conversion of cached tokens to rows of floats, as they were before they were rotated: the values of
    /// [`convert::dequantize`](attn_core::convert::dequantize), rounded once to `dtype`. Can be captured.
    ///
    /// # Safety
    /// - As [`CudaBackend::decode_on`] for the stream, addresses and lifetimes.
    /// - On the device, ranges end inside their sequences, none is longer than `max_tokens`, and every page that they reach, and the residual
    ///   page of each that the sequence's last token reads with residuals, is in the pool.
    ///
    /// # Errors
    /// Those of the arguments' numbers: [`Error::Parameter`]; [`Error::Device`] with the driver's refusal.
    pub unsafe fn export_on(
        &self,
        export: &NativeExport,
        stream: Stream,
        args: &ExportArgs,
    ) -> Result<(), Error> {
        let mut params = export_params(args, &export.layout)?;
        if args.batch == 0 || args.max_tokens == 0 {
            return Ok(());
        }
        let (grid, threads) = export_grid(&export.layout, args.batch, args.max_tokens);
        let mut arguments = [(&raw mut params).cast::<c_void>()];
        // SAFETY: `attn_export` takes one ExportParams, asserted on both sides; the rest is this function's contract.
        unsafe {
            export
                .kernel
                .launch(stream.raw(), grid, threads, &mut arguments)
        }
        .map_err(failed("exporting"))
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
        let params = export_params(&good, &layout).unwrap();
        assert_eq!((params.k_token_stride, params.v_token_stride), (128, 136));
        let [_, tiles, layers] = export_grid(&layout, good.batch, good.max_tokens).0;
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
            let said = export_params(&args, &layout).unwrap_err().to_string();
            assert!(said.contains(what), "{said}");
        }
    }
}
