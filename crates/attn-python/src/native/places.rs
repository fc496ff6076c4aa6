//! Where the tokens of a plan's sequences lie: arrays compared with the plan, as launches take them.

use attn::{
    Int8Scale, Scheme, Window,
    backends::cuda::native::{DeviceAddress, DeviceKv, PagedSequences, Pages, ViewRows},
    layout::Side,
};
use pyo3::{prelude::*, types::PyCapsule};

use super::{
    Plan,
    table_rows::{rows_apart, rows_side_by_side},
};
use crate::{
    arrays::{PageArrays, RowArrays},
    dlpack::{Array, Dtype},
    errors,
};

impl Plan {
    /// The pool: whole pages side by side, or pages along its first dim that lie apart.
    pub(super) fn pool(&self, capsule: &Bound<'_, PyCapsule>) -> PyResult<Pages> {
        let array = Array::new("pool", capsule)?;
        let page = self.page_bytes()?;
        let of_first = array.shape.iter().skip(1).product::<usize>();
        let lie_apart = array.shape.len() > 1 && of_first == page;
        let memory = self
            .gpu
            .memory(&array, &[Dtype::U8], usize::from(lie_apart))?;
        if !memory.bytes.is_multiple_of(page) {
            return Err(errors::shape(format!(
                "pool has {} bytes; needed: whole pages of {page} bytes",
                memory.bytes
            )));
        }
        let num_pages = memory.bytes / page;
        let mut pages = Pages {
            at: memory.address,
            stride: page,
            num_pages,
        };
        if lie_apart && num_pages > 1 {
            pages.stride = usize::try_from(array.strides[0]).unwrap_or(0);
        }
        Ok(pages)
    }

    /// The static scales of K and V.
    pub(super) fn scales(
        &self,
        [k, v]: [&Option<Bound<'_, PyCapsule>>; 2],
    ) -> PyResult<[DeviceAddress; 2]> {
        let (format, heads) = (self.layout.format(), self.layout.num_kv_heads());
        Ok([
            self.gpu.scales((Side::K, format.k), k.as_ref(), heads)?,
            self.gpu.scales((Side::V, format.v), v.as_ref(), heads)?,
        ])
    }

    /// The table of pages or of residual pages: its address, and the array.
    fn table<'py>(
        &self,
        what: &'static str,
        capsule: &Bound<'py, PyCapsule>,
    ) -> PyResult<(DeviceAddress, Array<'py>)> {
        let array = Array::new(what, capsule)?;
        array.check_rank(2, "[sequences, pages]")?;
        let memory = self.gpu.memory(&array, &[Dtype::I32], 1)?;
        Ok((memory.address, array))
    }

    fn kv_lens(&self, kv_lens: &Bound<'_, PyCapsule>) -> PyResult<DeviceAddress> {
        let bytes = 4 * self.problem.batch();
        self.gpu.list("kv_lens", Some(kv_lens), (Dtype::I32, bytes))
    }

    /// The table of an attention, whose rows reach the longest length: its address, and entries from one row to the next.
    fn full_table(&self, capsule: &Bound<'_, PyCapsule>) -> PyResult<(DeviceAddress, usize)> {
        let (address, table) = self.table("page_table", capsule)?;
        let [rows, columns] = [table.shape[0], table.shape[1]];
        let batch = self.problem.batch();
        let apart = rows_apart(table.what, [rows, columns], table.strides[0], batch);
        if columns.saturating_mul(self.layout.page_size()) < self.plan.max_kv_len() {
            return Err(errors::shape(format!(
                "page_table has {columns} pages per sequence, but the plan's longest length, {}, needs more",
                self.plan.max_kv_len()
            )));
        }
        Ok((address, apart.map_err(errors::shape)?))
    }

