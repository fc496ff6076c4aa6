//! The weights of the integer arithmetic: they equal `tests/vectors/grid.txt`, which `grid.py` finds in exact integers, and f32 gives them too.

use std::collections::HashMap;

use attn_core::{
    arithmetic::exp2i,
    grid::{
        self, GRID, MARGIN, SCORE_BASE, SMALLEST_POINT, TO_STEP, grid_ceil, grid_scale, grid_score,
        is_near, round_up, scale_point, step_inverse, threshold, weight, weight_byte, weight_point,
        weight_step, weight_units,
    },
};
use half::f16;

const TABLE: &str = include_str!("../../../../tests/vectors/grid.txt");
/// 2^-22, in which margins count.
const UNIT: f64 = 1.0 / 4_194_304.0;

fn table() -> HashMap<&'static str, Vec<&'static str>> {
    let lines = TABLE.lines().map(|line| line.split_once(": ").unwrap());
    lines
        .map(|(name, numbers)| (name, numbers.split(' ').collect()))
        .collect()
}

fn integers(numbers: &[&str]) -> Vec<i32> {
    numbers.iter().map(|n| n.parse().unwrap()).collect()
}

fn floats(numbers: &[&str]) -> Vec<f32> {
    let bits = numbers.iter().map(|n| u32::from_str_radix(n, 16).unwrap());
    bits.map(f32::from_bits).collect()
}

fn place(t: usize) -> usize {
    (29 * t + 32) % 64
}

fn next(x: f32, by: i32) -> f32 {
    f32::from_bits(x.to_bits().wrapping_add_signed(by))
}

/// Every weight that has a byte: the step's inverse, the point of 2^(b/64), and the bytes of 64 tokens.
fn every_byte() -> Vec<(f32, i32, [u8; 64])> {
    let mut bytes = Vec::new();
    for (name, sums) in table() {
        let Some(name) = name.strip_prefix("bytes ") else {
            continue;
        };
        let (m, octave) = name.split_once(' ').unwrap();
        let inverse = grid::INVERSES[m.parse::<usize>().unwrap() - 4];
        let octave: i32 = octave.parse().unwrap();
        for (i, sum) in integers(&sums).into_iter().enumerate() {
            let (least, more) = (sum / 64, sum % 64);
            // From some place on it is one more.
            let byte = |t| (least + i32::from(place(t) as i32 >= 64 - more)) as u8;
            bytes.push((inverse, octave * GRID + i as i32, std::array::from_fn(byte)));
        }
    }
    assert_eq!(bytes.len(), 4 * 16 * 64);
    bytes
}

#[test]
fn weights_of_16_bits_equal_the_exact_ones() {
    let units = integers(&table()["units -384 down"]);
    assert_eq!(units.len(), 1281);
    for (i, units) in units.into_iter().enumerate() {
        assert_eq!(weight_units(-384 - i as i32), units, "{i}");
    }
    for point in -126 * GRID - 384..-384 - 1280 {
        assert_eq!(weight_units(point), 0, "{point}");
    }
    let mantissas = floats(&table()["mantissas"]);
    assert_eq!(grid::mantissas()[..], mantissas[..]);
}

#[test]
fn bytes_equal_the_exact_ones() {
    for (inverse, point, bytes) in every_byte() {
        for octaves in [0, -40, 9] {
            let inverse = inverse * exp2i(-octaves);
            let point = point + octaves * GRID;
            for (t, byte) in bytes.into_iter().enumerate() {
                assert_eq!(
                    weight_byte(point, inverse, t),
                    byte,
                    "{inverse} {point} {t}"
                );
                assert_eq!(weight_byte(point, inverse, t + 192), byte);
            }
        }
    }
}

