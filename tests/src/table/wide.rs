//! Cases of heads wider than 256 dims, of keys and values of unlike widths, and of the 128 query heads over one KV head that latents have.

use attn_core::{Arithmetic, HeadDim, KvFormat};

use super::{Table, each_sink, formats};
use crate::case::{Build, Case, Inputs};

/// Keys and values as models have them: Gemma 4 (512), MiMo-V2 and expanded latents (192/128), latents (576/512, 320/256), Zamba2 (160); and keys that are the
/// narrower ones.
const DIMS: [(usize, usize); 8] = [
    (512, 512),
    (192, 128),
    (576, 512),
    (320, 256),
    (160, 160),
    (128, 192),
    (80, 64),
    (64, 320),
];

fn of(heads: [usize; 2], dim: (usize, usize), kv_lens: &[usize], format: KvFormat) -> Option<Case> {
    let dim = HeadDim::from(dim);
    format
        .check(dim)
        .is_ok()
        .then(|| Case::new(heads, dim, kv_lens, format))
}

/// One case of each width and preset, and one of floats; and of centres of 4 bits with a window where a software adapter takes less than two minutes for the shader.
pub(super) fn few(table: &mut Table) {
    for dim in DIMS {
        let presets = [
            "int8",
            "int8-latents",
            "bf16-latents",
            "fp8-latents",
            "int8-tensor",
            "int4",
            "int8/int4",
            "bf16",
        ];
        for format in formats(&presets) {
            preset(table, dim, format);
        }
        if dim.0 < 512 {
            preset(table, dim, windowed());
        }
    }
    rotary(table, KvFormat::INT8_LATENTS);
    if let Some(mut case) = of([4, 2], (192, 128), &[0, 1, 70], formats(&["int8-plain"])[0]) {
        case.build = Build::Bsnh;
        table.add(case);
    }
}

fn windowed() -> KvFormat {
    formats(&["int4-r2-w4"])[0]
}

fn preset(table: &mut Table, dim: (usize, usize), format: KvFormat) {
    let Some(mut case) = of([4, 2], dim, &[70, 0, 300], format) else {
        return;
    };
    case.problem.q_lens = vec![2; 3];
    case.build = Build::Shuffled;
    case.centres = format.check_centres().is_ok();
    table.add(case);
}

/// All kinds of rows, pages, lengths and modifiers.
pub(super) fn all(table: &mut Table) {
    few(table);
    for dim in DIMS {
        if dim.0 >= 512 {
            preset(table, dim, windowed());
        }
    }
    let all = [
        "int8",
        "int4",
        "int8/int4",
        "int4/int8",
        "int8-plain",
        "int8-latents",
        "int8-plain-latents",
        "bf16-latents",
        "f16-latents",
        "fp8-latents",
        "int8-g32",
        "int8-tensor",
        "int4-g1",
        "int4-g2/int8-g32",
        "int4-r2",
        "f16",
        "bf16",
        "fp8",
        "bf16/int8",
    ];
    for format in formats(&all) {
        for dim in DIMS {
            shapes(table, dim, format);
        }
    }
    for format in formats(&[
        "int8",
        "int8-latents",
        "int4",
        "bf16",
        "bf16-latents",
        "fp8-latents",
    ]) {
        for dim in DIMS {
            modified(table, dim, format);
        }
        many_heads(table, format);
    }
    for format in formats(&["int8-latents", "int8-plain-latents"]) {
        rotary(table, format);
    }
    for format in formats(&["int8-plain", "int8-g32", "int8-tensor", "bf16", "f16/fp8"]) {
        for build in [Build::Bnsh, Build::Bsnh] {
            for dim in [(192, 128), (512, 512), (128, 64)] {
                if let Some(mut case) = of([6, 2], dim, &[0, 1, 65, 300], format) {
                    case.build = build;
                    case.problem.q_lens = vec![2; 4];
                    table.add(case);
                }
            }
        }
    }
}

