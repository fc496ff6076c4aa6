//! `cargo xtask package`: what crates.io would get, built from the packages alone, and what a crate outside the workspace builds.

use std::{
    collections::BTreeSet,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The largest file that crates.io takes.
const MOST_BYTES: u64 = 10 << 20;
/// The most packages of the library with the CPU backend alone, itself included.
const MOST_PACKAGES: usize = 32;

/// A crate that is published.
struct Crate {
    name: String,
    version: String,
    /// Those of this repository that it needs, its tests left out.
    needs: Vec<String>,
}

impl Crate {
    /// The name of its package's file without the ending, and of the folder inside.
    fn folder(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }
}

/// Packages every published crate and builds all from their packages, with the examples; with `each`, each one alone, too, in the order in which
/// they are published. Checks a crate outside the workspace with each of these features of the library alone.
///
/// # Errors
/// If a package lacks something, is too large, or one does not compile.
pub fn run(root: &Path, each: bool, features: &[&str]) -> Result<()> {
    let crates = in_order(published(root)?)?;
    let mut package = cargo(root);
    package.args(["package", "--allow-dirty", "--quiet", "--no-verify"]);
    for krate in &crates {
        package.args(["--package", &krate.name]);
    }
    ensure!(package.status()?.success(), "cargo package failed");
    let unpacked = unpack(root, &crates)?;
    check(root, &unpacked, &["--workspace", "--examples"])?;
    if each {
        for krate in &crates {
            check(root, &unpacked, &["--package", &krate.name])?;
        }
    }
    for feature in features {
        outside(root, feature)?;
    }
    Ok(())
}

/// Prints the crates in the order in which they are published, one a line.
///
/// # Errors
/// If cargo cannot be asked.
pub fn order(root: &Path) -> Result<()> {
    for krate in in_order(published(root)?)? {
        println!("{}", krate.name);
    }
    Ok(())
}

fn cargo(root: &Path) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root);
    cargo
}

/// The crates of the workspace but for those that say `publish = false`.
fn published(root: &Path) -> Result<Vec<Crate>> {
    let output = cargo(root)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()?;
    ensure!(output.status.success(), "cargo metadata failed");
    let all: Value = serde_json::from_slice(&output.stdout)?;
    let packages = all["packages"].as_array().context("packages")?;
    let text = |value: &Value| value.as_str().map(str::to_owned).context("a text");
    let taken = packages
        .iter()
        .filter(|package| package["publish"].is_null());
    taken
        .map(|package| {
            let dependencies = package["dependencies"].as_array().into_iter().flatten();
            let needs = dependencies.filter(|d| !d["path"].is_null() && d["kind"] != "dev");
            Ok(Crate {
                name: text(&package["name"])?,
                version: text(&package["version"])?,
                needs: needs.map(|d| text(&d["name"])).collect::<Result<_>>()?,
            })
        })
        .collect()
}

/// Each behind all that it needs.
fn in_order(mut left: Vec<Crate>) -> Result<Vec<Crate>> {
    let mut done: Vec<Crate> = Vec::new();
    while !left.is_empty() {
        let is_ready = |krate: &Crate| {
            krate
                .needs
                .iter()
                .all(|n| done.iter().any(|d| d.name == *n))
        };
        let Some(next) = left.iter().position(is_ready) else {
            let names: Vec<_> = left.iter().map(|krate| &krate.name[..]).collect();
            bail!(
                "{} cannot be published: each needs another, or a crate with `publish = false`",
                names.join(", ")
            );
        };
        let ready = left.remove(next);
        done.push(ready);
    }
    Ok(done)
}

/// Unpacks the packages beside each other, as one workspace in which each takes the others' packages for those of crates.io.
fn unpack(root: &Path, crates: &[Crate]) -> Result<PathBuf> {
    let (packed, unpacked) = (
        root.join("target/package"),
        root.join("target/from-packages"),
    );
    let _ = fs::remove_dir_all(&unpacked);
    fs::create_dir_all(&unpacked)?;
    let mut manifest = "[workspace]\nresolver = \"3\"\nmembers = [\"*-*.*.*\"]\n\n".to_owned();
    manifest.push_str("[patch.crates-io]\n");
    for krate in crates {
        let folder = krate.folder();
        let file = packed.join(format!("{folder}.crate"));
        let bytes = fs::metadata(&file)
            .with_context(|| format!("no {}", file.display()))?
            .len();
        println!("{folder:28} {:6} KiB", bytes >> 10);
        ensure!(
            bytes < MOST_BYTES,
            "crates.io takes at most {MOST_BYTES} bytes"
        );
        // Packages say of all files that they are of one day, by which cargo would take changed ones for those that it has compiled.
        let tar = Command::new("tar")
            .arg("-xmzf")
            .arg(&file)
            .arg("-C")
            .arg(&unpacked)
            .status();
        ensure!(
            tar.context("cannot run tar")?.success(),
            "tar refuses {folder}"
        );
        // The package has a lock file of its own, which a member of a workspace has not.
        let _ = fs::remove_file(unpacked.join(&folder).join("Cargo.lock"));
        writeln!(manifest, "{} = {{ path = {folder:?} }}", krate.name)?;
    }
    fs::write(unpacked.join("Cargo.toml"), manifest)?;
    // The versions that this repository is tested with.
    fs::copy(root.join("Cargo.lock"), unpacked.join("Cargo.lock"))?;
    Ok(unpacked)
}

/// Has the compiler check what was unpacked. Dependencies are those that the workspace's lints have checked already.
fn check(root: &Path, unpacked: &Path, what: &[&str]) -> Result<()> {
    let start = Instant::now();
    let status = cargo(unpacked)
        .args(["check", "--release", "--quiet"])
        .args(what)
        .env("CARGO_TARGET_DIR", root.join("target"))
        .status()?;
    let what = what.join(" ");
    ensure!(
        status.success(),
        "what crates.io would get does not compile: cargo check {what} in {}",
        unpacked.display()
    );
    println!(
        "from the packages, {what}: checked in {:.0} s",
        start.elapsed().as_secs_f64()
    );
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

#[cfg(test)]
mod tests {
    use super::*;

    fn krate(name: &str, needs: &[&str]) -> Crate {
        Crate {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            needs: needs.iter().map(|&need| need.to_owned()).collect(),
        }
    }

    #[test]
    fn a_crate_is_published_behind_what_it_needs() {
        let crates = vec![
            krate("program", &["library", "core"]),
            krate("library", &["core"]),
            krate("core", &[]),
        ];
        let names: Vec<_> = in_order(crates)
            .unwrap()
            .into_iter()
            .map(|krate| krate.name)
            .collect();
        assert_eq!(names, ["core", "library", "program"]);
    }

    #[test]
    fn a_crate_that_needs_an_unpublished_one_is_refused_by_name() {
        let crates = vec![krate("core", &[]), krate("library", &["secret"])];
        let error = in_order(crates).err().map(|error| error.to_string());
        assert!(
            error
                .as_ref()
                .is_some_and(|e| e.starts_with("library cannot be published")),
            "{error:?}"
        );
    }
}
