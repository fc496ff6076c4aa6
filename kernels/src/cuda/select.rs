//! The fastest decode kernel of a problem: a pure function of the problem, the device's limits and the caller's preferences.

use attn_core::{HeadDim, KvFormat, Problem, Scheme, arithmetic};

use super::{
    config::{
        BULK_SHARED, DeviceLimits, Kernel, KernelChoice, KernelConfig, KvLayout, Preferences,
        RESERVED_SHARED, SM_TEAMS, WARPGROUPS,
    },
    cost::{Cost, fastest_split, split_kv_us},
    launch::takes_whole_items,
    row_blocks::RowBlocks,
    smem::{Stage, has_wide_rows, shared_bytes, wide_parts},
    split::{has_score_mods, rows},
};

mod many_rows;

/// The most CTAs along a grid's second and third axis.
const MAX_GRID: usize = 65_535;

/// Most dims of a key or a value of floats: the query of a row group takes as many registers as four of integers.
const MOST_FLOAT_DIMS: usize = 256;

/// Rows of a warpgroup of `many_rows.cu` whose threads have one row each.
const FEW_ROWS: usize = 32;

/// Microseconds of wide rows by each kernel that attends them.
struct WideTimes {
    split_kv: Option<f64>,
    many_rows: f64,
}

/// A decode kernel's specialization apart from its configuration.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Query rows per KV head.
    pub rows: usize,
    /// Format of the cache.
    pub format: KvFormat,
    /// Elements per head.
    pub head_dim: HeadDim,
    /// How K and V lie.
    pub layout: KvLayout,
    /// Whether scores are modified, or hidden by more than causality.
    pub score_mods: bool,
}

impl Shape {
    /// The shape of a problem.
    pub fn new(problem: &Problem, format: KvFormat, layout: KvLayout) -> Self {
        Shape {
            rows: rows(problem),
            format,
            head_dim: problem.head_dim,
            layout,
            score_mods: has_score_mods(problem),
        }
    }

    /// Whether an SM has room for `ctas` CTAs, or teams of `low_latency.cu`.
    fn fits(&self, config: &KernelConfig, ctas: usize, shared_limit: usize) -> bool {
        let bytes = shared_bytes(
            config,
            self.format,
            self.head_dim,
            self.layout,
            shared_limit,
        );
        ctas * (bytes + RESERVED_SHARED) <= shared_limit + RESERVED_SHARED
    }

    /// The configuration of `split_kv.cu`, with `shared_limit` bytes of shared memory in a CTA; `None` if nothing fits, and for floats of more dims than a warp has
    /// registers for.
    pub(crate) fn split_kv(&self, shared_limit: usize) -> Option<KernelConfig> {
        if !self.format.is_integer() && self.head_dim.max() > MOST_FLOAT_DIMS {
            return None;
        }
        // Measured on an H200: a second row group per warp spills but for 32 rows; 48 rows are faster as two
        // blocks of 24 (58 µs) than as one of 48 (70) or two of 32 (70).
        let warps = [(2, 2), (1, 3), (1, 2), (1, 1)];
        let wanted = match self.rows {
            0..=8 => 3,
            9..=16 => 2,
            _ if self.head_dim.max() > 128 => 2,
            17..=24 | 33..=48 => 1,
            _ => 0,
        };
        let smaller = || warps[wanted..].iter().copied();
        smaller()
            .find_map(|warps| self.split_kv_of(warps, 2, shared_limit))
            .or_else(|| smaller().find_map(|warps| self.split_kv_of(warps, 1, shared_limit)))
    }

