//! How a sequence is cut into tiles, segments and spans (`docs/arithmetic.md`, section 1): by its length alone.

/// Tokens per tile.
pub const TILE: usize = 64;

/// Segments per span: segments merge inside their span, then the spans merge.
pub const SPAN: usize = 4;

/// Tiles of a sequence of `kv_len` tokens; the last one may be partial.
#[must_use]
pub fn num_tiles(kv_len: usize) -> usize {
    kv_len.div_ceil(TILE)
}

/// Tiles per segment of a sequence of `kv_len` tokens.
#[must_use]
pub fn segment_tiles(kv_len: usize) -> usize {
    num_tiles(kv_len).div_ceil(256).next_power_of_two().max(4)
}

/// Tokens per segment of a sequence of `kv_len` tokens.
#[must_use]
pub fn segment_tokens(kv_len: usize) -> usize {
    segment_tiles(kv_len) * TILE
}

/// Segments of a sequence of `kv_len` tokens.
#[must_use]
pub fn num_segments(kv_len: usize) -> usize {
    num_tiles(kv_len).div_ceil(segment_tiles(kv_len))
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
    fn segments_follow_kv_len_alone() {
        let tiles: Vec<_> = [1, 256, 65536, 65537, 131_072, 262_145, 1 << 20]
            .map(segment_tiles)
            .into();
        assert_eq!(tiles, [4, 4, 4, 8, 8, 32, 64]);
    }

    #[test]
    fn segments_and_spans_cover_the_sequence() {
        for (kv_len, tiles, segments, spans) in [
            (0, 0, 0, 0),
            (1, 1, 1, 1),
            (256, 4, 1, 1),
            (257, 5, 2, 1),
            (1025, 17, 5, 2),
            (65536, 1024, 256, 64),
            (65537, 1025, 129, 33),
        ] {
            assert_eq!(num_tiles(kv_len), tiles);
            assert_eq!(num_segments(kv_len), segments);
            assert_eq!(
                num_segments(kv_len),
                kv_len.div_ceil(segment_tokens(kv_len))
            );
            assert_eq!(num_spans(kv_len), spans);
        }
    }
}
