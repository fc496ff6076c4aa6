//! The launch of a problem: its grid, and the partials that its CTAs exchange.

use attn_core::{KvFormat, Problem, arithmetic};

use super::{
    config::{FEW_PLACES, Kernel, KernelConfig, WARPGROUPS},
    cost::{Cost, fastest_split},
    split::{MergeVia, kv_heads, longest, max_segments, row_blocks},
};

/// The grid of a launch, and the partials that its CTAs exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Row blocks per KV head.
    pub row_blocks: usize,
    /// Partials per work item in the workspace.
    pub max_partials: usize,
    /// Whether a partial is a segment's state for lengths up to the longest. If not, it is a span's, and a segment's where the device finds
    /// sequences that are short for the launch.
    pub partial_per_segment: bool,
    /// CTAs along each axis of the grid.
    pub grid: [usize; 3],
    /// Threads of a CTA.
    pub threads: usize,
    /// Teams of a CTA that have shared memory of their own: more than 1 only in `low_latency.cu`.
    pub teams: usize,
    /// CTAs of a cluster, along the grid's first axis: more than 1 only in `low_latency.cu`.
    pub cluster: usize,
    /// CTAs of a work item where the device finds few tiles (`few_tiles.cuh`); 0 in other kernels.
    pub few_slots: usize,
    /// Places for partials of a work item then.
    pub few_places: usize,
}

impl Default for Launch {
    /// A launch of one CTA without threads.
    fn default() -> Self {
        Launch {
            row_blocks: 1,
            max_partials: 0,
            partial_per_segment: false,
            grid: [1; 3],
            threads: 0,
            teams: 1,
            cluster: 1,
            few_slots: 0,
            few_places: 0,
        }
    }
}

/// Work items of a team of `many_rows.cu` from which on they are not split: the last one of a few teams is an eighth of all then.
const MANY_ITEMS: usize = 8;

impl Launch {
    /// The launch for lengths up to the problem's longest on `sms` SMs.
    pub fn new(config: &KernelConfig, problem: &Problem, format: KvFormat, sms: usize) -> Self {
        match config.kernel {
            Kernel::SplitKv => Self::split_kv(config, problem, sms),
            Kernel::SplitKvFewTiles => {
                let few_slots = sms * config.ctas / kv_heads(problem).max(1);
                Launch {
                    few_slots,
                    few_places: (2 * few_slots).min(FEW_PLACES),
                    ..Self::split_kv(config, problem, sms)
                }
            }
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
        // Arrival counts have 12 bits.
        let partial_per_segment = max_segments(longest) < 1 << 12
            && kv_heads(problem).saturating_mul(3 * row_blocks * spans) < sms * config.ctas;
        Self::persistent(config, problem, sms, partial_per_segment)
    }

    /// Teams have whole work items where each has several, which then leave no partials; else runs of spans.
    fn many_rows(config: &KernelConfig, problem: &Problem, sms: usize) -> Self {
        let teams = sms * WARPGROUPS / config.row_warps;
        let has_whole_items = kv_heads(problem) >= MANY_ITEMS * teams;
        let launch = Self::persistent(config, problem, sms, false);
        Launch {
            max_partials: if has_whole_items {
                0
            } else {
                launch.max_partials
            },
            ..launch
        }
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
        let best = fastest_split(problem, sms, &cost, Some(config.kernel));
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

#[cfg(test)]
mod tests {
    use attn_core::Heads;

    use super::{super::smem::TEAM_PARTIALS, *};

    #[test]
    fn all_ctas_of_a_launch_run_at_once() {
        let kernels = [
            None,
            Some(Kernel::LowLatencyCluster),
            Some(Kernel::LowLatencyGlobal),
        ];
        for batch in 1..300 {
            for kv_len in [1, 64, 65, 700, 1024, 5000, 8192, 65_536, 200_000] {
                let problem = Problem::new(
                    Heads {
                        q: 4,
                        kv: 1,
                        dim: 128,
                    },
                    vec![kv_len; batch],
                );
                let cost = Cost::new(&problem, KvFormat::INT8);
                for kernel in kernels {
                    let Some(split) = fastest_split(&problem, 132, &cost, kernel) else {
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
