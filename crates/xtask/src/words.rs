//! `cargo xtask words`: the words that docs/architecture.md's glossary has replaced are gone, docs/variables.md has every variable, and
//! what the documents name or link to exists.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// `crates/xtask/retired-words.toml`.
#[derive(Deserialize)]
struct Retired {
    /// Beginnings of paths that are not read: they tell history.
    history: Vec<String>,
    /// Files and folders that documents name and the repository does not hold.
    outside: Vec<String>,
    words: Vec<Word>,
}

#[derive(Deserialize)]
struct Word {
    /// A whole identifier, or several words of prose.
    old: String,
    /// The word to use instead.
    new: String,
    /// Beginnings of the paths that are read; everything by default.
    #[serde(default)]
    within: Vec<String>,
}

/// Fails if a retired word stands in a file of the repository, code names a variable that the documents do not, or a document names a
/// file that is not there.
///
/// # Errors
/// With every place, or if git or a file cannot be read.
pub fn run(root: &Path) -> Result<()> {
    let list = "crates/xtask/retired-words.toml";
    let text = fs::read_to_string(root.join(list)).with_context(|| format!("no {list}"))?;
    let retired: Retired = toml::from_str(&text).with_context(|| format!("{list} is damaged"))?;
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root)
        .output()
        .context("cannot run git")?;
    ensure!(listed.status.success(), "git does not list the files");
    let listed = String::from_utf8_lossy(&listed.stdout);
    let files: Vec<&str> = listed.split('\0').filter(|path| !path.is_empty()).collect();
    let mut found = Vec::new();
    for &path in &files {
        if path == list || retired.history.iter().any(|h| path.starts_with(h)) {
            continue;
        }
        // Binary files have no words; deleted ones are not there.
        let Ok(content) = fs::read_to_string(root.join(path)) else {
            continue;
        };
        for word in &retired.words {
            if word.applies_to(path) {
                found.extend(word.places(path, &content));
            }
        }
    }
    found.extend(undocumented(root, &files)?);
    found.extend(crate::paths::missing(root, &files, &retired.outside));
    found.extend(crate::bugs::missing(root, &files));
    for place in &found {
        println!("{place}");
    }
    ensure!(
        found.is_empty(),
        "{} retired words, undocumented variables, or paths and tests that do not exist",
        found.len()
    );
    println!(
        "words: none of {} retired ones is left",
        retired.words.len()
    );
    Ok(())
}

/// The page that lists every environment variable.
const VARIABLES: &str = "docs/variables.md";
/// Files whose `ATTN_` names are not variables of the environment: macros of CUDA kernels, and the tests below.
const OTHER_NAMES: [&str; 3] = [
    "kernels/src/cuda/instance.rs",
    "kernels/tests/cuda_sources.rs",
    "crates/xtask/src/words.rs",
];

/// A line for each variable that Rust code names and [`VARIABLES`] does not.
fn undocumented(root: &Path, files: &[&str]) -> Result<Vec<String>> {
    let page = fs::read_to_string(root.join(VARIABLES))
        .with_context(|| format!("cannot read {VARIABLES}"))?;
    let mut missing = Vec::new();
    for path in files {
        if !path.ends_with(".rs") || OTHER_NAMES.contains(path) {
            continue;
        }
        let Ok(content) = fs::read_to_string(root.join(path)) else {
            continue;
        };
        let unknown = variables(&content).filter(|name| !page.contains(&format!("`{name}`")));
        missing.extend(unknown.map(|name| format!("{path}: {name} is not in {VARIABLES}")));
    }
    Ok(missing)
}

/// The string literals of Rust code that are names of this project's variables.
fn variables(code: &str) -> impl Iterator<Item = &str> {
    let is_name = |text: &&str| {
        let rest = text.strip_prefix("ATTN_").unwrap_or_default();
        !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_uppercase() || b == b'_')
    };
    code.split('"').skip(1).filter(is_name)
}

impl Word {
    fn applies_to(&self, path: &str) -> bool {
        self.within.is_empty() || self.within.iter().any(|w| path.starts_with(w))
    }

    /// A line for each line that has the word.
    fn places(&self, path: &str, content: &str) -> Vec<String> {
        let lines = content.lines().enumerate();
        lines
            .filter(|(_, line)| has_word(line, &self.old))
            .map(|(i, _)| format!("{path}:{}: `{}`; use `{}`", i + 1, self.old, self.new))
            .collect()
    }
}

/// Whether `word` stands in the line with no letter, digit or underscore on either side.
fn has_word(line: &str, word: &str) -> bool {
    let inside = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word).any(|(at, _)| {
        !inside(line[..at].chars().next_back()) && !inside(line[at + word.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_words_are_found_and_parts_of_words_are_not() {
        assert!(has_word("x = blur(y)", "blur"));
        assert!(has_word("as the odd says", "the odd"));
        for line in ["blurred", "unblur", "re_blur", "the odds", "bathe odd"] {
            assert!(
                !has_word(line, "blur") && !has_word(line, "the odd"),
                "{line}"
            );
        }
        assert!(has_word("blurred, then blur", "blur"));
    }

    #[test]
    fn variables_are_whole_literals() {
        let code =
            r#"var("ATTN_ONE"); "ATTN_two"; x("-DATTN_THREE=1"); f("ATTN_"); g("ATTN_FOUR_B")"#;
        let names: Vec<_> = variables(code).collect();
        assert_eq!(names, ["ATTN_ONE", "ATTN_FOUR_B"]);
    }

    #[test]
    fn words_are_looked_for_where_they_are_retired() {
        let word = Word {
            old: "slot".to_owned(),
            new: "partial".to_owned(),
            within: vec!["kernels/cuda/".to_owned()],
        };
        assert!(word.applies_to("kernels/cuda/a.cuh") && !word.applies_to("crates/a.rs"));
        let places = word.places("a", "slot\nslots\n a slot b slot");
        assert_eq!(
            places,
            ["a:1: `slot`; use `partial`", "a:3: `slot`; use `partial`"]
        );
    }
}
