//! Figures of an earlier run, from a CSV file with the columns `shape`, `us` and `read_us`.

use std::{fs, path::Path};

use anyhow::{Context, Result, anyhow, ensure};
use attn_bench::{Measured, Timing, workloads};

use crate::measured::{Figures, Row};

/// The columns that a file must have, in any order and beside any others.
const COLUMNS: [&str; 3] = ["shape", "us", "read_us"];

/// The rows of a file, in its order.
pub(super) fn recorded(path: &Path) -> Result<Vec<Row>> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    rows(&text).with_context(|| format!("reading {}", path.display()))
}

fn rows(text: &str) -> Result<Vec<Row>> {
    let mut lines = text.lines();
    let head: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    let mut places = [0; COLUMNS.len()];
    for (place, column) in places.iter_mut().zip(COLUMNS) {
        let found = head.iter().position(|name| *name == column);
        *place = found.with_context(|| format!("its first line names no column {column}"))?;
    }
    let all = workloads();
    let row = |(number, line): (usize, &str)| {
        let cells: Vec<&str> = line.split(',').collect();
        ensure!(
            cells.len() == head.len(),
            "line {number} has {} cells; expected {}",
            cells.len(),
            head.len()
        );
        let [shape, us, read_us] = places.map(|place| cells[place]);
        let workload = all.iter().find(|workload| workload.to_string() == shape);
        let workload = workload.ok_or_else(|| {
            anyhow!(
                "line {number}: no workload is called {shape}; `attn bench --list` prints the names"
            )
        })?;
        let timing = |us: &str| {
            let us: f64 = us
                .parse()
                .with_context(|| format!("line {number}: {us} is no number of microseconds"))?;
            Ok::<_, anyhow::Error>(Timing {
                min: us,
                median: us,
            })
        };
        let measured = Measured {
            step: timing(us)?,
            ceiling: timing(read_us)?,
        };
        Ok(Row {
            device: 0,
            workload: workload.clone(),
            outcome: Ok(Figures::new(measured, true)),
            peak: None,
        })
    };
    (2..).zip(lines).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: &str = "single/32-8-ctx1024/int8";

    fn refusal(text: &str) -> String {
        let error = rows(text).err().expect("a refusal");
        error.to_string()
    }

    #[test]
    fn columns_are_found_by_their_names_in_any_order() {
        let rows = rows(&format!("read_us,other,shape,us\n2.5,x,{SHAPE},10\n")).unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].workload.to_string(), SHAPE);
        let figures = rows[0].outcome.as_ref().unwrap();
        assert_eq!((figures.us, figures.read_us), (10.0, 2.5));
    }

    #[test]
    fn what_is_no_recorded_figure_is_refused_with_its_line() {
        assert!(refusal("shape,us\n").contains("no column read_us"));
        assert!(refusal("").contains("no column shape"));
        let with = |line: &str| refusal(&format!("shape,us,read_us\n{SHAPE},1,2\n{line}\n"));
        assert!(with("no/such,1,2").contains("line 3: no workload is called no/such"));
        assert!(with(&format!("{SHAPE},1")).contains("line 3 has 2 cells; expected 3"));
        assert!(with(&format!("{SHAPE},1,?")).contains("line 3: ? is no number"));
    }
}
