//! Grids of small launches.

/// Threads of `append.cu`, `import.cu`, `export.cu` and `check.cu`.
pub(super) const COPY_THREADS: usize = 128;

/// The grid of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// CTAs along each axis.
    pub ctas: [usize; 3],
    /// Threads of a CTA.
    pub threads: usize,
}

impl Grid {
    /// A grid of so many CTAs along each axis, of so many threads each.
    #[must_use]
    pub const fn new(ctas: [usize; 3], threads: usize) -> Self {
        Grid { ctas, threads }
    }

    /// Whether it has no CTA.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ctas.contains(&0)
    }
}
