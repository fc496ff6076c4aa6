//! The parameter blocks of the CUDA kernels. One definition gives each Rust struct and its text in `kernels/cuda/common/params.h`.
//!
//! `ATTN_UPDATE=1 cargo test -p attn-kernels` rewrites `params.h`; without it the same test fails if the file is not current.

#[macro_use]
mod block;

use std::{fmt::Write, mem::size_of};

use self::block::{Block, Count, Field, write_block};
use super::instance::SCHEMES;

impl Count for FastDivmod {}
impl Count for DecodeParams {}

blocks! {
    /// A divisor prepared by the host; `divmod.cuh` divides numbers below 2^31 by it: `(2n · multiplier) >> 32 >> shift`.
    struct FastDivmod {
        /// Number to divide by.
        divisor: u32 = "unsigned int",
        /// 2^(31 + shift) / divisor, rounded up.
        multiplier: u32 = "unsigned int",
        /// log2 of the first power of two from the divisor on.
        shift: u32 = "unsigned int",
    }

    /// Query tokens of a sequence that are attended together.
    struct QueryBlock {
        /// The sequence.
        sequence: i32 = "int",
        /// The first token's place among the query tokens of all sequences.
        first: i32 = "int",
        /// How many they are.
        tokens: i32 = "int",
        /// How many query tokens of the sequence come after them.
        behind: i32 = "int",
    }

    /// Parameters of the decode kernels. Addresses are device addresses, 0 for null.
    struct DecodeParams {
        /// Queries [query tokens, num_q_heads, head_dim].
        q: u64 = "const void*",
        /// Outputs [query tokens, num_q_heads, head_dim].
        out: u64 = "void*",
        /// f32 [query tokens, num_q_heads], or null.
        lse: u64 = "float*",
        /// Pages: the pool [page][kv_head][run]. Rows: codes of K.
        k: u64 = "const unsigned char*",
        /// Rows: codes of V.
        v: u64 = "const unsigned char*",
        /// Rows: f16 scales of K, or null for schemes without scales.
        k_scales: u64 = "const unsigned short*",
        /// Rows: f16 scales of V, or null for schemes without scales.
        v_scales: u64 = "const unsigned short*",
        /// Rows: bytes from one sequence or page, KV head, token of K's codes to the next.
        k_strides: [i64; 3] = "long long",
        /// Rows: bytes from one sequence or page, KV head, token of V's codes to the next.
        v_strides: [i64; 3] = "long long",
        /// Rows: elements from one sequence or page, KV head, token of K's scales to the next.
        k_scale_strides: [i64; 3] = "long long",
        /// Rows: elements from one sequence or page, KV head, token of V's scales to the next.
        v_scale_strides: [i64; 3] = "long long",
        /// Pages and pages of rows: u32 [batch][page_table_stride].
        page_table: u64 = "const unsigned int*",
        /// Pages: u32 [batch][F + residual_ring], where F pages, or one, hold a tile: the residual page of home page i at i below F, else at F + i mod residual_ring. Null where no scheme has a window.
        residual_pages: u64 = "const unsigned int*",
        /// i32 [batch].
        kv_lens: u64 = "const int*",
        /// f32 [num_kv_heads], or null.
        k_tensor_scales: u64 = "const float*",
        /// f32 [num_kv_heads], or null.
        v_tensor_scales: u64 = "const float*",
        /// f32 [num_q_heads], each multiplied by log2 e, or null.
        alibi_slopes: u64 = "const float*",
        /// f32 [num_q_heads], or null.
        sinks: u64 = "const float*",
        /// [batch], or null where sequence b has the query tokens from b · q_len on. Blocks without tokens come last.
        query_blocks: u64 = "const QueryBlock*",
        /// Workspace: O of the partials [partial][row][head_dim]. Zero between launches where low_latency.cu merges through global memory.
        partial_o: u64 = "float*",
        /// Workspace: maximum and sum of the partials [partial][row]. Zero between launches as partial_o.
        partial_max_sum: u64 = "float2*",
        /// Workspace: arrival counts [query block][num_kv_heads][row_blocks], zero between launches.
        counters: u64 = "unsigned long long*",
        /// many_rows.cu: where in partial_o the states of rows begin that a warpgroup attends, in floats.
        row_states_at: u64 = "unsigned long long",
        /// fl(softmax_scale · log2 e).
        log2_scale: f32 = "float",
        /// fl(2 / softcap), or 0 without a soft cap.
        softcap_inner: f32 = "float",
        /// fl(softcap · log2 e).
        softcap_outer: f32 = "float",
        /// Query blocks: sequences, where query_blocks is null.
        batch: i32 = "int",
        /// Query heads.
        num_q_heads: i32 = "int",
        /// KV heads.
        num_kv_heads: i32 = "int",
        /// Query heads per KV head.
        heads_per_kv: i32 = "int",
        /// Query tokens of a block, at most.
        q_len: i32 = "int",
        /// ceil(heads_per_kv · q_len / rows per CTA).
        row_blocks: i32 = "int",
        /// Entries of the page table per sequence.
        page_table_stride: i32 = "int",
        /// Places for partials per work item (query block, KV head, row block).
        max_partials: i32 = "int",
        /// Tokens to the left of the query that it sees, or -1 without a window.
        window_left: i32 = "int",
        /// Tokens of a chunk, of which a query sees its own alone, or 0 without chunks.
        chunk: i32 = "int",
        /// Whether the mask is causal.
        causal: i32 = "int",
        /// low_latency.cu: whether a partial is always a segment's state; else a span's, where sequences are as long as planned.
        partial_per_segment: i32 = "int",
        /// Pages: bytes from one page to the next.
        page_stride: i32 = "int",
        /// Divides by heads_per_kv.
        heads_per_kv_divmod: FastDivmod = "FastDivmod",
        /// Divides by row_blocks.
        row_blocks_divmod: FastDivmod = "FastDivmod",
        /// Divides by the CTAs of the grid's first axis.
        ctas_divmod: FastDivmod = "FastDivmod",
        /// Divides by the grid's CTAs over those that share an SM.
        sms_divmod: FastDivmod = "FastDivmod",
        /// New tokens of each sequence, if the launch ahead is an append that writes them: all else may be read while it runs. Else 0.
        appended: i32 = "int",
        /// Number format of queries and outputs: Dtype.
        dtype: i32 = "int",
        /// Slots of a sequence that the residual pages of its last home pages share, a power of two; 0 where no scheme has a window.
        residual_ring: u32 = "unsigned int",
        /// ATTN_SPANS: rows of a span in partial_o and partial_max_sum, which then are the caller's, [span][row].
        span_rows: u32 = "unsigned int",
        /// ATTN_SPANS: i32 [batch], tokens of each sequence that follow those of kv_lens in other shards; null for none.
        tokens_after: u64 = "const int*",
        /// ATTN_SPANS: i32 [batch], tokens of each sequence that lie in shards ahead; null for none.
        tokens_before: u64 = "const int*",
        /// Pages: centres of K, [row][num_kv_heads][2][head_dim] in bf16, which keys lack; null: none.
        centres: u64 = "const unsigned short*",
        /// With centres: u32, the row of each sequence's centres; null: the sequence's number.
        centre_rows: u64 = "const unsigned int*",
        /// Elements from one row of centres to the next.
        centre_stride: u64 = "unsigned long long",
        /// Entries of centre_rows from one sequence to the next.
        centre_rows_stride: i32 = "int",
        /// many_rows.cu, pages of dequantize.cu: whether queries are rounded to f16, as K was; f32 queries are the sum of two f16 elsewhere.
        rounds_queries: i32 = "int",
        /// many_rows.cu, pages of dequantize.cu: tiles that a row reads with residuals; 0: none.
        fine_window: i32 = "int",
        /// many_rows.cu, pages of dequantize.cu: from a tile's page to that with residuals.
        fine_pages: u32 = "unsigned int",
    }

    /// Parameters of `query_blocks.cu`.
    struct QueryBlocksParams {
        /// i32 [batch + 1]: the first query token of each sequence, and the end of the last one.
        cu_seqlens_q: u64 = "const int*",
        /// List to fill; entries behind the blocks have no tokens.
        blocks: u64 = "QueryBlock*",
        /// Sequences.
        batch: i32 = "int",
        /// Entries of the list.
        num_blocks: i32 = "int",
        /// Query tokens of a block, at most.
        block_tokens: i32 = "int",
        /// Query tokens that there are at most.
        query_tokens: i32 = "int",
    }

    /// Tensor maps of rows [sequence or page][KV head][token][byte], which the driver encoded.
    #[repr(align(64))]
    struct RowMaps {
        /// Map of K's codes.
        k: [u64; 16] = "alignas(64) long long",
        /// Map of V's codes.
        v: [u64; 16] = "long long",
        /// Whether the maps are set; some strides have none.
        are_set: i32 = "int",
    }

    /// Parameters of `append.cu`.
    struct AppendParams {
        /// New K [token][num_kv_heads][head_dim].
        k: u64 = "const void*",
        /// New V [token][num_kv_heads][head_dim].
        v: u64 = "const void*",
        /// Pages [page][kv_head][run].
        pool: u64 = "unsigned char*",
        /// u32 [batch][page_table_stride].
        page_table: u64 = "const unsigned int*",
        /// u32 [batch][F + residual_ring], as in DecodeParams; with slots u32 [tokens], NO_PAGE for none. Null where no scheme has a window.
        residual_pages: u64 = "const unsigned int*",
        /// i32 [batch], the new tokens included.
        kv_lens: u64 = "const int*",
        /// i64 [tokens]: where each token goes, page * page_size + token of the page, or negative for nowhere. Null: behind its sequence's tokens.
        slots: u64 = "const long long*",
        /// f32 [num_kv_heads], or null.
        k_tensor_scales: u64 = "const float*",
        /// f32 [num_kv_heads], or null.
        v_tensor_scales: u64 = "const float*",
        /// By slots: centres of K, [row][num_kv_heads][2][head_dim] in bf16, which are taken off keys; null: none.
        centres: u64 = "unsigned short*",
        /// With centres: u32 [tokens], the row of the centres of the token's sequence.
        centre_rows: u64 = "const unsigned int*",
        /// With centres: i32 [tokens], the token's number in its sequence. The first one's key makes the first centre.
        centre_positions: u64 = "const int*",
        /// Elements from one row of centres to the next.
        centre_stride: u64 = "unsigned long long",
        /// Elements from one token of K to the next.
        k_token_stride: i64 = "long long",
        /// Elements from one token of V to the next.
        v_token_stride: i64 = "long long",
        /// Bytes from one page to the next.
        page_stride: u64 = "unsigned long long",
        /// With rotary positions: [num_positions][rotary_dim], the cosines of a position's pairs, then their sines.
        cos_sin: u64 = "const void*",
        /// With rotary positions: i64 [tokens]; null: a token's position is its number in its sequence.
        positions: u64 = "const long long*",
        /// With rotary positions: queries [tokens][num_q_heads][head_dim], in K's number format, or null.
        q: u64 = "const void*",
        /// Where rotated queries go.
        q_out: u64 = "void*",
        /// Elements from one token of q to the next.
        q_token_stride: i64 = "long long",
        /// Elements from one token of q_out to the next.
        q_out_token_stride: i64 = "long long",
        /// Rows of cos_sin.
        num_positions: i64 = "long long",
        /// New tokens of each sequence; those of sequence b start at b * tokens. With slots: all new tokens.
        tokens: i32 = "int",
        /// Sequences.
        batch: i32 = "int",
        /// KV heads.
        num_kv_heads: i32 = "int",
        /// Entries of the page table per sequence.
        page_table_stride: i32 = "int",
        /// Number format of K and V: Dtype.
        dtype: i32 = "int",
        /// Whether the next launch is a decode that knows which pages this one writes.
        is_followed: i32 = "int",
        /// Slots of a sequence that the residual pages of its last home pages share, a power of two; 0 where no scheme has a window.
        residual_ring: u32 = "unsigned int",
        /// Query heads that are rotated.
        num_q_heads: i32 = "int",
        /// Elements of a head that are rotated, a multiple of 4.
        rotary_dim: i32 = "int",
        /// Number format of cos_sin: Dtype.
        cos_sin_dtype: i32 = "int",
        /// Whether pairs are neighbours; else half of rotary_dim lies between them.
        is_interleaved: i32 = "int",
        /// With centres: which tokens are stored, CentreTokens.
        centre_tokens: i32 = "int",
    }

    /// Parameters of `centre.cu`.
    struct CentreParams {
        /// Pages [page][kv_head][run].
        pool: u64 = "const unsigned char*",
        /// Centres of K, [row][num_kv_heads][2][head_dim] in bf16: the first ones are read, the second ones written.
        centres: u64 = "unsigned short*",
        /// First tiles, u32 [9] of each: the row of its centres, up to four home pages, and their residual pages, which are not read where K keeps none. Null: those of
        /// which there is the last token, each in one page, whose number is the row of its centres.
        tiles: u64 = "const unsigned int*",
        /// Bytes from one page to the next.
        page_stride: u64 = "unsigned long long",
        /// Elements from one row of centres to the next.
        centre_stride: u64 = "unsigned long long",
        /// Without tiles: as in AppendParams.
        slots: u64 = "const long long*",
        /// Without tiles: as in AppendParams.
        centre_rows: u64 = "const unsigned int*",
        /// Without tiles: as in AppendParams.
        centre_positions: u64 = "const int*",
        /// Without tiles: tokens.
        tokens: i32 = "int",
    }

    /// Parameters of `import.cu`.
    struct ImportParams {
        /// Rows of K.
        k: u64 = "const unsigned char*",
        /// Rows of V.
        v: u64 = "const unsigned char*",
        /// f16 scales of K, or null for schemes without scales.
        k_scales: u64 = "const unsigned short*",
        /// f16 scales of V, or null for schemes without scales.
        v_scales: u64 = "const unsigned short*",
        /// Bytes from one sequence, KV head, token of K to the next.
        k_strides: [i64; 3] = "long long",
        /// Bytes from one sequence, KV head, token of V to the next.
        v_strides: [i64; 3] = "long long",
        /// Elements from one sequence, KV head, token of K's scales to the next.
        k_scale_strides: [i64; 3] = "long long",
        /// Elements from one sequence, KV head, token of V's scales to the next.
        v_scale_strides: [i64; 3] = "long long",
        /// Pages [page][kv_head][run].
        pool: u64 = "unsigned char*",
        /// u32 [batch][page_table_stride].
        page_table: u64 = "const unsigned int*",
        /// i32 [batch].
        kv_lens: u64 = "const int*",
        /// KV heads.
        num_kv_heads: i32 = "int",
        /// Entries of the page table per sequence.
        page_table_stride: i32 = "int",
    }

    /// Parameters of `export.cu`.
    struct ExportParams {
        /// Rows of K [token][num_kv_heads][head_dim], or null.
        k: u64 = "void*",
        /// Rows of V [token][num_kv_heads][head_dim], or null.
        v: u64 = "void*",
        /// Pages [page][kv_head][run].
        pool: u64 = "const unsigned char*",
        /// u32 [batch][page_table_stride].
        page_table: u64 = "const unsigned int*",
        /// u32 [batch][F + residual_ring], as in DecodeParams; null where no scheme has a window.
        residual_pages: u64 = "const unsigned int*",
        /// i32 [batch]: cached tokens.
        kv_lens: u64 = "const int*",
        /// i32 [batch + 1]: the first row of each sequence's range, and the end of the last one.
        row_starts: u64 = "const int*",
        /// i32 [batch]: the first token of each range, or null for 0.
        first_tokens: u64 = "const int*",
        /// f32 [num_kv_heads], or null.
        k_tensor_scales: u64 = "const float*",
        /// f32 [num_kv_heads], or null.
        v_tensor_scales: u64 = "const float*",
        /// Elements from one token of K to the next.
        k_token_stride: i64 = "long long",
        /// Elements from one token of V to the next.
        v_token_stride: i64 = "long long",
        /// Bytes from one page to the next.
        page_stride: i64 = "long long",
        /// Entries of the page table per sequence.
        page_table_stride: i32 = "int",
        /// Number format of K and V: Dtype.
        dtype: i32 = "int",
        /// Slots of a sequence that the residual pages of its last home pages share, a power of two; 0 where no scheme has a window.
        residual_ring: u32 = "unsigned int",
        /// Unused: the size is a multiple of 8.
        reserved: u32 = "unsigned int",
    }

    /// Parameters of `dequantize.cu`, of `dequantize_rows.cu` and of `gather_pages.cu`.
    struct DequantizeParams {
        /// Those of a step that would attend the cache as it is.
        step: DecodeParams = "DecodeParams",
        /// Pages of 64 tokens to write.
        pages: u64 = "unsigned char*",
        /// Their table to write, u32 [batch][pages_each].
        table: u64 = "unsigned int*",
        /// What the numbers of each KV head count, to write: f32 [2][num_kv_heads], of K and of V. Not where bytes are copied.
        scales: u64 = "float*",
        /// Where bytes are copied, and read with residuals: the table of the pages with these to write, u32 [batch][1 + residual_ring].
        residual_table: u64 = "unsigned int*",
        /// Pages to write per sequence.
        pages_each: u32 = "unsigned int",
        /// From a tile's page to that with residuals.
        fine_pages: u32 = "unsigned int",
        /// Entries of the step's query_blocks.
        num_blocks: i32 = "int",
        /// Entries of `residual_table` per sequence, but for the first: a power of two.
        residual_ring: u32 = "unsigned int",
    }

    /// Parameters of `copy_pages.cu`.
    struct CopyPagesParams {
        /// Pages to read.
        from: u64 = "const unsigned char*",
        /// Pages to write.
        to: u64 = "unsigned char*",
        /// i64 [pair][2]: the page to read and the page to write.
        pairs: u64 = "const long long*",
        /// Bytes from one page to the next where pages are read.
        from_stride: i64 = "long long",
        /// Bytes from one page to the next where pages are written.
        to_stride: i64 = "long long",
        /// Pages that may be read.
        from_pages: i64 = "long long",
        /// Pages that may be written.
        to_pages: i64 = "long long",
        /// Bytes of a page, a multiple of 16.
        page_bytes: u64 = "unsigned long long",
    }

    /// Parameters of `merge_states.cu`.
    struct MergeStatesParams {
        /// Outputs [state][row][head_dim].
        outs: u64 = "const void*",
        /// f32 [state][row].
        lses: u64 = "const float*",
        /// Merged outputs [row][head_dim].
        out: u64 = "void*",
        /// f32 [row], or null.
        lse: u64 = "float*",
        /// Elements from one state's outputs to the next one's.
        out_stride: i64 = "long long",
        /// Elements from one state's log-sum-exps to the next one's.
        lse_stride: i64 = "long long",
        /// States.
        states: i32 = "int",
        /// Rows.
        rows: i32 = "int",
        /// Elements of a row, a multiple of 4 up to 576.
        head_dim: i32 = "int",
        /// Number format of the states' outputs: Dtype.
        in_dtype: i32 = "int",
        /// Number format of the merged outputs: Dtype.
        out_dtype: i32 = "int",
        /// Unused: the size is a multiple of 8.
        reserved: u32 = "unsigned int",
    }

    /// Parameters of `merge_spans.cu`.
    struct MergeSpansParams {
        /// Maximum and sum of each row's states [state][rows_apart], in the order of their tokens; a maximum of -inf where the row sees no token.
        max_sums: u64 = "const float2*",
        /// O of the states [state][rows_apart][head_dim].
        o: u64 = "const float*",
        /// Outputs [row][head_dim].
        out: u64 = "void*",
        /// f32 [row], or null.
        lse: u64 = "float*",
        /// f32 [num_q_heads], or null.
        sinks: u64 = "const float*",
        /// f32 [num_kv_heads], or null.
        v_tensor_scales: u64 = "const float*",
        /// Rows from one state to the next.
        rows_apart: u64 = "unsigned long long",
        /// States of a row: spans of all shards.
        states: i32 = "int",
        /// Rows [query token][num_q_heads].
        rows: i32 = "int",
        /// Query heads.
        num_q_heads: i32 = "int",
        /// Query heads per KV head.
        heads_per_kv: i32 = "int",
        /// Number format of out: Dtype.
        dtype: i32 = "int",
        /// Unused: the size is a multiple of 8.
        reserved: u32 = "unsigned int",
    }

    /// Parameters of `check.cu`, beside those of the launch that it checks.
    struct CheckParams {
        /// i32 [4], zeroed: {kind, index, value, limit}.
        report: u64 = "int*",
        /// Slots of an append, as in AppendParams, or null.
        slots: u64 = "const long long*",
        /// Positions of the tokens to append, as in AppendParams, or null.
        positions: u64 = "const long long*",
        /// Rows of the tokens' centres, as in AppendParams, or null.
        centre_rows: u64 = "const unsigned int*",
        /// The tokens' numbers in their sequences, as in AppendParams, beside rows of centres.
        centre_positions: u64 = "const int*",
        /// First query tokens, as in QueryBlocksParams, or null.
        cu_seqlens_q: u64 = "const int*",
        /// Positions that are allowed; 0 where none matters.
        num_positions: i64 = "long long",
        /// The longest length that is allowed.
        max_kv_len: i32 = "int",
        /// Pages in the pool.
        num_pages: u32 = "unsigned int",
        /// Tokens per page; 0 without pages.
        page_size: i32 = "int",
        /// Elements per head.
        head_dim: i32 = "int",
        /// The shortest length that is allowed: the new tokens of an append.
        min_kv_len: i32 = "int",
        /// Query tokens of all sequences; of an append by slots, its tokens.
        query_tokens: i32 = "int",
        /// Entries of a list of query blocks that the device has made, which says how many query tokens there are; 0 without one.
        num_blocks: i32 = "int",
        /// Rows of centres.
        num_centre_rows: u32 = "unsigned int",
    }

    /// Parameters of `grid_functions.cu`.
    struct GridFunctionsParams {
        /// f32 [num_points]: 2^(first_point/64), 2^((first_point + 1)/64), …
        points: u64 = "float*",
        /// f32 [num_scales]: the f16 numbers from +0 on as scales of V, on the grid.
        scales: u64 = "float*",
        /// The first point.
        first_point: i32 = "int",
        /// How many.
        num_points: i32 = "int",
        /// How many scales.
        num_scales: i32 = "int",
        /// Unused: the size is a multiple of 8.
        reserved: u32 = "unsigned int",
    }

    /// Parameters of `read.cu`.
    struct ReadParams {
        /// Buffer to read.
        from: u64 = "const unsigned char*",
        /// Bytes to read, a multiple of 16.
        bytes: u64 = "unsigned long long",
        /// One word, written if the bytes cancel out.
        sink: u64 = "unsigned int*",
    }
}

