//! The launch of a problem: its grid, and the partials that its CTAs exchange.

use std::{cmp::Reverse, collections::BinaryHeap};

use attn_core::{KvFormat, Problem, arithmetic};

use super::{
    config::{DeviceLimits, Kernel, KernelConfig, WARPGROUPS, warpgroups},
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
        }
    }
}

/// Work items of a team of `many_rows.cu` from which on they are not split, whatever their lengths: the last one of a few teams is an eighth of all then.
const MANY_ITEMS: usize = 8;

/// What a work item of `many_rows.cu` costs apart from its tiles, in tiles: finding it, loading queries, writing rows. About 8 µs on an H100.
const ITEM_COST: usize = 8;

/// What a tile takes three warpgroups, in that of two: 2144 cycles and 1548 (bf16, 128 dims, a prompt of 8192 tokens on an H200).
const THREE_WARPGROUPS: f64 = 1.39;

/// What work items that teams share take in whole ones: teams are at different heads then, whose tiles they do not find in L2. 512 and 2048 tokens behind 32768, 32/8 heads, blocks of
/// 192 rows: 620 and 2530 µs, where blocks of 128, in whole items, take 492 and 1970.
const SPLIT_ITEMS: f64 = 1.4;

/// What teams may wait for each other in percent of their work, before work items are split, which costs merges, and tiles that are not in L2.
const MOST_WAITING: usize = 10;

