//! The backends: the trait over the scalar reference and over the vector kernels.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use attn_core::{
    CacheAccess, CacheConfig, DecodeAttention, DecodeStep, DeviceInfo, Error, HostPages, HostStore,
    KvCache, KvFormat, PageStore, Plan, PoolPages, Problem, Rows, SlotAppend, SlotCentres,
    SpanStates, SpansStep, StepInputs, TokenWrite, Unsupported, WideRows, process,
};

use crate::{
    BACKEND,
    decode::{self, Workspace},
    float_modes,
    options::Options,
    pool::Threads,
    quantize::{RowWriter, Tokens},
    reader::Reader,
    reference::{self, QueryRow},
    simd::Isa,
    store::{CpuPages, write_tokens},
    stored::Stored,
};

/// The mark of this crate's plans: the kernels need nothing prepared.
struct CpuPlan;

fn plan(problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
    Plan::new(BACKEND, problem, format, CpuPlan)
}

fn pages(config: &CacheConfig) -> Result<HostPages, Error> {
    let pages = HostPages::new(config)?;
    (0..config.layers)
        .filter_map(|layer| pages.pool(layer))
        .for_each(ask_for_huge_pages);
    Ok(pages)
}

/// Asks the kernel for huge pages: a run spans four or five small ones, and their page-table walks take a tenth of a decode step.
// Miri has no such call.
#[cfg(all(target_os = "linux", not(miri)))]
fn ask_for_huge_pages(pool: &[u8]) {
    const HUGE_PAGE: usize = 2 << 20;
    const MADV_HUGEPAGE: std::ffi::c_int = 14;
    unsafe extern "C" {
        fn madvise(
            addr: *mut std::ffi::c_void,
            len: usize,
            advice: std::ffi::c_int,
        ) -> std::ffi::c_int;
    }
    let skip = pool.as_ptr().align_offset(HUGE_PAGE);
    if let Some(rest) = pool.len().checked_sub(skip) {
        let len = rest / HUGE_PAGE * HUGE_PAGE;
        // SAFETY: the range lies inside the pool and starts on a page; the advice changes no byte of it. A kernel that does
        // not know the advice refuses it, which changes nothing.
        unsafe {
            madvise(
                pool.as_ptr().add(skip).cast_mut().cast(),
                len,
                MADV_HUGEPAGE,
            )
        };
    }
}

#[cfg(any(not(target_os = "linux"), miri))]
fn ask_for_huge_pages(_: &[u8]) {}

fn check_plan(plan: &Plan) -> Result<(), Error> {
    match plan.prepared() {
        Some(CpuPlan) => Ok(()),
        None => Err(Error::WrongBackend {
            backend: BACKEND,
            what: "plan",
        }),
    }
}

/// The scalar quantizers' pages, written in the default floating-point modes.
struct ScalarPages(HostPages);

impl HostStore for ScalarPages {
    fn pages(&self) -> &HostPages {
        &self.0
    }

    fn pages_mut(&mut self) -> &mut HostPages {
        &mut self.0
    }

    fn append(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        float_modes::with_default(|| self.0.append(access, layer, writes, k, v))
    }
}

/// The scalar specification as a backend, with which all others are compared.
#[derive(Debug)]
pub struct Reference {
    device: DeviceInfo,
}

impl Reference {
    /// Makes the backend, which every machine has.
    #[allow(
        clippy::new_without_default,
        reason = "a backend is opened, not defaulted"
    )]
    #[must_use]
    pub fn new() -> Self {
        Reference {
            device: DeviceInfo::new(BACKEND, "scalar specification", "one thread"),
        }
    }
}

impl DecodeAttention for Reference {
    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn supports(&self, _: &Problem, _: KvFormat) -> Result<(), Unsupported> {
        Ok(())
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        KvCache::new(config.clone(), Box::new(ScalarPages(pages(config)?)))
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        plan(problem, format)
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        check_plan(step.plan())?;
        let (inputs, mut outputs) = step.parts();
        let integer = inputs.plan().format().is_integer();
        let mut lse = outputs.lse;
        let attend = |r, row: &QueryRow<'_>, stored: &Stored<'_>| {
            let (token, head) = (r / row.problem.num_q_heads, row.q_head);
            let row_lse = reference::attend(row, stored, integer, outputs.out.row(token, head));
            if let Some(lse) = &mut lse {
                lse[r] = row_lse;
            }
        };
        float_modes::with_default(|| each_row(&inputs, attend))
    }

    fn attend_spans(&self, step: &SpansStep<'_>) -> Result<SpanStates, Error> {
        let inputs = step.inputs();
        check_plan(inputs.plan())?;
        let integer = inputs.plan().format().is_integer();
        let mut all = SpanStates::unseen(inputs.problem())?;
        let attend = |r, row: &QueryRow<'_>, stored: &Stored<'_>| {
            for (span, state) in reference::attend_spans(row, stored, integer).enumerate() {
                all.set(span, r, [state.m, state.l], &state.o);
            }
        };
        float_modes::with_default(|| each_row(&inputs, attend))?;
        Ok(all)
    }
}

