//! The kernels of all plans that are no larger than one, loaded before their first steps: without an image each takes seconds to compile.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use attn_core::{Error, KvFormat, Problem};
use attn_kernels::cuda::{DeviceLimits, Instance, KvLayout, Preferences};

use super::{NativePlan, launch_plan::LaunchPlan, query_blocks::PlanKind};
use crate::gpu::CudaBackend;

/// Rows of a KV head at which another configuration of a kernel begins.
const ROW_STEPS: [usize; 7] = [8, 16, 24, 32, 48, 64, 128];

/// Query tokens of prompts, whose work is split otherwise.
const PROMPTS: [usize; 5] = [256, 512, 2048, 8192, 65_536];

/// Kernels that are compiled at once: each takes a few hundred MB of host memory.
const AT_ONCE: usize = 8;

/// A kernel and its dynamic shared memory, bytes.
type Sized = (Instance, usize);

/// 1, 2, 4 and so on below `most`, then `most`.
fn doubling(most: usize) -> impl Iterator<Item = usize> {
    let below = (0..usize::BITS).map(|bit| 1 << bit);
    below
        .take_while(move |&x| x < most)
        .chain(std::iter::once(most))
}

/// Numbers of query tokens of a sequence between which kernels may differ, up to `most`.
fn query_tokens(heads_per_kv: usize, most: usize) -> BTreeSet<usize> {
    let at = ROW_STEPS.map(|rows| rows / heads_per_kv.max(1));
    let steps = at.into_iter().flat_map(|tokens| [tokens, tokens + 1]);
    let all = steps.chain(PROMPTS).chain([1, most]);
    all.filter(|tokens| (1..=most).contains(tokens)).collect()
}

/// Problems like this one with as many sequences, query tokens and KV tokens at most, near enough to each other that every kernel that a smaller problem has is among theirs.
fn smaller(problem: &Problem) -> impl Iterator<Item = Problem> + '_ {
    let (most_q, all) = (problem.max_q_len(), problem.query_tokens());
    let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
    let q_lens = query_tokens(problem.heads_per_kv(), most_q);
    doubling(problem.batch()).flat_map(move |batch| {
        let q_lens = q_lens.clone().into_iter();
        q_lens.flat_map(move |q_len| {
            // All sequences alike, and one beside others that decode.
            let alike = vec![q_len; batch];
            let mut beside = vec![1; batch];
            beside[0] = q_len;
            let shares = [alike, beside].into_iter();
            let shares = shares.filter(move |q_lens| q_lens.iter().sum::<usize>() <= all);
            shares.flat_map(move |q_lens| {
                let lens = doubling(longest).filter(move |&len| len >= q_len.min(longest));
                lens.map(move |len| {
                    let mut smaller = problem.clone();
                    smaller.kv_lens = vec![len; batch];
                    smaller.q_lens.clone_from(&q_lens);
                    smaller
                })
            })
        })
    })
}

/// The kernels of all plans that are no larger than the problem's.
fn kernels(
    kind: PlanKind,
    limits: DeviceLimits,
    preferences: &Preferences,
    problem: &Problem,
    format: KvFormat,
    layout: KvLayout,
) -> Vec<Sized> {
    let mut all: Vec<Sized> = Vec::new();
    for problem in smaller(problem) {
        // What no kernel covers has no plan to load one for.
        let Ok(plan) = LaunchPlan::new(kind, limits, preferences, &problem, format, layout) else {
            continue;
        };
        let makes_pages = plan.dequantized.map(|pages| (pages.instance, 0));
        for kernel in makes_pages
            .into_iter()
            .chain([(plan.instance, plan.shared_bytes)])
        {
            if !all.contains(&kernel) {
                all.push(kernel);
            }
        }
    }
    all
}

