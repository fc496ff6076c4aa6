//! The workloads that have names: published figures refer to them, and every backend's bench takes the same list.

use attn_core::{Arithmetic, HeadDim, Heads, KvFormat, Problem, arithmetic::TILE};

use crate::workload::{CacheLayout, Operation, Workload, page_bytes};

fn named(name: &str) -> KvFormat {
    name.parse().expect("the presets name formats that exist")
}

/// Sequences of `ctx` tokens so that `bytes` of an int8 cache are read.
fn batch_for(bytes: usize, kv_heads: usize, head_dim: usize, ctx: usize) -> usize {
    let per_page = page_bytes(KvFormat::INT8, kv_heads, head_dim.into(), TILE);
    (bytes / (ctx / TILE * per_page)).max(1)
}

/// Lengths of prompts, and the tokens of all prompts of a step, at least.
const PROMPTS: [usize; 8] = [
    1 << 10,
    1 << 11,
    1 << 12,
    1 << 13,
    1 << 14,
    1 << 15,
    1 << 16,
    1 << 17,
];
const PROMPT_TOKENS: usize = 1 << 15;

/// Tokens of all KV heads of a step of the families of rows: 65 MiB of int8.
const ROWS_TOKENS: usize = 1 << 18;

/// The length at which the families of rows have every format.
pub const ROWS_CTX: usize = 8192;

const SOME_LENS: &[usize] = &[1 << 10, ROWS_CTX, 1 << 15, 1 << 17];
const MANY_LENS: &[usize] = &[
    1 << 10,
    1 << 11,
    1 << 12,
    ROWS_CTX,
    1 << 14,
    1 << 15,
    1 << 16,
    1 << 17,
];

/// A family of so many query rows to a KV head: its name, query and KV heads, query tokens, lengths.
type Rows = (&'static str, [usize; 2], usize, &'static [usize]);

