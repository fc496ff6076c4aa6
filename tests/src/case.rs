//! One conformance case: a problem, a cache built in some way, and seeded inputs.

mod contiguous;

use std::{fmt, ops::Range};

use attn_core::{
    Arithmetic, CacheConfig, DecodeAttention, Error, HeadDim, Heads, KvCache, KvFormat, Problem,
    internals::order_free_pages,
};
use half::bf16;

pub use contiguous::Contiguous;

use crate::noise::{Noise, mix, unit};

/// A problem, a cache for it, and the seed of its inputs.
#[derive(Debug, Clone)]
pub struct Case {
    /// The step.
    pub problem: Problem,
    /// What is stored.
    pub format: KvFormat,
    /// Tokens per page.
    pub page_size: usize,
    /// What the numbers look like.
    pub inputs: Inputs,
    /// How K and V come to be where decode reads them.
    pub build: Build,
    /// Whether the cache takes centres off its keys.
    pub centres: bool,
    /// Whether each sequence is also decoded alone.
    pub alone: bool,
    /// The seed of K, V and Q, and the case's number in the table.
    pub seed: u64,
    /// Number of the first sequence: 0, but for a sequence taken out of its batch.
    pub first: usize,
}

/// What the numbers look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// In −3..3, one in 97 of them 8 times larger: outliers are what quantization finds hard.
    Noise,
    /// Noise, in K beside a constant of up to 40 in each dim, as a bias of the model's gives.
    Biased,
    /// Noise, 64 times as large in the elements that K has and V has not, as rotary keys are, and as much smaller in Q; every third row of Q is zeros there, and every
    /// third elsewhere.
    Rotary,
    /// All zero, Q too.
    Zeros,
    /// Tokens in turn: zero, f32 subnormals, values whose f16 scales are subnormal, noise.
    Tiny,
    /// Sixteen steps that an int4 group takes from 2 − 2^-10 on: small steps beside a large shift.
    Edge,
    /// Noise with 1e30 in it, or the scheme's largest number: scales saturate. What is left of accuracy is not asked.
    Huge,
    /// Noise with the largest f32 in it, or the scheme's largest number: bytes only.
    Extreme,
}

/// How K and V come to be where decode reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    /// Appended a varying number of tokens at a time.
    Chunks,
    /// Appended one token at a time.
    OneByOne,
    /// Appended in one call.
    AtOnce,
    /// In chunks, the sequences taking turns, on pages in a shuffled order.
    Shuffled,
    /// Sequence 1 is forked off sequence 0 and both go on.
    Forked,
    /// Written where sequences of other tokens were freed.
    Reused,
    /// Appended whole with other tokens behind the first ones, taken back to these, which the first tile holds, and appended at once.
    TakenBack,
    /// Appended in chunks; then what no query token's window sees is dropped, and the pages that this frees are poisoned.
    Dropped,
    /// Not cached: a contiguous `[batch, num_kv_heads, capacity, head_dim]`, read in place.
    Bnsh,
    /// Not cached: a contiguous `[batch, capacity, num_kv_heads, head_dim]`, read in place.
    Bsnh,
}

/// Seeded numbers in −3..3, one in 97 of them 8 times larger.
pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut noise = Noise::of_case(seed);
    (0..n)
        .map(|_| {
            let bits = noise.bits();
            let x = unit(bits) * 3.0;
            if bits.is_multiple_of(97) { x * 8.0 } else { x }
        })
        .collect()
}

impl Case {
    /// Causal decode of `kv_lens` in `format` on pages of 64 tokens.
    pub fn new(
        heads: [usize; 2],
        head_dim: impl Into<HeadDim>,
        kv_lens: &[usize],
        format: KvFormat,
    ) -> Self {
        Case {
            problem: Problem::new(Heads::new(heads[0], heads[1], head_dim), kv_lens.to_vec()),
            format,
            page_size: 64,
            inputs: Inputs::Noise,
            build: Build::Chunks,
            centres: false,
            alone: false,
            seed: 1,
            first: 0,
        }
    }