impl CudaBackend {
    /// Loads the kernels of all plans over such pages that are no larger than this one: for at most as many sequences, query tokens, and tokens of a sequence. Those that
    /// no image exists of are compiled side by side, which takes seconds; not for use inside a capture. Returns how many there are. They are for keys that lack centres of K where
    /// the plan's is.
    ///
    /// # Errors
    /// Those of [`CudaBackend::prepare`].
    pub fn load_smaller(&self, plan: &NativePlan) -> Result<usize, Error> {
        self.device.bind()?;
        let (limits, preferences) = (self.device.limits(), &self.device.preferences);
        let kind = plan.kind();
        let all = kernels(
            kind,
            limits,
            preferences,
            &plan.problem,
            plan.format(),
            plan.layout(),
        );
        let next = AtomicUsize::new(0);
        let load = || {
            self.device.bind()?;
            while let Some((instance, shared)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                let instance = match plan.has_centres() {
                    true => instance.with_centres(),
                    false => *instance,
                };
                self.device.kernel(&instance, *shared)?;
            }
            Ok::<_, Error>(())
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            let threads: Vec<_> = (0..cores.min(AT_ONCE).min(all.len()))
                .map(|_| scope.spawn(load))
                .collect();
            threads.into_iter().try_for_each(|thread| {
                let ended = thread.join();
                ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })?;
        Ok(all.len())
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{Heads, Scheme};

    use super::*;

    /// Numbers below `most`, the same in each run.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, most: usize) -> usize {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.0 >> 33) as usize % most
        }

        /// From 1 to `most`, small ones as often as large ones.
        fn up_to(&mut self, most: usize) -> usize {
            let most = 2 << self.below(most.ilog2() as usize + 1).min(62);
            1 + self.below(most - 1)
        }
    }

    #[test]
    fn every_smaller_plan_has_its_kernel_among_those_that_are_loaded() {
        let preferences = Preferences::default();
        let mut numbers = Numbers(7);
        for (shared_kib, sms) in [(227, 132), (163, 108)] {
            let limits = DeviceLimits::new(shared_kib * 1024, sms);
            for (format, heads, page) in [
                (KvFormat::INT8, Heads::new(32, 8, 128), 64),
                (KvFormat::INT4, Heads::new(16, 2, 64), 16),
                (KvFormat::same(Scheme::Bf16), Heads::new(12, 12, 128), 64),
                (KvFormat::INT8, Heads::new(48, 1, 256), 32),
            ] {
                let layout = KvLayout::Pages(page);
                let mut q_lens = vec![8; 64];
                q_lens[0] = 8192;
                let largest = Problem::new(heads, [32_768; 64]).q_lens(q_lens);
                let of = |problem: &Problem| {
                    kernels(
                        PlanKind::Known,
                        limits,
                        &preferences,
                        problem,
                        format,
                        layout,
                    )
                };
                let loaded = of(&largest);
                assert!(
                    (1..20).contains(&loaded.len()),
                    "{format}: {}",
                    loaded.len()
                );
                for _ in 0..150 {
                    let batch = numbers.up_to(64);
                    let mut q_lens = match numbers.below(2) {
                        0 => vec![numbers.up_to(8); batch],
                        _ => (0..batch).map(|_| numbers.up_to(8)).collect(),
                    };
                    if numbers.below(2) == 0 {
                        q_lens[0] = numbers.up_to(8192);
                    }
                    let lens = q_lens
                        .iter()
                        .map(|&q_len| numbers.up_to(32_768).max(q_len).min(32_768));
                    let problem = Problem::new(heads, lens.collect::<Vec<_>>()).q_lens(q_lens);
                    let plan = LaunchPlan::new(
                        PlanKind::Known,
                        limits,
                        &preferences,
                        &problem,
                        format,
                        layout,
                    )
                    .unwrap();
                    let wanted = (plan.instance, plan.shared_bytes);
                    assert!(
                        loaded.contains(&wanted),
                        "{format} {:?} {:?}: {:?}",
                        problem.q_lens,
                        problem.kv_lens,
                        plan.config
                    );
                }
            }
        }
    }
}
