//! `cargo xtask deny`: holds the dependencies to `deny.toml`. `cargo xtask gpu`: collects in `gpu-bin/` what a machine with a GPU, a driver and NVRTC needs to run `.ci/gpu`.
//! `cargo xtask mutants`: changes one expression at a time, and sees whether a test fails.

mod deny;
mod fuzz;
mod mutants;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

/// What may be carried, stripped.
const LIMIT: u64 = 60 << 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    match arguments.first().map(String::as_str) {
        Some("deny") => deny::run(&root()),
        Some("gpu") => gpu(has("--images"), has("--quick")),
        Some("fuzz") => fuzz::fuzz(&arguments[1..]).map(|good| {
            if !good {
                std::process::exit(1)
            }
        }),
        Some("mutants") => mutants::main(&arguments[1..]),
        _ => bail!(
            "usage: cargo xtask deny | fuzz | gpu [--images] [--quick] | mutants [--help]; --images also compiles the kernels here, for a machine without NVRTC; \
             --quick leaves out the program attn"
        ),
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn gpu(images: bool, quick: bool) -> Result<()> {
    let root = root();
    let out = root.join("gpu-bin");
    fs::create_dir_all(&out)?;
    let mut build = vec!["build", "--release"];
    build.extend(["--package", "attn-gpu"]);
    build.extend(["--package", "attn-cuda", "--example", "engine"]);
    let programs = if quick {
        vec!["attn-gpu", "examples/engine"]
    } else {
        build.extend(["--package", "attn", "--bin", "attn"]);
        vec!["attn-gpu", "examples/engine", "attn"]
    };
    let status = Command::new(env!("CARGO"))
        .current_dir(&root)
        .args(build)
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env("ATTN_EMBED", "0")
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "the build failed");
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), Into::into);
    let mut total = 0;
    for name in programs {
        let to = out.join(name.trim_start_matches("examples/"));
        total += fs::copy(target.join("release").join(name), to)
            .with_context(|| format!("cannot copy {name}"))?;
    }
    if images {
        for arch in ["sm_90a", "compute_80"] {
            let status = Command::new(out.join("attn-gpu"))
                .arg("images")
                .env("ATTN_CUDA_ARCH", arch)
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
