//! The rows of a contiguous cache in pages, as other engines keep them.

use attn_core::{KvView, Problem, Scheme, StridedRows};
use attn_cuda::native::{DeviceAddress, DeviceKv, ViewRows};

/// Rows in pages that are scattered over a pool: `[page][token][head]`, or `[page][head][token]`. Whatever no token owns holds ones, which are no
/// numbers to formats of floats.
pub struct PagedRows {
    pub num_pages: usize,
    /// K's and V's.
    pub codes: [Vec<u8>; 2],
    pub scales: [Vec<u16>; 2],
    code_strides: [[usize; 3]; 2],
    scale_strides: [[usize; 3]; 2],
    /// `[batch][stride]`.
    pub table: Vec<u32>,
    stride: usize,
}

impl PagedRows {
    pub fn new(view: &KvView<'_>, problem: &Problem, page_size: usize, heads_first: bool) -> Self {
        let pages = |len: &usize| len.div_ceil(page_size);
        let stride = problem.kv_lens.iter().map(pages).max().unwrap_or(0).max(1);
        let num_pages = problem.batch() * stride;
        // No two pages of a sequence lie side by side, and none where it would without a table.
        let step = [7, 11, 13]
            .into_iter()
            .find(|n| !num_pages.is_multiple_of(*n));
        let table: Vec<u32> = (0..num_pages)
            .map(|i| ((i + 1) * step.unwrap_or(1) % num_pages) as u32)
            .collect();
        let (format, [k_dim, v_dim]) = (view.format(), problem.head_dim.both());
        let sides = [(format.k, k_dim, view.k()), (format.v, v_dim, view.v())];
        let heads = problem.num_kv_heads;
        let strides = |row: usize| match heads_first {
            true => [heads * page_size * row, page_size * row, row],
            false => [heads * page_size * row, row, heads * row],
        };
        let row_bytes = |scheme: Scheme, dim: usize| dim * scheme.code_bits() / 8;
        let groups = |scheme: Scheme, dim: usize, rows: &StridedRows<'_>| match rows.scales {
            [] => 0,
            _ => scheme.groups(dim).count(),
        };
        // Each cached row's place in the contiguous cache and in its page.
        let places = || {
            let of = |b: usize| {
                (0..problem.kv_lens[b]).flat_map(move |t| (0..heads).map(move |h| [b, h, t]))
            };
            (0..problem.batch()).flat_map(of)
        };
        let at = |[a, b, c]: [usize; 3], strides: [usize; 3]| {
            a * strides[0] + b * strides[1] + c * strides[2]
        };
        let in_page = |[b, h, t]: [usize; 3]| {
            let page = table[b * stride + t / page_size] as usize;
            [page, h, t % page_size]
        };
        let codes = sides.map(|(scheme, dim, rows)| {
            let row = row_bytes(scheme, dim);
            let mut paged = vec![0xff; num_pages * page_size * heads * row];
            for place in places() {
                let (from, to) = (
                    at(place, rows.code_strides),
                    at(in_page(place), strides(row)),
                );
                paged[to..to + row].copy_from_slice(&rows.codes[from..from + row]);
            }
            paged
        });
        let scales = sides.map(|(scheme, dim, rows)| {
            let count = groups(scheme, dim, rows);
            let mut paged = vec![0xffff; num_pages * page_size * heads * count];
            for place in places().filter(|_| count > 0) {
                let from = at(place, rows.scale_strides);
                let to = at(in_page(place), strides(count));
                paged[to..to + count].copy_from_slice(&rows.scales[from..from + count]);
            }
            paged
        });
        PagedRows {
            num_pages,
            codes,
            scales,
            code_strides: sides.map(|(scheme, dim, _)| strides(row_bytes(scheme, dim))),
            scale_strides: sides.map(|(scheme, dim, rows)| strides(groups(scheme, dim, rows))),
            table,
            stride,
        }
    }

    /// K and V of a launch: the addresses of the codes, of the scales, of the table, of the lengths, and of the static scales.
    pub fn kv(
        &self,
        codes: [DeviceAddress; 2],
        scales: [DeviceAddress; 2],
        [table, kv_lens]: [DeviceAddress; 2],
        tensor_scales: [DeviceAddress; 2],
    ) -> DeviceKv {
        DeviceKv::PagedRows {
            rows: ViewRows {
                k: [codes[0], scales[0]],
                v: [codes[1], scales[1]],
                code_strides: self.code_strides,
                scale_strides: self.scale_strides,
                kv_lens,
                tensor_scales,
            },
            num_pages: self.num_pages,
            page_table: table,
            page_table_stride: self.stride,
        }
    }
}
