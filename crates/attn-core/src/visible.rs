//! Which cached tokens the query tokens of a problem see: positions, causality, windows, and the first tile that a backend reads.

use crate::{format::KvFormat, problem::Problem, segments::TILE};

impl Problem {
    /// The position of query token `i` of sequence `b`; negative where it stands before the sequence.
    ///
    /// # Panics
    /// If the problem has no sequence `b`.
    #[must_use]
    pub fn position(&self, b: usize, i: usize) -> isize {
        // Checked lengths are far below 2^30.
        let signed = |x: usize| x.min(1 << 30) as isize;
        signed(self.kv_lens[b]) + signed(self.after(b)) - signed(self.q_lens[b]) + signed(i)
    }

    /// Tokens of sequence b that lie ahead of the cached ones, in other shards.
    #[must_use]
    pub fn before(&self, b: usize) -> usize {
        self.tokens_before.get(b).copied().unwrap_or(0)
    }

    /// Tokens of sequence b that follow the cached ones, in other shards.
    #[must_use]
    pub fn after(&self, b: usize) -> usize {
        self.tokens_after.get(b).copied().unwrap_or(0)
    }

    /// Cached and following tokens of sequence b: its query tokens are the last ones of these.
    pub(crate) fn all_tokens(&self, b: usize) -> usize {
        self.kv_lens[b].saturating_add(self.after(b))
    }

    /// The first token that any of the last `q_len` tokens, at least one, of a sequence of `kv_len` sees; 0 where some stand before the sequence.
    pub(crate) fn first_seen(&self, q_len: usize, kv_len: usize) -> usize {
        let position = kv_len.saturating_sub(q_len).min(1 << 30) as isize;
        self.scores.first_position(position).max(0) as usize
    }

    /// For backends: the first token of the first tile of which any of the last `q_len` tokens, at least one, of a sequence of `kv_len` sees some token.
    #[must_use]
    pub fn first_seen_tile(&self, q_len: usize, kv_len: usize) -> usize {
        self.first_seen(q_len, kv_len) / TILE * TILE
    }

    /// For backends: whether query tokens of sequence `b` see its first tile, which formats with a window then read with residuals, whatever their
    /// positions are.
    ///
    /// # Panics
    /// If the problem has no sequence `b`.
    #[must_use]
    pub fn reads_first_tile(&self, b: usize) -> bool {
        let q_len = self.q_lens[b];
        q_len > 0 && self.before(b) == 0 && self.first_seen_tile(q_len, self.all_tokens(b)) == 0
    }

    /// For backends: the first token of the first tile that they read with residuals for its place in the window; the sequence's first tile may
    /// come beside it ([`Problem::reads_first_tile`]).
    #[must_use]
    pub fn first_residual_read(&self, format: KvFormat, q_len: usize, kv_len: usize) -> usize {
        let rows = if self.scores.causal { q_len } else { 1 };
        let fine = format.first_residual_token(kv_len.saturating_sub(rows));
        fine.max(self.first_seen_tile(q_len, kv_len))
    }

    /// Tokens that query token `i` of sequence `b` sees: `start..end`.
    ///
    /// # Panics
    /// If the problem has no sequence `b`.
    #[must_use]
    pub fn visible(&self, b: usize, i: usize) -> std::ops::Range<usize> {
        // Checked lengths are far below 2^30.
        let signed = |x: usize| x.min(1 << 30) as isize;
        let len = signed(self.kv_lens[b]);
        let position = self.position(b, i);
        let end = if self.scores.causal {
            (position + 1).clamp(0, len)
        } else {
            len
        };
        let start = self.scores.first_position(position).clamp(0, end);
        start as usize..end as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Heads;

    #[test]
    fn a_token_sees_its_own_chunk() {
        let mut p = Problem::new(Heads::new(1, 1, 64), vec![10, 2]).q_len(4);
        for (chunk, seen) in [
            (1, 6..7),
            (4, 4..7),
            (6, 6..7),
            (7, 0..7),
            (usize::MAX, 0..7),
        ] {
            p.scores.chunk = Some(chunk);
            assert_eq!(p.visible(0, 0), seen, "{chunk}");
        }
        p.scores.chunk = Some(8);
        assert_eq!(
            [0, 1, 2, 3].map(|i| p.visible(0, i)),
            [0..7, 0..8, 8..9, 8..10]
        );
        assert_eq!([p.visible(1, 0), p.visible(1, 2)], [0..0, 0..1]);
        // The nearer of chunk and window hides.
        p.scores.window_left = Some(2);
        assert_eq!(
            [0, 1, 2, 3].map(|i| p.visible(0, i)),
            [4..7, 5..8, 8..9, 8..10]
        );
        p.scores.chunk = Some(0);
        assert!(p.check().is_err());
        p.scores.chunk = Some(64);
        assert!(p.check().is_ok());
        assert!(p.tokens_before([1024, 0]).check().is_err());
    }

    #[test]
    fn windows_of_any_size_see_what_they_should() {
        let mut p = Problem::new(Heads::new(1, 1, 64), vec![10, 2, 0]).q_len(4);
        for (window, seen) in [(0, 6..7), (2, 4..7), (6, 0..7), (usize::MAX >> 1, 0..7)] {
            p.scores.window_left = Some(window);
            assert_eq!(p.visible(0, 0), seen, "{window}");
        }
        for window in [usize::MAX, isize::MAX as usize, isize::MAX as usize + 1] {
            p.scores.window_left = Some(window);
            assert_eq!(p.visible(0, 3), 0..10);
            // The first two query tokens stand before the sequence.
            assert_eq!([p.visible(1, 0), p.visible(1, 2)], [0..0, 0..1]);
            assert_eq!(p.visible(2, 3), 0..0);
        }
    }
}
