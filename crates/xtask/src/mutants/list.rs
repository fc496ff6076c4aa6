//! `mutants.toml`: the files with mutants, the tests that may notice them, and the mutants that are left out.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::Key;

/// The committed list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// Files with mutants.
    pub files: Vec<String>,
    /// What `cargo test` is told to build, once for each group.
    pub programs: Vec<Vec<String>>,
    /// Optimization of packages that take long to compile.
    pub opt_levels: BTreeMap<String, u8>,
    /// Parts of the names of tests that do not run.
    pub without_tests: Vec<String>,
    /// Mutants that are left out.
    #[serde(default)]
    pub skip: Vec<Skip>,
}

/// Mutants that no test can notice, with the reason.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Skip {
    /// The file.
    pub file: String,
    /// The function, with the type of a method.
    pub function: String,
    /// A part of `original -> mutated`; all of the function's mutants if it is empty.
    pub text: String,
    /// Which of several equal ones in the function, from 1; all of them without it.
    pub nth: Option<u64>,
    /// Why no test can notice them.
    pub reason: String,
}

impl Skip {
    /// Whether it means a mutant.
    pub fn covers(&self, (file, function, from, to, nth): &Key) -> bool {
        self.file == *file
            && self.function == *function
            && format!("{from} -> {to}").contains(&self.text)
            && self.nth.is_none_or(|only| only == *nth)
    }
}

/// Reads the list and sees that its files are there.
///
/// # Errors
/// If it cannot be read, or names a file that is not there.
pub fn read(root: &Path) -> Result<List> {
    let path = root.join("crates/xtask/mutants.toml");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let list: List = toml::from_str(&text).with_context(|| format!("in {}", path.display()))?;
    for file in &list.files {
        ensure!(
            root.join(file).is_file(),
            "mutants.toml names {file}, which is not there; remove it from `files`"
        );
    }
    for skip in &list.skip {
        ensure!(
            list.files.contains(&skip.file) && !skip.reason.is_empty(),
            "mutants.toml: the skip in {}, {}, needs a file of `files` and a reason",
            skip.file,
            skip.function
        );
    }
    Ok(list)
}

/// Whether a path matches a pattern in which `*` stands for any text; a pattern without one matches inside the path.
pub fn matches(pattern: &str, path: &str) -> bool {
    let parts: Vec<&str> = pattern.split('*').collect();
    let [first, middle @ .., last] = &parts[..] else {
        return path.contains(pattern);
    };
    let Some(mut rest) = path.strip_prefix(first) else {
        return false;
    };
    for part in middle {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text() {
        let path = "crates/attn-core/src/quant.rs";
        for pattern in ["quant", "crates/*/quant.rs", "crates/attn-core/*", "*"] {
            assert!(matches(pattern, path), "{pattern}");
        }
        for pattern in ["state", "*/state.rs", "attn-core/*"] {
            assert!(!matches(pattern, path), "{pattern}");
        }
    }
}
