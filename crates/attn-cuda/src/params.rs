//! The kernels' parameter blocks: the same bytes as the structs in `kernels/cuda`, asserted here and there.

use std::mem::size_of;

/// `DecodeParams` of `kernels/cuda/params.h`; addresses are device addresses, 0 for null.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "params.h documents each field")]
pub struct DecodeParams {
    pub q: u64,
    pub out: u64,
    pub lse: u64,
    pub k: u64,
    pub v: u64,
    pub k_scales: u64,
    pub v_scales: u64,
    pub k_strides: [i64; 3],
    pub v_strides: [i64; 3],
    pub k_scale_strides: [i64; 3],
    pub v_scale_strides: [i64; 3],
    pub page_table: u64,
    pub tail_pages: u64,
    pub kv_lens: u64,
    pub k_tensor_scales: u64,
    pub v_tensor_scales: u64,
    pub alibi_slopes: u64,
    pub states: u64,
    pub state_ml: u64,
    pub counters: u64,
    pub log2_scale: f32,
    pub softcap_inner: f32,
    pub softcap_outer: f32,
    pub batch: i32,
    pub num_q_heads: i32,
    pub num_kv_heads: i32,
    pub heads_per_kv: i32,
    pub q_len: i32,
    pub row_blocks: i32,
    pub page_table_stride: i32,
    pub max_slots: i32,
    pub window_left: i32,
    pub causal: i32,
    pub tile_split: i32,
    pub page_bytes: i32,
    pub by_heads: Divisor,
    pub by_row_blocks: Divisor,
    pub by_ctas: Divisor,
    pub by_sms: Divisor,
    pub appended: i32,
    pub dtype: i32,
    /// The C struct's padding.
    pub padding: i32,
}

const _: () = assert!(size_of::<DecodeParams>() == 344);

/// `Divisor` of `kernels/cuda/params.h`: the quotient of `n < 2^31` is `(2n·multiplier) >> 32 >> shift`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "new says what they are")]
pub struct Divisor {
    pub divisor: u32,
    pub multiplier: u32,
    pub shift: u32,
}

impl Divisor {
    /// With 2^shift the first power of two from `divisor` on, `multiplier` is 2^(31 + shift) / divisor, rounded up: the error of at
    /// most n/2^31 of 1/divisor does not reach the next integer.
    pub fn new(divisor: usize) -> Self {
        let divisor = divisor.clamp(1, 1 << 30) as u32;
        let shift = divisor.next_power_of_two().trailing_zeros();
        Self {
            divisor,
            multiplier: (1u64 << (31 + shift)).div_ceil(u64::from(divisor)) as u32,
            shift,
        }
    }
}

/// `RowMaps` of `kernels/cuda/params.h`.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "params.h documents each field")]
pub struct RowMaps {
    pub k: [u64; 16],
    pub v: [u64; 16],
    pub are_set: i32,
}

const _: () = assert!(size_of::<RowMaps>() == 320);

/// `AppendParams` of `kernels/cuda/append.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "append.cu documents each field")]
pub struct AppendParams {
    pub k: u64,
    pub v: u64,
    pub pool: u64,
    pub page_table: u64,
    pub tail_pages: u64,
    pub kv_lens: u64,
    pub k_tensor_scales: u64,
    pub v_tensor_scales: u64,
    pub k_token_stride: i64,
    pub v_token_stride: i64,
    pub tokens: i32,
    pub batch: i32,
    pub num_kv_heads: i32,
    pub page_table_stride: i32,
    pub dtype: i32,
    pub is_followed: i32,
}

const _: () = assert!(size_of::<AppendParams>() == 104);

/// `ImportParams` of `kernels/cuda/import.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "import.cu documents each field")]
pub struct ImportParams {
    pub k: u64,
    pub v: u64,
    pub k_scales: u64,
    pub v_scales: u64,
    pub k_strides: [i64; 3],
    pub v_strides: [i64; 3],
    pub k_scale_strides: [i64; 3],
    pub v_scale_strides: [i64; 3],
    pub pool: u64,
    pub page_table: u64,
    pub kv_lens: u64,
    pub num_kv_heads: i32,
    pub page_table_stride: i32,
}

const _: () = assert!(size_of::<ImportParams>() == 160);

/// `CheckParams` of `kernels/cuda/check.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "check.cu documents each field")]
pub struct CheckParams {
    pub report: u64,
    pub max_kv_len: i32,
    pub num_pages: u32,
    pub page_size: i32,
    pub head_dim: i32,
    pub has_tail: i32,
    pub min_kv_len: i32,
}

const _: () = assert!(size_of::<CheckParams>() == 32);

