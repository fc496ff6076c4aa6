//! One decode step, checked.

use std::borrow::Cow;

use crate::{
    arithmetic::LOG2_E,
    cache::{CacheLayer, CachedSequences, KvCache, PageTable},
    elements::ElementsMut,
    error::{Error, filled},
    head_dim::HeadDim,
    page_pool::PagePool,
    plan::Plan,
    problem::Problem,
    process,
    row_layout::{Layout, scatter},
    rows::{Rows, RowsMut},
    view::KvView,
    wide_rows::{WideRows, WideRowsMut, Widened, check_finite_rows, first_of},
};

/// Where K and V come from.
#[derive(Clone, Copy)]
pub enum KvSource<'a> {
    /// A cache of one layer created by the same backend: its first sequences.
    Cache(&'a KvCache),
    /// One layer of such a cache: its first sequences.
    Layer(CacheLayer<'a>),
    /// Some sequences of such a cache or layer, in any order: [`KvCache::sequences`], [`CacheLayer::sequences`].
    Sequences(&'a CachedSequences<'a>),
    /// A contiguous cache in host memory, read in place.
    View(&'a KvView<'a>),
    /// Sequences in pages of the caller's in host memory.
    Pool(&'a PagePool<'a>),
}

impl<'a> KvSource<'a> {
    /// The number of cached tokens of each sequence.
    #[must_use]
    pub fn kv_lens(self) -> &'a [usize] {
        match self {
            KvSource::Cache(cache) => &cache.table().lens,
            KvSource::Layer(layer) => &layer.table().lens,
            KvSource::Sequences(sequences) => &sequences.table().lens,
            KvSource::View(view) => view.kv_lens(),
            KvSource::Pool(pool) => pool.kv_lens(),
        }
    }

    /// For backends: a cache, or a contiguous one.
    #[must_use]
    pub fn memory(self) -> KvMemory<'a> {
        match self {
            KvSource::Cache(cache) => KvMemory::Pages(cache.first_layer(), cache.table()),
            KvSource::Layer(layer) => KvMemory::Pages(layer, layer.table()),
            KvSource::Sequences(sequences) => KvMemory::Pages(sequences.layer(), sequences.table()),
            KvSource::View(view) => KvMemory::View(view),
            KvSource::Pool(pool) => KvMemory::Pool(pool),
        }
    }
}

/// For backends: what the K and V of a step lie in.
#[derive(Clone, Copy)]
pub enum KvMemory<'a> {
    /// A layer of a cache, and the pages and lengths of the step's sequences in their order.
    Pages(CacheLayer<'a>, &'a PageTable),
    /// A contiguous cache in host memory.
    View(&'a KvView<'a>),
    /// Pages of the caller's in host memory.
    Pool(&'a PagePool<'a>),
}

/// The inputs of a decode step that [`DecodeStep::new`] has checked.
#[derive(Clone, Copy)]
pub struct StepInputs<'a> {
    plan: &'a Plan,
    problem: &'a Problem,
    q: WideRows<'a>,
    kv: KvSource<'a>,
}

impl<'a> StepInputs<'a> {
    /// The plan.
    pub fn plan(&self) -> &'a Plan {
        self.plan
    }

    /// The plan's problem with this step's lengths.
    #[must_use]
    pub fn problem(&self) -> &'a Problem {
        self.problem
    }

    /// The queries, `[query tokens, num_q_heads, head_dim.k]`, side by side or at strides.
    #[must_use]
    pub fn q(&self) -> WideRows<'a> {
        self.q
    }

    /// K and V.
    #[must_use]
    pub fn kv(&self) -> KvSource<'a> {
        self.kv
    }
}

/// The outputs of a decode step, to be overwritten.
#[derive(Debug)]
#[non_exhaustive]
pub struct StepOutputs<'a> {
    /// The attended values, `[query tokens, num_q_heads, head_dim.v]`, side by side or at strides.
    pub out: WideRowsMut<'a>,
    /// The log-sum-exps, `[query tokens, num_q_heads]`, where the caller asked for them.
    pub lse: Option<&'a mut [f32]>,
}

