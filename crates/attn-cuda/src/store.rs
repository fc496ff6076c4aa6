//! A pool of pages in device memory.

use std::{any::Any, ops::Range, sync::Arc};

use attn_core::{
    CacheAccess, CacheConfig, CacheLayer, Error, FirstTile, HeadDim, KvCache, PageLayout,
    PageStore, TokenWrite, WideRows, cache::check_pages, error::refuse,
};
use cudarc::driver::{CudaSlice, DevicePtr};

use crate::{
    call_memory::CallMemory,
    centres::{Centres, no_centres},
    device::Device,
    error::{FOREIGN_CACHE, failed},
    gpu::CudaBackend,
    native::{
        AppendShape, CentreTokens, DeviceAddress, Dtype, KvRows, Pages, Prepared, SlotAppendArgs,
        SlotCentres, Stream, enqueue,
    },
    slots::Slots,
    staging::Parts,
};

/// The pages of one cache: a pool for each layer.
#[derive(Debug)]
pub struct CudaPages {
    gpu: CudaBackend,
    layout: PageLayout,
    layers: usize,
    num_pages: usize,
    /// For each layer the pages, and one of zeros behind them, which stands for pages that were dropped
    /// ([`DeviceTables`](crate::device_tables::DeviceTables)).
    pool: CudaSlice<u8>,
    /// K's static scales of all layers, then V's.
    tensor_scales: CudaSlice<f32>,
    num_scales: [usize; 2],
    append: Prepared<SlotAppendArgs>,
    /// Of K, of a cache that has some.
    centres: Option<Centres>,
}

fn check_layer(given: usize, count: usize) -> Result<(), Error> {
    if given >= count {
        return Err(Error::Layer { given, count });
    }
    Ok(())
}

impl CudaPages {
    /// Allocates the pool, and loads (at first compiles) the kernel of appends.
    pub(crate) fn new(gpu: &CudaBackend, config: &CacheConfig) -> Result<Self, Error> {
        config.check()?;
        let (bytes, layout) = (config.pool_bytes()?, config.layout()?);
        let append = gpu.prepare_op(AppendShape {
            layout,
            rotary: false,
        })?;
        let device = &gpu.device;
        let pool = device
            .stream
            .alloc_zeros(bytes.saturating_add(config.layers * layout.page_bytes()))
            .map_err(failed("allocating the page pool"))?;
        let mut scales = config.k_tensor_scales.clone();
        scales.extend(&config.v_tensor_scales);
        scales.push(1.0);
        let mut tensor_scales = device
            .stream
            .alloc_zeros(scales.len())
            .map_err(failed("allocating the tensor scales"))?;
        device
            .upload(&scales, &mut tensor_scales)
            .map_err(failed("copying the tensor scales"))?;
        Ok(CudaPages {
            gpu: gpu.share(),
            layout,
            layers: config.layers,
            num_pages: config.num_pages,
            pool,
            tensor_scales,
            num_scales: [&config.k_tensor_scales, &config.v_tensor_scales].map(Vec::len),
            append,
            centres: match config.centres {
                true => Some(Centres::new(gpu, config)?),
                false => None,
            },
        })
    }

