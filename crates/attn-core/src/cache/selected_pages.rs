//! Some pages of a sequence for each of its KV heads, as block-sparse attention chooses them.

use super::{CacheLayer, CachedSequences, PageTable};
use crate::{
    arithmetic::TILE,
    cache_config::CacheConfig,
    error::{Error, refuse},
    format::Window,
};

/// The pages that the rows of each KV head attend, of each sequence of a step. All other tokens are not read.
///
/// Results have the bits of a sequence that consists of the tokens of these pages alone.
#[derive(Debug, Clone, Copy)]
pub struct SelectedPages<'a> {
    /// Numbers of pages, of which page i has the tokens from i · `page_size` on: those of the first sequence's first KV head in ascending order, then those of its next KV
    /// head, and so on.
    pub pages: &'a [u32],
    /// How many each KV head of each sequence has, `[sequences, num_kv_heads]`. One without pages has outputs of 0 and log-sum-exps of −∞.
    pub counts: &'a [usize],
}

impl<'a> CacheLayer<'a> {
    /// Each KV head of some sequences as a sequence of its own, `[sequences, num_kv_heads]`, which consists of the pages that are selected for it: for problems of one KV
    /// head ([`Attend::pages`](crate::Attend::pages) makes them).
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::Length`] for other counts than one for each KV head, and for other pages than those that they count; [`Error::Dropped`] for a sequence that
    /// has dropped tokens; [`Error::Parameter`] for pages that a sequence does not have or that are not in ascending order, for shards, and for what has other
    /// bits at another place in a sequence: static scales that differ from KV head to KV head; in a cache with centres, and in formats with residuals, pages without the sequence's first tile; in
    /// formats with residuals pages without the newest ones, which the newest token reads with residuals.
    pub fn selected(
        self,
        sequences: &[usize],
        selected: SelectedPages<'_>,
    ) -> Result<CachedSequences<'a>, Error> {
        let of_all = self.sequences(sequences)?;
        self.check_selectable()?;
        let heads = self.cache().config.num_kv_heads;
        let needed = sequences.len().saturating_mul(heads);
        check_len("counts of selected pages", selected.counts.len(), needed)?;
        let counted = selected
            .counts
            .iter()
            .fold(0usize, |n, c| n.saturating_add(*c));
        check_len("selected pages", selected.pages.len(), counted)?;
        let mut table = PageTable {
            of_runs: true,
            first_residual_pages: of_all.table.first_residual_pages,
            ..PageTable::default()
        };
        let mut rest = selected.pages;
        for (i, count) in selected.counts.iter().enumerate() {
            let (own, others) = rest.split_at(*count);
            rest = others;
            self.push_selected(&of_all.table, [i / heads, i % heads], own, &mut table)?;
        }
        let of_each = vec![0; table.lens.len()];
        table.first_tokens = of_each.clone();
        table.tokens_before = of_each;
        Ok(CachedSequences { layer: self, table })
    }

    /// Refuses caches whose pages read otherwise at another place of a sequence, or for another KV head.
    fn check_selectable(self) -> Result<(), Error> {
        let config = &self.cache().config;
        let differ = |scales: &&[f32]| scales.windows(2).any(|pair| pair[0] != pair[1]);
        if self.tensor_scales().iter().any(differ) {
            return refuse(
                "static scales of selected pages",
                format_args!(
                    "those of {} that differ from KV head to KV head",
                    config.format
                ),
                "the same for all KV heads of a layer",
            );
        }
        let runs = config.num_pages.saturating_mul(config.num_kv_heads);
        match u32::try_from(runs) {
            Ok(runs) if runs < PageTable::DROPPED => Ok(()),
            _ => refuse(
                "runs of a layer with selected pages",
                runs,
                "less than 2^32 - 1: num_pages · num_kv_heads",
            ),
        }
    }

    /// Adds a KV head of a sequence to a table of runs.
    fn push_selected(
        self,
        of_all: &PageTable,
        [b, head]: [usize; 2],
        own: &[u32],
        table: &mut PageTable,
    ) -> Result<(), Error> {
        let config = &self.cache().config;
        let (heads, page_size) = (config.num_kv_heads, config.page_size);
        let (pages, tokens) = (&of_all.pages[b], of_all.lens[b]);
        if of_all.first_tokens[b] > 0 {
            return Err(Error::Dropped {
                what: "attention to selected pages",
                sequence: b,
                first: 0,
                kept: of_all.first_tokens[b],
            });
        }
        if of_all.tokens_before[b] > 0 {
            return refuse(
                "tokens before a sequence with selected pages",
                of_all.tokens_before[b],
                "0: no shards",
            );
        }
        if let Some(pair) = own.windows(2).find(|pair| pair[0] >= pair[1]) {
            return refuse(
                "selected pages",
                format_args!("{} behind {}", pair[1], pair[0]),
                "ascending, each once",
            );
        }
        let count = tokens.div_ceil(page_size);
        if let Some(page) = own.last().filter(|page| **page as usize >= count) {
            return refuse(
                "selected page",
                format_args!("{page} of sequence {b} of the step, which has {count}"),
                "less than the number of the sequence's pages",
            );
        }
        // Keys of the first tile lack another centre than later ones, and codes of 4 bits have residuals there.
        let first = own.len().min(TILE.div_ceil(page_size)).min(count);
        let are_first = own[..first].iter().zip(0u32..).all(|(page, i)| *page == i);
        if !are_first && (config.centres || config.format.window() != Window::None) {
            return refuse(
                "selected pages",
                format_args!(
                    "{:?}… of a cache with centres or of {}",
                    &own[..first],
                    config.format
                ),
                "those of the sequence's first 64 tokens ahead of others; or a cache without centres (CacheConfig::centres) of a format without residuals",
            );
        }
        let run = |page: u32| page * heads as u32 + head as u32;
        let ends = own.last().is_some_and(|page| *page as usize + 1 == count);
        let missing = if ends { count * page_size - tokens } else { 0 };
        let len = own.len() * page_size - missing;
        let residuals = self.selected_residuals(of_all, b, (own, len))?;
        let home = own.iter().map(|page| run(pages[*page as usize]));
        table.pages.push(home.collect());
        table
            .residual_pages
            .push(residuals.into_iter().map(run).collect());
        table.lens.push(len);
        table.sequences.push(of_all.sequences[b] * heads + head);
        Ok(())
    }

    /// Residual pages of selected pages of so many tokens, as a table lists them: of the sequence's first tile, and of its newest pages. Refuses a selection whose newest token
    /// reads others with residuals.
    fn selected_residuals(
        self,
        of_all: &PageTable,
        b: usize,
        (own, len): (&[u32], usize),
    ) -> Result<Vec<u32>, Error> {
        let CacheConfig {
            format, page_size, ..
        } = self.cache().config;
        if format.window() == Window::None {
            return Ok(Vec::new());
        }
        let first = of_all.first_residual_pages.min(own.len());
        let residual = |page: &u32| of_all.residual_page(b, *page as usize);
        let of_first: Vec<u32> = own[..first].iter().filter_map(residual).collect();
        let newest = own[first..].iter().rev();
        let newest = newest.zip((0..of_all.pages[b].len() as u32).rev());
        let newest = newest.take_while(|(page, last)| *page == last);
        let mut of_newest: Vec<u32> = newest.map_while(|(page, _)| residual(page)).collect();
        of_newest.reverse();
        let fine = format.first_residual_token(len.saturating_sub(1)) / page_size;
        let needed = own.len().saturating_sub(fine.max(first));
        if of_first.len() < first || of_newest.len() < needed {
            return refuse(
                "selected pages",
                format_args!("{own:?} of {format}"),
                "with the newest pages of the sequence at the end, whose residuals its newest token reads; or a format without residuals",
            );
        }
        Ok([of_first, of_newest].concat())
    }
}

fn check_len(what: &'static str, given: usize, needed: usize) -> Result<(), Error> {
    match given == needed {
        true => Ok(()),
        false => Err(Error::Length {
            what,
            given,
            needed,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cache::KvCache, format::KvFormat, host_pages::HostPages, problem::Heads};

    /// Kills selections of a shard, whose pages are not the sequence's first ones.
    #[test]
    fn shards_have_no_selected_pages() {
        let config = CacheConfig::builder(KvFormat::INT8, Heads::new(1, 1, 64))
            .centres(false)
            .max_len(128)
            .build();
        let pages = HostPages::new(&config).unwrap();
        let mut cache = KvCache::new(config, Box::new(pages)).unwrap();
        let selected = SelectedPages {
            pages: &[1],
            counts: &[1],
        };
        let refused = |cache: &KvCache| {
            let layer = cache.layer(0).unwrap();
            layer.selected(&[0], selected).err().map(|e| e.to_string())
        };
        cache.begin_shard(0, 1024, &[]).unwrap();
        cache.append(0, &[0.5; 70 * 64], &[0.5; 70 * 64]).unwrap();
        let said = refused(&cache).unwrap();
        assert!(said.contains("1024; allowed: 0: no shards"), "{said}");
        cache.free_sequence(0).unwrap();
        cache.append(0, &[0.5; 70 * 64], &[0.5; 70 * 64]).unwrap();
        assert_eq!(refused(&cache), None);
    }
}
