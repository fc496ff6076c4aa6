//! The memory of rows `[tokens, heads, dim]`, on the host or on a device, and how they lie in it: what is the same of rows to read and of rows to write.

use crate::{
    device_rows::{DeviceMemory, DeviceRows},
    elements::{Elements, ElementsMut},
    error::Error,
    row_layout::Layout,
};

/// Elements of a slice in host memory.
pub(crate) trait HostElements {
    /// How many there are.
    fn count(&self) -> usize;
}

impl HostElements for Elements<'_> {
    fn count(&self) -> usize {
        self.len()
    }
}

impl HostElements for ElementsMut<'_> {
    fn count(&self) -> usize {
        self.len()
    }
}

/// Where rows are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Memory<'a, E> {
    Host(E),
    Device(&'a dyn DeviceMemory),
}

impl<'a, E: HostElements> Memory<'a, E> {
    /// Elements of the memory, those between and behind rows among them.
    fn reach(&self) -> usize {
        match self {
            Memory::Host(elements) => elements.count(),
            Memory::Device(memory) => memory.elements(),
        }
    }

    /// The memory on a device; none in host memory.
    pub fn device(&self) -> Option<&'a dyn DeviceMemory> {
        match *self {
            Memory::Host(_) => None,
            Memory::Device(memory) => Some(memory),
        }
    }
}

/// Rows in a memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowMemory<'a, E> {
    pub memory: Memory<'a, E>,
    /// `None`: the rows that a call needs, side by side.
    pub layout: Option<Layout>,
}

impl<'a, E: HostElements> RowMemory<'a, E> {
    /// The rows that a call needs, side by side in host memory.
    pub fn needed(elements: E) -> Self {
        RowMemory {
            memory: Memory::Host(elements),
            layout: None,
        }
    }

    /// The rows as `[tokens · parts, heads / parts, dim]`.
    ///
    /// # Errors
    /// [`Error::Rows`] where heads and tokens are not equally far apart.
    pub fn split(self, what: &'static str, parts: usize) -> Result<Self, Error> {
        let split = self.layout.map(|layout| {
            layout.split(parts).ok_or_else(|| Error::Rows {
                what,
                given: format!("{:?} at strides", layout.shape()),
                needed: format!(
                    "for selected pages all heads of all tokens equally far apart, and a multiple of {parts} heads; copy them side by side"
                ),
            })
        });
        Ok(RowMemory {
            layout: split.transpose()?,
            ..self
        })
    }

    /// Rows `[sequences, tokens, heads, dim]` at strides.
    ///
    /// # Errors
    /// [`Error::Length`] if the memory ends before the last row does; [`Error::Parameter`] for sizes whose products exceed 64 bits.
    pub fn strided(
        memory: Memory<'a, E>,
        shape: [usize; 4],
        strides: [usize; 3],
    ) -> Result<Self, Error> {
        let (layout, needed) = Layout::strided(shape, strides)?;
        let given = memory.reach();
        if given < needed {
            return Err(Error::Length {
                what: "the slice of strided rows",
                given,
                needed,
            });
        }
        let layout = Some(layout);
        Ok(RowMemory { memory, layout })
    }

    /// Elements of all rows; what lies between them is not counted.
    pub fn len(&self) -> usize {
        let of_layout = self.layout.map(|layout| layout.len());
        of_layout.unwrap_or_else(|| self.memory.reach())
    }

    /// Refuses other than the needed rows `[tokens, heads, dim]`.
    pub fn check(&self, what: &'static str, needed: [usize; 3]) -> Result<Layout, Error> {
        match self.layout {
            Some(layout) if layout.shape() == needed => Ok(layout),
            Some(layout) => Err(Error::Shape {
                what,
                given: layout.shape(),
                needed,
            }),
            None => {
                let given = self.memory.reach();
                let needed_elements = needed.into_iter().fold(1, usize::saturating_mul);
                if given != needed_elements {
                    return Err(Error::Length {
                        what,
                        given,
                        needed: needed_elements,
                    });
                }
                Layout::packed(needed)
            }
        }
    }

    /// The tokens of rows `[tokens, heads, dim]`, where their number is not known otherwise.
    pub fn tokens(&self, what: &'static str, [heads, dim]: [usize; 2]) -> Result<usize, Error> {
        let Some(layout) = self.layout else {
            let (given, row) = (self.memory.reach(), heads * dim);
            if !given.is_multiple_of(row) {
                return Err(Error::Length {
                    what,
                    given,
                    needed: given.next_multiple_of(row),
                });
            }
            return Ok(given / row);
        };
        let tokens = layout.shape()[0];
        self.check(what, [tokens, heads, dim]).map(|_| tokens)
    }

    /// The rows, which are on a device and have the needed shape.
    pub fn device_rows(
        &self,
        what: &'static str,
        needed: [usize; 3],
    ) -> Result<DeviceRows<'a>, Error> {
        let memory = self.memory.device().ok_or_else(|| Error::Rows {
            what,
            given: "lies in host memory".to_owned(),
            needed: "rows in the device's memory".to_owned(),
        })?;
        let layout = self.check(what, needed)?;
        Ok(DeviceRows::new(what, memory, layout))
    }

    /// The elements of rows in host memory.
    ///
    /// # Errors
    /// [`Error::Rows`] for a device's rows, where the host reads or writes.
    pub fn on_host(self, what: &'static str) -> Result<E, Error> {
        match self.memory {
            Memory::Host(elements) => Ok(elements),
            Memory::Device(memory) => Err(on_device(what, memory)),
        }
    }
}

/// The refusal of a device's rows where the host reads or writes.
pub(crate) fn on_device(what: &'static str, memory: &dyn DeviceMemory) -> Error {
    Error::Rows {
        what,
        given: format!("lies on {}", memory.device()),
        needed: "rows in host memory, which is all that this call takes".to_owned(),
    }
}
