//! The common trait: rows in host memory are copied to the device and go the way of rows that lie there.

use std::sync::{Arc, Mutex, PoisonError};

use attn_core::{
    Arithmetic, CacheConfig, DecodeAttention, DecodeStep, DeviceInfo, DeviceSteps, Dtype, Error,
    KvCache, KvFormat, KvMemory, PageStore, Plan, Problem, StepInputs, StepOutputs, Unsupported,
    grid::GridCheck,
};
use attn_kernels::cuda::KvLayout;
use cudarc::driver::{DriverError, result};

use crate::{
    attention::{Attention, AttentionKv, AttentionRows},
    device::Device,
    device_steps::CudaSteps,
    error::{BACKEND, failed},
    gpu::CudaBackend,
    images,
    native::{self, NativePlan, PlanKind, Stream},
    sizes,
    staged_view::{StagedView, layout_of},
    staging::Parts,
    store::CudaPages,
};

impl CudaBackend {
    /// Attends with queries and results in host memory: copies queries, the lists that differ from the step before, and results, and waits once.
    fn attend(
        &self,
        step: &StepInputs<'_>,
        StepOutputs { out, mut lse, .. }: StepOutputs<'_>,
    ) -> Result<(), Error> {
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
        let plan = planned.native(layout, has_centres, step.plan())?;
        let q = step.q().packed(0..problem.query_tokens())?;
        let mut out = out.packed()?;
        check_lengths(problem, &q, out.as_mut_slice(), lse.as_deref())?;
        let at_q = parts.add(&q)?;
        let at_out = parts.reserve(size_of_val(out.as_mut_slice()))?;
        let at_lse = parts.reserve(lse.as_deref().map_or(0, size_of_val))?;
        let mut calls = self.host_calls();
        let base = calls.rows(device, parts.bytes())?;
        let attention = Attention {
            problem,
            plan: &plan,
            rows: AttentionRows {
                q: base.offset(at_q),
                dtype: Dtype::F32,
                out: base.offset(at_out),
                lse: base.offset(at_lse).given(lse.is_some()),
                states: None,
            },
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
        // - Rows: `check_lengths` has compared queries and outputs with the problem that `plan` is for; parts are aligned to 256 bytes. `DecodeStep::new` has compared each
        //   query with the range.
        // - K and V: of a live cache of this backend, which `step` borrows, or a view that `DecodeStep::new` has compared with the problem, copied ahead.
        // - Lifetime: all other memory is the calls', whose lock is held until `wait` has waited; one stream.
        unsafe { attention.enqueue(device, &mut calls.memory, stream) }?;
        let AttentionRows {
            out: from,
            lse: of_lse,
            ..
        } = attention.rows;
        let mut copy_out = || -> Result<(), DriverError> {
            // SAFETY: `parts` has as many bytes as `out` has; it outlives `wait`.
            unsafe { result::memcpy_dtoh_async(out.as_mut_slice(), from.get(), stream.raw()) }?;
            // SAFETY: the same for `lse`.
            lse.as_deref_mut().map_or(Ok(()), |lse| unsafe {
                result::memcpy_dtoh_async(lse, of_lse.get(), stream.raw())
            })
        };
        copy_out().map_err(failed("copying the results"))?;
        wait.finish().map_err(failed("decoding"))?;
        out.finish();
        Ok(())
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

/// What launches of a plan differ in: the layout of K and V, and whether keys lack centres of K.
type Planning = (KvLayout, bool);

/// The launches of a plan.
struct Planned {
    device: Arc<Device>,
    by_layout: Mutex<Vec<(Planning, Arc<NativePlan>)>>,
}

impl Planned {
    /// The launch for K and V that lie so, prepared where it is the first. With centres of K it is exact: fast launches dequantize pages, and know no centres.
    fn native(
        &self,
        layout: KvLayout,
        has_centres: bool,
        plan: &Plan,
    ) -> Result<Arc<NativePlan>, Error> {
        let key = (layout, has_centres);
        let known = self.by_layout.lock();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        if let Some((_, native)) = known.iter().find(|(of, _)| *of == key) {
            return Ok(native.clone());
        }
        let mut problem = plan.problem().clone();
        if has_centres {
            problem.scores.arithmetic = Arithmetic::Exact;
        }
        let (kind, format) = (PlanKind::Known, plan.format());
        let of = (format, layout);
        let native = native::prepare(kind, &self.device, &problem, of, has_centres)?;
        let native = Arc::new(native);
        known.push((key, native.clone()));
        Ok(native)
    }
}

/// The layout of a cache that asks for no other page size.
const USUAL: KvLayout = KvLayout::Pages(64);

/// Refuses slices of other lengths than the problem's.
fn check_lengths(
    problem: &Problem,
    q: &[f32],
    out: &[f32],
    lse: Option<&[f32]>,
) -> Result<(), Error> {
    let rows = problem.rows();
    let elems = sizes::product("elements of a query", &[rows, problem.head_dim])?;
    for (what, given, needed) in [
        ("q", q.len(), elems),
        ("out", out.len(), elems),
        ("lse", lse.map_or(rows, <[f32]>::len), rows),
    ] {
        if given != needed {
            return Err(Error::Length {
                what,
                given,
                needed,
            });
        }
    }
    Ok(())
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
        let has_centres = format.check_centres().is_ok();
        self.planned(&plan)?.native(USUAL, has_centres, &plan)?;
        Ok(plan)
    }

    fn device_steps(&self, cache: &KvCache) -> Result<Box<dyn DeviceSteps>, Error> {
        Ok(Box::new(CudaSteps::new(self, cache)?))
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        let (inputs, outputs) = step.parts();
        self.attend(&inputs, outputs)
    }
}
