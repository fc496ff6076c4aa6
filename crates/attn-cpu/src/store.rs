//! Pages in host memory, written by the vectorized quantizers, long appends by several threads.

use attn_core::{
    CacheAccess, CacheConfig, Error, FirstTile, HostPages, HostStore, PageLayout, PageStore,
    TokenWrite, WideRows,
};
use rayon::prelude::*;

use crate::{
    float_modes,
    pool::Threads,
    quantize::{RowWriter, Runs, Tokens},
    simd::Isa,
};

/// The rows of K and of V from which on an append is worth waking other threads: one thread takes some 50 µs.
const SPREAD: usize = 512;

/// The least rows that one thread takes at once.
const PIECE: usize = 64;

/// Pools of pages whose bytes are those of [`HostPages`].
pub(crate) struct CpuPages {
    pages: HostPages,
    /// The writers of each layer.
    writers: Vec<RowWriter>,
    threads: Threads,
}

impl CpuPages {
    /// Takes over an empty pool; `isa` is one that the caller has found available.
    pub fn new(
        pages: HostPages,
        config: &CacheConfig,
        isa: Isa,
        threads: Threads,
    ) -> Result<Self, Error> {
        let layout = config.layout()?;
        let writer = |layer| {
            let scales = config.tensor_scales(layer).map(<[f32]>::to_vec);
            RowWriter::new(&layout, scales, isa)
        };
        Ok(CpuPages {
            writers: (0..config.layers).map(writer).collect(),
            pages,
            threads,
        })
    }
}

/// Tokens of one page, the bytes of the page, and those of its residual page, if it has one.
struct PageWrite<'a, 'b> {
    writes: &'a [TokenWrite],
    home: &'b mut [u8],
    residual: Option<&'b mut [u8]>,
}

/// The pages of groups of tokens as slices of the pool; `None` if two groups share a page.
fn split_pool<'a, 'b>(
    groups: &[&'a [TokenWrite]],
    mut pool: &'b mut [u8],
    stride: usize,
    page_bytes: usize,
) -> Option<Vec<PageWrite<'a, 'b>>> {
    let places = groups.iter().enumerate().flat_map(|(i, group)| {
        let residual = group[0].residual_page.map(|page| (page, i, true));
        [(group[0].page, i, false)].into_iter().chain(residual)
    });
    let mut places: Vec<(u32, usize, bool)> = places.collect();
    places.sort_unstable();
    let mut taken: Vec<[Option<&mut [u8]>; 2]> = groups.iter().map(|_| [None, None]).collect();
    let mut next = 0;
    for (page, group, is_residual) in places {
        let skipped = (page as usize).checked_sub(next)?;
        let (bytes, rest) = pool[skipped * stride..].split_at_mut(stride);
        taken[group][usize::from(is_residual)] = Some(&mut bytes[..page_bytes]);
        (pool, next) = (rest, page as usize + 1);
    }
    let pairs = groups.iter().zip(taken);
    let writes = pairs.map(|(writes, [home, residual])| {
        home.map(|home| PageWrite {
            writes,
            home,
            residual,
        })
    });
    writes.collect()
}

/// Writes the pages' runs in the rayon pool that this is called in; `rows` are those of all pages.
fn spread(
    mut pages: Vec<PageWrite<'_, '_>>,
    rows: usize,
    run_bytes: usize,
    write: impl Fn(&[TokenWrite], usize, Runs<'_>) + Sync,
) {
    let pages_at_once = PIECE * pages.len() / rows;
    let pages = pages.par_iter_mut().with_min_len(pages_at_once.max(1));
    pages.for_each(|page| {
        let runs_at_once = PIECE.div_ceil(2 * page.writes.len());
        let runs = page.home.par_chunks_exact_mut(run_bytes);
        let runs = runs.with_min_len(runs_at_once);
        match &mut page.residual {
            None => runs.enumerate().for_each(|(head, home)| {
                let residual = None;
                write(page.writes, head, Runs { home, residual });
            }),
            Some(residual) => {
                let pairs = runs.zip(residual.par_chunks_exact_mut(run_bytes));
                pairs.enumerate().for_each(|(head, (home, residual))| {
                    let residual = Some(residual);
                    write(page.writes, head, Runs { home, residual });
                });
            }
        }
    });
}

impl HostStore for CpuPages {
    fn pages(&self) -> &HostPages {
        &self.pages
    }

    fn pages_mut(&mut self) -> &mut HostPages {
        &mut self.pages
    }

    fn append(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        // They make centres: a row for each sequence that begins.
        if self.pages.has_centres() && writes.iter().any(|write| write.position == 0) {
            return float_modes::with_default(|| self.pages.append(access, layer, writes, k, v));
        }
        let (layout, writer) = (self.pages.layout(), &self.writers[layer]);
        let (pool, centres) = self.pages.parts_mut(access, layer);
        let tokens = Tokens {
            writes,
            kv: [k, v],
            centres: &*centres,
        };
        let stride = layout.page_bytes();
        write_tokens(&layout, stride, writer, &self.threads, pool, tokens);
        Ok(())
    }

    fn centre(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        tiles: &[FirstTile],
    ) -> Result<(), Error> {
        float_modes::with_default(|| self.pages.centre(access, layer, tiles))
    }
}

/// Writes tokens, whose pages are those of the pool and begin `stride` bytes apart, with few of them on the calling thread.
pub(crate) fn write_tokens(
    layout: &PageLayout,
    stride: usize,
    writer: &RowWriter,
    threads: &Threads,
    pool: &mut [u8],
    tokens: Tokens<'_>,
) {
    let (run_bytes, page_bytes) = (layout.run_bytes(), layout.page_bytes());
    let write = |writes: &[TokenWrite], head, runs: Runs<'_>| {
        writer.write(Tokens { writes, ..tokens }, head, runs);
    };
    // A sequence's tokens follow each other, and pages that are written belong to one sequence.
    let groups: Vec<_> = tokens.writes.chunk_by(|a, b| a.page == b.page).collect();
    let rows = 2 * tokens.writes.len() * layout.num_kv_heads();
    if rows >= SPREAD
        && threads.count() > 1
        && let Some(pages) = split_pool(&groups, pool, stride, page_bytes)
    {
        threads.run(false, |_| spread(pages, rows, run_bytes, write));
        return;
    }
    let bytes_of = |page: u32| {
        let first = page as usize * stride;
        first..first + page_bytes
    };
    for group in groups {
        let home = bytes_of(group[0].page);
        let runs = 0..layout.num_kv_heads();
        let Some(residual) = group[0].residual_page.map(bytes_of) else {
            let page = pool[home].chunks_exact_mut(run_bytes);
            runs.zip(page).for_each(|(head, home)| {
                let residual = None;
                write(group, head, Runs { home, residual });
            });
            continue;
        };
        let [home, residual] = pool
            .get_disjoint_mut([home, residual])
            .expect("a residual page is not a home page");
        let pages = home
            .chunks_exact_mut(run_bytes)
            .zip(residual.chunks_exact_mut(run_bytes));
        runs.zip(pages).for_each(|(head, (home, residual))| {
            let residual = Some(residual);
            write(group, head, Runs { home, residual });
        });
    }
}
