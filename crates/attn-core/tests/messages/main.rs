//! `docs/errors.md`: every error as a user reads it, from calls that are refused. `ATTN_UPDATE=1 cargo test -p attn-core --test messages` writes it again.

mod appends;
mod attention;
mod backends;
mod calls;
mod descriptions;
mod rows;
mod sequences;

use std::{collections::BTreeSet, env, fmt::Write, fs, path::Path};

use attn_core::{Error, ErrorKind};

use calls::{ROW, Refusal, filled};

/// `CACHE_FULL` of `CacheFull`.
fn screaming(name: &str) -> String {
    let mut text = String::new();
    for (i, c) in name.char_indices() {
        if i > 0 && c.is_uppercase() {
            text.push('_');
        }
        text.extend(c.to_uppercase());
    }
    text
}

fn page() -> String {
    let groups = [
        descriptions::parsed(),
        descriptions::problems(),
        descriptions::configs(),
        appends::appends(),
        appends::steps(),
        attention::attention(),
        sequences::sequences(),
        sequences::images(),
        rows::rows(),
        attention::states(),
        backends::backends(),
    ];
    let all: Vec<Refusal> = groups.into_iter().flatten().collect();
    let mut page = String::from(
        "# Errors\n\n\
         <!-- ATTN_UPDATE=1 cargo test -p attn-core --test messages -->\n\n\
         Every variant of `attn::Error`, with the sentence that users read, from calls that were refused. A refused call changes nothing. The status of the C \
         interface and the exception of the Python package follow the variant's kind (`Error::kind`); both give the same sentence, with the causes of a \
         device's failure behind it.\n",
    );
    for (variant, kind) in Error::VARIANTS {
        let name = format!("{kind:?}");
        let status = screaming(&name);
        write!(page, "\n## {variant}\n\nC: `ATTN_STATUS_{status}`. Python: `attn.{name}Error`.\n\n| call | error |\n|---|---|\n").unwrap();
        let mut examples = all
            .iter()
            .filter(|(_, error)| error.variant().0 == *variant)
            .peekable();
        assert!(
            examples.peek().is_some(),
            "a call that is refused with Error::{variant} belongs on the page"
        );
        for (call, error) in examples {
            let sentence = error.to_string().replace('|', "\\|");
            writeln!(page, "| {call} | {sentence} |").unwrap();
        }
    }
    page
}

#[test]
fn the_page_of_errors_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors.md");
    let page = page();
    if env::var("ATTN_UPDATE").is_ok_and(|update| update == "1") {
        fs::write(&path, &page).unwrap();
    }
    let current = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        current == page,
        "docs/errors.md is old; run ATTN_UPDATE=1 cargo test -p attn-core --test messages"
    );
}

#[test]
fn sentences_can_be_read() {
    let kinds: BTreeSet<String> = Error::VARIANTS
        .iter()
        .map(|(_, kind)| format!("{kind:?}"))
        .collect();
    assert_eq!(
        kinds.len(),
        8,
        "each kind of error has a variant: {kinds:?}"
    );
    assert_eq!(
        ErrorKind::CacheFull,
        filled("int8", 0)
            .append(0, &vec![0.5; 2000 * ROW], &vec![0.5; 2000 * ROW])
            .unwrap_err()
            .kind()
    );
    for line in page().lines().filter(|line| line.starts_with("| ")) {
        assert!(!line.chars().any(char::is_control), "{line:?}");
        let digits = line
            .split(|c: char| !c.is_ascii_digit())
            .map(str::len)
            .max();
        assert!(digits <= Some(20), "{line}");
        assert!(line.len() < 600, "{line}");
    }
}
