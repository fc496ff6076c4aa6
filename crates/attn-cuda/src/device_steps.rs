//! Calls over a [`KvCache`] whose rows lie in the GPU's memory, on the caller's stream: the host keeps pages and lengths, and no row leaves the device.

use attn_core::{
    Attended, CacheAccess, DeviceRows, DeviceSteps, Dtype, Error, KEPT_PLANS, KvCache, PageStore,
    Problem, Recent, TokenWrite, Window, events, segments::SPAN_TOKENS,
};
use attn_kernels::cuda::KvLayout;
use cudarc::driver::{CudaEvent, result, sys};

use crate::native::{
    DecodeArgs, DeviceAddress, DeviceKv, NativeAppend, NativePlan, PagedSequences, PlanKind,
    SlotAppendArgs, SpansArgs, Stream, alibi_slopes_log2, launch_decode_as, prepare,
};
use crate::{
    device_tables::DeviceTables,
    error::{BACKEND, FOREIGN_CACHE, failed},
    gpu::CudaBackend,
    memory::CallRows,
    sizes,
    staging::{DeviceLists, Lists, Scratch, Staging},
    store::{CudaPages, check_writes},
    upload::bytes_of,
};

/// What the calls over one [`KvCache`] keep: page tables and a workspace on the device, and the plans of the latest problems.
///
/// All calls over a cache go through one value, which orders them where their streams differ. Dropping it waits for them, so it is dropped before the cache.
#[derive(Debug)]
pub(crate) struct CudaSteps {
    gpu: CudaBackend,
    append: NativeAppend,
    plans: Recent<(PlanKind, Problem), NativePlan>,
    staging: Staging,
    /// Slots and residual pages of an append.
    places: Scratch,
    /// Lengths, page tables and the problem's lists.
    tables: DeviceLists,
    workspace: Scratch,
    /// Bytes at the workspace's start that are zero once the calls before have run.
    zeroed: usize,
    /// Recorded behind the latest call.
    done: CudaEvent,
}

/// Where attention reads queries and writes results: outputs and log-sum-exps, or the states of spans.
struct LaunchRows {
    q: DeviceAddress,
    dtype: Dtype,
    out: DeviceAddress,
    lse: DeviceAddress,
    /// Maxima and sums, and O.
    states: Option<[DeviceAddress; 2]>,
}

impl CudaSteps {
    /// Prepares calls over a cache of this backend. Loads (at first compiles) the kernel of appends.
    pub(crate) fn new(gpu: &CudaBackend, cache: &KvCache) -> Result<Self, Error> {
        gpu.store(cache)?;
        gpu.device.bind()?;
        let done = gpu.device.context.new_event(None);
        Ok(CudaSteps {
            append: gpu.prepare_append(cache.config())?,
            done: done.map_err(failed("making an event"))?,
            gpu: CudaBackend {
                device: gpu.device.clone(),
            },
            plans: Recent::new(KEPT_PLANS),
            staging: Staging::default(),
            places: Scratch::default(),
            tables: DeviceLists::default(),
            workspace: Scratch::default(),
            zeroed: 0,
        })
    }

    /// The rows of a call on this GPU.
    fn call(&self) -> CallRows {
        CallRows::on(self.gpu.device.context.ordinal())
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
        self.order(self.gpu.device.stream.cu_stream())
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
        let own = store.as_any().downcast_ref::<CudaPages>();
        let own = own.filter(|store| store.lies_on(&self.gpu.device) && store.has_layer(layer));
        let own = own.filter(|store| store.layout() == *self.append.layout());
        let store = own.ok_or(FOREIGN_CACHE)?;
        let [k_len, v_len] = kv.map(|rows| rows.shape().into_iter().product());
        // Another's store can lead to this one, and have more pages.
        check_writes(&store.layout(), store.num_pages(), writes, k_len, v_len)?;
        self.order(stream.raw())?;
        let layout = store.layout();
        let page_size = layout.page_size() as i64;
        let slot = |w: &TokenWrite| i64::from(w.page) * page_size + w.token as i64;
        let slots: Vec<i64> = writes.iter().map(slot).collect();
        let residual = |w: &TokenWrite| w.residual_page.unwrap_or(u32::MAX);
        let residuals: Vec<u32> = writes.iter().map(residual).collect();
        let mut lists = Lists::default();
        let [slots, residuals] = [bytes_of(&slots), bytes_of(&residuals)].map(|x| lists.add(x));
        let (device, done) = (&self.gpu.device, &self.done);
        let (base, _) = self.places.room(device, done, lists.bytes().len())?;
        let bytes = lists.bytes();
        // SAFETY: `room` has given as many bytes; each step records `done` behind its one copy from this ring or waits for it.
        unsafe { self.staging.copy(device, done, bytes, base, stream.raw()) }
            .map_err(failed("copying an append's places"))?;
        let has_window = layout.format().window() != Window::None;
        let args = SlotAppendArgs {
            rows,
            pool: store.pages(layer, store.num_pages()),
            tensor_scales: store.tensor_scale_addresses(layer),
            slots: base.offset(slots),
            residual_pages: base.offset(residuals).given(has_window),
            tokens: writes.len(),
            rotary: None,
        };
        // SAFETY: stream and rows are those of `CudaMemory`s, whose makers have promised them, and `tokens` has compared them with what kernels read; the places lie in
        // the store's pool; the lists are copied ahead on the same stream.
        let launched = unsafe { self.gpu.append_slots_on(&self.append, stream, &args) };
        self.end(stream).and(launched)
    }

