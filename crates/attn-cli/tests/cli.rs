//! The program: what it prints, what it refuses, and with which exit code.

mod program;

use attn_conformance::noise::uniform;
use program::{Folder, attn, bundled, dequantize, json, printed, quantize, refused, run, text};

const PROGRAM: &str = env!("CARGO_BIN_EXE_attn");

#[test]
fn run_prints_a_line_per_format() {
    let table = printed(&["run", "--backend", "cpu", "--kv", "int8,int8/int4-g1"]);
    assert!(table.contains("| int8 | 132.0 | 1.94x | 1."), "{table}");
    assert!(table.contains("| int8/int4-g1 | 102.0 |"), "{table}");

    let rows = json(&run(&["run", "--backend", "cpu", "--kv", "int8", "--json"]));
    assert_eq!(rows["backend"], "cpu");
    let error = rows["formats"][0]["output_error"].as_f64().unwrap();
    assert!((0.01..0.02).contains(&error), "{error}");
}

#[test]
fn devices_names_every_backend() {
    let rows = json(&run(&["devices", "--json"]));
    let names: Vec<_> = rows
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["backend"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["cuda", "wgpu", "cpu"]);
    for row in rows.as_array().unwrap() {
        let present = row["available"].as_bool().unwrap();
        assert_eq!(present, row["reason"].is_null(), "{row}");
        if !present {
            // One that is absent is refused by name, with the same reason, and never replaced.
            let name = row["backend"].as_str().unwrap();
            let output = run(&["run", "--backend", name]);
            refused(&output, &[row["reason"].as_str().unwrap()]);
            let output = attn(&["run"]).env("ATTN_BACKEND", name).output().unwrap();
            refused(&output, &[row["reason"].as_str().unwrap()]);
        }
    }
    assert!(rows[2]["formats"].as_array().unwrap().len() >= 11, "{rows}");
}

#[test]
fn commands_and_options_of_attn_eval_are_refused_with_its_name() {
    for command in ["generate", "perplexity", "plot"] {
        for arguments in [
            &[command][..],
            &[command, "--model", "x", "text"],
            &[command, "--help"],
        ] {
            let way = format!("`cargo run --release -p attn-eval -- {command}`");
            refused(&run(arguments), &[&format!("`attn {command}`"), &way]);
        }
    }
    for arguments in [
        &["--plot", "x.svg", "context/"][..],
        &["--plot", "x.svg", "--force"],
        &["--recorded", "x.csv", "--plot", "x.svg", "--force"],
    ] {
        let output = run(&[&["bench"], arguments].concat());
        refused(
            &output,
            &["attn bench --json", "-p attn-eval -- plot FILE SVG"],
        );
    }
}

#[test]
fn misuse_exits_with_2_and_says_what_is_allowed() {
    refused(
        &run(&["run", "--kv", "int8 "]),
        &["format is \"int8 \"; allowed"],
    );
    refused(&run(&["run", "--kv", "int5"]), &["int5", "int8-plain"]);
    refused(
        &run(&["run", "--kv", "int8/int4-channel"]),
        &["int4-channel", "int4-g1"],
    );
    refused(
        &run(&["run", "--backend", "tpu"]),
        &["tpu", "cuda, wgpu, cpu"],
    );
    refused(&run(&["paint"]), &["unrecognized subcommand"]);
    refused(
        &run(&["run", "/no/such/file"]),
        &["cannot read /no/such/file", "check the path"],
    );
    let output = attn(&["run"]).env("ATTN_BACKEND", "tpu").output().unwrap();
    refused(&output, &["tpu", "cuda:1 and so on, wgpu, cpu"]);
    for (name, value) in [("ATTN_TABLE", "huge"), ("ATTN_CASE", "0")] {
        let output = attn(&["check"]).env(name, value).output().unwrap();
        refused(&output, &[name, value, "allowed"]);
    }
}

#[test]
fn check_passes_on_the_cpu_and_prints_digests() {
    let check = |threads: &str| {
        let mut command = attn(&["check", "--backend", "cpu", "--json"]);
        json(
            &command
                .env("ATTN_TABLE", "reduced")
                .env("RAYON_NUM_THREADS", threads)
                .output()
                .unwrap(),
        )
    };
    let rows = check("1");
    let cases = attn_conformance::table(attn_conformance::Size::Reduced).len();
    assert_eq!(rows[0]["cases"], cases);
    assert_eq!(rows[0]["failures"].as_array().unwrap().len(), 0);
    assert_eq!(rows[0]["integer_digest"].as_str().unwrap().len(), 16);
    assert_eq!(rows, check("3"));
}

