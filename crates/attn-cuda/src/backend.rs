//! The common trait on top of the native entry: host slices in and out.

use std::sync::Arc;

use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, DeviceInfo, Error, KvCache, KvFormat, KvSource,
    PageLayout, Plan, Problem, StepInputs, Unsupported,
};
use cudarc::driver::{DriverError, result};

use crate::{
    device::{Device, failed},
    geometry::Short,
    images, instance,
    native::{self, DecodeArgs, DeviceKv, Dtype, ImportArgs, Shape},
    store::CudaPages,
};

/// One NVIDIA GPU.
#[derive(Debug)]
pub struct CudaBackend {
    pub(crate) device: Arc<Device>,
}

/// Host bytes on their way into the arena, each part aligned.
#[derive(Default)]
struct Upload<'a> {
    parts: Vec<(usize, &'a [u8])>,
    bytes: usize,
}

impl<'a> Upload<'a> {
    fn reserve(&mut self, bytes: usize) -> usize {
        let at = self.bytes;
        self.bytes = (at + bytes).next_multiple_of(256);
        at
    }

    fn add(&mut self, bytes: &'a [u8]) -> usize {
        let at = self.reserve(bytes.len());
        self.parts.push((at, bytes));
        at
    }
}

fn bytes_of<T: Copy + Words>(x: &[T]) -> &[u8] {
    // SAFETY: `Words` are plain numbers without padding, and a byte has no alignment.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
}

/// Numbers without padding.
trait Words {}
impl Words for f32 {}
impl Words for i32 {}
impl Words for u32 {}
impl Words for u16 {}

impl CudaBackend {
    /// Opens the first GPU that the driver shows; never panics.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] with what is missing and what mends it.
    pub fn open() -> Result<Self, Unsupported> {
        Self::open_ordinal(0)
    }

    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// As [`CudaBackend::open`].
    pub fn open_ordinal(ordinal: usize) -> Result<Self, Unsupported> {
        Ok(CudaBackend {
            device: Arc::new(Device::open(ordinal)?),
        })
    }

    /// Sizes launches for so many SMs instead of the device's: this changes speed, never bits. Before the first cache is made.
    pub fn with_sms(mut self, sms: usize) -> Self {
        if let Some(device) = Arc::get_mut(&mut self.device) {
            device.sms = sms.max(1);
        }
        self
    }

    /// Chooses `short.cu` where it is faster, always or never: this changes speed, never bits. Before the first cache is made.
    pub fn with_short(mut self, short: Short) -> Self {
        if let Some(device) = Arc::get_mut(&mut self.device) {
            device.short = short;
        }
        self
    }

    /// The context that the backend works in: the device's primary one.
    pub fn context(&self) -> &Arc<cudarc::driver::CudaContext> {
        &self.device.context
    }

