//! Rows in the caller's memory: new tokens, queries and outputs.

use std::ffi::c_void;

use attn::{
    HeadDim, PageLayout, Problem, RotaryStyle,
    backends::cuda::native::{
        DeviceAddress, Dtype as CudaDtype, KvRows, RotaryArgs, RotaryQueries,
    },
};

use crate::{
    arguments,
    status::{Failure, Status},
};

/// New tokens, `[tokens][kv_heads][head_dim]`, of V `[tokens][kv_heads][v_dim]`: those of the first sequence, then those of the next. A head's elements are contiguous; what lies
/// between rows is not read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tokens {
    /// sizeof(attn_tokens).
    pub struct_size: usize,
    /// K, after RoPE; before it with `rotary`.
    pub k: *const c_void,
    /// V; NULL for a format of latents, whose V is in K.
    pub v: *const c_void,
    /// An attn_dtype, of K and V.
    pub dtype: u32,
    /// Elements from one token of K to the next; 0: kv_heads times the next head's.
    pub k_token_stride: usize,
    /// Elements from one token of V to the next; 0: kv_heads times the next head's.
    pub v_token_stride: usize,
    /// Elements from one head of K to the next; 0: head_dim. Device memory has no other.
    pub k_head_stride: usize,
    /// Elements from one head of V to the next; 0: v_dim. Device memory has no other.
    pub v_head_stride: usize,
    /// RoPE of K, and of queries beside it, for attn_plan_append_slots; else NULL.
    pub rotary: *const Rotary,
}

/// Rotary positions (RoPE) of an append by a plan, computed in 32 bits: K is stored as if its 32-bit rows had been rotated first. All addresses are of
/// device memory, aligned to 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Rotary {
    /// sizeof(attn_rotary).
    pub struct_size: usize,
    /// `[num_positions][rotary_dim]`: of a position, the cosines of its pairs, then their sines.
    pub cos_sin: *const c_void,
    /// An attn_dtype, of cos_sin.
    pub cos_sin_dtype: u32,
    /// Rows of cos_sin.
    pub num_positions: usize,
    /// Elements of a head that are rotated, from its first on: a multiple of 4; 0: head_dim.
    pub rotary_dim: usize,
    /// 0: element i and i + rotary_dim / 2 are a pair (Hugging Face's Llama, `is_neox_style`); else 2·i and 2·i + 1.
    pub interleaved: u32,
    /// int64 `[count]`: each token's row of cos_sin. Tokens without a slot may have none; their queries stay as they are then. For attn_plan_step also NULL:
    /// the tokens' numbers in their sequences, from 0.
    pub positions: *const i64,
    /// The tokens' queries `[count][q_heads][head_dim]`, in the dtype of K; NULL: K alone is rotated.
    pub q: *const c_void,
    /// Where rotated queries go; NULL: into `q`.
    pub q_out: *mut c_void,
    /// Elements from one token of q to the next, a multiple of 4; 0: q_heads·head_dim.
    pub q_token_stride: usize,
    /// Elements from one token of q_out to the next, a multiple of 4; 0: q_heads·head_dim. In place it is q_token_stride.
    pub q_out_token_stride: usize,
}

impl Tokens {
    /// The tokens in device memory, as launches take them; refuses heads that lie apart, which kernels do not read.
    pub(crate) fn on_device(&self, layout: &PageLayout) -> Result<KvRows, Failure> {
        let (heads, dim) = (layout.num_kv_heads(), layout.head_dim());
        check_stride("k_head_stride", self.k_head_stride, dim.k)?;
        check_stride("v_head_stride", self.v_head_stride, dim.v)?;
        Ok(KvRows {
            k: DeviceAddress::new(self.k as u64),
            v: DeviceAddress::new(self.v as u64),
            dtype: on_device(self.dtype)?,
            k_token_stride: or(self.k_token_stride, heads * dim.k),
            v_token_stride: or(self.v_token_stride, heads * dim.v),
        })
    }

    /// Refuses what appends by plans alone do.
    pub(crate) fn without_rotary(&self) -> Result<(), Failure> {
        if self.rotary.is_null() {
            return Ok(());
        }
        let sentence = "attn_tokens.rotary is set; only attn_plan_append_slots and attn_plan_step rotate, others take K after RoPE";
        Err(Failure::new(Status::Parameter, sentence.to_owned()))
    }
}