#[test]
fn steps_equal_the_exact_ones() {
    let table = table();
    for bits in [2, 3] {
        let steps = floats(&table[&*format!("step {bits}")]);
        let inverses = floats(&table[&*format!("inverse {bits}")]);
        for largest in SMALLEST_POINT..=11 * GRID {
            let i = largest.rem_euclid(GRID) as usize;
            let octave = largest.div_euclid(GRID);
            let expected = [steps[i] * exp2i(octave), inverses[i] * exp2i(-octave)];
            assert_eq!(weight_step(largest, bits), expected, "{largest} {bits}");
            assert_eq!(step_inverse(expected[0]), expected[1]);
        }
        let least = weight_step(-3200, bits);
        assert_ne!(weight_step(-3199 + GRID, bits), least);
        for below in [-3201, -3200 - GRID, i32::MIN] {
            assert_eq!(weight_step(below, bits), least, "{below} {bits}");
        }
    }
    assert_eq!(TO_STEP, 1.0 / 255.0);
    assert_eq!(SMALLEST_POINT, -3200);
}

#[test]
fn steps_are_rounded_up_to_few_bits() {
    for (x, bits, up) in [
        (1.0, 3, 1.0),
        (1.0001, 3, 1.25),
        (1.75, 3, 1.75),
        (1.76, 3, 2.0),
        (1.0001, 2, 1.5),
        (1.5001, 2, 2.0),
    ] {
        assert_eq!(round_up(x, bits), up, "{x}");
    }
}

#[test]
fn scales_of_v_equal_the_exact_points_and_err_by_half_of_one() {
    let points = integers(&table()["scale points"]);
    assert_eq!(points.len(), 2047);
    let half_step = (1.0f64 / 128.0).exp2();
    for bits in 1..0x7C00u16 {
        let (scale, e) = (f16::from_bits(bits), i32::from(bits >> 10).max(1));
        let units = i32::from(bits) - (e - 1) * 1024;
        let point = points[units as usize - 1] + (e - 25) * GRID;
        assert_eq!(scale_point(scale), Some(point), "{scale}");
        let read = grid_scale(scale);
        assert_eq!(read, weight(point) as f32);
        let ratio = f64::from(read) / scale.to_f64();
        assert!(ratio < half_step && ratio > 1.0 / half_step, "{scale}");
    }
    for zero in [0.0, -0.0] {
        assert_eq!(scale_point(f16::from_f32(zero)), None);
        assert_eq!(grid_scale(f16::from_f32(zero)).to_bits(), 0);
    }
}

/// A kernel's two ways to a byte, from a weight of f32 that errs as a GPU's does.
#[test]
fn f32_gives_the_exact_bytes() {
    for (inverse, point, bytes) in every_byte() {
        for error in [-1.75, -1.0, 0.0, 1.0, 1.75] {
            let x = (weight(point) * (1.0 + error * UNIT)) as f32 * inverse;
            for (t, byte) in bytes.into_iter().enumerate() {
                let sum = (x + threshold(t)).to_bits();
                assert_eq!(sum.to_be_bytes()[2], byte, "{inverse} {point} {t} {error}");
                let less_half = (place(t) as f32 + 0.375) / 64.0 - 0.5;
                let rounded = (x + less_half).round_ties_even().clamp(0.0, 255.0);
                assert_eq!(rounded, f32::from(byte), "{inverse} {point} {t} {error}");
            }
        }
    }
}

#[test]
fn the_margin_is_the_largest_error_that_no_byte_shows() {
    let shown = |error: f64| {
        every_byte().into_iter().any(|(inverse, point, bytes)| {
            let x = weight(point) * (1.0 + error) * f64::from(inverse);
            let byte = |t| (x + (place(t) as f64 + 0.375) / 64.0) as u8;
            (0..64).any(|t| byte(t) != bytes[t])
        })
    };
    assert!(!shown(MARGIN) && !shown(-MARGIN));
    assert!(shown(1.05 * MARGIN) || shown(-1.05 * MARGIN));
}

/// A carry out of byte 1 would come back as 0.
#[test]
fn no_weight_exceeds_a_byte() {
    for bits in [2, 3] {
        for largest in 0..GRID {
            let [step, inverse] = weight_step(largest, bits);
            let x = (weight(largest) * (1.0 + 1.75 * UNIT)) as f32 * inverse;
            for t in 0..64 {
                assert!(x + threshold(t) < 33024.0, "{largest} {t}");
            }
            let steps = weight(largest) / f64::from(step);
            let error = f64::from(weight_byte(largest, inverse, 0)) - steps;
            assert!(steps <= 255.0 && error.abs() < 1.0, "{largest}");
        }
    }
}

