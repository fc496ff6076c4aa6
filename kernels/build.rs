//! Lists the kernel sources, so that `lib.rs` holds every file of `cuda/`, `host/` and `wgsl/` as text.

use std::{
    env,
    fmt::Write,
    fs, io,
    path::{Path, PathBuf},
};

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
        let folder = Path::new(&root).join(folder);
        println!("cargo::rerun-if-changed={}", folder.display());
        let mut files = Vec::new();
        find_files(&folder, "", &mut files).expect("the package holds its kernels");
        files.sort();
        writeln!(
            text,
            "/// The files of `{}/`: path within the folder, with `/`, and text.",
            folder.file_name().unwrap_or_default().display()
        )
        .expect("strings take all");
        writeln!(text, "pub static {name}: &[(&str, &str)] = &[").expect("strings take all");
        for (name, path) in files {
            writeln!(text, "({name:?}, include_str!({path:?})),").expect("strings take all");
        }
        writeln!(text, "];").expect("strings take all");
    }
    let out = Path::new(&env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("sources.rs");
    fs::write(out, text).expect("OUT_DIR is writable");
}

/// Adds the files below a folder, each by its path from the folder on, as `#include` names it, and where it lies.
fn find_files(folder: &Path, within: &str, files: &mut Vec<(String, PathBuf)>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{within}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            find_files(&entry.path(), &format!("{name}/"), files)?;
        } else {
            files.push((name, entry.path()));
        }
    }
    Ok(())
}