    /// A configuration with as many CTAs and stages as fit, with `least` stages at least where there is one CTA.
    fn split_kv_of(
        &self,
        (row_groups, row_warps): (usize, usize),
        least: usize,
        shared_limit: usize,
    ) -> Option<KernelConfig> {
        // With stages of 12 KB or more one stage per team suffices for two CTAs; smaller ones need two.
        let stage = Stage::new(self.format, self.head_dim, self.layout);
        let is_long = stage.k.min(stage.v) >= 12_288;
        // Two small CTAs cover each other's merges; larger ones leave no registers for a second.
        let most = if (row_groups, row_warps) == (1, 1) {
            2
        } else {
            1
        };
        (1..=most).rev().find_map(|ctas| {
            let least = match ctas {
                2 if is_long => 1,
                2 => 2,
                _ => least,
            };
            (least.max(stage.least)..=6)
                .rev()
                .map(|stages| KernelConfig {
                    kernel: Kernel::SplitKv,
                    row_groups,
                    row_warps,
                    stages,
                    ctas,
                    producers: 0,
                })
                .find(|config| self.fits(config, ctas, shared_limit))
        })
    }

    /// The configurations of `low_latency.cu`; none where it does not cover the shape.
    fn low_latency(&self, shared_limit: usize) -> impl Iterator<Item = KernelConfig> {
        let (rows, format) = (self.rows, self.format);
        let HeadDim { k, v } = self.head_dim;
        let is_int8 = |scheme: Scheme| scheme.is_integer() && scheme.code_bits() == 8;
        let groups = format.groups(self.head_dim);
        let have_one_scale =
            is_int8(format.k) && is_int8(format.v) && groups.iter().all(|side| side.count() == 1);
        // A warp has a quarter of the dims, which lie in one of V's groups or are some of them. Registers suffice for two row groups of int8
        // with one scale alone, and for values of 192 and 256 dims, and keys of 256, of int8 alone.
        let is_covered = matches!(groups[1].count(), 1 | 2 | 4 | 8)
            && match (k, v) {
                (..=192, 64 | 128) => rows <= 8 || rows <= 16 && k <= 128 && have_one_scale,
                (..=256, 64 | 128 | 192 | 256) => {
                    rows <= 8 && is_int8(format.k) && is_int8(format.v)
                }
                _ => false,
            }
            && shared_limit >= BULK_SHARED;
        let shape = *self;
        [Kernel::LowLatencyCluster, Kernel::LowLatencyGlobal]
            .into_iter()
            .filter(move |_| is_covered)
            .filter_map(move |kernel| {
                (3..=6)
                    .rev()
                    .map(|stages| KernelConfig {
                        kernel,
                        row_groups: rows.div_ceil(8).max(1),
                        row_warps: 1,
                        stages,
                        ctas: 1,
                        producers: 0,
                    })
                    .find(|config| shape.fits(config, SM_TEAMS, shared_limit))
            })
    }

    /// The configuration of `many_rows.cu` for wide rows, of which its warpgroups have 64 together; `None` where it does not cover the shape.
    fn wide_rows(&self, shared_limit: usize) -> Option<KernelConfig> {
        let KvFormat { k, v, .. } = self.format;
        let HeadDim { k: k_dim, v: v_dim } = self.head_dim;
        // Parts of K are multiplied 32 bytes at a time; of V a warpgroup's dims are those of an instruction.
        let [k_parts, v_parts] = wide_parts(self.format, self.head_dim);
        let copies = shared_limit >= BULK_SHARED;
        let is_integer = self.format.is_integer();
        let (has_dims, is_covered, least) = match is_integer {
            true => (
                k_dim.is_multiple_of(32 * k_parts) && matches!(v_dim, 128 | 160 | 192 | 256 | 512),
                copies
                    && self.are_bytes()
                    && k.groups(k_dim).count() == 1
                    && v.groups(v_dim).count() == 1,
                2,
            ),
            // Products with K read all of its parts, or two tiles are read at once (`HAS_PAIRS`). Parts of fp8 are turned into f16 one after the other.
            false => (
                k_dim.is_multiple_of(16 * k_parts)
                    && matches!(v_dim, 96 | 128 | 160 | 192 | 256 | 320 | 512),
                k == v,
                match k {
                    _ if copies && self.format.latents && k_dim >= v_dim + arithmetic::TILE => 2,
                    Scheme::Fp8E4m3 => 1,
                    _ => k_parts,
                },
            ),
        };
        // The copy engine has a part of rows as a multiple of what its widest swizzle spans.
        let is_of_boxes = |dim: usize, parts: usize| (2 * dim).is_multiple_of(128 * parts);
        let has_layout = !self.layout.is_rows()
            || k.code_bits() == 16 && is_of_boxes(k_dim, k_parts) && is_of_boxes(v_dim, v_parts);
        let few = self.is_few_of_split_kv(shared_limit);
        if few || !has_dims || !is_covered || !has_layout {
            return None;
        }
        (least..=12)
            .rev()
            .map(|stages| KernelConfig {
                kernel: Kernel::ManyRows,
                row_groups: 4,
                row_warps: WARPGROUPS,
                stages,
                ctas: 1,
                producers: 1,
            })
            .find(|config| self.fits(config, 1, shared_limit))
    }

