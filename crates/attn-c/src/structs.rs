//! The names in C of all structs that callers fill.

use std::mem::offset_of;

use crate::{
    arguments::Config,
    cache::CacheConfig,
    host_pages::{HostPagesConfig, HostStep},
    launch_args::{Buffers, Merge, PageCopies, Pages, Ranges, SpanMerge, Spans},
    paged_rows::PagedRows,
    plan::PlanConfig,
    rows::{Rotary, Rows, Tokens},
    step::Step,
    transfer::TransferConfig,
};

/// Gives types their names in C. Their first field is `struct_size`, a `usize`, which the compiler sees here.
macro_rules! structs {
    ($($name:literal: $type:ty),* $(,)?) => { $(
        const _: fn(&$type) -> usize = |of| of.struct_size;
        const _: () = assert!(offset_of!($type, struct_size) == 0);
        // SAFETY: `struct_size` is first, as asserted above; the type is in attn.h, and so `repr(C)`.
        unsafe impl Config for $type {
            const NAME: &'static str = $name;
        }
    )* };
}

structs! {
    "attn_buffers": Buffers,
    "attn_cache_config": CacheConfig,
    "attn_host_pages_config": HostPagesConfig,
    "attn_host_step": HostStep,
    "attn_merge": Merge,
    "attn_page_copies": PageCopies,
    "attn_paged_rows": PagedRows,
    "attn_pages": Pages,
    "attn_plan_config": PlanConfig,
    "attn_ranges": Ranges,
    "attn_rotary": Rotary,
    "attn_rows": Rows,
    "attn_span_merge": SpanMerge,
    "attn_spans": Spans,
    "attn_step": Step,
    "attn_tokens": Tokens,
    "attn_transfer_config": TransferConfig,
}
