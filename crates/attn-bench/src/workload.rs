//! What every backend's bench measures, by name, and what it says of it: one list of workloads, one trait.
//!
//! `attn bench`, `cargo bench -p attn-cpu` and `cargo bench -p attn-cuda` use these names. A [`Workload`] says nothing of a backend;
//! a backend takes part by a [`Timer`], which knows its own clock and how to find its bytes outside every cache.

use std::fmt;

use attn_core::{Error, Heads, KvFormat, PageLayout, Problem, Scheme, arithmetic::TILE, layout};

/// Where K and V lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheLayout {
    /// In pages of [`Workload::page_size`] tokens, scattered over the pool.
    Pages,
    /// In a contiguous cache `[batch, num_kv_heads, capacity, head_dim]`, read in place.
    Bnsh,
    /// In a contiguous cache `[batch, capacity, num_kv_heads, head_dim]`, read in place.
    Bsnh,
    /// In another engine's pages `[page, token, num_kv_heads, head_dim]`, scattered over the pool, which CUDA's native entry reads in place.
    PagedBsnh,
}

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A decode step.
    Decode,
    /// The append of one token per sequence, after which the lengths are the problem's.
    Append,
    /// The same append by slots, which CUDA's native entry has.
    AppendBySlots,
    /// The append by slots that rotates K, and the queries of its tokens in place.
    AppendRotary,
    /// The append by sequence, and then the decode step.
    AppendDecode,
}

impl Operation {
    /// Whether tokens bring their slots.
    pub fn is_by_slots(self) -> bool {
        matches!(self, Operation::AppendBySlots | Operation::AppendRotary)
    }

    /// Whether nothing is attended.
    pub fn is_append_alone(self) -> bool {
        self == Operation::Append || self.is_by_slots()
    }
}

/// One thing to measure.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Its family.
    pub family: &'static str,
    /// Its own name, unique inside the family and format.
    pub name: String,
    /// What is stored.
    pub format: KvFormat,
    /// What is attended to.
    pub problem: Problem,
    /// Tokens per page; contiguous caches have none and ignore it.
    pub page_size: usize,
    /// Where K and V lie.
    pub cache: CacheLayout,
    /// What is timed.
    pub operation: Operation,
    /// Tokens of the longest sequence that the plan is for, as an engine's captured graph has it; 0: the problem's. CUDA's timer alone takes it.
    pub planned: usize,
}

impl fmt::Display for Workload {
    /// `family/name/format`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.family, self.name, self.format)
    }
}

impl Workload {
    /// A decode step of `batch` sequences of equal length from pages, with a name made of its numbers.
    ///
    /// # Errors
    /// Those of [`Problem::check`] and [`PageLayout::new`].
    pub fn custom(problem: Problem, format: KvFormat, page_size: usize) -> Result<Self, Error> {
        problem.check()?;
        PageLayout::new(format, problem.head_dim, page_size, problem.num_kv_heads)?;
        let Problem {
            num_q_heads,
            num_kv_heads,
            head_dim,
            ..
        } = problem;
        let q_len = problem.max_q_len();
        let longest = problem.kv_lens.iter().max().copied().unwrap_or(0);
        let batch = problem.batch();
        Ok(Workload {
            family: "custom",
            name: format!(
                "{num_q_heads}-{num_kv_heads}-d{head_dim}-q{q_len}-ctx{longest}-batch{batch}-page{page_size}"
            ),
            format,
            problem,
            page_size,
            cache: CacheLayout::Pages,
            operation: Operation::Decode,
            planned: 0,
        })
    }

    /// The problem that the plan is for: its first sequence is as long as [`Workload::planned`], if that is longer.
    #[must_use]
    pub fn planned_problem(&self) -> Problem {
        let mut problem = self.problem.clone();
        if let Some(first) = problem.kv_lens.first_mut() {
            *first = self.planned.max(*first);
        }
        problem
    }

