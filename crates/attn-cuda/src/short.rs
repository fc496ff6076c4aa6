//! When `short.cu` is the faster kernel, and what its launches look like: pure functions, tuned on an H200 (docs/log/2026-11-cuda.md).

use attn_core::{Int4Scale, KvFormat, Problem, Scheme, arithmetic, layout::run_bytes};

use crate::geometry::{
    BULK_SHARED, Geometry, Launch, Limits, RESERVED_SHARED, Short, Unit, items, max_segments,
};

/// Threads of a team: four warps that share its tiles, and one that feeds them.
pub(crate) const TEAM_THREADS: usize = 160;

/// The most CTAs along a grid's second and third axis.
const MAX_GRID: usize = 65_535;

/// Slots of an item for each team of its cluster, at most.
pub(crate) const TEAM_SLOTS: usize = 4;

/// Teams of all CTAs on an SM.
pub(crate) const SM_TEAMS: usize = 2;

/// The most CTAs of a cluster; more of them are not portable, and were not faster.
const MAX_CLUSTER: usize = 8;

/// What the warps of a team tell each other about a tile: `EXCHANGE_BYTES` of `team.cuh`.
pub(crate) fn exchange_bytes(geometry: &Geometry, format: KvFormat, head_dim: usize) -> usize {
    let (v, groups) = (format.v, format.v.groups(head_dim));
    let query = if format.k == Scheme::Int4(Int4Scale::Channel) {
        head_dim / 16 * 32 * 8 + geometry.rows() * 16
    } else {
        0
    };
    let sums = if v.code_bits() == 4 {
        1 + 2 * groups
    } else {
        1
    };
    let is_float = matches!(v, Scheme::F16 | Scheme::Bf16 | Scheme::Fp8E4m3);
    let planes = if is_float { 16 } else { 8 };
    (1 + 4 * sums) * geometry.rows() * 16 + groups * geometry.row_groups * 4 * 32 * planes + query
}

/// A team's state, and room for those that others of its cluster send: `PLACE_BYTES` and `SENT_BYTES` of `cluster.cuh`.
pub(crate) fn state_bytes(geometry: &Geometry, head_dim: usize) -> usize {
    let sent = match geometry.unit {
        Unit::HandOver => 0,
        _ => TEAM_SLOTS * (head_dim / 32) * (32 * 4 + 8),
    };
    geometry.rows() * ((head_dim + 8) * 4 + sent)
}

/// The shapes for `rows` query rows per KV head; none where the kernels were not written for the problem.
pub(crate) fn geometries(
    rows: usize,
    format: KvFormat,
    head_dim: usize,
    page_size: usize,
    shared_limit: usize,
) -> impl Iterator<Item = Geometry> {
    let channel = format.k == Scheme::Int4(Int4Scale::Channel);
    // A warp has a quarter of the dims, which is a part of one of V's groups or some of them. Two row groups fit the registers of the
    // integer schemes alone, 192 and 256 dims those of int8 alone.
    let int8 = |scheme: Scheme| scheme.is_integer() && scheme.code_bits() == 8;
    let written = matches!(format.v.groups(head_dim), 1 | 2 | 4 | 8)
        && match head_dim {
            64 | 128 => rows <= 8 || rows <= 16 && format.is_integer() && !channel,
            192 | 256 => rows <= 8 && int8(format.k) && int8(format.v),
            _ => false,
        }
        && shared_limit >= BULK_SHARED;
    let team = move |unit, stages| Geometry {
        unit,
        row_groups: rows.div_ceil(8).max(1),
        row_warps: 1,
        stages,
        ctas: 1,
    };
    let fits = move |g: &Geometry| {
        let bytes = g.shared_bytes(format, head_dim, page_size) + RESERVED_SHARED;
        SM_TEAMS * bytes <= shared_limit + RESERVED_SHARED
    };
    let of_unit = move |unit| {
        let stages = (3..=6).rev().map(|stages| team(unit, stages));
        { stages }.find(|g| written && fits(g))
    };
    [Unit::Short, Unit::HandOver]
        .into_iter()
        .filter_map(of_unit)
}

/// How the teams of an item bring their states together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Together {
    /// There is one.
    Alone,
    /// They read each other's shared memory.
    Cluster,
    /// In slots of global memory, segments or spans: any number of CTAs, wherever they run.
    HandOver { segments: bool },
}

