//! `attn-eval plot`, and what the program refuses.

#[path = "../../attn-cli/tests/program/mod.rs"]
mod program;

use std::fs;

use program::{Folder, printed, refused, run};
use serde_json::json;

const PROGRAM: &str = env!("CARGO_BIN_EXE_attn-eval");

/// A file of the figures that `attn bench --json` prints of one device.
fn measured(folder: &Folder) -> String {
    let path = folder.path("measured.json");
    let row = |tokens: usize| {
        let shape = format!("context/8-2-ctx{tokens}/int8");
        json!({ "device": "a device", "shape": shape, "us": tokens as f64 / 50.0, "read_us": tokens as f64 / 100.0 })
    };
    fs::write(&path, json!([row(1024), row(4096)]).to_string()).unwrap();
    path
}

#[test]
fn plot_draws_what_was_measured() {
    let folder = Folder::new();
    let chart = folder.path("chart.svg");
    printed(&["plot", &measured(&folder), &chart]);
    let svg = fs::read_to_string(chart).unwrap();
    for part in ["a device", "8/2 int8", "</svg>"] {
        assert!(svg.contains(part), "{part} is not in {svg}");
    }
}

#[test]
fn plot_draws_divergences_of_formats_over_their_bytes() {
    let folder = Folder::new();
    let (figures, chart) = (folder.path("figures.csv"), folder.path("chart.svg"));
    fs::write(
        &figures,
        "kl_x1000,kv,bytes_per_token\n0,f32,46080\n0.5,int8,11880\n2.6,int4,6120\n",
    )
    .unwrap();
    printed(&["plot", &figures, &chart]);
    let svg = fs::read_to_string(&chart).unwrap();
    for part in ["int8", "int4", "KL × 1000", "</svg>"] {
        assert!(svg.contains(part), "{part} is not in {svg}");
    }
    assert!(!svg.contains("f32"), "f32 has no place on the axes: {svg}");
    fs::write(&figures, "kv,bytes_per_token,kl_x1000\nint8,many,1").unwrap();
    let plot = ["plot", &figures, &chart, "--force"];
    refused(&run(&plot), &["line 2", "many is no number of bytes"]);
}

#[test]
fn an_existing_chart_is_replaced_only_by_force() {
    let folder = Folder::new();
    let (figures, chart) = (measured(&folder), folder.path("chart.svg"));
    fs::write(&chart, "mine").unwrap();
    let plot = ["plot", &figures, &chart];
    refused(&run(&plot), &["chart.svg exists", "--force"]);
    assert_eq!(fs::read(&chart).unwrap(), b"mine");
    let nowhere = folder.path("no/such/folder.svg");
    refused(
        &run(&["plot", &figures, &nowhere]),
        &["folder does not exist"],
    );
    printed(&[&plot[..], &["--force"]].concat());
    assert!(fs::read_to_string(&chart).unwrap().contains("</svg>"));
    // The figures themselves are never replaced.
    let output = run(&["plot", &figures, &figures, "--force"]);
    refused(&output, &["both input and output"]);
    assert_eq!(folder.names(), ["chart.svg", "measured.json"]);
}

#[test]
fn files_without_figures_are_refused_with_their_name() {
    let folder = Folder::new();
    let (file, chart) = (folder.path("in.csv"), folder.path("chart.svg"));
    let plot = ["plot", &file, &chart];
    refused(&run(&plot), &["attn-eval: reading", "in.csv"]);
    for (bytes, says) in [
        ("[]", "nothing to draw"),
        ("[7]", "row 1: it has no text device"),
        ("shape,us", "no column read_us"),
    ] {
        fs::write(&file, bytes).unwrap();
        refused(&run(&plot), &[says]);
    }
    assert_eq!(folder.names(), ["in.csv"]);
}

#[test]
fn completions_name_every_command() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = printed(&["completions", shell]);
        for command in ["generate", "perplexity", "plot"] {
            assert!(script.contains(command), "{command} in {shell}");
        }
    }
}
