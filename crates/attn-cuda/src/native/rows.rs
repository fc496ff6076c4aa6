//! Tensor maps: how the copy engine finds rows.

use std::ffi::c_void;

use attn_core::{KvFormat, Problem, Scheme, arithmetic::TILE};
use attn_kernels::cuda::{Arch, KvLayout, params::RowMaps};
use cudarc::driver::sys;

use super::kv::DeviceKv;
use crate::device::Device;

/// What a launch reads rows for.
pub(super) struct RowsOf<'a> {
    pub problem: &'a Problem,
    pub format: KvFormat,
    pub layout: KvLayout,
    /// The most tokens of a sequence.
    pub max_kv_len: usize,
}

/// The maps of a launch on rows; unset ones where the engine cannot take them, and the kernel copies chunks of 16 bytes.
pub(super) fn maps(device: &Device, of: &RowsOf<'_>, kv: &DeviceKv) -> RowMaps {
    let (rows, outer) = match kv {
        DeviceKv::Paged(_) => return RowMaps::default(),
        DeviceKv::Rows(rows) => (rows, [of.max_kv_len, of.problem.batch()]),
        DeviceKv::PagedRows {
            rows, num_pages, ..
        } => (rows, [of.layout.row_page_size(), *num_pages]),
    };
    if device.arch != Arch::Sm90a {
        return RowMaps::default();
    }
    let [k, v] = [
        (
            (of.format.k, of.problem.head_dim.k),
            rows.k[0],
            rows.code_strides[0],
        ),
        (
            (of.format.v, of.problem.head_dim.v),
            rows.v[0],
            rows.code_strides[1],
        ),
    ]
    .map(|(side, base, strides)| map(of, side, base.get(), (outer, strides)));
    match (k, v) {
        (Some(k), Some(v)) => RowMaps { k, v, are_set: 1 },
        _ => RowMaps::default(),
    }
}

/// Rows as `[sequence or page][KV head][token][byte]`, in boxes of a tile's tokens, or of a page's where they are fewer: as much of each row as
/// `swizzle_of` of `config.cuh` says. `tokens` and `outer` are the numbers of tokens, and of sequences or pages. None for rows that no swizzle
/// fits, and where the driver refuses the strides.
fn map(
    of: &RowsOf<'_>,
    (scheme, dim): (Scheme, usize),
    base: u64,
    ([tokens, outer], strides): ([usize; 2], [usize; 3]),
) -> Option<[u64; 16]> {
    use sys::CUtensorMapSwizzle_enum as Swizzle;
    let problem = of.problem;
    let row = dim * scheme.code_bits() / 8;
    let (width, swizzle) = [
        (128, Swizzle::CU_TENSOR_MAP_SWIZZLE_128B),
        (64, Swizzle::CU_TENSOR_MAP_SWIZZLE_64B),
        (32, Swizzle::CU_TENSOR_MAP_SWIZZLE_32B),
    ]
    .into_iter()
    .find(|(width, _)| row.is_multiple_of(*width))?;
    let lengths = [row, tokens, problem.num_kv_heads, outer].map(|n| n as u64);
    let of_box = match of.layout {
        KvLayout::PagedRows(tokens) => tokens.min(TILE),
        _ => TILE,
    };
    // What lies along a length of one has any stride, and the driver would like a valid one.
    let stride = |axis: usize| {
        if lengths[axis] > 1 {
            strides[3 - axis] as u64
        } else {
            row as u64
        }
    };
    let (strides, boxes, steps) = (
        [stride(1), stride(2), stride(3)],
        [width as u32, of_box as u32, 1, 1],
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
