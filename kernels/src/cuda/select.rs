//! The fastest decode kernel of a problem: a pure function of the problem, the device's limits and the caller's preferences.

use attn_core::{KvFormat, Problem, Scheme};

use super::{
    config::{
        BULK_SHARED, DeviceLimits, Kernel, KernelConfig, KvLayout, LowLatency, Preferences,
        RESERVED_SHARED, SM_TEAMS, WARPGROUPS,
    },
    cost::{Cost, fastest_split, split_kv_us},
    smem::{Stage, shared_bytes},
    split::{kv_heads, rows},
};

/// The most CTAs along a grid's second and third axis.
const MAX_GRID: usize = 65_535;

/// The most sequences that a warp finds the longest of at once.
const FEW_SEQUENCES: usize = 32;

/// A decode kernel's specialization apart from its configuration.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Query rows per KV head.
    pub rows: usize,
    /// Format of the cache.
    pub format: KvFormat,
    /// Elements per head.
    pub head_dim: usize,
    /// How K and V lie.
    pub layout: KvLayout,
}

impl Shape {
    /// The shape of a problem.
    pub fn new(problem: &Problem, format: KvFormat, layout: KvLayout) -> Self {
        Shape {
            rows: rows(problem),
            format,
            head_dim: problem.head_dim,
            layout,
        }
    }

    fn shared_bytes(&self, config: &KernelConfig) -> usize {
        shared_bytes(config, self.format, self.head_dim, self.layout)
    }

    /// Whether an SM has room for `ctas` CTAs, or teams of `low_latency.cu`.
    fn fits(&self, config: &KernelConfig, ctas: usize, shared_limit: usize) -> bool {
        ctas * (self.shared_bytes(config) + RESERVED_SHARED) <= shared_limit + RESERVED_SHARED
    }

    /// The configuration of `split_kv.cu`, with `shared_limit` bytes of shared memory in a CTA; `None` if nothing fits.
    pub(crate) fn split_kv(&self, shared_limit: usize) -> Option<KernelConfig> {
        // Measured on an H200 (docs/log/2026-11-cuda.md): a second row group per warp spills but for 32 rows; 48 rows are faster as two
        // blocks of 24 (58 µs) than as one of 48 (70) or two of 32 (70).
        let warps = [(2, 2), (1, 3), (1, 2), (1, 1)];
        let wanted = match self.rows {
            0..=8 => 3,
            9..=16 => 2,
            _ if self.head_dim > 128 => 2,
            17..=24 | 33..=48 => 1,
            _ => 0,
        };
        let smaller = || warps[wanted..].iter().copied();
        smaller()
            .find_map(|warps| self.split_kv_of(warps, 2, shared_limit))
            .or_else(|| smaller().find_map(|warps| self.split_kv_of(warps, 1, shared_limit)))
    }

