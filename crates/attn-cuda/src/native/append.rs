//! Appends on the device: new tokens of every sequence into its pages.

use attn_core::{Error, PageLayout, error::refuse};
use attn_kernels::cuda::{
    Instance,
    params::{AppendParams, CheckParams, DecodeParams},
};

use super::{
    check::Checked,
    decode::{NativePlan, check_purpose, launch_decode},
    decode_args::DecodeArgs,
    grid::{COPY_THREADS, Grid},
    kv::{PagedSequences, check_scale_addresses},
    kv_rows::KvRows,
    op::{Op, Prepared, enqueue_as},
    rotary::{PositionsFrom, RotaryArgs},
};
use crate::{
    gpu::CudaBackend,
    handles::{DeviceAddress, Stream},
    sizes::{self, check_heads},
};

/// What the kernels of appends are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppendShape {
    /// The layout of the pages that are written. Refused are more than 65535 KV heads.
    pub layout: PageLayout,
    /// Whether launches may rotate K and queries by their positions; the kernel that does is loaded beside the other one.
    pub rotary: bool,
}

impl AppendShape {
    /// The kernel without rotary positions, then the one with them.
    pub(super) fn instances(&self) -> Result<Vec<Instance>, Error> {
        check_heads(self.layout.num_kv_heads())?;
        let instance = |rotary| Instance::Append {
            format: self.layout.format(),
            head_dim: self.layout.head_dim(),
            page_size: self.layout.page_size(),
            rotary,
        };
        Ok(match self.rotary {
            false => vec![instance(false)],
            true => vec![instance(false), instance(true)],
        })
    }

    /// The fields that rotary positions have in the kernel's parameter block; all others are 0.
    ///
    /// # Errors
    /// [`Error::Parameter`] for positions where the kernel that takes them was not loaded; those of [`RotaryArgs`].
    pub(super) fn rotary_params(
        &self,
        rotary: Option<&RotaryArgs>,
        tokens: usize,
        positions: PositionsFrom,
    ) -> Result<AppendParams, Error> {
        match rotary {
            None => Ok(AppendParams::default()),
            Some(_) if !self.rotary => refuse(
                "rotary",
                format_args!("some, for an append that was prepared without"),
                "none, or an append prepared with AppendShape::rotary",
            ),
            Some(rotary) => rotary.params(self.layout.head_dim().k, tokens, positions),
        }
    }
}

/// An append of `tokens` new tokens to each of `batch` sequences; their places come from `kv_lens` on the device.
///
/// Refused are more than 65535 sequences, where `tokens` is above 1 more than 65535 KV heads and query heads to rotate together, pages that overlap, residual
/// pages or static scales that are missing, and rotary positions with a `rotary_dim`, an address or strides that are not allowed.
///
/// # Safety
/// - On the device, every `kv_lens` counts the new tokens, and every page that they touch, home and residual, is in the pool and belongs to its sequence
///   alone; tokens arrive in order; K and V are finite.
/// - With `rotary`, on the device, positions are rows of `cos_sin` (a token whose is none is not appended), and K is finite once rotated; rotated queries
///   overlap nothing that runs meanwhile, and not K or V.
#[derive(Debug, Clone, Copy)]
pub struct AppendArgs {
    /// K and V of the new tokens, `batch · tokens` rows.
    pub rows: KvRows,
    /// The sequences that they are appended to; `kv_lens` count the new tokens already.
    pub sequences: PagedSequences,
    /// Sequences.
    pub batch: usize,
    /// New tokens of each.
    pub tokens: usize,
    /// Rotary positions, by an append prepared with [`AppendShape::rotary`]; none where K is appended as it is. Positions that are null are the
    /// tokens' numbers in their sequences, as `kv_lens` say.
    pub rotary: Option<RotaryArgs>,
}

impl AppendArgs {
    /// Query heads that are rotated beside K.
    fn query_heads(&self) -> usize {
        self.rotary.map_or(0, |rotary| rotary.query_heads())
    }

    /// Refuses what [`append_grid`] has no room for.
    fn check_grid(&self, layout: &PageLayout) -> Result<(), Error> {
        let allowed = "at most 65535 in an append behind sequences, as a CUDA grid has no more rows; SlotAppendArgs takes more, or append to some at a time";
        sizes::check_grid("sequences to append to", self.batch, allowed)?;
        // One token of each takes several heads in a row.
        if self.tokens > 1 {
            let heads = layout.num_kv_heads().saturating_add(self.query_heads());
            let allowed = "at most 65535 in an append of several tokens, as a CUDA grid has no more rows; SlotAppendArgs takes 65535 of each";
            sizes::check_grid("KV heads and query heads to rotate", heads, allowed)?;
        }
        Ok(())
    }
}

