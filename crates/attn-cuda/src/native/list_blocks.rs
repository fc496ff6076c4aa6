//! The list of a step's query blocks, made on the device from what each sequence brings.

use attn_core::{Error, Problem};
use attn_kernels::cuda::{
    Instance,
    params::{CheckParams, DecodeParams, QueryBlocksParams},
};

use super::{check::Checked, grid::Grid, launch_plan::LaunchPlan, op::Op};
use crate::{handles::DeviceAddress, sizes};

/// Threads of `query_blocks.cu`, and the most CTAs: each counts all sequences.
const THREADS: usize = 256;
const MOST_LISTERS: usize = 32;

/// The list of a step's query blocks, for a plan of [`PlanKind::Ragged`](crate::native::PlanKind), whose
/// [`NativePlan::list_blocks`](crate::native::NativePlan::list_blocks) has the kernel. Once for a step: the launches of all its layers read the list. Sequences may bring other numbers of query
/// tokens each time that a captured graph runs.
///
/// # Safety
/// - No launch that reads the list runs meanwhile.
/// - On the device, the numbers of `cu_seqlens_q` never fall, and end at [`NativePlan::max_query_tokens`](crate::native::NativePlan::max_query_tokens) at most. (Others give a list of other blocks, and
///   no write elsewhere.)
#[derive(Debug, Clone, Copy)]
pub struct ListBlocksArgs {
    /// i32 or u32 `[batch + 1]`: the first query token of each sequence, counted through all of them, then the end of the last one's. A sequence without
    /// query tokens costs nothing.
    pub cu_seqlens_q: DeviceAddress,
    /// Where the list goes: [`NativePlan::query_blocks_bytes`](crate::native::NativePlan::query_blocks_bytes) bytes.
    pub to: DeviceAddress,
}

// SAFETY: `attn_query_blocks` takes one QueryBlocksParams, asserted on both sides, and writes `num_blocks` entries of the list alone.
unsafe impl Op for ListBlocksArgs {
    /// The numbers of sequences, blocks and tokens of a plan; addresses do not matter.
    type Shape = QueryBlocksParams;
    type Params = QueryBlocksParams;
    const DOING: &'static str = "listing query blocks";

    fn instances(_: &QueryBlocksParams) -> Result<Vec<Instance>, Error> {
        Ok(vec![Instance::QueryBlocks])
    }

    fn params(&self, numbers: &QueryBlocksParams) -> Result<QueryBlocksParams, Error> {
        Ok(QueryBlocksParams {
            cu_seqlens_q: self.cu_seqlens_q.get(),
            blocks: self.to.get(),
            ..*numbers
        })
    }

    fn grid(&self, numbers: &QueryBlocksParams) -> Grid {
        let ctas = numbers.num_blocks.unsigned_abs() as usize;
        Grid::new([ctas.div_ceil(THREADS).min(MOST_LISTERS), 1, 1], THREADS)
    }

    fn checked(&self, numbers: &QueryBlocksParams) -> Result<Option<Checked>, Error> {
        Ok(Some(Checked {
            doing: "checking the query tokens",
            arrays: DecodeParams {
                batch: numbers.batch,
                ..DecodeParams::default()
            },
            limits: CheckParams {
                cu_seqlens_q: self.cu_seqlens_q.get(),
                query_tokens: numbers.query_tokens,
                ..CheckParams::default()
            },
        }))
    }
}

impl LaunchPlan {
    /// The numbers of the list that `query_blocks.cu` makes.
    ///
    /// # Errors
    /// [`Error::Parameter`] for numbers of more than 31 bits.
    pub fn list_numbers(&self, problem: &Problem) -> Result<QueryBlocksParams, Error> {
        Ok(QueryBlocksParams {
            batch: sizes::int("sequences", problem.batch())?,
            num_blocks: sizes::int("query blocks", self.num_blocks)?,
            block_tokens: sizes::int("query tokens", self.block_tokens)?,
            query_tokens: sizes::int("query tokens", problem.query_tokens())?,
            ..QueryBlocksParams::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctas_list_256_blocks_each_and_are_32_at_most() {
        let args = ListBlocksArgs {
            cu_seqlens_q: DeviceAddress::new(0x100),
            to: DeviceAddress::new(0x200),
        };
        let numbers = |num_blocks| QueryBlocksParams {
            batch: 5,
            num_blocks,
            block_tokens: 3,
            query_tokens: 9,
            ..QueryBlocksParams::default()
        };
        let params = args.params(&numbers(7)).unwrap();
        assert_eq!((params.cu_seqlens_q, params.blocks), (0x100, 0x200));
        assert_eq!((params.batch, params.num_blocks), (5, 7));
        let ctas = |blocks| args.grid(&numbers(blocks)).ctas[0];
        assert_eq!([0, 1, 256, 257, i32::MAX].map(ctas), [0, 1, 1, 2, 32]);
        let checked = args.checked(&numbers(7)).unwrap().unwrap();
        assert_eq!((checked.arrays.batch, checked.limits.query_tokens), (5, 9));
        assert_eq!(checked.limits.cu_seqlens_q, 0x100);
    }
}
