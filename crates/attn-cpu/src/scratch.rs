//! Aligned arrays that grow on demand. A thread keeps them between calls, so that a step allocates nothing once one of its size has run.

use std::marker::PhantomData;

/// One cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code, reason = "only its address is used")] [u8; 64]);

/// An array of plain numbers that starts on a cache line.
pub(crate) struct Aligned<T> {
    lines: Vec<Line>,
    of: PhantomData<T>,
}

/// Numbers for which every bit pattern is a value.
pub(crate) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for i32 {}
impl Plain for f32 {}

impl<T: Plain> Aligned<T> {
    pub const fn new() -> Self {
        Aligned {
            lines: Vec::new(),
            of: PhantomData,
        }
    }

    /// Makes room for at least `len` elements; the old ones stay.
    pub fn reserve(&mut self, len: usize) {
        let lines = (len * size_of::<T>()).div_ceil(64);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0; 64]));
        }
    }

    pub fn as_slice(&self) -> &[T] {
        let len = self.lines.len() * (64 / size_of::<T>());
        // SAFETY: the lines are initialized bytes, aligned for any `T: Plain`, and every bit pattern is a `T`.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [T] {
        let len = self.lines.len() * (64 / size_of::<T>());
        // SAFETY: as in `as_slice`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), len) }
    }
}
