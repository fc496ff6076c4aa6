//! Estimated times of wide rows, in microseconds on an H200: whether `many_rows.cu` or `split_kv.cu` attends them faster. Both read the cache once for each block of
//! rows, whose sizes differ; memory binds neither but where rows are few.

use attn_core::{Problem, arithmetic, segments::num_spans};

use super::split::{longest, rows};

/// What a launch over row blocks takes but for its tiles, and a tile of 1088 dims of K and V together: of `split_kv.cu`, whose CTAs attend so many rows as
/// registers leave them.
const SPLIT_ROWS_US: f64 = 9.0;
const SPLIT_ROWS_TILE_US: f64 = 2.9;
/// The time of a segment's tiles and of merging segments, where work is so little that CTAs share spans.
const SPLIT_SEGMENT_US: f64 = 22.0;
/// The same of wide rows in `many_rows.cu`: a launch, and a tile, of which a part depends on no dims; where all SMs read at once a tile takes longer.
const WIDE_US: f64 = 14.0;
const WIDE_TILE_US: f64 = 0.5;
const WIDE_DIMS_US: f64 = 1.5;
const WIDE_CROWDED: f64 = 1.15;
const TILE_DIMS: f64 = 1088.0;

/// Estimated times of row blocks of unlike kernels over the same cache: `kernels/README.md` ("Estimated times") has the measurements.
pub(crate) struct RowBlocks {
    spans: usize,
    /// Tiles of the longest span.
    tiles: f64,
    rows: usize,
    /// Elements of K and V, in those that the constants count.
    dims: f64,
    sms: usize,
}

impl RowBlocks {
    pub(crate) fn new(problem: &Problem, sms: usize) -> Self {
        let spans: usize = problem.kv_lens.iter().map(|&len| num_spans(len)).sum();
        let tiles = longest(problem).div_ceil(arithmetic::TILE);
        RowBlocks {
            spans: spans.saturating_mul(problem.num_kv_heads),
            tiles: tiles.min(arithmetic::SEGMENT * arithmetic::SPAN) as f64,
            rows: rows(problem),
            dims: (problem.head_dim.k + problem.head_dim.v) as f64 / TILE_DIMS,
            sms,
        }
    }

    /// Spans of so many rows that a CTA attends one after the other, as far as one has more than others.
    fn waves(&self, rows: usize) -> (usize, f64) {
        let units = self.spans.saturating_mul(self.rows.div_ceil(rows));
        (units, units.div_ceil(self.sms.max(1)) as f64)
    }

    /// Time of `split_kv.cu`, whose CTAs have so many rows.
    pub(crate) fn split_kv_us(&self, rows: usize) -> f64 {
        let (units, waves) = self.waves(rows);
        match 3 * units < self.sms {
            true => SPLIT_ROWS_US + SPLIT_SEGMENT_US * self.dims,
            false => SPLIT_ROWS_US + waves * self.tiles * SPLIT_ROWS_TILE_US * self.dims,
        }
    }

    /// Time of wide rows in `many_rows.cu`, whose CTAs have so many.
    pub(crate) fn wide_us(&self, rows: usize) -> f64 {
        let (units, waves) = self.waves(rows);
        let tile = WIDE_TILE_US + WIDE_DIMS_US * self.dims;
        let crowded = if units < self.sms { 1.0 } else { WIDE_CROWDED };
        WIDE_US + waves * self.tiles * tile * crowded
    }
}
