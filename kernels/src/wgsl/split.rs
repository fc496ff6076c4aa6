//! How the decode kernels split a step into workgroups. A split changes speed, never bits.

use attn_core::{
    Problem,
    segments::{SEGMENT, num_tiles},
};

/// Workgroups below which each takes a tile instead of a segment: a GPU runs as many at once, and waits for them.
const FEW_WORKGROUPS: usize = 512;

/// The tokens that one workgroup of `decode_split.wgsl` attends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    /// A segment, whose state the workgroup folds.
    Segment,
    /// A tile, which `decode_merge.wgsl` folds into its segment.
    Tile,
}

/// Blocks of `rows` query rows of one KV head.
pub fn row_blocks(problem: &Problem, rows: usize) -> usize {
    (problem.heads_per_kv() * problem.max_q_len()).div_ceil(rows)
}

impl Split {
    /// The split that is asked for, or the faster one.
    pub fn choose(problem: &Problem, rows: usize, asked: Option<Split>) -> Self {
        let few = Split::Segment.partials(problem, rows) < FEW_WORKGROUPS;
        asked.unwrap_or(if few { Split::Tile } else { Split::Segment })
    }

    /// Tiles of one split.
    pub fn tiles(self) -> usize {
        match self {
            Split::Segment => SEGMENT,
            Split::Tile => 1,
        }
    }

    /// Splits of one segment, at most.
    pub fn per_segment(self) -> usize {
        SEGMENT / self.tiles()
    }

    /// Splits of one sequence and KV head.
    pub fn of_sequence(self, kv_len: usize) -> usize {
        num_tiles(kv_len).div_ceil(self.tiles())
    }

    /// Splits of one KV head, over all sequences.
    pub fn count(self, problem: &Problem) -> usize {
        let lens = problem.kv_lens.iter();
        lens.map(|&len| self.of_sequence(len)).sum()
    }

    /// Workgroups of `decode_split.wgsl`, over all sequences, KV heads and row blocks: each leaves a partial. A number that saturates
    /// exceeds every limit.
    pub fn partials(self, problem: &Problem, rows: usize) -> usize {
        self.count(problem)
            .saturating_mul(problem.num_kv_heads)
            .saturating_mul(row_blocks(problem, rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::Heads;

    #[test]
    fn few_workgroups_take_tiles() {
        let split = |kv_lens: &[usize], asked| {
            let problem = Problem::new(Heads::new(32, 8, 128), kv_lens.to_vec());
            Split::choose(&problem, 4, asked)
        };
        for (kv_lens, want) in [
            (&[1][..], Split::Tile),
            (&[8192], Split::Tile),
            (&[8192, 8192], Split::Segment), // 512 workgroups
            (&[1, 65_537], Split::Segment),
        ] {
            assert_eq!(split(kv_lens, None), want, "{kv_lens:?}");
        }
        assert_eq!(split(&[1], Some(Split::Segment)), Split::Segment);
        assert_eq!(split(&[8192; 64], Some(Split::Tile)), Split::Tile);
        assert_eq!(split(&[65_537], Some(Split::Tile)), Split::Tile);
    }
}
