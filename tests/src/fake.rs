//! Backends and stores of pages that do what others do but for one thing, for tests of the code that calls them.

use std::any::Any;

use attn_core::{
    CacheAccess, CacheConfig, DecodeAttention, DecodeStep, DeviceInfo, DeviceSteps, Error,
    FirstTile, HostPages, KvCache, KvFormat, PageLayout, PageStore, Plan, Problem, SpanStates,
    SpansStep, StepOutputs, TokenWrite, Unsupported, WideRows, grid::GridCheck,
};

type Refuses = dyn Fn(&Problem, KvFormat) -> Option<Unsupported> + Send + Sync;
type MakesCaches = dyn Fn(&CacheConfig) -> Result<KvCache, Error> + Send + Sync;
type Executes =
    dyn Fn(&dyn DecodeAttention, &mut DecodeStep<'_>) -> Result<(), Error> + Send + Sync;
type AttendsSpans = dyn Fn(&SpansStep<'_>) -> Result<SpanStates, Error> + Send + Sync;
type ChecksGrid = dyn Fn() -> Result<Option<GridCheck>, Error> + Send + Sync;
type MakesSteps = dyn Fn(&KvCache) -> Result<Box<dyn DeviceSteps>, Error> + Send + Sync;

/// What a backend answered, to be changed.
pub struct Answer<'a> {
    /// The step's problem.
    pub problem: &'a Problem,
    /// The format of its cache.
    pub format: KvFormat,
    /// The outputs, row after row.
    pub out: &'a mut [f32],
    /// The log-sum-exps; empty where nobody asked for them.
    pub lse: &'a mut [f32],
}

/// A backend whose calls are another's, but for those that a test replaces. Unless they are replaced, it refuses shards and rows on a device.
///
/// ```
/// use attn_conformance::{Case, check_table, fake::FakeBackend};
/// use attn_cpu::Reference;
///
/// let wrong = FakeBackend::of(Reference::new()).with_answers(|answer| answer.out[7] += 1.0);
/// let case = Case::new([2, 1], 64, &[70, 9], "int8".parse()?);
/// let report = check_table(&Reference::new(), &wrong, &[case], 1, &mut |_, _| ());
/// assert!(report.failures[0].contains("out[7] is"));
/// # Ok::<(), attn_core::Error>(())
/// ```
pub struct FakeBackend {
    inner: Box<dyn DecodeAttention>,
    device: DeviceInfo,
    is_software: bool,
    refuses: Option<Box<Refuses>>,
    makes_caches: Option<Box<MakesCaches>>,
    executes: Option<Box<Executes>>,
    attends_spans: Option<Box<AttendsSpans>>,
    makes_steps: Option<Box<MakesSteps>>,
    checks_grid: Option<Box<ChecksGrid>>,
}

impl FakeBackend {
    /// A backend that does what `inner` does.
    pub fn of(inner: impl DecodeAttention + 'static) -> Self {
        FakeBackend {
            device: inner.device().clone(),
            is_software: inner.is_software(),
            inner: Box::new(inner),
            refuses: None,
            makes_caches: None,
            executes: None,
            attends_spans: None,
            makes_steps: None,
            checks_grid: None,
        }
    }

    /// A backend of this name with caches in host memory, which attends nothing and leaves outputs as they are.
    #[must_use]
    pub fn idle(name: &'static str) -> Self {
        FakeBackend::of(Idle(DeviceInfo::new(name, "a fake", "")))
    }

    /// Gives the device another name.
    #[must_use]
    pub fn named(mut self, name: &'static str) -> Self {
        self.device.backend = name;
        self
    }

    /// Says that the device is a program on the CPU.
    #[must_use]
    pub fn software(mut self) -> Self {
        self.is_software = true;
        self
    }

    /// Refuses the problems for which `refuses` has a reason.
    #[must_use]
    pub fn with_refusals(
        mut self,
        refuses: impl Fn(&Problem, KvFormat) -> Option<Unsupported> + Send + Sync + 'static,
    ) -> Self {
        self.refuses = Some(Box::new(refuses));
        self
    }

    /// Makes caches in another way.
    #[must_use]
    pub fn with_caches(
        mut self,
        makes: impl Fn(&CacheConfig) -> Result<KvCache, Error> + Send + Sync + 'static,
    ) -> Self {
        self.makes_caches = Some(Box::new(makes));
        self
    }

    /// Executes steps in another way; the first argument is the backend that it replaces.
    #[must_use]
    pub fn with_execute(
        mut self,
        executes: impl Fn(&dyn DecodeAttention, &mut DecodeStep<'_>) -> Result<(), Error>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        self.executes = Some(Box::new(executes));
        self
    }

    /// Changes the answers of steps whose rows lie side by side.
    #[must_use]
    pub fn with_answers(self, changes: impl Fn(Answer<'_>) + Send + Sync + 'static) -> Self {
        self.with_execute(move |inner, step| {
            inner.execute(step)?;
            let (problem, format) = (step.problem().clone(), step.plan().format());
            let StepOutputs { out, lse, .. } = step.parts().1;
            let out = out.into_contiguous();
            changes(Answer {
                problem: &problem,
                format,
                out: out.expect("tests that change answers give contiguous rows"),
                lse: lse.unwrap_or_default(),
            });
            Ok(())
        })
    }

    /// Attends shards.
    #[must_use]
    pub fn with_spans(
        mut self,
        attends: impl Fn(&SpansStep<'_>) -> Result<SpanStates, Error> + Send + Sync + 'static,
    ) -> Self {
        self.attends_spans = Some(Box::new(attends));
        self
    }

    /// Takes rows on a device.
    #[must_use]
    pub fn with_device_steps(
        mut self,
        makes: impl Fn(&KvCache) -> Result<Box<dyn DeviceSteps>, Error> + Send + Sync + 'static,
    ) -> Self {
        self.makes_steps = Some(Box::new(makes));
        self
    }

    /// Compares the device's own functions in another way.
    #[must_use]
    pub fn with_grid_check(
        mut self,
        checks: impl Fn() -> Result<Option<GridCheck>, Error> + Send + Sync + 'static,
    ) -> Self {
        self.checks_grid = Some(Box::new(checks));
        self
    }
}

impl DecodeAttention for FakeBackend {
    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn is_software(&self) -> bool {
        self.is_software
    }

    fn check_grid(&self) -> Result<Option<GridCheck>, Error> {
        match &self.checks_grid {
            Some(checks) => checks(),
            None => self.inner.check_grid(),
        }
    }

    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported> {
        let refuses = self.refuses.as_ref();
        match refuses.and_then(|refuses| refuses(problem, format)) {
            Some(reason) => Err(reason),
            None => self.inner.supports(problem, format),
        }
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        match &self.makes_caches {
            Some(makes) => makes(config),
            None => self.inner.create_cache(config),
        }
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        self.inner.plan(problem, format)
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        match &self.executes {
            Some(executes) => executes(&*self.inner, step),
            None => self.inner.execute(step),
        }
    }

    fn device_steps(&self, cache: &KvCache) -> Result<Box<dyn DeviceSteps>, Error> {
        match &self.makes_steps {
            Some(makes) => makes(cache),
            None => Idle(self.device.clone()).device_steps(cache),
        }
    }

    fn attend_spans(&self, step: &SpansStep<'_>) -> Result<SpanStates, Error> {
        match &self.attends_spans {
            Some(attends) => attends(step),
            None => Idle(self.device.clone()).attend_spans(step),
        }
    }
}

/// A backend that attends nothing, and has of the trait what it must have.
struct Idle(DeviceInfo);

impl DecodeAttention for Idle {
    fn device(&self) -> &DeviceInfo {
        &self.0
    }

    fn supports(&self, _: &Problem, _: KvFormat) -> Result<(), Unsupported> {
        Ok(())
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        FakePages::new(config)?.cache()
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        Plan::new(self.0.backend, problem, format, ())
    }

    fn execute(&self, _: &mut DecodeStep<'_>) -> Result<(), Error> {
        Ok(())
    }
}

/// What a store is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// To append tokens.
    Tokens,
    /// To write whole pages.
    Pages,
}

/// An append to pages.
pub struct AppendCall<'a> {
    access: &'a CacheAccess,
    layer: usize,
    /// Where the tokens go.
    pub writes: &'a [TokenWrite],
    kv: [WideRows<'a>; 2],
}

impl AppendCall<'_> {
    /// Writes the call's tokens to these places of the pages.
    ///
    /// # Errors
    /// Those of [`PageStore::append`].
    pub fn write(&self, pages: &mut HostPages, writes: &[TokenWrite]) -> Result<(), Error> {
        let [k, v] = self.kv;
        pages.append(self.access, self.layer, writes, k, v)
    }

    /// Adds 1 to the first byte of a page.
    ///
    /// # Errors
    /// Those of [`PageStore::write_pages`].
    pub fn change_page(&self, pages: &mut HostPages, page: u32) -> Result<(), Error> {
        let mut bytes = pages.read_page(self.access, self.layer, page)?;
        bytes[0] = bytes[0].wrapping_add(1);
        pages.write_page(self.access, self.layer, page, &bytes)
    }
}

type Appends = dyn FnMut(&mut HostPages, &AppendCall<'_>) -> Result<(), Error> + Send + Sync;
type Allows = dyn Fn(Call, usize) -> usize + Send + Sync;
type AllowsCentres = dyn Fn(usize) -> bool + Send + Sync;
type Notes = dyn Fn() + Send + Sync;

/// Pages in host memory whose appends a test changes, whose writes it cuts short, or whose accesses it notes.
pub struct FakePages {
    config: CacheConfig,
    pages: HostPages,
    appends: Box<Appends>,
    allows: Box<Allows>,
    allows_centres: Box<AllowsCentres>,
    notes: Box<Notes>,
    is_hidden: bool,
}

impl FakePages {
    /// Pages for a cache, which do what [`HostPages`] do.
    ///
    /// # Errors
    /// Those of [`HostPages::new`].
    pub fn new(config: &CacheConfig) -> Result<Self, Error> {
        Ok(FakePages {
            config: config.clone(),
            pages: HostPages::new(config)?,
            appends: Box::new(|pages, call| call.write(pages, call.writes)),
            allows: Box::new(|_, count| count),
            allows_centres: Box::new(|_| true),
            notes: Box::new(|| ()),
            is_hidden: false,
        })
    }

    /// Appends in another way.
    #[must_use]
    pub fn with_appends(
        mut self,
        appends: impl FnMut(&mut HostPages, &AppendCall<'_>) -> Result<(), Error>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        self.appends = Box::new(appends);
        self
    }

    /// Asks `allows` at each call that writes how many of its tokens or pages are written before it fails with [`failure`]; it does not fail if they
    /// are as many as it has.
    #[must_use]
    pub fn with_limit(
        mut self,
        allows: impl Fn(Call, usize) -> usize + Send + Sync + 'static,
    ) -> Self {
        self.allows = Box::new(allows);
        self
    }

    /// Asks `allows` at each call that replaces a sequence's centres of K in a layer whether it does so; else it fails with [`failure`].
    #[must_use]
    pub fn with_centres_limit(
        mut self,
        allows: impl Fn(usize) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.allows_centres = Box::new(allows);
        self
    }

    /// Calls `notes` at each access to the pages or the centres.
    #[must_use]
    pub fn with_notes(mut self, notes: impl Fn() + Send + Sync + 'static) -> Self {
        self.notes = Box::new(notes);
        self
    }

    /// Hides that the pages lie in host memory, as another backend's store does.
    #[must_use]
    pub fn hidden(mut self) -> Self {
        self.is_hidden = true;
        self
    }

    /// The cache over these pages.
    ///
    /// # Errors
    /// Those of [`KvCache::new`].
    pub fn cache(self) -> Result<KvCache, Error> {
        KvCache::new(self.config.clone(), Box::new(self))
    }

    /// How many of a call's tokens or pages are written, and what the call ends with.
    fn allowed(&self, call: Call, count: usize) -> (usize, Result<(), Error>) {
        (self.notes)();
        let allowed = (self.allows)(call, count).min(count);
        let end = match call {
            _ if allowed == count => Ok(()),
            Call::Tokens => Err(failure("writing tokens")),
            Call::Pages => Err(failure("writing pages")),
        };
        (allowed, end)
    }
}

/// A cache over pages of which each write does what `allows` says ([`FakePages::with_limit`]).
///
/// # Panics
/// If there is no such cache.
pub fn limited(
    config: CacheConfig,
    allows: impl Fn(Call, usize) -> usize + Send + Sync + 'static,
) -> KvCache {
    let pages = FakePages::new(&config).expect("pages of the config");
    let cache = pages.with_limit(allows).cache();
    cache.expect("a cache of the config")
}

/// The error of a device that fails on demand.
#[must_use]
pub fn failure(doing: &'static str) -> Error {
    Error::Device {
        backend: "test",
        doing,
        source: "as asked".into(),
    }
}

impl PageStore for FakePages {
    fn layout(&self) -> PageLayout {
        self.pages.layout()
    }

    fn num_pages(&self) -> usize {
        self.pages.num_pages()
    }

    fn layers(&self) -> usize {
        self.pages.layers()
    }

    fn append(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        let (allowed, end) = self.allowed(Call::Tokens, writes.len());
        let call = AppendCall {
            access,
            layer,
            writes: &writes[..allowed],
            kv: [k, v],
        };
        (self.appends)(&mut self.pages, &call)?;
        end
    }

    fn read_pages(
        &self,
        access: &CacheAccess,
        layer: usize,
        pages: &[u32],
        out: &mut [u8],
    ) -> Result<(), Error> {
        (self.notes)();
        self.pages.read_pages(access, layer, pages, out)
    }

    fn write_pages(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        pages: &[u32],
        bytes: &[u8],
    ) -> Result<(), Error> {
        let (allowed, end) = self.allowed(Call::Pages, pages.len());
        let bytes = &bytes[..allowed * self.pages.layout().page_bytes()];
        let pages = &pages[..allowed];
        self.pages.write_pages(access, layer, pages, bytes)?;
        end
    }

    fn tensor_scales(&self) -> Option<[&[f32]; 2]> {
        self.pages.tensor_scales()
    }

    fn num_sequences(&self) -> Option<usize> {
        self.pages.num_sequences()
    }

    fn has_centres(&self) -> bool {
        self.pages.has_centres()
    }

    fn centre(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        tiles: &[FirstTile],
    ) -> Result<(), Error> {
        (self.notes)();
        self.pages.centre(access, layer, tiles)
    }

    fn read_centres(
        &self,
        access: &CacheAccess,
        layer: usize,
        sequence: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        (self.notes)();
        self.pages.read_centres(access, layer, sequence, out)
    }

    fn write_centres(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        sequence: usize,
        bytes: &[u8],
    ) -> Result<(), Error> {
        (self.notes)();
        if !(self.allows_centres)(layer) {
            return Err(failure("writing centres"));
        }
        self.pages.write_centres(access, layer, sequence, bytes)
    }

    fn grow_centres(&mut self, access: &CacheAccess, sequences: usize) -> Result<(), Error> {
        (self.notes)();
        self.pages.grow_centres(access, sequences)
    }

    fn grow(&mut self, access: &CacheAccess, pages: usize) -> Result<(), Error> {
        (self.notes)();
        self.pages.grow(access, pages)
    }

    fn as_any(&self) -> &dyn Any {
        if self.is_hidden {
            self
        } else {
            self.pages.as_any()
        }
    }
}
