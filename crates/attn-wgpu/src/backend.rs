//! The backend: the common trait, and the native entry for programs that use wgpu.

use std::sync::Arc;

use attn_core::{
    Append, CacheConfig, CacheLayer, DecodeAttention, DecodeStep, DeviceInfo, Error, KvCache,
    KvFormat, KvMemory, PagePool, PageStore, PageTable, Plan, Problem, StepOutputs, Unsupported,
};
use attn_kernels::wgsl::decode::{KvLayout, Tuning};
use wgpu::BufferUsages;

use crate::{
    append::{self, AppendPipelines},
    arithmetic::{self, ArithmeticCheck},
    error::BACKEND,
    gpu::{self, Gpu, IN_BROWSER},
    import::ViewPages,
    launch::{KvTables, Prepared},
    options::Options,
    pipeline::Pipelines,
    pool::Pool,
    store::DevicePages,
    view::{self, DeviceView},
};

/// Decode attention through wgpu: Vulkan, Metal or DX12.
pub struct WgpuBackend {
    pub(crate) gpu: Arc<Gpu>,
    pipelines: Pipelines,
    appends: Arc<AppendPipelines>,
    device: DeviceInfo,
}

/// The device that a plan's kernels were compiled for.
struct Planned(Arc<Gpu>);

impl WgpuBackend {
    /// Opens the best adapter, or the one that the environment names, with the options that it sets ([`Options::from_env`]); never panics.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] with the reason and the repair.
    ///
    /// ```no_run
    /// use attn_core::DecodeAttention;
    ///
    /// let gpu = attn_wgpu::WgpuBackend::open()?;
    /// println!("{}", gpu.device().name);
    /// # Ok::<(), attn_core::Unsupported>(())
    /// ```
    pub fn open() -> Result<Self, Unsupported> {
        Self::with_options(&Options::from_env()?)
    }

    /// Opens an adapter with these options, and reads none of their environment variables; never panics.
    ///
    /// # Errors
    /// Those of [`WgpuBackend::open`].
    ///
    /// ```no_run
    /// use attn_wgpu::{Options, WgpuBackend};
    ///
    /// let gpu = WgpuBackend::with_options(&Options::default().adapter("H200").by_tiles(true))?;
    /// # Ok::<(), attn_core::Unsupported>(())
    /// ```
    pub fn with_options(options: &Options) -> Result<Self, Unsupported> {
        if IN_BROWSER {
            return Err(gpu::absent(
                "a page in a browser cannot wait for an adapter",
                "await WgpuBackend::open_async",
            ));
        }
        pollster::block_on(Self::open_async(options))
    }

    /// Opens an adapter with these options, as [`WgpuBackend::with_options`] does, for callers that must not wait, such as a page in a browser (WebGPU).
    ///
    /// # Errors
    /// Those of [`WgpuBackend::open`].
    pub async fn open_async(options: &Options) -> Result<Self, Unsupported> {
        Ok(Self::on(Gpu::open(options).await?).tuned(options.tuning))
    }

