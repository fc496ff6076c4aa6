//! A cache and the calls over it: rows in host memory and on the device, plans that are kept, and what waits for what.

use std::{fmt, ops::Range, sync::Arc};

use attn_core::{DeviceResults, DeviceSteps, KEPT_PLANS, all_on_device};

use crate::{
    Append, Attend, AttendRows, Attended, CacheConfig, DecodeAttention, DecodeStep, Error, KvCache,
    KvSource, PageLayout, PageTable, Plan, Problem, Recent, Rows, RowsMut, SequenceImage, SpanRows,
    SpanStates, SpansStep, process,
};

/// A cache on one backend, and what the calls over it keep: plans of the latest problems, and memory on the device.
///
/// K, V, queries and results are rows in host memory or, where the backend has them, on the device of the cache ([`Rows::on_device`]). A call with rows in host memory
/// is over when it returns. One with rows on the device enqueues its work on what orders the rows, such as a stream, behind the work of all calls before; the
/// host counts pages and lengths meanwhile. Calls may alternate: whatever reads or changes pages or centres of K from the host waits for the device first, or comes behind
/// its work.
///
/// ```
/// use attn::{Append, Attend, AttendRows, CacheConfig, Device, Heads, KvFormat, Session};
///
/// let heads = Heads::new(4, 1, 64);
/// let config = CacheConfig::builder(KvFormat::INT8, heads).sequences(3).max_len(1024).build();
/// let mut session = Session::new(Device::best()?.into(), &config)?;
/// session.append(&[Append { sequence: 2, tokens: 1 }], &[0.5; 64], &[2.0; 64])?;
///
/// let (q, mut out) = ([1.0; 4 * 64], [0.0; 4 * 64]);
/// session.attend(&Attend::new(heads.q, &[2]), AttendRows::new(&q, &mut out))?;
/// assert!((out[0] - 2.0).abs() < 0.02);
/// # Ok::<(), attn::Error>(())
/// ```
///
/// A step of a model whose layers share the cache:
///
/// ```
/// use attn::{Append, Attend, AttendRows, CacheConfig, Device, Heads, KvFormat, Session};
///
/// let heads = Heads::new(4, 1, 64);
/// let config = CacheConfig::builder(KvFormat::INT8, heads).layers(2).max_len(64).build();
/// let mut session = Session::new(Device::best()?.into(), &config)?;
/// let (q, mut out) = ([1.0; 4 * 64], [[0.0; 4 * 64]; 2]);
///
/// session.reserve(&[Append { sequence: 0, tokens: 1 }])?;
/// for (layer, out) in out.iter_mut().enumerate() {
///     session.write(layer, &[0.5; 64], &[2.0 + layer as f32; 64])?;
///     let at = Attend { layer, ..Attend::new(heads.q, &[0]) };
///     session.attend(&at, AttendRows::new(&q, out))?;
/// }
/// assert!((out[0][0] - 2.0).abs() < 0.02 && (out[1][0] - 3.0).abs() < 0.03);
/// # Ok::<(), attn::Error>(())
/// ```
pub struct Session {
    /// Made at the first call with rows on the device. Ahead of the cache, which it is dropped before: it waits for what still reads the pool.
    on_device: Option<Box<dyn DeviceSteps>>,
    plans: Recent<Problem, Plan>,
    cache: KvCache,
    backend: Arc<dyn DecodeAttention>,
}

impl Session {
    /// An empty cache in the backend's memory; [`Device::best`](crate::Device::best) and [`Device::open`](crate::Device::open) give a backend.
    ///
    /// # Errors
    /// Those of [`DecodeAttention::create_cache`].
    pub fn new(backend: Arc<dyn DecodeAttention>, config: &CacheConfig) -> Result<Self, Error> {
        Ok(Session {
            on_device: None,
            plans: Recent::new(KEPT_PLANS),
            cache: backend.create_cache(config)?,
            backend,
        })
    }

