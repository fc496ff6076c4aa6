//! Where rows `[tokens, heads, dim]` lie in a slice.

use std::ops::Range;

use crate::{elements::ElementsMut, error::Error};

/// Where rows lie in a slice: the `dim` elements of each are contiguous. No product of the shape's sizes exceeds 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Sequences, tokens of each, heads, dim. Sequences that one token stride reaches are counted as one.
    shape: [usize; 4],
    /// Elements from one sequence, token, head to the next.
    strides: [usize; 3],
}

impl Layout {
    /// Rows side by side.
    ///
    /// # Errors
    /// [`Error::Parameter`] for sizes whose products exceed 64 bits.
    pub fn packed([tokens, heads, dim]: [usize; 3]) -> Result<Self, Error> {
        let shape = [1, tokens, heads, dim];
        let token = heads.saturating_mul(dim);
        check_products(shape, [token, token, dim])?;
        Ok(Layout {
            shape,
            strides: [token, token, dim],
        })
    }

    /// Rows of the same shape, side by side.
    pub fn side_by_side(&self) -> Self {
        let [tokens, heads, dim] = self.shape();
        let token = heads * dim;
        Layout {
            shape: [1, tokens, heads, dim],
            strides: [token, token, dim],
        }
    }

    /// Rows at strides, and the number of elements that the last one ends at.
    pub fn strided(shape: [usize; 4], strides: [usize; 3]) -> Result<(Self, usize), Error> {
        let [sequences, tokens, heads, dim] = shape;
        let refused = || refused(shape, strides, IN_64_BITS);
        check_products(shape, strides)?;
        if shape.contains(&0) {
            return Ok((Layout::packed([sequences * tokens, heads, dim])?, 0));
        }
        let steps = [sequences, tokens, heads].into_iter().zip(strides);
        let mut end = dim;
        for (n, stride) in steps {
            let last = (n - 1).checked_mul(stride);
            end = last
                .and_then(|last| end.checked_add(last))
                .ok_or_else(refused)?;
        }
        let [sequence, token, head] = strides;
        let layout = |shape, strides| Layout { shape, strides };
        let joined = [1, sequences * tokens, heads, dim];
        let layout = if tokens == 1 {
            layout(joined, [sequence, sequence, head])
        } else if sequences == 1 || tokens.checked_mul(token) == Some(sequence) {
            layout(joined, [sequence, token, head])
        } else {
            layout(shape, strides)
        };
        Ok((layout, end))
    }

    /// Whether two rows may share an element: whether a stride is smaller than what lies inside of it.
    pub fn overlaps(&self) -> bool {
        let [sequences, tokens, heads, dim] = self.shape;
        let [sequence, token, head] = self.strides;
        let mut steps = [(sequences, sequence), (tokens, token), (heads, head)];
        steps.sort_unstable_by_key(|(_, stride)| *stride);
        let mut inside = dim;
        // `strided` has seen that the sums do not wrap.
        let overlaps = |(n, stride): (usize, usize)| {
            let found = n > 1 && stride < inside;
            inside += (n - 1) * stride;
            found
        };
        !self.is_empty() && steps.into_iter().any(overlaps)
    }

    /// `[tokens, heads, dim]`.
    pub fn shape(&self) -> [usize; 3] {
        let [sequences, tokens, heads, dim] = self.shape;
        [sequences * tokens, heads, dim]
    }

    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Number of elements of all rows.
    pub fn len(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        self.shape.iter().product()
    }

    /// Where a row begins.
    pub fn at(&self, token: usize, head: usize) -> usize {
        let [sequences, tokens, ..] = self.shape;
        let [s, t, h] = self.strides;
        if sequences == 1 {
            return token * t + head * h;
        }
        token / tokens * s + token % tokens * t + head * h
    }

    /// Elements up to the end of the last row; `strided` has seen that the sums do not wrap.
    pub fn end(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        let [sequences, tokens, heads, dim] = self.shape;
        let [s, t, h] = self.strides;
        (sequences - 1) * s + (tokens - 1) * t + (heads - 1) * h + dim
    }