/// The memory that a backend writes outputs to.
enum Output<'a> {
    /// The caller's own.
    Wide(&'a mut [f32], Layout),
    /// f32 results, and the caller's 16-bit memory that they are rounded into.
    Narrow(Vec<f32>, ElementsMut<'a>, Layout),
}

/// Inputs that have been checked against each other.
struct Checked<'a> {
    plan: &'a Plan,
    problem: Cow<'a, Problem>,
    q: Widened<'a>,
    kv: KvSource<'a>,
}

impl<'a> Checked<'a> {
    /// Checks what a step reads, with queries that lie `in_q`; `check` sees the problem with the step's lengths. The queries' values come last, since
    /// there may be far more rows than memory, as at strides of 0.
    fn new(
        plan: &'a Plan,
        q: Rows<'a>,
        in_q: Layout,
        kv: KvSource<'a>,
        check: impl FnOnce(&Problem) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        process::check()?;
        let problem = plan.problem();
        let (format, tensor_scales) = match kv.memory() {
            KvMemory::Pages(layer, table) => {
                if let KvSource::Cache(cache) = kv {
                    cache.only_layer()?;
                }
                let config = layer.cache().config();
                let heads = layer.layout_of(table).num_kv_heads();
                check_source(problem, heads, config.head_dim, kv.kv_lens())?;
                layer.check_queries_of(problem, table)?;
                (config.format, layer.tensor_scales()[0])
            }
            KvMemory::View(view) => {
                check_source(problem, view.num_kv_heads(), view.head_dim(), kv.kv_lens())?;
                (view.format(), view.k_tensor_scales())
            }
            KvMemory::Pool(pool) => {
                let layout = pool.layout();
                check_source(
                    problem,
                    layout.num_kv_heads(),
                    layout.head_dim(),
                    kv.kv_lens(),
                )?;
                (layout.format(), &[][..])
            }
        };
        if format != plan.format() {
            return Err(Error::Mismatch {
                what: "format",
                problem: plan.format().to_string(),
                cache: format.to_string(),
            });
        }
        let lens = &kv.kv_lens()[..problem.batch()];
        let problem = if problem.kv_lens == lens {
            Cow::Borrowed(problem)
        } else {
            Cow::Owned(Problem {
                kv_lens: lens.to_vec(),
                ..problem.clone()
            })
        };
        check(&problem)?;
        let q = q.widened(in_q, "the queries in f32")?;
        check_queries(&problem, q.rows(), tensor_scales)?;
        Ok(Checked {
            plan,
            problem,
            q,
            kv,
        })
    }

    fn inputs(&self) -> StepInputs<'_> {
        StepInputs {
            plan: self.plan,
            problem: &self.problem,
            q: self.q.rows(),
            kv: self.kv,
        }
    }
}

/// A step over a shard of its sequences' tokens, which leaves the states of its spans unfinished ([`SpanStates`](crate::SpanStates)): checked as a
/// [`DecodeStep`] is.
#[must_use = "a step is attended by DecodeAttention::attend_spans"]
pub struct SpansStep<'a>(Checked<'a>);

impl<'a> SpansStep<'a> {
    /// Checks a step, whose problem may have tokens that follow in other shards ([`Problem::tokens_after`]): such a sequence's cached tokens are whole
    /// spans of [`SPAN_TOKENS`](crate::segments::SPAN_TOKENS).
    ///
    /// # Errors
    /// Those of [`DecodeStep::new`]; [`Error::Parameter`] for a shard that ends inside a span.
    pub fn new(plan: &'a Plan, q: impl Into<Rows<'a>>, kv: KvSource<'a>) -> Result<Self, Error> {
        let q = q.into();
        let in_q = q.check_host("q", plan.problem().q_shape())?;
        Checked::new(plan, q, in_q, kv, Problem::check_shards).map(SpansStep)
    }