/// Calls `take` for each row of a step: its number, its query, and what it reads.
fn each_row(
    inputs: &StepInputs<'_>,
    mut take: impl FnMut(usize, &QueryRow<'_>, &Stored<'_>),
) -> Result<(), Error> {
    let problem = inputs.problem();
    for (b, tokens) in problem.query_ranges().enumerate() {
        let stored = (0..problem.num_kv_heads).map(|head| {
            let reader = Reader::new(inputs.kv(), b, head)?;
            Ok(Stored::new(reader, problem.head_dim, problem.kv_lens[b]))
        });
        let stored: Vec<Stored<'_>> = stored.collect::<Result<_, Error>>()?;
        for (i, token) in tokens.enumerate() {
            for q_head in 0..problem.num_q_heads {
                let stored = &stored[q_head / problem.heads_per_kv()];
                let q = inputs.q().row(token, q_head);
                let row = QueryRow::new(problem, [b, i, q_head], q, &stored.reader);
                take(token * problem.num_q_heads + q_head, &row, stored);
            }
        }
    }
    Ok(())
}

/// The fast CPU backend: vector kernels of one instruction set, with rayon over (sequence, KV head, span).
///
/// [`Options`] says which threads a step runs on; its bits depend neither on their number nor on the instruction set. A step
/// allocates nothing once one of its size has run.
pub struct CpuBackend {
    device: DeviceInfo,
    isa: Isa,
    threads: Threads,
    workspaces: Mutex<Vec<Workspace>>,
}

