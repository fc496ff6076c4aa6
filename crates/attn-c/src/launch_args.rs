//! What launches over the caller's device memory take: C's structs, and how each becomes the library's. A field that a launch does not get fails the test
//! `every_field_reaches_its_launch`; one that the library's struct has and C's has not fails to compile.

use std::ffi::c_void;

use attn::{
    KvFormat, PageLayout, Scheme,
    backends::cuda::native::{
        self, CopyPagesArgs, DeviceAddress, ExportArgs, KvRows, MergeSpansArgs, MergeStatesArgs,
        Op, PagedSequences, Prepared, SpansArgs, Stream,
    },
};

use crate::{
    rows::{on_device, or},
    status::{Failure, Status},
};

/// Where the sequences' tokens lie. All addresses are of device memory, aligned to 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Pages {
    /// sizeof(attn_pages).
    pub struct_size: usize,
    /// The pool: num_pages pages, aligned to 16 bytes.
    pub pool: *mut c_void,
    /// Pages of the pool.
    pub num_pages: usize,
    /// int32 `[count][page_table_stride]`: a sequence's pages in order.
    pub page_table: *const i32,
    /// Entries of a sequence in page_table: at least max_tokens / page_size, rounded up.
    pub page_table_stride: usize,
    /// int32 `[count][residual_slots]` for formats that keep some tokens finer: the residual page of a sequence's page i at i below first =
    /// first_residual_pages, else at first + i % (residual_slots - first). Else NULL.
    pub residual_pages: *const i32,
    /// int32 `[count]`: the tokens of each sequence, new ones included.
    pub kv_lens: *const i32,
    /// float `[kv_heads]` for fp8 and int8-tensor; else NULL.
    pub k_scales: *const f32,
    /// As `k_scales`, for V.
    pub v_scales: *const f32,
    /// Bytes from one page of the pool to the next, a multiple of 16; 0: attn_plan_info.page_bytes. More where pages are padded, or those of other
    /// layers lie between.
    pub page_stride: usize,
}

impl Pages {
    /// The pool, whose pages have this layout.
    pub(crate) fn pool(&self, layout: &PageLayout) -> Result<native::Pages, Failure> {
        Ok(native::Pages {
            at: given("pool", self.pool)?,
            stride: or(self.page_stride, layout.page_bytes()),
            num_pages: self.num_pages,
        })
    }

    /// The sequences, in pages of this layout with so many residual pages each.
    pub(crate) fn sequences(
        &self,
        layout: &PageLayout,
        residual_slots: usize,
    ) -> Result<PagedSequences, Failure> {
        Ok(PagedSequences {
            pool: self.pool(layout)?,
            page_table: given("page_table", self.page_table)?,
            page_table_stride: self.page_table_stride,
            residual_pages: address(self.residual_pages),
            residual_slots,
            kv_lens: given("kv_lens", self.kv_lens)?,
            tensor_scales: tensor_scales([self.k_scales, self.v_scales], layout.format())?,
        })
    }
}

/// A plan's own memory on the device, which the caller allocates and fills.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Buffers {
    /// sizeof(attn_buffers).
    pub struct_size: usize,
    /// attn_plan_info.workspace_bytes bytes, aligned to 256, of which the first zeroed_bytes are zero. Launches that share it do not overlap.
    pub workspace: *mut c_void,
    /// attn_plan_info.scratch_bytes bytes, aligned to 256, that launches of any plans may share, one after another; of the workspace only the first
    /// zeroed_bytes are used then. NULL: they are the workspace's.
    pub scratch: *mut c_void,
    /// What attn_plan_query_blocks gives, in device memory, or what attn_plan_list_query_blocks has listed; NULL where that is nothing.
    pub query_blocks: *const c_void,
    /// What attn_plan_alibi_slopes gives, in device memory; NULL without.
    pub alibi_slopes: *const f32,
    /// float `[q_heads]`: the sinks; NULL without.
    pub sinks: *const f32,
}

