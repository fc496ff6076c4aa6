//! Appends on the device: new tokens of every sequence into its pages.

use std::{ffi::c_void, sync::Arc};

use attn_core::{CacheConfig, Error, PageLayout};
use attn_kernels::cuda::{
    Instance,
    params::{AppendParams, CheckParams, DecodeParams},
};
use cudarc::driver::sys;

use super::{
    COPY_THREADS, DecodeArgs, DeviceAddress, KvRows, NativePlan, PagedSequences, RotaryArgs,
    Stream,
    check::{check, check_kernel},
    launch_decode,
    rotary::PositionsFrom,
};
use crate::{CudaBackend, device::LoadedKernel, error::failed, sizes};

/// Device addresses of one append launch: `tokens` new tokens for each of `batch` sequences.
#[derive(Debug, Clone, Copy)]
pub struct AppendArgs {
    /// K and V of the new tokens, `batch · tokens` rows.
    pub rows: KvRows,
    /// The sequences that they are appended to; `kv_lens` count the new tokens already.
    pub sequences: PagedSequences,
    /// Sequences.
    pub batch: usize,
    /// New tokens of each.
    pub tokens: usize,
    /// Rotary positions, by an append of [`CudaBackend::prepare_append_rotary`]; none where K is appended as it is. Positions that are null are the
    /// tokens' numbers in their sequences, as `kv_lens` say.
    pub rotary: Option<RotaryArgs>,
}

impl AppendArgs {
    /// New tokens of all sequences.
    pub(super) fn all_tokens(&self) -> usize {
        self.batch.saturating_mul(self.tokens)
    }

    /// Query heads that are rotated beside K.
    fn query_heads(&self) -> usize {
        self.rotary.map_or(0, |rotary| rotary.query_heads())
    }

    /// Refuses what [`append_grid`] has no room for.
    fn check_grid(&self, layout: &PageLayout) -> Result<(), Error> {
        let allowed = "at most 65535 in an append behind sequences, as a CUDA grid has no more rows; append_slots_on takes more, or append to some at a time";
        sizes::check_grid("sequences to append to", self.batch, allowed)?;
        // One token of each takes several heads in a row.
        if self.tokens > 1 {
            let heads = layout.num_kv_heads().saturating_add(self.query_heads());
            let allowed = "at most 65535 in an append of several tokens, as a CUDA grid has no more rows; append_slots_on takes 65535 of each";
            sizes::check_grid("KV heads and query heads to rotate", heads, allowed)?;
        }
        Ok(())
    }
}

/// The kernel's parameter block; `is_followed` by a decode that knows what is appended.
///
/// # Errors
/// [`Error::Parameter`] for a number that needs more than 31 bits, for more sequences or heads than the grid of a launch has room for, for pages that
/// overlap, for residual pages that are missing, and those of [`RotaryArgs`].
pub fn append_params(
    args: &AppendArgs,
    layout: &PageLayout,
    is_followed: bool,
) -> Result<AppendParams, Error> {
    args.check_grid(layout)?;
    let sequences = &args.sequences;
    let tables = sequences.check(layout)?;
    let [k_tensor_scales, v_tensor_scales] = sequences.tensor_scales.map(DeviceAddress::get);
    let rotary = match &args.rotary {
        Some(rotary) => {
            rotary.params(layout.head_dim(), args.all_tokens(), PositionsFrom::KvLens)?
        }
        None => AppendParams::default(),
    };
    Ok(AppendParams {
        pool: sequences.pool.at.get(),
        page_stride: sequences.pool.stride as u64,
        page_table: sequences.page_table.get(),
        page_table_stride: tables.page_table_stride,
        residual_pages: sequences.residual_pages.get(),
        residual_ring: tables.residual_ring,
        kv_lens: sequences.kv_lens.get(),
        k_tensor_scales,
        v_tensor_scales,
        tokens: sizes::int("tokens to append", args.tokens)?,
        batch: sizes::int("sequences to append to", args.batch)?,
        num_kv_heads: sizes::int("num_kv_heads", layout.num_kv_heads())?,
        is_followed: i32::from(is_followed),
        ..args.rows.append_params(rotary)
    })
}

/// Refuses more KV heads than an append launch has room for.
pub(crate) fn check_heads(num_kv_heads: usize) -> Result<(), Error> {
    let allowed = "1 to 65535 on CUDA, whose grids have no more rows";
    sizes::check_grid("num_kv_heads", num_kv_heads, allowed)
}

