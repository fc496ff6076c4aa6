//! How a decode kernel is shaped for a problem: a pure table, which changes speed and never bits.

use std::ops::RangeInclusive;

use attn_core::{Int4Scale, Int8Scale, KvFormat, Problem, Scheme, arithmetic};

use crate::short;

/// Rows of one tensor-core tile: the two planes of 8 query rows fill the 16 rows of a fragment.
pub const ROWS: usize = 8;

/// Teams of warps in a CTA of `decode.cu`: each has a segment of the span, or a tile of the segment.
const TEAMS: usize = arithmetic::SPAN;

/// A decode kernel: each is the fastest for some problems, all give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// `decode.cu`: most of the work in flight.
    Decode,
    /// `wide.cu`: many query rows per KV head.
    Wide,
    /// `short.cu`: few and short sequences, where latency binds; an item's teams share a cluster.
    Short,
    /// `short.cu` where an item's teams hand their states over in global memory: few long sequences.
    HandOver,
}

impl Unit {
    /// Whether it is one of `short.cu`, whose teams share tiles.
    pub fn shares_tiles(self) -> bool {
        matches!(self, Unit::Short | Unit::HandOver)
    }
}

/// What of a device shapes a launch.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of shared memory that a CTA may have.
    pub shared_limit: usize,
    /// Streaming multiprocessors.
    pub sms: usize,
    /// Whether `short.cu` may be chosen, must be where it can, or must not: this changes speed, never bits.
    pub short: Short,
}

/// When to choose `short.cu` (`ATTN_CUDA_SHORT`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Short {
    /// Where it is the faster one: `auto`.
    #[default]
    Auto,
    /// Wherever it can: `always`.
    Always,
    /// Wherever its teams can hand over in global memory, elsewhere where it is the faster one: `hand-over`.
    HandOver,
    /// `never`.
    Never,
}

impl std::str::FromStr for Short {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" | "auto" => Ok(Short::Auto),
            "always" => Ok(Short::Always),
            "hand-over" => Ok(Short::HandOver),
            "never" => Ok(Short::Never),
            other => Err(format!(
                "ATTN_CUDA_SHORT is {other}; allowed: auto, always, hand-over, never"
            )),
        }
    }
}

/// The shape of one CTA, fixed at compile time (`-D` macros of the kernels).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// The kernel.
    pub unit: Unit,
    /// Row groups of 8 rows per warp: `ATTN_G`.
    pub row_groups: usize,
    /// Warps of a team, each with its own rows: `ATTN_WR`. All warps with rows of `wide.cu`, where there are no teams.
    pub row_warps: usize,
    /// Stages in flight per team: `ATTN_STAGES`.
    pub stages: usize,
    /// CTAs per SM: `ATTN_CTAS`.
    pub ctas: usize,
}

/// The rows per KV head for which `wide.cu` is chosen, with six or eight warps of eight rows each: 48 rows take 43 to 54 µs there and 49
/// to 76 in `decode.cu`, 64 rows 209 instead of 284 (docs/log/2026-11-cuda.md, "Many query rows").
const WIDE_ROWS: RangeInclusive<usize> = 33..=64;

/// A stage has K and V of a tile if they are no larger.
pub(crate) const WHOLE_STAGE: usize = 12288;

/// What an architecture with the bulk copy engine has, and no other.
pub(crate) const BULK_SHARED: usize = 227 * 1024;

/// Shared memory that the device keeps for itself per CTA.
pub(crate) const RESERVED_SHARED: usize = 1024;

/// What one launch looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Runs of rows per KV head.
    pub row_blocks: usize,
    /// Slots per (sequence, KV head, row block).
    pub max_slots: usize,
    /// Whether there is so little work that a unit of it is a segment, handed over in a slot, and not a span or four.
    pub tile_split: bool,
    /// CTAs.
    pub grid: [usize; 3],
    /// Threads of a CTA.
    pub threads: usize,
    /// Teams of a CTA, of which each has shared memory of its own; 1 but in `short.cu`.
    pub teams: usize,
    /// CTAs of a cluster, along the grid's first axis; 1 but in `short.cu`.
    pub cluster: usize,
}

/// The most of anything in a shape that `ATTN_CUDA_SHAPE` asks for.
const MOST_OF_SHAPE: usize = 64;

