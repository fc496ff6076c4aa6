//! Rows `[tokens, heads, dim]` in the caller's memory, on the host or on a device: side by side, or at strides.

use half::{bf16, f16, slice::HalfFloatSliceExt};

use crate::{
    device_rows::{DeviceMemory, DeviceRows},
    elements::{Elements, ElementsMut},
    error::{Error, filled},
    row_layout::{Layout, refused},
    row_memory::{Memory, RowMemory, on_device},
    wide_rows::{WideRows, WideRowsMut, Widened},
};

/// Rows to read, `[tokens, heads, dim]` of f32, f16 or bf16: K, V or queries.
///
/// A slice, an array or a vector converts into it: rows side by side. [`Rows::strided`] takes rows that lie apart, such as a slice of a fused
/// projection or a transposed array. What lies between rows is not read. [`Rows::on_device`] takes rows in a device's memory, which its own backend reads
/// there.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a>(RowMemory<'a, Elements<'a>>);

/// Rows to write, `[tokens, heads, dim]` of f32, f16 or bf16: outputs.
///
/// A slice, an array or a vector converts into it: rows side by side. [`RowsMut::strided`] takes rows that lie apart. What lies between rows is
/// neither read nor written. [`RowsMut::on_device`] takes rows in a device's memory.
#[derive(Debug)]
pub struct RowsMut<'a>(RowMemory<'a, ElementsMut<'a>>);

impl<'a> Rows<'a> {
    /// The same rows as `[tokens · parts, heads / parts, dim]`: the shape that a problem with selected pages has ([`Attended::split`](crate::Attended::split)).
    ///
    /// # Errors
    /// [`Error::Rows`] where heads and tokens are not equally far apart, or `parts` does not divide the heads.
    pub fn split(self, what: &'static str, parts: usize) -> Result<Self, Error> {
        self.0.split(what, parts).map(Rows)
    }

