//! The common trait: rows in host memory are copied to the device and go the way of rows that lie there.

use std::sync::{Arc, Mutex, PoisonError};

use attn_core::{
    Arithmetic, CacheConfig, DecodeAttention, DecodeStep, DeviceInfo, DeviceSteps, Dtype, Error,
    KvCache, KvFormat, KvMemory, PagePool, PageStore, Plan, Problem, SpanStates, SpansStep,
    StepInputs, StepOutputs, Unsupported, error::reserve, grid::GridCheck, segments::num_spans,
};
use attn_kernels::cuda::KvLayout;
use cudarc::driver::result;

use crate::{
    attention::{Attention, AttentionKv, AttentionRows},
    device::Device,
    device_steps::CudaSteps,
    error::{BACKEND, failed},
    gpu::CudaBackend,
    images,
    native::{self, DeviceAddress, NativePlan, PlanFor, PlanKind, Stream},
    sizes,
    staged_view::{StagedView, layout_of},
    staging::Parts,
    store::CudaPages,
};

impl CudaBackend {
    /// Attends with queries and results in host memory: outputs, and log-sum-exps if there are any.
    fn attend(
        &self,
        step: &StepInputs<'_>,
        StepOutputs { out, lse, .. }: StepOutputs<'_>,
    ) -> Result<(), Error> {
        let mut out = out.packed()?;
        let of_out = out.as_mut_slice();
        check_lengths(step.problem(), of_out, lse.as_deref())?;
        self.run(step, HostResults::Rows(of_out, lse))?;
        out.finish();
        Ok(())
    }

    /// Copies queries, the lists that differ from the step before, and results, and waits once.
    fn run(&self, step: &StepInputs<'_>, mut results: HostResults<'_>) -> Result<(), Error> {
        let device = &*self.device;
        device.bind()?;
        let (planned, problem) = (self.planned(step.plan())?, step.problem());
        let mut parts = Parts::default();
        let (layout, kv) = self.kv(step, &mut parts)?;
        let has_centres = matches!(
            &kv,
            AttentionKv::Pages {
                centres: Some(_),
                ..
            }
        );
        let plan_for = PlanFor {
            kind: results.kind(),
            centres: has_centres,
        };
        let plan = planned.native((plan_for, layout), step.plan())?;
        let q = step.q().packed(0..problem.query_tokens())?;
        check_elements(problem, problem.head_dim.k, "q", &q)?;
        let at_q = parts.add(&q)?;
        let mut places = [None; 2];
        for (place, result) in places.iter_mut().zip(results.slices()) {
            *place = result
                .map(|result| parts.reserve(size_of_val(result)))
                .transpose()?;
        }
        let mut calls = self.host_calls();
        let base = calls.rows(device, parts.bytes())?;
        let places = places.map(|at| at.map_or(DeviceAddress::NULL, |at| base.offset(at)));
        let attention = Attention {
            problem,
            plan: &plan,
            rows: results.rows(base.offset(at_q), places),
            kv,
            view_at: base,
        };
        let stream = Stream::of(device.stream.cu_stream());
        let wait = device.wait_on_drop().map_err(failed("decoding"))?;
        // SAFETY: the rows' memory, whose lock is held, has room for the parts; they outlive `wait`, which waits for the copies however this
        // function ends.
        unsafe { parts.copy(base, stream.raw()) }.map_err(failed("copying the inputs"))?;
        // SAFETY:
        // - Stream: the device's own, alive and of the current context; each call before has waited.
        // - Rows: `check_lengths` has compared queries and outputs with the problem that `plan` is for, `attend_spans` made states for all of its spans; parts are aligned to
        //   256 bytes. `DecodeStep::new` has compared each query with the range.
        // - K and V: of a live cache of this backend, which `step` borrows, or a view that `DecodeStep::new` has compared with the problem, copied ahead.
        // - Lifetime: all other memory is the calls', whose lock is held until `wait` has waited; one stream.
        unsafe { attention.enqueue(device, &mut calls.memory, stream) }?;
        for (from, result) in places.into_iter().zip(results.slices()) {
            // SAFETY: `parts` has as many bytes as the result has; it outlives `wait`.
            let copied = result.map_or(Ok(()), |result| unsafe {
                result::memcpy_dtoh_async(result, from.get(), stream.raw())
            });
            copied.map_err(failed("copying the results"))?;
        }
        wait.finish().map_err(failed("decoding"))
    }

