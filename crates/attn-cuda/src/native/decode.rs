//! Attention as a launch: what is prepared for a problem, and how it is enqueued.

use std::{
    ffi::c_void,
    sync::{Arc, OnceLock},
};

use attn_core::{Error, KvFormat, Problem, error::refuse, segments::num_spans};
use attn_kernels::cuda::{
    KvLayout,
    params::{CheckParams, DecodeParams, QueryBlock},
};
use cudarc::driver::sys;

use super::{
    check::{Checked, check, check_kernel},
    decode_args::{CentresArgs, DecodeArgs, SpansArgs},
    launch_plan::LaunchPlan,
    list_blocks::ListBlocksArgs,
    op::{self, Prepared, prepare_op},
    query_blocks::{PlanFor, PlanKind},
    rows::{self, RowsOf},
};
use crate::{
    device::{Device, LoadedKernel},
    error::failed,
    gpu::CudaBackend,
    handles::Stream,
    sizes,
};

/// A prepared decode launch: for one problem's heads and modifiers, and lengths up to the problem's longest.
#[derive(Debug, Clone)]
pub struct NativePlan {
    pub(crate) problem: Problem,
    format: KvFormat,
    layout: KvLayout,
    /// The kernels for keys as they are and for keys that lack centres of K: one from the beginning, the other from its first launch on.
    kernels: [OnceLock<Arc<LoadedKernel>>; 2],
    /// `dequantize.cu`, `dequantize_rows.cu` or `gather_pages.cu`, where it makes the pages that are attended.
    dequantize: Option<Arc<LoadedKernel>>,
    /// Where the device lists the blocks.
    list_blocks: Option<Prepared<ListBlocksArgs>>,
    check: Option<Arc<LoadedKernel>>,
    launch_plan: LaunchPlan,
}

impl NativePlan {
    /// Bytes of device memory that every launch needs, aligned to 256.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.launch_plan.workspace_bytes()
    }

    /// Bytes of the workspace that launches of any plans may share, aligned to 256: [`DecodeArgs::scratch`].
    #[must_use]
    pub fn scratch_bytes(&self) -> usize {
        self.launch_plan.scratch_bytes()
    }

    /// Bytes at the workspace's start to zero once; launches leave them zero.
    #[must_use]
    pub fn zeroed_bytes(&self) -> usize {
        self.launch_plan.zeroed_bytes()
    }

    /// What launches read at [`DecodeArgs::query_blocks`]: which query tokens are attended together. None where every sequence has the same
    /// number of query tokens, up to 16, and for a plan of [`PlanKind::Ragged`], whose list the device makes.
    #[must_use]
    pub fn query_blocks(&self) -> &[QueryBlock] {
        self.launch_plan.query_blocks()
    }

    /// Bytes of the list of query blocks, whoever makes it.
    #[must_use]
    pub fn query_blocks_bytes(&self) -> usize {
        self.launch_plan.num_blocks * size_of::<QueryBlock>()
    }

    /// Query tokens of all sequences, at most.
    #[must_use]
    pub fn max_query_tokens(&self) -> usize {
        self.problem.query_tokens()
    }

    /// The longest `kv_len` that a launch takes.
    #[must_use]
    pub fn max_kv_len(&self) -> usize {
        self.launch_plan.max_kv_len
    }

    /// CTAs of the launch.
    #[must_use]
    pub fn grid(&self) -> usize {
        self.launch_plan.launch.grid.iter().product()
    }

    /// Format of the cache.
    #[must_use]
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// How K and V lie.
    pub(super) fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Whether the kernel for keys that lack centres of K is loaded.
    pub(super) fn has_centres(&self) -> bool {
        self.kernels[1].get().is_some()
    }

    /// What the plan is for.
    pub(super) fn kind(&self) -> PlanKind {
        match (&self.list_blocks, self.launch_plan.leaves_spans()) {
            (Some(_), _) => PlanKind::Ragged,
            (None, true) => PlanKind::Spans,
            (None, false) => PlanKind::Known,
        }
    }

    /// Spans of the longest sequence that a launch takes, at least one: states of each row that [`CudaBackend::attend_spans_on`] leaves.
    #[must_use]
    pub fn spans(&self) -> usize {
        num_spans(self.max_kv_len()).max(1)
    }

    /// The kernel for keys as they are, or for keys that lack centres of K. Loads (at first compiles) it at the first call, which is not for use inside a capture.
    fn kernel(&self, device: &Device, centres: bool) -> Result<&Arc<LoadedKernel>, Error> {
        let place = &self.kernels[usize::from(centres)];
        if let Some(kernel) = place.get() {
            return Ok(kernel);
        }
        let plan = &self.launch_plan;
        let instance = match centres {
            true => plan.instance.with_centres(),
            false => plan.instance,
        };
        let kernel = device.kernel(&instance, plan.shared_bytes)?;
        Ok(place.get_or_init(|| kernel))
    }

    /// The kernel of [`ListBlocksArgs`].
    ///
    /// # Errors
    /// [`Error::Parameter`] for a plan that knows the query tokens of each sequence.
    pub fn list_blocks(&self) -> Result<&Prepared<ListBlocksArgs>, Error> {
        let Some(list_blocks) = &self.list_blocks else {
            let given = "a plan that knows the query tokens of each sequence";
            let allowed = "a ragged plan; or pass this one's query blocks to its launches";
            return refuse("plan", given, allowed);
        };
        Ok(list_blocks)
    }
}