impl Together {
    fn unit(self) -> Unit {
        match self {
            Together::Alone | Together::Cluster => Unit::Short,
            Together::HandOver { .. } => Unit::HandOver,
        }
    }
}

/// One way to spread each item (a KV head of a sequence, with the rows of a block) over the GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    teams: usize,
    ctas: usize,
    together: Together,
    /// Of the item.
    slots: usize,
    /// Of the team with the most.
    slots_each: usize,
    tiles: usize,
}

/// The fewest tiles of an item that is worth a wave: where CTAs come and go faster, `decode.cu` lets its teams stay.
const WAVE_TILES: usize = 16;

/// Microseconds of a launch but for its tiles: of one team per item, of several that read each other's states, and of several that hand
/// them over.
const ALONE: f64 = 2.6;
const TOGETHER: f64 = 3.7;
const HANDED_OVER: f64 = 5.9;
/// What each slot that is joined takes: of a cluster of more than `FEW_TEAMS` (fewer join whole rows at once), and handed over; and
/// each that a team hands over but its first. `MORE_ROWS`: of a cluster, where there are more than eight. From `SHARED_SLOTS` on
/// (`slots.cuh`) several teams join, `SHARED` sooner; beyond `FEW_BATCHES` their warps' batches make each slot take `LATE_SLOT` more.
const CLUSTER_SLOT: f64 = 0.08;
const MORE_ROWS: f64 = 2.5;
const FEW_TEAMS: usize = 4;
const SLOT: f64 = 0.03;
const SHARED_SLOTS: usize = 12;
const SHARED: f64 = 0.7;
const FEW_BATCHES: usize = 64;
const LATE_SLOT: f64 = 0.025;
const NEXT_SLOT: f64 = 0.45;

fn longest(problem: &Problem) -> usize {
    problem.kv_lens.iter().copied().max().unwrap_or(0)
}

impl Spread {
    /// `None` if a launch of it would come in waves, or leave more in shared memory than teams keep.
    fn of(
        problem: &Problem,
        sms: usize,
        teams: usize,
        ctas: usize,
        together: Together,
    ) -> Option<Self> {
        let longest = longest(problem);
        let all = teams * ctas;
        let tiles = longest.div_ceil(arithmetic::TILE).max(1);
        let segment_tiles = arithmetic::segment_tiles(longest);
        let segments = max_segments(longest);
        let spans = segments.div_ceil(arithmetic::SPAN);
        // A graphics processing cluster has a number of SMs that need not be a multiple of what a cluster takes; there are eight.
        let places = (SM_TEAMS / teams) * sms;
        let in_cluster = together == Together::Cluster;
        let lost = if in_cluster && ctas > 2 {
            8 * (ctas - 2)
        } else {
            0
        };
        if items(problem).saturating_mul(ctas).saturating_add(lost) > places {
            return None;
        }
        let by_tiles = in_cluster && tiles <= 2 * all && segment_tiles == arithmetic::SPAN;
        let by_segments = match together {
            Together::Alone => false,
            Together::Cluster => segments <= TEAM_SLOTS * all,
            Together::HandOver { segments } => segments,
        };
        let (slots, slot_tiles) = if by_tiles {
            (tiles, 1)
        } else if by_segments {
            (segments, segment_tiles)
        } else {
            (spans, segment_tiles * arithmetic::SPAN)
        };
        let slots_each = slots.div_ceil(all);
        if in_cluster && slots_each > TEAM_SLOTS {
            return None;
        }
        Some(Spread {
            teams,
            ctas,
            together,
            slots,
            slots_each,
            tiles: (slots_each * slot_tiles).min(tiles),
        })
    }

    fn us(&self, cost: &Cost) -> f64 {
        let tiles = self.tiles as f64 * cost.tile;
        let slots = self.slots as f64;
        match self.together {
            Together::Alone => (ALONE + tiles).max(TOGETHER + cost.read),
            Together::Cluster => {
                let is_tile = self.tiles == self.slots_each;
                let few = self.teams * self.ctas <= FEW_TEAMS;
                let join = if is_tile || few { 0.0 } else { CLUSTER_SLOT };
                let rows = if cost.row_groups > 1 { MORE_ROWS } else { 0.0 };
                TOGETHER + rows + slots * join + tiles.max(cost.read)
            }
            Together::HandOver { .. } => {
                let more = (self.slots_each - 1) as f64 * NEXT_SLOT;
                let shared = if self.slots < SHARED_SLOTS {
                    0.0
                } else {
                    SHARED
                };
                let late = self.slots.saturating_sub(FEW_BATCHES) as f64 * LATE_SLOT;
                HANDED_OVER - shared + slots * SLOT + late + more + tiles.max(cost.read)
            }
        }
    }
}

