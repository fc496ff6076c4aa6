//! Rows of K and V that are not yet, or no longer, quantized.

use attn_kernels::cuda::params::AppendParams;

use super::dtype::{self, Dtype};
use crate::{handles::DeviceAddress, sizes};

/// Rows of K and V in device memory, `[tokens][num_kv_heads][head_dim]`, sequence after sequence: what appends read and exports write. A token's heads
/// lie side by side. Rows are aligned to 16 bytes, and the caller keeps them alive until the work has run.
#[derive(Debug, Clone, Copy)]
pub struct KvRows {
    /// Rows of K.
    pub k: DeviceAddress,
    /// Rows of V; of latents appends read none.
    pub v: DeviceAddress,
    /// Number format of `k` and `v`.
    pub dtype: Dtype,
    /// Elements from one token of K to the next.
    pub k_token_stride: usize,
    /// Elements from one token of V to the next.
    pub v_token_stride: usize,
}

impl KvRows {
    /// The rows behind so many tokens.
    pub(crate) fn skip_tokens(self, tokens: usize) -> Self {
        let skip = |stride: usize| tokens * stride * self.dtype.bytes();
        KvRows {
            k: self.k.offset(skip(self.k_token_stride)),
            v: self.v.offset(skip(self.v_token_stride)),
            ..self
        }
    }

    /// The strides of K and V as kernels take them.
    pub(super) fn token_strides(&self) -> [i64; 2] {
        sizes::strides([self.k_token_stride, self.v_token_stride])
    }

    /// An append's parameter block with these rows; all other fields are those of `others`.
    pub(super) fn append_params(&self, others: AppendParams) -> AppendParams {
        let [k_token_stride, v_token_stride] = self.token_strides();
        AppendParams {
            k: self.k.get(),
            v: self.v.get(),
            k_token_stride,
            v_token_stride,
            dtype: dtype::code(self.dtype),
            ..others
        }
    }
}
