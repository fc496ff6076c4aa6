//! Scales and shifts of a tile's codes, as floats.

use attn_core::{Scheme, arithmetic::TILE, format::MAX_GROUPS};

use crate::{
    grid,
    reader::{Reader, Side},
    simd::{Simd, scale_and_shift},
};

/// Multiplies the scales of half steps, which count sixteenths, by a power of two.
#[inline(always)]
pub(super) fn half_step_scales<S: Simd>(
    s: S,
    scheme: Scheme,
    unit: f32,
    scales: &mut [[f32; TILE]],
) {
    if !matches!(scheme, Scheme::RotatedInt4 { .. }) {
        return;
    }
    for scales in scales {
        for t in (0..TILE).step_by(S::LANES) {
            // SAFETY: t + LANES ≤ TILE.
            unsafe {
                let at = scales.as_mut_ptr().add(t);
                s.store(at, s.mul(s.load(at), s.splat(unit)));
            }
        }
    }
}

/// Puts V's scales on the grid; half steps count sixteenths.
#[inline(always)]
pub(super) fn grid_scales<S: Simd>(s: S, scheme: Scheme, scales: &mut [[f32; TILE]]) {
    let is_rotated = matches!(scheme, Scheme::RotatedInt4 { .. });
    let unit = s.splat(if is_rotated { 1.0 / 16.0 } else { 1.0 });
    for scales in scales {
        for t in (0..TILE).step_by(S::LANES) {
            // SAFETY: t + LANES ≤ TILE.
            unsafe {
                let at = scales.as_mut_ptr().add(t);
                s.store(at, s.mul(grid::scale(s, s.load(at)), unit));
            }
        }
    }
}

/// Parameters per token as floats, `[group][token]`, 0 from `tokens` on.
#[inline(always)]
pub(super) fn params<S: Simd>(
    s: S,
    reader: &Reader<'_>,
    side: Side,
    [t0, tokens]: [usize; 2],
    groups: usize,
    centre: f32,
    [scale, shift]: [&mut [[f32; TILE]; MAX_GROUPS]; 2],
) {
    if !reader.is_paged() {
        let ((from, stride), mut bits) = (reader.view_scales(side, t0), [0u16; TILE]);
        for g in 0..groups {
            for (t, bits) in bits[..tokens].iter_mut().enumerate() {
                *bits = from[t * stride + g];
            }
            for t in (0..TILE).step_by(S::LANES) {
                // SAFETY: t + LANES ≤ TILE, the length of both.
                unsafe {
                    let x = s.f16_to_f(s.i_load_u16(bits.as_ptr().add(t).cast()));
                    s.store(scale[g].as_mut_ptr().add(t), x);
                }
            }
        }
        return;
    }
    let shifted = reader.scheme(side).has_shifts();
    let width = if shifted { 4 } else { 2 };
    if tokens < TILE {
        scale[..groups].fill([0.0; TILE]);
        shift[..groups].fill([0.0; TILE]);
    }
    let mut t = 0;
    while t < tokens {
        let page = reader.page(side, t0 + t);
        let mut first = (t0 + t) & (page.page_size - 1);
        while first < page.page_size && t < tokens {
            for g in 0..groups {
                let at = &page.params[(g * page.page_size + first) * width..][..S::LANES * width];
                let rest = tokens as i32 - t as i32;
                // SAFETY: `at` holds LANES parameters; t + LANES ≤ TILE.
                unsafe {
                    let (mut a, mut b) = if shifted {
                        scale_and_shift(s, at.as_ptr(), centre)
                    } else {
                        (s.f16_to_f(s.i_load_u16(at.as_ptr())), s.splat(0.0))
                    };
                    if rest < S::LANES as i32 {
                        (a, b) = (s.keep(a, 0, rest, 0.0), s.keep(b, 0, rest, 0.0));
                    }
                    s.store(scale[g].as_mut_ptr().add(t), a);
                    if shifted {
                        s.store(shift[g].as_mut_ptr().add(t), b);
                    }
                }
            }
            (t, first) = (t + S::LANES, first + S::LANES);
        }
    }
}