/// The way that takes the least time, of those that `unit` has, or of all.
fn spread(problem: &Problem, sms: usize, cost: &Cost, unit: Option<Unit>) -> Option<Spread> {
    let clusters = [2, 4, MAX_CLUSTER]
        .into_iter()
        .flat_map(|ctas| [1, SM_TEAMS].map(|teams| (teams, ctas, Together::Cluster)));
    // As many as there is room for, and as many as there are slots.
    let hand_over = [false, true].into_iter().filter_map(|segments| {
        let slots =
            max_segments(longest(problem)).div_ceil(if segments { 1 } else { arithmetic::SPAN });
        let ctas = (SM_TEAMS * sms / items(problem).max(1)).min(slots);
        (ctas > 1).then_some((1, ctas, Together::HandOver { segments }))
    });
    [(1, 1, Together::Alone), (SM_TEAMS, 1, Together::Cluster)]
        .into_iter()
        .chain(clusters)
        .chain(hand_over)
        .filter(|(.., together)| unit.is_none_or(|unit| together.unit() == unit))
        .filter_map(|(teams, ctas, together)| Spread::of(problem, sms, teams, ctas, together))
        .min_by(|a, b| a.us(cost).total_cmp(&b.us(cost)))
}

/// Microseconds of a team's tile, and of reading everything as fast as the kernel does.
struct Cost {
    tile: f64,
    read: f64,
    row_groups: usize,
}

impl Cost {
    fn of(problem: &Problem, format: KvFormat) -> Self {
        // What both kernels read at most, in bytes per microsecond.
        let pace = if format.is_integer() { 4.3e6 } else { 4.5e6 };
        let tile = run_bytes(format, problem.head_dim, arithmetic::TILE);
        Cost {
            tile: us_per_tile(problem, format, tile as f64),
            read: bytes(problem, format) / pace,
            row_groups: row_groups(problem),
        }
    }
}

/// Of the cache that is read.
fn bytes(problem: &Problem, format: KvFormat) -> f64 {
    let tokens: f64 = problem.kv_lens.iter().map(|&len| len as f64).sum();
    let tile = run_bytes(format, problem.head_dim, arithmetic::TILE) as f64;
    tokens * problem.num_kv_heads as f64 * (tile / arithmetic::TILE as f64)
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
        (channel, 0.4 * dims),
    ];
    let more: f64 = more.iter().filter(|(has, _)| *has).map(|(_, us)| us).sum();
    let chain = (0.25 + 0.55 * dims).max(0.7) + more;
    let chain = chain * (0.4 + 0.6 * row_groups(problem) as f64);
    chain.max(bytes / 32.5e3)
}

/// Groups of eight query rows per KV head.
fn row_groups(problem: &Problem) -> usize {
    let rows = problem.heads_per_kv() * problem.q_len;
    rows.div_ceil(8).max(1)
}

/// Microseconds of a launch whose items have a team each, more than run at once. `None` where lengths differ, so that some teams would
/// end long after others, or each item is soon over, or of fewer dims (more teams than two then fit an SM).
fn in_waves(problem: &Problem, sms: usize, cost: &Cost) -> Option<f64> {
    let longest = longest(problem);
    let shortest = problem.kv_lens.iter().copied().min().unwrap_or(0);
    let tiles = longest.div_ceil(arithmetic::TILE);
    if problem.head_dim < 128 || tiles < WAVE_TILES || 4 * shortest < 3 * longest {
        return None;
    }
    let (items, places) = (items(problem), SM_TEAMS * sms);
    let alone = ALONE + tiles as f64 * cost.tile;
    let wave = |of_wave: usize| {
        if of_wave > 0 {
            alone.max(cost.read * of_wave as f64 / items as f64)
        } else {
            0.0
        }
    };
    Some(ALONE + (items / places) as f64 * wave(places) + wave(items % places))
}