    fn attend(
        &self,
        step: StepInputs<'_>,
        (out, lse): (&mut [f32], &mut [f32]),
        page_size: usize,
    ) -> Result<(), Error> {
        let device = &self.device;
        let bind = device.context.bind_to_thread();
        bind.map_err(failed("binding the context"))?;
        let problem = &step.plan().problem;
        let plan = native::prepare(device, problem, step.plan().format, page_size)?;
        let lens: Vec<i32> = problem.kv_lens.iter().map(|&len| len as i32).collect();
        let slopes = native::alibi_slopes_log2(problem.alibi_slopes.as_deref().unwrap_or(&[]));
        let mut table = Vec::new();
        let mut tails = Vec::new();
        let mut stride = 0;
        // A view that decode does not read in place is copied into pages first.
        let import = match step.kv() {
            KvSource::View(_) if page_size != 0 => {
                let (format, heads) = (step.plan().format, problem.num_kv_heads);
                let layout = PageLayout::new(format, problem.head_dim, page_size, heads)?;
                Some((native::prepare_import(device, layout)?, layout))
            }
            _ => None,
        };
        let mut imported = 0;
        if let Some((_, layout)) = &import {
            stride = plan.max_kv_len().div_ceil(page_size).max(1);
            table.extend(0..(problem.batch() * stride) as u32);
            imported = table.len() * layout.page_bytes();
        }
        if let KvSource::Cache(cache) = step.kv() {
            let pages = &cache.table().pages[..problem.batch()];
            stride = pages.iter().map(Vec::len).max().unwrap_or(0).max(1);
            for (b, own) in pages.iter().enumerate() {
                table.extend(own);
                table.resize((b + 1) * stride, 0);
            }
            tails.extend(
                cache.table().tail_pages[..problem.batch()]
                    .iter()
                    .map(|tail| tail.unwrap_or(0)),
            );
        }
        let rows = problem.rows();
        let mut upload = Upload::default();
        let workspace = upload.reserve(plan.workspace_bytes());
        let out_at = upload.reserve(size_of_val(&*out));
        let lse_at = upload.reserve(rows * 4);
        let q = upload.add(bytes_of(step.q()));
        let lens_at = upload.add(bytes_of(&lens));
        let slopes_at = upload.add(bytes_of(&slopes));
        let pages = [upload.reserve(imported), upload.add(bytes_of(&table))];
        let source = match step.kv() {
            KvSource::Cache(_) => [0, upload.add(bytes_of(&tails)), 0, 0, 0, 0],
            KvSource::View(view) => [
                upload.add(view.k().codes),
                upload.add(view.v().codes),
                upload.add(bytes_of(view.k().scales)),
                upload.add(bytes_of(view.v().scales)),
                upload.add(bytes_of(view.k_tensor_scales())),
                upload.add(bytes_of(view.v_tensor_scales())),
            ],
        };
        let (base, _lock) = device
            .arena(upload.bytes)
            .map_err(failed("allocating for a decode"))?;
        let at = |offset: usize| base + offset as u64;
        let some = |given: bool, offset: usize| if given { at(offset) } else { 0 };
        let mut importing = None;
        let (kv, scales) = match step.kv() {
            KvSource::Cache(cache) => {
                let store = cache.store().as_any().downcast_ref::<CudaPages>();
                let store = store
                    .filter(|store| store.lies_on(device))
                    .ok_or(FOREIGN_CACHE)?;
                let kv = DeviceKv::Paged {
                    pool: store.pool_address(),
                    num_pages: cache.config().num_pages,
                    page_table: at(pages[1]),
                    page_table_stride: stride,
                    tail_pages: some(cache.layout().has_tail_page(), source[1]),
                };
                (kv, store.tensor_scale_addresses())
            }
            KvSource::View(view) => {
                let format = view.format();
                let k = [at(source[0]), some(format.k.has_row_scales(), source[2])];
                let v = [at(source[1]), some(format.v.has_row_scales(), source[3])];
                let code_strides = [view.k().code_strides, view.v().code_strides];
                let scale_strides = [view.k().scale_strides, view.v().scale_strides];
                let kv = if let Some((import, _)) = import {
                    let args = ImportArgs {
                        k,
                        v,
                        code_strides,
                        scale_strides,
                        pool: at(pages[0]),
                        page_table: at(pages[1]),
                        page_table_stride: stride,
                        kv_lens: at(lens_at),
                        batch: problem.batch(),
                        max_kv_len: plan.max_kv_len(),
                    };
                    importing = Some((import, args));
                    DeviceKv::Paged {
                        pool: at(pages[0]),
                        num_pages: table.len(),
                        page_table: at(pages[1]),
                        page_table_stride: stride,
                        tail_pages: 0,
                    }
                } else {
                    DeviceKv::Strided {
                        k,
                        v,
                        code_strides,
                        scale_strides,
                    }
                };
                let scales = [
                    some(format.k.has_tensor_scale(), source[4]),
                    some(format.v.has_tensor_scale(), source[5]),
                ];
                (kv, scales)
            }
        };
        let args = DecodeArgs {
            q: at(q),
            out: at(out_at),
            lse: at(lse_at),
            dtype: Dtype::F32,
            kv,
            kv_lens: at(lens_at),
            k_tensor_scales: scales[0],
            v_tensor_scales: scales[1],
            alibi_slopes: some(!slopes.is_empty(), slopes_at),
            workspace: at(workspace),
        };
        let stream = device.stream.cu_stream();
        let copy_in = || -> Result<(), DriverError> {
            for (offset, bytes) in upload.parts.iter().filter(|(_, bytes)| !bytes.is_empty()) {
                // SAFETY: the arena holds every part; the copy has left `bytes` when it returns.
                unsafe { result::memcpy_htod_async(at(*offset), bytes, stream) }?;
            }
            // SAFETY: the workspace has more bytes than are zeroed.
            unsafe { result::memset_d8_async(at(workspace), 0, plan.zeroed_bytes(), stream) }
        };
        copy_in().map_err(failed("copying the inputs"))?;
        if let Some((import, args)) = &importing {
            // SAFETY: `KvView::check` proved that its slices reach every token; the rest lies in the arena, whose lock is held.
            unsafe { native::launch_import(import, stream, args) }
                .map_err(failed("importing a view"))?;
        }
        // SAFETY: `DecodeStep` and `KvCache` checked lengths, pages and queries; the addresses lie in the arena, whose lock is held
        // until the synchronization below, and in the cache's pool; all on one stream.
        unsafe { native::launch_decode(device, &plan, stream, &args, 0) }
            .map_err(failed("decoding"))?;
        let mut copy_out = || -> Result<(), DriverError> {
            // SAFETY: `out` has as many elements as the arena's part.
            unsafe { result::memcpy_dtoh_async(out, args.out, stream) }?;
            // SAFETY: likewise.
            unsafe { result::memcpy_dtoh_async(lse, args.lse, stream) }?;
            device.stream.synchronize()
        };
        copy_out().map_err(failed("decoding"))
    }
}

