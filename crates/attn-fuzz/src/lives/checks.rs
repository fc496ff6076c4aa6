//! What must hold of a life after every action: the page table, the bytes, the values, decode.

use attn_core::{CacheConfig, Int4Scale, Int8Scale, KvSource, Scheme};

use super::Life;
use crate::{
    backends::problem,
    draw::Draw,
    hold, oracle,
    pages::{self, Values},
};

impl Life<'_> {
    /// Sets the bytes that a sequence of known floats must have: those of one append to a cache of its own. Their values are
    /// the floats' to the format's error.
    pub(super) fn check_values(&mut self, s: usize) -> Result<(), String> {
        let Some([k, v]) = &self.sequences[s].floats else {
            return Ok(());
        };
        let tokens = self.sequences[s].tokens;
        let mut config = self.config.clone();
        config.num_sequences = 1;
        config.num_pages = tokens.div_ceil(config.page_size) + 1;
        let alone = self.backends.reference.create_cache(&config);
        let mut alone = alone.map_err(|e| e.to_string())?;
        alone.append(0, k, v).map_err(|e| e.to_string())?;
        let bytes = alone.read_back(0).map_err(|e| e.to_string())?;
        let values = self.values(&bytes, tokens);
        let schemes = [self.config.format.k, self.config.format.v];
        for (side, (x, scheme)) in [k, v].into_iter().zip(schemes).enumerate() {
            check_error(
                &self.config,
                scheme,
                x,
                &values.x[side],
                &values.steps[side],
            )?;
        }
        self.sequences[s].bytes = bytes;
        Ok(())
    }

    fn values(&self, bytes: &[Vec<u8>], tokens: usize) -> Values {
        let scales = [
            &self.config.k_tensor_scales[..],
            &self.config.v_tensor_scales[..],
        ];
        pages::read(&self.shape(), bytes, tokens, scales)
    }

    /// Free and owned pages are the pool; no page is both, or a tail page twice.
    pub(super) fn check_page_table(&self) -> Result<(), String> {
        let (table, size) = (self.cache.table(), self.config.page_size);
        let free = self.free().len();
        hold!(
            free == self.cache.free_pages(),
            "{} pages are free, not {free}; {self:?}",
            self.cache.free_pages()
        );
        for (s, sequence) in self.sequences.iter().enumerate() {
            let pages = sequence.tokens.div_ceil(size);
            let tail =
                self.config.format.k == Scheme::Int4(Int4Scale::Channel) && sequence.tokens > 0;
            hold!(
                table.lens[s] == sequence.tokens
                    && table.pages[s].len() == pages
                    && table.tail_pages[s].is_some() == tail,
                "sequence {s} does not have {} tokens; {self:?}",
                sequence.tokens
            );
            let others = table.tail_pages.iter().flatten();
            let others = others.chain(table.pages.iter().flatten());
            let tail_owners = others.filter(|p| Some(**p) == table.tail_pages[s]).count();
            hold!(
                tail_owners == usize::from(tail),
                "tail page of {s} is shared; {self:?}"
            );
        }
        Ok(())
    }

    /// Every sequence has the bytes of its model.
    pub(super) fn check_bytes(&self) -> Result<(), String> {
        for (s, sequence) in self.sequences.iter().enumerate() {
            let bytes = self.cache.read_back(s).map_err(|e| e.to_string())?;
            hold!(
                bytes == sequence.bytes,
                "the bytes of sequence {s} of {} tokens changed; {self:?}",
                sequence.tokens
            );
        }
        Ok(())
    }

    /// Decodes some sequences on every backend, and compares with f64.
    pub(super) fn decode(&mut self, draw: &mut Draw<'_, '_>) -> Result<(), String> {
        let batch = draw.range(0..=self.sequences.len());
        let lens: Vec<usize> = self.sequences[..batch].iter().map(|s| s.tokens).collect();
        let (heads, dim) = (self.config.num_kv_heads, self.config.head_dim);
        let problem = problem(draw, heads, dim, &lens);
        let size = draw.pick(&[1.0, 0.1, 5.0, 0.0, 1e-30, 1e10]);
        let mut q = draw.noise(problem.rows() * dim, size);
        if let (Some(x), true) = (q.first_mut(), draw.once_in(10)) {
            *x = draw.float();
        }
        let kv = KvSource::Cache(&self.cache);
        let format = self.config.format;
        let Some(rows) = self.backends.decode(draw, &problem, format, &q, kv)? else {
            let scales = self
                .config
                .k_tensor_scales
                .iter()
                .fold(1.0f32, |a, s| a.max(*s));
            let most = q.iter().fold(0.0, |a: f64, x| a.max(f64::from(x.abs())));
            let most = most
                * f64::from(problem.softmax_scale)
                * f64::from(scales)
                * std::f64::consts::LOG2_E;
            let bad = q.iter().any(|x| !x.is_finite()) || most > 1.8e19;
            hold!(
                bad,
                "a decode of queries up to {most:e} is refused; {self:?}"
            );
            return Ok(());
        };
        let values: Vec<Values> = self.sequences[..batch]
            .iter()
            .map(|s| self.values(&s.bytes, s.tokens))
            .collect();
        let kv: Vec<_> = values.iter().map(|v| [&v.x[0][..], &v.x[1][..]]).collect();
        let exact = oracle::attend(&problem, &q, &kv);
        let integer = !matches!(format.k, Scheme::F16 | Scheme::Bf16 | Scheme::Fp8E4m3)
            && !matches!(format.v, Scheme::F16 | Scheme::Bf16 | Scheme::Fp8E4m3);
        oracle::compare(&problem, integer, &rows, &exact)
            .map_err(|text| format!("{text}; {self:?}"))
    }
}

