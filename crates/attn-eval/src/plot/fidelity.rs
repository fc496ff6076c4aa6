//! `attn-eval perplexity --plot`, and `attn-eval plot` of its figures: the divergence of the next token over bytes per token, a mark for each format.

use anyhow::{Result, anyhow, ensure};
use attn_llm::Fidelity;
use plotters::prelude::*;

use super::{COLOURS, bounds, short};
use crate::recorded::Divergence;

/// Draws the formats whose divergence is more than zero, as an SVG file.
pub fn fidelity(results: &[Fidelity]) -> Result<String> {
    let of = |r: &Fidelity| Divergence {
        name: r.name(),
        bytes_per_token: r.bytes_per_token,
        kl_x1000: r.mean_kl * 1e3,
    };
    divergences(&results.iter().map(of).collect::<Vec<_>>())
}

/// Draws those that are more than zero, as an SVG file.
pub(super) fn divergences(all: &[Divergence]) -> Result<String> {
    let points: Vec<(f64, f64, String)> = all
        .iter()
        .map(|d| (d.bytes_per_token, d.kl_x1000, d.name.clone()))
        .filter(|(bytes, kl, _)| bytes.is_normal() && kl.is_normal() && *kl > 0.0)
        .collect();
    ensure!(
        !points.is_empty(),
        "there is nothing to draw: name a format that differs from f32 with --kv"
    );
    let failed = |error: &dyn std::fmt::Display| anyhow!("drawing: {error}");
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (750, 500)).into_drawing_area();
        area.fill(&WHITE).map_err(|e| failed(&e))?;
        let x = bounds(points.iter().map(|p| p.0));
        let y = bounds(points.iter().map(|p| p.1));
        let mut chart = ChartBuilder::on(&area)
            .caption("Divergence of the next token", ("sans-serif", 18))
            .margin(12)
            .margin_right(70)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(x.log_scale().base(2.0), y.log_scale())
            .map_err(|e| failed(&e))?;
        chart
            .configure_mesh()
            .x_desc("bytes per token, all layers and heads")
            .y_desc("KL × 1000")
            .x_label_formatter(&|x| short(*x))
            .y_label_formatter(&|y| format!("{y}"))
            .light_line_style(RGBColor(240, 240, 240))
            .draw()
            .map_err(|e| failed(&e))?;
        let marks = points.iter().enumerate().map(|(i, (bytes, kl, name))| {
            let colour = COLOURS[i % COLOURS.len()];
            EmptyElement::at((*bytes, *kl))
                + Circle::new((0, 0), 5, colour.filled())
                + Text::new(name.clone(), (9, -6), ("sans-serif", 14))
        });
        chart.draw_series(marks).map_err(|e| failed(&e))?;
        area.present().map_err(|e| failed(&e))?;
    }
    Ok(svg)
}
