//! The shape of a model, whatever file it comes from.

use attn::{Heads, Rotary, RotaryScaling, RotaryStyle};

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

/// Rotary positions of Q and K.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Rope {
    /// The frequencies.
    pub rotary: Rotary,
    /// Which elements of a head are turned together; [`RotaryStyle::Interleaved`] in GGUF files of the architecture `llama`, whose rows of Q and K are
    /// stored in that order.
    pub style: RotaryStyle,
}

impl Rope {
    /// Turns the first `dims` elements of a head of `head_dim`; the reason, where there is no such rotation.
    pub(crate) fn new(
        [dims, head_dim]: [usize; 2],
        base: f64,
        style: RotaryStyle,
        scaling: &RotaryScaling,
    ) -> Result<Self, String> {
        if dims > head_dim || !dims.is_multiple_of(2) {
            return Err(format!(
                "rotary positions turn {dims} of a head's {head_dim} elements; allowed: an even number up to all"
            ));
        }
        let rotary = Rotary::new(dims, base, scaling).map_err(|e| e.to_string())?;
        Ok(Rope { rotary, style })
    }
}

impl ModelConfig {
    /// Refuses shapes that no product or attention takes; the reason, where there is one.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Heads { q, kv, dim } = self.heads;
        let dim = dim.max();
        let sizes = [
            ("the number of layers", self.windows.len(), 1 << 12),
            ("the embedding length", self.hidden, 1 << 20),
            ("the feed-forward length", self.feed_forward, 1 << 22),
            ("the vocabulary", self.vocab, 1 << 24),
            ("the number of query heads", q, 1 << 12),
            ("the number of KV heads", kv, 1 << 12),
            ("the length of a head", dim, attn::MAX_HEAD_DIM),
            ("the context length", self.context, 1 << 31),
        ];
        for (what, given, most) in sizes {
            if !(1..=most).contains(&given) {
                return Err(format!("{what} is {given}; allowed: 1 to {most}"));
            }
        }
        if !(0.0..=1.0).contains(&self.norm_eps) {
            return Err(format!(
                "the epsilon of its RMSNorm is {}; allowed: 0 to 1",
                self.norm_eps
            ));
        }
        attn::Problem::new(self.heads, [1])
            .check()
            .map_err(|e| e.to_string())
    }
}