    /// Appends tokens to several sequences at once, or to none: K and V are `[tokens, num_kv_heads, head_dim]`, those of the first append, then of the next. For a
    /// cache of one layer.
    ///
    /// On a device K and V have one type; numbers there that the host's append refuses, such as NaN, give attention that means nothing.
    ///
    /// # Errors
    /// Those of [`KvCache::append_batch`] and of [`DeviceSteps`]. Lengths and pages are unchanged then.
    pub fn append<'a>(
        &mut self,
        appends: &[Append],
        k: impl Into<Rows<'a>>,
        v: impl Into<Rows<'a>>,
    ) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        if all_on_device(&[("k", k.device()), ("v", v.device())])? {
            let (steps, cache) = self.steps()?;
            cache.append_on(steps, appends, [k, v])?;
            self.look_at_keys(0);
            return Ok(());
        }
        self.wait()?;
        self.cache.append_batch(appends, k, v)
    }

    /// Begins a model's step: takes pages of new tokens in all layers and counts the tokens. [`Session::write`] writes them layer by layer.
    ///
    /// # Errors
    /// Those of [`KvCache::reserve`]. Lengths and pages are unchanged then.
    pub fn reserve(&mut self, appends: &[Append]) -> Result<(), Error> {
        match &mut self.on_device {
            Some(steps) => self.cache.reserve_on(&mut **steps, appends),
            None => self.cache.reserve(appends),
        }
    }

    /// Writes one layer's K and V of the tokens that [`Session::reserve`] has counted. Layers come in any order, each once; the last one ends the step.
    ///
    /// # Errors
    /// Those of [`KvCache::write`] and of [`DeviceSteps`]. The layer counts as not written then.
    pub fn write<'a>(
        &mut self,
        layer: usize,
        k: impl Into<Rows<'a>>,
        v: impl Into<Rows<'a>>,
    ) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        // Without an open step the write is refused, whatever its rows.
        self.cache.tokens_to_write(layer)?;
        if all_on_device(&[("k", k.device()), ("v", v.device())])? {
            let (steps, cache) = self.steps()?;
            cache.write_on(steps, layer, [k, v])?;
            self.look_at_keys(layer);
            return Ok(());
        }
        self.wait()?;
        self.cache.write(layer, k, v)
    }

    /// Looks at keys that were written on the device, where that is due: it waits for the device then, which is seldom.
    fn look_at_keys(&mut self, layer: usize) {
        if self.cache.keys_are_due(layer) && self.wait().is_ok() {
            // The tokens are there: a device that fails says so at the next call that needs it.
            let _ = self.cache.look_at_keys(layer);
        }
    }

    /// Takes the open step back, whichever layers were written. Without one nothing is done.
    ///
    /// # Errors
    /// Those of [`KvCache::cancel_step`].
    pub fn cancel_step(&mut self) -> Result<(), Error> {
        self.wait()?;
        self.cache.cancel_step()
    }

    /// Attends: writes every row of the outputs, or refuses and writes none.
    ///
    /// # Errors
    /// Those of [`Attend::of_cache`], [`DecodeAttention::plan`], [`DecodeStep::new`] and [`DecodeAttention::decode`]; of rows on a device those of
    /// [`DeviceSteps::attend`].
    pub fn attend(&mut self, at: &Attend<'_>, rows: AttendRows<'_>) -> Result<(), Error> {
        let AttendRows { q, out, lse } = &rows;
        let of_lse = lse.as_ref().map_or(out.device(), RowsMut::device);
        let places = [("q", q.device()), ("out", out.device()), ("lse", of_lse)];
        if all_on_device(&places)? {
            let (steps, cache) = self.steps()?;
            let attended = at.of_cache(cache)?;
            let AttendRows { q, out, lse } = rows.split(attended.split())?;
            let q = q.device_rows("q", attended.problem().q_shape())?;
            let out = out.device_rows("out", attended.problem().out_shape())?;
            let lse = lse.map(|lse| lse.device_rows("lse", attended.lse_rows()));
            let lse = lse.transpose()?;
            return steps.attend(&attended, q, DeviceResults::Rows { out, lse });
        }
        self.wait()?;
        let attended = at.of_cache(&self.cache)?;
        let AttendRows { q, out, lse } = rows.split(attended.split())?;
        let plan = plan(&mut self.plans, &*self.backend, &attended)?;
        let kv = KvSource::Sequences(attended.sequences());
        let mut step = DecodeStep::new(&plan, q, kv, out)?;
        if let Some(lse) = lse {
            step = step.with_lse(lse.into_packed_f32("lse", attended.lse_rows())?)?;
        }
        self.backend.decode(&mut step)
    }

    /// Attends to a shard of each sequence, and leaves the states of its spans. [`Attend::tokens_before`] and [`Attend::tokens_after`] say how many tokens lie ahead and follow in
    /// other shards; sinks belong to the merge of all shards ([`SpanStates::finish`]).
    ///
    /// ```
    /// use attn::{Append, Attend, BackendId, CacheConfig, Device, Heads, KvFormat, Problem, Session, SpanStates};
    ///
    /// let device = std::sync::Arc::new(Device::open(BackendId::Cpu.into())?);
    /// let heads = Heads::new(4, 1, 64);
    /// let config = CacheConfig::builder(KvFormat::INT8, heads).max_len(1024).build();
    /// let q = [0.25; 4 * 64];
    /// // 1024 tokens here, and 300 in another shard, whose keys have the first one's centres.
    /// let (mut shards, mut centres) = (Vec::new(), Vec::new());
    /// for (before, tokens, after) in [(0, 1024, 300), (1024, 300, 0)] {
    ///     let mut session = Session::new(device.clone(), &config)?;
    ///     if before > 0 {
    ///         session.begin_shard(0, before, &centres)?;
    ///     }
    ///     let append = [Append { sequence: 0, tokens }];
    ///     session.append(&append, &vec![0.5; tokens * 64], &vec![2.0; tokens * 64])?;
    ///     let at = Attend { tokens_before: &[before], tokens_after: &[after], ..Attend::new(heads.q, &[0]) };
    ///     shards.push(session.span_states(&at, &q)?);
    ///     centres = session.shard_centres(0)?;
    /// }
    /// let (mut out, mut lse) = ([0.0; 4 * 64], [0.0; 4]);
    /// SpanStates::finish(&shards, &Problem::new(heads, [1324]), KvFormat::INT8, &[], (&mut out, &mut lse))?;
    /// assert!((out[0] - 2.0).abs() < 0.02);
    /// # Ok::<(), attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Session::attend`], [`SpansStep::new`] and [`DecodeAttention::attend_spans`].
    pub fn span_states<'a>(
        &mut self,
        at: &Attend<'_>,
        q: impl Into<Rows<'a>>,
    ) -> Result<SpanStates, Error> {
        let q: Rows<'_> = q.into();
        self.wait()?;
        let attended = attended_whole(at, &self.cache)?;
        let plan = plan(&mut self.plans, &*self.backend, &attended)?;
        let kv = KvSource::Sequences(attended.sequences());
        self.backend.attend_spans(&SpansStep::new(&plan, q, kv)?)
    }

    /// Attends as [`Session::span_states`] does, into memory of the caller.
    ///
    /// # Errors
    /// Those of [`Session::span_states`] and of [`Problem::check_spans`]; of rows on a device those of [`DeviceSteps::attend`].
    pub fn attend_spans(&mut self, at: &Attend<'_>, rows: SpanRows<'_>) -> Result<(), Error> {
        let places = [
            ("q", rows.q.device()),
            ("max_sums", rows.max_sums.device()),
            ("o", rows.o.device()),
        ];
        if all_on_device(&places)? {
            let (steps, cache) = self.steps()?;
            let attended = attended_whole(at, cache)?;
            let [of_max_sums, of_o] = attended.state_rows(rows.spans);
            let states = DeviceResults::Spans {
                spans: rows.spans,
                max_sums: rows.max_sums.device_rows("max_sums", of_max_sums)?,
                o: rows.o.device_rows("o", of_o)?,
            };
            let q = rows.q.device_rows("q", attended.problem().q_shape())?;
            return steps.attend(&attended, q, states);
        }
        let attended = attended_whole(at, &self.cache)?;
        attended.problem().check_spans(rows.spans)?;
        let [of_max_sums, of_o] = attended.state_rows(rows.spans);
        let max_sums = rows.max_sums.into_packed_f32("max_sums", of_max_sums)?;
        let o = rows.o.into_packed_f32("o", of_o)?;
        self.span_states(at, rows.q)?.write(max_sums, o)
    }
}

