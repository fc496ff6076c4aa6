//! A contiguous cache in host memory, brought to the device as pages: for rows whose strides the kernels cannot load (`view.rs`).

use std::sync::Arc;

use attn_core::{
    CacheConfig, Error, KvView, Problem, Scheme, StridedRows,
    layout::{CodeAddr, k_code, v_code},
};

use crate::{gpu::Gpu, launch::Source, store::DevicePages};

const PAGE_SIZE: usize = 64;

/// The pages of a view, for one step.
pub(crate) struct ViewPages {
    pages: DevicePages,
    lists: Vec<Vec<u32>>,
    no_tails: Vec<Option<u32>>,
}

/// One of K, V: where its codes and scales lie in a run.
struct Part {
    scheme: Scheme,
    codes_at: usize,
    params_at: usize,
    address: fn(usize, usize, usize, usize, usize) -> CodeAddr,
}

impl Part {
    fn copy(
        &self,
        rows: &StridedRows<'_>,
        at: [usize; 3],
        head_dim: usize,
        slot: usize,
        run: &mut [u8],
    ) {
        let bits = self.scheme.code_bits();
        for d in 0..head_dim {
            let code = rows.code(bits, at, d).to_le_bytes();
            let to = self.codes_at + (self.address)(bits, head_dim, PAGE_SIZE, slot, d).byte;
            run[to..to + bits / 8].copy_from_slice(&code[..bits / 8]);
        }
        if self.scheme.has_row_scales() {
            for g in 0..self.scheme.groups(head_dim) {
                let to = self.params_at + 2 * (g * PAGE_SIZE + slot);
                run[to..to + 2].copy_from_slice(&rows.scale(at, g).to_le_bytes());
            }
        }
    }
}

impl ViewPages {
    pub fn new(gpu: Arc<Gpu>, view: &KvView<'_>, problem: &Problem) -> Result<Self, Error> {
        let counts: Vec<usize> = problem
            .kv_lens
            .iter()
            .map(|len| len.div_ceil(PAGE_SIZE))
            .collect();
        let mut config =
            CacheConfig::new(view.format(), problem.num_kv_heads, problem.head_dim, 1, 0);
        config.num_pages = counts.iter().sum();
        config.k_tensor_scales = view.k_tensor_scales().to_vec();
        config.v_tensor_scales = view.v_tensor_scales().to_vec();
        let layout = config.layout()?;
        let parts = [
            Part {
                scheme: view.format().k,
                codes_at: layout.k_codes().start,
                params_at: layout.k_params().start,
                address: k_code,
            },
            Part {
                scheme: view.format().v,
                codes_at: layout.v_codes().start,
                params_at: layout.v_params().start,
                address: v_code,
            },
        ];
        let pages = DevicePages::new(gpu, &config)?;
        let (mut lists, mut next) = (Vec::new(), 0u32);
        for (b, (&len, &count)) in problem.kv_lens.iter().zip(&counts).enumerate() {
            lists.push((next..next + count as u32).collect());
            for i in 0..count {
                let mut bytes = vec![0; layout.page_bytes()];
                for (head, run) in bytes.chunks_exact_mut(layout.run_bytes()).enumerate() {
                    for slot in 0..PAGE_SIZE.min(len - i * PAGE_SIZE) {
                        let at = [b, head, i * PAGE_SIZE + slot];
                        parts[0].copy(view.k(), at, problem.head_dim, slot, run);
                        parts[1].copy(view.v(), at, problem.head_dim, slot, run);
                    }
                }
                pages.replace_page(next + i as u32, &bytes)?;
            }
            next += count as u32;
        }
        Ok(ViewPages {
            pages,
            no_tails: vec![None; lists.len()],
            lists,
        })
    }

    pub fn source<'a>(&'a self, view: &'a KvView<'_>) -> Source<'a> {
        Source {
            layout: self.pages.decode_layout(),
            stored: self.pages.stored(),
            pages_per_pool: self.pages.pages_per_buffer,
            num_pages: Some(self.pages.num_pages),
            lists: &self.lists,
            tail_pages: &self.no_tails,
            k_tensor_scales: view.k_tensor_scales(),
            v_tensor_scales: view.v_tensor_scales(),
        }
    }
}
