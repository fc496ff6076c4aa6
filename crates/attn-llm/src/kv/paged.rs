//! K and V in this library's pages: one cache of all layers, on one backend.

use std::sync::Arc;

use attn::{
    Append, CacheConfig, DecodeAttention, DecodeStep, KvCache, KvFormat, KvSource, Plan, Problem,
};

use super::{Kv, check_room};
use crate::{config::ModelConfig, error::Error};

/// A cache of this library with all layers of a model.
pub struct PagedKv {
    backend: Arc<dyn DecodeAttention>,
    cache: KvCache,
    windows: Vec<Option<usize>>,
    config: ModelConfig,
    format: KvFormat,
    max_len: usize,
    /// Those of the step that began last.
    appends: Vec<Append>,
    /// Plans of the latest query lengths, one for each window that layers have.
    plans: Vec<(Option<usize>, Plan)>,
}

impl PagedKv {
    /// Creates an empty cache for `sequences` of up to `max_len` tokens each, of which up to `chunk` come at once. `fp8` has scale 1, as files of models
    /// bring no scales of K and V: a number's exponent reaches the magnitudes of a model, and larger ones than 448 saturate.
    ///
    /// With `centres` a cache whose format allows it takes centres off its keys ([`attn::centres`]).
    ///
    /// # Errors
    /// Those of [`DecodeAttention::create_cache`]: [`attn::Error::OutOfMemory`] among them, and [`attn::Error::MissingScales`] for `int8-tensor`.
    pub fn new(
        backend: Arc<dyn DecodeAttention>,
        model: &ModelConfig,
        format: KvFormat,
        sequences: usize,
        max_len: usize,
        chunk: usize,
        centres: bool,
    ) -> Result<Self, Error> {
        let mut config = CacheConfig::builder(format, model.heads)
            .layers(model.windows.len())
            .sequences(sequences)
            .max_len(max_len)
            .max_q_len(chunk)
            .centres(centres && format.check_centres().is_ok());
        // Whole numbers at scale 1 are no approximation of K and V, so that static scales of integers stay missing, and are refused.
        if [format.k, format.v]
            .iter()
            .all(|scheme| !scheme.is_integer() || !scheme.has_tensor_scale())
        {
            config = config.unit_tensor_scales();
        }
        Ok(PagedKv {
            cache: backend.create_cache(&config.build())?,
            backend,
            windows: model.windows.clone(),
            config: model.clone(),
            format,
            max_len,
            appends: Vec::new(),
            plans: Vec::new(),
        })
    }

    /// Bytes of pages that hold tokens, in all layers together.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let (cache, config) = (&self.cache, self.cache.config());
        (config.num_pages - cache.free_pages()) * config.layers * cache.layout().page_bytes()
    }

    /// Bytes of one token's K and V in all layers and heads, residuals left out.
    #[must_use]
    pub fn bytes_per_token(&self) -> f64 {
        let layout = self.cache.layout();
        layout.bytes_per_token() * (self.cache.config().layers * layout.num_kv_heads()) as f64
    }

    /// Makes the empty sequence `to` share the tokens of `from`.
    ///
    /// # Errors
    /// Those of [`KvCache::fork`].
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        Ok(self.cache.fork(from, to)?)
    }

    /// Empties a sequence.
    ///
    /// # Errors
    /// Those of [`KvCache::free_sequence`].
    pub fn free(&mut self, sequence: usize) -> Result<(), Error> {
        Ok(self.cache.free_sequence(sequence)?)
    }

    /// Plans steps with these query lengths, unless the latest plans are of the same.
    fn plan(&mut self, q_lens: &[usize]) -> Result<(), Error> {
        let known = self.plans.first().map(|(_, plan)| &plan.problem().q_lens);
        if known.is_some_and(|known| known == q_lens) {
            return Ok(());
        }
        self.plans.clear();
        for &window in &self.windows {
            if self.plans.iter().any(|(known, _)| *known == window) {
                continue;
            }
            let lens = vec![self.max_len; q_lens.len()];
            let mut problem = Problem::new(self.config.heads, lens).q_lens(q_lens);
            problem.scores.window_left = window;
            self.plans
                .push((window, self.backend.plan(&problem, self.format)?));
        }
        Ok(())
    }
}

impl Kv for PagedKv {
    fn lens(&self) -> &[usize] {
        &self.cache.table().lens
    }

    fn begin(&mut self, appends: &[Append]) -> Result<(), Error> {
        check_room(self.lens(), appends, self.max_len)?;
        let mut q_lens = vec![0; self.lens().len()];
        appends.iter().for_each(|a| q_lens[a.sequence] = a.tokens);
        self.plan(&q_lens)?;
        self.cache.reserve(appends)?;
        self.appends = appends.to_vec();
        Ok(())
    }

    fn cancel(&mut self) -> Result<(), Error> {
        if self.cache.open_step().is_some() {
            self.cache.cancel_step()?;
            self.appends.clear();
        }
        // Of a step whose last layer is written.
        while let Some(Append { sequence, tokens }) = self.appends.last() {
            let len = self.lens()[*sequence] - tokens;
            self.cache.truncate(*sequence, len)?;
            self.appends.pop();
        }
        Ok(())
    }

    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.cache.write(layer, k, v)?;
        let window = self.windows[layer];
        let plan = self.plans.iter().find(|(known, _)| *known == window);
        let (_, plan) = plan.expect("`begin` plans for every window");
        let kv = KvSource::Layer(self.cache.layer(layer)?);
        let mut step = DecodeStep::new(plan, q, kv, out)?;
        Ok(self.backend.decode(&mut step)?)
    }
}
