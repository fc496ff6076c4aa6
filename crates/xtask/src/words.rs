//! `cargo xtask words`: the words of docs/architecture.md's glossary have one spelling, and the ones that they replaced are gone.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// `crates/xtask/retired-words.toml`.
#[derive(Deserialize)]
struct Retired {
    /// Beginnings of paths that are not read: they tell history.
    history: Vec<String>,
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

/// Fails if a retired word stands in a file of the repository.
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
    let mut found = Vec::new();
    for path in String::from_utf8_lossy(&listed.stdout).split('\0') {
        let skipped = path == list || retired.history.iter().any(|h| path.starts_with(h));
        if path.is_empty() || skipped {
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
    for place in &found {
        println!("{place}");
    }
    ensure!(found.is_empty(), "{} retired words", found.len());
    println!(
        "words: none of {} retired ones is left",
        retired.words.len()
    );
    Ok(())
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