    /// Rows `[tokens, heads, dim]` of which the row of token t and head h begins at element `t·token_stride + h·head_stride`.
    ///
    /// Rows may share elements, as with a stride of 0. The slice may go on behind the last row.
    ///
    /// # Errors
    /// [`Error::Length`] if the slice ends before the last row does; [`Error::Parameter`] for sizes whose products exceed 64 bits.
    ///
    /// ```
    /// use attn_core::{CacheConfig, Error, Heads, HostPages, KvCache, KvFormat, Rows};
    ///
    /// let heads = Heads::new(4, 2, 64);
    /// let config = CacheConfig::builder(KvFormat::INT8, heads).max_len(64).build();
    /// let pages = HostPages::new(&config)?;
    /// let mut cache = KvCache::new(config, Box::new(pages))?;
    /// // Three tokens of a fused projection: 4 heads of Q, 2 of K, 2 of V.
    /// let fused = vec![0.5f32; 3 * 8 * 64];
    /// let of = |head: usize| Rows::strided(&fused[head * 64..], [3, 2, 64], [8 * 64, 64]);
    /// cache.append(0, of(4)?, of(6)?)?;
    /// assert_eq!(cache.table().lens, [3]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn strided(
        elements: impl Into<Elements<'a>>,
        [tokens, heads, dim]: [usize; 3],
        [token_stride, head_stride]: [usize; 2],
    ) -> Result<Self, Error> {
        let strides = [0, token_stride, head_stride];
        Rows::strided_batch(elements, [1, tokens, heads, dim], strides)
    }

    /// Rows `[sequences, tokens, heads, dim]` of as many tokens for each sequence, with the strides of these but the last in elements: a call takes
    /// them as `[sequences·tokens, heads, dim]`.
    ///
    /// # Errors
    /// Those of [`Rows::strided`].
    pub fn strided_batch(
        elements: impl Into<Elements<'a>>,
        shape: [usize; 4],
        strides: [usize; 3],
    ) -> Result<Self, Error> {
        RowMemory::strided(Memory::Host(elements.into()), shape, strides).map(Rows)
    }

    /// Rows `[sequences, tokens, heads, dim]` in a device's memory, with strides as those of [`Rows::strided_batch`].
    ///
    /// # Errors
    /// Those of [`Rows::strided`].
    pub fn on_device(
        memory: &'a dyn DeviceMemory,
        shape: [usize; 4],
        strides: [usize; 3],
    ) -> Result<Self, Error> {
        RowMemory::strided(Memory::Device(memory), shape, strides).map(Rows)
    }

    /// Rows of no tokens, `[0, heads, dim]`, in the memory of these: what an append of latents takes as V beside these as K.
    ///
    /// # Errors
    /// Those of [`Rows::strided`].
    pub fn no_tokens(&self, heads: usize, dim: usize) -> Result<Rows<'a>, Error> {
        let strides = [0, heads.saturating_mul(dim), dim];
        RowMemory::strided(self.0.memory, [1, 0, heads, dim], strides).map(Rows)
    }

    /// The slice that has the rows, and what lies between and behind them; none for rows on a device.
    #[must_use]
    pub fn elements(&self) -> Option<Elements<'a>> {
        match self.0.memory {
            Memory::Host(elements) => Some(elements),
            Memory::Device(_) => None,
        }
    }

    /// The memory of rows on a device; none for rows in host memory.
    #[must_use]
    pub fn device(&self) -> Option<&'a dyn DeviceMemory> {
        self.0.memory.device()
    }

    /// The rows, which are on a device and have the needed shape `[tokens, heads, dim]`.
    ///
    /// # Errors
    /// [`Error::Shape`]; [`Error::Rows`] for rows in host memory.
    pub fn device_rows(
        &self,
        what: &'static str,
        needed: [usize; 3],
    ) -> Result<DeviceRows<'a>, Error> {
        self.0.device_rows(what, needed)
    }

    /// Number of elements of all rows; what lies between them is not counted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of the rows, side by side, in f32.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Rows`] for rows on a device.
    pub fn to_wide(&self) -> Result<Vec<f32>, Error> {
        let layout = match self.0.layout {
            Some(layout) => layout,
            None => Layout::packed([1, 1, self.len()])?,
        };
        let wide = self.widened(layout, "a copy of rows")?;
        wide.into_packed("a copy of rows")
    }

    /// The tokens of rows `[tokens, heads, dim]`, where their number is not known otherwise.
    pub(crate) fn tokens(&self, what: &'static str, row: [usize; 2]) -> Result<usize, Error> {
        self.0.tokens(what, row)
    }

    /// Refuses other than the needed rows `[tokens, heads, dim]`.
    pub(crate) fn check(&self, what: &'static str, needed: [usize; 3]) -> Result<Layout, Error> {
        self.0.check(what, needed)
    }

    /// Refuses other than the needed rows, and rows on a device.
    pub(crate) fn check_host(
        &self,
        what: &'static str,
        needed: [usize; 3],
    ) -> Result<Layout, Error> {
        match self.device() {
            Some(memory) => Err(on_device(what, memory)),
            None => self.check(what, needed),
        }
    }

    /// The rows, which have this layout, in f32: in place where they are, else side by side in memory of their own.
    pub(crate) fn widened(self, layout: Layout, what: &'static str) -> Result<Widened<'a>, Error> {
        let narrow = match self.0.on_host(what)? {
            Elements::F32(x) => return Ok(Widened::in_place(x, layout)),
            narrow => narrow,
        };
        let mut wide = filled(what, layout.len(), 0.0f32)?;
        let mut rest = &mut wide[..];
        for run in layout.runs(0..layout.shape()[0]) {
            let (part, behind) = rest.split_at_mut(run.len());
            match narrow {
                Elements::F32(x) => part.copy_from_slice(&x[run]),
                Elements::F16(x) => x[run].convert_to_f32_slice(part),
                Elements::Bf16(x) => {
                    let pairs = part.iter_mut().zip(&x[run]);
                    pairs.for_each(|(w, x)| *w = x.to_f32());
                }
            }
            rest = behind;
        }
        Ok(Widened::own(wide, layout.side_by_side()))
    }
}

