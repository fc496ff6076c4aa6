//! The actions of a life: each draws a call, makes it, and compares its outcome with the model.

use attn_conformance::noise::Noise;
use attn_core::{Append, Error, HeadDim, Scheme, TokenWrite, internals::order_free_pages};

use super::{Demand, Done, Life, Sequence};
use crate::{draw::Draw, hold, pages};

impl Life<'_> {
    /// Appends to one sequence floats that may be refused.
    pub(super) fn append(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let s = self.sequence(draw);
        let tokens = match draw.range(0..=5) {
            0 => 1,
            1 => draw.range(0..=self.config.page_size * 3),
            2 => draw.range(0..=400),
            _ => draw.range(0..=self.config.page_size + 3),
        };
        let rows = self.given_rows();
        let size = draw.pick(&[1.0, 1.0, 4.0, 1e-7, 0.0, 1e4, 1e15, 3e38]);
        let [mut k, mut v] = rows.map(|row| draw.noise(tokens * row, size));
        let mut good = true;
        if tokens > 0 && draw.once_in(6) {
            let of_k = draw.once_in(2) || v.is_empty();
            let x = if of_k { &mut k } else { &mut v };
            let at = draw.range(0..=x.len() - 1);
            x[at] = draw.float();
        }
        for (x, scheme) in [(&k, self.config.format.k), (&v, self.config.format.v)] {
            let most = match scheme {
                Scheme::Bf16 => f32::powi(2.0, 50),
                _ if pages::is_rotated(scheme) => f32::powi(2.0, 100),
                _ => f32::MAX,
            };
            good &= x.iter().all(|x| x.abs() <= most);
        }
        if draw.once_in(16) {
            k.push(0.0);
            good = false;
        } else if draw.once_in(16) {
            match rows[1] {
                0 => v.push(0.0),
                row => v.truncate(tokens.saturating_sub(1) * row),
            }
            good &= tokens == 0 && v.is_empty();
        } else if rows[0] != rows[1] && draw.once_in(8) {
            // As many elements in all, but each side has the other's.
            (k, v) = (v, k);
            good &= tokens == 0;
        }
        let demand = self.demand(&[Append {
            sequence: s,
            tokens,
        }]);
        let fits = self.has_room(&demand);
        let done = self.cache.append(s, &k, &v);
        self.expect("append", done.as_ref(), good && fits)?;
        if done.is_err() {
            return Ok(Done::Refused);
        }
        self.grow(s, tokens);
        if self.config.format.latents {
            let HeadDim { k: row, v: first } = self.config.head_dim;
            v = k
                .chunks_exact(row)
                .flat_map(|row| row[..first].to_vec())
                .collect();
        }
        let sequence = &mut self.sequences[s];
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
        let demand = self.demand(&appends);
        let fits = self.has_room(&demand) && !twice;
        let fails = draw.once_in(2);
        let mut seen = Vec::new();
        let new_pages = self.new_pages(demand.as_ref());
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
        let mut seen = &seen[..];
        for &Append {
            sequence: s,
            tokens,
        } in &appends
        {
            let (own, rest) = seen.split_at(tokens);
            let first = total - seen.len();
            self.check_writes(s, first, own, &new_pages)?;
            seen = rest;
        }
        for &Append {
            sequence: s,
            tokens,
        } in &appends
        {
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

    /// The pages that appends may take: free ones, and residual pages that they drop if those are too few.
    fn new_pages(&self, demand: Option<&Demand>) -> Vec<u32> {
        let mut pages = self.free();
        if let Some(demand) = demand.filter(|d| d.pages > pages.len()) {
            pages.extend(&demand.recyclable);
        }
        pages
    }

    /// Each token of an append that was made is written to its place in the table, in pages of that sequence alone.
    fn check_writes(
        &self,
        s: usize,
        first: usize,
        writes: &[TokenWrite],
        new_pages: &[u32],
    ) -> Result<(), String> {
        let (len, size, table) = (
            self.sequences[s].tokens,
            self.config.page_size,
            self.cache.table(),
        );
        let format = self.config.format;
        let [home, _] = pages::page_counts(format, size, len + writes.len());
        let kept = table.residual_pages[s].len();
        let homes = pages::residual_homes(format, size, [home, kept]);
        for (i, write) in writes.iter().enumerate() {
            let (at, page) = (len + i, (len + i) / size);
            let residual = homes.clone().position(|home| home == page);
            let residual = residual.map(|i| table.residual_pages[s][i]);
            let mut of_checkpoints = table.checkpoint_pages[s].iter();
            let residual =
                residual.or_else(|| Some(of_checkpoints.find(|of| of.home == page)?.page));
            let good = write.source == first + i
                && write.page == table.pages[s][page]
                && write.token == at % size
                && write.residual_page == residual;
            hold!(good, "token {at} of {s} goes to {write:?}; {self:?}");
            // The open page and its residual page are not new, unless they are copies.
            let is_new = page > len / size || len % size == 0;
            let lists = || table.pages.iter().chain(&table.residual_pages);
            for page in [Some(write.page), residual].into_iter().flatten() {
                hold!(
                    !is_new || new_pages.contains(&page),
                    "page {page} was not free; {self:?}"
                );
                let at_checkpoints = table.checkpoint_pages.iter().flatten();
                let owners = lists().flatten().filter(|p| **p == page).count()
                    + at_checkpoints.filter(|of| of.page == page).count();
                hold!(owners == 1, "page {page} is written, but shared; {self:?}");
            }
        }
        Ok(())
    }

    /// Forks a sequence.
    pub(super) fn fork(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let (from, to) = (self.sequence(draw), self.sequence(draw));
        let count = self.sequences.len();
        let can = from < count && to < count && from != to && self.sequences[to].tokens == 0;
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

    /// Takes a sequence back to some length, where this leaves the residuals that its image has; others are refused, or only asked for.
    pub(super) fn truncate(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let s = self.sequence(draw);
        let Some(sequence) = self.sequences.get(s) else {
            hold!(
                self.cache.truncate(s, 0).is_err(),
                "sequence {s} is truncated"
            );
            return Ok(Done::Refused);
        };
        let (size, format) = (self.config.page_size, self.config.format);
        let every = self.config.checkpoints.max(64);
        let len = match draw.range(0..=2) {
            0 => sequence.tokens.saturating_sub(draw.range(0..=70)),
            1 => draw.range(0..=sequence.tokens / every) * every,
            _ => draw.range(0..=sequence.tokens),
        };
        // A row reads its own tile and those before it, as many as the window has.
        let can_keep = |len: usize| {
            let tiles = pages::larger_window(format);
            let first = (len / 64 + 1).saturating_sub(tiles) * 64;
            tiles == 0 || (first / size..len.div_ceil(size)).all(|i| sequence.fine.contains(&i))
        };
        let longest = (0..=len).rfind(|len| can_keep(*len)).unwrap_or(0);
        let found = self.cache.longest_prefix(s, len);
        hold!(
            found.as_ref().is_ok_and(|found| *found == longest),
            "{found:?} of {len} tokens can be kept, not {longest}; {self:?}"
        );
        let saved = pages::saved_counts(format, size, longest);
        let mut saved = pages::residual_homes(format, size, saved);
        if !saved.all(|i| sequence.fine.contains(&i)) {
            return Ok(Done::Refused);
        }
        self.cache.truncate(s, longest).map_err(|e| e.to_string())?;
        let rows = self.rows();
        let sequence = &mut self.sequences[s];
        sequence.tokens = longest;
        sequence.fine.retain(|i| *i < longest.div_ceil(size));
        match &mut sequence.floats {
            Some(floats) => {
                let sides = floats.iter_mut().zip(rows);
                sides.for_each(|(x, row)| x.truncate(longest * row));
                self.check_values(s)?;
            }
            None => sequence.bytes = self.cache.read_back(s).map_err(|e| e.to_string())?,
        }
        Ok(Done::Changed)
    }

    /// Restores a sequence from the image of another one.
    pub(super) fn restore_image(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let (from, to) = (
            draw.range(0..=self.sequences.len() - 1),
            self.sequence(draw),
        );
        let (size, format) = (self.config.page_size, self.config.format);
        let mut given = self.sequences[from].clone();
        let saved = pages::saved_counts(format, size, given.tokens);
        let kept = pages::residual_homes(format, size, saved);
        let kept: Vec<usize> = kept.collect();
        given
            .fine
            .retain(|i| kept.contains(i) || self.is_before_checkpoint(*i));
        let room = saved[0] + given.fine.len() <= self.cache.free_pages();
        let empty = self.sequences.get(to).is_some_and(|s| s.tokens == 0);
        let image = self.cache.image(from).map_err(|e| e.to_string())?;
        let done = self.cache.restore(to, &image);
        self.expect("an image", done.as_ref(), room && empty)?;
        if done.is_err() {
            return Ok(Done::Refused);
        }
        self.sequences[to] = given;
        let again = self.cache.image(to).map_err(|e| e.to_string())?;
        hold!(again == image, "sequence {to} has another image; {self:?}");
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
            0 if draw.once_in(2) => given.tokens = draw.size(),
            0 => given.tokens = given.tokens.saturating_sub(draw.range(0..=70)),
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
        let room = given.bytes.len() <= self.cache.free_pages();
        let empty = self.sequences.get(to).is_some_and(|s| s.tokens == 0);
        let done = self.cache.restore_pages(to, given.tokens, &given.bytes);
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
        let home = given.tokens.div_ceil(self.config.page_size);
        let first = pages::first_pages(self.config.format, self.config.page_size, home);
        let last = given.bytes.len() - home - first;
        given.fine = (0..first).chain(home - last..home).collect();
        let back = self.cache.read_back(to).map_err(|e| e.to_string())?;
        if whole && fits_pages {
            self.sequences[to] = given;
        } else {
            // Damage may lie where nothing was written; read_back leaves that out.
            self.sequences[to] = Sequence {
                bytes: back,
                floats: None,
                tokens: given.tokens,
                fine: given.fine,
            };
        }
        Ok(Done::Changed)
    }

    /// Orders the free pages, or tries an order that must be refused.
    pub(super) fn order(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        let mut order = self.free();
        let mut noise = Noise::new(draw.bits());
        for i in (1..order.len()).rev() {
            order.swap(i, noise.below(i + 1));
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
