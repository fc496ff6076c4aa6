//! Shared memory of a CTA: the sizes of `struct SharedMemory` in `kernels/cuda`, for the choice of a configuration.
//!
//! A kernel's image exports its own size, `attn_shared_bytes`, which is what a launch uses; a test compares the two.

use attn_core::{Groups, HeadDim, KvFormat, Scheme, arithmetic, layout::params_bytes};

use super::config::{BULK_SHARED, Kernel, KernelConfig, KvLayout, TEAMS, WARPGROUPS, warpgroups};

/// A stage holds both K and V of a tile where they are no larger than this.
const KV_ONE_STAGE: usize = 12288;

/// Stages of a CTA of `many_rows.cu` with codes of 4 bits as bytes, with and without a copy engine, and with codes as f16.
const UNPACKED_STAGES: [usize; 2] = [10, 4];
const UNPACKED_FLOAT_STAGES: usize = 8;

/// Partials that a team of a cluster receives room for, if jobs are as many as teams.
pub(crate) const TEAM_PARTIALS: usize = 4;
/// Warps that share each tile in `low_latency.cu`.
const TILE_WARPS: usize = 4;

/// What `many_rows.cu` turns codes into.
#[derive(Clone, Copy)]
enum Unpacked {
    /// They are read as they are.
    Nothing { integers: bool },
    /// Codes of 4 bits into bytes, with their parameters, beside which those of values in 8 bits are copied.
    Bytes { values_are_bytes: bool },
    /// Codes of fp8 into f16.
    Floats,
}

/// Bytes of a tile's K and V, and of a stage, which holds one of them, or both where they are small.
pub(crate) struct Stage {
    pub(crate) k: usize,
    pub(crate) v: usize,
    /// The fewest stages that a tile with residuals needs at once.
    pub(crate) least: usize,
    /// What codes are turned into by `many_rows.cu`.
    unpacked: Unpacked,
    /// Bytes of a stage of wide rows: a part of K with the parameters of both sides, or one of V.
    wide: usize,
    /// Bytes of the barriers of a stage of wide rows: full and empty, and of latents copied.
    wide_barriers: usize,
    /// Bytes of a row of V that is turned back, where it has a place of its own, or 0.
    rotated_row: usize,
    bytes: usize,
    align: usize,
}

impl Stage {
    pub(crate) fn new(format: KvFormat, head_dim: HeadDim, layout: KvLayout) -> Self {
        let tile = arithmetic::TILE;
        let block = match layout {
            KvLayout::Pages(tokens) => tokens.min(tile),
            KvLayout::Rows | KvLayout::PagedRows(_) => tile,
        };
        let [k_groups, v_groups] = format.groups(head_dim);
        let side = |scheme: Scheme, groups: Groups| {
            // Scales of strided rows are copied in words of 4 bytes.
            let copies = if layout.is_rows() { 2 } else { 1 };
            let codes = block * groups.dim() * scheme.code_bits() / 8;
            (codes + copies * params_bytes(scheme, groups, block)) * (tile / block)
        };
        let k = side(format.k, k_groups);
        let v = match format.latents {
            true => 0,
            false => side(format.v, v_groups),
        };
        let one_stage = !layout.is_rows() && (format.latents || k + v <= KV_ONE_STAGE);
        let v_behind = if one_stage { v } else { 0 };
        let bytes = (k + v_behind).max(v);
        let residuals = |scheme: Scheme, dim: usize| match scheme.window().tiles() {
            0 => 0,
            _ => tile * dim / 2,
        };
        // Residuals lie behind the codes of their side, or in a stage of their own, which is in use at the same time.
        let of_k = residuals(format.k, head_dim.k);
        let of_v = residuals(format.v, head_dim.v);
        let lie_apart = |codes: usize, residuals: usize| {
            residuals > 0 && (one_stage || codes + residuals > bytes)
        };
        let align = if layout.is_rows() { 1024 } else { 128 };
        let codes = |scheme: Scheme, dim: usize| tile * dim * scheme.code_bits() / 8;
        let [k_codes, v_codes] = [codes(format.k, head_dim.k), codes(format.v, head_dim.v)];
        let params = k.saturating_sub(k_codes) + v.saturating_sub(v_codes);
        let [k_parts, v_parts] = wide_parts(format, head_dim);
        let wide = (k_codes / k_parts + params).max(v_codes.checked_div(v_parts).unwrap_or(0));
        Stage {
            k,
            v,
            least: if lie_apart(k, of_k) || lie_apart(v, of_v) {
                2
            } else {
                1
            },
            unpacked: match [format.k, format.v].map(Scheme::code_bits) {
                _ if format.k == Scheme::Fp8E4m3 => Unpacked::Floats,
                _ if !format.is_integer() => Unpacked::Nothing { integers: false },
                [8, 8] => Unpacked::Nothing { integers: true },
                [_, v] => Unpacked::Bytes {
                    values_are_bytes: v == 8,
                },
            },
            wide: wide.next_multiple_of(align),
            wide_barriers: if format.latents && format.is_integer() {
                32
            } else {
                16
            },
            // Wider ones lie where the states did.
            rotated_row: if format.v.is_rotated() && head_dim.v <= 256 {
                head_dim.v.next_multiple_of(32) * 4
            } else {
                0
            },
            bytes: bytes.next_multiple_of(align),
            align,
        }
    }
}

