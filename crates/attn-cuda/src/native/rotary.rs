//! Rotary positions of appends.

use attn_core::{Error, RotaryStyle, error::refuse};
use attn_kernels::cuda::params::AppendParams;

use super::dtype::{self, Dtype};
use crate::{handles::DeviceAddress, sizes};

/// Rotary positions of an append: K is rotated as [`RotaryTable::rotate`](attn_core::RotaryTable::rotate) does it, in f32, before it is
/// quantized; V is not. The bytes are those of an append of the f32 rows so rotated: K of 16 bits is not rounded to them between.
#[derive(Debug, Clone, Copy)]
pub struct RotaryArgs {
    /// Which elements of a head are a pair.
    pub style: RotaryStyle,
    /// Elements of a head that are rotated, from its first on: a multiple of 4 up to head_dim.
    pub rotary_dim: usize,
    /// `[num_positions][rotary_dim]`, aligned to 16 bytes: of a position, the cosines of its pairs, then their sines
    /// ([`RotaryTable::cos_sin`](attn_core::RotaryTable::cos_sin); `cos_sin_cache` of vLLM and SGLang).
    pub cos_sin: DeviceAddress,
    /// Number format of `cos_sin`; 16 bits are widened exactly.
    pub cos_sin_dtype: Dtype,
    /// Rows of `cos_sin`.
    pub num_positions: usize,
    /// i64 `[tokens]`: each token's row of `cos_sin`. The query of a token without a slot is rotated, too; where its position is no row (negative, or
    /// `num_positions` and more, as padding may be), its query stays as it is. Null, but not in appends by slots: the tokens' numbers in their
    /// sequences, from 0.
    pub positions: DeviceAddress,
    /// Queries of the same tokens, rotated by the same launch; none where K alone is.
    pub queries: Option<RotaryQueries>,
}

/// Queries that an append rotates, in the number format of its K. Results of 16 bits are the f32 ones rounded to nearest even.
#[derive(Debug, Clone, Copy)]
pub struct RotaryQueries {
    /// Queries `[tokens][heads][head_dim]`.
    pub q: DeviceAddress,
    /// Rotated queries `[tokens][heads][head_dim]`: `q` itself, with its stride, or memory that does not overlap it.
    pub out: DeviceAddress,
    /// Query heads.
    pub heads: usize,
    /// Elements from one token of `q` to the next, a multiple of 4.
    pub token_stride: usize,
    /// Elements from one token of `out` to the next: a multiple of 4, `heads · head_dim` and more.
    pub out_token_stride: usize,
}

/// Whether an append knows positions where the caller gives none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PositionsFrom {
    /// It does not: slots say nothing of them.
    Caller,
    /// It takes the places that lengths give.
    KvLens,
}

fn given(what: &'static str, address: DeviceAddress) -> Result<u64, Error> {
    if address == DeviceAddress::NULL {
        return refuse(
            what,
            format_args!("null"),
            "an address; rotary: None appends K as it is",
        );
    }
    Ok(address.get())
}

impl RotaryArgs {
    /// The fields of the kernel's parameter block; all others are 0.
    pub(super) fn params(
        &self,
        head_dim: usize,
        tokens: usize,
        positions: PositionsFrom,
    ) -> Result<AppendParams, Error> {
        let dim = self.rotary_dim;
        if dim == 0 || !dim.is_multiple_of(4) || dim > head_dim {
            return refuse("rotary_dim", dim, "a multiple of 4 up to head_dim");
        }
        if self.num_positions == 0 {
            return refuse("num_positions", 0, "the rows of cos_sin, 1 and more");
        }
        let queries = match &self.queries {
            Some(queries) => queries.params(head_dim, tokens)?,
            None => AppendParams::default(),
        };
        Ok(AppendParams {
            cos_sin: given("cos_sin", self.cos_sin)?,
            positions: match positions {
                PositionsFrom::Caller => given("positions", self.positions)?,
                PositionsFrom::KvLens => self.positions.get(),
            },
            num_positions: self.rows(),
            rotary_dim: sizes::int("rotary_dim", dim)?,
            cos_sin_dtype: dtype::code(self.cos_sin_dtype),
            is_interleaved: i32::from(self.style == RotaryStyle::Interleaved),
            ..queries
        })
    }

    /// Rows of `cos_sin`, as the kernels take them.
    pub(super) fn rows(&self) -> i64 {
        i64::try_from(self.num_positions).unwrap_or(i64::MAX)
    }

    /// Query heads that are rotated.
    pub(super) fn query_heads(&self) -> usize {
        self.queries.map_or(0, |queries| queries.heads)
    }
}

impl RotaryQueries {
    fn params(&self, head_dim: usize, tokens: usize) -> Result<AppendParams, Error> {
        /// Rows of a CUDA grid hold the columns of all heads.
        const MOST_HEADS: usize = 65_535;
        if !(1..=MOST_HEADS).contains(&self.heads) {
            return refuse("query heads to rotate", self.heads, "1 to 65535");
        }
        let row = self.heads * head_dim;
        let strides = [self.token_stride, self.out_token_stride];
        if let Some(stride) = strides.into_iter().find(|n| !n.is_multiple_of(4)) {
            return refuse(
                "a token stride of queries",
                stride,
                "multiples of 4 elements",
            );
        }
        if tokens > 1 && self.out_token_stride < row {
            return refuse(
                "the token stride of rotated queries",
                self.out_token_stride,
                "heads · head_dim elements and more, so that tokens do not overlap",
            );
        }
        if tokens > 1 && self.q == self.out && self.token_stride != self.out_token_stride {
            return refuse(
                "the token stride of queries rotated in place",
                self.token_stride,
                "that of the results, which lie at the same address",
            );
        }
        let [q_token_stride, q_out_token_stride] = sizes::strides(strides);
        Ok(AppendParams {
            q: given("q", self.q)?,
            q_out: given("the address of rotated queries", self.out)?,
            q_token_stride,
            q_out_token_stride,
            num_q_heads: sizes::int("query heads to rotate", self.heads)?,
            ..AppendParams::default()
        })
    }
}