    /// How K and V of a step lie, and K and V: pages of a cache, or a view's rows, for which it takes parts.
    fn kv<'a>(
        &self,
        step: &StepInputs<'a>,
        parts: &mut Parts<'a>,
    ) -> Result<(KvLayout, AttentionKv<'a>), Error> {
        let problem = step.problem();
        match step.kv().memory() {
            KvMemory::Pages(layer, table) => {
                let store = self.store_of(layer)?;
                let kv = AttentionKv::of_layer(store, layer, table, problem)?;
                Ok((KvLayout::Pages(store.layout().page_size()), kv))
            }
            KvMemory::View(view) => {
                let layout = layout_of(view, USUAL);
                let staged = StagedView::new(&self.device, parts, view, problem, layout)?;
                Ok((layout, AttentionKv::View(staged)))
            }
            KvMemory::Pool(_) => Err(PagePool::refused_by(BACKEND)),
        }
    }

    /// The launches of a plan that this backend made.
    fn planned<'a>(&self, plan: &'a Plan) -> Result<&'a Planned, Error> {
        let planned = plan.prepared::<Planned>();
        let own = planned.filter(|planned| Arc::ptr_eq(&planned.device, &self.device));
        own.ok_or(Error::WrongBackend {
            backend: BACKEND,
            what: "plan",
        })
    }
}

/// Where results go in host memory.
enum HostResults<'a> {
    /// Outputs, and log-sum-exps.
    Rows(&'a mut [f32], Option<&'a mut [f32]>),
    /// Maxima and sums, and O, of the states of spans.
    Spans(&'a mut [f32], &'a mut [f32]),
}

impl HostResults<'_> {
    fn kind(&self) -> PlanKind {
        match self {
            HostResults::Rows(..) => PlanKind::Known,
            HostResults::Spans(..) => PlanKind::Spans,
        }
    }

    fn slices(&mut self) -> [Option<&mut [f32]>; 2] {
        match self {
            HostResults::Rows(out, lse) => [Some(out), lse.as_deref_mut()],
            HostResults::Spans(max_sums, o) => [Some(max_sums), Some(o)],
        }
    }

    /// The rows of a launch with queries at `q`, and results where they are copied from.
    fn rows(&self, q: DeviceAddress, at: [DeviceAddress; 2]) -> AttentionRows {
        let ([out, lse], states) = match self {
            HostResults::Rows(..) => (at, None),
            HostResults::Spans(..) => ([DeviceAddress::NULL; 2], Some(at)),
        };
        AttentionRows {
            q,
            dtype: Dtype::F32,
            out,
            lse,
            states,
        }
    }
}

/// What launches of a plan differ in.
type Planning = (PlanFor, KvLayout);

/// The launches of a plan.
struct Planned {
    device: Arc<Device>,
    by_layout: Mutex<Vec<(Planning, Arc<NativePlan>)>>,
}

impl Planned {
    /// The launch for K and V that lie so, prepared where it is the first. With centres of K it is exact: fast launches dequantize pages, and know no centres.
    fn native(&self, key: Planning, plan: &Plan) -> Result<Arc<NativePlan>, Error> {
        let (plan_for, layout) = key;
        let known = self.by_layout.lock();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        if let Some((_, native)) = known.iter().find(|(of, _)| *of == key) {
            return Ok(native.clone());
        }
        let mut problem = plan.problem().clone();
        if plan_for.centres {
            problem.scores.arithmetic = Arithmetic::Exact;
        }
        if plan_for.kind == PlanKind::Spans {
            // Read on the device, or by the merge.
            problem.tokens_before.clear();
            problem.tokens_after.clear();
            problem.scores.sinks = None;
        }
        let of = (plan.format(), layout);
        let native = native::prepare(plan_for, &self.device, &problem, of)?;
        let native = Arc::new(native);
        known.push((key, native.clone()));
        Ok(native)
    }
}

/// The layout of a cache that asks for no other page size.
const USUAL: KvLayout = KvLayout::Pages(64);

