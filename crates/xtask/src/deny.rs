//! `cargo xtask deny`: holds every dependency to `deny.toml`, by `cargo metadata` of the committed `Cargo.lock`.
//!
//! Licences, sources, wildcards and doubles, as cargo-deny has them; advisories are cargo-deny's alone (`deny.toml` says why). A
//! setting that this program does not know how to follow is an error, so the file cannot say what nobody checks.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use spdx::{Expression, ParseMode};
use toml::Table;

/// What `deny.toml` allows.
struct Policy {
    licences: BTreeSet<String>,
    /// Licences of one crate alone, by its name.
    exceptions: BTreeMap<String, BTreeSet<String>>,
    registries: BTreeSet<String>,
    /// `name@version` of doubles that are known.
    skips: BTreeSet<String>,
}

/// One package of the graph.
struct Package {
    name: String,
    version: String,
    licence: Option<String>,
    /// `None` for a path.
    source: Option<String>,
    /// Names of dependencies from a registry that take any version.
    wildcards: Vec<String>,
}

/// Settings that must have these values.
const FIXED: [(&str, &str, &str); 4] = [
    ("sources", "unknown-registry", "deny"),
    ("sources", "unknown-git", "deny"),
    ("bans", "multiple-versions", "deny"),
    ("bans", "wildcards", "deny"),
];

/// Reads `deny.toml` and the graph, prints what is not allowed, and fails if there is anything.
pub fn run(root: &Path) -> Result<()> {
    let path = root.join("deny.toml");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let policy = Policy::parse(&text).context("deny.toml")?;
    let packages = packages(root)?;
    let found = policy.finds(&packages);
    for find in &found {
        println!("deny: {find}");
    }
    ensure!(
        found.is_empty(),
        "{} of the dependencies' properties are not allowed; change Cargo.toml, or deny.toml with a reason",
        found.len()
    );
    println!(
        "deny: {} packages, {} known doubles: licences, sources and versions are allowed (advisories: see deny.toml)",
        packages.len(),
        policy.skips.len()
    );
    Ok(())
}

fn packages(root: &Path) -> Result<Vec<Package>> {
    let output = Command::new(env!("CARGO"))
        .current_dir(root)
        .args([
            "metadata",
            "--format-version",
            "1",
            "--locked",
            "--all-features",
        ])
        .output()
        .context("cannot run cargo metadata")?;
    ensure!(
        output.status.success(),
        "cargo metadata failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let graph: Value = serde_json::from_slice(&output.stdout)?;
    let packages = graph["packages"].as_array().context("no packages")?;
    packages.iter().map(Package::of).collect()
}

impl Package {
    fn of(package: &Value) -> Result<Self> {
        let text = |key: &str| package[key].as_str().map(str::to_owned);
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        Ok(Package {
            name: text("name").context("a package without a name")?,
            version: text("version").context("a package without a version")?,
            licence: text("license"),
            source: text("source"),
            wildcards: dependencies
                .filter(|d| d["req"] == "*" && d["path"].is_null())
                .map(|d| d["name"].as_str().unwrap_or("?").to_owned())
                .collect(),
        })
    }

    fn id(&self) -> String {
        format!("{}@{}", self.name, self.version)
    }
}

/// A list of texts below `section`.
fn texts(table: &Table, section: &str, key: &str) -> Result<BTreeSet<String>> {
    let list = table.get(section).and_then(|s| s.get(key)?.as_array());
    let list = list.with_context(|| format!("[{section}] has no list {key}"))?;
    list.iter()
        .map(|text| {
            let text = text.as_str();
            text.map(str::to_owned)
                .with_context(|| format!("[{section}] {key} has an entry that is no text"))
        })
        .collect()
}

/// Licences that one crate alone may have.
fn exceptions(table: &Table) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let list = table.get("licenses").and_then(|s| s.get("exceptions"));
    let list = list.and_then(|list| list.as_array());
    let one = |entry: &toml::Value| {
        let name = entry.get("crate").and_then(|name| name.as_str());
        let allow = entry.get("allow").and_then(|allow| allow.as_array());
        let allow: Option<BTreeSet<String>> = allow
            .into_iter()
            .flatten()
            .map(|licence| licence.as_str().map(str::to_owned))
            .collect();
        match (name, allow) {
            (Some(name), Some(allow)) if !allow.is_empty() => Ok((name.to_owned(), allow)),
            _ => bail!(
                "[licenses] exceptions takes {{ crate = \"name\", allow = [\"…\"] }}, not {entry:?}"
            ),
        }
    };
    list.into_iter().flatten().map(one).collect()
}