/// Prepares launches, with the kernel for keys that lack centres of K, or as they are.
pub(crate) fn prepare(
    PlanFor { kind, centres }: PlanFor,
    device: &Device,
    problem: &Problem,
    (format, layout): (KvFormat, KvLayout),
) -> Result<NativePlan, Error> {
    let launch_plan = LaunchPlan::new(
        kind,
        device.limits(),
        &device.preferences,
        problem,
        format,
        layout,
    )?;
    let dequantize = launch_plan
        .dequantized
        .map(|pages| device.kernel(&pages.instance, 0))
        .transpose()?;
    let list_blocks = match kind {
        PlanKind::Known | PlanKind::Spans => None,
        PlanKind::Ragged => Some(prepare_op(device, launch_plan.list_numbers(problem)?)?),
    };
    let check = check_kernel(device)?;
    let mut problem = problem.clone();
    if kind == PlanKind::Spans {
        // Sinks belong to the end of the merge, and the device says what lies ahead and follows.
        problem.scores.sinks = None;
        problem.tokens_before.clear();
        problem.tokens_after.clear();
    }
    let plan = NativePlan {
        dequantize,
        list_blocks,
        problem,
        format,
        layout,
        kernels: Default::default(),
        check,
        launch_plan,
    };
    plan.kernel(device, centres)?;
    Ok(plan)
}

/// What a decode has beside its arguments.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Beside<'a> {
    /// New tokens of each sequence that an append enqueued just before writes; 0 behind anything else.
    pub(crate) appended: usize,
    /// Where the states of spans go, in place of results.
    pub(crate) spans: Option<&'a SpansArgs>,
    /// What the cache's keys lack.
    pub(crate) centres: Option<&'a CentresArgs>,
}

/// Enqueues one decode. `appended`: as [`Beside`] has it.
///
/// # Safety
/// Those of [`CudaBackend::decode_on`], with 0 tokens, or of [`CudaBackend::append_decode_on`]; the device's context is current.
pub(crate) unsafe fn launch_decode(
    device: &Device,
    plan: &NativePlan,
    stream: sys::CUstream,
    args: &DecodeArgs,
    appended: usize,
) -> Result<(), Error> {
    let beside = Beside {
        appended,
        ..Beside::default()
    };
    // SAFETY: this function's contract.
    unsafe { launch_decode_as(device, plan, stream, args, &beside) }
}

/// Refuses a plan for spans to decode, and any other to attend spans.
pub(super) fn check_purpose(plan: &NativePlan, attends_spans: bool) -> Result<(), Error> {
    if plan.launch_plan.leaves_spans() == attends_spans {
        return Ok(());
    }
    let given = match attends_spans {
        true => "a plan whose launches finish their rows",
        false => "a plan for spans, whose launches leave their states",
    };
    let allowed = "a plan for spans to attend spans, any other to decode";
    refuse("plan", format_args!("{given}"), allowed)
}

