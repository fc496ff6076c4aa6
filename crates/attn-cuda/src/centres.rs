//! Centres of K in device memory: two rows of bf16 for each layer, sequence and KV head.

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use attn_core::{
    CacheConfig, Error, FirstTile, PageLayout, Window, arithmetic::TILE, centres::centres_bytes,
    error::refuse,
};
use cudarc::driver::{CudaSlice, DevicePtr};

use crate::{
    call_memory::CallMemory,
    error::failed,
    gpu::CudaBackend,
    native::{
        DeviceAddress, Pages, Prepared, Stream,
        centre::{CentreArgs, tiles_list},
    },
    sizes,
    staging::Lists,
};

/// The centres of one cache, `[layer][capacity][num_kv_heads][2][head_dim]`, of which each layer's first are those of its sequences.
#[derive(Debug)]
pub(crate) struct Centres {
    gpu: CudaBackend,
    memory: CudaSlice<u8>,
    /// What held them before there were more sequences, which launches on other streams may read still. Less than `memory`, since each is half of the next.
    outgrown: Vec<CudaSlice<u8>>,
    layers: usize,
    sequences: usize,
    /// Sequences that there is room for in each layer.
    capacity: usize,
    /// Of a sequence in one layer.
    bytes: usize,
    make: Prepared<CentreArgs>,
    /// What the making of centres keeps; orders it among the appends, whose streams may differ.
    calls: Mutex<CallMemory>,
}

impl Centres {
    /// Allocates the centres, zeros, and loads (at first compiles) the kernel that makes second ones.
    pub(crate) fn new(gpu: &CudaBackend, config: &CacheConfig) -> Result<Self, Error> {
        let make = gpu.prepare_op(config.layout()?)?;
        let (layers, sequences) = (config.layers, config.num_sequences);
        let bytes = centres_bytes(config.num_kv_heads, config.head_dim.k);
        let all = sizes::product("bytes of centres of K", &[layers, sequences, bytes])?;
        // Kernels name a sequence and a centre by 32 bits.
        sizes::int("sequences with centres of K", sequences)?;
        let memory = gpu.device.stream.alloc_zeros(all);
        Ok(Centres {
            gpu: gpu.share(),
            memory: memory.map_err(failed("allocating centres of K"))?,
            outgrown: Vec::new(),
            layers,
            sequences,
            capacity: sequences,
            bytes,
            make,
            calls: Mutex::new(CallMemory::new(&gpu.device).map_err(failed("making an event"))?),
        })
    }

    fn calls(&self) -> MutexGuard<'_, CallMemory> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues work that reads or writes centres behind all such work so far.
    ///
    /// # Safety
    /// `stream` is a live stream of the device's context, which is current.
    pub(crate) unsafe fn ordered(
        &self,
        stream: Stream,
        enqueue: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let calls = self.calls();
        // SAFETY: this function's contract.
        unsafe { calls.begin(stream) }?;
        let enqueued = enqueue();
        // SAFETY: this function's contract.
        unsafe { calls.end(stream) }.and(enqueued)
    }

    /// Sequences that there are centres of.
    pub(crate) fn sequences(&self) -> usize {
        self.sequences
    }

    /// Elements of a sequence's in one layer.
    pub(crate) fn len_of_row(&self) -> usize {
        self.bytes / 2
    }

    /// Where those of a layer begin.
    pub(crate) fn at(&self, layer: usize) -> DeviceAddress {
        let base = DeviceAddress::new(self.memory.device_ptr(&self.gpu.device.stream).0);
        base.offset(layer * self.capacity * self.bytes)
    }

    /// Where those of a sequence lie in a layer. Refuses others, and other than their `bytes`.
    fn place(&self, [layer, sequence]: [usize; 2], bytes: usize) -> Result<Range<usize>, Error> {
        if layer >= self.layers {
            let (given, count) = (layer, self.layers);
            return Err(Error::Layer { given, count });
        }
        self.check_sequence(sequence)?;
        if bytes != self.bytes {
            return Err(Error::Length {
                what: "centres of K",
                given: bytes,
                needed: self.bytes,
            });
        }
        let first = (layer * self.capacity + sequence) * self.bytes;
        Ok(first..first + self.bytes)
    }

    /// Refuses a sequence that there are no centres of.
    pub(crate) fn check_sequence(&self, sequence: usize) -> Result<(), Error> {
        if sequence < self.sequences {
            return Ok(());
        }
        let given = format_args!("{sequence} of {}", self.sequences);
        refuse("sequence", given, "a sequence of the cache")
    }

    /// Whose centres each of the first `batch` listed sequences has, as launches read it: none where each has those of its own number. Refuses a sequence that there
    /// are no centres of. `entries`: rows of a sequence, one or one for each KV head ([`PageTable::entries_of_page`](attn_core::PageTable::entries_of_page)).
    pub(crate) fn rows_of(
        &self,
        sequences: &[usize],
        batch: usize,
        entries: usize,
    ) -> Result<Vec<u32>, Error> {
        let Some(listed) = sequences.get(..batch) else {
            let given = sequences.len();
            let planned = batch;
            return Err(Error::Batch { planned, given });
        };
        let row = |sequence: &usize| {
            self.check_sequence(*sequence / entries)?;
            u32::try_from(*sequence).map_err(|_| {
                Error::parameter("sequences times KV heads", *sequence, "less than 2^32")
            })
        };
        let rows: Vec<u32> = listed.iter().map(row).collect::<Result<_, Error>>()?;
        Ok(
            match rows.iter().enumerate().all(|(b, row)| b == *row as usize) {
                true => Vec::new(),
                false => rows,
            },
        )
    }

