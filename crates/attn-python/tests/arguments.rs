//! The names of launches' arguments: those that the extension reads are those that Python gives, and fields of C's structs.

use std::{collections::BTreeSet, fs, path::Path};

type Names = BTreeSet<String>;

/// Structs of `src/arrays.rs`, and the structs of attn.h that have their names; then names that only Python gives.
const IN_C: [(&str, &[&str], &[&str]); 8] = [
    ("PageArrays", &["attn_pages"], &[]),
    ("RowArrays", &["attn_paged_rows"], &[]),
    ("ExportArrays", &["attn_ranges"], &[]),
    ("AttendArrays", &["attn_rows", "attn_buffers"], &[]),
    ("SpanArrays", &["attn_spans"], &[]),
    ("MergeArrays", &["attn_merge"], &[]),
    // C's handle of transfers knows the KV heads.
    ("SpanMergeArrays", &["attn_span_merge"], &["kv_heads"]),
    ("RotaryArrays", &["attn_rotary"], &[]),
];

/// Structs of `src/arrays.rs` whose names C has not.
const OF_PYTHON: [&str; 2] = ["PlanOptions", "CentreArrays"];

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The names of a list of `name: type` or `name=value`, at the first level of brackets.
fn names(list: &str, mark: char) -> Names {
    let mut depth = 0;
    let parts = list.split(|c: char| {
        depth += match c {
            '(' | '[' | '{' | '<' => 1,
            ')' | ']' | '}' | '>' => -1,
            _ => 0,
        };
        c == ',' && depth == 0
    });
    let named = parts.filter_map(|part| Some(part.split_once(mark)?.0.trim().to_owned()));
    named.collect()
}

/// The fields of each struct of `src/arrays.rs`.
fn structs() -> Vec<(String, Names)> {
    let text = read("src/arrays.rs");
    let bodies = text.split("#[derive(FromPyObject)]\npub struct ").skip(1);
    let fields = bodies.map(|body| {
        let (head, rest) = body.split_once('{').expect("a struct");
        let (fields, _) = rest.split_once("\n}").expect("its end");
        let code = fields.lines().filter(|line| !line.contains("///"));
        let list = code.collect::<Vec<_>>().join(" ").replace("pub ", "");
        let name = head.split('<').next().expect("a name").trim();
        (name.to_owned(), names(&list, ':'))
    });
    fields.collect()
}

/// The keywords of each call of `_arguments` in `attn.torch`.
fn calls() -> Vec<Names> {
    let files = ["_plan.py", "_operators.py", "_transfer.py"];
    let text = files.map(|file| read(&format!("python/attn/torch/{file}")));
    let text = text.concat();
    let calls = text.split(" _arguments(").skip(1);
    let lists = calls.filter_map(|call| {
        let mut depth = 1;
        let end = call.find(|c| {
            depth += match c {
                '(' => 1,
                ')' => -1,
                _ => 0,
            };
            depth == 0
        })?;
        Some(names(&call[..end], '='))
    });
    // What is left of a definition has no keyword.
    lists.filter(|names| !names.is_empty()).collect()
}

/// The fields of a struct of attn.h.
fn in_c(name: &str) -> Names {
    let text = read("../attn-c/include/attn.h");
    let start = format!("typedef struct {name} {{");
    let (_, body) = text
        .split_once(&start)
        .unwrap_or_else(|| panic!("no {name}"));
    let (body, _) = body.split_once('}').expect("its end");
    let fields = body
        .lines()
        .filter_map(|line| line.trim().strip_suffix(';'));
    let last = fields.map(|field| field.rsplit([' ', '*']).next().unwrap_or("").to_owned());
    last.collect()
}

#[test]
fn python_gives_the_names_that_the_extension_reads() {
    let (structs, calls) = (structs(), calls());
    assert_eq!(structs.len(), IN_C.len() + OF_PYTHON.len(), "{structs:?}");
    for (name, fields) in &structs {
        let in_c = IN_C.iter().any(|(own, ..)| own == name);
        assert!(in_c || OF_PYTHON.contains(&&name[..]), "{name}");
        assert!(
            calls.contains(fields),
            "no call gives {name} {fields:?}: {calls:?}"
        );
    }
    for call in &calls {
        let is_read = structs.iter().any(|(_, fields)| fields == call);
        assert!(is_read, "nothing reads {call:?}");
    }
}

#[test]
fn names_of_arguments_are_those_of_the_c_interface() {
    let structs = structs();
    for (name, structs_of_c, own) in IN_C {
        let (_, fields) = structs.iter().find(|(of, _)| of == name).expect(name);
        let mut allowed: Names = structs_of_c.iter().flat_map(|of| in_c(of)).collect();
        allowed.extend(own.iter().map(|name| (*name).to_owned()));
        let others: Vec<_> = fields.difference(&allowed).collect();
        assert!(
            others.is_empty(),
            "{name} has {others:?}, and C {allowed:?}"
        );
    }
}