    /// Uses a caller's device and queue, with the features and limits that they were created with.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] if the device offers less than WebGPU's default compute limits.
    ///
    /// ```no_run
    /// use attn_core::{CacheConfig, DecodeAttention, Error, Heads, KvFormat, Problem};
    /// use attn_wgpu::{WgpuBackend, wgpu};
    ///
    /// /// One step in the engine's own encoder: nothing is submitted, read back or waited for.
    /// fn record(
    ///     (device, queue): (wgpu::Device, wgpu::Queue),
    ///     encoder: &mut wgpu::CommandEncoder,
    ///     [q, out, lse]: [&wgpu::Buffer; 3],
    /// ) -> Result<(), Error> {
    ///     let backend = WgpuBackend::with_device(device, queue)?;
    ///     let heads = Heads::new(4, 1, 64);
    ///     let config = CacheConfig::builder(KvFormat::INT8, heads).max_len(1024).build();
    ///     let mut cache = backend.create_cache(&config)?;
    ///     cache.append(0, &[0.5; 64], &[2.0; 64])?;
    ///     let step = backend.prepare(&Problem::new(heads, [1]), &cache)?;
    ///     backend.record(encoder, &step, q, out, lse)
    /// }
    /// ```
    pub fn with_device(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self, Unsupported> {
        Ok(Self::on(Gpu::of_device(device, queue)?))
    }

    fn on(gpu: Gpu) -> Self {
        let info = &gpu.info;
        // A browser tells neither the driver nor, as a rule, the name.
        let api = format!("{:?}", info.backend);
        let known = [&api[..], &info.driver, &info.driver_info];
        let known: Vec<&str> = known.into_iter().filter(|x| !x.is_empty()).collect();
        let detail = format!(
            "{} adapter, {}, bindings of {} MiB",
            gpu::kind(info),
            known.join(", "),
            gpu.limits.max_storage_buffer_binding_size >> 20
        );
        let name = match &info.name[..] {
            "" => "adapter without a name",
            name => name,
        };
        let device = DeviceInfo::new(BACKEND, name, detail);
        WgpuBackend {
            gpu: Arc::new(gpu),
            pipelines: Pipelines::default(),
            appends: Arc::default(),
            device,
        }
    }

    /// Makes a backend on the same device with another tuning; both share their caches.
    #[must_use]
    pub fn tuned(&self, tuning: Tuning) -> Self {
        WgpuBackend {
            gpu: self.gpu.clone(),
            pipelines: Pipelines::tuned(tuning),
            appends: self.appends.clone(),
            device: self.device.clone(),
        }
    }

    /// Evaluates the functions of `docs/arithmetic.md` on this adapter and compares them with the CPU's bits.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn check_arithmetic(&self) -> Result<Vec<ArithmeticCheck>, Error> {
        self.gpu
            .blocking("checking the arithmetic", self.check_arithmetic_async())
    }

