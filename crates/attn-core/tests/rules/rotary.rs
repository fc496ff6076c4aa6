//! Rotary positions: tables against the formulas of transformers' `modeling_rope_utils.py`, written down here once more; bits of the rotation.

use std::f64::consts::PI;

use attn_core::{Error, Rotary, RotaryScaling, RotaryStyle, RotaryTable};
use half::{bf16, f16};

fn near(got: f64, want: f64, tolerance: f64, what: &str) {
    let error = (got - want).abs();
    assert!(error <= tolerance, "{what}: {got} for {want}");
}

fn plain(dim: usize, base: f64) -> Vec<f64> {
    let exponents = (0..dim).step_by(2).map(|i| i as f64 / dim as f64);
    exponents.map(|e| 1.0 / base.powf(e)).collect()
}

/// Frequencies to a rounding of f32, cosines and sines to what the f32 angle allows.
fn compare(dim: usize, base: f64, scaling: &RotaryScaling, want: &[f64], factor: f64) {
    let rotary = Rotary::new(dim, base, scaling).unwrap();
    assert_eq!((rotary.rotary_dim(), want.len()), (dim, dim / 2));
    for (i, (got, want)) in rotary.frequencies().iter().zip(want).enumerate() {
        let what = format!("{scaling:?}, pair {i}");
        near(f64::from(*got), *want, 1e-7 * want, &what);
    }
    near(
        f64::from(rotary.attention_factor()),
        factor,
        1e-7 * factor,
        "the attention factor",
    );
    let table = rotary.table(0..5000).unwrap();
    assert_eq!((table.len(), table.cos_sin().len()), (5000, 5000 * dim));
    for position in [0, 1, 17, 4095, 4999] {
        let row = &table.cos_sin()[position * dim..][..dim];
        for (i, frequency) in want.iter().enumerate() {
            let angle = position as f64 * frequency;
            let what = format!("{scaling:?}, position {position}, pair {i}");
            let tolerance = factor * (2e-7 + 1.3e-7 * angle);
            near(f64::from(row[i]), factor * angle.cos(), tolerance, &what);
            let sine = f64::from(row[i + dim / 2]);
            near(sine, factor * angle.sin(), tolerance, &what);
        }
    }
}

#[test]
fn frequencies_without_scaling_and_divided_ones() {
    for (dim, base) in [(64, 1e4), (128, 5e5), (20, 1e4), (2, 1e6)] {
        let frequencies = plain(dim, base);
        compare(dim, base, &RotaryScaling::None, &frequencies, 1.0);
        let divided: Vec<f64> = frequencies.iter().map(|f| f / 4.0).collect();
        let linear = RotaryScaling::Linear { factor: 4.0 };
        compare(dim, base, &linear, &divided, 1.0);
        let factors: Vec<f64> = (0..dim / 2).map(|i| 1.0 + i as f64).collect();
        let pairs = frequencies.iter().zip(&factors);
        let divided: Vec<f64> = pairs.map(|(f, factor)| f / factor).collect();
        let own = RotaryScaling::Factors {
            factors,
            attention_factor: 1.19,
        };
        compare(dim, base, &own, &divided, 1.19);
    }
}

#[test]
fn llama3_keeps_short_waves_divides_long_ones_and_mixes_between() {
    let (factor, low, high, old) = (8.0, 1.0, 4.0, 8192.0);
    let mut kinds = [0; 3];
    let of = |frequency: &f64| {
        let wavelen = 2.0 * PI / frequency;
        if wavelen < old / high {
            kinds[0] += 1;
            return *frequency;
        }
        if wavelen > old / low {
            kinds[1] += 1;
            return frequency / factor;
        }
        kinds[2] += 1;
        let smooth = (old / wavelen - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    };
    let want: Vec<f64> = plain(128, 5e5).iter().map(of).collect();
    assert!(kinds.iter().all(|count| *count > 3), "{kinds:?}");
    let scaling = RotaryScaling::Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_context: old,
    };
    compare(128, 5e5, &scaling, &want, 1.0);
}