/// Where attn_plan_attend_spans leaves the states of a shard's spans. Addresses are of device memory, aligned to 16 bytes; rows are query tokens times
/// query heads, sequence after sequence.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Spans {
    /// sizeof(attn_spans).
    pub struct_size: usize,
    /// int32 `[count]`: tokens that lie in shards ahead of those of attn_pages.kv_lens, multiples of 1024. NULL: the shard is each sequence's first.
    pub tokens_before: *const i32,
    /// int32 `[count]`: tokens that follow those of attn_pages.kv_lens in other shards; query tokens are the last of all. NULL: none follow.
    pub tokens_after: *const i32,
    /// float `[spans][rows][2]`: maximum, -inf where a row sees no token of a span, and sum.
    pub max_sums: *mut f32,
    /// float `[spans][rows][v_dim]`; not written where a row sees no token.
    pub o: *mut f32,
}

impl Spans {
    /// As the launch takes them.
    pub(crate) fn args(&self) -> Result<SpansArgs, Failure> {
        Ok(SpansArgs {
            tokens_before: address(self.tokens_before),
            tokens_after: address(self.tokens_after),
            max_sums: given("max_sums", self.max_sums)?,
            o: given("o", self.o)?,
        })
    }
}

/// Ranges of tokens, one of each sequence of attn_pages, and where their rows go. All addresses are of device memory, aligned to 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Ranges {
    /// sizeof(attn_ranges).
    pub struct_size: usize,
    /// Rows of K `[token][kv_heads][head_dim]`, those of the first range, then those of the next; NULL: V alone.
    pub k: *mut c_void,
    /// Rows of V, as those of K; NULL: K alone.
    pub v: *mut c_void,
    /// An attn_dtype, of k and v.
    pub dtype: u32,
    /// Elements from one token of K to the next, a multiple of 8; 0: kv_heads·head_dim.
    pub k_token_stride: usize,
    /// Elements from one token of V to the next, a multiple of 8; 0: kv_heads·v_dim.
    pub v_token_stride: usize,
    /// int32 `[count + 1]`: the first row of each range, then the end of the last.
    pub row_starts: *const i32,
    /// int32 `[count]`: the first token of each range; NULL: the sequences' first ones.
    pub first_tokens: *const i32,
    /// Sequences.
    pub count: usize,
    /// No range has more tokens.
    pub max_tokens: usize,
}

impl Ranges {
    /// The export of these ranges of sequences in pages of this layout.
    pub(crate) fn args(
        &self,
        sequences: PagedSequences,
        layout: &PageLayout,
    ) -> Result<ExportArgs, Failure> {
        let (heads, dim) = (layout.num_kv_heads(), layout.head_dim());
        Ok(ExportArgs {
            rows: KvRows {
                k: address(self.k),
                v: address(self.v),
                dtype: on_device(self.dtype)?,
                k_token_stride: or(self.k_token_stride, heads * dim.k),
                v_token_stride: or(self.v_token_stride, heads * dim.v),
            },
            sequences,
            row_starts: given("row_starts", self.row_starts)?,
            first_tokens: address(self.first_tokens),
            batch: self.count,
            max_tokens: self.max_tokens,
        })
    }
}

/// Copies of pages: inside a pool, between pools, or to and from pinned host memory that the device can address (cudaHostAlloc).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PageCopies {
    /// sizeof(attn_page_copies).
    pub struct_size: usize,
    /// The pages that are read.
    pub from: *const c_void,
    /// Their number.
    pub from_pages: usize,
    /// Bytes from one of them to the next, a multiple of 16; 0: they lie side by side.
    pub from_stride: usize,
    /// The pages that are written.
    pub to: *mut c_void,
    /// Their number.
    pub to_pages: usize,
    /// Bytes from one of them to the next; 0: they lie side by side.
    pub to_stride: usize,
    /// int64 `[count][2]` in device memory: a page that is read, and the one that gets its bytes; a negative number skips the pair.
    pub pairs: *const i64,
    /// Pairs.
    pub count: usize,
}

