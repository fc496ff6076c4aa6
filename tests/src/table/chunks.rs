//! Cases of chunked attention: a query token sees its own chunk alone.

use super::{Table, each_sink, formats};
use crate::case::{Build, Case};

/// A step of one token, and one of several that lie in two chunks.
pub(super) fn few(table: &mut Table) {
    for format in formats(&["int8", "int4", "bf16"]) {
        for (chunk, q_len) in [(128, 1), (100, 7)] {
            let mut case = Case::new([4, 2], 64, &[300, 64, 0, 129], format);
            case.problem.scores.chunk = Some(chunk);
            case.problem.q_lens = vec![q_len; 4];
            case.build = Build::Shuffled;
            table.add(case);
        }
    }
}

/// Chunks of every size beside tiles, segments and spans, and beside what else changes scores.
pub(super) fn all(table: &mut Table) {
    few(table);
    for format in formats(&["int8", "int8/int4", "int4", "int4-g1", "fp8", "bf16"]) {
        for (chunk, kv_lens, q_len) in [
            (1, &[70, 3][..], 3),
            (63, &[300, 126, 127], 2),
            (64, &[300, 64, 65], 20),
            (1024, &[2500, 1024, 1025], 1),
            (1000, &[2100, 30], 40),
            (8192, &[300], 2),
        ] {
            let mut case = Case::new([8, 1], 128, kv_lens, format);
            case.problem.scores.chunk = Some(chunk);
            case.problem.q_lens = vec![q_len; kv_lens.len()];
            case.centres = format.check_centres().is_ok();
            case.alone = q_len > 1;
            table.add(case);
        }
        let mut case = Case::new([6, 2], 64, &[300, 40, 129], format);
        case.problem.scores.chunk = Some(96);
        case.problem.scores.window_left = Some(40);
        case.problem.scores.softcap = Some(30.0);
        case.problem.scores.sinks = each_sink(6);
        case.problem.q_lens = vec![70, 3, 1];
        table.add(case);
    }
}
