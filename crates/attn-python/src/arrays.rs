//! What `attn.torch` passes to launches, attribute by attribute: arrays on the device as capsules, beside the numbers that no array has. A test compares the names with
//! those that Python's calls give, and with the fields of C's structs.

use pyo3::{prelude::*, types::PyCapsule};

use crate::modifiers::Modifiers;

/// The description of a plan, attribute by attribute of Python's.
#[derive(FromPyObject)]
pub struct PlanOptions {
    pub format: String,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub v_dim: usize,
    pub page_size: usize,
    pub q_lens: Vec<usize>,
    pub max_kv_len: usize,
    /// Whether pages are another engine's, of rows.
    pub rows: bool,
    /// Whether appends by slots take rotary positions.
    pub rotary: bool,
    /// Whether the device says how many query tokens each sequence brings.
    pub ragged: bool,
    /// Whether sequences are shards, of whose spans launches leave the states.
    pub spans: bool,
    /// Whether pages have their sequences' centres of K.
    pub centres: bool,
    /// Static scales that launches take with their pages, if they are given now.
    pub k_scales: Option<Vec<f32>>,
    pub v_scales: Option<Vec<f32>>,
    pub modifiers: Modifiers,
}

/// Where the sequences' tokens lie, as capsules of device arrays.
#[derive(FromPyObject)]
pub struct PageArrays<'py> {
    /// uint8, whole pages.
    pub pool: Bound<'py, PyCapsule>,
    /// int32 `[sequences, pages of the longest]`.
    pub page_table: Bound<'py, PyCapsule>,
    /// int32 `[sequences]`.
    pub kv_lens: Bound<'py, PyCapsule>,
    /// int32 `[sequences, residual slots]` for formats with a window.
    pub residual_pages: Option<Bound<'py, PyCapsule>>,
    /// float32 `[KV heads]` for formats with static scales.
    pub k_scales: Option<Bound<'py, PyCapsule>>,
    pub v_scales: Option<Bound<'py, PyCapsule>>,
}

/// Where the centres of K of an append's tokens are, as capsules of device arrays.
#[derive(FromPyObject)]
pub struct CentreArrays<'py> {
    /// int32 `[tokens]`: the page that holds the first tokens of each token's sequence.
    pub first_pages: Bound<'py, PyCapsule>,
    /// int32 `[tokens]`: each token's number in its sequence.
    pub positions: Bound<'py, PyCapsule>,
    /// Whether no sequence brings two tokens.
    pub one_each: bool,
}

/// Another engine's paged cache, as capsules of device arrays.
#[derive(FromPyObject)]
pub struct RowArrays<'py> {
    /// `[pages, tokens, KV heads, dim]`, at any strides but between dims; uint8 for codes of a byte.
    pub k: Bound<'py, PyCapsule>,
    pub v: Bound<'py, PyCapsule>,
    /// int32 `[sequences, pages of the longest]`.
    pub page_table: Bound<'py, PyCapsule>,
    /// int32 `[sequences]`.
    pub kv_lens: Bound<'py, PyCapsule>,
    /// float32 `[KV heads]` for formats with static scales.
    pub k_scales: Option<Bound<'py, PyCapsule>>,
    pub v_scales: Option<Bound<'py, PyCapsule>>,
}

/// Rows that an export writes, as capsules of device arrays.
#[derive(FromPyObject)]
pub struct ExportArrays<'py> {
    /// `[tokens, KV heads, dim]`.
    pub k: Bound<'py, PyCapsule>,
    pub v: Bound<'py, PyCapsule>,
    /// int32 `[sequences + 1]`: where each sequence's rows begin, then their end.
    pub row_starts: Bound<'py, PyCapsule>,
    /// int32 `[sequences]`; none for ranges that begin with their sequence.
    pub first_tokens: Option<Bound<'py, PyCapsule>>,
    /// Tokens of the longest range.
    pub max_tokens: usize,
}

/// What an attention launch reads and writes beside K and V.
#[derive(FromPyObject)]
pub struct AttendArrays<'py> {
    pub q: Bound<'py, PyCapsule>,
    /// None where the states of spans go elsewhere.
    pub out: Option<Bound<'py, PyCapsule>>,
    pub lse: Option<Bound<'py, PyCapsule>>,
    pub workspace: Bound<'py, PyCapsule>,
    /// uint8, what plans share; none where it is the workspace's.
    pub scratch: Option<Bound<'py, PyCapsule>>,
    pub query_blocks: Option<Bound<'py, PyCapsule>>,
    pub alibi_slopes: Option<Bound<'py, PyCapsule>>,
    pub sinks: Option<Bound<'py, PyCapsule>>,
}

/// Where the states of spans go.
#[derive(FromPyObject)]
pub struct SpanArrays<'py> {
    /// float32 `[spans, rows, 2]`.
    pub max_sums: Bound<'py, PyCapsule>,
    /// float32 `[spans, rows, dim]`.
    pub o: Bound<'py, PyCapsule>,
    /// int32 `[sequences]`; none where no tokens lie ahead.
    pub tokens_before: Option<Bound<'py, PyCapsule>>,
    /// int32 `[sequences]`; none where no tokens follow.
    pub tokens_after: Option<Bound<'py, PyCapsule>>,
}

/// Results of shards to merge, and where those over all tokens go.
#[derive(FromPyObject)]
pub struct MergeArrays<'py> {
    /// `[shards, rows, dim]`.
    pub outs: Bound<'py, PyCapsule>,
    /// float32 `[shards, rows]`.
    pub lses: Bound<'py, PyCapsule>,
    /// `[rows, dim]`.
    pub out: Bound<'py, PyCapsule>,
    /// float32 `[rows]`.
    pub lse: Bound<'py, PyCapsule>,
}

/// What a merge of spans' states reads and writes.
#[derive(FromPyObject)]
pub struct SpanMergeArrays<'py> {
    /// float32 `[states, query tokens, heads, 2]`.
    pub max_sums: Bound<'py, PyCapsule>,
    /// float32 `[states, query tokens, heads, dim]`.
    pub o: Bound<'py, PyCapsule>,
    /// `[query tokens, heads, dim]`.
    pub out: Bound<'py, PyCapsule>,
    /// float32 `[query tokens, heads]`.
    pub lse: Bound<'py, PyCapsule>,
    /// float32 `[heads]`.
    pub sinks: Option<Bound<'py, PyCapsule>>,
    /// float32 `[KV heads]`, for formats with static scales.
    pub v_scales: Option<Bound<'py, PyCapsule>>,
    pub kv_heads: usize,
}

/// How an append rotates K and queries.
#[derive(FromPyObject)]
pub struct RotaryArrays<'py> {
    /// Floats `[positions, rotary_dim]`: cosines of a position's pairs, then their sines.
    pub cos_sin: Bound<'py, PyCapsule>,
    /// int64 `[tokens]`; none for the tokens' numbers in their sequences.
    pub positions: Option<Bound<'py, PyCapsule>>,
    /// `[tokens, heads, dim]` in K's type, rotated in place.
    pub q: Option<Bound<'py, PyCapsule>>,
    pub interleaved: bool,
}
