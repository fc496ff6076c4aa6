//! For `cargo xtask words`: each row of docs/others-bugs.md links to a thread, and the tests that it names are there.

use std::{fs, path::Path};

use crate::paths::is_named;

const PAGE: &str = "docs/others-bugs.md";
const SITE: &str = "https://github.com/";

/// A line for each row of the page without a thread or a test, and for each test that is not in the file where it should be.
pub fn missing(root: &Path, files: &[&str]) -> Vec<String> {
    let Ok(page) = fs::read_to_string(root.join(PAGE)) else {
        return vec![format!("there is no {PAGE}")];
    };
    let has_test = |path: &str, name: &str| {
        let mut named = files.iter().filter(|file| is_named(file, path));
        named.any(|file| {
            fs::read_to_string(root.join(file)).is_ok_and(|text| is_test(file, &text, name))
        })
    };
    faults(&page, has_test)
}

/// What is wrong with the page, by a function that says whether a file has a test.
fn faults(page: &str, has_test: impl Fn(&str, &str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    let rows = page.lines().enumerate();
    for (i, row) in rows.filter(|(_, line)| line.starts_with("| [")) {
        let mut fault = |text: String| found.push(format!("{PAGE}:{}: {text}", i + 1));
        let (reports, rest) = row[2..].split_once(" | ").unwrap_or((row, ""));
        let links: Vec<_> = reports.split("](").skip(1).collect();
        if links.is_empty() || !links.iter().all(|link| is_thread(link)) {
            fault("the first cell is not made of links to threads".to_owned());
        }
        let spans = rest.split('`').skip(1).step_by(2);
        let tests: Vec<_> = spans.filter_map(|span| span.split_once("::")).collect();
        if tests.is_empty() {
            fault("the row names no test".to_owned());
        }
        for (path, name) in tests {
            if !has_test(path, name) {
                fault(format!("{path} has no test `{name}`"));
            }
        }
    }
    if !page.lines().any(|line| line.starts_with("| [")) {
        found.push(format!("{PAGE} has no row"));
    }
    found
}

/// Whether a link's rest is `https://github.com/OWNER/NAME/issues/NUMBER)`, or a pull request's.
fn is_thread(link: &str) -> bool {
    let target = link.split(')').next().unwrap_or_default();
    let Some(path) = target.strip_prefix(SITE) else {
        return false;
    };
    let parts: Vec<_> = path.split('/').collect();
    matches!(parts[..], [owner, name, "issues" | "pull", number]
        if !owner.is_empty() && !name.is_empty() && number.parse::<u32>().is_ok())
}

/// Whether a file has a test: a function under a test's attribute or with a test's name, or the text of a trial.
fn is_test(file: &str, text: &str, name: &str) -> bool {
    let is_function = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    if !is_function {
        return text.contains(name);
    }
    if file.ends_with(".py") {
        return name.starts_with("test_") && text.contains(&format!("\ndef {name}("));
    }
    // The attributes of the function: what stands before it, behind the last blank line.
    let Some(at) = text.find(&format!("fn {name}(")) else {
        return false;
    };
    let attributes = text[..at].rsplit("\n\n").next().unwrap_or_default();
    let mut lines = attributes.lines().map(str::trim);
    lines.any(|line| line == "#[test]" || line == "#[rstest]")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(row: &str) -> Vec<String> {
        faults(&format!("# Title\n\n{row}\n"), |path, name| {
            path == "a.rs" && name == "it_holds"
        })
    }

    #[test]
    fn a_row_has_threads_and_tests_that_are_there() {
        let thread = "[b#7](https://github.com/a/b/issues/7)";
        assert!(found(&format!("| {thread} | what | `a.rs::it_holds` |")).is_empty());
        let faulty = [
            format!("| {thread} | what | `a.rs::it_held` |"),
            format!("| {thread} | what | `b.rs::it_holds` |"),
            format!("| {thread} | what | a test |"),
            "| [b#7](https://github.com/a/b/issues/x) | what | `a.rs::it_holds` |".to_owned(),
            "| [b](https://github.com/a/b) | what | `a.rs::it_holds` |".to_owned(),
            format!("| {thread} · [b](c.md) | what | `a.rs::it_holds` |"),
            String::new(),
        ];
        for row in faulty {
            assert_eq!(found(&row).len(), 1, "{row}");
        }
    }

    #[test]
    fn tests_are_functions_under_an_attribute_or_texts_of_trials() {
        let rust = "#[test]\n// A reason.\n#[case(1)]\nfn one(x: u8) {}\n\nfn two() {}\n\n#[rstest]\nfn six() {}\n\ntrials.test(\"three and four\")";
        for name in ["one", "six", "three and four"] {
            assert!(is_test("a.rs", rust, name), "{name}");
        }
        assert!(!is_test("a.rs", rust, "two") && !is_test("a.rs", rust, "on"));
        assert!(!is_test("a.rs", rust, "four and five"));
        let python = "\ndef test_one():\n    pass\n\ndef two():\n    pass\n";
        assert!(is_test("a.py", python, "test_one") && !is_test("a.py", python, "two"));
    }
}
