use attn::{KvFormat, Scheme};
use attn_bench::{Measured, Timing};
use clap::Parser;
use serde_json::Value;

use super::*;
use crate::faulty::{self, program};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    bench: BenchArgs,
}

fn args(words: &[&str]) -> BenchArgs {
    Line::parse_from([&["bench"], words].concat()).bench
}

/// A timer with figures by format, or with an error.
struct Fake {
    measure: fn(&Workload) -> Result<Measured, Error>,
    most_bytes: usize,
    by_median: bool,
    peak: Option<f64>,
}

fn fake(measure: fn(&Workload) -> Result<Measured, Error>) -> Fake {
    Fake {
        measure,
        most_bytes: 100_000_000,
        by_median: true,
        peak: None,
    }
}

impl Timer for Fake {
    fn device(&self) -> String {
        "a fake".to_owned()
    }

    fn runs(&self) -> usize {
        7
    }

    fn most_bytes(&self) -> usize {
        self.most_bytes
    }

    fn by_median(&self) -> bool {
        self.by_median
    }

    fn peak(&self) -> Option<f64> {
        self.peak
    }

    fn measure(&mut self, workload: &Workload, _: usize) -> Result<Measured, Error> {
        (self.measure)(workload)
    }
}

/// Steps of 100 (median 200) µs and reads of 40 (50) µs; half as fast in bf16.
fn known(workload: &Workload) -> Result<Measured, Error> {
    let slow = workload.format == KvFormat::same(Scheme::Bf16);
    let by = if slow { 2.0 } else { 1.0 };
    let timing = |min, median| Timing {
        min: min * by,
        median: median * by,
    };
    Ok(Measured {
        step: timing(100.0, 200.0),
        ceiling: timing(40.0, 50.0),
    })
}

fn measured(
    measure: fn(&Workload) -> Result<Measured, Error>,
    words: &[&str],
    json: bool,
) -> (String, bool) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut console = Console::new(&mut out, &mut err);
    console.json = json;
    let args = args(words);
    let workloads = chosen(&args.names).unwrap();
    let mut timers = vec![Box::new(fake(measure)) as Box<dyn Timer>];
    let healthy = measure_all(&mut timers, &workloads, &args, &mut console).unwrap();
    (String::from_utf8(out).unwrap(), healthy)
}

const NAMES: [&str; 2] = ["single/32-8-ctx1024/bf16", "single/32-8-ctx1024/int8"];

#[test]
fn lines_have_the_rates_of_the_medians_and_the_share_of_the_read() {
    let (table, healthy) = measured(known, &NAMES, false);
    assert!(healthy);
    assert!(table.starts_with("a fake; at most 7 repetitions, caches cold, rates of the medians"));
    // 8 KV heads × 1024 tokens × (K and V) × (128 codes and a scale of 2 bytes) = 2.13 MB; in 200 µs.
    let int8 = "| single/32-8-ctx1024/int8 | 2.1 | 100.0 | 200.0 | 10.6 | 40.0 | 50.0 | 25 % | 400.0 | 0.1 |";
    let bf16 =
        "| single/32-8-ctx1024/bf16 | 4.2 | 200.0 | 400.0 | 10.5 | 80.0 | 100.0 | 25 % | – | 0.0 |";
    assert!(table.contains(int8) && table.contains(bf16), "{table}");
}

#[test]
fn rates_stand_beside_the_peak_that_a_timer_measures() {
    let print = |json: bool| {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut console = Console::new(&mut out, &mut err);
        console.json = json;
        let timer = Fake {
            peak: Some(0.4e12),
            ..fake(known)
        };
        let mut timers = vec![Box::new(timer) as Box<dyn Timer>];
        measure_all(&mut timers, &[workload(NAMES[1])], &args(&[]), &mut console).unwrap();
        String::from_utf8(out).unwrap()
    };
    // 0.0839 TFLOP/s, as below.
    let table = print(false);
    assert!(table.contains("| 0.084 of 0.400, 21 % |"), "{table}");
    let rows: Value = serde_json::from_str(&print(true)).unwrap();
    assert_eq!(rows[0]["peak_tflop_per_s"], 0.4);
}

