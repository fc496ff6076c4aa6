//! Rows in f32, as backends read and write them: the caller's own memory, wherever that is f32.

use std::{borrow::Cow, ops::Range};

use crate::{
    elements::ElementsMut,
    error::{ElementIndex, Error, filled, first, reserve},
    format::Scheme,
    row_layout::{Layout, scatter},
};

/// For backends: rows `[tokens, heads, dim]` of f32 to read, side by side or at strides.
#[derive(Debug, Clone, Copy)]
pub struct WideRows<'a> {
    x: &'a [f32],
    layout: Layout,
}

/// For backends: rows `[tokens, heads, dim]` of f32 to write, side by side or at strides. No two share an element.
#[derive(Debug)]
pub struct WideRowsMut<'a> {
    x: &'a mut [f32],
    layout: Layout,
}

/// Rows in f32: the caller's, or a copy that lies side by side.
#[derive(Clone)]
pub(crate) struct Widened<'a> {
    x: Cow<'a, [f32]>,
    layout: Layout,
}

impl<'a> Widened<'a> {
    pub fn in_place(x: &'a [f32], layout: Layout) -> Self {
        let x = Cow::Borrowed(x);
        Widened { x, layout }
    }

    pub fn own(x: Vec<f32>, layout: Layout) -> Self {
        let x = Cow::Owned(x);
        Widened { x, layout }
    }

    pub fn into_packed(self, what: &'static str) -> Result<Vec<f32>, Error> {
        if let Cow::Owned(own) = self.x {
            return Ok(own);
        }
        let (rows, mut copy) = (self.rows(), Vec::new());
        reserve(what, &mut copy, rows.len())?;
        rows.runs().for_each(|(_, run)| copy.extend_from_slice(run));
        Ok(copy)
    }

    pub fn rows(&self) -> WideRows<'_> {
        WideRows {
            x: &self.x,
            layout: self.layout,
        }
    }
}

impl<'a> WideRows<'a> {
    /// Rows that lie side by side.
    ///
    /// # Errors
    /// [`Error::Length`] for another number of elements than the shape's; [`Error::Parameter`] for sizes whose products exceed 64 bits.
    pub fn new(x: &'a [f32], shape: [usize; 3]) -> Result<Self, Error> {
        let layout = Layout::packed(shape)?;
        if x.len() != layout.len() {
            return Err(Error::Length {
                what: "rows",
                given: x.len(),
                needed: layout.len(),
            });
        }
        Ok(WideRows { x, layout })
    }

    /// `[tokens, heads, dim]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 3] {
        self.layout.shape()
    }

    /// Number of elements of all rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layout.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layout.is_empty()
    }

    /// The `dim` elements of one row.
    ///
    /// # Panics
    /// May panic for a token or a head that the shape lacks.
    #[must_use]
    #[inline]
    pub fn row(&self, token: usize, head: usize) -> &'a [f32] {
        let [.., dim] = self.layout.shape();
        &self.x[self.layout.at(token, head)..][..dim]
    }

    /// All rows as one slice, where they lie side by side.
    #[must_use]
    pub fn contiguous(&self) -> Option<&'a [f32]> {
        let packed = self.layout.is_packed();
        packed.then(|| &self.x[..self.layout.len()])
    }

    /// Some tokens' rows side by side; a copy where they are not.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] for the copy.
    ///
    /// # Panics
    /// If the range ends beyond the tokens.
    pub fn packed(&self, tokens: Range<usize>) -> Result<Cow<'a, [f32]>, Error> {
        let [all, heads, dim] = self.shape();
        assert!(tokens.end <= all, "the rows have {all} tokens");
        let mut runs = self.layout.runs(tokens.clone());
        let first = runs.next().map_or(&[][..], |run| &self.x[run]);
        let needed = tokens.len() * heads * dim;
        if first.len() == needed {
            return Ok(Cow::Borrowed(first));
        }
        let mut copy = Vec::new();
        reserve("rows side by side", &mut copy, needed)?;
        copy.extend_from_slice(first);
        runs.for_each(|run| copy.extend_from_slice(&self.x[run]));
        Ok(Cow::Owned(copy))
    }

    /// The rows of some ranges of tokens side by side, range after range; a copy where they are not.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] for the copy.
    ///
    /// # Panics
    /// If a range ends beyond the tokens.
    pub fn gathered(&self, ranges: &[Range<usize>]) -> Result<Cow<'a, [f32]>, Error> {
        if let [one] = ranges {
            return self.packed(one.clone());
        }
        let [_, heads, dim] = self.shape();
        let tokens: usize = ranges.iter().map(|range| range.len()).sum();
        let mut copy = Vec::new();
        reserve("rows side by side", &mut copy, tokens * heads * dim)?;
        for range in ranges {
            copy.extend_from_slice(&self.packed(range.clone())?);
        }
        Ok(Cow::Owned(copy))
    }

    /// The rows as few slices, each with the index of its first element among all rows'.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (usize, &'a [f32])> {
        let x = self.x;
        let mut next = 0;
        self.layout.runs(0..self.shape()[0]).map(move |run| {
            let index = next;
            next += run.len();
            (index, &x[run])
        })
    }

    pub(crate) fn into_parts(self) -> (&'a [f32], Layout) {
        (self.x, self.layout)
    }
}

