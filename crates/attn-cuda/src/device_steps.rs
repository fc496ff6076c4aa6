//! Calls over a [`KvCache`] whose rows lie in the GPU's memory, on the caller's stream: the host keeps pages and lengths, and no row leaves the device.

use attn_core::{
    Arithmetic, Attended, CacheAccess, CacheConfig, DeviceResults, DeviceRows, DeviceSteps, Dtype,
    Error, KEPT_PLANS, KvCache, PageLayout, PageStore, Problem, Recent, TokenWrite, events,
    segments::SPAN_TOKENS,
};
use attn_kernels::cuda::KvLayout;
use cudarc::driver::{result, sys};

use crate::{
    attention::{Attention, AttentionKv, AttentionRows},
    call_memory::CallMemory,
    error::{BACKEND, FOREIGN_CACHE, failed},
    gpu::CudaBackend,
    memory::CallRows,
    native::{DeviceAddress, NativePlan, PlanFor, PlanKind, Stream, prepare},
    store::CudaPages,
};

/// What the calls over one [`KvCache`] keep: their memory on the device, and the plans of the latest problems.
///
/// All calls over a cache go through one value, which orders them where their streams differ. Dropping it waits for them, so it is dropped before the cache.
#[derive(Debug)]
pub(crate) struct CudaSteps {
    gpu: CudaBackend,
    /// The cache's, which plans are made for.
    layout: PageLayout,
    plans: Recent<(PlanKind, Problem), NativePlan>,
    memory: CallMemory,
}

impl CudaSteps {
    /// Prepares calls over a cache of this backend.
    pub(crate) fn new(gpu: &CudaBackend, cache: &KvCache) -> Result<Self, Error> {
        let layout = gpu.store(cache)?.layout();
        gpu.device.bind()?;
        let memory = CallMemory::new(&gpu.device);
        Ok(CudaSteps {
            gpu: gpu.share(),
            layout,
            plans: Recent::new(KEPT_PLANS),
            memory: memory.map_err(failed("making an event"))?,
        })
    }

    /// Refuses pages of another layout than those of the cache that the calls were prepared for.
    fn check_layout(&self, store: &CudaPages) -> Result<(), Error> {
        match store.layout() == self.layout {
            true => Ok(()),
            false => Err(FOREIGN_CACHE),
        }
    }

    /// The rows of a call on this GPU.
    fn call(&self) -> CallRows {
        CallRows::on(self.gpu.device.context.ordinal())
    }

    /// Where queries and results lie, and the stream that orders them.
    fn rows(
        &self,
        attended: &Attended<'_>,
        q: &DeviceRows<'_>,
        results: &DeviceResults<'_>,
    ) -> Result<(AttentionRows, Stream), Error> {
        check_shape(q, attended.problem().q_shape())?;
        let mut call = self.call();
        let (q, dtype) = call.queries(q)?;
        let null = DeviceAddress::NULL;
        let (mut out_at, mut lse_at, mut states) = (null, null, None);
        match results {
            DeviceResults::Rows { out, lse } => {
                check_shape(out, attended.problem().out_shape())?;
                out_at = call.results(out, dtype, "q")?;
                if let Some(lse) = lse {
                    check_shape(lse, attended.lse_rows())?;
                    lse_at = call.results(lse, Dtype::F32, "log-sum-exps are")?;
                }
            }
            DeviceResults::Spans { spans, max_sums, o } => {
                let [of_max_sums, of_o] = attended.state_rows(*spans);
                check_shape(max_sums, of_max_sums)?;
                check_shape(o, of_o)?;
                let [max_sums, o] =
                    [max_sums, o].map(|rows| call.results(rows, Dtype::F32, "states are"));
                states = Some([max_sums?, o?]);
            }
        }
        let rows = AttentionRows {
            q,
            dtype,
            out: out_at,
            lse: lse_at,
            states,
        };
        Ok((rows, call.stream()))
    }

    /// The plan for this problem.
    fn plan(
        &mut self,
        kind: PlanKind,
        config: &CacheConfig,
        mut planned: Problem,
    ) -> Result<NativePlan, Error> {
        if config.centres {
            // Fast launches dequantize pages, and know no centres.
            planned.scores.arithmetic = Arithmetic::Exact;
        }
        let device = &self.gpu.device;
        self.plans.get_or_make((kind, planned), |(kind, planned)| {
            let layout = KvLayout::Pages(config.page_size);
            let of = (config.format, layout);
            let plan_for = PlanFor {
                kind: *kind,
                centres: config.centres,
            };
            let plan = prepare(plan_for, device, planned, of)?;
            events::prepared(BACKEND, planned, config.format);
            Ok(plan)
        })
    }
}

