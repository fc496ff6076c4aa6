//! One conformance case, and its seeded inputs.

use attn_core::{CacheConfig, DecodeAttention, Error, KvCache, KvFormat, Problem};

/// A problem, a cache for it, and the seed of its inputs.
#[derive(Debug, Clone)]
pub struct Case {
    /// The step.
    pub problem: Problem,
    /// What is stored.
    pub format: KvFormat,
    /// Tokens per page.
    pub page_size: usize,
    /// Of K, V and Q.
    pub seed: u64,
}

/// Seeded numbers in −3..3, one in 97 of them 8 times larger: outliers are what quantization finds hard.
pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..n)
        .map(|_| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            let x = ((z >> 40) as f32 / (1 << 23) as f32 - 1.0) * 3.0;
            if z.is_multiple_of(97) { x * 8.0 } else { x }
        })
        .collect()
}

impl Case {
    /// Causal decode of `kv_lens` in `format` on pages of 64 tokens.
    pub fn new(heads: [usize; 2], head_dim: usize, kv_lens: &[usize], format: KvFormat) -> Self {
        Case {
            problem: Problem::new(heads[0], heads[1], head_dim, kv_lens.to_vec()),
            format,
            page_size: 64,
            seed: 1,
        }
    }

    /// The cache's configuration; per-tensor scales that use the range of the inputs.
    pub fn config(&self) -> CacheConfig {
        let p = &self.problem;
        let max = p.kv_lens.iter().copied().max().unwrap_or(0);
        let mut config = CacheConfig::new(self.format, p.num_kv_heads, p.head_dim, p.batch(), max);
        config.page_size = self.page_size;
        config.num_pages = p
            .kv_lens
            .iter()
            .map(|&len| config.pages_for(len))
            .sum::<usize>();
        config
            .k_tensor_scales
            .iter_mut()
            .chain(&mut config.v_tensor_scales)
            .for_each(|s| *s = 0.19);
        config
    }

    /// K and V of sequence `b`: `[kv_len, num_kv_heads, head_dim]`.
    pub fn kv(&self, b: usize) -> [Vec<f32>; 2] {
        let n = self.problem.kv_lens[b] * self.problem.num_kv_heads * self.problem.head_dim;
        let seed = self.seed * 1000 + b as u64 * 2;
        [noise(seed, n), noise(seed + 1, n)]
    }

    /// The queries.
    pub fn q(&self) -> Vec<f32> {
        noise(
            self.seed * 1000 + 999,
            self.problem.rows() * self.problem.head_dim,
        )
    }

    /// A filled cache whose pool was poisoned first; tokens arrive `step` at a time.
    ///
    /// # Errors
    /// The backend's.
    pub fn cache(&self, backend: &dyn DecodeAttention, step: usize) -> Result<KvCache, Error> {
        let config = self.config();
        let mut cache = backend.create_cache(&config)?;
        for page in 0..config.num_pages as u32 {
            cache.write_page(page, &vec![0xff; config.layout().page_bytes()])?;
        }
        let row = self.problem.num_kv_heads * self.problem.head_dim;
        for b in 0..self.problem.batch() {
            let [k, v] = self.kv(b);
            for (k, v) in k.chunks(step * row).zip(v.chunks(step * row)) {
                cache.append(b, k, v)?;
            }
        }
        Ok(cache)
    }
}
