//! How a sequence is cut into tiles, segments and spans (`docs/arithmetic.md`, section 1).

/// Tokens per tile.
pub const TILE: usize = 64;

/// Tiles per segment.
pub const SEGMENT: usize = 4;

/// Segments per span: segments merge inside their span, then the spans merge.
pub const SPAN: usize = 4;

/// Tokens per span: shards of a sequence begin at multiples of it.
pub const SPAN_TOKENS: usize = SPAN * SEGMENT * TILE;

/// Tiles of a sequence of `kv_len` tokens; the last one may be partial.
#[must_use]
pub fn num_tiles(kv_len: usize) -> usize {
    kv_len.div_ceil(TILE)
}

/// Segments of a sequence of `kv_len` tokens.
#[must_use]
pub fn num_segments(kv_len: usize) -> usize {
    num_tiles(kv_len).div_ceil(SEGMENT)
}

/// Spans of a sequence of `kv_len` tokens.
#[must_use]
pub fn num_spans(kv_len: usize) -> usize {
    num_segments(kv_len).div_ceil(SPAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_and_spans_cover_the_sequence() {
        for (kv_len, tiles, segments, spans) in [
            (0, 0, 0, 0),
            (1, 1, 1, 1),
            (256, 4, 1, 1),
            (257, 5, 2, 1),
            (1025, 17, 5, 2),
            (65536, 1024, 256, 64),
            (65537, 1025, 257, 65),
        ] {
            assert_eq!(num_tiles(kv_len), tiles);
            assert_eq!(num_segments(kv_len), segments);
            assert_eq!(num_spans(kv_len), spans);
        }
    }
}
