//! Texts that sequences of one KV head hold: tokens of which none is like another text's, or like another token.

use attn_conformance::noise::uniform;
use attn_core::{Error, HeadDim, Heads, KvCache};

pub const DIM: usize = 64;

pub const ONE_HEAD: Heads = Heads {
    q: 1,
    kv: 1,
    dim: HeadDim::same(DIM),
};

/// The values of tokens `from..to` of text `seed`.
pub fn values(seed: usize, from: usize, to: usize) -> Vec<f32> {
    let numbers = uniform(seed as u64, from * DIM..to * DIM);
    numbers.into_iter().map(|x| 4.0 * x).collect()
}

/// Appends tokens of a text to a sequence up to the length `to`.
pub fn grow_to(cache: &mut KvCache, sequence: usize, seed: usize, to: usize) -> Result<(), Error> {
    let from = cache.table().lens[sequence];
    let [k, v] = [seed, seed + 100].map(|seed| values(seed, from, to));
    cache.append(sequence, &k, &v)
}
