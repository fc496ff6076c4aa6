//! The pool of pages on the device, read and written page by page.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use attn_core::{CacheConfig, Error, PageLayout, Unsupported};
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
    /// Pages that callers may name; the buffers hold at least one.
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

    /// The buffer that holds a page, and where.
    fn place(&self, page: u32) -> Result<(&wgpu::Buffer, u64), Error> {
        if page as usize >= self.num_pages {
            return Err(Error::Parameter {
                what: "page",
                given: format!("{page} of {}", self.num_pages),
                allowed: "a page of the pool",
            });
        }
        let buffer = &self.buffers[(page / self.pages_per_buffer) as usize];
        let at = u64::from(page % self.pages_per_buffer) * self.layout.page_bytes() as u64;
        Ok((buffer, at))
    }

    /// Replaces the bytes of one page.
    pub fn replace_page(&self, page: u32, bytes: &[u8]) -> Result<(), Error> {
        if bytes.len() != self.layout.page_bytes() {
            return Err(Error::Length {
                what: "page bytes",
                given: bytes.len(),
                needed: self.layout.page_bytes(),
            });
        }
        self.upload(page, bytes)
    }

    fn upload(&self, page: u32, bytes: &[u8]) -> Result<(), Error> {
        let (buffer, at) = self.place(page)?;
        let pending = self
            .pending
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.gpu.guarded("writing a page", || {
            self.gpu.queue.write_buffer(buffer, at, bytes);
            if pending > MOST_PENDING {
                self.pending.store(0, Ordering::Relaxed);
                self.gpu.queue.submit([]);
            }
        })?;
        if pending > MOST_PENDING {
            self.gpu.wait("writing pages")?;
        }
        Ok(())
    }

    /// The bytes of one page.
    pub fn read_page(&self, page: u32) -> Result<Vec<u8>, Error> {
        let (buffer, at) = self.place(page)?;
        let bytes = self.layout.page_bytes() as u64;
        self.gpu.read("reading a page", &[(buffer, at, bytes)])
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
