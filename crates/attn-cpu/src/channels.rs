//! Sealed pages of `Int4 Channel`, whose scales and shifts belong to dims: the page's parameters, and the query rows prepared with them
//! (`docs/arithmetic.md`, section 3).

use attn_core::{
    arithmetic::{exp2i, exponent, plane_exponent},
    format::MAX_GROUPS,
};

use crate::{
    query::{QueryRows, fours, largest_abs, largest_of_fours, plane},
    reader::{Reader, Side},
    scratch::Aligned,
    simd::{Dot, OPERAND, Simd, scale_and_shift},
};

/// The parameters of a sealed page, `[dim]`.
pub(crate) struct Channels {
    pub scale: Aligned<f32>,
    /// The shifts, centred in the integer arithmetic.
    pub shift: Aligned<f32>,
    /// The largest of every four scales, `[fours(dim)]`.
    largest_scale: Aligned<f32>,
}

impl Channels {
    pub const fn new() -> Self {
        Channels {
            scale: Aligned::new(),
            shift: Aligned::new(),
            largest_scale: Aligned::new(),
        }
    }

    /// Scales and shifts of the page of token `t0`, for codes less `centre`.
    #[inline(always)]
    pub fn load<S: Simd>(&mut self, s: S, reader: &Reader<'_>, t0: usize, dim: usize, centre: f32) {
        self.scale.reserve(dim);
        self.shift.reserve(dim);
        self.largest_scale.reserve(fours(dim));
        let params = &reader.page(Side::K, t0).params[..dim * 4];
        let (scale, shift) = (
            &mut self.scale.as_mut_slice()[..dim],
            &mut self.shift.as_mut_slice()[..dim],
        );
        for d in (0..dim).step_by(S::LANES) {
            // SAFETY: d + LANES ≤ dim, the number of pairs in params and of floats in scale and shift.
            unsafe {
                let (a, b) = scale_and_shift(s, params.as_ptr().add(d * 4), centre);
                s.store(scale.as_mut_ptr().add(d), a);
                s.store(shift.as_mut_ptr().add(d), b);
            }
        }
        let largest = &mut self.largest_scale.as_mut_slice()[..fours(dim)];
        largest_of_fours(scale, largest);
    }
}

/// Prepares every row for one sealed page: scales go into the plane, shifts into the offset.
#[inline(always)]
pub(crate) fn prepare<D: Dot>(d: D, rows: &mut QueryRows, page: &Channels, bias: i32) {
    let (s, dim, each) = (d.simd(), rows.dim, rows.dim / 16 * OPERAND);
    let [scale, shift] = [&page.scale, &page.shift].map(|x| x.as_slice()[..dim].as_ptr());
    let stride = fours(dim);
    let largest_scale = page.largest_scale.as_slice()[..stride].as_ptr();
    // SAFETY: `dim` floats, a multiple of 16.
    let shift_exponent = exponent(unsafe { largest_abs(s, shift, dim) });
    for r in 0..rows.count {
        // If all queries or all shifts are zero, so is every term, whatever the exponent.
        let j = (20 - rows.q_exponent.as_slice()[r] - shift_exponent).clamp(-100, 100);
        let q_largest = rows.q_largest.as_slice()[r * stride..][..stride].as_ptr();
        let mut bounds = s.splat(0.0);
        for i in (0..stride).step_by(D::S::LANES) {
            // SAFETY: `stride` floats each, a multiple of LANES.
            let product = unsafe { s.mul(s.load(q_largest.add(i)), s.load(largest_scale.add(i))) };
            bounds = s.max(bounds, product);
        }
        let e = plane_exponent(s.largest(bounds));
        let q = rows.q.as_slice()[r * dim..][..dim].as_ptr();
        let folded = rows.floats.as_mut_slice()[..dim].as_mut_ptr();
        let out = rows.k_operands.as_mut_slice()[r * each..][..each].as_mut_ptr();
        let integers = rows.integers.as_mut_slice()[..dim].as_mut_ptr();
        let (unit, mut y, mut sum) = (s.splat(exp2i(j)), s.i_splat(0), s.i_splat(0));
        // SAFETY: `dim` elements each, and dim/16 operands; LANES divides `dim`.
        unsafe {
            for i in (0..dim).step_by(D::S::LANES) {
                let x = s.load(q.add(i));
                s.store(folded.add(i), s.mul(x, s.load(scale.add(i))));
                let term = s.mul(s.mul(x, s.load(shift.add(i))), unit);
                y = s.i_add(y, s.round(term));
            }
            plane(d, folded, e, dim, integers, out);
            for i in (0..dim).step_by(D::S::LANES) {
                sum = s.i_add(sum, s.i_load(integers.add(i).cast()));
            }
        }
        rows.unit.as_mut_slice()[r] = exp2i(-e);
        rows.offset.as_mut_slice()[r] = s.i_sum(y) as f32 * exp2i(-j);
        rows.k_bias.as_mut_slice()[r * MAX_GROUPS] = bias * s.i_sum(sum);
    }
}