    /// Whether a backend that has no kernel for the case fails the suite: the presets and plain int4, pages of 64, head_dim 64 and 128.
    pub fn is_required(&self) -> bool {
        let formats = ["int8", "int4", "int8/int4", "int4-g1", "int4-g4"];
        formats.contains(&self.format.to_string().as_str())
            && [64, 128]
                .map(HeadDim::same)
                .contains(&self.problem.head_dim)
            && self.page_size == 64
            && !self.is_view()
    }

    /// Whether decode reads a contiguous view instead of a cache.
    pub fn is_view(&self) -> bool {
        matches!(self.build, Build::Bnsh | Build::Bsnh)
    }

    /// A name of at most so many columns: the case's number, then what its heads, queries, pages and masks are, as far as there is room. `Display`
    /// gives the whole case.
    pub fn label(&self, columns: usize) -> String {
        let p = &self.problem;
        let fewest = p.q_lens.iter().copied().min().unwrap_or(0);
        let mut parts = vec![
            format!("case {:04} {}", self.seed, self.format),
            format!("q{}/kv{}", p.num_q_heads, p.num_kv_heads),
            format!("d{}", p.head_dim),
        ];
        match (fewest, p.max_q_len()) {
            (1, 1) => (),
            (fewest, most) if fewest == most => parts.push(format!("q_len {most}")),
            (fewest, most) => parts.push(format!("q_len {fewest}-{most}")),
        }
        if self.page_size != 64 {
            parts.push(format!("page {}", self.page_size));
        }
        if self.centres {
            parts.push("centres".to_owned());
        }
        let usual = match self.centres {
            true => Inputs::Biased,
            false => Inputs::Noise,
        };
        if self.inputs != usual {
            parts.push(format!("{:?}", self.inputs));
        }
        if self.build != Build::Chunks {
            parts.push(format!("{:?}", self.build));
        }
        let modifiers = [
            ("noncausal", !p.scores.causal),
            ("window", p.scores.window_left.is_some()),
            ("chunk", p.scores.chunk.is_some()),
            ("softcap", p.scores.softcap.is_some()),
            ("alibi", p.scores.alibi_slopes.is_some()),
            ("sinks", p.scores.sinks.is_some()),
            ("fast", p.scores.arithmetic == Arithmetic::Fast),
        ];
        let given = modifiers.iter().filter(|(_, is_given)| *is_given);
        parts.extend(given.map(|(name, _)| (*name).to_owned()));
        while parts.len() > 1
            && parts.iter().map(|part| part.len() + 1).sum::<usize>() > columns + 1
        {
            parts.pop();
        }
        parts.join(" ")
    }

    /// Sequence `b` alone, with the tokens and queries it has in the batch.
    pub fn only(&self, b: usize) -> Case {
        let mut one = self.clone();
        one.problem.kv_lens = vec![self.problem.kv_lens[b]];
        one.problem.q_lens = vec![self.problem.q_lens[b]];
        one.build = Build::AtOnce;
        one.first = b;
        one
    }

    /// The cache's configuration; per-tensor scales that use the range of the inputs.
    pub fn config(&self) -> CacheConfig {
        let p = &self.problem;
        let mut config = CacheConfig::builder(self.format, p.heads())
            .unit_tensor_scales()
            .lens(p.kv_lens.iter().copied())
            .page_size(self.page_size)
            .max_q_len(p.max_q_len().max(64))
            .centres(self.centres)
            .build();
        config
            .k_tensor_scales
            .iter_mut()
            .chain(&mut config.v_tensor_scales)
            .enumerate()
            .for_each(|(i, s)| *s = 0.19 + 0.01 * i as f32);
        if self.format.latents {
            config.v_tensor_scales.clone_from(&config.k_tensor_scales);
        }
        config
    }

    /// Numbers per token of K, and of V, of which latents have none of their own.
    fn widths(&self) -> [usize; 2] {
        let [k, v] = self.problem.head_dim.both();
        let v = if self.format.latents { 0 } else { v };
        [k, v].map(|dim| self.problem.num_kv_heads * dim)
    }

