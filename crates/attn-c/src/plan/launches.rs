//! What a plan enqueues: attention, steps and appends over the caller's pages.

use std::ffi::c_void;

use attn::backends::cuda::native::{
    AppendArgs, DecodeArgs, DeviceAddress, DeviceKv, KvRows, PagedSequences, RotaryArgs,
    SlotAppendArgs, Stream,
};

use super::{Appends, Plan};
use crate::{
    arguments::{config, handle},
    launch_args::{Buffers, Pages, Spans, address, enqueue, given, tensor_scales},
    rows::{Rows, Tokens, on_device},
    status::{Failure, Status, call},
};

impl Plan {
    /// Rotary positions of an append, where it has some.
    ///
    /// # Safety
    /// `tokens.rotary` is NULL or as documented.
    unsafe fn rotary(&self, tokens: &Tokens) -> Result<Option<RotaryArgs>, Failure> {
        if tokens.rotary.is_null() {
            return Ok(None);
        }
        // SAFETY: this function's contract.
        let rotary = unsafe { config(tokens.rotary) }?;
        let args = rotary.args(self.problem.num_q_heads, self.layout.head_dim().k)?;
        Ok(Some(args))
    }

    /// The launches of appends; refuses a plan for another engine's pages.
    fn appends(&self) -> Result<&Appends, Failure> {
        let sentence = "the plan is for another engine's pages, which attn_plan_attend_rows reads and nothing writes; create one with attn_plan_config.rows 0";
        let refused = || Failure::new(Status::Parameter, sentence);
        self.append.as_ref().ok_or_else(refused)
    }

    /// Refuses a page table that ends before the plan's longest length.
    pub(crate) fn check_table(&self, page_table_stride: usize) -> Result<(), Failure> {
        let reach = page_table_stride.saturating_mul(self.layout.page_size());
        if reach < self.plan.max_kv_len() {
            let sentence = format!(
                "page_table_stride is {page_table_stride}, but the plan's longest length, {}, needs more pages",
                self.plan.max_kv_len()
            );
            return Err(Failure::new(Status::Shape, sentence));
        }
        Ok(())
    }

    /// The sequences in the library's pages.
    fn sequences(&self, pages: &Pages) -> Result<PagedSequences, Failure> {
        self.appends()?;
        self.check_table(pages.page_table_stride)?;
        pages.sequences(&self.layout, self.residual_slots())
    }

    /// New tokens in device memory.
    fn new_rows(&self, tokens: &Tokens) -> Result<KvRows, Failure> {
        given("k", tokens.k)?;
        if !self.layout.format().latents {
            given("v", tokens.v)?;
        }
        tokens.on_device(&self.layout)
    }

    pub(crate) fn decode_args(
        &self,
        kv: DeviceKv,
        rows: &Rows,
        buffers: &Buffers,
    ) -> Result<DecodeArgs, Failure> {
        rows.check_on_device(&self.problem)?;
        let has_blocks = self.plan.query_blocks_bytes() > 0;
        Ok(DecodeArgs {
            q: given("q", rows.q)?,
            out: given("out", rows.out)?,
            dtype: on_device(rows.dtype)?,
            lse: address(rows.lse),
            kv,
            query_blocks: match has_blocks {
                true => given("query_blocks", buffers.query_blocks)?,
                false => DeviceAddress::NULL,
            },
            alibi_slopes: match self.problem.scores.alibi_slopes {
                Some(_) => given("alibi_slopes", buffers.alibi_slopes)?,
                None => DeviceAddress::NULL,
            },
            sinks: match self.problem.scores.sinks {
                Some(_) => given("sinks", buffers.sinks)?,
                None => DeviceAddress::NULL,
            },
            workspace: given("workspace", buffers.workspace)?,
            scratch: address(buffers.scratch),
        })
    }
}

/// Attends: enqueues the step on `stream`, a CUstream or cudaStream_t of the device's primary context, which is current. A CUDA graph can capture it,
/// and reads lengths and pages anew each time that it runs.
///
/// # Safety
/// `plan` has not been destroyed. The structs' addresses are device memory as documented, and stay so until the work has run. On the device, lengths
/// are 0 to max_tokens, and pages are below num_pages. ATTN_CUDA=check=1 in the environment checks them before each launch, outside of graphs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_attend(
    plan: *const Plan,
    pages: *const Pages,
    rows: *const Rows,
    buffers: *const Buffers,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (plan, pages, rows, buffers) = unsafe {
            (
                handle("plan", plan)?,
                config(pages)?,
                config(rows)?,
                config(buffers)?,
            )
        };
        let args = plan.decode_args(DeviceKv::Paged(plan.sequences(&pages)?), &rows, &buffers)?;
        let gpu = plan.device.cuda("plan")?;
        // SAFETY: this function's contract.
        Ok(unsafe { gpu.decode_on(&plan.plan, Stream::from_raw(stream), &args) }?)
    })
}