    /// Residual pages and their slots per sequence; null for formats without a window.
    fn residuals(&self, pages: &PageArrays<'_>) -> PyResult<(DeviceAddress, usize)> {
        if self.layout.format().window() == Window::None {
            return Ok((DeviceAddress::NULL, 0));
        }
        let capsule = pages.residual_pages.as_ref();
        let missing = || {
            errors::shape(format!(
                "residual_pages is missing; {} keeps residuals of the first and of the newest tokens",
                self.layout.format()
            ))
        };
        let (address, table) = self.table("residual_pages", capsule.ok_or_else(missing)?)?;
        let shape = [table.shape[0], table.shape[1]];
        let batch = self.problem.batch();
        let slots = rows_side_by_side(table.what, shape, table.strides[0], batch);
        Ok((address, slots.map_err(errors::shape)?))
    }

    /// The sequences of an attention or an export in the library's pages; refuses a plan for another engine's.
    pub(super) fn sequences(&self, pages: &PageArrays<'_>) -> PyResult<PagedSequences> {
        self.launches()?;
        let (page_table, page_table_stride) = self.full_table(&pages.page_table)?;
        let (residual_pages, residual_slots) = self.residuals(pages)?;
        Ok(PagedSequences {
            pool: self.pool(&pages.pool)?,
            page_table,
            page_table_stride,
            residual_pages,
            residual_slots,
            kv_lens: self.kv_lens(&pages.kv_lens)?,
            tensor_scales: self.scales([&pages.k_scales, &pages.v_scales])?,
        })
    }

    /// Rows of K or V in pages: their address, strides in bytes, number of pages.
    fn paged_rows(
        &self,
        what: &'static str,
        side: Side,
        capsule: &Bound<'_, PyCapsule>,
    ) -> PyResult<(DeviceAddress, [usize; 3], usize)> {
        let part = self.layout.part(side);
        let scheme = part.scheme;
        let dtype = match scheme {
            Scheme::F16 => Dtype::F16,
            Scheme::Bf16 => Dtype::Bf16,
            Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor) => Dtype::U8,
            _ => {
                return Err(errors::parameter(format!(
                    "format is {scheme}; another engine's pages are bf16, f16, fp8 or int8-tensor"
                )));
            }
        };
        let array = Array::new(what, capsule)?;
        let (tokens, heads) = (self.layout.page_size(), self.layout.num_kv_heads());
        let row = [tokens, heads, part.dim()];
        let shape = format!("[pages, {}, {}, {}]", row[0], row[1], row[2]);
        array.check_rank(4, &shape)?;
        if array.shape[1..] != row {
            return Err(errors::shape(format!(
                "{what} has the shape {:?}; needed: {shape}",
                array.shape
            )));
        }
        let memory = self.gpu.memory(&array, &[dtype], 3)?;
        let bytes = |stride: i64| usize::try_from(stride).unwrap_or(0) * dtype.bytes();
        let [page, token, head] = [0, 1, 2].map(|i| bytes(array.strides[i]));
        Ok((memory.address, [page, head, token], array.shape[0]))
    }

    /// The sequences of an attention in another engine's pages.
    pub(super) fn kv_of_rows(&self, rows: &RowArrays<'_>) -> PyResult<DeviceKv> {
        let (k, k_strides, num_pages) = self.paged_rows("k_cache", Side::K, &rows.k)?;
        let (v, v_strides, v_pages) = self.paged_rows("v_cache", Side::V, &rows.v)?;
        if num_pages != v_pages {
            return Err(errors::shape(format!(
                "k_cache has {num_pages} pages, and v_cache {v_pages}; pass as many of both"
            )));
        }
        let (page_table, page_table_stride) = self.full_table(&rows.page_table)?;
        Ok(DeviceKv::PagedRows {
            rows: ViewRows {
                k: [k, DeviceAddress::NULL],
                v: [v, DeviceAddress::NULL],
                code_strides: [k_strides, v_strides],
                scale_strides: [[0; 3]; 2],
                kv_lens: self.kv_lens(&rows.kv_lens)?,
                tensor_scales: self.scales([&rows.k_scales, &rows.v_scales])?,
            },
            num_pages,
            page_table,
            page_table_stride,
        })
    }
}
