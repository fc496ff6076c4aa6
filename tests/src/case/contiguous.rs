//! A contiguous cache that a case reads in place of pages.

use attn_core::{
    CacheConfig, Error, KvView, Problem, Scheme, StridedRows,
    quant::{self, Param},
};

use super::{Build, Case};

impl Case {
    /// The contiguous cache that a view case reads: exact codes, 9 tokens of capacity to spare, all poisoned.
    pub fn contiguous(&self) -> Contiguous {
        let (p, config) = (&self.problem, self.config());
        let capacity = p.kv_lens.iter().copied().max().unwrap_or(0) + 9;
        let sides = [0, 1].map(|side| {
            let (scheme, scales) = match side {
                0 => (self.format.k, &config.k_tensor_scales),
                _ => (self.format.v, &config.v_tensor_scales),
            };
            let dim = p.head_dim.both()[side];
            let of_row = scheme.groups(dim);
            let groups = of_row.count();
            let row_bytes = dim * scheme.code_bits() / 8;
            let rows = p.batch() * p.num_kv_heads * capacity;
            let mut filled = Rows {
                codes: vec![0xff; rows * row_bytes],
                scales: vec![0xffff; rows * groups],
                capacity,
                row_bytes,
                groups,
            };
            let (mut codes, mut params) = (vec![0; dim], vec![Param::default(); groups]);
            for b in 0..p.batch() {
                let x = &self.kv(b)[side];
                for (i, x) in x.chunks_exact(dim).enumerate() {
                    let (t, head) = (i / p.num_kv_heads, i % p.num_kv_heads);
                    let tensor_scale = scales.get(head).copied().unwrap_or(1.0);
                    quant::encode(scheme, tensor_scale, x, of_row, &mut codes, &mut params);
                    let row = match self.build {
                        Build::Bnsh => (b * p.num_kv_heads + head) * capacity + t,
                        _ => (b * capacity + t) * p.num_kv_heads + head,
                    };
                    filled.put(row, &codes, &params);
                }
            }
            filled
        });
        Contiguous {
            sides,
            config,
            heads: p.num_kv_heads,
            bnsh: self.build == Build::Bnsh,
        }
    }
}

/// One of K, V as rows side by side.
struct Rows {
    codes: Vec<u8>,
    scales: Vec<u16>,
    capacity: usize,
    row_bytes: usize,
    groups: usize,
}

impl Rows {
    fn put(&mut self, row: usize, codes: &[u16], params: &[Param]) {
        let bytes = &mut self.codes[row * self.row_bytes..][..self.row_bytes];
        let width = bytes.len() / codes.len();
        for (byte, code) in bytes.chunks_exact_mut(width).zip(codes) {
            byte.copy_from_slice(&code.to_le_bytes()[..width]);
        }
        for (g, param) in params.iter().enumerate() {
            self.scales[row * self.groups + g] = param.scale.to_bits();
        }
    }
}

/// A contiguous cache in host memory.
pub struct Contiguous {
    sides: [Rows; 2],
    config: CacheConfig,
    heads: usize,
    bnsh: bool,
}

impl Contiguous {
    /// The view of it; schemes without f16 scales get none.
    ///
    /// # Errors
    /// Those of [`KvView::new`].
    pub fn view<'a>(&'a self, problem: &'a Problem) -> Result<KvView<'a>, Error> {
        let format = self.config.format;
        let k = self.rows(&self.sides[0], format.k);
        let v = self.rows(&self.sides[1], format.v);
        let scales = [
            &self.config.k_tensor_scales[..],
            &self.config.v_tensor_scales[..],
        ];
        KvView::new(problem, format, k, v, scales)
    }

    fn rows<'a>(&self, side: &'a Rows, scheme: Scheme) -> StridedRows<'a> {
        let make = if self.bnsh {
            StridedRows::bnsh
        } else {
            StridedRows::bsnh
        };
        make(
            &side.codes,
            if scheme.has_row_scales() {
                &side.scales
            } else {
                &[]
            },
            self.heads,
            side.capacity,
            side.row_bytes,
            side.groups,
        )
    }
}
