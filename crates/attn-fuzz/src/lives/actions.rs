//! The actions of a life: each draws a call, makes it, and compares its outcome with the model.

use attn_core::{Append, Error, Int4Scale, Scheme, internals::order_free_pages};

use super::{Done, Life, Sequence};
use crate::{
    draw::{Draw, splitmix},
    hold, pages,
};

impl Life<'_> {
    /// Appends to one sequence floats that may be refused.
    pub(super) fn append(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
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

    /// A closure that fails changes nothing; one that succeeds gets the place of each token. Sequences whose tokens it did not write are
    /// freed.
    pub(super) fn append_with(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
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

    /// Forks a sequence.
    pub(super) fn fork(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
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

    /// Frees a sequence.
    pub(super) fn free_sequence(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
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

    /// Restores a sequence from the pages of another one, which may be damaged.
    pub(super) fn restore(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
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

    /// Orders the free pages, or tries an order that must be refused.
    pub(super) fn order(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
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

    /// Fills the free pages with NaN or noise, which must change nothing.
    pub(super) fn poison(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
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
}
