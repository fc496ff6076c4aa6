//! The uniform parameter blocks: each is defined here, and its WGSL struct is made of the same fields.
//!
//! A kernel includes its block by name: `#include "decode_params"`.

/// A scalar of 32 bits that a parameter block holds.
trait Field: Copy {
    const WGSL: &str;
    fn word(self) -> u32;
}

impl Field for u32 {
    const WGSL: &str = "u32";
    fn word(self) -> u32 {
        self
    }
}

impl Field for i32 {
    const WGSL: &str = "i32";
    fn word(self) -> u32 {
        self.cast_unsigned()
    }
}

impl Field for f32 {
    const WGSL: &str = "f32";
    fn word(self) -> u32 {
        self.to_bits()
    }
}

fn type_of<T, F: Field>(_: fn(&T) -> F) -> &'static str {
    F::WGSL
}

macro_rules! block {
    ($(#[$about:meta])* $name:ident { $($(#[doc = $doc:literal])* $field:ident: $kind:ty,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Default, PartialEq)]
        pub struct $name {
            $($(#[doc = $doc])* pub $field: $kind,)*
        }

        impl $name {
            /// The block's words, as the kernel's uniform buffer holds them.
            pub fn words(&self) -> Vec<u32> {
                vec![$(self.$field.word()),*]
            }

            /// The block's struct in WGSL.
            pub fn wgsl() -> String {
                let mut text = "struct Params {\n".to_owned();
                $(
                    let kind = type_of(|block: &Self| block.$field);
                    text += &format!("    {}: {kind},\n", stringify!($field));
                )*
                text + "}\n"
            }
        }
    };
}

block! {
    /// The parameters of `decode_split.wgsl` and `decode_merge.wgsl`.
    DecodeParams {
        /// Splits of all sequences.
        num_splits: u32,
        /// Workgroups of the split kernel in x.
        grid_x: u32,
        /// Row blocks of a KV head.
        row_blocks: u32,
        /// Word of the tables where the splits begin.
        splits_at: u32,
        /// Word of the tables where the query blocks begin.
        blocks_at: u32,
        /// Word of the tables where the f32 scales begin: k_tensor_scale and v_tensor_scale per KV head, then slope·log2 e per query head, then m and l of
        /// each query head's sink.
        scales_at: u32,
        /// Query heads.
        num_q_heads: u32,
        /// KV heads.
        num_kv_heads: u32,
        /// Query heads per KV head.
        heads_per_kv: u32,
        /// Slots of the ring of a sequence's residual pages, behind those of its first tile: a power of two, or 0.
        residual_ring: u32,
        /// 1 if the mask is causal.
        causal: u32,
        /// Tokens before its own that a query token sees, or -1 without a window.
        window_left: i32,
        /// Tokens of a chunk, of which a query token sees its own alone, or 0 without chunks.
        chunk: i32,
        /// Pages in one buffer of the pool.
        pages_per_pool: u32,
        /// Word of the tables where m and l of each query head's sink begin, or 0 without sinks.
        sinks_at: u32,
        /// Float of the partials where their (m, l) begin.
        maxima_at: u32,
        /// softmax_scale·log2 e.
        log2_scale: f32,
        /// 2/softcap.
        softcap_inner: f32,
        /// softcap·log2 e.
        softcap_outer: f32,
        /// Query blocks.
        num_blocks: u32,
        /// 12582912, which rounds to integers; see `arithmetic.wgsl` for why it comes twice.
        round_up: f32,
        /// The same number as `round_up`.
        round_down: f32,
        /// 0; see `product` in `arithmetic.wgsl`.
        zero: u32,
    }
}

block! {
    /// The parameters of `append.wgsl`.
    AppendParams {
        /// Jobs: the new tokens of one page each.
        num_jobs: u32,
        /// Workgroups in x.
        grid_x: u32,
        /// Word of the jobs where the f32 scales begin: k_tensor_scale and v_tensor_scale per KV head.
        scales_at: u32,
        /// KV heads.
        num_kv_heads: u32,
        /// Pages in one buffer of the pool.
        pages_per_pool: u32,
        /// As in [`DecodeParams`].
        round_up: f32,
        /// As in [`DecodeParams`].
        round_down: f32,
        /// As in [`DecodeParams`].
        zero: u32,
    }
}

block! {
    /// The parameters of `centre.wgsl`.
    CentreParams {
        /// First tiles.
        num_tiles: u32,
        /// Workgroups in x.
        grid_x: u32,
        /// KV heads.
        num_kv_heads: u32,
        /// Pages in one buffer of the pool.
        pages_per_pool: u32,
        /// As in [`DecodeParams`].
        round_up: f32,
        /// As in [`DecodeParams`].
        round_down: f32,
        /// As in [`DecodeParams`].
        zero: u32,
    }
}

block! {
    /// The parameters of `check_arithmetic.wgsl`: those that `arithmetic.wgsl` reads.
    ArithmeticParams {
        /// As in [`DecodeParams`].
        round_up: f32,
        /// As in [`DecodeParams`].
        round_down: f32,
        /// As in [`DecodeParams`].
        zero: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_struct_has_the_words_fields_in_order() {
        let params = DecodeParams {
            num_splits: 7,
            window_left: -1,
            log2_scale: 1.0,
            zero: 9,
            ..DecodeParams::default()
        };
        let words = params.words();
        let text = DecodeParams::wgsl();
        let fields: Vec<_> = text.lines().filter(|line| line.ends_with(',')).collect();
        assert_eq!(fields.len(), words.len());
        for (at, line, word) in [
            (0, "    num_splits: u32,", 7),
            (11, "    window_left: i32,", u32::MAX),
            (16, "    log2_scale: f32,", 0x3f80_0000),
            (22, "    zero: u32,", 9),
        ] {
            assert_eq!((fields[at], words[at]), (line, word));
        }
    }
}
