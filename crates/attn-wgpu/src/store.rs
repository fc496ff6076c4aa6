//! A cache's pages on the device: the pool, and the appends that write it.

use std::any::Any;
use std::sync::Arc;

use attn_core::{CacheAccess, CacheConfig, Error, PageLayout, PageStore, TokenWrite, WideRows};

use crate::{
    append::{AppendPipelines, Appender},
    gpu::Gpu,
    pool::Pool,
};

/// The pages of one cache on the device: a pool for each layer.
pub struct DevicePages {
    pools: Vec<Pool>,
    pub(crate) appender: Appender,
}

impl DevicePages {
    pub(crate) fn new(
        gpu: Arc<Gpu>,
        pipelines: Arc<AppendPipelines>,
        config: &CacheConfig,
    ) -> Result<Self, Error> {
        config.check()?;
        let pools = (0..config.layers).map(|_| Pool::new(gpu.clone(), config));
        Ok(DevicePages {
            pools: pools.collect::<Result<_, _>>()?,
            appender: Appender::new(pipelines, config),
        })
    }

    /// The buffers that a layer's pages lie in: the same number in each, `[page][kv_head][run]` of FORMATS.md; none for a layer that the cache does not
    /// have.
    pub fn buffers(&self, layer: usize) -> &[wgpu::Buffer] {
        self.pool(layer).map_or(&[], |pool| &pool.buffers)
    }

    pub(crate) fn pool(&self, layer: usize) -> Option<&Pool> {
        self.pools.get(layer)
    }

    pub(crate) fn lies_on(&self, gpu: &Arc<Gpu>) -> bool {
        Arc::ptr_eq(&self.pools[0].gpu, gpu)
    }
}

impl PageStore for DevicePages {
    fn layout(&self) -> PageLayout {
        self.pools[0].layout
    }

    fn num_pages(&self) -> usize {
        self.pools[0].num_pages
    }

    fn layers(&self) -> usize {
        self.pools.len()
    }

    fn append(
        &mut self,
        _: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        let pool = &self.pools[layer];
        self.appender.append_from_host(pool, layer, writes, [k, v])
    }

    fn read_pages(
        &self,
        _: &CacheAccess,
        layer: usize,
        pages: &[u32],
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.pools[layer].read_pages(pages, out)
    }

    fn write_pages(
        &mut self,
        _: &CacheAccess,
        layer: usize,
        pages: &[u32],
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.pools[layer].write_pages(pages, bytes)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
