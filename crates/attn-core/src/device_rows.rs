//! Rows in a device's memory: described by the backend that reaches them, and read by no other.

use std::{any::Any, fmt};

use crate::{error::Error, row_layout::Layout};

/// The type of the numbers in rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit IEEE numbers.
    F32,
    /// 16-bit IEEE numbers.
    F16,
    /// The upper halves of f32.
    Bf16,
}

impl Dtype {
    /// The bytes of a number.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        })
    }
}

/// Numbers in a device's memory that [`Rows::on_device`](crate::Rows::on_device) makes rows of.
///
/// A backend that reads such memory has a type of its own for it, which says where the memory is and what orders work on it; only that backend's `unsafe`
/// constructor makes one. Core compares lengths and places, and hands the value back to the backend, which takes its own type alone.
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// How many numbers there are.
    fn elements(&self) -> usize;
    /// Their type.
    fn dtype(&self) -> Dtype;
    /// The device's name, such as `cuda:0`, for errors.
    fn device(&self) -> String;
    /// The value as [`Any`], so that a backend can recover its own type.
    fn as_any(&self) -> &dyn Any;
}

/// For backends: rows `[tokens, heads, dim]` in a device's memory that have the shape which a call needs.
///
/// They end inside of what [`DeviceMemory::elements`] says. A backend that reads or writes them compares [`DeviceRows::end`] with its own type's length, since another
/// type can lead to that one.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRows<'a> {
    what: &'static str,
    memory: &'a dyn DeviceMemory,
    layout: Layout,
}

impl<'a> DeviceRows<'a> {
    pub(crate) fn new(what: &'static str, memory: &'a dyn DeviceMemory, layout: Layout) -> Self {
        DeviceRows {
            what,
            memory,
            layout,
        }
    }

    /// The name of the rows, for errors.
    #[must_use]
    pub fn what(&self) -> &'static str {
        self.what
    }

    /// The memory that has them.
    #[must_use]
    pub fn memory(&self) -> &'a dyn DeviceMemory {
        self.memory
    }

    /// `[tokens, heads, dim]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 3] {
        self.layout.shape()
    }

    /// Elements from the first to the end of the last row.
    #[must_use]
    pub fn end(&self) -> usize {
        self.layout.end()
    }

    /// Elements from one token to the next, where the heads of a token lie side by side and all tokens are equally far apart.
    #[must_use]
    pub fn token_stride(&self) -> Option<usize> {
        self.layout.token_stride()
    }

    /// Whether all rows lie side by side.
    #[must_use]
    pub fn is_packed(&self) -> bool {
        self.layout.is_packed()
    }

    /// The refusal of these rows.
    #[must_use]
    pub fn refused(&self, given: impl Into<String>, needed: impl Into<String>) -> Error {
        Error::Rows {
            what: self.what,
            given: given.into(),
            needed: needed.into(),
        }
    }
}