/// Whether tokens lie in other shards.
fn is_shard(problem: &Problem) -> bool {
    let elsewhere = [&problem.tokens_before, &problem.tokens_after];
    elsewhere.into_iter().flatten().any(|tokens| *tokens > 0)
}

/// Refuses slices of other lengths than the problem's.
fn check_lengths(problem: &Problem, out: &[f32], lse: Option<&[f32]>) -> Result<(), Error> {
    check_elements(problem, problem.head_dim.v, "out", out)?;
    let rows = problem.rows();
    check_length("lse", lse.map_or(rows, <[f32]>::len), rows)
}

fn check_elements(
    problem: &Problem,
    dim: usize,
    what: &'static str,
    x: &[f32],
) -> Result<(), Error> {
    let sizes = [problem.rows(), dim];
    check_length(
        what,
        x.len(),
        sizes::product("elements of a query", &sizes)?,
    )
}

fn check_length(what: &'static str, given: usize, needed: usize) -> Result<(), Error> {
    if given == needed {
        return Ok(());
    }
    Err(Error::Length {
        what,
        given,
        needed,
    })
}

impl DecodeAttention for CudaBackend {
    fn device(&self) -> &DeviceInfo {
        &self.device.info
    }

    fn check_grid(&self) -> Result<Option<GridCheck>, Error> {
        self.device.bind()?;
        let check = self.device.check_exponential();
        check.map(Some).map_err(failed("checking the exponential"))
    }

    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported> {
        let defined = problem
            .check()
            .and_then(|()| format.check(problem.head_dim));
        defined.map_err(|error| Unsupported::Undefined {
            backend: BACKEND,
            reason: error.to_string(),
        })?;
        let instance = native::choose(&self.device, problem, format, USUAL)?;
        images::obtainable(&instance, self.device.known_target()).map_err(|error| {
            Unsupported::Absent {
                backend: BACKEND,
                reason: error.to_string(),
                next_step: "or use backend \"cpu\"".into(),
            }
        })
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        config.check()?;
        self.device.bind()?;
        let pages = CudaPages::new(self, config)?;
        KvCache::new(config.clone(), Box::new(pages))
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        let planned = Planned {
            device: self.device.clone(),
            by_layout: Mutex::default(),
        };
        let plan = Plan::new(BACKEND, problem, format, planned)?;
        // Pages of other sizes, contiguous caches, and caches that have centres of K, or none, against their format's habit, are prepared by their first step.
        let usual = PlanFor {
            kind: match is_shard(problem) {
                true => PlanKind::Spans,
                false => PlanKind::Known,
            },
            centres: format.check_centres().is_ok(),
        };
        self.planned(&plan)?.native((usual, USUAL), &plan)?;
        Ok(plan)
    }

    fn device_steps(&self, cache: &KvCache) -> Result<Box<dyn DeviceSteps>, Error> {
        Ok(Box::new(CudaSteps::new(self, cache)?))
    }

    fn attend_spans(&self, step: &SpansStep<'_>) -> Result<SpanStates, Error> {
        let inputs = step.inputs();
        let (rows, dim) = (inputs.problem().rows(), inputs.problem().head_dim.v);
        let spans = |problem: &Problem| {
            let longest = problem.kv_lens.iter().copied().max();
            num_spans(longest.unwrap_or(0)).max(1)
        };
        // A launch leaves states of all spans that its plan has.
        let [of_plan, own] = [inputs.plan().problem(), inputs.problem()].map(spans);
        let count = |each| sizes::product("states of spans", &[of_plan, rows, each]);
        let zeros = |count: usize| {
            let mut zeros = Vec::new();
            reserve("states of spans", &mut zeros, count)?;
            zeros.resize(count, 0.0f32);
            Ok::<_, Error>(zeros)
        };
        let (mut max_sums, mut o) = (zeros(count(2)?)?, zeros(count(dim)?)?);
        if rows > 0 {
            self.run(&inputs, HostResults::Spans(&mut max_sums, &mut o))?;
        }
        max_sums.truncate(own * rows * 2);
        o.truncate(own * rows * dim);
        SpanStates::new(rows, dim, max_sums, o)
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        let (inputs, outputs) = step.parts();
        self.attend(&inputs, outputs)
    }
}