impl<'a> RowsMut<'a> {
    /// The same rows as `[tokens · parts, heads / parts, dim]`: the shape that a problem with selected pages has ([`Attended::split`](crate::Attended::split)).
    ///
    /// # Errors
    /// [`Error::Rows`] where heads and tokens are not equally far apart, or `parts` does not divide the heads.
    pub fn split(self, what: &'static str, parts: usize) -> Result<Self, Error> {
        self.0.split(what, parts).map(RowsMut)
    }

    /// Rows `[tokens, heads, dim]` of which the row of token t and head h begins at element `t·token_stride + h·head_stride`.
    ///
    /// No two rows share an element: the smaller stride is at least `dim`, and the larger one at least as long as what lies inside of it. The stride
    /// of a single token or head is not looked at. The slice may go on behind the last row.
    ///
    /// # Errors
    /// [`Error::Length`] if the slice ends before the last row does; [`Error::Parameter`] for rows that overlap, and for sizes whose products exceed
    /// 64 bits.
    ///
    /// ```
    /// use attn_core::{Error, RowsMut};
    ///
    /// // Outputs `[heads, tokens, dim]`: 4 heads of 3 tokens.
    /// let mut out = vec![0.0f32; 4 * 3 * 64];
    /// let rows = RowsMut::strided(&mut out, [3, 4, 64], [64, 3 * 64])?;
    /// assert_eq!(rows.len(), 4 * 3 * 64);
    /// assert!(RowsMut::strided(&mut out, [3, 4, 64], [64, 2 * 64]).is_err());
    /// # Ok::<(), Error>(())
    /// ```
    pub fn strided(
        elements: impl Into<ElementsMut<'a>>,
        [tokens, heads, dim]: [usize; 3],
        [token_stride, head_stride]: [usize; 2],
    ) -> Result<Self, Error> {
        let strides = [0, token_stride, head_stride];
        RowsMut::strided_batch(elements, [1, tokens, heads, dim], strides)
    }

    /// Rows `[sequences, tokens, heads, dim]`; see [`Rows::strided_batch`].
    ///
    /// # Errors
    /// Those of [`RowsMut::strided`].
    pub fn strided_batch(
        elements: impl Into<ElementsMut<'a>>,
        shape: [usize; 4],
        strides: [usize; 3],
    ) -> Result<Self, Error> {
        RowsMut::apart(Memory::Host(elements.into()), shape, strides)
    }

    /// Rows `[sequences, tokens, heads, dim]` in a device's memory; see [`Rows::on_device`].
    ///
    /// # Errors
    /// Those of [`RowsMut::strided`].
    pub fn on_device(
        memory: &'a dyn DeviceMemory,
        shape: [usize; 4],
        strides: [usize; 3],
    ) -> Result<Self, Error> {
        RowsMut::apart(Memory::Device(memory), shape, strides)
    }

    /// Rows at strides, of which no two share an element.
    fn apart(
        memory: Memory<'a, ElementsMut<'a>>,
        shape: [usize; 4],
        strides: [usize; 3],
    ) -> Result<Self, Error> {
        let rows = RowMemory::strided(memory, shape, strides)?;
        if rows.layout.is_some_and(|layout| layout.overlaps()) {
            let allowed =
                "rows to write that do not overlap: strides of at least what lies inside of them";
            return Err(refused(shape, strides, allowed));
        }
        Ok(RowsMut(rows))
    }

