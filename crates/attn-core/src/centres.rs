//! Centres of K (`docs/arithmetic.md`, section 12): what a cache takes off a sequence's keys before it quantizes them, and what their scores get back.
//!
//! A sequence has two for each layer and KV head, in the domain of stored (rotated) rows: the first token's key, for the first tile, and the mean of that
//! tile's keys, for all later tokens. Both have the elements of bf16, so that their products with 16 bits of a query are exact in f32.

use half::bf16;

use crate::{
    error::{Error, refuse},
    format::{BF16_MAX, KvFormat, Scheme, Window},
    grid::SCORE_BASE,
    layout::{PageLayout, Side},
    quant,
    segments::TILE,
};

/// Centres of a sequence, layer and KV head.
pub const CENTRES: usize = 2;

/// Bytes of a sequence's centres in one layer: `[num_kv_heads, 2, dim]` in bf16, of keys of `dim` elements.
#[must_use]
pub fn centres_bytes(num_kv_heads: usize, dim: usize) -> usize {
    num_kv_heads
        .saturating_mul(CENTRES * size_of::<bf16>())
        .saturating_mul(dim)
}

/// Which centre is taken off the key of the token at a position: 0 for the first key, 1 for the mean of the first tile.
#[inline]
#[must_use]
pub fn centre_of(position: usize) -> usize {
    usize::from(position >= TILE)
}

/// An element of a centre, as bf16 of at most 2^50.
#[inline]
#[must_use]
pub fn to_centre(x: f32) -> bf16 {
    bf16::from_f32(x.clamp(-BF16_MAX, BF16_MAX))
}

/// An element of the second centre: the first one's, and `sum`, the f32 sum over the first tile's tokens, in their order, of what they store.
#[inline]
#[must_use]
pub fn mean(first: bf16, sum: f32) -> bf16 {
    to_centre(first.to_f32() + sum * (1.0 / TILE as f32))
}

/// What a first tile stores of K of one KV head, summed over its tokens. `runs` gives the head's run of the tile's pages, and that of the residual page, if
/// there is one.
pub(crate) fn sum_of_tile<'a>(
    layout: &PageLayout,
    runs: impl Fn(usize) -> (&'a [u8], Option<&'a [u8]>),
) -> Vec<f32> {
    let (part, residual) = (layout.part(Side::K), layout.residual(Side::K));
    let mut sum = vec![0.0; part.dim()];
    for t in 0..TILE {
        let (run, fine) = runs(t / layout.page_size());
        let (fine, t) = (residual.as_ref().zip(fine), t % layout.page_size());
        for (d, sum) in sum.iter_mut().enumerate() {
            let param = part.load_param(run, t, part.groups().of_dim(d));
            let code = part.load_code(run, t, d);
            *sum += match &fine {
                Some((part, run)) => {
                    quant::half_step_value(code, part.load_code(run, t, d), param.scale)
                }
                None => quant::decode(part.scheme, code, param, 1.0),
            };
        }
    }
    sum
}

/// An element of a query as it is multiplied by a centre: rounded to 16 significant bits.
#[inline(always)]
#[must_use]
pub fn query_element(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 128) & !255)
}

/// What the scores of a row are added to on the grid where their tokens' keys lack `centre`: [`SCORE_BASE`] and the score of the centre. `q` is `q'` of
/// section 3.
// Inlined into vector kernels, so that the 16 sums are vectors there.
#[inline(always)]
#[must_use]
pub fn score_base(q: &[f32], centre: &[bf16]) -> f32 {
    let mut acc = [0.0f32; 16];
    let panels = q.as_chunks::<16>().0.iter();
    for (q, c) in panels.zip(centre.as_chunks::<16>().0) {
        for j in 0..16 {
            acc[j] += query_element(q[j]) * f32::from_bits(u32::from(c[j].to_bits()) << 16);
        }
    }
    for half in [8, 4, 2, 1] {
        for j in 0..half {
            acc[j] += acc[j + half];
        }
    }
    SCORE_BASE + acc[0]
}

impl KvFormat {
    /// Refuses formats whose caches have no centres: K is to be rotated, and read finely in the first tile, and the arithmetic that of integers.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub fn check_centres(self) -> Result<(), Error> {
        let fine = match self.k {
            Scheme::RotatedInt8 => true,
            Scheme::RotatedInt4 { window, .. } => window != Window::None,
            _ => false,
        };
        if fine && self.is_integer() && !self.latents {
            return Ok(());
        }
        refuse(
            "centres of K",
            format_args!("those of a cache of {self}"),
            "caches whose K is int8 or int4 (rotated, and of int4 with a window) and whose V is of integers and stored beside it",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_tile_has_a_centre_of_its_own() {
        assert_eq!([0, 63, 64, 1 << 20].map(centre_of), [0, 0, 1, 1]);
    }

    #[test]
    fn centres_are_bf16_within_its_limit() {
        assert_eq!(to_centre(1.0 + 1.0 / 256.0).to_f32(), 1.0);
        assert_eq!(to_centre(1.0 + 3.0 / 256.0).to_f32(), 1.0 + 4.0 / 256.0);
        assert_eq!(to_centre(-3e30).to_f32(), -BF16_MAX);
        assert_eq!(mean(bf16::ONE, 64.0).to_f32(), 2.0);
    }

    #[test]
    fn products_of_queries_and_centres_are_exact() {
        for (x, expected) in [
            (1.0 + f32::EPSILON * 127.0, 1.0),
            (1.0 + f32::EPSILON * 128.0, 1.0 + f32::EPSILON * 256.0),
            (-1.0 - f32::EPSILON * 128.0, -1.0 - f32::EPSILON * 256.0),
        ] {
            assert_eq!(query_element(x), expected);
        }
        let c = bf16::from_f32(1.992_187_5);
        let q = query_element(1.7);
        let product = f64::from(q) * f64::from(c.to_f32());
        assert_eq!(f64::from(q * c.to_f32()), product);
    }

    /// Kills a sum in another order: the 16 sums are of every 16th dim, and the large terms cancel only in this one.
    #[test]
    fn bases_are_summed_by_sixteens_and_halves() {
        let mut q = [0.0f32; 64];
        let ones = [bf16::ONE; 64];
        (q[0], q[16], q[8], q[1]) = (16_777_216.0, 1.0, -16_777_216.0, 0.5);
        assert_eq!(score_base(&q, &ones), SCORE_BASE + 0.5);
        (q[0], q[16], q[8], q[32]) = (16_777_216.0, -16_777_216.0, 0.0, 1.0);
        assert_eq!(score_base(&q, &ones), SCORE_BASE + 1.5);
    }

    #[test]
    fn caches_of_other_formats_have_none() {
        for name in [
            "int8",
            "int8/int4",
            "int4",
            "int4-w4",
            "int4-r2",
            "int4/int8",
            "int8/int8-plain",
        ] {
            let format: KvFormat = name.parse().unwrap();
            format.check_centres().unwrap();
        }
        for name in [
            "bf16",
            "fp8",
            "int8-plain",
            "int4-w0",
            "int4-g4",
            "int8/bf16",
            "int8-g32",
            "int8-latents",
        ] {
            let format: KvFormat = name.parse().unwrap();
            assert!(format.check_centres().is_err(), "{name}");
        }
    }
}
