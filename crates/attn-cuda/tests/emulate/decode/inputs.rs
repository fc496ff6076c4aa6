//! The inputs of an emulated decode and its workspace, in host memory.

use anyhow::Result;
use attn_conformance::Case;
use attn_core::{KvCache, KvMemory, KvSource, PageTable};
use attn_cuda::{internals::LaunchPlan, native::alibi_slopes_log2};

use super::centred::Centres;
use crate::pages::{Tables, padded, pool_of};

/// Kernels load queries and store results by 16 bytes.
pub(super) fn aligned(bytes: &[u8]) -> Vec<u128> {
    let mut words = vec![0; bytes.len().div_ceil(16)];
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

/// Inputs of a launch beside the queries, and its workspace.
pub(super) struct Inputs {
    /// The cache's pages, and one of zeros.
    pub(super) pool: Vec<u128>,
    pub(super) lens: Vec<i32>,
    /// The page tables of a cache.
    pub(super) tables: Tables,
    /// Of K, of a cache that has some.
    pub(super) centres: Option<Centres>,
    pub(super) slopes: Vec<f32>,
    pub(super) workspace: Vec<u64>,
    pub(super) workspace_at: usize,
}

impl Inputs {
    pub(super) fn new(
        case: &Case,
        source: KvSource<'_>,
        plan: &LaunchPlan,
        reach: usize,
    ) -> Result<Self> {
        let paged = match source.memory() {
            KvMemory::Pages(layer, table) => Some((layer.cache(), table)),
            KvMemory::View(_) | KvMemory::Pool(_) => None,
        };
        // NaN wherever the kernel should not look; counters, or partials, are zero.
        let mut workspace = vec![u64::MAX; plan.workspace_bytes() / 8 + 32];
        let workspace_at = workspace.as_ptr().expose_provenance().next_multiple_of(256);
        let first = (workspace_at - workspace.as_ptr().addr()) / 8;
        workspace[first..first + plan.zeroed_bytes() / 8].fill(0);
        let slots = case
            .format
            .residual_slots(case.page_size, case.config().max_q_len);
        let pages_of = |(cache, table): (&KvCache, &PageTable)| {
            let layout = cache.layout();
            let size = layout.page_bytes();
            let mut all = [pool_of(cache)?, &vec![0; size]].concat();
            // What the last pages leave unwritten holds anything: here NaN, as a code or a scale.
            for (own, len) in table.pages.iter().zip(&case.problem.kv_lens) {
                if let (Some(page), 1..) = (own.last(), len % case.page_size) {
                    let at = *page as usize * size;
                    let mut written = vec![0xff; size];
                    layout.canonical(&mut written, len % case.page_size, false)?;
                    let bytes = all[at..at + size].iter_mut().zip(written);
                    bytes.for_each(|(byte, written)| *byte |= !written);
                }
            }
            anyhow::Ok(aligned(&padded(&all, layout)))
        };
        let tables = paged.map(|(cache, of)| Tables::of(cache.config(), of, slots, reach));
        let centres = paged.and_then(|(cache, table)| Centres::of(cache, table));
        Ok(Inputs {
            pool: paged.map(pages_of).transpose()?.unwrap_or_default(),
            centres,
            lens: case.problem.kv_lens.iter().map(|&len| len as i32).collect(),
            tables: tables.unwrap_or_default(),
            slopes: alibi_slopes_log2(case.problem.scores.alibi_slopes.as_deref().unwrap_or(&[])),
            workspace,
            workspace_at,
        })
    }

    pub(super) fn is_zeroed(&self, plan: &LaunchPlan) -> bool {
        let first = (self.workspace_at - self.workspace.as_ptr().addr()) / 8;
        self.workspace[first..][..plan.zeroed_bytes() / 8]
            .iter()
            .all(|&x| x == 0)
    }
}
