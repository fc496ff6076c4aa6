//! Fuzzes the lives of caches: appends, forks, frees, restores, orders and poison on a pool that may be too small, against a
//! model that keeps the floats; decodes on every backend against f64.

use arbitrary::Unstructured;
use attn_core::{
    Append, CacheConfig, Error, Heads, Int4Scale, Int8Scale, KvCache, KvSource, PageTable, Scheme,
    internals::order_free_pages,
};

use crate::{
    backends::{Backends, CPU, problem},
    draw::{Draw, splitmix},
    hold, oracle,
    pages::{self, Shape, Values},
};

/// Draws a cache and what happens to it; see the module.
///
/// # Errors
/// What does not hold.
pub fn fuzz(u: &mut Unstructured<'_>) -> Result<(), String> {
    fuzz_backends(u, &CPU)
}

/// The same for other backends.
///
/// # Errors
/// What does not hold.
pub fn fuzz_backends(u: &mut Unstructured<'_>, backends: &Backends) -> Result<(), String> {
    let mut draw = Draw(u);
    let config = config(&mut draw);
    let mut life = match Life::new(backends, config)? {
        Some(life) => life,
        None => return Ok(()),
    };
    for _ in 0..draw.range(4..=24) {
        let before = life.snapshot();
        let done = life.act(&mut draw)?;
        let after = life.snapshot();
        if done == Done::Refused {
            hold!(
                before == after,
                "a refused call changed {before:?} to {after:?}; {life:?}"
            );
        }
        life.check_books()?;
        life.check_bytes()?;
    }
    life.decode(&mut draw)
}

fn config(draw: &mut Draw<'_, '_>) -> CacheConfig {
    let mut config = CacheConfig::builder(
        draw.format(),
        Heads {
            q: draw.range(1..=2),
            kv: draw.range(1..=2),
            dim: draw.pick(&[64, 64, 64, 80, 96, 128, 192, 256]),
        },
    )
    .sequences(draw.range(1..=4))
    .max_len(0)
    .build();
    config.page_size = draw.pick(&[16, 16, 32, 64, 128]);
    if config.format.k == Scheme::Int4(Int4Scale::Channel) {
        config.page_size = draw.pick(&[64, 128]);
    }
    config.num_pages = draw.range(0..=14);
    let heads = config.num_kv_heads;
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        if !scales.is_empty() {
            let extreme = draw.once_in(8);
            let drawn = (0..heads).map(|_| match extreme {
                true => draw.pick(&[1e-15, 1e15, 1.0]),
                false => draw.pick(&[0.02, 0.05, 1.0]),
            });
            *scales = drawn.collect();
        }
    }
    config
}

/// What a call came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Done {
    Changed,
    Refused,
}

/// What a sequence holds.
#[derive(Debug, Clone, Default)]
struct Sequence {
    /// What `read_back` must give.
    bytes: Vec<Vec<u8>>,
    /// What was appended, unless pages of other origin were restored.
    floats: Option<[Vec<f32>; 2]>,
    tokens: usize,
}

/// A cache and its model.
struct Life<'a> {
    backends: &'a Backends,
    config: CacheConfig,
    cache: KvCache,
    sequences: Vec<Sequence>,
}

impl std::fmt::Debug for Life<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tokens: Vec<_> = self.sequences.iter().map(|s| s.tokens).collect();
        let (config, table) = (&self.config, self.cache.table());
        write!(f, "tokens {tokens:?} {config:?} {table:?}")
    }
}

impl<'a> Life<'a> {
    fn new(backends: &'a Backends, config: CacheConfig) -> Result<Option<Self>, String> {
        let cache = match backends.reference.create_cache(&config) {
            Ok(cache) => cache,
            // FORMATS.md's limits are the fuzzer of sizes' to check.
            Err(Error::Parameter { .. }) => return Ok(None),
            Err(error) => return Err(format!("{config:?} is refused: {error}")),
        };
        let mut sequences = vec![Sequence::default(); config.num_sequences];
        for sequence in &mut sequences {
            sequence.floats = Some(Default::default());
        }
        Ok(Some(Life {
            backends,
            config,
            cache,
            sequences,
        }))
    }

    fn row(&self) -> usize {
        self.config.num_kv_heads * self.config.head_dim
    }