    fn attend(
        &mut self,
        attended: &Attended<'_>,
        q: DeviceRows<'_>,
        out: DeviceRows<'_>,
        lse: Option<DeviceRows<'_>>,
    ) -> Result<(), Error> {
        check_shape(&q, attended.rows())?;
        check_shape(&out, attended.rows())?;
        let mut call = self.call();
        let (q, dtype) = call.queries(&q)?;
        let out = call.results(&out, dtype, "q")?;
        let lse = match lse {
            Some(lse) => {
                check_shape(&lse, attended.lse_rows())?;
                call.results(&lse, Dtype::F32, "log-sum-exps are")?
            }
            None => DeviceAddress::NULL,
        };
        let rows = LaunchRows {
            q,
            dtype,
            out,
            lse,
            states: None,
        };
        self.check_cache(attended)?;
        let _step = events::attend(BACKEND, attended.problem());
        self.begin(call.stream())?;
        let plan = self.plan(PlanKind::Known, attended, attended.problem().to_plan())?;
        self.launch(attended, &plan, &rows, call.stream())
    }

    fn attend_spans(
        &mut self,
        attended: &Attended<'_>,
        q: DeviceRows<'_>,
        spans: usize,
        states: [DeviceRows<'_>; 2],
    ) -> Result<(), Error> {
        let problem = attended.problem();
        problem.check_shards()?;
        problem.check_spans(spans)?;
        check_shape(&q, attended.rows())?;
        for (rows, needed) in states.iter().zip(attended.state_rows(spans)) {
            check_shape(rows, needed)?;
        }
        let mut call = self.call();
        let (q, dtype) = call.queries(&q)?;
        let [max_sums, o] = states.map(|rows| call.results(&rows, Dtype::F32, "states are"));
        let rows = LaunchRows {
            q,
            dtype,
            out: DeviceAddress::NULL,
            lse: DeviceAddress::NULL,
            states: Some([max_sums?, o?]),
        };
        self.check_cache(attended)?;
        let _step = events::attend(BACKEND, problem);
        self.begin(call.stream())?;
        let mut planned = problem.clone();
        planned.kv_lens = vec![spans * SPAN_TOKENS; problem.batch()];
        // Read on the device, or by the merge; others need no other plan.
        planned.tokens_after.clear();
        planned.scores.sinks = None;
        let plan = self.plan(PlanKind::Spans, attended, planned)?;
        self.launch(attended, &plan, &rows, call.stream())
    }

    fn wait(&self) -> Result<(), Error> {
        self.gpu.device.bind()?;
        let done = self.done.synchronize();
        done.map_err(failed("waiting for steps"))
    }
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
        "a stream that runs: lengths and pages of a KvCache change on the host; capture decode_on and append_slots_on, which read them on the device",
    ))
}

impl CudaSteps {
    /// Refuses a cache of another backend, or of other pages than plans and appends were prepared for.
    fn check_cache(&self, attended: &Attended<'_>) -> Result<(), Error> {
        let store = self.gpu.store_of(attended.sequences().layer())?;
        match store.layout() == *self.append.layout() {
            true => Ok(()),
            false => Err(FOREIGN_CACHE),
        }
    }

    /// The plan for this problem.
    fn plan(
        &mut self,
        kind: PlanKind,
        attended: &Attended<'_>,
        planned: Problem,
    ) -> Result<NativePlan, Error> {
        let config = attended.sequences().cache().config();
        let device = &self.gpu.device;
        self.plans.get_or_make((kind, planned), |(kind, planned)| {
            let layout = KvLayout::Pages(config.page_size);
            let plan = prepare(*kind, device, planned, config.format, layout)?;
            events::prepared(BACKEND, planned, config.format);
            Ok(plan)
        })
    }

    /// Enqueues the launch, and records its end.
    fn launch(
        &mut self,
        attended: &Attended<'_>,
        plan: &NativePlan,
        rows: &LaunchRows,
        stream: Stream,
    ) -> Result<(), Error> {
        // SAFETY: stream and rows are those of `CudaMemory`s, whose makers have promised them; their shapes are the problem's, and `CallRows` has compared them with what
        // kernels read. Pages and lengths are the cache's, which `DeviceTables` compares with the pool; `plan` is for sequences that are as long.
        let launched = unsafe { self.enqueue(attended, plan, rows, stream) };
        self.end(stream).and(launched)
    }

