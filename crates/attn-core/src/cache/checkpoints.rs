//! Checkpoints: points of a sequence at which it keeps the residuals that a sequence truncated to it has.

use super::{CheckpointPage, KvCache};
use crate::cache_config::CacheConfig;

impl KvCache {
    /// Enters the residual pages that a sequence takes with `tokens` more, before these are counted. Gives those that it no longer keeps.
    pub(super) fn enter_residuals(
        &mut self,
        sequence: usize,
        tokens: usize,
        pages: &[u32],
    ) -> Vec<u32> {
        let new = self.new_residual_indices(sequence, tokens).zip(pages);
        let new = new.map(|(home, &page)| CheckpointPage { home, page });
        let new: Vec<_> = new.collect();
        let leaving = self.leaving_residual_pages(sequence, tokens);
        let leaving: Vec<_> = leaving.collect();
        let kept = self.residual_indices(sequence, tokens);
        let first = self.table.first_held(sequence);
        let residuals = &mut self.table.residual_pages[sequence];
        residuals.drain(first..first + leaving.len());
        // A sequence that takes pages for its first tile has no others yet, so that the lists stay in order.
        let is_for_steps = |of: &CheckpointPage| kept.iter().any(|kept| kept.contains(&of.home));
        let (for_steps, of_checkpoints): (Vec<_>, Vec<_>) = new.into_iter().partition(is_for_steps);
        residuals.extend(for_steps.into_iter().map(|of| of.page));
        let (staying, dropped): (Vec<_>, Vec<_>) = leaving
            .into_iter()
            .partition(|of| self.config.keeps_at_checkpoint(of.home));
        let at_checkpoints = &mut self.table.checkpoint_pages[sequence];
        at_checkpoints.extend(staying.into_iter().chain(of_checkpoints));
        dropped.into_iter().map(|of| of.page).collect()
    }

    /// Makes residual pages that a truncated or restored sequence keeps at checkpoints those of its last home pages again, as many as it has between steps.
    pub(super) fn take_up_checkpoints(&mut self, sequence: usize) {
        let CacheConfig {
            format, page_size, ..
        } = self.config;
        let table = &mut self.table;
        let first = table.first_held(sequence);
        let kept = format.residual_pages(page_size, table.lens[sequence], 0);
        let lacking = kept.saturating_sub(table.residual_pages[sequence].len());
        let mut next = table.first_of_last(sequence);
        let (pages, mut taken) = (&mut table.checkpoint_pages[sequence], Vec::new());
        while let Some(last) = pages.pop_if(|last| taken.len() < lacking && last.home + 1 == next) {
            next = last.home;
            taken.push(last.page);
        }
        table.residual_pages[sequence].splice(first..first, taken.into_iter().rev());
    }

    /// Takes the pages at checkpoints of some of a sequence's home pages out of its list, and moves those behind them by as many pages, if these are a multiple of
    /// the checkpoints' distance, so that checkpoints lie there, too; else takes them out as well. Gives those that the sequence has no longer.
    pub(super) fn drop_checkpoints(
        &mut self,
        sequence: usize,
        homes: std::ops::Range<usize>,
    ) -> Vec<u32> {
        let tokens = homes.len() * self.config.page_size;
        let (are_moved, mut dropped) = (tokens.is_multiple_of(self.config.checkpoints), Vec::new());
        self.table.checkpoint_pages[sequence].retain_mut(|kept| {
            if kept.home < homes.start {
                return true;
            }
            let stays = kept.home >= homes.end && are_moved;
            match stays {
                true => kept.home -= homes.len(),
                false => dropped.push(kept.page),
            }
            stays
        });
        dropped
    }

    /// The residual pages that the image of a sequence has for its checkpoints, beside those of the newest tokens, which begin with home page `saved`.
    pub(super) fn checkpoints_before(&self, sequence: usize, saved: usize) -> Vec<CheckpointPage> {
        let table = &self.table;
        let last = table.first_of_last(sequence)..saved;
        let last = last.filter_map(|home| {
            let page = table.residual_page(sequence, home)?;
            Some(CheckpointPage { home, page })
        });
        let all = table.at_checkpoints(sequence).iter().copied().chain(last);
        all.filter(|kept| self.config.keeps_at_checkpoint(kept.home))
            .collect()
    }
}
