//! What a bench measures: a problem, its cache, the operation, and the bytes and operations that rates count.
//!
//! A [`Workload`] says nothing of a backend. Those with names are in [`presets`](crate::presets).

use std::fmt;

use attn_core::{
    Arithmetic, Error, HeadDim, KvFormat, PageLayout, Problem, Scheme,
    arithmetic::TILE,
    layout::{self, Side},
};

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
    /// An append by slots, which CUDA's native entry has.
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
    /// Whether the cache's keys lack their centres ([`Workload::with_centres`]).
    pub centres: bool,
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
        let mask = if problem.scores.causal {
            ""
        } else {
            "-not-causal"
        };
        let fast = match problem.scores.arithmetic {
            Arithmetic::Fast => "-fast",
            _ => "",
        };
        Ok(Workload {
            family: "custom",
            name: format!(
                "{num_q_heads}-{num_kv_heads}-d{head_dim}-q{q_len}-ctx{longest}-batch{batch}-page{page_size}{mask}{fast}"
            ),
            format,
            problem,
            page_size,
            cache: CacheLayout::Pages,
            operation: Operation::Decode,
            planned: 0,
            centres: false,
        })
    }

    /// The decode step over a cache with centres of K, named by `-centres`; none of a format, a layout or an operation without.
    #[must_use]
    pub fn with_centres(mut self) -> Option<Self> {
        let is_step = self.operation == Operation::Decode && self.cache == CacheLayout::Pages;
        if !is_step || self.format.check_centres().is_err() {
            return None;
        }
        self.name.push_str("-centres");
        self.centres = true;
        Some(self)
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

    /// Bytes of residuals that a decode step reads: those of the tiles that its rows read fine, the first one among them, up to the end of the last page.
    pub fn residual_bytes(&self) -> usize {
        let problem = &self.problem;
        let side = |(scheme, dim): (Scheme, usize)| {
            let window = scheme.window().tiles();
            let tokens = |(len, q_len): (&usize, &usize)| {
                // The first row's own tile; `docs/arithmetic.md`, section 4.
                let rows = if problem.scores.causal { *q_len } else { 1 };
                let own_tile = len.saturating_sub(rows) / TILE;
                let first = (own_tile + 1).saturating_sub(window) * TILE;
                let windows = len.next_multiple_of(self.page_size).saturating_sub(first);
                windows + first.min(TILE)
            };
            let lens = problem.kv_lens.iter().zip(&problem.q_lens);
            let kept = lens.map(tokens).sum::<usize>();
            let bytes = problem.num_kv_heads * dim / 2;
            if window == 0 { 0 } else { kept * bytes }
        };
        self.format.sides(problem.head_dim).map(side).iter().sum()
    }

    /// Floating-point operations of the two products of a decode step: two for each dim of K and of V of each token that a query row sees.
    pub fn decode_flops(&self) -> f64 {
        let problem = &self.problem;
        let seen = |(b, q_len): (usize, &usize)| -> f64 {
            (0..*q_len)
                .map(|i| problem.visible(b, i).len() as f64)
                .sum()
        };
        let pairs: f64 = problem.q_lens.iter().enumerate().map(seen).sum();
        let HeadDim { k, v } = problem.head_dim;
        2.0 * pairs * (problem.num_q_heads * (k + v)) as f64
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
        let row = |(scheme, dim): (Scheme, usize)| {
            let scales = if scheme.has_row_scales() {
                2 * scheme.groups(dim).count()
            } else {
                0
            };
            dim * scheme.code_bits() / 8 + scales
        };
        let rows = self.format.sides(problem.head_dim).map(row);
        tokens * problem.num_kv_heads * rows.iter().sum::<usize>()
    }

    /// Copies of the cache for steps that rotate over so many bytes, at most `most`, and over fewer where steps are long: the queries and outputs of a
    /// prompt displace a cache by themselves. The read beside such steps may find its bytes in a cache of the device.
    pub fn copies(&self, bytes: usize, most: usize) -> usize {
        bytes
            .div_ceil(self.cache_bytes().max(1))
            .min((LONG_FLOPS / self.decode_flops()) as usize)
            .clamp(1, most)
    }

    fn decode_bytes(&self) -> usize {
        self.cache_bytes() + self.residual_bytes()
    }

    /// Numbers of a token's K, and of its V, which of latents are none.
    pub fn appended_elements(&self) -> [usize; 2] {
        let [k, v] = self.problem.kv_elements();
        [k, if self.format.latents { 0 } else { v }]
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
        let sides = self.format.sides(head_dim);
        let side = |side: &Side| match sides[*side as usize] {
            (scheme, dim) if scheme.window().tiles() == 0 => 2 * dim,
            (_, dim) => 2 * dim + dim / 2,
        };
        let each: usize = self.format.stored_sides().iter().map(side).sum();
        self.problem.batch() * (num_kv_heads * each + written)
    }

    /// Refuses what timers of [`KvCache`](attn_core::KvCache)s cannot do: appends by slots, other engines' pages, and an append that fills every
    /// page, since their caches grow with each append: only the first would.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub fn check_for_caches(&self) -> Result<(), Error> {
        if self.cache == CacheLayout::PagedBsnh {
            return Err(Error::parameter(
                "cache to time",
                format_args!("another engine's pages"),
                "pages of the library and contiguous caches; CUDA's native entry reads others",
            ));
        }
        if self.operation.is_by_slots() {
            return Err(Error::parameter(
                "append to time",
                format_args!("one by slots"),
                "appends by sequence; slots are for the pools of CUDA's native entry",
            ));
        }
        let fills = |len: &usize| len.is_multiple_of(self.page_size);
        if self.operation != Operation::Decode && self.problem.kv_lens.iter().all(fills) {
            return Err(Error::parameter(
                "append to time",
                format_args!("one that fills every page"),
                "lengths that differ: this timer's caches grow, so that only the first append would fill pages",
            ));
        }
        Ok(())
    }

    /// Bytes that the work moves at least, and that its ceiling reads.
    pub fn bytes(&self) -> usize {
        match self.operation {
            Operation::Decode => self.decode_bytes(),
            Operation::Append | Operation::AppendBySlots => self.append_bytes(),
            // Queries of 16 bits are read and written.
            Operation::AppendRotary => self.append_bytes() + 4 * self.problem.q_elements(),
            Operation::AppendDecode => self.decode_bytes() + self.append_bytes(),
        }
    }
}

