//! `attn-eval plot`: latency over context, share of the read ceiling over cache size, time over query rows, and rate over prompt length, as one
//! SVG file; or divergence over bytes per token.

mod curves;
mod fidelity;
mod style;
#[cfg(test)]
mod tests;

use std::{ops::Range, path::PathBuf};

use anyhow::{Result, anyhow, ensure};
use attn::KvFormat;
use attn_cli::{measured::Row, target::Target};
use curves::{Curve, latency, prompts, query_rows, share};
pub use fidelity::fidelity;
use plotters::{
    coord::ranged1d::{AsRangedCoord, ValueFormatter},
    prelude::*,
};
use style::{Area, COLOURS, DASHES, Mark, draw_key};

use crate::recorded::{Figures, Recorded, read};

/// What `attn-eval plot` reads and writes.
#[derive(clap::Args)]
pub struct PlotArgs {
    /// The figures: what `attn bench --json` printed, or a CSV file with the columns shape, us and read_us, or kv, bytes_per_token and kl_x1000.
    file: PathBuf,
    /// The SVG file to write: latency over context, share of the read over cache size, time over query rows, TFLOP/s over prompt length; or
    /// divergence over bytes per token.
    svg: PathBuf,
    /// Replace the SVG file if it exists.
    #[arg(long)]
    force: bool,
}

/// Draws the figures of a file.
pub fn plot(args: &PlotArgs) -> Result<()> {
    let target = Target::new(&args.svg, args.force, std::slice::from_ref(&args.file))?;
    let text = match read(&args.file)? {
        Figures::Times(Recorded { devices, rows }) => svg(&devices, &rows)?,
        Figures::Divergences(all) => fidelity::divergences(&all)?,
    };
    target.write(text.as_bytes())
}

/// Pixels beside a chart for its legend.
const LEGEND: u32 = 186;

/// A chart's words.
struct Words<'a> {
    caption: &'a str,
    x: &'a str,
    y: &'a str,
}

/// The range of an axis.
fn bounds(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, 0f64), |(a, b), x| (a.min(x), b.max(x)));
    // Room for the outermost points.
    low * 0.85..high * 1.2
}

/// A number of an axis as short text: multiples of 1024 in Ki, and no long tails of digits.
fn short(x: f64) -> String {
    match x {
        x if x >= 1_048_576.0 && x % 1_048_576.0 == 0.0 => format!("{}Mi", x / 1_048_576.0),
        x if x >= 1024.0 && x % 1024.0 == 0.0 => format!("{}Ki", x / 1024.0),
        x if x > 0.0 && x < 1.0 => format!("{x:.2}"),
        x => format!("{x:.0}"),
    }
}