/// `ATTN_CUDA_SHAPE=row_groups,row_warps,stages,ctas`, and a fifth number, 1, for `wide.cu`; for who tunes this table.
fn from_env() -> Option<Geometry> {
    let text = std::env::var("ATTN_CUDA_SHAPE").ok()?;
    let number = |n: &str| n.parse().unwrap_or(1usize).clamp(1, MOST_OF_SHAPE);
    let numbers: Vec<usize> = text.split(',').map(number).collect();
    let (&[row_groups, row_warps, stages, ctas], wide) = (numbers.get(..4)?, numbers.get(4)) else {
        return None;
    };
    Some(Geometry {
        unit: if wide == Some(&1) {
            Unit::Wide
        } else {
            Unit::Decode
        },
        row_groups,
        row_warps,
        stages,
        ctas,
    })
}

fn params_bytes(scheme: Scheme, head_dim: usize, tokens: usize) -> usize {
    match scheme {
        Scheme::Int8(Int8Scale::Tensor) | Scheme::F16 | Scheme::Bf16 | Scheme::Fp8E4m3 => 0,
        Scheme::Int8(_) => scheme.groups(head_dim) * tokens * 2,
        Scheme::Int4(Int4Scale::Groups(groups)) => groups as usize * tokens * 4,
        Scheme::Int4(Int4Scale::Channel) => head_dim * 4,
    }
}

/// Bytes of a tile's K and V, and of a stage of a ring, which has one of them or, where they are small, both.
struct Stage {
    k: usize,
    v: usize,
    bytes: usize,
    align: usize,
}

impl Stage {
    fn of(format: KvFormat, head_dim: usize, page_size: usize) -> Self {
        let tile = arithmetic::TILE;
        let block = if page_size == 0 || page_size > tile {
            tile
        } else {
            page_size
        };
        let part = |scheme: Scheme| {
            let each = if page_size == 0 { 2 } else { 1 };
            block * head_dim * scheme.code_bits() / 8 + each * params_bytes(scheme, head_dim, block)
        };
        let (k, v) = (
            part(format.k) * (tile / block),
            part(format.v) * (tile / block),
        );
        let whole = page_size != 0 && k + v <= WHOLE_STAGE;
        let behind = if whole { v } else { 0 };
        let panels = head_dim / 16;
        let tail_first = panels.div_ceil(2) * tile * 16;
        let tail_second = panels / 2 * tile * 16 + tile * 2 + behind;
        let tail = if format.k == Scheme::Int4(Int4Scale::Channel) {
            tail_first.max(tail_second)
        } else {
            0
        };
        let align = if page_size == 0 { 1024 } else { 128 };
        Stage {
            k,
            v,
            bytes: (k + behind).max(v).max(tail).next_multiple_of(align),
            align,
        }
    }
}

