//! New tokens: appended to a cache of one layer, or reserved once and written layer by layer; from host memory or the cache's GPU.

use std::ffi::c_void;

use attn::backends::cuda::native::{KvRows, Stream};

use crate::{
    arguments::config,
    cache::{Append, Cache, State, counts, on_cache},
    place::Place,
    rows::Tokens,
    status::{Failure, Status},
    step::device_steps,
};

/// Tokens of all sequences.
fn sum(appends: &[attn::Append]) -> usize {
    let tokens = appends.iter().map(|append| append.tokens);
    tokens.fold(0, usize::saturating_add)
}

/// K and V of `count` tokens in host memory.
///
/// # Safety
/// `tokens` are as documented, with as many rows.
unsafe fn on_host<'a>(
    tokens: &Tokens,
    cache: &attn::CacheConfig,
    count: usize,
) -> Result<[attn::Rows<'a>; 2], Failure> {
    tokens.without_rotary()?;
    let shape = [count, cache.num_kv_heads, cache.head_dim];
    let k = Place::new("k", shape, [tokens.k_token_stride, tokens.k_head_stride])?;
    let v = Place::new("v", shape, [tokens.v_token_stride, tokens.v_head_stride])?;
    // SAFETY: this function's contract.
    unsafe {
        Ok([
            k.rows("k", tokens.dtype, tokens.k)?,
            v.rows("v", tokens.dtype, tokens.v)?,
        ])
    }
}

/// Tokens in the GPU's memory, as kernels read them.
fn on_gpu(tokens: &Tokens, cache: &attn::CacheConfig) -> Result<KvRows, Failure> {
    tokens.without_rotary()?;
    tokens.on_device([cache.num_kv_heads, cache.head_dim])
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
    let work = |_: &attn::Device, state: &mut State| {
        // SAFETY: this function's contract.
        let (appends, tokens) = unsafe { (counts(appends, count)?, config(tokens)?) };
        // SAFETY: this function's contract.
        let [k, v] = unsafe { on_host(&tokens, state.cache.config(), sum(&appends)) }?;
        state.wait()?;
        Ok(state.cache.append_batch(&appends, k, v)?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
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
    let work = |device: &attn::Device, state: &mut State| {
        // SAFETY: this function's contract.
        let (appends, tokens) = unsafe { (counts(appends, count)?, config(tokens)?) };
        let new = on_gpu(&tokens, state.cache.config())?;
        let (steps, cache) = device_steps(device, state)?;
        // SAFETY: this function's contract.
        Ok(unsafe { steps.append(cache, &appends, &new, Stream::from_raw(stream)) }?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
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
    let work = |_: &attn::Device, state: &mut State| {
        // SAFETY: this function's contract.
        let appends = unsafe { counts(appends, count) }?;
        Ok(match &mut state.device_steps {
            Some(steps) => steps.reserve(&mut state.cache, &appends),
            None => state.cache.reserve(&appends),
        }?)
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
    let work = |_: &attn::Device, state: &mut State| {
        // SAFETY: this function's contract.
        let tokens = unsafe { config(tokens) }?;
        // Without an open step the write is refused, whatever its rows.
        let count = state.cache.open_step().map_or(0, sum);
        // SAFETY: this function's contract.
        let [k, v] = unsafe { on_host(&tokens, state.cache.config(), count) }?;
        state.wait()?;
        Ok(state.cache.write(layer, k, v)?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
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
    let work = |device: &attn::Device, state: &mut State| {
        // SAFETY: this function's contract.
        let tokens = unsafe { config(tokens) }?;
        let new = on_gpu(&tokens, state.cache.config())?;
        let (steps, cache) = device_steps(device, state)?;
        // SAFETY: this function's contract.
        Ok(unsafe { steps.write(cache, layer, &new, Stream::from_raw(stream)) }?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// Takes the open step back, whichever layers were written: lengths and pages are those before attn_cache_reserve. Does nothing without an open step.
///
/// # Safety
/// `cache` has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_cancel_step(cache: *mut Cache) -> Status {
    let work = |_: &attn::Device, state: &mut State| {
        state.wait()?;
        Ok(state.cache.cancel_step()?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}
