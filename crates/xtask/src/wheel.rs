//! `cargo xtask wheel`: the Python package as a wheel that runs where there is neither Rust nor CUDA's toolkit.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

/// The largest wheel, in bytes.
const MOST_BYTES: u64 = 15_000_000;
/// The oldest C library that the wheel runs with: that of RHEL 8, Debian 10 and Ubuntu 20.04.
const COMPATIBILITY: &str = "manylinux_2_28";

/// Builds the wheel into `target/wheels`, with the CUDA images of the presets where NVRTC is found.
///
/// # Errors
/// If maturin or zig is not there, the build fails, or the wheel is too large.
pub fn run(root: &Path) -> Result<()> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    for module in ["maturin", "ziglang"] {
        let found = Command::new(&python)
            .args([
                "-m",
                module,
                if module == "maturin" {
                    "--version"
                } else {
                    "version"
                },
            ])
            .output();
        ensure!(
            found.is_ok_and(|output| output.status.success()),
            "{python} has no {module}; run `{python} -m pip install maturin ziglang`, or name another Python in PYTHON"
        );
    }
    let folder = root.join("target/wheels");
    let _ = fs::remove_dir_all(&folder);
    let status = Command::new(&python)
        // Maturin searches zig by this Python.
        .env("CARGO_ZIGBUILD_PYTHON_PATH", &python)
        .args([
            "-m",
            "maturin",
            "build",
            "--release",
            "--strip",
            "--zig",
            "--compatibility",
            COMPATIBILITY,
        ])
        .arg("--manifest-path")
        .arg(root.join("crates/attn-python/Cargo.toml"))
        .arg("--out")
        .arg(&folder)
        .status()?;
    ensure!(status.success(), "maturin failed");
    let wheel = only_file(&folder)?;
    let bytes = fs::metadata(&wheel)?.len();
    println!("{}: {:.1} MB", wheel.display(), bytes as f64 / 1e6);
    ensure!(bytes < MOST_BYTES, "a wheel has at most {MOST_BYTES} bytes");
    Ok(())
}

fn only_file(folder: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))?;
    let paths: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    match &paths[..] {
        [wheel] => Ok(wheel.clone()),
        _ => bail!(
            "{} holds {} files, not one wheel",
            folder.display(),
            paths.len()
        ),
    }
}
