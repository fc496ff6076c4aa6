//! The numbers that timed caches and queries hold.

/// Deterministic numbers around 0, below 2 in magnitude.
pub fn noise(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 8) as f32 * (1.0 / (1 << 23) as f32) - 1.0
    };
    (0..count).map(|_| next() + next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_repeatable_and_below_2_on_both_sides_of_0() {
        let x = noise(1, 1000);
        assert_eq!(x, noise(1, 1000));
        assert_ne!(x, noise(2, 1000));
        assert!(x.iter().all(|x| x.abs() < 2.0));
        assert!(x.iter().any(|x| *x > 1.0) && x.iter().any(|x| *x < -1.0));
    }
}