/// `_compute_yarn_parameters`.
fn yarn(dim: usize, base: f64, factor: f64, original: f64, truncate: bool) -> Vec<f64> {
    let correction =
        |rotations: f64| dim as f64 * (original / (rotations * 2.0 * PI)).ln() / (2.0 * base.ln());
    let (mut low, mut high) = (correction(32.0), correction(1.0));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    let of = |(i, f): (usize, &f64)| {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        f / factor * ramp + f * (1.0 - ramp)
    };
    plain(dim, base).iter().enumerate().map(of).collect()
}

#[test]
fn yarn_ramps_from_kept_to_divided_and_scales_cosines() {
    let scaling = |factor, original_context, truncate, attention_factor| RotaryScaling::Yarn {
        factor,
        original_context,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate,
        attention_factor,
    };
    for (dim, base, factor, original) in [
        (128, 1e6, 4.0, 32768.0),
        (64, 150_000.0, 32.0, 4096.0),
        // A ramp without length.
        (64, 1e4, 2.0, 6.0),
    ] {
        for truncate in [false, true] {
            let want = yarn(dim, base, factor, original, truncate);
            let by_default = 0.1 * f64::ln(factor) + 1.0;
            compare(
                dim,
                base,
                &scaling(factor, original, truncate, None),
                &want,
                by_default,
            );
            let given = scaling(factor, original, truncate, Some(0.75));
            compare(dim, base, &given, &want, 0.75);
        }
    }
    let (whole, cut) = (
        yarn(64, 150_000.0, 32.0, 4096.0, true),
        yarn(64, 150_000.0, 32.0, 4096.0, false),
    );
    assert_ne!(whole, cut);
    let none = scaling(1.0, 4096.0, true, None);
    compare(64, 1e4, &none, &plain(64, 1e4), 1.0);
}

#[test]
fn yarn_ends_its_ramp_at_the_last_dim_where_slow_waves_would_lie_beyond() {
    let scaling = RotaryScaling::Yarn {
        factor: 4.0,
        original_context: 4096.0,
        beta_fast: 2000.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: Some(1.0),
    };
    // 4096 / 2π·2000 is less than a turn, so that the ramp begins at pair 0; one turn would be pair 11.3 of 8 dims.
    let mixed = |(i, plain): (usize, f64)| {
        let divided = i as f64 / 7.0;
        plain / 4.0 * divided + plain * (1.0 - divided)
    };
    let want: Vec<f64> = plain(8, 10.0).into_iter().enumerate().map(mixed).collect();
    compare(8, 10.0, &scaling, &want, 1.0);
}

#[test]
fn the_longest_row_and_a_base_below_one_are_taken() {
    let rotary = Rotary::new(256, 0.5, &RotaryScaling::None).unwrap();
    let got = f64::from(rotary.frequencies()[127]);
    near(got, 2f64.powf(254.0 / 256.0), 2e-7, "the last frequency");
}

/// Products and sums of f32 through f64, whose product of two f32 is exact.
fn rotated(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    let product = |x: f32, y: f32| (f64::from(x) * f64::from(y)) as f32;
    (
        product(a, cos) - product(b, sin),
        product(b, cos) + product(a, sin),
    )
}

#[test]
fn both_styles_round_products_then_sums_and_leave_the_rest() {
    let (heads, head_dim) = (3, 80);
    for style in [RotaryStyle::HalfSplit, RotaryStyle::Interleaved] {
        for dim in [80, 64, 20, 2] {
            let rotary = Rotary::new(dim, 1e4, &RotaryScaling::None).unwrap();
            let table = rotary.table([0, 7, 31].into_iter()).unwrap();
            let row = &table.cos_sin()[dim..2 * dim];
            let x: Vec<f32> = (0..heads * head_dim)
                .map(|i| ((i * i + 3 * i) as f32 * 0.37).sin() * 3.0)
                .collect();
            let mut got = x.clone();
            table.rotate(style, &mut got, head_dim, 1).unwrap();
            let mut want = x.clone();
            for head in 0..heads {
                for i in 0..dim / 2 {
                    let (a, b) = match style {
                        RotaryStyle::HalfSplit => (i, i + dim / 2),
                        RotaryStyle::Interleaved => (2 * i, 2 * i + 1),
                    };
                    let (a, b) = (head * head_dim + a, head * head_dim + b);
                    (want[a], want[b]) = rotated(x[a], x[b], row[i], row[i + dim / 2]);
                }
            }
            assert_eq!(got, want, "{style:?}, {dim} of {head_dim}");
            // Position 0 turns nothing.
            let mut still = x.clone();
            table.rotate(style, &mut still, head_dim, 0).unwrap();
            assert_eq!(still, x);
        }
    }
}

