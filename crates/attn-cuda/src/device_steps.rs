//! Steps over a [`KvCache`] whose rows lie in device memory already, on the caller's stream: the host keeps pages and lengths, and no row leaves
//! the device.

use attn_core::{
    Append, CachedSequences, Error, KvCache, PageStore, Problem, Recent, TokenWrite, Window,
    events,
    segments::{SPAN_TOKENS, num_spans},
};
use attn_kernels::cuda::KvLayout;
use cudarc::driver::{CudaEvent, result, sys};

use crate::native::{
    DecodeArgs, DeviceAddress, DeviceKv, Dtype, KvRows, NativeAppend, NativePlan, PagedSequences,
    PlanKind, SlotAppendArgs, SpansArgs, Stream, alibi_slopes_log2, launch_decode_as, prepare,
};
use crate::{
    backend::FOREIGN_CACHE,
    device_tables::DeviceTables,
    error::{BACKEND, failed},
    gpu::CudaBackend,
    sizes,
    staging::{DeviceLists, Lists, Scratch, Staging},
    store::CudaPages,
    upload::bytes_of,
};

/// Plans that are kept for the steps that come: those of decoding, of drafts, of a prompt's pieces.
const KEPT_PLANS: usize = 8;

/// Queries and outputs in device memory, `[query tokens, num_q_heads, head_dim]`, sequence after sequence.
#[derive(Debug, Clone, Copy)]
pub struct QueryRows {
    /// The queries.
    pub q: DeviceAddress,
    /// The outputs.
    pub out: DeviceAddress,
    /// Number format of `q` and `out`.
    pub dtype: Dtype,
    /// f32 `[query tokens, num_q_heads]` for the log-sum-exps, or null.
    pub lse: DeviceAddress,
}

/// Queries in device memory, as [`QueryRows::q`], and where the states of the spans that they see go.
#[derive(Debug, Clone, Copy)]
pub struct SpanRows {
    /// The queries.
    pub q: DeviceAddress,
    /// Number format of `q`.
    pub dtype: Dtype,
    /// Spans of 1024 tokens, at least those of the longest sequence, 1 to 1024. States of spans that a sequence does not have are those that see no token.
    pub spans: usize,
    /// f32 `[spans][query tokens, num_q_heads][2]`: maxima, −∞ where a row sees no token of a span, and sums.
    pub max_sums: DeviceAddress,
    /// f32 `[spans][query tokens, num_q_heads][head_dim]`; not written where a row sees no token.
    pub o: DeviceAddress,
}

/// What the steps of one [`KvCache`] keep: page tables and a workspace on the device, and the plans of the latest problems.
///
/// Made by [`CudaBackend::prepare_steps`]. All steps of a cache go through one value, which orders them where their streams differ. Dropping it
/// waits for them, so drop it before the cache.
#[derive(Debug)]
pub struct DeviceSteps {
    gpu: CudaBackend,
    append: NativeAppend,
    plans: Recent<(PlanKind, Problem), NativePlan>,
    staging: Staging,
    /// Slots and residual pages of an append.
    places: Scratch,
    /// Lengths, page tables and the problem's lists.
    tables: DeviceLists,
    workspace: Scratch,
    /// Bytes at the workspace's start that are zero once the steps before have run.
    zeroed: usize,
    /// Recorded behind the latest step.
    done: CudaEvent,
}

impl CudaBackend {
    /// Prepares steps over a cache of this backend. Loads (at first compiles) the kernel of appends.
    ///
    /// # Errors
    /// [`Error::WrongBackend`] for another backend's cache; [`Error::Device`].
    pub fn prepare_steps(&self, cache: &KvCache) -> Result<DeviceSteps, Error> {
        self.store(cache)?;
        self.device.bind()?;
        let done = self.device.context.new_event(None);
        Ok(DeviceSteps {
            append: self.prepare_append(cache.config())?,
            done: done.map_err(failed("making an event"))?,
            gpu: CudaBackend {
                device: self.device.clone(),
            },
            plans: Recent::new(KEPT_PLANS),
            staging: Staging::default(),
            places: Scratch::default(),
            tables: DeviceLists::default(),
            workspace: Scratch::default(),
            zeroed: 0,
        })
    }
}