    /// Bytes of residuals that a decode step reads: those of the tiles that its rows read fine, up to the end of the last page.
    pub fn residual_bytes(&self) -> usize {
        let problem = &self.problem;
        let side = |scheme: Scheme| {
            let window = scheme.window().tiles();
            let tokens = |(len, q_len): (&usize, &usize)| {
                // The first row's own tile; `docs/arithmetic.md`, section 4.
                let rows = if problem.causal { *q_len } else { 1 };
                let own_tile = len.saturating_sub(rows) / TILE;
                let first = (own_tile + 1).saturating_sub(window) * TILE;
                len.next_multiple_of(self.page_size).saturating_sub(first)
            };
            let lens = problem.kv_lens.iter().zip(&problem.q_lens);
            let kept = lens.map(tokens).sum::<usize>();
            let bytes = problem.num_kv_heads * problem.head_dim / 2;
            if window == 0 { 0 } else { kept * bytes }
        };
        side(self.format.k) + side(self.format.v)
    }

    /// Floating-point operations of the two products of a decode step: two for each dim of each token that a query row sees, twice.
    pub fn decode_flops(&self) -> f64 {
        let problem = &self.problem;
        let seen = |(b, q_len): (usize, &usize)| -> f64 {
            (0..*q_len)
                .map(|i| problem.visible(b, i).len() as f64)
                .sum()
        };
        let pairs: f64 = problem.q_lens.iter().enumerate().map(seen).sum();
        4.0 * pairs * (problem.num_q_heads * problem.head_dim) as f64
    }

    /// Bytes of codes and parameters of the whole cache: whole pages, or the rows of a contiguous cache.
    pub fn cache_bytes(&self) -> usize {
        let problem = &self.problem;
        if self.cache == CacheLayout::Pages {
            let pages: usize = problem
                .kv_lens
                .iter()
                .map(|len| len.div_ceil(self.page_size))
                .sum();
            return pages
                * page_bytes(
                    self.format,
                    problem.num_kv_heads,
                    problem.head_dim,
                    self.page_size,
                );
        }
        let tokens: usize = problem.kv_lens.iter().sum();
        let row = |scheme: Scheme| {
            let scales = if scheme.has_row_scales() {
                2 * scheme.groups(problem.head_dim)
            } else {
                0
            };
            problem.head_dim * scheme.code_bits() / 8 + scales
        };
        tokens * problem.num_kv_heads * (row(self.format.k) + row(self.format.v))
    }

    fn decode_bytes(&self) -> usize {
        self.cache_bytes() + self.residual_bytes()
    }

    /// Bytes of 16-bit K and V that an append reads, and of codes, residuals and parameters that it writes.
    pub fn append_bytes(&self) -> usize {
        let Problem {
            num_kv_heads,
            head_dim,
            ..
        } = self.problem;
        let written =
            page_bytes(self.format, num_kv_heads, head_dim, self.page_size) / self.page_size;
        let kept = |scheme: &Scheme| scheme.window().tiles() > 0;
        let residuals = [self.format.k, self.format.v]
            .iter()
            .filter(|s| kept(s))
            .count();
        let elements = num_kv_heads * head_dim;
        self.problem.batch() * (elements * 4 + written + residuals * elements / 2)
    }

