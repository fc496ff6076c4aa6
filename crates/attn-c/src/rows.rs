//! Rows in the caller's memory: new tokens, queries and outputs.

use std::ffi::c_void;

use attn::backends::cuda::native::Dtype as CudaDtype;

use crate::{
    arguments::{self, Config, Dtype},
    status::Failure,
};

/// New tokens, `[tokens][kv_heads][head_dim]`: those of the first sequence, then those of the next.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tokens {
    /// sizeof(attn_tokens).
    pub struct_size: usize,
    /// K, after RoPE.
    pub k: *const c_void,
    /// V.
    pub v: *const c_void,
    /// An attn_dtype, of K and V.
    pub dtype: u32,
    /// Elements from one token of K to the next; 0: kv_heads·head_dim.
    pub k_token_stride: usize,
    /// Elements from one token of V to the next; 0: kv_heads·head_dim.
    pub v_token_stride: usize,
}

// SAFETY: `repr(C)`, and `struct_size` is first.
unsafe impl Config for Tokens {
    const NAME: &'static str = "attn_tokens";
}

/// Queries and outputs, `[query tokens][q_heads][head_dim]`: those of the step's first sequence, then those of the next.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// sizeof(attn_rows).
    pub struct_size: usize,
    /// The queries, after RoPE.
    pub q: *const c_void,
    /// The outputs.
    pub out: *mut c_void,
    /// An attn_dtype, of queries and outputs. 16-bit outputs are the 32-bit ones, rounded to nearest even.
    pub dtype: u32,
    /// Log-sum-exps `[query tokens][q_heads]`, or NULL.
    pub lse: *mut f32,
}

// SAFETY: `repr(C)`, and `struct_size` is first.
unsafe impl Config for Rows {
    const NAME: &'static str = "attn_rows";
}

/// The kernels' name of an attn_dtype.
pub(crate) fn on_device(dtype: u32) -> Result<CudaDtype, Failure> {
    Ok(match arguments::dtype(dtype)? {
        Dtype::F32 => CudaDtype::F32,
        Dtype::F16 => CudaDtype::F16,
        Dtype::Bf16 => CudaDtype::Bf16,
    })
}
