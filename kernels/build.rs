//! Lists the kernel sources, so that `lib.rs` holds every file of `cuda/`, `host/` and `wgsl/` as text.

use std::{env, fmt::Write, fs, path::Path};

fn main() {
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let mut text = String::new();
    for (folder, name, feature) in [
        ("cuda", "CUDA", "CARGO_FEATURE_CUDA"),
        ("host", "HOST", "CARGO_FEATURE_CUDA"),
        ("wgsl", "WGSL", "CARGO_FEATURE_WGSL"),
    ] {
        if env::var_os(feature).is_none() {
            continue;
        }
        let path = Path::new(&root).join(folder);
        println!("cargo::rerun-if-changed={}", path.display());
        let mut files: Vec<_> = fs::read_dir(&path)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.path().is_file())
            .collect();
        files.sort_by_key(fs::DirEntry::file_name);
        writeln!(text, "/// The files of `{folder}/`: name and text.").expect("strings take all");
        writeln!(text, "pub static {name}: &[(&str, &str)] = &[").expect("strings take all");
        for file in files {
            let (name, path) = (file.file_name(), file.path());
            writeln!(text, "({name:?}, include_str!({path:?})),").expect("strings take all");
        }
        writeln!(text, "];").expect("strings take all");
    }
    let out = Path::new(&env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("sources.rs");
    fs::write(out, text).expect("OUT_DIR is writable");
}
