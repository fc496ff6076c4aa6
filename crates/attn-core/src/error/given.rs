//! How errors show values: a caller's text in quotes, numbers without long rows of digits.

use std::fmt;

/// A value that was refused, as an error shows it. [`Error::parameter`](super::Error::parameter) makes it.
///
/// A `&str` is a caller's text: it is quoted, so that spaces and control characters can be seen. What the library itself says of a value comes by
/// [`format_args!`] and is shown as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given(pub(super) String);

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Characters of a caller's text that an error repeats.
const MOST_CHARS: usize = 80;

impl From<&str> for Given {
    fn from(text: &str) -> Self {
        Given(match text.char_indices().nth(MOST_CHARS) {
            None => format!("{text:?}"),
            Some((end, _)) => format!("{:?} and {} more bytes", &text[..end], text.len() - end),
        })
    }
}

impl From<&String> for Given {
    fn from(text: &String) -> Self {
        text.as_str().into()
    }
}

impl From<fmt::Arguments<'_>> for Given {
    fn from(phrase: fmt::Arguments<'_>) -> Self {
        Given(phrase.to_string())
    }
}

impl From<usize> for Given {
    fn from(n: usize) -> Self {
        Given(Count(n).to_string())
    }
}

impl From<i32> for Given {
    fn from(n: i32) -> Self {
        Given(n.to_string())
    }
}

impl From<u32> for Given {
    fn from(n: u32) -> Self {
        (n as usize).into()
    }
}

impl From<f32> for Given {
    fn from(x: f32) -> Self {
        Given(match readable(x.into()) {
            true => x.to_string(),
            false => format!("{x:e}"),
        })
    }
}

impl From<f64> for Given {
    fn from(x: f64) -> Self {
        Given(match readable(x) {
            true => x.to_string(),
            false => format!("{x:e}"),
        })
    }
}

/// Whether a number has few digits without an exponent. NaN and the infinities have none at all.
fn readable(x: f64) -> bool {
    x == 0.0 || !x.is_finite() || (1e-4..1e7).contains(&x.abs())
}

/// A count: digits, or 2^k, 2^k - 1 and 2^k + 1 for the large ones that limits and overflows make.
pub(super) struct Count(pub usize);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Count(n) = *self;
        let power = |n: usize| n.is_power_of_two().then(|| n.trailing_zeros());
        if n < 1 << 24 {
            return n.fmt(f);
        }
        if let Some(k) = power(n) {
            write!(f, "2^{k}")
        } else if let Some(k) = power(n - 1) {
            write!(f, "2^{k} + 1")
        } else if n == usize::MAX {
            write!(f, "2^{} - 1", usize::BITS)
        } else if let Some(k) = power(n + 1) {
            write!(f, "2^{k} - 1")
        } else {
            n.fmt(f)
        }
    }
}

/// A number of things, by the word for one of them.
pub(crate) struct Many(pub usize, pub &'static str);

impl fmt::Display for Many {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Many(n, one) = *self;
        write!(f, "{} {one}{}", Count(n), if n == 1 { "" } else { "s" })
    }
}

/// Where an element lies in what a call was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementIndex {
    /// In rows `[tokens, heads, dim]`; tokens are counted through all sequences of the call.
    Row {
        /// The token.
        token: usize,
        /// The head.
        head: usize,
        /// The dim.
        dim: usize,
    },
    /// In a list.
    Flat(usize),
}

impl ElementIndex {
    /// The element of this index among those of rows `[tokens, heads, dim]`.
    pub(crate) fn of_row(index: usize, [_, heads, dim]: [usize; 3]) -> Self {
        let row = index / dim.max(1);
        ElementIndex::Row {
            token: row / heads.max(1),
            head: row % heads.max(1),
            dim: index % dim.max(1),
        }
    }
}

impl fmt::Display for ElementIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ElementIndex::Row { token, head, dim } => {
                write!(f, "token {token}, head {head}, dim {dim}")
            }
            ElementIndex::Flat(index) => write!(f, "index {index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(given: impl Into<Given>) -> String {
        given.into().0
    }

    #[test]
    fn a_callers_text_is_quoted_and_cut() {
        assert_eq!(shown("int8 "), "\"int8 \"");
        assert_eq!(shown("a\n\u{1b}[0m"), "\"a\\n\\u{1b}[0m\"");
        assert_eq!(
            shown(&"é".repeat(81)),
            format!("\"{}\" and 2 more bytes", "é".repeat(80))
        );
        assert_eq!(shown(format_args!("{} of {}", 3, 4)), "3 of 4");
    }

    #[test]
    fn numbers_are_short() {
        let counts = [
            (0, "0"),
            (1_048_577, "1048577"),
            (1 << 24, "2^24"),
            ((1 << 40) + 1, "2^40 + 1"),
            ((1 << 40) - 1, "2^40 - 1"),
            (10_000_000_000, "10000000000"),
            (usize::MAX, "2^64 - 1"),
        ];
        for (n, text) in counts {
            assert_eq!(shown(n), text);
        }
        for (x, text) in [
            (1e30, "1e30"),
            (f32::MAX, "3.4028235e38"),
            (0.0, "0"),
            (-1e-20, "-1e-20"),
            (0.001, "0.001"),
            (1_048_576.0, "1048576"),
            (f32::NAN, "NaN"),
            (f32::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(shown(x), text);
        }
        assert_eq!(Many(1, "token").to_string(), "1 token");
        assert_eq!(Many(1 << 30, "token").to_string(), "2^30 tokens");
        assert_eq!(shown(1e300), "1e300");
        assert_eq!(shown(0.5f64), "0.5");
    }

    #[test]
    fn an_element_of_rows_has_three_places() {
        let at = ElementIndex::of_row(2 * 3 * 64 + 64 + 5, [4, 3, 64]);
        assert_eq!(at.to_string(), "token 2, head 1, dim 5");
        assert_eq!(ElementIndex::Flat(7).to_string(), "index 7");
    }
}