impl Launch {
    /// The launch for lengths up to the problem's longest on this device.
    pub fn new(
        config: &KernelConfig,
        problem: &Problem,
        format: KvFormat,
        limits: DeviceLimits,
    ) -> Self {
        let sms = limits.sms;
        match config.kernel {
            Kernel::SplitKv => Self::split_kv(config, problem, sms),
            Kernel::ManyRows => Self::persistent(config, problem, sms, false),
            Kernel::ManyRowsWhole => Launch {
                max_partials: 0,
                ..Self::persistent(config, problem, sms, false)
            },
            Kernel::LowLatencyCluster | Kernel::LowLatencyGlobal => {
                Self::low_latency(config, problem, format, limits)
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
    fn low_latency(
        config: &KernelConfig,
        problem: &Problem,
        format: KvFormat,
        limits: DeviceLimits,
    ) -> Self {
        let cost = Cost::new(problem, format, limits);
        let best = fastest_split(problem, limits.sms, &cost, Some(config.kernel));
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

/// Whether teams of `many_rows.cu` are to take whole work items: where these are many, or blocks of query tokens and teams that take them, the last ones of each
/// KV head first, end at about the same time. A few sequences may have other lengths on the device than in the plan: runs of spans suit all.
pub(super) fn takes_whole_items(
    problem: &Problem,
    row_warps: usize,
    sms: usize,
    are_blocks: bool,
) -> bool {
    let teams = sms * warpgroups(row_warps) / row_warps;
    let are_many = kv_heads(problem) >= MANY_ITEMS * teams;
    are_many || are_blocks && ItemCosts::new(problem, teams).fit(teams)
}

/// What whole work items cost, in tiles: those of all teams together, and of the team that ends last.
struct ItemCosts {
    all: usize,
    last: usize,
}

impl ItemCosts {
    fn new(problem: &Problem, teams: usize) -> Self {
        let cost = |len: &usize| len.div_ceil(arithmetic::TILE) + ITEM_COST;
        let costs = problem.kv_lens.iter().rev().map(cost);
        let all = costs.clone().sum::<usize>() * problem.num_kv_heads;
        let mut ends: BinaryHeap<_> = (0..teams).map(|_| Reverse(0)).collect();
        for cost in (0..problem.num_kv_heads).flat_map(|_| costs.clone()) {
            if let Some(mut first) = ends.peek_mut() {
                first.0 += cost;
            }
        }
        let last = ends.into_iter().map(|end| end.0).max().unwrap_or(0);
        ItemCosts { all, last }
    }

    fn fit(&self, teams: usize) -> bool {
        100 * self.last * teams <= (100 + MOST_WAITING) * self.all
    }
}

/// Query rows of the blocks in which `many_rows.cu` attends many query tokens: those of `config`, or, where it has three warpgroups, of two if that is estimated to be faster,
/// as larger blocks are fewer, and leave more SMs waiting for the last ones.
#[must_use]
pub fn block_rows(config: &KernelConfig, problem: &Problem, sms: usize) -> usize {
    if config.row_warps <= WARPGROUPS {
        return config.rows();
    }
    let estimate = |warpgroups: usize, tile_time: f64| {
        let config = KernelConfig {
            row_warps: warpgroups,
            ..*config
        };
        let of_block = (config.rows() / problem.heads_per_kv().max(1)).max(1);
        let blocks: Vec<_> = problem.query_blocks(of_block).collect();
        let costs = ItemCosts::new(&problem.of_blocks(&blocks), sms);
        let tiles = match costs.fit(sms) {
            true => costs.last as f64,
            false => costs.all as f64 / sms as f64 * SPLIT_ITEMS,
        };
        (tiles * tile_time, config.rows())
    };
    let (three, two) = (
        estimate(config.row_warps, THREE_WARPGROUPS),
        estimate(WARPGROUPS, 1.0),
    );
    if three.0 <= two.0 { three.1 } else { two.1 }
}

#[cfg(test)]
mod tests {
    use attn_core::Heads;

    use super::{super::smem::cluster_partials, *};

    #[test]
    fn all_ctas_of_a_launch_run_at_once() {
        let kernels = [
            None,
            Some(Kernel::LowLatencyCluster),
            Some(Kernel::LowLatencyGlobal),
        ];
        let limits = DeviceLimits::new(0, 132);
        for batch in 1..300 {
            for kv_len in [1, 64, 65, 700, 1024, 5000, 8192, 65_536, 200_000] {
                let problem = Problem::new(Heads::new(4, 1, 128), vec![kv_len; batch]);
                let cost = Cost::new(&problem, KvFormat::INT8, limits);
                for kernel in kernels {
                    let Some(split) = fastest_split(&problem, 132, &cost, kernel) else {
                        continue;
                    };
                    let all = split.teams * split.ctas;
                    assert!(batch * all <= 264);
                    let has_room = split.via != MergeVia::Cluster
                        || split.partials <= cluster_partials(8, KvFormat::INT8.v, 128, all);
                    assert!(has_room, "{kv_len} {batch}");
                    assert!(split.tiles * all >= kv_len.div_ceil(64));
                    assert!(kernel.is_none_or(|kernel| kernel == split.via.kernel()));
                }
            }
        }
    }

    #[test]
    fn blocks_are_of_three_warpgroups_where_these_end_together() {
        let config = KernelConfig {
            kernel: Kernel::ManyRows,
            row_groups: 8,
            row_warps: 3,
            stages: 10,
            ctas: 1,
            producers: 1,
        };
        let rows = |heads: Heads, kv_len: usize, q_len: usize, batch: usize| {
            let problem = Problem::new(heads, vec![kv_len; batch]).q_len(q_len);
            block_rows(&config, &problem, 132)
        };
        let (multi_query, grouped) = (Heads::new(16, 1, 128), Heads::new(32, 8, 128));
        assert_eq!(rows(multi_query, 8192, 8192, 4), 192);
        assert_eq!(rows(multi_query, 1024, 1024, 32), 192);
        // 344 blocks of 192 rows are three rounds of 132 SMs, the last one of 80, and 88 leave a third of the SMs alone.
        assert_eq!(rows(grouped, 32768, 2048, 1), 128);
        assert_eq!(rows(grouped, 32768, 512, 1), 128);
        // All rows of a sequence in one block of the three, or two of two each.
        assert_eq!(rows(grouped, 8192, 40, 16), 192);
        let two = KernelConfig {
            row_warps: 2,
            ..config
        };
        let problem = Problem::new(multi_query, vec![8192]).q_len(8192);
        assert_eq!(block_rows(&two, &problem, 132), 128);
    }

    #[test]
    fn work_items_stay_whole_where_no_team_waits_long() {
        let is_whole = |kv_lens: Vec<usize>, kv: usize| {
            let problem = Problem::new(Heads::new(kv, kv, 128), kv_lens);
            let of_sequences = takes_whole_items(&problem, 2, 132, false);
            assert_eq!(of_sequences, kv * problem.batch() >= 1056);
            takes_whole_items(&problem, 2, 132, true)
        };
        // One for each SM, or nearly; a few too many, of which most SMs wait for some; as many as two each.
        for (batch, want) in [
            (132, true),
            (128, true),
            (66, false),
            (140, false),
            (264, true),
        ] {
            assert_eq!(is_whole(vec![8192; batch], 1), want, "{batch} items");
        }
        // Blocks of a prompt of 4096 tokens in 8 KV heads: the short ones fill up what long ones leave. So many that it hardly matters.
        let blocks = |tokens: usize| (1..=tokens / 32).map(|block| 32 * block).collect();
        assert!(is_whole(blocks(4096), 8));
        assert!(!is_whole(blocks(1024), 8));
        assert!(is_whole([vec![64; 1056], vec![1 << 20]].concat(), 1));
        // Launches of whole items leave no partials.
        for (kernel, partials) in [(Kernel::ManyRows, 8), (Kernel::ManyRowsWhole, 0)] {
            let config = KernelConfig {
                kernel,
                row_groups: 8,
                row_warps: 2,
                stages: 8,
                ctas: 1,
                producers: 1,
            };
            let heads = Heads::new(16, 1, 128);
            let problem = Problem::new(heads, vec![8192; 4]);
            let launch = Launch::new(&config, &problem, KvFormat::INT8, DeviceLimits::new(0, 132));
            assert_eq!(launch.max_partials, partials, "{kernel:?}");
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
