//! `attn run`: the formats side by side on real data.

mod totals;

use std::{path::PathBuf, time::Instant};

use anyhow::Result;
use attn::{BackendId, DecodeAttention, DecodeStep, Heads, KvFormat, KvSource, Problem, Selection};
use attn_bench::{Timer, Workload};
use serde_json::{Value, json};

use self::totals::{HEADER, Totals};
use crate::{
    bench::gpu_timer,
    console::Console,
    data::{Layer, Layers, Layout, load},
    figures::{greater, lse_difference},
    program::Backends,
    progress::bar,
};

/// What `attn run` reads and compares.
#[derive(clap::Args)]
pub struct RunArgs {
    /// A safetensors file with NAME.{k,v,q} per layer, and NAME.{out,lse} where the exact results are known; the bundled SmolLM2-135M tensors by default.
    file: Option<PathBuf>,
    /// The order of K and V in a file whose metadata `layout` names none; tokens-first by default.
    #[arg(long)]
    layout: Option<Layout>,
    /// Formats, `k/v` or one name: f16, bf16, fp8, int8, int4 (also int4-r2, -r4, -r8, each also -w0, -w4), int8-plain, int8-g32, int8-tensor, int4-g1 … int4-g8, int8/int4, …
    #[arg(long, value_delimiter = ',', default_value = DEFAULT_FORMATS)]
    kv: Vec<KvFormat>,
    /// cuda, wgpu or cpu; the best present by default.
    #[arg(long)]
    backend: Option<BackendId>,
    /// Whether all backends have been named already, with what is in the way of each.
    #[arg(skip)]
    are_named: bool,
}

const DEFAULT_FORMATS: &str = "bf16,fp8,int8,int8/int4,int4";

impl RunArgs {
    /// The bundled data in the usual formats, after the backends have been named.
    pub(crate) fn first() -> Self {
        let format = |name: &str| name.parse().expect("the default formats exist");
        RunArgs {
            file: None,
            layout: None,
            kv: DEFAULT_FORMATS.split(',').map(format).collect(),
            backend: None,
            are_named: true,
        }
    }
}

/// Timed steps per layer; the median is printed.
const STEPS: usize = 5;

/// The clock of a GPU's own timer: a step of the host interface would show the copies to the device and back.
struct DeviceClock {
    timer: Box<dyn Timer>,
    /// Shapes that have been timed: layers of a model are alike.
    known: Vec<(Workload, f64)>,
}

impl DeviceClock {
    /// None for the CPU, and for a GPU that is a program on the CPU.
    fn open(id: BackendId, backend: &dyn DecodeAttention) -> Result<Option<Self>> {
        if id == BackendId::Cpu || backend.is_software() {
            return Ok(None);
        }
        let timer = gpu_timer(id)?;
        Ok(Some(DeviceClock {
            timer,
            known: Vec::new(),
        }))
    }

    /// Seconds of a decode step, the median of the timer's runs.
    fn seconds(&mut self, problem: &Problem, format: KvFormat) -> Result<f64> {
        let workload = Workload::custom(problem.clone(), format, PAGE_SIZE)?;
        let name = workload.to_string();
        if let Some((_, seconds)) = self.known.iter().find(|(w, _)| w.to_string() == name) {
            return Ok(*seconds);
        }
        let runs = self.timer.runs();
        let seconds = self.timer.measure(&workload, runs)?.step.median * 1e-6;
        self.known.push((workload, seconds));
        Ok(seconds)
    }
}

/// Tokens per page of the caches here, which is the default of a cache.
const PAGE_SIZE: usize = 64;