/// Compares the values of pages with the floats, to the error of their scheme; `x` is `[token][head][dim]`.
fn check_error(
    config: &CacheConfig,
    scheme: Scheme,
    x: &[f32],
    values: &[f64],
    steps: &[f64],
) -> Result<(), String> {
    hold!(
        x.len() == values.len(),
        "{} values of {} floats",
        values.len(),
        x.len()
    );
    let dim = config.head_dim;
    let most: Vec<f64> = x
        .chunks_exact(dim)
        .map(|row| row.iter().fold(0.0, |a: f64, x| a.max(f64::from(x.abs()))))
        .collect();
    let largest = most.iter().copied().fold(0.0, f64::max);
    for (i, (x, value)) in x.iter().zip(values).enumerate() {
        let (x, step) = (f64::from(*x), steps[i]);
        let row = most[i / dim];
        let nearest = |limit: f64, rounding: f64| (x.clamp(-limit, limit), rounding);
        let (want, bound) = match scheme {
            Scheme::F16 => nearest(65504.0, x.abs() * 2f64.powi(-11) + 2f64.powi(-25)),
            Scheme::Bf16 => nearest(f64::MAX, x.abs() * 2f64.powi(-8) + 1e-40),
            Scheme::Fp8E4m3 => nearest(448.0 * step, x.abs() / 16.0 + step * 2f64.powi(-10)),
            Scheme::Int8(Int8Scale::Tensor) => nearest(127.0 * step, step * 0.5000001),
            // f16 holds no larger scale.
            _ if largest > 60000.0 => continue,
            Scheme::Int8(_) => nearest(f64::MAX, step * 0.57 + 4e-6),
            Scheme::Int4(Int4Scale::Groups(_)) => {
                nearest(f64::MAX, step * 0.52 + row / 1024.0 + 1e-5)
            }
            Scheme::Int4(Int4Scale::Channel) => {
                nearest(f64::MAX, step * 0.57 + largest / 100.0 + 2e-5)
            }
        };
        hold!(
            (want - value).abs() <= bound,
            "{scheme}: element {i} is {value} for {x}, step {step}, bound {bound:e}"
        );
    }
    Ok(())
}