    /// For backends: what the step reads.
    pub fn inputs(&self) -> StepInputs<'_> {
        self.0.inputs()
    }
}

/// A decode step whose inputs and outputs have been checked against each other: holding one is the proof.
#[must_use = "a step is decoded by DecodeAttention::decode"]
pub struct DecodeStep<'a> {
    inputs: Checked<'a>,
    out: Output<'a>,
    lse: Option<&'a mut [f32]>,
}

impl<'a> DecodeStep<'a> {
    /// Checks a step; sequence b of the source is sequence b of the problem, and at most as long as the plan's.
    ///
    /// `q` is `[query tokens, num_q_heads, head_dim.k]` and `out` `[query tokens, num_q_heads, head_dim.v]`, in f32, f16 or bf16, side by side or at strides ([`Rows::strided`],
    /// [`RowsMut::strided`]). Results are those of f32, rounded at the end.
    ///
    /// # Errors
    /// [`Error::Length`], or [`Error::Shape`] for strided rows; [`Error::NotFinite`], [`Error::QueryRange`]; [`Error::Mismatch`], [`Error::Batch`], [`Error::KvLen`],
    /// [`Error::ResidualQueries`] where plan and cache disagree; [`Error::SeveralLayers`] for a whole cache of several layers; [`Error::Step`] for a layer that lacks the tokens of an open step;
    /// [`Error::OutOfMemory`] for copies of 16-bit elements.
    ///
    /// ```
    /// use attn_core::{
    ///     CacheConfig, DecodeStep, Error, Heads, HostPages, KvCache, KvFormat, KvSource, Plan, Problem,
    /// };
    ///
    /// let heads = Heads::new(4, 1, 64);
    /// let config = CacheConfig::builder(KvFormat::INT8, heads).max_len(64).build();
    /// let pages = HostPages::new(&config)?;
    /// let mut cache = KvCache::new(config, Box::new(pages))?;
    /// cache.append(0, &[0.5; 64], &[2.0; 64])?;
    /// // A backend's `plan` gives the plan, and its `decode` takes the step.
    /// let plan = Plan::new("example", &Problem::new(heads, [64]), KvFormat::INT8, ())?;
    /// let (q, mut out, mut lse) = ([1.0; 4 * 64], [0.0; 4 * 64], [0.0; 4]);
    /// let step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)?.with_lse(&mut lse)?;
    /// assert_eq!(step.problem().kv_lens, [1]);
    /// // Queries of another length are refused.
    /// let refused = DecodeStep::new(&plan, &q[1..], KvSource::Cache(&cache), &mut out);
    /// assert!(matches!(refused, Err(Error::Length { what: "q", .. })));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn new(
        plan: &'a Plan,
        q: impl Into<Rows<'a>>,
        kv: KvSource<'a>,
        out: impl Into<RowsMut<'a>>,
    ) -> Result<Self, Error> {
        let (q, out, problem) = (q.into(), out.into(), plan.problem());
        let in_q = q.check_host("q", problem.q_shape())?;
        let in_out = out.check("out", problem.out_shape())?;
        let inputs = Checked::new(plan, q, in_q, kv, |_| Ok(()))?;
        let out = match out.into_elements("out")? {
            ElementsMut::F32(out) => Output::Wide(out, in_out),
            narrow => {
                let wide = filled("the outputs in f32", in_out.len(), 0.0)?;
                Output::Narrow(wide, narrow, in_out)
            }
        };
        Ok(DecodeStep {
            inputs,
            out,
            lse: None,
        })
    }

    /// Asks for the log-sum-exps too: natural logarithms, `[query tokens, num_q_heads]`, −∞ where a query sees no token.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn with_lse(mut self, lse: &'a mut [f32]) -> Result<Self, Error> {
        check_length("lse", lse.len(), self.problem().rows())?;
        self.lse = Some(lse);
        Ok(self)
    }

    /// The plan.
    pub fn plan(&self) -> &'a Plan {
        self.inputs.plan
    }

    /// The plan's problem with this step's lengths.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.inputs.problem
    }

    /// For backends: what the step reads, and what it writes.
    pub fn parts(&mut self) -> (StepInputs<'_>, StepOutputs<'_>) {
        let inputs = self.inputs.inputs();
        let out = match &mut self.out {
            Output::Wide(out, layout) => WideRowsMut::of(out, *layout),
            Output::Narrow(wide, _, layout) => WideRowsMut::of(wide, layout.side_by_side()),
        };
        let lse = self.lse.as_deref_mut();
        (inputs, StepOutputs { out, lse })
    }

    /// For backends: rounds the results into 16-bit outputs, as [`DecodeAttention::decode`](crate::DecodeAttention::decode) does behind
    /// [`DecodeAttention::execute`](crate::DecodeAttention::execute).
    pub fn finish(&mut self) {
        if let Output::Narrow(wide, narrow, layout) = &mut self.out {
            scatter(wide, narrow, layout);
        }
    }
}