/// `ReadParams` of `kernels/cuda/read.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs, reason = "read.cu documents each field")]
pub struct ReadParams {
    pub from: u64,
    pub bytes: u64,
    pub sink: u64,
}

const _: () = assert!(size_of::<ReadParams>() == 24);

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// `(field, offset)` of a struct in the kernels' text, by C's rules.
    fn fields(file: &str, name: &str) -> Vec<(String, usize)> {
        let (_, text) = attn_kernels::CUDA
            .iter()
            .find(|(f, _)| *f == file)
            .expect("a kernel source");
        let start = text.find(&format!("struct {name} {{")).expect("a struct");
        let body = text[start..].split_once("\n};").expect("a struct's end").0;
        let mut at = 0usize;
        let mut all = Vec::new();
        for line in body.lines().skip(1) {
            let line = line.split("//").next().unwrap_or("").trim();
            let Some(declaration) = line.strip_suffix(';') else {
                continue;
            };
            let (kind, field) = declaration.rsplit_once(' ').expect("a type and a name");
            let (field, count) = match field.split_once('[') {
                Some((field, count)) => (field, count.trim_end_matches(']').parse().unwrap()),
                None => (field, 1),
            };
            let (size, align) = match kind {
                "int" | "unsigned int" | "float" => (4, 4),
                "long long" | "alignas(64) long long" | "u64" => (8, 8),
                "Divisor" => (size_of::<Divisor>(), 4),
                pointer if pointer.ends_with('*') => (8, 8),
                other => panic!("{file}: {other} is not a type that this test knows"),
            };
            at = at.next_multiple_of(align);
            all.push((field.to_owned(), at));
            at += size * count;
        }
        all
    }

    macro_rules! assert_same {
        ($file:literal, $name:ident, $($field:ident),+) => {
            let ours = vec![$((stringify!($field).to_owned(), offset_of!($name, $field))),+];
            assert_eq!(fields($file, stringify!($name)), ours, "{}", $file);
        };
    }

    #[test]
    fn prepared_divisors_divide() {
        let quotient = |d: Divisor, n: u32| {
            ((u64::from(2 * n) * u64::from(d.multiplier)) >> 32 >> d.shift) as u32
        };
        for divisor in (1..3000).chain([4095, 65_537, (1 << 30) - 1, 1 << 30]) {
            let d = Divisor::new(divisor as usize);
            let most = (1u32 << 31) - 1;
            let last = most / divisor * divisor;
            for n in [
                0,
                1,
                divisor - 1,
                divisor,
                2 * divisor - 1,
                last - 1,
                last,
                most,
                most / 2,
                123_456_789,
            ] {
                assert_eq!(quotient(d, n), n / divisor, "{n} / {divisor}");
            }
        }
    }

    #[test]
    fn blocks_are_the_kernels_own_field_by_field() {
        assert_same!(
            "params.h",
            DecodeParams,
            q,
            out,
            lse,
            k,
            v,
            k_scales,
            v_scales,
            k_strides,
            v_strides,
            k_scale_strides,
            v_scale_strides,
            page_table,
            tail_pages,
            kv_lens,
            k_tensor_scales,
            v_tensor_scales,
            alibi_slopes,
            states,
            state_ml,
            counters,
            log2_scale,
            softcap_inner,
            softcap_outer,
            batch,
            num_q_heads,
            num_kv_heads,
            heads_per_kv,
            q_len,
            row_blocks,
            page_table_stride,
            max_slots,
            window_left,
            causal,
            tile_split,
            page_bytes,
            by_heads,
            by_row_blocks,
            by_ctas,
            by_sms,
            appended,
            dtype
        );
        assert_same!("params.h", RowMaps, k, v, are_set);
        assert_same!("params.h", Divisor, divisor, multiplier, shift);
        assert_same!(
            "append.cu",
            AppendParams,
            k,
            v,
            pool,
            page_table,
            tail_pages,
            kv_lens,
            k_tensor_scales,
            v_tensor_scales,
            k_token_stride,
            v_token_stride,
            tokens,
            batch,
            num_kv_heads,
            page_table_stride,
            dtype,
            is_followed
        );
        assert_same!(
            "import.cu",
            ImportParams,
            k,
            v,
            k_scales,
            v_scales,
            k_strides,
            v_strides,
            k_scale_strides,
            v_scale_strides,
            pool,
            page_table,
            kv_lens,
            num_kv_heads,
            page_table_stride
        );
        assert_same!(
            "check.cu",
            CheckParams,
            report,
            max_kv_len,
            num_pages,
            page_size,
            head_dim,
            has_tail,
            min_kv_len
        );
        assert_same!("read.cu", ReadParams, from, bytes, sink);
    }
}
