//! Launches that move what is cached, beside a plan's: rows out of pages, pages between pools, and results of shards merged. A CUDA graph can capture
//! them.

use std::{
    ffi::{c_char, c_void},
    sync::Arc,
};

use attn::{
    CacheConfig, Heads, KvFormat, PageLayout,
    backends::cuda::native::{
        self, CopyPagesArgs, ExportArgs, KvRows, MergeSpansArgs, MergeStatesArgs, Prepared, Stream,
    },
};

use crate::{
    arguments::{self, Config, config, handle, place, text},
    device::Device,
    plan::{Pages, address, given, scales},
    rows::{on_device, or},
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
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens per page; 0: 64.
    pub page_size: usize,
    /// Formats that keep the newest tokens finer: the most query tokens of a step, as for the plan whose pages these are; 0: 1.
    pub max_q_len: usize,
}

// SAFETY: `repr(C)`, and `struct_size` is first.
unsafe impl Config for TransferConfig {
    const NAME: &'static str = "attn_transfer_config";
}

/// Ranges of tokens, one of each sequence of attn_pages, and where their rows go. All addresses are of device memory, aligned to 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Ranges {
    /// sizeof(attn_ranges).
    pub struct_size: usize,
    /// Rows of K `[token][kv_heads][head_dim]`, those of the first range, then those of the next; NULL: V alone.
    pub k: *mut c_void,
    /// Rows of V, as those of K; NULL: K alone.
    pub v: *mut c_void,
    /// An attn_dtype, of k and v.
    pub dtype: u32,
    /// Elements from one token of K to the next, a multiple of 8; 0: kv_heads·head_dim.
    pub k_token_stride: usize,
    /// Elements from one token of V to the next, a multiple of 8; 0: kv_heads·head_dim.
    pub v_token_stride: usize,
    /// int32 `[count + 1]`: the first row of each range, then the end of the last.
    pub row_starts: *const i32,
    /// int32 `[count]`: the first token of each range; NULL: the sequences' first ones.
    pub first_tokens: *const i32,
    /// Sequences.
    pub count: usize,
    /// No range has more tokens.
    pub max_tokens: usize,
}

// SAFETY: `repr(C)`, and `struct_size` is first.
unsafe impl Config for Ranges {
    const NAME: &'static str = "attn_ranges";
}

/// Copies of pages: inside a pool, between pools, or to and from pinned host memory that the device can address (cudaHostAlloc).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PageCopies {
    /// sizeof(attn_page_copies).
    pub struct_size: usize,
    /// The pages that are read.
    pub from: *const c_void,
    /// Their number.
    pub from_pages: usize,
    /// Bytes from one of them to the next, a multiple of 16; 0: they lie side by side.
    pub from_stride: usize,
    /// The pages that are written.
    pub to: *mut c_void,
    /// Their number.
    pub to_pages: usize,
    /// Bytes from one of them to the next; 0: they lie side by side.
    pub to_stride: usize,
    /// int64 `[count][2]` in device memory: a page that is read, and the one that gets its bytes; a negative number skips the pair.
    pub pairs: *const i64,
    /// Pairs.
    pub count: usize,
}

// SAFETY: `repr(C)`, and `struct_size` is first.
unsafe impl Config for PageCopies {
    const NAME: &'static str = "attn_page_copies";
}

/// Results of the same query rows over disjoint tokens, in their order. All addresses are of device memory, aligned to 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Merge {
    /// sizeof(attn_merge).
    pub struct_size: usize,
    /// Outputs `[states][rows][head_dim]`.
    pub outs: *const c_void,
    /// float `[states][rows]`: log-sum-exps, -inf where a state saw no token of a row.
    pub lses: *const f32,
    /// An attn_dtype, of outs.
    pub dtype: u32,
    /// Elements from one state's outputs to the next one's, a multiple of 4; 0: rows·head_dim.
    pub out_stride: usize,
    /// Elements from one state's log-sum-exps to the next one's; 0: rows.
    pub lse_stride: usize,
    /// Merged outputs `[rows][head_dim]`; may be those of the first state.
    pub out: *mut c_void,
    /// An attn_dtype, of out.
    pub out_dtype: u32,
    /// float `[rows]`: merged log-sum-exps; NULL: none.
    pub lse: *mut f32,
    /// Results to merge.
    pub states: usize,
    /// Rows of each: query tokens times query heads.
    pub rows: usize,
}

// SAFETY: `repr(C)`, and `struct_size` is first.
unsafe impl Config for Merge {
    const NAME: &'static str = "attn_merge";
}

