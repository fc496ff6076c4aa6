//! Caches: pages and lengths of sequences. Rows go in and out by `step`.

use std::{
    ffi::{c_char, c_void},
    sync::{Arc, Mutex},
};

use attn::{CacheConfig as Description, Error, Heads, KvFormat, SequenceImage, Session};

use crate::{
    arguments::{self, destroy, handle, list, list_mut, lock, optional, place, text},
    device::Device,
    rows::head_dim,
    status::{Failure, Status, call},
};

/// The description of a cache. Fields that are 0 have their defaults.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CacheConfig {
    /// sizeof(attn_cache_config).
    pub struct_size: usize,
    /// How K and V are stored: "int8", "int4", "int8/int4", "fp8", "bf16", "f16" and others of docs/c.md.
    pub format: *const c_char,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head's key and query: 64, 80, 96, 128, 160, 192, 256, 320, 512 or 576.
    pub head_dim: usize,
    /// Elements of a value and of an output, where they are not head_dim; 0: head_dim.
    pub v_dim: usize,
    /// Sequences, all empty at first; 0: 1.
    pub sequences: usize,
    /// Tokens that each sequence has room for.
    pub max_tokens: usize,
    /// Pages of the pool; 0: enough for max_tokens of every sequence.
    pub pages: usize,
    /// Tokens per page: 16, 32, 64 or 128; 0: 64.
    pub page_size: usize,
    /// Formats that keep the newest tokens finer, such as int4: the most query tokens that a step has of one sequence; 0: 64.
    pub max_q_len: usize,
    /// fp8 and int8-tensor: a static scale for each KV head of the first layer, then of the next; NULL for other formats.
    pub k_scales: *const f32,
    /// As `k_scales`, for V.
    pub v_scales: *const f32,
    /// Layers of a model that have this shape, with lengths and pages in common and a pool for each: attn_cache_reserve; 0: 1.
    pub layers: usize,
    /// Query heads of the steps to come, so that a number that no step can have is refused here; 0: not known yet.
    pub q_heads: usize,
    /// Whether each sequence's keys are stored without what they have in common; 0: for int8, int8/int4 and int4; 1: yes, refused for other formats; 2: no.
    pub centres: usize,
    /// Formats that keep the newest tokens finer, such as int4: tokens after which, again and again, a sequence keeps what attn_cache_truncate needs to leave it so long, a
    /// multiple of 64 and of page_size; attn_cache_stats.checkpoint_bytes says what that takes. 0: none. Other formats are truncated to any length.
    pub checkpoints: usize,
}

/// attn_cache_stats.saturated of a cache whose numbers are not counted: rows in device memory were appended to it.
pub const ATTN_NOT_COUNTED: u64 = u64::MAX;

/// The state of a cache's pool, and what has become of the numbers in it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CacheStats {
    /// Bytes of a page, in each layer's pool.
    pub page_bytes: usize,
    /// Pages of each layer's pool.
    pub pages: usize,
    /// Pages that no sequence has.
    pub free_pages: usize,
    /// fp8, int8-tensor and f16: numbers that were appended so far and stored as the end of the format's range, being larger than static scales
    /// (f16: than 65504) allow; ATTN_NOT_COUNTED where that is not known. 0 for other formats.
    pub saturated: u64,
    /// How uneven the channels of the keys are: their mean square over that of the middle channel, in the worst head that the cache has looked at. Models
    /// without biases of K have 1 to 4; at more than 10, 4 and 8 bits store the keys badly. 0 before a sequence has 128 tokens.
    pub key_outliers: f64,
    /// Bytes that a sequence takes in all layers for each of its checkpoints (attn_cache_config.checkpoints); 0 without.
    pub checkpoint_bytes: usize,
}

/// Tokens for a sequence.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Append {
    /// The sequence's index.
    pub sequence: usize,
    /// How many tokens it gets.
    pub tokens: usize,
}

/// A paged, quantized cache of K and V of one layer, or of several that have lengths and pages in common.
pub struct Cache {
    device: Arc<attn::Device>,
    session: Mutex<Session>,
}

