//! Rows of a contiguous cache into pages, for views that no kernel reads in place.

use attn_core::{Error, PageLayout, error::refuse};
use attn_kernels::cuda::{Instance, params::ImportParams};

use super::{
    grid::{COPY_THREADS, Grid},
    kv::ViewRows,
    op::Op,
};
use crate::{
    handles::DeviceAddress,
    sizes::{self, check_heads},
};

/// Rows of a contiguous cache into pages of the same format, bit for bit; rows may lie at any address.
///
/// Prepared for the pages' layout, of f16, bf16, fp8, int8-plain, int8-g32 or int8-tensor: other schemes have no row form. Refused are more than 65535
/// sequences or KV heads.
///
/// # Safety
/// On the device, no `kv_lens` is negative or exceeds `max_kv_len`, and every page that they reach is in the pool.
#[derive(Debug, Clone, Copy)]
pub struct ImportArgs {
    /// The rows, at any strides and addresses. Their static scales are not read: codes are copied as they are.
    pub rows: ViewRows,
    /// The pool.
    pub pool: DeviceAddress,
    /// u32 `[batch][page_table_stride]`.
    pub page_table: DeviceAddress,
    /// Entries per sequence.
    pub page_table_stride: usize,
    /// Sequences.
    pub batch: usize,
    /// No length exceeds it.
    pub max_kv_len: usize,
}

// SAFETY: `attn_import` takes one ImportParams, asserted on both sides, and writes the pages of the table alone.
unsafe impl Op for ImportArgs {
    type Shape = PageLayout;
    type Params = ImportParams;
    const DOING: &'static str = "importing";

    fn instances(layout: &PageLayout) -> Result<Vec<Instance>, Error> {
        check_heads(layout.num_kv_heads())?;
        for scheme in [layout.format().k, layout.format().v] {
            if scheme.code_bits() == 4 || scheme.is_rotated() {
                let allowed = "f16, bf16, fp8, int8-plain, int8-g32, int8-tensor";
                return refuse("imported scheme", format_args!("{scheme}"), allowed);
            }
        }
        Ok(vec![Instance::Import {
            format: layout.format(),
            head_dim: layout.head_dim(),
            page_size: layout.page_size(),
        }])
    }

    fn params(&self, layout: &PageLayout) -> Result<ImportParams, Error> {
        let allowed = "at most 65535, as a CUDA grid has no more layers; import some at a time";
        sizes::check_grid("sequences to import", self.batch, allowed)?;
        let rows = self.rows.decode_params();
        Ok(ImportParams {
            k: rows.k,
            v: rows.v,
            k_scales: rows.k_scales,
            v_scales: rows.v_scales,
            k_strides: rows.k_strides,
            v_strides: rows.v_strides,
            k_scale_strides: rows.k_scale_strides,
            v_scale_strides: rows.v_scale_strides,
            pool: self.pool.get(),
            page_table: self.page_table.get(),
            kv_lens: rows.kv_lens,
            num_kv_heads: sizes::int("num_kv_heads", layout.num_kv_heads())?,
            page_table_stride: sizes::int("page_table_stride", self.page_table_stride)?,
        })
    }

    fn grid(&self, layout: &PageLayout) -> Grid {
        let pages = self.max_kv_len.div_ceil(layout.page_size());
        Grid::new([pages, layout.num_kv_heads(), self.batch], COPY_THREADS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::KvFormat;

    fn layout(format: &str) -> PageLayout {
        PageLayout::new(format.parse().unwrap(), 128, 64, 2).unwrap()
    }

    fn args(batch: usize) -> ImportArgs {
        let at = DeviceAddress::new;
        ImportArgs {
            rows: ViewRows {
                k: [at(0x100), at(0x200)],
                v: [at(0x300), at(0x400)],
                code_strides: [[512, 128, 256], [1024, 256, 512]],
                scale_strides: [[8, 1, 2], [16, 2, 4]],
                kv_lens: at(0x500),
                tensor_scales: [DeviceAddress::NULL; 2],
            },
            pool: at(0x600),
            page_table: at(0x700),
            page_table_stride: 3,
            batch,
            max_kv_len: 130,
        }
    }

    #[test]
    fn schemes_without_rows_are_refused() {
        for format in ["int8-plain", "int8-g32", "int8-tensor", "fp8", "bf16/f16"] {
            assert_eq!(ImportArgs::instances(&layout(format)).unwrap().len(), 1);
        }
        for (format, scheme) in [
            ("int8", "int8"),
            ("f16/int4", "int4"),
            ("int4-g1/fp8", "int4-g1"),
        ] {
            let said = ImportArgs::instances(&layout(format))
                .unwrap_err()
                .to_string();
            assert!(
                said.starts_with(&format!("imported scheme is {scheme}")),
                "{said}"
            );
        }
        let heads = PageLayout::new(KvFormat::same(attn_core::Scheme::F16), 64, 16, 65_536);
        assert!(ImportArgs::instances(&heads.unwrap()).is_err());
    }

    #[test]
    fn rows_and_tables_reach_the_kernel_and_more_than_a_grid_holds_is_refused() {
        let layout = layout("fp8");
        let params = args(65_535).params(&layout).unwrap();
        assert_eq!(
            (params.k, params.v_scales, params.kv_lens),
            (0x100, 0x400, 0x500)
        );
        assert_eq!(
            (params.v_strides, params.k_scale_strides),
            ([1024, 256, 512], [8, 1, 2])
        );
        assert_eq!((params.pool, params.page_table), (0x600, 0x700));
        assert_eq!((params.num_kv_heads, params.page_table_stride), (2, 3));
        assert_eq!(args(5).grid(&layout).ctas, [3, 2, 5]);
        let said = args(65_536).params(&layout).unwrap_err().to_string();
        assert!(said.contains("sequences to import is 65536"), "{said}");
        let mut wide = args(5);
        wide.page_table_stride = 1 << 31;
        assert!(wide.params(&layout).is_err());
    }
}