const FOREIGN_CACHE: Error = Error::Foreign {
    backend: "cuda",
    what: "cache",
};

impl DecodeAttention for CudaBackend {
    fn device(&self) -> &DeviceInfo {
        &self.device.info
    }

    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported> {
        let (instance, ..) = native::choose(self.device.limits(), problem, format, 64)?;
        images::obtainable(&instance, self.device.arch).map_err(|error| Unsupported::Absent {
            backend: "cuda",
            reason: error.to_string(),
            next_step: "or use backend \"cpu\"".into(),
        })
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        config.check()?;
        let bind = self.device.context.bind_to_thread();
        bind.map_err(failed("binding the context"))?;
        let pages = CudaPages::new(self.device.clone(), config)?;
        KvCache::new(config.clone(), Box::new(pages))
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        let shape = Shape::new(self.device.limits(), problem, format, 64)?;
        Ok(Plan {
            backend: "cuda",
            problem: problem.clone(),
            format,
            num_splits: shape.launch.grid.iter().product(),
            workspace_bytes: shape.workspace_bytes(),
        })
    }

    fn decode(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        if step.plan().backend != "cuda" {
            return Err(Error::Foreign {
                backend: "cuda",
                what: "plan",
            });
        }
        let inputs = step.inputs();
        let page_size = match inputs.kv() {
            KvSource::Cache(cache) => {
                let ours = cache.store().as_any().downcast_ref::<CudaPages>();
                if !ours.is_some_and(|store| store.lies_on(&self.device)) {
                    return Err(FOREIGN_CACHE);
                }
                cache.config().page_size
            }
            KvSource::View(view) => {
                // Decode copies rows in pieces of 16 bytes.
                let mut strides = view
                    .k()
                    .code_strides
                    .into_iter()
                    .chain(view.v().code_strides);
                let in_place = instance::covered(view.format(), 0).is_ok()
                    && strides.all(|stride| stride.is_multiple_of(16));
                if in_place { 0 } else { 64 }
            }
        };
        self.attend(inputs, step.outputs(), page_size)
    }
}
