//! Caches with centres of K: appends by the kernels, against the CPU's pages and centres byte by byte.

use std::{any::Any, sync::Arc};

use anyhow::{Result, anyhow};
use attn_conformance::case::noise;
use attn_core::{
    Append, CacheAccess, CacheConfig, Error, FirstTile, HeadDim, Heads, KvCache, PageLayout,
    PageStore, TokenWrite, WideRows,
    centres::{CENTRES, centres_bytes},
    error::refuse,
};
use attn_cpu::Reference;
use attn_cuda::{
    internals::{CentreArgs, tiles_list},
    native::{
        AppendShape, CentreTokens, DeviceAddress, Dtype, KvRows, Op, Pages, SlotAppendArgs,
        SlotCentres,
    },
};
use libtest_mimic::Trial;

use crate::{Kernels, address};

/// Pages and centres that the emulated kernels write, as `CudaPages` has the device's write them.
struct EmulatedPages {
    kernels: Arc<Kernels>,
    layout: PageLayout,
    num_pages: usize,
    /// Aligned for the kernels' vectors.
    pool: Vec<u128>,
    /// `[sequence][num_kv_heads][2][head_dim]`.
    centres: Vec<u16>,
}

impl EmulatedPages {
    fn new(kernels: &Arc<Kernels>, config: &CacheConfig) -> Result<Self> {
        let layout = config.layout()?;
        let of_sequence = centres_bytes(config.num_kv_heads, config.head_dim.k) / 2;
        Ok(EmulatedPages {
            kernels: kernels.clone(),
            layout,
            num_pages: config.num_pages,
            pool: vec![0; config.num_pages * layout.page_bytes() / 16],
            // No number: what is read before it is written shows.
            centres: vec![0x7fc0; config.num_sequences * of_sequence],
        })
    }

    fn pages(&self) -> Pages {
        Pages::new(address(&self.pool), &self.layout, self.num_pages)
    }

    /// Elements of a sequence's centres.
    fn len_of_row(&self) -> usize {
        self.layout.num_kv_heads() * CENTRES * self.layout.head_dim().k
    }

    fn bytes_of(&self, sequence: usize) -> std::ops::Range<usize> {
        let each = self.len_of_row();
        sequence * each..(sequence + 1) * each
    }

    /// One launch for rows from the first to the last that is written; those between others go nowhere.
    fn launch(&self, writes: &[TokenWrite], [k, v]: [&[f32]; 2]) -> Result<()> {
        let (first, last) = (writes[0].source, writes[writes.len() - 1].source);
        let tokens = last + 1 - first;
        let (mut slots, mut residuals) = (vec![-1i64; tokens], vec![u32::MAX; tokens]);
        let (mut rows, mut positions) = (vec![u32::MAX; tokens], vec![-1i32; tokens]);
        for write in writes {
            let at = write.source - first;
            slots[at] = i64::from(write.page) * self.layout.page_size() as i64 + write.token as i64;
            residuals[at] = write.residual_page.unwrap_or(u32::MAX);
            rows[at] = write.sequence as u32;
            positions[at] = write.position as i32;
        }
        let strides = self.layout.head_dim().both();
        let [k_token_stride, v_token_stride] = strides.map(|dim| self.layout.num_kv_heads() * dim);
        let args = SlotAppendArgs {
            rows: KvRows {
                k: address(k),
                v: address(v),
                dtype: Dtype::F32,
                k_token_stride,
                v_token_stride,
            },
            pool: self.pages(),
            tensor_scales: [DeviceAddress::NULL; 2],
            slots: address(&slots),
            residual_pages: address(&residuals),
            tokens,
            rotary: None,
            centres: Some(SlotCentres {
                centres: address(&self.centres),
                stride: self.len_of_row(),
                count: self.centres.len() / self.len_of_row(),
                rows: address(&rows),
                positions: address(&positions),
                tokens: CentreTokens::All,
            }),
        };
        let shape = AppendShape {
            layout: self.layout,
            rotary: false,
        };
        let params = args.params(&shape)?;
        let (instances, grid) = (SlotAppendArgs::instances(&shape)?, args.grid(&shape));
        // SAFETY: the addresses are those of memory that lives until here, as large as `SlotAppendArgs` asks, the slots are those of a cache's pages, and there
        // are centres of its sequences.
        unsafe {
            self.kernels
                .run(&instances[0], &params, grid.ctas, grid.threads)
        }
    }
}