// SAFETY: `attn_append` takes one AppendParams, asserted on both sides, and writes the pages of new tokens and rotated queries alone.
unsafe impl Op for AppendArgs {
    type Shape = AppendShape;
    type Params = AppendParams;
    const DOING: &'static str = "appending";

    fn instances(shape: &AppendShape) -> Result<Vec<Instance>, Error> {
        shape.instances()
    }

    fn kernel(&self) -> usize {
        usize::from(self.rotary.is_some())
    }

    fn params(&self, shape: &AppendShape) -> Result<AppendParams, Error> {
        let layout = &shape.layout;
        self.check_grid(layout)?;
        let sequences = &self.sequences;
        let tables = sequences.check(layout)?;
        let heads = layout.num_kv_heads();
        check_scale_addresses(layout.format(), sequences.tensor_scales, heads)?;
        let [k_tensor_scales, v_tensor_scales] = sequences.tensor_scales.map(DeviceAddress::get);
        let all = self.batch.saturating_mul(self.tokens);
        let rotary = shape.rotary_params(self.rotary.as_ref(), all, PositionsFrom::KvLens)?;
        Ok(AppendParams {
            pool: sequences.pool.at.get(),
            page_stride: sequences.pool.stride as u64,
            page_table: sequences.page_table.get(),
            page_table_stride: tables.page_table_stride,
            residual_pages: sequences.residual_pages.get(),
            residual_ring: tables.residual_ring,
            kv_lens: sequences.kv_lens.get(),
            k_tensor_scales,
            v_tensor_scales,
            tokens: sizes::int("tokens to append", self.tokens)?,
            batch: sizes::int("sequences to append to", self.batch)?,
            num_kv_heads: sizes::int("num_kv_heads", layout.num_kv_heads())?,
            ..self.rows.append_params(rotary)
        })
    }

    fn grid(&self, shape: &AppendShape) -> Grid {
        append_grid(&shape.layout, [self.batch, self.tokens], self.query_heads())
    }

    fn checked(&self, shape: &AppendShape) -> Result<Option<Checked>, Error> {
        let (layout, sequences) = (&shape.layout, &self.sequences);
        let reach = sequences
            .page_table_stride
            .saturating_mul(layout.page_size());
        Ok(Some(Checked {
            doing: "checking an append",
            arrays: DecodeParams {
                batch: sizes::int("sequences to append to", self.batch)?,
                ..sequences.decode_params(layout)?
            },
            limits: CheckParams {
                positions: self.rotary.map_or(0, |rotary| rotary.positions.get()),
                num_positions: self.rotary.map_or(0, |rotary| rotary.rows()),
                max_kv_len: sizes::int_limit(reach),
                min_kv_len: sizes::int("tokens to append", self.tokens)?,
                num_pages: sizes::axis(sequences.pool.num_pages),
                page_size: sizes::int("page_size", layout.page_size())?,
                ..CheckParams::default()
            },
        }))
    }
}

/// Heads of a CTA that takes one token of each: two warps of its eight have a head's K and V.
const HEADS: usize = 4;

/// The grid of `append.cu`, for `tokens` new tokens of each of `batch` sequences, and so many query heads that are rotated beside K.
pub(super) fn append_grid(
    layout: &PageLayout,
    [batch, tokens]: [usize; 2],
    query_heads: usize,
) -> Grid {
    let heads = layout.num_kv_heads();
    if tokens > 1 {
        // A first page may be open, so `tokens` touch up to this many.
        let jobs = tokens.saturating_add(layout.page_size() - 2) / layout.page_size() + 1;
        return Grid::new(
            [jobs, heads.saturating_add(query_heads), batch],
            COPY_THREADS,
        );
    }
    let threads = 64 * heads.min(HEADS);
    // `QUERY_HEADS` of rotary.cuh to a warp.
    let rotated = threads / 32 * (4 / layout.head_dim().k.div_ceil(128)).max(1);
    let columns = heads.div_ceil(HEADS) + query_heads.div_ceil(rotated);
    Grid::new([columns, batch, tokens], threads)
}