/// A prepared append launch.
#[derive(Debug, Clone)]
pub struct NativeAppend {
    pub(super) layout: PageLayout,
    pub(super) kernel: Arc<LoadedKernel>,
    pub(super) check: Option<Arc<LoadedKernel>>,
    /// The kernel of appends that rotate; none where it was not prepared.
    pub(super) rotary: Option<Arc<LoadedKernel>>,
}

impl NativeAppend {
    /// The kernel of an append with these rotary positions, or without.
    ///
    /// # Errors
    /// [`Error::Parameter`] for positions where the append was prepared without.
    pub(super) fn kernel(&self, rotary: Option<&RotaryArgs>) -> Result<&LoadedKernel, Error> {
        match (rotary, &self.rotary) {
            (None, _) => Ok(&self.kernel),
            (Some(_), Some(kernel)) => Ok(kernel),
            (Some(_), None) => Err(Error::parameter(
                "rotary",
                format_args!("some, for an append that was prepared without"),
                "none, or an append of prepare_append_rotary",
            )),
        }
    }
}

/// Heads of a CTA that takes one token of each: two warps of its eight have a head's K and V.
const HEADS: usize = 4;

/// Grid and threads of `append.cu`, for `tokens` new tokens of each of `batch` sequences, and so many query heads that are rotated beside K. What has no
/// room in a grid [`append_params`] has refused.
#[must_use]
pub fn append_grid(
    layout: &PageLayout,
    batch: usize,
    tokens: usize,
    query_heads: usize,
) -> ([usize; 3], usize) {
    let heads = layout.num_kv_heads();
    if tokens > 1 {
        // A first page may be open, so `tokens` touch up to this many.
        let jobs = tokens.saturating_add(layout.page_size() - 2) / layout.page_size() + 1;
        return ([jobs, heads + query_heads, batch], COPY_THREADS);
    }
    let threads = 64 * heads.min(HEADS);
    // `QUERY_HEADS` of rotary.cuh to a warp.
    let rotated = threads / 32 * (4 / layout.head_dim().div_ceil(128));
    let columns = heads.div_ceil(HEADS) + query_heads.div_ceil(rotated);
    ([columns, batch, 1], threads)
}

/// Enqueues one append.
///
/// # Safety
/// Those of `CudaBackend::append_on`; the device's context is current.
unsafe fn launch_append(
    kernel: &LoadedKernel,
    layout: &PageLayout,
    stream: sys::CUstream,
    args: &AppendArgs,
    is_followed: bool,
) -> Result<(), Error> {
    if args.batch == 0 || args.tokens == 0 {
        return Ok(());
    }
    let mut params = append_params(args, layout, is_followed)?;
    let (grid, threads) = append_grid(layout, args.batch, args.tokens, args.query_heads());
    let mut arguments = [(&raw mut params).cast::<c_void>()];
    // SAFETY: `attn_append` takes one AppendParams, asserted on both sides; the rest is this function's contract.
    unsafe { kernel.launch(stream, grid, threads, &mut arguments) }.map_err(failed("appending"))
}

impl CudaBackend {
    /// Prepares append launches for caches of this shape.
    ///
    /// # Errors
    /// Those of [`CacheConfig::check`]; [`Error::Parameter`] for more KV heads than a grid has rows; [`Error::Device`].
    pub fn prepare_append(&self, config: &CacheConfig) -> Result<NativeAppend, Error> {
        config.check()?;
        check_heads(config.num_kv_heads)?;
        Ok(NativeAppend {
            layout: config.layout()?,
            kernel: self.append_kernel(config, false)?,
            check: check_kernel(&self.device)?,
            rotary: None,
        })
    }

    /// Prepares appends as [`CudaBackend::prepare_append`] does, and loads the kernel of appends with [`AppendArgs::rotary`] or [`SlotAppendArgs::rotary`](super::SlotAppendArgs::rotary).
    ///
    /// # Errors
    /// Those of [`CudaBackend::prepare_append`].
    pub fn prepare_append_rotary(&self, config: &CacheConfig) -> Result<NativeAppend, Error> {
        let mut append = self.prepare_append(config)?;
        append.rotary = Some(self.append_kernel(config, true)?);
        Ok(append)
    }

    fn append_kernel(
        &self,
        config: &CacheConfig,
        rotary: bool,
    ) -> Result<Arc<LoadedKernel>, Error> {
        let instance = Instance::Append {
            format: config.format,
            head_dim: config.head_dim,
            page_size: config.page_size,
            rotary,
        };
        self.device.kernel(&instance, 0)
    }

