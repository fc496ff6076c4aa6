//! Launches that move what is cached, beside a plan's: rows out of pages, pages between pools, and results of shards merged. A CUDA graph can capture
//! them.

use std::{
    ffi::{c_char, c_void},
    sync::Arc,
};

use attn::{
    CacheConfig, Heads, KvFormat, PageLayout,
    backends::cuda::native::{
        CopyPagesArgs, ExportArgs, MergeSpansArgs, MergeStatesArgs, Prepared,
    },
};

use crate::{
    arguments::{self, config, destroy, handle, place, text},
    device::Device,
    launch_args::{Merge, PageCopies, Pages, Ranges, SpanMerge, enqueue},
    rows::head_dim,
    status::{Status, call},
};

/// The caches whose pages and results are moved. Fields that are 0 have their defaults.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TransferConfig {
    /// sizeof(attn_transfer_config).
    pub struct_size: usize,
    /// How K and V are stored, as in attn_cache_config.
    pub format: *const c_char,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head's key, as in attn_cache_config.
    pub head_dim: usize,
    /// Elements of a value and of an output, where they are not head_dim; 0: head_dim.
    pub v_dim: usize,
    /// Tokens per page; 0: 64.
    pub page_size: usize,
    /// Formats that keep some tokens finer: the most query tokens of a step, as for the plan whose pages these are; 0: 1.
    pub max_q_len: usize,
}

/// Launches that move pages and results of some caches. They allocate nothing and wait for nothing.
pub struct Transfer {
    device: Arc<attn::Device>,
    layout: PageLayout,
    residual_slots: usize,
    export: Prepared<ExportArgs>,
    copy_pages: Prepared<CopyPagesArgs>,
    merge: Prepared<MergeStatesArgs>,
    merge_spans: Prepared<MergeSpansArgs>,
}

/// Loads the kernels for a GPU; the first handle of its kind may compile some.
///
/// # Safety
/// `device` is open; `config` and what it points to are readable; `transfer` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_transfer_create(
    device: *const Device,
    config: *const TransferConfig,
    transfer: *mut *mut Transfer,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (device, out, given) = unsafe {
            (
                &handle("device", device)?.device,
                place("transfer", transfer)?,
                arguments::config(config)?,
            )
        };
        // SAFETY: this function's contract.
        let format: KvFormat = unsafe { text("format", given.format) }?.parse()?;
        let heads = Heads::new(
            given.kv_heads,
            given.kv_heads,
            head_dim(given.head_dim, given.v_dim),
        );
        let mut pages = CacheConfig::builder(format, heads).centres(false);
        if given.page_size > 0 {
            pages = pages.page_size(given.page_size);
        }
        let layout = pages.build().layout()?;
        let gpu = device.cuda("transfer of memory on a GPU")?;
        let handle = Transfer {
            device: device.clone(),
            residual_slots: format.residual_slots(layout.page_size(), given.max_q_len.max(1)),
            export: gpu.prepare_op(layout)?,
            copy_pages: gpu.prepare_op(())?,
            merge: gpu.prepare_op(())?,
            merge_spans: gpu.prepare_op((format, layout.head_dim().v))?,
            layout,
        };
        *out = Box::into_raw(Box::new(handle));
        Ok(())
    })
}

/// Destroys a handle; launches that it enqueued go on. NULL is none.
///
/// # Safety
/// `transfer` is NULL or was created and has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_transfer_destroy(transfer: *mut Transfer) {
    // SAFETY: a handle of `attn_transfer_create`'s by contract, used for the last time.
    unsafe { destroy(transfer) }
}

/// Writes ranges of cached tokens as rows of numbers, as they were before they were quantized, to the format's precision: enqueues the work on `stream`,
/// as attn_plan_attend. `pages->kv_lens` are the cached tokens; they are read as a query of the last one would.
///
/// # Safety
/// Everything that attn_plan_attend needs for `pages`; ranges are cached, row_starts do not fall, and k and v have room for their rows and lie apart from all else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_transfer_export(
    transfer: *const Transfer,
    pages: *const Pages,
    ranges: *const Ranges,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (transfer, pages, ranges) = unsafe {
            (
                handle("transfer", transfer)?,
                config(pages)?,
                config(ranges)?,
            )
        };
        let sequences = pages.sequences(&transfer.layout, transfer.residual_slots)?;
        let args = ranges.args(sequences, &transfer.layout)?;
        // SAFETY: this function's contract.
        unsafe { enqueue(&transfer.device, &transfer.export, &args, stream) }
    })
}

/// Merges what shards left by attn_plan_attend_spans, in the order of their tokens, with each row's sink, and finishes: enqueues one launch on `stream`. For
/// integer formats these are the bits of one GPU over all tokens. The handle has the format, kv_heads and head_dim of the plans.
///
/// # Safety
/// Everything that attn_plan_attend needs; `merge->max_sums` and `o` were left by launches of attn_plan_attend_spans, and `out` and `lse` overlap nothing else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_transfer_merge_spans(
    transfer: *const Transfer,
    merge: *const SpanMerge,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (transfer, merge) = unsafe { (handle("transfer", transfer)?, config(merge)?) };
        let args = merge.args(&transfer.layout)?;
        // SAFETY: this function's contract.
        unsafe { enqueue(&transfer.device, &transfer.merge_spans, &args, stream) }
    })
}

/// Copies pages as they are, with their scales: enqueues the work on `stream`, as attn_plan_attend.
///
/// # Safety
/// Addresses are as documented, and stay so until the work has run. On the device, pairs name pages of their pools; no page is written twice, or both
/// read and written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_transfer_pages(
    transfer: *const Transfer,
    copies: *const PageCopies,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (transfer, copies) = unsafe { (handle("transfer", transfer)?, config(copies)?) };
        let args = copies.args(&transfer.layout)?;
        // SAFETY: this function's contract.
        unsafe { enqueue(&transfer.device, &transfer.copy_pages, &args, stream) }
    })
}

/// Merges results over disjoint tokens into those over all: enqueues the work on `stream`, as attn_plan_attend. The same results in the same order give
/// the same bits. A log-sum-exp counts its row's sink, so only one of the results may have been computed with sinks.
///
/// # Safety
/// Addresses are as documented, and stay so until the work has run. out and lse overlap no state but, in the same dtype, the first. Outputs are finite, and
/// log-sum-exps finite or -inf.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_transfer_merge(
    transfer: *const Transfer,
    merge: *const Merge,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (transfer, merge) = unsafe { (handle("transfer", transfer)?, config(merge)?) };
        let args = merge.args(&transfer.layout)?;
        // SAFETY: this function's contract.
        unsafe { enqueue(&transfer.device, &transfer.merge, &args, stream) }
    })
}