    /// Whether rows are few and of dims that `split_kv.cu` reads as fast as memory delivers them.
    fn is_few_of_split_kv(&self, shared_limit: usize) -> bool {
        self.rows <= 8 && self.head_dim.max() <= 256 && self.split_kv(shared_limit).is_some()
    }

    /// Estimated times of wide rows that `many_rows.cu` covers.
    fn wide_us(&self, problem: &Problem, limits: DeviceLimits) -> Option<WideTimes> {
        let many_rows = self.wide_rows(limits.shared_limit)?;
        let split_kv = self.split_kv(limits.shared_limit);
        let blocks = RowBlocks::new(problem, limits.sms);
        Some(WideTimes {
            split_kv: split_kv.map(|config| blocks.split_kv_us(config.rows())),
            many_rows: blocks.wide_us(many_rows.rows()),
        })
    }

    /// Whether codes of both sides are integers of 8 bits.
    fn are_bytes(&self) -> bool {
        let KvFormat { k, v, .. } = self.format;
        self.format.is_integer() && k.code_bits() == 8 && v.code_bits() == 8
    }

    /// The configurations of `many_rows.cu`, for runs of spans and for whole work items.
    pub(crate) fn all_many_rows(&self, shared_limit: usize) -> impl Iterator<Item = KernelConfig> {
        let config = self.many_rows(shared_limit);
        let whole = config.and_then(|config| self.whole_items(config, shared_limit));
        config.into_iter().chain(whole)
    }

    /// The same configuration for whole work items, whose query rows may take shared memory of stages; `None` where too few are left.
    fn whole_items(&self, config: KernelConfig, shared_limit: usize) -> Option<KernelConfig> {
        (config.stages.min(4)..=config.stages)
            .rev()
            .step_by(2)
            .map(|stages| KernelConfig {
                kernel: Kernel::ManyRowsWhole,
                stages,
                ..config
            })
            .find(|config| self.fits(config, 1, shared_limit))
    }

    /// The kernels for every batch and length of the shape: `split_kv.cu` first, then those of `many_rows.cu` and `low_latency.cu`.
    pub fn all(&self, shared_limit: usize) -> impl Iterator<Item = KernelConfig> {
        let split_kv = self.split_kv(shared_limit).into_iter();
        split_kv
            .chain(self.all_many_rows(shared_limit))
            .chain(self.low_latency(shared_limit))
    }
}