#[test]
fn json_has_the_same_figures() {
    let (text, _) = measured(known, &NAMES, true);
    let rows: Value = serde_json::from_str(&text).unwrap();
    let row = &rows[1];
    assert_eq!(row["shape"], NAMES[1]);
    for (key, want) in [
        ("bytes", 2_129_920.0),
        ("us", 200.0),
        ("us_min", 100.0),
        ("us_median", 200.0),
        ("gb_per_s", 10.6496),
        ("read_us", 50.0),
        ("read_us_min", 40.0),
        ("read_us_median", 50.0),
        ("share", 0.25),
        ("bf16_us", 400.0),
        // 32 heads × 1024 tokens × 128 dims × 4 in 200 µs.
        ("tflop_per_s", 0.083_886_08),
    ] {
        assert_eq!(row[key], want, "{key}");
    }
    // Without bf16 beside it there is nothing to compare with.
    let (text, _) = measured(known, &NAMES[1..], true);
    let rows: Value = serde_json::from_str(&text).unwrap();
    assert!(rows[0]["bf16_us"].is_null(), "{rows}");
}

#[test]
fn figures_are_of_the_fastest_where_the_clock_is_not_quiet() {
    let workload = &chosen(&[NAMES[1].to_owned()]).unwrap()[0];
    let figures = Figures::new(known(workload).unwrap(), false);
    assert_eq!((figures.us, figures.read_us), (100.0, 40.0));
    assert_eq!(figures.share(), 0.4);
}

#[test]
fn figures_that_are_no_numbers_are_json_strings() {
    let none = |_: &Workload| {
        let timing = |us| Timing {
            min: us,
            median: us,
        };
        Ok(Measured {
            step: timing(0.0),
            ceiling: timing(0.0),
        })
    };
    let (text, _) = measured(none, &NAMES[1..], true);
    let rows: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&rows[0]["share"], &rows[0]["gb_per_s"]),
        (&json!("NaN"), &json!("inf"))
    );
}

#[test]
fn shapes_without_figures_say_why_and_only_a_failed_device_is_a_failure() {
    let large = ["gqa8/batch512/int8"];
    let (table, healthy) = measured(known, &large, false);
    assert!(healthy && table.contains("GB; add --large |"), "{table}");
    let (table, _) = measured(known, &["gqa8/batch512/int8", "--large"], false);
    assert!(table.contains("| 25 % |"), "{table}");

    let refused = |_: &Workload| Err(Error::parameter("it", format_args!("this"), "that"));
    let (table, healthy) = measured(refused, &NAMES, false);
    assert!(
        healthy && table.contains("| it is this; allowed: that |"),
        "{table}"
    );

    let lost = |_: &Workload| {
        Err(Error::Device {
            backend: "fake",
            doing: "a launch",
            source: "it is gone".into(),
        })
    };
    let (table, healthy) = measured(lost, &NAMES, false);
    assert!(
        !healthy && table.contains("| fake: a launch failed: it is gone |"),
        "{table}"
    );
}

#[test]
fn names_choose_one_shape_or_all_that_contain_them() {
    let names = |names: &[&str]| -> Vec<String> {
        let names: Vec<_> = names.iter().map(|&n| n.to_owned()).collect();
        let workloads = chosen(&names).unwrap();
        workloads.iter().map(Workload::to_string).collect()
    };
    // A whole name is that workload alone, though int8 begins int8-g32.
    assert_eq!(
        names(&["single/32-8-ctx8192/int8"]),
        ["single/32-8-ctx8192/int8"]
    );
    assert_eq!(names(&["single/32-8-ctx8192/int8-"]).len(), 3);
    assert_eq!(names(&["context/", "context/"]).len(), 6);
    assert!(chosen(&["no-such".to_owned()]).is_err());
}

fn workload(name: &str) -> Workload {
    chosen(&[name.to_owned()]).unwrap().remove(0)
}