    /// Refuses what timers of [`KvCache`](attn_core::KvCache)s cannot do: appends by slots, other engines' pages, and an append that fills every
    /// page, since their caches grow with each append: only the first would.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub fn check_for_caches(&self) -> Result<(), Error> {
        if self.cache == CacheLayout::PagedBsnh {
            return Err(Error::Parameter {
                what: "cache to time",
                given: "another engine's pages".to_owned(),
                allowed: "pages of the library and contiguous caches; CUDA's native entry reads others",
            });
        }
        if self.operation.is_by_slots() {
            return Err(Error::Parameter {
                what: "append to time",
                given: "one by slots".to_owned(),
                allowed: "appends by sequence; slots are for the pools of CUDA's native entry",
            });
        }
        let fills = |len: &usize| len.is_multiple_of(self.page_size);
        if self.operation != Operation::Decode && self.problem.kv_lens.iter().all(fills) {
            return Err(Error::Parameter {
                what: "append to time",
                given: "one that fills every page".to_owned(),
                allowed: "lengths that differ: this timer's caches grow, so that only the first append would fill pages",
            });
        }
        Ok(())
    }

    /// Bytes that the work moves at least, and that its ceiling reads.
    pub fn bytes(&self) -> usize {
        match self.operation {
            Operation::Decode => self.decode_bytes(),
            Operation::Append | Operation::AppendBySlots => self.append_bytes(),
            // Queries of 16 bits are read and written.
            Operation::AppendRotary => {
                self.append_bytes() + 4 * self.problem.rows() * self.problem.head_dim
            }
            Operation::AppendDecode => self.decode_bytes() + self.append_bytes(),
        }
    }
}

fn page_bytes(format: KvFormat, kv_heads: usize, head_dim: usize, page_size: usize) -> usize {
    kv_heads * layout::run_bytes(format, head_dim, page_size)
}

fn named(name: &str) -> KvFormat {
    name.parse().expect("the presets name formats that exist")
}

/// Sequences of `ctx` tokens so that `bytes` of an int8 cache are read.
fn batch_for(bytes: usize, kv_heads: usize, head_dim: usize, ctx: usize) -> usize {
    let per_page = page_bytes(KvFormat::INT8, kv_heads, head_dim, TILE);
    (bytes / (ctx / TILE * per_page)).max(1)
}

/// A list under construction.
#[derive(Default)]
struct List(Vec<Workload>);

impl List {
    /// Adds a decode step from pages in several formats.
    fn add(
        &mut self,
        family: &'static str,
        name: &str,
        formats: &str,
        [q_heads, kv_heads, head_dim]: [usize; 3],
        kv_lens: Vec<usize>,
    ) -> &mut [Workload] {
        let first = self.0.len();
        for format in formats.split(',').map(named) {
            self.0.push(Workload {
                family,
                name: name.to_owned(),
                format,
                problem: Problem::new(
                    Heads {
                        q: q_heads,
                        kv: kv_heads,
                        dim: head_dim,
                    },
                    kv_lens.clone(),
                ),
                page_size: TILE,
                cache: CacheLayout::Pages,
                operation: Operation::Decode,
                planned: 0,
            });
        }
        &mut self.0[first..]
    }

    /// One sequence with four query heads per KV head: what a CPU or a latency-bound server runs; and small batches of it.
    fn single(&mut self) {
        let presets = "bf16,int8,int8/int4,int4";
        let all =
            "bf16,f16,fp8,int8,int8-plain,int8-g32,int8-tensor,int8/int4,int4,int4-g1,int4-g4";
        for (ctx, formats) in [
            (1024, presets),
            (8192, all),
            (32768, presets),
            (131_072, presets),
        ] {
            let name = format!("32-8-ctx{ctx}");
            self.add("single", &name, formats, [32, 8, 128], vec![ctx]);
        }
        let long = vec![131_072];
        self.add("single", "8-1-ctx131072", "int8,int4", [8, 1, 128], long);
        self.add("single", "9-3-d64-ctx2048", "int8", [9, 3, 64], vec![2048]);
        for batch in [8, 64] {
            let name = format!("32-8-ctx4096-batch{batch}");
            let lens = vec![4096; batch];
            self.add("batch", &name, presets, [32, 8, 128], lens);
        }
        for ctx in [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20] {
            let name = format!("8-2-ctx{ctx}");
            self.add("context", &name, "int8", [8, 2, 128], vec![ctx]);
        }
    }

