//! A contiguous cache in host memory, brought to the device as pages: for rows whose strides the kernels cannot load (`view.rs`).

use std::sync::Arc;

use attn_core::{
    CacheConfig, Error, KvView, PageTable, Problem, StridedRows,
    layout::{Part, Side},
};

use crate::{gpu::Gpu, launch::KvTables, pool::Pool};

const PAGE_SIZE: usize = 64;

/// The pages of a view, for one step.
pub(crate) struct ViewPages {
    pool: Pool,
    table: PageTable,
}

/// Copies one token's codes and scales from the row at `at` of a view to place `t` of a page's run.
fn copy_token(part: &Part, rows: &StridedRows<'_>, at: [usize; 3], t: usize, run: &mut [u8]) {
    let bits = part.scheme.code_bits();
    let codes: Vec<u16> = (0..part.dim()).map(|d| rows.code(bits, at, d)).collect();
    part.store_codes(run, t, &codes);
    if part.scheme.has_row_scales() {
        let params = (0..part.groups().count()).map(|g| rows.param(at, g));
        part.store_params(run, t, &params.collect::<Vec<_>>());
    }
}

impl ViewPages {
    pub fn new(gpu: Arc<Gpu>, view: &KvView<'_>, problem: &Problem) -> Result<Self, Error> {
        let counts: Vec<usize> = problem
            .kv_lens
            .iter()
            .map(|len| len.div_ceil(PAGE_SIZE))
            .collect();
        let config = CacheConfig::builder(view.format(), problem.heads())
            .pages(counts.iter().sum())
            .tensor_scales(view.k_tensor_scales(), view.v_tensor_scales())
            .build();
        let layout = config.layout()?;
        let parts = [(Side::K, view.k()), (Side::V, view.v())];
        let parts = parts.map(|(side, rows)| (layout.part(side), rows));
        let pool = Pool::new(gpu, &config)?;
        let (mut table, mut next) = (PageTable::default(), 0u32);
        for (b, (&len, &count)) in problem.kv_lens.iter().zip(&counts).enumerate() {
            let pages = next..next + count as u32;
            table.pages.push(pages.collect());
            for i in 0..count {
                let mut bytes = vec![0; layout.page_bytes()];
                for (head, run) in bytes.chunks_exact_mut(layout.run_bytes()).enumerate() {
                    for slot in 0..PAGE_SIZE.min(len - i * PAGE_SIZE) {
                        let at = [b, head, i * PAGE_SIZE + slot];
                        for (part, rows) in &parts {
                            copy_token(part, rows, at, slot, run);
                        }
                    }
                }
                pool.write_pages(&[next + i as u32], &bytes)?;
            }
            next += count as u32;
        }
        Ok(ViewPages { pool, table })
    }

    pub fn tables<'a>(&'a self, view: &'a KvView<'_>) -> KvTables<'a> {
        KvTables {
            layout: self.pool.decode_layout(),
            stored: self.pool.stored(),
            pages_per_pool: self.pool.pages_per_buffer,
            pages: Some((&self.table, self.pool.num_pages)),
            lists: &self.table.pages,
            residual_slots: 0,
            k_tensor_scales: view.k_tensor_scales(),
            v_tensor_scales: view.v_tensor_scales(),
        }
    }
}
