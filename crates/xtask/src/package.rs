//! `cargo xtask package`: what crates.io would get, and what a crate outside the workspace builds.

use std::{collections::BTreeSet, fs, path::Path, process::Command, time::Instant};

use anyhow::{Context, Result, bail, ensure};

/// Crates that stay in the repository.
const UNPUBLISHED: [&str; 5] = ["attn-c", "attn-fuzz", "attn-images", "attn-python", "xtask"];
/// The largest file that crates.io takes.
const MOST_BYTES: u64 = 10 << 20;
/// The most packages of the library with the CPU backend alone, itself included.
const MOST_PACKAGES: usize = 32;

/// Packages every published crate, and checks a crate outside the workspace with each of these features of the library alone.
///
/// # Errors
/// If a package lacks something, is too large, or the crate outside does not compile.
pub fn run(root: &Path, verify: bool, features: &[&str]) -> Result<()> {
    let mut package = cargo(root);
    package.args(["package", "--workspace", "--allow-dirty", "--quiet"]);
    for name in UNPUBLISHED {
        package.args(["--exclude", name]);
    }
    if !verify {
        package.arg("--no-verify");
    }
    ensure!(package.status()?.success(), "cargo package failed");
    sizes(&root.join("target/package"))?;
    for feature in features {
        outside(root, feature)?;
    }
    Ok(())
}

fn cargo(root: &Path) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root);
    cargo
}

fn sizes(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        if Path::new(&name).extension().is_some_and(|e| e == "crate") {
            let bytes = entry.metadata()?.len();
            println!("{:40} {:8} KiB", name.to_string_lossy(), bytes >> 10);
            ensure!(
                bytes < MOST_BYTES,
                "crates.io takes at most {MOST_BYTES} bytes"
            );
        }
    }
    Ok(())
}

/// A crate with one dependency: the library with one feature.
fn outside(root: &Path, feature: &str) -> Result<()> {
    let folder = root.join("target/outside").join(feature);
    fs::create_dir_all(folder.join("src"))?;
    let library = root.join("crates/attn").canonicalize()?;
    fs::write(
        folder.join("Cargo.toml"),
        format!(
            "[package]\nname = \"outside-{feature}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
             attn = {{ package = \"attn-kv\", path = {library:?}, default-features = false, features = [{feature:?}] }}\n"
        ),
    )?;
    fs::write(
        folder.join("src/main.rs"),
        "fn main() {\n    for id in attn::BackendId::ALL {\n        match attn::open(id) {\n            \
         Ok(backend) => println!(\"{id}: {}\", backend.device().name),\n            \
         Err(reason) => println!(\"{reason}\"),\n        }\n    }\n}\n",
    )?;
    // The versions that this repository is tested with.
    fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
    let packages = packages(&folder)?;
    let start = Instant::now();
    let mut check = cargo(&folder);
    // The workspace has checked most dependencies in this folder already.
    check.args(["check", "--release", "--quiet"]);
    check.env("CARGO_TARGET_DIR", root.join("target"));
    let status = check.status()?;
    ensure!(
        status.success(),
        "a crate with the feature {feature} alone does not compile"
    );
    println!(
        "outside, feature {feature}: {packages} packages, checked in {:.0} s",
        start.elapsed().as_secs_f64()
    );
    if feature == "cpu" {
        ensure!(
            packages <= MOST_PACKAGES,
            "the library with cpu has more than {MOST_PACKAGES} packages"
        );
    }
    Ok(())
}

/// The number of packages that the crate in `folder` is built from, without itself.
fn packages(folder: &Path) -> Result<usize> {
    let arguments = [
        "tree",
        "--edges",
        "normal,build",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ];
    let output = cargo(folder).args(arguments).output()?;
    if !output.status.success() {
        bail!("cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let names: BTreeSet<_> = text.lines().map(|l| l.trim_end_matches(" (*)")).collect();
    Ok(names.len() - 1)
}
