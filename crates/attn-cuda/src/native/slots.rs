//! Appends of tokens that bring their places, as engines with a `slot_mapping` have them.

use std::ffi::c_void;

use attn_core::{Error, PageLayout};
use attn_kernels::cuda::params::{AppendParams, CheckParams, DecodeParams};
use cudarc::driver::sys;

use super::{
    KvRows, NativeAppend, Pages, RotaryArgs, append::append_grid, check, kv::check_residual_pages,
    rotary::PositionsFrom,
};
use crate::{
    error::failed,
    gpu::CudaBackend,
    handles::{DeviceAddress, Stream},
    sizes,
};

/// Device addresses of one append launch in which every token brings its place, as engines with a `slot_mapping` have it: any number of tokens
/// of any sequences.
#[derive(Debug, Clone, Copy)]
pub struct SlotAppendArgs {
    /// K and V of the new tokens.
    pub rows: KvRows,
    /// The pool.
    pub pool: Pages,
    /// f32 `[num_kv_heads]` of K, then of V: the static scales; null for schemes without.
    pub tensor_scales: [DeviceAddress; 2],
    /// i64 `[tokens]`: `page · page_size + token of the page`; a token with a negative slot is skipped.
    pub slots: DeviceAddress,
    /// u32 `[tokens]`: the residual page of the token's page, or `u32::MAX` if that keeps none (as for all but a sequence's last
    /// [`KvFormat::residual_slots`](attn_core::KvFormat::residual_slots) pages); null where no scheme has a window.
    pub residual_pages: DeviceAddress,
    /// Tokens, skipped ones included.
    pub tokens: usize,
    /// Rotary positions, by an append of [`CudaBackend::prepare_append_rotary`]; none where K is appended as it is.
    pub rotary: Option<RotaryArgs>,
}

/// The kernel's parameter block of an append by slots.
///
/// # Errors
/// [`Error::Parameter`] for a number that needs more than 31 bits, for pages that overlap, for slots that are null, for residual pages that are missing,
/// and those of [`RotaryArgs`].
pub fn slot_append_params(
    args: &SlotAppendArgs,
    layout: &PageLayout,
) -> Result<AppendParams, Error> {
    if args.slots.is_null() {
        return Err(Error::parameter(
            "slots",
            format_args!("null"),
            "an i64 for each token; append_on takes places from kv_lens",
        ));
    }
    args.pool.check(layout.page_bytes())?;
    check_residual_pages(layout, args.residual_pages)?;
    let [k_tensor_scales, v_tensor_scales] = args.tensor_scales.map(DeviceAddress::get);
    let rotary = match &args.rotary {
        Some(rotary) => rotary.params(layout.head_dim(), args.tokens, PositionsFrom::Caller)?,
        None => AppendParams::default(),
    };
    Ok(AppendParams {
        pool: args.pool.at.get(),
        page_stride: args.pool.stride as u64,
        residual_pages: args.residual_pages.get(),
        slots: args.slots.get(),
        k_tensor_scales,
        v_tensor_scales,
        tokens: sizes::int("tokens to append", args.tokens)?,
        num_kv_heads: sizes::int("num_kv_heads", layout.num_kv_heads())?,
        ..args.rows.append_params(rotary)
    })
}

/// Grid and threads of `append.cu` by slots: behind the columns of KV heads those of query heads that are rotated.
#[must_use]
pub fn slot_append_grid(layout: &PageLayout, args: &SlotAppendArgs) -> ([usize; 3], usize) {
    let query_heads = args.rotary.map_or(0, |rotary| rotary.query_heads());
    let ([columns, ..], threads) = append_grid(layout, 1, 1, query_heads);
    ([args.tokens, columns, 1], threads)
}

