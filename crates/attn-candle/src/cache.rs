//! A cache of one attention layer or of several, and attention over it.

use std::{fmt, sync::Arc};

use attn::{
    Append, Attend, AttendRows, BackendId, CacheConfig, DeviceName, Heads, KvFormat, Problem,
    RowsMut, ScoreModifiers, Session,
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
    session: Session,
    device: Device,
    layers: Vec<Layer>,
    all: Vec<usize>,
}

/// How one layer attends.
struct Layer {
    q_heads: usize,
    scores: ScoreModifiers,
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
    /// Formats with static scales (`fp8`, `int8-tensor`) are refused here; [`QuantizedKvCache::layers`] takes a config with
    /// [`tensor_scales`](attn::CacheBuilder::tensor_scales).
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
    /// let heads = Heads::new(8, 2, 64);
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
    /// let heads = Heads::new(8, 2, 64);
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
            let heads = [problem.num_kv_heads, config.num_kv_heads].map(|n| n.to_string());
            let dims = [problem.head_dim, config.head_dim].map(|dim| dim.to_string());
            let pairs = [("num_kv_heads", heads), ("head_dim", dims)];
            if let Some((what, [problem, cache])) = pairs.into_iter().find(|(_, [a, b])| a != b) {
                return Err(attn::Error::Mismatch {
                    what,
                    problem,
                    cache,
                }
                .into());
            }
        }
        let layer = |problem: &Problem| Layer {
            q_heads: problem.num_q_heads,
            scores: problem.scores.clone(),
        };
        Ok(QuantizedKvCache {
            session: Session::new(opened.clone(), config)?,
            device: device.clone(),
            layers: problems.iter().map(layer).collect(),
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
    /// [`Error::Device`], [`Error::DType`], [`Error::Shape`] or [`Error::Batch`] naming `k` or `v`; [`Error::Attention`] with
    /// those of [`Session::append`]. No sequence is changed then.
    pub fn append_to(&mut self, sequences: &[usize], k: &Tensor, v: &Tensor) -> Result<(), Error> {
        let [k, v] = self.rows(sequences.len(), [k, v])?;
        let (session, appends) = (&mut self.session, appends(sequences, k.tokens));
        k.read(|k| v.read(|v| Ok(session.append(&appends, k, v)?)))
    }

    /// Attends with `q` `[sequences, q heads, tokens, head_dim]`, whose last token stands at the last cached one of each sequence. The result
    /// has q's type and shape, with V's head_dim, and the memory `[sequences, tokens, q heads, head_dim]`: `transpose(1, 2)` gives it as it lies.
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
    /// [`Session::attend`].
    pub fn attend_to(&mut self, sequences: &[usize], q: &Tensor) -> Result<Tensor, Error> {
        if self.layers.len() != 1 {
            return Err(attn::Error::SeveralLayers {
                what: "attend_to",
                layers: self.layers.len(),
                next: "name one of them by attend_layer",
            }
            .into());
        }
        self.attend_layer(0, sequences, q)
    }

    /// Begins a step of all layers: takes the pages of `tokens` new tokens for each of these sequences, and counts them. Each layer is written then,
    /// and attended once it is written; with the last one's write the step is over. Until then the sequences are neither forked, truncated, emptied
    /// nor dropped from.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`Session::reserve`]. Nothing is changed then.
    pub fn reserve(&mut self, sequences: &[usize], tokens: usize) -> Result<(), Error> {
        Ok(self.session.reserve(&appends(sequences, tokens))?)
    }

    /// Writes a layer's `k` and `v` `[sequences, kv heads, tokens, head_dim]`, the sequences and tokens of [`QuantizedKvCache::reserve`]. Layers come in
    /// any order, each once.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::DType`], [`Error::Shape`] or [`Error::Batch`] naming `k` or `v`; [`Error::Attention`] with
    /// those of [`Session::write`]. The layer counts as not written then.
    pub fn write(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<(), Error> {
        // Without an open step the write is refused, whatever its rows.
        let step = self.session.open_step();
        let sequences = step.map_or(k.dims().first().copied().unwrap_or(0), <[Append]>::len);
        let [k, v] = self.rows(sequences, [k, v])?;
        let session = &mut self.session;
        k.read(|k| v.read(|v| Ok(session.write(layer, k, v)?)))
    }

    /// K and V of so many sequences as rows.
    fn rows(&self, sequences: usize, [k, v]: [&Tensor; 2]) -> Result<[TensorRows; 2], Error> {
        let dim = self.session.config().head_dim;
        let rows = |what, tensor, dim| {
            let expected = Expected {
                what,
                heads: self.session.config().num_kv_heads,
                dim,
                device: self.device.location(),
                tokens_apart: true,
            };
            TensorRows::new(expected, tensor, sequences)
        };
        Ok([rows("k", k, dim.k)?, rows("v", v, dim.v)?])
    }

    /// Takes the open step back, whichever layers were written; nothing is done without one.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`Session::cancel_step`].
    pub fn cancel_step(&mut self) -> Result<(), Error> {
        Ok(self.session.cancel_step()?)
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
        let of = self.layers.get(layer).ok_or(attn::Error::Layer {
            given: layer,
            count: self.layers.len(),
        })?;
        let dim = self.session.config().head_dim;
        let expected = Expected {
            what: "q",
            heads: of.q_heads,
            dim: dim.k,
            device: self.device.location(),
            tokens_apart: false,
        };
        let q = TensorRows::new(expected, q, sequences.len())?;
        let q_lens = vec![q.tokens; sequences.len()];
        let at = Attend {
            layer,
            q_lens: Some(&q_lens),
            scores: of.scores.clone(),
            ..Attend::new(of.q_heads, sequences)
        };
        let shape = Shape::from((sequences.len(), q.tokens, of.q_heads, dim.v));
        let (session, device) = (&mut self.session, &self.device);
        let out = match q.dtype() {
            DType::F16 => attend(session, &at, &q, (f16::ZERO, shape, device)),
            DType::BF16 => attend(session, &at, &q, (bf16::ZERO, shape, device)),
            _ => attend(session, &at, &q, (0f32, shape, device)),
        }?;
        Ok(out.transpose(1, 2)?)
    }

    /// The number of tokens of each sequence.
    #[must_use]
    pub fn lens(&self) -> &[usize] {
        &self.session.table().lens
    }

    /// Takes back a sequence's newest tokens, such as drafts that were rejected: its first `tokens` stay.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`Session::truncate`].
    pub fn truncate(&mut self, sequence: usize, tokens: usize) -> Result<(), Error> {
        Ok(self.session.truncate(sequence, tokens)?)
    }

    /// The most tokens, `tokens` at most, that [`QuantizedKvCache::truncate`] can leave of a sequence: where to go on from to have the first `tokens` again, in formats with a
    /// window a checkpoint ([`CacheBuilder::checkpoints`](attn::CacheBuilder::checkpoints)).
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`Session::longest_prefix`].
    pub fn longest_prefix(&self, sequence: usize, tokens: usize) -> Result<usize, Error> {
        Ok(self.session.longest_prefix(sequence, tokens)?)
    }

    /// Frees the pages of a sequence's tokens before `token`, which no window sees any more: at most the length less the widest layer's
    /// [`Problem::window_left`]. Lengths, positions and bits stay; pages go by whole tiles of 64 tokens, in all layers.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`Session::drop_before`].
    pub fn drop_before(&mut self, sequence: usize, token: usize) -> Result<(), Error> {
        Ok(self.session.drop_before(sequence, token)?)
    }

    /// Makes the empty sequence `to` share the tokens of `from`, such as a common prompt.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`Session::fork`].
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        Ok(self.session.fork(from, to)?)
    }

    /// Empties a sequence.
    ///
    /// # Errors
    /// [`Error::Attention`] with those of [`Session::free`].
    pub fn free(&mut self, sequence: usize) -> Result<(), Error> {
        Ok(self.session.free(sequence)?)
    }

    /// Takes an open step back, and empties all sequences.
    ///
    /// # Errors
    /// Those of [`QuantizedKvCache::cancel_step`].
    pub fn reset(&mut self) -> Result<(), Error> {
        self.cancel_step()?;
        for sequence in &self.all {
            self.session.free(*sequence)?;
        }
        Ok(())
    }

    /// The cache itself: its description, pages and free pages, sequences as bytes.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }
}

impl fmt::Debug for QuantizedKvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format = self.session.config().format;
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

/// Attends, into a new tensor `[sequences, tokens, heads, head_dim]` of the queries' type.
fn attend<T: Number>(
    session: &mut Session,
    at: &Attend<'_>,
    q: &TensorRows,
    (zero, shape, device): (T, Shape, &Device),
) -> Result<Tensor, Error>
where
    for<'a> &'a mut [T]: Into<RowsMut<'a>>,
{
    q.read(|q| {
        let mut write = |out: RowsMut<'_>| -> Result<(), Error> {
            Ok(session.attend(at, AttendRows::new(q, out))?)
        };
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => crate::device::results::<T>(device, shape, write),
            _ => {
                let mut out = vec![zero; shape.elem_count()];
                write((&mut *out).into())?;
                Ok(Tensor::from_vec(out, shape, &Device::Cpu)?)
            }
        }
    })
}

fn appends(sequences: &[usize], tokens: usize) -> Vec<Append> {
    let of = |sequence: &usize| Append {
        sequence: *sequence,
        tokens,
    };
    sequences.iter().map(of).collect()
}
