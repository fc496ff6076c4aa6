//! Cases of caches that take centres off their keys.

use attn_core::KvFormat;

use super::{Table, formats};
use crate::case::{Build, Case, Inputs};

const FORMATS: [&str; 3] = ["int8", "int8/int4", "int4"];

fn of(heads: [usize; 2], dim: usize, kv_lens: &[usize], format: KvFormat) -> Case {
    Case {
        centres: true,
        inputs: Inputs::Biased,
        ..Case::new(heads, dim, kv_lens, format)
    }
}

/// A sequence that ends in its first tile, one that ends with it, and longer ones: decoded, verified, as prompts, forked, and taken back and gone on with.
pub(super) fn few(table: &mut Table) {
    for format in formats(&FORMATS) {
        let mut case = of([4, 2], 64, &[5, 64, 65, 300], format);
        case.alone = true;
        table.add(case.clone());
        case.problem.q_lens = vec![3, 20, 1, 70];
        case.build = Build::Shuffled;
        table.add(case.clone());
        (case.build, case.page_size) = (Build::TakenBack, 16);
        table.add(case);
        let mut case = of([3, 1], 128, &[70, 140], format);
        (case.build, case.problem.q_lens) = (Build::Forked, vec![2; 2]);
        table.add(case);
        modified(table, format);
    }
}

/// Soft cap, slopes, sinks and windows, which need the scores of the keys themselves; and scores that leave the grid, with and without them.
fn modified(table: &mut Table, format: KvFormat) {
    let mut case = of([4, 2], 64, &[300, 40, 129], format);
    case.problem.q_lens = vec![2; 3];
    case.problem.scores.softmax_scale = Some(0.01);
    case.problem.scores.sinks = Some(vec![0.5, -2.0, 6.0, 90.0]);
    table.add(case.clone());
    case.problem.scores.softcap = Some(30.0);
    table.add(case.clone());
    case.problem.scores.softcap = None;
    case.problem.scores.alibi_slopes = Some(vec![0.5, -0.25, 0.0, 0.125]);
    case.problem.scores.window_left = Some(100);
    table.add(case.clone());
    for (softmax_scale, slopes) in [(10.0, None), (25.0, Some(100.0)), (60.0, Some(0.5))] {
        let mut case = of([4, 2], 64, &[1, 70, 300], format);
        case.problem.scores.softmax_scale = Some(softmax_scale);
        case.problem.scores.alibi_slopes = slopes.map(|slope| vec![0.5, slope, 0.125, 0.0]);
        case.problem.q_lens = vec![3; 3];
        table.add(case);
    }
}

/// All kinds of rows and pages.
pub(super) fn all(table: &mut Table) {
    few(table);
    for format in formats(&[
        "int8",
        "int8/int4",
        "int4",
        "int4-w4/int8",
        "int4-r2/int4-w0",
    ]) {
        for (page_size, build) in [
            (16, Build::TakenBack),
            (32, Build::OneByOne),
            (64, Build::TakenBack),
            (128, Build::Shuffled),
        ] {
            let mut case = of([4, 2], 64, &[700, 63, 1300, 66], format);
            (case.build, case.page_size) = (build, page_size);
            table.add(case.clone());
            // One by one, residuals of that many query tokens are not kept.
            case.problem.q_lens = match build {
                Build::OneByOne => vec![1, 3, 70, 0],
                _ => vec![1, 3, 140, 0],
            };
            table.add(case);
        }
        for dim in [96, 192, 256] {
            let mut case = of([8, 1], dim, &[400, 64, 0, 1030], format);
            (case.problem.q_lens, case.build) = (vec![90, 2, 0, 17], Build::AtOnce);
            table.add(case);
        }
        let mut case = of([16, 1], 128, &[2100, 330], format);
        case.problem.q_lens = vec![2; 2];
        case.problem.scores.window_left = Some(300);
        (case.build, case.alone) = (Build::Shuffled, true);
        table.add(case.clone());
        case.problem.scores.window_left = Some(50);
        (case.build, case.alone) = (Build::Dropped, false);
        table.add(case);
    }
    for format in formats(&["int8", "int4"]) {
        let of = || of([4, 2], 64, &[70, 9, 200], format);
        for inputs in [Inputs::Zeros, Inputs::Tiny, Inputs::Huge, Inputs::Extreme] {
            table.add(Case { inputs, ..of() });
        }
        let build = Build::Reused;
        table.add(Case { build, ..of() });
        let mut case = Case::new([8, 2], 80, &[130, 64, 300], format);
        (case.centres, case.problem.q_lens) = (true, vec![70, 1, 3]);
        table.add(case);
    }
}
