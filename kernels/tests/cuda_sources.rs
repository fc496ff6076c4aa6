//! The tree of CUDA sources: macros of an instance are read in few files, and includes name files by their path from `cuda/` on.

use std::collections::BTreeSet;

use attn_core::{HeadDim, Heads, KvFormat, Problem};
use attn_kernels::{
    CUDA,
    cuda::{Arch, Exponential, Instance, KvLayout, Target},
};

/// The files that turn macros of an instance into constants.
const READERS: [&str; 8] = [
    "attend/config.cuh",
    "attend/kernel_defaults.cuh",
    "attend/low_latency/config.cuh",
    "attend/many_rows/config.cuh",
    "attend/split_kv/config.cuh",
    "common/arithmetic.cuh",
    "ops/rotary.cuh",
    "page/instance.cuh",
];

/// The macros of all kinds of instances that have any.
fn macros() -> BTreeSet<String> {
    let (format, head_dim, page_size) = (KvFormat::INT8, HeadDim::same(128), 64);
    let heads = Heads::new(16, 1, head_dim);
    let mut instances = vec![Instance::Append {
        format,
        head_dim,
        page_size,
        rotary: true,
    }];
    for q_len in [1, 64] {
        let problem = Problem::new(heads, [4096]).q_len(q_len);
        let limit = Arch::Sm90a.shared_limit();
        let layout = KvLayout::Pages(page_size);
        instances.extend(Instance::all_decode(&problem, format, layout, limit));
    }
    let target = Target {
        arch: Arch::Sm90a,
        exponential: Exponential::Polynomial,
    };
    let options = instances.iter().flat_map(|i| i.options(target));
    let names = options.filter_map(|option| {
        let definition = option.strip_prefix("-D")?;
        Some(definition.split('=').next()?.to_owned())
    });
    // No instance of these problems is a shard's.
    names.chain(["ATTN_SPANS".to_owned()]).collect()
}

/// The words of a file but for its comments.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let code = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or(""));
    code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'))
}

#[test]
fn macros_of_an_instance_are_read_where_they_become_constants() {
    let macros = macros();
    for name in ["ATTN_V_DIM", "ATTN_ROTARY", "ATTN_WHOLE_ITEMS"] {
        assert!(macros.contains(name), "{name} is no macro of {macros:?}");
    }
    let mut read = BTreeSet::new();
    for (file, text) in CUDA {
        for word in words(text).filter(|word| macros.contains(*word)) {
            assert!(
                READERS.contains(file),
                "{file} reads {word}: use the constant of {READERS:?}"
            );
            read.insert(word);
        }
    }
    let unread: Vec<_> = macros
        .iter()
        .filter(|m| !read.contains(m.as_str()))
        .collect();
    assert!(unread.is_empty(), "nothing reads {unread:?}");
}

#[test]
fn includes_name_files_by_their_path() {
    for (file, text) in CUDA {
        let lines = text.lines().filter(|line| line.starts_with("#include"));
        for line in lines {
            let name = line.split('"').nth(1);
            let is_found = CUDA.iter().any(|(file, _)| Some(*file) == name);
            assert!(is_found, "{file}: {line}");
        }
    }
}