impl PageCopies {
    /// The copies of pages of this layout.
    pub(crate) fn args(&self, layout: &PageLayout) -> Result<CopyPagesArgs, Failure> {
        let page_bytes = layout.page_bytes();
        Ok(CopyPagesArgs {
            from: native::Pages {
                at: given("from", self.from)?,
                stride: or(self.from_stride, page_bytes),
                num_pages: self.from_pages,
            },
            to: native::Pages {
                at: given("to", self.to)?,
                stride: or(self.to_stride, page_bytes),
                num_pages: self.to_pages,
            },
            page_bytes,
            pairs: given("pairs", self.pairs)?,
            num_pairs: self.count,
        })
    }
}

/// Results of the same query rows over disjoint tokens, in their order. All addresses are of device memory, aligned to 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Merge {
    /// sizeof(attn_merge).
    pub struct_size: usize,
    /// Outputs `[states][rows][v_dim]`.
    pub outs: *const c_void,
    /// float `[states][rows]`: log-sum-exps, -inf where a state saw no token of a row.
    pub lses: *const f32,
    /// An attn_dtype, of outs.
    pub dtype: u32,
    /// Elements from one state's outputs to the next one's, a multiple of 4; 0: rows·v_dim.
    pub out_stride: usize,
    /// Elements from one state's log-sum-exps to the next one's; 0: rows.
    pub lse_stride: usize,
    /// Merged outputs `[rows][v_dim]`; may be those of the first state.
    pub out: *mut c_void,
    /// An attn_dtype, of out.
    pub out_dtype: u32,
    /// float `[rows]`: merged log-sum-exps; NULL: none.
    pub lse: *mut f32,
    /// Results to merge.
    pub states: usize,
    /// Rows of each: query tokens times query heads.
    pub rows: usize,
}

impl Merge {
    /// The merge of rows of a head's elements.
    pub(crate) fn args(&self, layout: &PageLayout) -> Result<MergeStatesArgs, Failure> {
        let head_dim = layout.head_dim().v;
        Ok(MergeStatesArgs {
            outs: given("outs", self.outs)?,
            lses: given("lses", self.lses)?,
            out_stride: or(self.out_stride, self.rows.saturating_mul(head_dim)),
            lse_stride: or(self.lse_stride, self.rows),
            in_dtype: on_device(self.dtype)?,
            out: given("out", self.out)?,
            out_dtype: on_device(self.out_dtype)?,
            lse: address(self.lse),
            states: self.states,
            rows: self.rows,
            head_dim,
        })
    }
}

/// States of spans of all shards, in the order of their tokens, such as an all-gather of what attn_plan_attend_spans leaves. All addresses are of device
/// memory, aligned to 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SpanMerge {
    /// sizeof(attn_span_merge).
    pub struct_size: usize,
    /// float `[states][rows][2]`.
    pub max_sums: *const f32,
    /// float `[states][rows][v_dim]`.
    pub o: *const f32,
    /// Spans of all shards together.
    pub states: usize,
    /// Rows: query tokens times query heads.
    pub rows: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Outputs `[rows][v_dim]`.
    pub out: *mut c_void,
    /// An attn_dtype, of out.
    pub dtype: u32,
    /// float `[rows]`: log-sum-exps; NULL: none.
    pub lse: *mut f32,
    /// float `[q_heads]`: sinks; NULL: none.
    pub sinks: *const f32,
    /// float `[kv_heads]` for fp8 and int8-tensor; else NULL.
    pub v_scales: *const f32,
}

