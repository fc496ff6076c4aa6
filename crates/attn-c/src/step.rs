//! Appends and attention over a cache, with rows in host memory or on the cache's GPU.

use std::ffi::c_void;

use attn::{
    Elements, Error, Heads, HostRows, KvCache, Problem,
    backends::cuda::{
        DeviceSteps, NewTokens, QueryRows,
        native::{DeviceAddress, Stream},
    },
};
use half::{bf16, f16};

use crate::{
    arguments::{self, Config, config, elements_mut, list, list_mut, optional},
    cache::{Append, Cache, State, counts, on_cache},
    modifiers::Modifiers,
    rows::{Rows, Tokens, on_device},
    status::{Failure, Status},
};

/// Which sequences attend, with how many query tokens. The last query token of a sequence stands at its last cached token: append first.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// sizeof(attn_step).
    pub struct_size: usize,
    /// Query heads: a multiple of the cache's KV heads.
    pub q_heads: usize,
    /// Number of sequences.
    pub count: usize,
    /// Their indices in the cache, in any order.
    pub sequences: *const usize,
    /// Query tokens of each; NULL: one.
    pub q_lens: *const usize,
    /// What changes scores.
    pub modifiers: Modifiers,
}

// SAFETY: `repr(C)`, and `struct_size` is first.
unsafe impl Config for Step {
    const NAME: &'static str = "attn_step";
}

/// The problem of a step without its lengths, and its sequences.
///
/// # Safety
/// The step's lists are as it documents them.
unsafe fn problem<'a>(step: &Step, state: &State) -> Result<(Problem, &'a [usize]), Failure> {
    let config = state.cache.config();
    let heads = Heads {
        q: step.q_heads,
        kv: config.num_kv_heads,
        dim: config.head_dim,
    };
    // SAFETY: this function's contract.
    unsafe {
        let sequences = list("sequences", step.sequences, step.count)?;
        let mut problem = Problem::new(heads, vec![0; step.count]);
        if let Some(q_lens) = optional("q_lens", step.q_lens, step.count)? {
            problem = problem.q_lens(q_lens);
        }
        Ok((step.modifiers.of(problem)?, sequences))
    }
}

/// Rows of new tokens, brought side by side where they are not.
enum Gathered<'a> {
    InPlace(Elements<'a>),
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Gathered<'_> {
    fn elements(&self) -> Elements<'_> {
        match self {
            Gathered::InPlace(elements) => *elements,
            Gathered::F32(rows) => rows.into(),
            Gathered::F16(rows) => rows.into(),
            Gathered::Bf16(rows) => rows.into(),
        }
    }
}

fn gather<T: Copy>(from: &[T], row: usize, stride: usize) -> Vec<T> {
    from.chunks(stride)
        .flat_map(|part| &part[..row])
        .copied()
        .collect()
}

/// `tokens` rows of `row` elements, `stride` from one to the next.
///
/// # Safety
/// `pointer` is NULL or has as many elements.
unsafe fn rows<'a>(
    what: &str,
    dtype: u32,
    pointer: *const c_void,
    [tokens, row, stride]: [usize; 3],
) -> Result<Gathered<'a>, Failure> {
    let stride = if stride == 0 { row } else { stride };
    if stride < row {
        let sentence = format!("{what}_token_stride is {stride}; a token has {row} elements");
        return Err(Failure::new(Status::Shape, sentence));
    }
    let before = tokens.saturating_sub(1).saturating_mul(stride);
    let len = if tokens == 0 {
        0
    } else {
        before.saturating_add(row)
    };
    // SAFETY: this function's contract.
    let all = unsafe { arguments::elements(what, dtype, pointer, len) }?;
    if stride == row {
        return Ok(Gathered::InPlace(all));
    }
    Ok(match all {
        Elements::F32(x) => Gathered::F32(gather(x, row, stride)),
        Elements::F16(x) => Gathered::F16(gather(x, row, stride)),
        Elements::Bf16(x) => Gathered::Bf16(gather(x, row, stride)),
        other => Gathered::InPlace(other),
    })
}

