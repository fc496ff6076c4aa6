//! A cache of one attention layer or of several, and attention over it.

use std::{fmt, sync::Arc};

use attn::{
    Append, BackendId, CacheConfig, DeviceName, Heads, HostRows, HostSteps, KvCache, KvFormat,
    Problem, RowsMut,
};
use candle_core::{DType, Device, DeviceLocation, Shape, Tensor};
use half::{bf16, f16};

use crate::{
    Error,
    rows::{Expected, TensorRows},
};

/// The quantized K and V of one attention layer, for one or more sequences, and attention over them.
///
/// `append` the new K and V, then `attend` with the queries of the newest tokens. A token has the same bits attended alone, in a batch, or in a
/// prompt. One cache can also have all layers of a model: [`QuantizedKvCache::shared`].
pub struct QuantizedKvCache {
    /// Ahead of the cache, which they are dropped before.
    steps: Steps,
    cache: KvCache,
    device: Arc<attn::Device>,
    location: DeviceLocation,
    /// The heads and score modifiers of each layer; a step brings its sequences.
    problems: Vec<Problem>,
    all: Vec<usize>,
}

/// What steps keep.
enum Steps {
    Host(HostSteps),
    #[cfg(feature = "cuda")]
    Device(Box<crate::device::Steps>),
}

/// A type of queries and outputs, on every device.
#[cfg(feature = "cuda")]
trait Number:
    candle_core::WithDType
    + candle_core::cuda_backend::CudaDType
    + candle_core::cuda_backend::cudarc::driver::DeviceRepr
{
}
#[cfg(not(feature = "cuda"))]
trait Number: candle_core::WithDType {}
impl Number for f32 {}
impl Number for f16 {}
impl Number for bf16 {}

impl QuantizedKvCache {
    /// An empty cache for `sequences` of up to `max_tokens` tokens each, attended causally with the scale `1/√head_dim`.
    ///
    /// A prompt may have any length. Formats with a window (`int4`, `int8/int4`) take room for the residuals of one as long as `max_tokens`;
    /// [`QuantizedKvCache::layers`] with another [`CacheConfig::max_q_len`] takes less, and prompts then come in pieces of at most so many tokens.
    ///
    /// # Errors
    /// Those of [`QuantizedKvCache::layers`].
    pub fn new(
        format: KvFormat,
        heads: Heads,
        sequences: usize,
        max_tokens: usize,
        device: &Device,
    ) -> Result<Self, Error> {
        let config = CacheConfig::builder(format, heads)
            .sequences(sequences)
            .max_len(max_tokens)
            .max_q_len(max_tokens)
            .build();
        let problem = Problem::new(heads, []);
        Self::with(&open(device)?, device, &config, vec![problem])
    }

    /// An empty cache for each layer of a model. A layer's problem has its heads, its softmax scale, and what else changes its scores: window, soft
    /// cap, ALiBi slopes, sinks. The problem's lengths are not used.
    ///
    /// # Errors
    /// [`Error::NoCaches`] for devices without caches in this build; [`Error::Attention`] with [`attn::Error::Unsupported`] for a GPU that cannot be opened, with those of
    /// [`Problem::check`] and
    /// [`create_cache`](attn::DecodeAttention::create_cache), or [`attn::Error::Mismatch`] for a problem of other KV heads or dims than the
    /// config's.
    ///
    /// ```
    /// use attn::{CacheConfig, Heads, KvFormat, Problem};
    /// use attn_candle::QuantizedKvCache;
    /// use candle_core::Device;
    ///
    /// let heads = Heads { q: 8, kv: 2, dim: 64 };
    /// let config = CacheConfig::builder(KvFormat::INT8, heads).sequences(4).max_len(4096).build();
    /// // Every second layer sees 128 tokens.
    /// let global = Problem::new(heads, []);
    /// let problems = [global.clone().window_left(127), global];
    /// let layers = QuantizedKvCache::layers(&config, problems, &Device::Cpu)?;
    /// assert_eq!(layers.len(), 2);
    /// # Ok::<(), attn_candle::Error>(())
    /// ```
    pub fn layers(
        config: &CacheConfig,
        problems: impl IntoIterator<Item = Problem>,
        device: &Device,
    ) -> Result<Vec<Self>, Error> {
        let opened = open(device)?;
        let problems = problems.into_iter();
        problems
            .map(|problem| Self::with(&opened, device, config, vec![problem]))
            .collect()
    }

