//! Quantization groups: the dims of a token that have parameters of their own.

use std::ops::Range;

/// How the dims of a side are parted into groups of neighbours: all groups have as many dims, but for the last, which has what is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    dim: usize,
    dims: usize,
}

impl Groups {
    /// No dims.
    pub const NONE: Groups = Groups::of_dims(0, 0);

    /// Groups of `dims` of `dim` dims; one group of all where `dims` is 0.
    #[must_use]
    pub(crate) const fn of_dims(dim: usize, dims: usize) -> Self {
        let dims = if dims == 0 { dim } else { dims };
        Groups { dim, dims }
    }

    /// Number of groups, and of a token's parameters.
    #[must_use]
    pub fn count(self) -> usize {
        self.dim.div_ceil(self.dims.max(1))
    }

    /// Dims of each group but the last.
    #[must_use]
    pub fn dims(self) -> usize {
        self.dims
    }

    /// Dims of all groups.
    #[must_use]
    pub fn dim(self) -> usize {
        self.dim
    }

    /// The group of a dim.
    #[inline]
    #[must_use]
    pub fn of_dim(self, d: usize) -> usize {
        d / self.dims
    }

    /// The dims of a group.
    #[inline]
    #[must_use]
    pub fn range(self, group: usize) -> Range<usize> {
        let first = group * self.dims;
        first..(first + self.dims).min(self.dim)
    }

    /// The dims of each group, one after the other.
    pub fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.count()).map(move |group| self.range(group))
    }
}

#[cfg(test)]
mod tests {
    use super::Groups;

    /// Kills a last group that is left out, or as long as the others.
    #[test]
    fn the_last_group_has_what_is_left() {
        let parts = Groups::of_dims(576, 512);
        assert_eq!(parts.ranges().collect::<Vec<_>>(), [0..512, 512..576]);
        assert_eq!((parts.of_dim(511), parts.of_dim(512)), (0, 1));
        assert_eq!(Groups::of_dims(128, 32).count(), 4);
        assert_eq!(Groups::of_dims(128, 0).range(0), 0..128);
    }
}