/// Dynamic shared memory of a CTA, or of each of its teams in `low_latency.cu`, in bytes, where it may have `shared_limit`.
pub fn shared_bytes(
    config: &KernelConfig,
    format: KvFormat,
    head_dim: HeadDim,
    layout: KvLayout,
    shared_limit: usize,
) -> usize {
    let stage = Stage::new(format, head_dim, layout);
    match config.kernel {
        Kernel::SplitKv => split_kv_bytes(config, &stage, head_dim.v),
        Kernel::LowLatencyCluster | Kernel::LowLatencyGlobal => {
            team_bytes(config, &stage, head_dim.v)
        }
        Kernel::ManyRows | Kernel::ManyRowsWhole if has_wide_rows(format, head_dim) => {
            let widens_pages = widens_pages(format, head_dim, shared_limit);
            wide_rows_bytes(config, &stage, format, head_dim, widens_pages)
        }
        Kernel::ManyRows | Kernel::ManyRowsWhole => {
            many_rows_bytes(config, &stage, head_dim.max(), shared_limit)
        }
    }
}

/// Whether rows are wide for `many_rows.cu`, whose warpgroups share them then (`IS_WIDE` in `kernels/cuda/attend/many_rows/config.cuh`).
pub(crate) fn has_wide_rows(format: KvFormat, head_dim: HeadDim) -> bool {
    match format.is_integer() {
        true => head_dim.k != head_dim.v || head_dim.v > 128 || format.latents,
        false => head_dim.max() > 256,
    }
}

/// The parts in which stages have wide rows of K and V, where that is not in K's.
pub(crate) fn wide_parts(format: KvFormat, head_dim: HeadDim) -> [usize; 2] {
    let HeadDim { k, v } = head_dim;
    match (format.is_integer(), format.latents) {
        (true, _) => [if k > 320 { 2 } else { 1 }, if v > 256 { 2 } else { 1 }],
        (false, true) => [1, 0],
        (false, false) => [if k > 256 { 2 } else { 1 }, WARPGROUPS],
    }
}

/// Whether latents of fp8 are turned into f16 on their way from pages (`WIDENS_PAGES`), so that stages are of f16.
pub(crate) fn widens_pages(format: KvFormat, head_dim: HeadDim, shared_limit: usize) -> bool {
    let has_room_for_weights = head_dim.k >= head_dim.v + arithmetic::TILE;
    let is_wide = has_wide_rows(format, head_dim) && format.latents;
    is_wide && format.k == Scheme::Fp8E4m3 && has_room_for_weights && shared_limit >= BULK_SHARED
}

/// The stages of fp8 as f16 that a CTA with wide rows has beside those of codes, and the bytes of each.
fn wide_unpacked(format: KvFormat, head_dim: HeadDim) -> [usize; 2] {
    if format.k != Scheme::Fp8E4m3 {
        return [0, 0];
    }
    let [k_parts, v_parts] = wide_parts(format, head_dim);
    let of_v = head_dim.v.checked_div(v_parts).unwrap_or(0);
    let is_one = format.latents && head_dim.k > 320;
    let part = (head_dim.k / k_parts).max(of_v);
    [if is_one { 1 } else { 3 }, arithmetic::TILE * 2 * part]
}

