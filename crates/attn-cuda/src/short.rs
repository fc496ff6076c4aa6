//! When `short.cu` is the faster kernel, and what its launches look like: pure functions, tuned on an H200 (docs/performance.md).

use attn_core::{Int4Scale, KvFormat, PageLayout, Problem, Scheme, arithmetic};

use crate::geometry::{
    BULK_SHARED, Geometry, Launch, Limits, RESERVED_SHARED, Short, Unit, max_segments,
};

/// Threads of a team: four warps that share its tiles, and one that feeds them.
pub(crate) const TEAM_THREADS: usize = 160;

/// The most CTAs along a grid's second and third axis.
const MAX_GRID: usize = 65_535;

/// Slots that a team keeps for the others of its cluster.
pub(crate) const TEAM_SLOTS: usize = 4;

/// Teams of all CTAs on an SM.
pub(crate) const SM_TEAMS: usize = 2;

/// The most CTAs of a cluster; more of them are not portable, and were not faster.
const MAX_CLUSTER: usize = 8;

/// What the warps of a team tell each other about a tile: `EXCHANGE_BYTES` of `team.cuh`.
pub(crate) fn exchange_bytes(geometry: &Geometry, v: Scheme, groups: usize) -> usize {
    let sums = if v.code_bits() == 4 {
        1 + 2 * groups
    } else {
        1
    };
    let is_float = matches!(v, Scheme::F16 | Scheme::Bf16 | Scheme::Fp8E4m3);
    let planes = if is_float { 16 } else { 8 };
    (1 + 4 * sums) * geometry.rows() * 16 + groups * geometry.row_groups * 4 * 32 * planes
}

/// The shape for `rows` query rows per KV head; `None` where the kernel was not written for the problem.
pub(crate) fn geometry(
    rows: usize,
    format: KvFormat,
    head_dim: usize,
    page_size: usize,
    shared_limit: usize,
) -> Option<Geometry> {
    let channel = format.k == Scheme::Int4(Int4Scale::Channel);
    // A warp has a quarter of the dims, which is a part of one of V's groups or some of them. Two row groups fit the registers of the
    // integer schemes alone, 256 dims those of int8 alone. (192 dims do, too, and are no faster.)
    let int8 = |scheme: Scheme| scheme.is_integer() && scheme.code_bits() == 8;
    let written = matches!(format.v.groups(head_dim), 1 | 2 | 4 | 8)
        && match head_dim {
            64 | 128 => rows <= 8 || rows <= 16 && format.is_integer() && !channel,
            256 => rows <= 8 && int8(format.k) && int8(format.v),
            _ => false,
        }
        && shared_limit >= BULK_SHARED;
    let team = |stages| Geometry {
        unit: Unit::Short,
        row_groups: rows.div_ceil(8).max(1),
        row_warps: 1,
        stages,
        ctas: 1,
    };
    let fits = |g: &Geometry| {
        let bytes = g.shared_bytes(format, head_dim, page_size) + RESERVED_SHARED;
        SM_TEAMS * bytes <= shared_limit + RESERVED_SHARED
    };
    (3..=6).rev().map(team).find(|g| written && fits(g))
}

/// One way to spread each item (a KV head of a sequence, with the rows of a block) over the GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    teams: usize,
    cluster: usize,
    /// Of the team with the most.
    tiles: usize,
}

/// The fewest tiles of an item that is worth a wave: where CTAs come and go faster, `decode.cu` lets its teams stay.
const WAVE_TILES: usize = 16;

/// Microseconds of a launch but for its tiles: of one team per item, and of several that read each other's states.
const ALONE: f64 = 2.6;
const TOGETHER: f64 = 4.2;

impl Spread {
    /// `None` if a launch of it would come in waves, or hand over more than teams keep.
    fn of(problem: &Problem, sms: usize, teams: usize, cluster: usize) -> Option<Self> {
        let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
        let all = teams * cluster;
        let tiles = longest.div_ceil(arithmetic::TILE).max(1);
        let segment_tiles = arithmetic::segment_tiles(longest);
        let segments = max_segments(longest);
        let spans = segments.div_ceil(arithmetic::SPAN);
        if all > 1 && spans > TEAM_SLOTS * all {
            return None;
        }
        // A graphics processing cluster has a number of SMs that need not be a multiple of what a cluster takes; there are eight.
        let places = (SM_TEAMS / teams) * sms;
        let lost = if cluster > 2 { 8 * (cluster - 2) } else { 0 };
        let items = problem.batch() * problem.num_kv_heads;
        if items * cluster + lost > places {
            return None;
        }
        let most = |slots: usize, each: usize| (slots.div_ceil(all) * each).min(tiles);
        let tiles = if all == 1 {
            tiles
        } else if tiles <= 2 * all && segment_tiles == arithmetic::SPAN {
            tiles.div_ceil(all)
        } else if segments <= TEAM_SLOTS * all {
            most(segments, segment_tiles)
        } else {
            most(spans, segment_tiles * arithmetic::SPAN)
        };
        Some(Spread {
            teams,
            cluster,
            tiles,
        })
    }

