//! The kernels' parameter blocks: the same bytes as the structs in `kernels/cuda`, asserted here and there.

use std::mem::{offset_of, size_of};

/// `DecodeParams` of `kernels/cuda/params.h`; addresses are device addresses, 0 for null.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "params.h documents each field")]
pub struct DecodeParams {
    pub q: u64,
    pub out: u64,
    pub lse: u64,
    pub k: u64,
    pub v: u64,
    pub k_scales: u64,
    pub v_scales: u64,
    pub k_strides: [i64; 3],
    pub v_strides: [i64; 3],
    pub k_scale_strides: [i64; 3],
    pub v_scale_strides: [i64; 3],
    pub page_table: u64,
    pub tail_pages: u64,
    pub kv_lens: u64,
    pub k_tensor_scales: u64,
    pub v_tensor_scales: u64,
    pub alibi_slopes: u64,
    pub states: u64,
    pub state_ml: u64,
    pub counters: u64,
    pub log2_scale: f32,
    pub softcap_inner: f32,
    pub softcap_outer: f32,
    pub batch: i32,
    pub num_q_heads: i32,
    pub num_kv_heads: i32,
    pub heads_per_kv: i32,
    pub q_len: i32,
    pub row_blocks: i32,
    pub page_table_stride: i32,
    pub max_units: i32,
    pub window_left: i32,
    pub causal: i32,
    pub tile_split: i32,
    pub page_bytes: i32,
    /// The C struct's padding.
    pub padding: i32,
}

const _: () = {
    assert!(size_of::<DecodeParams>() == 288);
    assert!(offset_of!(DecodeParams, k_strides) == 56);
    assert!(offset_of!(DecodeParams, page_table) == 152);
    assert!(offset_of!(DecodeParams, states) == 200);
    assert!(offset_of!(DecodeParams, log2_scale) == 224);
    assert!(offset_of!(DecodeParams, page_bytes) == 280);
};

/// `AppendParams` of `kernels/cuda/append.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "append.cu documents each field")]
pub struct AppendParams {
    pub k: u64,
    pub v: u64,
    pub pool: u64,
    pub page_table: u64,
    pub tail_pages: u64,
    pub kv_lens: u64,
    pub k_tensor_scales: u64,
    pub v_tensor_scales: u64,
    pub k_token_stride: i64,
    pub v_token_stride: i64,
    pub tokens: i32,
    pub num_kv_heads: i32,
    pub page_table_stride: i32,
    pub dtype: i32,
}

const _: () = assert!(size_of::<AppendParams>() == 96);

/// `ImportParams` of `kernels/cuda/import.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "import.cu documents each field")]
pub struct ImportParams {
    pub k: u64,
    pub v: u64,
    pub k_scales: u64,
    pub v_scales: u64,
    pub k_strides: [i64; 3],
    pub v_strides: [i64; 3],
    pub k_scale_strides: [i64; 3],
    pub v_scale_strides: [i64; 3],
    pub pool: u64,
    pub page_table: u64,
    pub kv_lens: u64,
    pub num_kv_heads: i32,
    pub page_table_stride: i32,
}

const _: () = assert!(size_of::<ImportParams>() == 160);

/// `CheckParams` of `kernels/cuda/check.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "check.cu documents each field")]
pub struct CheckParams {
    pub report: u64,
    pub max_kv_len: i32,
    pub num_pages: u32,
    pub page_size: i32,
    pub head_dim: i32,
    pub has_tail: i32,
    pub min_kv_len: i32,
}

const _: () = assert!(size_of::<CheckParams>() == 32);

/// `ReadParams` of `kernels/cuda/read.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "read.cu documents each field")]
pub struct ReadParams {
    pub from: u64,
    pub bytes: u64,
    pub sink: u64,
}

const _: () = assert!(size_of::<ReadParams>() == 24);
