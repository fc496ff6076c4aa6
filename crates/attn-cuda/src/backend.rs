//! The common trait on top of the native entry: host slices in and out.

use std::sync::{Arc, Mutex, PoisonError};

use attn_core::{
    CacheConfig, CacheLayer, DecodeAttention, DecodeStep, DeviceInfo, DeviceSteps, Error, KvCache,
    KvFormat, KvMemory, PageStore, Plan, Problem, StepInputs, StepOutputs, Unsupported,
};
use attn_kernels::cuda::{KvLayout, instance};
use cudarc::driver::{DriverError, result};

use crate::{
    device::Device,
    device_steps::CudaSteps,
    error::{BACKEND, FOREIGN_CACHE, failed},
    gpu::CudaBackend,
    images,
    native::{self, DeviceKv, NativePlan, Pages, PlanKind},
    sizes,
    step::{Inputs, Parts, Placed},
    store::CudaPages,
    upload::Upload,
};

impl CudaBackend {
    fn attend(
        &self,
        step: &StepInputs<'_>,
        StepOutputs { out, mut lse, .. }: StepOutputs<'_>,
        layout: KvLayout,
    ) -> Result<(), Error> {
        let device = &self.device;
        device.bind()?;
        let problem = step.problem();
        let plan = self.planned(step.plan())?.native(layout, step.plan())?;
        let store = match step.kv().memory() {
            KvMemory::Pages(layer, _) => Some(self.store_of(layer)?),
            KvMemory::View(_) => None,
        };
        let inputs = Inputs::new(device, step, store, layout)?;
        let q = step.q().packed(0..problem.query_tokens())?;
        let mut out = out.packed()?;
        check_lengths(problem, &q, out.as_mut_slice(), lse.as_deref())?;
        let mut upload = Upload::default();
        let parts = Parts::reserve(&mut upload, step, &plan, &inputs, &q)?;
        let allocated = device.arena(upload.bytes());
        let (base, _lock) = allocated.map_err(failed("allocating for a decode"))?;
        let placed = Placed { base, parts };
        let kv = self.kv(step, &inputs, &placed)?;
        let args = placed.decode_args(kv, &plan, &inputs);
        let stream = device.stream.cu_stream();
        let wait = device.wait_on_drop().map_err(failed("decoding"))?;
        // SAFETY: the arena, whose lock is held, has room for the parts; they outlive `wait`, which waits for the copies however this
        // function ends.
        unsafe { upload.copy(base, stream) }.map_err(failed("copying the inputs"))?;
        // SAFETY: the workspace, a part of the arena, has more bytes than are zeroed.
        unsafe { result::memset_d8_async(args.workspace.get(), 0, plan.zeroed_bytes(), stream) }
            .map_err(failed("zeroing the workspace"))?;
        if let (Some(import), KvMemory::View(view)) = (&inputs.import, step.kv().memory()) {
            let args = placed.import_args(view, &inputs);
            // SAFETY: `DecodeStep::new` has compared the view's reach with its slices, by products that do not wrap, and strides beyond
            // 63 bits are multiplied by 0 alone. `Inputs` counts pages up to the longest length for each sequence, and `Parts` has
            // their bytes. All lies in the arena, whose lock is held until `wait` has waited.
            unsafe { native::launch_import(import, stream, &args) }?;
        }
        // SAFETY:
        // - Lengths: `check_lengths` has compared queries and outputs with the problem that `plan` is for.
        // - Pages: `DeviceTables::of_cache` has compared every page with the store's pool, and counted each sequence's. Imported ones are in order.
        // - Rows: as for the import; `decode` has seen that strides are whole chunks of 16 bytes.
        // - Queries: `DecodeStep::new` has compared each with the range.
        // - Lifetime: everything lies in the arena, whose lock is held until `wait` has waited, or in the cache, which `step` borrows;
        //   one stream. The workspace is zeroed ahead.
        unsafe { native::launch_decode(device, &plan, stream, &args, 0) }?;
        let mut copy_out = || -> Result<(), DriverError> {
            // SAFETY: `Parts` has reserved as many bytes as `out` has; it outlives `wait`.
            unsafe { result::memcpy_dtoh_async(out.as_mut_slice(), args.out.get(), stream) }?;
            // SAFETY: the same for `lse`.
            lse.as_deref_mut().map_or(Ok(()), |lse| unsafe {
                result::memcpy_dtoh_async(lse, args.lse.get(), stream)
            })
        };
        copy_out().map_err(failed("copying the results"))?;
        wait.finish().map_err(failed("decoding"))?;
        out.finish();
        Ok(())
    }