impl SpanMerge {
    /// The merge of rows of a head's elements.
    pub(crate) fn args(&self, layout: &PageLayout) -> Result<MergeSpansArgs, Failure> {
        Ok(MergeSpansArgs {
            max_sums: given("max_sums", self.max_sums)?,
            o: given("o", self.o)?,
            states: self.states,
            rows_apart: self.rows,
            rows: self.rows,
            num_q_heads: self.q_heads,
            num_kv_heads: layout.num_kv_heads(),
            out: given("out", self.out)?,
            dtype: on_device(self.dtype)?,
            lse: address(self.lse),
            sinks: address(self.sinks),
            v_tensor_scales: scales("v_scales", self.v_scales, layout.format().v)?,
        })
    }
}

/// Enqueues a launch on `stream`, a CUstream or cudaStream_t of the device's primary context, which is current.
///
/// # Safety
/// The stream is alive; the op's addresses are device memory as its type documents, until the work has run.
pub(crate) unsafe fn enqueue<O: Op>(
    device: &attn::Device,
    prepared: &Prepared<O>,
    op: &O,
    stream: *mut c_void,
) -> Result<(), Failure> {
    let gpu = device.cuda("launch")?;
    // SAFETY: this function's contract.
    Ok(unsafe { gpu.enqueue(prepared, Stream::from_raw(stream), op) }?)
}

pub(crate) fn address<T>(pointer: *const T) -> DeviceAddress {
    DeviceAddress::new(pointer as u64)
}

/// Refuses NULL where the launch reads.
pub(crate) fn given<T>(what: &str, pointer: *const T) -> Result<DeviceAddress, Failure> {
    if pointer.is_null() {
        return Err(Failure::new(Status::Parameter, format!("{what} is NULL")));
    }
    Ok(address(pointer))
}

/// Static scales per KV head, where the scheme has them.
pub(crate) fn scales(
    what: &str,
    scales: *const f32,
    scheme: Scheme,
) -> Result<DeviceAddress, Failure> {
    match scheme.has_tensor_scale() {
        true => given(what, scales),
        false => Ok(DeviceAddress::NULL),
    }
}

/// Static scales of K and of V, where their schemes have them.
pub(crate) fn tensor_scales(
    [k, v]: [*const f32; 2],
    format: KvFormat,
) -> Result<[DeviceAddress; 2], Failure> {
    Ok([
        scales("k_scales", k, format.k)?,
        scales("v_scales", v, format.v)?,
    ])
}

#[cfg(test)]
mod tests {
    use std::{fmt::Debug, mem::offset_of, ptr};

    use super::*;
    use crate::{
        arguments::Config,
        paged_rows::PagedRows,
        rows::{Rotary, Tokens},
    };

    const AT: *mut c_void = 0x1000 as *mut c_void;

    /// Checks that a change of any field but `struct_size` and the one at `but` changes what is made of the struct, or is refused.
    fn every_field_matters<C: Config, A: Debug>(
        of: C,
        but: usize,
        args: impl Fn(C) -> Result<A, Failure>,
    ) {
        let said = |of| args(of).map(|args| format!("{args:?}"));
        let as_it_is = said(of).unwrap_or_else(|_| panic!("{} is refused", C::NAME));
        for word in 1..size_of::<C>() / 8 {
            let mut changed = of;
            // SAFETY: a word of `changed`, which holds numbers and pointers: every pattern of bits is a value of theirs.
            unsafe { *(&raw mut changed).cast::<u64>().add(word) ^= 1 };
            let is_same = said(changed).is_ok_and(|now| now == as_it_is);
            assert_eq!(is_same, 8 * word == but, "{} at {}", C::NAME, 8 * word);
        }
    }

    /// Pages of a format with residuals of K and a static scale of V.
    fn layout() -> PageLayout {
        PageLayout::new("int4/fp8".parse().expect("a format"), 128, 64, 2).expect("a layout")
    }

    fn pages() -> Pages {
        Pages {
            struct_size: size_of::<Pages>(),
            pool: AT,
            num_pages: 9,
            page_table: AT.cast(),
            page_table_stride: 4,
            residual_pages: AT.cast(),
            kv_lens: AT.cast(),
            k_scales: AT.cast(),
            v_scales: AT.cast(),
            page_stride: 1 << 20,
        }
    }

