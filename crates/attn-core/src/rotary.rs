//! Rotary positions (RoPE): tables of cosines and sines, and the rotation of a row by them.
//!
//! Pair i of a head's first `rotary_dim` elements turns by the angle `position · frequency(i)`. The frequencies are those of transformers'
//! `modeling_rope_utils.py`; each formula is named at its [`RotaryScaling`]. A table is data like K itself: backends that rotate by the same table
//! give the same bits, whoever made it.

use std::f64::consts::TAU;

use crate::{
    elements::Elements,
    error::{ElementIndex, Error, filled, refuse},
    head_dim::MAX_HEAD_DIM,
};

/// Which elements of a head are a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RotaryStyle {
    /// i and i + rotary_dim / 2: Hugging Face's Llama, Qwen, Mistral; `is_neox_style` of vLLM and SGLang.
    #[default]
    HalfSplit,
    /// 2i and 2i + 1: GPT-J, GLM, DeepSeek; GGUF files of the architecture `llama`.
    Interleaved,
}

impl RotaryStyle {
    /// The two elements of pair `i`, of `pairs`.
    #[inline(always)]
    #[must_use]
    pub fn pair(self, i: usize, pairs: usize) -> (usize, usize) {
        match self {
            RotaryStyle::HalfSplit => (i, i + pairs),
            RotaryStyle::Interleaved => (2 * i, 2 * i + 1),
        }
    }
}

/// What is done to the frequencies `f(i) = base^(-2i / rotary_dim)` for long contexts, as transformers computes it.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// Nothing: `_compute_default_rope_parameters`.
    #[default]
    None,
    /// `f / factor`: `_compute_linear_scaling_rope_parameters`.
    Linear {
        /// Divisor of every frequency.
        factor: f64,
    },
    /// `f(i) / factors[i]`: `_compute_longrope_parameters` with one of its lists; the tensor `rope_freqs.weight` of GGUF files.
    Factors {
        /// A divisor for each pair.
        factors: Vec<f64>,
        /// Factor of every cosine and sine; 1 changes nothing.
        attention_factor: f64,
    },
    /// Low frequencies are divided, high ones kept, those between mixed: `_compute_llama3_parameters`.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Frequencies with fewer turns than this over the original context are low.
        low_freq_factor: f64,
        /// Frequencies with more turns than this over the original context are high.
        high_freq_factor: f64,
        /// Tokens of the context that the model was first trained for.
        original_context: f64,
    },
    /// YaRN: a ramp over the pairs from kept to divided frequencies, and a factor of all cosines and sines: `_compute_yarn_parameters`.
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Tokens of the context that the model was first trained for.
        original_context: f64,
        /// Pairs with more turns than this over the original context are kept; 32 in most models.
        beta_fast: f64,
        /// Pairs with fewer turns than this are divided; 1 in most models.
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole pairs, as in most models.
        truncate: bool,
        /// Factor of every cosine and sine; none: `0.1 · ln(factor) + 1`, or 1 for factors up to 1.
        attention_factor: Option<f64>,
    },
}

/// Rotary positions by their formula: the frequency of each pair.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    frequencies: Vec<f32>,
    attention_factor: f32,
}

fn check_dim(rotary_dim: usize) -> Result<(), Error> {
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || rotary_dim > MAX_HEAD_DIM {
        return refuse(
            "rotary_dim",
            rotary_dim,
            "an even number from 2 to head_dim, which is at most 576",
        );
    }
    Ok(())
}

