//! What a device may be tuned with changes speed, never bits; and the law's functions hold on the adapter that is here.

mod common;

use attn_conformance::{Build, Outcome, Size, check_case, table};
use attn_core::KvFormat;
use attn_cpu::Reference;
use attn_wgpu::{Products, Tuning};

#[test]
fn the_laws_functions_have_the_cpus_bits() {
    let Some(backend) = common::open_or_skip() else {
        return;
    };
    for check in backend.check_law().unwrap() {
        println!("{check}");
        assert!(!check.relied_on || check.differing == 0, "{check}");
    }
}

#[test]
fn tunings_change_no_bits() {
    let Some(backend) = common::open_or_skip() else {
        return;
    };
    let plain = Tuning::default();
    let mut ahead = plain;
    (ahead.ahead, ahead.together) = (Some([true; 2]), Some(2));
    let mut four = plain;
    (four.together, four.ahead) = (Some(4), Some([false, true]));
    let mut subgroups = plain;
    (subgroups.subgroups, subgroups.rows, subgroups.ahead) =
        (Some(true), Some(2), Some([true, false]));
    for tuning in [ahead, four, subgroups] {
        let tuned = backend.tuned(tuning);
        // Cases of int8, int4 and int4-g4 with several query tokens, and one over several segments.
        for case in table(Size::Reduced)
            .iter()
            .filter(|case| [2, 5, 8, 12, 30].contains(&case.seed))
        {
            if let Outcome::Failed(text) = check_case(&Reference::new(), &tuned, case) {
                panic!("{tuning:?}: {text}");
            }
        }
    }
}

/// The kernel on cooperative matrices computes what the law says wherever its parts lie: its operations in plain WGSL, on any adapter.
#[test]
fn matrices_spelled_out_have_the_references_bits() {
    let Some(backend) = common::open_or_skip() else {
        return;
    };
    let mut tuning = Tuning::default();
    tuning.products = Some(Products::SpelledOut);
    let mut wide = tuning;
    (wide.units, wide.segments) = (Some(4), Some(1));
    let mut ran = 0;
    for case in table(Size::Full) {
        let dim = case.problem.head_dim;
        let KvFormat { k, v } = case.format;
        let taken = case.format.is_integer() && k.groups(dim) == 1 && v.groups(dim) == 1;
        // Views have another kernel. The rest, in parts, as each compiles for a second or two.
        if !taken || dim > 128 || matches!(case.build, Build::Bnsh | Build::Bsnh) {
            continue;
        }
        for (tuning, each) in [(tuning, 11), (wide, 37)] {
            if ran % each == 0
                && let Outcome::Failed(text) =
                    check_case(&Reference::new(), &backend.tuned(tuning), &case)
            {
                panic!("{tuning:?}: {text}");
            }
        }
        ran += 1;
    }
    assert!(ran > 100, "{ran}");
}
