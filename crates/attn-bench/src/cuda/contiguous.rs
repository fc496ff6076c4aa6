//! Contiguous caches, and rows in pages, to time.

use attn_core::{Error, Scheme};
use attn_cuda::native::{DeviceAddress, DeviceKv, ViewRows};
use cudarc::driver::CudaSlice;

use super::{Buffers, CudaTimer, Rotation, pages::scattered};
use crate::{CacheLayout, Workload, noise};

/// One part of a copy: its offset, and the strides from one sequence, KV head and token to the next.
type Part = (usize, [usize; 3]);

/// How the rows lie in each copy.
pub(super) struct Contiguous {
    /// Codes of K and V, in bytes.
    codes: [Part; 2],
    /// Their scales, in elements; without an offset for schemes without.
    scales: [(Option<usize>, [usize; 3]); 2],
    /// The page table of rows in pages, and its entries per sequence.
    table: Option<(CudaSlice<u32>, usize)>,
}

impl Contiguous {
    pub(super) fn kv(
        &self,
        buffers: &Buffers,
        copy: DeviceAddress,
        kv_lens: DeviceAddress,
        tensor_scales: [DeviceAddress; 2],
    ) -> DeviceKv {
        let of = |i: usize| {
            let scales = self.scales[i]
                .0
                .map_or(DeviceAddress::NULL, |at| copy.offset(at));
            [copy.offset(self.codes[i].0), scales]
        };
        let rows = ViewRows {
            k: of(0),
            v: of(1),
            code_strides: self.codes.map(|(_, strides)| strides),
            scale_strides: self.scales.map(|(_, strides)| strides),
            kv_lens,
            tensor_scales,
        };
        match &self.table {
            Some((table, stride)) => DeviceKv::PagedRows {
                rows,
                num_pages: table.len(),
                page_table: buffers.address(table),
                page_table_stride: *stride,
            },
            None => DeviceKv::Rows(rows),
        }
    }
}

/// Codes of finite numbers.
fn codes(scheme: Scheme, count: usize) -> Vec<u8> {
    let noise = noise(7, count).into_iter();
    match scheme {
        // Between 0.5 and 1 in magnitude.
        Scheme::F16 => noise
            .flat_map(|x| (0x3800 | (x.to_bits() >> 16 & 0x83ff) as u16).to_le_bytes())
            .collect(),
        Scheme::Bf16 => noise
            .flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes())
            .collect(),
        Scheme::Fp8E4m3 => noise
            .map(|x| 0x30 | (x.to_bits() >> 24 & 0x87) as u8)
            .collect(),
        _ => noise.map(|x| (x * 60.0) as i8 as u8).collect(),
    }
}

/// f16 for about 0.016.
const SCALE: u16 = 0x2400;

/// Fills the copies.
pub(super) fn fill(
    timer: &mut CudaTimer,
    workload: &Workload,
) -> Result<(Contiguous, Rotation), Error> {
    let problem = &workload.problem;
    let (batch, heads) = (problem.batch(), problem.num_kv_heads);
    let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
    // Tokens side by side: of a sequence, or of a page.
    let (side_by_side, pages) = match workload.cache {
        CacheLayout::PagedBsnh => (workload.page_size, longest.div_ceil(workload.page_size)),
        _ => (longest, 1),
    };
    let capacity = side_by_side * pages;
    let strides = |row: usize| match workload.cache {
        CacheLayout::Bnsh | CacheLayout::Pages => [heads * capacity * row, capacity * row, row],
        _ => [heads * side_by_side * row, row, heads * row],
    };
    let mut end = 0;
    let mut part = |bytes: usize| {
        let at = end;
        end = (at + bytes).next_multiple_of(256);
        at
    };
    let rows = batch * heads * capacity;
    let sides = workload.format.sides(problem.head_dim);
    let code_parts = sides.map(|(scheme, dim)| {
        let bytes = dim * scheme.code_bits() / 8;
        (part(rows * bytes), strides(bytes))
    });
    let scale_parts = sides.map(|(scheme, dim)| {
        let has = scheme.is_integer() && !scheme.has_tensor_scale();
        let groups = if has { scheme.groups(dim).count() } else { 0 };
        (has.then(|| part(rows * groups * 2)), strides(groups))
    });
    let rotation = timer.rotate(workload, end)?;
    for (i, (scheme, dim)) in sides.into_iter().enumerate() {
        let bytes = rows * dim * scheme.code_bits() / 8;
        let template = codes(scheme, 4 << 20);
        timer.fill(&template, code_parts[i].0, bytes)?;
        if let Some(at) = scale_parts[i].0 {
            let bytes = rows * scheme.groups(dim).count() * 2;
            let template: Vec<u8> = (0..1 << 16).flat_map(|_| SCALE.to_le_bytes()).collect();
            timer.fill(&template, at, bytes)?;
        }
    }
    let copy = rotation.copy_bytes;
    timer.repeat(0, copy, rotation.copies * copy)?;
    let is_paged = workload.cache == CacheLayout::PagedBsnh;
    let table = is_paged.then(|| {
        let table = scattered(&vec![pages; batch], pages);
        Ok::<_, Error>((timer.buffers.upload(&table)?, pages))
    });
    let rows = Contiguous {
        codes: code_parts,
        scales: scale_parts,
        table: table.transpose()?,
    };
    Ok((rows, rotation))
}
