//! Appends of tokens that bring their places, as engines with a `slot_mapping` have them.

use attn_core::{Error, error::refuse};
use attn_kernels::cuda::{
    Instance,
    params::{AppendParams, CentreTokens, CheckParams, DecodeParams},
};

use super::{
    append::{AppendShape, append_grid},
    check::Checked,
    grid::Grid,
    kv::{check_residual_pages, check_scale_addresses},
    kv_rows::KvRows,
    op::Op,
    pages::Pages,
    rotary::{PositionsFrom, RotaryArgs},
};
use crate::{handles::DeviceAddress, sizes};

/// An append in which every token brings its place, as engines with a `slot_mapping` have it: any number of tokens of any sequences, with padding. The
/// bytes are those of [`AppendArgs`](super::AppendArgs).
///
/// Refused are slots that are null, pages that overlap, residual pages or static scales that are missing, and rotary positions with a `rotary_dim`, an address or strides that
/// are not allowed.
///
/// # Safety
/// - On the device, no two slots are the same; slots that are not negative are in the pool, as are the residual pages of their tokens, in pages that belong to
///   one sequence; a sequence's tokens lie side by side, in order, with no token without a slot among them; K and V of tokens with slots are finite.
/// - With `rotary`, on the device, positions of tokens with slots are rows of `cos_sin`, and K is finite once rotated; rotated queries overlap nothing that
///   runs meanwhile, and not K or V.
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
    /// u32 `[tokens]`: the residual page of the token's page, or `u32::MAX` if that keeps none (as for all but a sequence's first
    /// [`KvFormat::first_residual_pages`](attn_core::KvFormat::first_residual_pages) and its last pages); null where no scheme has a window.
    pub residual_pages: DeviceAddress,
    /// Tokens, skipped ones included.
    pub tokens: usize,
    /// Rotary positions, by an append prepared with [`AppendShape::rotary`]; none where K is appended as it is.
    pub rotary: Option<RotaryArgs>,
    /// The centres of K that are taken off keys; none where keys have theirs.
    pub centres: Option<SlotCentres>,
}

/// The centres of K of an append by slots. A sequence's first token makes the first one.
#[derive(Debug, Clone, Copy)]
pub struct SlotCentres {
    /// Rows of bf16 `[num_kv_heads][2][head_dim]`.
    pub centres: DeviceAddress,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Rows.
    pub count: usize,
    /// u32 `[tokens]`: the row of the centres of each token's sequence.
    pub rows: DeviceAddress,
    /// i32 `[tokens]`: each token's number in its sequence.
    pub positions: DeviceAddress,
    /// Which tokens are stored.
    pub tokens: CentreTokens,
}

// SAFETY: `attn_append` takes one AppendParams, asserted on both sides, and writes the tokens of the slots and rotated queries alone.
unsafe impl Op for SlotAppendArgs {
    type Shape = AppendShape;
    type Params = AppendParams;
    const DOING: &'static str = "appending by slots";

    fn instances(shape: &AppendShape) -> Result<Vec<Instance>, Error> {
        shape.instances()
    }

    fn kernel(&self) -> usize {
        usize::from(self.rotary.is_some())
    }

    fn params(&self, shape: &AppendShape) -> Result<AppendParams, Error> {
        if self.slots.is_null() {
            let allowed = "an i64 for each token; AppendArgs takes places from kv_lens";
            return refuse("slots", format_args!("null"), allowed);
        }
        let layout = &shape.layout;
        self.pool.check(layout.page_bytes())?;
        check_residual_pages(layout, self.residual_pages)?;
        let heads = layout.num_kv_heads();
        check_scale_addresses(layout.format(), self.tensor_scales, heads)?;
        let [k_tensor_scales, v_tensor_scales] = self.tensor_scales.map(DeviceAddress::get);
        if let Some(centres) = &self.centres {
            layout.format().check_centres()?;
            if centres.rows.is_null() || centres.positions.is_null() {
                let allowed = "a row of centres and a position for each token";
                return refuse("centres of K", format_args!("null"), allowed);
            }
            if self.rotary.is_some() && centres.tokens != CentreTokens::All {
                let given =
                    "with some of the tokens, whose queries would be rotated more than once";
                return refuse("rotary", given, "keys that are rotated before");
            }
        }
        let positions = PositionsFrom::Caller;
        let rotary = shape.rotary_params(self.rotary.as_ref(), self.tokens, positions)?;
        Ok(AppendParams {
            pool: self.pool.at.get(),
            page_stride: self.pool.stride as u64,
            residual_pages: self.residual_pages.get(),
            slots: self.slots.get(),
            k_tensor_scales,
            v_tensor_scales,
            tokens: sizes::int("tokens to append", self.tokens)?,
            num_kv_heads: sizes::int("num_kv_heads", layout.num_kv_heads())?,
            centres: self.centres.map_or(0, |of| of.centres.get()),
            centre_rows: self.centres.map_or(0, |of| of.rows.get()),
            centre_positions: self.centres.map_or(0, |of| of.positions.get()),
            centre_stride: self.centres.map_or(0, |of| of.stride as u64),
            centre_tokens: self.centres.map_or(0, |of| of.tokens as i32),
            ..self.rows.append_params(rotary)
        })
    }

