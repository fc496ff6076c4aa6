//! Numbers in host memory, in the types that models use.

use std::borrow::Cow;

use half::{bf16, f16, slice::HalfFloatSliceExt};

use crate::error::{Error, filled};

/// Numbers to read: f32, f16 or bf16.
///
/// Slices, arrays and vectors of the three types convert into it. 16-bit numbers are widened to f32, which is exact.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Elements<'a> {
    /// 32-bit IEEE numbers.
    F32(&'a [f32]),
    /// 16-bit IEEE numbers.
    F16(&'a [f16]),
    /// The upper halves of f32.
    Bf16(&'a [bf16]),
}

/// Numbers to write: f32, f16 or bf16.
///
/// Slices, arrays and vectors of the three types convert into it. Results are f32, rounded to 16 bits to nearest, ties to even.
#[derive(Debug)]
#[non_exhaustive]
pub enum ElementsMut<'a> {
    /// 32-bit IEEE numbers.
    F32(&'a mut [f32]),
    /// 16-bit IEEE numbers.
    F16(&'a mut [f16]),
    /// The upper halves of f32.
    Bf16(&'a mut [bf16]),
}

impl<'a> Elements<'a> {
    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Elements::F32(x) => x.len(),
            Elements::F16(x) => x.len(),
            Elements::Bf16(x) => x.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The numbers as f32; a copy where they are not.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] naming `what`.
    pub fn widened(self, what: &'static str) -> Result<Cow<'a, [f32]>, Error> {
        let mut wide = match self {
            Elements::F32(x) => return Ok(Cow::Borrowed(x)),
            _ => filled(what, self.len(), 0.0f32)?,
        };
        match self {
            Elements::F32(_) => {}
            Elements::F16(x) => x.convert_to_f32_slice(&mut wide),
            Elements::Bf16(x) => wide.iter_mut().zip(x).for_each(|(w, x)| *w = x.to_f32()),
        }
        Ok(Cow::Owned(wide))
    }
}

impl ElementsMut<'_> {
    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            ElementsMut::F32(x) => x.len(),
            ElementsMut::F16(x) => x.len(),
            ElementsMut::Bf16(x) => x.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes f32, rounded where the elements are 16-bit.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn write(&mut self, wide: &[f32]) {
        assert_eq!(self.len(), wide.len(), "as many elements as results");
        match self {
            ElementsMut::F32(x) => x.copy_from_slice(wide),
            ElementsMut::F16(x) => {
                let pairs = x.iter_mut().zip(wide);
                pairs.for_each(|(x, w)| *x = f16::from_f32(*w));
            }
            ElementsMut::Bf16(x) => {
                let pairs = x.iter_mut().zip(wide);
                pairs.for_each(|(x, w)| *x = bf16::from_f32(*w));
            }
        }
    }
}

macro_rules! conversions {
    ($element:ty, $variant:ident) => {
        impl<'a> From<&'a [$element]> for Elements<'a> {
            fn from(x: &'a [$element]) -> Self {
                Elements::$variant(x)
            }
        }
        impl<'a, const N: usize> From<&'a [$element; N]> for Elements<'a> {
            fn from(x: &'a [$element; N]) -> Self {
                Elements::$variant(x)
            }
        }
        impl<'a> From<&'a Vec<$element>> for Elements<'a> {
            fn from(x: &'a Vec<$element>) -> Self {
                Elements::$variant(x)
            }
        }
        impl<'a> From<&'a mut [$element]> for ElementsMut<'a> {
            fn from(x: &'a mut [$element]) -> Self {
                ElementsMut::$variant(x)
            }
        }
        impl<'a, const N: usize> From<&'a mut [$element; N]> for ElementsMut<'a> {
            fn from(x: &'a mut [$element; N]) -> Self {
                ElementsMut::$variant(x)
            }
        }
        impl<'a> From<&'a mut Vec<$element>> for ElementsMut<'a> {
            fn from(x: &'a mut Vec<$element>) -> Self {
                ElementsMut::$variant(x)
            }
        }
    };
}

conversions!(f32, F32);
conversions!(f16, F16);
conversions!(bf16, Bf16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_numbers_are_widened_exactly_and_results_rounded_to_nearest_even() {
        let halves = [f16::from_f32(-1.5), f16::MAX];
        let wide = Elements::from(&halves).widened("x").unwrap();
        assert_eq!(wide[..], [-1.5, 65504.0]);
        let brains = vec![bf16::from_f32(0.125), bf16::MIN];
        let wide = Elements::from(&brains).widened("x").unwrap();
        assert_eq!(wide[..], [0.125, bf16::MIN.to_f32()]);
        assert!(matches!(
            Elements::from(&[1.0f32]).widened("x").unwrap(),
            Cow::Borrowed(_)
        ));
        // Halfway between two bf16 numbers: the even one.
        let results = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -2.0];
        let mut brains = [bf16::ZERO; 3];
        ElementsMut::from(&mut brains).write(&results);
        assert_eq!(brains.map(bf16::to_f32), [1.0, 1.015_625, -2.0]);
        let mut halves = [f16::ZERO; 3];
        ElementsMut::from(&mut halves).write(&results);
        assert_eq!(halves.map(f16::to_f32), results);
    }
}