impl Rotary {
    /// As the launch takes it, for so many query heads and elements of a head.
    pub(crate) fn args(&self, q_heads: usize, head_dim: usize) -> Result<RotaryArgs, Failure> {
        let address = |pointer: *const c_void| DeviceAddress::new(pointer as u64);
        let row = q_heads.saturating_mul(head_dim);
        let token_stride = or(self.q_token_stride, row);
        let q = address(self.q);
        let (out, out_token_stride) = match self.q_out.is_null() {
            true => (q, token_stride),
            false => (
                address(self.q_out.cast_const()),
                or(self.q_out_token_stride, row),
            ),
        };
        Ok(RotaryArgs {
            style: match self.interleaved {
                0 => RotaryStyle::HalfSplit,
                _ => RotaryStyle::Interleaved,
            },
            rotary_dim: or(self.rotary_dim, head_dim),
            cos_sin: address(self.cos_sin),
            cos_sin_dtype: on_device(self.cos_sin_dtype)?,
            num_positions: self.num_positions,
            positions: address(self.positions.cast()),
            queries: (!self.q.is_null()).then_some(RotaryQueries {
                q,
                out,
                heads: q_heads,
                token_stride,
                out_token_stride,
            }),
        })
    }
}

/// Queries, `[query tokens][q_heads][head_dim]`, and outputs, `[query tokens][q_heads][v_dim]`: those of the step's first sequence, then those of the next. A head's elements are
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
    /// Elements from one head of the outputs to the next; 0: v_dim.
    pub out_head_stride: usize,
}

impl Rows {
    /// Refuses rows that lie apart, which kernels neither read nor write.
    pub(crate) fn check_on_device(&self, problem: &Problem) -> Result<(), Failure> {
        let (heads, HeadDim { k, v }) = (problem.num_q_heads, problem.head_dim);
        check_stride("q_token_stride", self.q_token_stride, heads * k)?;
        check_stride("q_head_stride", self.q_head_stride, k)?;
        check_stride("out_token_stride", self.out_token_stride, heads * v)?;
        check_stride("out_head_stride", self.out_head_stride, v)
    }
}

/// The elements of a head, of which a caller gives 0 for V's where they are K's.
pub(crate) fn head_dim(k: usize, v: usize) -> HeadDim {
    HeadDim { k, v: or(v, k) }
}

/// A field of a caller's struct, whose 0 is `default`.
pub(crate) fn or(given: usize, default: usize) -> usize {
    if given == 0 { default } else { given }
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
    Ok(arguments::dtype(dtype)?.into())
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    const ROTARY: Rotary = Rotary {
        struct_size: size_of::<Rotary>(),
        cos_sin: 0x100 as *const c_void,
        cos_sin_dtype: 2,
        num_positions: 9,
        rotary_dim: 0,
        interleaved: 0,
        positions: 0x200 as *const i64,
        q: 0x300 as *const c_void,
        q_out: ptr::null_mut(),
        q_token_stride: 0,
        q_out_token_stride: 0,
    };

    #[test]
    fn zeros_are_the_defaults_of_a_rotation_in_place() {
        let of = |rotary: Rotary| rotary.args(8, 128).unwrap();
        let strides = |args: RotaryArgs| {
            let queries = args.queries.unwrap();
            let addresses = (queries.q.get(), queries.out.get());
            (addresses, queries.token_stride, queries.out_token_stride)
        };
        let args = of(ROTARY);
        assert_eq!((args.style, args.rotary_dim), (RotaryStyle::HalfSplit, 128));
        assert_eq!((args.cos_sin.get(), args.positions.get()), (0x100, 0x200));
        assert_eq!(
            (args.cos_sin_dtype, args.num_positions),
            (CudaDtype::Bf16, 9)
        );
        assert_eq!(strides(args), ((0x300, 0x300), 1024, 1024));
        let (mut apart, mut own, mut none) = (ROTARY, ROTARY, ROTARY);
        (apart.q_token_stride, apart.q_out_token_stride) = (1536, 7);
        assert_eq!(strides(of(apart)), ((0x300, 0x300), 1536, 1536));
        (own.q_out, own.q_token_stride) = (0x400 as *mut c_void, 1536);
        assert_eq!(strides(of(own)), ((0x300, 0x400), 1536, 1024));
        own.q_out_token_stride = 2048;
        assert_eq!(strides(of(own)), ((0x300, 0x400), 1536, 2048));
        (none.q, none.interleaved, none.rotary_dim) = (ptr::null(), 1, 64);
        let args = of(none);
        assert!(args.queries.is_none());
        assert_eq!(
            (args.style, args.rotary_dim),
            (RotaryStyle::Interleaved, 64)
        );
        none.cos_sin_dtype = 7;
        assert!(none.args(8, 128).is_err());
    }
}