    fn shape(&self) -> Shape {
        Shape {
            format: self.config.format,
            head_dim: self.config.head_dim,
            page_size: self.config.page_size,
            heads: self.config.num_kv_heads,
        }
    }

    fn snapshot(&self) -> (PageTable, usize) {
        (self.cache.table().clone(), self.cache.free_pages())
    }

    fn sequence(&self, draw: &mut Draw<'_, '_>) -> usize {
        if draw.once_in(24) {
            return draw.size();
        }
        draw.range(0..=self.sequences.len() - 1)
    }

    /// Pages that no sequence has.
    fn free(&self) -> Vec<u32> {
        let table = self.cache.table();
        let owned = |page: &u32| {
            table.pages.iter().flatten().any(|p| p == page)
                || table.tail_pages.contains(&Some(*page))
        };
        (0..self.config.num_pages as u32)
            .filter(|p| !owned(p))
            .collect()
    }

    /// Pages that appends must take, a copy of a shared open page each included; None if a sequence does not exist.
    fn needed(&self, appends: &[Append]) -> Option<usize> {
        let (table, size) = (self.cache.table(), self.config.page_size);
        let channel = self.config.format.k == Scheme::Int4(Int4Scale::Channel);
        let mut needed = 0usize;
        for &Append {
            sequence: s,
            tokens,
        } in appends
        {
            let len = self.sequences.get(s)?.tokens;
            if tokens == 0 {
                continue;
            }
            let shared = len % size != 0
                && table
                    .pages
                    .iter()
                    .filter(|p| p.last() == table.pages[s].last())
                    .count()
                    > 1;
            needed = needed
                .saturating_add(len.saturating_add(tokens).div_ceil(size) - len.div_ceil(size))
                .saturating_add(usize::from(shared))
                .saturating_add(usize::from(channel && len == 0));
        }
        Some(needed)
    }

    fn act(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        match draw.range(0..=15) {
            0..=5 => self.append(draw),
            6 => self.append_with(draw),
            7 | 8 => self.fork(draw),
            9 => self.free_sequence(draw),
            10 | 11 => self.restore(draw),
            12 => self.order(draw),
            13 => self.poison(draw),
            _ => self.decode(draw).map(|()| Done::Refused),
        }
    }

    fn append(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let s = self.sequence(draw);
        let tokens = match draw.range(0..=3) {
            0 => 1,
            1 => draw.range(0..=self.config.page_size * 3),
            _ => draw.range(0..=self.config.page_size + 3),
        };
        let n = tokens * self.row();
        let size = draw.pick(&[1.0, 1.0, 4.0, 1e-7, 0.0, 1e4, 1e15, 3e38]);
        let [mut k, mut v] = [draw.noise(n, size), draw.noise(n, size)];
        let mut good = true;
        if n > 0 && draw.once_in(6) {
            let x = if draw.once_in(2) { &mut k } else { &mut v };
            let at = draw.range(0..=n - 1);
            x[at] = draw.float();
        }
        for (x, scheme) in [(&k, self.config.format.k), (&v, self.config.format.v)] {
            let most = if scheme == Scheme::Bf16 {
                f32::powi(2.0, 50)
            } else {
                f32::MAX
            };
            good &= x.iter().all(|x| x.abs() <= most);
        }
        if draw.once_in(16) {
            k.push(0.0);
            good = false;
        } else if draw.once_in(16) {
            v.truncate(n.saturating_sub(self.row()));
            good &= v.len() == n;
        }
        let needed = self.needed(&[Append {
            sequence: s,
            tokens,
        }]);
        let fits = needed.is_some_and(|n| n <= self.cache.free_pages());
        let done = self.cache.append(s, &k, &v);
        self.expect("append", done.as_ref(), good && fits)?;
        if done.is_err() {
            return Ok(Done::Refused);
        }
        let sequence = &mut self.sequences[s];
        sequence.tokens += tokens;
        if let Some([ks, vs]) = &mut sequence.floats {
            ks.extend(k);
            vs.extend(v);
            self.check_values(s)?;
        } else {
            sequence.bytes = self.cache.read_back(s).map_err(|e| e.to_string())?;
        }
        Ok(Done::Changed)
    }

    fn expect(&self, what: &str, done: Result<&(), &Error>, can: bool) -> Result<(), String> {
        match done {
            Ok(()) => hold!(can, "{what} is taken, but cannot be; {self:?}"),
            Err(error) => hold!(!can, "{what} is refused: {error}; {self:?}"),
        }
        Ok(())
    }