/// Decoded in a batch and, but for forks, alone, with pages of every size in turn.
fn shapes(table: &mut Table, dim: (usize, usize), format: KvFormat) {
    let Some(mut case) = of([3, 1], dim, &[65, 300, 1], format) else {
        return;
    };
    case.page_size = [16, 32, 64, 128][table.cases.len() % 4];
    case.build = [Build::Chunks, Build::Forked, Build::TakenBack][table.cases.len() % 3];
    // Alone, a fork would have no tokens of its sibling.
    case.alone = case.build != Build::Forked;
    table.add(case);
}

/// Windows, soft cap, slopes and sinks, over centres where the format has them, in prompts and in steps of one token; and sequences of several spans.
fn modified(table: &mut Table, dim: (usize, usize), format: KvFormat) {
    let Some(mut case) = of([4, 2], dim, &[300, 40, 0, 129], format) else {
        return;
    };
    case.centres = format.check_centres().is_ok();
    if case.centres {
        case.inputs = Inputs::Biased;
    }
    case.problem.q_lens = vec![70, 1, 0, 33];
    case.problem.scores.window_left = Some(100);
    case.problem.scores.softmax_scale = Some(0.02);
    case.problem.scores.sinks = each_sink(4);
    table.add(case.clone());
    case.problem.scores.window_left = None;
    case.problem.scores.softcap = Some(30.0);
    case.problem.scores.alibi_slopes = Some(vec![0.5, -0.25, 0.0, 0.125]);
    table.add(case);
    for (heads, kv_lens, q_len) in [
        ([8, 1], &[2500, 70][..], 1),
        ([24, 1], &[1100][..], 1),
        ([16, 1], &[600, 5][..], 3),
    ] {
        if let Some(mut case) = of(heads, dim, kv_lens, format) {
            case.problem.q_lens = vec![q_len; kv_lens.len()];
            case.build = Build::AtOnce;
            table.add(case);
        }
    }
}

/// Latents whose rotary keys are far larger than what V has, in decode steps of few and of many rows, in drafts and in a prompt.
fn rotary(table: &mut Table, format: KvFormat) {
    for (heads, dim, kv_lens, q_len) in [
        ([128, 1], (576, 512), &[300, 70][..], 1),
        ([16, 1], (576, 512), &[1100, 5][..], 1),
        ([5, 1], (320, 256), &[300, 64][..], 3),
        ([20, 2], (192, 128), &[200][..], 40),
    ] {
        if let Some(mut case) = of(heads, dim, kv_lens, format) {
            case.problem.q_lens = vec![q_len; kv_lens.len()];
            case.build = Build::AtOnce;
            case.inputs = Inputs::Rotary;
            table.add(case);
        }
    }
}

/// As many query heads over one KV head as latents have, and a number that no power of two divides.
fn many_heads(table: &mut Table, format: KvFormat) {
    for (heads, dim, kv_lens, q_len) in [
        ([128, 1], (576, 512), &[300, 70][..], 1),
        ([128, 1], (128, 128), &[1100][..], 2),
        ([71, 1], (64, 64), &[300, 5][..], 1),
        ([142, 2], (80, 64), &[130][..], 1),
    ] {
        if let Some(mut case) = of(heads, dim, kv_lens, format) {
            case.problem.q_lens = vec![q_len; kv_lens.len()];
            case.build = Build::AtOnce;
            table.add(case);
        }
    }
}

/// Prompts of unlike widths whose tokens so many rows read that a GPU writes them as floats first, with the codes of residuals and without.
pub(super) fn written_as_floats(table: &mut Table, all: &[(&str, (usize, usize), usize)]) {
    for &(name, dim, heads) in all {
        let Some(mut case) = of([heads, 1], dim, &[130, 70], formats(&[name])[0]) else {
            continue;
        };
        case.problem.q_lens = vec![66, 70];
        case.problem.scores.arithmetic = Arithmetic::Fast;
        case.build = Build::AtOnce;
        table.add(case);
    }
}