/// An emulated launch's error as a store's.
fn failed(error: &anyhow::Error) -> Error {
    Error::parameter("emulation", format_args!("{error:#}"), "none")
}

impl PageStore for EmulatedPages {
    fn layout(&self) -> PageLayout {
        self.layout
    }

    fn num_pages(&self) -> usize {
        self.num_pages
    }

    fn append(
        &mut self,
        _: &CacheAccess,
        _: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        let (Some(first), Some(last)) = (writes.first(), writes.last()) else {
            return Ok(());
        };
        let rows = first.source..last.source + 1;
        let [k, v] = [k.packed(rows.clone())?, v.packed(rows)?];
        self.launch(writes, [&k, &v])
            .map_err(|error| failed(&error))
    }

    fn read_pages(
        &self,
        _: &CacheAccess,
        _: usize,
        pages: &[u32],
        out: &mut [u8],
    ) -> Result<(), Error> {
        let size = self.layout.page_bytes();
        let pool: &[u8] = bytemuck::cast_slice(&self.pool);
        for (page, out) in pages.iter().zip(out.chunks_exact_mut(size)) {
            out.copy_from_slice(&pool[*page as usize * size..][..size]);
        }
        Ok(())
    }

    fn write_pages(
        &mut self,
        _: &CacheAccess,
        _: usize,
        pages: &[u32],
        bytes: &[u8],
    ) -> Result<(), Error> {
        let size = self.layout.page_bytes();
        let pool: &mut [u8] = bytemuck::cast_slice_mut(&mut self.pool);
        for (page, bytes) in pages.iter().zip(bytes.chunks_exact(size)) {
            pool[*page as usize * size..][..size].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn has_centres(&self) -> bool {
        true
    }

    fn centre(&mut self, _: &CacheAccess, _: usize, tiles: &[FirstTile]) -> Result<(), Error> {
        let list = tiles_list(tiles);
        let args = CentreArgs {
            pool: self.pages(),
            centres: address(&self.centres),
            stride: self.len_of_row(),
            tiles: address(&list),
            count: tiles.len(),
        };
        // SAFETY: pool, centres and list live until here, and the tiles are a cache's.
        let made = unsafe { self.kernels.launch(&self.layout, &args) };
        made.map_err(|error| failed(&error))
    }

    fn read_centres(
        &self,
        _: &CacheAccess,
        _: usize,
        sequence: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let centres = &self.centres[self.bytes_of(sequence)];
        out.copy_from_slice(bytemuck::cast_slice(centres));
        Ok(())
    }

    fn write_centres(
        &mut self,
        _: &CacheAccess,
        _: usize,
        sequence: usize,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let place = self.bytes_of(sequence);
        bytemuck::cast_slice_mut(&mut self.centres[place]).copy_from_slice(bytes);
        Ok(())
    }

    fn grow(&mut self, _: &CacheAccess, pages: usize) -> Result<(), Error> {
        refuse("pages to add", pages, "0")
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// What is done to both caches.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// So many tokens behind each sequence, in one call.
    Append([usize; 3]),
    Truncate(usize, usize),
    Fork(usize, usize),
}

/// Tokens one by one and across 64, first tiles that end with their call, sequences cut to the middle of the first tile, to nothing and behind it, which make their centres
/// anew, and a fork that goes its own way.
const STEPS: [Step; 16] = {
    use Step::{Append, Fork, Truncate};
    [
        Append([1, 63, 0]),
        Append([1, 1, 64]),
        Append([61, 1, 1]),
        Append([1, 70, 0]),
        Append([1, 1, 1]),
        Truncate(1, 40),
        Append([0, 30, 1]),
        Truncate(0, 0),
        Append([130, 1, 1]),
        Truncate(2, 65),
        Truncate(1, 0),
        Fork(0, 1),
        Append([2, 3, 1]),
        Truncate(1, 63),
        Append([1, 2, 1]),
        Append([1, 1, 1]),
    ]
};

/// A kind of cache, and how large its keys are.
struct Job {
    name: &'static str,
    head_dim: HeadDim,
    page_size: usize,
    heads: usize,
    /// What all keys of a head have in common: the largest number of it.
    common: f32,
}

const fn job(name: &'static str, dim: usize, page_size: usize, heads: usize) -> Job {
    Job {
        name,
        head_dim: HeadDim::same(dim),
        page_size,
        heads,
        common: 20.0,
    }
}

const JOBS: [Job; 13] = [
    job("int8", 128, 64, 3),
    job("int8", 64, 16, 1),
    job("int8", 80, 32, 5),
    job("int8/int4", 64, 128, 2),
    job("int4", 128, 64, 2),
    job("int4", 80, 16, 1),
    job("int4-w4/int8-plain", 256, 32, 1),
    job("int4-r2", 96, 128, 2),
    job("int8/int8-plain", 192, 64, 1),
    // Centres that are cut to 2^50.
    Job {
        common: 1e18,
        ..job("int4/int8", 64, 32, 1)
    },
    Job {
        head_dim: HeadDim { k: 192, v: 128 },
        ..job("int8", 0, 64, 2)
    },
    Job {
        head_dim: HeadDim { k: 64, v: 160 },
        ..job("int4", 0, 32, 1)
    },
    job("int8/int4", 512, 64, 1),
];

impl Job {
    fn config(&self) -> Result<CacheConfig> {
        let heads = Heads::new(self.heads, self.heads, self.head_dim);
        let builder = CacheConfig::builder(self.name.parse()?, heads).centres(true);
        Ok(builder
            .sequences(3)
            .page_size(self.page_size)
            .max_len(400)
            .build())
    }

    /// K and V of so many tokens.
    fn tokens(&self, seed: u64, count: usize) -> [Vec<f32>; 2] {
        let [row, v_row] = self.head_dim.both().map(|dim| self.heads * dim);
        let common = noise(7, row);
        let mut k = noise(2 * seed, count * row);
        for (i, x) in k.iter_mut().enumerate() {
            *x += self.common * common[i % row];
        }
        [k, noise(2 * seed + 1, count * v_row)]
    }

    /// The first step after which the caches differ.
    fn differs(&self, kernels: &Arc<Kernels>) -> Result<Option<String>> {
        use attn_core::DecodeAttention;
        let config = self.config()?;
        let mut want = Reference::new().create_cache(&config)?;
        let store = EmulatedPages::new(kernels, &config)?;
        let mut got = KvCache::new(config, Box::new(store))?;
        for (n, step) in STEPS.into_iter().enumerate() {
            for cache in [&mut want, &mut got] {
                self.take(cache, step, n as u64)?;
            }
            for sequence in 0..3 {
                let images = [want.image(sequence)?, got.image(sequence)?];
                let [want, got] = images.each_ref().map(|image| image.as_bytes());
                if let Some(i) = (0..want.len()).find(|&i| want[i] != got[i]) {
                    return Ok(Some(format!(
                        "after step {n}, {step:?}: byte {i} of {} of sequence {sequence}'s image is {:#04x}, expected {:#04x}",
                        want.len(),
                        got[i],
                        want[i]
                    )));
                }
            }
        }
        Ok(None)
    }

    fn take(&self, cache: &mut KvCache, step: Step, seed: u64) -> Result<()> {
        match step {
            Step::Append(tokens) => {
                let of = |(sequence, tokens)| Append { sequence, tokens };
                let appends: Vec<Append> = tokens.into_iter().enumerate().map(of).collect();
                let [k, v] = self.tokens(seed, tokens.iter().sum());
                cache.append_batch(&appends, &k, &v)?;
            }
            Step::Truncate(sequence, len) => cache.truncate(sequence, len)?,
            Step::Fork(from, to) => cache.fork(from, to)?,
        }
        Ok(())
    }
}

/// A test for each kind of cache.
pub fn trials(kernels: &Arc<Kernels>) -> Vec<Trial> {
    let trial = |job: Job| {
        let kernels = kernels.clone();
        let Job {
            name,
            head_dim,
            page_size,
            ..
        } = job;
        let name = format!("centres {name}, d{head_dim}, page {page_size}");
        Trial::test(name, move || match job.differs(&kernels) {
            Ok(None) => Ok(()),
            Ok(Some(text)) => Err(text.into()),
            Err(error) => Err(anyhow!("{error:#}").into()),
        })
    };
    JOBS.into_iter().map(trial).collect()
}