/// The configuration of `many_rows.cu` for a problem that it covers, where the caller wants it.
pub fn many_rows(
    problem: &Problem,
    format: KvFormat,
    layout: KvLayout,
    limits: DeviceLimits,
    preferences: &Preferences,
) -> Option<KernelConfig> {
    let shape = Shape::new(problem, format, layout);
    // Measured on an H200: 48 rows 68 µs by `split_kv.cu`, 49 by `many_rows.cu`; up to 32 rows, which `split_kv.cu` has in one block: `few_rows_are_faster`.
    // Floats, 24 rows · 32, 8 heads a KV head: `split_kv.cu` 48 · 54 µs in bf16, `many_rows.cu` 43; many sequences of 24 rows 132 and 146. fp8 on an H100,
    // 18 rows · 24 · many sequences of 24: 45.7 · 46.7 · 126 and 37.1 · 37.4 · 110. By the rows alone, as the two round floats otherwise. Kernels without a copy engine, on an
    // H100: 12 rows in bf16 102 and 63, in fp8 53 and 60, 24 rows in fp8 69 and 60; int8 40 rows 79 and 53, int4 24 · 32 · 40 rows 44 · 64 · 81 and 70 · 70 · 72.
    let few = match format.k {
        Scheme::Fp8E4m3 => 16,
        _ if format.is_integer() => 32,
        _ if limits.shared_limit < BULK_SHARED => 8,
        _ => 24,
    };
    // Of many dims `split_kv.cu` has 8 or 16 floats' rows in a block, and reads the cache for each: on an H200 32 rows of 192/128 in bf16 175 µs, where 8 take 44.
    let few = match shape.split_kv(limits.shared_limit) {
        Some(config) if !format.is_integer() && problem.head_dim.max() > 128 => {
            few.min(config.rows())
        }
        _ => few,
    };
    let are_many = match has_wide_rows(format, problem.head_dim) {
        // Nothing else has floats of so many dims.
        true if !format.is_integer() => true,
        true => shape
            .wide_us(problem, limits)
            .is_some_and(|us| us.split_kv.is_none_or(|split_kv| us.many_rows < split_kv)),
        false => shape.rows > few || shape.few_rows_are_faster(problem, limits),
    };
    let is_wanted = match preferences.kernel {
        KernelChoice::Auto => are_many,
        KernelChoice::ManyRows => true,
        _ => false,
    };
    if !is_wanted {
        return None;
    }
    let config = shape.many_rows(limits.shared_limit)?;
    let are_blocks = preferences.are_blocks;
    let whole = takes_whole_items(problem, config.row_warps, limits.sms, are_blocks)
        .then(|| shape.whole_items(config, limits.shared_limit))
        .flatten();
    Some(whole.unwrap_or(config))
}

/// Tokens of a page that `dequantize.cu` and `gather_pages.cu` write: those of a tile.
const DEQUANTIZED_PAGE: usize = arithmetic::TILE;

/// Query rows of a KV head that read each cached token, from which on it is faster to write it again first: for formats whose integers are attended exactly
/// otherwise, small pages, and rows without a copy engine; and for fp8, whose codes become f16 in `many_rows.cu` otherwise.
const MANY_READERS: [usize; 2] = [512, 4096];
/// The same of fp8 of more than 128 dims, which `split_kv.cu` alone attends otherwise and reads for each few rows: so many, and more the fewer tokens of KV heads
/// there are, as writing takes a launch. Measured on an H200, 192/128 dims, 262144 tokens of KV heads, by `split_kv.cu` and written first, 32 rows · 64 · 128: 72 · 139 ·
/// 278 µs and 127 · 130 · 135; 256 dims, 65536 tokens: 33 · 60 · 118 and 72 · 74 · 78; 192/128, 8192 tokens, 128 rows 20 and 46.
const BLOCK_READERS: f64 = 64.0;
const BLOCK_READERS_TOKENS: f64 = 4e6;

/// The format and the layout in which the cache of a problem is attended, where it is first written again as pages of 64 tokens: in 16-bit floats by
/// `dequantize.cu` and `dequantize_rows.cu`, or as it is by `gather_pages.cu`.
pub fn dequantized(
    problem: &Problem,
    format: KvFormat,
    layout: KvLayout,
    limits: DeviceLimits,
    preferences: &Preferences,
) -> Option<(KvFormat, KvLayout)> {
    let attended = dequantized_as(problem, format, layout, limits.shared_limit)?;
    let wanted = preferences.dequantize.unwrap_or_else(|| {
        let tokens = problem.kv_lens.iter().map(|&len| len as f64);
        let reads = tokens
            .clone()
            .zip(&problem.q_lens)
            .map(|(len, &q_len)| len * q_len as f64);
        let tokens = tokens.sum::<f64>();
        let becomes_f16_anyway = !format.is_integer() && attended.0 != format;
        let is_read_by_blocks = becomes_f16_anyway
            && problem.head_dim.max() > 128
            && Shape::new(problem, format, layout)
                .many_rows(limits.shared_limit)
                .is_none();
        let readers = match is_read_by_blocks {
            true => BLOCK_READERS + BLOCK_READERS_TOKENS / (tokens * problem.num_kv_heads as f64),
            false => MANY_READERS[usize::from(becomes_f16_anyway)] as f64,
        };
        problem.heads_per_kv() as f64 * reads.sum::<f64>() >= readers * tokens
    });
    many_rows(problem, attended.0, attended.1, limits, preferences)?;
    wanted.then_some(attended)
}

