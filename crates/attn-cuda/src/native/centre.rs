//! Second centres of K, made on the device of what first tiles store, and appends over pages that have centres.

use attn_core::{Error, FirstTile, PageLayout, error::refuse};
use attn_kernels::cuda::{
    Instance,
    params::{CentreParams, CentreTokens},
};

use super::{
    grid::Grid,
    op::{Op, Prepared},
    page_centres::PageCentres,
    pages::Pages,
    slots::{SlotAppendArgs, SlotCentres},
};
use crate::{
    gpu::CudaBackend,
    handles::{DeviceAddress, Stream},
    sizes::{self, check_heads},
};

/// Words of a first tile in the list that `centre.cu` reads.
const WORDS: usize = 9;

/// Makes the second centres of K of some sequences of a layer.
///
/// Refused are formats whose caches have no centres, pages that overlap, and more than 65535 KV heads.
///
/// # Safety
/// - On the device, the list names pages of the pool, residual pages where K keeps some, and sequences that there are centres of, each once.
/// - First tiles and first centres are written ahead on the stream, and nothing else uses the sequences' centres meanwhile.
#[derive(Debug, Clone, Copy)]
pub struct CentreArgs {
    /// The pool.
    pub pool: Pages,
    /// Rows of bf16 `[num_kv_heads][2][head_dim]`, one for each sequence.
    pub centres: DeviceAddress,
    /// Elements from one row to the next.
    pub stride: usize,
    /// What [`tiles_list`] gives.
    pub tiles: DeviceAddress,
    /// First tiles in the list.
    pub count: usize,
}

/// The list of first tiles as `centre.cu` reads it: of each the sequence, its first home pages, and their residual pages.
#[must_use]
pub fn tiles_list(tiles: &[FirstTile]) -> Vec<u32> {
    let mut list = Vec::with_capacity(tiles.len() * WORDS);
    for tile in tiles {
        list.push(tile.sequence as u32);
        list.extend(tile.pages);
        list.extend(tile.residual_pages.map(Option::unwrap_or_default));
    }
    list
}

// SAFETY: `attn_centre` takes one CentreParams, asserted on both sides, and writes the second centres of the list's sequences alone.
unsafe impl Op for CentreArgs {
    type Shape = PageLayout;
    type Params = CentreParams;
    const DOING: &'static str = "making centres of K";

    fn instances(layout: &PageLayout) -> Result<Vec<Instance>, Error> {
        check_heads(layout.num_kv_heads())?;
        layout.format().check_centres()?;
        Ok(vec![Instance::Centre {
            format: layout.format(),
            head_dim: layout.head_dim(),
            page_size: layout.page_size(),
        }])
    }

    fn params(&self, layout: &PageLayout) -> Result<CentreParams, Error> {
        self.pool.check(layout.page_bytes())?;
        sizes::int("first tiles", self.count)?;
        Ok(CentreParams {
            pool: self.pool.at.get(),
            centres: self.centres.get(),
            tiles: self.tiles.get(),
            page_stride: self.pool.stride as u64,
            centre_stride: self.stride as u64,
            ..CentreParams::default()
        })
    }

    fn grid(&self, layout: &PageLayout) -> Grid {
        let ctas = [self.count, layout.num_kv_heads(), 1];
        Grid::new(ctas, layout.head_dim().k.next_multiple_of(32))
    }
}

/// Makes the second centres of K of the sequences of which an append brings the last token of the first tile, in the pages that hold the tiles.
///
/// Refused is what [`PageCentres::new`] refuses.
///
/// # Safety
/// - Those of [`SlotAppendArgs`] for slots, rows of centres, which are pages of the pool, and positions.
/// - First tiles and first centres are written ahead on the stream, and nothing else uses these centres meanwhile.
#[derive(Debug, Clone, Copy)]
pub struct SecondCentresArgs {
    /// The pool.
    pub pool: Pages,
    /// i64 `[tokens]`, as [`SlotAppendArgs::slots`].
    pub slots: DeviceAddress,
    /// The centres in the pool's pages, and which of them each token's sequence has.
    pub centres: SlotCentres,
    /// Tokens.
    pub tokens: usize,
}

/// Tokens that a CTA looks at.
const LOOKED_AT: usize = 32;

// SAFETY: `attn_centre` takes one CentreParams, asserted on both sides, and writes the second centres of the tokens' first pages alone.
unsafe impl Op for SecondCentresArgs {
    type Shape = PageLayout;
    type Params = CentreParams;
    const DOING: &'static str = "making centres of K";

