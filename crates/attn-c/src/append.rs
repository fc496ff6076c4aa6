//! New tokens: appended to a cache of one layer, or reserved once and written layer by layer; from host memory or the cache's GPU.

use std::ffi::c_void;

use attn::{PageLayout, Session, backends::cuda::native::Stream};

use crate::{
    arguments::config,
    cache::{Append, Cache, counts, on_cache},
    place::{Memory, Numbers, Place},
    rows::Tokens,
    status::{Failure, Status},
};

/// K and V of new tokens, and where they lie.
pub(crate) struct NewTokens<'a> {
    k: (Place, Numbers<'a>),
    v: (Place, Numbers<'a>),
}

impl NewTokens<'_> {
    /// K and V of `count` tokens.
    ///
    /// # Safety
    /// `tokens` are as documented, with as many rows, in this memory.
    pub unsafe fn new(
        tokens: &Tokens,
        layout: &PageLayout,
        count: usize,
        memory: Memory,
    ) -> Result<Self, Failure> {
        let [of_k, of_v] = layout.shapes(count);
        let k = Place::new("k", of_k, [tokens.k_token_stride, tokens.k_head_stride])?;
        let v = Place::new("v", of_v, [tokens.v_token_stride, tokens.v_head_stride])?;
        // SAFETY: this function's contract.
        let [of_k, of_v] = unsafe {
            [
                k.numbers(("k", memory), tokens.dtype, tokens.k)?,
                v.numbers(("v", memory), tokens.dtype, tokens.v)?,
            ]
        };
        Ok(NewTokens {
            k: (k, of_k),
            v: (v, of_v),
        })
    }

    pub fn rows(&self) -> Result<[attn::Rows<'_>; 2], Failure> {
        let [(k, of_k), (v, of_v)] = [&self.k, &self.v];
        Ok([k.rows(of_k)?, v.rows(of_v)?])
    }
}

/// Appends tokens in host memory, or on the device that the stream belongs to.
///
/// # Safety
/// Those of `attn_cache_append`, or of `attn_cache_append_on`.
unsafe fn append(
    cache: *mut Cache,
    (appends, count): (*const Append, usize),
    tokens: *const Tokens,
    stream: Option<Stream>,
) -> Status {
    let work = |device: &attn::Device, session: &mut Session| {
        // SAFETY: this function's contract.
        let (appends, tokens) = unsafe { (counts(appends, count)?, config(tokens)?) };
        tokens.without_rotary()?;
        let (memory, count) = (Memory::of(device, stream)?, attn::Append::total(&appends));
        // SAFETY: this function's contract.
        let new = unsafe { NewTokens::new(&tokens, session.layout(), count, memory) }?;
        let [k, v] = new.rows()?;
        Ok(session.append(&appends, k, v)?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// Writes one layer's tokens from host memory, or from the device that the stream belongs to.
///
/// # Safety
/// Those of `attn_cache_write`, or of `attn_cache_write_on`.
unsafe fn write(
    cache: *mut Cache,
    layer: usize,
    tokens: *const Tokens,
    stream: Option<Stream>,
) -> Status {
    let work = |device: &attn::Device, session: &mut Session| {
        // SAFETY: this function's contract.
        let tokens = unsafe { config(tokens) }?;
        tokens.without_rotary()?;
        let memory = Memory::of(device, stream)?;
        // Without an open step the write is refused, whatever its rows.
        let count = session.open_step().map_or(0, attn::Append::total);
        // SAFETY: this function's contract.
        let new = unsafe { NewTokens::new(&tokens, session.layout(), count, memory) }?;
        let [k, v] = new.rows()?;
        Ok(session.write(layer, k, v)?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// Appends tokens in host memory to several sequences at once, or to none. For a cache of one layer; of others see attn_cache_reserve.
///
/// # Safety
/// `cache` has not been destroyed; `appends` has `count` entries, each of another sequence; `tokens` has as many tokens as they add up to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_append(
    cache: *mut Cache,
    appends: *const Append,
    count: usize,
    tokens: *const Tokens,
) -> Status {
    // SAFETY: this function's contract.
    unsafe { append(cache, (appends, count), tokens, None) }
}

/// Appends tokens in the GPU's memory: enqueues the writes on `stream`, a CUstream or cudaStream_t of the device's primary context (NULL: the default
/// stream), and counts the tokens. The bytes are those of attn_cache_append.
///
/// # Safety
/// Everything that attn_cache_append needs, with rows in device memory, aligned to 16 bytes, which stays as it is until the work has run. K and V are finite.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_append_on(
    cache: *mut Cache,
    appends: *const Append,
    count: usize,
    tokens: *const Tokens,
    stream: *mut c_void,
) -> Status {
    let stream = Some(Stream::from_raw(stream));
    // SAFETY: this function's contract.
    unsafe { append(cache, (appends, count), tokens, stream) }
}

/// Begins a step of a model whose layers share the cache: takes the pages of new tokens in all layers, and counts the tokens. attn_cache_write then
/// writes them layer by layer, and a layer that is written can be attended; the last one's write ends the step. Until then these sequences are neither
/// forked, truncated, emptied, dropped from nor saved, and attn_cache_cancel_step takes the whole step back.
///
/// # Safety
/// `cache` has not been destroyed; `appends` has `count` entries, each of another sequence.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_reserve(
    cache: *mut Cache,
    appends: *const Append,
    count: usize,
) -> Status {
    let work = |_: &attn::Device, session: &mut Session| {
        // SAFETY: this function's contract.
        let appends = unsafe { counts(appends, count) }?;
        Ok(session.reserve(&appends)?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// Writes one layer's K and V of the tokens that attn_cache_reserve has counted, in host memory. Layers come in any order, each once. A write that was
/// refused or failed is repeated, or the step is cancelled.
///
/// # Safety
/// `cache` has not been destroyed; `tokens` has as many tokens as the appends of attn_cache_reserve add up to, in their order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_write(
    cache: *mut Cache,
    layer: usize,
    tokens: *const Tokens,
) -> Status {
    // SAFETY: this function's contract.
    unsafe { write(cache, layer, tokens, None) }
}

/// Writes one layer's tokens from the GPU's memory: enqueues the writes on `stream`, as attn_cache_append_on. The bytes are those of attn_cache_write.
///
/// # Safety
/// Everything that attn_cache_write needs, with rows in device memory, aligned to 16 bytes, which stays as it is until the work has run. K and V are finite.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_write_on(
    cache: *mut Cache,
    layer: usize,
    tokens: *const Tokens,
    stream: *mut c_void,
) -> Status {
    let stream = Some(Stream::from_raw(stream));
    // SAFETY: this function's contract.
    unsafe { write(cache, layer, tokens, stream) }
}

/// Takes the open step back, whichever layers were written: lengths and pages are those before attn_cache_reserve. Does nothing without an open step.
///
/// # Safety
/// `cache` has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_cancel_step(cache: *mut Cache) -> Status {
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, |_, session| Ok(session.cancel_step()?)) }
}
