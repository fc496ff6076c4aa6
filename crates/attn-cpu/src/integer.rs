//! The two products of the integer arithmetic of a tile for a block of query rows; `blocks.rs` goes through the blocks.
//!
//! Rows go in blocks that share each loaded vector of codes; an accumulator holds four partial sums per token (of K) or dim
//! (of V), which meet once per tile. Many rows read a tile that [`crate::lanes`] has unpacked, whose sums stay in their lanes.
mod scores;
mod values;

pub(crate) use scores::scores;
pub(crate) use values::{values, values_of_lanes};