/// Operations of a round over all copies, from which on they become fewer: about 10 ms of a fast GPU.
const LONG_FLOPS: f64 = 4e12;

pub(crate) fn page_bytes(
    format: KvFormat,
    kv_heads: usize,
    head_dim: HeadDim,
    page_size: usize,
) -> usize {
    kv_heads * layout::run_bytes(format, head_dim, page_size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::workloads;

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
        // Four bits more for each new element, and for those of the first 64 and the last 65 to 128 tokens of each sequence.
        let append = workload("append/append/int4");
        assert_eq!(append.bytes(), 256 * 8 * (2 * 128 * 2 + 2 * 66 + 2 * 64));
        let decode = workload("context/8-2-ctx4096/int8");
        assert_eq!(decode.residual_bytes(), 0);
        let decode = workload("single/32-8-ctx8192/int4");
        assert_eq!(decode.residual_bytes(), 192 * 8 * 128);
        assert_eq!(decode.bytes(), 8192 * 8 * 2 * 66 + 192 * 8 * 128);
        let decode = workload("single/32-8-ctx8192/int8/int4");
        assert_eq!(decode.residual_bytes(), 192 * 8 * 64);
        let both = workload("append/append-then-decode/int8");
        assert_eq!(both.bytes(), both.cache_bytes() + append.bytes());
    }

    #[test]
    fn long_steps_rotate_over_few_copies() {
        let copies = |name: &str| workload(name).copies(400 << 20, 200);
        // 2 KV heads of 1024 tokens, 260 bytes each: 788 copies, and no more than 200.
        assert_eq!(copies("context/8-2-ctx1024/int8"), 200);
        assert_eq!(copies("context/8-2-ctx65536/int8"), 13);
        // 32 prompts of 1024 tokens, which see 512.5 on average: 138 GFLOP. One of 32768: 4.4 TFLOP.
        assert_eq!(copies("prefill/16-1-ctx1024-batch32/int8"), 29);
        assert_eq!(copies("prefill/16-1-ctx32768-batch1/int8"), 1);
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
}
