//! Pages in host memory that the caller owns: appended to by slots, attended through its page table, on the CPU.

use std::ffi::c_char;

use attn::{
    DecodeAttention, DecodeStep, Heads, KvFormat, KvSource, PageLayout, PagePool, PoolPages,
    Problem, backends::cpu::CpuBackend,
};

use crate::{
    append::NewTokens,
    arguments::{config, destroy, handle, list, list_mut, optional, place, text},
    modifiers::Modifiers,
    place::{Memory, with_rows},
    rows::{Rows, Tokens, head_dim, or},
    status::{Failure, Status, call},
};

/// What pages in host memory hold.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct HostPagesConfig {
    /// sizeof(attn_host_pages_config).
    pub struct_size: usize,
    /// A format without a window and without static scales, such as "int8", "int8/int4-w0", "int4-g1" and "bf16".
    pub format: *const c_char,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head's key and query.
    pub head_dim: usize,
    /// Elements of a value and of an output, where they are not head_dim; 0: head_dim.
    pub v_dim: usize,
    /// Tokens per page: 16, 32, 64 or 128; 0: 64.
    pub page_size: usize,
}

/// What reads and writes the caller's pages. It keeps no sequences, lengths or pages, and calls may run side by side.
pub struct HostPages {
    backend: CpuBackend,
    layout: PageLayout,
}

/// The sequences of a step over the caller's pages. The last query token of a sequence stands at its last token: append first.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct HostStep {
    /// sizeof(attn_host_step).
    pub struct_size: usize,
    /// Query heads: a multiple of the KV heads.
    pub q_heads: usize,
    /// Whole pages of attn_host_pages_page_bytes each, side by side.
    pub pool: *const u8,
    /// Bytes of the pool.
    pub pool_bytes: usize,
    /// Number of sequences.
    pub count: usize,
    /// `[count][page_table_stride]`: a sequence's pages in order. Entries behind its last token are not looked at.
    pub page_table: *const i32,
    /// Entries of a sequence in page_table.
    pub page_table_stride: usize,
    /// Tokens of each sequence, those of the step included.
    pub kv_lens: *const i32,
    /// Query tokens of each; NULL: one.
    pub q_lens: *const usize,
    /// What changes scores, but for ATTN_FAST.
    pub modifiers: Modifiers,
}

impl HostStep {
    /// The step's problem, and its page table: a negative page is none of the pool, which is said of the number that it is without a sign.
    ///
    /// # Safety
    /// The step's lists are as it documents them.
    unsafe fn problem(&self, layout: &PageLayout) -> Result<(Problem, Vec<u32>), Failure> {
        let entries = self.count.saturating_mul(self.page_table_stride);
        // SAFETY: this function's contract.
        let (lens, table, q_lens, scores) = unsafe {
            (
                list("kv_lens", self.kv_lens, self.count)?,
                list("page_table", self.page_table, entries)?,
                optional("q_lens", self.q_lens, self.count)?,
                self.modifiers.scores(self.q_heads)?,
            )
        };
        let lens: Vec<usize> = lens
            .iter()
            .map(|len| usize::try_from(*len))
            .collect::<Result<_, _>>()
            .map_err(|_| {
                let sentence = "kv_lens has a negative number; a sequence has 0 tokens or more";
                Failure::new(Status::Parameter, sentence.to_owned())
            })?;
        let heads = Heads::new(self.q_heads, layout.num_kv_heads(), layout.head_dim());
        let q_lens = q_lens.map_or_else(|| vec![1; self.count], <[usize]>::to_vec);
        let problem = Problem::new(heads, lens).q_lens(q_lens).scores(scores);
        let table = table.iter().map(|page| page.cast_unsigned()).collect();
        Ok((problem, table))
    }
}