    /// One KV head: eight query heads as published 4-bit kernels have them, and 16 with one or three query tokens.
    fn one_kv_head(&mut self) {
        let formats = "bf16,fp8,int8,int8/int4,int4,int4-g1,int4-g4";
        for batch in [512, 256, 128, 64, 32] {
            let name = format!("batch{batch}");
            self.add("gqa8", &name, formats, [8, 1, 128], vec![8192; batch]);
        }
        for (family, q_len) in [("rows48", 3), ("rows16", 1)] {
            for log in 10..18 {
                let lens = vec![1 << log; 256 >> (log - 10)];
                let name = format!("ctx{}-batch{}", lens[0], lens.len());
                let workloads = self.add(family, &name, "int8", [16, 1, 128], lens);
                workloads[0].problem.q_lens = vec![q_len; workloads[0].problem.batch()];
            }
        }
        for heads in [3, 5, 6, 7, 12, 16, 32, 64] {
            let lens = vec![8192; batch_for(256 << 20, 1, 128, 8192)];
            let name = format!("per-kv{heads}");
            self.add("heads", &name, "int8", [heads, 1, 128], lens);
        }
        for dim in [64, 80, 96, 128, 192, 256] {
            let lens = vec![8192; batch_for(256 << 20, 1, dim, 8192)];
            self.add("dims", &format!("d{dim}"), "int8", [8, 1, dim], lens);
        }
    }

    /// Query tokens of a step: what speculation verifies, and prompts, whole and in pieces behind a prefix.
    fn query_tokens(&mut self) {
        for q_len in [2, 4, 8, 16] {
            let name = format!("32-8-q{q_len}-ctx8192-batch16");
            let (formats, lens) = ("bf16,int8,int4,int4-g1", vec![8192; 16]);
            for workload in self.add("verify", &name, formats, [32, 8, 128], lens) {
                workload.problem = workload.problem.clone().q_len(q_len);
            }
        }
        for (ctx, formats) in [
            (1024, "bf16,int8,int4"),
            (8192, "bf16,int8,int4"),
            (32_768, "int8,int4"),
        ] {
            let batch = 32_768 / ctx;
            let name = format!("16-1-ctx{ctx}-batch{batch}");
            for workload in self.add("prefill", &name, formats, [16, 1, 128], vec![ctx; batch]) {
                workload.problem = workload.problem.clone().q_len(ctx);
            }
        }
        let (name, lens) = ("16-1-ctx8192-batch4-not-causal", vec![8192; 4]);
        for workload in self.add("prefill", name, "int8", [16, 1, 128], lens) {
            workload.problem = workload.problem.clone().q_len(8192).causal(false);
        }
        for chunk in [512, 2048] {
            let name = format!("32-8-q{chunk}-behind-32768");
            let lens = vec![32_768 + chunk];
            for workload in self.add("prefill", &name, "int8,int4", [32, 8, 128], lens) {
                workload.problem = workload.problem.clone().q_len(chunk);
            }
        }
    }

    /// As many KV heads as query heads, 16-bit.
    fn mha(&mut self) {
        for ctx in [128, 256, 512, 1024, 2048, 4096, 8192] {
            let name = format!("ctx{ctx}");
            self.add("mha", &name, "f16", [32, 32, 128], vec![ctx]);
        }
        for batch in [2, 4, 8, 16, 32, 64, 128] {
            let name = format!("ctx128-batch{batch}");
            self.add("mha", &name, "f16", [32, 32, 128], vec![128; batch]);
        }
    }

    /// Lengths that differ, pages that are not full, contiguous caches.
    fn uneven(&mut self) {
        // Log-uniform from 64 to 131072 in a fixed, mixed order.
        let ragged: Vec<usize> = (0..256)
            .map(|i| (64.0 * 2048f64.powf(f64::from(i * 77 % 256) / 255.0)) as usize)
            .collect();
        let presets = "int8,int8/int4,int4";
        self.add("ragged", "256", presets, [8, 1, 128], ragged);
        // Half of the last page.
        let open = vec![8160; 32];
        self.add("tails", "ctx8160-batch32", presets, [8, 1, 128], open);
        for (name, layout) in [
            ("pages", CacheLayout::Pages),
            ("bnsh", CacheLayout::Bnsh),
            ("bsnh", CacheLayout::Bsnh),
        ] {
            let lens = vec![8192; batch_for(256 << 20, 8, 128, 8192)];
            for workload in self.add("views", name, "bf16,int8-plain", [32, 8, 128], lens) {
                workload.cache = layout;
            }
        }
        for page_size in [16, 64] {
            let name = format!("paged-rows-{page_size}");
            let lens = vec![8192; batch_for(256 << 20, 8, 128, 8192)];
            for workload in self.add("views", &name, "bf16,fp8", [32, 8, 128], lens) {
                (workload.cache, workload.page_size) = (CacheLayout::PagedBsnh, page_size);
            }
        }
    }

