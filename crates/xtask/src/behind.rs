//! `cargo xtask behind`: which dependencies have newer versions than this repository is built with.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// The root `Cargo.toml`, as far as it is read here.
#[derive(Deserialize)]
struct Manifest {
    workspace: Workspace,
}

#[derive(Deserialize)]
struct Workspace {
    metadata: Metadata,
}

#[derive(Deserialize)]
struct Metadata {
    /// Of a dependency that stays behind: the reason.
    behind: BTreeMap<String, String>,
}

/// One line of what cargo would do.
struct Line<'a> {
    name: &'a str,
    /// The version that is built, and the newer one: `v0.9.2 -> v0.9.3`, `v0.9.2 (available: v0.11.1)`.
    versions: &'a str,
    /// Whether `cargo update` takes the newer one.
    is_allowed: bool,
}

/// Prints what `cargo update` would take, and what a requirement of this repository or of another crate keeps back.
///
/// # Errors
/// If a direct dependency has a newer version that its requirement excludes, and `[workspace.metadata.behind]` has no reason for it; if a
/// reason there is of no use any more; if cargo cannot be asked.
pub fn run(root: &Path) -> Result<()> {
    let output = Command::new(env!("CARGO"))
        .current_dir(root)
        .args(["update", "--dry-run", "--verbose", "--color", "never"])
        .output()
        .context("cannot run cargo")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo update --dry-run: {said}");
    let text = std::fs::read_to_string(root.join("Cargo.toml"))?;
    let manifest: Manifest = toml::from_str(&text).context("Cargo.toml")?;
    let faults = report(&said, &direct(root)?, &manifest.workspace.metadata.behind);
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}

/// Prints the lines, and gives the faults among them.
fn report(
    said: &str,
    direct: &BTreeSet<String>,
    reasons: &BTreeMap<String, String>,
) -> Vec<String> {
    let (mut faults, mut used) = (Vec::new(), BTreeSet::new());
    for line in said.lines().filter_map(parsed) {
        let Line { name, versions, .. } = line;
        let why = match reasons.get(name) {
            _ if line.is_allowed => "`cargo update` takes it",
            Some(reason) => {
                used.insert(name);
                reason
            }
            None if direct.contains(name) => {
                faults.push(format!(
                    "{name} {versions}: raise its requirement, or give a reason in [workspace.metadata.behind] of Cargo.toml"
                ));
                continue;
            }
            None => "other crates keep it there",
        };
        println!("{name:24} {versions:44} {why}");
    }
    let unused = reasons.keys().filter(|name| !used.contains(name.as_str()));
    faults.extend(unused.map(|name| {
        format!(
            "[workspace.metadata.behind] has a reason for {name}, which is not behind; take it out"
        )
    }));
    faults
}

/// A line about a package that is behind; `None` for others.
fn parsed(line: &str) -> Option<Line<'_>> {
    let (what, rest) = line.trim_start().split_once(' ')?;
    let (name, versions) = rest.trim_start().split_once(' ')?;
    let is_allowed = what == "Updating" && versions.contains("->");
    (is_allowed || what == "Unchanged").then_some(Line {
        name,
        versions,
        is_allowed,
    })
}

/// The packages that a crate of this repository names as a dependency.
fn direct(root: &Path) -> Result<BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .current_dir(root)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "cargo metadata failed");
    let all: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = all["packages"].as_array().into_iter().flatten();
    let dependencies = packages.filter_map(|package| package["dependencies"].as_array());
    let names = dependencies
        .flatten()
        .filter_map(|dependency| dependency["name"].as_str());
    Ok(names.map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "    Updating crates.io index
     Locking 2 packages to latest Rust 1.89 compatible versions
    Updating anyhow v1.0.104 -> v1.0.105
   Unchanged candle-core v0.9.2 (available: v0.11.1)
   Unchanged generic-array v0.14.7 (available: v0.14.9)
note: to see how you depend on a package, run `cargo tree --invert <dep>@<ver>`
";

    fn faults(reasons: &[&str]) -> Vec<String> {
        let direct = ["anyhow", "candle-core"].map(str::to_owned).into();
        let reasons = reasons
            .iter()
            .map(|name| ((*name).to_owned(), "a reason".to_owned()))
            .collect();
        report(SAID, &direct, &reasons)
    }

    #[test]
    fn a_direct_dependency_is_behind_for_a_reason_alone() {
        let found = faults(&[]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("candle-core v0.9.2 (available: v0.11.1)"),
            "{found:?}"
        );
        assert!(faults(&["candle-core"]).is_empty());
    }

    #[test]
    fn a_reason_for_what_is_not_behind_is_a_fault() {
        let found = faults(&["candle-core", "anyhow"]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("reason for anyhow"), "{found:?}");
    }
}