    /// [`WgpuBackend::check_arithmetic`], for a page in a browser.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub async fn check_arithmetic_async(&self) -> Result<Vec<ArithmeticCheck>, Error> {
        arithmetic::check(&self.gpu).await
    }

    /// Attends as [`DecodeAttention::decode`] does, and hands the thread back while the device works. Outside a browser the future waits for the device
    /// when it is first polled.
    ///
    /// # Errors
    /// Those of [`DecodeAttention::decode`].
    pub async fn decode_async(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        self.execute_async(step).await?;
        step.finish();
        Ok(())
    }

    /// Waits until the device has done all that was submitted to it, and reports what it refused. A browser reports nothing before: calls that do not end in
    /// `_async` return there before the device has looked at their work.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub async fn finish_async(&self) -> Result<(), Error> {
        self.gpu.finish_async("waiting for the device").await
    }

    /// The device that holds the caches and kernels.
    pub fn wgpu_device(&self) -> &wgpu::Device {
        &self.gpu.device
    }

    /// The queue of the device.
    pub fn wgpu_queue(&self) -> &wgpu::Queue {
        &self.gpu.queue
    }

    /// Prepares a step: uploads its tables, allocates its workspace and makes its pipelines. Sequence b of the problem is sequence b of the cache.
    ///
    /// # Errors
    /// Those of [`Problem::check`]; [`Error::Mismatch`], [`Error::Batch`], [`Error::KvLen`] where problem and cache disagree; [`Error::WrongBackend`] for another
    /// backend's (or device's) cache; [`Error::Device`].
    pub fn prepare(&self, problem: &Problem, cache: &KvCache) -> Result<Prepared, Error> {
        cache.check_queries(problem)?;
        self.prepare_sequences(problem, cache.layer(0)?, cache.table())
    }

    /// Prepares a step over one layer, as [`WgpuBackend::prepare`] does over a cache of one.
    ///
    /// # Errors
    /// Those of [`WgpuBackend::prepare`]; [`Error::Step`] for a layer that lacks the tokens of an open step.
    pub fn prepare_layer(
        &self,
        problem: &Problem,
        layer: CacheLayer<'_>,
    ) -> Result<Prepared, Error> {
        layer.check_queries(problem)?;
        self.prepare_sequences(problem, layer, layer.table())
    }

    /// Prepares a step over the sequences of the layer that `table` lists; the step's queries have been checked.
    fn prepare_sequences(
        &self,
        problem: &Problem,
        layer: CacheLayer<'_>,
        table: &PageTable,
    ) -> Result<Prepared, Error> {
        self.gpu.alive("preparing a step")?;
        let config = layer.cache().config();
        self.check(problem, config.format)?;
        let mismatch = |what, problem: &dyn ToString, cache: &dyn ToString| {
            Err(Error::Mismatch {
                what,
                problem: problem.to_string(),
                cache: cache.to_string(),
            })
        };
        if problem.head_dim != config.head_dim {
            return mismatch("head_dim", &problem.head_dim, &config.head_dim);
        }
        let num_kv_heads = layer.layout_of(table).num_kv_heads();
        if problem.num_kv_heads != num_kv_heads {
            return mismatch("num_kv_heads", &problem.num_kv_heads, &num_kv_heads);
        }
        if problem.batch() > table.lens.len() {
            return Err(Error::Batch {
                planned: problem.batch(),
                given: table.lens.len(),
            });
        }
        let mut lens = problem.kv_lens.iter().zip(&table.lens).enumerate();
        if let Some((sequence, (&planned, &tokens))) = lens.find(|(_, (want, have))| want != have) {
            return Err(Error::KvLen {
                sequence,
                tokens,
                planned,
            });
        }
        let (_, pool) = self.pages(layer.cache(), layer.index())?;
        let entries = table.entries_of_page(config.num_kv_heads);
        pool.check_sequences(table.sequences.iter().map(|sequence| sequence / entries))?;
        let [k_tensor_scales, v_tensor_scales] = layer.tensor_scales();
        let source = KvTables {
            layout: pool.decode_layout(),
            stored: pool.stored(),
            pages_per_pool: pool.pages_per_buffer.saturating_mul(entries as u32),
            pages: Some((table, pool.num_pages * entries)),
            lists: &table.pages,
            residual_slots: config.residual_slots(),
            k_tensor_scales,
            v_tensor_scales,
        };
        Prepared::new(&self.gpu, &self.pipelines, problem, &source)
    }

    /// Prepares a step on a contiguous cache in the caller's buffers, which is read in place.
    ///
    /// # Errors
    /// Those of [`Problem::check`]; those of [`KvFormat::check_rows`]; those of [`Scheme::check_scales`](attn_core::Scheme::check_scales) for
    /// the static scales; [`Error::Device`] for buffers that are too short, or whose offsets and strides do not suit the kernels' loads.
    pub fn prepare_view(
        &self,
        problem: &Problem,
        view: &DeviceView<'_>,
    ) -> Result<Prepared, Error> {
        self.gpu.alive("preparing a view")?;
        problem.check()?;
        view.format.check_rows(problem.head_dim)?;
        self.check(problem, view.format)?;
        let (stored, lists) = view.check(&self.gpu, problem)?;
        let source = KvTables {
            layout: KvLayout {
                format: view.format,
                page_size: 64,
                pools: 1,
                view: true,
                centres: false,
            },
            stored,
            pages_per_pool: u32::MAX,
            pages: None,
            lists: &lists,
            residual_slots: 0,
            k_tensor_scales: view.k_tensor_scales,
            v_tensor_scales: view.v_tensor_scales,
        };
        Prepared::new(&self.gpu, &self.pipelines, problem, &source)
    }

    /// Records a prepared step into the caller's encoder; nothing is submitted, read back or waited for.
    ///
    /// `q` is f32 `[query tokens, num_q_heads, head_dim.k]`, `out` `[query tokens, num_q_heads, head_dim.v]`, `lse` f32 `[query tokens, num_q_heads]`; all need
    /// `BufferUsages::STORAGE`. The queries are not checked: they must be finite, and `q · softmax_scale · log2 e` at most 2^64.
    ///
    /// # Errors
    /// [`Error::Device`] for a buffer that is too short or of another device; [`Error::WrongBackend`] for another backend's step.
    pub fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        step: &Prepared,
        q: &wgpu::Buffer,
        out: &wgpu::Buffer,
        lse: &wgpu::Buffer,
    ) -> Result<(), Error> {
        step.record(&self.gpu, encoder, [q, out, lse], true)
    }

    /// Records an append into the caller's encoder: tokens in the caller's buffers are quantized into pages.
    ///
    /// `appends` lists (sequence, number of tokens), each sequence once; `k` and `v` are f32 `[tokens, num_kv_heads, head_dim]`, the first
    /// sequence's tokens first, with `BufferUsages::STORAGE`. They are not checked and must be finite. The cache counts the tokens at once, so
    /// steps may be prepared and recorded behind this one; submit the encoder before the cache's pages are used in any other way. What reads the recorded tokens before is
    /// refused: an image, `read_back`, an append to a sequence that shares their last page with a fork, and a fork of a sequence whose centres of K they make.
    ///
    /// # Errors
    /// Those of [`KvCache::append_with`]; [`Error::WrongBackend`] for another backend's (or device's) cache; [`Error::Device`] for a buffer
    /// that is too short or of another device, and with [`WgpuError::Unsubmitted`](crate::WgpuError::Unsubmitted) for an append to a forked sequence whose shared page is not submitted.
    pub fn record_append(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        cache: &mut KvCache,
        appends: &[Append],
        k: &wgpu::Buffer,
        v: &wgpu::Buffer,
    ) -> Result<(), Error> {
        self.gpu.alive("recording an append")?;
        // A number that saturates is more than any buffer holds.
        let tokens = appends.iter().map(|append| append.tokens);
        let tokens = tokens.fold(0, usize::saturating_add);
        let (pages, pool) = self.pages(cache, 0)?;
        append::check_buffers(pool, tokens, [k, v])?;
        let recording = pages.recording();
        cache.append_with(appends, |store, writes| {
            recording.flush(encoder)?;
            let (pages, pool) = pages_of(store, 0)?;
            let appender = &pages.appender;
            appender.record(pool, 0, encoder, writes, tokens, [k, v])
        })?;
        recording.flush(encoder)
    }

    /// Records the write of one layer of the open step ([`KvCache::reserve`]) into the caller's encoder, as [`WgpuBackend::record_append`] does for a cache of
    /// one layer: `k` and `v` are those of the layer.
    ///
    /// # Errors
    /// Those of [`KvCache::write_with`]; [`Error::WrongBackend`] for another backend's (or device's) cache; [`Error::Device`] for a buffer that is
    /// too short or of another device. The layer counts as not written then.
    pub fn record_write(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        cache: &mut KvCache,
        layer: usize,
        k: &wgpu::Buffer,
        v: &wgpu::Buffer,
    ) -> Result<(), Error> {
        self.gpu.alive("recording a write")?;
        cache.layer(layer)?;
        let (pages, _) = self.pages(cache, layer)?;
        let appends = cache.open_step().unwrap_or_default();
        let tokens = appends.iter().map(|append| append.tokens).sum();
        let recording = pages.recording();
        cache.write_with(layer, |store, writes| {
            recording.flush(encoder)?;
            let (pages, pool) = pages_of(store, layer)?;
            let appender = &pages.appender;
            appender.record(pool, layer, encoder, writes, tokens, [k, v])
        })?;
        recording.flush(encoder)
    }

    /// The pages of a cache of this backend, and one layer's.
    fn pages<'a>(
        &self,
        cache: &'a KvCache,
        layer: usize,
    ) -> Result<(&'a DevicePages, &'a Pool), Error> {
        let (pages, pool) = pages_of(cache.store(), layer)?;
        if !pages.lies_on(&self.gpu) {
            return Err(FOREIGN_CACHE);
        }
        Ok((pages, pool))
    }

    fn check(&self, problem: &Problem, format: KvFormat) -> Result<(), Error> {
        problem.check()?;
        problem.check_whole(BACKEND)?;
        format.check(problem.head_dim)?;
        Ok(self.supports(problem, format)?)
    }

    async fn run(&self, step: &Prepared, q: &[f32]) -> Result<Vec<u8>, Error> {
        let gpu = &self.gpu;
        let (q_bytes, out_bytes) = (4 * step.q_elems, 4 * step.out_elems);
        let lse_bytes = 4 * step.lse_elems;
        let result = BufferUsages::STORAGE | BufferUsages::COPY_SRC;
        let queries = gpu.buffer(
            "attn queries",
            q_bytes,
            BufferUsages::STORAGE | BufferUsages::COPY_DST,
        )?;
        let out = gpu.buffer("attn out", out_bytes, result)?;
        let lse = gpu.buffer("attn lse", lse_bytes, result)?;
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        step.record(gpu, &mut encoder, [&queries, &out, &lse], true)?;
        gpu.guarded("writing queries", || {
            gpu.queue.write_buffer(&queries, 0, bytemuck::cast_slice(q))
        })?;
        gpu.submit("decoding", encoder)?;
        let parts = [(&out, 0, out_bytes), (&lse, 0, lse_bytes)];
        gpu.read_async("reading results", &parts).await
    }

    /// What [`DecodeAttention::execute`] does.
    async fn execute_async(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        let planned = step.plan().prepared();
        if !planned.is_some_and(|Planned(gpu)| Arc::ptr_eq(gpu, &self.gpu)) {
            return Err(Error::WrongBackend {
                backend: BACKEND,
                what: "plan",
            });
        }
        self.gpu.alive("decoding")?;
        let (inputs, StepOutputs { out, lse, .. }) = step.parts();
        let problem = inputs.problem();
        if out.is_empty() {
            return Ok(());
        }
        let prepared = match inputs.kv().memory() {
            KvMemory::Pages(layer, table) => self.prepare_sequences(problem, layer, table)?,
            KvMemory::Pool(_) => return Err(PagePool::refused_by(BACKEND)),
            KvMemory::View(view) => match view::upload(&self.gpu, view, problem)? {
                Some([k, v]) => {
                    let view = DeviceView {
                        format: view.format(),
                        k: k.rows(),
                        v: v.rows(),
                        k_tensor_scales: view.k_tensor_scales(),
                        v_tensor_scales: view.v_tensor_scales(),
                    };
                    self.prepare_view(problem, &view)?
                }
                None => {
                    let pages = ViewPages::new(self.gpu.clone(), view, problem)?;
                    Prepared::new(&self.gpu, &self.pipelines, problem, &pages.tables(view))?
                }
            },
        };
        let q = inputs.q().packed(0..problem.query_tokens())?;
        let mut out = out.packed()?;
        let bytes = self.run(&prepared, &q).await?;
        let mut words = bytes
            .chunks_exact(4)
            .map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]]));
        out.as_mut_slice()
            .iter_mut()
            .chain(lse.into_iter().flatten())
            .zip(&mut words)
            .for_each(|(to, x)| *to = x);
        out.finish();
        Ok(())
    }
}