    /// As many CTAs and stages as fit, with `least` stages at least where there is one CTA.
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
                })
                .find(|config| self.fits(config, ctas, shared_limit))
        })
    }

    /// The configuration of `split_kv.cu` with `few_tiles.cuh`; `None` where it does not cover the shape.
    pub(crate) fn few_tiles(&self, shared_limit: usize) -> Option<KernelConfig> {
        let config = self.split_kv(shared_limit)?;
        let v_groups = self.format.v.groups(self.head_dim);
        // A warp has a quarter of the dims, which lie in one of V's groups or are some of them; a ring of stages has a tile.
        let is_covered = shared_limit >= BULK_SHARED
            && self.rows <= config.rows()
            && (config.row_groups, config.row_warps) == (1, 1)
            && self.head_dim.is_multiple_of(64)
            && (matches!(v_groups, 1 | 2) || v_groups.is_multiple_of(4))
            && config.stages >= Stage::new(self.format, self.head_dim, self.layout).of_tile;
        is_covered.then_some(KernelConfig {
            kernel: Kernel::SplitKvFewTiles,
            ..config
        })
    }

    /// The configurations of `low_latency.cu`; none where it does not cover the shape.
    fn low_latency(&self, shared_limit: usize) -> impl Iterator<Item = KernelConfig> {
        let (rows, format) = (self.rows, self.format);
        let is_int8 = |scheme: Scheme| scheme.is_integer() && scheme.code_bits() == 8;
        let has_one_scale = |scheme: Scheme| is_int8(scheme) && scheme.groups(self.head_dim) == 1;
        // A warp has a quarter of the dims, which lie in one of V's groups or are some of them. Registers suffice for two row groups of int8
        // with one scale alone, and for 192 and 256 dims of int8 alone.
        let is_covered = matches!(format.v.groups(self.head_dim), 1 | 2 | 4 | 8)
            && match self.head_dim {
                64 | 128 => {
                    rows <= 8 || rows <= 16 && has_one_scale(format.k) && has_one_scale(format.v)
                }
                192 | 256 => rows <= 8 && is_int8(format.k) && is_int8(format.v),
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
                    })
                    .find(|config| shape.fits(config, SM_TEAMS, shared_limit))
            })
    }

    /// The configuration of `many_rows.cu`, one of whose kernels this is; `None` where it does not cover the shape.
    pub(crate) fn many_rows(&self, kernel: Kernel, shared_limit: usize) -> Option<KernelConfig> {
        let KvFormat { k, v } = self.format;
        let has_one_scale = |scheme: Scheme| scheme.groups(self.head_dim) == 1;
        let have_one_scale = has_one_scale(k) && has_one_scale(v);
        let is_covered = match kernel {
            Kernel::ManyRowsFast => self.format.is_integer() && have_one_scale,
            _ if self.format.is_integer() => k.code_bits() == v.code_bits() && have_one_scale,
            _ => k == v,
        };
        // Its products are Hopper's, and read K and V as pages of whole tiles have them.
        if self.rows <= 8
            || !matches!(self.head_dim, 64 | 96 | 128)
            || self.layout.page_size() < 64
            || shared_limit < BULK_SHARED
            || !is_covered
        {
            return None;
        }
        let row_warps = if self.rows > 64 { WARPGROUPS } else { 1 };
        (2..=9 * row_warps)
            .rev()
            .map(|stages| KernelConfig {
                kernel,
                row_groups: 8,
                row_warps,
                stages,
                ctas: 1,
            })
            .find(|config| self.fits(config, 1, shared_limit))
    }

    /// The kernels for every batch and length of the shape: `split_kv.cu` first, then those of `many_rows.cu` and `low_latency.cu`, and
    /// `split_kv.cu` with `few_tiles.cuh`.
    pub fn all(&self, shared_limit: usize) -> impl Iterator<Item = KernelConfig> {
        let split_kv = self.split_kv(shared_limit).into_iter();
        let many_rows = [Kernel::ManyRows, Kernel::ManyRowsFast]
            .into_iter()
            .filter_map(move |kernel| self.many_rows(kernel, shared_limit));
        split_kv
            .chain(many_rows)
            .chain(self.low_latency(shared_limit))
            .chain(self.few_tiles(shared_limit))
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
    // Measured on an H200: 32 rows, which `split_kv.cu` has in one block, take it 107 µs, and `many_rows.cu` 154; 48 rows 68 and 49.
    // Floats, 24 rows · 32, 8 heads a KV head: `split_kv.cu` 48 · 54 µs in bf16 and 44 · 55 in fp8, `many_rows.cu` 43 and 49; many sequences of 24 rows
    // 132 and 146. By the rows alone, as the two round floats otherwise.
    let few = if format.is_integer() && !preferences.floats {
        32
    } else {
        24
    };
    let is_faster = shape.rows > few && preferences.config.is_none();
    if !preferences.many_rows.unwrap_or(is_faster) {
        return None;
    }
    let fast = preferences
        .floats
        .then(|| shape.many_rows(Kernel::ManyRowsFast, limits.shared_limit));
    fast.flatten()
        .or_else(|| shape.many_rows(Kernel::ManyRows, limits.shared_limit))
}

/// The fastest kernel of a problem, by its longest sequence; `None` if nothing fits.
pub fn select(
    problem: &Problem,
    format: KvFormat,
    layout: KvLayout,
    limits: DeviceLimits,
    preferences: &Preferences,
) -> Option<KernelConfig> {
    if let Some(config) = many_rows(problem, format, layout, limits, preferences) {
        return Some(config);
    }
    let shape = Shape::new(problem, format, layout);
    let chosen = low_latency_kernel(problem, format, limits.sms, preferences.low_latency);
    let low_latency = shape
        .low_latency(limits.shared_limit)
        .find(|config| chosen == Some(config.kernel));
    low_latency
        .or(preferences.config)
        .or_else(|| few_tiles(problem, &shape, limits, preferences))
        .or_else(|| shape.split_kv(limits.shared_limit))
}

