//! A cache's pages on the device: the pool, and the appends that write it, at once or into a caller's encoder.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use attn_core::{
    CacheAccess, CacheConfig, Error, FirstTile, PageLayout, PageStore, TokenWrite, WideRows,
};

use crate::{
    append::{AppendPipelines, Appender, Launch, dispatch},
    gpu::{Gpu, IN_BROWSER},
    pool::Pool,
};

/// The pages of one cache on the device: a pool for each layer.
pub struct DevicePages {
    pools: Vec<Pool>,
    pub(crate) appender: Appender,
    recorded: Recorded,
}

/// While a caller's encoder takes an append: the launches that make centres of K and wait to be recorded behind the tokens that they are made of.
type Recorded = Arc<Mutex<Option<Vec<Launch>>>>;

fn locked(recorded: &Recorded) -> MutexGuard<'_, Option<Vec<Launch>>> {
    recorded.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An append that a caller's encoder takes. The store makes centres of K at once again when this is dropped.
pub(crate) struct Recording {
    gpu: Arc<Gpu>,
    recorded: Recorded,
}

impl Recording {
    /// Records the launches that wait: before the next tokens, which lack the centres, and at the end.
    pub fn flush(&self, encoder: &mut wgpu::CommandEncoder) -> Result<(), Error> {
        let launches = locked(&self.recorded).replace(Vec::new());
        let mut launches = launches.iter().flatten();
        launches.try_for_each(|launch| dispatch(&self.gpu, encoder, launch))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        *locked(&self.recorded) = None;
    }
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
            recorded: Recorded::default(),
        })
    }

    /// Begins an append into a caller's encoder.
    pub(crate) fn recording(&self) -> Recording {
        *locked(&self.recorded) = Some(Vec::new());
        Recording {
            gpu: self.pools[0].gpu.clone(),
            recorded: self.recorded.clone(),
        }
    }

    /// The buffers that a layer's pages lie in: the same number in each, `[page][kv_head][run]` of FORMATS.md; none for a layer that the cache does not
    /// have. Keys of a cache with centres of K lack those of [`DevicePages::centres`].
    pub fn buffers(&self, layer: usize) -> &[wgpu::Buffer] {
        self.pool(layer).map_or(&[], |pool| &pool.buffers)
    }

    /// The buffer of a layer's centres of K, `[num_sequences, num_kv_heads, 2, head_dim]` in bf16; none for a cache without.
    pub fn centres(&self, layer: usize) -> Option<&wgpu::Buffer> {
        let centres = self.pool(layer)?.centres.as_ref()?;
        Some(&centres.buffer)
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

    fn can_wait(&self) -> bool {
        let are_any = |pool: &Pool| pool.unsubmitted.are_any(&pool.gpu);
        !IN_BROWSER && !self.pools.iter().any(are_any)
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

    fn has_centres(&self) -> bool {
        self.pools[0].centres.is_some()
    }

    fn centre(&mut self, _: &CacheAccess, layer: usize, tiles: &[FirstTile]) -> Result<(), Error> {
        let pool = &self.pools[layer];
        let launch = self.appender.centre(pool, tiles)?;
        if let Some(launches) = &mut *locked(&self.recorded) {
            launches.push(launch);
            return Ok(());
        }
        let gpu = &pool.gpu;
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        dispatch(gpu, &mut encoder, &launch)?;
        gpu.submit("making centres of K", encoder)
    }

    fn read_centres(
        &self,
        _: &CacheAccess,
        layer: usize,
        sequence: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.pools[layer].read_centres(sequence, out)
    }

    fn write_centres(
        &mut self,
        _: &CacheAccess,
        layer: usize,
        sequence: usize,
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.pools[layer].write_centres(sequence, bytes)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