    /// A plan for long sequences that meets short ones, beside a plan for just those.
    fn one_plan(&mut self) {
        const LONGEST: usize = 131_072;
        for ctx in [1024, 4096, 32_768] {
            for planned in [ctx, LONGEST] {
                let name = format!("32-8-ctx{ctx}-plan{planned}");
                let workloads = self.add("one-plan", &name, "int8,int4", [32, 8, 128], vec![ctx]);
                workloads.iter_mut().for_each(|w| w.planned = planned);
            }
        }
    }

    /// One new token of each of 256 sequences, into pages filled to any degree, or into the last place of each page; and of one.
    fn append(&mut self) {
        let mixed: Vec<usize> = (0..256).map(|b| 961 + b * 37 % 64).collect();
        for (name, operation, lens) in [
            ("decode-alone", Operation::Decode, &mixed),
            ("append", Operation::Append, &mixed),
            ("append-by-slots", Operation::AppendBySlots, &mixed),
            ("append-by-slots-rope", Operation::AppendRotary, &mixed),
            ("append-then-decode", Operation::AppendDecode, &mixed),
            (
                "append-then-decode-one",
                Operation::AppendDecode,
                &vec![8190],
            ),
            ("append-fills", Operation::Append, &vec![1024; 256]),
        ] {
            for workload in self.add(
                "append",
                name,
                "int8,int8/int4,int4",
                [32, 8, 128],
                lens.clone(),
            ) {
                workload.operation = operation;
            }
        }
    }
}

/// Every workload, family by family; inside a family, bf16 before the formats that are compared with it.
pub fn workloads() -> Vec<Workload> {
    let mut list = List::default();
    list.single();
    list.one_kv_head();
    list.query_tokens();
    list.mha();
    list.uneven();
    list.append();
    list.one_plan();
    list.0
}

/// Deterministic numbers around 0, below 2 in magnitude.
pub fn noise(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 8) as f32 * (1.0 / (1 << 23) as f32) - 1.0
    };
    (0..count).map(|_| next() + next()).collect()
}

/// Microseconds of a run, over several.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// The fastest.
    pub min: f64,
    /// The middle one; of an even number, the slower of the middle two.
    pub median: f64,
}

impl Timing {
    /// From microseconds.
    ///
    /// # Panics
    /// If there are none.
    pub fn of(mut us: Vec<f64>) -> Self {
        us.sort_by(f64::total_cmp);
        Timing {
            min: us[0],
            median: us[us.len() / 2],
        }
    }
}

/// What one workload took, and the pure read of [`Workload::bytes`] bytes in the same run.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// The work.
    pub step: Timing,
    /// The read.
    pub ceiling: Timing,
}

/// How one backend is timed.
pub trait Timer {
    /// Backend, device and what else the figures depend on.
    fn device(&self) -> String;

    /// Timed repetitions per workload where the caller names no number.
    fn runs(&self) -> usize;

    /// Whether rates are those of the medians: so on GPUs, whose clock is quiet. Else of the fastest.
    fn by_median(&self) -> bool {
        true
    }

    /// Cache bytes beyond which a workload is left out unless large ones are asked for.
    fn most_bytes(&self) -> usize {
        usize::MAX
    }