impl<'a> WideRowsMut<'a> {
    pub(crate) fn of(x: &'a mut [f32], layout: Layout) -> Self {
        WideRowsMut { x, layout }
    }

    /// `[tokens, heads, dim]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 3] {
        self.layout.shape()
    }

    /// Number of elements of all rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layout.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layout.is_empty()
    }

    /// The `dim` elements of one row.
    ///
    /// # Panics
    /// May panic for a token or a head that the shape lacks.
    #[inline]
    pub fn row(&mut self, token: usize, head: usize) -> &mut [f32] {
        let [.., dim] = self.layout.shape();
        &mut self.x[self.layout.at(token, head)..][..dim]
    }

    /// All rows as one slice, where they lie side by side.
    #[must_use]
    pub fn into_contiguous(self) -> Option<&'a mut [f32]> {
        let (packed, len) = (self.layout.is_packed(), self.layout.len());
        packed.then(|| &mut self.x[..len])
    }

    /// The slice that has the rows, and what lies between them; and each row's place in it.
    #[must_use]
    pub fn into_parts(self) -> (&'a mut [f32], RowPlaces) {
        (self.x, RowPlaces(self.layout))
    }

    /// Memory for the rows side by side: the rows themselves, or memory of its own that [`PackedRows::finish`] copies to them.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn packed(self) -> Result<PackedRows<'a>, Error> {
        let WideRowsMut { x, layout } = self;
        let len = layout.len();
        if layout.is_packed() {
            let rows = Packed::InPlace(&mut x[..len]);
            return Ok(PackedRows(rows));
        }
        let copy = filled("outputs side by side", len, 0.0f32)?;
        let rows = Packed::Copy(copy, WideRowsMut { x, layout });
        Ok(PackedRows(rows))
    }

    pub(crate) fn into_layout(self) -> (&'a mut [f32], Layout) {
        (self.x, self.layout)
    }
}

/// For backends: where rows lie in the slice of [`WideRowsMut::into_parts`]. No two rows of the shape share an element, and all lie inside.
#[derive(Debug, Clone, Copy)]
pub struct RowPlaces(Layout);

impl RowPlaces {
    /// The place of one row.
    #[must_use]
    #[inline]
    pub fn of(&self, token: usize, head: usize) -> Range<usize> {
        let ([.., dim], at) = (self.0.shape(), self.0.at(token, head));
        at..at + dim
    }
}

/// For backends: memory for outputs side by side; see [`WideRowsMut::packed`].
#[derive(Debug)]
#[must_use = "`finish` brings a copy to its rows"]
pub struct PackedRows<'a>(Packed<'a>);

