//! Contiguous caches to time, in host memory.

use attn_core::{Error, KvFormat, KvView, Problem, Scheme, StridedRows};

use crate::{CacheLayout, Workload};

/// f16 for about 0.016.
const SCALE: u16 = 0x2400;

/// A contiguous cache of some numbers, all finite.
pub struct ContiguousCache {
    workload: Workload,
    /// Codes of K and of V.
    codes: [Vec<u8>; 2],
    scales: [Vec<u16>; 2],
}

/// A constructor of [`KvView`].
type MakeView<'a> = fn(
    &'a Problem,
    KvFormat,
    StridedRows<'a>,
    StridedRows<'a>,
    [&'a [f32]; 2],
) -> Result<KvView<'a>, Error>;

/// Groups of a row that have a stored scale.
fn scale_groups(scheme: Scheme, head_dim: usize) -> usize {
    if scheme.has_row_scales() {
        scheme.groups(head_dim).count()
    } else {
        0
    }
}

impl ContiguousCache {
    /// Every sequence has room for the longest.
    pub fn new(workload: &Workload) -> Self {
        let rows =
            workload.problem.batch() * workload.problem.num_kv_heads * Self::capacity(workload);
        let sides = workload.format.sides(workload.problem.head_dim);
        ContiguousCache {
            // Bytes below 64 are finite in every format.
            codes: sides.map(|(scheme, dim)| {
                let bytes = rows * dim * scheme.code_bits() / 8;
                (0..bytes).map(|i| (i * 31 % 61) as u8).collect()
            }),
            scales: sides.map(|(scheme, dim)| vec![SCALE; rows * scale_groups(scheme, dim)]),
            workload: workload.clone(),
        }
    }

    fn capacity(workload: &Workload) -> usize {
        workload.problem.kv_lens.iter().copied().max().unwrap_or(0)
    }

    /// The rows as the workload places them; their values are this type's own, and taken on trust.
    ///
    /// # Errors
    /// Those of [`KvView::new`].
    pub fn view(&self) -> Result<KvView<'_>, Error> {
        self.made_by(KvView::with_trusted_values)
    }

    /// The cache as a view with every value checked, as [`KvView::new`] does it: what that costs.
    ///
    /// # Errors
    /// Those of [`KvView::new`].
    pub fn checked_view(&self) -> Result<KvView<'_>, Error> {
        self.made_by(KvView::new)
    }

    fn made_by<'a>(&'a self, make_view: MakeView<'a>) -> Result<KvView<'a>, Error> {
        let problem = &self.workload.problem;
        let (heads, format) = (problem.num_kv_heads, self.workload.format);
        let capacity = Self::capacity(&self.workload);
        let [k, v] = [0, 1].map(|i| {
            let (scheme, dim) = format.sides(problem.head_dim)[i];
            let make = match self.workload.cache {
                CacheLayout::Bsnh => StridedRows::bsnh,
                _ => StridedRows::bnsh,
            };
            let row_bytes = dim * scheme.code_bits() / 8;
            let groups = scale_groups(scheme, dim);
            let (codes, scales) = (&self.codes[i], &self.scales[i]);
            make(codes, scales, heads, capacity, row_bytes, groups)
        });
        make_view(problem, format, k, v, [&[], &[]])
    }
}
