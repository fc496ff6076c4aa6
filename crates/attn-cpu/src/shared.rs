//! A slice that threads write parts of.

use std::ops::Range;

/// The states of all splits, or the rows of all outputs, each of which one thread writes.
pub(crate) struct Shared {
    all: *mut f32,
    len: usize,
}

// SAFETY: threads write disjoint parts of memory that is borrowed for as long: see `Shared::part`.
unsafe impl Sync for Shared {}

impl Shared {
    pub fn new(all: &mut [f32]) -> Self {
        Shared {
            all: all.as_mut_ptr(),
            len: all.len(),
        }
    }

    /// # Safety
    /// No other part that is in use overlaps `range`, which lies in `0..len`.
    #[allow(clippy::mut_from_ref, reason = "parts are disjoint by contract")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside of the slice that this was made from; nobody else has this part, by contract.
        unsafe { std::slice::from_raw_parts_mut(self.all.add(range.start), range.len()) }
    }
}