/// The configuration of `split_kv.cu` with `few_tiles.cuh`, where the caller wants it.
fn few_tiles(
    problem: &Problem,
    shape: &Shape,
    limits: DeviceLimits,
    preferences: &Preferences,
) -> Option<KernelConfig> {
    let config = shape.few_tiles(limits.shared_limit)?;
    let slots = limits.sms * config.ctas / kv_heads(problem).max(1);
    let is_wanted = preferences.few_tiles && slots > 0;
    (is_wanted && problem.batch() <= FEW_SEQUENCES).then_some(config)
}

/// The kernel of `low_latency.cu` that is faster than the others, or preferred. It has a launch then.
fn low_latency_kernel(
    problem: &Problem,
    format: KvFormat,
    sms: usize,
    preference: LowLatency,
) -> Option<Kernel> {
    if problem.batch() > MAX_GRID || problem.num_kv_heads > MAX_GRID {
        return None;
    }
    let cost = Cost::new(problem, format);
    let global = Some(Kernel::LowLatencyGlobal);
    if preference == LowLatency::Global && fastest_split(problem, sms, &cost, global).is_some() {
        return global;
    }
    let split = fastest_split(problem, sms, &cost, None);
    let kernel = split.map_or(Kernel::LowLatencyCluster, |split| split.via.kernel());
    let us = match split {
        Some(split) => Some(cost.of_split(&split)),
        None => cost.of_waves(problem, sms),
    };
    let is_chosen = match preference {
        LowLatency::Auto | LowLatency::Global => {
            us.is_some_and(|us| us < split_kv_us(problem, format, sms))
        }
        LowLatency::Always => true,
        LowLatency::Never => false,
    };
    is_chosen.then_some(kernel)
}

#[cfg(test)]
mod tests {
    use super::{super::launch::Launch, *};
    use attn_core::Heads;

    fn shape(rows: usize, format: KvFormat, head_dim: usize, layout: KvLayout) -> Shape {
        Shape {
            rows,
            format,
            head_dim,
            layout,
        }
    }

