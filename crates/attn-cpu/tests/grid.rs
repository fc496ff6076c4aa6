//! The operations of the grid on every instruction set of this machine: at all their points, against the definition in f64.

use attn_core::grid::{
    GRID, INVERSES, NEAR_END, NEAR_START, SCORE_BASE, grid_scale, grid_score, is_near, mantissas,
    step_inverse, weight, weight_units,
};
use attn_cpu::{
    Isa,
    internals::{Operations, grid_operations},
};
use half::f16;

/// Runs the operations over columns of a, step and base, 16 lanes at a time, and hands each lane to `check`, with its number.
fn each_lane(isa: Isa, columns: [&[f32]; 3], check: impl Fn(usize, &Operations, usize)) {
    let len = columns.map(<[f32]>::len).into_iter().max().unwrap();
    for first in (0..len).step_by(16) {
        // Columns of one number are constant.
        let lane = |column: &[f32], i: usize| column[(first + i).min(column.len() - 1)];
        let inputs = columns.map(|column| std::array::from_fn(|i| lane(column, i)));
        let operations = grid_operations(isa, &inputs);
        for i in 0..16.min(len - first) {
            check(first + i, &operations, i);
        }
    }
}

/// Relative error in units of 2^-22.
fn error(got: f32, want: f64) -> f64 {
    (f64::from(got) / want - 1.0).abs() * 4_194_304.0
}

#[test]
fn powers_are_near_everywhere_exact_at_integers_and_their_f16_is_the_definitions() {
    let points: Vec<i32> = (-126 * GRID..=0).collect();
    let y: Vec<f32> = points
        .iter()
        .map(|point| SCORE_BASE + *point as f32 / GRID as f32)
        .collect();
    for isa in Isa::available() {
        each_lane(isa, [&[1.0], &[1.0], &y], |i, got, lane| {
            let (p, point) = (got.powers[lane], points[i]);
            assert!(error(p, weight(point)) < 0.75, "{isa} {point} {p}");
            if point % GRID == 0 {
                assert_eq!(f64::from(p), weight(point), "{isa} {point}");
            }
            let units = f64::from(got.halves[lane]) * 16_777_216.0;
            assert_eq!(units, f64::from(weight_units(point)), "{isa} {point}");
        });
    }
    let of_core = mantissas();
    let ups: Vec<f32> = (0..GRID).map(|n| SCORE_BASE + n as f32 / 64.0).collect();
    each_lane(Isa::Portable, [&[1.0], &[1.0], &ups], |i, got, lane| {
        assert_eq!(got.powers[lane], of_core[i]);
    });
}

#[test]
fn every_scale_is_read_as_the_nearest_point() {
    let scales: Vec<f16> = (0..0x7c00).map(f16::from_bits).collect();
    let floats: Vec<f32> = scales.iter().map(|scale| scale.to_f32()).collect();
    for isa in Isa::available() {
        each_lane(isa, [&floats, &[1.0], &[SCORE_BASE]], |i, got, lane| {
            let (got, want) = (got.scales[lane], f64::from(grid_scale(scales[i])));
            if i == 0 {
                assert_eq!(got, 0.0, "{isa}");
            } else {
                // A step of the grid is 45,000 times as far.
                assert!(error(got, want) < 1.0, "{isa} {} {got}", scales[i]);
            }
        });
    }
}

#[test]
fn steps_have_the_definitions_inverses() {
    let step = |i: i32| (1.0 + (i % 4) as f32 / 4.0) * 2f32.powi(i / 4 - 58);
    let all: Vec<f32> = (0..4 * 70).map(step).collect();
    for isa in Isa::available() {
        each_lane(isa, [&[1.0], &all, &[SCORE_BASE]], |i, got, lane| {
            assert_eq!(got.inverses[lane], step_inverse(all[i]), "{isa} {}", all[i]);
        });
    }
    assert_eq!(step_inverse(1.75 * 4.0), INVERSES[3] / 4.0);
}

/// Terms and steps whose products lie at ties of the grid and beside them, at both ends of its range, and anywhere.
fn products() -> [Vec<f32>; 2] {
    let (mut a, mut step) = (Vec::new(), Vec::new());
    let mut add = |x: f32, y: f32| {
        a.push(x);
        step.push(y);
    };
    // Odd multiples of 2^-7 as products of two numbers of many bits: 4097·4095·2^-7 and the like, and one unit beside them.
    for odd in (1..4096).step_by(2) {
        for other in [1.0f32, 3.0, 1023.0, 4095.0] {
            for sign in [1.0, -1.0] {
                let (x, y) = (sign * odd as f32, other / 128.0);
                add(x, y);
                add(x, f32::from_bits(y.to_bits() + 1));
                add(x, f32::from_bits(y.to_bits() - 1));
            }
        }
    }
    for end in [-65408.0f32, 65536.0] {
        for n in -200..200 {
            for divisor in [1.0f32, 3.0, 1000.0, 0.001] {
                let x = end + n as f32 / 256.0;
                add(x / divisor, divisor);
            }
        }
    }
    let mut bits = 12345u32;
    for _ in 0..100_000 {
        bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Magnitudes of 2^-40 to 2^40, and small steps.
        let exponent = 87 + (bits >> 8) % 80;
        let x = f32::from_bits(bits & 0x807F_FFFF | exponent << 23);
        add(x, 2f32.powi((bits >> 3) as i32 % 24 - 16) * 1.1);
    }
    for x in [3e38f32, -3e38, 1e30, -1e30, f32::NEG_INFINITY, 0.0, -0.0] {
        add(x, 0.01);
    }
    [a, step]
}

#[test]
fn scores_are_rounded_once_and_are_near_or_far_alike() {
    let [a, step] = products();
    for isa in Isa::available() {
        for base in [
            SCORE_BASE,
            SCORE_BASE - 6.0 - 1000.0,
            SCORE_BASE - 6.0 + 65_000.0,
        ] {
            each_lane(isa, [&a, &step, &[base]], |i, got, lane| {
                let (got, want) = (got.sums[lane], a[i].mul_add(step[i], base));
                // The points of section 5, the counts of weights that are not 0, and what decides between near and far.
                if (131_072.0..NEAR_END).contains(&want) && (a[i] * step[i]).abs() < 65_536.0 {
                    assert_eq!(got, want, "{isa} {} {} {base}", a[i], step[i]);
                } else if want < 131_072.0 {
                    assert!(got < 131_072.0, "{isa} {} {} {base}", a[i], step[i]);
                } else {
                    assert!(got >= 131_072.0, "{isa} {} {} {base}", a[i], step[i]);
                }
                if base == SCORE_BASE {
                    assert_eq!(want, grid_score(a[i], step[i], SCORE_BASE));
                    assert_eq!(is_near(got), is_near(want), "{isa} {} {}", a[i], step[i]);
                    assert_eq!(got < NEAR_START, want < NEAR_START, "{isa}");
                }
            });
        }
    }
}
