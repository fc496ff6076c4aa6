//! The launch of a problem: how its work items are split among CTAs and teams, and which way partials go to the merge.

use attn_core::{KvFormat, Problem, arithmetic};

use super::{
    config::{Kernel, KernelConfig, SM_TEAMS, TEAMS},
    cost::Cost,
    smem::TEAM_PARTIALS,
};

/// CTAs of a cluster: more are not portable, and were not faster.
const MAX_CLUSTER: usize = 8;

/// The grid of a launch, and the partials that its CTAs exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Row blocks per KV head.
    pub row_blocks: usize,
    /// Partials per work item in the workspace.
    pub max_partials: usize,
    /// Whether a partial is a segment's state. If not, it is a span's.
    pub partial_per_segment: bool,
    /// CTAs along each axis of the grid.
    pub grid: [usize; 3],
    /// Threads of a CTA.
    pub threads: usize,
    /// Teams of a CTA that have shared memory of their own: more than 1 only in `low_latency.cu`.
    pub teams: usize,
    /// CTAs of a cluster, along the grid's first axis: more than 1 only in `low_latency.cu`.
    pub cluster: usize,
}

impl Default for Launch {
    /// One CTA without threads.
    fn default() -> Self {
        Launch {
            row_blocks: 1,
            max_partials: 0,
            partial_per_segment: false,
            grid: [1; 3],
            threads: 0,
            teams: 1,
            cluster: 1,
        }
    }
}

impl Launch {
    /// The launch for lengths up to the problem's longest on `sms` SMs.
    pub fn new(config: &KernelConfig, problem: &Problem, format: KvFormat, sms: usize) -> Self {
        match config.kernel {
            Kernel::SplitKv => Self::split_kv(config, problem, sms),
            Kernel::ManyRows => Self::many_rows(config, problem, sms),
            Kernel::LowLatencyCluster | Kernel::LowLatencyGlobal => {
                Self::low_latency(config, problem, format, sms)
            }
        }
    }

    /// Partials of the workspace; `usize::MAX` where there would be more.
    pub fn partials(&self, batch: usize, num_kv_heads: usize) -> usize {
        let of_head = self.row_blocks.saturating_mul(self.max_partials);
        batch.saturating_mul(num_kv_heads).saturating_mul(of_head)
    }

    // Products that would not fit saturate: they only choose a launch, and a launch plan refuses work that kernels cannot add up.

    fn split_kv(config: &KernelConfig, problem: &Problem, sms: usize) -> Self {
        let longest = longest(problem);
        let row_blocks = row_blocks(config, problem);
        let spans = max_segments(longest).div_ceil(arithmetic::SPAN);
        // A team attends a tile of a segment, which has no more than four tiles up to 65536 tokens.
        let partial_per_segment = longest <= TEAMS * arithmetic::TILE * 256
            && kv_heads(problem).saturating_mul(3 * row_blocks * spans) < sms * config.ctas;
        Self::persistent(config, problem, sms, partial_per_segment)
    }

    fn many_rows(config: &KernelConfig, problem: &Problem, sms: usize) -> Self {
        let (ctas, row_blocks) = (sms * config.ctas, row_blocks(config, problem));
        let segments = max_segments(longest(problem));
        let spans = segments.div_ceil(arithmetic::SPAN);
        let each = |n: usize| kv_heads(problem).saturating_mul(n).div_ceil(ctas);
        // Whole spans, unless segments are distributed more evenly: a partial of a segment costs about one segment more.
        let partial_per_segment = each(row_blocks * segments).saturating_add(1)
            < each(row_blocks * spans).saturating_mul(arithmetic::SPAN);
        Self::persistent(config, problem, sms, partial_per_segment)
    }

    /// A grid of as many CTAs as run at once, which divide the work on the device.
    fn persistent(
        config: &KernelConfig,
        problem: &Problem,
        sms: usize,
        partial_per_segment: bool,
    ) -> Self {
        let segments = max_segments(longest(problem));
        Launch {
            row_blocks: row_blocks(config, problem),
            max_partials: if partial_per_segment {
                segments
            } else {
                segments.div_ceil(arithmetic::SPAN)
            },
            partial_per_segment,
            grid: [sms * config.ctas, 1, 1],
            threads: config.threads(),
            ..Launch::default()
        }
    }