impl DeviceSteps {
    /// Appends tokens to several sequences at once, as [`KvCache::append_batch`] does: enqueues the writes on `stream`, and enters the tokens into
    /// the cache's table. The bytes are those of the host's append.
    ///
    /// # Safety
    /// - `stream` is a live stream of the device's primary context.
    /// - `tokens` are as many rows as `appends` say, in device memory of the documented type, aligned to 16 bytes, and stay so until the work has
    ///   run; K and V are finite and within the scheme's magnitudes.
    ///
    /// # Errors
    /// Those of [`KvCache::append_with`]; [`Error::WrongBackend`]; [`Error::Parameter`] while `stream` is captured into a graph;
    /// [`Error::Device`]. Lengths and pages are unchanged then.
    pub unsafe fn append(
        &mut self,
        cache: &mut KvCache,
        appends: &[Append],
        tokens: &KvRows,
        stream: Stream,
    ) -> Result<(), Error> {
        self.gpu.store(cache)?;
        self.begin(stream)?;
        // The store copies a page that a fork shares on its own stream.
        let own = self.gpu.device.stream.cu_stream();
        self.order(own)?;
        cache.append_with(appends, |store, writes| {
            let store = store.as_any().downcast_ref::<CudaPages>();
            let store = store.ok_or(FOREIGN_CACHE)?;
            // SAFETY: this function's contract; the places come from the cache, whose pages the store has.
            unsafe { self.write_places(store, 0, writes, tokens, stream) }
        })
    }

    /// Begins a model's step, as [`KvCache::reserve`] does, behind the steps before on their streams: pages that it copies or takes again hold what these
    /// wrote.
    ///
    /// # Errors
    /// Those of [`KvCache::reserve`]; [`Error::WrongBackend`], [`Error::Device`]. Lengths and pages are unchanged then.
    pub fn reserve(&mut self, cache: &mut KvCache, appends: &[Append]) -> Result<(), Error> {
        self.gpu.store(cache)?;
        self.gpu.device.bind()?;
        self.order(self.gpu.device.stream.cu_stream())?;
        cache.reserve(appends)
    }

    /// Writes one layer of the open step, as [`KvCache::write`] does: enqueues the writes on `stream`. The bytes are those of the host's write. Before
    /// [`KvCache::cancel_step`] call [`DeviceSteps::wait`].
    ///
    /// # Safety
    /// Those of [`DeviceSteps::append`], with as many rows as the step's appends say.
    ///
    /// # Errors
    /// Those of [`KvCache::write_with`]; [`Error::WrongBackend`]; [`Error::Parameter`] while `stream` is captured into a graph; [`Error::Device`].
    /// The layer counts as not written then.
    pub unsafe fn write(
        &mut self,
        cache: &mut KvCache,
        layer: usize,
        tokens: &KvRows,
        stream: Stream,
    ) -> Result<(), Error> {
        self.gpu.store_of(cache.layer(layer)?)?;
        self.begin(stream)?;
        cache.write_with(layer, |store, writes| {
            let store = store.as_any().downcast_ref::<CudaPages>();
            let store = store.ok_or(FOREIGN_CACHE)?;
            // SAFETY: this function's contract; the places come from the cache, whose pages the store has.
            unsafe { self.write_places(store, layer, writes, tokens, stream) }
        })
    }