/// Launches a decode; with `spans`, a plan's launch leaves the states of its spans there.
///
/// # Safety
/// Those of [`launch_decode`], and with `spans` those of [`CudaBackend::attend_spans_on`]. With `centres`, on the device, every sequence of the problem has a row, and there are
/// centres of that.
pub(crate) unsafe fn launch_decode_as(
    device: &Device,
    plan: &NativePlan,
    stream: sys::CUstream,
    args: &DecodeArgs,
    beside: &Beside<'_>,
) -> Result<(), Error> {
    let Beside {
        appended,
        spans,
        centres,
    } = *beside;
    check_purpose(plan, spans.is_some())?;
    if plan.problem.rows() == 0 {
        return Ok(());
    }
    let mut params = plan.launch_plan.params(&plan.problem, args)?;
    if let Some(spans) = spans {
        let launch_plan = &plan.launch_plan;
        params = launch_plan.spans_params(&plan.problem, spans, params)?;
    }
    let kernel = plan.kernel(device, centres.is_some())?;
    if let Some(centres) = centres {
        params = plan.launch_plan.centres_params(centres, params)?;
    }
    if !plan.layout.is_rows() {
        // A launch waits for all of the append where blocks end before the sequence does, and where another launch writes what it reads.
        let early = plan.launch_plan.num_blocks == 0 && plan.dequantize.is_none();
        params.appended = sizes::int("tokens appended", if early { appended } else { 0 })?;
    }
    if let Some(kernel) = &plan.check {
        let limits = CheckParams {
            max_kv_len: sizes::int_limit(plan.launch_plan.max_kv_len),
            num_pages: sizes::axis(args.kv.num_pages()),
            page_size: sizes::int("page_size", plan.layout.table_page_size())?,
            head_dim: sizes::int("head_dim", plan.problem.head_dim.k)?,
            query_tokens: sizes::int("query tokens", plan.problem.query_tokens())?,
            num_blocks: match plan.list_blocks {
                Some(_) => sizes::int("query blocks", plan.launch_plan.num_blocks)?,
                None => 0,
            },
            ..CheckParams::default()
        };
        let checked = Checked {
            doing: "checking a decode",
            arrays: DecodeParams {
                batch: sizes::int("sequences", plan.problem.batch())?,
                ..params
            },
            limits,
        };
        // SAFETY: this function's contract.
        unsafe { check(device, kernel, stream, checked) }?;
    }
    let (made, params) = plan.launch_plan.dequantize_params(args, params);
    if let (Some(made), Some(kernel), Some(pages)) =
        (made, &plan.dequantize, &plan.launch_plan.dequantized)
    {
        // SAFETY: `attn_dequantize`, `attn_dequantize_rows` and `attn_gather_pages` take one DequantizeParams, asserted on both sides; it reads what the launches below would, and writes the part of the
        // workspace that they read in its place; the rest is this function's contract.
        unsafe { op::launch(kernel, stream, pages.grid(), made) }
            .map_err(failed("dequantizing"))?;
    }
    let rows_of = RowsOf {
        problem: &plan.problem,
        format: plan.format,
        layout: plan.layout,
        max_kv_len: plan.launch_plan.max_kv_len,
    };
    let mut maps = rows::maps(device, &rows_of, &args.kv);
    for mut params in plan.launch_plan.launches(params) {
        // What `attn_decode` takes on views, and in pages.
        let mut both = [(&raw mut params).cast(), (&raw mut maps).cast::<c_void>()];
        let arguments = if plan.layout.is_rows() && plan.dequantize.is_none() {
            &mut both[..]
        } else {
            &mut both[..1]
        };
        // SAFETY:
        // - Arguments: `attn_decode` takes one DecodeParams; its size and offsets are asserted in params.rs and params.h. Compiled
        //   for views it takes RowMaps, too, whose size is asserted in params.rs and params.h.
        // - Bounds, aliasing, lifetime: this function's contract.
        unsafe { kernel.launch_teams(stream, &plan.launch_plan.launch, arguments) }
            .map_err(failed("decoding"))?;
    }
    Ok(())
}

impl CudaBackend {
    /// Prepares decode launches for the problem's batch, heads and modifiers, and for lengths up to its longest.
    ///
    /// `layout` says how K and V will lie. Loads (at first compiles) the kernel; not for use inside a capture.
    ///
    /// # Errors
    /// Those of [`Problem::check`]; [`attn_core::Unsupported`] without a kernel; [`Error::Device`].
    pub fn prepare(
        &self,
        problem: &Problem,
        format: KvFormat,
        layout: KvLayout,
    ) -> Result<NativePlan, Error> {
        self.prepare_for(problem, format, layout, PlanFor::default())
    }