/// Queries, and two numbers of each row; of fp8 stages as f16; of integers weights of a span, too, four numbers for each row of its tiles, and of its segments, thresholds, and V's scales of each warp.
fn wide_rows_bytes(
    config: &KernelConfig,
    stage: &Stage,
    format: KvFormat,
    head_dim: HeadDim,
    widens_pages: bool,
) -> usize {
    let k_dim = head_dim.k;
    let [beside, unpacked_bytes] = wide_unpacked(format, head_dim);
    let (codes, unpacked) = match widens_pages {
        true => (0, config.stages),
        false => (stage.wide, beside),
    };
    let (tile, rows) = (arithmetic::TILE, config.rows());
    let tiles = arithmetic::SEGMENT * arithmetic::SPAN;
    let (query, of_integers) = match format.is_integer() {
        true => {
            let span = tiles * rows * (tile + 12) + arithmetic::SPAN * rows * 8;
            (k_dim, span + tile * 4 + WARPGROUPS * 4 * tile * 4)
        }
        false => (k_dim * 2, 0),
    };
    config.stages * (codes + stage.wide_barriers)
        + unpacked * (unpacked_bytes + 16)
        + rows * query
        + of_integers
        + rows * 8
        + 64
        + 16
        + 16
        + 80
}

/// What a buffer of query rows has beside them, with its barriers.
const LOADED: usize = 328 + 16;

fn many_rows_bytes(
    config: &KernelConfig,
    stage: &Stage,
    head_dim: usize,
    shared_limit: usize,
) -> usize {
    let warpgroups = warpgroups(config.row_warps);
    let teams = warpgroups / config.row_warps;
    let tile = arithmetic::TILE;
    let dims = warpgroups * 64 * head_dim;
    let scales = warpgroups * 4 * tile * 4;
    let (unpacked, rows) = match stage.unpacked {
        // First parts of queries, or none where they are in registers.
        Unpacked::Floats => {
            let queries = if head_dim > 64 { 0 } else { dims * 2 };
            (UNPACKED_FLOAT_STAGES * (tile * head_dim * 2 + 16), queries)
        }
        // First parts of queries: of whole work items two buffers of a warpgroup, whose rows are loaded ahead (`LOADS_AHEAD`).
        Unpacked::Nothing { integers: false } => match config.kernel {
            Kernel::ManyRowsWhole if head_dim <= 128 => (0, 2 * (dims * 2 + warpgroups * LOADED)),
            _ => (0, dims * 2),
        },
        // Queries, states of spans, thresholds, and V's scales of each warp.
        Unpacked::Nothing { integers: true } => (0, dims * 5 + tile * 4 + scales),
        Unpacked::Bytes { values_are_bytes } => {
            let stages = UNPACKED_STAGES[usize::from(shared_limit < BULK_SHARED)]
                * (tile * (head_dim + 8) + 16);
            let scales = if values_are_bytes { scales } else { 0 };
            (stages, dims * 5 + tile * 4 + scales)
        }
    };
    teams * config.stages * (stage.bytes + 16) + unpacked + rows + 64 + 16 * teams + 16 + teams * 80
}

fn split_kv_bytes(config: &KernelConfig, stage: &Stage, head_dim: usize) -> usize {
    let rows = config.rows();
    TEAMS * config.stages * stage.bytes
        + TEAMS * rows * (head_dim + 4) * 4
        + TEAMS * rows * 8
        + rows * (head_dim + 2) * 4
        + stage.rotated_row
        + TEAMS * config.stages * 16
        + 64
        + (2 + TEAMS) * 64
}

fn team_bytes(config: &KernelConfig, stage: &Stage, head_dim: usize) -> usize {
    let bytes = config.stages * (stage.bytes + 16)
        + exchange_bytes(config)
        + partial_bytes(config, head_dim)
        + 16;
    bytes.next_multiple_of(stage.align)
}

/// Bytes that the warps of a team exchange about a tile: maxima of its rows, and weights.
fn exchange_bytes(config: &KernelConfig) -> usize {
    config.rows() * 16 + config.row_groups * 4 * 32 * 16
}

/// Bytes of a team's own state, and of the partials that it receives from its cluster.
fn partial_bytes(config: &KernelConfig, head_dim: usize) -> usize {
    let received = match config.kernel {
        Kernel::LowLatencyGlobal => 0,
        _ => received_bytes(config.rows(), head_dim),
    };
    config.rows() * (head_dim + 4) * 4 + received
}

/// Room for the partials that a team of a cluster merges, of so many rows of values.
fn received_bytes(rows: usize, v_dim: usize) -> usize {
    TEAM_PARTIALS * rows * (v_dim / 32) * (32 * 4 + 8)
}

