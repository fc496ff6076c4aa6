//! attn in a browser: a page that attends real K, V and Q in each format on WebGPU and on its CPU, and compares the bits.
//!
//! `measure` attends and compares, on any machine; `page` is what the page's script calls. `cargo xtask web` makes the page's folder, in which
//! `bundle` puts the digests of the CPU that built it, too.

pub mod measure;
#[cfg(target_family = "wasm")]
mod page;