    /// Behind the columns of KV heads are those of query heads that are rotated.
    fn grid(&self, shape: &AppendShape) -> Grid {
        let query_heads = self.rotary.map_or(0, |rotary| rotary.query_heads());
        let Grid { ctas, threads } = append_grid(&shape.layout, [1, 1], query_heads);
        Grid::new([self.tokens, ctas[0], 1], threads)
    }

    fn checked(&self, shape: &AppendShape) -> Result<Option<Checked>, Error> {
        Ok(Some(Checked {
            doing: "checking an append by slots",
            arrays: DecodeParams {
                residual_pages: self.residual_pages.get(),
                batch: 1,
                ..DecodeParams::default()
            },
            limits: CheckParams {
                slots: self.slots.get(),
                query_tokens: sizes::int("tokens to append", self.tokens)?,
                num_pages: sizes::axis(self.pool.num_pages),
                page_size: sizes::int("page_size", shape.layout.page_size())?,
                positions: self.rotary.map_or(0, |rotary| rotary.positions.get()),
                num_positions: self.rotary.map_or(0, |rotary| rotary.rows()),
                centre_rows: self.centres.map_or(0, |of| of.rows.get()),
                centre_positions: self.centres.map_or(0, |of| of.positions.get()),
                num_centre_rows: sizes::axis(self.centres.map_or(0, |of| of.count)),
                ..CheckParams::default()
            },
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::{KvFormat, PageLayout, RotaryStyle};

    use crate::native::{Dtype, RotaryQueries};

    fn layout() -> PageLayout {
        PageLayout::new(KvFormat::INT4, 128, 64, 2).unwrap()
    }

    fn shape() -> AppendShape {
        AppendShape {
            layout: layout(),
            rotary: true,
        }
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
            centres: None,
        }
    }

    #[test]
    fn static_scales_are_needed_where_a_scheme_has_them() {
        let shape = AppendShape {
            layout: PageLayout::new("fp8".parse().unwrap(), 128, 64, 2).unwrap(),
            rotary: false,
        };
        let mut given = args(None);
        given.pool = Pages::new(given.pool.at, &shape.layout, 1);
        let refused = given.params(&shape).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::MissingScales {
                    what: "k_scales",
                    ..
                }
            ),
            "{refused}"
        );
        given.tensor_scales = [0x700, 0x800].map(DeviceAddress::new);
        let params = given.params(&shape).unwrap();
        let scales = (params.k_tensor_scales, params.v_tensor_scales);
        assert_eq!(scales, (0x700, 0x800));
    }

    #[test]
    fn slots_are_needed_and_residual_pages_where_a_scheme_has_a_window() {
        let given = args(None);
        let params = given.params(&shape()).unwrap();
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
            let refused = args.params(&shape()).unwrap_err();
            assert!(refused.to_string().contains(what), "{refused}");
        }
        let Grid { ctas, threads } = given.grid(&shape());
        assert_eq!((ctas, threads), ([9, 1, 1], 128));
        tokens.tokens = 0;
        assert!(tokens.grid(&shape()).is_empty());
        let checked = given.checked(&shape()).unwrap().unwrap();
        let limits = checked.limits;
        assert_eq!(
            (checked.arrays.residual_pages, limits.slots),
            (0x100, 0x200)
        );
        assert_eq!(
            (limits.query_tokens, limits.page_size, limits.num_pages),
            (9, 64, 1)
        );
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
        let params = with(rotary).params(&shape()).unwrap();
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
        let grid = |rotary| with(rotary).grid(&shape()).ctas;
        assert_eq!((grid(rotary), with(rotary).kernel()), ([9, 2, 1], 1));
        let of_k_alone = RotaryArgs {
            style: RotaryStyle::HalfSplit,
            queries: None,
            ..rotary
        };
        assert_eq!(grid(of_k_alone), [9, 1, 1]);
        let params = with(of_k_alone).params(&shape()).unwrap();
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
            let refused = with(wrong).params(&shape()).unwrap_err();
            let said = refused.to_string();
            assert!(said.contains(what), "{said} for {what}");
        }
    }
}
