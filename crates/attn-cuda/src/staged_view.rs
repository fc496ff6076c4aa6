//! A contiguous cache in host memory on its way to the device: read in place there, or brought into pages.

use attn_core::{Error, KvView, PageLayout, Problem};
use attn_kernels::cuda::{KvLayout, instance};

use crate::{
    device::Device,
    device_tables::DeviceTables,
    native::{DeviceAddress, ImportArgs, Pages, Prepared, ViewRows, prepare_op},
    sizes,
    staging::Parts,
};

/// How the kernels find the rows of a view: in place where they can, else in `pages`.
pub(crate) fn layout_of(view: &KvView<'_>, pages: KvLayout) -> KvLayout {
    // Decode copies rows in chunks of 16 bytes.
    let [k, v] = [view.k(), view.v()].map(|rows| rows.code_strides);
    let in_place = instance::covered(view.format(), KvLayout::Rows).is_ok()
        && k.into_iter()
            .chain(v)
            .all(|stride| stride.is_multiple_of(16));
    if in_place { KvLayout::Rows } else { pages }
}

/// Pages that a view's rows are imported to.
pub(crate) struct ViewPages {
    pub(crate) import: Prepared<ImportArgs>,
    pub(crate) tables: DeviceTables,
    /// The offset of the pages.
    at: usize,
}

/// A view whose rows are parts of device memory, at the offsets `k` and `v` of codes and scales.
pub(crate) struct StagedView<'a> {
    view: &'a KvView<'a>,
    k: [usize; 2],
    v: [usize; 2],
    pages: Option<ViewPages>,
}

impl ViewPages {
    /// The pages, on a device that has the view's parts from `base` on.
    pub(crate) fn pool(&self, base: DeviceAddress) -> Pages {
        let count = self.tables.table.len();
        Pages::new(base.offset(self.at), self.import.shape(), count)
    }

    /// The import of the problem's rows into the pages.
    pub(crate) fn import_args(
        &self,
        rows: ViewRows,
        pool: Pages,
        page_table: DeviceAddress,
        problem: &Problem,
    ) -> ImportArgs {
        ImportArgs {
            rows,
            pool: pool.at,
            page_table,
            page_table_stride: self.tables.stride,
            batch: problem.batch(),
            max_kv_len: longest(problem),
        }
    }
}

fn longest(problem: &Problem) -> usize {
    problem.kv_lens.iter().copied().max().unwrap_or(0)
}

impl<'a> StagedView<'a> {
    /// Takes parts for the view's rows, and for pages where the layout has such.
    ///
    /// # Errors
    /// [`Error::Parameter`] for more pages than kernels count; [`Error::OutOfMemory`], [`Error::Device`].
    pub(crate) fn new(
        device: &Device,
        parts: &mut Parts<'a>,
        view: &'a KvView<'a>,
        problem: &Problem,
        layout: KvLayout,
    ) -> Result<Self, Error> {
        let pages = match layout.is_rows() {
            true => None,
            false => {
                let (page_size, heads) = (layout.page_size(), problem.num_kv_heads);
                let layout = PageLayout::new(view.format(), problem.head_dim, page_size, heads)?;
                let longest = longest(problem);
                let tables = DeviceTables::in_order(problem.batch(), longest, page_size)?;
                let sizes = [tables.table.len(), layout.page_bytes()];
                let bytes = sizes::product("bytes of a view in pages", &sizes)?;
                Some(ViewPages {
                    import: prepare_op(device, layout)?,
                    tables,
                    at: parts.reserve(bytes)?,
                })
            }
        };
        Ok(StagedView {
            view,
            k: [parts.add(view.k().codes)?, parts.add(view.k().scales)?],
            v: [parts.add(view.v().codes)?, parts.add(view.v().scales)?],
            pages,
        })
    }

    /// The pages that rows are imported to; none for those that are read in place.
    pub(crate) fn pages(&self) -> Option<&ViewPages> {
        self.pages.as_ref()
    }

    /// K's and V's static scales; none for schemes without.
    pub(crate) fn tensor_scales(&self) -> [&'a [f32]; 2] {
        [self.view.k_tensor_scales(), self.view.v_tensor_scales()]
    }

    /// The rows, on a device that has the parts from `base` on, with these lengths and static scales.
    pub(crate) fn rows(
        &self,
        base: DeviceAddress,
        kv_lens: DeviceAddress,
        tensor_scales: [DeviceAddress; 2],
    ) -> ViewRows {
        let (view, format) = (self.view, self.view.format());
        let of = |[codes, scales]: [usize; 2], has_scales| {
            [base.offset(codes), base.offset(scales).given(has_scales)]
        };
        ViewRows {
            k: of(self.k, format.k.has_row_scales()),
            v: of(self.v, format.v.has_row_scales()),
            code_strides: [view.k().code_strides, view.v().code_strides],
            scale_strides: [view.k().scale_strides, view.v().scale_strides],
            kv_lens,
            tensor_scales,
        }
    }
}