    /// One empty cache for all layers of a model, which have the same KV heads and dims: lengths, pages and forks are kept once. A step's tokens are
    /// counted by [`QuantizedKvCache::reserve`], then written and attended layer by layer; a step that fails in any layer is taken back whole.
    ///
    /// # Errors
    /// Those of [`QuantizedKvCache::layers`]; [`Error::Attention`] with [`attn::Error::Parameter`] for another number of problems than the config's
    /// layers.
    ///
    /// ```
    /// use attn::{CacheConfig, Heads, KvFormat, Problem};
    /// use attn_candle::QuantizedKvCache;
    /// use candle_core::{DType, Device, Tensor};
    ///
    /// let heads = Heads { q: 8, kv: 2, dim: 64 };
    /// let config = CacheConfig::builder(KvFormat::INT8, heads).layers(3).max_len(4096).build();
    /// let problems = vec![Problem::new(heads, []); 3];
    /// let mut cache = QuantizedKvCache::shared(&config, problems, &Device::Cpu)?;
    /// let [q, kv] = [8, 2].map(|heads| Tensor::ones((1, heads, 10, 64), DType::F32, &Device::Cpu));
    /// let (q, kv) = (q?, kv?);
    ///
    /// cache.reserve(&[0], 10)?;
    /// for layer in 0..3 {
    ///     cache.write(layer, &kv, &kv)?;
    ///     let out = cache.attend_layer(layer, &[0], &q)?;
    ///     assert_eq!(out.dims(), q.dims());
    /// }
    /// assert_eq!(cache.lens(), [10]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn shared(
        config: &CacheConfig,
        problems: impl IntoIterator<Item = Problem>,
        device: &Device,
    ) -> Result<Self, Error> {
        Self::with(
            &open(device)?,
            device,
            config,
            problems.into_iter().collect(),
        )
    }

    fn with(
        opened: &Arc<attn::Device>,
        device: &Device,
        config: &CacheConfig,
        mut problems: Vec<Problem>,
    ) -> Result<Self, Error> {
        if problems.len() != config.layers {
            return Err(attn::Error::parameter(
                "the number of problems",
                format_args!("{} for {} layers", problems.len(), config.layers),
                "one for each layer of the config",
            )
            .into());
        }
        for problem in &mut problems {
            problem.q_lens.clear();
            problem.kv_lens.clear();
            problem.check()?;
            let pairs = [
                ("num_kv_heads", problem.num_kv_heads, config.num_kv_heads),
                ("head_dim", problem.head_dim, config.head_dim),
            ];
            if let Some((what, problem, cache)) = pairs.into_iter().find(|(_, a, b)| a != b) {
                let [problem, cache] = [problem, cache].map(|x| x.to_string());
                return Err(attn::Error::Mismatch {
                    what,
                    problem,
                    cache,
                }
                .into());
            }
        }
        let cache = opened.backend().create_cache(config)?;
        Ok(QuantizedKvCache {
            steps: steps(opened, device, &cache)?,
            cache,
            device: opened.clone(),
            location: device.location(),
            problems,
            all: (0..config.num_sequences).collect(),
        })
    }

    /// Appends `k` and `v` `[sequences, kv heads, tokens, head_dim]`: as many tokens to every sequence.
    ///
    /// # Errors
    /// Those of [`QuantizedKvCache::append_to`].
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(), Error> {
        let all = std::mem::take(&mut self.all);
        let appended = self.append_to(&all, k, v);
        self.all = all;
        appended
    }

    /// Appends `k` and `v` `[sequences named, kv heads, tokens, head_dim]` to these sequences, each named once.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::DType`], [`Error::Shape`], [`Error::Batch`] or, on a GPU, [`Error::Tokens`] naming `k` or `v`; [`Error::Attention`] with
    /// those of [`KvCache::append_batch`]. No sequence is changed then.
    pub fn append_to(&mut self, sequences: &[usize], k: &Tensor, v: &Tensor) -> Result<(), Error> {
        let [k, v] = self.rows(sequences.len(), [k, v])?;
        let (cache, appends) = (&mut self.cache, appends(sequences, k.tokens));
        match &mut self.steps {
            Steps::Host(_) => k.read(|k| v.read(|v| Ok(cache.append_batch(&appends, k, v)?))),
            #[cfg(feature = "cuda")]
            Steps::Device(steps) => steps.append(cache, &appends, [&k, &v]),
        }
    }

    /// Attends with `q` `[sequences, q heads, tokens, head_dim]`, whose last token stands at the last cached one of each sequence. The result
    /// has q's shape and type, and the memory `[sequences, tokens, q heads, head_dim]`: `transpose(1, 2)` gives it as it lies.
    ///
    /// # Errors
    /// Those of [`QuantizedKvCache::attend_to`].
    pub fn attend(&mut self, q: &Tensor) -> Result<Tensor, Error> {
        let all = std::mem::take(&mut self.all);
        let out = self.attend_to(&all, q);
        self.all = all;
        out
    }

    /// Attends with `q` `[sequences named, q heads, tokens, head_dim]` to these sequences, in this order.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::DType`], [`Error::Shape`] or [`Error::Batch`] naming `q`; [`Error::Attention`] with those of
    /// [`HostSteps::attend`].
    pub fn attend_to(&mut self, sequences: &[usize], q: &Tensor) -> Result<Tensor, Error> {
        // Of several layers one is named.
        self.cache.sequences(&[])?;
        self.attend_layer(0, sequences, q)
    }

    /// Begins a step of all layers: takes the pages of `tokens` new tokens for each of these sequences, and counts them. Each layer is written then,
    /// and attended once it is written; with the last one's write the step is over. Until then the sequences are neither forked, truncated, emptied
    /// nor dropped from.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`KvCache::reserve`]. Nothing is changed then.
    pub fn reserve(&mut self, sequences: &[usize], tokens: usize) -> Result<(), Error> {
        let (cache, appends) = (&mut self.cache, appends(sequences, tokens));
        match &mut self.steps {
            Steps::Host(_) => Ok(cache.reserve(&appends)?),
            #[cfg(feature = "cuda")]
            Steps::Device(steps) => steps.reserve(cache, &appends),
        }
    }

    /// Writes a layer's `k` and `v` `[sequences, kv heads, tokens, head_dim]`, the sequences and tokens of [`QuantizedKvCache::reserve`]. Layers come in
    /// any order, each once.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::DType`], [`Error::Shape`], [`Error::Batch`] or, on a GPU, [`Error::Tokens`] naming `k` or `v`; [`Error::Attention`] with
    /// those of [`KvCache::write`]. The layer counts as not written then.
    pub fn write(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<(), Error> {
        // Without an open step the write is refused, whatever its rows.
        let step = self.cache.open_step();
        let sequences = step.map_or(k.dims().first().copied().unwrap_or(0), <[Append]>::len);
        let [k, v] = self.rows(sequences, [k, v])?;
        let cache = &mut self.cache;
        match &mut self.steps {
            Steps::Host(_) => k.read(|k| v.read(|v| Ok(cache.write(layer, k, v)?))),
            #[cfg(feature = "cuda")]
            Steps::Device(steps) => steps.write(cache, layer, [&k, &v]),
        }
    }

    /// K and V of so many sequences as rows.
    fn rows(&self, sequences: usize, [k, v]: [&Tensor; 2]) -> Result<[TensorRows; 2], Error> {
        let rows = |what, tensor| {
            let expected = Expected {
                what,
                heads: self.cache.config().num_kv_heads,
                dim: self.cache.config().head_dim,
                device: self.location,
            };
            TensorRows::new(expected, tensor, sequences)
        };
        Ok([rows("k", k)?, rows("v", v)?])
    }

    /// Takes the open step back, whichever layers were written; nothing is done without one.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`KvCache::cancel_step`].
    pub fn cancel_step(&mut self) -> Result<(), Error> {
        #[cfg(feature = "cuda")]
        if let Steps::Device(steps) = &self.steps {
            steps.wait()?;
        }
        Ok(self.cache.cancel_step()?)
    }

    /// Attends a layer with `q` `[sequences named, q heads, tokens, head_dim]`, as [`QuantizedKvCache::attend_to`] does.
    ///
    /// # Errors
    /// Those of [`QuantizedKvCache::attend_to`]; [`Error::Attention`] with [`attn::Error::Layer`], or [`attn::Error::Step`] for a layer that lacks the
    /// tokens of an open step.
    pub fn attend_layer(
        &mut self,
        layer: usize,
        sequences: &[usize],
        q: &Tensor,
    ) -> Result<Tensor, Error> {
        self.cache.layer(layer)?;
        let problem = &self.problems[layer];
        let Heads { q: heads, dim, .. } = problem.heads();
        let expected = Expected {
            what: "q",
            heads,
            dim,
            device: self.location,
        };
        let rows = TensorRows::new(expected, q, sequences.len())?;
        let mut problem = problem.clone();
        problem.kv_lens = vec![0; sequences.len()];
        problem.q_lens = vec![rows.tokens; sequences.len()];
        let shape = Shape::from((sequences.len(), rows.tokens, heads, dim));
        let out = match q.dtype() {
            DType::F16 => self.step((layer, sequences), &problem, &rows, (f16::ZERO, shape)),
            DType::BF16 => self.step((layer, sequences), &problem, &rows, (bf16::ZERO, shape)),
            _ => self.step((layer, sequences), &problem, &rows, (0f32, shape)),
        }?;
        Ok(out.transpose(1, 2)?)
    }

    /// One step, into a new tensor of this shape.
    fn step<T: Number>(
        &mut self,
        (layer, sequences): (usize, &[usize]),
        problem: &Problem,
        rows: &TensorRows,
        (zero, shape): (T, Shape),
    ) -> Result<Tensor, Error>
    where
        for<'a> &'a mut [T]: Into<RowsMut<'a>>,
    {
        let layer = self.cache.layer(layer)?;
        match &mut self.steps {
            Steps::Host(steps) => {
                let mut out = vec![zero; shape.elem_count()];
                rows.read(|q| {
                    let rows = HostRows {
                        q,
                        out: (&mut *out).into(),
                        lse: None,
                    };
                    let backend = self.device.backend();
                    Ok(steps.attend_layer(backend, layer, sequences, problem, rows)?)
                })?;
                Ok(Tensor::from_vec(out, shape, &Device::Cpu)?)
            }
            #[cfg(feature = "cuda")]
            Steps::Device(steps) => steps.attend::<T>(layer, sequences, problem, rows, shape),
        }
    }

    /// The number of tokens of each sequence.
    #[must_use]
    pub fn lens(&self) -> &[usize] {
        &self.cache.table().lens
    }

    /// Takes back a sequence's newest tokens, such as drafts that were rejected: its first `tokens` stay.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`KvCache::truncate`].
    pub fn truncate(&mut self, sequence: usize, tokens: usize) -> Result<(), Error> {
        Ok(self.cache.truncate(sequence, tokens)?)
    }

    /// Frees the pages of a sequence's tokens before `token`, which no window sees any more: at most the length less the widest layer's
    /// [`Problem::window_left`]. Lengths, positions and bits stay; pages go by whole tiles of 64 tokens, in all layers.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`KvCache::drop_before`].
    pub fn drop_before(&mut self, sequence: usize, token: usize) -> Result<(), Error> {
        Ok(self.cache.drop_before(sequence, token)?)
    }

    /// Makes the empty sequence `to` share the tokens of `from`, such as a common prompt.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`KvCache::fork`].
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        Ok(self.cache.fork(from, to)?)
    }

    /// Empties a sequence.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`KvCache::free_sequence`].
    pub fn free(&mut self, sequence: usize) -> Result<(), Error> {
        Ok(self.cache.free_sequence(sequence)?)
    }

    /// Takes an open step back, and empties all sequences.
    ///
    /// # Errors
    /// Those of [`QuantizedKvCache::cancel_step`].
    pub fn reset(&mut self) -> Result<(), Error> {
        self.cancel_step()?;
        for sequence in &self.all {
            self.cache.free_sequence(*sequence)?;
        }
        Ok(())
    }

    /// The cache itself: its description, pages and free pages.
    #[must_use]
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }
}