    /// Some tokens of [`Case::kv`]'s K and V.
    pub(crate) fn tokens<'a>(
        &self,
        [k, v]: &'a [Vec<f32>; 2],
        tokens: Range<usize>,
    ) -> [&'a [f32]; 2] {
        let [in_k, in_v] = self.widths();
        [(k, in_k), (v, in_v)].map(|(x, width)| &x[tokens.start * width..tokens.end * width])
    }

    /// Tokens that sequences 0 and 1 share when forked: all but the shorter one's last few, so that a page is open.
    fn prefix(&self) -> usize {
        let shorter = self.problem.kv_lens.iter().copied().take(2).min();
        shorter.unwrap_or(0).saturating_sub(5)
    }

    /// K and V of sequence `b`: `[kv_len, num_kv_heads, head_dim]` with their own head_dim; of latents no V.
    pub fn kv(&self, b: usize) -> [Vec<f32>; 2] {
        let sequence = (self.first + b) as u64;
        let [in_k, in_v] = self.widths();
        let sides = [(0, self.format.k, in_k), (1, self.format.v, in_v)];
        sides.map(|(side, scheme, width)| {
            if width == 0 {
                return Vec::new();
            }
            let of = (width, scheme.max_magnitude());
            let tokens = self.problem.kv_lens[b];
            let mut x = self.numbers(self.seed * 1000 + sequence * 2 + side, tokens, of);
            if self.build == Build::Forked && b == 1 {
                let shared = self.numbers(self.seed * 1000 + side, self.prefix(), of);
                x[..shared.len()].copy_from_slice(&shared);
            }
            if self.inputs == Inputs::Rotary && side == 0 {
                self.rotary_elements(&mut x, |_, x| *x *= 64.0);
            }
            if self.inputs == Inputs::Biased && side == 0 {
                let mut bits = Noise::of_case(self.seed);
                let bias: Vec<f32> = (0..width).map(|_| unit(bits.bits()) * 40.0).collect();
                let rows = x.chunks_exact_mut(bias.len());
                rows.for_each(|row| row.iter_mut().zip(&bias).for_each(|(x, c)| *x += c));
            }
            x
        })
    }

    /// Changes the elements of rows of K, or of queries, that V has not: `change(row, x)`.
    fn rotary_elements(&self, x: &mut [f32], mut change: impl FnMut(usize, &mut f32)) {
        let HeadDim { k, v } = self.problem.head_dim;
        for (i, row) in x.chunks_exact_mut(k).enumerate() {
            row[v.min(k)..].iter_mut().for_each(|x| change(i, x));
        }
    }

    fn rotary_queries(&self, q: &mut [f32]) {
        self.rotary_elements(q, |i, x| *x *= if i % 3 == 1 { 0.0 } else { 1.0 / 64.0 });
        let HeadDim { k, v } = self.problem.head_dim;
        let rows = q.chunks_exact_mut(k).skip(2).step_by(3);
        rows.for_each(|row| row[..v.min(k)].fill(0.0));
    }

    /// Seeded numbers of so many tokens, `width` each, of a magnitude of at most `most`, the scheme's own.
    fn numbers(&self, seed: u64, tokens: usize, (width, most): (usize, f32)) -> Vec<f32> {
        let n = tokens * width;
        let mut x = noise(seed, n);
        let large = match self.inputs {
            Inputs::Noise | Inputs::Biased | Inputs::Rotary => return x,
            Inputs::Zeros => return vec![0.0; n],
            Inputs::Tiny => {
                let scales = [0.0, 1e-40, 1e-6, 1.0];
                for (t, row) in x.chunks_mut(width).enumerate() {
                    row.iter_mut().for_each(|x| *x *= scales[t % 4]);
                }
                return x;
            }
            Inputs::Edge => {
                let (first, step) = (2.0 - 1.0 / 1024.0, (2.0 - 1.0 / 1024.0) / 16384.0);
                return (0..n).map(|i| first + (i % 16) as f32 * step).collect();
            }
            Inputs::Huge => 1e30,
            Inputs::Extreme => f32::MAX,
        };
        for (i, x) in x.iter_mut().enumerate().filter(|(i, _)| i % 211 == 17) {
            *x = large.min(most).copysign(if i % 2 == 0 { *x } else { -*x });
        }
        x
    }

    /// The queries. For float formats they are bf16 values, so that rounding Q to 16 bits loses nothing.
    pub fn q(&self) -> Vec<f32> {
        let token = self.problem.num_q_heads * self.problem.head_dim.k;
        let mut q = Vec::new();
        for (b, q_len) in self.problem.q_lens.iter().enumerate() {
            let seed = self.seed * 1000 + 500 + (self.first + b) as u64;
            q.extend(noise(seed, q_len * token));
        }
        match self.inputs {
            Inputs::Zeros => q.fill(0.0),
            Inputs::Rotary => self.rotary_queries(&mut q),
            _ if !self.format.is_integer() => {
                q.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32())
            }
            _ => (),
        }
        q
    }

    /// A filled cache whose pool was poisoned first; tokens arrive `step` at a time.
    ///
    /// # Errors
    /// The backend's.
    pub fn cache(&self, backend: &dyn DecodeAttention, step: usize) -> Result<KvCache, Error> {
        let mut cache = self.poisoned(backend, self.config())?;
        for b in 0..self.problem.batch() {
            self.append(&mut cache, b, 0..self.problem.kv_lens[b], &[step])?;
        }
        Ok(cache)
    }

    /// An empty cache, every byte of its pool 0xFF: NaN as a float, as an f16 scale, and as an fp8 code.
    fn poisoned(
        &self,
        backend: &dyn DecodeAttention,
        config: CacheConfig,
    ) -> Result<KvCache, Error> {
        let mut cache = backend.create_cache(&config)?;
        let poison = vec![0xff; config.layout()?.page_bytes()];
        for page in 0..config.num_pages as u32 {
            cache.write_page(page, &poison)?;
        }
        Ok(cache)
    }

    /// Appends some tokens of sequence `b`, `steps` at a time in turn.
    fn append(
        &self,
        cache: &mut KvCache,
        b: usize,
        tokens: Range<usize>,
        steps: &[usize],
    ) -> Result<(), Error> {
        let kv = self.kv(b);
        let (mut t, mut steps) = (tokens.start, steps.iter().cycle());
        while t < tokens.end {
            let step = steps.next().copied().unwrap_or(1);
            let end = tokens.end.min(t.saturating_add(step));
            let [k, v] = self.tokens(&kv, t..end);
            cache.append(b, k, v)?;
            t = end;
        }
        Ok(())
    }

    /// The cache that [`Case::build`] asks for, on a poisoned pool.
    ///
    /// # Errors
    /// The backend's.
    pub fn built(&self, backend: &dyn DecodeAttention) -> Result<KvCache, Error> {
        let lens = &self.problem.kv_lens;
        let chunks = [1, 3, 64, 2, 17, 129, 5, 1000];
        match self.build {
            Build::AtOnce | Build::Bnsh | Build::Bsnh => self.cache(backend, usize::MAX),
            Build::OneByOne => self.cache(backend, 1),
            Build::Chunks => {
                let mut cache = self.poisoned(backend, self.config())?;
                for b in 0..lens.len() {
                    self.append(&mut cache, b, 0..lens[b], &chunks)?;
                }
                Ok(cache)
            }
            Build::Shuffled => {
                let mut cache = self.poisoned(backend, self.config())?;
                let mut order: Vec<u32> = (0..cache.config().num_pages as u32).collect();
                order.sort_by_key(|page| mix(self.seed << 32 | u64::from(*page)));
                order_free_pages(&mut cache, &order)?;
                let longest = lens.iter().copied().max().unwrap_or(0);
                for t in (0..longest).step_by(37) {
                    for b in 0..lens.len() {
                        let tokens = t.min(lens[b])..lens[b].min(t + 37);
                        self.append(&mut cache, b, tokens, &chunks)?;
                    }
                }
                Ok(cache)
            }
            Build::Forked => {
                let mut cache = self.poisoned(backend, self.config())?;
                let prefix = self.prefix();
                self.append(&mut cache, 0, 0..prefix, &chunks)?;
                cache.fork(0, 1)?;
                // The fork first: its tokens must not reach the page that the two still share.
                self.append(&mut cache, 1, prefix..lens[1], &chunks)?;
                self.append(&mut cache, 0, prefix..lens[0], &chunks)?;
                for b in 2..lens.len() {
                    self.append(&mut cache, b, 0..lens[b], &chunks)?;
                }
                Ok(cache)
            }
            Build::Reused => {
                let mut cache = self.poisoned(backend, self.config())?;
                let other = Case {
                    seed: self.seed + 1_000_000,
                    inputs: Inputs::Extreme,
                    ..self.clone()
                };
                for b in 0..lens.len() {
                    other.append(&mut cache, b, 0..lens[b], &[usize::MAX])?;
                }
                for b in 0..lens.len() {
                    cache.free_sequence(b)?;
                }
                for b in (0..lens.len()).rev() {
                    self.append(&mut cache, b, 0..lens[b], &chunks)?;
                }
                Ok(cache)
            }
            Build::TakenBack => {
                let mut cache = self.poisoned(backend, self.config())?;
                let other = Case {
                    seed: self.seed + 1_000_000,
                    ..self.clone()
                };
                for b in 0..lens.len() {
                    let right = lens[b].min(41);
                    self.append(&mut cache, b, 0..right, &chunks)?;
                    other.append(&mut cache, b, right..lens[b], &[usize::MAX])?;
                    cache.truncate(b, right)?;
                    self.append(&mut cache, b, right..lens[b], &[usize::MAX])?;
                }
                Ok(cache)
            }
            Build::Dropped => {
                let mut cache = self.poisoned(backend, self.config())?;
                for b in 0..lens.len() {
                    self.append(&mut cache, b, 0..lens[b], &chunks)?;
                    let unseen = match self.problem.q_lens[b] {
                        0 => lens[b],
                        _ => self.problem.visible(b, 0).start,
                    };
                    cache.drop_before(b, unseen)?;
                }
                poison_free_pages(&mut cache)?;
                Ok(cache)
            }
        }
    }

    /// What a forked-off sequence 0 must still hold after sequence 1 went on: the books and bytes before, and after.
    ///
    /// # Errors
    /// The backend's.
    pub fn fork_keeps_sibling(&self, backend: &dyn DecodeAttention) -> Result<bool, Error> {
        let mut cache = self.poisoned(backend, self.config())?;
        let prefix = self.prefix();
        self.append(&mut cache, 0, 0..prefix, &[usize::MAX])?;
        let before = cache.image(0)?;
        cache.fork(0, 1)?;
        let forked = cache.image(1)?;
        self.append(&mut cache, 1, prefix..self.problem.kv_lens[1], &[2])?;
        Ok(before == forked && before == cache.image(0)?)
    }
}

