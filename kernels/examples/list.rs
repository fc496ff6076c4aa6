//! The sources that this crate holds, and the kernels that are compiled of them for most models on an H100. `cargo run --example list`

use attn_kernels::{
    CUDA, WGSL,
    cuda::{Arch, embedded::common},
};

fn main() {
    for (what, files) in [("CUDA", CUDA), ("WGSL", WGSL)] {
        let bytes: usize = files.iter().map(|(_, text)| text.len()).sum();
        println!("{what}: {} files, {bytes} bytes", files.len());
    }
    let kernels = common(Arch::Sm90a);
    println!(
        "{} kernels for {}, such as",
        kernels.len(),
        Arch::Sm90a.name()
    );
    for kernel in kernels.iter().take(3) {
        println!(
            "    {} of {}: {}",
            kernel.name(),
            kernel.source(),
            kernel.options(Arch::Sm90a).join(" ")
        );
    }
}