/// The library's description of a cache.
///
/// # Safety
/// The format is text, and the scales are NULL or one for each layer and KV head.
unsafe fn describe(given: &CacheConfig) -> Result<Description, Failure> {
    // SAFETY: this function's contract.
    let format: KvFormat = unsafe { text("format", given.format) }?.parse()?;
    let heads = Heads::new(
        match given.q_heads {
            0 => given.kv_heads,
            q_heads => q_heads,
        },
        given.kv_heads,
        head_dim(given.head_dim, given.v_dim),
    );
    let mut builder = Description::builder(format, heads).max_len(given.max_tokens);
    builder = builder.sequences(given.sequences.max(1));
    let layers = given.layers.max(1);
    builder = builder.layers(layers);
    if given.pages > 0 {
        builder = builder.pages(given.pages);
    }
    if given.page_size > 0 {
        builder = builder.page_size(given.page_size);
    }
    if given.max_q_len > 0 {
        builder = builder.max_q_len(given.max_q_len);
    }
    builder = builder.checkpoints(given.checkpoints);
    builder = match given.centres {
        0 => builder,
        1 => builder.centres(true),
        2 => builder.centres(false),
        other => return Err(Error::parameter("centres", other, "0, 1, 2").into()),
    };
    let scales = layers.saturating_mul(given.kv_heads);
    // SAFETY: this function's contract.
    let [k, v] = unsafe {
        [
            optional("k_scales", given.k_scales, scales)?,
            optional("v_scales", given.v_scales, scales)?,
        ]
    };
    let [k, v] = [k, v].map(Option::unwrap_or_default);
    Ok(builder.tensor_scales(k, v).build())
}

/// Creates an empty cache in a device's memory.
///
/// # Safety
/// `device` is open; `config` and what it points to are readable; `cache` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_create(
    device: *const Device,
    config: *const CacheConfig,
    cache: *mut *mut Cache,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (device, out, description) = unsafe {
            let device = &handle("device", device)?.device;
            let description = describe(&arguments::config(config)?)?;
            (device, place("cache", cache)?, description)
        };
        let handle = Cache {
            session: Mutex::new(Session::new(device.clone(), &description)?),
            device: device.clone(),
        };
        *out = Box::into_raw(Box::new(handle));
        Ok(())
    })
}

/// Destroys a cache, when its steps on the device have run; NULL is none.
///
/// # Safety
/// `cache` is NULL or was created and has not been destroyed; no call on it is under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_destroy(cache: *mut Cache) {
    // SAFETY: a handle of `attn_cache_create`'s by contract, used for the last time.
    unsafe { destroy(cache) }
}

/// Runs `work` on a cache that no other call uses.
///
/// # Safety
/// `cache` is NULL or has not been destroyed.
pub(crate) unsafe fn on_cache(
    cache: *const Cache,
    work: impl FnOnce(&attn::Device, &mut Session) -> Result<(), Failure>,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let cache = unsafe { handle("cache", cache) }?;
        let mut session = lock(&cache.session)?;
        work(&cache.device, &mut session)
    })
}

/// Makes the empty sequence `to` share the tokens of `from`. Their pages are copied when one of the two changes them.
///
/// # Safety
/// `cache` has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_fork(cache: *mut Cache, from: usize, to: usize) -> Status {
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, |_, session| Ok(session.fork(from, to)?)) }
}

/// Takes tokens from a sequence's end, such as those of a rejected draft, so that `tokens` are left. Formats that keep the newest tokens finer, such as int4, go back by the
/// tokens of the last append, to the first 64 or fewer, and to checkpoints (attn_cache_config.checkpoints); attn_cache_longest_prefix says how far from the length that is asked for.
///
/// # Safety
/// `cache` has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_truncate(
    cache: *mut Cache,
    sequence: usize,
    tokens: usize,
) -> Status {
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, |_, session| Ok(session.truncate(sequence, tokens)?)) }
}

/// The most tokens, `tokens` at most, that attn_cache_truncate can leave of a sequence: where to go on from to have its first `tokens` again. To keep the sequence, fork it and
/// truncate the fork.
///
/// # Safety
/// `cache` has not been destroyed; `longest` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_longest_prefix(
    cache: *const Cache,
    sequence: usize,
    tokens: usize,
    longest: *mut usize,
) -> Status {
    let work = |_: &attn::Device, session: &mut Session| {
        let found = session.longest_prefix(sequence, tokens)?;
        // SAFETY: this function's contract.
        *unsafe { place("longest", longest) }? = found;
        Ok(())
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// Frees the pages of a sequence's tokens before `token`, which no window sees any more; its length, its positions and its bits stay. After a step of
/// a layer with a window, `token` is at most length - window + 1. Pages go by whole tiles of 64 tokens, in all layers. Queries that see a dropped token
/// are refused, and so is attn_cache_save.
///
/// # Safety
/// `cache` has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_drop_before(
    cache: *mut Cache,
    sequence: usize,
    token: usize,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        on_cache(
            cache,
            |_, session| Ok(session.drop_before(sequence, token)?),
        )
    }
}