#[test]
fn thresholds_meet_runs_and_strides_evenly() {
    for stride in [1, 2, 4, 8] {
        // A flat tail below a step on every `stride`th token: its weights sum up to it.
        for point in -4 * GRID..0 {
            let tokens = (0..64).step_by(stride);
            let exact = weight(point) * tokens.len() as f64;
            let bytes = tokens.map(|t| f64::from(weight_byte(point, 1.0, t)));
            let sum: f64 = bytes.sum();
            assert!(
                (sum - exact).abs() <= 1.0,
                "{stride} {point}: {sum} {exact}"
            );
        }
    }
    let mut sums: Vec<f32> = (0..64).map(threshold).collect();
    assert!((0..64).all(|t| sums[t] == threshold(t + 64)));
    sums.sort_by(f32::total_cmp);
    for (i, sum) in sums.into_iter().enumerate() {
        assert_eq!(sum, 32768.0 + (i as f32 + 0.25) / 64.0);
    }
}

#[test]
fn scores_are_rounded_once_to_64ths_half_to_even() {
    let of = |sixty_fourths: f32| SCORE_BASE + sixty_fourths / 64.0;
    for (a, step, expected) in [
        (1.0, 1.0 / 128.0, of(0.0)),
        (3.0, 1.0 / 128.0, of(2.0)),
        (-3.0, 1.0 / 128.0, of(-2.0)),
        (5.0, 1.0 / 256.0, of(1.0)),
        (-65408.0, 1.0, grid::NEAR_START),
    ] {
        assert_eq!(grid_score(a, step, SCORE_BASE), expected, "{a} {step}");
    }
    // The product, 3/128·(1 − 2^-26), is below the tie that it would be rounded to.
    let tiny = exp2i(-13);
    let (a, step) = (3.0 * (1.0 + tiny), (1.0 - tiny) / 128.0);
    assert_eq!(a * step, 3.0 / 128.0);
    assert_eq!(grid_score(a, step, SCORE_BASE), of(1.0));
}

#[test]
fn the_grid_ends_at_its_ends() {
    for (top, near) in [
        (131_200.0, true),
        (next(131_200.0, -1), false),
        (next(262_144.0, -1), true),
        (262_144.0, false),
        (196_608.0, true),
        (-196_608.0, false),
        (f32::INFINITY, false),
        (f32::NEG_INFINITY, false),
    ] {
        assert_eq!(is_near(top), near, "{top}");
    }
    // The step of f32 is a 64th in between.
    assert_eq!(next(131_200.0, 1) - 131_200.0, 1.0 / GRID as f32);
    assert_eq!(262_144.0 - next(262_144.0, -1), 1.0 / GRID as f32);
}

#[test]
fn an_exponent_is_the_largest_score_rounded_up() {
    for integer in [131_200.0, SCORE_BASE - 1.0, SCORE_BASE, SCORE_BASE + 7.0] {
        assert_eq!(grid_ceil(integer), integer);
        assert_eq!(grid_ceil(next(integer, 1)), integer + 1.0);
        assert_eq!(grid_ceil(next(integer, 63)), integer + 1.0);
    }
    assert_eq!(grid_ceil(next(262_144.0, -1)), 262_144.0);
}

#[test]
fn points_count_from_64ths_below_the_exponent_down_to_weights_that_count_nothing() {
    let ceil = SCORE_BASE + 2.0;
    for below in [0, 1, 63, 64, 1000, 120 * GRID - 1, 120 * GRID] {
        assert_eq!(weight_point(next(ceil, -below), ceil), -384 - below);
    }
    let lowest = -384 - 120 * GRID;
    for far in [120 * GRID + 1, 121 * GRID, 65536] {
        assert_eq!(weight_point(next(ceil, -far), ceil), lowest);
    }
    for off_grid in [131_071.99, 0.3, -5e9, f32::MIN] {
        assert_eq!(weight_point(off_grid, ceil), lowest);
    }
    // Beside V's largest scale and the smallest step.
    let [_, inverse] = weight_step(i32::MIN, 3);
    let largest_scale = scale_point(f16::MAX).unwrap();
    assert_eq!(weight_units(lowest), 0);
    assert!((0..64).all(|t| weight_byte(lowest + largest_scale, inverse, t) == 0));
}