/// Describes pages in host memory; of a pool, every page has attn_host_pages_page_bytes.
///
/// # Safety
/// `config` is as its type documents it; `pages` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_host_pages_create(
    config: *const HostPagesConfig,
    pages: *mut *mut HostPages,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (out, given) = unsafe { (place("pages", pages)?, self::config(config)?) };
        // SAFETY: this function's contract.
        let format: KvFormat = unsafe { text("format", given.format) }?.parse()?;
        let (dims, page_size) = (
            head_dim(given.head_dim, given.v_dim),
            or(given.page_size, 64),
        );
        let layout = PageLayout::new(format, dims, page_size, given.kv_heads)?;
        // An empty pool of it: formats that need more than their pages are refused now.
        PagePool::new(&layout, &[], &[], &[])?;
        let backend = CpuBackend::open().map_err(attn::Error::from)?;
        *out = Box::into_raw(Box::new(HostPages { backend, layout }));
        Ok(())
    })
}

/// Forgets the description; the caller's pages stay. NULL is none.
///
/// # Safety
/// `pages` is NULL or was created and has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_host_pages_destroy(pages: *mut HostPages) {
    // SAFETY: a handle of `attn_host_pages_create`'s by contract, used for the last time.
    unsafe { destroy(pages) }
}

/// Bytes of a page: K, V and their scales, of all KV heads. 0 for NULL.
///
/// # Safety
/// `pages` is NULL or has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_host_pages_page_bytes(pages: *const HostPages) -> usize {
    // SAFETY: this function's contract.
    unsafe { handle("pages", pages) }.map_or(0, |pages| pages.layout.page_bytes())
}

/// Appends tokens in host memory that bring their places, page · page_size + token of the page: any number, of any sequences. A negative slot skips its
/// token, whatever it holds; of tokens with the same slot, the last one stays.
///
/// # Safety
/// `pages` has not been destroyed; `pool` has `pool_bytes`, which nothing else uses meanwhile; `slots` has `count` numbers; `tokens` has as many tokens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_host_pages_append_slots(
    pages: *const HostPages,
    pool: *mut u8,
    pool_bytes: usize,
    slots: *const i64,
    count: usize,
    tokens: *const Tokens,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (pages, tokens) = unsafe { (handle("pages", pages)?, config(tokens)?) };
        tokens.without_rotary()?;
        // SAFETY: this function's contract.
        let (slots, pool) = unsafe {
            (
                list("slots", slots, count)?,
                list_mut("pool", pool, pool_bytes)?,
            )
        };
        // SAFETY: this function's contract.
        let new = unsafe { NewTokens::new(&tokens, &pages.layout, count, Memory::Host) }?;
        let [k, v] = new.rows()?;
        Ok(pages
            .backend
            .append_slots(&PoolPages::new(&pages.layout)?, pool, slots, k, v, None)?)
    })
}

/// Attends over the caller's pages, with rows in host memory. The bits are those of the same tokens in a cache.
///
/// # Safety
/// `pages` has not been destroyed; `step` and `rows` are as their types document them, with rows for all query tokens; nothing writes the pool meanwhile, and
/// outputs overlap nothing else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_host_pages_attend(
    pages: *const HostPages,
    step: *const HostStep,
    rows: *const Rows,
) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let (pages, step, rows) =
            unsafe { (handle("pages", pages)?, config(step)?, config(rows)?) };
        // SAFETY: this function's contract.
        let pool = unsafe { list("pool", step.pool, step.pool_bytes) }?;
        // SAFETY: this function's contract.
        let (problem, table) = unsafe { step.problem(&pages.layout) }?;
        let pool = PagePool::new(&pages.layout, pool, &table, &problem.kv_lens)?;
        let plan = pages.backend.plan(&problem, pages.layout.format())?;
        let tokens: usize = problem.q_lens.iter().sum();
        let shape = (tokens, problem.num_q_heads, problem.head_dim);
        let attend = |rows: attn::AttendRows<'_>| {
            let mut step = DecodeStep::new(&plan, rows.q, KvSource::Pool(&pool), rows.out)?;
            if let Some(lse) = rows.lse {
                step = step.with_lse(lse.into_packed_f32("lse", [tokens, shape.1, 1])?)?;
            }
            Ok(pages.backend.decode(&mut step)?)
        };
        // SAFETY: this function's contract.
        unsafe { with_rows(&rows, shape, Memory::Host, attend) }
    })
}
