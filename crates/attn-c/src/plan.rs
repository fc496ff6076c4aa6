//! Launches over the caller's own device memory, which a CUDA graph can capture: pages, tables, lengths and workspace are its arrays.

mod launches;

use std::{
    ffi::{c_char, c_void},
    sync::Arc,
};

use attn::{
    CacheConfig, Heads, KvFormat, PageLayout, Problem,
    backends::cuda::native::{
        AppendArgs, AppendShape, KvLayout, ListBlocksArgs, NativePlan, PlanFor, PlanKind, Prepared,
        SlotAppendArgs, alibi_slopes_log2,
    },
};

use crate::{
    arguments::{self, destroy, handle, optional, place, text},
    device::Device,
    launch_args::{enqueue, given},
    modifiers::Modifiers,
    rows::head_dim,
    status::{Failure, Status, call},
};

pub use launches::*;

/// The shape of a batch, for every step of these heads and query tokens with lengths up to the longest.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PlanConfig {
    /// sizeof(attn_plan_config).
    pub struct_size: usize,
    /// How K and V are stored, as in attn_cache_config.
    pub format: *const c_char,
    /// Query heads.
    pub q_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head's key and query, as in attn_cache_config.
    pub head_dim: usize,
    /// Elements of a value and of an output, where they are not head_dim; 0: head_dim.
    pub v_dim: usize,
    /// Tokens per page; 0: 64.
    pub page_size: usize,
    /// Sequences.
    pub count: usize,
    /// Query tokens of each; NULL: one.
    pub q_lens: *const usize,
    /// The longest length of a sequence.
    pub max_tokens: usize,
    /// What changes scores. A launch reads slopes and sinks from attn_buffers.
    pub modifiers: Modifiers,
    /// Not 0: attn_plan_append_slots and attn_plan_step take attn_tokens.rotary, whose kernel is loaded, too.
    pub rotary: u32,
    /// Not 0: sequences bring other numbers of query tokens from step to step, as attn_plan_list_query_blocks says; q_lens gives how many tokens they
    /// have in all, and the most that one mostly has, for which the kernel is chosen.
    pub ragged: u32,
    /// Not 0: pages are another engine's, of rows, which attn_plan_attend_rows reads as they lie; the plan appends nothing. The format is bf16, f16, fp8
    /// or int8-tensor.
    pub rows: u32,
    /// Not 0: sequences are shards, runs of whole spans of 1024 tokens but for the last shard, for attn_plan_attend_spans; neither ragged nor rows. Sinks
    /// belong to attn_transfer_merge_spans.
    pub spans: u32,
}

/// What a plan's launches need.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PlanInfo {
    /// Bytes of a page of the pool; 0 where pages are another engine's.
    pub page_bytes: usize,
    /// Bytes of the workspace.
    pub workspace_bytes: usize,
    /// Bytes at the workspace's start that are zeroed before the first launch.
    pub zeroed_bytes: usize,
    /// Bytes of the workspace that launches leave nothing in, which plans may share (attn_buffers.scratch).
    pub scratch_bytes: usize,
    /// Bytes of the query blocks; 0: there are none.
    pub query_block_bytes: usize,
    /// Entries of a sequence in attn_pages.residual_pages, of a ragged plan for one that brings all tokens; 0 for formats without.
    pub residual_slots: usize,
    /// Of these, the entries in front: a sequence keeps the residual pages of so many first pages for good. 0 for formats without.
    pub first_residual_pages: usize,
    /// States that attn_plan_attend_spans leaves of each row: those of the spans of max_tokens. 0 for other plans.
    pub spans: usize,
}

/// The appends to a plan's pages: behind its sequences, and by slots.
struct Appends {
    step: Prepared<AppendArgs>,
    slots: Prepared<SlotAppendArgs>,
}

/// Launches for one batch shape. They allocate nothing and wait for nothing.
pub struct Plan {
    pub(crate) device: Arc<attn::Device>,
    /// Whether launches leave the states of spans.
    leaves_spans: bool,
    /// Whether sequences bring other numbers of query tokens from step to step.
    is_ragged: bool,
    problem: Problem,
    pub(crate) layout: PageLayout,
    pub(crate) plan: NativePlan,
    /// None where pages are another engine's.
    append: Option<Appends>,
}

