//! Repeatable numbers for tests: the one generator, splitmix64, and what is drawn from it.

use std::ops::Range;

/// What splitmix64 adds to its state for each number.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The number that splitmix64 makes of a state: each bit of the state moves about half of its bits.
#[must_use]
pub fn mix(state: u64) -> u64 {
    let mut z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// A sequence of numbers, which its seed determines.
///
/// ```
/// use attn_conformance::noise::Noise;
///
/// let mut noise = Noise::new(7);
/// let sizes: Vec<usize> = (0..100).map(|_| 1 + noise.below(9)).collect();
/// assert!(sizes.iter().all(|size| (1..=9).contains(size)));
/// ```
#[derive(Debug, Clone)]
pub struct Noise(u64);

impl Noise {
    /// The sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Noise(seed)
    }

    /// The sequence of a case's inputs.
    pub(crate) fn of_case(seed: u64) -> Self {
        Noise(seed.wrapping_mul(STEP))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// The next number in −1..1, a multiple of 2⁻²³.
    pub fn unit(&mut self) -> f32 {
        unit(self.bits())
    }

    /// The next index below `n`.
    ///
    /// # Panics
    /// If `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// One of several values.
    ///
    /// # Panics
    /// If there are none.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// The number in −1..1 that 64 bits stand for.
pub(crate) fn unit(bits: u64) -> f32 {
    (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// The number at a place of a seed's sequence, in −1..1: what [`Noise::unit`] gives there.
#[must_use]
pub fn at(seed: u64, place: usize) -> f32 {
    let steps = (place as u64).wrapping_add(1);
    unit(mix(seed.wrapping_add(STEP.wrapping_mul(steps))))
}

/// The numbers at these places of a seed's sequence, in −1..1, however the sequence is cut.
///
/// ```
/// use attn_conformance::noise::uniform;
///
/// let whole = uniform(3, 0..100);
/// assert_eq!(whole[40..], uniform(3, 40..100));
/// ```
#[must_use]
pub fn uniform(seed: u64, places: Range<usize>) -> Vec<f32> {
    places.map(|place| at(seed, place)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_splitmix64() {
        // The first numbers of seed 1234567, as the algorithm's authors' program prints them.
        let mut noise = Noise::new(1_234_567);
        let first = [(); 3].map(|()| noise.bits());
        assert_eq!(
            first,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn a_place_has_its_number_however_the_sequence_is_cut() {
        let mut noise = Noise::new(9);
        let one_by_one: Vec<f32> = (0..50).map(|_| noise.unit()).collect();
        for cut in [0, 1, 17, 50] {
            let parts = [uniform(9, 0..cut), uniform(9, cut..50)].concat();
            assert_eq!(parts, one_by_one, "{cut}");
        }
    }

    #[test]
    fn numbers_fill_minus_one_to_one_and_differ_between_seeds() {
        let x = uniform(1, 0..10_000);
        assert!(x.iter().all(|x| (-1.0..1.0).contains(x)));
        assert!(x.iter().any(|x| *x < -0.99) && x.iter().any(|x| *x > 0.99));
        let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / 1e4;
        assert!(mean.abs() < 0.03, "{mean}");
        // No other seed's numbers are these, shifted.
        let other = uniform(2, 0..10_000);
        let start = &x[..4];
        assert!(!other.windows(4).any(|part| part == start));
    }

    #[test]
    fn every_index_below_a_bound_is_drawn() {
        let mut noise = Noise::new(5);
        let mut seen = [false; 7];
        (0..200).for_each(|_| seen[noise.below(7)] = true);
        assert_eq!(seen, [true; 7]);
        assert!([3, 8].contains(&noise.pick(&[3, 8])));
    }
}
