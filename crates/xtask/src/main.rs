//! `cargo xtask COMMAND`: the habits of this repository; `USAGE` lists them.

mod behind;
mod bugs;
mod circles;
mod fuzz;
mod header;
mod mutants;
mod package;
mod paths;
mod tarball;
mod web;
mod wheel;
mod words;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

/// What may be carried, stripped.
const LIMIT: u64 = 60 << 20;

const USAGE: &str = "usage: cargo xtask COMMAND
  behind                   lists dependencies that have newer versions, and fails on a direct one without a reason in Cargo.toml
  ci [fast|full]           everything that a change must pass; fast: form, lints, words, licences, in about three minutes
  circles                  lists the import circles inside each crate, and fails on one that is not allowed
  deny                     holds the dependencies' licences, sources and versions to deny.toml, by cargo-deny
  fuzz [--seconds N | --minutes N] [--seed S] [--only NAME] [--input SEED]
                           feeds random input to every door, with checks of overflow and assertions
  gpu [--images] [--quick] collects in gpu-bin/ what .ci/gpu needs on a machine with a GPU, a driver and NVRTC;
                           --images compiles the kernels here, --quick leaves out the program attn
  hub [--built | --check]  a repository for Hugging Face's Hub, from the wheels in target/wheels or the tests' extension, into target/hub; check: load it
  header [--check]         writes the header of crates/attn-c again from its sources
  kernels                  compiles the CUDA kernels for sm_80 and sm_90a: no stack frames, tensor-core instructions
  mutants [--help]         changes one expression at a time, and sees whether a test fails
  package [--each] [--quick] [--order]
                           packages what crates.io would get and checks all crates from their packages (each: one by one, too), and a crate outside
                           with each feature alone (quick: with `cpu` alone); --order lists the crates as they are published
  release-check [fast]     every way in which others get this, in fresh folders: crates, programs, C package, wheel, workflows; with times
  tables [--check | DIR]   writes the tables of the documents again from docs/data, or from a run of .ci/gpu
  tarball [--built] [--features wgpu]
                           headers, libraries, pkg-config and CMake files for C and C++, into target/tarball; built: of the tests' library
  web                      builds the page of crates/attn-web, which measures attn in a browser, into target/web
  wheel [--target aarch64] builds the Python package for machines without Rust, into target/wheels (target/wheels-aarch64)
  words                    finds words that docs/architecture.md's glossary has replaced, variables that docs/variables.md lacks,
                           files that a document names and that do not exist, and rows of docs/others-bugs.md without a test";

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    match arguments.first().map(String::as_str) {
        Some("ci") => script("run", &arguments[1..]),
        Some("behind") => behind::run(&root()),
        Some("circles") => circles::run(&root().canonicalize()?),
        Some("deny") => script("deny", &arguments[1..]),
        Some("gpu") => gpu(has("--images"), has("--quick")),
        Some("fuzz") => {
            ensure!(fuzz::fuzz(&arguments[1..])?, "the fuzzers found something");
            Ok(())
        }
        Some("header") => header::run(&root(), has("--check")),
        Some("hub") => script("hub", &arguments[1..]),
        Some("kernels") => script("kernels", &arguments[1..]),
        Some("mutants") => mutants::main(&arguments[1..]),
        Some("package") => {
            let features: &[&str] = if has("--quick") {
                &["cpu"]
            } else {
                &["cpu", "cuda", "wgpu"]
            };
            if has("--order") {
                return package::order(&root());
            }
            package::run(&root(), has("--each"), features)
        }
        Some("tables") => script("tables", &arguments[1..]),
        Some("release-check") => script("release-check", &arguments[1..]),
        Some("tarball") => {
            let features = arguments.iter().skip_while(|a| *a != "--features").nth(1);
            tarball::run(&root(), has("--built"), features.map(String::as_str))
        }
        Some("web") => web::run(&root().canonicalize()?),
        Some("wheel") => {
            let target = arguments.iter().skip_while(|a| *a != "--target").nth(1);
            wheel::run(&root(), target.map(String::as_str))
        }
        Some("words") => words::run(&root()),
        _ => bail!(USAGE),
    }
}

/// Runs a script of `.ci`.
fn script(name: &str, arguments: &[String]) -> Result<()> {
    let path = root().join(".ci").join(name);
    let status = Command::new(&path).args(arguments).status();
    let status = status.with_context(|| format!("cannot run {}", path.display()))?;
    ensure!(status.success(), "{} failed", path.display());
    Ok(())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds what the machine with the GPU runs: names and paths of two test targets, two examples, and two programs, of which `quick` leaves out one.
fn programs(root: &Path, quick: bool) -> Result<Vec<(String, PathBuf)>> {
    let mut calls = vec![
        vec![
            "test",
            "--no-run",
            "--package",
            "attn-conformance",
            "--test",
            "conformance",
        ],
        vec![
            "test",
            "--no-run",
            "--package",
            "attn-cuda",
            "--test",
            "gpu",
        ],
        vec!["build", "--package", "attn-cuda", "--example", "engine"],
        vec![
            "build",
            "--package",
            "attn-bench",
            "--features",
            "cuda",
            "--example",
            "transfer",
        ],
        vec!["build", "--package", "attn-images"],
        vec!["build", "--package", "attn-c"],
    ];
    if !quick {
        calls.push(vec!["build", "--package", "attn-cli", "--bin", "attn"]);
    }
    let mut all = Vec::new();
    for call in calls {
        let output = Command::new(env!("CARGO"))
            .current_dir(root)
            .args(&call)
            .args(["--release", "--message-format", "json-render-diagnostics"])
            .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
            .env("ATTN_EMBED", "0")
            .stderr(Stdio::inherit())
            .output()
            .context("cannot run cargo")?;
        ensure!(output.status.success(), "cargo {} failed", call.join(" "));
        for line in String::from_utf8(output.stdout)?.lines() {
            let message: serde_json::Value = serde_json::from_str(line)?;
            if let Some(program) = message["executable"].as_str() {
                let name = message["target"]["name"]
                    .as_str()
                    .context("a target's name")?;
                all.push((name.to_owned(), PathBuf::from(program)));
            }
            // What the C examples load.
            let made = message["filenames"].as_array().into_iter().flatten();
            let libraries = made.filter_map(|file| file.as_str());
            for library in libraries.filter(|file| file.ends_with("/libattn_c.so")) {
                all.push(("libattn_c.so".to_owned(), PathBuf::from(library)));
            }
        }
    }
    Ok(all)
}

fn gpu(images: bool, quick: bool) -> Result<()> {
    let root = root();
    let out = root.join("gpu-bin");
    fs::create_dir_all(&out)?;
    let mut total = 0;
    for (name, program) in programs(&root, quick)? {
        total += fs::copy(&program, out.join(&name))
            .with_context(|| format!("cannot copy {}", program.display()))?;
    }
    if images {
        for arch in ["sm_90a", "compute_80"] {
            let status = Command::new(out.join("attn-images"))
                .args(["--arch", arch])
                .env("ATTN_CACHE_DIR", out.join("cache"))
                .status()?;
            ensure!(status.success(), "the kernels did not compile for {arch}");
        }
        for entry in fs::read_dir(out.join("cache"))? {
            total += entry?.metadata()?.len();
        }
    }
    ensure!(
        total < LIMIT,
        "gpu-bin holds {total} bytes, and {LIMIT} may be carried"
    );
    println!(
        "gpu-bin: {} KiB; run .ci/gpu on the machine with the GPU",
        total >> 10
    );
    Ok(())
}
