//! The elements of one (sequence, KV head) as the specification's formulas take them: each token is looked up in its page or row once for all query
//! rows.

use std::cell::OnceCell;

use attn_core::{
    Groups, HeadDim, Scheme,
    quant::{self, Param},
};

use crate::reader::{Reader, Side};

/// One side of one token; what no row asks for is not read.
#[derive(Default)]
struct Token {
    params: OnceCell<Vec<Param>>,
    /// Without residuals, with residuals.
    signed: [OnceCell<Vec<i32>>; 2],
    /// Without residuals, with residuals.
    dequantized: [OnceCell<Vec<f32>>; 2],
}

/// One KV head of one sequence.
pub(crate) struct Stored<'a> {
    pub reader: Reader<'a>,
    head_dim: HeadDim,
    /// K's and V's.
    tokens: [Vec<Token>; 2],
}

impl<'a> Stored<'a> {
    /// The first `kv_len` tokens of what `reader` reads.
    pub fn new(reader: Reader<'a>, head_dim: HeadDim, kv_len: usize) -> Self {
        Stored {
            reader,
            head_dim,
            tokens: std::array::from_fn(|_| (0..kv_len).map(|_| Token::default()).collect()),
        }
    }

    /// The quantization groups of a side.
    pub fn groups(&self, side: Side) -> Groups {
        self.reader.format().groups(self.head_dim)[side as usize]
    }

    /// A token's parameters, one for each group.
    pub fn params(&self, side: Side, t: usize) -> &[Param] {
        self.tokens[side as usize][t].params.get_or_init(|| {
            (0..self.groups(side).count())
                .map(|g| self.reader.param(side, t, g))
                .collect()
        })
    }

    /// How a token's codes enter the products: as `code + residual`, and `2·sum − offset·weights` where the codes are half steps.
    pub fn signed(&self, side: Side, t: usize, fine: bool) -> &[i32] {
        let signed = |d| {
            let code = self.reader.code(side, t, d);
            match self.reader.scheme(side) {
                Scheme::Int4(_) => i32::from(code) - 8,
                Scheme::RotatedInt4 { .. } if fine => {
                    i32::from(16 * code + self.reader.residual(side, t, d))
                }
                Scheme::RotatedInt4 { .. } => 16 * i32::from(code),
                _ => i32::from(code as u8 as i8),
            }
        };
        self.tokens[side as usize][t].signed[usize::from(fine)]
            .get_or_init(|| (0..self.head_dim.of(side)).map(signed).collect())
    }

    /// A token's dequantized elements without their per-tensor scale; rotated where the scheme is.
    pub fn dequantized(&self, side: Side, t: usize, fine: bool) -> &[f32] {
        let (scheme, dim) = (self.reader.scheme(side), self.head_dim.of(side));
        let groups = self.groups(side);
        let value = |d| {
            let (code, param) = (
                self.reader.code(side, t, d),
                self.params(side, t)[groups.of_dim(d)],
            );
            match scheme {
                Scheme::RotatedInt4 { .. } if fine => {
                    quant::half_step_value(code, self.reader.residual(side, t, d), param.scale)
                }
                _ => quant::decode(scheme, code, param, 1.0),
            }
        };
        self.tokens[side as usize][t].dequantized[usize::from(fine)]
            .get_or_init(|| (0..dim).map(value).collect())
    }
}
