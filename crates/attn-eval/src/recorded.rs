//! Figures of earlier runs: what `attn bench --json` printed, or a CSV file with the columns `shape`, `us` and `read_us`, or `kv`, `bytes_per_token` and
//! `kl_x1000`.

use std::{fs, path::Path};

use anyhow::{Context, Result, anyhow, ensure};
use attn_bench::{Measured, Timing, Workload, workloads};
use attn_cli::measured::{self, Row};
use serde_json::Value;

/// The columns that a file must have, in any order and beside any others: of times, and of divergences.
const TIMES: [&str; 3] = ["shape", "us", "read_us"];
const DIVERGENCES: [&str; 3] = ["kv", "bytes_per_token", "kl_x1000"];

/// What a file holds.
pub enum Figures {
    /// Microseconds of workloads.
    Times(Recorded),
    /// What formats do to a model.
    Divergences(Vec<Divergence>),
}

/// What a format does to a model's predictions.
pub struct Divergence {
    /// The format, or f32.
    pub name: String,
    /// Bytes of one token's K and V in all layers and heads.
    pub bytes_per_token: f64,
    /// The mean divergence from f32, times 1000.
    pub kl_x1000: f64,
}

/// Rows of figures in a file's order, and the names of the devices that they are of.
#[derive(Default)]
pub struct Recorded {
    /// What charts call the devices: in JSON their own names, for a CSV file its name.
    pub devices: Vec<String>,
    /// The figures.
    pub rows: Vec<Row>,
}

/// Reads a file.
pub fn read(path: &Path) -> Result<Figures> {
    let reading = || format!("reading {}", path.display());
    let text = fs::read_to_string(path).with_context(reading)?;
    if text.trim_start().starts_with('[') {
        return Ok(Figures::Times(from_json(&text).with_context(reading)?));
    }
    let head = text.lines().next().unwrap_or_default();
    if head.split(',').any(|name| name == DIVERGENCES[2]) {
        let all = csv(&text, DIVERGENCES, |[name, bytes, kl]| {
            Ok(Divergence {
                name: name.to_owned(),
                bytes_per_token: number(bytes, "bytes")?,
                kl_x1000: number(kl, "nats")?,
            })
        });
        return Ok(Figures::Divergences(all.with_context(reading)?));
    }
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    Ok(Figures::Times(Recorded {
        devices: vec![name.into_owned()],
        rows: from_csv(&text).with_context(reading)?,
    }))
}

fn from_csv(text: &str) -> Result<Vec<Row>> {
    let all = workloads();
    csv(text, TIMES, |[shape, us, read_us]| {
        let [us, read_us] = [us, read_us].map(|text| number(text, "microseconds"));
        row(&all, 0, shape, us?, read_us?)
    })
}

fn number(text: &str, what: &str) -> Result<f64> {
    text.parse::<f64>()
        .with_context(|| format!("{text} is no number of {what}"))
}

/// The row of a workload that took `us`, and whose plain read took `read_us`.
fn row(all: &[Workload], device: usize, shape: &str, us: f64, read_us: f64) -> Result<Row> {
    let workload = all.iter().find(|workload| workload.to_string() == shape);
    let workload = workload.ok_or_else(|| {
        anyhow!("no workload is called {shape}; `attn bench --list` prints the names")
    })?;
    let timing = |us| Timing {
        min: us,
        median: us,
    };
    let measured = Measured {
        step: timing(us),
        ceiling: timing(read_us),
    };
    Ok(Row {
        device,
        workload: workload.clone(),
        outcome: Ok(measured::Figures::new(measured, true)),
        peak: None,
    })
}

/// What `of` makes of these columns of each line.
fn csv<T>(text: &str, columns: [&str; 3], of: impl Fn([&str; 3]) -> Result<T>) -> Result<Vec<T>> {
    let mut lines = text.lines();
    let head: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    let mut places = [0; 3];
    for (place, column) in places.iter_mut().zip(columns) {
        let found = head.iter().position(|name| *name == column);
        *place = found.with_context(|| format!("its first line names no column {column}"))?;
    }
    let of_line = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        ensure!(
            cells.len() == head.len(),
            "it has {} cells; expected {}",
            cells.len(),
            head.len()
        );
        of(places.map(|place| cells[place]))
    };
    let numbered = (2..).zip(lines);
    numbered
        .map(|(number, line)| of_line(line).with_context(|| format!("line {number}")))
        .collect()
}

/// Rows without a figure, which say why there is none, are left out.
fn from_json(text: &str) -> Result<Recorded> {
    let values: Vec<Value> = serde_json::from_str(text)
        .context("it is not the array of rows that `attn bench --json` prints")?;
    let all = workloads();
    let mut recorded = Recorded::default();
    for (number, value) in (1..).zip(&values) {
        if value.get("reason").is_some() {
            continue;
        }
        let added = recorded.add(&all, value);
        added.with_context(|| format!("row {number}"))?;
    }
    Ok(recorded)
}

