//! Cases of what a sequence keeps for good and what it lets go: residuals of the first tile, tokens that were taken back, pages before a window.

use super::{Table, each_sink, formats};
use crate::case::{Build, Case};

/// Sequences whose tokens were taken back to the first tile, in a page of which it is a part and in several pages.
pub(super) fn taken_back(table: &mut Table) {
    for (format, page_size) in formats(&["int4", "int8/int4"]).into_iter().zip([16, 128]) {
        let mut case = Case::new([4, 2], 64, &[400, 70], format);
        case.problem.q_lens = vec![2; case.problem.batch()];
        (case.build, case.page_size) = (Build::TakenBack, page_size);
        table.add(case);
    }
}

/// The first tile, read with residuals far from its rows: on pages of every size, by few rows and by prompts' ones, where it has most of the weight, where its
/// residuals were written twice, and behind windows that hide it or a part of it.
pub(super) fn first_tiles(table: &mut Table) {
    for format in formats(&["int4", "int8/int4", "int4-w4/int4", "int4-r2/int4-w0"]) {
        for page_size in [16, 32, 64, 128] {
            let mut case = Case::new([4, 2], 64, &[700, 65, 1300, 41], format);
            case.problem.q_lens = vec![1, 3, 140, 0];
            (case.build, case.page_size) = (Build::TakenBack, page_size);
            table.add(case.clone());
            case.problem.q_lens = vec![1; 4];
            case.problem.scores.alibi_slopes = Some(vec![-0.25; 4]);
            table.add(case);
            let mut case = Case::new([4, 1], 128, &[2100, 330], format);
            case.problem.q_lens = vec![2; 2];
            (case.build, case.page_size, case.alone) = (Build::Shuffled, page_size, true);
            for window in [2060, 300] {
                case.problem.scores.window_left = Some(window);
                table.add(case.clone());
            }
        }
    }
}

/// Pages before every window are gone: of every kernel's rows, of windows inside a page and of whole spans, inside the residuals and before them.
pub(super) fn dropped(table: &mut Table) {
    let of = |heads, dim, kv_lens: &[usize], q_lens: &[usize], window, format| {
        let mut case = Case::new(heads, dim, kv_lens, format);
        case.problem.q_lens = q_lens.to_vec();
        case.problem.scores.window_left = Some(window);
        case.build = Build::Dropped;
        case
    };
    for format in formats(&[
        "int8",
        "int4",
        "int4-g4",
        "int8/int4",
        "int4-w4/int8",
        "f16",
        "bf16",
        "fp8",
    ]) {
        for page_size in [16, 64, 128] {
            let lens = [66, 129, 193, 260, 330, 514, 1027];
            let mut case = of([4, 2], 64, &lens, &[3; 7], 70, format);
            case.page_size = page_size;
            table.add(case);
        }
        // Sequences that end with their page, and one without query tokens, of which nothing is left.
        table.add(of(
            [8, 2],
            128,
            &[64, 65, 192, 300],
            &[1, 1, 1, 0],
            0,
            format,
        ));
        let mut case = of(
            [4, 2],
            64,
            &[300, 170, 200, 450],
            &[5, 2, 1, 70],
            60,
            format,
        );
        case.problem.scores.causal = false;
        case.problem.scores.sinks = each_sink(4);
        table.add(case);
        table.add(of([8, 1], 64, &[2500, 700], &[2, 1], 100, format));
        let prompts = [400, 250, 3, 300, 200];
        table.add(of([12, 1], 64, &prompts, &[65, 20, 3, 127, 1], 50, format));
    }
}
