//! The host twin of `kernels/cuda`: everything about a CUDA kernel that needs no GPU.
//!
//! | module | holds |
//! |---|---|
//! | [`config`] | the decode kernels, the configuration of a CTA, the limits of a device |
//! | [`smem`] | shared memory of a CTA, in bytes |
//! | [`split`] | the launch: how work items are split among CTAs, and which way partials go |
//! | `cost` | the fitted constants, in microseconds |
//! | [`select`] | the fastest kernel of a problem |
//! | [`arch`] | the targets of images |
//! | [`instance`] | a kernel with its macros, compiler options and image key |
//! | [`embedded`] | the kernels whose images a build takes along |
//! | [`params`] | the parameter blocks; `params.h` is generated from them |
//! | [`nvrtc`] | the run-time compiler: where it is searched, and its calls |
//!
//! Every choice here changes speed, never bits.

pub mod arch;
pub mod config;
mod cost;
pub mod embedded;
pub mod instance;
mod launch;
pub mod nvrtc;
pub mod params;
mod row_blocks;
pub mod select;
pub mod smem;
pub mod split;

pub use arch::{Arch, Exponential, Target};
pub use config::{
    DeviceLimits, H200_MEMORY_PACE, Kernel, KernelChoice, KernelConfig, KvLayout, Preferences,
};
pub use instance::Instance;
pub use launch::{Launch, block_rows};
