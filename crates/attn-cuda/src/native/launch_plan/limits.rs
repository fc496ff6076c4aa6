//! How much work kernels can add up and count.

use attn_core::{Problem, arithmetic};
use attn_kernels::cuda::KernelConfig;

/// The most work of a launch, in half tiles: kernels add it up in 32 bits, and divide sums of less than 2^31.
pub(super) const MOST_WORK: u64 = 1 << 30;

/// The work that kernels add up in order to split it: `cost_of_item` of `attend/split_kv/work.cuh` for each KV head and row block of every sequence.
pub(super) fn work(
    problem: &Problem,
    config: KernelConfig,
    kv_lens: impl Iterator<Item = usize>,
) -> u64 {
    let rows = problem.heads_per_kv() * problem.max_q_len();
    let row_blocks = rows.div_ceil(config.rows());
    let item = |kv_len: usize| {
        let tiles = kv_len.div_ceil(arithmetic::TILE).max(1);
        let segments = tiles.div_ceil(arithmetic::SEGMENT);
        (2 * tiles + segments + 32) as u64
    };
    let items = kv_lens.fold(0u64, |sum, kv_len| sum.saturating_add(item(kv_len)));
    items
        .saturating_mul(problem.num_kv_heads as u64)
        .saturating_mul(row_blocks as u64)
}

/// A text that names what is too much, and one for what is allowed.
pub(super) type TooMuch = (String, String);

pub(super) fn check_work(problem: &Problem, work: u64) -> Result<(), TooMuch> {
    if work <= MOST_WORK {
        return Ok(());
    }
    let given = format!(
        "work of {work} half tiles ({} sequences, {} KV heads)",
        problem.batch(),
        problem.num_kv_heads
    );
    Err((
        given,
        format!("up to {MOST_WORK}: fewer or shorter sequences at once"),
    ))
}

/// Refuses numbers that kernels cannot count to.
pub(super) fn check_counts(problem: &Problem) -> Result<(), TooMuch> {
    let counts = [
        ("sequences", problem.batch()),
        ("query heads", problem.num_q_heads),
        ("KV heads", problem.num_kv_heads),
    ];
    match counts.into_iter().find(|(_, n)| *n > i32::MAX as usize) {
        Some((what, n)) => Err((
            format!("a problem of {n} {what}"),
            format!("up to {}", i32::MAX),
        )),
        None => Ok(()),
    }
}