impl Plan {
    /// Residual pages of a sequence. One of a ragged plan may bring all tokens.
    fn residual_slots(&self) -> usize {
        let (format, page_size) = (self.layout.format(), self.layout.page_size());
        let tokens = match self.is_ragged {
            true => self.problem.query_tokens(),
            false => self.problem.max_q_len(),
        };
        format.residual_slots(page_size, tokens)
    }
}

/// Prepares the launches for a batch shape on a GPU; the first plan of its kind may compile kernels.
///
/// # Safety
/// `device` is open; `config` and what it points to are readable; `plan` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_create(
    device: *const Device,
    config: *const PlanConfig,
    plan: *mut *mut Plan,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (device, out, given) = unsafe {
            (
                &handle("device", device)?.device,
                place("plan", plan)?,
                arguments::config(config)?,
            )
        };
        if given.spans != 0 && (given.ragged != 0 || given.rows != 0) {
            let sentence = "attn_plan_config.spans is set with ragged or rows; a plan for shards is of the library's pages, and knows its q_lens";
            return Err(Failure::new(Status::Parameter, sentence));
        }
        // SAFETY: this function's contract.
        let (format, q_lens) = unsafe {
            (
                text("format", given.format)?,
                optional("q_lens", given.q_lens, given.count)?,
            )
        };
        let format: KvFormat = format.parse()?;
        let heads = Heads::new(
            given.q_heads,
            given.kv_heads,
            head_dim(given.head_dim, given.v_dim),
        );
        let mut problem = Problem::new(heads, vec![given.max_tokens; given.count]);
        if let Some(q_lens) = q_lens {
            problem = problem.q_lens(q_lens);
        }
        // SAFETY: this function's contract.
        let scores = unsafe { given.modifiers.scores(given.q_heads) }?;
        let problem = problem.scores(scores);
        // Launches are given static scales with their pages.
        let builder = CacheConfig::builder(format, heads).centres(false);
        let mut pages = builder.unit_tensor_scales();
        if given.page_size > 0 {
            pages = pages.page_size(given.page_size);
        }
        let pages = pages.build();
        let gpu = device.cuda("plan for memory on a GPU")?;
        let layout = pages.layout()?;
        let (kv, append) = match given.rows {
            0 => {
                pages.check()?;
                let shape = AppendShape {
                    layout,
                    rotary: given.rotary != 0,
                };
                let (step, slots) = (gpu.prepare_op(shape)?, gpu.prepare_op(shape)?);
                let appends = Appends { step, slots };
                (KvLayout::Pages(pages.page_size), Some(appends))
            }
            _ => (KvLayout::PagedRows(pages.page_size), None),
        };
        let plan_for = PlanFor {
            kind: match (given.spans, given.ragged) {
                (0, 0) => PlanKind::Known,
                (0, _) => PlanKind::Ragged,
                _ => PlanKind::Spans,
            },
            centres: false,
        };
        let handle = Plan {
            plan: gpu.prepare_for(&problem, format, kv, plan_for)?,
            leaves_spans: given.spans != 0,
            is_ragged: given.ragged != 0,
            append,
            layout,
            device: device.clone(),
            problem,
        };
        *out = Box::into_raw(Box::new(handle));
        Ok(())
    })
}

/// Destroys a plan; launches that it enqueued go on. NULL is none.
///
/// # Safety
/// `plan` is NULL or was created and has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_destroy(plan: *mut Plan) {
    // SAFETY: a handle of `attn_plan_create`'s by contract, used for the last time.
    unsafe { destroy(plan) }
}