#[derive(Debug)]
enum Packed<'a> {
    InPlace(&'a mut [f32]),
    Copy(Vec<f32>, WideRowsMut<'a>),
}

impl PackedRows<'_> {
    /// The elements of all rows.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Packed::InPlace(x) => x,
            Packed::Copy(x, _) => x,
        }
    }

    /// Brings the elements to their rows.
    pub fn finish(self) {
        if let Packed::Copy(x, rows) = self.0 {
            scatter(&x, &mut ElementsMut::F32(rows.x), &rows.layout);
        }
    }
}

/// Refuses NaN, infinity, and magnitudes beyond what `scheme` takes; counts the numbers that saturate ([`Scheme::range`]). `tensor_scales` are the heads'
/// static scales, empty for schemes without.
pub(crate) fn check_values(
    what: &'static str,
    rows: WideRows<'_>,
    scheme: Scheme,
    tensor_scales: &[f32],
) -> Result<u64, Error> {
    let limit = scheme.max_magnitude();
    let range_of = |head: usize| {
        let scale = tensor_scales.get(head).copied().unwrap_or(1.0);
        scheme.range(scale).min(limit)
    };
    let [tokens, heads, _] = rows.shape();
    let least = match tensor_scales {
        [] => range_of(0),
        scales => (0..scales.len()).map(range_of).fold(limit, f32::min),
    };
    // NaN is beyond any limit.
    let beyond = |most: f32| move |v: f32| !(v.abs() <= most);
    // What nearly all rows are: within the range of every head.
    if first_of(rows, beyond(least)).is_none() {
        return Ok(0);
    }
    let mut saturated = 0;
    for token in 0..tokens {
        for head in 0..heads {
            let (row, range) = (rows.row(token, head), range_of(head));
            if first(row, beyond(range)).is_none() {
                continue;
            }
            if let Some(dim) = first(row, beyond(limit)) {
                check_finite_rows(what, rows)?;
                return Err(Error::Magnitude {
                    what,
                    at: ElementIndex::Row { token, head, dim },
                    value: row[dim],
                    scheme,
                    limit,
                });
            }
            saturated += row.iter().filter(|v| v.abs() > range).count() as u64;
        }
    }
    Ok(saturated)
}

/// Refuses NaN, infinity, and magnitudes beyond what `scheme`, which has no static scales, takes, in the tokens that are written.
pub(crate) fn check_written(
    what: &'static str,
    rows: WideRows<'_>,
    scheme: Scheme,
    is_written: impl Fn(usize) -> bool,
) -> Result<(), Error> {
    let limit = scheme.max_magnitude();
    let beyond = |v: f32| !(v.abs() <= limit);
    if first_of(rows, beyond).is_none() {
        return Ok(());
    }
    let [tokens, heads, _] = rows.shape();
    for token in (0..tokens).filter(|token| is_written(*token)) {
        for head in 0..heads {
            let row = rows.row(token, head);
            let Some(dim) = first(row, beyond) else {
                continue;
            };
            let (at, value) = (ElementIndex::Row { token, head, dim }, row[dim]);
            return Err(match value.is_finite() {
                false => Error::NotFinite { what, at, value },
                true => Error::Magnitude {
                    what,
                    at,
                    value,
                    scheme,
                    limit,
                },
            });
        }
    }
    Ok(())
}

/// The first number of rows that `is_bad`, and its place among them.
pub(crate) fn first_of(
    rows: WideRows<'_>,
    is_bad: impl Fn(f32) -> bool,
) -> Option<(ElementIndex, f32)> {
    let mut runs = rows.runs();
    runs.find_map(|(start, run)| {
        let index = first(run, &is_bad)?;
        let at = ElementIndex::of_row(start + index, rows.shape());
        Some((at, run[index]))
    })
}

/// Refuses NaN and infinity.
pub(crate) fn check_finite_rows(what: &'static str, rows: WideRows<'_>) -> Result<(), Error> {
    match first_of(rows, |v| !v.is_finite()) {
        Some((at, value)) => Err(Error::NotFinite { what, at, value }),
        None => Ok(()),
    }
}