/// Decodes every layer in every format and prints one line per format; whether every error is a number.
pub fn run(args: &RunArgs, console: &mut Console<'_>, backends: &Backends) -> Result<bool> {
    let Layers {
        layers,
        scale,
        layout,
    } = load(args.file.as_deref(), args.layout)?;
    let Selection {
        backend,
        id,
        refused,
        ..
    } = (backends.select)(args.backend)?;
    let mut clock = DeviceClock::open(id, &*backend)?;
    let mut rows = Vec::new();
    let bar = bar(args.kv.len() * layers.len());
    for &format in &args.kv {
        let (mut totals, mut per_layer) = (Totals::default(), Vec::new());
        for layer in &layers {
            bar.set_message(format!("{format}, {}", layer.kv.name));
            let mut own = Totals::default();
            let (problem, rows) = decode(&*backend, layer, format, scale, &mut own)?;
            if let Some(clock) = &mut clock {
                own.seconds = clock.seconds(&problem, format)?;
            }
            per_layer.push(own.layer_value(layer.kv.name.raw()));
            totals.add(&own);
            for what in not_finite(layer, &rows) {
                bar.suspend(|| {
                    console.remark(format_args!("{format}, layer {}: {what}", layer.kv.name));
                });
            }
            bar.inc(1);
        }
        rows.push((format, totals.figures(), per_layer));
    }
    bar.finish_and_clear();
    let device = backend.device();
    if !console.json && !args.are_named {
        for (_, reason) in &refused {
            console.remark(format_args!("not used: {reason}"));
        }
    }
    console.table(format_args!("{id}: {} ({})", device.name, device.detail))?;
    console.table(inputs(&layers, layout))?;
    console.table(HEADER)?;
    for (format, figures, _) in &rows {
        console.table(figures.line(*format))?;
    }
    let reasons: Vec<_> = refused.iter().map(|(_, r)| r.to_string()).collect();
    let formats: Vec<_> = rows
        .iter()
        .map(|(format, figures, layers)| figures.value(*format, layers))
        .collect();
    console.value(&json!({
        "backend": id.to_string(), "device": device.name, "detail": device.detail, "refused": reasons,
        "softmax_scale": scale, "layout": layout.to_string(), "layers": shapes(&layers), "formats": formats,
    }))?;
    Ok(rows.iter().all(|(_, figures, _)| figures.are_finite()))
}

/// The shape of each layer, for JSON.
fn shapes(layers: &[Layer]) -> Vec<Value> {
    let shape = |l: &Layer| {
        json!({
            "layer": l.kv.name.raw(), "q_heads": l.q_heads, "kv_heads": l.kv.kv_heads, "head_dim": l.kv.head_dim,
            "q_len": l.q_len, "tokens": l.kv.seq,
        })
    };
    layers.iter().map(shape).collect()
}

/// What is decoded, in a line.
fn inputs(layers: &[Layer], layout: Layout) -> String {
    let first = &layers[0];
    let names: Vec<_> = layers.iter().map(|l| l.kv.name.to_string()).collect();
    format!(
        "{} query heads, {} KV heads, head_dim {}, q_len {}, {} tokens; {}; K and V read as {layout}\n",
        first.q_heads,
        first.kv.kv_heads,
        first.kv.head_dim,
        first.q_len,
        first.kv.seq,
        names.join(" ")
    )
}

/// Outputs and log-sum-exps of a layer.
struct Rows {
    out: Vec<f32>,
    lse: Vec<f32>,
}

/// A sentence for each tensor, decoded or of the file, with a value that no attention has.
fn not_finite(layer: &Layer, rows: &Rows) -> Vec<String> {
    // −∞ is the log-sum-exp of a query that sees no token.
    let tensors = [
        ("out", &rows.out, false),
        ("lse", &rows.lse, true),
        ("the file's out", &layer.out, false),
        ("the file's lse", &layer.lse, true),
    ];
    let first = |(what, x, is_lse): (&str, &Vec<f32>, bool)| {
        let legal = |x: f32| x.is_finite() || is_lse && x == f32::NEG_INFINITY;
        let i = x.iter().position(|x| !legal(*x))?;
        Some(format!("{what}[{i}] is {}", x[i]))
    };
    tensors.into_iter().filter_map(first).collect()
}

