//! Device addresses of a decode launch.

use attn_core::{Error, PageLayout, arithmetic::LOG2_E};

use super::{dtype::Dtype, kv::DeviceKv, kv::PagedSequences, page_centres::PageCentres};
use crate::handles::DeviceAddress;

/// Device addresses of one decode launch.
#[derive(Debug, Clone, Copy)]
pub struct DecodeArgs {
    /// Queries `[query tokens, num_q_heads, head_dim]`.
    pub q: DeviceAddress,
    /// Outputs `[query tokens, num_q_heads, head_dim]`.
    pub out: DeviceAddress,
    /// Number format of `q` and `out`. 16-bit queries are widened exactly; 16-bit outputs are the f32 ones rounded to nearest even,
    /// infinite where f16 has no more room.
    pub dtype: Dtype,
    /// f32 `[query tokens, num_q_heads]`, or null.
    pub lse: DeviceAddress,
    /// K and V. Page tables reach the longest length that the plan is for.
    pub kv: DeviceKv,
    /// The list of query blocks: [`NativePlan::query_blocks`](crate::native::NativePlan::query_blocks) in device memory, or what [`ListBlocksArgs`](crate::native::ListBlocksArgs) has listed; null where
    /// [`NativePlan::query_blocks_bytes`](crate::native::NativePlan::query_blocks_bytes) is 0.
    pub query_blocks: DeviceAddress,
    /// f32 `[num_q_heads]`, each slope times log2 e rounded to f32 ([`alibi_slopes_log2`]); null without.
    pub alibi_slopes: DeviceAddress,
    /// f32 `[num_q_heads]`, the sinks as [`Problem::sinks`](attn_core::Problem::sinks) takes them: magnitudes up to 1e6. Null without sinks, which is an error
    /// if the plan's problem has some.
    pub sinks: DeviceAddress,
    /// [`NativePlan::workspace_bytes`](crate::native::NativePlan::workspace_bytes) bytes, aligned to 256, of which the first [`NativePlan::zeroed_bytes`](crate::native::NativePlan::zeroed_bytes) are zero.
    pub workspace: DeviceAddress,
    /// [`NativePlan::scratch_bytes`](crate::native::NativePlan::scratch_bytes) bytes, aligned to 256, that hold nothing from launch to launch: launches of any plans, one after
    /// another, may share them. Null: they are the workspace's, behind those that are zero.
    pub scratch: DeviceAddress,
}

impl DecodeArgs {
    /// The addresses that every launch has; those of `lse`, query blocks, slopes, sinks and scratch are null.
    #[must_use]
    pub fn new(
        q: DeviceAddress,
        out: DeviceAddress,
        dtype: Dtype,
        kv: DeviceKv,
        workspace: DeviceAddress,
    ) -> Self {
        DecodeArgs {
            q,
            out,
            dtype,
            lse: DeviceAddress::NULL,
            kv,
            query_blocks: DeviceAddress::NULL,
            alibi_slopes: DeviceAddress::NULL,
            sinks: DeviceAddress::NULL,
            workspace,
            scratch: DeviceAddress::NULL,
        }
    }
}

/// ALiBi slopes as the kernels take them: each times log2 e.
#[must_use]
pub fn alibi_slopes_log2(slopes: &[f32]) -> Vec<f32> {
    slopes.iter().map(|slope| slope * LOG2_E).collect()
}

/// Centres of K that keys in pages lack: those of a [`KvCache`](attn_core::KvCache) on the device, or those in a pool's pages.
#[derive(Debug, Clone, Copy)]
pub struct CentresArgs {
    /// Rows of bf16 `[num_kv_heads][2][head_dim]`.
    pub centres: DeviceAddress,
    /// Elements from one row to the next.
    pub stride: usize,
    /// u32: the row of each sequence's centres. Null: the sequence's number, which spares a load ahead of that of the centres.
    pub rows: DeviceAddress,
    /// Entries of `rows` from one sequence to the next.
    pub rows_stride: usize,
}

impl CentresArgs {
    /// Rows that lie side by side, each `len` elements, and whose numbers do so, too.
    #[must_use]
    pub fn side_by_side(centres: DeviceAddress, len: usize, rows: DeviceAddress) -> Self {
        CentresArgs {
            centres,
            stride: len,
            rows,
            rows_stride: 1,
        }
    }

    /// Those behind each sequence's first page, as [`PageCentres`](super::PageCentres) has them.
    ///
    /// # Errors
    /// Those of [`PageCentres::new`](super::PageCentres::new).
    pub fn in_first_pages(of: &PagedSequences, layout: &PageLayout) -> Result<Self, Error> {
        let PageCentres { at, stride } = PageCentres::new(&of.pool, layout)?;
        Ok(CentresArgs {
            centres: at,
            stride,
            rows: of.page_table,
            rows_stride: of.page_table_stride,
        })
    }
}

/// Where the states of a shard's spans go, as [`SpanStates`](attn_core::SpanStates) holds them: `spans` is [`NativePlan::spans`](crate::native::NativePlan::spans), rows are query tokens
/// times query heads.
#[derive(Debug, Clone, Copy)]
pub struct SpansArgs {
    /// i32 `[batch]`: tokens of each sequence that lie in shards ahead of those of `kv_lens`, multiples of 1024. Null for none: the shards are the sequences' first
    /// ones.
    pub tokens_before: DeviceAddress,
    /// i32 `[batch]`: tokens of each sequence that follow those of `kv_lens` in other shards; query tokens are the last of all. Null for none.
    pub tokens_after: DeviceAddress,
    /// f32 `[spans][rows][2]`: maximum, −∞ where a row sees no token of a span, and sum.
    pub max_sums: DeviceAddress,
    /// f32 `[spans][rows][head_dim]`; not written where a row sees no token.
    pub o: DeviceAddress,
}
