//! What the suite itself promises: vectors, accuracy, refusals, and claims that a spoilt backend breaks one by one.

#[path = "../common/vectors.rs"]
mod golden;
#[path = "../common/layers.rs"]
mod layers;

mod accuracy;
mod bounds;
mod by_hand;
mod centres;
mod claims;
mod errors;
mod foreign;
mod latents;
mod matrix;
mod one_or_many;
mod ranges;
mod third_party;
mod vectors;
mod weights;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors");