    /// K and V on the device.
    fn kv(
        &self,
        step: &StepInputs<'_>,
        inputs: &Inputs,
        placed: &Placed,
    ) -> Result<DeviceKv, Error> {
        Ok(match step.kv().memory() {
            KvMemory::Pages(layer, _) => {
                let store = self.store_of(layer)?;
                let pool = store.pages(layer.index(), store.pages_to_read());
                let scales = store.tensor_scale_addresses(layer.index());
                DeviceKv::Paged(placed.paged(inputs, pool, scales))
            }
            KvMemory::View(view) => {
                let rows = placed.rows(view);
                match &inputs.import {
                    None => DeviceKv::Rows(rows),
                    Some(import) => {
                        let at = placed.at(placed.parts.imported);
                        let pool = Pages::new(at, import.layout(), inputs.tables.table.len());
                        DeviceKv::Paged(placed.paged(inputs, pool, rows.tensor_scales))
                    }
                }
            }
        })
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

    /// The store of a cache that this backend made, whose pages are as the cache says.
    ///
    /// Another's store can lead to it (`PageStore::as_any`), and say something else of itself: what a launch relies on is compared with
    /// this store's own numbers.
    pub(crate) fn store<'a>(&self, cache: &'a KvCache) -> Result<&'a CudaPages, Error> {
        let store = cache.store().as_any().downcast_ref::<CudaPages>();
        store
            .filter(|store| store.lies_on(&self.device))
            .filter(|store| store.layout() == *cache.layout())
            .ok_or(FOREIGN_CACHE)
    }

    /// The store that has the layer.
    pub(crate) fn store_of<'a>(&self, layer: CacheLayer<'a>) -> Result<&'a CudaPages, Error> {
        let store = self.store(layer.cache())?;
        let own = Some(store).filter(|store| store.has_layer(layer.index()));
        own.ok_or(FOREIGN_CACHE)
    }
}

/// The launches of a plan.
struct Planned {
    device: Arc<Device>,
    by_layout: Mutex<Vec<(KvLayout, Arc<NativePlan>)>>,
}

impl Planned {
    /// The launch for K and V that lie so, prepared where it is the first.
    fn native(&self, layout: KvLayout, plan: &Plan) -> Result<Arc<NativePlan>, Error> {
        let known = self.by_layout.lock();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        if let Some((_, native)) = known.iter().find(|(of, _)| *of == layout) {
            return Ok(native.clone());
        }
        let (problem, format) = (plan.problem(), plan.format());
        let native = native::prepare(PlanKind::Known, &self.device, problem, format, layout)?;
        let native = Arc::new(native);
        known.push((layout, native.clone()));
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

    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported> {
        let defined = problem
            .check()
            .and_then(|()| format.check(problem.head_dim));
        defined.map_err(|error| Unsupported::Undefined {
            backend: BACKEND,
            reason: error.to_string(),
        })?;
        let instance = native::choose(&self.device, problem, format, USUAL)?;
        images::obtainable(&instance, self.device.arch).map_err(|error| Unsupported::Absent {
            backend: BACKEND,
            reason: error.to_string(),
            next_step: "or use backend \"cpu\"".into(),
        })
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        config.check()?;
        self.device.bind()?;
        let pages = CudaPages::new(self.device.clone(), config)?;
        KvCache::new(config.clone(), Box::new(pages))
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        let planned = Planned {
            device: self.device.clone(),
            by_layout: Mutex::default(),
        };
        let plan = Plan::new(BACKEND, problem, format, planned)?;
        // Pages of other sizes and contiguous caches are prepared by their first step.
        self.planned(&plan)?.native(USUAL, &plan)?;
        Ok(plan)
    }

    fn device_steps(&self, cache: &KvCache) -> Result<Box<dyn DeviceSteps>, Error> {
        Ok(Box::new(CudaSteps::new(self, cache)?))
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        self.planned(step.plan())?;
        let (inputs, outputs) = step.parts();
        let layout = match inputs.kv().memory() {
            KvMemory::Pages(layer, _) => {
                KvLayout::Pages(self.store_of(layer)?.layout().page_size())
            }
            KvMemory::View(view) => {
                // Decode copies rows in chunks of 16 bytes.
                let [k, v] = [view.k(), view.v()].map(|rows| rows.code_strides);
                let in_place = instance::covered(view.format(), KvLayout::Rows).is_ok()
                    && k.into_iter()
                        .chain(v)
                        .all(|stride| stride.is_multiple_of(16));
                if in_place { KvLayout::Rows } else { USUAL }
            }
        };
        self.attend(&inputs, outputs, layout)
    }
}