    /// The fastest split; one CTA per work item, in waves, where there is no room for all at once.
    fn low_latency(config: &KernelConfig, problem: &Problem, format: KvFormat, sms: usize) -> Self {
        let cost = Cost::new(problem, format);
        let best = Split::best(problem, sms, &cost, Some(config.kernel));
        let (teams, ctas, via) = best.map_or((1, 1, MergeVia::None), |split| {
            (split.teams, split.ctas, split.via)
        });
        let segments = max_segments(longest(problem));
        let (max_partials, partial_per_segment) = match (config.kernel, via) {
            (Kernel::LowLatencyGlobal, MergeVia::Global { segments: true }) => (segments, true),
            (Kernel::LowLatencyGlobal, _) => (segments.div_ceil(arithmetic::SPAN), false),
            _ => (0, false),
        };
        Launch {
            grid: [ctas, problem.num_kv_heads, problem.batch()],
            threads: teams * config.threads(),
            teams,
            cluster: if via == MergeVia::Cluster { ctas } else { 1 },
            max_partials,
            partial_per_segment,
            ..Launch::default()
        }
    }
}

/// The way of partials between the teams of a work item; `MergeVia` of `low_latency.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MergeVia {
    /// The work item has one team, which writes the result.
    None,
    /// Distributed shared memory of a cluster.
    Cluster,
    /// Global memory, for any number of CTAs. A partial is a segment's state or a span's.
    Global { segments: bool },
}

impl MergeVia {
    pub(crate) fn kernel(self) -> Kernel {
        match self {
            MergeVia::None | MergeVia::Cluster => Kernel::LowLatencyCluster,
            MergeVia::Global { .. } => Kernel::LowLatencyGlobal,
        }
    }
}

/// A split of every work item among the teams of `low_latency.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Split {
    /// Teams of a CTA.
    pub(crate) teams: usize,
    /// CTAs of a work item.
    pub(crate) ctas: usize,
    pub(crate) via: MergeVia,
    /// Partials of a work item.
    pub(crate) partials: usize,
    /// Partials of the team that has the most.
    pub(crate) partials_each: usize,
    /// Tiles of the team that has the most.
    pub(crate) tiles: usize,
}

impl Split {
    /// `None` if not all CTAs run at once, or a team would have more partials than there is shared memory for.
    fn new(
        problem: &Problem,
        sms: usize,
        teams: usize,
        ctas: usize,
        via: MergeVia,
    ) -> Option<Self> {
        let longest = longest(problem);
        let all = teams * ctas;
        let tiles = longest.div_ceil(arithmetic::TILE).max(1);
        let segment_tiles = arithmetic::segment_tiles(longest);
        let segments = max_segments(longest);
        let spans = segments.div_ceil(arithmetic::SPAN);
        let places = (SM_TEAMS / teams) * sms;
        let in_cluster = via == MergeVia::Cluster;
        // The SMs of a graphics processing cluster, of which there are eight, need not be a multiple of a cluster's.
        let lost = if in_cluster && ctas > 2 {
            8 * (ctas - 2)
        } else {
            0
        };
        if kv_heads(problem).saturating_mul(ctas).saturating_add(lost) > places {
            return None;
        }
        let by_tiles = in_cluster && tiles <= 2 * all && segment_tiles == arithmetic::SPAN;
        let by_segments = match via {
            MergeVia::None => false,
            MergeVia::Cluster => segments <= TEAM_PARTIALS * all,
            MergeVia::Global { segments } => segments,
        };
        let (partials, partial_tiles) = if by_tiles {
            (tiles, 1)
        } else if by_segments {
            (segments, segment_tiles)
        } else {
            (spans, segment_tiles * arithmetic::SPAN)
        };
        let partials_each = partials.div_ceil(all);
        if in_cluster && partials_each > TEAM_PARTIALS {
            return None;
        }
        Some(Split {
            teams,
            ctas,
            via,
            partials,
            partials_each,
            tiles: (partials_each * partial_tiles).min(tiles),
        })
    }

