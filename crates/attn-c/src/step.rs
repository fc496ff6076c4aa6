//! Attention over a cache, with rows in host memory or on the cache's GPU.

use std::ffi::c_void;

use attn::{
    Error, Heads, HostRows, KvCache, Problem,
    backends::cuda::{
        DeviceSteps, QueryRows,
        native::{DeviceAddress, Stream},
    },
};

use crate::{
    arguments::{Config, config, list, list_mut, optional},
    cache::{Cache, State, on_cache},
    modifiers::Modifiers,
    place::{Place, share},
    rows::{Rows, on_device},
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
    /// The layer that is attended, in a cache of several; else 0.
    pub layer: usize,
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
        let layer = cache.layer(step.layer)?;
        Ok(host_steps.attend_layer(device.backend(), layer, sequences, &problem, rows)?)
    };
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, work) }
}

/// What a cache's steps on its GPU keep, made at the first one.
pub(crate) fn device_steps<'a>(
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

/// Attends, with rows in the GPU's memory: enqueues the step on `stream`. For a step that a CUDA graph captures, see attn_plan.
///
/// # Safety
/// Everything that attn_cache_attend needs, with rows in device memory, aligned to 16 bytes, which stay until the work has run; queries are finite.
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
        let chosen = cache.layer(step.layer)?.sequences(sequences)?;
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