/// Appends tokens in host memory to several sequences at once, or to none.
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
        tokens.without_rotary()?;
        let all = appends
            .iter()
            .fold(0usize, |n, a| n.saturating_add(a.tokens));
        let description = state.cache.config();
        let row = description.num_kv_heads * description.head_dim;
        // SAFETY: this function's contract.
        let [k, v] = unsafe {
            [
                rows(
                    "k",
                    tokens.dtype,
                    tokens.k,
                    [all, row, tokens.k_token_stride],
                )?,
                rows(
                    "v",
                    tokens.dtype,
                    tokens.v,
                    [all, row, tokens.v_token_stride],
                )?,
            ]
        };
        state.wait()?;
        Ok(state
            .cache
            .append_batch(&appends, k.elements(), v.elements())?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// Attends, with rows in host memory.
///
/// # Safety
/// `cache` has not been destroyed; `step` and `rows` are as their types document them, with rows for all query tokens; outputs overlap nothing else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_attend(
    cache: *mut Cache,
    step: *const Step,
    rows: *const Rows,
) -> Status {
    let work = |device: &attn::Device, state: &mut State| {
        // SAFETY: this function's contract.
        let (step, rows) = unsafe { (config(step)?, config(rows)?) };
        // SAFETY: this function's contract.
        let (problem, sequences) = unsafe { problem(&step, state) }?;
        let tokens = problem
            .q_lens
            .iter()
            .fold(0usize, |n, q| n.saturating_add(*q));
        let per_head = tokens.saturating_mul(problem.num_q_heads);
        let len = per_head.saturating_mul(problem.head_dim);
        // SAFETY: this function's contract.
        let rows = unsafe {
            HostRows {
                q: arguments::elements("q", rows.dtype, rows.q, len)?,
                out: elements_mut("out", rows.dtype, rows.out, len)?,
                lse: match rows.lse.is_null() {
                    true => None,
                    false => Some(list_mut("lse", rows.lse, per_head)?),
                },
            }
        };
        state.wait()?;
        let State {
            host_steps, cache, ..
        } = state;
        Ok(host_steps.attend(device.backend(), cache, sequences, &problem, rows)?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// What a cache's steps on its GPU keep, made at the first one.
fn device_steps<'a>(
    device: &attn::Device,
    state: &'a mut State,
) -> Result<(&'a mut DeviceSteps, &'a mut KvCache), Error> {
    let gpu = device.cuda("stream")?;
    let steps = match state.device_steps.take() {
        Some(steps) => steps,
        None => gpu.prepare_steps(&state.cache)?,
    };
    Ok((state.device_steps.insert(steps), &mut state.cache))
}

/// Appends tokens in the GPU's memory: enqueues the writes on `stream`, a CUstream or cudaStream_t of the device's primary context (NULL: the default
/// stream), and counts the tokens. The bytes are those of attn_cache_append.
///
/// # Safety
/// As attn_cache_append, in device memory, aligned to 16 bytes, which stays as it is until the work has run. K and V are finite.
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
        tokens.without_rotary()?;
        let description = state.cache.config();
        let row = description.num_kv_heads * description.head_dim;
        let stride = |given: usize| if given == 0 { row } else { given };
        let new = NewTokens {
            k: DeviceAddress::new(tokens.k as u64),
            v: DeviceAddress::new(tokens.v as u64),
            dtype: on_device(tokens.dtype)?,
            k_token_stride: stride(tokens.k_token_stride),
            v_token_stride: stride(tokens.v_token_stride),
        };
        let (steps, cache) = device_steps(device, state)?;
        // SAFETY: this function's contract.
        Ok(unsafe { steps.append(cache, &appends, &new, Stream::from_raw(stream)) }?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// Attends, with rows in the GPU's memory: enqueues the step on `stream`. For a step that a CUDA graph captures, see attn_plan.
///
/// # Safety
/// As attn_cache_attend, with rows in device memory, aligned to 16 bytes, which stay until the work has run; queries are finite.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_attend_on(
    cache: *mut Cache,
    step: *const Step,
    rows: *const Rows,
    stream: *mut c_void,
) -> Status {
    let work = |device: &attn::Device, state: &mut State| {
        // SAFETY: this function's contract.
        let (step, rows) = unsafe { (config(step)?, config(rows)?) };
        // SAFETY: this function's contract.
        let (problem, sequences) = unsafe { problem(&step, state) }?;
        let rows = QueryRows {
            q: DeviceAddress::new(rows.q as u64),
            out: DeviceAddress::new(rows.out as u64),
            dtype: on_device(rows.dtype)?,
            lse: DeviceAddress::new(rows.lse as u64),
        };
        let (steps, cache) = device_steps(device, state)?;
        let chosen = cache.sequences(sequences)?;
        // SAFETY: this function's contract.
        Ok(unsafe { steps.attend(&chosen, &problem, &rows, Stream::from_raw(stream)) }?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// Waits for a cache's steps on the device.
///
/// # Safety
/// `cache` has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_wait(cache: *mut Cache) -> Status {
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, |_, state| state.wait()) }
}
