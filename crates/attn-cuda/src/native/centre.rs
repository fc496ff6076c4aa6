//! Second centres of K, made on the device of what first tiles store.

use attn_core::{Error, FirstTile, PageLayout};
use attn_kernels::cuda::{Instance, params::CentreParams};

use super::{grid::Grid, op::Op, pages::Pages};
use crate::{
    handles::DeviceAddress,
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
    /// bf16 `[sequence][num_kv_heads][2][head_dim]`.
    pub centres: DeviceAddress,
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
        })
    }

    fn grid(&self, layout: &PageLayout) -> Grid {
        let ctas = [self.count, layout.num_kv_heads(), 1];
        Grid::new(ctas, layout.head_dim().k.next_multiple_of(32))
    }
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
            tiles: DeviceAddress::new(0x300),
            count: 2,
        };
        assert_eq!(args.grid(&layout), Grid::new([2, 3, 1], 96));
        let params = args.params(&layout).unwrap();
        let stride = layout.page_bytes() as u64;
        assert_eq!((params.pool, params.page_stride), (0x100, stride));
        assert_eq!((params.centres, params.tiles), (0x200, 0x300));
        let plain = PageLayout::new("int8-plain".parse().unwrap(), 128, 64, 2).unwrap();
        assert!(CentreArgs::instances(&plain).is_err());
    }
}
