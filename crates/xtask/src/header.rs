//! `cargo xtask header`: include/attn.h of crates/attn-c, which cbindgen writes from its sources.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};

/// Writes the header, or with `check` compares it with the one that is there.
///
/// # Errors
/// If the sources cannot be read; if the header differs.
pub fn run(root: &Path, check: bool) -> Result<()> {
    let folder = root.join("crates/attn-c");
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml"));
    let config = config.map_err(anyhow::Error::msg)?;
    // Its modules come with it.
    let builder = cbindgen::Builder::new()
        .with_config(config)
        .with_src(folder.join("src/lib.rs"));
    let bindings = builder.generate().context("cbindgen refuses attn-c")?;
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text)?;
    // A link to another item, and code, are plain text in C; preconditions are a sentence, not a heading.
    let text = text
        .replace("// # Safety\n//", "// Needs:")
        .replace('`', "");
    let path = folder.join("include/attn.h");
    if check {
        let is_same = fs::read_to_string(&path).is_ok_and(|held| held == text);
        ensure!(
            is_same,
            "{} is not what its sources give; write it by `cargo xtask header`",
            path.display()
        );
        return Ok(());
    }
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}