impl Geometry {
    /// For `rows` query rows per KV head, with `shared_limit` bytes of shared memory in a CTA; `None` if nothing fits.
    pub fn choose(
        rows: usize,
        format: KvFormat,
        head_dim: usize,
        page_size: usize,
        shared_limit: usize,
    ) -> Option<Self> {
        if let Some(given) = from_env() {
            return Some(given);
        }
        if let Some(wide) = Self::wide(rows, format, head_dim, page_size, shared_limit) {
            return Some(wide);
        }
        // Measured on an H200 (docs/log/2026-11-cuda.md): a second row group per warp spills but for 32 rows; 48 rows are faster as two
        // blocks of 24 (58 µs) than as one of 48 (70) or two of 32 (70).
        let shapes = [(2, 2), (1, 3), (1, 2), (1, 1)];
        let wanted = match rows {
            0..=8 => 3,
            9..=16 => 2,
            _ if head_dim > 128 => 2,
            17..=24 | 33..=48 => 1,
            _ => 0,
        };
        // Of long stages one is enough to have on the way for each of eight teams; of short ones it is too few.
        let stage = Stage::of(format, head_dim, page_size);
        let is_long = stage.k.min(stage.v) >= 12_288;
        let fits = |(row_groups, row_warps): (usize, usize), least: usize| {
            // Two small CTAs cover each other's joins; with more warps in one there are no registers for a second.
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
                (least..=6)
                    .rev()
                    .map(|stages| Geometry {
                        unit: Unit::Decode,
                        row_groups,
                        row_warps,
                        stages,
                        ctas,
                    })
                    .find(|g| {
                        let bytes = g.shared_bytes(format, head_dim, page_size);
                        ctas * (bytes + RESERVED_SHARED) <= shared_limit + RESERVED_SHARED
                    })
            })
        };
        let smaller = || shapes[wanted..].iter().copied();
        smaller()
            .find_map(|shape| fits(shape, 2))
            .or_else(|| smaller().find_map(|shape| fits(shape, 1)))
    }

    /// The shape of `wide.cu`; `None` where it was not written for the problem, or is not the faster one.
    fn wide(
        rows: usize,
        format: KvFormat,
        head_dim: usize,
        page_size: usize,
        shared_limit: usize,
    ) -> Option<Self> {
        let int8 = |scheme| {
            matches!(
                scheme,
                Scheme::Int8(Int8Scale::Token) | Scheme::Int8(Int8Scale::Tensor)
            )
        };
        let shape = Geometry {
            unit: Unit::Wide,
            row_groups: 1,
            row_warps: if rows <= 48 { 6 } else { 8 },
            stages: 3,
            ctas: 2,
        };
        // Only an architecture with the bulk copy engine has as much shared memory (`Arch::shared_limit`).
        let fits = shared_limit >= BULK_SHARED
            && 2 * (shape.shared_bytes(format, head_dim, page_size) + RESERVED_SHARED)
                <= shared_limit + RESERVED_SHARED;
        let written = int8(format.k)
            && int8(format.v)
            && matches!(head_dim, 64 | 128)
            && (1..=arithmetic::TILE).contains(&page_size);
        (fits && written && WIDE_ROWS.contains(&rows)).then_some(shape)
    }

    /// The kernel of a problem, and of other lengths and batches of its heads: `decode.cu` or `wide.cu` first, then those of `short.cu`.
    pub fn all(
        rows: usize,
        format: KvFormat,
        head_dim: usize,
        page_size: usize,
        shared_limit: usize,
    ) -> impl Iterator<Item = Self> {
        let many = Self::choose(rows, format, head_dim, page_size, shared_limit);
        many.into_iter().chain(short::geometries(
            rows,
            format,
            head_dim,
            page_size,
            shared_limit,
        ))
    }

    /// The fastest one for a problem, by its longest sequence; `None` if nothing fits.
    pub fn of_problem(
        problem: &Problem,
        format: KvFormat,
        page_size: usize,
        limits: Limits,
    ) -> Option<Self> {
        let rows = problem.heads_per_kv() * problem.q_len;
        let all = Self::all(
            rows,
            format,
            problem.head_dim,
            page_size,
            limits.shared_limit,
        );
        let (short, mut many): (Vec<_>, Vec<_>) = all.partition(|g| g.unit.shares_tiles());
        let chosen = short::choose(problem, format, limits);
        let is_chosen = |g: &Geometry| chosen == Some(g.unit);
        short.into_iter().find(is_chosen).or(many.pop())
    }

    /// Threads of a CTA, or of each of its teams in `short.cu`.
    pub fn threads(&self) -> usize {
        match self.unit {
            Unit::Decode => 32 * self.row_warps * TEAMS,
            Unit::Wide => 32 * (self.row_warps + 2),
            Unit::Short | Unit::HandOver => short::TEAM_THREADS,
        }
    }

    /// Query rows of a CTA.
    pub fn rows(&self) -> usize {
        ROWS * self.row_groups * self.row_warps
    }

    /// Dynamic shared memory of a CTA, or of each of its teams in `short.cu`: `attn_shared_bytes`, which the image exports.
    pub fn shared_bytes(&self, format: KvFormat, head_dim: usize, page_size: usize) -> usize {
        let tile = arithmetic::TILE;
        let channel = format.k == Scheme::Int4(Int4Scale::Channel);
        let int4 = |scheme: Scheme| scheme.code_bits() == 4;
        let (k_groups, v_groups) = (format.k.groups(head_dim), format.v.groups(head_dim));
        let panels = head_dim / 16;
        let Stage {
            k,
            v,
            bytes: stage,
            align,
        } = Stage::of(format, head_dim, page_size);
        let scratch_k = match (channel, int4(format.k)) {
            (true, _) => 2 * head_dim * 4 + panels.div_ceil(4) * 64,
            (false, true) => k_groups * tile * 8,
            (false, false) => k_groups * tile * 4,
        };
        let query = if channel {
            self.rows() / ROWS * (panels + panels.div_ceil(4)) * 512
        } else {
            0
        };
        let scratch_v = v_groups * tile * (4 + if int4(format.v) { 2 } else { 0 });
        if self.unit.shares_tiles() {
            let scratch = if channel {
                4 * scratch_k.max(scratch_v)
            } else {
                0
            };
            let bytes = self.stages * (stage + 16)
                + short::exchange_bytes(self, format, head_dim)
                + short::state_bytes(self, head_dim)
                + query
                + scratch
                + 16;
            return bytes.next_multiple_of(align);
        }
        if self.unit == Unit::Wide {
            let params = scratch_k + scratch_v + v_groups * 8;
            let slot = ((k + v).next_multiple_of(16) + params).next_multiple_of(128);
            return self.stages * slot
                + 4 * self.rows() * (head_dim / 8 + 1) * 8
                + (self.stages * 24).next_multiple_of(16)
                + 80
                + 128
                + self.row_warps * 64
                + 4 * self.rows() * (head_dim / 16) * 8;
        }
        TEAMS * self.stages * stage
            + TEAMS * self.rows() * (head_dim + 8) * 4
            + TEAMS * self.rows() * 8
            + (self.rows() * (head_dim + 2) * 4 + query).max(TEAMS * query)
            + TEAMS * self.row_warps * scratch_k.max(scratch_v)
            + TEAMS * self.stages * 16
            + 64
            + (2 + TEAMS) * 64
    }

    /// The launch for lengths up to the problem's longest on `sms` SMs.
    pub fn launch(&self, problem: &Problem, format: KvFormat, sms: usize) -> Launch {
        let rows = problem.heads_per_kv() * problem.q_len;
        let max_kv_len = problem.kv_lens.iter().copied().max().unwrap_or(0);
        if self.unit.shares_tiles() {
            return short::launch(self, problem, format, sms);
        }
        let one_by_one = |tile_split, row_blocks, segments: usize, spans, ctas| Launch {
            row_blocks,
            max_slots: if tile_split { segments } else { spans },
            tile_split,
            grid: [ctas, 1, 1],
            threads: self.threads(),
            ..Launch::default()
        };
        // Sums that would not fit saturate: they only choose a shape, and `Shape::new` refuses what kernels cannot add up.
        let items = |n: usize| items(problem).saturating_mul(n);
        let ctas = sms * self.ctas;
        let row_blocks = rows.div_ceil(self.rows());
        let segments = max_segments(max_kv_len);
        let spans = segments.div_ceil(arithmetic::SPAN);
        if self.unit == Unit::Wide {
            // Whole spans, unless shares of whole segments come out more even: a segment that is handed over costs about one more.
            let spans_each = items(row_blocks * spans).div_ceil(ctas);
            let segments_each = items(row_blocks * segments).div_ceil(ctas);
            let tile_split =
                segments_each.saturating_add(1) < spans_each.saturating_mul(arithmetic::SPAN);
            return one_by_one(tile_split, row_blocks, segments, spans, ctas);
        }
        // A team takes one tile of a segment, which has no more than four tiles up to 65536 tokens.
        let tile_split =
            max_kv_len <= TEAMS * arithmetic::TILE * 256 && items(3 * row_blocks * spans) < ctas;
        one_by_one(tile_split, row_blocks, segments, spans, ctas)
    }
}