#[test]
fn pages_written_are_pages_read() {
    for (kv, limit) in [
        ("int8", 0.02),
        ("int4", 0.2),
        ("fp8/int8-tensor", 0.05),
        ("f16", 1e-6),
    ] {
        let folder = Folder::new();
        let [pages, back, again] = folder.paths(["pages", "back", "again"]);
        let made = quantize(&bundled(), &pages, kv);
        assert_eq!(made["layers"].as_array().unwrap().len(), 6);
        for layer in made["layers"].as_array().unwrap() {
            for side in ["k_error", "v_error"] {
                let error = layer[side].as_f64().unwrap();
                assert!(error <= limit, "{kv} {layer}");
            }
        }
        let read = dequantize(&pages, &back);
        assert_eq!(read["layers"][5]["tokens"], 2048);
        if kv == "f16" {
            // The data are f16: pages of them lose nothing, and the file says so.
            let made = quantize(&back, &again, kv);
            assert_eq!(made["layers"][0]["k_error"], 0.0);
            assert_eq!(
                std::fs::read(&pages).unwrap().len(),
                std::fs::read(&again).unwrap().len()
            );
        }
    }
}

#[test]
fn damaged_pages_are_refused_with_the_layer() {
    let folder = Folder::new();
    let [pages, bad, out] = folder.paths(["whole", "bad", "never"]);
    quantize(&bundled(), &pages, "int8");
    let mut bytes = std::fs::read(&pages).unwrap();
    // The last two bytes of the last page: a V scale, now NaN.
    let end = bytes.len();
    bytes[end - 2..].copy_from_slice(&[0x00, 0x7e]);
    std::fs::write(&bad, &bytes).unwrap();
    refused(
        &run(&["dequantize", &bad, &out]),
        &["is damaged", "its checksum is `blake3 "],
    );
    std::fs::write(&bad, &bytes[..end / 2]).unwrap();
    refused(
        &run(&["dequantize", &bad, &out]),
        &["not a safetensors file"],
    );
    refused(
        &run(&["dequantize", &bundled(), &out]),
        &["no `attn`", "attn quantize"],
    );
    refused(
        &run(&["dequantize", &pages, &pages]),
        &["both input and output"],
    );
    refused(&run(&["run", &pages]), &["no tensor NAME.k"]);
    let output = run(&["quantize", &bundled(), &out, "--kv", "int4-g8"]);
    refused(&output, &["int4 with groups of a multiple of 16 dims"]);
    assert_eq!(folder.names(), ["bad", "whole"]);
}

#[test]
fn bench_says_why_a_shape_has_no_figure() {
    let rows = json(&run(&[
        "bench",
        "--backend",
        "cpu",
        "--json",
        "--runs",
        "1",
        "single/9-3-d64-ctx2048/int8",
        "gqa8/batch512/int8",
    ]));
    let [small, large] = &rows.as_array().unwrap()[..] else {
        panic!("{rows}");
    };
    assert!(small["us"].as_f64().unwrap() > 0.0, "{small}");
    assert!(small["share"].as_f64().unwrap() > 0.0, "{small}");
    assert!(large["us"].is_null(), "{large}");
    let reason = large["reason"].as_str().unwrap();
    assert!(reason.contains("--large"), "{reason}");
    refused(
        &run(&["bench", "no-such-shape"]),
        &["no-such-shape", "--list"],
    );
}

#[test]
fn files_without_exact_results_are_run_against_f64() {
    let folder = Folder::new();
    let (heads, tokens, dim) = (2, 70, 64);
    let [k, v] = [1, 2].map(|seed| uniform(seed, 0..heads * tokens * dim));
    let q = uniform(3, 0..3 * 4 * dim);
    let tensors = [
        ("x.k", &[tokens, heads, dim][..], &k[..]),
        ("x.v", &[tokens, heads, dim], &v),
        ("x.q", &[3, 4, dim], &q),
    ];
    let file = folder.write("in", &tensors, "0.125");
    let made = json(&run(&[
        "run",
        &file,
        "--backend",
        "cpu",
        "--kv",
        "bf16,int4",
        "--json",
    ]));
    let layer = &made["layers"][0];
    for (key, want) in [
        ("q_heads", 4),
        ("kv_heads", 2),
        ("head_dim", 64),
        ("q_len", 3),
        ("tokens", 70),
    ] {
        assert_eq!(layer[key], want, "{key}");
    }
    let errors = [0, 1].map(|i| {
        made["formats"][i]["layers"][0]["output_error"]
            .as_f64()
            .unwrap()
    });
    // The error of rounding K and V, not that of another mask or scale.
    assert!(
        errors[0] < 0.01 && errors[0] < errors[1] && errors[1] < 0.5,
        "{errors:?}"
    );
}

