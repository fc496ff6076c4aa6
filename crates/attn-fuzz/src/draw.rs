//! What fuzzers draw from an input: ranges, choices, hostile numbers.
//!
//! An input that is used up gives zeros, which `arbitrary` promises for numbers; so drawing cannot fail.

use std::ops::RangeInclusive;

use arbitrary::Unstructured;
use attn_conformance::noise::Noise;
use attn_core::{HeadDim, KvFormat, Scheme, Window};

/// The bytes of the input of `seed`: up to 4 KiB, shorter ones more often.
pub fn input(seed: u64) -> Vec<u8> {
    let mut noise = Noise::new(seed);
    let len = 16usize << noise.below(9);
    let words = (0..len / 8).map(|_| noise.bits());
    words.flat_map(u64::to_le_bytes).collect()
}

/// Draws from an input.
pub struct Draw<'a, 'b>(pub &'a mut Unstructured<'b>);

impl Draw<'_, '_> {
    /// Any 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.arbitrary().unwrap_or(0)
    }

    /// A number of a range.
    pub fn range(&mut self, range: RangeInclusive<usize>) -> usize {
        let least = *range.start();
        self.0.int_in_range(range).unwrap_or(least)
    }

    /// True about once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.range(1..=n) == n
    }

    /// One of several values.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.range(0..=of.len() - 1)]
    }

    /// A size at which products and sums overflow, or one near a limit, or a small one.
    pub fn size(&mut self) -> usize {
        const EDGES: [usize; 14] = [
            0,
            1,
            2,
            64,
            128,
            1 << 16,
            1 << 20,
            1 << 31,
            1 << 32,
            1 << 40,
            1 << 53,
            1 << 62,
            1 << 63,
            usize::MAX,
        ];
        match self.range(0..=3) {
            0 => self.range(0..=300),
            1 => self.pick(&EDGES),
            2 => self
                .pick(&EDGES)
                .wrapping_add(self.range(0..=4))
                .wrapping_sub(2),
            _ => self.bits() as usize >> self.range(0..=63),
        }
    }

    /// An ordinary number of magnitude up to 4.
    pub fn small(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 * 4.0 - 4.0
    }

    /// Any f32: NaN, infinities, subnormals, extremes, ordinary ones.
    pub fn float(&mut self) -> f32 {
        const EDGES: [f32; 16] = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            f32::MAX,
            f32::MIN,
            f32::MIN_POSITIVE,
            1e-45,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            65504.0,
            65520.0,
            1e20,
            -1e30,
            1e-20,
        ];
        match self.range(0..=3) {
            0 => self.pick(&EDGES),
            1 => f32::from_bits(self.bits() as u32),
            _ => self.small(),
        }
    }

    /// `n` ordinary numbers of magnitude up to `largest`, from one seed of the input.
    pub fn noise(&mut self, n: usize, largest: f32) -> Vec<f32> {
        let mut noise = Noise::new(self.bits());
        (0..n).map(|_| noise.unit() * largest).collect()
    }

    /// `n` bytes, from one seed of the input.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut noise = Noise::new(self.bits());
        let words = (0..n.div_ceil(8)).map(|_| noise.bits());
        let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        bytes.truncate(n);
        bytes
    }

    /// A scheme; of the rotated 4-bit ones, any groups and any window.
    pub fn scheme(&mut self) -> Scheme {
        match self.pick(&Scheme::ALL) {
            Scheme::RotatedInt4 { .. } => Scheme::RotatedInt4 {
                groups: self.pick(&[1, 1, 2, 4, 8]),
                window: self.pick(&[Window::Two, Window::Two, Window::None, Window::Four]),
            },
            other => other,
        }
    }

    /// Elements of K and of V of a head, in two of five draws unlike. Most are few, since the time that an input takes grows with them.
    pub fn head_dim(&mut self) -> HeadDim {
        const UNLIKE: [(usize, usize); 10] = [
            (64, 80),
            (64, 128),
            (64, 192),
            (80, 64),
            (80, 128),
            (96, 64),
            (128, 64),
            (128, 80),
            (192, 128),
            (256, 64),
        ];
        const LARGE: [(usize, usize); 6] = [
            (512, 512),
            (576, 512),
            (512, 64),
            (64, 512),
            (576, 80),
            (80, 576),
        ];
        let some = [64, 80, 96, 128, 160, 192, 256, 320];
        match self.range(0..=39) {
            0..=18 => self.pick(&[64, 64, 80, 128]).into(),
            19..=32 => self.pick(&UNLIKE).into(),
            33..=35 => self.pick(&some).into(),
            36..=38 => (self.pick(&some), self.pick(&some)).into(),
            _ => self.pick(&LARGE).into(),
        }
    }

    /// A format of a cache: a pair of schemes, or now and then latents, whether these are defined or not.
    pub fn cache_format(&mut self) -> KvFormat {
        if !self.once_in(8) {
            return self.format();
        }
        let scheme = self.scheme();
        KvFormat {
            latents: true,
            ..KvFormat::same(scheme)
        }
    }

    /// A pair of schemes.
    pub fn format(&mut self) -> KvFormat {
        KvFormat::new(self.scheme(), self.scheme())
    }
}