    /// As [`CudaBackend::prepare`], for launches of another kind, or over keys that lack centres of K.
    ///
    /// # Errors
    /// [`Error::Parameter`] for centres of a format whose caches have none; those of [`CudaBackend::prepare`].
    pub fn prepare_for(
        &self,
        problem: &Problem,
        format: KvFormat,
        layout: KvLayout,
        plan_for: PlanFor,
    ) -> Result<NativePlan, Error> {
        if plan_for.centres {
            format.check_centres()?;
        }
        self.device.bind()?;
        let plan = prepare(plan_for, &self.device, problem, (format, layout))?;
        plan.launch_plan.check_longest(problem)?;
        Ok(plan)
    }

    /// Enqueues one decode step on the caller's stream. Allocates nothing, synchronizes nothing, and can be captured.
    ///
    /// With `ATTN_CUDA=check=1` in the environment of [`CudaBackend::open`], a checking launch goes first and is waited for.
    ///
    /// # Safety
    /// - `stream` is a live `CUstream` of this backend's context (the device's primary one), which is current on this thread.
    /// - Every address in `args` is device memory of the documented type and length, aligned to 16 bytes (`workspace`, `scratch`: 256), and
    ///   stays so until the work has run; `out`, `lse`, the workspace and the scratch memory overlap nothing else that runs meanwhile.
    /// - On the device, every `kv_lens` is 0 to [`NativePlan::max_kv_len`]; every page that a length reaches, and the residual pages of the
    ///   first and last ones, are in the pool; queries are finite and within `Error::QueryRange`; K and V were written by append.
    /// - The workspace's first [`NativePlan::zeroed_bytes`] bytes were zeroed before its first launch, and again whenever
    ///   another plan used it; launches that share a workspace do not overlap.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other K and V than the plan's layout says, for strides that are not allowed, and for numbers of more than 31 bits;
    /// [`Error::Device`] with the driver's refusal, or with [`CudaError::Check`](crate::CudaError::Check).
    pub unsafe fn decode_on(
        &self,
        plan: &NativePlan,
        stream: Stream,
        args: &DecodeArgs,
    ) -> Result<(), Error> {
        // SAFETY: this function's contract.
        unsafe { launch_decode(&self.device, plan, stream.raw(), args, 0) }
    }

    /// Enqueues, as [`CudaBackend::decode_on`] does, one decode step over pages whose keys lack centres of K, which a cache writes. The first one of a plan loads
    /// its kernel, and is not for use inside a capture.
    ///
    /// # Safety
    /// Those of [`CudaBackend::decode_on`]; the centres are device memory as documented, of finite elements, and stay so until the work has run.
    ///
    /// # Errors
    /// Those of [`CudaBackend::decode_on`]; [`Error::Parameter`] for a format whose caches have no centres, and for a plan of
    /// [`Arithmetic::Fast`](attn_core::Arithmetic::Fast).
    pub unsafe fn decode_with_centres_on(
        &self,
        plan: &NativePlan,
        stream: Stream,
        args: &DecodeArgs,
        centres: &CentresArgs,
    ) -> Result<(), Error> {
        let beside = Beside {
            centres: Some(centres),
            ..Beside::default()
        };
        // SAFETY: this function's contract.
        unsafe { launch_decode_as(&self.device, plan, stream.raw(), args, &beside) }
    }

    /// Enqueues the attention of a shard, and leaves the states of its spans, which [`MergeSpansArgs`](crate::native::MergeSpansArgs) merges with those of other shards:
    /// the states of [`DecodeAttention::attend_spans`](attn_core::DecodeAttention::attend_spans) on the CPU, bit for bit for integer formats. Can be captured.
    ///
    /// `out`, `lse`, `sinks` and `workspace` of `args` are not used.
    ///
    /// # Safety
    /// Those of [`CudaBackend::decode_on`]; `to` is device memory of the documented sizes, which nothing else uses meanwhile. On the device, no
    /// `tokens_after` is negative, `tokens_before` are multiples of 1024 from 0 on, a sequence has at most 2^20 tokens with them, and where tokens follow, `kv_lens` is a
    /// multiple of 1024: other shards have no wild access, and other bits than one device.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a plan of another kind than [`PlanKind::Spans`]; those of [`CudaBackend::decode_on`].
    pub unsafe fn attend_spans_on(
        &self,
        plan: &NativePlan,
        stream: Stream,
        args: &DecodeArgs,
        to: &SpansArgs,
    ) -> Result<(), Error> {
        let beside = Beside {
            spans: Some(to),
            ..Beside::default()
        };
        // SAFETY: this function's contract.
        unsafe { launch_decode_as(&self.device, plan, stream.raw(), args, &beside) }
    }
}