#[test]
fn a_table_names_the_figure_that_its_rates_are_of() {
    for (by_median, figure) in [(true, "medians"), (false, "fastest")] {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let timer = Fake {
            by_median,
            ..fake(known)
        };
        let mut timers = vec![Box::new(timer) as Box<dyn Timer>];
        let mut console = Console::new(&mut out, &mut err);
        measure_all(&mut timers, &[workload(NAMES[1])], &args(&[]), &mut console).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains(&format!("rates of the {figure}\n")), "{text}");
    }
}

#[test]
fn what_needs_more_memory_than_allowed_is_named_with_its_size() {
    let large = workload("gqa8/batch512/int8");
    let (table, _) = measured(known, &["gqa8/batch512/int8"], false);
    let [megabytes, gigabytes] = [large.bytes() as f64 / 1e6, large.cache_bytes() as f64 / 1e9];
    let line =
        format!("| {large} | {megabytes:.1} | not measured: {gigabytes:.1} GB; add --large |");
    assert!(table.contains(&line), "{table}");
    // As much as allowed is measured.
    let mut timer = fake(known);
    for (spare, is_measured) in [(0, true), (1, false)] {
        timer.most_bytes = large.cache_bytes() - spare;
        assert_eq!(measure(&mut timer, &large, 1, false).0.is_ok(), is_measured);
    }
}

#[test]
fn bf16_beside_a_row_is_of_the_same_shape() {
    let other = [NAMES[0], "single/32-8-ctx8192/int8"];
    let (text, _) = measured(known, &other, true);
    let rows: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 2);
    assert!(
        rows.as_array()
            .unwrap()
            .iter()
            .all(|row| row["bf16_us"].is_null()),
        "{rows}"
    );
}

#[test]
fn each_backend_has_default_workloads() {
    assert_eq!(default_names(BackendId::Cuda), [""]);
    assert_eq!(default_names(BackendId::Cpu), ["single/"]);
    assert_eq!(default_names(BackendId::Wgpu).len(), 3);
}

#[test]
fn threads_are_the_cpus_alone() {
    let error = timers(&args(&["--threads", "2"]), BackendId::Cuda)
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("--threads is the CPU's"),
        "{error}"
    );
    let opened = timers(&args(&["--threads", "1,2"]), BackendId::Cpu).unwrap();
    assert_eq!(opened.len(), 2);
}

#[test]
fn sequences_of_ones_own_shape_are_bounded() {
    let of = |batch: &str| {
        let shape = [
            "--heads", "2/1", "--dim", "64", "--ctx", "1", "--kv", "int8", "--batch",
        ];
        args(&[&shape[..], &[batch]].concat()).custom.workloads()
    };
    assert_eq!(of("65536").unwrap().len(), 1);
    let error = of("65537").err().unwrap().to_string();
    assert!(
        error.contains("--batch is 65537; allowed: up to 65536"),
        "{error}"
    );
}

/// The CPU as the best backend, after one that is absent.
fn backends() -> Backends {
    Backends {
        open: |_| Ok(faulty::open(|_, _| ())),
        select: |_| Ok(faulty::select_after_another()),
    }
}

#[test]
fn the_list_has_names_and_bytes() {
    let (code, text, _) = program(&["bench", "--list", NAMES[1]], &backends());
    assert_eq!(
        (code, text),
        (0, format!("{:44} {:9.1} MB\n", NAMES[1], 2.1))
    );
    let (_, text, _) = program(&["bench", "--list", "--json", NAMES[1]], &backends());
    let rows: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(rows, json!([{ "shape": NAMES[1], "bytes": 2_129_920 }]));
}

#[test]
fn the_best_backend_is_timed_after_a_remark_on_absent_ones() {
    let shape = [
        "bench", "--heads", "2/1", "--dim", "64", "--ctx", "16", "--kv", "int8", "--runs", "1",
    ];
    let (code, text, err) = program(&shape, &backends());
    assert!(
        code == 0 && text.contains("| custom/2-1-d64-q1-ctx16"),
        "{text}"
    );
    assert!(err.contains("not used: cuda: none"), "{err}");
    let (code, text, err) = program(&[&shape[..], &["--json"]].concat(), &backends());
    let rows: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (code, rows.as_array().unwrap().len(), err.as_str()),
        (0, 1, "")
    );
}