    #[test]
    fn every_field_reaches_its_launch() {
        let (layout, none) = (layout(), usize::MAX);
        let fp8 = PageLayout::new("fp8".parse().expect("a format"), 128, 64, 2);
        let fp8 = fp8.expect("a layout");
        every_field_matters(pages(), none, |pages| pages.sequences(&fp8, 4));
        let sequences = pages().sequences(&layout, 4).unwrap_or_else(|_| panic!());
        let ranges = Ranges {
            struct_size: 0,
            k: AT,
            v: AT,
            dtype: 0,
            k_token_stride: 256,
            v_token_stride: 256,
            row_starts: AT.cast(),
            first_tokens: AT.cast(),
            count: 3,
            max_tokens: 5,
        };
        every_field_matters(ranges, none, |ranges| ranges.args(sequences, &layout));
        let copies = PageCopies {
            struct_size: 0,
            from: AT,
            from_pages: 3,
            from_stride: 1 << 20,
            to: AT,
            to_pages: 4,
            to_stride: 1 << 20,
            pairs: AT.cast(),
            count: 5,
        };
        every_field_matters(copies, none, |copies| copies.args(&layout));
        let merge = Merge {
            struct_size: 0,
            outs: AT,
            lses: AT.cast(),
            dtype: 0,
            out_stride: 4096,
            lse_stride: 16,
            out: AT,
            out_dtype: 0,
            lse: AT.cast(),
            states: 2,
            rows: 8,
        };
        every_field_matters(merge, none, |merge| merge.args(&layout));
        let merge = SpanMerge {
            struct_size: 0,
            max_sums: AT.cast(),
            o: AT.cast(),
            states: 2,
            rows: 8,
            q_heads: 8,
            out: AT,
            dtype: 0,
            lse: AT.cast(),
            sinks: AT.cast(),
            v_scales: AT.cast(),
        };
        every_field_matters(merge, none, |merge| merge.args(&layout));
        let spans = Spans {
            struct_size: 0,
            tokens_before: AT.cast(),
            tokens_after: AT.cast(),
            max_sums: AT.cast(),
            o: AT.cast(),
        };
        every_field_matters(spans, none, |spans| spans.args());
    }

    #[test]
    fn every_field_of_rows_reaches_its_launch() {
        let tokens = Tokens {
            struct_size: 0,
            k: AT,
            v: AT,
            dtype: 0,
            k_token_stride: 256,
            v_token_stride: 256,
            k_head_stride: 128,
            v_head_stride: 128,
            rotary: ptr::null(),
        };
        // The rows of K and V alone; what rotates them is a struct of its own.
        let rotary = offset_of!(Tokens, rotary);
        let layout = PageLayout::new(KvFormat::INT8, 128, 64, 2).expect("a layout");
        every_field_matters(tokens, rotary, |tokens| tokens.on_device(&layout));
        let rotary = Rotary {
            struct_size: 0,
            cos_sin: AT,
            cos_sin_dtype: 0,
            num_positions: 9,
            rotary_dim: 64,
            interleaved: 0,
            positions: AT.cast(),
            q: AT,
            q_out: AT,
            q_token_stride: 2048,
            q_out_token_stride: 2048,
        };
        every_field_matters(rotary, usize::MAX, |rotary| rotary.args(8, 128));
        let rows = PagedRows {
            struct_size: 0,
            k: AT,
            v: AT,
            num_pages: 9,
            k_page_stride: 4096,
            k_token_stride: 256,
            k_head_stride: 128,
            v_page_stride: 4096,
            v_token_stride: 256,
            v_head_stride: 128,
            page_table: AT.cast(),
            page_table_stride: 4,
            kv_lens: AT.cast(),
            k_scales: AT.cast(),
            v_scales: AT.cast(),
        };
        let fp8: KvFormat = "fp8".parse().expect("a format");
        every_field_matters(rows, usize::MAX, |rows| rows.kv(fp8));
    }
}