    fn instances(layout: &PageLayout) -> Result<Vec<Instance>, Error> {
        PageCentres::page_bytes(layout)?;
        CentreArgs::instances(layout)
    }

    fn params(&self, layout: &PageLayout) -> Result<CentreParams, Error> {
        PageCentres::new(&self.pool, layout)?;
        Ok(CentreParams {
            pool: self.pool.at.get(),
            centres: self.centres.centres.get(),
            tiles: 0,
            page_stride: self.pool.stride as u64,
            centre_stride: self.centres.stride as u64,
            slots: self.slots.get(),
            centre_rows: self.centres.rows.get(),
            centre_positions: self.centres.positions.get(),
            tokens: sizes::int("tokens to append", self.tokens)?,
        })
    }

    fn grid(&self, layout: &PageLayout) -> Grid {
        let ctas = [self.tokens.div_ceil(LOOKED_AT), layout.num_kv_heads(), 1];
        Grid::new(ctas, layout.head_dim().k.next_multiple_of(32))
    }
}

impl CudaBackend {
    /// Enqueues an append by slots over pages with centres of K: in one launch where each sequence brings at most one token (`one_each`), else in four, since tokens lack what those
    /// ahead of them make. Can be captured.
    ///
    /// # Safety
    /// Those of [`SlotAppendArgs`] and [`SecondCentresArgs`].
    ///
    /// # Errors
    /// Those of [`CudaBackend::enqueue`]; [`Error::Parameter`] for an append without centres, and what [`PageCentres::new`] refuses.
    pub unsafe fn append_with_centres_on(
        &self,
        append: &Prepared<SlotAppendArgs>,
        second: &Prepared<SecondCentresArgs>,
        stream: Stream,
        args: &SlotAppendArgs,
        one_each: bool,
    ) -> Result<(), Error> {
        for launch in centred_launches(args, one_each)? {
            // SAFETY: this function's contract; launches of a stream see what those ahead have written.
            unsafe {
                match launch {
                    CentredLaunch::Store(args) => self.enqueue(append, stream, &args),
                    CentredLaunch::Make(args) => self.enqueue(second, stream, &args),
                }
            }?;
        }
        Ok(())
    }
}

/// A launch of an append over pages with centres of K.
#[derive(Debug, Clone, Copy)]
pub enum CentredLaunch {
    /// Some of the tokens.
    Store(SlotAppendArgs),
    /// Second centres.
    Make(SecondCentresArgs),
}

/// The launches of [`CudaBackend::append_with_centres_on`], in order.
///
/// # Errors
/// [`Error::Parameter`] for an append without centres.
pub fn centred_launches(
    args: &SlotAppendArgs,
    one_each: bool,
) -> Result<Vec<CentredLaunch>, Error> {
    let Some(centres) = args.centres else {
        let allowed = "the centres of its tokens' sequences";
        return refuse("centres of K", format_args!("none"), allowed);
    };
    let store = |tokens| {
        CentredLaunch::Store(SlotAppendArgs {
            centres: Some(SlotCentres { tokens, ..centres }),
            ..*args
        })
    };
    if one_each {
        return Ok(vec![store(CentreTokens::EachWithCentres)]);
    }
    let make = SecondCentresArgs {
        pool: args.pool,
        slots: args.slots,
        centres,
        tokens: args.tokens,
    };
    Ok(vec![
        store(CentreTokens::First),
        store(CentreTokens::OfFirstTiles),
        CentredLaunch::Make(make),
        store(CentreTokens::BehindFirstTiles),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_and_a_head_have_a_cta_of_whole_warps_with_a_thread_for_each_dim() {
        let layout = PageLayout::new(attn_core::KvFormat::INT4, 80, 16, 3).unwrap();
        let args = CentreArgs {
            pool: Pages::new(DeviceAddress::new(0x100), &layout, 9),
            centres: DeviceAddress::new(0x200),
            stride: 480,
            tiles: DeviceAddress::new(0x300),
            count: 2,
        };
        assert_eq!(args.grid(&layout), Grid::new([2, 3, 1], 96));
        let params = args.params(&layout).unwrap();
        let stride = layout.page_bytes() as u64;
        assert_eq!((params.pool, params.page_stride), (0x100, stride));
        assert_eq!((params.centres, params.tiles), (0x200, 0x300));
        assert_eq!(params.centre_stride, 480);
        let plain = PageLayout::new("int8-plain".parse().unwrap(), 128, 64, 2).unwrap();
        assert!(CentreArgs::instances(&plain).is_err());
    }
}
