//! Numbers for tensors.

/// So many numbers in −1..1, the same on every run: odd multiples of 1/256, which bf16 and f16 hold.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 56) as f32 - 127.5) / 128.0
    };
    (0..count).map(|_| next()).collect()
}
