//! The GPU kernel sources of `attn`, as text: a crate, so that packages hold them.
#![forbid(unsafe_code)]

include!(concat!(env!("OUT_DIR"), "/sources.rs"));