/// Enqueues one append by slots.
///
/// # Safety
/// Those of `CudaBackend::append_slots_on`; the device's context is current.
pub(crate) unsafe fn launch_slot_append(
    append: &NativeAppend,
    stream: sys::CUstream,
    args: &SlotAppendArgs,
) -> Result<(), Error> {
    let mut params = slot_append_params(args, &append.layout)?;
    let kernel = append.kernel(args.rotary.as_ref())?;
    if args.tokens == 0 {
        return Ok(());
    }
    let (grid, threads) = slot_append_grid(&append.layout, args);
    let mut arguments = [(&raw mut params).cast::<c_void>()];
    // SAFETY: `attn_append` takes one AppendParams, asserted on both sides; the rest is this function's contract.
    unsafe { kernel.launch(stream, grid, threads, &mut arguments) }
        .map_err(failed("appending by slots"))
}

impl CudaBackend {
    /// Enqueues the append of tokens that bring their slots: those of any sequences, any number of each, with padding. The bytes are those of
    /// [`CudaBackend::append_on`].
    ///
    /// # Safety
    /// - As [`CudaBackend::decode_on`] for the stream, addresses and lifetimes.
    /// - On the device, no two slots are the same; slots that are not negative are in the pool, as are the residual pages of their tokens, in pages
    ///   that belong to one sequence; a sequence's tokens lie side by side, in order; K and V of tokens with slots are finite.
    /// - With [`SlotAppendArgs::rotary`], on the device, positions of tokens with slots are rows of `cos_sin`, and K is finite once rotated; rotated
    ///   queries overlap nothing that runs meanwhile, and not K or V.
    ///
    /// # Errors
    /// [`Error::Parameter`] for numbers of more than 31 bits, slots that are null, missing residual pages, and rotary positions with a `rotary_dim`,
    /// an address or strides that are not allowed, or for an append that was prepared without; [`Error::Device`] with the driver's refusal, or with
    /// [`CudaError::Check`](crate::CudaError::Check).
    pub unsafe fn append_slots_on(
        &self,
        append: &NativeAppend,
        stream: Stream,
        args: &SlotAppendArgs,
    ) -> Result<(), Error> {
        if let Some(kernel) = append.check.as_ref().filter(|_| args.tokens > 0) {
            // The checking launch reads what the host refuses where it is null.
            slot_append_params(args, &append.layout)?;
            let mut params = DecodeParams {
                residual_pages: args.residual_pages.get(),
                batch: 1,
                ..DecodeParams::default()
            };
            let limits = CheckParams {
                slots: args.slots.get(),
                query_tokens: sizes::int("tokens to append", args.tokens)?,
                num_pages: sizes::axis(args.pool.num_pages),
                page_size: sizes::int("page_size", append.layout.page_size())?,
                positions: args.rotary.map_or(0, |rotary| rotary.positions.get()),
                num_positions: args.rotary.map_or(0, |rotary| rotary.rows()),
                ..CheckParams::default()
            };
            // SAFETY: this function's contract.
            unsafe { check(&self.device, kernel, stream.raw(), &mut params, limits) }
                .map_err(failed("checking an append by slots"))?;
        }
        // SAFETY: this function's contract.
        unsafe { launch_slot_append(append, stream.raw(), args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::{KvFormat, RotaryStyle};

    use crate::native::{Dtype, RotaryQueries};

    fn layout() -> PageLayout {
        PageLayout::new(KvFormat::INT4, 128, 64, 2).unwrap()
    }

    fn args(rotary: Option<RotaryArgs>) -> SlotAppendArgs {
        let at = DeviceAddress::new;
        SlotAppendArgs {
            rows: KvRows {
                k: at(0x300),
                v: at(0x300),
                dtype: Dtype::Bf16,
                k_token_stride: 256,
                v_token_stride: 512,
            },
            pool: Pages::new(at(0x400), &layout(), 1),
            tensor_scales: [DeviceAddress::NULL; 2],
            slots: at(0x200),
            residual_pages: at(0x100),
            tokens: 9,
            rotary,
        }
    }

    #[test]
    fn slots_are_needed_and_residual_pages_where_a_scheme_has_a_window() {
        let given = args(None);
        let params = slot_append_params(&given, &layout()).unwrap();
        assert_eq!((params.slots, params.tokens, params.dtype), (0x200, 9, 2));
        assert_eq!((params.k_token_stride, params.v_token_stride), (256, 512));
        let [mut slots, mut residuals, mut tokens] = [given; 3];
        slots.slots = DeviceAddress::NULL;
        residuals.residual_pages = DeviceAddress::NULL;
        tokens.tokens = 1 << 31;
        for (args, what) in [
            (slots, "slots"),
            (residuals, "residual_pages"),
            (tokens, "tokens"),
        ] {
            let refused = slot_append_params(&args, &layout()).unwrap_err();
            assert!(refused.to_string().contains(what), "{refused}");
        }
        assert_eq!(slot_append_grid(&layout(), &given), ([9, 1, 1], 128));
    }
    #[test]
    fn rotary_positions_are_checked_and_passed_on() {
        let at = DeviceAddress::new;
        let queries = RotaryQueries {
            q: at(0x600),
            out: at(0x600),
            heads: 9,
            token_stride: 9 * 128 + 64,
            out_token_stride: 9 * 128 + 64,
        };
        let rotary = RotaryArgs {
            style: RotaryStyle::Interleaved,
            rotary_dim: 64,
            cos_sin: at(0x700),
            cos_sin_dtype: Dtype::F16,
            num_positions: usize::MAX,
            positions: at(0x800),
            queries: Some(queries),
        };
        let with = |rotary| args(Some(rotary));
        let params = slot_append_params(&with(rotary), &layout()).unwrap();
        assert_eq!((params.slots, params.dtype, params.tokens), (0x200, 2, 9));
        assert_eq!((params.cos_sin, params.positions), (0x700, 0x800));
        assert_eq!((params.q, params.q_out), (0x600, 0x600));
        assert_eq!(
            (params.q_token_stride, params.q_out_token_stride),
            (1216, 1216)
        );
        assert_eq!((params.num_positions, params.num_q_heads), (i64::MAX, 9));
        let kind = (
            params.rotary_dim,
            params.cos_sin_dtype,
            params.is_interleaved,
        );
        assert_eq!(kind, (64, 1, 1));
        let grid = |rotary| slot_append_grid(&layout(), &with(rotary));
        assert_eq!(grid(rotary), ([9, 2, 1], 128));
        let of_k_alone = RotaryArgs {
            style: RotaryStyle::HalfSplit,
            queries: None,
            ..rotary
        };
        assert_eq!(grid(of_k_alone), ([9, 1, 1], 128));
        let params = slot_append_params(&with(of_k_alone), &layout()).unwrap();
        assert_eq!((params.q, params.is_interleaved), (0, 0));
        let changed = |change: &dyn Fn(&mut RotaryArgs)| {
            let mut rotary = rotary;
            change(&mut rotary);
            rotary
        };
        let of_queries = |change: &dyn Fn(&mut RotaryQueries)| {
            let mut queries = queries;
            change(&mut queries);
            changed(&|rotary| rotary.queries = Some(queries))
        };
        for (wrong, what) in [
            (changed(&|r| r.rotary_dim = 0), "rotary_dim is 0"),
            (changed(&|r| r.rotary_dim = 66), "rotary_dim is 66"),
            (changed(&|r| r.rotary_dim = 132), "rotary_dim is 132"),
            (changed(&|r| r.num_positions = 0), "num_positions"),
            (
                changed(&|r| r.cos_sin = DeviceAddress::NULL),
                "cos_sin is null",
            ),
            (
                changed(&|r| r.positions = DeviceAddress::NULL),
                "positions is null",
            ),
            (of_queries(&|q| q.q = DeviceAddress::NULL), "q is null"),
            (
                of_queries(&|q| q.out = DeviceAddress::NULL),
                "rotated queries is null",
            ),
            (of_queries(&|q| q.heads = 0), "query heads to rotate is 0"),
            (of_queries(&|q| q.heads = 65_536), "65536"),
            (of_queries(&|q| q.token_stride = 1154), "1154"),
            (of_queries(&|q| q.out_token_stride = 1154), "1154"),
            (of_queries(&|q| q.out_token_stride = 1148), "do not overlap"),
            (of_queries(&|q| q.token_stride = 1152), "in place is 1152"),
        ] {
            let refused = slot_append_params(&with(wrong), &layout()).unwrap_err();
            let said = refused.to_string();
            assert!(said.contains(what), "{said} for {what}");
        }
    }
}