#[test]
fn rows_are_those_of_the_positions_given_and_tables_are_widened() {
    let rotary = Rotary::new(8, 1e4, &RotaryScaling::None).unwrap();
    let whole = rotary.table(0..100).unwrap();
    let some = rotary.table([99, 3].into_iter()).unwrap();
    assert_eq!(some.cos_sin()[..8], whole.cos_sin()[99 * 8..]);
    assert_eq!(some.cos_sin()[8..], whole.cos_sin()[3 * 8..4 * 8]);
    assert_eq!(
        RotaryTable::from_cos_sin(8, whole.cos_sin()).unwrap(),
        whole
    );
    let narrow: Vec<bf16> = whole.cos_sin().iter().map(|x| bf16::from_f32(*x)).collect();
    let widened: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
    let table = RotaryTable::from_cos_sin(8, &narrow).unwrap();
    assert_eq!((table.cos_sin(), table.rotary_dim()), (&widened[..], 8));
    assert!(
        !table.is_empty()
            && RotaryTable::from_cos_sin(8, &[0.0f32; 0])
                .unwrap()
                .is_empty()
    );
}

#[test]
fn what_gives_no_rotation_is_refused() {
    let none = RotaryScaling::None;
    let parameter = |error: Error, word: &str| {
        let said = error.to_string();
        assert!(said.contains(word), "{said}");
    };
    for dim in [0, 63, 578, usize::MAX] {
        parameter(Rotary::new(dim, 1e4, &none).unwrap_err(), "rotary_dim");
        parameter(
            RotaryTable::from_cos_sin(dim, &[1.0f32]).unwrap_err(),
            "rotary_dim",
        );
    }
    for base in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        parameter(Rotary::new(64, base, &none).unwrap_err(), "the rotary base");
    }
    let divided = RotaryScaling::Linear { factor: 0.0 };
    parameter(Rotary::new(64, 1e4, &divided).unwrap_err(), "frequency");
    let short = RotaryScaling::Factors {
        factors: vec![1.0; 31],
        attention_factor: 1.0,
    };
    parameter(
        Rotary::new(64, 1e4, &short).unwrap_err(),
        "32 elements, not 31",
    );
    let rotary = Rotary::new(64, 1e4, &none).unwrap();
    let huge = rotary.table(0..usize::MAX).unwrap_err();
    assert!(matches!(huge, Error::OutOfMemory { .. }), "{huge}");
    parameter(
        RotaryTable::from_cos_sin(4, &[f16::ONE; 6]).unwrap_err(),
        "must have 8 elements",
    );
    parameter(
        RotaryTable::from_cos_sin(2, &[0.0, f32::NAN]).unwrap_err(),
        "cos_sin is NaN at index 1",
    );
    let table = rotary.table(0..4).unwrap();
    let mut x = [1.0; 128];
    let mut rotate = |head_dim, len: usize, position| {
        let style = RotaryStyle::HalfSplit;
        let refused = table.rotate(style, &mut x[..len], head_dim, position);
        (refused.unwrap_err(), x)
    };
    for (head_dim, len, position, word) in [
        (48, 96, 0, "head_dim"),
        (0, 96, 0, "head_dim"),
        (64, 96, 0, "must have 128 elements"),
        (64, 128, 4, "position is 4"),
        (64, 128, usize::MAX, "position"),
    ] {
        let (refused, x) = rotate(head_dim, len, position);
        parameter(refused, word);
        assert_eq!(x, [1.0; 128]);
    }
}

#[test]
fn yarn_that_does_not_stretch_leaves_cosines_and_sines_as_they_are() {
    for (factor, attention_factor) in [
        (0.25, 1.0),
        (0.999, 1.0),
        (1.0, 1.0),
        (2.0, 0.1 * 2f64.ln() + 1.0),
    ] {
        let scaling = RotaryScaling::Yarn {
            factor,
            original_context: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: None,
        };
        let rotary = Rotary::new(64, 1e4, &scaling).unwrap();
        assert_eq!(
            rotary.attention_factor(),
            attention_factor as f32,
            "{factor}"
        );
    }
}
