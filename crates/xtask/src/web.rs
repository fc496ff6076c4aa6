//! `cargo xtask web`: the page of crates/attn-web as a folder that any server of files can serve.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

const TARGET: &str = "wasm32-unknown-unknown";

/// Builds `target/web`: the library for wasm32 with its bindings, the page, the bundled tensors and the digests of this machine's CPU.
///
/// # Errors
/// If a build fails; that of the library says how to install the target where it is not there.
pub fn run(root: &Path) -> Result<()> {
    let cargo = |arguments: &[&str]| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root).args(arguments);
        cargo
    };
    let library = ["build", "--release", "--package", "attn-web", "--lib"];
    let status = cargo(&library)
        .args(["--target", TARGET])
        // Every browser with WebGPU has these vectors, and their results are specified to the bit.
        .env("RUSTFLAGS", "-C target-feature=+simd128")
        .env("CARGO_PROFILE_RELEASE_LTO", "fat")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .status()?;
    ensure!(
        status.success(),
        "attn-web does not compile for {TARGET}; `rustup target add {TARGET}` installs the target"
    );
    let built = target_folder(root)?;
    let out = root.join("target/web");
    let bundle = [
        "run",
        "--release",
        "--package",
        "attn-web",
        "--features",
        "bundle",
        "--bin",
        "attn-web-bundle",
        "--",
    ];
    let status = cargo(&bundle)
        .arg(built.join(TARGET).join("release/attn_web.wasm"))
        .arg(root.join("crates/attn-web/page"))
        .arg(root.join("crates/attn-cli/data/smollm2-decode.safetensors"))
        .arg(&out)
        .status()?;
    ensure!(status.success(), "the page's folder could not be made");
    for entry in fs::read_dir(&out)? {
        let entry = entry?;
        let bytes = entry.metadata()?.len();
        println!("{:>10} {}", bytes, entry.file_name().to_string_lossy());
    }
    println!(
        "serve it: python3 -m http.server --bind 127.0.0.1 --directory {}",
        out.display()
    );
    Ok(())
}

/// The folder of builds, which a variable may move.
fn target_folder(root: &Path) -> Result<std::path::PathBuf> {
    let output = Command::new(env!("CARGO"))
        .current_dir(root)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()?;
    ensure!(output.status.success(), "cargo metadata failed");
    let all: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let folder = all["target_directory"].as_str();
    Ok(folder.context("target_directory")?.into())
}
