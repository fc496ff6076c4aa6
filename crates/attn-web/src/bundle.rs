//! Makes the page's folder: `attn-web-bundle LIBRARY.wasm PAGE DATA OUT` binds the library for wasm32, copies the page and the bundled tensors, and writes
//! `native.json`, the digests that this machine's CPU gives, for the page to compare with.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use attn::{KvFormat, backends::cpu::CpuBackend};
use attn_web::measure::{Device, FORMATS, Inputs, measure};
use serde_json::{Map, Value, json};
use wasm_bindgen_cli_support::Bindgen;

fn main() -> Result<()> {
    let arguments: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    let [library, page, data, out] = &arguments[..] else {
        bail!("usage: attn-web-bundle LIBRARY.wasm PAGE DATA OUT");
    };
    if out.exists() {
        fs::remove_dir_all(out)?;
    }
    fs::create_dir_all(out)?;
    Bindgen::new()
        .input_path(library)
        .web(true)?
        .typescript(false)
        .generate(out)?;
    for entry in fs::read_dir(page)? {
        let file = entry?.path();
        copy(&file, out)?;
    }
    copy(data, out)?;
    let digests = digests(&fs::read(data)?)?;
    fs::write(out.join("native.json"), format!("{digests:#}\n"))?;
    Ok(())
}

fn copy(file: &Path, folder: &Path) -> Result<()> {
    let name = file.file_name().context("a file's name")?;
    fs::copy(file, folder.join(name)).with_context(|| format!("cannot copy {}", file.display()))?;
    Ok(())
}

/// The digests of all contexts and formats that the page offers for the bundled tensors, and the machine.
fn digests(data: &[u8]) -> Result<Value> {
    let inputs = Inputs::read(data)?;
    let cpu = Device::Cpu(Box::new(CpuBackend::new()));
    let mut contexts = Map::new();
    for context in inputs.contexts() {
        let inputs = inputs.at(context)?;
        let mut digests = Map::new();
        for name in FORMATS {
            let format: KvFormat = name.parse()?;
            let measured = pollster::block_on(measure(&cpu, &inputs, format, None))?;
            digests.insert(name.to_owned(), measured.value()["digest"].clone());
        }
        contexts.insert(context.to_string(), digests.into());
    }
    let [name, detail] = cpu.describe();
    let isa = detail.split(',').next().unwrap_or_default();
    Ok(json!({"machine": format!("{name}, {isa}"), "digests": contexts}))
}
