//! For `cargo xtask words`: files and folders that the documents name in backticks, or link to, exist.

use std::{collections::BTreeSet, fs, path::Path};

/// Endings by which a name in backticks is a file of the repository.
const ENDINGS: [&str; 16] = [
    "c", "cpp", "csv", "cu", "cuh", "h", "hpp", "json", "md", "py", "pyi", "rs", "sh", "svg",
    "toml", "wgsl",
];

/// A line for each path that a document names and the repository lacks; `outside` are names that are no part of the repository.
pub fn missing(root: &Path, files: &[&str], outside: &[String]) -> Vec<String> {
    let paths = Paths::new(files);
    let is_document = |path: &&&str| path.ends_with(".md") && **path != "CHANGELOG.md";
    let mut found = Vec::new();
    for document in files.iter().filter(is_document) {
        let Ok(text) = fs::read_to_string(root.join(document)) else {
            continue;
        };
        for (line, name) in named(&text) {
            if !outside.iter().any(|o| o == name) && !paths.has(name) {
                found.push(format!("{document}:{line}: there is no `{name}`"));
            }
        }
        for (line, target) in links(&text) {
            if !paths.has_target(document, target) {
                found.push(format!("{document}:{line}: the link leads to no {target}"));
            }
        }
    }
    found
}

/// The repository's files and the folders that they are in.
struct Paths(BTreeSet<String>);

impl Paths {
    fn new(files: &[&str]) -> Self {
        let mut all = BTreeSet::new();
        for file in files {
            let parents = Path::new(file).ancestors().filter_map(Path::to_str);
            all.extend(parents.map(str::to_owned));
        }
        Paths(all)
    }

    /// Whether a path is `name`, or ends with it: documents leave out what their context says.
    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|path| is_named(path, name))
    }

    /// Whether a link of a document leads to a path.
    fn has_target(&self, document: &str, target: &str) -> bool {
        let mut parts: Vec<&str> = document.split('/').collect();
        parts.pop();
        for part in target.split('/') {
            match part {
                "." | "" => {}
                ".." if parts.is_empty() => return false,
                ".." => _ = parts.pop(),
                part => parts.push(part),
            }
        }
        self.0.contains(&parts.join("/"))
    }
}

/// Whether a path is `name`, or ends with it.
pub fn is_named(path: &str, name: &str) -> bool {
    let head = path.strip_suffix(name.trim_end_matches('/'));
    head.is_some_and(|head| head.is_empty() || head.ends_with('/'))
}

/// The lines of a document outside its blocks of code, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    let lines = text.lines().enumerate();
    lines.filter_map(move |(i, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (!is_code && !is_fence).then_some((i + 1, line))
    })
}

/// The texts in backticks that name a file or a folder, with their lines.
fn named(text: &str) -> impl Iterator<Item = (usize, &str)> {
    prose(text).flat_map(|(number, line)| {
        let spans = line.split('`').skip(1).step_by(2);
        // An item of a file stands behind two colons.
        let paths = spans.map(|span| span.split("::").next().unwrap_or(span));
        paths
            .filter(|span| is_path(span))
            .map(move |span| (number, span))
    })
}

/// Whether a text has the form of a file's or a folder's name. `NAME` stands for any name.
fn is_path(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    if !text.chars().all(is_plain) || text.contains("NAME") || text.starts_with('/') {
        return false;
    }
    let last = text.rsplit('/').next().unwrap_or(text);
    let ending = last.rsplit_once('.');
    let is_file = ending.is_some_and(|(stem, end)| !stem.is_empty() && ENDINGS.contains(&end));
    is_file || text.ends_with('/') && text.len() > 1
}

/// The targets of relative links, without their anchors, with their lines.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    prose(text).flat_map(|(number, line)| {
        let targets = line.split("](").skip(1).filter_map(|rest| {
            let target = rest.split(')').next()?;
            target.split('#').next()
        });
        targets
            .filter(|target| !target.is_empty() && !target.contains("://"))
            .map(move |target| (number, target))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [&str; 3] = ["README.md", "docs/a.md", "crates/one/src/deep/b.rs"];

    /// The names of a document that no path of `FILES` has.
    fn lacking(text: &str) -> Vec<(usize, &str)> {
        let paths = Paths::new(&FILES);
        named(text).filter(|(_, name)| !paths.has(name)).collect()
    }

    #[test]
    fn names_of_files_and_folders_that_exist_pass() {
        let text = "`b.rs`, `deep/b.rs::f`, `one/src/`, `crates/`, `docs/a.md`; `docs/NAME.md`, `a.b()`, `x/y`, `0.1`";
        assert_eq!(lacking(text), []);
    }

    #[test]
    fn names_that_no_path_ends_with_are_found_with_their_lines() {
        let text = "`b.rs` and `c.rs`\n```\n`d.rs`\n```\n`eep/b.rs`, `src/one/`";
        assert_eq!(
            lacking(text),
            [(1, "c.rs"), (5, "eep/b.rs"), (5, "src/one/")]
        );
    }

    #[test]
    fn links_are_read_from_the_documents_folder() {
        let paths = Paths::new(&FILES);
        let text = "[a](../README.md#x) [b](a.md) [c](https://x.y/z) [d](#here) [e](../crates/one)";
        let targets: Vec<_> = links(text).map(|(_, target)| target).collect();
        assert_eq!(targets, ["../README.md", "a.md", "../crates/one"]);
        for target in targets {
            assert!(paths.has_target("docs/a.md", target), "{target}");
        }
        for target in ["README.md", "../../README.md", "../crates/two"] {
            assert!(!paths.has_target("docs/a.md", target), "{target}");
        }
    }
}
