//! A cache's pages on the device: the pool, and the appends that write it.

use std::any::Any;
use std::sync::Arc;

use attn_core::{CacheAccess, CacheConfig, Error, PageLayout, PageStore, TokenWrite, WideRows};

use crate::{
    append::{AppendPipelines, Appender},
    gpu::Gpu,
    pool::Pool,
};

/// The pages of one cache on the device.
pub struct DevicePages {
    pub(crate) pool: Pool,
    pub(crate) appender: Appender,
}

impl DevicePages {
    pub(crate) fn new(
        gpu: Arc<Gpu>,
        pipelines: Arc<AppendPipelines>,
        config: &CacheConfig,
    ) -> Result<Self, Error> {
        Ok(DevicePages {
            pool: Pool::new(gpu, config)?,
            appender: Appender::new(pipelines, config),
        })
    }

    /// The buffers that the pool's pages lie in: the same number in each, `[page][kv_head][run]` of FORMATS.md.
    pub fn buffers(&self) -> &[wgpu::Buffer] {
        &self.pool.buffers
    }
}

impl PageStore for DevicePages {
    fn layout(&self) -> PageLayout {
        self.pool.layout
    }

    fn num_pages(&self) -> usize {
        self.pool.num_pages
    }

    fn append(
        &mut self,
        _: &CacheAccess,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        self.appender.append_from_host(&self.pool, writes, k, v)
    }

    fn read_pages(&self, _: &CacheAccess, pages: &[u32], out: &mut [u8]) -> Result<(), Error> {
        self.pool.read_pages(pages, out)
    }

    fn write_pages(&mut self, _: &CacheAccess, pages: &[u32], bytes: &[u8]) -> Result<(), Error> {
        self.pool.write_pages(pages, bytes)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
