//! Attention over a cache, with rows in host memory or on the cache's GPU.

use std::ffi::c_void;

use attn::{Attend, AttendRows, SelectedPages, Session, backends::cuda::native::Stream};

use crate::{
    arguments::{config, list, optional, refused},
    cache::{Cache, on_cache},
    modifiers::Modifiers,
    place::{Memory, with_rows},
    rows::Rows,
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
    /// Block-sparse attention: the pages that each KV head attends, ascending numbers of pages in the sequence: those of the first sequence's first KV head, then those
    /// of its next one, and so on; NULL with page_counts NULL: all. For one query token of each sequence, without score modifiers that go by a token's place or by the
    /// head, and static scales that are the same for all KV heads. In a cache with centres, and in formats with a window, the pages of a sequence's first 64 tokens are among them, and in the
    /// latter its newest pages, those of the window.
    pub pages: *const u32,
    /// How many each KV head of each sequence has, count times the cache's KV heads; NULL: all pages are attended.
    pub page_counts: *const usize,
}

impl Step {
    /// What attends.
    ///
    /// # Safety
    /// The step's lists are as it documents them.
    unsafe fn attend<'a>(&self, kv_heads: usize) -> Result<Attend<'a>, Failure> {
        // SAFETY: this function's contract.
        unsafe {
            Ok(Attend {
                layer: self.layer,
                pages: self.selected(kv_heads)?,
                q_lens: optional("q_lens", self.q_lens, self.count)?,
                scores: self.modifiers.scores(self.q_heads)?,
                ..Attend::new(self.q_heads, list("sequences", self.sequences, self.count)?)
            })
        }
    }
}

impl Step {
    /// The selected pages, if there are any.
    ///
    /// # Safety
    /// The step's lists are as it documents them.
    unsafe fn selected<'a>(&self, kv_heads: usize) -> Result<Option<SelectedPages<'a>>, Failure> {
        let len = self.count.saturating_mul(kv_heads);
        // SAFETY: this function's contract.
        let counts = unsafe { optional("page_counts", self.page_counts, len) }?;
        let Some(counts) = counts else {
            return match self.pages.is_null() {
                true => Ok(None),
                false => Err(refused(
                    "page_counts is NULL beside pages; give one for each KV head of each sequence"
                        .to_owned(),
                )),
            };
        };
        let all = counts.iter().fold(0usize, |all, n| all.saturating_add(*n));
        // SAFETY: this function's contract: there are as many pages as are counted.
        let pages = unsafe { list("pages", self.pages, all) }?;
        Ok(Some(SelectedPages { pages, counts }))
    }
}

/// Attends, with rows in host memory, or on the device that the stream belongs to.
///
/// # Safety
/// Those of `attn_cache_attend`, or of `attn_cache_attend_on`.
unsafe fn attend(
    cache: *mut Cache,
    step: *const Step,
    rows: *const Rows,
    stream: Option<Stream>,
) -> Status {
    let work = |device: &attn::Device, session: &mut Session| {
        // SAFETY: this function's contract.
        let (step, rows) = unsafe { (config(step)?, config(rows)?) };
        // SAFETY: this function's contract.
        let at = unsafe { step.attend(session.config().num_kv_heads) }?;
        let memory = Memory::of(device, stream)?;
        let shape = (at.query_tokens(), step.q_heads, session.config().head_dim);
        let work = |rows: AttendRows<'_>| Ok(session.attend(&at, rows)?);
        // SAFETY: this function's contract.
        unsafe { with_rows(&rows, shape, memory, work) }
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
    // SAFETY: this function's contract.
    unsafe { attend(cache, step, rows, None) }
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
    let stream = Some(Stream::from_raw(stream));
    // SAFETY: this function's contract.
    unsafe { attend(cache, step, rows, stream) }
}

/// Waits for a cache's steps on the device.
///
/// # Safety
/// `cache` has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_cache_wait(cache: *mut Cache) -> Status {
    // SAFETY: this function's contract.
    unsafe { on_cache(cache, |_, session| Ok(session.wait()?)) }
}
