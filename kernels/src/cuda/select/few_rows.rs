//! Which kernel integers of 9 to 32 query rows take.

use attn_core::{KvFormat, Problem, Scheme, segments::num_spans};

use super::{
    super::{
        config::{BULK_SHARED, DeviceLimits},
        split::longest,
    },
    FEW_ROWS, Shape,
};

impl Shape {
    /// Whether `many_rows.cu` is faster than `split_kv.cu` with integers and 9 to 32 rows: by the spans that an SM has. Its two teams to an SM take 25 µs for a span
    /// each, whatever the others do. Measured on an H200, int8, 1 · 2 · 4 · 8 spans an SM, µs: 16 rows 24 · 30 · 46 by `split_kv.cu`, 26 · 27 · 47; 32 rows
    /// 30 · 44 · 65 · 108 and 33 · 33 · 57 · 103. int4, 16 rows 20 · 30 · 44 · 72 and 29 · 30 · 51 · 92; 32 rows 32 · 48 · 72 · 122 and 32 · 33 · 57 · 103. int8 keys with
    /// int4 values, 16 rows 19 · 30 · 44 · 77 and 35 · 36 · 64 · 118; 32 rows 29 · 47 · 70 · 123 and 36 · 37 · 67 · 125. int4-g1, 2 · 4 · 8 spans an SM, 12 rows
    /// 29 · 41 · 71 and 30 · 53 · 97; 32 rows 41 · 62 · 108 and 35 · 61 · 115.
    pub(super) fn few_rows_are_faster(&self, problem: &Problem, limits: DeviceLimits) -> bool {
        let spans: usize = problem.kv_lens.iter().map(|&len| num_spans(len)).sum();
        let of_sm = spans
            .saturating_mul(problem.num_kv_heads)
            .div_ceil(limits.sms.max(1));
        // Two or three teams that share a sequence wait for each other to merge: 2048 tokens of 128 sequences, 16 rows, 27 and 31 µs.
        let merge_late = (2..4).contains(&num_spans(longest(problem)));
        let copies = limits.shared_limit >= BULK_SHARED;
        let KvFormat { k, v, .. } = self.format;
        let is_half_steps = |scheme: Scheme| scheme.code_bits() == 4 && scheme.is_rotated();
        let are_half_steps = is_half_steps(k) && is_half_steps(v);
        let are_faster = match self.rows {
            17..=FEW_ROWS if self.are_bytes() => (2..=4).contains(&of_sm),
            25..=FEW_ROWS if are_half_steps => of_sm >= 2,
            9..=16 if !self.are_bytes() && !are_half_steps => false,
            9..=FEW_ROWS => of_sm == 2 && !merge_late,
            _ => false,
        };
        are_faster && self.format.is_integer() && (copies || self.are_bytes())
    }
}
