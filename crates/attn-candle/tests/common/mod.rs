//! Numbers for tensors.

use attn_conformance::noise::Noise;

/// So many numbers in −1..1, the same on every run: odd multiples of 1/256, which bf16 and f16 hold.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut noise = Noise::new(seed);
    let mut next = || ((noise.bits() >> 56) as f32 - 127.5) / 128.0;
    (0..count).map(|_| next()).collect()
}
