//! Appends and attention over a cache, with rows in host memory or on the cache's GPU.

use std::ffi::c_void;

use attn::{
    Error, Heads, HostRows, KvCache, Problem, RowsMut,
    backends::cuda::{
        DeviceSteps, NewTokens, QueryRows,
        native::{DeviceAddress, Stream},
    },
};

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

/// Where a caller's rows `[tokens][heads][dim]` lie, with its strides of tokens and heads in elements; 0 is that of rows side by side.
#[derive(Clone, Copy)]
struct Place {
    shape: [usize; 3],
    strides: [usize; 2],
}

impl Place {
    fn new(what: &str, shape: [usize; 3], [token, head]: [usize; 2]) -> Result<Self, Failure> {
        let [_, heads, dim] = shape;
        let refused = |sentence| Err(Failure::new(Status::Shape, sentence));
        let head = if head == 0 { dim } else { head };
        if head < dim {
            return refused(format!(
                "{what}_head_stride is {head}; a head has {dim} elements"
            ));
        }
        let packed = heads.saturating_mul(head);
        let token = if token == 0 { packed } else { token };
        if head == dim && token < packed {
            return refused(format!(
                "{what}_token_stride is {token}; a token has {packed} elements"
            ));
        }
        Ok(Place {
            shape,
            strides: [token, head],
        })
    }

    /// Elements up to the last row's end, saturating.
    fn reach(&self) -> usize {
        let ([tokens, heads, dim], [token, head]) = (self.shape, self.strides);
        if self.shape.contains(&0) {
            return 0;
        }
        let last = (tokens - 1).saturating_mul(token);
        last.saturating_add((heads - 1).saturating_mul(head))
            .saturating_add(dim)
    }

    /// # Safety
    /// `pointer` is NULL or has the rows and what lies between them, of the type that `dtype` says.
    unsafe fn rows<'a>(
        self,
        what: &str,
        dtype: u32,
        pointer: *const c_void,
    ) -> Result<attn::Rows<'a>, Failure> {
        // SAFETY: this function's contract.
        let all = unsafe { arguments::elements(what, dtype, pointer, self.reach()) }?;
        Ok(attn::Rows::strided(all, self.shape, self.strides)?)
    }

    /// # Safety
    /// As [`Place::rows`], of memory that nothing else uses meanwhile.
    unsafe fn rows_mut<'a>(
        self,
        what: &str,
        dtype: u32,
        pointer: *mut c_void,
    ) -> Result<RowsMut<'a>, Failure> {
        // SAFETY: this function's contract.
        let all = unsafe { elements_mut(what, dtype, pointer, self.reach()) }?;
        Ok(RowsMut::strided(all, self.shape, self.strides)?)
    }
}

/// Whether two callers' arrays, each with what lies between its rows, share a byte.
fn share(
    a: (*const c_void, Place),
    b: (*const c_void, Place),
    dtype: u32,
) -> Result<bool, Failure> {
    let bytes = arguments::dtype(dtype)?.bytes();
    let span = |(pointer, place): (*const c_void, Place)| {
        let start = pointer as usize;
        (
            start,
            start.saturating_add(place.reach().saturating_mul(bytes)),
        )
    };
    let ((a, a_end), (b, b_end)) = (span(a), span(b));
    Ok(a < b_end && b < a_end)
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
        let shape = [all, description.num_kv_heads, description.head_dim];
        let k_strides = [tokens.k_token_stride, tokens.k_head_stride];
        let v_strides = [tokens.v_token_stride, tokens.v_head_stride];
        let in_k = Place::new("k", shape, k_strides)?;
        let in_v = Place::new("v", shape, v_strides)?;
        // SAFETY: this function's contract.
        let (k, v) = unsafe {
            (
                in_k.rows("k", tokens.dtype, tokens.k)?,
                in_v.rows("v", tokens.dtype, tokens.v)?,
            )
        };
        state.wait()?;
        Ok(state.cache.append_batch(&appends, k, v)?)
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
        let shape = [tokens, problem.num_q_heads, problem.head_dim];
        let in_q = Place::new("q", shape, [rows.q_token_stride, rows.q_head_stride])?;
        let in_out = Place::new("out", shape, [rows.out_token_stride, rows.out_head_stride])?;
        // Outputs between the queries of a fused array: the queries are copied before the outputs' memory is borrowed.
        let copied = if share((rows.q, in_q), (rows.out.cast_const(), in_out), rows.dtype)? {
            // SAFETY: this function's contract; what is borrowed here is given back at once.
            Some(unsafe { in_q.rows("q", rows.dtype, rows.q) }?.to_wide()?)
        } else {
            None
        };
        // SAFETY: this function's contract.
        let rows = unsafe {
            HostRows {
                q: match &copied {
                    Some(copied) => copied.into(),
                    None => in_q.rows("q", rows.dtype, rows.q)?,
                },
                out: in_out.rows_mut("out", rows.dtype, rows.out)?,
                lse: match rows.lse.is_null() {
                    true => None,
                    false => {
                        let len = tokens.saturating_mul(problem.num_q_heads);
                        Some(list_mut("lse", rows.lse, len)?)
                    }
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
        tokens.check_on_device(description.head_dim)?;
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
        rows.check_on_device([problem.num_q_heads, problem.head_dim])?;
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
