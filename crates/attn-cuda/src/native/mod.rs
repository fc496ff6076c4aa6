//! The entry for inference engines: the caller's stream and device buffers; nothing allocated, nothing synchronized.
//!
//! [`CudaBackend::prepare`](crate::CudaBackend::prepare) loads the kernels of a decode and sizes its workspace once; [`CudaBackend::decode_on`](crate::CudaBackend::decode_on) only enqueues, so a CUDA graph can
//! capture it and replay with longer `kv_lens`. Every other launch is an [`Op`]: appends, exports, imports, copies of pages, merges, lists of query blocks.
//! [`CudaBackend::prepare_op`](crate::CudaBackend::prepare_op) loads its kernels once, and [`CudaBackend::enqueue`](crate::CudaBackend::enqueue) enqueues it.
//!
//! ```no_run
//! use std::ffi::c_void;
//!
//! use attn_core::{Error, Heads, KvFormat, PageLayout, Problem};
//! use attn_cuda::{
//!     CudaBackend,
//!     native::{DecodeArgs, DeviceAddress, DeviceKv, Dtype, KvLayout, PagedSequences, Pages, Stream},
//! };
//!
//! /// One step of 4 sequences on the engine's stream and memory; `at` are the addresses of queries, outputs, pool, page table, lengths and workspace.
//! ///
//! /// # Safety
//! /// `stream` is a live stream of the device's primary context, which is current; the memory is as [`DecodeArgs`] documents it.
//! unsafe fn step(gpu: &CudaBackend, stream: *mut c_void, at: [u64; 6]) -> Result<(), Error> {
//!     let problem = Problem::new(Heads::new(32, 8, 128), [4096; 4]);
//!     // Once; its `workspace_bytes` say how much to allocate, and its `zeroed_bytes` how much of that to zero.
//!     let plan = gpu.prepare(&problem, KvFormat::INT8, KvLayout::Pages(64))?;
//!     let [q, out, pool, page_table, kv_lens, workspace] = at.map(DeviceAddress::new);
//!     let kv = PagedSequences {
//!         pool: Pages::new(pool, &PageLayout::new(KvFormat::INT8, 128, 64, 8)?, 256),
//!         page_table,
//!         page_table_stride: 64,
//!         residual_pages: DeviceAddress::NULL,
//!         residual_slots: 0,
//!         kv_lens,
//!         tensor_scales: [DeviceAddress::NULL; 2],
//!     };
//!     let args = DecodeArgs::new(q, out, Dtype::F32, DeviceKv::Paged(kv), workspace);
//!     // SAFETY: this function's contract; lengths are at most 4096, and pages below 256.
//!     unsafe { gpu.decode_on(&plan, Stream::from_raw(stream), &args) }
//! }
//! ```

pub(crate) mod append;
pub(crate) mod centre;
mod check;
pub(crate) mod copy_pages;
mod decode;
pub(crate) mod decode_args;
pub(crate) mod dequantize;
mod dtype;
pub(crate) mod export;
mod grid;
mod import;
mod kv;
mod kv_rows;
pub(crate) mod launch_plan;
pub(crate) mod list_blocks;
pub(crate) mod merge_spans;
pub(crate) mod merge_states;
mod op;
mod page_centres;
mod pages;
pub(crate) mod query_blocks;
pub(crate) mod read;
mod rotary;
mod rows;
pub(crate) mod slots;
mod smaller;

pub use append::{AppendArgs, AppendShape};
pub use attn_kernels::cuda::KvLayout;
pub use attn_kernels::cuda::params::CentreTokens;
pub use centre::SecondCentresArgs;
pub use check::Checked;
pub use copy_pages::CopyPagesArgs;
pub use decode::NativePlan;
pub(crate) use decode::{Beside, launch_decode_as, prepare};
pub use decode_args::{CentresArgs, DecodeArgs, SpansArgs, alibi_slopes_log2};
pub use dtype::Dtype;
pub use export::ExportArgs;
pub use grid::Grid;
pub use import::ImportArgs;
pub use kv::{DeviceKv, PagedSequences, ViewRows};
pub use kv_rows::KvRows;
pub(crate) use launch_plan::{LaunchPlan, choose};
pub use list_blocks::ListBlocksArgs;
pub use merge_spans::MergeSpansArgs;
pub use merge_states::MergeStatesArgs;
pub use op::{Op, Prepared};
pub(crate) use op::{enqueue, prepare_op};
pub use page_centres::PageCentres;
pub use pages::Pages;
pub use query_blocks::{PlanFor, PlanKind};
pub use rotary::{RotaryArgs, RotaryQueries};
pub use slots::{SlotAppendArgs, SlotCentres};

pub use crate::handles::{DeviceAddress, Stream};