impl Rotary {
    /// Frequencies of `rotary_dim / 2` pairs, each computed in f64 and rounded to f32.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a `rotary_dim` that is 0, odd or more than [`MAX_HEAD_DIM`], for factors of another number than the pairs', and for
    /// numbers that give no finite frequency.
    pub fn new(rotary_dim: usize, base: f64, scaling: &RotaryScaling) -> Result<Self, Error> {
        check_dim(rotary_dim)?;
        if !(base > 0.0 && base.is_finite()) {
            return refuse("the rotary base", base, "a finite number above 0");
        }
        let pairs = rotary_dim / 2;
        if let RotaryScaling::Factors { factors, .. } = scaling
            && factors.len() != pairs
        {
            return Err(Error::Length {
                what: "the factors of rotary frequencies",
                given: factors.len(),
                needed: pairs,
            });
        }
        let ramp = scaling.ramp(rotary_dim, base);
        let frequency = |i: usize| {
            let plain = base.powf(-((2 * i) as f64) / rotary_dim as f64);
            scaling.of_pair(plain, i, ramp) as f32
        };
        let rotary = Rotary {
            frequencies: (0..pairs).map(frequency).collect(),
            attention_factor: scaling.attention_factor() as f32,
        };
        let numbers = || rotary.frequencies.iter().chain([&rotary.attention_factor]);
        if let Some(wrong) = numbers().find(|number| !number.is_finite()) {
            return refuse(
                "a frequency, or the attention factor, of rotary positions",
                *wrong,
                "finite numbers: check the base and the scaling's factors",
            );
        }
        Ok(rotary)
    }

    /// Elements of a head that are rotated, from its first on.
    #[must_use]
    pub fn rotary_dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Radians per position of each pair.
    #[must_use]
    pub fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// What every cosine and sine is multiplied by.
    #[must_use]
    pub fn attention_factor(&self) -> f32 {
        self.attention_factor
    }

    /// A table of these positions, a row for each in their order; `0..n` is an engine's table.
    ///
    /// An angle is the product of position and frequency rounded to f32, as models are trained with; its cosine and sine are computed in f64,
    /// rounded to f32 and multiplied by the attention factor.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn table(
        &self,
        positions: impl ExactSizeIterator<Item = usize>,
    ) -> Result<RotaryTable, Error> {
        let (dim, pairs) = (self.rotary_dim(), self.frequencies.len());
        let elems = positions.len().saturating_mul(dim);
        let mut cos_sin = filled("a table of rotary positions", elems, 0.0f32)?;
        for (row, position) in cos_sin.chunks_exact_mut(dim).zip(positions) {
            let (cosines, sines) = row.split_at_mut(pairs);
            let of_pairs = cosines.iter_mut().zip(sines).zip(&self.frequencies);
            for ((cos, sin), frequency) in of_pairs {
                let (s, c) = f64::from(position as f32 * frequency).sin_cos();
                *cos = c as f32 * self.attention_factor;
                *sin = s as f32 * self.attention_factor;
            }
        }
        Ok(RotaryTable {
            rotary_dim: dim,
            cos_sin,
        })
    }
}

impl RotaryScaling {
    /// Where YaRN's ramp begins and ends, in pairs.
    fn ramp(&self, rotary_dim: usize, base: f64) -> [f64; 2] {
        let RotaryScaling::Yarn {
            original_context,
            beta_fast,
            beta_slow,
            truncate,
            ..
        } = self
        else {
            return [0.0; 2];
        };
        let dim = rotary_dim as f64;
        // The pair that makes so many turns over the original context.
        let pair = |turns: f64| dim * (original_context / (turns * TAU)).ln() / (2.0 * base.ln());
        let (mut low, mut high) = (pair(*beta_fast), pair(*beta_slow));
        if *truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        [low, if low == high { high + 0.001 } else { high }]
    }

    /// The frequency of pair `i`, which is `plain` without scaling.
    fn of_pair(&self, plain: f64, i: usize, [low, high]: [f64; 2]) -> f64 {
        match self {
            RotaryScaling::None => plain,
            RotaryScaling::Linear { factor } => plain / factor,
            RotaryScaling::Factors { factors, .. } => plain / factors[i],
            RotaryScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let turns = original_context * plain / TAU;
                let width = high_freq_factor - low_freq_factor;
                let kept = ((turns - low_freq_factor) / width).clamp(0.0, 1.0);
                plain / factor * (1.0 - kept) + plain * kept
            }
            RotaryScaling::Yarn { factor, .. } => {
                let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain / factor * divided + plain * (1.0 - divided)
            }
        }
    }

    fn attention_factor(&self) -> f64 {
        match self {
            RotaryScaling::Factors {
                attention_factor, ..
            } => *attention_factor,
            RotaryScaling::Yarn {
                attention_factor: Some(given),
                ..
            } => *given,
            RotaryScaling::Yarn { factor, .. } if *factor > 1.0 => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        }
    }
}

