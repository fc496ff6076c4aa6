//! A pool of pages in device memory.

use std::{any::Any, sync::Arc};

use attn_core::{CacheAccess, CacheConfig, Error, PageLayout, PageStore, TokenWrite};
use cudarc::driver::{CudaSlice, DevicePtr, result};

use crate::{
    device::{Device, Kernel, failed},
    instance::Instance,
    native::{self, AppendArgs, Dtype},
};

/// The pages of one cache.
#[derive(Debug)]
pub struct CudaPages {
    device: Arc<Device>,
    layout: PageLayout,
    num_pages: usize,
    pool: CudaSlice<u8>,
    /// K's, then V's static scales.
    tensor_scales: CudaSlice<f32>,
    num_k_scales: usize,
    num_v_scales: usize,
    append: Arc<Kernel>,
}

/// The longest run of writes that one launch can take: consecutive tokens of one sequence.
fn first_run(writes: &[TokenWrite], page_size: usize) -> usize {
    let follows = |a: &TokenWrite, b: &TokenWrite| {
        b.source == a.source + 1
            && b.tail_page == a.tail_page
            && b.token == (a.token + 1) % page_size
            && (b.token == 0) == (b.page != a.page)
    };
    1 + writes
        .windows(2)
        .take_while(|pair| follows(&pair[0], &pair[1]))
        .count()
}

impl CudaPages {
    pub(crate) fn new(device: Arc<Device>, config: &CacheConfig) -> Result<Self, Error> {
        let (bytes, layout) = (config.pool_bytes()?.max(1), config.layout()?);
        let append = device.kernel(
            &Instance::Append {
                format: config.format,
                head_dim: config.head_dim,
                page_size: config.page_size,
            },
            0,
        )?;
        let pool = device
            .stream
            .alloc_zeros(bytes)
            .map_err(failed("allocating the page pool"))?;
        let mut scales = config.k_tensor_scales.clone();
        scales.extend(&config.v_tensor_scales);
        scales.push(1.0);
        let tensor_scales = device
            .stream
            .clone_htod(&scales)
            .map_err(failed("copying the tensor scales"))?;
        Ok(CudaPages {
            layout,
            num_pages: config.num_pages,
            pool,
            tensor_scales,
            num_k_scales: config.k_tensor_scales.len(),
            num_v_scales: config.v_tensor_scales.len(),
            append,
            device,
        })
    }

    /// Whether `device` holds it.
    pub(crate) fn lies_on(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// The pool's device address, for native callers.
    pub fn pool_address(&self) -> u64 {
        self.pool.device_ptr(&self.device.stream).0
    }

    /// Device addresses of K's and V's static scales, 0 where the scheme has none.
    pub fn tensor_scale_addresses(&self) -> [u64; 2] {
        let base = self.tensor_scales.device_ptr(&self.device.stream).0;
        let k = if self.num_k_scales > 0 { base } else { 0 };
        let v = base + 4 * self.num_k_scales as u64;
        [k, if self.num_v_scales > 0 { v } else { 0 }]
    }

    fn append_run(&self, writes: &[TokenWrite], k: u64, v: u64, words: u64) -> Result<(), Error> {
        let first = writes[0];
        let row = self.layout.num_kv_heads() * self.layout.head_dim();
        let mut table: Vec<u32> = writes.iter().map(|w| w.page).collect();
        table.dedup();
        let pages = table.len();
        table.extend([
            first.tail_page.unwrap_or(0),
            (first.token + writes.len()) as u32,
        ]);
        let stream = &self.device.stream;
        // SAFETY: `words` was sized for every page of the call, a tail page and a length; the copy has left `table` when it returns.
        unsafe { result::memcpy_htod_async(words, &table, stream.cu_stream()) }
            .map_err(failed("copying the pages to append to"))?;
        let offset = (first.source * row * 4) as u64;
        let [k_tensor_scales, v_tensor_scales] = self.tensor_scale_addresses();
        let args = AppendArgs {
            k: k + offset,
            v: v + offset,
            dtype: Dtype::F32,
            k_token_stride: row,
            v_token_stride: row,
            pool: self.pool_address(),
            num_pages: self.num_pages,
            page_table: words,
            page_table_stride: pages,
            tail_pages: words + 4 * pages as u64,
            kv_lens: words + 4 * (pages + 1) as u64,
            k_tensor_scales,
            v_tensor_scales,
            batch: 1,
            tokens: writes.len(),
        };
        // SAFETY: the addresses are this store's pool and scales, and the arena's parts that were just written; pages and
        // tokens were checked by `KvCache`; the stream is the one that owns all of them.
        unsafe {
            native::launch_append(&self.append, &self.layout, stream.cu_stream(), &args, false)
        }
        .map_err(failed("appending"))
    }
}

impl PageStore for CudaPages {
    fn layout(&self) -> PageLayout {
        self.layout
    }

