//! Lists of query blocks as `query_blocks.cu` makes them, against those of the host.

use std::sync::Arc;

use anyhow::{Result, ensure};
use attn_core::{Heads, KvFormat, Problem};
use attn_cuda::{
    internals::{LaunchPlan, PlanKind},
    native::{DeviceAddress, KvLayout, ListBlocksArgs},
};
use attn_kernels::cuda::{Arch, DeviceLimits, Preferences, params::QueryBlock};
use libtest_mimic::Trial;

use crate::{Kernels, address};

/// Query tokens of each sequence.
fn cases() -> Vec<(&'static str, Vec<usize>)> {
    let mixed = (0..700).map(|b| [1, 0, 5, 33, 1, 2][b * 7 % 6]).collect();
    vec![
        ("one of each of some", vec![1; 9]),
        (
            "none, in the middle and at the end",
            vec![0, 3, 0, 0, 61, 1, 0],
        ),
        ("a prompt", vec![5000]),
        ("more sequences than threads", mixed),
        ("none at all", vec![0; 5]),
    ]
}

const NOTHING: QueryBlock = QueryBlock {
    sequence: -7,
    first: -7,
    tokens: -7,
    behind: -7,
};

/// The plan of as many sequences, for some more tokens than they have.
fn plan(q_lens: &[usize]) -> Result<(Problem, LaunchPlan)> {
    let heads = Heads::new(8, 2, 128);
    let mut planned = Problem::new(heads, vec![4096; q_lens.len()]).q_len(0);
    planned.q_lens[0] = q_lens.iter().sum::<usize>() + 11;
    let limits = DeviceLimits::new(Arch::Sm90a.shared_limit(), 132);
    let (kind, layout) = (PlanKind::Ragged, KvLayout::Pages(64));
    let preferences = Preferences::default();
    let plan = LaunchPlan::new(kind, limits, &preferences, &planned, KvFormat::INT8, layout)?;
    Ok((planned, plan))
}

/// What the kernel writes for these first query tokens, and behind the list.
fn list(
    kernels: &Kernels,
    planned: &Problem,
    plan: &LaunchPlan,
    starts: &[i32],
) -> Result<Vec<QueryBlock>> {
    let entries = plan.num_blocks();
    let mut list = vec![NOTHING; entries + 3];
    let args = ListBlocksArgs {
        cu_seqlens_q: address(starts),
        to: DeviceAddress::new(list.as_mut_ptr() as u64),
    };
    // SAFETY: starts are one more than the sequences, and the list has more entries than the plan says.
    unsafe { kernels.launch(&plan.list_numbers(planned)?, &args) }?;
    ensure!(list[entries..] == [NOTHING; 3], "a write behind the list");
    list.truncate(entries);
    Ok(list)
}

fn lists_the_hosts_blocks(kernels: &Kernels, q_lens: &[usize]) -> Result<()> {
    let (planned, plan) = plan(q_lens)?;
    let problem = planned.clone().q_lens(q_lens);
    let ends = problem.query_ranges().map(|range| range.end as i32);
    let starts: Vec<i32> = std::iter::once(0).chain(ends).collect();
    let list = list(kernels, &planned, &plan, &starts)?;
    let numbers = plan.list_numbers(&planned)?;
    let blocks = problem.query_blocks(numbers.block_tokens as usize);
    let mut want: Vec<_> = blocks
        .map(|block| QueryBlock {
            sequence: block.sequence as i32,
            first: block.first as i32,
            tokens: block.tokens as i32,
            behind: block.behind as i32,
        })
        .collect();
    ensure!(
        want.len() <= list.len(),
        "{} entries for {} blocks",
        list.len(),
        want.len()
    );
    want.resize(list.len(), QueryBlock::default());
    let first = list.iter().zip(&want).position(|(a, b)| a != b);
    ensure!(
        first.is_none(),
        "entry {first:?}: {list:?}, expected {want:?}"
    );
    Ok(())
}

/// Numbers that fall, are negative or too large: blocks of some tokens that there are, and no write elsewhere.
fn keeps_to_the_list(kernels: &Kernels) -> Result<()> {
    let (planned, plan) = plan(&[40, 30, 20, 10])?;
    for starts in [
        [0, 40, 30, 90, 100],
        [i32::MAX, i32::MIN, i32::MAX, i32::MIN, i32::MAX],
        [-5, 0, i32::MAX, 3, -1],
        [0, 111, 0, 111, 0],
    ] {
        let tokens = planned.query_tokens() as i32;
        for block in list(kernels, &planned, &plan, &starts)? {
            let is_inside = (0..4).contains(&block.sequence)
                && (0..=tokens).contains(&block.first)
                && (0..=tokens - block.first).contains(&block.tokens)
                && (0..=tokens).contains(&block.behind);
            ensure!(is_inside, "{starts:?}: {block:?}");
        }
    }
    Ok(())
}

type Check = Box<dyn Fn(&Kernels) -> Result<()> + Send>;

/// A trial for each case.
pub fn trials(kernels: &Arc<Kernels>) -> Vec<Trial> {
    let trial = |name: String, test: Check| {
        let kernels = kernels.clone();
        Trial::test(format!("query blocks, {name}"), move || {
            test(&kernels).map_err(|error| format!("{error:#}").into())
        })
    };
    let mut all: Vec<Trial> = cases()
        .into_iter()
        .map(|(name, q_lens)| {
            let test = move |kernels: &Kernels| lists_the_hosts_blocks(kernels, &q_lens);
            trial(name.to_owned(), Box::new(test))
        })
        .collect();
    let hostile = "of numbers that are no query tokens".to_owned();
    all.push(trial(hostile, Box::new(keeps_to_the_list)));
    all
}
