//! Embeds the images of common kernels where NVRTC, NVIDIA's run-time compiler, is found. A build never fails without it.
//!
//! This script loads `libnvrtc.so` and `libnvrtc-builtins.so` and runs them: from `ATTN_NVRTC` (an absolute path), the dynamic
//! loader's path, CUDA toolkits or Python wheels. The header of `kernels/src/cuda/nvrtc.rs` has the whole list and its order; no relative path is
//! searched. `ATTN_EMBED=0` loads nothing and embeds nothing: kernels then compile where they run. What is embedded depends on the
//! compiler that is found, so builds on different machines are equal to the byte only with `ATTN_EMBED=0`.
//!
//! Images of an earlier run of this script are kept by key and compiler version, so that a changed `PATH` costs no compilation.

use std::{
    collections::BTreeSet,
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use attn_kernels::cuda::{
    Arch,
    embedded::common,
    instance::{Key, hex},
    nvrtc,
};

fn main() {
    println!("cargo::rerun-if-env-changed=ATTN_EMBED");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut images = Vec::new();
    if env::var("ATTN_EMBED").as_deref() != Ok("0") {
        for variable in nvrtc::VARIABLES {
            println!("cargo::rerun-if-env-changed={variable}");
        }
        let found = nvrtc::Nvrtc::load().ok();
        for path in nvrtc::watched(found.as_ref()) {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        if let Some(nvrtc) = &found {
            embed(nvrtc, &out, &mut images);
        }
    }
    images.sort();
    let mut text =
        String::from("pub static IMAGES: &[(attn_kernels::cuda::instance::Key, &[u8])] = &[\n");
    for (key, path) in &images {
        writeln!(text, "({key:?}, include_bytes!({path:?})),").expect("strings take all");
    }
    text += "];\n";
    fs::write(out.join("embedded.rs"), text).expect("OUT_DIR is writable");
    remove_others(&out, &images);
}

fn embed(nvrtc: &nvrtc::Nvrtc, out: &Path, images: &mut Vec<(Key, PathBuf)>) {
    let (major, minor) = nvrtc.version;
    for arch in [Arch::Sm80, Arch::Sm90a, Arch::Compute80] {
        for instance in common(arch) {
            let key = instance.key(attn_kernels::CUDA, arch);
            let path = out.join(format!("{}-{major}.{minor}.image", hex(&key)));
            if !path.is_file() {
                let options = instance.options(arch);
                let image = match nvrtc.compile(attn_kernels::CUDA, instance.source(), &options) {
                    Ok(image) => image,
                    Err(error) => {
                        println!("cargo::warning=not embedded: {error:.300}");
                        continue;
                    }
                };
                // Renamed once it is whole: a script that is interrupted leaves no part of an image under its name.
                let part = path.with_extension("part");
                fs::write(&part, image).expect("OUT_DIR is writable");
                fs::rename(&part, &path).expect("OUT_DIR is writable");
            }
            images.push((key, path));
        }
    }
}

/// Images of sources and compilers that are no more.
fn remove_others(out: &Path, images: &[(Key, PathBuf)]) {
    let kept: BTreeSet<&Path> = images.iter().map(|(_, path)| &**path).collect();
    let entries = fs::read_dir(out).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        let is_image = path
            .extension()
            .is_some_and(|e| e == "image" || e == "part");
        if is_image && !kept.contains(&*path) {
            // One that stays costs its bytes.
            let _ = fs::remove_file(path);
        }
    }
}