    fn us(&self, us_per_tile: f64) -> f64 {
        let fixed = if self.teams * self.cluster == 1 {
            ALONE
        } else {
            TOGETHER
        };
        fixed + self.tiles as f64 * us_per_tile
    }
}

/// The way that leaves each team the fewest tiles, by the fewest CTAs; a team alone with an item needs not wait for others.
fn spread(problem: &Problem, sms: usize) -> Option<Spread> {
    let ways = [1, 2, 4, MAX_CLUSTER]
        .into_iter()
        .flat_map(|cluster| [1, SM_TEAMS].map(|teams| (teams, cluster)));
    ways.filter_map(|(teams, cluster)| Spread::of(problem, sms, teams, cluster))
        .min_by(|a, b| a.us(0.7).total_cmp(&b.us(0.7)))
}

/// Microseconds that a team takes for a tile of `bytes`: what its chain of products and exchanges takes, or what one team can read.
fn us_per_tile(problem: &Problem, format: KvFormat, bytes: f64) -> f64 {
    let head_dim = problem.head_dim;
    let channel = format.k == Scheme::Int4(Int4Scale::Channel);
    let groups = format.k.groups(head_dim) > 1 || format.v.groups(head_dim) > 1;
    let dims = head_dim as f64 / 128.0;
    let more = [
        (format.v.code_bits() == 4, 0.2),
        (groups, 0.35),
        (channel, 0.65 * dims),
    ];
    let more: f64 = more.iter().filter(|(has, _)| *has).map(|(_, us)| us).sum();
    let rows = problem.heads_per_kv() * problem.q_len;
    let row_groups = rows.div_ceil(8).max(1) as f64;
    let chain = (0.45 + 0.35 * dims + more) * (0.4 + 0.6 * row_groups);
    chain.max(bytes / 32.5e3)
}

/// Microseconds of a launch whose items have a team each, more than run at once; `read` is what so many of them take to read, at least.
/// `None` where lengths differ, so that some teams would end long after others, or each item is soon over, or of fewer dims (more teams
/// than two then fit an SM).
fn in_waves(
    problem: &Problem,
    sms: usize,
    us_per_tile: f64,
    read: impl Fn(usize) -> f64,
) -> Option<f64> {
    let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
    let shortest = problem.kv_lens.iter().copied().min().unwrap_or(0);
    let tiles = longest.div_ceil(arithmetic::TILE);
    if problem.head_dim < 128 || tiles < WAVE_TILES || 4 * shortest < 3 * longest {
        return None;
    }
    let (items, places) = (problem.batch() * problem.num_kv_heads, SM_TEAMS * sms);
    let alone = ALONE + tiles as f64 * us_per_tile;
    let wave = |items: usize| {
        if items > 0 {
            alone.max(read(items))
        } else {
            0.0
        }
    };
    Some(ALONE + (items / places) as f64 * wave(places) + wave(items % places))
}

/// Whether `short.cu` is faster than the others, or asked for; it always has a launch then.
pub(crate) fn is_faster(problem: &Problem, format: KvFormat, limits: Limits) -> bool {
    if problem.batch() > MAX_GRID || problem.num_kv_heads > MAX_GRID {
        return false;
    }
    let tokens: usize = problem.kv_lens.iter().sum();
    let layout = PageLayout {
        format,
        head_dim: problem.head_dim,
        page_size: arithmetic::TILE,
        num_kv_heads: problem.num_kv_heads,
    };
    let tile = layout.run_bytes() as f64;
    let bytes = (tokens * problem.num_kv_heads) as f64 * layout.bytes_per_token();
    // What both read at most, in bytes per microsecond.
    let pace = if format.is_integer() { 4.3e6 } else { 4.5e6 };
    let other = 8.3 + bytes / 4.4e6;
    let us_per_tile = us_per_tile(problem, format, tile);
    let item = bytes / (problem.batch() * problem.num_kv_heads) as f64;
    let short = match spread(problem, limits.sms) {
        Some(spread) => Some(spread.us(us_per_tile).max(TOGETHER + bytes / pace)),
        None => in_waves(problem, limits.sms, us_per_tile, |items| {
            items as f64 * item / pace
        }),
    };
    match limits.short {
        Short::Auto => short.is_some_and(|us| us < other),
        Short::Always => true,
        Short::Never => false,
    }
}