    /// Enqueues the writes of an append to a layer.
    ///
    /// # Safety
    /// Those of [`DeviceSteps::append`]; `writes` are places of the store's cache.
    unsafe fn write_places(
        &mut self,
        store: &CudaPages,
        layer: usize,
        writes: &[TokenWrite],
        tokens: &KvRows,
        stream: Stream,
    ) -> Result<(), Error> {
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
            rows: *tokens,
            pool: store.pages(layer, store.num_pages()),
            tensor_scales: store.tensor_scale_addresses(layer),
            slots: base.offset(slots),
            residual_pages: base.offset(residuals).given(has_window),
            tokens: writes.len(),
            rotary: None,
        };
        // SAFETY: this function's contract; the lists are copied ahead on the same stream.
        let launched = unsafe { self.gpu.append_slots_on(&self.append, stream, &args) };
        self.end(stream).and(launched)
    }

    /// Attends: enqueues the step on `stream`. The problem gives heads, modifiers and query tokens; its lengths are taken from `sequences`, which may be
    /// those of a layer ([`CacheLayer::sequences`](attn_core::CacheLayer::sequences)).
    ///
    /// # Safety
    /// - `stream` is a live stream of the device's primary context.
    /// - `rows` are as many as the problem says, in device memory of the documented type, aligned to 16 bytes, and stay so until the work has run;
    ///   outputs overlap nothing that runs meanwhile; queries are finite and within [`Error::QueryRange`].
    ///
    /// # Errors
    /// Those of [`CachedSequences::check_problem`] and [`CudaBackend::prepare`]; [`Error::WrongBackend`]; [`Error::Parameter`] while `stream` is
    /// captured into a graph; [`Error::Device`].
    pub unsafe fn attend(
        &mut self,
        sequences: &CachedSequences<'_>,
        problem: &Problem,
        rows: &QueryRows,
        stream: Stream,
    ) -> Result<(), Error> {
        let (problem, longest) = self.checked(sequences, problem)?;
        let _step = events::attend(BACKEND, &problem);
        self.begin(stream)?;
        let plan = self.plan(PlanKind::Known, sequences, &problem, planned_len(longest))?;
        // SAFETY: this function's contract; pages and lengths are the cache's, which `DeviceTables` compares with the pool.
        let launched = unsafe { self.launch(sequences, &problem, &plan, rows, None, stream) };
        self.end(stream).and(launched)
    }

    /// Attends a shard of each of these sequences, whose problem says how many tokens follow ([`Problem::tokens_after`]): enqueues a launch that leaves
    /// the states of its spans, which [`CudaBackend::merge_spans_on`] merges with those of other shards. Sinks belong to the merge.
    ///
    /// # Safety
    /// Those of [`DeviceSteps::attend`], with `max_sums` and `o` as outputs of the documented sizes.
    ///
    /// # Errors
    /// Those of [`DeviceSteps::attend`]; [`Error::Parameter`] for fewer spans than the longest sequence has; those of [`Problem::check_shards`].
    pub unsafe fn attend_spans(
        &mut self,
        sequences: &CachedSequences<'_>,
        problem: &Problem,
        rows: &SpanRows,
        stream: Stream,
    ) -> Result<(), Error> {
        let (mut problem, longest) = self.checked(sequences, problem)?;
        problem.check_shards()?;
        problem.sinks = None;
        if rows.spans < num_spans(longest).max(1) {
            return Err(Error::parameter(
                "spans",
                format_args!("{} for a sequence of {longest} tokens", rows.spans),
                "one for each 1024 tokens of the longest sequence, and one at least",
            ));
        }
        let _step = events::attend(BACKEND, &problem);
        self.begin(stream)?;
        let planned = rows.spans.saturating_mul(SPAN_TOKENS);
        let plan = self.plan(PlanKind::Spans, sequences, &problem, planned)?;
        let states = [rows.max_sums, rows.o];
        let rows = QueryRows {
            q: rows.q,
            out: DeviceAddress::NULL,
            dtype: rows.dtype,
            lse: DeviceAddress::NULL,
        };
        // SAFETY: as for `attend`; the plan leaves as many states as `rows` has spans.
        let launched =
            unsafe { self.launch(sequences, &problem, &plan, &rows, Some(states), stream) };
        self.end(stream).and(launched)
    }

    /// The problem with the sequences' lengths, compared with the cache, and the longest one.
    fn checked(
        &self,
        sequences: &CachedSequences<'_>,
        problem: &Problem,
    ) -> Result<(Problem, usize), Error> {
        self.gpu.store_of(sequences.layer())?;
        let mut problem = problem.clone();
        problem.kv_lens.clone_from(&sequences.table().lens);
        sequences.check_problem(&problem)?;
        let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
        Ok((problem, longest))
    }

    /// The plan for the problem with sequences of up to `len` tokens.
    fn plan(
        &mut self,
        kind: PlanKind,
        sequences: &CachedSequences<'_>,
        problem: &Problem,
        len: usize,
    ) -> Result<NativePlan, Error> {
        let config = sequences.cache().config();
        let mut planned = problem.clone();
        planned.kv_lens = vec![len; problem.batch()];
        if kind == PlanKind::Spans {
            // Read on the device; other numbers need no other plan.
            planned.tokens_after.clear();
        }
        let device = &self.gpu.device;
        self.plans.get_or_make((kind, planned), |(kind, planned)| {
            let layout = KvLayout::Pages(config.page_size);
            let plan = prepare(*kind, device, planned, config.format, layout)?;
            events::prepared(BACKEND, planned, config.format);
            Ok(plan)
        })
    }

    /// Copies the step's lists, and enqueues its launch; `states` are the maxima and sums and O of spans, for a plan that leaves them.
    ///
    /// # Safety
    /// Those of [`DeviceSteps::attend`] or of [`DeviceSteps::attend_spans`]; `plan` is for the problem.
    unsafe fn launch(
        &mut self,
        sequences: &CachedSequences<'_>,
        problem: &Problem,
        plan: &NativePlan,
        rows: &QueryRows,
        states: Option<[DeviceAddress; 2]>,
        stream: Stream,
    ) -> Result<(), Error> {
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
        let slopes = alibi_slopes_log2(problem.alibi_slopes.as_deref().unwrap_or(&[]));
        let sinks = problem.sinks.as_deref().unwrap_or(&[]);
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
        let states = states.map(|[max_sums, o]| SpansArgs {
            tokens_after: after_at.given(!after.is_empty()),
            max_sums,
            o,
        });
        // SAFETY: this function's contract; lists and workspace are this value's, written ahead on the same stream.
        unsafe { launch_decode_as(device, plan, stream.raw(), &args, 0, states.as_ref()) }
    }

    /// Waits for all steps: what the host then reads of the cache's pages is what they wrote.
    ///
    /// # Errors
    /// [`Error::Device`] with a failure of the steps' own.
    pub fn wait(&self) -> Result<(), Error> {
        self.gpu.device.bind()?;
        let waited = self.done.synchronize();
        waited.map_err(failed("waiting for steps"))
    }

    /// Binds the context, and lets `stream` wait for the steps before.
    fn begin(&self, stream: Stream) -> Result<(), Error> {
        self.gpu.device.bind()?;
        // SAFETY: the stream is alive by the contract of the functions that call this.
        let status = unsafe { result::stream::is_capturing(stream.raw()) };
        if status.map_err(failed("asking a stream for its state"))?
            != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
        {
            return Err(Error::parameter(
                "stream",
                format_args!("one that is captured into a graph"),
                "a stream that runs: a cache's lengths and pages change on the host; capture decode_on and append_slots_on (attn.torch.Plan), which read them on the device",
            ));
        }
        self.order(stream.raw())
    }

    /// Lets work that comes on `stream` wait for the steps so far.
    fn order(&self, stream: sys::CUstream) -> Result<(), Error> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is this value's; the stream is the device's own or the caller's, alive by contract.
        unsafe { result::stream::wait_event(stream, self.done.cu_event(), flags) }
            .map_err(failed("ordering steps"))
    }

    /// Records that the step's work ends here.
    fn end(&self, stream: Stream) -> Result<(), Error> {
        // SAFETY: the event is this value's; the stream is alive by the contract of the functions that call this.
        unsafe { result::event::record(self.done.cu_event(), stream.raw()) }
            .map_err(failed("recording the end of a step"))
    }
}

impl Drop for DeviceSteps {
    fn drop(&mut self) {
        // An error is the device's, which the next call reports.
        let _ = self.wait();
    }
}

/// The longest length that a plan is made for where the longest sequence has `len` tokens: at most an eighth more, so that a growing sequence
/// needs few plans.
fn planned_len(len: usize) -> usize {
    let step = (len.max(1).next_power_of_two() / 16).max(64);
    len.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_serves_an_eighth_more_tokens_at_most() {
        let [mut plans, mut last] = [0, usize::MAX];
        for len in 0..=1 << 20 {
            let planned = planned_len(len);
            assert!(planned >= len && planned <= 1 << 20, "{len}");
            assert!(planned - len < 64 || 8 * (planned - len) <= len, "{len}");
            plans += usize::from(planned != last);
            last = planned;
        }
        assert!(plans < 120, "{plans}");
    }
}