    /// Whether `device` holds it.
    pub(crate) fn lies_on(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.gpu.device, device)
    }

    /// Pages that page tables of this pool may name: its own and the page of zeros.
    pub(crate) fn pages_to_read(&self) -> usize {
        self.num_pages + 1
    }

    /// Whether it has the layer.
    pub(crate) fn has_layer(&self, layer: usize) -> bool {
        layer < self.layers
    }

    /// Where a layer's pages begin, in bytes: behind those of the layers before, and their pages of zeros.
    fn layer_start(&self, layer: usize) -> usize {
        layer * self.pages_to_read() * self.layout.page_bytes()
    }

    /// The first `count` pages of a layer's pool, for native callers.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a cache with centres of K, without which its pages mean nothing: native launches know none.
    ///
    /// # Panics
    /// For a layer that the cache does not have.
    pub fn pages(&self, layer: usize, count: usize) -> Result<Pages, Error> {
        match self.centres {
            None => Ok(self.pool(layer, count)),
            Some(_) => refuse(
                "pages for native launches",
                "those of a cache with centres of K, which native launches do not know",
                "a cache without centres, or KvCache's own calls",
            ),
        }
    }

    /// The first `count` pages of a layer's pool.
    ///
    /// # Panics
    /// For a layer that the cache does not have.
    pub(crate) fn pool(&self, layer: usize, count: usize) -> Pages {
        assert!(self.has_layer(layer), "layer {layer} of {}", self.layers);
        let at = DeviceAddress::new(self.pool.device_ptr(&self.gpu.device.stream).0);
        Pages::new(at.offset(self.layer_start(layer)), &self.layout, count)
    }

    /// The centres of K, of a cache that has some.
    pub(crate) fn centres(&self) -> Option<&Centres> {
        self.centres.as_ref()
    }

    fn own_centres(&self) -> Result<&Centres, Error> {
        self.centres().ok_or_else(no_centres)
    }

    /// Device addresses of a layer's static scales of K and V, null where the scheme has none.
    ///
    /// # Panics
    /// For a layer that the cache does not have.
    #[must_use]
    pub fn tensor_scale_addresses(&self, layer: usize) -> [DeviceAddress; 2] {
        assert!(self.has_layer(layer), "layer {layer} of {}", self.layers);
        let base = DeviceAddress::new(self.tensor_scales.device_ptr(&self.gpu.device.stream).0);
        let [k, v] = self.num_scales;
        let first = layer * self.layout.num_kv_heads();
        [
            base.offset(4 * first).given(k > 0),
            base.offset(4 * (k + first)).given(v > 0),
        ]
    }

    /// Where pages lie in a layer's pool: those that follow each other there as one part, which one copy takes. Refuses pages outside, and other
    /// than their `bytes`.
    fn parts(&self, layer: usize, pages: &[u32], bytes: usize) -> Result<Vec<Range<usize>>, Error> {
        check_layer(layer, self.layers)?;
        let (size, start) = (self.layout.page_bytes(), self.layer_start(layer));
        check_pages(&self.layout, self.num_pages, pages, bytes)?;
        // Below the pool's bytes, which `new` multiplied.
        let place = |run: &[u32]| {
            let first = start + run[0] as usize * size;
            first..first + run.len() * size
        };
        let runs = pages.chunk_by(|a, b| a.checked_add(1) == Some(*b));
        Ok(runs.map(place).collect())
    }

    /// Where the tokens of writes to a layer go. K and V have the shapes `rows`.
    ///
    /// # Errors
    /// [`Error::Layer`]; those of [`Slots::new`].
    pub(crate) fn slots(
        &self,
        layer: usize,
        writes: &[TokenWrite],
        rows: [[usize; 3]; 2],
    ) -> Result<Slots, Error> {
        check_layer(layer, self.layers)?;
        let sequences = self.centres.as_ref().map(Centres::sequences);
        Slots::new(&self.layout, self.num_pages, writes, rows, sequences)
    }

    /// Enqueues the writes of tokens to a layer: copies their slots, and launches one append.
    ///
    /// # Safety
    /// - `slots` are this store's ([`CudaPages::slots`]); `rows` are K and V from the first of their tokens on, which lie on the device as [`SlotAppendArgs`] asks.
    /// - `stream` is one that [`CallMemory::slots`] takes.
    pub(crate) unsafe fn enqueue_writes(
        &self,
        memory: &mut CallMemory,
        stream: Stream,
        layer: usize,
        slots: &Slots,
        rows: KvRows,
    ) -> Result<(), Error> {
        if slots.tokens.is_empty() {
            return Ok(());
        }
        let device = &self.gpu.device;
        // SAFETY: this function's contract.
        let base = unsafe { memory.slots(device, &slots.lists, stream) }?;
        let args = SlotAppendArgs {
            rows,
            pool: self.pool(layer, self.num_pages),
            tensor_scales: self.tensor_scale_addresses(layer),
            slots: slots.slots.at(base),
            residual_pages: slots.residual_pages.at(base),
            tokens: slots.tokens.len(),
            rotary: None,
            centres: self.centres().map(|centres| SlotCentres {
                centres: centres.at(layer),
                stride: centres.len_of_row(),
                count: centres.sequences(),
                rows: slots.centre_rows.at(base),
                positions: slots.centre_positions.at(base),
                tokens: CentreTokens::All,
            }),
        };
        let centres = self.centres();
        // SAFETY: pool, scales and centres are this store's; `Slots::new` has compared pages, residual pages, tokens and sequences with the pool, the page and the centres, and the
        // writes, which a cache makes, name each place once, a sequence's in order; the lists are copied ahead on the same stream; the rest is this function's contract.
        let append = || unsafe { enqueue(device, &self.append, stream.raw(), &args) };
        match centres {
            None => append(),
            // SAFETY: this function's contract.
            Some(centres) => unsafe { centres.ordered(stream, append) },
        }
    }
}

impl CudaBackend {
    /// The store of a cache that this backend made, whose pages are as the cache says.
    ///
    /// Another's store can lead to it (`PageStore::as_any`), and say something else of itself: what a launch relies on is compared with
    /// this store's own numbers.
    pub(crate) fn store<'a>(&self, cache: &'a KvCache) -> Result<&'a CudaPages, Error> {
        let store = self.own_store(cache.store())?;
        let as_said = Some(store).filter(|store| store.layout() == *cache.layout());
        as_said.ok_or(FOREIGN_CACHE)
    }

    /// The store, if it is one of this backend.
    pub(crate) fn own_store<'a>(&self, store: &'a dyn PageStore) -> Result<&'a CudaPages, Error> {
        let store = store.as_any().downcast_ref::<CudaPages>();
        let own = store.filter(|store| store.lies_on(&self.device));
        own.ok_or(FOREIGN_CACHE)
    }

    /// The store that has the layer.
    pub(crate) fn store_of<'a>(&self, layer: CacheLayer<'a>) -> Result<&'a CudaPages, Error> {
        let store = self.store(layer.cache())?;
        let own = Some(store).filter(|store| store.has_layer(layer.index()));
        own.ok_or(FOREIGN_CACHE)
    }
}

