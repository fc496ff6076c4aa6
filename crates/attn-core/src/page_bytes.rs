//! The bytes of pages: which of them a number of tokens writes, and which values they may hold.

use crate::{
    error::{Error, refuse},
    layout::{PageLayout, Part, Side},
    quant::{Param, check_stored},
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
        for run in page.chunks_exact_mut(self.run_bytes()) {
            let bytes = run.iter_mut().zip(&written);
            bytes.for_each(|(byte, mask)| *byte &= mask);
        }
        Ok(())
    }

    /// Refuses pages of a sequence of `tokens` that no quantizer can have written: NaN or infinite values, negative scales.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::BadBytes`].
    pub fn check_pages(&self, pages: &[Vec<u8>], tokens: usize) -> Result<(), Error> {
        let most = self.pages_of(tokens);
        let read = self.format().next_residual_pages(self.page_size(), tokens);
        let least = tokens.div_ceil(self.page_size()) + read;
        if !(least..=most).contains(&pages.len()) {
            check_length("pages", pages.len(), most)?;
        }
        for page in pages {
            check_length("page", page.len(), self.page_bytes())?;
        }
        let parts = [Side::K, Side::V].map(|side| self.part(side));
        // Every residual is a code.
        let home = tokens.div_ceil(self.page_size());
        for (i, page) in pages[..home].iter().enumerate() {
            let used = (tokens - i * self.page_size()).min(self.page_size());
            for head in 0..self.num_kv_heads() {
                let run = self.run(0, head);
                for part in &parts {
                    check_part(self.head_dim(), part, &page[run.clone()], used).map_err(
                        |what| Error::BadBytes {
                            what,
                            offset: run.start,
                            scheme: part.scheme,
                        },
                    )?;
                }
            }
        }
        Ok(())
    }
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

/// Refuses codes and parameters of the first `tokens` tokens of a run that no quantizer writes.
fn check_part(head_dim: usize, part: &Part, run: &[u8], tokens: usize) -> Result<(), &'static str> {
    for t in 0..tokens {
        let codes: Vec<u16> = (0..head_dim).map(|d| part.load_code(run, t, d)).collect();
        let params = (0..part.num_params()).map(|g| part.load_param(run, t, g));
        check_stored(part.scheme, &codes, &params.collect::<Vec<Param>>())?;
    }
    Ok(())
}

/// Sets the bits of a run that the first `tokens` tokens of one part write.
fn mark_written(layout: &PageLayout, part: &Part, tokens: usize, written: &mut [u8]) {
    for t in 0..tokens {
        for d in 0..layout.head_dim() {
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
        let group_bytes = params.len() / part.num_params();
        let token_bytes = group_bytes / layout.page_size();
        for group in params.chunks_exact_mut(group_bytes) {
            group[..tokens * token_bytes].fill(0xff);
        }
    }
}
