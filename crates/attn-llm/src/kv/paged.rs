//! K and V in this library's pages: a cache for each layer, on one backend.

use std::sync::Arc;

use attn::{
    Append, CacheConfig, DecodeAttention, DecodeStep, KvCache, KvFormat, KvSource, Plan, Problem,
};

use super::{Kv, check_room};
use crate::{config::ModelConfig, error::Error};

/// A cache of this library for each layer.
pub struct PagedKv {
    backend: Arc<dyn DecodeAttention>,
    caches: Vec<KvCache>,
    windows: Vec<Option<usize>>,
    config: ModelConfig,
    format: KvFormat,
    max_len: usize,
    appends: Vec<Append>,
    /// Plans of the latest query lengths, one for each window that layers have.
    plans: Vec<(Option<usize>, Plan)>,
}

impl PagedKv {
    /// Creates empty caches for `sequences` of up to `max_len` tokens each, of which up to `chunk` come at once.
    ///
    /// # Errors
    /// Those of [`DecodeAttention::create_cache`], [`attn::Error::OutOfMemory`] among them.
    pub fn new(
        backend: Arc<dyn DecodeAttention>,
        model: &ModelConfig,
        format: KvFormat,
        sequences: usize,
        max_len: usize,
        chunk: usize,
    ) -> Result<Self, Error> {
        let config = CacheConfig::builder(format, model.heads)
            .sequences(sequences)
            .max_len(max_len)
            .max_q_len(chunk)
            .build();
        let caches = (0..model.windows.len()).map(|_| backend.create_cache(&config));
        Ok(PagedKv {
            caches: caches.collect::<Result<_, _>>()?,
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
        let of_one = |cache: &KvCache| {
            let used = cache.config().num_pages - cache.free_pages();
            used * cache.layout().page_bytes()
        };
        self.caches.iter().map(of_one).sum()
    }

    /// Bytes of one token's K and V in all layers and heads, residuals left out.
    #[must_use]
    pub fn bytes_per_token(&self) -> f64 {
        let of_one = |cache: &KvCache| {
            cache.layout().bytes_per_token() * cache.layout().num_kv_heads() as f64
        };
        self.caches.iter().map(of_one).sum()
    }

    /// Makes the empty sequence `to` share the tokens of `from`.
    ///
    /// # Errors
    /// Those of [`KvCache::fork`].
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        Ok(self.caches.iter_mut().try_for_each(|c| c.fork(from, to))?)
    }

    /// Empties a sequence.
    ///
    /// # Errors
    /// Those of [`KvCache::free_sequence`].
    pub fn free(&mut self, sequence: usize) -> Result<(), Error> {
        let mut caches = self.caches.iter_mut();
        Ok(caches.try_for_each(|cache| cache.free_sequence(sequence))?)
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
            problem.window_left = window;
            self.plans
                .push((window, self.backend.plan(&problem, self.format)?));
        }
        Ok(())
    }
}

impl Kv for PagedKv {
    fn lens(&self) -> &[usize] {
        &self.caches[0].table().lens
    }

    fn begin(&mut self, appends: &[Append]) -> Result<(), Error> {
        check_room(self.lens(), appends, self.max_len)?;
        let mut q_lens = vec![0; self.lens().len()];
        appends.iter().for_each(|a| q_lens[a.sequence] = a.tokens);
        self.plan(&q_lens)?;
        self.appends = appends.to_vec();
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
        let cache = &mut self.caches[layer];
        cache.append_batch(&self.appends, k, v)?;
        let window = self.windows[layer];
        let plan = self.plans.iter().find(|(known, _)| *known == window);
        let (_, plan) = plan.expect("`begin` plans for every window");
        let mut step = DecodeStep::new(plan, q, KvSource::Cache(cache), out)?;
        Ok(self.backend.decode(&mut step)?)
    }
}
