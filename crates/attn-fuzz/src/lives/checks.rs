//! What must hold of a life after every action: the page table, the bytes, the values, decode.

use std::collections::HashMap;

use attn_core::{CacheConfig, Int8Scale, KvSource, Problem, Scheme, convert};

use super::Life;
use crate::{
    backends::problem,
    draw::Draw,
    hold, oracle,
    pages::{self, Numbers, Side},
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
        (config.num_sequences, config.checkpoints) = (1, 0);
        let counts = pages::page_counts(config.format, config.page_size, tokens);
        config.num_pages = counts.iter().sum();
        let alone = self.backends.reference.create_cache(&config);
        let mut alone = alone.map_err(|e| e.to_string())?;
        let given_v = if config.format.latents { &[][..] } else { v };
        alone.append(0, k, given_v).map_err(|e| e.to_string())?;
        let bytes = alone.read_back(0).map_err(|e| e.to_string())?;
        for (x, side) in [k, v].into_iter().zip(&self.values(&bytes, tokens)) {
            check_error(&self.config, side, x)?;
        }
        self.check_dequantized(&bytes, tokens)?;
        self.sequences[s].bytes = bytes;
        Ok(())
    }

    /// `convert::dequantize` gives the values that the row of the last token would read.
    fn check_dequantized(&self, bytes: &[Vec<u8>], tokens: usize) -> Result<(), String> {
        let config = &self.config;
        let layout = config.layout().map_err(|e| e.to_string())?;
        let scales = (&config.k_tensor_scales, &config.v_tensor_scales);
        let got = convert::dequantize(&layout, bytes, tokens, scales.0, scales.1);
        let got = got.map_err(|e| format!("pages are refused: {e}; {self:?}"))?;
        for (got, side) in got.iter().zip(&self.values(bytes, tokens)) {
            let row = config.num_kv_heads * side.dim;
            hold!(
                got.len() == side.coarse.x.len(),
                "{} values of {tokens} tokens; {self:?}",
                got.len()
            );
            for (i, got) in got.iter().enumerate() {
                let numbers = side.read_from(tokens.saturating_sub(1) / 64, i / row);
                // Rotated rows are turned back in f32.
                let of_row = &numbers.x[i / side.dim * side.dim..][..side.dim];
                let most = of_row.iter().fold(0.0f64, |a, x| a.max(x.abs()));
                let (got, want) = (f64::from(*got), numbers.x[i]);
                hold!(
                    (got - want).abs() <= most * 1e-4,
                    "{}: value {i} is dequantized to {got}, not {want}; {self:?}",
                    side.scheme
                );
            }
        }
        Ok(())
    }

    fn values(&self, bytes: &[Vec<u8>], tokens: usize) -> [Side; 2] {
        let scales = [
            &self.config.k_tensor_scales[..],
            &self.config.v_tensor_scales[..],
        ];
        pages::read(&self.shape(), bytes, tokens, scales)
    }

    /// Free and owned pages are the pool; each sequence has as many pages as its length says, and each page one place, which only sequences
    /// that share the home page there may share.
    pub(super) fn check_page_table(&self) -> Result<(), String> {
        let table = self.cache.table();
        let free = self.free().len();
        hold!(
            free == self.cache.free_pages(),
            "{} pages are free, not {free}; {self:?}",
            self.cache.free_pages()
        );
        // The index of the home page, and whether the page has its residuals.
        let mut places = HashMap::new();
        for (s, sequence) in self.sequences.iter().enumerate() {
            let [home, kept] = self.held_counts(s);
            let (own, residuals) = (&table.pages[s], &table.residual_pages[s]);
            hold!(
                table.lens[s] == sequence.tokens && own.len() == home && residuals.len() == kept,
                "sequence {s} does not have {} tokens; {self:?}",
                sequence.tokens
            );
            let (format, size) = (self.config.format, self.config.page_size);
            let residuals =
                pages::residual_homes(format, size, [home, kept]).zip(residuals.iter().copied());
            let (for_steps, kept): (Vec<_>, _) = (residuals.collect(), &table.checkpoint_pages[s]);
            let beside = sequence.fine.iter().copied();
            let beside = beside.filter(|i| !for_steps.iter().any(|(home, _)| home == i));
            hold!(
                beside.eq(kept.iter().map(|of| of.home)),
                "sequence {s} has others at checkpoints than {:?}; {self:?}",
                sequence.fine
            );
            let at_checkpoints = kept.iter().map(|of| (of.home, of.page));
            let residuals = for_steps.into_iter().chain(at_checkpoints);
            let of_home = own.iter().copied().enumerate().map(|at| (at, None));
            let of_residuals = residuals.map(|(i, page)| ((i, page), Some(own[i])));
            for ((i, page), of) in of_home.chain(of_residuals) {
                let place = (i, of);
                let other = places.insert(page, place).unwrap_or(place);
                hold!(
                    other == place,
                    "page {page} is that of {place:?} and {other:?}; {self:?}"
                );
            }
        }
        // A home page that two sequences share has one residual page.
        let mut residual_pages = HashMap::new();
        for (page, of) in places
            .iter()
            .filter_map(|(page, (_, of))| Some((page, (*of)?)))
        {
            let other = residual_pages.insert(of, page).unwrap_or(page);
            hold!(
                other == page,
                "page {of} has two residual pages, {page} and {other}; {self:?}"
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
        let mut q = draw.noise(problem.rows() * dim.k, size);
        if let (Some(x), true) = (q.first_mut(), draw.once_in(10)) {
            *x = draw.float();
        }
        let kv = KvSource::Cache(&self.cache);
        let format = self.config.format;
        let lacks = self.lacks_residuals(&problem);
        let Some(rows) = self.backends.decode(draw, &problem, format, &q, kv)? else {
            let scales = self
                .config
                .k_tensor_scales
                .iter()
                .fold(1.0f32, |a, s| a.max(*s));
            let most = q.iter().fold(0.0, |a: f64, x| a.max(f64::from(x.abs())));
            let most = most
                * f64::from(problem.score_scale())
                * f64::from(scales)
                * std::f64::consts::LOG2_E;
            let bad = q.iter().any(|x| !x.is_finite()) || most > 1.8e19;
            hold!(
                bad || lacks,
                "a decode of queries up to {most:e} is refused; {self:?}"
            );
            return Ok(());
        };
        hold!(!lacks, "rows read residuals that are not there; {self:?}");
        let values: Vec<[Side; 2]> = self.sequences[..batch]
            .iter()
            .map(|s| self.values(&s.bytes, s.tokens))
            .collect();
        let integer = pages::is_integer(format);
        let exact = oracle::attend(&problem, integer, &q, &values);
        oracle::compare(&problem, integer, &rows, &exact)
            .map_err(|text| format!("{text}; {self:?}"))
    }

    /// Whether a row reads a tile with residuals that its sequence does not have: it was restored with those that its next token reads.
    fn lacks_residuals(&self, problem: &Problem) -> bool {
        let (format, size) = (self.config.format, self.config.page_size);
        let tiles = pages::larger_window(format);
        let lacks = |s: usize, q_len: usize| {
            let len = problem.kv_lens[s];
            // The first row reads the earliest tiles. Without a mask every row reads as the last one does.
            let rows = if problem.scores.causal { q_len } else { 1 };
            let read = (len.saturating_sub(rows) / 64 + 1).saturating_sub(tiles);
            let first = len.saturating_sub(q_len);
            let of_window = first.saturating_sub(problem.scores.window_left.unwrap_or(usize::MAX));
            let of_chunk = problem
                .scores
                .chunk
                .map_or(0, |chunk| first - first % chunk);
            let seen = of_window.max(of_chunk) / 64;
            let homes = pages::residual_homes(format, size, self.held_counts(s));
            let mut needed = read.max(seen) * 64 / size..len.div_ceil(size);
            q_len > 0 && needed.any(|i| !homes.clone().any(|home| home == i))
        };
        let mut q_lens = problem.q_lens.iter().enumerate();
        tiles > 0 && q_lens.any(|(s, q_len)| lacks(s, *q_len))
    }
}

/// Compares the stored rows of pages with the floats, `[token][head][dim]`, to the error of their scheme.
fn check_error(config: &CacheConfig, side: &Side, x: &[f32]) -> Result<(), String> {
    let (scheme, dim) = (side.scheme, side.dim);
    hold!(
        x.len() == side.coarse.stored.len(),
        "{} values of {} floats",
        side.coarse.stored.len(),
        x.len()
    );
    let mut rows: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    if pages::is_rotated(scheme) {
        let rows = rows.chunks_exact_mut(dim);
        rows.for_each(|row| pages::rotate(row, side.block));
    }
    let largest = |row: &[f64]| row.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
    let most: Vec<f64> = rows.chunks_exact(dim).map(largest).collect();
    let tokens = x.len() / dim / config.num_kv_heads;
    let counts = pages::saved_counts(config.format, config.page_size, tokens);
    let homes = pages::residual_homes(config.format, config.page_size, counts);
    let of_page = config.page_size * dim * config.num_kv_heads;
    let readings: [(&Numbers, bool); 2] = [(&side.coarse, false), (&side.fine, true)];
    for (numbers, is_fine) in readings {
        for (i, value) in numbers.stored.iter().enumerate() {
            if is_fine && !homes.clone().any(|home| home == i / of_page) {
                continue;
            }
            let row = most[i / dim];
            // f16 holds no larger scale.
            if row > 60000.0 && scheme.has_row_scales() {
                continue;
            }
            let (want, bound) = expected(scheme, rows[i], row, numbers.steps[i]);
            hold!(
                (want - value).abs() <= bound,
                "{scheme}: element {i} is {value} for {}, step {}, bound {bound:e}",
                rows[i],
                numbers.steps[i]
            );
        }
    }
    Ok(())
}

/// What a number should be stored as, and how far from it: `row` is the largest magnitude of its row, `step` the factor of its code.
fn expected(scheme: Scheme, x: f64, row: f64, step: f64) -> (f64, f64) {
    let nearest = |limit: f64, rounding: f64| (x.clamp(-limit, limit), rounding);
    match scheme {
        Scheme::F16 => nearest(65504.0, x.abs() * 2f64.powi(-11) + 2f64.powi(-25)),
        Scheme::Bf16 => nearest(f64::MAX, x.abs() * 2f64.powi(-8) + 1e-40),
        Scheme::Fp8E4m3 => nearest(448.0 * step, x.abs() / 16.0 + step * 2f64.powi(-10)),
        Scheme::Int8(Int8Scale::Tensor) => nearest(127.0 * step, step * 0.5000001),
        Scheme::Int8(_) | Scheme::RotatedInt8 => nearest(f64::MAX, step * 0.57 + 4e-6),
        Scheme::Int4(_) => nearest(f64::MAX, step * 0.52 + row / 1024.0 + 1e-5),
        // A code is the middle of a step of two; f16 rounds the scale, a 16th of the largest element, so that this lies up to a 128th beyond.
        Scheme::RotatedInt4 { .. } => nearest(f64::MAX, step + row * 6e-4 + 1e-6),
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{Heads, KvFormat, Problem};

    use super::{super::Sequence, *};
    use crate::backends::{CPU, decode};

    #[test]
    fn a_sequence_of_fewer_residuals_is_read_and_the_rows_that_lack_some_are_refused() {
        let heads = Heads::new(1, 1, (64, 128));
        let config = CacheConfig::builder(KvFormat::INT4, heads)
            .centres(false)
            .sequences(2)
            .pages(30)
            .build();
        let mut life = Life::new(&CPU, config).unwrap().unwrap();
        let [k, v] = [64, 128].map(|dim| vec![0.5; 320 * dim]);
        life.cache.append(0, &k, &v).unwrap();
        life.grow(0, 320);
        // Of 320 tokens those of the pages 3 and 4 are saved, of 257 that of page 2 would be, too.
        let bytes = life.cache.read_back(0).unwrap();
        life.cache.restore_pages(1, 257, &bytes).unwrap();
        let bytes = life.cache.read_back(1).unwrap();
        life.sequences[1] = Sequence {
            bytes,
            tokens: 257,
            fine: [0, 3, 4].into(),
            ..Sequence::default()
        };
        life.check_page_table().unwrap();
        assert_eq!(
            life.values(&life.sequences[1].bytes, 257)[1].fine.x.len(),
            257 * 128
        );
        let (mut refused, kv) = (0, KvSource::Cache(&life.cache));
        let masks = [(true, None), (false, None), (true, Some(64))];
        for (q_len, (causal, chunk)) in (1..=80).flat_map(|n| masks.map(|mask| (n, mask))) {
            let problem = Problem::new(heads, [320, 257]).q_lens([1, q_len]);
            let mut problem = problem.causal(causal);
            problem.scores.chunk = chunk;
            let q = vec![1.0; problem.q_elements()];
            let done = decode(&*CPU.reference, &problem, KvFormat::INT4, &q, kv);
            assert_eq!(life.lacks_residuals(&problem), done.is_err(), "{problem:?}");
            refused += usize::from(done.is_err());
        }
        assert_eq!(refused, 79 + 15);
    }
}