#[test]
fn inspect_says_what_a_file_holds_and_what_it_cost() {
    let (folder, file) = (Folder::new(), bundled());
    let pages = folder.path("pages");
    let quantized = json(&run(&[
        "quantize",
        &file,
        &pages,
        "--kv",
        "int8",
        "--page-size",
        "32",
        "--json",
    ]));
    let tensors = json(&run(&["inspect", &file, "--json"]));
    assert_eq!(
        (&tensors["kind"], &tensors["layers"][5]["tokens"]),
        (&"tensors".into(), &2048.into())
    );
    assert_eq!(tensors["layers"][0]["has_q"], true);
    let plain = json(&run(&["inspect", &pages, "--json"]));
    assert_eq!(
        (&plain["kv"], &plain["page_size"]),
        (&"int8".into(), &32.into())
    );
    assert!(plain["layers"][0].get("k_error").is_none());
    let against = json(&run(&["inspect", &pages, "--against", &file, "--json"]));
    for i in 0..6 {
        for key in ["layer", "tokens", "bytes", "k_error", "v_error"] {
            assert_eq!(
                against["layers"][i][key], quantized["layers"][i][key],
                "{key} of {i}"
            );
        }
    }
    refused(
        &run(&["inspect", &file, "--against", &file]),
        &["holds none", "attn quantize"],
    );
}

#[test]
fn bench_times_a_shape_of_ones_own() {
    let shape = [
        "bench",
        "--backend",
        "cpu",
        "--heads",
        "6/2",
        "--dim",
        "64",
        "--ctx",
        "100",
    ];
    let more = [
        "--batch",
        "3",
        "--q-len",
        "2",
        "--page-size",
        "16",
        "--kv",
        "int8,fp8",
        "--fast",
        "--not-causal",
        "--runs",
        "1",
        "--json",
    ];
    let rows = json(&run(&[&shape[..], &more].concat()));
    let names = [0, 1].map(|i| rows[i]["shape"].as_str().unwrap());
    assert_eq!(
        names,
        [
            "custom/6-2-d64-q2-ctx100-batch3-page16-not-causal-fast/int8",
            "custom/6-2-d64-q2-ctx100-batch3-page16-not-causal-fast/fp8"
        ]
    );
    // Seven pages of 16 tokens each: codes of K and V of 64 dims, and two f16 scales.
    assert_eq!(
        rows[0]["bytes"].as_f64(),
        Some((3 * 7 * 16 * 2 * (2 * 64 + 4)) as f64)
    );
    assert!(rows[0]["us"].as_f64().unwrap() > 0.0);
    refused(&run(&["bench", "--dim", "64"]), &["--heads"]);
    refused(&run(&["bench", "--heads", "6"]), &["28/4"]);
    refused(&run(&["bench", "--heads", "6/4"]), &["num_q_heads"]);
}

#[test]
fn without_a_command_the_program_says_what_is_here_and_what_to_do_next() {
    let output = attn(&[]).env("ATTN_BACKEND", "cpu").output().unwrap();
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}");
    // Every backend once, the table, and commands that exist.
    for name in ["cuda", "wgpu", "cpu"] {
        let lines = said
            .lines()
            .filter(|l| l.starts_with(&format!("  {name:5} ")));
        assert_eq!(lines.count(), 1, "{name}: {said}");
    }
    assert!(said.contains("| int8/int4 |"), "{said}");
    assert!(!text(&output.stderr).contains("not used"), "{said}");
    let (_, next) = said.split_once("\nnext: ").expect("a last part");
    let help = printed(&["--help"]);
    for line in next.lines().filter(|line| !line.contains("--help")) {
        let command = line.trim_start().split(' ').nth(1).unwrap();
        assert!(help.contains(&format!("  {command} ")), "{command}: {help}");
    }
}

#[test]
fn the_manual_has_a_page_for_every_command() {
    let folder = Folder::new();
    printed(&["manual", &folder.path("man")]);
    for page in ["attn.1", "attn-run.1", "attn-bench.1", "attn-explain.1"] {
        let page = std::fs::read_to_string(folder.path(&format!("man/{page}"))).unwrap();
        assert!(page.contains(".SH SYNOPSIS"), "{page}");
    }
    assert!(printed(&["manual"]).contains("attn\\-explain(1)"));
    // A page that exists stays as it is, unless it may be replaced.
    let (man, page) = (folder.path("man"), folder.path("man/attn.1"));
    std::fs::write(&page, "another's").unwrap();
    refused(&run(&["manual", &man]), &["exists; add --force"]);
    assert_eq!(std::fs::read(&page).unwrap(), b"another's");
    printed(&["manual", &man, "--force"]);
    assert!(
        std::fs::read_to_string(&page)
            .unwrap()
            .contains(".SH SYNOPSIS")
    );
    refused(
        &run(&["manual", "/dev/null/man"]),
        &["cannot write /dev/null/man"],
    );
}

#[test]
fn completions_name_every_command() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let output = run(&["completions", shell]);
        assert!(output.status.success());
        for command in ["quantize", "inspect", "bench"] {
            assert!(
                text(&output.stdout).contains(command),
                "{command} in {shell}"
            );
        }
    }
}
