//! The pool of pages on the device, read and written by pages.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use attn_core::{CacheConfig, Error, PageLayout, Unsupported, cache::check_pages};
use attn_kernels::wgsl::decode::KvLayout;
use wgpu::BufferUsages;

use crate::{error::BACKEND, gpu::Gpu, pipeline::Stored};

/// Storage buffers of the split kernel beside the pool's.
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
    /// Bytes written to the queue and not yet submitted, so that staging memory stays small.
    pending: AtomicU64,
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
        let bindings = gpu.limits.max_storage_buffers_per_shader_stage - OTHER_BINDINGS;
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
            gpu,
            layout,
            buffers,
            pages_per_buffer: per_buffer.min(num_pages) as u32,
            num_pages: config.num_pages,
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

    /// Reads the bytes of pages into `out`, one page behind the other; waits once for each [`MOST_PENDING`] bytes.
    pub fn read_pages(&self, pages: &[u32], out: &mut [u8]) -> Result<(), Error> {
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

    /// How the decode kernels read the pool.
    pub fn decode_layout(&self) -> KvLayout {
        KvLayout {
            format: self.layout.format(),
            page_size: self.layout.page_size(),
            pools: self.buffers.len(),
            view: false,
        }
    }

    /// The buffers and their bindings in the decode kernels.
    pub fn stored(&self) -> Vec<Stored> {
        let stored = |(binding, buffer): (u32, &wgpu::Buffer)| Stored {
            binding,
            buffer: buffer.clone(),
            bytes: buffer.size(),
        };
        (4..).zip(&self.buffers).map(stored).collect()
    }
}