impl Policy {
    fn parse(text: &str) -> Result<Self> {
        let table: Table = text.parse()?;
        for (section, key, value) in FIXED {
            let given = table.get(section).and_then(|s| s.get(key)?.as_str());
            ensure!(
                given == Some(value),
                "[{section}] {key} must be {value:?}, which is all that `cargo xtask deny` follows"
            );
        }
        let git = texts(&table, "sources", "allow-git")?;
        ensure!(git.is_empty(), "[sources] allow-git must be empty");
        let skips = table.get("bans").and_then(|s| s.get("skip")?.as_array());
        let mut known = BTreeSet::new();
        for skip in skips.into_iter().flatten() {
            let id = skip.get("crate").and_then(|c| c.as_str());
            let reason = skip.get("reason").and_then(|r| r.as_str());
            match (id, reason) {
                (Some(id), Some(reason)) if id.contains('@') && !reason.is_empty() => {
                    known.insert(id.to_owned());
                }
                _ => bail!(
                    "[bans] skip takes {{ crate = \"name@version\", reason = \"…\" }}, not {skip:?}"
                ),
            }
        }
        Ok(Policy {
            licences: texts(&table, "licenses", "allow")?,
            exceptions: exceptions(&table)?,
            registries: texts(&table, "sources", "allow-registry")?,
            skips: known,
        })
    }

    /// Everything that is not allowed, in words.
    fn finds(&self, packages: &[Package]) -> Vec<String> {
        let mut finds = Vec::new();
        for package in packages {
            finds.extend(self.licence(package));
            finds.extend(self.source(package));
            for name in &package.wildcards {
                finds.push(format!("{} takes any version of {name}", package.id()));
            }
        }
        finds.extend(self.doubles(packages));
        finds
    }

    fn licence(&self, package: &Package) -> Option<String> {
        let Some(text) = &package.licence else {
            return Some(format!("{} names no licence", package.id()));
        };
        let own = self.exceptions.get(&package.name);
        let is_allowed = |licence: &str| {
            self.licences.contains(licence) || own.is_some_and(|own| own.contains(licence))
        };
        match Expression::parse_mode(text, ParseMode::LAX) {
            Ok(licence) if licence.evaluate(|l| is_allowed(&l.to_string())) => None,
            Ok(_) => Some(format!("{} has licence {text}", package.id())),
            Err(error) => Some(format!("{} has licence {text}: {error}", package.id())),
        }
    }

    fn source(&self, package: &Package) -> Option<String> {
        let source = package.source.as_ref()?;
        let registry = source.strip_prefix("registry+");
        if registry.is_some_and(|url| self.registries.contains(url)) {
            return None;
        }
        Some(format!("{} comes from {source}", package.id()))
    }