/// Decodes a layer in a format and adds what it came to.
fn decode(
    backend: &dyn DecodeAttention,
    layer: &Layer,
    format: KvFormat,
    scale: f32,
    totals: &mut Totals,
) -> Result<(Problem, Rows)> {
    let kv = &layer.kv;
    let mut cache = backend.create_cache(&kv.cache(format).build())?;
    cache.append(0, &kv.k, &kv.v)?;
    let mut problem = Problem::new(
        Heads::new(layer.q_heads, kv.kv_heads, kv.head_dim),
        vec![kv.seq],
    );
    problem.q_lens = vec![layer.q_len; problem.batch()];
    problem.scores.softmax_scale = Some(scale);
    let plan = backend.plan(&problem, format)?;
    let (mut out, mut lse) = (
        vec![f32::NAN; layer.out.len()],
        vec![f32::NAN; layer.lse.len()],
    );
    let mut times = Vec::new();
    for _ in 0..STEPS {
        let start = Instant::now();
        let kv = KvSource::Cache(&cache);
        let mut step = DecodeStep::new(&plan, &layer.q, kv, &mut out)?.with_lse(&mut lse)?;
        backend.decode(&mut step)?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let per_token = cache.layout().bytes_per_token();
    totals.layers += 1;
    totals.bytes_per_token = per_token;
    // K and V of 16 bits each.
    totals.compression = kv.head_dim as f64 * 4.0 / per_token;
    totals.seconds += times[STEPS / 2];
    let residuals = Workload::custom(problem.clone(), format, PAGE_SIZE)?.residual_bytes();
    totals.bytes += per_token * (kv.kv_heads * kv.seq) as f64 + residuals as f64;
    totals.difference.add(&out, &layer.out);
    totals.lse_error = greater(totals.lse_error, lse_difference(&lse, &layer.lse));
    Ok((problem, Rows { out, lse }))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use attn::{Error, Unsupported};
    use attn_bench::{Measured, Timing};

    use super::*;
    use crate::faulty::{self, program};

    const ARGS: [&str; 5] = ["run", "--backend", "cpu", "--kv", "int8"];

    fn json(args: &[&str], backends: &Backends) -> (u8, Value, String) {
        let (code, out, err) = program(&[args, &["--json"]].concat(), backends);
        (code, serde_json::from_str(&out).expect("JSON"), err)
    }

    #[test]
    fn nan_of_a_backend_is_printed_and_is_a_failure() {
        let backends = Backends {
            open: |_| Ok(faulty::open(|_, _| ())),
            select: |_| Ok(faulty::select(|_, lse| lse[3] = f32::NAN)),
        };
        let (code, table, err) = program(&ARGS, &backends);
        assert_eq!(code, 1, "{table}");
        assert!(table.contains("| 1.127 % | NaN |"), "{table}");
        assert!(err.contains("int8, layer layer00: lse[3] is NaN"), "{err}");
        let (code, value, _) = json(&ARGS, &backends);
        assert_eq!(
            (code, &value["formats"][0]["lse_error"]),
            (1, &json!("NaN"))
        );

        let backends = Backends {
            select: |_| Ok(faulty::select(|out, _| out[7] = f32::NAN)),
            ..backends
        };
        let (code, table, err) = program(&ARGS, &backends);
        assert_eq!(code, 1, "{table}");
        assert!(table.contains("| NaN % |"), "{table}");
        assert!(err.contains("out[7] is NaN"), "{err}");
        let (code, value, _) = json(&ARGS, &backends);
        assert_eq!(
            (code, &value["formats"][0]["output_error"]),
            (1, &json!("NaN"))
        );
    }

    #[test]
    fn infinite_outputs_are_a_failure() {
        let backends = Backends {
            open: |_| Ok(faulty::open(|_, _| ())),
            select: |_| Ok(faulty::select(|_, lse| lse[0] = f32::NEG_INFINITY)),
        };
        let (code, value, _) = json(&ARGS, &backends);
        assert_eq!(
            (code, &value["formats"][0]["lse_error"]),
            (1, &json!("inf"))
        );
    }

    #[test]
    fn errors_are_those_of_the_answers() {
        let backends = Backends {
            open: |_| Ok(faulty::open(|_, _| ())),
            select: |_| Ok(faulty::select(|_, _| ())),
        };
        let (code, value, err) = json(&ARGS, &backends);
        assert_eq!((code, err.as_str()), (0, ""));
        let lse_error = value["formats"][0]["lse_error"].as_f64().unwrap();
        assert!((0.07..0.08).contains(&lse_error), "{lse_error}");

        let backends = Backends {
            select: |_| {
                Ok(faulty::select(|out, lse| {
                    out.iter_mut().for_each(|x| *x *= 3.0);
                    lse.iter_mut().for_each(|x| *x += 8.0);
                }))
            },
            ..backends
        };
        let (code, value, _) = json(&ARGS, &backends);
        assert_eq!(code, 0);
        let row = &value["formats"][0];
        let lse_error = row["lse_error"].as_f64().unwrap();
        assert!((8.0..8.09).contains(&lse_error), "{lse_error}");
        let output_error = row["output_error"].as_f64().unwrap();
        assert!((1.95..2.05).contains(&output_error), "{output_error}");
    }

    #[test]
    fn the_table_names_the_device_the_inputs_and_what_was_not_used() {
        let backends = Backends {
            open: |_| Ok(faulty::open(|_, _| ())),
            select: |_| Ok(faulty::select_after_another()),
        };
        let (code, table, err) = program(&["run", "--kv", "int8"], &backends);
        let mut lines = table.lines();
        assert!(
            code == 0 && lines.next().is_some_and(|line| line.starts_with("cpu: ")),
            "{table}"
        );
        let inputs = "9 query heads, 3 KV heads, head_dim 64, q_len 8, 2048 tokens; layer00 ";
        assert!(
            lines.next().is_some_and(|line| line.starts_with(inputs)),
            "{table}"
        );
        assert!(table.contains(HEADER), "{table}");
        assert!(err.contains("not used: cuda: none"), "{err}");
        let (code, value, err) = json(&["run", "--kv", "int8"], &backends);
        assert_eq!((code, err.as_str()), (0, ""));
        assert!(
            value["refused"][0]
                .as_str()
                .unwrap()
                .starts_with("cuda: none"),
            "{value}"
        );
    }

    #[test]
    fn one_format_with_nan_among_others_is_a_failure() {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let backends = Backends {
            open: |_| Ok(faulty::open(|_, _| ())),
            select: |_| {
                Ok(faulty::select(|_, lse| {
                    // The steps of the first format are those of six layers.
                    if CALLS.fetch_add(1, Ordering::Relaxed) >= 6 * STEPS {
                        lse[0] = f32::NAN;
                    }
                }))
            },
        };
        let (code, value, _) = json(&["run", "--kv", "int8,f16"], &backends);
        let errors = [0, 1].map(|i| &value["formats"][i]["lse_error"]);
        assert!(errors[0].is_number() && errors[1] == "NaN", "{value}");
        assert_eq!(code, 1);
    }

    #[test]
    fn a_layer_comes_to_its_own_bytes_and_one_step() {
        let Layers { layers, scale, .. } = load(None, None).unwrap();
        let format: KvFormat = "int8".parse().unwrap();
        let mut totals = Totals::default();
        let backend = faulty::open(|_, _| ());
        decode(&*backend, &layers[0], format, scale, &mut totals).unwrap();
        assert_eq!((totals.layers, totals.bytes_per_token), (1, 132.0));
        assert_eq!(totals.compression, 64.0 * 4.0 / 132.0);
        assert_eq!(totals.bytes, 132.0 * (3 * 2048) as f64);
        assert!(totals.seconds > 0.0);
    }

    /// A device clock that takes a microsecond per cached token, and counts its calls.
    struct Clock;

    static MEASURED: AtomicUsize = AtomicUsize::new(0);

    impl Timer for Clock {
        fn device(&self) -> String {
            "a clock".to_owned()
        }

        fn runs(&self) -> usize {
            3
        }

        fn measure(&mut self, workload: &Workload, runs: usize) -> Result<Measured, Error> {
            assert_eq!(runs, 3);
            MEASURED.fetch_add(1, Ordering::Relaxed);
            let timing = |us| Timing {
                min: us / 2.0,
                median: us,
            };
            Ok(Measured {
                step: timing(workload.problem.kv_lens[0] as f64),
                ceiling: timing(1.0),
            })
        }
    }

    #[test]
    fn a_gpus_clock_times_each_shape_once() {
        let mut clock = DeviceClock {
            timer: Box::new(Clock),
            known: Vec::new(),
        };
        let format: KvFormat = "int8".parse().unwrap();
        for (tokens, calls) in [(100, 1), (100, 1), (300, 2), (100, 2)] {
            let problem = Problem::new(Heads::new(2, 1, 64), vec![tokens]);
            let seconds = clock.seconds(&problem, format).unwrap();
            assert!((seconds - tokens as f64 * 1e-6).abs() < 1e-12, "{seconds}");
            assert_eq!(MEASURED.load(Ordering::Relaxed), calls);
        }
    }

    #[test]
    fn programs_on_the_cpu_are_timed_by_the_hosts_clock() {
        // The fake is a program on the CPU; no timer is opened for it, whatever it is selected as.
        let backend = faulty::open(|_, _| ());
        for id in BackendId::ALL {
            assert!(DeviceClock::open(id, &*backend).unwrap().is_none());
        }
        let cpu =
            attn::open(BackendId::Cpu).unwrap_or_else(|reason: Unsupported| panic!("{reason}"));
        assert!(DeviceClock::open(BackendId::Cpu, &*cpu).unwrap().is_none());
    }
}
