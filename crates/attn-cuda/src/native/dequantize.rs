//! Pages of 64 tokens, in 16-bit floats or as they are, that a step attends in place of the cache's own, and how they are made in its workspace.

use attn_core::{KvFormat, PageLayout, Problem, arithmetic::TILE};
use attn_kernels::cuda::{
    DeviceLimits, Instance, KvLayout, Preferences,
    params::{DecodeParams, DequantizeParams},
    select,
};

use super::grid::{COPY_THREADS, Grid};
use crate::handles::DeviceAddress;

/// The most bytes of pages that a step makes: 262144 tokens of 8 KV heads of 128 dims.
const MOST_BYTES: usize = 1 << 30;

/// The most CTAs along a grid's second and third axis.
const MOST_OF_AXIS: usize = 65_535;

/// The pages of a plan.
#[derive(Debug, Clone, Copy)]
pub struct Dequantized {
    /// Kernel that makes them.
    pub instance: Instance,
    heads: usize,
    batch: usize,
    /// Pages of each sequence, without those with residuals.
    pages_each: usize,
    page_bytes: usize,
    /// Bytes of all pages.
    bytes: usize,
    /// Tiles that a row reads with residuals.
    window: usize,
    /// Whether pages keep their format: residuals then stay apart, and scales what they are.
    keeps_format: bool,
    /// Whether K was stored with fewer bits than f16.
    rounds_queries: bool,
}

impl Dequantized {
    /// The pages for a problem whose cache is better attended so, and the format and layout of what is attended then.
    pub(super) fn of(
        problem: &Problem,
        format: KvFormat,
        layout: KvLayout,
        limits: DeviceLimits,
        preferences: &Preferences,
    ) -> Option<(Self, KvFormat, KvLayout)> {
        let attended = select::dequantized(problem, format, layout, limits, preferences)?;
        let (head_dim, heads) = (problem.head_dim, problem.num_kv_heads);
        let pages = PageLayout::new(attended.0, head_dim, attended.1.page_size(), heads).ok()?;
        let (longest, batch) = (problem.kv_lens.iter().copied().max()?, problem.batch());
        let pages_each = longest.div_ceil(TILE).max(1);
        let window = format.k.window().tiles().max(format.v.window().tiles());
        let copies = if window > 0 { 2 } else { 1 };
        let bytes = batch
            .checked_mul(pages_each)?
            .checked_mul(copies)?
            .checked_mul(pages.page_bytes())?;
        let pages = Dequantized {
            instance: Instance::dequantize(head_dim, format, layout, attended.0),
            heads,
            batch,
            pages_each,
            page_bytes: pages.page_bytes(),
            bytes,
            window,
            keeps_format: attended.0 == format,
            rounds_queries: format.k.code_bits() < 16,
        };
        let fits = bytes <= MOST_BYTES && pages_each.max(batch) <= MOST_OF_AXIS;
        fits.then_some((pages, attended.0, attended.1))
    }

    /// Pages that are not read with residuals.
    fn coarse_pages(&self) -> usize {
        self.batch * self.pages_each
    }

    fn table_bytes(&self) -> usize {
        (4 * self.coarse_pages()).next_multiple_of(256)
    }

    /// Entries of a sequence in the table of residual pages, behind that of its first page.
    fn residual_ring(&self) -> usize {
        self.pages_each.next_power_of_two()
    }

    /// Bytes of the workspace: pages, their table, and what the numbers of each KV head count, or the table of residual pages.
    pub(super) fn workspace_bytes(&self) -> usize {
        let words = match (self.keeps_format, self.window) {
            (false, _) => 2 * self.heads,
            (true, 0) => 0,
            (true, _) => self.batch * (1 + self.residual_ring()),
        };
        self.bytes + self.table_bytes() + (4 * words).next_multiple_of(256)
    }

    /// Whether the pages are integers.
    #[must_use]
    pub fn are_integers(&self) -> bool {
        matches!(self.instance, Instance::GatherPages { format, .. } if format.is_integer())
    }

    /// Grid of the kernel.
    #[must_use]
    pub fn grid(&self) -> Grid {
        Grid::new([self.heads, self.pages_each, self.batch], COPY_THREADS)
    }

    /// Where the table lies, and scales or the other table, for pages at `at`.
    fn addresses(&self, at: DeviceAddress) -> [u64; 3] {
        let table = at.offset(self.bytes);
        [at, table, table.offset(self.table_bytes())].map(DeviceAddress::get)
    }

    /// The parameter blocks of the kernel that writes the pages to `at`, and of the step that attends them: from that of a step that attends the
    /// cache, with so many query blocks.
    pub(super) fn params(
        &self,
        step: &DecodeParams,
        num_blocks: usize,
        at: DeviceAddress,
    ) -> (DequantizeParams, DecodeParams) {
        let [pages, table, behind] = self.addresses(at);
        // Numbers that a grid's axes and `MOST_BYTES` bound.
        let (pages_each, fine_pages) = (self.pages_each as u32, self.coarse_pages() as u32);
        let make = DequantizeParams {
            step: *step,
            pages,
            table,
            scales: behind,
            residual_table: behind,
            residual_ring: self.residual_ring() as u32,
            pages_each,
            fine_pages,
            num_blocks: num_blocks as i32,
        };
        let attend = DecodeParams {
            k: pages,
            page_table: table,
            page_table_stride: pages_each as i32,
            page_stride: self.page_bytes as i32,
            ..*step
        };
        let attend = match self.keeps_format {
            true => DecodeParams {
                residual_pages: behind,
                residual_ring: self.residual_ring() as u32,
                ..attend
            },
            false => DecodeParams {
                residual_pages: 0,
                residual_ring: 0,
                k_tensor_scales: behind,
                v_tensor_scales: behind + 4 * self.heads as u64,
                rounds_queries: i32::from(self.rounds_queries),
                fine_window: self.window as i32,
                fine_pages,
                ..attend
            },
        };
        (make, attend)
    }
}