/// Draws a chart of curves and its legend.
fn chart<Y>(
    area: &Area<'_>,
    words: &Words<'_>,
    y: Y,
    curves: &[Curve],
    colours: &[KvFormat],
) -> Result<()>
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64> + Ranged<ValueType = f64>,
{
    let failed = |error: &dyn std::fmt::Display| anyhow!("drawing: {error}");
    let x = bounds(curves.iter().flat_map(|c| &c.points).map(|p| p.0));
    // The legend stands beside the chart, where it hides nothing.
    let (width, _) = area.dim_in_pixel();
    let (area, legend) = area.split_horizontally(width - LEGEND);
    let mut below = 60;
    let mut chart = ChartBuilder::on(&area)
        .caption(words.caption, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(x.log_scale().base(2.0), y)
        .map_err(|e| failed(&e))?;
    chart
        .configure_mesh()
        .x_desc(words.x)
        .y_desc(words.y)
        .x_label_formatter(&|x| short(*x))
        .y_label_formatter(&|y| short(*y))
        .light_line_style(RGBColor(240, 240, 240))
        .draw()
        .map_err(|e| failed(&e))?;
    for curve in curves {
        let index = colours.iter().position(|f| *f == curve.format).unwrap_or(0);
        let colour = COLOURS[index % COLOURS.len()].to_rgba();
        let style = colour.stroke_width(2);
        let points = curve.points.iter().copied();
        match DASHES[curve.stroke % DASHES.len()] {
            None => chart.draw_series(LineSeries::new(points, style)).map(drop),
            Some((dash, gap)) => chart
                .draw_series(DashedLineSeries::new(points, dash, gap, style))
                .map(drop),
        }
        .map_err(|e| failed(&e))?;
        let mark = Mark::of(index);
        if !curve.label.is_empty() {
            draw_key(&legend, curve, style, mark, below).map_err(|e| failed(&e))?;
            below += 16;
        }
        for &(x, y) in &curve.points {
            let (area, outline) = mark.parts(colour);
            let at = EmptyElement::at((x, y)) + area + outline;
            chart.draw_series([at]).map_err(|e| failed(&e))?;
        }
    }
    Ok(())
}

/// How an axis of figures runs.
enum Axis {
    Logarithmic,
    /// From 0 to this, or beyond the highest point.
    FromZero(f64),
}

/// A chart of the plot.
struct Panel {
    words: Words<'static>,
    axis: Axis,
    curves: Vec<Curve>,
}

/// All charts; those without curves have nothing to show.
fn panels(devices: &[String], rows: &[Row]) -> [Panel; 4] {
    let panel = |[caption, x, y]: [&'static str; 3], axis, curves| Panel {
        words: Words { caption, x, y },
        axis,
        curves,
    };
    [
        panel(
            ["One decode step of one sequence", "tokens cached", "µs"],
            Axis::Logarithmic,
            latency(devices, rows),
        ),
        panel(
            [
                "Share of a plain read of the same bytes",
                "MiB of cache",
                "%",
            ],
            Axis::FromZero(105.0),
            share(devices, rows),
        ),
        panel(
            [
                "A step of 2^18 tokens and KV heads, ctx 8192",
                "query rows of a KV head",
                "µs",
            ],
            Axis::Logarithmic,
            query_rows(devices, rows),
        ),
        panel(
            [
                "Whole prompts, 16 heads on one KV head",
                "tokens of a prompt",
                "TFLOP/s",
            ],
            Axis::FromZero(0.0),
            prompts(devices, rows),
        ),
    ]
}

/// Pixels of a chart.
const CHART: (u32, u32) = (750, 530);

/// Pixels of the line above all charts.
const TITLE: u32 = 30;

/// The charts that have curves, two side by side, as the text of an SVG file.
fn svg(devices: &[String], rows: &[Row]) -> Result<String> {
    let panels = panels(devices, rows);
    let shown: Vec<&Panel> = panels.iter().filter(|p| !p.curves.is_empty()).collect();
    ensure!(
        !shown.is_empty(),
        "nothing to draw: families single, context, gqa8, rows and prefill have curves, and too few of their workloads were measured"
    );
    let mut colours: Vec<KvFormat> = Vec::new();
    for curve in shown.iter().flat_map(|panel| &panel.curves) {
        if !colours.contains(&curve.format) {
            colours.push(curve.format);
        }
    }
    let mut text = String::new();
    {
        let columns = shown.len().min(2);
        let lines = shown.len().div_ceil(2);
        let size = (CHART.0 * columns as u32, CHART.1 * lines as u32 + TITLE);
        let root = SVGBackend::with_string(&mut text, size).into_drawing_area();
        let failed = |error: &dyn std::fmt::Display| anyhow!("drawing: {error}");
        root.fill(&WHITE).map_err(|e| failed(&e))?;
        let root = root
            .titled(&devices.join("; "), ("sans-serif", 14))
            .map_err(|e| failed(&e))?;
        let areas = root.split_evenly((lines, columns));
        for (area, panel) in areas.iter().zip(shown) {
            let Panel { words, curves, .. } = panel;
            let y = curves.iter().flat_map(|c| &c.points).map(|p| p.1);
            match panel.axis {
                Axis::Logarithmic => chart(area, words, bounds(y).log_scale(), curves, &colours)?,
                Axis::FromZero(least) => {
                    let top = y.fold(least, f64::max) + 5.0;
                    chart(area, words, 0.0..top, curves, &colours)?;
                }
            }
        }
        root.present().map_err(|e| failed(&e))?;
    }
    Ok(text)
}
