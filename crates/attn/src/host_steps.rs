//! Steps over any sequences of a cache, with rows in host memory.

use crate::{
    CacheLayer, CachedSequences, DecodeAttention, DecodeStep, Error, KvCache, KvSource, Plan,
    Problem, Recent, Rows, RowsMut, SpanStates, SpansStep,
};

/// Plans that are kept for the steps that come: those of decoding, of drafts, of a prompt's pieces.
const KEPT_PLANS: usize = 8;

/// Queries and outputs in host memory, `[query tokens, num_q_heads, head_dim]`, sequence after sequence: side by side, or at strides
/// ([`Rows::strided`]).
#[derive(Debug)]
pub struct HostRows<'a> {
    /// The queries.
    pub q: Rows<'a>,
    /// The outputs.
    pub out: RowsMut<'a>,
    /// The log-sum-exps, `[query tokens, num_q_heads]`, if they are asked for.
    pub lse: Option<&'a mut [f32]>,
}

/// What the steps of one cache keep: the plans of the latest problems, so that the caller needs none of its own.
///
/// ```
/// use attn::{Append, CacheConfig, Heads, HostRows, HostSteps, KvFormat, Problem};
///
/// let backend = attn::select(None)?.backend;
/// let heads = Heads { q: 4, kv: 1, dim: 64 };
/// let config = CacheConfig::builder(KvFormat::INT8, heads).sequences(3).max_len(1024).build();
/// let mut cache = backend.create_cache(&config)?;
/// cache.append_batch(&[Append { sequence: 2, tokens: 1 }], &[0.5; 64], &[2.0; 64])?;
///
/// let mut steps = HostSteps::default();
/// let (q, mut out) = ([1.0; 4 * 64], [0.0; 4 * 64]);
/// let rows = HostRows { q: (&q).into(), out: (&mut out).into(), lse: None };
/// steps.attend(&*backend, &cache, &[2], &Problem::new(heads, [0]), rows)?;
/// assert!((out[0] - 2.0).abs() < 0.02);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HostSteps {
    plans: Recent<Problem, Plan>,
}

impl Default for HostSteps {
    fn default() -> Self {
        HostSteps {
            plans: Recent::new(KEPT_PLANS),
        }
    }
}

impl HostSteps {
    /// Attends to these sequences of the cache, in this order. The problem gives heads, modifiers and query tokens; its lengths are taken from the
    /// cache.
    ///
    /// # Errors
    /// Those of [`KvCache::sequences`], [`CachedSequences::check_problem`](crate::CachedSequences::check_problem), [`DecodeAttention::plan`] and
    /// [`DecodeAttention::decode`]; [`Error::Length`] and [`Error::Shape`] for other than the problem's rows.
    pub fn attend(
        &mut self,
        backend: &dyn DecodeAttention,
        cache: &KvCache,
        sequences: &[usize],
        problem: &Problem,
        rows: HostRows<'_>,
    ) -> Result<(), Error> {
        self.attend_chosen(backend, &cache.sequences(sequences)?, problem, rows)
    }

    /// The same for one layer of a cache of several; the plans are those of all layers.
    ///
    /// ```
    /// use attn::{Append, CacheConfig, Heads, HostRows, HostSteps, KvFormat, Problem};
    ///
    /// let backend = attn::select(None)?.backend;
    /// let heads = Heads { q: 4, kv: 1, dim: 64 };
    /// let config = CacheConfig::builder(KvFormat::INT8, heads).layers(2).max_len(64).build();
    /// let mut cache = backend.create_cache(&config)?;
    /// let (mut steps, problem) = (HostSteps::default(), Problem::new(heads, [0]));
    /// let (q, mut out) = ([1.0; 4 * 64], [[0.0; 4 * 64]; 2]);
    ///
    /// cache.reserve(&[Append { sequence: 0, tokens: 1 }])?;
    /// for (layer, out) in out.iter_mut().enumerate() {
    ///     cache.write(layer, &[0.5; 64], &[2.0 + layer as f32; 64])?;
    ///     let rows = HostRows { q: (&q).into(), out: out.into(), lse: None };
    ///     steps.attend_layer(&*backend, cache.layer(layer)?, &[0], &problem, rows)?;
    /// }
    /// assert!((out[0][0] - 2.0).abs() < 0.02 && (out[1][0] - 3.0).abs() < 0.03);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`HostSteps::attend`]; [`Error::Step`] for a layer that lacks the tokens of an open step.
    pub fn attend_layer(
        &mut self,
        backend: &dyn DecodeAttention,
        layer: CacheLayer<'_>,
        sequences: &[usize],
        problem: &Problem,
        rows: HostRows<'_>,
    ) -> Result<(), Error> {
        self.attend_chosen(backend, &layer.sequences(sequences)?, problem, rows)
    }

