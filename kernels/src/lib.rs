//! The GPU kernel sources of `attn` as text, and how the host specialises them: a crate, so that packages hold them.
#![forbid(unsafe_code)]

pub mod wgsl;

include!(concat!(env!("OUT_DIR"), "/sources.rs"));
