//! Elements of a head: of its keys and queries, and of its values and outputs.

use std::{fmt, str::FromStr};

use crate::error::{Error, refuse};

/// Numbers of elements that K or V of a head may have.
pub const HEAD_DIMS: [usize; 10] = [64, 80, 96, 128, 160, 192, 256, 320, 512, 576];

/// The largest of [`HEAD_DIMS`].
pub const MAX_HEAD_DIM: usize = 576;

const ALLOWED: &str = "64, 80, 96, 128, 160, 192, 256, 320, 512, 576; of K and V, where they differ, two of them, such as 192/128";

/// K or V.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Keys.
    K,
    /// Values.
    V,
}

/// Elements of a head, of K and of V. Queries have as many as K, outputs as many as V.
///
/// Written `k/v`, or as one number: `128` means both.
///
/// ```
/// use attn_core::{HeadDim, Heads};
///
/// assert_eq!(HeadDim::from(128), HeadDim { k: 128, v: 128 });
/// assert_eq!("192/128".parse::<HeadDim>()?, HeadDim { k: 192, v: 128 });
/// assert_eq!(Heads::new(64, 4, (192, 128)).dim.to_string(), "192/128");
/// # Ok::<(), attn_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadDim {
    /// Elements of a key and of a query: one of [`HEAD_DIMS`].
    pub k: usize,
    /// Elements of a value and of an output: one of [`HEAD_DIMS`].
    pub v: usize,
}

impl HeadDim {
    /// As many elements for K as for V.
    #[must_use]
    pub const fn same(dim: usize) -> Self {
        HeadDim { k: dim, v: dim }
    }

    /// The elements of one side.
    #[must_use]
    pub const fn of(self, side: Side) -> usize {
        match side {
            Side::K => self.k,
            Side::V => self.v,
        }
    }

    /// The elements of K, then those of V.
    #[must_use]
    pub const fn both(self) -> [usize; 2] {
        [self.k, self.v]
    }

    /// The larger one.
    #[must_use]
    pub fn max(self) -> usize {
        self.k.max(self.v)
    }

    /// The one number of elements that K and V have, where it is one.
    #[must_use]
    pub fn one(self) -> Option<usize> {
        (self.k == self.v).then_some(self.k)
    }

    /// Refuses numbers that the library does not define.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub fn check(self) -> Result<(), Error> {
        match self.both().iter().all(|dim| HEAD_DIMS.contains(dim)) {
            true => Ok(()),
            false => refuse("head_dim", format_args!("{self}"), ALLOWED),
        }
    }
}

impl From<usize> for HeadDim {
    fn from(dim: usize) -> Self {
        HeadDim::same(dim)
    }
}

impl From<(usize, usize)> for HeadDim {
    fn from((k, v): (usize, usize)) -> Self {
        HeadDim { k, v }
    }
}

impl fmt::Display for HeadDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.one() {
            Some(dim) => write!(f, "{dim}"),
            None => write!(f, "{}/{}", self.k, self.v),
        }
    }
}

impl FromStr for HeadDim {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let number = |s: &str| {
            let parsed = s.parse::<usize>();
            parsed.map_err(|_| Error::parameter("head_dim", s, ALLOWED))
        };
        match s.split_once('/') {
            Some((k, v)) => Ok(HeadDim {
                k: number(k)?,
                v: number(v)?,
            }),
            None => Ok(HeadDim::same(number(s)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_the_last() {
        assert_eq!(HEAD_DIMS.last(), Some(&MAX_HEAD_DIM));
        assert!(HEAD_DIMS.is_sorted());
    }

    #[test]
    fn what_is_written_is_read() {
        for k in HEAD_DIMS {
            for v in HEAD_DIMS {
                let dim = HeadDim { k, v };
                assert_eq!(dim.to_string().parse::<HeadDim>().unwrap(), dim);
                dim.check().unwrap();
            }
        }
        for wrong in ["", "/", "128/", "/128", "64/64/64", "-1", "k"] {
            assert!(wrong.parse::<HeadDim>().is_err(), "{wrong}");
        }
        for wrong in [0, 72, 100, 577] {
            assert!(HeadDim { k: wrong, v: 64 }.check().is_err());
            assert!(HeadDim { k: 64, v: wrong }.check().is_err());
        }
    }
}