    /// Crates of several versions, all but one of which have to be known; and those known that are no doubles.
    fn doubles(&self, packages: &[Package]) -> Vec<String> {
        let mut versions: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for package in packages {
            versions
                .entry(&package.name)
                .or_default()
                .push(package.id());
        }
        versions.retain(|_, ids| ids.len() > 1);
        let doubles: BTreeSet<&String> = versions.values().flatten().collect();
        let mut finds = Vec::new();
        for ids in versions.values() {
            let unknown = ids.iter().filter(|id| !self.skips.contains(*id)).count();
            if unknown > 1 {
                let all = ids.join(", ");
                finds.push(format!(
                    "{unknown} versions of a crate beside [bans] skip: {all}"
                ));
            }
        }
        let useless = self.skips.iter().filter(|id| !doubles.contains(id));
        finds.extend(useless.map(|id| format!("[bans] skip has {id}, which is no double")));
        finds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = r#"
        [licenses]
        allow = ["MIT", "Apache-2.0 WITH LLVM-exception"]
        exceptions = [{ crate = "c", allow = ["MPL-2.0"] }]
        [sources]
        unknown-registry = "deny"
        unknown-git = "deny"
        allow-registry = ["https://github.com/rust-lang/crates.io-index"]
        allow-git = []
        [bans]
        multiple-versions = "deny"
        wildcards = "deny"
        skip = [{ crate = "a@1.0.0", reason = "b has it" }]
    "#;

    fn package(name: &str, version: &str, licence: &str, source: Option<&str>) -> Package {
        Package {
            name: name.into(),
            version: version.into(),
            licence: Some(licence.into()),
            source: source.map(str::to_owned),
            wildcards: Vec::new(),
        }
    }

    const CRATES_IO: Option<&str> = Some("registry+https://github.com/rust-lang/crates.io-index");

    /// The double that the policy knows.
    fn known() -> Vec<Package> {
        ["1.0.0", "2.0.0"]
            .map(|version| package("a", version, "MIT", CRATES_IO))
            .into()
    }

    fn finds(more: Package) -> Vec<String> {
        let mut packages = known();
        packages.push(more);
        Policy::parse(POLICY).unwrap().finds(&packages)
    }

    #[test]
    fn allowed_packages_pass() {
        let policy = Policy::parse(POLICY).unwrap();
        assert_eq!(policy.finds(&known()), Vec::<String>::new());
        for licence in [
            "GPL-3.0-only OR MIT",
            "Apache-2.0 WITH LLVM-exception",
            "MIT/Zlib",
            "MIT AND MIT",
        ] {
            assert!(
                finds(package("b", "1.0.0", licence, CRATES_IO)).is_empty(),
                "{licence}"
            );
        }
        assert!(
            finds(package("b", "1.0.0", "MIT", None)).is_empty(),
            "a path"
        );
    }

    #[test]
    fn other_licences_and_none_are_found() {
        for licence in [
            "GPL-3.0-only",
            "MIT AND GPL-3.0-only",
            "Apache-2.0",
            "Nonsense-1.0",
            "",
        ] {
            let found = finds(package("b", "1.0.0", licence, CRATES_IO));
            assert_eq!(found.len(), 1, "{licence}: {found:?}");
        }
        assert!(finds(package("c", "1.0.0", "MPL-2.0", CRATES_IO)).is_empty());
        assert_eq!(finds(package("b", "1.0.0", "MPL-2.0", CRATES_IO)).len(), 1);
        let mut none = package("b", "1.0.0", "", CRATES_IO);
        none.licence = None;
        assert_eq!(finds(none), ["b@1.0.0 names no licence"]);
    }

    #[test]
    fn other_sources_are_found() {
        for source in [
            "git+https://github.com/rust-lang/crates.io-index",
            "registry+https://example.org/index",
            "sparse+https://example.org/",
        ] {
            let found = finds(package("b", "1.0.0", "MIT", Some(source)));
            assert_eq!(found, [format!("b@1.0.0 comes from {source}")]);
        }
    }

    #[test]
    fn wildcards_and_new_or_missing_doubles_are_found() {
        let mut any = package("b", "1.0.0", "MIT", CRATES_IO);
        any.wildcards = vec!["c".into()];
        assert_eq!(finds(any), ["b@1.0.0 takes any version of c"]);
        let third = finds(package("a", "3.0.0", "MIT", CRATES_IO));
        assert_eq!(
            third,
            ["2 versions of a crate beside [bans] skip: a@1.0.0, a@2.0.0, a@3.0.0"]
        );
        let alone = Policy::parse(POLICY).unwrap().finds(&known()[1..]);
        assert_eq!(alone, ["[bans] skip has a@1.0.0, which is no double"]);
    }

    #[test]
    fn a_policy_that_nobody_follows_is_refused() {
        for (section, key, _) in FIXED {
            let other = POLICY.replace(&format!("{key} = \"deny\""), &format!("{key} = \"warn\""));
            assert!(Policy::parse(&other).is_err(), "[{section}] {key}");
        }
        assert!(Policy::parse(&POLICY.replace(", reason = \"b has it\"", "")).is_err());
        assert!(
            Policy::parse(&POLICY.replace("allow-git = []", "allow-git = [\"https://x\"]"))
                .is_err()
        );
    }
}
