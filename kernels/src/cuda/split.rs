//! How work items are split among CTAs and teams, and which way partials go to the merge.

use attn_core::{Problem, arithmetic, segments};

use super::config::{Kernel, KernelConfig, SM_TEAMS};

/// CTAs of a cluster: more are not portable, and were not faster.
pub(super) const MAX_CLUSTER: usize = 8;

/// The way of partials between the teams of a work item; `MergeVia` of `low_latency.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MergeVia {
    /// The work item has one team, which writes the result.
    None,
    /// Distributed shared memory of a cluster.
    Cluster,
    /// Global memory, for any number of CTAs. A partial is a segment's state or a span's.
    Global { segments: bool },
}

impl MergeVia {
    pub(crate) fn kernel(self) -> Kernel {
        match self {
            MergeVia::None | MergeVia::Cluster => Kernel::LowLatencyCluster,
            MergeVia::Global { .. } => Kernel::LowLatencyGlobal,
        }
    }
}

/// A split of every work item among the teams of `low_latency.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Split {
    /// Teams of a CTA.
    pub(crate) teams: usize,
    /// CTAs of a work item.
    pub(crate) ctas: usize,
    pub(crate) via: MergeVia,
    /// Partials of a work item.
    pub(crate) partials: usize,
    /// Partials of the team that has the most.
    pub(crate) partials_each: usize,
    /// Tiles of the team that has the most.
    pub(crate) tiles: usize,
}

impl Split {
    /// `None` if not all CTAs run at once, or a cluster would have more partials than `most`, for which there is shared memory.
    pub(super) fn new(
        problem: &Problem,
        sms: usize,
        [teams, ctas]: [usize; 2],
        via: MergeVia,
        most: usize,
    ) -> Option<Self> {
        let longest = longest(problem);
        let all = teams * ctas;
        let tiles = longest.div_ceil(arithmetic::TILE).max(1);
        let segments = max_segments(longest);
        let spans = segments.div_ceil(arithmetic::SPAN);
        let places = (SM_TEAMS / teams) * sms;
        let in_cluster = via == MergeVia::Cluster;
        // The SMs of a graphics processing cluster, of which there are eight, need not be a multiple of a cluster's.
        let lost = if in_cluster && ctas > 2 {
            8 * (ctas - 2)
        } else {
            0
        };
        if kv_heads(problem).saturating_mul(ctas).saturating_add(lost) > places {
            return None;
        }
        let by_tiles = in_cluster && tiles <= 2 * all;
        let by_segments = match via {
            MergeVia::None => false,
            MergeVia::Cluster => segments <= most,
            MergeVia::Global { segments } => segments,
        };
        let (partials, partial_tiles) = if by_tiles {
            (tiles, 1)
        } else if by_segments {
            (segments, arithmetic::SEGMENT)
        } else {
            (spans, arithmetic::SEGMENT * arithmetic::SPAN)
        };
        let partials_each = partials.div_ceil(all);
        if in_cluster && partials > most {
            return None;
        }
        Some(Split {
            teams,
            ctas,
            via,
            partials,
            partials_each,
            tiles: (partials_each * partial_tiles).min(tiles),
        })
    }
}

/// The longest sequence.
pub(crate) fn longest(problem: &Problem) -> usize {
    problem.kv_lens.iter().copied().max().unwrap_or(0)
}

/// KV heads of all sequences; `usize::MAX` where there would be more.
pub(crate) fn kv_heads(problem: &Problem) -> usize {
    problem.batch().saturating_mul(problem.num_kv_heads)
}

/// Whether kernels of a problem have code for windows, chunks, soft caps and slopes.
pub(crate) fn has_score_mods(problem: &Problem) -> bool {
    let scores = &problem.scores;
    scores.hides_old_tokens() || scores.softcap.is_some() || scores.alibi_slopes.is_some()
}

/// Query rows of a KV head.
pub(crate) fn rows(problem: &Problem) -> usize {
    problem.heads_per_kv() * problem.max_q_len()
}

pub(super) fn row_blocks(config: &KernelConfig, problem: &Problem) -> usize {
    rows(problem).div_ceil(config.rows())
}

/// Segments of a sequence; one where it is empty, since an empty row has a result, too.
pub fn max_segments(max_kv_len: usize) -> usize {
    segments::num_segments(max_kv_len).max(1)
}
