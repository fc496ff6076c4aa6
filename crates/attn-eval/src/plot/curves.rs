//! The curves of a plot, from measured rows: which rows have a place, and what their points are.

use attn::{Arithmetic, HeadDim, KvFormat};
use attn_bench::{CacheLayout, Operation, presets::ROWS_CTX};
use attn_cli::measured::Row;

/// The points of one line: a format has a colour and a mark; a device, attention without a mask, and fast arithmetic, a stroke.
pub(super) struct Curve {
    /// Its name in the legend; an empty one has no line there.
    pub label: String,
    pub format: KvFormat,
    pub stroke: usize,
    pub points: Vec<(f64, f64)>,
}

/// Strokes of attention without a mask come after those of two devices, and those of fast arithmetic each after that of exact.
const UNMASKED: usize = 2;
const FAST: usize = 1;

/// Whether the row is a plain decode step of sequences of one length, by a plan for that length.
pub(super) fn plain(row: &Row) -> bool {
    let workload = &row.workload;
    let lens = &workload.problem.kv_lens;
    workload.operation == Operation::Decode
        && workload.cache == CacheLayout::Pages
        && workload.problem.head_dim == HeadDim::same(128)
        && workload.planned == 0
        && lens.windows(2).all(|pair| pair[0] == pair[1])
}

fn is_fast(row: &Row) -> bool {
    row.workload.problem.scores.arithmetic == Arithmetic::Fast
}

/// Gathers points into curves: `of` names a row's curve and its point.
fn curves(
    devices: &[String],
    rows: &[Row],
    of: impl Fn(&Row) -> Option<(String, (f64, f64))>,
) -> Vec<Curve> {
    let mut all: Vec<Curve> = Vec::new();
    for row in rows.iter().filter(|row| plain(row)) {
        let Some((mut label, point)) = of(row) else {
            continue;
        };
        // Axes have no place for a figure that is zero, infinite or NaN.
        if ![point.0, point.1].iter().all(|x| x.is_normal() && *x > 0.0) {
            continue;
        }
        if devices.len() > 1 {
            // What distinguishes a device from the others of a run is its last word.
            let last = devices[row.device].rsplit(", ").next().unwrap_or_default();
            label = format!("{label}, {last}");
        }
        match all.iter_mut().find(|curve| curve.label == label) {
            Some(curve) => curve.points.push(point),
            None => all.push(Curve {
                label,
                format: row.workload.format,
                stroke: row.device
                    + UNMASKED * usize::from(!row.workload.problem.scores.causal)
                    + FAST * usize::from(is_fast(row)),
                points: vec![point],
            }),
        }
    }
    for curve in &mut all {
        curve.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    all
}

/// Microseconds of one sequence's query token over its tokens; a single point is no curve.
pub(super) fn latency(devices: &[String], rows: &[Row]) -> Vec<Curve> {
    let mut all = curves(devices, rows, |row| {
        let problem = &row.workload.problem;
        let is_one = problem.batch() == 1 && problem.max_q_len() == 1;
        let figures = row.outcome.as_ref().ok().filter(|_| is_one)?;
        let heads = format!("{}/{}", problem.num_q_heads, problem.num_kv_heads);
        let point = (problem.kv_lens[0] as f64, figures.us);
        Some((format!("{heads} {}", row.workload.format), point))
    });
    all.retain(|curve| curve.points.len() > 1);
    all
}

/// Microseconds over the query rows of a KV head, at one length and over the same bytes of a format; a single point is no curve.
pub(super) fn query_rows(devices: &[String], rows: &[Row]) -> Vec<Curve> {
    let mut all = curves(devices, rows, |row| {
        let problem = &row.workload.problem;
        let figures = row.outcome.as_ref().ok()?;
        let has_place = row.workload.family.starts_with("rows") && problem.kv_lens[0] == ROWS_CTX;
        let rows = problem.heads_per_kv() * problem.max_q_len();
        has_place.then(|| (row.workload.format.to_string(), (rows as f64, figures.us)))
    });
    all.retain(|curve| curve.points.len() > 1);
    all
}

/// TFLOP/s over the tokens of whole prompts; a single point is no curve.
pub(super) fn prompts(devices: &[String], rows: &[Row]) -> Vec<Curve> {
    let mut all = curves(devices, rows, |row| {
        let problem = &row.workload.problem;
        let figures = row.outcome.as_ref().ok()?;
        let is_whole = row.workload.family == "prefill" && problem.q_lens == problem.kv_lens;
        let fast = if is_fast(row) { ", fast" } else { "" };
        let mask = if problem.scores.causal {
            ""
        } else {
            ", no mask"
        };
        let point = (problem.kv_lens[0] as f64, row.tflop_per_s(figures.us));
        is_whole.then(|| (format!("{}{fast}{mask}", row.workload.format), point))
    });
    all.retain(|curve| curve.points.len() > 1);
    all
}

/// Percent of the read over MiB; the legend names formats once.
pub(super) fn share(devices: &[String], rows: &[Row]) -> Vec<Curve> {
    let mut all = curves(devices, rows, |row| {
        let workload = &row.workload;
        let figures = row.outcome.as_ref().ok()?;
        let known = ["single", "context", "gqa8"].contains(&workload.family);
        let name = format!("{} {}", workload.family, workload.problem.heads_per_kv());
        let mib = workload.bytes() as f64 / f64::from(1 << 20);
        known.then(|| {
            (
                format!("{name} {}", workload.format),
                (mib, figures.share() * 100.0),
            )
        })
    });
    let mut named = Vec::new();
    for curve in &mut all {
        let first = !named.contains(&curve.format);
        named.push(curve.format);
        curve.label = if first {
            curve.format.to_string()
        } else {
            String::new()
        };
    }
    all
}