/// Fills the pages that no sequence owns with bytes 0xFF.
///
/// # Errors
/// The backend's.
pub fn poison_free_pages(cache: &mut KvCache) -> Result<(), Error> {
    let table = cache.table();
    let mut is_free = vec![true; cache.config().num_pages];
    for page in table.pages.iter().chain(&table.residual_pages).flatten() {
        if let Some(is_free) = is_free.get_mut(*page as usize) {
            *is_free = false;
        }
    }
    let poison = vec![0xff; cache.layout().page_bytes()];
    for (page, _) in is_free.iter().enumerate().filter(|(_, is_free)| **is_free) {
        cache.write_page(page as u32, &poison)?;
    }
    Ok(())
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.problem;
        write!(
            f,
            "seed {}: {}, {}/{} heads, head_dim {}, q_lens {:?}, kv_lens {:?}, page_size {}, {:?}, {:?}",
            self.seed,
            self.format,
            p.num_q_heads,
            p.num_kv_heads,
            p.head_dim,
            p.q_lens,
            p.kv_lens,
            self.page_size,
            self.inputs,
            self.build
        )?;
        if self.centres {
            f.write_str(", centres")?;
        }
        if !p.scores.causal {
            f.write_str(", not causal")?;
        }
        if let Some(chunk) = p.scores.chunk {
            write!(f, ", chunk {chunk}")?;
        }
        if let Some(window) = p.scores.window_left {
            write!(f, ", window {window}")?;
        }
        if let Some(cap) = p.scores.softcap {
            write!(f, ", softcap {cap}")?;
        }
        if let Some(slopes) = &p.scores.alibi_slopes {
            write!(f, ", ALiBi {slopes:?}")?;
        }
        if let Some(sinks) = &p.scores.sinks {
            write!(f, ", sinks {sinks:?}")?;
        }
        if p.scores.arithmetic == Arithmetic::Fast {
            f.write_str(", fast")?;
        }
        if self.alone {
            f.write_str(", also alone")?;
        }
        Ok(())
    }
}