/// States of spans of all shards, in the order of their tokens, such as an all-gather of what attn_plan_attend_spans leaves. All addresses are of device
/// memory, aligned to 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SpanMerge {
    /// sizeof(attn_span_merge).
    pub struct_size: usize,
    /// float `[states][rows][2]`.
    pub max_sums: *const f32,
    /// float `[states][rows][head_dim]`.
    pub o: *const f32,
    /// Spans of all shards together.
    pub states: usize,
    /// Rows: query tokens times query heads.
    pub rows: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Outputs `[rows][head_dim]`.
    pub out: *mut c_void,
    /// An attn_dtype, of out.
    pub dtype: u32,
    /// float `[rows]`: log-sum-exps; NULL: none.
    pub lse: *mut f32,
    /// float `[q_heads]`: sinks; NULL: none.
    pub sinks: *const f32,
    /// float `[kv_heads]` for fp8 and int8-tensor; else NULL.
    pub v_scales: *const f32,
}

// SAFETY: `repr(C)`, and `struct_size` is first.
unsafe impl Config for SpanMerge {
    const NAME: &'static str = "attn_span_merge";
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
        let heads = Heads {
            q: given.kv_heads,
            kv: given.kv_heads,
            dim: given.head_dim,
        };
        let mut pages = CacheConfig::builder(format, heads);
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
            merge_spans: gpu.prepare_op((format, layout.head_dim()))?,
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
    let _ = call(|| {
        if !transfer.is_null() {
            // SAFETY: a handle of `attn_transfer_create`'s by contract, used for the last time.
            drop(unsafe { Box::from_raw(transfer) });
        }
        Ok(())
    });
}

/// Writes ranges of cached tokens as rows of numbers, as they were before they were quantized, to the format's precision: enqueues the work on `stream`,
/// as attn_plan_attend. `pages->lengths` are the cached tokens; the newest are read as a query of the last token would.
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
        let layout = &transfer.layout;
        let row = layout.num_kv_heads() * layout.head_dim();
        let args = ExportArgs {
            rows: KvRows {
                k: address(ranges.k),
                v: address(ranges.v),
                dtype: on_device(ranges.dtype)?,
                k_token_stride: or(ranges.k_token_stride, row),
                v_token_stride: or(ranges.v_token_stride, row),
            },
            sequences: pages.sequences(layout, transfer.residual_slots)?,
            row_starts: given("row_starts", ranges.row_starts)?,
            first_tokens: address(ranges.first_tokens),
            batch: ranges.count,
            max_tokens: ranges.max_tokens,
        };
        let gpu = transfer.device.cuda("transfer")?;
        // SAFETY: this function's contract.
        Ok(unsafe { gpu.enqueue(&transfer.export, Stream::from_raw(stream), &args) }?)
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
        let layout = &transfer.layout;
        let args = MergeSpansArgs {
            max_sums: given("max_sums", merge.max_sums)?,
            o: given("o", merge.o)?,
            states: merge.states,
            rows_apart: merge.rows,
            rows: merge.rows,
            num_q_heads: merge.q_heads,
            num_kv_heads: layout.num_kv_heads(),
            out: given("out", merge.out)?,
            dtype: on_device(merge.dtype)?,
            lse: address(merge.lse),
            sinks: address(merge.sinks),
            v_tensor_scales: scales("v_scales", merge.v_scales, layout.format().v)?,
        };
        let gpu = transfer.device.cuda("transfer")?;
        // SAFETY: this function's contract.
        Ok(unsafe { gpu.enqueue(&transfer.merge_spans, Stream::from_raw(stream), &args) }?)
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
        let page_bytes = transfer.layout.page_bytes();
        let args = CopyPagesArgs {
            from: native::Pages {
                at: given("from", copies.from)?,
                stride: or(copies.from_stride, page_bytes),
                num_pages: copies.from_pages,
            },
            to: native::Pages {
                at: given("to", copies.to.cast_const())?,
                stride: or(copies.to_stride, page_bytes),
                num_pages: copies.to_pages,
            },
            page_bytes,
            pairs: given("pairs", copies.pairs)?,
            num_pairs: copies.count,
        };
        let gpu = transfer.device.cuda("transfer")?;
        // SAFETY: this function's contract.
        Ok(unsafe { gpu.enqueue(&transfer.copy_pages, Stream::from_raw(stream), &args) }?)
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
        let head_dim = transfer.layout.head_dim();
        let args = MergeStatesArgs {
            outs: given("outs", merge.outs)?,
            lses: given("lses", merge.lses)?,
            out_stride: or(merge.out_stride, merge.rows.saturating_mul(head_dim)),
            lse_stride: or(merge.lse_stride, merge.rows),
            in_dtype: on_device(merge.dtype)?,
            out: given("out", merge.out.cast_const())?,
            out_dtype: on_device(merge.out_dtype)?,
            lse: address(merge.lse),
            states: merge.states,
            rows: merge.rows,
            head_dim,
        };
        let gpu = transfer.device.cuda("transfer")?;
        // SAFETY: this function's contract.
        Ok(unsafe { gpu.enqueue(&transfer.merge, Stream::from_raw(stream), &args) }?)
    })
}