/// Attends shards of the sequences, for a plan with attn_plan_config.spans: enqueues the step on `stream`, which leaves the states of the shards' spans.
/// What all shards leave, one behind the other, attn_transfer_merge_spans makes into results: for integer formats the bits of one GPU over all tokens.
/// Of `rows` only q and its dtype are read.
///
/// # Safety
/// Everything that attn_plan_attend needs; `spans` has room for attn_plan_info.spans states of each row. On the device, a shard with tokens_after is whole spans of 1024.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_attend_spans(
    plan: *const Plan,
    pages: *const Pages,
    rows: *const Rows,
    buffers: *const Buffers,
    spans: *const Spans,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (plan, pages, rows, buffers, spans) = unsafe {
            (
                handle("plan", plan)?,
                config(pages)?,
                config(rows)?,
                config(buffers)?,
                config(spans)?,
            )
        };
        let to = spans.args()?;
        // Neither results nor a workspace are touched, so any address stands for them.
        let rows = Rows {
            out: spans.o.cast(),
            ..rows
        };
        let buffers = Buffers {
            workspace: spans.o.cast(),
            scratch: std::ptr::null_mut(),
            ..buffers
        };
        let args = plan.decode_args(DeviceKv::Paged(plan.sequences(&pages)?), &rows, &buffers)?;
        let gpu = plan.device.cuda("plan")?;
        // SAFETY: this function's contract.
        Ok(unsafe { gpu.attend_spans_on(&plan.plan, Stream::from_raw(stream), &args, &to) }?)
    })
}

/// Appends as many new tokens to each sequence, and attends: what attn_plan_append_slots and attn_plan_attend do, with the same bits, in less time.
/// `tokens` has `each` tokens of the first sequence, then those of the next; their places are the last ones of `pages->kv_lens`. With `tokens->rotary`, K
/// is rotated by its positions before it is stored, and rotary.q to where `rows->q` reads it, in the same launch; the plan was created with
/// attn_plan_config.rotary then.
///
/// # Safety
/// Everything that attn_plan_attend needs; nothing else is enqueued between what wrote the pages before and this; every page that a new token touches belongs to its
/// sequence alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_step(
    plan: *const Plan,
    pages: *const Pages,
    tokens: *const Tokens,
    each: usize,
    rows: *const Rows,
    buffers: *const Buffers,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (plan, pages, tokens, rows, buffers) = unsafe {
            (
                handle("plan", plan)?,
                config(pages)?,
                config(tokens)?,
                config(rows)?,
                config(buffers)?,
            )
        };
        let (new, sequences) = (plan.new_rows(&tokens)?, plan.sequences(&pages)?);
        // SAFETY: this function's contract.
        let rotary = unsafe { plan.rotary(&tokens) }?;
        let decode = plan.decode_args(DeviceKv::Paged(sequences), &rows, &buffers)?;
        let append = AppendArgs {
            rows: new,
            sequences,
            batch: plan.problem.batch(),
            tokens: each,
            rotary,
        };
        let gpu = plan.device.cuda("plan")?;
        let stream = Stream::from_raw(stream);
        // SAFETY: this function's contract.
        Ok(unsafe {
            gpu.append_decode_on(&plan.appends()?.step, &plan.plan, stream, &append, &decode)
        }?)
    })
}

/// Appends tokens that bring their places: enqueues the writes on `stream`. `slots`, int64 `[count]` in device memory: page·page_size + token of the
/// page; tokens with a negative slot are skipped. `residual_pages`, int32 `[count]` in device memory for formats that keep some tokens finer:
/// the residual page of the token's page, or -1 if that has none, as it is neither one of the first nor of the last pages of its sequence; else NULL. Of `pages`, the pool and the scales are read. With `tokens->rotary`, K is
/// rotated by its positions before it is stored, and the queries of the same tokens beside it; the plan was created with attn_plan_config.rotary then.
///
/// # Safety
/// Everything that attn_plan_attend needs; on the device, slots are in the pool, no two are the same, and their pages belong to one sequence each;
/// a sequence's tokens lie side by side, in order, with no token without a slot among them; K and V are finite, and
/// the positions of tokens with slots are rows of cos_sin.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_append_slots(
    plan: *const Plan,
    pages: *const Pages,
    tokens: *const Tokens,
    slots: *const i64,
    residual_pages: *const i32,
    count: usize,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (plan, pages, tokens) =
            unsafe { (handle("plan", plan)?, config(pages)?, config(tokens)?) };
        let new = plan.new_rows(&tokens)?;
        // SAFETY: this function's contract.
        let rotary = unsafe { plan.rotary(&tokens) }?;
        let args = SlotAppendArgs {
            rows: new,
            pool: pages.pool(&plan.layout)?,
            tensor_scales: tensor_scales([pages.k_scales, pages.v_scales], plan.layout.format())?,
            slots: given("slots", slots)?,
            residual_pages: address(residual_pages),
            tokens: count,
            rotary,
            centres: None,
        };
        // SAFETY: this function's contract.
        unsafe { enqueue(&plan.device, &plan.appends()?.slots, &args, stream) }
    })
}