    /// Sets the bytes that a sequence of known floats must have: those of one append to a cache of its own. Their values are
    /// the floats' to the format's error.
    fn check_values(&mut self, s: usize) -> Result<(), String> {
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

    /// A closure that fails changes nothing; one that succeeds is told where each token goes. What it did not write is freed.
    fn append_with(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let count = draw.range(0..=3);
        let appends: Vec<Append> = (0..count)
            .map(|_| {
                let sequence = self.sequence(draw);
                let tokens = if draw.once_in(12) {
                    draw.size()
                } else {
                    draw.range(0..=self.config.page_size + 2)
                };
                Append { sequence, tokens }
            })
            .collect();
        let twice = (1..count).any(|i| {
            appends[..i]
                .iter()
                .any(|a| a.sequence == appends[i].sequence)
        });
        let needed = self.needed(&appends);
        let fits = needed.is_some_and(|n| n <= self.cache.free_pages()) && !twice;
        let fails = draw.once_in(2);
        let (mut seen, taken) = (Vec::new(), self.free());
        let done = self.cache.append_with(&appends, |_, writes| {
            seen = writes.to_vec();
            match fails {
                true => Err(Error::Sequence {
                    given: 77,
                    count: 0,
                }),
                false => Ok(()),
            }
        });
        let total: usize = if fits {
            appends.iter().map(|a| a.tokens).sum()
        } else {
            0
        };
        self.expect("append_with", done.as_ref(), fits && (total == 0 || !fails))?;
        hold!(
            seen.len() == total || !fits,
            "{} writes for {total} tokens",
            seen.len()
        );
        if done.is_err() {
            return Ok(Done::Refused);
        }
        let mut source = 0;
        for &Append {
            sequence: s,
            tokens,
        } in &appends
        {
            let (len, table) = (self.sequences[s].tokens, self.cache.table());
            for i in 0..tokens {
                let (write, at) = (seen[source], len + i);
                let page = table.pages[s][at / self.config.page_size];
                let good = write.source == source
                    && write.page == page
                    && write.token == at % self.config.page_size
                    && write.tail_page == table.tail_pages[s];
                hold!(good, "token {at} of {s} goes to {write:?}; {self:?}");
                let is_new = at / self.config.page_size > len / self.config.page_size;
                hold!(
                    !is_new || taken.contains(&page),
                    "page {page} was not free; {self:?}"
                );
                let owners = table.pages.iter().flatten().filter(|p| **p == page).count();
                hold!(owners == 1, "page {page} is written, but shared; {self:?}");
                source += 1;
            }
            if tokens > 0 {
                self.cache.free_sequence(s).map_err(|e| e.to_string())?;
                self.sequences[s] = Sequence {
                    floats: Some(Default::default()),
                    ..Sequence::default()
                };
            }
        }
        Ok(Done::Changed)
    }

    fn fork(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let (from, to) = (self.sequence(draw), self.sequence(draw));
        let count = self.sequences.len();
        let can = from < count && to < count && from != to && self.sequences[to].tokens == 0 && {
            let tail = self.cache.table().tail_pages[from].is_some();
            !tail || self.cache.free_pages() > 0
        };
        let done = self.cache.fork(from, to);
        self.expect("fork", done.as_ref(), can)?;
        if done.is_err() {
            return Ok(Done::Refused);
        }
        self.sequences[to] = self.sequences[from].clone();
        Ok(Done::Changed)
    }

    fn free_sequence(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let s = self.sequence(draw);
        let done = self.cache.free_sequence(s);
        self.expect("free_sequence", done.as_ref(), s < self.sequences.len())?;
        if done.is_err() {
            return Ok(Done::Refused);
        }
        self.sequences[s] = Sequence {
            floats: Some(Default::default()),
            ..Sequence::default()
        };
        Ok(Done::Changed)
    }

    fn restore(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let (from, to) = (
            draw.range(0..=self.sequences.len() - 1),
            self.sequence(draw),
        );
        let mut given = self.sequences[from].clone();
        let mut whole = true;
        match draw.range(0..=7) {
            0 => given.tokens = draw.size(),
            1 => drop(given.bytes.pop()),
            2 => given.bytes.push(vec![0; draw.range(0..=64)]),
            3..=4 if !given.bytes.is_empty() => {
                let page = draw.range(0..=given.bytes.len() - 1);
                let at = draw.range(0..=given.bytes[page].len() - 1);
                given.bytes[page][at] = draw.pick(&[0x00, 0x7c, 0x7f, 0x80, 0xfc, 0xff]);
                whole = false;
                given.floats = None;
            }
            _ => {}
        }
        let source = &self.sequences[from];
        let fits_pages = given.bytes.len() == source.bytes.len() && given.tokens == source.tokens;
        let room = {
            let channel = self.config.format.k == Scheme::Int4(Int4Scale::Channel);
            let tail = usize::from(channel && given.tokens > 0);
            given.tokens.div_ceil(self.config.page_size) + tail <= self.cache.free_pages()
        };
        let empty = self.sequences.get(to).is_some_and(|s| s.tokens == 0);
        let done = self.cache.restore(to, given.tokens, &given.bytes);
        let could = fits_pages && room && empty;
        if whole {
            // Another number of tokens on the same pages may be as good.
            if could || !empty || !room {
                self.expect("restore", done.as_ref(), could)?;
            }
        } else {
            hold!(
                done.is_err() || could,
                "restore is taken, but cannot be; {self:?}"
            );
        }
        if done.is_err() {
            return Ok(Done::Refused);
        }
        let back = self.cache.read_back(to).map_err(|e| e.to_string())?;
        if whole && fits_pages {
            self.sequences[to] = given;
        } else {
            // Damage may lie where nothing was written; read_back leaves that out.
            self.sequences[to] = Sequence {
                bytes: back,
                floats: None,
                tokens: given.tokens,
            };
        }
        Ok(Done::Changed)
    }

    fn order(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let mut order = self.free();
        let mut state = draw.bits();
        for i in (1..order.len()).rev() {
            order.swap(i, splitmix(&mut state) as usize % (i + 1));
        }
        let good = !draw.once_in(4);
        if !good {
            match draw.range(0..=2) {
                0 => order.push(draw.bits() as u32),
                1 if !order.is_empty() => order[0] = draw.bits() as u32 | 1 << 20,
                _ => order.extend_from_within(..order.len().min(1)),
            }
        }
        let unchanged = {
            let mut o = order.clone();
            o.sort_unstable();
            o == self.free()
        };
        let done = order_free_pages(&mut self.cache, &order);
        self.expect("order_free_pages", done.as_ref(), unchanged)?;
        Ok(Done::Refused)
    }

    /// Whatever lies in free pages changes nothing.
    fn poison(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let shape = self.shape();
        let len = shape.heads * pages::run_bytes(&shape);
        for page in self.free() {
            let bytes = if draw.once_in(2) {
                vec![0xff; len]
            } else {
                draw.bytes(len)
            };
            self.cache
                .write_page(page, &bytes)
                .map_err(|e| e.to_string())?;
        }
        let outside = draw.bits() as u32 | 1 << 16;
        let done = self.cache.write_page(outside, &vec![0; len]);
        hold!(done.is_err(), "page {outside} is written");
        if self.config.num_pages > 0 {
            let done = self.cache.write_page(0, &vec![0; len + 1]);
            hold!(done.is_err(), "a page of {} bytes is written", len + 1);
        }
        Ok(Done::Refused)
    }

    /// Free and owned pages are the pool; no page is both or twice a tail.
    fn check_books(&self) -> Result<(), String> {
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

    fn check_bytes(&self) -> Result<(), String> {
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

    fn decode(&mut self, draw: &mut Draw<'_, '_>) -> Result<(), String> {
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

/// Values of pages are the floats' to the error of their scheme; `x` is `[token][head][dim]`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faulty;

    fn finds(backends: &Backends) -> bool {
        crate::finds(400, fuzz, |u| fuzz_backends(u, backends))
    }

    #[test]
    fn a_backend_with_one_wrong_bit_is_found() {
        assert!(finds(&faulty::one_wrong_bit()));
    }

    #[test]
    fn an_error_that_the_reference_shares_is_found() {
        assert!(finds(&faulty::all_wrong()));
    }

    #[test]
    fn a_store_that_writes_one_wrong_byte_is_found() {
        assert!(finds(&faulty::wrong_pages()));
    }
}
