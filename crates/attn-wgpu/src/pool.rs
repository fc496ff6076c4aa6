//! The pool of pages on the device, read and written by pages; and the centres of K of its sequences.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use attn_core::{CacheConfig, Error, PageLayout, Unsupported, cache::check_pages};
use attn_kernels::wgsl::decode::KvLayout;
use wgpu::BufferUsages;

use crate::{
    error::{BACKEND, no_kernel},
    gpu::Gpu,
    pipeline::Stored,
    unsubmitted::Unsubmitted,
};

/// Storage buffers of the split kernel beside the pool's, and the centres of K where there are some.
const OTHER_BINDINGS: u32 = 3;

/// Page bytes that may wait for a submission.
const MOST_PENDING: u64 = 64 << 20;

/// Pages in as many storage buffers as bindings require.
pub(crate) struct Pool {
    pub gpu: Arc<Gpu>,
    pub layout: PageLayout,
    /// `pages_per_buffer` pages each, `[page][kv_head][run]` of FORMATS.md.
    pub buffers: Vec<wgpu::Buffer>,
    pub pages_per_buffer: u32,
    /// Number of pages that callers may name; the buffers hold at least one.
    pub num_pages: usize,
    /// The centres of K of the cache's sequences, if it has some.
    pub centres: Option<Centres>,
    /// Appends that callers' encoders have taken.
    pub unsubmitted: Unsubmitted,
    /// Bytes written to the queue and not yet submitted, so that staging memory stays small.
    pending: AtomicU64,
}

/// Centres of K in one layer, `[num_sequences, num_kv_heads, 2, head_dim]` in bf16.
pub(crate) struct Centres {
    pub buffer: wgpu::Buffer,
    num_sequences: usize,
    /// Bytes of one sequence, a multiple of 4.
    bytes: u64,
}

impl Centres {
    /// Those of a cache that has some.
    fn new(gpu: &Gpu, config: &CacheConfig, usage: BufferUsages) -> Result<Option<Self>, Error> {
        if !config.centres {
            return Ok(None);
        }
        let (num_sequences, bytes) = (config.num_sequences, config.centres_bytes());
        let (all, largest) = (num_sequences.saturating_mul(bytes), gpu.largest_binding());
        if all as u64 > largest {
            return Err(no_kernel(
                format!("centres of K of {num_sequences} sequences, {bytes} bytes each"),
                format!("a binding of {largest} bytes; make a cache of fewer sequences"),
            ));
        }
        Ok(Some(Centres {
            buffer: gpu.buffer("attn centres of K", all as u64, usage)?,
            num_sequences,
            bytes: bytes as u64,
        }))
    }
}

impl Pool {
    pub fn new(gpu: Arc<Gpu>, config: &CacheConfig) -> Result<Self, Error> {
        gpu.alive("creating a cache")?;
        config.check()?;
        let layout = config.layout()?;
        let page_bytes = layout.page_bytes() as u64;
        let largest = gpu.largest_binding();
        let per_buffer = largest / page_bytes;
        let num_pages = config.num_pages.max(1) as u64;
        let others = OTHER_BINDINGS + u32::from(config.centres);
        let bindings = gpu.limits.max_storage_buffers_per_shader_stage - others;
        if per_buffer == 0 || num_pages.div_ceil(per_buffer) > u64::from(bindings) {
            return Err(Unsupported::NoKernel {
                backend: BACKEND,
                what: format!("a pool of {num_pages} pages of {page_bytes} bytes"),
                built: format!(
                    "{bindings} bindings of {largest} bytes on {}; make a smaller pool",
                    gpu.info.name
                ),
            }
            .into());
        }
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
        let buffers = (0..num_pages)
            .step_by(per_buffer as usize)
            .map(|first| {
                let pages = per_buffer.min(num_pages - first);
                gpu.buffer("attn pages", pages * page_bytes, usage)
            })
            .collect::<Result<_, _>>()?;
        Ok(Pool {
            centres: Centres::new(&gpu, config, usage)?,
            gpu,
            layout,
            buffers,
            pages_per_buffer: per_buffer.min(num_pages) as u32,
            num_pages: config.num_pages,
            unsubmitted: Unsubmitted::default(),
            pending: AtomicU64::new(0),
        })
    }

    /// Where pages lie: those that follow each other in a buffer as one part, a buffer with an offset and a length. Refuses pages outside, and
    /// other than their `bytes`.
    fn parts(&self, pages: &[u32], bytes: usize) -> Result<Vec<(&wgpu::Buffer, u64, u64)>, Error> {
        let (size, per_buffer) = (self.layout.page_bytes(), self.pages_per_buffer);
        check_pages(&self.layout, self.num_pages, pages, bytes)?;
        let together = |a: &u32, b: &u32| *b == a + 1 && !b.is_multiple_of(per_buffer);
        let most = (MOST_PENDING as usize / size).max(1);
        let runs = pages.chunk_by(together).flat_map(|run| run.chunks(most));
        let place = |run: &[u32]| {
            let buffer = &self.buffers[(run[0] / per_buffer) as usize];
            let at = u64::from(run[0] % per_buffer) * size as u64;
            (buffer, at, (run.len() * size) as u64)
        };
        Ok(runs.map(place).collect())
    }

