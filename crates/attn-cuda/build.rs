//! Embeds the images of common kernels when NVRTC is found; `ATTN_EMBED=0` leaves them out. Never fails for want of a compiler.

use std::{env, fmt::Write, fs, path::Path};

#[allow(dead_code, reason = "shared with the library, which uses all of it")]
#[path = "src/geometry.rs"]
mod geometry;
#[allow(dead_code, reason = "shared with the library, which uses all of it")]
#[path = "src/instance.rs"]
mod instance;
#[allow(dead_code, reason = "shared with the library, which uses all of it")]
#[path = "src/nvrtc.rs"]
mod nvrtc;
#[allow(dead_code, reason = "shared with the library, which uses all of it")]
#[path = "src/short.rs"]
mod short;

use instance::Arch;

fn main() {
    println!("cargo::rerun-if-env-changed=ATTN_EMBED");
    println!("cargo::rerun-if-env-changed=ATTN_NVRTC");
    let mut images = Vec::new();
    if env::var("ATTN_EMBED").as_deref() != Ok("0") {
        // Without a compiler here, kernels compile where they run.
        if let Ok(nvrtc) = nvrtc::Nvrtc::load() {
            embed(&nvrtc, &mut images);
        }
    }
    images.sort();
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let mut text = String::from("pub static IMAGES: &[(u128, &[u8])] = &[\n");
    for (key, image) in &images {
        let path = Path::new(&out).join(format!("{key:032x}.image"));
        fs::write(&path, image).expect("OUT_DIR is writable");
        writeln!(text, "({key}, include_bytes!({path:?})),").expect("strings take all");
    }
    text += "];\n";
    fs::write(Path::new(&out).join("embedded.rs"), text).expect("OUT_DIR is writable");
}

fn embed(nvrtc: &nvrtc::Nvrtc, images: &mut Vec<(u128, Vec<u8>)>) {
    for arch in [Arch::Sm80, Arch::Sm90a, Arch::Compute80] {
        for instance in instance::common(arch) {
            match nvrtc.compile(attn_kernels::CUDA, instance.unit(), &instance.options(arch)) {
                Ok(image) => images.push((instance.key(attn_kernels::CUDA, arch), image)),
                Err(error) => println!("cargo::warning=not embedded: {error:.300}"),
            }
        }
    }
}