/// The launch of a problem; one CTA per item, in waves, where there is no room for all at once.
pub(crate) fn launch(geometry: &Geometry, problem: &Problem, sms: usize) -> Launch {
    let alone = Spread {
        teams: 1,
        cluster: 1,
        tiles: 0,
    };
    let Spread { teams, cluster, .. } = spread(problem, sms).unwrap_or(alone);
    Launch {
        grid: [cluster, problem.num_kv_heads, problem.batch()],
        threads: teams * geometry.threads(),
        teams,
        cluster,
        ..Launch::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(short: Short) -> Limits {
        Limits {
            shared_limit: BULK_SHARED,
            sms: 132,
            short,
        }
    }

    fn unit(heads: [usize; 2], kv_len: usize, batch: usize, format: KvFormat) -> Unit {
        let problem = Problem::new(heads[0], heads[1], 128, vec![kv_len; batch]);
        Geometry::of_problem(&problem, format, 64, limits(Short::Auto))
            .map(|g| g.unit)
            .unwrap()
    }

    /// What was measured faster is chosen (docs/performance.md, log lines 39, 41 and 49).
    #[test]
    fn latency_and_full_waves_go_to_short() {
        let (int8, f16, bf16) = (
            KvFormat::INT8,
            KvFormat::same(Scheme::F16),
            KvFormat::same(Scheme::Bf16),
        );
        let kinds = [
            (
                int8,
                [32, 8],
                &[(1, 1), (1024, 1), (8192, 1)][..],
                Unit::Short,
            ),
            (int8, [32, 8], &[(32_768, 1), (131_072, 1)], Unit::Decode),
            (
                int8,
                [8, 1],
                &[(8192, 64), (8192, 128), (8192, 256)],
                Unit::Short,
            ),
            (int8, [8, 1], &[(8192, 32), (8192, 512)], Unit::Decode),
            (
                f16,
                [32, 32],
                &[(128, 1), (512, 1), (2048, 1), (8192, 1), (128, 8)],
                Unit::Short,
            ),
            (f16, [32, 32], &[(128, 16)], Unit::Decode),
            (bf16, [8, 1], &[(8192, 512), (8192, 400)], Unit::Short),
            (bf16, [32, 8], &[(4096, 64), (1024, 128)], Unit::Short),
            (bf16, [8, 1], &[(8192, 300)], Unit::Decode),
            (KvFormat::INT4, [8, 1], &[(8192, 512)], Unit::Decode),
        ];
        for (format, heads, shapes, want) in kinds {
            for &(kv_len, batch) in shapes {
                let got = unit(heads, kv_len, batch, format);
                assert_eq!(got, want, "{format}, {kv_len} tokens, batch {batch}");
            }
        }
    }

    #[test]
    fn all_clusters_of_a_launch_run_at_once() {
        for batch in 1..300 {
            for kv_len in [1, 64, 65, 700, 1024, 5000, 8192, 65_536, 200_000] {
                let problem = Problem::new(4, 1, 128, vec![kv_len; batch]);
                let Some(way) = spread(&problem, 132) else {
                    continue;
                };
                let all = way.teams * way.cluster;
                assert!(batch * way.cluster * way.teams <= 264);
                let spans = max_segments(kv_len).div_ceil(arithmetic::SPAN);
                assert!(all == 1 || spans <= TEAM_SLOTS * all, "{kv_len} {batch}");
                assert!(way.tiles * all >= kv_len.div_ceil(64));
            }
        }
    }

    #[test]
    fn short_can_be_had_always_and_never() {
        let problem = Problem::new(8, 1, 128, vec![8192; 512]);
        let of = |short| {
            let geometry = Geometry::of_problem(&problem, KvFormat::INT8, 64, limits(short));
            geometry.map(|g| (g.unit, g.launch(&problem, 132).grid))
        };
        assert_eq!(of(Short::Always), Some((Unit::Short, [1, 1, 512])));
        assert_eq!(of(Short::Never), Some((Unit::Decode, [264, 1, 1])));
        let few = Problem::new(8, 1, 128, vec![100]);
        let never = Geometry::of_problem(&few, KvFormat::INT8, 64, limits(Short::Never));
        assert_eq!(never.map(|g| g.unit), Some(Unit::Decode));
        assert!("often".parse::<Short>().is_err());
    }
}