    /// The memory of rows on a device; none for rows in host memory.
    #[must_use]
    pub fn device(&self) -> Option<&'a dyn DeviceMemory> {
        self.0.memory.device()
    }

    /// The rows, which are on a device and have the needed shape `[tokens, heads, dim]`.
    ///
    /// # Errors
    /// [`Error::Shape`]; [`Error::Rows`] for rows in host memory.
    pub fn device_rows(
        &self,
        what: &'static str,
        needed: [usize; 3],
    ) -> Result<DeviceRows<'a>, Error> {
        self.0.device_rows(what, needed)
    }

    /// The slice of f32 rows in host memory that lie side by side and have the needed shape `[tokens, heads, dim]`: results that are never rounded to 16 bits,
    /// such as log-sum-exps.
    ///
    /// # Errors
    /// [`Error::Length`], or [`Error::Shape`] for strided rows; [`Error::Rows`] for other rows.
    pub fn into_packed_f32(
        self,
        what: &'static str,
        needed: [usize; 3],
    ) -> Result<&'a mut [f32], Error> {
        let layout = self.check(what, needed)?;
        let refused = |given: &str| Error::Rows {
            what,
            given: given.to_owned(),
            needed: "rows of f32 side by side".to_owned(),
        };
        match self.into_elements(what)? {
            ElementsMut::F32(x) if layout.is_packed() => Ok(&mut x[..layout.len()]),
            ElementsMut::F32(_) => Err(refused("has rows that lie apart")),
            _ => Err(refused("has numbers of 16 bits")),
        }
    }

    /// Number of elements of all rows; what lies between them is not counted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refuses other than the needed rows `[tokens, heads, dim]`.
    pub(crate) fn check(&self, what: &'static str, needed: [usize; 3]) -> Result<Layout, Error> {
        self.0.check(what, needed)
    }

    pub(crate) fn into_elements(self, what: &'static str) -> Result<ElementsMut<'a>, Error> {
        self.0.on_host(what)
    }
}

impl<'a> From<Elements<'a>> for Rows<'a> {
    fn from(elements: Elements<'a>) -> Self {
        Rows(RowMemory::needed(elements))
    }
}

impl<'a> From<ElementsMut<'a>> for RowsMut<'a> {
    fn from(elements: ElementsMut<'a>) -> Self {
        RowsMut(RowMemory::needed(elements))
    }
}

impl<'a> From<WideRows<'a>> for Rows<'a> {
    fn from(rows: WideRows<'a>) -> Self {
        let (x, layout) = rows.into_parts();
        Rows(RowMemory {
            memory: Memory::Host(x.into()),
            layout: Some(layout),
        })
    }
}

impl<'a> From<WideRowsMut<'a>> for RowsMut<'a> {
    fn from(rows: WideRowsMut<'a>) -> Self {
        let (x, layout) = rows.into_layout();
        RowsMut(RowMemory {
            memory: Memory::Host(x.into()),
            layout: Some(layout),
        })
    }
}

macro_rules! conversions {
    ($element:ty) => {
        conversions!($element, &'a [$element], &'a mut [$element]);
        conversions!($element, &'a Vec<$element>, &'a mut Vec<$element>);
        impl<'a, const N: usize> From<&'a [$element; N]> for Rows<'a> {
            fn from(x: &'a [$element; N]) -> Self {
                Elements::from(x).into()
            }
        }
        impl<'a, const N: usize> From<&'a mut [$element; N]> for RowsMut<'a> {
            fn from(x: &'a mut [$element; N]) -> Self {
                ElementsMut::from(x).into()
            }
        }
    };
    ($element:ty, $read:ty, $write:ty) => {
        impl<'a> From<$read> for Rows<'a> {
            fn from(x: $read) -> Self {
                Elements::from(x).into()
            }
        }
        impl<'a> From<$write> for RowsMut<'a> {
            fn from(x: $write) -> Self {
                ElementsMut::from(x).into()
            }
        }
    };
}

conversions!(f32);
conversions!(f16);
conversions!(bf16);