impl PageStore for CudaPages {
    fn layout(&self) -> PageLayout {
        self.layout
    }

    fn num_pages(&self) -> usize {
        self.num_pages
    }

    fn layers(&self) -> usize {
        self.layers
    }

    fn append(
        &mut self,
        _: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        let slots = self.slots(layer, writes, [k.shape(), v.shape()])?;
        if slots.tokens.is_empty() {
            return Ok(());
        }
        // Of latents there is no V to append.
        let of_v = match self.layout.format().latents {
            true => 0..0,
            false => slots.tokens.clone(),
        };
        let [k, v] = [k.packed(slots.tokens.clone())?, v.packed(of_v)?];
        let mut parts = Parts::default();
        let at = [parts.add(&k)?, parts.add(&v)?];
        let device = &self.gpu.device;
        device.bind()?;
        let mut calls = self.gpu.host_calls();
        let base = calls.rows(device, parts.bytes())?;
        let wait = device.wait_on_drop().map_err(failed("appending"))?;
        let stream = Stream::of(device.stream.cu_stream());
        // SAFETY: the rows' memory, whose lock is held, has room for the parts; they outlive `wait`, which waits for the copies however this
        // function ends.
        unsafe { parts.copy(base, stream.raw()) }.map_err(failed("copying tokens to append"))?;
        let HeadDim { k: k_dim, v: v_dim } = self.layout.head_dim();
        let heads = self.layout.num_kv_heads();
        let [k, v] = at.map(|offset| base.offset(offset));
        let rows = KvRows {
            k,
            v,
            dtype: Dtype::F32,
            k_token_stride: heads * k_dim,
            v_token_stride: heads * v_dim,
        };
        // SAFETY: slots and rows are those above; the stream is the device's own, alive and of the current context, and each call before has waited.
        unsafe { self.enqueue_writes(&mut calls.memory, stream, layer, &slots, rows) }?;
        wait.finish().map_err(failed("appending"))
    }

    fn read_pages(
        &self,
        _: &CacheAccess,
        layer: usize,
        pages: &[u32],
        out: &mut [u8],
    ) -> Result<(), Error> {
        let parts = self.parts(layer, pages, out.len())?;
        let copy = || {
            let wait = self.gpu.device.wait_on_drop()?;
            let mut out = out;
            for place in parts {
                let (part, rest) = out.split_at_mut(place.len());
                let from = self.pool.slice(place);
                self.gpu.device.stream.memcpy_dtoh(&from, part)?;
                out = rest;
            }
            wait.finish()
        };
        copy().map_err(failed("reading pages"))
    }

    fn write_pages(
        &mut self,
        _: &CacheAccess,
        layer: usize,
        pages: &[u32],
        bytes: &[u8],
    ) -> Result<(), Error> {
        let parts = self.parts(layer, pages, bytes.len())?;
        let copy = || {
            let wait = self.gpu.device.wait_on_drop()?;
            let mut bytes = bytes;
            for place in parts {
                let (part, rest) = bytes.split_at(place.len());
                let mut to = self.pool.slice_mut(place);
                self.gpu.device.stream.memcpy_htod(part, &mut to)?;
                bytes = rest;
            }
            wait.finish()
        };
        copy().map_err(failed("writing pages"))
    }

    fn has_centres(&self) -> bool {
        self.centres.is_some()
    }

    fn centre(&mut self, _: &CacheAccess, layer: usize, tiles: &[FirstTile]) -> Result<(), Error> {
        check_layer(layer, self.layers)?;
        let pool = self.pool(layer, self.num_pages);
        // SAFETY: pool and centres are this store's and of one layout; whoever has the access is the cache, whose first tiles these are.
        unsafe { self.own_centres()?.make(layer, (&self.layout, pool), tiles) }
    }

    fn read_centres(
        &self,
        _: &CacheAccess,
        layer: usize,
        sequence: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.own_centres()?.read([layer, sequence], out)
    }

    fn write_centres(
        &mut self,
        _: &CacheAccess,
        layer: usize,
        sequence: usize,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let centres = self.centres.as_mut().ok_or_else(no_centres)?;
        centres.write([layer, sequence], bytes)
    }

    fn grow_centres(&mut self, _: &CacheAccess, sequences: usize) -> Result<(), Error> {
        self.centres
            .as_mut()
            .ok_or_else(no_centres)?
            .grow(sequences)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
