//! Attention over another engine's pages of rows, as they lie.

use std::ffi::c_void;

use attn::{
    Int8Scale, KvFormat, Scheme,
    backends::cuda::native::{DeviceAddress, DeviceKv, Stream, ViewRows},
};

use crate::{
    arguments::{config, handle},
    launch_args::{Buffers, given, tensor_scales},
    plan::Plan,
    rows::Rows,
    status::{Failure, Status, call},
};

/// Another engine's cache: pages of rows of bf16, f16, fp8 (e4m3) or int8, such as `[pages][tokens][kv_heads][head_dim]` and
/// `[pages][kv_heads][tokens][head_dim]`. All addresses are of device memory. A row's elements are side by side; rows begin at multiples of 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PagedRows {
    /// sizeof(attn_paged_rows).
    pub struct_size: usize,
    /// The rows of K.
    pub k: *const c_void,
    /// The rows of V.
    pub v: *const c_void,
    /// Pages of K and of V.
    pub num_pages: usize,
    /// Elements from one page of K to the next.
    pub k_page_stride: usize,
    /// Elements from one token of a page of K to the next.
    pub k_token_stride: usize,
    /// Elements from one head of a token of K to the next.
    pub k_head_stride: usize,
    /// Elements from one page of V to the next.
    pub v_page_stride: usize,
    /// Elements from one token of a page of V to the next.
    pub v_token_stride: usize,
    /// Elements from one head of a token of V to the next.
    pub v_head_stride: usize,
    /// int32 `[count][page_table_stride]`: a sequence's pages in order, of attn_plan_config.page_size tokens each.
    pub page_table: *const i32,
    /// Entries of a sequence in page_table: at least max_tokens / page_size, rounded up.
    pub page_table_stride: usize,
    /// int32 `[count]`: the tokens of each sequence.
    pub kv_lens: *const i32,
    /// float `[kv_heads]` for fp8 and int8-tensor; else NULL.
    pub k_scales: *const f32,
    /// As `k_scales`, for V.
    pub v_scales: *const f32,
}

/// Bytes of an element of a scheme that rows have.
fn element_bytes(scheme: Scheme) -> Result<usize, Failure> {
    match scheme {
        Scheme::F16 | Scheme::Bf16 => Ok(2),
        Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor) => Ok(1),
        _ => Err(Failure::new(
            Status::Parameter,
            format!(
                "the plan's format is {scheme}; another engine's pages are bf16, f16, fp8 or int8-tensor"
            ),
        )),
    }
}

impl PagedRows {
    pub(crate) fn kv(&self, format: KvFormat) -> Result<DeviceKv, Failure> {
        let strides = |scheme, [page, token, head]: [usize; 3]| {
            let bytes = element_bytes(scheme)?;
            Ok::<_, Failure>([page, head, token].map(|stride| stride.saturating_mul(bytes)))
        };
        let k = [self.k_page_stride, self.k_token_stride, self.k_head_stride];
        let v = [self.v_page_stride, self.v_token_stride, self.v_head_stride];
        Ok(DeviceKv::PagedRows {
            rows: ViewRows {
                k: [given("k", self.k)?, DeviceAddress::NULL],
                v: [given("v", self.v)?, DeviceAddress::NULL],
                code_strides: [strides(format.k, k)?, strides(format.v, v)?],
                scale_strides: [[0; 3]; 2],
                kv_lens: given("kv_lens", self.kv_lens)?,
                tensor_scales: tensor_scales([self.k_scales, self.v_scales], format)?,
            },
            num_pages: self.num_pages,
            page_table: given("page_table", self.page_table)?,
            page_table_stride: self.page_table_stride,
        })
    }
}

/// Attends another engine's pages of rows: enqueues the step on `stream`, as attn_plan_attend. The plan was created with attn_plan_config.rows.
///
/// # Safety
/// Everything that attn_plan_attend needs; all rows of the pool's pages lie in the memory that `kv` describes, and those that kv_lens count are finite.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_plan_attend_rows(
    plan: *const Plan,
    kv: *const PagedRows,
    rows: *const Rows,
    buffers: *const Buffers,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (plan, kv, rows, buffers) = unsafe {
            (
                handle("plan", plan)?,
                config(kv)?,
                config(rows)?,
                config(buffers)?,
            )
        };
        plan.check_table(kv.page_table_stride)?;
        let kv = kv.kv(plan.layout.format())?;
        let args = plan.decode_args(kv, &rows, &buffers)?;
        let gpu = plan.device.cuda("plan")?;
        // SAFETY: this function's contract.
        Ok(unsafe { gpu.decode_on(&plan.plan, Stream::from_raw(stream), &args) }?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_with_parameters_of_their_own_are_no_rows() {
        for scheme in Scheme::ALL {
            let bytes = element_bytes(scheme);
            match scheme {
                Scheme::F16 | Scheme::Bf16 => assert_eq!(bytes.unwrap(), 2),
                _ if scheme.has_tensor_scale() => assert_eq!(bytes.unwrap(), 1),
                _ => assert!(bytes.is_err(), "{scheme}"),
            }
        }
    }
}
