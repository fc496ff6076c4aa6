//! The C interface of `attn`: include/attn.h, which `cargo xtask header` writes from here, and include/attn.hpp, which wraps it for C++.
//!
//! `device`, `cache`, `append` and `step` are the interface with rows in host memory or on a GPU; `host_pages` reads and writes pages that the caller has in host memory; `plan`, `paged_rows` and `transfer` launch over the caller's own device
//! memory, for CUDA graphs. No function unwinds into its caller: a panic comes back as [`Status::Internal`].

mod append;
mod arguments;
mod cache;
mod device;
mod host_pages;
mod launch_args;
mod modifiers;
mod paged_rows;
mod place;
mod plan;
mod rows;
mod status;
mod step;
mod structs;
mod transfer;

use std::ffi::{CStr, c_char};

pub use append::*;
pub use arguments::Dtype;
pub use cache::*;
pub use device::*;
pub use host_pages::*;
pub use launch_args::{Buffers, Merge, PageCopies, Pages, Ranges, SpanMerge, Spans};
pub use modifiers::*;
pub use paged_rows::*;
pub use plan::*;
pub use rows::{Rotary, Rows, Tokens};
pub use status::*;
pub use step::*;
pub use transfer::*;

/// Version of this interface's types and functions. A program and the library that it runs with have the same.
pub const ATTN_ABI_VERSION: u32 = 6;

/// The library's ATTN_ABI_VERSION, to be compared with the header's at the start of a program.
#[unsafe(no_mangle)]
pub extern "C" fn attn_abi_version() -> u32 {
    ATTN_ABI_VERSION
}

/// The library's version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn attn_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no zero byte"),
        };
    VERSION.as_ptr()
}
