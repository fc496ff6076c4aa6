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
    /// The C struct's padding.
    pub padding: i32,
}

const _: () = assert!(size_of::<DecodeParams>() == 288);

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
    /// The C struct's padding.
    pub padding: i32,
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
            let size = match kind {
                "int" | "unsigned int" | "float" => 4,
                "long long" | "alignas(64) long long" | "u64" => 8,
                pointer if pointer.ends_with('*') => 8,
                other => panic!("{file}: {other} is not a type that this test knows"),
            };
            at = at.next_multiple_of(size);
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
            page_bytes
        );
        assert_same!("params.h", RowMaps, k, v, are_set);
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
            dtype
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
