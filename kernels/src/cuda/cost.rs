//! Estimated times of the decode kernels, in microseconds, fitted to `attn bench` with each kernel on an H200.
//!
//! `kernels/README.md` ("Estimated times") has the measurement behind each constant, `docs/data/h200-kernels.csv` every shape with each kernel.

use attn_core::{HeadDim, KvFormat, Problem, Scheme, arithmetic, layout::run_bytes};

use super::{
    config::{DeviceLimits, GROUP_ROWS, H200_MEMORY_PACE, Kernel, SM_TEAMS, TEAMS},
    smem::cluster_partials,
    split::{MAX_CLUSTER, MergeVia, Split, kv_heads, longest, max_segments, rows},
};

/// A `low_latency.cu` launch but for its tiles, where every work item has one team.
const ONE_TEAM_US: f64 = 2.6;
/// A `low_latency.cu` launch but for its tiles, where the teams of a cluster merge.
const CLUSTER_US: f64 = 3.7;
/// A `low_latency.cu` launch but for its tiles, where partials pass through global memory.
const GLOBAL_US: f64 = 5.9;
/// A merged partial in a cluster of more than `FEW_TEAMS`; fewer teams merge whole rows at once.
const CLUSTER_PARTIAL_US: f64 = 0.08;
const FEW_TEAMS: usize = 4;
/// A second row group in a cluster.
const SECOND_ROW_GROUP_US: f64 = 2.5;
/// A merged partial in global memory.
const GLOBAL_PARTIAL_US: f64 = 0.03;
/// A partial that a team publishes in global memory after its first.
const NEXT_PARTIAL_US: f64 = 0.45;
/// The time that several merging teams save; they share the merge from this many partials on, as in `partials_counted.cuh`.
const SHARED_MERGE_US: f64 = 0.7;
const SHARED_PARTIALS: usize = 12;
/// A merged partial beyond `FEW_BATCHES`: loads then come in several batches.
const LATE_PARTIAL_US: f64 = 0.025;
const FEW_BATCHES: usize = 64;

/// The fewest tiles of a work item that is worth a wave of CTAs; with fewer, CTAs that stay (`split_kv.cu`) are faster.
const WAVE_TILES: usize = 16;

/// Bytes per microsecond that `low_latency.cu` reads at most of integer schemes on an H200. Another device is as much faster or slower as its memory.
const INTEGER_PACE: f64 = 4.3e6;
/// The bytes per microsecond that `low_latency.cu` reads at most of floats on an H200.
const FLOAT_PACE: f64 = 4.5e6;
/// The bytes per microsecond that `split_kv.cu` reads at most on an H200.
const SPLIT_KV_PACE: f64 = 4.4e6;
/// Bytes per microsecond that one team reads at most.
const TEAM_PACE: f64 = 32.5e3;

/// A `split_kv.cu` launch but for its bytes, and each span that CTAs merge.
const SPLIT_KV_US: f64 = 9.2;
const SPLIT_KV_SPAN_US: f64 = 0.026;
/// The most spans of a CTA whose number, if it is uneven, makes some CTAs late; with more, memory is what all wait for.
const FEW_SPANS: f64 = 4.0;

/// Estimates for one problem on `low_latency.cu`, in microseconds.
pub(crate) struct Cost {
    /// Time of a team's tile.
    tile: f64,
    /// Time to read the whole cache as fast as the kernel can.
    read: f64,
    row_groups: usize,
    /// How values are stored.
    v: Scheme,
}

impl Cost {
    pub(crate) fn new(problem: &Problem, format: KvFormat, limits: DeviceLimits) -> Self {
        let pace = if format.is_integer() {
            INTEGER_PACE
        } else {
            FLOAT_PACE
        };
        Cost {
            tile: tile_us(problem, format),
            read: read_us(problem, format, pace, limits),
            row_groups: row_groups(problem),
            v: format.v,
        }
    }

    /// Partials of a work item that so many teams of a cluster have room for.
    fn cluster_partials(&self, problem: &Problem, teams: usize) -> usize {
        let rows = GROUP_ROWS * self.row_groups;
        cluster_partials(rows, self.v, problem.head_dim.v, teams)
    }

    pub(crate) fn of_split(&self, split: &Split) -> f64 {
        let tiles = split.tiles as f64 * self.tile;
        let partials = split.partials as f64;
        match split.via {
            MergeVia::None => (ONE_TEAM_US + tiles).max(CLUSTER_US + self.read),
            MergeVia::Cluster => {
                let is_tile = split.tiles == split.partials_each;
                let few = split.teams * split.ctas <= FEW_TEAMS;
                let each = if is_tile || few {
                    0.0
                } else {
                    CLUSTER_PARTIAL_US
                };
                let rows = if self.row_groups > 1 {
                    SECOND_ROW_GROUP_US
                } else {
                    0.0
                };
                CLUSTER_US + rows + partials * each + tiles.max(self.read)
            }
            MergeVia::Global { .. } => {
                let more = (split.partials_each - 1) as f64 * NEXT_PARTIAL_US;
                let shared = if split.partials < SHARED_PARTIALS {
                    0.0
                } else {
                    SHARED_MERGE_US
                };
                let late = split.partials.saturating_sub(FEW_BATCHES) as f64 * LATE_PARTIAL_US;
                GLOBAL_US - shared
                    + partials * GLOBAL_PARTIAL_US
                    + late
                    + more
                    + tiles.max(self.read)
            }
        }
    }