impl CpuBackend {
    /// Makes the backend with the fastest instruction set of this machine.
    #[allow(
        clippy::new_without_default,
        reason = "a backend is opened, not defaulted"
    )]
    #[must_use]
    pub fn new() -> Self {
        // A process that lacks the threads is refused by whatever needs them.
        let _ = process::open();
        CpuBackend::of(Isa::best(), Threads::Shared)
    }

    /// Makes the backend with the options that the environment sets ([`Options::from_env`]); by default with the fastest instruction set.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] if the named instruction set is unknown or this machine lacks it.
    ///
    /// ```
    /// let backend = attn_cpu::CpuBackend::open()?;
    /// println!("{}", backend.isa());
    /// # Ok::<(), attn_core::Unsupported>(())
    /// ```
    pub fn open() -> Result<Self, Unsupported> {
        Self::with_options(&Options::from_env()?)
    }

    /// Makes the backend with these options; reads no environment variable.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] if this machine lacks the instruction set or does not start the threads; [`Unsupported::Forked`].
    ///
    /// ```
    /// use attn_cpu::{CpuBackend, Isa, Options};
    ///
    /// let backend = CpuBackend::with_options(&Options::default().isa(Isa::Portable))?;
    /// assert_eq!(backend.isa(), Isa::Portable);
    /// # Ok::<(), attn_core::Unsupported>(())
    /// ```
    pub fn with_options(options: &Options) -> Result<Self, Unsupported> {
        process::open()?;
        let isa = options.isa.map_or_else(|| Ok(Isa::best()), Isa::require);
        Ok(CpuBackend::of(isa?, options.start()?))
    }

    /// Makes the backend with `isa`, which this machine has: the kernels rely on it.
    fn of(isa: Isa, threads: Threads) -> Self {
        let detail = format!(
            "{isa}, {} threads; fp8, pairs of an integer and a float scheme, and views are slower: each tile is copied into panels first",
            threads.count()
        );
        CpuBackend {
            device: DeviceInfo::new(BACKEND, std::env::consts::ARCH, detail),
            isa,
            threads,
            workspaces: Mutex::default(),
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The number of threads of a step that is called from here.
    pub fn threads(&self) -> usize {
        self.threads.count()
    }

    /// Runs `f` in the rayon pool of a step that is called from here, for other work on the same CPUs, such as a read to compare with.
    ///
    /// ```
    /// let backend = attn_cpu::CpuBackend::with_options(&attn_cpu::Options::default().threads(2))?;
    /// assert_eq!(backend.install(rayon::current_num_threads), 2);
    /// # Ok::<(), attn_core::Unsupported>(())
    /// ```
    pub fn install<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.threads.install(f)
    }

    /// Computes the dot product of 8-bit integers that the kernels use, `rounds` times over on the calling thread, and returns how many products that
    /// is. Codes stay in registers and operands in the first-level cache: its rate is the ceiling of steps with many query rows.
    ///
    /// ```
    /// let backend = attn_cpu::CpuBackend::new();
    /// assert_eq!(backend.multiply(3), 3 * backend.multiply(1));
    /// ```
    pub fn multiply(&self, rounds: usize) -> usize {
        rounds.saturating_mul(decode::products(self.isa, rounds))
    }

    /// Writes tokens into pages of the caller's, each to its slot (page · page_size + token of the page; a negative one is nowhere): what a step over
    /// [`KvSource::Pool`](attn_core::KvSource::Pool) reads. The bytes are those of a cache without centres of K. `pool` is whole pages, [`PoolPages::stride`] bytes apart; `k` and `v` are
    /// `[tokens, num_kv_heads, head_dim]`, in f32, f16 or bf16. Of tokens with the same slot, the last one stays.
    ///
    /// With `centres`, the pages are those of [`PoolPages::with_centres`](attn_core::PoolPages::with_centres), and the bytes those of a cache with centres, in whatever calls the
    /// tokens come: a sequence's token 0 makes its first centre, and a call with its token 63 makes the second, of what the page stores of its first 64
    /// tokens. Of tokens with the same slot, those at position 64 and behind stay.
    ///
    /// # Errors
    /// Those of [`SlotAppend::new`]: the pool is then as it was.
    ///
    /// ```
    /// use attn_core::{DecodeAttention, DecodeStep, Error, Heads, KvFormat, KvSource, PageLayout, PagePool, PoolPages, Problem};
    ///
    /// let backend = attn_cpu::CpuBackend::open()?;
    /// let (format, heads) = (KvFormat::INT8, Heads::new(4, 1, 64));
    /// let layout = PageLayout::new(format, heads.dim, 16, heads.kv)?;
    /// let mut pool = vec![0; 8 * layout.page_bytes()];
    /// // Tokens 0 and 1 of a sequence whose first page is page 5.
    /// backend.append_slots(&PoolPages::new(&layout)?, &mut pool, &[80, 81], &[0.5; 2 * 64], &[2.0; 2 * 64], None)?;
    /// let plan = backend.plan(&Problem::new(heads, [2]), format)?;
    /// let (q, mut out) = ([1.0; 4 * 64], [0.0; 4 * 64]);
    /// let kv = PagePool::new(&layout, &pool, &[5], &[2])?;
    /// backend.decode(&mut DecodeStep::new(&plan, &q, KvSource::Pool(&kv), &mut out)?)?;
    /// assert!(out.iter().all(|x| (x - 2.0).abs() < 0.02));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn append_slots<'a>(
        &self,
        pages: &PoolPages,
        pool: &mut [u8],
        slots: &[i64],
        k: impl Into<Rows<'a>>,
        v: impl Into<Rows<'a>>,
        centres: Option<SlotCentres<'_>>,
    ) -> Result<(), Error> {
        process::check()?;
        let (k, v) = (k.into(), v.into());
        let mut append = SlotAppend::new(pages, pool.len(), slots, k, v, centres)?;
        let layout = pages.layout();
        let writer = RowWriter::new(layout, Default::default(), self.isa);
        let write = |append: &SlotAppend<'_>, part: usize, pool: &mut [u8]| {
            let tokens = Tokens {
                writes: append.writes()[part],
                kv: append.rows(),
                centres: append.centres(),
            };
            write_tokens(
                layout,
                append.stride(),
                &writer,
                &self.threads,
                pool,
                tokens,
            );
        };
        float_modes::with_default(|| append.begin(pool));
        write(&append, 0, pool);
        float_modes::with_default(|| append.end_first_tiles(pool));
        write(&append, 1, pool);
        Ok(())
    }

    fn workspaces(&self) -> MutexGuard<'_, Vec<Workspace>> {
        self.workspaces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuBackend({})", self.isa)
    }
}

impl DecodeAttention for CpuBackend {
    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn supports(&self, _: &Problem, _: KvFormat) -> Result<(), Unsupported> {
        Ok(())
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        let pages = CpuPages::new(pages(config)?, config, self.isa, self.threads.clone())?;
        KvCache::new(config.clone(), Box::new(pages))
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        plan(problem, format)
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        check_plan(step.plan())?;
        let (inputs, outputs) = step.parts();
        let mut workspace = self.workspaces().pop().unwrap_or_default();
        let result = self
            .threads
            .run(decode::is_small(inputs.problem()), |threads| {
                decode::decode(self.isa, threads, &inputs, &mut workspace, outputs)
            });
        self.workspaces().push(workspace);
        result
    }

    fn attend_spans(&self, step: &SpansStep<'_>) -> Result<SpanStates, Error> {
        let inputs = step.inputs();
        check_plan(inputs.plan())?;
        let mut workspace = self.workspaces().pop().unwrap_or_default();
        let is_small = decode::is_small(inputs.problem());
        let result = self.threads.run(is_small, |threads| {
            decode::spans(self.isa, threads, &inputs, &mut workspace)
        });
        self.workspaces().push(workspace);
        result
    }
}
