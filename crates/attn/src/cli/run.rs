//! `attn run`: the formats side by side on real data.

use std::{path::Path, time::Instant};

use anyhow::Result;
use attn::{
    BackendId, CacheConfig, DecodeAttention, DecodeStep, KvFormat, KvSource, Problem, Selection,
};
use serde_json::json;

use crate::data::{Layer, load, tensor_scales};

/// Timed steps per layer; the median is printed.
const STEPS: usize = 5;

#[derive(Default)]
struct Totals {
    bytes_per_token: f64,
    compression: f64,
    error: f64,
    norm: f64,
    lse_error: f64,
    seconds: f64,
    bytes: f64,
}

/// Decodes every layer in every format and prints one line per format.
pub fn run(
    file: Option<&Path>,
    formats: &[KvFormat],
    backend: Option<BackendId>,
    as_json: bool,
) -> Result<()> {
    let (layers, scale) = load(file)?;
    let Selection {
        backend,
        id,
        refused,
    } = attn::select(backend)?;
    let device = backend.device();
    let mut rows = Vec::new();
    for &format in formats {
        let mut totals = Totals::default();
        for layer in &layers {
            decode(&*backend, layer, format, scale, &mut totals)?;
        }
        rows.push((format, totals));
    }
    let error = |t: &Totals| (t.error / t.norm).sqrt();
    if as_json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(format, t)| {
                json!({
                    "kv": format.to_string(), "bytes_per_token": t.bytes_per_token, "compression": t.compression,
                    "output_error": error(t), "lse_error": t.lse_error,
                    "us_per_step": t.seconds * 1e6 / layers.len() as f64, "gb_per_s": t.bytes / t.seconds / 1e9,
                })
            })
            .collect();
        let refused: Vec<_> = refused
            .iter()
            .map(|(_, reason)| reason.to_string())
            .collect();
        println!(
            "{}",
            json!({ "backend": id.to_string(), "device": device.name, "refused": refused, "formats": rows })
        );
        return Ok(());
    }
    for (_, reason) in &refused {
        eprintln!("not used: {reason}");
    }
    println!("{id}: {} ({})", device.name, device.detail);
    let (first, names) = (
        &layers[0],
        layers
            .iter()
            .map(|l| l.kv.name.as_str())
            .collect::<Vec<_>>()
            .join(" "),
    );
    println!(
        "{} query heads, {} KV heads, head_dim {}, q_len {}, {} tokens; {names}\n",
        first.q_heads, first.kv.kv_heads, first.kv.head_dim, first.q_len, first.kv.seq
    );
    println!(
        "| K/V | bytes per token | compression | output error | LSE error | µs per step | GB/s |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (format, t) in &rows {
        println!(
            "| {format} | {:.1} | {:.2}x | {:.3} % | {:.1e} | {:.0} | {:.2} |",
            t.bytes_per_token,
            t.compression,
            error(t) * 100.0,
            t.lse_error,
            t.seconds * 1e6 / layers.len() as f64,
            t.bytes / t.seconds / 1e9
        );
    }
    Ok(())
}

fn decode(
    backend: &dyn DecodeAttention,
    layer: &Layer,
    format: KvFormat,
    scale: f32,
    totals: &mut Totals,
) -> Result<()> {
    let mut config = CacheConfig::new(
        format,
        layer.kv.kv_heads,
        layer.kv.head_dim,
        1,
        layer.kv.seq,
    );
    config.k_tensor_scales =
        tensor_scales(format.k, &layer.kv.k, layer.kv.kv_heads, layer.kv.head_dim);
    config.v_tensor_scales =
        tensor_scales(format.v, &layer.kv.v, layer.kv.kv_heads, layer.kv.head_dim);
    let mut cache = backend.create_cache(&config)?;
    cache.append(0, &layer.kv.k, &layer.kv.v)?;
    let mut problem = Problem::new(
        layer.q_heads,
        layer.kv.kv_heads,
        layer.kv.head_dim,
        vec![layer.kv.seq],
    );
    problem.q_len = layer.q_len;
    problem.softmax_scale = scale;
    let plan = backend.plan(&problem, format)?;
    let (mut out, mut lse) = (
        vec![f32::NAN; layer.out.len()],
        vec![f32::NAN; layer.lse.len()],
    );
    let mut times = Vec::new();
    for _ in 0..STEPS {
        let start = Instant::now();
        let kv = KvSource::Cache(&cache);
        backend.decode(&mut DecodeStep::new(
            &plan, &layer.q, kv, &mut out, &mut lse,
        )?)?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let per_token = cache.layout().bytes_per_token();
    totals.bytes_per_token = per_token;
    totals.compression = layer.kv.head_dim as f64 * 4.0 / per_token;
    totals.seconds += times[STEPS / 2];
    totals.bytes += per_token * (layer.kv.kv_heads * layer.kv.seq) as f64;
    for (got, want) in out.iter().zip(&layer.out) {
        totals.error += f64::from(got - want).powi(2);
        totals.norm += f64::from(*want).powi(2);
    }
    let lse_error = lse
        .iter()
        .zip(&layer.lse)
        .map(|(a, b)| f64::from((a - b).abs()))
        .fold(0.0, f64::max);
    totals.lse_error = totals.lse_error.max(lse_error);
    Ok(())
}
