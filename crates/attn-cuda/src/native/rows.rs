//! Tensor maps: how the copy engine finds the rows of a contiguous cache.

use std::ffi::c_void;

use attn_core::{Scheme, arithmetic::TILE};
use attn_kernels::cuda::{Arch, params::RowMaps};
use cudarc::driver::sys;

use super::{DeviceKv, NativePlan};
use crate::device::Device;

/// The maps of a launch on a view; unset ones where the engine cannot take them, and the kernel copies chunks of 16 bytes.
pub(super) fn maps(device: &Device, plan: &NativePlan, kv: &DeviceKv) -> RowMaps {
    let DeviceKv::Strided {
        k, v, code_strides, ..
    } = kv
    else {
        return RowMaps::default();
    };
    if device.arch != Arch::Sm90a {
        return RowMaps::default();
    }
    let of = |scheme, base, strides| map(plan, scheme, base, strides);
    let (k, v) = (
        of(plan.format.k, k[0].get(), code_strides[0]),
        of(plan.format.v, v[0].get(), code_strides[1]),
    );
    match (k, v) {
        (Some(k), Some(v)) => RowMaps { k, v, are_set: 1 },
        _ => RowMaps::default(),
    }
}

/// Rows as `[sequence][KV head][token][byte]`, in boxes of a tile's tokens: as much of each row as `swizzle_of` of `config.cuh` says.
/// None for rows that no swizzle fits, and where the driver refuses the strides.
fn map(plan: &NativePlan, scheme: Scheme, base: u64, strides: [usize; 3]) -> Option<[u64; 16]> {
    use sys::CUtensorMapSwizzle_enum as Swizzle;
    let problem = &plan.problem;
    let row = problem.head_dim * scheme.code_bits() / 8;
    let (width, swizzle) = [
        (128, Swizzle::CU_TENSOR_MAP_SWIZZLE_128B),
        (64, Swizzle::CU_TENSOR_MAP_SWIZZLE_64B),
        (32, Swizzle::CU_TENSOR_MAP_SWIZZLE_32B),
    ]
    .into_iter()
    .find(|(width, _)| row.is_multiple_of(*width))?;
    let lengths = [
        row,
        plan.launch_plan.max_kv_len,
        problem.num_kv_heads,
        problem.batch(),
    ]
    .map(|n| n as u64);
    // What lies along a length of one has any stride, and the driver would like a valid one.
    let stride = |of: usize| {
        if lengths[of] > 1 {
            strides[3 - of] as u64
        } else {
            row as u64
        }
    };
    let (strides, boxes, steps) = (
        [stride(1), stride(2), stride(3)],
        [width as u32, TILE as u32, 1, 1],
        [1; 4],
    );
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the arrays have as many entries as the four dimensions ask for; the call only writes `map`, and dereferences no
    // device address. libcuda is of CUDA 12.0 or newer, which has the function (`Device::open`).
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            4,
            base as *mut c_void,
            lengths.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    (status == sys::CUresult::CUDA_SUCCESS).then_some(map.opaque)
}