    /// Enqueues the append of `tokens` new tokens to each sequence; places come from `kv_lens` on the device.
    ///
    /// # Safety
    /// - As [`CudaBackend::decode_on`] for the stream, addresses and lifetimes.
    /// - On the device, every `kv_lens` counts the new tokens, and every page that they touch, home and residual, is in the
    ///   pool and belongs to its sequence alone; tokens arrive in order; K and V are finite.
    /// - With [`AppendArgs::rotary`], on the device, positions are rows of `cos_sin` (a token whose is none is not appended), and K is finite once
    ///   rotated; rotated queries overlap nothing that runs meanwhile, and not K or V.
    ///
    /// # Errors
    /// [`Error::Parameter`] for numbers of more than 31 bits, for more than 65535 sequences, for more than 65535 KV heads and query heads to rotate
    /// together where `tokens` is above 1, and for rotary positions with a `rotary_dim`, an address or strides that are not allowed, or for an append
    /// that was prepared without; [`Error::Device`] with the driver's refusal, or with
    /// [`CudaError::Check`](crate::CudaError::Check).
    pub unsafe fn append_on(
        &self,
        append: &NativeAppend,
        stream: Stream,
        args: &AppendArgs,
    ) -> Result<(), Error> {
        // SAFETY: this function's contract.
        unsafe { self.append(append, stream.raw(), args, false) }
    }

    /// Enqueues an append and the decode behind it: what [`CudaBackend::append_on`] and [`CudaBackend::decode_on`] do, with the same bits,
    /// but the decode reads older pages while the append runs, and waits only for those that it writes. The step of a layer. Where the append rotates
    /// the queries, too, the decode waits for all of it.
    ///
    /// # Safety
    /// Those of both. All that the decode reads but the new tokens is there before the append begins, as nothing is enqueued between them;
    /// on the device, the last tokens of a sequence that the append takes are its new ones.
    ///
    /// # Errors
    /// Those of both. If the decode is refused, the append has been enqueued.
    pub unsafe fn append_decode_on(
        &self,
        append: &NativeAppend,
        plan: &NativePlan,
        stream: Stream,
        append_args: &AppendArgs,
        decode_args: &DecodeArgs,
    ) -> Result<(), Error> {
        // What is ahead of an append of nothing may still run.
        let is_early = append_args.batch > 0
            && append_args
                .rotary
                .is_none_or(|rotary| rotary.query_heads() == 0);
        let appended = if is_early { append_args.tokens } else { 0 };
        // SAFETY: this function's contract.
        unsafe { self.append(append, stream.raw(), append_args, appended > 0) }?;
        // SAFETY: this function's contract, and the launch ahead is the append.
        unsafe { launch_decode(&self.device, plan, stream.raw(), decode_args, appended) }
    }

