//! Prefetches: which tile a thread reads next, and its lines, spread over the work on the tile at hand.

use attn_core::{
    StepInputs,
    segments::{SEGMENT, TILE},
};

use crate::{
    reader::Reader,
    simd::Simd,
    split::{Split, SplitInputs, TilePlace},
};

/// Prefetches the next tile's pages into L2 while the current tile is computed: line by line in the order of addresses, spread over the
/// tile's work. Measured on a Zen 4 (ctx 8192, one thread): without requests 2.28 ms, so 1.56, in bursts 1.60 to 1.96, every second line 2.13,
/// into L1 1.77 for 1.45.
pub(crate) struct Fetch {
    runs: [(*const u8, usize); 4],
    count: usize,
    run: usize,
    offset: usize,
    per_step: usize,
}

impl Fetch {
    const CHUNK: usize = 256;

    pub const fn new() -> Self {
        Fetch {
            runs: [(std::ptr::null(), 0); 4],
            count: 0,
            run: 0,
            offset: 0,
            per_step: 0,
        }
    }

    /// Aims at the pages of the tile at `t0`; views have none.
    #[inline(always)]
    pub fn aim(&mut self, reader: &Reader<'_>, t0: usize, tokens: usize) {
        (self.count, self.run, self.offset) = (0, 0, 0);
        let page_size = reader.page_end(0);
        // The second half of a page of 128 tokens is fetched with the first.
        if !reader.is_paged() || t0 & (page_size - 1) != 0 {
            return;
        }
        for t in (t0..t0 + tokens).step_by(page_size) {
            let run = reader.run(t);
            self.runs[self.count] = (run.as_ptr(), run.len());
            self.count += 1;
        }
    }

    /// Aims at nothing.
    pub fn idle(&mut self) {
        (self.count, self.run, self.offset) = (0, 0, 0);
    }

    /// Spreads the prefetches over so many steps.
    #[inline(always)]
    pub fn spread(&mut self, steps: usize) {
        let chunks: usize = self.runs[..self.count]
            .iter()
            .map(|(_, len)| len.div_ceil(Self::CHUNK))
            .sum();
        self.per_step = chunks.div_ceil(steps.max(1));
    }

    #[inline(always)]
    pub fn step<S: Simd>(&mut self, s: S) {
        for _ in 0..self.per_step {
            if self.run == self.count {
                return;
            }
            let (run, len) = self.runs[self.run];
            for line in 0..4 {
                s.prefetch(run.wrapping_add(self.offset + 64 * line));
            }
            self.offset += Self::CHUNK;
            if self.offset >= len {
                (self.run, self.offset) = (self.run + 1, 0);
            }
        }
    }
}

/// Where the thread reads next, for prefetching: the tiles of its split, then the first tile of the split after it, which the same
/// thread most likely takes.
pub(crate) struct Ahead<'a> {
    /// The end of this split's tokens that any query row sees.
    pub last: usize,
    pub kv_len: usize,
    pub following: Option<(Reader<'a>, TilePlace)>,
}

impl<'a> Ahead<'a> {
    #[inline(always)]
    pub fn new(step: &StepInputs<'a>, inputs: &SplitInputs<'_>, next: Option<&Split>) -> Self {
        let segment_tokens = SEGMENT * TILE;
        let following = next.and_then(|next| {
            let reader = Reader::new(step.kv(), next.block.sequence, next.g).ok()?;
            let (problem, b) = (inputs.problem, next.block.sequence);
            let kv_len = problem.kv_lens[b];
            // Its first query token sees furthest back; pages before that may have been dropped.
            let seen = problem.visible(b, next.block.queries(problem).start);
            let t0 = (next.segments.start * SEGMENT).max(seen.start / TILE) * TILE;
            let tokens = TILE.min(kv_len.checked_sub(t0)?);
            Some((reader, TilePlace { t0, tokens }))
        });
        Ahead {
            last: inputs
                .seen
                .end
                .min(inputs.split.segments.end * segment_tokens),
            kv_len: inputs.kv_len,
            following,
        }
    }

    /// Aims the prefetches at the tile behind `tile`.
    #[inline(always)]
    pub fn aim(&self, fetch: &mut Fetch, reader: &Reader<'_>, tile: TilePlace) {
        let t0 = tile.t0 + TILE;
        match &self.following {
            _ if t0 < self.last => fetch.aim(reader, t0, TILE.min(self.kv_len - t0)),
            Some((reader, tile)) => fetch.aim(reader, tile.t0, tile.tokens),
            None => fetch.idle(),
        }
    }
}