    /// Elements from one token to the next, where the heads of a token lie side by side and all tokens are equally far apart.
    pub fn token_stride(&self) -> Option<usize> {
        let [sequences, tokens, heads, dim] = self.shape;
        if self.is_empty() || sequences * tokens == 1 && self.has_heads_together() {
            return Some(heads.saturating_mul(dim));
        }
        (sequences == 1 && self.has_heads_together()).then_some(self.strides[1])
    }

    /// The same rows as `[tokens · parts, heads / parts, dim]`; `None` where heads and tokens are not equally far apart, or are not so many.
    pub fn split(&self, parts: usize) -> Option<Self> {
        let [sequences, tokens, heads, dim] = self.shape;
        let [_, token, head] = self.strides;
        let of_part = heads.checked_div(parts).filter(|n| n * parts == heads)?;
        let follow = sequences * tokens <= 1 || sequences == 1 && token == heads * head;
        (parts == 1 || follow || self.is_empty()).then(|| match parts {
            1 => *self,
            _ => Layout {
                shape: [1, sequences * tokens * parts, of_part, dim],
                strides: [of_part * head, of_part * head, head],
            },
        })
    }

    fn has_heads_together(&self) -> bool {
        let [.., heads, dim] = self.shape;
        heads == 1 || self.strides[2] == dim
    }

    /// Whether all rows lie side by side.
    pub fn is_packed(&self) -> bool {
        let [sequences, tokens, heads, dim] = self.shape;
        let follow = sequences == 1 && (tokens == 1 || self.strides[1] == heads * dim);
        self.is_empty() || follow && self.has_heads_together()
    }

    /// The elements of some tokens in the order of rows, as few ranges as they lie in.
    pub fn runs(&self, tokens: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let layout = *self;
        let [_, heads, dim] = layout.shape();
        let packed = layout.is_packed();
        let (steps, row) = match layout.has_heads_together() {
            true => (1, heads * dim),
            false => (heads, dim),
        };
        // Of packed rows all tokens are one run.
        let (first, end) = (tokens.start, tokens.end.max(tokens.start));
        let whole = (packed && !layout.is_empty() && first < end).then(|| {
            let at = first * heads * dim;
            at..at + (end - first) * heads * dim
        });
        let apart = if packed || layout.is_empty() {
            0..0
        } else {
            first..end
        };
        let apart = apart.flat_map(move |token| {
            (0..steps).map(move |head| {
                let at = layout.at(token, head);
                at..at + row
            })
        });
        whole.into_iter().chain(apart)
    }
}

const IN_64_BITS: &str = "rows whose elements a slice of less than 2^64 can hold";

/// Refuses sizes of which some product exceeds 64 bits, also where another size is 0: whoever holds a [`Layout`] may multiply any of them.
fn check_products(shape: [usize; 4], strides: [usize; 3]) -> Result<(), Error> {
    let product = |product: usize, n: usize| product.checked_mul(n.max(1));
    match shape.into_iter().try_fold(1, product) {
        Some(_) => Ok(()),
        None => Err(refused(shape, strides, IN_64_BITS)),
    }
}

/// The refusal of a layout.
pub(crate) fn refused(shape: [usize; 4], strides: [usize; 3], allowed: &'static str) -> Error {
    let [sequences, tokens, heads, dim] = shape;
    let [sequence, token, head] = strides;
    let given = match sequences {
        1 => format!("[{tokens}, {heads}, {dim}] at the strides [{token}, {head}]"),
        _ => format!(
            "[{sequences}, {tokens}, {heads}, {dim}] at the strides [{sequence}, {token}, {head}]"
        ),
    };
    Error::parameter("shape of strided rows", format_args!("{given}"), allowed)
}

/// Writes f32 that lie side by side to rows of this layout, rounded where the elements are 16-bit.
pub(crate) fn scatter(wide: &[f32], to: &mut ElementsMut<'_>, layout: &Layout) {
    let mut rest = wide;
    for run in layout.runs(0..layout.shape()[0]) {
        let (part, behind) = rest.split_at(run.len());
        match to {
            ElementsMut::F32(x) => ElementsMut::F32(&mut x[run]),
            ElementsMut::F16(x) => ElementsMut::F16(&mut x[run]),
            ElementsMut::Bf16(x) => ElementsMut::Bf16(&mut x[run]),
        }
        .write(part);
        rest = behind;
    }
}