    /// Makes room for `count` sequences more, behind all work so far that reads or writes centres; launches to come find them in other memory.
    pub(crate) fn grow(&mut self, count: usize) -> Result<(), Error> {
        let what = "sequences with centres of K";
        let sequences = self.sequences.saturating_add(count);
        sizes::int(what, sequences)?;
        if sequences > self.capacity {
            let capacity = sequences.max(self.capacity.saturating_mul(2));
            let memory = self.copied(capacity)?;
            self.outgrown
                .push(std::mem::replace(&mut self.memory, memory));
            self.capacity = capacity;
        }
        self.sequences = sequences;
        Ok(())
    }

    /// A copy with room for so many sequences in each layer, which is there when this returns.
    fn copied(&self, capacity: usize) -> Result<CudaSlice<u8>, Error> {
        let parts = [self.layers, capacity, self.bytes];
        let all = sizes::product("bytes of centres of K", &parts)?;
        let device = &self.gpu.device;
        device.bind()?;
        let memory = device.stream.alloc_zeros(all);
        let mut memory = memory.map_err(failed("allocating centres of K"))?;
        // SAFETY: the device's own stream is alive, and its context current.
        unsafe { self.calls().begin(Stream::of(device.stream.cu_stream())) }?;
        let held = self.sequences * self.bytes;
        let mut copy = || {
            let wait = device.wait_on_drop()?;
            for layer in (0..self.layers).filter(|_| held > 0) {
                let [from, to] = [self.capacity, capacity].map(|each| layer * each * self.bytes);
                let from = self.memory.slice(from..from + held);
                let mut to = memory.slice_mut(to..to + held);
                device.stream.memcpy_dtod(&from, &mut to)?;
            }
            wait.finish()
        };
        copy().map_err(failed("copying centres of K"))?;
        Ok(memory)
    }

    /// Copies a sequence's centres in a layer to the host.
    pub(crate) fn read(&self, of: [usize; 2], out: &mut [u8]) -> Result<(), Error> {
        let device = &self.gpu.device;
        let from = self.memory.slice(self.place(of, out.len())?);
        device.bind()?;
        // SAFETY: the device's own stream is alive, and its context current.
        unsafe { self.calls().begin(Stream::of(device.stream.cu_stream())) }?;
        let mut copy = || {
            let wait = device.wait_on_drop()?;
            device.stream.memcpy_dtoh(&from, &mut *out)?;
            wait.finish()
        };
        copy().map_err(failed("reading centres of K"))
    }

    /// Copies a sequence's centres in a layer from the host.
    pub(crate) fn write(&mut self, of: [usize; 2], bytes: &[u8]) -> Result<(), Error> {
        let place = self.place(of, bytes.len())?;
        self.gpu.device.bind()?;
        // SAFETY: the device's own stream is alive, and its context current.
        unsafe {
            self.calls()
                .begin(Stream::of(self.gpu.device.stream.cu_stream()))
        }?;
        let device = &self.gpu.device;
        let mut to = self.memory.slice_mut(place);
        let mut copy = || {
            let wait = device.wait_on_drop()?;
            device.stream.memcpy_htod(bytes, &mut to)?;
            wait.finish()
        };
        copy().map_err(failed("writing centres of K"))
    }

    /// Enqueues the making of second centres of first tiles in a layer's pool, on the device's own stream, behind the appends so far and ahead of the next ones.
    ///
    /// # Safety
    /// The pool is the layer's, live, of pages of this layout; the tiles are a cache's, whole, and written.
    pub(crate) unsafe fn make(
        &self,
        layer: usize,
        (layout, pool): (&PageLayout, Pages),
        tiles: &[FirstTile],
    ) -> Result<(), Error> {
        for tile in tiles {
            self.check_sequence(tile.sequence)?;
            check_tile(tile, layout, pool.num_pages)?;
        }
        let mut lists = Lists::default();
        let list = lists.add(&tiles_list(tiles))?;
        let device = &self.gpu.device;
        device.bind()?;
        let stream = Stream::of(device.stream.cu_stream());
        let mut calls = self.calls();
        // SAFETY: the device's own stream is alive, and its context current.
        unsafe { calls.begin(stream) }?;
        // SAFETY: as for `begin`, which has been called.
        let base = unsafe { calls.slots(device, &lists, stream) }?;
        let args = CentreArgs {
            pool,
            centres: self.at(layer),
            stride: self.len_of_row(),
            tiles: list.at(base),
            count: tiles.len(),
        };
        // SAFETY: the tiles' sequences and pages are compared with the centres and the pool above, and a cache lists each sequence once; the list is copied ahead on the same
        // stream, which has waited for the appends; the rest is this function's contract.
        let made = unsafe { self.gpu.enqueue(&self.make, stream, &args) };
        // SAFETY: as for `begin`.
        unsafe { calls.end(stream) }.and(made)
    }
}

/// Refuses a first tile by which the kernel would read outside of a pool.
fn check_tile(tile: &FirstTile, layout: &PageLayout, num_pages: usize) -> Result<(), Error> {
    let count = TILE.div_ceil(layout.page_size());
    let residual_pages = match layout.format().k.window() {
        Window::None => &[][..],
        _ => &tile.residual_pages[..count],
    };
    let pages = tile.pages[..count].iter().map(|page| Some(*page));
    for page in pages.chain(residual_pages.iter().copied()) {
        if page.is_none_or(|page| page as usize >= num_pages) {
            let given = format_args!("{page:?} of {num_pages}");
            return refuse("page of a first tile", given, "a page of the pool");
        }
    }
    Ok(())
}

/// Refuses a call for centres of a cache without.
pub(crate) fn no_centres() -> Error {
    Error::parameter(
        "centres of K",
        format_args!("a call for them"),
        "caches that have some",
    )
}