impl Recorded {
    /// Adds a row of JSON.
    fn add(&mut self, all: &[Workload], value: &Value) -> Result<()> {
        let text = |key: &str| {
            let text = value.get(key).and_then(Value::as_str);
            text.with_context(|| format!("it has no text {key}"))
        };
        // What is no number is a string in JSON.
        let number = |key: &str| {
            let found = value.get(key).and_then(|x| match x {
                Value::String(text) => text.parse().ok(),
                x => x.as_f64(),
            });
            found.with_context(|| format!("it has no number {key}"))
        };
        let name = text("device")?;
        let known = self.devices.iter().position(|device| device == name);
        let device = known.unwrap_or(self.devices.len());
        let (us, read_us) = (number("us")?, number("read_us")?);
        self.rows
            .push(row(all, device, text("shape")?, us, read_us)?);
        if known.is_none() {
            self.devices.push(name.to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SHAPE: &str = "single/32-8-ctx1024/int8";

    fn refusal<T>(result: Result<T>) -> String {
        let error = result.err().expect("a refusal");
        format!("{error:#}")
    }

    fn figures(row: &Row) -> (String, f64, f64) {
        let figures = row.outcome.as_ref().unwrap();
        (row.workload.to_string(), figures.us, figures.read_us)
    }

    #[test]
    fn columns_are_found_by_their_names_in_any_order() {
        let rows = from_csv(&format!("read_us,other,shape,us\n2.5,x,{SHAPE},10\n")).unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!(figures(&rows[0]), (SHAPE.to_owned(), 10.0, 2.5));
    }

    #[test]
    fn what_is_no_recorded_figure_is_refused_with_its_line() {
        assert!(refusal(from_csv("shape,us\n")).contains("no column read_us"));
        assert!(refusal(from_csv("")).contains("no column shape"));
        let with = |line: &str| {
            refusal(from_csv(&format!(
                "shape,us,read_us\n{SHAPE},1,2\n{line}\n"
            )))
        };
        assert!(with("no/such,1,2").contains("line 3: no workload is called no/such"));
        assert!(with(&format!("{SHAPE},1")).contains("line 3: it has 2 cells; expected 3"));
        assert!(with(&format!("{SHAPE},1,?")).contains("line 3: ? is no number"));
    }

    #[test]
    fn what_the_benchmark_prints_is_read_with_its_devices() {
        let all = workloads();
        let other = "context/8-2-ctx4096/int8";
        let printed = [
            (0, SHAPE, 10.0, 2.5),
            (1, SHAPE, 7.0, f64::NAN),
            (0, other, 20.0, 5.0),
        ];
        let devices = ["cpu: 1 thread", "cpu: 2 threads"];
        let mut values: Vec<Value> = printed
            .iter()
            .map(|&(device, shape, us, read_us)| {
                let row = row(&all, device, shape, us, read_us).unwrap();
                row.value(devices[device], None)
            })
            .collect();
        let none = Row {
            outcome: Err("too large".to_owned()),
            ..row(&all, 0, other, 1.0, 1.0).unwrap()
        };
        values.insert(1, none.value("another", None));
        let read = from_json(&json!(values).to_string()).unwrap();
        assert_eq!(read.devices, devices);
        assert_eq!(read.rows.len(), printed.len());
        for (row, (device, shape, us, read_us)) in read.rows.iter().zip(printed) {
            let got = figures(row);
            assert_eq!((row.device, &*got.0, got.1), (device, shape, us));
            assert_eq!(got.2.total_cmp(&read_us), std::cmp::Ordering::Equal);
        }
    }

    #[test]
    fn json_of_another_kind_is_refused_with_its_row() {
        assert!(refusal(from_json("[1")).contains("`attn bench --json` prints"));
        let with = |key: &str, value: Value| {
            let mut row = json!({ "device": "d", "shape": SHAPE, "us": 1.0, "read_us": 2.0 });
            row[key] = value;
            let first = json!({ "reason": "none" });
            refusal(from_json(&json!([first, row]).to_string()))
        };
        assert_eq!(with("us", json!("many")), "row 2: it has no number us");
        assert_eq!(
            with("read_us", Value::Null),
            "row 2: it has no number read_us"
        );
        assert_eq!(with("device", json!(7)), "row 2: it has no text device");
        let custom = with("shape", json!("custom/2-1/int8"));
        assert!(
            custom.contains("row 2: no workload is called custom/2-1/int8"),
            "{custom}"
        );
    }
}
