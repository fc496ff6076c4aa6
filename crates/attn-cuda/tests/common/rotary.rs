//! Rotary positions of appends: K and queries as a launch takes them, here and on a GPU, and what has to come out.

use anyhow::Result;
use attn_conformance::case::noise;
use attn_core::{Rotary, RotaryScaling, RotaryStyle, RotaryTable};
use attn_cuda::native::{DeviceAddress, Dtype, RotaryArgs, RotaryQueries};

use crate::numbers;

/// Rows of a table; more than any sequence of a job has tokens.
const POSITIONS: usize = 700;
/// What lies in results, and between them, before a launch.
const PAD: u8 = 0x5a;

/// How a job's tokens are rotated.
#[derive(Clone, Copy)]
pub struct Kind {
    pub style: RotaryStyle,
    pub dim: usize,
    pub table: Dtype,
    pub q_heads: usize,
    /// Whether results take the queries' place.
    pub in_place: bool,
    /// Elements behind each token of K.
    pub k_padding: usize,
    /// Whether positions are the tokens' numbers in their sequences, which appends behind sequences are not told.
    pub numbered: bool,
}

/// A kind's table, as the reference has it and as the kernel reads it.
pub struct Table {
    pub kind: Kind,
    reference: RotaryTable,
    pub words: Vec<u128>,
}

/// 16-byte words that hold these bytes: kernels load vectors.
pub fn words(bytes: &[u8]) -> Vec<u128> {
    let mut words = vec![0u128; bytes.len().div_ceil(16)];
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

impl Table {
    pub fn new(kind: Kind) -> Result<Self> {
        let rotary = Rotary::new(kind.dim, 1e4, &RotaryScaling::None)?;
        let table = rotary.table(0..POSITIONS)?;
        let widened = numbers::rounded(kind.table, table.cos_sin());
        Ok(Table {
            words: words(&numbers::bytes(kind.table, table.cos_sin())),
            reference: RotaryTable::from_cos_sin(kind.dim, &widened)?,
            kind,
        })
    }

    /// The position of token `at` of sequence `b`: mostly not its number, as after a shared prefix of another length.
    pub fn position(&self, b: usize, at: usize) -> usize {
        match self.kind.numbered {
            true => at,
            false => at + 7 * (b % 5),
        }
    }

    /// A position for a token without a slot, of which the second kind alone is a row of the table.
    pub fn of_padding(b: usize) -> i64 {
        [-3, 11, POSITIONS as i64, i64::MIN, i64::MAX][b % 5]
    }

    /// Rotates the heads of consecutive tokens of sequence `b`, whose first is its token `first`.
    pub fn rotate(&self, x: &mut [f32], row: usize, head_dim: usize, b: usize, first: usize) {
        for (i, token) in x.chunks_exact_mut(row).enumerate() {
            let position = self.position(b, first + i);
            let rotated = self
                .reference
                .rotate(self.kind.style, token, head_dim, position);
            rotated.expect("the table is longer than the sequences");
        }
    }

    /// Queries of these tokens, which lie apart.
    pub fn launch(
        &self,
        dtype: Dtype,
        head_dim: usize,
        positions: Vec<i64>,
        seed: u64,
    ) -> Result<Launch<'_>> {
        let kind = &self.kind;
        let row = kind.q_heads * head_dim;
        let strides = match kind.in_place {
            true => [row + 12, row + 12],
            false => [row + 8, row + 4],
        };
        let element = numbers::bytes(dtype, &[0.0]).len();
        let [mut from, mut want] = strides.map(|n| vec![PAD; n * element * positions.len()]);
        if kind.in_place {
            want.clear();
        }
        let all = noise(seed, positions.len() * row);
        let queries = numbers::rounded(dtype, &all);
        for (t, position) in positions.iter().enumerate() {
            let mut q = queries[t * row..(t + 1) * row].to_vec();
            let at = |stride: usize| t * stride * element..(t * stride + row) * element;
            from[at(strides[0])].copy_from_slice(&numbers::bytes(dtype, &q));
            let known = usize::try_from(*position).is_ok_and(|p| p < POSITIONS);
            if known {
                self.reference
                    .rotate(kind.style, &mut q, head_dim, *position as usize)?;
            }
            if kind.in_place {
                let token = &from[t * strides[0] * element..(t + 1) * strides[0] * element];
                want.extend(token);
            }
            if known {
                want[at(strides[1])].copy_from_slice(&numbers::bytes(dtype, &q));
            }
        }
        let before = vec![PAD; want.len()];
        Ok(Launch {
            table: self,
            positions,
            strides,
            out: words(if kind.in_place { &from } else { &before }),
            q: words(&from),
            want,
        })
    }
}

/// What one launch rotates beside K.
pub struct Launch<'a> {
    table: &'a Table,
    pub positions: Vec<i64>,
    pub q: Vec<u128>,
    /// Of queries that are rotated in place, they themselves.
    pub out: Vec<u128>,
    strides: [usize; 2],
    want: Vec<u8>,
}

/// Where a launch finds its parts.
pub struct Places {
    pub cos_sin: DeviceAddress,
    pub positions: DeviceAddress,
    pub q: DeviceAddress,
    pub out: DeviceAddress,
}

impl Launch<'_> {
    pub fn args(&self, at: &Places) -> RotaryArgs {
        let kind = &self.table.kind;
        let queries = RotaryQueries {
            q: if kind.in_place { at.out } else { at.q },
            out: at.out,
            heads: kind.q_heads,
            token_stride: self.strides[0],
            out_token_stride: self.strides[1],
        };
        RotaryArgs {
            style: kind.style,
            rotary_dim: kind.dim,
            cos_sin: at.cos_sin,
            cos_sin_dtype: kind.table,
            num_positions: POSITIONS,
            positions: at.positions,
            queries: (kind.q_heads > 0).then_some(queries),
        }
    }

    /// The first byte of the queries' results, or of what lies between them, that is another one.
    pub fn difference(&self, got: &[u8]) -> Option<String> {
        let i = self
            .want
            .iter()
            .zip(got)
            .position(|(want, got)| want != got)?;
        Some(format!(
            "byte {i} of the queries is {:#04x}, expected {:#04x}",
            got[i], self.want[i]
        ))
    }
}