    /// Copies the call's lists, and enqueues its launch.
    ///
    /// # Safety
    /// - `stream` is a live stream of the device's primary context, and waits for the calls before.
    /// - `rows` are as many as the problem says, in device memory of their types, aligned to 16 bytes, and stay so until the work has run; outputs overlap nothing that
    ///   runs meanwhile.
    /// - `plan` is for the problem with sequences that are as long or longer, and leaves states where `rows` has room for them.
    unsafe fn enqueue(
        &mut self,
        attended: &Attended<'_>,
        plan: &NativePlan,
        rows: &LaunchRows,
        stream: Stream,
    ) -> Result<(), Error> {
        let (sequences, problem) = (attended.sequences(), attended.problem());
        let layer = sequences.layer();
        let store = self.gpu.store_of(layer)?;
        let config = sequences.cache().config();
        let residual_slots = config
            .format
            .residual_slots(config.page_size, config.max_q_len);
        let tables = DeviceTables::of_cache(
            problem,
            sequences.table(),
            [config.page_size, residual_slots],
            store.num_pages(),
        )?;
        let ints = |what, list: &[usize]| {
            let ints = list.iter().map(|&n| sizes::int(what, n));
            ints.collect::<Result<Vec<i32>, _>>()
        };
        let lens = ints("kv_len", &problem.kv_lens)?;
        let after = ints("tokens_after", &problem.tokens_after)?;
        let slopes = alibi_slopes_log2(problem.scores.alibi_slopes.as_deref().unwrap_or(&[]));
        // Sinks of shards belong to the merge.
        let sinks = problem
            .scores
            .sinks
            .as_deref()
            .filter(|_| rows.states.is_none());
        let sinks = sinks.unwrap_or(&[]);
        let mut lists = Lists::default();
        let at = [
            bytes_of(&lens),
            bytes_of(&tables.table),
            bytes_of(&tables.residuals),
            bytes_of(plan.query_blocks()),
            bytes_of(&slopes),
            bytes_of(sinks),
            bytes_of(&after),
        ]
        .map(|list| lists.add(list));
        let (device, done) = (&self.gpu.device, &self.done);
        let (staging, stream_raw) = (&mut self.staging, stream.raw());
        // SAFETY: each step records `done` behind its work, and `begin` has let the stream wait for it.
        let base = unsafe {
            self.tables
                .write(staging, (device, done), &lists, stream_raw)
        }?;
        let (workspace, is_new) = self.workspace.room(device, done, plan.workspace_bytes())?;
        let zeroed = if is_new { 0 } else { self.zeroed };
        if zeroed < plan.zeroed_bytes() {
            // SAFETY: the workspace has more bytes than are zeroed.
            unsafe { result::memset_d8_async(workspace.get(), 0, plan.zeroed_bytes(), stream_raw) }
                .map_err(failed("zeroing a workspace"))?;
        }
        self.zeroed = plan.zeroed_bytes();
        let [
            lens,
            table,
            residuals,
            blocks,
            slopes_at,
            sinks_at,
            after_at,
        ] = at.map(|at| base.offset(at));
        let args = DecodeArgs {
            q: rows.q,
            out: rows.out,
            dtype: rows.dtype,
            lse: rows.lse,
            kv: DeviceKv::Paged(PagedSequences {
                pool: store.pages(layer.index(), store.pages_to_read()),
                page_table: table,
                page_table_stride: tables.stride,
                residual_pages: residuals.given(residual_slots > 0),
                residual_slots,
                kv_lens: lens,
                tensor_scales: store.tensor_scale_addresses(layer.index()),
            }),
            query_blocks: blocks.given(!plan.query_blocks().is_empty()),
            alibi_slopes: slopes_at.given(!slopes.is_empty()),
            sinks: sinks_at.given(!sinks.is_empty()),
            workspace,
        };
        let states = rows.states.map(|[max_sums, o]| SpansArgs {
            tokens_after: after_at.given(!after.is_empty()),
            max_sums,
            o,
        });
        // SAFETY: this function's contract; lists and workspace are this value's, written ahead on the same stream.
        unsafe { launch_decode_as(device, plan, stream.raw(), &args, 0, states.as_ref()) }
    }

    /// Binds the context, and lets `stream` wait for the calls before.
    fn begin(&self, stream: Stream) -> Result<(), Error> {
        self.gpu.device.bind()?;
        check_runs(stream)?;
        self.order(stream.raw())
    }

    /// Lets work that comes on `stream` wait for the calls so far.
    fn order(&self, stream: sys::CUstream) -> Result<(), Error> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is this value's; the stream is the device's own or the caller's, alive by the promise of `CudaMemory`'s maker.
        unsafe { result::stream::wait_event(stream, self.done.cu_event(), flags) }
            .map_err(failed("ordering calls"))
    }

    /// Records that the call's work ends here.
    fn end(&self, stream: Stream) -> Result<(), Error> {
        // SAFETY: the event is this value's; the stream is alive by the promise of `CudaMemory`'s maker.
        unsafe { result::event::record(self.done.cu_event(), stream.raw()) }
            .map_err(failed("recording the end of a call"))
    }
}

impl Drop for CudaSteps {
    fn drop(&mut self) {
        // An error is the device's, which the next call reports.
        let _ = self.wait();
    }
}