/// Microseconds of `decode.cu`: its CTAs have whole spans, some one more than others, and hand over what they share; a warp alone with a
/// tile takes longer with two groups of rows, and with 4-bit keys. One item alone is a few tiles for each, most of all with 4-bit keys, and
/// slots of all CTAs that eight join.
fn decode_us(problem: &Problem, format: KvFormat, sms: usize) -> f64 {
    let spans = max_segments(longest(problem)).div_ceil(arithmetic::SPAN);
    let (items, ctas) = (items(problem), SM_TEAMS * sms);
    let is_cut = items < ctas && spans > 1;
    let joins = if is_cut { 0.05 * spans as f64 } else { 0.0 };
    let each = items as f64 * spans as f64 / ctas as f64;
    let most = if is_cut && each > 1.0 {
        each.ceil() / each
    } else {
        1.0
    };
    let int4 = format.k.code_bits() == 4;
    let more = [
        (items == 1, 4.0),
        (items == 1 && int4, 4.0),
        (row_groups(problem) > 1, 4.0),
        (int4, 1.3),
        (format.k == Scheme::Int4(Int4Scale::Channel), 0.7),
        (format.k.groups(problem.head_dim) > 1, 1.4),
    ];
    let more: f64 = more.iter().filter(|(has, _)| *has).map(|(_, us)| us).sum();
    8.3 + joins + more + most * bytes(problem, format) / 4.4e6
}

/// Which kernel of `short.cu` is faster than the others, or asked for; it always has a launch then.
pub(crate) fn choose(problem: &Problem, format: KvFormat, limits: Limits) -> Option<Unit> {
    if problem.batch() > MAX_GRID || problem.num_kv_heads > MAX_GRID {
        return None;
    }
    let cost = Cost::of(problem, format);
    let hands_over = || spread(problem, limits.sms, &cost, Some(Unit::HandOver)).is_some();
    if limits.short == Short::HandOver && hands_over() {
        return Some(Unit::HandOver);
    }
    let spread = spread(problem, limits.sms, &cost, None);
    let unit = spread.map_or(Unit::Short, |spread| spread.together.unit());
    let short = match spread {
        Some(spread) => Some(spread.us(&cost)),
        None => in_waves(problem, limits.sms, &cost),
    };
    let is_chosen = match limits.short {
        Short::Auto | Short::HandOver => {
            short.is_some_and(|us| us < decode_us(problem, format, limits.sms))
        }
        Short::Always => true,
        Short::Never => false,
    };
    is_chosen.then_some(unit)
}