/// What is dequantized first, whether that is faster or not.
pub(crate) fn dequantized_as(
    problem: &Problem,
    format: KvFormat,
    layout: KvLayout,
    shared_limit: usize,
) -> Option<(KvFormat, KvLayout)> {
    let [f16, bf16] = [Scheme::F16, Scheme::Bf16].map(KvFormat::same);
    let is_16_bit = format == f16 || format == bf16;
    let are_exact = [format.k, format.v]
        .iter()
        .all(|side| matches!(side, Scheme::Fp8E4m3 | Scheme::F16));
    // Rows are written with as many dims of V as of K, pages with those that `many_rows.cu` covers.
    let pages = KvLayout::Pages(DEQUANTIZED_PAGE);
    let are_alike = problem.head_dim.one().is_some();
    let has_dims = are_alike
        || !layout.is_rows()
            && Shape::new(problem, f16, pages)
                .many_rows(shared_limit)
                .is_some();
    // `dequantize.cu` writes no more dims of V than of K, and parts of wide rows are copied without regard to residuals.
    let has_windows = [format.k, format.v]
        .iter()
        .any(|side| side.window().tiles() > 0);
    let has_dims = has_dims
        && problem.head_dim.k >= problem.head_dim.v
        && !(has_windows && has_wide_rows(f16, problem.head_dim));
    let becomes_f16 =
        !is_16_bit && !format.latents && has_dims && (are_exact || problem.may_use_floats(format));
    let as_it_is = match layout {
        // Small pages take many copies to a tile.
        KvLayout::Pages(tokens) => tokens < DEQUANTIZED_PAGE,
        // Without a copy engine rows take a copy for each of a token's 16 bytes; with one, a few for each page.
        KvLayout::Rows => is_16_bit && are_alike && shared_limit < BULK_SHARED,
        KvLayout::PagedRows(tokens) => {
            let are_slow = tokens < DEQUANTIZED_PAGE || shared_limit < BULK_SHARED;
            is_16_bit && are_alike && are_slow
        }
    };
    let attended = match becomes_f16 {
        true => f16,
        false => as_it_is.then_some(format)?,
    };
    Some((attended, pages))
}

/// A kernel that covers a problem, and how long it is estimated to take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The kernel as it would be configured.
    pub config: KernelConfig,
    /// Microseconds for the plan's longest sequences; `None` for rows of `many_rows.cu` that are not wide, which is chosen by rows and spans, and where no estimate holds.
    pub us: Option<f64>,
}

/// The kernel of a problem, and what it was selected among.
#[derive(Debug, Clone)]
pub struct Selected {
    /// The kernel.
    pub config: KernelConfig,
    /// One of each source that covers the problem: `split_kv.cu`, `low_latency.cu`, `many_rows.cu`.
    pub candidates: Vec<Candidate>,
}