    /// Replaces the bytes of pages; `bytes` are those of the first page, then of the next.
    pub fn write_pages(&self, pages: &[u32], bytes: &[u8]) -> Result<(), Error> {
        let mut bytes = bytes;
        for (buffer, at, length) in self.parts(pages, bytes.len())? {
            let (part, rest) = bytes.split_at(length as usize);
            let pending = length + self.pending.fetch_add(length, Ordering::Relaxed);
            self.gpu.guarded("writing pages", || {
                self.gpu.queue.write_buffer(buffer, at, part);
                if pending > MOST_PENDING {
                    self.pending.store(0, Ordering::Relaxed);
                    self.gpu.queue.submit([]);
                }
            })?;
            if pending > MOST_PENDING {
                self.gpu.wait("writing pages")?;
            }
            bytes = rest;
        }
        Ok(())
    }

    /// Reads the bytes of pages into `out`, one page behind the other; waits once for each [`MOST_PENDING`] bytes. Refuses pages that an encoder has yet to write.
    pub fn read_pages(&self, pages: &[u32], out: &mut [u8]) -> Result<(), Error> {
        self.unsubmitted.check_pages(&self.gpu, pages)?;
        let (mut out, mut batch, mut waiting) = (out, Vec::new(), 0);
        let mut parts = self.parts(pages, out.len())?.into_iter().peekable();
        while let Some(part) = parts.next() {
            waiting += part.2;
            batch.push(part);
            let next = parts.peek().map(|next| next.2);
            if next.is_none_or(|next| waiting + next > MOST_PENDING) {
                let bytes = self.gpu.read("reading pages", &batch)?;
                let (filled, rest) = out.split_at_mut(bytes.len());
                filled.copy_from_slice(&bytes);
                (out, waiting) = (rest, 0);
                batch.clear();
            }
        }
        Ok(())
    }

    /// Refuses sequences that have no place among the centres of K; a pool without has none to look up.
    pub fn check_sequences(&self, sequences: impl IntoIterator<Item = usize>) -> Result<(), Error> {
        let count = self
            .centres
            .as_ref()
            .map_or(usize::MAX, |c| c.num_sequences);
        match sequences.into_iter().find(|sequence| *sequence >= count) {
            None => Ok(()),
            Some(given) => Err(Error::Sequence { given, count }),
        }
    }

    /// The centres of one sequence: their buffer, the first byte, and how many.
    fn centres_at(
        &self,
        sequence: usize,
        bytes: usize,
    ) -> Result<(&wgpu::Buffer, u64, u64), Error> {
        self.check_sequences([sequence])?;
        let Some(centres) = self.centres.as_ref().filter(|c| c.bytes == bytes as u64) else {
            return Err(Error::parameter(
                "bytes of a sequence's centres of K",
                bytes,
                "as many as the cache keeps for each sequence",
            ));
        };
        let at = sequence as u64 * centres.bytes;
        Ok((&centres.buffer, at, centres.bytes))
    }

    /// Reads a sequence's centres of K. Refuses those that an encoder has yet to make.
    pub fn read_centres(&self, sequence: usize, out: &mut [u8]) -> Result<(), Error> {
        self.unsubmitted.check_centres(&self.gpu, sequence)?;
        let part = self.centres_at(sequence, out.len())?;
        out.copy_from_slice(&self.gpu.read("reading centres of K", &[part])?);
        Ok(())
    }

    /// Replaces a sequence's centres of K.
    pub fn write_centres(&self, sequence: usize, bytes: &[u8]) -> Result<(), Error> {
        let (buffer, at, _) = self.centres_at(sequence, bytes.len())?;
        self.gpu.guarded("writing centres of K", || {
            self.gpu.queue.write_buffer(buffer, at, bytes);
        })
    }

    /// How the decode kernels read the pool.
    pub fn decode_layout(&self) -> KvLayout {
        KvLayout {
            format: self.layout.format(),
            page_size: self.layout.page_size(),
            pools: self.buffers.len(),
            view: false,
            centres: self.centres.is_some(),
        }
    }

    /// The buffers with their bindings in every kernel: those of the pages, and behind them the centres of K.
    fn bound(&self) -> impl Iterator<Item = (u32, &wgpu::Buffer)> {
        let centres = self.centres.iter().map(|centres| &centres.buffer);
        (4..).zip(self.buffers.iter().chain(centres))
    }

    /// The whole buffers with their bindings.
    pub fn bindings(&self) -> impl Iterator<Item = (u32, wgpu::BufferBinding<'_>)> {
        let bound = self.bound();
        bound.map(|(binding, buffer)| (binding, buffer.as_entire_buffer_binding()))
    }

    /// The buffers and their bindings in the decode kernels.
    pub fn stored(&self) -> Vec<Stored> {
        let stored = |(binding, buffer): (u32, &wgpu::Buffer)| Stored {
            binding,
            buffer: buffer.clone(),
            bytes: buffer.size(),
        };
        self.bound().map(stored).collect()
    }
}