/// What a plan's launches need.
///
/// # Safety
/// `plan` has not been destroyed; `info` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_get_info(plan: *const Plan, info: *mut PlanInfo) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (plan, info) = unsafe { (handle("plan", plan)?, place("info", info)?) };
        *info = PlanInfo {
            page_bytes: match plan.append {
                Some(_) => plan.layout.page_bytes(),
                None => 0,
            },
            workspace_bytes: plan.plan.workspace_bytes(),
            zeroed_bytes: plan.plan.zeroed_bytes(),
            scratch_bytes: plan.plan.scratch_bytes(),
            query_block_bytes: plan.plan.query_blocks_bytes(),
            residual_slots: plan.residual_slots(),
            first_residual_pages: plan
                .layout
                .format()
                .first_residual_pages(plan.layout.page_size()),
            spans: match plan.leaves_spans {
                true => plan.plan.spans(),
                false => 0,
            },
        };
        Ok(())
    })
}

/// Loads the kernels of all plans that are no larger than this one: of at most as many sequences, query tokens and KV tokens, else of the same configuration. Those
/// that the library has no image of are compiled side by side, which takes seconds: an engine that calls it at its start has no such step later.
///
/// # Safety
/// `plan` has not been destroyed; `count` is NULL or writable: how many kernels there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_load_smaller(plan: *const Plan, count: *mut usize) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (plan, count) = unsafe { (handle("plan", plan)?, count.as_mut()) };
        let loaded = plan.device.cuda("plan")?.load_smaller(&plan.plan)?;
        if let Some(count) = count {
            *count = loaded;
        }
        Ok(())
    })
}

/// Copies a plan's query blocks to host memory of attn_plan_info.query_block_bytes bytes, for attn_buffers. Not for a ragged plan, whose list
/// attn_plan_list_query_blocks makes: writes nothing.
///
/// # Safety
/// `plan` has not been destroyed; `bytes` has room for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_query_blocks(plan: *const Plan, bytes: *mut c_void) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let blocks = unsafe { handle("plan", plan) }?.plan.query_blocks();
        let words = blocks
            .iter()
            .flat_map(|block| [block.sequence, block.first, block.tokens, block.behind]);
        let words: Vec<i32> = words.collect();
        // SAFETY: this function's contract.
        let out = unsafe { arguments::list_mut("bytes", bytes.cast::<u8>(), 4 * words.len()) }?;
        let parts = out.chunks_exact_mut(4).zip(words);
        parts.for_each(|(out, word)| out.copy_from_slice(&word.to_ne_bytes()));
        Ok(())
    })
}

/// Lists the query blocks of a step of a ragged plan on the device: enqueues one launch on `stream`, once for the layers of a step. A CUDA graph can
/// capture it, and sequences may bring other numbers of query tokens each time that it runs. Sequences without any cost nothing.
///
/// `cu_seqlens_q` is int32 `[count + 1]` on the device: the first query token of each sequence, then the end of the last one's, at most as many as
/// attn_plan_config.q_lens has in all. `query_blocks` has room for attn_plan_info.query_block_bytes, for attn_buffers.
///
/// # Safety
/// Everything that attn_plan_attend needs; on the device, cu_seqlens_q never falls.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_list_query_blocks(
    plan: *const Plan,
    cu_seqlens_q: *const i32,
    query_blocks: *mut c_void,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let plan = unsafe { handle("plan", plan)? };
        let args = ListBlocksArgs {
            cu_seqlens_q: given("cu_seqlens_q", cu_seqlens_q)?,
            to: given("query_blocks", query_blocks)?,
        };
        // SAFETY: this function's contract.
        unsafe { enqueue(&plan.device, plan.plan.list_blocks()?, &args, stream) }
    })
}

/// Copies a plan's ALiBi slopes, as the kernels take them, to host memory of q_heads numbers, for attn_buffers. Without slopes, writes nothing.
///
/// # Safety
/// `plan` has not been destroyed; `slopes` has room for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_alibi_slopes(plan: *const Plan, slopes: *mut f32) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let problem = &unsafe { handle("plan", plan) }?.problem;
        let taken = alibi_slopes_log2(problem.scores.alibi_slopes.as_deref().unwrap_or(&[]));
        // SAFETY: this function's contract.
        let out = unsafe { arguments::list_mut("slopes", slopes, taken.len()) }?;
        out.copy_from_slice(&taken);
        Ok(())
    })
}