/// Cosines and sines `[positions][rotary_dim]`: of a position, the cosines of its pairs, then their sines. The layout of vLLM's and SGLang's
/// `cos_sin_cache`, and of what the CUDA kernel reads.
#[derive(Debug, Clone, PartialEq)]
pub struct RotaryTable {
    rotary_dim: usize,
    cos_sin: Vec<f32>,
}

impl RotaryTable {
    /// An engine's table, `[positions][rotary_dim]`, in f32, f16 or bf16; 16-bit numbers are widened, which is exact.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a `rotary_dim` that is 0, odd or more than [`MAX_HEAD_DIM`]; [`Error::Length`] for a list that ends inside a row;
    /// [`Error::NotFinite`]; [`Error::OutOfMemory`].
    pub fn from_cos_sin<'a>(
        rotary_dim: usize,
        cos_sin: impl Into<Elements<'a>>,
    ) -> Result<Self, Error> {
        check_dim(rotary_dim)?;
        let cos_sin = cos_sin.into().widened("cos_sin")?;
        if !cos_sin.len().is_multiple_of(rotary_dim) {
            return Err(Error::Length {
                what: "cos_sin",
                given: cos_sin.len(),
                needed: cos_sin.len().next_multiple_of(rotary_dim),
            });
        }
        if let Some(index) = cos_sin.iter().position(|x| !x.is_finite()) {
            return Err(Error::NotFinite {
                what: "cos_sin",
                at: ElementIndex::Flat(index),
                value: cos_sin[index],
            });
        }
        Ok(RotaryTable {
            rotary_dim,
            cos_sin: cos_sin.into_owned(),
        })
    }

    /// Elements of a head that are rotated, from its first on.
    #[must_use]
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim
    }

    /// The number of positions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cos_sin.len() / self.rotary_dim
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cos_sin.is_empty()
    }

    /// All rows, one after the other.
    #[must_use]
    pub fn cos_sin(&self) -> &[f32] {
        &self.cos_sin
    }

    /// Rotates the heads of one token, `[heads][head_dim]`, by the table's row `position`. Elements behind `rotary_dim` stay.
    ///
    /// A pair (a, b) becomes (a·cos − b·sin, b·cos + a·sin). Each product is rounded to f32, then the difference or sum: the order that every backend
    /// keeps, with no fused multiply-add.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a position that the table lacks and for a `head_dim` below `rotary_dim`; [`Error::Length`] for a list that ends inside a
    /// head. `x` is unchanged then.
    pub fn rotate(
        &self,
        style: RotaryStyle,
        x: &mut [f32],
        head_dim: usize,
        position: usize,
    ) -> Result<(), Error> {
        if head_dim < self.rotary_dim {
            return refuse("head_dim", head_dim, "rotary_dim of the table and more");
        }
        if !x.len().is_multiple_of(head_dim) {
            return Err(Error::Length {
                what: "heads to rotate",
                given: x.len(),
                needed: x.len().next_multiple_of(head_dim),
            });
        }
        let Some(row) = self.cos_sin.chunks_exact(self.rotary_dim).nth(position) else {
            return refuse("a position", position, "those of the table's rows");
        };
        let pairs = self.rotary_dim / 2;
        let (cosines, sines) = row.split_at(pairs);
        for head in x.chunks_exact_mut(head_dim) {
            for (i, (cos, sin)) in cosines.iter().zip(sines).enumerate() {
                let (first, second) = style.pair(i, pairs);
                let (a, b) = (head[first], head[second]);
                head[first] = a * cos - b * sin;
                head[second] = b * cos + a * sin;
            }
        }
        Ok(())
    }
}