    /// Time of a launch with one team per work item and more work items than run at once. `None` where lengths differ, so that some teams
    /// would end long after others, where work items are soon over, and where they have fewer dims (an SM then has room for more teams).
    pub(crate) fn of_waves(&self, problem: &Problem, sms: usize) -> Option<f64> {
        let longest = longest(problem);
        let shortest = problem.kv_lens.iter().copied().min().unwrap_or(0);
        let tiles = longest.div_ceil(arithmetic::TILE);
        if problem.head_dim.max() < 128 || tiles < WAVE_TILES || 4 * shortest < 3 * longest {
            return None;
        }
        let (items, places) = (kv_heads(problem), SM_TEAMS * sms);
        let one_team = ONE_TEAM_US + tiles as f64 * self.tile;
        let wave = |of_wave: usize| {
            if of_wave > 0 {
                one_team.max(self.read * of_wave as f64 / items as f64)
            } else {
                0.0
            }
        };
        Some(ONE_TEAM_US + (items / places) as f64 * wave(places) + wave(items % places))
    }
}

/// Time to read the cache at `pace` on an H200.
fn read_us(problem: &Problem, format: KvFormat, pace: f64, limits: DeviceLimits) -> f64 {
    cache_bytes(problem, format) / (pace * limits.memory_pace / H200_MEMORY_PACE)
}

/// Bytes of the cache that a decode reads.
fn cache_bytes(problem: &Problem, format: KvFormat) -> f64 {
    let tokens: f64 = problem.kv_lens.iter().map(|&len| len as f64).sum();
    let tile = run_bytes(format, problem.head_dim, arithmetic::TILE) as f64;
    tokens * problem.num_kv_heads as f64 * (tile / arithmetic::TILE as f64)
}

/// Sum of the times whose condition holds.
fn sum_where<const N: usize>(times: [(bool, f64); N]) -> f64 {
    times
        .iter()
        .filter(|(holds, _)| *holds)
        .map(|(_, us)| us)
        .sum()
}

/// Time of a team's tile: its chain of products and exchanges, or the read of its bytes.
fn tile_us(problem: &Problem, format: KvFormat) -> f64 {
    let head_dim = problem.head_dim;
    let dims = (head_dim.k + head_dim.v) as f64 / 256.0;
    let more = sum_where([
        (has_window(format), 0.1),
        (has_groups(format, head_dim), 0.1),
        (format.k == Scheme::Fp8E4m3, 0.1),
    ]);
    let chain = 1.03 + 0.55 * (dims - 1.0).max(0.0) + more;
    let chain = chain * (0.4 + 0.6 * row_groups(problem) as f64);
    let bytes = run_bytes(format, head_dim, arithmetic::TILE) as f64;
    chain.max(bytes / TEAM_PACE)
}

/// Time of a warp's tile in `split_kv.cu`, where memory does not bind.
fn warp_tile_us(problem: &Problem, format: KvFormat) -> f64 {
    if has_groups(format, problem.head_dim) {
        return 3.3;
    }
    match (format.k.code_bits(), format.v.code_bits()) {
        (4, 4) => 2.3,
        (4, _) | (_, 4) => 3.0,
        _ => 3.6,
    }
}

/// Whether K or V has residuals.
fn has_window(format: KvFormat) -> bool {
    format.k.window().tiles() > 0 || format.v.window().tiles() > 0
}

/// Whether a row of K or V has several scales.
fn has_groups(format: KvFormat, head_dim: HeadDim) -> bool {
    format
        .groups(head_dim)
        .iter()
        .any(|groups| groups.count() > 1)
}

/// Groups of eight query rows per KV head.
fn row_groups(problem: &Problem) -> usize {
    rows(problem).div_ceil(8).max(1)
}

/// Time of `split_kv.cu` where rows are few; [`RowBlocks`](super::row_blocks::RowBlocks) has that of wide rows in blocks. Its CTAs have whole spans, some one more than others, and exchange partials of the work items that
/// they share. With more than eight query rows, and more than 128 dims, an SM has one CTA.
pub(crate) fn split_kv_us(problem: &Problem, format: KvFormat, limits: DeviceLimits) -> f64 {
    let spans = max_segments(longest(problem)).div_ceil(arithmetic::SPAN);
    let (items, ctas) = (kv_heads(problem), SM_TEAMS * limits.sms);
    let is_shared = items < ctas && spans > 1;
    let merges = if is_shared {
        SPLIT_KV_SPAN_US * spans as f64
    } else {
        0.0
    };
    let each = items as f64 * spans as f64 / ctas as f64;
    let most = if is_shared && each > 1.0 && each <= FEW_SPANS {
        each.ceil() / each
    } else {
        1.0
    };
    let more = sum_where([
        (row_groups(problem) > 1, 4.0),
        (problem.head_dim.max() > 128, 7.0),
    ]);
    let read = read_us(problem, format, SPLIT_KV_PACE, limits);
    let tiles_of = |len: &usize| len.div_ceil(arithmetic::TILE) as f64;
    let tiles = problem.kv_lens.iter().map(tiles_of).sum::<f64>() * problem.num_kv_heads as f64;
    let chain = tiles / (ctas * TEAMS) as f64 * warp_tile_us(problem, format);
    SPLIT_KV_US + merges + more + most * read.max(chain)
}

/// The fastest split, of those of `kernel` or of all.
pub(crate) fn fastest_split(
    problem: &Problem,
    sms: usize,
    cost: &Cost,
    kernel: Option<Kernel>,
) -> Option<Split> {
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
        .filter_map(|(teams, ctas, via)| {
            let most = cost.cluster_partials(problem, teams * ctas);
            Split::new(problem, sms, [teams, ctas], via, most)
        })
        .min_by(|a, b| cost.of_split(a).total_cmp(&cost.of_split(b)))
}
