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
/// Its minor version.
const OLDEST_MINOR: u32 = 28;

/// Builds the wheel for this machine into `target/wheels`, with the CUDA images of the presets where NVRTC is found, or the one for `target` (`aarch64`, on Linux)
/// into `target/wheels-aarch64`, and has auditwheel hold it to the oldest C library.
///
/// # Errors
/// For another target; if maturin, zig or auditwheel is not there, the build fails, or the wheel is too large or needs more of a system.
pub fn run(root: &Path, target: Option<&str>) -> Result<()> {
    let (triple, folder) = match target {
        None => (None, "target/wheels"),
        Some("aarch64") => (Some("aarch64-unknown-linux-gnu"), "target/wheels-aarch64"),
        Some(other) => bail!("wheel --target {other}; allowed: aarch64"),
    };
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    for [module, version] in [
        ["maturin", "--version"],
        ["ziglang", "version"],
        ["auditwheel", "--version"],
    ] {
        let found = Command::new(&python).args(["-m", module, version]).output();
        ensure!(
            found.is_ok_and(|output| output.status.success()),
            "{python} has no {module}; run `{python} -m pip install maturin ziglang auditwheel`, or name another Python in PYTHON"
        );
    }
    let folder = root.join(folder);
    let _ = fs::remove_dir_all(&folder);
    let mut maturin = Command::new(&python);
    maturin
        // Maturin searches zig by this Python.
        .env("CARGO_ZIGBUILD_PYTHON_PATH", &python)
        .args(["-m", "maturin", "build", "--release", "--strip", "--zig"])
        .args(["--compatibility", COMPATIBILITY])
        .arg("--manifest-path")
        .arg(root.join("crates/attn-python/Cargo.toml"))
        .arg("--out")
        .arg(&folder);
    if let Some(triple) = triple {
        maturin.args(["--target", triple]);
    }
    ensure!(maturin.status()?.success(), "maturin failed");
    let wheel = only_file(&folder)?;
    let bytes = fs::metadata(&wheel)?.len();
    println!("{}: {:.1} MB", wheel.display(), bytes as f64 / 1e6);
    ensure!(bytes < MOST_BYTES, "a wheel has at most {MOST_BYTES} bytes");
    audit(&python, &wheel)
}

/// Has auditwheel say which C library a wheel needs, and that it needs no other library.
fn audit(python: &str, wheel: &Path) -> Result<()> {
    let output = Command::new(python)
        .args(["-m", "auditwheel", "show"])
        .arg(wheel)
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout).replace('\n', " ");
    ensure!(
        output.status.success(),
        "auditwheel: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    println!("{}", said.trim());
    let minor = consistent_with(&said).with_context(|| {
        format!(
            "auditwheel finds no manylinux that {} fits",
            wheel.display()
        )
    })?;
    ensure!(
        minor <= OLDEST_MINOR,
        "the wheel needs glibc 2.{minor}; it is to run with 2.{OLDEST_MINOR}"
    );
    Ok(())
}

/// The minor version of glibc of the tag that a wheel is consistent with, in auditwheel's words.
fn consistent_with(said: &str) -> Option<u32> {
    let (_, tag) =
        said.split_once("is consistent with the following platform tag: \"manylinux_2_")?;
    tag.split('_').next()?.parse().ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_that_auditwheel_finds_counts_and_not_the_files_name() {
        let said = |tag: &str| {
            format!(
                "a-cp310-abi3-manylinux_2_28_x86_64.whl is consistent with the following platform tag: \"{tag}\"."
            )
        };
        assert_eq!(consistent_with(&said("manylinux_2_17_x86_64")), Some(17));
        assert_eq!(consistent_with(&said("manylinux_2_34_aarch64")), Some(34));
        assert_eq!(consistent_with(&said("linux_x86_64")), None);
    }
}