/// The fastest kernel of a problem, by its longest sequence; `None` if nothing fits.
pub fn select(
    problem: &Problem,
    format: KvFormat,
    layout: KvLayout,
    limits: DeviceLimits,
    preferences: &Preferences,
) -> Option<Selected> {
    let shape = Shape::new(problem, format, layout);
    let shared_limit = limits.shared_limit;
    let us = split_kv_us(problem, format, limits);
    let table = || shape.split_kv(shared_limit);
    let split_kv = preferences.kernel.config().or_else(table);
    let low_latency = LowLatency::of(problem, format, limits, preferences);
    let low_latency = low_latency.and_then(|estimated| {
        let mut configs = shape.low_latency(shared_limit);
        let config = configs.find(|config| config.kernel == estimated.kernel);
        config.map(|config| (config, estimated))
    });
    let chosen = low_latency.filter(|(_, estimated)| estimated.is_chosen(preferences.kernel, us));
    let many = many_rows(problem, format, layout, limits, preferences);
    // A work item is one CTA's there. More rows than that are no block of `many_rows`, which the caller does not want then.
    let fits = shape.many_rows(shared_limit);
    let at_last = fits.filter(|config| shape.rows <= config.rows());
    let config = many
        .or(chosen.map(|(config, _)| config))
        .or(split_kv)
        .or(at_last)?;
    let is_estimated = format.is_integer() && has_wide_rows(format, problem.head_dim);
    let wide = is_estimated.then(|| shape.wide_us(problem, limits));
    let wide = wide.flatten();
    let split_kv_us = wide.as_ref().map_or(Some(us), |wide| wide.split_kv);
    let candidates = [
        split_kv.map(|config| (config, split_kv_us)),
        low_latency.map(|(config, estimated)| (config, estimated.us)),
        many.or(fits)
            .map(|config| (config, wide.map(|wide| wide.many_rows))),
    ];
    let candidates = candidates.into_iter().flatten();
    Some(Selected {
        config,
        candidates: candidates
            .map(|(config, us)| Candidate { config, us })
            .collect(),
    })
}

/// The kernel of `low_latency.cu` that is faster than the other, or preferred.
#[derive(Clone, Copy)]
struct LowLatency {
    kernel: Kernel,
    us: Option<f64>,
    /// Whether merging through global memory has been asked for, and has a launch.
    is_preferred: bool,
}

impl LowLatency {
    /// `None` where a grid has no room for the problem's sequences or heads.
    fn of(
        problem: &Problem,
        format: KvFormat,
        limits: DeviceLimits,
        preferences: &Preferences,
    ) -> Option<Self> {
        if preferences.are_blocks || problem.batch() > MAX_GRID || problem.num_kv_heads > MAX_GRID {
            return None;
        }
        let (cost, sms) = (Cost::new(problem, format, limits), limits.sms);
        let is_global = preferences.kernel == KernelChoice::LowLatencyGlobal;
        let global = Some(Kernel::LowLatencyGlobal).filter(|_| is_global);
        let preferred = global.and_then(|_| fastest_split(problem, sms, &cost, global));
        let split = preferred.or_else(|| fastest_split(problem, sms, &cost, None));
        Some(LowLatency {
            kernel: split.map_or(Kernel::LowLatencyCluster, |split| split.via.kernel()),
            us: match split {
                Some(split) => Some(cost.of_split(&split)),
                None => cost.of_waves(problem, sms),
            },
            is_preferred: preferred.is_some(),
        })
    }

    /// Whether it is chosen rather than `split_kv.cu`, which takes so long.
    fn is_chosen(&self, choice: KernelChoice, split_kv_us: f64) -> bool {
        // A plan serves shorter sequences, too, of which `split_kv.cu` takes up to 4 µs more: worth a twentieth of the longest. Those of a plan for global memory all go
        // through it.
        let serves_all = self.kernel == Kernel::LowLatencyGlobal;
        let worth = if serves_all { 1.05 } else { 1.0 };
        let is_faster = self.us.is_some_and(|us| us < worth * split_kv_us);
        match choice {
            KernelChoice::Auto | KernelChoice::LowLatencyGlobal => self.is_preferred || is_faster,
            KernelChoice::LowLatency => true,
            KernelChoice::SplitKv(_) | KernelChoice::ManyRows => false,
        }
    }
}

#[cfg(test)]
mod tests;