impl Default for Launch {
    /// One CTA of no threads.
    fn default() -> Self {
        Launch {
            row_blocks: 1,
            max_slots: 0,
            tile_split: false,
            grid: [1; 3],
            threads: 0,
            teams: 1,
            cluster: 1,
        }
    }
}

impl Launch {
    /// Slots for partial states; `usize::MAX` where there would be more.
    pub fn slots(&self, batch: usize, num_kv_heads: usize) -> usize {
        let of_item = self.row_blocks.saturating_mul(self.max_slots);
        batch.saturating_mul(num_kv_heads).saturating_mul(of_item)
    }
}

/// KV heads of all sequences; `usize::MAX` where there would be more.
pub(crate) fn items(problem: &Problem) -> usize {
    problem.batch().saturating_mul(problem.num_kv_heads)
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
    fn no_length_has_more_segments_than_the_maximum_says() {
        let mut most = 1;
        for kv_len in 0..300_000usize {
            let tiles = kv_len.div_ceil(arithmetic::TILE);
            most = most.max(tiles.div_ceil(arithmetic::segment_tiles(kv_len)));
            assert!(most <= max_segments(kv_len), "{kv_len}");
        }
        assert_eq!((max_segments(0), max_segments(1 << 20)), (1, 256));
    }

    #[test]
    fn every_problem_fits_shared_memory_and_covers_its_rows() {
        for limit in [163 * 1024, 227 * 1024] {
            for rows in 1..=1024 {
                for dim in [64, 80, 96, 128, 192, 256] {
                    for format in [KvFormat::INT8, KvFormat::INT4, KvFormat::same(Scheme::F16)] {
                        let Some(g) = Geometry::choose(rows, format, dim, 64, limit) else {
                            let largest = format == KvFormat::same(Scheme::F16) && dim == 256;
                            assert!(largest && limit < 200 * 1024, "{format} {dim} {rows}");
                            continue;
                        };
                        let launch =
                            g.launch(&Problem::new(2 * rows, 2, dim, vec![5000; 3]), format, 132);
                        assert!(launch.row_blocks * g.rows() >= rows, "{rows}");
                        assert!(g.threads() <= 512 && g.shared_bytes(format, dim, 64) <= limit);
                    }
                }
            }
        }
    }

    #[test]
    fn wide_kernels_take_spans_or_the_segments_that_share_more_evenly() {
        let limit = 227 * 1024;
        let g = Geometry::wide(48, KvFormat::INT8, 128, 64, limit).unwrap();
        assert_eq!((g.rows(), g.threads()), (48, 256));
        let g64 = Geometry::wide(64, KvFormat::INT8, 128, 64, limit).unwrap();
        assert_eq!((g64.rows(), g64.threads()), (64, 320));
        for (kv_len, batch, split) in [(1024, 256, false), (8192, 32, false), (131_072, 2, true)] {
            let launch = g.launch(
                &Problem::new(48, 1, 128, vec![kv_len; batch]),
                KvFormat::INT8,
                132,
            );
            assert_eq!((launch.row_blocks, launch.grid), (1, [264, 1, 1]));
            assert_eq!(launch.tile_split, split, "{kv_len}");
        }
        assert!(Geometry::wide(48, KvFormat::INT8, 128, 64, 163 * 1024).is_none());
        assert!(Geometry::wide(48, KvFormat::INT8, 128, 0, limit).is_none());
        assert!(Geometry::wide(48, KvFormat::INT4, 128, 64, limit).is_none());
        assert!(Geometry::wide(48, KvFormat::INT8, 80, 64, limit).is_none());
    }

    #[test]
    fn the_rows_of_wide_kernels_are_those_that_were_measured() {
        let is_wide = |rows, format, page_size, limit| {
            Geometry::choose(rows, format, 128, page_size, limit)
                .is_some_and(|g| g.unit == Unit::Wide)
        };
        let (int8, limit) = (KvFormat::INT8, 227 * 1024);
        let wide: Vec<usize> = (1..=300)
            .filter(|&rows| is_wide(rows, int8, 64, limit))
            .collect();
        assert_eq!(wide, Vec::from_iter(33..=64));
        assert!(!is_wide(48, KvFormat::INT4, 64, limit) && !is_wide(48, int8, 0, limit));
        assert!(!is_wide(48, int8, 64, 163 * 1024) && !is_wide(48, int8, 128, limit));
    }

    #[test]
    fn short_batches_split_segments_by_tile() {
        let g = Geometry::choose(4, KvFormat::INT8, 128, 64, 227 * 1024).unwrap();
        let is_split = |heads: usize, batch: usize, kv_len| {
            let problem = Problem::new(4 * heads, heads, 128, vec![kv_len; batch]);
            g.launch(&problem, KvFormat::INT8, 132).tile_split
        };
        assert!(is_split(8, 1, 1024));
        assert!(!is_split(1, 512, 8192));
        assert!(!is_split(1, 1, 65_537));
    }
}
