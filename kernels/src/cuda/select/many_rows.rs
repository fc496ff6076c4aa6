//! The configuration of `many_rows.cu` for rows that are not wide, and which kernel integers of 9 to 32 query rows take.

use attn_core::{HeadDim, KvFormat, Problem, Scheme, segments::num_spans};

use super::{
    super::{
        config::{BULK_SHARED, DeviceLimits, Kernel, KernelConfig, WARPGROUPS},
        smem::has_wide_rows,
        split::longest,
    },
    FEW_ROWS, Shape,
};

impl Shape {
    /// The configuration of `many_rows.cu` for runs of spans; `None` where it does not cover the shape.
    pub(crate) fn many_rows(&self, shared_limit: usize) -> Option<KernelConfig> {
        if has_wide_rows(self.format, self.head_dim) {
            return self.wide_rows(shared_limit);
        }
        let KvFormat { k, v, .. } = self.format;
        let HeadDim { k: dim, v: v_dim } = self.head_dim;
        let has_one_scale = |scheme: Scheme| scheme.groups(dim).count() == 1;
        let is_covered = match self.format.is_integer() {
            true => has_one_scale(k) && has_one_scale(v),
            false => k == v && !self.format.latents,
        };
        // Products of bytes have V along the tokens, as rows have not. Of many dims, registers suffice for 16-bit floats, and shared memory for a ring of both warpgroups'.
        let is_16_bit = k.code_bits() == 16;
        let has_many_dims = dim > 128;
        // Three read a cached token half as often as two for as many rows, where registers suffice for their states.
        let has_three =
            is_16_bit && !has_many_dims && !self.score_mods && shared_limit >= BULK_SHARED;
        let row_warps = match self.rows {
            0..=64 if !has_many_dims => 1,
            129.. if has_three => WARPGROUPS + 1,
            _ => WARPGROUPS,
        };
        let has_dims = match (dim, v_dim) {
            (64 | 96 | 128, _) if v_dim == dim => true,
            (80, 80) | (192 | 256, _) if v_dim == dim => is_16_bit,
            // Of pages alone: the copy engine has rows of both sides by one swizzle.
            (192 | 256, 64..) => is_16_bit && v_dim < dim && !self.layout.is_rows(),
            _ => false,
        };
        // Few rows, too, where nothing else fits.
        if self.rows <= 8 && self.split_kv(shared_limit).is_some()
            || !has_dims
            || self.layout.is_rows() && self.format.is_integer()
            || !is_covered
        {
            return None;
        }
        // A thread has one row then in place of two, and all warps have rows.
        let row_groups = match self.format.is_integer() && self.rows <= FEW_ROWS {
            true => 4,
            false => 8,
        };
        let producers = self.producers(row_warps, row_groups, shared_limit);
        // Floats of 16 bits are read a tile at a time.
        let is_whole_tiles = move |stages: &usize| !is_16_bit || stages.is_multiple_of(2);
        (2..=9 * row_warps)
            .rev()
            .filter(is_whole_tiles)
            .map(|stages| KernelConfig {
                kernel: Kernel::ManyRows,
                row_groups,
                row_warps,
                stages,
                ctas: 1,
                producers,
            })
            .find(|config| self.fits(config, 1, shared_limit))
    }

    /// Warpgroups that copy tiles and unpack codes. Four warps unpack too slowly for two teams, but where codes of 4 bits are plain: attending 64 rows takes longer
    /// then, and needs the registers (`kernels/README.md`).
    fn producers(&self, row_warps: usize, row_groups: usize, shared_limit: usize) -> usize {
        let sides = [self.format.k, self.format.v];
        let has_nibbles = sides.iter().any(|side| side.code_bits() == 4);
        let is_plain = |side: &Scheme| side.code_bits() == 4 && !side.is_rotated();
        let unpacks_slowly = match self.format.k {
            Scheme::Fp8E4m3 => true,
            _ => has_nibbles && (row_groups == 4 || !sides.iter().any(is_plain)),
        };
        match unpacks_slowly && row_warps == 1 && shared_limit >= BULK_SHARED {
            true => 2,
            false => 1,
        }
    }

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
        // Two or three teams that share a sequence wait for each other to merge: 2048 tokens of 128 sequences, 16 rows of int4 28.7 and 29.9 µs, though of int8 26.3 and
        // 25.2, and 24 rows of int4 34.9 and 31.8.
        let merge_late = (2..4).contains(&num_spans(longest(problem)));
        let copies = limits.shared_limit >= BULK_SHARED;
        let KvFormat { k, v, .. } = self.format;
        let is_half_steps = |scheme: Scheme| scheme.code_bits() == 4 && scheme.is_rotated();
        let are_half_steps = is_half_steps(k) && is_half_steps(v);
        let are_faster = match self.rows {
            17..=FEW_ROWS if self.are_bytes() => (2..=4).contains(&of_sm),
            25..=FEW_ROWS if are_half_steps => of_sm >= 2,
            9..=16 if are_half_steps => of_sm == 2 && !merge_late,
            9..=16 if !self.are_bytes() => false,
            9..=FEW_ROWS => of_sm == 2,
            _ => false,
        };
        are_faster && self.format.is_integer() && (copies || self.are_bytes())
    }
}