impl CachedSequences<'_> {
    /// Refuses a problem of other heads, of another number of sequences, of shorter ones, or with query tokens whose residuals the cache no longer
    /// has ([`KvCache::check_queries`]).
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Batch`], [`Error::KvLen`]; those of [`Problem::check`] and [`CacheLayer::check_queries`].
    pub fn check_problem(&self, problem: &Problem) -> Result<(), Error> {
        problem.check()?;
        if problem.batch() != self.table().lens.len() {
            return Err(Error::Batch {
                planned: problem.batch(),
                given: self.table().lens.len(),
            });
        }
        let layout = self.layer().layout_of(self.table());
        check_source(
            problem,
            layout.num_kv_heads(),
            layout.head_dim(),
            &self.table().lens,
        )?;
        self.layer().check_queries_of(problem, self.table())
    }
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

/// Refuses queries that are not finite or exceed the arithmetic's range.
fn check_queries(problem: &Problem, q: WideRows<'_>, k_tensor_scales: &[f32]) -> Result<(), Error> {
    let scale =
        problem.score_scale() * LOG2_E * k_tensor_scales.iter().copied().fold(1.0, f32::max);
    // Valid queries take one pass; NaN and infinity are beyond any range.
    let Some((at, x)) = first_of(q, |x| !((x * scale).abs() <= 1.844_674_4e19)) else {
        return Ok(());
    };
    check_finite_rows("q", q)?;
    Err(Error::QueryRange {
        at,
        value: x * scale,
    })
}

/// Refuses a source with other heads than the plan's problem, with fewer sequences, or with longer ones.
fn check_source(
    problem: &Problem,
    num_kv_heads: usize,
    head_dim: HeadDim,
    lens: &[usize],
) -> Result<(), Error> {
    let mismatch = |what, problem: &dyn ToString, cache: &dyn ToString| {
        Err(Error::Mismatch {
            what,
            problem: problem.to_string(),
            cache: cache.to_string(),
        })
    };
    if problem.head_dim != head_dim {
        return mismatch("head_dim", &problem.head_dim, &head_dim);
    }
    if problem.num_kv_heads != num_kv_heads {
        return mismatch("num_kv_heads", &problem.num_kv_heads, &num_kv_heads);
    }
    if problem.batch() > lens.len() {
        return Err(Error::Batch {
            planned: problem.batch(),
            given: lens.len(),
        });
    }
    let mut pairs = problem.kv_lens.iter().zip(lens).enumerate();
    match pairs.find(|(_, (planned, len))| len > planned) {
        Some((sequence, (&planned, &tokens))) => Err(Error::KvLen {
            sequence,
            tokens,
            planned,
        }),
        None => Ok(()),
    }
}