    fn num_pages(&self) -> usize {
        self.num_pages
    }

    fn append(
        &mut self,
        _: &CacheAccess,
        writes: &[TokenWrite],
        k: &[f32],
        v: &[f32],
    ) -> Result<(), Error> {
        if writes.is_empty() {
            return Ok(());
        }
        let device = &self.device;
        let bind = device.context.bind_to_thread();
        bind.map_err(failed("binding the context"))?;
        let floats = (k.len() * 4).next_multiple_of(256);
        let pages = (writes.len() + 2) * 4;
        let (base, _lock) = device
            .arena(2 * floats + pages)
            .map_err(failed("allocating for an append"))?;
        let (k_at, v_at, words) = (base, base + floats as u64, base + 2 * floats as u64);
        for (at, x) in [(k_at, k), (v_at, v)] {
            // SAFETY: the arena holds both inputs; the copy has left `x` when it returns.
            unsafe { result::memcpy_htod_async(at, x, device.stream.cu_stream()) }
                .map_err(failed("copying tokens to append"))?;
        }
        let mut left = writes;
        while !left.is_empty() {
            let (run, rest) = left.split_at(first_run(left, self.layout.page_size()));
            self.append_run(run, k_at, v_at, words)?;
            left = rest;
        }
        Ok(())
    }

    fn read_page(&self, _: &CacheAccess, page: u32) -> Result<Vec<u8>, Error> {
        let size = self.layout.page_bytes();
        let at = page as usize * size;
        let view = self.pool.slice(at..at + size);
        let stream = &self.device.stream;
        let bytes = stream.clone_dtoh(&view).map_err(failed("reading a page"))?;
        stream.synchronize().map_err(failed("reading a page"))?;
        Ok(bytes)
    }

    fn write_page(&mut self, _: &CacheAccess, page: u32, bytes: &[u8]) -> Result<(), Error> {
        let size = self.layout.page_bytes();
        let at = page as usize * size;
        let mut view = self.pool.slice_mut(at..at + size);
        let stream = &self.device.stream;
        stream
            .memcpy_htod(bytes, &mut view)
            .map_err(failed("writing a page"))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use attn_core::{HostPages, KvCache, KvFormat};

    /// Where the tokens of some appends go, on pages of 32 tokens.
    fn writes(before: usize, appends: &[(usize, usize)]) -> Vec<TokenWrite> {
        let mut config = CacheConfig::new(KvFormat::INT8, 1, 64, 2, 128);
        (config.page_size, config.num_pages) = (32, 8);
        let pages = HostPages::new(&config).unwrap();
        let mut cache = KvCache::new(config, Box::new(pages)).unwrap();
        cache.append_with(&[(0, before)], |_, _| Ok(())).unwrap();
        let mut all = Vec::new();
        let write = |_: &dyn PageStore, writes: &[TokenWrite]| {
            all = writes.to_vec();
            Ok(())
        };
        cache.append_with(appends, write).unwrap();
        all
    }

    #[test]
    fn runs_end_where_tokens_do_not_follow() {
        let across = writes(30, &[(0, 3), (1, 2)]);
        assert_eq!(first_run(&across, 32), 3);
        assert_eq!(first_run(&across[3..], 32), 2);
        let gap = [across[0], across[2]];
        assert_eq!(first_run(&gap, 32), 1);
        // The second sequence's first token is the first of a page, as the one that follows would be, but of another source.
        assert_eq!(first_run(&[across[1], across[3]], 32), 1);
    }
}