/// What attends for states of spans, which are those of all pages of a shard.
fn attended_whole<'c>(at: &Attend<'_>, cache: &'c KvCache) -> Result<Attended<'c>, Error> {
    if let Some(selected) = &at.pages {
        return Err(Error::parameter(
            "selected pages of a step that leaves states of spans",
            selected.pages.len(),
            "none: all pages of a shard are attended; Session::attend takes some",
        ));
    }
    at.of_cache(cache)
}

/// The plan that serves the problem: one that is kept, or a new one.
fn plan(
    plans: &mut Recent<Problem, Plan>,
    backend: &dyn DecodeAttention,
    attended: &Attended<'_>,
) -> Result<Plan, Error> {
    let format = attended.sequences().cache().config().format;
    let planned = attended.problem().to_plan();
    plans.get_or_make(planned, |planned| backend.plan(planned, format))
}

/// Sequences, pages and bytes.
impl Session {
    /// What the cache was created from.
    #[must_use]
    pub fn config(&self) -> &CacheConfig {
        self.cache.config()
    }

    /// The layout of the cache's pages.
    #[must_use]
    pub fn layout(&self) -> &PageLayout {
        self.cache.layout()
    }

    /// The pages and lengths of all sequences.
    #[must_use]
    pub fn table(&self) -> &PageTable {
        self.cache.table()
    }