impl CudaBackend {
    /// Enqueues an append and the decode behind it: what [`CudaBackend::enqueue`] and [`CudaBackend::decode_on`] do, with the same bits,
    /// but the decode reads older pages while the append runs, and waits only for those that it writes. The step of a layer. Where the append rotates
    /// the queries, too, the decode waits for all of it.
    ///
    /// # Safety
    /// Those of both. All that the decode reads but the new tokens is there before the append begins, as nothing is enqueued between them;
    /// on the device, the last tokens of a sequence that the append takes are its new ones.
    ///
    /// # Errors
    /// Those of both. If the decode is refused, the append has been enqueued.
    pub unsafe fn append_decode_on(
        &self,
        append: &Prepared<AppendArgs>,
        plan: &NativePlan,
        stream: Stream,
        append_args: &AppendArgs,
        decode_args: &DecodeArgs,
    ) -> Result<(), Error> {
        // Ahead of the append, which would be enqueued.
        check_purpose(plan, false)?;
        // What is ahead of an append of nothing may still run.
        let is_early = append_args.batch > 0 && append_args.query_heads() == 0;
        let appended = if is_early { append_args.tokens } else { 0 };
        let is_followed = i32::from(appended > 0);
        let followed = |params| AppendParams {
            is_followed,
            ..params
        };
        // SAFETY: this function's contract; the decode is next on the stream.
        unsafe { enqueue_as(&self.device, append, stream.raw(), append_args, followed) }?;
        // SAFETY: this function's contract, and the launch ahead is the append.
        unsafe { launch_decode(&self.device, plan, stream.raw(), decode_args, appended) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::{KvFormat, RotaryStyle};

    use crate::native::{Dtype, Pages, RotaryQueries};

    fn layout() -> PageLayout {
        PageLayout::new(KvFormat::INT4, 128, 64, 2).unwrap()
    }

    fn shape() -> AppendShape {
        AppendShape {
            layout: layout(),
            rotary: true,
        }
    }

    fn args() -> AppendArgs {
        AppendArgs {
            rows: KvRows {
                k: DeviceAddress::NULL,
                v: DeviceAddress::NULL,
                dtype: Dtype::F32,
                k_token_stride: 256,
                v_token_stride: usize::MAX,
            },
            sequences: PagedSequences {
                pool: Pages::new(DeviceAddress::NULL, &layout(), 1),
                page_table: DeviceAddress::NULL,
                page_table_stride: 3,
                residual_pages: DeviceAddress::new(0x100),
                residual_slots: 5,
                kv_lens: DeviceAddress::NULL,
                tensor_scales: [DeviceAddress::NULL; 2],
            },
            batch: 5,
            tokens: 7,
            rotary: None,
        }
    }

    fn rotary(query_heads: usize) -> RotaryArgs {
        let at = DeviceAddress::new;
        RotaryArgs {
            style: RotaryStyle::HalfSplit,
            rotary_dim: 64,
            cos_sin: at(0x700),
            cos_sin_dtype: Dtype::F32,
            num_positions: 9,
            positions: DeviceAddress::NULL,
            queries: Some(RotaryQueries {
                q: at(0x600),
                out: at(0x600),
                heads: query_heads,
                token_stride: query_heads * 128,
                out_token_stride: query_heads * 128,
            }),
        }
    }

    #[test]
    fn static_scales_are_needed_where_a_scheme_has_them() {
        let layout = PageLayout::new("int8/fp8".parse().unwrap(), 128, 64, 2).unwrap();
        let shape = AppendShape {
            layout,
            rotary: false,
        };
        let mut given = args();
        given.sequences.pool = Pages::new(DeviceAddress::NULL, &layout, 1);
        let refused = given.params(&shape).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::MissingScales {
                    what: "v_scales",
                    needed: 2,
                    ..
                }
            ),
            "{refused}"
        );
        given.sequences.tensor_scales[1] = DeviceAddress::new(0x700);
        let params = given.params(&shape).unwrap();
        assert_eq!(params.v_tensor_scales, 0x700);
    }

