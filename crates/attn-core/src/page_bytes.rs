//! The bytes of pages: which of them a number of tokens writes, and which values they may hold.

use crate::{
    error::{Error, refuse},
    layout::{PageLayout, Part, Side},
    quant::check_stored_bytes,
};

impl PageLayout {
    /// Zeroes what a page with `tokens` written tokens leaves unwritten, so that pages can be compared.
    ///
    /// `page` is the bytes of a home page, or of a residual page.
    ///
    /// # Errors
    /// [`Error::Length`] if `page` is not one page long; [`Error::Parameter`] for more tokens than a page holds.
    pub fn canonical(
        &self,
        page: &mut [u8],
        tokens: usize,
        is_residual: bool,
    ) -> Result<(), Error> {
        if tokens > self.page_size() {
            return refuse("tokens of a page", tokens, "at most the page size");
        }
        check_length("page", page.len(), self.page_bytes())?;
        let written = self.written(tokens, is_residual);
        page.chunks_exact_mut(self.run_bytes())
            .for_each(|run| keep(run, &written));
        Ok(())
    }

    /// Zeroes what full residual pages behind each other leave unwritten.
    pub(crate) fn canonical_residuals(&self, pages: &mut [u8]) {
        let written = self.written(self.page_size(), true);
        pages
            .chunks_exact_mut(self.run_bytes())
            .for_each(|run| keep(run, &written));
    }

    /// The bits of a run that its first `tokens` tokens write.
    fn written(&self, tokens: usize, is_residual: bool) -> Vec<u8> {
        let mut written = vec![0u8; self.run_bytes()];
        for side in [Side::K, Side::V] {
            let part = match is_residual {
                true => self.residual(side),
                false => Some(self.part(side)),
            };
            if let Some(part) = part {
                mark_written(self, &part, tokens, &mut written);
            }
        }
        written
    }

    /// Refuses pages of a sequence of `tokens` that no quantizer can have written: NaN or infinite values, negative scales.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::BadBytes`].
    pub fn check_pages(&self, pages: &[Vec<u8>], tokens: usize) -> Result<(), Error> {
        let all = SequencePages::of_lists(*self, tokens, pages)?;
        all.check(pages.iter().map(Vec::as_slice))
    }
}

/// A sequence's pages behind each other: its home pages, of which the last may be open, then the residual pages of its first tile and of the last ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SequencePages {
    layout: PageLayout,
    tokens: usize,
    home: usize,
    residuals: usize,
}

impl SequencePages {
    /// `count` pages of a sequence of `tokens`: at least those that the next token reads, at most those that a cache keeps between steps.
    ///
    /// # Errors
    /// [`Error::Length`] for other than as many pages as such a sequence has.
    pub fn new(layout: PageLayout, tokens: usize, count: usize) -> Result<Self, Error> {
        let (format, page_size) = (layout.format(), layout.page_size());
        let home = tokens.div_ceil(page_size);
        let most = home + format.residual_pages(page_size, tokens, 0);
        let least = home + format.next_residual_pages(page_size, tokens);
        if !(least..=most).contains(&count) {
            check_length("pages", count, most)?;
        }
        Ok(SequencePages {
            layout,
            tokens,
            home,
            residuals: count - home,
        })
    }

    /// Those that each lie in a list of their own.
    ///
    /// # Errors
    /// [`Error::Length`] for other than as many pages as such a sequence has, and for a page of another length.
    pub fn of_lists(layout: PageLayout, tokens: usize, pages: &[Vec<u8>]) -> Result<Self, Error> {
        let all = SequencePages::new(layout, tokens, pages.len())?;
        all.check_lengths(pages)?;
        Ok(all)
    }