    /// The number of pages that no sequence has.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.cache.free_pages()
    }

    /// Numbers that were stored as the end of the format's range; `None` where they are not counted, as those of rows on a device.
    /// [`KvCache::saturated`] says it all.
    #[must_use]
    pub fn saturated(&self) -> Option<u64> {
        self.cache.saturated()
    }

    /// How uneven the channels of the keys are: [`KvCache::key_outliers`].
    #[must_use]
    pub fn key_outliers(&self) -> Option<f32> {
        self.cache.key_outliers()
    }

    /// What to tell of keys that the cache's format stores badly; none where [`KvCache::has_key_outliers`] is not.
    #[must_use]
    pub fn outlier_notice(&self) -> Option<String> {
        let ratio = self
            .key_outliers()
            .filter(|_| self.cache.has_key_outliers());
        ratio.map(|ratio| self.config().format.outlier_notice(ratio))
    }

    /// The appends of the step that [`Session::reserve`] began, until its last layer is written.
    #[must_use]
    pub fn open_step(&self) -> Option<&[Append]> {
        self.cache.open_step()
    }

    /// The tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::Sequence`].
    pub fn tokens(&self, sequence: usize) -> Result<usize, Error> {
        let lens = &self.table().lens;
        lens.get(sequence).copied().ok_or(Error::Sequence {
            given: sequence,
            count: lens.len(),
        })
    }

    /// The free pages that these appends take.
    ///
    /// # Errors
    /// Those of [`KvCache::pages_needed`].
    pub fn pages_needed(&self, appends: &[Append]) -> Result<usize, Error> {
        self.cache.pages_needed(appends)
    }

    /// Makes the empty sequence `to` share the tokens of `from`.
    ///
    /// # Errors
    /// Those of [`KvCache::fork`].
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.order_centres()?;
        self.cache.fork(from, to)
    }

    /// Takes back a sequence's newest tokens: its first `tokens` stay.
    ///
    /// # Errors
    /// Those of [`KvCache::truncate`].
    pub fn truncate(&mut self, sequence: usize, tokens: usize) -> Result<(), Error> {
        self.cache.truncate(sequence, tokens)
    }

    /// Refuses what [`Session::truncate`] refuses, and changes nothing.
    ///
    /// # Errors
    /// Those of [`KvCache::check_truncate`].
    pub fn check_truncate(&self, sequence: usize, tokens: usize) -> Result<(), Error> {
        self.cache.check_truncate(sequence, tokens)
    }

    /// The most tokens, `tokens` at most, that [`Session::truncate`] can leave of a sequence: where to go on from to have the first `tokens` again.
    ///
    /// # Errors
    /// Those of [`KvCache::longest_prefix`].
    pub fn longest_prefix(&self, sequence: usize, tokens: usize) -> Result<usize, Error> {
        self.cache.longest_prefix(sequence, tokens)
    }

    /// Frees the pages of a sequence's tokens before `token`, which no window sees any more.
    ///
    /// # Errors
    /// Those of [`KvCache::drop_before`].
    pub fn drop_before(&mut self, sequence: usize, token: usize) -> Result<(), Error> {
        self.cache.drop_before(sequence, token)
    }

    /// Drops tokens from the middle of a sequence and closes the gap; how many.
    ///
    /// # Errors
    /// Those of [`KvCache::drop_range`].
    pub fn drop_range(&mut self, sequence: usize, tokens: Range<usize>) -> Result<usize, Error> {
        self.cache.drop_range(sequence, tokens)
    }

    /// The centres of K of a sequence, for its later shards in other caches.
    ///
    /// # Errors
    /// Those of [`KvCache::shard_centres`].
    pub fn shard_centres(&self, sequence: usize) -> Result<Vec<u8>, Error> {
        self.wait()?;
        self.cache.shard_centres(sequence)
    }

    /// Makes an empty sequence a later shard, with the centres of its first one.
    ///
    /// # Errors
    /// Those of [`KvCache::begin_shard`].
    pub fn begin_shard(
        &mut self,
        sequence: usize,
        tokens_before: usize,
        centres: &[u8],
    ) -> Result<(), Error> {
        self.order_centres()?;
        self.cache.begin_shard(sequence, tokens_before, centres)
    }

    /// Empties a sequence.
    ///
    /// # Errors
    /// Those of [`KvCache::free_sequence`].
    pub fn free(&mut self, sequence: usize) -> Result<(), Error> {
        self.cache.free_sequence(sequence)
    }

    /// Adds empty sequences behind the last one.
    ///
    /// # Errors
    /// Those of [`KvCache::add_sequences`].
    pub fn add_sequences(&mut self, count: usize) -> Result<(), Error> {
        self.cache.add_sequences(count)
    }

    /// Adds free pages to the pool, where the backend's pool can grow.
    ///
    /// # Errors
    /// Those of [`KvCache::add_pages`].
    pub fn add_pages(&mut self, count: usize) -> Result<(), Error> {
        self.wait()?;
        self.cache.add_pages(count)
    }

    /// A sequence as one block of bytes, for this or another cache of the same format and shape.
    ///
    /// # Errors
    /// Those of [`KvCache::image`].
    pub fn image(&self, sequence: usize) -> Result<SequenceImage<'static>, Error> {
        self.wait()?;
        self.cache.image(sequence)
    }

    /// The number of bytes of [`Session::image`].
    ///
    /// # Errors
    /// Those of [`KvCache::image_bytes`].
    pub fn image_bytes(&self, sequence: usize) -> Result<usize, Error> {
        self.cache.image_bytes(sequence)
    }

    /// Writes the bytes of [`Session::image`] to memory of the caller.
    ///
    /// # Errors
    /// Those of [`KvCache::write_image`].
    pub fn write_image(&self, sequence: usize, out: &mut [u8]) -> Result<(), Error> {
        self.wait()?;
        self.cache.write_image(sequence, out)
    }

    /// Fills an empty sequence with an image.
    ///
    /// # Errors
    /// Those of [`KvCache::restore`].
    pub fn restore(&mut self, sequence: usize, image: &SequenceImage<'_>) -> Result<(), Error> {
        self.wait()?;
        self.cache.restore(sequence, image)
    }

    /// A session of its own with the same sequences, on the same backend.
    ///
    /// # Errors
    /// Those of [`Session::new`] and [`KvCache::copy_from`].
    pub fn copy(&self) -> Result<Session, Error> {
        self.wait()?;
        let mut copy = Session::new(self.backend.clone(), self.config())?;
        copy.cache.copy_from(&self.cache)?;
        Ok(copy)
    }

    /// A sequence's pages as bytes: those of the first layer, then of the next.
    ///
    /// # Errors
    /// Those of [`KvCache::read_back`].
    pub fn read_back(&self, sequence: usize) -> Result<Vec<Vec<u8>>, Error> {
        self.wait()?;
        self.cache.read_back(sequence)
    }

    /// Fills an empty sequence with `tokens` tokens from pages of [`Session::read_back`].
    ///
    /// # Errors
    /// Those of [`KvCache::restore_pages`].
    pub fn restore_pages(
        &mut self,
        sequence: usize,
        tokens: usize,
        pages: &[Vec<u8>],
    ) -> Result<(), Error> {
        self.wait()?;
        self.cache.restore_pages(sequence, tokens, pages)
    }

    /// A sequence's dequantized K and V of one layer, `[tokens, num_kv_heads, head_dim]`.
    ///
    /// # Errors
    /// [`Error::Layer`]; those of [`CacheLayer::dequantize`](crate::CacheLayer::dequantize).
    pub fn export(&self, sequence: usize, layer: usize) -> Result<[Vec<f32>; 2], Error> {
        self.wait()?;
        self.cache.layer(layer)?.dequantize(sequence)
    }

    /// Waits for the work of all calls with rows on the device.
    ///
    /// # Errors
    /// [`Error::Device`] with a failure of that work; [`Unsupported::Forked`](crate::Unsupported::Forked).
    pub fn wait(&self) -> Result<(), Error> {
        process::check()?;
        self.on_device.as_ref().map_or(Ok(()), |steps| steps.wait())
    }

    /// Lets a write of centres of K come behind the work of all calls on the device, which may read those that it replaces.
    fn order_centres(&mut self) -> Result<(), Error> {
        match &mut self.on_device {
            Some(steps) if self.cache.config().centres => {
                process::check()?;
                steps.order_store()
            }
            _ => Ok(()),
        }
    }

    /// What calls with rows on the device keep, made at the first one; and the cache.
    fn steps(&mut self) -> Result<(&mut dyn DeviceSteps, &mut KvCache), Error> {
        process::check()?;
        let steps = match self.on_device.take() {
            Some(steps) => steps,
            None => self.backend.device_steps(&self.cache)?,
        };
        Ok((&mut **self.on_device.insert(steps), &mut self.cache))
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (backend, format) = (self.backend.device().backend, self.config().format);
        write!(
            f,
            "Session({backend}, {format}, lens: {:?})",
            self.table().lens
        )
    }
}