/// Partials of a work item that so many teams of a cluster have room for. Its merge is jobs, which teams take in turn: rows, where these are rotated or the runs of 32
/// dims are more than warps, else those runs (`MergeJobs` in `low_latency/partials_cluster.cuh`).
pub(crate) fn cluster_partials(rows: usize, v: Scheme, v_dim: usize, teams: usize) -> usize {
    let (runs, warps) = (rows * (v_dim / 32), teams * TILE_WARPS);
    let of = |jobs: usize, dims: usize| {
        let of_job = received_bytes(rows, v_dim) / jobs.div_ceil(teams);
        of_job / 16 * 16 / (dims * 4 + 8)
    };
    let by_rows = (v.is_rotated() || runs > warps).then(|| of(rows, v_dim));
    let by_runs = (!v.is_rotated()).then(|| of(runs.min(warps), 32));
    let most = [by_rows, by_runs].into_iter().flatten();
    most.fold(TEAM_PARTIALS * teams, usize::min)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use attn_core::HEAD_DIMS;

    use super::*;
    use crate::cuda::{Arch, Instance, instance::covered, nvrtc::Nvrtc, select::Shape};

    const FORMATS: [&str; 22] = [
        "int8",
        "int8-latents",
        "bf16-latents",
        "fp8-latents",
        "int8-plain",
        "int8-g32",
        "int8-tensor",
        "int4",
        "int4-w0",
        "int4-r2-w4",
        "int4-g1",
        "int4-g4",
        "int8/int4",
        "int8-plain/int4-g2",
        "fp8",
        "bf16",
        "f16",
        "bf16/int8",
        "int4/bf16",
        "int8-g32/fp8",
        "fp8/int8-g32",
        "f16/int4",
    ];

    const LAYOUTS: [KvLayout; 6] = [
        KvLayout::Rows,
        KvLayout::PagedRows(16),
        KvLayout::Pages(16),
        KvLayout::Pages(32),
        KvLayout::Pages(64),
        KvLayout::Pages(128),
    ];

    /// Those that kernels are written for alike, and some that differ.
    fn head_dims() -> impl Iterator<Item = HeadDim> {
        let unlike = [(192, 128), (128, 256), (576, 512), (80, 64)];
        HEAD_DIMS
            .map(HeadDim::same)
            .into_iter()
            .chain(unlike.map(HeadDim::from))
    }

    /// Every configuration that is chosen for some problem, by the options that its size depends on.
    fn configurations() -> BTreeMap<Vec<String>, (Instance, usize)> {
        let mut all = BTreeMap::new();
        for format in FORMATS.map(|name| name.parse::<KvFormat>().expect("a format's name")) {
            for head_dim in head_dims() {
                for layout in LAYOUTS {
                    if format.check(head_dim).is_err() || covered(format, layout).is_err() {
                        continue;
                    }
                    for rows in [8, 16, 24, 32, 48, 96] {
                        let shape = Shape {
                            rows,
                            format,
                            head_dim,
                            layout,
                            score_mods: false,
                        };
                        for limit in [163 * 1024, 227 * 1024] {
                            for config in shape.all(limit) {
                                let instance = Instance::Decode {
                                    format,
                                    head_dim,
                                    layout,
                                    config,
                                    score_mods: false,
                                    spans: false,
                                    centres: false,
                                };
                                let size = shared_bytes(&config, format, head_dim, layout, limit);
                                let mut options = instance.options(Arch::Compute80);
                                if limit >= BULK_SHARED {
                                    options[0] = "--gpu-architecture=compute_90a".to_owned();
                                }
                                all.insert(options, (instance, size));
                            }
                        }
                    }
                }
            }
        }
        all
    }

    /// The size that the kernel's header exports, from its PTX.
    fn exported(nvrtc: &Nvrtc, instance: &Instance, options: &[String]) -> Option<usize> {
        let (folder, _) = instance.source().rsplit_once('/')?;
        let text = format!("#include \"{folder}/shared_memory.cuh\"\n");
        let mut sources = crate::CUDA.to_vec();
        sources.push(("size.cu", &text));
        let ptx = nvrtc.compile(&sources, "size.cu", options).unwrap();
        let ptx = String::from_utf8_lossy(&ptx);
        let (_, value) = ptx.split_once("attn_shared_bytes = ")?;
        value.split(';').next()?.parse().ok()
    }

    #[test]
    fn sizes_are_those_of_the_kernels() {
        let Ok(nvrtc) = Nvrtc::load() else {
            eprintln!("skipped: no NVRTC");
            return;
        };
        let mut compared = 0;
        for (options, (instance, size)) in configurations() {
            let exported = exported(&nvrtc, &instance, &options);
            assert_eq!(exported, Some(size), "{instance:?}");
            compared += 1;
        }
        println!("{compared} sizes are equal");
        assert!(compared > 500);
    }
}