/// Whether the rows of a call lie on a device, by the names and memories of [`Rows::device`](crate::Rows::device). A backend compares the device with its own.
///
/// # Errors
/// [`Error::Rows`] for rows of which some lie on a device, and some in host memory.
pub fn all_on_device(rows: &[(&'static str, Option<&dyn DeviceMemory>)]) -> Result<bool, Error> {
    let Some((first, rest)) = rows.split_first() else {
        return Ok(false);
    };
    let on_device = first.1.is_some();
    let Some(other) = rest.iter().find(|rows| rows.1.is_some() != on_device) else {
        return Ok(on_device);
    };
    let place = |memory: Option<&dyn DeviceMemory>| match memory {
        Some(memory) => format!("lies on {}", memory.device()),
        None => "lies in host memory".to_owned(),
    };
    Err(Error::Rows {
        what: other.0,
        given: place(other.1),
        needed: format!(
            "all rows of a call in one place, and {} {}",
            first.0,
            place(first.1)
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        CacheConfig, DecodeStep, Heads, HostPages, KvCache, KvFormat, KvSource, Plan, Problem,
        Rows, RowsMut,
    };

    #[derive(Debug)]
    struct There(usize);

    impl DeviceMemory for There {
        fn elements(&self) -> usize {
            self.0
        }
        fn dtype(&self) -> Dtype {
            Dtype::F32
        }
        fn device(&self) -> String {
            "there:3".to_owned()
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    #[test]
    fn rows_say_how_they_lie_and_where_they_end() {
        let memory = There(54);
        let lies = |shape: [usize; 4], strides| {
            let [sequences, tokens, heads, dim] = shape;
            let rows = Rows::on_device(&memory, shape, strides).unwrap();
            let rows = rows.device_rows("k", [sequences * tokens, heads, dim]);
            let rows = rows.unwrap();
            (rows.token_stride(), rows.is_packed(), rows.end())
        };
        assert_eq!(lies([1, 3, 2, 4], [0, 8, 4]), (Some(8), true, 24));
        assert_eq!(lies([1, 3, 2, 4], [0, 10, 4]), (Some(10), false, 28));
        assert_eq!(lies([1, 3, 2, 4], [0, 16, 8]), (None, false, 44));
        // Sequences that one stride of tokens reaches, and others.
        assert_eq!(lies([2, 3, 2, 4], [24, 8, 4]), (Some(8), true, 48));
        assert_eq!(lies([2, 3, 2, 4], [30, 8, 4]), (None, false, 54));
        assert_eq!(lies([2, 1, 2, 4], [12, 99, 4]), (Some(12), false, 20));
        // The stride of a single token says nothing.
        assert_eq!(lies([1, 1, 2, 4], [0, 99, 4]), (Some(8), true, 8));
        assert_eq!(lies([1, 0, 2, 4], [0, 99, 4]), (Some(8), true, 0));
        let longer = Rows::on_device(&memory, [2, 3, 2, 4], [31, 8, 4]);
        assert!(
            matches!(longer, Err(Error::Length { needed: 55, .. })),
            "{longer:?}"
        );
        let overlapping = RowsMut::on_device(&memory, [1, 3, 2, 4], [0, 7, 4]);
        assert!(
            matches!(overlapping, Err(Error::Parameter { .. })),
            "{overlapping:?}"
        );
        let rows = Rows::on_device(&memory, [1, 3, 2, 4], [0, 8, 4]).unwrap();
        let other = rows.device_rows("k", [3, 4, 2]);
        assert!(
            matches!(other, Err(Error::Shape { what: "k", .. })),
            "{other:?}"
        );
    }

    #[test]
    fn the_host_reads_and_writes_no_rows_of_a_device() {
        let memory = There(256);
        let rows = || Rows::on_device(&memory, [1, 1, 1, 64], [0, 64, 64]).unwrap();
        let rows_mut = || RowsMut::on_device(&memory, [1, 1, 1, 64], [0, 64, 64]).unwrap();
        let heads = Heads::new(1, 1, 64);
        let config = CacheConfig::builder(KvFormat::INT8, heads)
            .max_len(64)
            .build();
        let pages = HostPages::new(&config).unwrap();
        let mut cache = KvCache::new(config, Box::new(pages)).unwrap();
        let named = |refused: Result<(), Error>, name| {
            let error = refused.unwrap_err();
            assert!(
                matches!(error, Error::Rows { what, .. } if what == name),
                "{error}"
            );
            assert!(error.to_string().contains("there:3"), "{error}");
        };
        named(cache.append(0, &[0.5; 64], rows()), "v");
        named(cache.append(0, rows(), &[0.5; 64]), "k");
        assert_eq!(cache.table().lens, [0]);
        named(rows().to_wide().map(drop), "a copy of rows");
        let packed = rows_mut().into_packed_f32("lse", [1, 1, 64]);
        named(packed.map(drop), "lse");
        let plan = Plan::new("a test", &Problem::new(heads, [64]), KvFormat::INT8, ()).unwrap();
        let (kv, mut out) = (KvSource::Cache(&cache), [0.0; 64]);
        named(DecodeStep::new(&plan, rows(), kv, &mut out).map(drop), "q");
        let step = DecodeStep::new(&plan, &[0.5; 64], kv, rows_mut());
        named(step.map(drop), "out");
        let there = Rows::from(&[0.5f32; 64]).device_rows("q", [1, 1, 64]);
        assert!(
            matches!(there, Err(Error::Rows { what: "q", .. })),
            "{there:?}"
        );
    }
}