impl fmt::Debug for QuantizedKvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format = self.cache.config().format;
        write!(f, "QuantizedKvCache({format}, lens: {:?})", self.lens())
    }
}

/// The device of this library whose memory is the tensors'.
fn open(device: &Device) -> Result<Arc<attn::Device>, Error> {
    let name: DeviceName = match device.location() {
        DeviceLocation::Cpu => BackendId::Cpu.into(),
        #[cfg(feature = "cuda")]
        DeviceLocation::Cuda { gpu_id } => DeviceName {
            id: BackendId::Cuda,
            ordinal: gpu_id,
        },
        given => {
            return Err(Error::NoCaches {
                given,
                allowed: match cfg!(feature = "cuda") {
                    true => "the CPU and CUDA devices",
                    false => "the CPU; CUDA devices with attn-candle's feature cuda",
                },
            });
        }
    };
    let opened = attn::Device::open(name);
    Ok(Arc::new(opened.map_err(attn::Error::from)?))
}

/// What steps of a new cache keep.
#[cfg(feature = "cuda")]
fn steps(own: &attn::Device, device: &Device, cache: &KvCache) -> Result<Steps, Error> {
    Ok(match device {
        Device::Cuda(device) => {
            Steps::Device(Box::new(crate::device::Steps::new(device, own, cache)?))
        }
        _ => Steps::Host(HostSteps::default()),
    })
}
#[cfg(not(feature = "cuda"))]
fn steps(_: &attn::Device, _: &Device, _: &KvCache) -> Result<Steps, Error> {
    Ok(Steps::Host(HostSteps::default()))
}

fn appends(sequences: &[usize], tokens: usize) -> Vec<Append> {
    let of = |sequence: &usize| Append {
        sequence: *sequence,
        tokens,
    };
    sequences.iter().map(of).collect()
}