    #[test]
    fn every_problem_fits_shared_memory_and_covers_its_rows() {
        for limit in [163 * 1024, 227 * 1024] {
            for rows in 1..=1024 {
                for dim in [64, 80, 96, 128, 192, 256] {
                    for format in [KvFormat::INT8, KvFormat::INT4, KvFormat::same(Scheme::F16)] {
                        let Some(g) = shape(rows, format, dim, KvLayout::Pages(64))
                            .all(limit)
                            .next()
                        else {
                            let largest = format == KvFormat::same(Scheme::F16) && dim == 256;
                            assert!(largest && limit < 200 * 1024, "{format} {dim} {rows}");
                            continue;
                        };
                        let launch = Launch::new(
                            &g,
                            &Problem::new(
                                Heads {
                                    q: 2 * rows,
                                    kv: 2,
                                    dim,
                                },
                                vec![5000; 3],
                            ),
                            format,
                            132,
                        );
                        assert!(launch.row_blocks * g.rows() >= rows, "{rows}");
                        assert!(
                            g.threads() <= 512
                                && shared_bytes(&g, format, dim, KvLayout::Pages(64)) <= limit
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn short_batches_split_segments_by_tile() {
        let g = shape(4, KvFormat::INT8, 128, KvLayout::Pages(64))
            .split_kv(227 * 1024)
            .unwrap();
        let is_split = |heads: usize, batch: usize, kv_len| {
            let problem = Problem::new(
                Heads {
                    q: 4 * heads,
                    kv: heads,
                    dim: 128,
                },
                vec![kv_len; batch],
            );
            Launch::new(&g, &problem, KvFormat::INT8, 132).partial_per_segment
        };
        assert!(is_split(8, 1, 1024));
        assert!(!is_split(1, 512, 8192));
        assert!(!is_split(1, 1, 1 << 20));
    }

    const LIMITS: DeviceLimits = DeviceLimits {
        shared_limit: BULK_SHARED,
        sms: 132,
    };

    fn chosen(problem: &Problem, format: KvFormat, low_latency: LowLatency) -> KernelConfig {
        let preferences = Preferences {
            low_latency,
            ..Preferences::default()
        };
        select(problem, format, KvLayout::Pages(64), LIMITS, &preferences).unwrap()
    }

    fn kernel(heads: [usize; 2], kv_len: usize, batch: usize, format: KvFormat) -> Kernel {
        let problem = Problem::new(
            Heads {
                q: heads[0],
                kv: heads[1],
                dim: 128,
            },
            vec![kv_len; batch],
        );
        chosen(&problem, format, LowLatency::Auto).kernel
    }

    /// The kernel that was measured faster is chosen (docs/log/2026-11-cuda.md, lines 39, 41, 49, 51, 64 and 72).
    #[test]
    fn latency_and_full_waves_go_to_teams_that_share_tiles() {
        let (int8, f16, bf16) = (
            KvFormat::INT8,
            KvFormat::same(Scheme::F16),
            KvFormat::same(Scheme::Bf16),
        );
        let kinds = [
            (
                int8,
                [32, 8],
                &[(1, 1), (1024, 1), (4096, 1)][..],
                Kernel::LowLatencyCluster,
            ),
            (
                int8,
                [32, 8],
                &[(8192, 1), (32_768, 1)],
                Kernel::LowLatencyGlobal,
            ),
            (int8, [32, 8], &[(131_072, 1)], Kernel::SplitKv),
            (
                int8,
                [8, 1],
                &[(8192, 32), (8192, 85)],
                Kernel::LowLatencyGlobal,
            ),
            (
                int8,
                [8, 1],
                &[(8192, 64), (8192, 128)],
                Kernel::LowLatencyCluster,
            ),
            (int8, [8, 1], &[(8192, 256), (8192, 512)], Kernel::SplitKv),
            (
                f16,
                [32, 32],
                &[(128, 1), (512, 1), (2048, 1), (4096, 1), (128, 8)],
                Kernel::LowLatencyCluster,
            ),
            (f16, [32, 32], &[(128, 16)], Kernel::SplitKv),
            (
                bf16,
                [8, 1],
                &[(8192, 512), (8192, 400)],
                Kernel::LowLatencyCluster,
            ),
            (
                bf16,
                [32, 8],
                &[(4096, 64), (1024, 128)],
                Kernel::LowLatencyCluster,
            ),
            (
                bf16,
                [32, 8],
                &[(8192, 1), (32_768, 1)],
                Kernel::LowLatencyGlobal,
            ),
            (bf16, [8, 1], &[(8192, 300)], Kernel::SplitKv),
            (int8, [8, 2], &[(65_536, 1)], Kernel::SplitKv),
            (KvFormat::INT4, [8, 1], &[(8192, 512)], Kernel::SplitKv),
        ];
        for (format, heads, shapes, want) in kinds {
            for &(kv_len, batch) in shapes {
                let got = kernel(heads, kv_len, batch, format);
                assert_eq!(got, want, "{format}, {kv_len} tokens, batch {batch}");
            }
        }
    }

    #[test]
    fn head_dims_choose_for_themselves() {
        for (head_dim, batch, want) in [
            (64, 256, Kernel::SplitKv),
            (96, 167, Kernel::SplitKv),
            (192, 85, Kernel::LowLatencyGlobal),
            (256, 64, Kernel::LowLatencyCluster),
        ] {
            let problem = Problem::new(
                Heads {
                    q: 8,
                    kv: 1,
                    dim: head_dim,
                },
                vec![8192; batch],
            );
            let got = chosen(&problem, KvFormat::INT8, LowLatency::Auto);
            assert_eq!(got.kernel, want, "{head_dim}");
        }
    }

    #[test]
    fn low_latency_can_be_had_always_and_never() {
        let problem = Problem::new(
            Heads {
                q: 8,
                kv: 1,
                dim: 128,
            },
            vec![8192; 512],
        );
        let of = |problem: &Problem, preference| {
            let config = chosen(problem, KvFormat::INT8, preference);
            let launch = Launch::new(&config, problem, KvFormat::INT8, 132);
            (config.kernel, launch.grid)
        };
        let always = of(&problem, LowLatency::Always);
        assert_eq!(always, (Kernel::LowLatencyCluster, [1, 1, 512]));
        let never = of(&problem, LowLatency::Never);
        assert_eq!(never, (Kernel::SplitKv, [264, 1, 1]));
        assert_eq!(of(&problem, LowLatency::Global).0, Kernel::SplitKv);
        let long = Problem::new(
            Heads {
                q: 8,
                kv: 1,
                dim: 128,
            },
            vec![300, 1],
        );
        assert_eq!(of(&long, LowLatency::Global).0, Kernel::LowLatencyGlobal);
        let few = Problem::new(
            Heads {
                q: 8,
                kv: 1,
                dim: 128,
            },
            vec![100],
        );
        assert_eq!(of(&few, LowLatency::Never).0, Kernel::SplitKv);
    }

    #[test]
    fn plans_for_few_long_sequences_have_a_second_way_for_short_ones() {
        let of = |batch: usize, kv_len, format, preferences: Preferences| {
            let heads = Heads {
                q: 32,
                kv: 8,
                dim: 128,
            };
            let problem = Problem::new(heads, vec![kv_len; batch]);
            let layout = KvLayout::Pages(64);
            let config = select(&problem, format, layout, LIMITS, &preferences).unwrap();
            let launch = Launch::new(&config, &problem, format, 132);
            (config.kernel, launch.few_slots, launch.few_places)
        };
        let auto = Preferences::default();
        let wanted = Preferences {
            few_tiles: true,
            ..auto
        };
        let (int8, long) = (KvFormat::INT8, 131_072);
        let few = Kernel::SplitKvFewTiles;
        assert_eq!(of(1, long, int8, wanted), (few, 33, 64));
        assert_eq!(of(4, long, KvFormat::INT4, wanted), (few, 8, 16));
        assert_eq!(of(5, long, int8, wanted), (few, 6, 12));
        assert_eq!(of(1, long, int8, auto), (Kernel::SplitKv, 0, 0));
        // A ring of one stage holds no tile.
        let bf16 = KvFormat::same(Scheme::Bf16);
        let alone = Preferences {
            low_latency: LowLatency::Never,
            ..wanted
        };
        assert_eq!(of(1, long, bf16, alone).0, Kernel::SplitKv);
        // More sequences than a warp finds the longest of; shorter ones, which `low_latency.cu` has.
        assert_eq!(of(32, long, int8, alone), (few, 1, 2));
        assert_eq!(of(33, long, int8, alone).0, Kernel::SplitKv);
        assert_eq!(of(1, 1024, int8, wanted).0, Kernel::LowLatencyCluster);
    }

    #[test]
    fn floats_are_taken_for_many_rows_of_integers_where_the_caller_allows_them() {
        let heads = Heads {
            q: 16,
            kv: 1,
            dim: 128,
        };
        let kernel = |format: &str, q_len: usize, floats| {
            let problem = Problem::new(heads, [8192]).q_len(q_len);
            let preferences = Preferences {
                floats,
                ..Preferences::default()
            };
            let format = format.parse().unwrap();
            let layout = KvLayout::Pages(64);
            select(&problem, format, layout, LIMITS, &preferences).map(|config| config.kernel)
        };
        for format in ["int8", "int4", "int4-g1", "int8-tensor"] {
            assert_eq!(kernel(format, 64, true), Some(Kernel::ManyRowsFast));
            assert_eq!(kernel(format, 64, false), Some(Kernel::ManyRows));
        }
        // Pairs of code sizes, which the exact kernel does not unpack; 24 rows are few.
        assert_eq!(kernel("int8/int4", 2, true), Some(Kernel::ManyRowsFast));
        assert_eq!(kernel("int8/int4", 64, false), Some(Kernel::SplitKv));
        assert_eq!(kernel("int8", 1, true), Some(Kernel::LowLatencyGlobal));
        // Several scales of a token.
        assert_eq!(kernel("int4-g4", 64, true), Some(Kernel::SplitKv));
    }

    #[test]
    fn a_preferred_configuration_is_taken_where_low_latency_is_not() {
        let problem = Problem::new(
            Heads {
                q: 8,
                kv: 1,
                dim: 128,
            },
            vec![8192; 512],
        );
        let config: KernelConfig = "1,2,3,1".parse().unwrap();
        let preferences = Preferences {
            config: Some(config),
            ..Preferences::default()
        };
        let got = select(
            &problem,
            KvFormat::INT8,
            KvLayout::Pages(64),
            LIMITS,
            &preferences,
        );
        assert_eq!(got, Some(config));
    }
}