impl DeviceSteps for CudaSteps {
    fn check_write(&mut self, kv: [DeviceRows<'_>; 2]) -> Result<(), Error> {
        let mut call = self.call();
        call.tokens(kv)?;
        self.gpu.device.bind()?;
        check_runs(call.stream())
    }

    fn order_store(&mut self) -> Result<(), Error> {
        self.gpu.device.bind()?;
        // SAFETY: the device's own stream is alive, and its context current.
        unsafe {
            self.memory
                .begin(Stream::of(self.gpu.device.stream.cu_stream()))
        }
    }

    fn write(
        &mut self,
        _: &CacheAccess,
        store: &dyn PageStore,
        layer: usize,
        writes: &[TokenWrite],
        kv: [DeviceRows<'_>; 2],
    ) -> Result<(), Error> {
        let mut call = self.call();
        let rows = call.tokens(kv)?;
        let stream = call.stream();
        // Another's store can lead to this one, and have more pages.
        let store = self.gpu.own_store(store)?;
        self.check_layout(store)?;
        let slots = store.slots(layer, writes, kv.map(|rows| rows.shape()))?;
        let rows = rows.skip_tokens(slots.tokens.start);
        self.gpu.device.bind()?;
        // SAFETY: the stream is one of `CudaMemory`s, whose makers have promised that it is alive and of the device's context, which is current.
        unsafe { self.memory.begin(stream) }?;
        // SAFETY: stream and rows are those of `CudaMemory`s, whose makers have promised them, and `tokens` has compared them with what kernels read; `slots` is the store's for these rows.
        let launched =
            unsafe { store.enqueue_writes(&mut self.memory, stream, layer, &slots, rows) };
        // SAFETY: as for `begin`.
        unsafe { self.memory.end(stream) }.and(launched)
    }

    fn attend(
        &mut self,
        attended: &Attended<'_>,
        q: DeviceRows<'_>,
        results: DeviceResults<'_>,
    ) -> Result<(), Error> {
        let (problem, sequences) = (attended.problem(), attended.sequences());
        let (kind, planned) = planned(problem, &results)?;
        let (rows, stream) = self.rows(attended, &q, &results)?;
        let layer = sequences.layer();
        let store = self.gpu.store_of(layer)?;
        self.check_layout(store)?;
        let kv = AttentionKv::of_layer(store, layer, sequences.table(), problem)?;
        let _step = events::attend(BACKEND, problem);
        self.gpu.device.bind()?;
        check_runs(stream)?;
        let plan = self.plan(kind, sequences.cache().config(), planned)?;
        let attention = Attention {
            problem,
            plan: &plan,
            rows,
            kv,
            view_at: DeviceAddress::NULL,
        };
        // SAFETY: the stream is one of `CudaMemory`s, whose makers have promised that it is alive and of the device's context, which is current.
        unsafe { self.memory.begin(stream) }?;
        // SAFETY: stream and rows are those of `CudaMemory`s, whose makers have promised them; their shapes are the problem's, and `CallRows` has compared them with what
        // kernels read. Pages and lengths are the cache's; `plan` is for sequences that are as long.
        let launched = unsafe { attention.enqueue(&self.gpu.device, &mut self.memory, stream) };
        // SAFETY: as for `begin`.
        unsafe { self.memory.end(stream) }.and(launched)
    }

    fn wait(&self) -> Result<(), Error> {
        self.gpu.device.bind()?;
        self.memory.wait()
    }
}

/// The kind of plan that leaves such results, and its problem.
fn planned(problem: &Problem, results: &DeviceResults<'_>) -> Result<(PlanKind, Problem), Error> {
    let DeviceResults::Spans { spans, .. } = results else {
        return Ok((PlanKind::Known, problem.to_plan()));
    };
    problem.check_shards()?;
    problem.check_spans(*spans)?;
    let mut planned = problem.clone();
    planned.kv_lens = vec![spans * SPAN_TOKENS; problem.batch()];
    // Read on the device, or by the merge; others need no other plan.
    planned.tokens_before.clear();
    planned.tokens_after.clear();
    planned.scores.sinks = None;
    Ok((PlanKind::Spans, planned))
}

/// Refuses rows of another shape than the call's.
fn check_shape(rows: &DeviceRows<'_>, needed: [usize; 3]) -> Result<(), Error> {
    if rows.shape() == needed {
        return Ok(());
    }
    Err(Error::Shape {
        what: rows.what(),
        given: rows.shape(),
        needed,
    })
}

/// Refuses a stream that is captured; it is a live one of the current context.
fn check_runs(stream: Stream) -> Result<(), Error> {
    // SAFETY: the stream is alive by the promise of `CudaMemory`'s maker.
    let status = unsafe { result::stream::is_capturing(stream.raw()) };
    if status.map_err(failed("asking a stream for its state"))?
        == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    {
        return Ok(());
    }
    Err(Error::parameter(
        "stream",
        format_args!("one that is captured into a graph"),
        "a stream that runs: lengths and pages of a KvCache change on the host; capture decode_on and SlotAppendArgs, which read them on the device",
    ))
}

impl Drop for CudaSteps {
    fn drop(&mut self) {
        // An error is the device's, which the next call reports.
        let _ = self.wait();
    }
}
