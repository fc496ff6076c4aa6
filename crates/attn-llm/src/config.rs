//! The shape of a model, whatever file it comes from.

use attn::Heads;

/// The shape of a Llama-type model: RMSNorm, rotary positions, grouped query heads, gated SiLU.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// The kind of model as its file has it: `llama`, `mistral`, `qwen2` or `qwen3`.
    pub architecture: String,
    /// Elements of a token's state.
    pub hidden: usize,
    /// Elements between the two products of a feed-forward layer.
    pub feed_forward: usize,
    /// Heads of every attention layer.
    pub heads: Heads,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// The most tokens that the model was made for.
    pub context: usize,
    /// The number that RMSNorm adds to the mean square.
    pub norm_eps: f32,
    /// Rotary positions.
    pub rope: Rope,
    /// For each layer, how many tokens before its own a token sees; `None` is all of them.
    pub windows: Vec<Option<usize>>,
}

/// Rotary positions: pair i of a head's first `dims` elements turns by `position * base^(-2i/dims)`, scaled.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Rope {
    /// The base of the frequencies.
    pub base: f32,
    /// Elements of a head that are turned.
    pub dims: usize,
    /// Which elements are a pair.
    pub pairs: RopePairs,
    /// What is done to the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// Which elements of a head are turned together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// 2i and 2i + 1: GGUF files of the architecture `llama`, whose rows of Q and K are stored in that order.
    Neighbours,
    /// i and i + dims / 2.
    Halves,
}

/// What is done to the frequencies of rotary positions for long contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Nothing.
    None,
    /// Every frequency is divided by one number.
    Linear(f32),
    /// Each pair's frequency is divided by its own number, as GGUF files of Llama 3 store it.
    Factors(Vec<f32>),
    /// Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between are mixed.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f32,
        /// Frequencies with fewer turns than this over the original context are low.
        low: f32,
        /// Frequencies with more turns than this over the original context are high.
        high: f32,
        /// Tokens of the context that the model was first trained for.
        original: f32,
    },
}

impl Rope {
    /// Radians per position of each pair.
    #[must_use]
    pub fn frequencies(&self) -> Vec<f32> {
        let pair = |i: usize| {
            let plain = self.base.powf(-((2 * i) as f32) / self.dims as f32);
            match &self.scaling {
                RopeScaling::None => plain,
                RopeScaling::Linear(factor) => plain / factor,
                RopeScaling::Factors(factors) => plain / factors[i],
                RopeScaling::Llama3 {
                    factor,
                    low,
                    high,
                    original,
                } => {
                    let turns = original * plain / std::f32::consts::TAU;
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    plain / factor * (1.0 - kept) + plain * kept
                }
            }
        };
        (0..self.dims / 2).map(pair).collect()
    }

    /// Turns the heads of one token at `position`; `x` is `[heads, head_dim]`, `frequencies` those of [`Rope::frequencies`].
    pub(crate) fn turn(
        &self,
        x: &mut [f32],
        head_dim: usize,
        position: usize,
        frequencies: &[f32],
    ) {
        let half = self.dims / 2;
        for (i, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            let (a, b) = match self.pairs {
                RopePairs::Neighbours => (2 * i, 2 * i + 1),
                RopePairs::Halves => (i, i + half),
            };
            for head in x.chunks_exact_mut(head_dim) {
                let (p, q) = (head[a], head[b]);
                head[a] = p * cos - q * sin;
                head[b] = p * sin + q * cos;
            }
        }
    }
}

impl ModelConfig {
    /// Refuses shapes that no product or attention takes; the reason, where there is one.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Heads { q, kv, dim } = self.heads;
        let sizes = [
            ("the number of layers", self.windows.len(), 1 << 12),
            ("the embedding length", self.hidden, 1 << 20),
            ("the feed-forward length", self.feed_forward, 1 << 22),
            ("the vocabulary", self.vocab, 1 << 24),
            ("the number of query heads", q, 1 << 12),
            ("the number of KV heads", kv, 1 << 12),
            ("the length of a head", dim, attn::format::MAX_HEAD_DIM),
            ("the context length", self.context, 1 << 31),
        ];
        for (what, given, most) in sizes {
            if !(1..=most).contains(&given) {
                return Err(format!("{what} is {given}; allowed: 1 to {most}"));
            }
        }
        let rope = &self.rope;
        if rope.dims > dim || !rope.dims.is_multiple_of(2) || rope.dims == 0 {
            return Err(format!(
                "rotary positions turn {} of a head's {dim} elements; allowed: an even number up to all",
                rope.dims
            ));
        }
        if let RopeScaling::Factors(factors) = &rope.scaling
            && factors.len() != rope.dims / 2
        {
            return Err(format!(
                "it has {} factors of rotary positions for {} pairs",
                factors.len(),
                rope.dims / 2
            ));
        }
        let frequencies = rope.frequencies();
        if !frequencies.iter().all(|f| f.is_finite()) || !(self.norm_eps >= 0.0) {
            return Err("its rotary base or its norm's epsilon is no usable number".to_owned());
        }
        attn::Problem::new(self.heads, [1])
            .check()
            .map_err(|e| e.to_string())
    }
}