    /// The fastest split, of those of `kernel` or of all.
    pub(crate) fn best(
        problem: &Problem,
        sms: usize,
        cost: &Cost,
        kernel: Option<Kernel>,
    ) -> Option<Self> {
        let clusters = [2, 4, MAX_CLUSTER]
            .into_iter()
            .flat_map(|ctas| [1, SM_TEAMS].map(|teams| (teams, ctas, MergeVia::Cluster)));
        // As many CTAs as run at once, and no more than there are partials.
        let global = [false, true].into_iter().filter_map(|segments| {
            let unit = if segments { 1 } else { arithmetic::SPAN };
            let partials = max_segments(longest(problem)).div_ceil(unit);
            let ctas = (SM_TEAMS * sms / kv_heads(problem).max(1)).min(partials);
            (ctas > 1).then_some((1, ctas, MergeVia::Global { segments }))
        });
        [(1, 1, MergeVia::None), (SM_TEAMS, 1, MergeVia::Cluster)]
            .into_iter()
            .chain(clusters)
            .chain(global)
            .filter(|(.., via)| kernel.is_none_or(|kernel| via.kernel() == kernel))
            .filter_map(|(teams, ctas, via)| Split::new(problem, sms, teams, ctas, via))
            .min_by(|a, b| cost.of_split(a).total_cmp(&cost.of_split(b)))
    }
}

/// The longest sequence.
pub(crate) fn longest(problem: &Problem) -> usize {
    problem.kv_lens.iter().copied().max().unwrap_or(0)
}

/// KV heads of all sequences; `usize::MAX` where there would be more.
pub(crate) fn kv_heads(problem: &Problem) -> usize {
    problem.batch().saturating_mul(problem.num_kv_heads)
}

/// Query rows of a KV head.
pub(crate) fn rows(problem: &Problem) -> usize {
    problem.heads_per_kv() * problem.q_len
}

fn row_blocks(config: &KernelConfig, problem: &Problem) -> usize {
    rows(problem).div_ceil(config.rows())
}

/// The most segments of any length up to `max_kv_len`: their number falls back to 129 past 65536.
pub fn max_segments(max_kv_len: usize) -> usize {
    let tiles = max_kv_len.div_ceil(arithmetic::TILE);
    tiles.div_ceil(4).clamp(1, 256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_length_has_more_segments_than_the_maximum() {
        let mut most = 1;
        for kv_len in 0..300_000usize {
            let tiles = kv_len.div_ceil(arithmetic::TILE);
            most = most.max(tiles.div_ceil(arithmetic::segment_tiles(kv_len)));
            assert!(most <= max_segments(kv_len), "{kv_len}");
        }
        assert_eq!((max_segments(0), max_segments(1 << 20)), (1, 256));
    }

    #[test]
    fn all_ctas_of_a_launch_run_at_once() {
        let kernels = [
            None,
            Some(Kernel::LowLatencyCluster),
            Some(Kernel::LowLatencyGlobal),
        ];
        for batch in 1..300 {
            for kv_len in [1, 64, 65, 700, 1024, 5000, 8192, 65_536, 200_000] {
                let problem = Problem::new(4, 1, 128, vec![kv_len; batch]);
                let cost = Cost::new(&problem, KvFormat::INT8);
                for kernel in kernels {
                    let Some(split) = Split::best(&problem, 132, &cost, kernel) else {
                        continue;
                    };
                    let all = split.teams * split.ctas;
                    assert!(batch * all <= 264);
                    let has_room =
                        split.via != MergeVia::Cluster || split.partials_each <= TEAM_PARTIALS;
                    assert!(has_room, "{kv_len} {batch}");
                    assert!(split.tiles * all >= kv_len.div_ceil(64));
                    assert!(kernel.is_none_or(|kernel| kernel == split.via.kernel()));
                }
            }
        }
    }

    #[test]
    fn counts_of_partials_saturate() {
        let launch = Launch {
            row_blocks: 1 << 40,
            max_partials: 256,
            ..Launch::default()
        };
        assert_eq!(launch.partials(1 << 20, 1 << 16), usize::MAX);
        assert_eq!(launch.partials(2, 3), 2 * 3 * (1 << 48));
    }
}
