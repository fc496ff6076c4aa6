//! `cargo xtask fuzz`: builds the fuzzers with checks of overflow and assertions, and the program that one of them starts.

use std::{env, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

/// Builds and starts the fuzzers with the options of `attn_fuzz::driver::Options`; whether they found nothing.
pub fn fuzz(options: &[String]) -> Result<bool> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), Into::into);
    for build in [
        ["--profile", "fuzz", "--package", "attn-fuzz"],
        ["--profile", "release", "--package", "attn-cli"],
    ] {
        let status = Command::new(env!("CARGO"))
            .current_dir(&root)
            .arg("build")
            .args(build)
            .status()
            .context("cannot run cargo")?;
        ensure!(status.success(), "the build failed");
    }
    let status = Command::new(target.join("fuzz/attn-fuzz"))
        .args(options)
        .env("ATTN_BIN", target.join("release/attn"))
        .status()
        .context("cannot start attn-fuzz")?;
    ensure!(
        matches!(status.code(), Some(0 | 1)),
        "the fuzzers did not run: {status}"
    );
    Ok(status.success())
}
