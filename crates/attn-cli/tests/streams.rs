//! How the program ends when its output is lost, its answers are no numbers, or its environment is wrong.

mod program;

use std::{ffi::OsStr, io};

use program::{Folder, attn, json, refused, run, text};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_attn");

/// A pipe whose reader is gone.
fn closed() -> io::PipeWriter {
    let (reader, writer) = io::pipe().expect("a pipe");
    drop(reader);
    writer
}

/// Commands that print a lot, little, JSON, help; and one that writes a file first.
fn commands(folder: &Folder) -> Vec<Vec<String>> {
    let file = tiny(folder, 0.0, 1.0);
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    vec![
        words("bench --list"),
        words("bench --list --json"),
        words("devices"),
        words("devices --json"),
        words("--help"),
        words("--version"),
        words("bench --backend cpu --runs 1 single/9-3-d64-ctx2048/int8"),
        words(&format!("run {file} --backend cpu --kv int8")),
        words(&format!(
            "quantize {file} {} --kv int8 --force",
            folder.path("out")
        )),
    ]
}

#[test]
fn a_reader_that_is_gone_ends_the_program_quietly() {
    let folder = Folder::new();
    for args in commands(&folder) {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let output = attn(&args).stdout(closed()).output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(141), "{args:?}: {error}");
        let ours = ["attn:", "panicked", "pipe"];
        assert!(!ours.iter().any(|word| error.contains(word)), "{error}");
    }
    // Nor is a check passed whose answer nobody read.
    let mut check = attn(&["check", "--backend", "cpu"]);
    check.env("ATTN_TABLE", "reduced").stdout(closed());
    assert_eq!(check.output().unwrap().status.code(), Some(141));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_output_is_a_sentence_and_no_panic() {
    let full = || {
        std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap()
    };
    let folder = Folder::new();
    for args in commands(&folder) {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let output = attn(&args).stdout(full()).output().unwrap();
        refused(&output, &["cannot print the result", "No space left"]);
    }
    // Where remarks cannot be printed either, the exit code stays.
    let output = attn(&["run", "--backend", "tpu"]).stderr(full()).output();
    assert_eq!(output.unwrap().status.code(), Some(2));
    let output = attn(&["run", "/no/such/file"]).stderr(full()).output();
    assert_eq!(output.unwrap().status.code(), Some(2));
}

/// A file with one layer of two equal tokens: K is zero and V is 3, so that every output is 3 and every LSE ln 2; each off by so much, or
/// by a factor.
fn tiny(folder: &Folder, lse_off: f32, out_factor: f32) -> String {
    let (kv, q) = ([2, 1, 64], [1, 2, 64]);
    let (k, v) = ([0.0; 128], [3.0; 128]);
    let (out, lse) = ([3.0 * out_factor; 128], [2f32.ln() + lse_off; 2]);
    let tensors: [(&str, &[usize], &[f32]); 5] = [
        ("one.k", &kv, &k),
        ("one.v", &kv, &v),
        ("one.q", &q, &[1.0; 128]),
        ("one.out", &q, &out),
        ("one.lse", &[1, 2], &lse),
    ];
    folder.write("tiny", &tensors, "0.125")
}

fn figures(file: &str) -> Value {
    let args = ["run", file, "--backend", "cpu", "--kv", "f16", "--json"];
    json(&run(&args))["formats"][0].clone()
}

#[test]
fn errors_are_measured_against_the_file() {
    let folder = Folder::new();
    let near = |figure: &Value, want: f64| {
        let figure = figure.as_f64().unwrap();
        assert!((figure - want).abs() < 1e-4, "{figure}, not {want}");
    };
    let right = figures(&tiny(&folder, 0.0, 1.0));
    near(&right["lse_error"], 0.0);
    near(&right["output_error"], 0.0);
    // 64 dims of K and V in 16 bits.
    assert_eq!(right["bytes_per_token"], 256.0);
    assert_eq!(right["compression"], 1.0);
    let wrong = figures(&tiny(&folder, 0.5, 2.0));
    near(&wrong["lse_error"], 0.5);
    near(&wrong["output_error"], 0.5);
    near(&figures(&tiny(&folder, -0.25, 1.0))["lse_error"], 0.25);
}

#[test]
fn nan_of_a_file_is_printed_as_nan_and_is_a_failure() {
    let folder = Folder::new();
    for (lse_off, out_factor, key, says) in [
        (f32::NAN, 1.0, "lse_error", "the file's lse[0] is NaN"),
        (0.0, f32::NAN, "output_error", "the file's out[0] is NaN"),
    ] {
        let file = tiny(&folder, lse_off, out_factor);
        let args = ["run", &file, "--backend", "cpu", "--kv", "int8"];
        let output = run(&args);
        let (table, error) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{table}{error}");
        assert!(table.contains("| NaN"), "{table}");
        assert!(error.contains(says), "{error}");
        let output = run(&[&args[..], &["--json"]].concat());
        assert_eq!(output.status.code(), Some(1));
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(value["formats"][0][key], "NaN", "{value}");
    }
}

#[test]
fn threads_are_bounded_by_a_sentence() {
    for threads in ["99999999", "1025", "0", "1,100000"] {
        let output = run(&["bench", "--threads", threads, "single/9-3-d64-ctx2048"]);
        refused(&output, &["--threads", "1 to 1024"]);
    }
    for threads in ["100000", "1025", "-3", "many"] {
        for args in [&["run", "--backend", "cpu"][..], &["check"], &["devices"]] {
            let output = attn(args).env("RAYON_NUM_THREADS", threads).output();
            refused(
                &output.unwrap(),
                &["RAYON_NUM_THREADS", threads, "1 to 1024"],
            );
        }
    }
    let folder = Folder::new();
    let file = tiny(&folder, 0.0, 1.0);
    let mut command = attn(&["run", &file, "--backend", "cpu", "--json"]);
    json(&command.env("RAYON_NUM_THREADS", "40").output().unwrap());
}

#[cfg(unix)]
#[test]
fn a_variable_that_is_not_utf8_is_refused_and_not_ignored() {
    use std::os::unix::ffi::OsStrExt;
    let value = OsStr::from_bytes(b"cpu\xff");
    let output = attn(&["run"]).env("ATTN_BACKEND", value).output().unwrap();
    let allowed = "cuda:1 and so on, wgpu, cpu";
    refused(&output, &["ATTN_BACKEND", "\"cpu\\xFF\"", allowed]);
    let output = attn(&["run"]).env("RAYON_NUM_THREADS", value).output();
    refused(&output.unwrap(), &["RAYON_NUM_THREADS"]);
}

#[test]
fn options_that_would_be_ignored_are_refused() {
    for args in [
        &["bench", "--list", "--plot", "x.svg"][..],
        &["bench", "--list", "--threads", "1"],
        &["bench", "--force", "single/"],
        &["bench", "--runs", "0", "single/"],
        &["bench", "--backend", "wgpu", "--threads", "2", "single/"],
    ] {
        refused(&run(args), &[]);
    }
}