    /// # Safety
    /// Those of [`CudaBackend::append_on`]; if `is_followed`, [`launch_decode`] with the same tokens is next on the stream.
    unsafe fn append(
        &self,
        append: &NativeAppend,
        stream: sys::CUstream,
        args: &AppendArgs,
        is_followed: bool,
    ) -> Result<(), Error> {
        let kernel = append.kernel(args.rotary.as_ref())?;
        if let Some(kernel) = append.check.as_ref().filter(|_| args.tokens > 0) {
            let (layout, sequences) = (&append.layout, &args.sequences);
            // The checking launch comes first, and what the host refuses enqueues nothing.
            append_params(args, layout, is_followed)?;
            let mut params = DecodeParams {
                batch: sizes::int("sequences to append to", args.batch)?,
                ..sequences.decode_params(layout)?
            };
            let limits = CheckParams {
                positions: args.rotary.map_or(0, |rotary| rotary.positions.get()),
                num_positions: args.rotary.map_or(0, |rotary| rotary.rows()),
                max_kv_len: sizes::int_limit(
                    sequences
                        .page_table_stride
                        .saturating_mul(layout.page_size()),
                ),
                min_kv_len: sizes::int("tokens to append", args.tokens)?,
                num_pages: sizes::axis(sequences.pool.num_pages),
                page_size: sizes::int("page_size", layout.page_size())?,
                ..CheckParams::default()
            };
            // SAFETY: this function's contract.
            unsafe { check(&self.device, kernel, stream, &mut params, limits) }
                .map_err(failed("checking an append"))?;
        }
        // SAFETY: this function's contract.
        unsafe { launch_append(kernel, &append.layout, stream, args, is_followed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::{KvFormat, RotaryStyle};

    use crate::native::{Dtype, Pages, RotaryQueries};

    fn layout() -> PageLayout {
        PageLayout::new(KvFormat::INT4, 128, 64, 2).unwrap()
    }

    fn args() -> AppendArgs {
        AppendArgs {
            rows: KvRows {
                k: DeviceAddress::NULL,
                v: DeviceAddress::NULL,
                dtype: Dtype::F32,
                k_token_stride: 256,
                v_token_stride: usize::MAX,
            },
            sequences: PagedSequences {
                pool: Pages::new(DeviceAddress::NULL, &layout(), 1),
                page_table: DeviceAddress::NULL,
                page_table_stride: 3,
                residual_pages: DeviceAddress::new(0x100),
                residual_slots: 4,
                kv_lens: DeviceAddress::NULL,
                tensor_scales: [DeviceAddress::NULL; 2],
            },
            batch: 5,
            tokens: 7,
            rotary: None,
        }
    }

    fn rotary(query_heads: usize) -> RotaryArgs {
        let at = DeviceAddress::new;
        RotaryArgs {
            style: RotaryStyle::HalfSplit,
            rotary_dim: 64,
            cos_sin: at(0x700),
            cos_sin_dtype: Dtype::F32,
            num_positions: 9,
            positions: DeviceAddress::NULL,
            queries: Some(RotaryQueries {
                q: at(0x600),
                out: at(0x600),
                heads: query_heads,
                token_stride: query_heads * 128,
                out_token_stride: query_heads * 128,
            }),
        }
    }

    #[test]
    fn numbers_of_more_than_31_bits_are_refused() {
        let params = append_params(&args(), &layout(), true).unwrap();
        assert_eq!(
            (params.tokens, params.batch, params.page_table_stride),
            (7, 5, 3)
        );
        assert_eq!(
            (params.k_token_stride, params.v_token_stride),
            (256, i64::MAX)
        );
        assert_eq!((params.residual_pages, params.residual_ring), (0x100, 4));
        for large in [1 << 31, (1 << 32) + 1, usize::MAX] {
            let [mut tokens, mut batch, mut stride] = [args(); 3];
            (tokens.tokens, batch.batch) = (large, large);
            stride.sequences.page_table_stride = large;
            for args in [tokens, batch, stride] {
                let refused = append_params(&args, &layout(), false);
                assert!(matches!(refused, Err(Error::Parameter { .. })), "{args:?}");
            }
        }
    }

    #[test]
    fn what_a_grid_has_no_room_for_is_refused_before_anything_is_enqueued() {
        let args = |batch, tokens, query_heads| AppendArgs {
            batch,
            tokens,
            rotary: Some(rotary(query_heads)),
            ..args()
        };
        // A grid's second and third axis are as long as CUDA allows where the block of parameters is made, and longer where it is not.
        for (batch, tokens, query_heads, refused) in [
            (65_535, 1, 9, None),
            (65_536, 1, 9, Some("sequences to append to is 65536")),
            (65_535, 2, 9, None),
            (65_536, 2, 9, Some("sequences to append to is 65536")),
            (5, 1, 65_535, None),
            (5, 2, 65_533, None),
            (5, 2, 65_534, Some("query heads to rotate is 65536")),
        ] {
            let args = args(batch, tokens, query_heads);
            let [_, rows, layers] = append_grid(&layout(), batch, tokens, query_heads).0;
            let fits = rows.max(layers) <= 65_535;
            match (append_params(&args, &layout(), false), refused) {
                (Ok(_), None) => assert!(fits, "{args:?}"),
                (Err(error), Some(what)) => {
                    let said = error.to_string();
                    assert!(!fits && said.contains(what), "{said}");
                    assert!(said.contains("append_slots_on"), "{said}");
                }
                (other, _) => panic!("{other:?} of {args:?}"),
            }
        }
    }

    #[test]
    fn grids_grow_with_tokens_and_saturate() {
        assert_eq!(append_grid(&layout(), 3, 65, 0), ([2, 2, 3], COPY_THREADS));
        assert_eq!(append_grid(&layout(), 3, 66, 0).0, [3, 2, 3]);
        assert_eq!(append_grid(&layout(), 3, 66, 9).0, [3, 11, 3]);
        assert_eq!(append_grid(&layout(), 3, usize::MAX, 0).0[1..], [2, 3]);
        let (grid, threads) = append_grid(&layout(), usize::MAX, 1, 0);
        assert_eq!((grid, threads), ([1, usize::MAX, 1], 128));
        // Two KV heads are four warps, which take sixteen query heads in a column.
        assert_eq!(append_grid(&layout(), 6, 1, 16), ([2, 6, 1], 128));
        assert_eq!(append_grid(&layout(), 6, 1, 17), ([3, 6, 1], 128));
    }

    #[test]
    fn more_heads_than_a_grid_has_rows_are_refused() {
        check_heads(65_535).unwrap();
        assert!(check_heads(65_536).is_err());
    }
}