    /// Attends to a shard of each of these sequences, of a layer of the cache, and leaves the states of its spans. The problem says how many tokens
    /// follow in other shards ([`Problem::tokens_after`]); its lengths are taken from the cache.
    ///
    /// ```
    /// use attn::{BackendId, CacheConfig, Heads, HostSteps, KvFormat, Problem, SpanStates};
    ///
    /// let backend = attn::select(Some(BackendId::Cpu))?.backend;
    /// let heads = Heads { q: 4, kv: 1, dim: 64 };
    /// let config = CacheConfig::builder(KvFormat::INT8, heads).max_len(1024).build();
    /// let q = [0.25; 4 * 64];
    /// // 1024 tokens here, and 300 in another shard.
    /// let mut shards = Vec::new();
    /// for (tokens, after) in [(1024, 300), (300, 0)] {
    ///     let mut cache = backend.create_cache(&config)?;
    ///     cache.append(0, &vec![0.5; tokens * 64], &vec![2.0; tokens * 64])?;
    ///     let problem = Problem::new(heads, [0]).tokens_after([after]);
    ///     shards.push(HostSteps::default().attend_spans(&*backend, cache.layer(0)?, &[0], &problem, &q)?);
    /// }
    /// let (mut out, mut lse) = ([0.0; 4 * 64], [0.0; 4]);
    /// SpanStates::finish(&shards, &Problem::new(heads, [1324]), KvFormat::INT8, &[], (&mut out, &mut lse))?;
    /// assert!((out[0] - 2.0).abs() < 0.02);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`HostSteps::attend_layer`], [`SpansStep::new`] and [`DecodeAttention::attend_spans`].
    pub fn attend_spans<'a>(
        &mut self,
        backend: &dyn DecodeAttention,
        layer: CacheLayer<'_>,
        sequences: &[usize],
        problem: &Problem,
        q: impl Into<Rows<'a>>,
    ) -> Result<SpanStates, Error> {
        let chosen = layer.sequences(sequences)?;
        let plan = self.plan(backend, &chosen, problem)?;
        backend.attend_spans(&SpansStep::new(
            &plan,
            q.into(),
            KvSource::Sequences(&chosen),
        )?)
    }

    fn attend_chosen(
        &mut self,
        backend: &dyn DecodeAttention,
        chosen: &CachedSequences<'_>,
        problem: &Problem,
        rows: HostRows<'_>,
    ) -> Result<(), Error> {
        let plan = self.plan(backend, chosen, problem)?;
        let mut step = DecodeStep::new(&plan, rows.q, KvSource::Sequences(chosen), rows.out)?;
        if let Some(lse) = rows.lse {
            step = step.with_lse(lse)?;
        }
        backend.decode(&mut step)
    }

    /// The plan of a step over the chosen sequences, which it has been compared with.
    fn plan(
        &mut self,
        backend: &dyn DecodeAttention,
        chosen: &CachedSequences<'_>,
        problem: &Problem,
    ) -> Result<Plan, Error> {
        let mut problem = problem.clone();
        problem.kv_lens.clone_from(&chosen.table().lens);
        chosen.check_problem(&problem)?;
        // One plan serves every shorter length; of shards, what follows differs from step to step anyway.
        if problem.tokens_after.is_empty() {
            let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
            problem.kv_lens = vec![longest.next_power_of_two().max(64); problem.batch()];
        }
        let format = chosen.cache().config().format;
        self.plans
            .get_or_make(problem, |problem| backend.plan(problem, format))
    }
}