    /// Operations a second, two for a product and its sum, of the backend's dot product of 8-bit integers alone, on all of its threads; the best so far.
    /// `None` where nobody measures it.
    fn peak(&self) -> Option<f64> {
        None
    }

    /// Times one workload.
    ///
    /// # Errors
    /// What the backend refuses, or its device's failure.
    fn measure(&mut self, workload: &Workload, runs: usize) -> Result<Measured, Error>;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn shapes_are_legal_and_their_names_unique() {
        let mut names = BTreeSet::new();
        for workload in workloads() {
            workload.problem.check().unwrap();
            workload
                .format
                .check(workload.problem.head_dim, TILE)
                .unwrap();
            assert!(names.insert(workload.to_string()), "{workload} twice");
        }
    }

    #[test]
    fn target_rows_hold_the_bytes_they_are_named_for() {
        let mib = |workload: &Workload| workload.bytes() >> 20;
        for workload in workloads() {
            match workload.family {
                "rows48" | "rows16" => assert_eq!(mib(&workload), 65, "{workload}"),
                "heads" | "dims" => assert!((240..=262).contains(&mib(&workload)), "{workload}"),
                _ => {}
            }
        }
    }

    #[test]
    fn timings_are_the_fastest_and_the_middle_one() {
        let timing = Timing::of(vec![7.0, 1.0, 100.0, 3.0, 2.0]);
        assert_eq!((timing.min, timing.median), (1.0, 3.0));
        let timing = Timing::of(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!((timing.min, timing.median), (1.0, 3.0));
    }

    fn workload(name: &str) -> Workload {
        let found = workloads().into_iter().find(|s| s.to_string() == name);
        found.unwrap_or_else(|| panic!("{name} is a preset"))
    }

    #[test]
    fn bytes_are_those_of_codes_scales_and_new_tokens() {
        // A token of a KV head has 2 × 128 codes, and in int8 two f16 scales.
        let cache = workload("context/8-2-ctx4096/int8");
        assert_eq!(cache.bytes(), 4096 * 2 * 2 * 130);
        assert_eq!(workload("mha/ctx128/f16").bytes(), 128 * 32 * 2 * 128 * 2);
        // An append reads 16-bit K and V and writes a token's share of a page.
        let append = workload("append/append/int8");
        assert_eq!(append.bytes(), 256 * 8 * (2 * 128 * 2 + 2 * 130));
        // Four bits more for each new element, and for those of the last 65 to 128 tokens of each sequence.
        let append = workload("append/append/int4");
        assert_eq!(append.bytes(), 256 * 8 * (2 * 128 * 2 + 2 * 66 + 2 * 64));
        let decode = workload("context/8-2-ctx4096/int8");
        assert_eq!(decode.residual_bytes(), 0);
        let decode = workload("single/32-8-ctx8192/int4");
        assert_eq!(decode.residual_bytes(), 128 * 8 * 128);
        assert_eq!(decode.bytes(), 8192 * 8 * 2 * 66 + 128 * 8 * 128);
        let decode = workload("single/32-8-ctx8192/int8/int4");
        assert_eq!(decode.residual_bytes(), 128 * 8 * 64);
        let both = workload("append/append-then-decode/int8");
        assert_eq!(both.bytes(), both.cache_bytes() + append.bytes());
    }

    #[test]
    fn appends_that_fill_every_page_are_not_for_growing_caches() {
        assert!(
            workload("append/append-fills/int8")
                .check_for_caches()
                .is_err()
        );
        workload("append/append/int8").check_for_caches().unwrap();
        workload("context/8-2-ctx4096/int8")
            .check_for_caches()
            .unwrap();
    }

    #[test]
    fn noise_is_repeatable_and_below_2_on_both_sides_of_0() {
        let x = noise(1, 1000);
        assert_eq!(x, noise(1, 1000));
        assert_ne!(x, noise(2, 1000));
        assert!(x.iter().all(|x| x.abs() < 2.0));
        assert!(x.iter().any(|x| *x > 1.0) && x.iter().any(|x| *x < -1.0));
    }
}