    /// Refuses a page of another length than the layout's.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn check_lengths(&self, pages: &[Vec<u8>]) -> Result<(), Error> {
        let needed = self.layout.page_bytes();
        let mut pages = pages.iter();
        pages.try_for_each(|page| check_length("page", page.len(), needed))
    }

    /// The layout of the pages.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of home pages.
    pub fn home(&self) -> usize {
        self.home
    }

    /// Number of residual pages.
    pub fn residuals(&self) -> usize {
        self.residuals
    }

    /// Which of the pages has the residuals of home page `home`, if one does.
    pub fn residual_of(&self, home: usize) -> Option<usize> {
        (self.home..self.count()).find(|i| self.home_of(*i) == home)
    }

    /// The home page that the i-th page is, or whose residuals it has.
    fn home_of(&self, i: usize) -> usize {
        let format = self.layout.format();
        let first = format.first_residual_pages(self.layout.page_size());
        match i.checked_sub(self.home) {
            None => i,
            Some(residual) if residual < first => residual,
            Some(_) => i - self.residuals,
        }
    }

    /// The home pages between those that have residual pages for being the first ones, and for being the last ones.
    pub fn without_residuals(&self) -> std::ops::Range<usize> {
        let (format, page_size) = (self.layout.format(), self.layout.page_size());
        let first = format.first_residual_pages(page_size).min(self.residuals);
        first..self.home - (self.residuals - first)
    }

    /// Number of pages.
    pub fn count(&self) -> usize {
        self.home + self.residuals
    }

    /// The number of written tokens of the i-th page, and whether it holds residuals.
    fn used(&self, i: usize) -> (usize, bool) {
        let (home, page_size) = (self.home_of(i), self.layout.page_size());
        let tokens = (self.tokens - home * page_size).min(page_size);
        (tokens, i >= self.home)
    }

    /// Zeroes what the tokens leave unwritten; `bytes` are the pages, each of a page's length.
    pub fn canonical(&self, bytes: &mut [u8]) {
        let mut known: Option<((usize, bool), Vec<u8>)> = None;
        let pages = bytes.chunks_exact_mut(self.layout.page_bytes());
        for (i, page) in pages.enumerate() {
            let used = self.used(i);
            if used == (self.layout.page_size(), false) {
                continue;
            }
            if known.as_ref().is_none_or(|(of, _)| *of != used) {
                known = Some((used, self.layout.written(used.0, used.1)));
            }
            if let Some((_, written)) = &known {
                page.chunks_exact_mut(self.layout.run_bytes())
                    .for_each(|run| keep(run, written));
            }
        }
    }

    /// Refuses codes and parameters of home pages that no quantizer writes; every residual is a code. Each page has a page's length.
    ///
    /// # Errors
    /// [`Error::BadBytes`].
    pub fn check<'a>(&self, pages: impl Iterator<Item = &'a [u8]>) -> Result<(), Error> {
        let layout = self.layout;
        let parts = [Side::K, Side::V].map(|side| layout.part(side));
        let mut scratch = Vec::new();
        for (i, page) in pages.take(self.home).enumerate() {
            let (tokens, _) = self.used(i);
            let written = (tokens < layout.page_size()).then(|| self.layout.written(tokens, false));
            for (head, run) in page.chunks_exact(layout.run_bytes()).enumerate() {
                let run = match &written {
                    None => run,
                    Some(written) => {
                        scratch.clear();
                        scratch.extend_from_slice(run);
                        keep(&mut scratch, written);
                        &scratch
                    }
                };
                for part in &parts {
                    let [codes, params] = [&part.codes, &part.params].map(|r| &run[r.clone()]);
                    check_stored_bytes(part.scheme, codes, params).map_err(|what| {
                        Error::BadBytes {
                            what,
                            offset: layout.run(0, head).start,
                            scheme: part.scheme,
                        }
                    })?;
                }
            }
        }
        Ok(())
    }
}

/// Zeroes the other bits of a run.
fn keep(run: &mut [u8], written: &[u8]) {
    let bytes = run.iter_mut().zip(written);
    bytes.for_each(|(byte, mask)| *byte &= mask);
}

fn check_length(what: &'static str, given: usize, needed: usize) -> Result<(), Error> {
    if given == needed {
        Ok(())
    } else {
        Err(Error::Length {
            what,
            given,
            needed,
        })
    }
}

/// Sets the bits of a run that the first `tokens` tokens of one part write.
fn mark_written(layout: &PageLayout, part: &Part, tokens: usize, written: &mut [u8]) {
    for t in 0..tokens {
        for d in 0..part.dim() {
            let at = part.code_addr(t, d);
            let codes = &mut written[part.codes.clone()];
            match part.scheme.code_bits() {
                16 => codes[at.byte..at.byte + 2].fill(0xff),
                8 => codes[at.byte] = 0xff,
                _ => codes[at.byte] |= 0xf << at.shift,
            }
        }
    }
    let params = &mut written[part.params.clone()];
    if !params.is_empty() {
        let group_bytes = params.len() / part.groups().count();
        let token_bytes = group_bytes / layout.page_size();
        for group in params.chunks_exact_mut(group_bytes) {
            group[..tokens * token_bytes].fill(0xff);
        }
    }
}
