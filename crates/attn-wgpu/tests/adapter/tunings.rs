//! What a device may be tuned with changes speed, never bits; and the scalar functions have the CPU's bits on this adapter.

use attn_conformance::{Outcome, Size, check_case, table, trials::Trials};
use attn_cpu::Reference;
use attn_wgpu::{Tuning, WgpuBackend};

fn the_scalar_functions_have_the_cpus_bits(backend: &WgpuBackend) {
    for check in backend.check_arithmetic().unwrap() {
        println!("{check}");
        assert!(!check.relied_on || check.differing == 0, "{check}");
    }
}

fn tunings_change_no_bits(backend: &WgpuBackend) {
    let plain = Tuning::default();
    let mut by_tiles = plain;
    (by_tiles.by_tiles, by_tiles.rows) = (Some(true), Some(8));
    let mut by_segments = plain;
    (by_segments.by_tiles, by_segments.rows) = (Some(false), Some(4));
    for tuning in [by_tiles, by_segments] {
        let tuned = backend.tuned(tuning);
        // Cases of int8, int4, int4-g4 and int8/int4 with several query tokens, and one over several segments.
        for case in table(Size::Reduced)
            .iter()
            .filter(|case| [2, 5, 8, 12, 33].contains(&case.seed))
        {
            if let Outcome::Failed(text) = check_case(&Reference::new(), &tuned, case) {
                panic!("{tuning:?}: {text}");
            }
        }
    }
}

/// Adds the tests of this file.
pub fn add(trials: Trials<WgpuBackend>) -> Trials<WgpuBackend> {
    trials
        .test(
            "tunings: the scalar functions have the cpus bits",
            the_scalar_functions_have_the_cpus_bits,
        )
        .test("tunings: tunings change no bits", tunings_change_no_bits)
}