/// Drops the tokens of a sequence from `first` up to `end` and closes the gap, for streams that run for ever; as many as `dropped`, which may be NULL, then says. Whole
/// pages and tiles of 64 tokens inside of the range go; the first 64 tokens stay, and of formats that keep the newest tokens finer, such as int4, these. Keys keep
/// the rotary positions that they were appended with; windows and ALiBi count the tokens that are left.
///
/// # Safety
/// `cache` has not been destroyed; `dropped` is writable, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_drop_range(
    cache: *mut Cache,
    sequence: usize,
    first: usize,
    end: usize,
    dropped: *mut usize,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        on_cache(cache, |_, session| {
            let count = session.drop_range(sequence, first..end)?;
            if !dropped.is_null() {
                *place("dropped", dropped)? = count;
            }
            Ok(())
        })
    }
}

/// Empties a sequence.
///
/// # Safety
/// `cache` has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_free(cache: *mut Cache, sequence: usize) -> Status {
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, |_, session| Ok(session.free(sequence)?)) }
}

/// The number of a sequence's tokens.
///
/// # Safety
/// `cache` has not been destroyed; `tokens` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_tokens(
    cache: *const Cache,
    sequence: usize,
    tokens: *mut usize,
) -> Status {
    let work = |_: &attn::Device, session: &mut Session| {
        let len = session.tokens(sequence)?;
        // SAFETY: this function's contract.
        *unsafe { place("tokens", tokens) }? = len;
        Ok(())
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// The state of a cache's pool.
///
/// # Safety
/// `cache` has not been destroyed; `stats` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_get_stats(
    cache: *const Cache,
    stats: *mut CacheStats,
) -> Status {
    let work = |_: &attn::Device, session: &mut Session| {
        // SAFETY: this function's contract.
        *unsafe { place("stats", stats) }? = CacheStats {
            page_bytes: session.layout().page_bytes(),
            pages: session.config().num_pages,
            free_pages: session.free_pages(),
            saturated: session.saturated().unwrap_or(ATTN_NOT_COUNTED),
            key_outliers: session.key_outliers().map_or(0.0, f64::from),
            checkpoint_bytes: session.config().checkpoint_bytes()?,
        };
        Ok(())
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// The number of pages that these appends take from the pool.
///
/// # Safety
/// `cache` has not been destroyed; `appends` has `count` entries; `pages` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_pages_needed(
    cache: *const Cache,
    appends: *const Append,
    count: usize,
    pages: *mut usize,
) -> Status {
    let work = |_: &attn::Device, session: &mut Session| {
        // SAFETY: this function's contract.
        let appends = unsafe { counts(appends, count) }?;
        let needed = session.pages_needed(&appends)?;
        // SAFETY: this function's contract.
        *unsafe { place("pages", pages) }? = needed;
        Ok(())
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// The library's list of appends.
///
/// # Safety
/// `appends` is NULL or has `count` entries.
pub(crate) unsafe fn counts(
    appends: *const Append,
    count: usize,
) -> Result<Vec<attn::Append>, Failure> {
    // SAFETY: this function's contract.
    let appends = unsafe { list("appends", appends, count) }?;
    let as_ours = |append: &Append| attn::Append {
        sequence: append.sequence,
        tokens: append.tokens,
    };
    Ok(appends.iter().map(as_ours).collect())
}

/// Writes a sequence as one block of bytes, with a header that says what it holds, to be kept elsewhere; attn_cache_restore brings it back, into this
/// or another cache of the same format and shape, on any device. `bytes` NULL: only `needed` is written, the number of bytes.
///
/// # Safety
/// `cache` has not been destroyed; `bytes` is NULL or has `size` writable bytes; `needed` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_save(
    cache: *const Cache,
    sequence: usize,
    bytes: *mut c_void,
    size: usize,
    needed: *mut usize,
) -> Status {
    let work = |_: &attn::Device, session: &mut Session| {
        let all = session.image_bytes(sequence)?;
        // SAFETY: this function's contract.
        *unsafe { place("needed", needed) }? = all;
        if bytes.is_null() {
            return Ok(());
        }
        if size != all {
            let sentence = format!("size is {size}, but sequence {sequence} takes {all} bytes");
            return Err(Failure::new(Status::Shape, sentence));
        }
        // SAFETY: this function's contract.
        let out = unsafe { list_mut("bytes", bytes.cast::<u8>(), size) }?;
        Ok(session.write_image(sequence, out)?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// Fills an empty sequence from the bytes of attn_cache_save. Damaged ones, and those of another format, shape or other scales, are refused, and
/// nothing changes.
///
/// # Safety
/// `cache` has not been destroyed; `bytes` has `size` readable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_restore(
    cache: *mut Cache,
    sequence: usize,
    bytes: *const c_void,
    size: usize,
) -> Status {
    let work = |_: &attn::Device, session: &mut Session| {
        // SAFETY: this function's contract.
        let bytes = unsafe { list("bytes", bytes.cast::<u8>(), size) }?;
        let image = SequenceImage::from_bytes(bytes)?;
        Ok(session.restore(sequence, &image)?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}