const ROWS: &[Rows] = &[
    ("rows1", [1, 1], 1, &[ROWS_CTX]),
    ("rows2", [2, 1], 1, &[ROWS_CTX]),
    ("rows4", [4, 1], 1, &[ROWS_CTX]),
    ("rows8", [8, 1], 1, &[ROWS_CTX]),
    ("rows12", [24, 2], 1, SOME_LENS),
    ("rows16", [16, 1], 1, MANY_LENS),
    ("rows24", [24, 2], 2, SOME_LENS),
    ("rows32", [16, 1], 2, SOME_LENS),
    ("rows48", [16, 1], 3, MANY_LENS),
    ("rows64", [16, 1], 4, SOME_LENS),
    ("rows96", [16, 1], 6, &[ROWS_CTX]),
    ("rows128", [16, 1], 8, &[ROWS_CTX]),
];

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
                problem: Problem::new(Heads::new(q_heads, kv_heads, head_dim), kv_lens.clone()),
                page_size: TILE,
                cache: CacheLayout::Pages,
                operation: Operation::Decode,
                planned: 0,
                centres: false,
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

    /// One KV head: eight query heads as published 4-bit kernels have them; other numbers of heads, and of dims.
    fn one_kv_head(&mut self) {
        let formats = "bf16,fp8,int8,int8/int4,int4,int4-g1,int4-g4";
        for batch in [512, 256, 128, 64, 32] {
            let name = format!("batch{batch}");
            self.add("gqa8", &name, formats, [8, 1, 128], vec![8192; batch]);
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

    /// Heads wider than 256 elements, keys wider than values, and latents: one KV head for all query heads.
    fn wide(&mut self) {
        for (family, heads, dim, formats) in [
            (
                "d512",
                [16, 2],
                HeadDim::from(512),
                "bf16,fp8,int8,int8/int4,int4",
            ),
            (
                "k192",
                [32, 4],
                HeadDim::from((192, 128)),
                "bf16,fp8,int8,int4",
            ),
            (
                "mla",
                [16, 1],
                HeadDim::from((576, 512)),
                "bf16-latents,fp8-latents,int8-latents,int8,int8/int4",
            ),
            (
                "mla",
                [128, 1],
                HeadDim::from((576, 512)),
                "bf16-latents,fp8-latents,int8-latents,int8",
            ),
        ] {
            let [q_heads, kv_heads] = heads;
            for batch in [1, 32] {
                let name = format!("{q_heads}-{kv_heads}-ctx8192-batch{batch}");
                let shape = [q_heads, kv_heads, dim.k];
                for workload in self.add(family, &name, formats, shape, vec![8192; batch]) {
                    workload.problem.head_dim = dim;
                }
            }
        }
    }

    /// 1 to 128 query rows to a KV head, by heads and by query tokens: all formats at one length, over a cache that stays the same, and int8 at
    /// others.
    fn query_rows(&mut self) {
        for &(family, [heads, kv_heads], q_len, lens) in ROWS {
            for &ctx in lens {
                let batch = ROWS_TOKENS / (ctx * kv_heads);
                let name = format!("ctx{ctx}-batch{batch}");
                let formats = if ctx == ROWS_CTX {
                    "bf16,fp8,int8,int4,int4-g1"
                } else {
                    "int8"
                };
                let shape = [heads, kv_heads, 128];
                for workload in self.add(family, &name, formats, shape, vec![ctx; batch]) {
                    workload.problem = workload.problem.clone().q_len(q_len);
                }
            }
        }
    }

    /// Whole prompts with a causal mask, and some of them without; a piece of one in small pages, and over other engines' caches.
    fn prompts(&mut self) {
        for (name, layout, page_size, formats) in [
            ("pages-16", CacheLayout::Pages, 16, "bf16,fp8,int8,int4"),
            ("pages-32", CacheLayout::Pages, 32, "bf16,fp8,int8,int4"),
            ("bsnh", CacheLayout::Bsnh, 64, "bf16,fp8"),
            ("paged-rows-16", CacheLayout::PagedBsnh, 16, "bf16,fp8"),
            ("paged-rows-64", CacheLayout::PagedBsnh, 64, "bf16,fp8"),
        ] {
            let name = format!("32-8-q2048-behind-32768-{name}");
            let lens = vec![32768 + 2048];
            for workload in self.add("prefill", &name, formats, [32, 8, 128], lens) {
                workload.problem = workload.problem.clone().q_len(2048);
                (workload.cache, workload.page_size) = (layout, page_size);
            }
        }
        // The shapes of Gemma 3 and Phi 2.
        for [heads, kv_heads, dim] in [[8, 4, 256], [32, 32, 80]] {
            let name = format!("{heads}-{kv_heads}-d{dim}-ctx8192");
            let shape = [heads, kv_heads, dim];
            for workload in self.add("prefill", &name, "bf16,int8", shape, vec![8192]) {
                let problem = workload.problem.clone().q_len(8192);
                workload.problem = problem.arithmetic(Arithmetic::Fast);
            }
        }
        for ctx in PROMPTS {
            let batch = (PROMPT_TOKENS / ctx).max(1);
            let name = format!("16-1-ctx{ctx}-batch{batch}");
            let formats = if ctx <= PROMPT_TOKENS {
                "bf16,int8,int4"
            } else {
                "bf16,int8"
            };
            let shape = [16, 1, 128];
            for workload in self.add("prefill", &name, formats, shape, vec![ctx; batch]) {
                workload.problem = workload.problem.clone().q_len(ctx);
            }
            let fast = format!("{name}-fast");
            for workload in self.add("prefill", &fast, "int8,int4", shape, vec![ctx; batch]) {
                workload.problem = workload
                    .problem
                    .clone()
                    .q_len(ctx)
                    .arithmetic(Arithmetic::Fast);
            }
            let name = format!("{name}-not-causal");
            for workload in self.add("prefill", &name, "bf16,fp8,int8", shape, vec![ctx; batch]) {
                workload.problem = workload.problem.clone().q_len(ctx).causal(false);
            }
            let name = format!("{name}-fast");
            for workload in self.add("prefill", &name, "int8", shape, vec![ctx; batch]) {
                let problem = workload.problem.clone().q_len(ctx).causal(false);
                workload.problem = problem.arithmetic(Arithmetic::Fast);
            }
        }
    }

    /// Query tokens of a step behind a cache: what speculation verifies, and pieces of a prompt.
    fn query_tokens(&mut self) {
        for q_len in [2, 4, 8, 16] {
            let name = format!("32-8-q{q_len}-ctx8192-batch16");
            let (formats, lens) = ("bf16,int8,int4,int4-g1", vec![8192; 16]);
            for workload in self.add("verify", &name, formats, [32, 8, 128], lens) {
                workload.problem = workload.problem.clone().q_len(q_len);
            }
        }
        for chunk in [512, 2048] {
            let name = format!("32-8-q{chunk}-behind-32768");
            let lens = vec![32_768 + chunk];
            for workload in self.add("prefill", &name, "bf16,fp8,int8,int4", [32, 8, 128], lens) {
                workload.problem = workload.problem.clone().q_len(chunk);
            }
            let name = format!("{name}-fast");
            let lens = vec![32_768 + chunk];
            for workload in self.add("prefill", &name, "int8,int4", [32, 8, 128], lens) {
                let problem = workload.problem.clone().q_len(chunk);
                workload.problem = problem.arithmetic(Arithmetic::Fast);
            }
        }
    }

    /// Adds shapes with as many KV heads as query heads, in 16 bits.
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
    list.wide();
    list.query_rows();
    list.query_tokens();
    list.prompts();
    list.mha();
    list.uneven();
    list.append();
    list.one_plan();
    list.0
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
            workload.format.check(workload.problem.head_dim).unwrap();
            assert!(names.insert(workload.to_string()), "{workload} twice");
        }
    }

    #[test]
    fn target_rows_hold_the_bytes_they_are_named_for() {
        let mib = |workload: &Workload| workload.bytes() >> 20;
        for workload in workloads() {
            match workload.family {
                rows if rows.starts_with("rows") && workload.format == KvFormat::INT8 => {
                    assert_eq!(mib(&workload), 65, "{workload}")
                }
                "heads" | "dims" => assert!((240..=262).contains(&mib(&workload)), "{workload}"),
                _ => {}
            }
        }
    }

    #[test]
    fn families_of_rows_have_as_many_to_a_kv_head_as_their_name_says() {
        let mut seen = BTreeSet::new();
        for workload in workloads() {
            if let Some(rows) = workload.family.strip_prefix("rows") {
                let rows: usize = rows.parse().unwrap();
                assert_eq!(
                    workload.problem.heads_per_kv() * workload.problem.max_q_len(),
                    rows,
                    "{workload}"
                );
                seen.insert(rows);
            }
        }
        let all = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128];
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), all);
    }
}