    #[test]
    fn numbers_of_more_than_31_bits_are_refused() {
        let params = args().params(&shape()).unwrap();
        assert_eq!(
            (params.tokens, params.batch, params.page_table_stride),
            (7, 5, 3)
        );
        assert_eq!(
            (params.k_token_stride, params.v_token_stride),
            (256, i64::MAX)
        );
        assert_eq!((params.residual_pages, params.residual_ring), (0x100, 4));
        for large in [1 << 31, (1 << 32) + 1, usize::MAX] {
            let [mut tokens, mut batch, mut stride] = [args(); 3];
            (tokens.tokens, batch.batch) = (large, large);
            stride.sequences.page_table_stride = large;
            for args in [tokens, batch, stride] {
                let refused = args.params(&shape());
                assert!(matches!(refused, Err(Error::Parameter { .. })), "{args:?}");
            }
        }
    }

    #[test]
    fn what_a_grid_has_no_room_for_is_refused_before_anything_is_enqueued() {
        let args = |batch, tokens, query_heads| AppendArgs {
            batch,
            tokens,
            rotary: Some(rotary(query_heads)),
            ..args()
        };
        // A grid's second and third axis are as long as CUDA allows where the block of parameters is made, and longer where it is not.
        for (batch, tokens, query_heads, refused) in [
            (65_535, 1, 9, None),
            (65_536, 1, 9, Some("sequences to append to is 65536")),
            (65_535, 2, 9, None),
            (65_536, 2, 9, Some("sequences to append to is 65536")),
            (5, 1, 65_535, None),
            (5, 2, 65_533, None),
            (5, 2, 65_534, Some("query heads to rotate is 65536")),
        ] {
            let args = args(batch, tokens, query_heads);
            let [_, rows, layers] = args.grid(&shape()).ctas;
            let fits = rows.max(layers) <= 65_535;
            match (args.params(&shape()), refused) {
                (Ok(_), None) => assert!(fits, "{args:?}"),
                (Err(error), Some(what)) => {
                    let said = error.to_string();
                    assert!(!fits && said.contains(what), "{said}");
                    assert!(said.contains("SlotAppendArgs"), "{said}");
                }
                (other, _) => panic!("{other:?} of {args:?}"),
            }
        }
    }

    #[test]
    fn grids_grow_with_tokens_and_saturate() {
        let grid = |batch, tokens, query_heads| {
            let Grid { ctas, threads } = append_grid(&layout(), [batch, tokens], query_heads);
            (ctas, threads)
        };
        assert_eq!(grid(3, 65, 0), ([2, 2, 3], COPY_THREADS));
        assert_eq!(grid(3, 66, 0).0, [3, 2, 3]);
        assert_eq!(grid(3, 66, 9).0, [3, 11, 3]);
        assert_eq!(grid(3, usize::MAX, 0).0[1..], [2, 3]);
        assert_eq!(grid(usize::MAX, 1, 0), ([1, usize::MAX, 1], 128));
        // Two KV heads are four warps, which take sixteen query heads in a column.
        assert_eq!(grid(6, 1, 16), ([2, 6, 1], 128));
        assert_eq!(grid(6, 1, 17), ([3, 6, 1], 128));
        for nothing in [[0, 1], [0, 5], [7, 0]] {
            assert!(append_grid(&layout(), nothing, 9).is_empty());
        }
    }

    #[test]
    fn positions_need_the_kernel_that_takes_them() {
        let without = AppendShape {
            rotary: false,
            ..shape()
        };
        assert_eq!(
            (shape().instances().unwrap().len(), args().kernel()),
            (2, 0)
        );
        assert_eq!(
            without.instances().unwrap(),
            shape().instances().unwrap()[..1]
        );
        let rotated = AppendArgs {
            rotary: Some(rotary(4)),
            ..args()
        };
        assert_eq!(rotated.kernel(), 1);
        rotated.params(&shape()).unwrap();
        let said = rotated.params(&without).unwrap_err().to_string();
        assert!(said.contains("AppendShape::rotary"), "{said}");
        args().params(&without).unwrap();
    }

    #[test]
    fn a_check_compares_lengths_with_the_table_and_new_tokens() {
        let checked = args().checked(&shape()).unwrap().unwrap();
        let (arrays, limits) = (checked.arrays, checked.limits);
        assert_eq!((arrays.batch, arrays.residual_pages), (5, 0x100));
        assert_eq!((limits.max_kv_len, limits.min_kv_len), (3 * 64, 7));
        assert_eq!((limits.num_pages, limits.page_size), (1, 64));
        assert_eq!((limits.positions, limits.num_positions), (0, 0));
    }
}