const FOREIGN_CACHE: Error = Error::WrongBackend {
    backend: BACKEND,
    what: "cache",
};

/// A store of this crate, and the pool of one layer.
fn pages_of(store: &dyn PageStore, layer: usize) -> Result<(&DevicePages, &Pool), Error> {
    let pages = store.as_any().downcast_ref::<DevicePages>();
    let pages = pages.ok_or(FOREIGN_CACHE)?;
    Ok((pages, pages.pool(layer).ok_or(FOREIGN_CACHE)?))
}

impl DecodeAttention for WgpuBackend {
    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn is_software(&self) -> bool {
        self.gpu.info.device_type == wgpu::DeviceType::Cpu
    }

    fn supports(&self, problem: &Problem, _: KvFormat) -> Result<(), Unsupported> {
        problem.check_whole(BACKEND)
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        KvCache::new(
            config.clone(),
            Box::new(DevicePages::new(
                self.gpu.clone(),
                self.appends.clone(),
                config,
            )?),
        )
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        problem.check_whole(BACKEND)?;
        let plan = Plan::new(BACKEND, problem, format, Planned(self.gpu.clone()))?;
        self.gpu.alive("planning")?;
        // The kernels of the usual layout; others compile at their first step.
        let layout = KvLayout {
            format,
            page_size: 64,
            pools: 1,
            view: false,
            centres: false,
        };
        let key = self.pipelines.key(&self.gpu, problem, layout);
        self.pipelines.decode(&self.gpu, &key)?;
        Ok(plan)
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        self.gpu.blocking("decoding", self.execute_async(step))
    }
}