/// The launch of a problem; one CTA per item, in waves, where there is no room for all at once.
pub(crate) fn launch(
    geometry: &Geometry,
    problem: &Problem,
    format: KvFormat,
    sms: usize,
) -> Launch {
    let cost = Cost::of(problem, format);
    let best = spread(problem, sms, &cost, Some(geometry.unit));
    let (teams, ctas, together) = best.map_or((1, 1, Together::Alone), |spread| {
        (spread.teams, spread.ctas, spread.together)
    });
    let segments = max_segments(longest(problem));
    let (max_slots, tile_split) = match (geometry.unit, together) {
        (Unit::HandOver, Together::HandOver { segments: true }) => (segments, true),
        (Unit::HandOver, _) => (segments.div_ceil(arithmetic::SPAN), false),
        _ => (0, false),
    };
    Launch {
        grid: [ctas, problem.num_kv_heads, problem.batch()],
        threads: teams * geometry.threads(),
        teams,
        cluster: if together == Together::Cluster {
            ctas
        } else {
            1
        },
        max_slots,
        tile_split,
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

    fn chosen(problem: &Problem, format: KvFormat) -> Unit {
        let geometry = Geometry::of_problem(problem, format, 64, limits(Short::Auto));
        geometry.map(|g| g.unit).unwrap()
    }

    fn unit(heads: [usize; 2], kv_len: usize, batch: usize, format: KvFormat) -> Unit {
        let problem = Problem::new(heads[0], heads[1], 128, vec![kv_len; batch]);
        chosen(&problem, format)
    }

    /// What was measured faster is chosen (docs/log/2026-11-cuda.md, lines 39, 41, 49, 51, 64 and 72).
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
                Unit::Short,
            ),
            (
                int8,
                [32, 8],
                &[(8192, 1), (32_768, 1), (131_072, 1)],
                Unit::HandOver,
            ),
            (int8, [8, 1], &[(8192, 32), (8192, 85)], Unit::HandOver),
            (
                int8,
                [8, 1],
                &[(8192, 64), (8192, 128), (8192, 256)],
                Unit::Short,
            ),
            (int8, [8, 1], &[(8192, 512)], Unit::Decode),
            (
                f16,
                [32, 32],
                &[(128, 1), (512, 1), (2048, 1), (4096, 1), (128, 8)],
                Unit::Short,
            ),
            (f16, [32, 32], &[(128, 16)], Unit::Decode),
            (bf16, [8, 1], &[(8192, 512), (8192, 400)], Unit::Short),
            (bf16, [32, 8], &[(4096, 64), (1024, 128)], Unit::Short),
            (bf16, [32, 8], &[(8192, 1), (32_768, 1)], Unit::HandOver),
            (bf16, [8, 1], &[(8192, 300)], Unit::Decode),
            (int8, [8, 1], &[(131_072, 1)], Unit::Decode),
            (int8, [8, 2], &[(65_536, 1), (262_144, 1)], Unit::Decode),
            (KvFormat::INT4, [8, 1], &[(8192, 512)], Unit::Decode),
            (KvFormat::INT4, [8, 1], &[(131_072, 1)], Unit::Decode),
        ];
        for (format, heads, shapes, want) in kinds {
            for &(kv_len, batch) in shapes {
                let got = unit(heads, kv_len, batch, format);
                assert_eq!(got, want, "{format}, {kv_len} tokens, batch {batch}");
            }
        }
    }

    #[test]
    fn head_dims_choose_for_themselves() {
        for (head_dim, batch, want) in [
            (64, 256, Unit::Decode),
            (96, 167, Unit::Decode),
            (192, 85, Unit::HandOver),
            (256, 64, Unit::Short),
        ] {
            let problem = Problem::new(8, 1, head_dim, vec![8192; batch]);
            assert_eq!(chosen(&problem, KvFormat::INT8), want, "{head_dim}");
        }
    }

    #[test]
    fn all_ctas_of_a_launch_run_at_once() {
        for batch in 1..300 {
            for kv_len in [1, 64, 65, 700, 1024, 5000, 8192, 65_536, 200_000] {
                let problem = Problem::new(4, 1, 128, vec![kv_len; batch]);
                let cost = Cost::of(&problem, KvFormat::INT8);
                for unit in [None, Some(Unit::Short), Some(Unit::HandOver)] {
                    let Some(way) = spread(&problem, 132, &cost, unit) else {
                        continue;
                    };
                    let all = way.teams * way.ctas;
                    assert!(batch * all <= 264);
                    let kept = way.together != Together::Cluster || way.slots_each <= TEAM_SLOTS;
                    assert!(kept, "{kv_len} {batch}");
                    assert!(way.tiles * all >= kv_len.div_ceil(64));
                    assert!(unit.is_none_or(|unit| unit == way.together.unit()));
                }
            }
        }
    }

    #[test]
    fn short_can_be_had_always_and_never() {
        let problem = Problem::new(8, 1, 128, vec![8192; 512]);
        let of = |short| {
            let geometry = Geometry::of_problem(&problem, KvFormat::INT8, 64, limits(short));
            geometry.map(|g| (g.unit, g.launch(&problem, KvFormat::INT8, 132).grid))
        };
        assert_eq!(of(Short::Always), Some((Unit::Short, [1, 1, 512])));
        assert_eq!(of(Short::Never), Some((Unit::Decode, [264, 1, 1])));
        assert_eq!(
            of(Short::HandOver).map(|(unit, _)| unit),
            Some(Unit::Decode)
        );
        let long = Problem::new(8, 1, 128, vec![300, 1]);
        let over = Geometry::of_problem(&long, KvFormat::INT8, 64, limits(Short::HandOver));
        assert_eq!(over.map(|g| g.unit), Some(Unit::HandOver));
        let few = Problem::new(8, 1, 128, vec![100]);
        let never = Geometry::of_problem(&few, KvFormat::INT8, 64, limits(Short::Never));
        assert_eq!(never.map(|g| g.unit), Some(Unit::Decode));
        assert!("often".parse::<Short>().is_err());
    }
}
