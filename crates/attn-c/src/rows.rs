//! Rows in the caller's memory: new tokens, queries and outputs.

use std::ffi::c_void;

use attn::backends::cuda::native::Dtype as CudaDtype;

use crate::{
    arguments::{self, Config, Dtype},
    status::{Failure, Status},
};

/// New tokens, `[tokens][kv_heads][head_dim]`: those of the first sequence, then those of the next. A head's elements are contiguous; what lies
/// between rows is not read.
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
    /// Elements from one token of K to the next; 0: kv_heads times the next head's.
    pub k_token_stride: usize,
    /// Elements from one token of V to the next; 0: kv_heads times the next head's.
    pub v_token_stride: usize,
    /// Elements from one head of K to the next; 0: head_dim. Device memory has no other.
    pub k_head_stride: usize,
    /// Elements from one head of V to the next; 0: head_dim. Device memory has no other.
    pub v_head_stride: usize,
}

// SAFETY: `repr(C)`, and `struct_size` is first.
unsafe impl Config for Tokens {
    const NAME: &'static str = "attn_tokens";
}

impl Tokens {
    /// Refuses heads that lie apart, which kernels do not read.
    pub(crate) fn check_on_device(&self, head_dim: usize) -> Result<(), Failure> {
        check_stride("k_head_stride", self.k_head_stride, head_dim)?;
        check_stride("v_head_stride", self.v_head_stride, head_dim)
    }
}

/// Queries and outputs, `[query tokens][q_heads][head_dim]`: those of the step's first sequence, then those of the next. A head's elements are
/// contiguous; what lies between rows is neither read nor written, and nothing else writes it while the call runs.
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
    /// Elements from one query token to the next; 0: q_heads times the next head's. Device memory has no other, here and below.
    pub q_token_stride: usize,
    /// Elements from one head of a query to the next; 0: head_dim.
    pub q_head_stride: usize,
    /// Elements from one token of the outputs to the next; 0: q_heads times the next head's.
    pub out_token_stride: usize,
    /// Elements from one head of the outputs to the next; 0: head_dim.
    pub out_head_stride: usize,
}

// SAFETY: `repr(C)`, and `struct_size` is first.
unsafe impl Config for Rows {
    const NAME: &'static str = "attn_rows";
}

impl Rows {
    /// Refuses rows that lie apart, which kernels neither read nor write.
    pub(crate) fn check_on_device(&self, [heads, dim]: [usize; 2]) -> Result<(), Failure> {
        let token = heads.saturating_mul(dim);
        check_stride("q_token_stride", self.q_token_stride, token)?;
        check_stride("q_head_stride", self.q_head_stride, dim)?;
        check_stride("out_token_stride", self.out_token_stride, token)?;
        check_stride("out_head_stride", self.out_head_stride, dim)
    }
}

fn check_stride(what: &str, given: usize, own: usize) -> Result<(), Failure> {
    if given == 0 || given == own {
        return Ok(());
    }
    let sentence = format!("{what} is {given}; in device memory it is {own}, or 0 for the same");
    Err(Failure::new(Status::Shape, sentence))
}

/// The kernels' name of an attn_dtype.
pub(crate) fn on_device(dtype: u32) -> Result<CudaDtype, Failure> {
    Ok(match arguments::dtype(dtype)? {
        Dtype::F32 => CudaDtype::F32,
        Dtype::F16 => CudaDtype::F16,
        Dtype::Bf16 => CudaDtype::Bf16,
    })
}