impl FastDivmod {
    /// Prepares a division by `divisor`. The multiplier's error, at most n/2^31 of 1/divisor, does not reach the next integer.
    pub fn new(divisor: usize) -> Self {
        let divisor = divisor.clamp(1, 1 << 30) as u32;
        let shift = divisor.next_power_of_two().trailing_zeros();
        Self {
            divisor,
            multiplier: (1u64 << (31 + shift)).div_ceil(u64::from(divisor)) as u32,
            shift,
        }
    }
}

/// Which tokens an append by slots stores where keys lack centres.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum CentreTokens {
    /// All; second centres have been made.
    All,
    /// All, one of each sequence at most, of which the last one of a first tile makes the second centre; pages have 64 tokens or more, and K has no window.
    EachWithCentres,
    /// The first ones of their sequences.
    First,
    /// The others of first tiles.
    OfFirstTiles,
    /// Those behind first tiles.
    BehindFirstTiles,
}

/// The names of [`CentreTokens`] in the kernels, in their order.
const CENTRE_TOKENS: [&str; 5] = [
    "ALL_TOKENS",
    "EACH_WITH_CENTRES",
    "FIRST_TOKENS",
    "OF_FIRST_TILES",
    "BEHIND_FIRST_TILES",
];

/// The text of `kernels/cuda/common/params.h`.
pub fn header() -> String {
    let mut text = String::from(
        "// The parameter blocks of the kernels. Generated from kernels/src/cuda/params.rs: edit that file, then run\n\
         // `ATTN_UPDATE=1 cargo test -p attn-kernels`.\n#pragma once\n#include \"common/ptx.cuh\"\n\nnamespace attn {\n",
    );
    text.push_str("\n// How K or V is stored: the values of ATTN_K and ATTN_V.\n");
    writeln!(text, "enum Scheme {{ {} }};", SCHEMES.join(", ")).expect("strings take all");
    text.push_str(
        "\n// Which tokens an append stores where keys lack centres: the values of CentreTokens.\n",
    );
    writeln!(
        text,
        "enum CentreTokens {{ {} }};",
        CENTRE_TOKENS.join(", ")
    )
    .expect("strings take all");
    for block in BLOCKS {
        write_block(&mut text, block);
    }
    text.push_str("\n}  // namespace attn\n");
    text
}

#[cfg(test)]
mod tests;
