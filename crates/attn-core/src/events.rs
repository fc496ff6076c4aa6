//! Events and spans for subscribers of [`tracing`](https://docs.rs/tracing): their targets and fields.
//!
//! Without a subscriber all is silent, and a call costs a load and a comparison. Events are at level `debug`, but for the choice of a backend, which is
//! at `info`, and for numbers that saturate and keys with outlier channels, at `warn`; steps have spans at level `trace` alone. Targets, messages and fields are part of the interface; more may come.
//!
//! | target | message | fields |
//! |---|---|---|
//! | [`BACKEND`] | `chosen`, at `info` | `backend`, `device`, `detail` |
//! | | `refused`: absent, or a program on the CPU that was not named | `backend`, `reason` |
//! | [`KERNEL`] | `loaded`: at the first step or plan that needs it | `backend`, `kernel`, `arch`, `origin` (`embedded`, `cached`, `compiled`), `ms` |
//! | [`CACHE`] | `pool allocated`, `pool grown` | `pages`, `bytes` of all pages in all layers, `format`, `sequences` |
//! | | `saturated`, at `warn`: the first numbers beyond the range of the cache's format were stored as its end ([`KvCache::saturated`](crate::KvCache::saturated)) | `values`, `layer`, `format`, `advice` |
//! | | `outlier channels`, at `warn`: keys that the cache's format stores badly, for the first time ([`KvCache::key_outliers`](crate::KvCache::key_outliers)) | `ratio`, `layer`, `format`, `advice` |
//! | | `pages short`: a call was refused with [`Error::CacheFull`](crate::Error::CacheFull) | `needed`, `free`, `total` |
//! | [`PLAN`] | `prepared`: each plan that is made; [`Recent`](crate::Recent) ones that serve again are not | `backend`, `format`, `sequences`, `query_tokens`, `longest` |
//! | [`STEP`] | spans `append`, of a layer's write too, and `attend`, at `trace` | `sequences`, `tokens`; `backend`, `sequences`, `query_tokens` |

use std::time::Instant;

use tracing::span::EnteredSpan;

use crate::{cache_config::CacheConfig, error::Unsupported, format::KvFormat, problem::Problem};

/// Which backend is used, and why others are not.
pub const BACKEND: &str = "attn::backend";
/// Kernels that are loaded or compiled.
pub const KERNEL: &str = "attn::kernel";
/// Pools of pages, and pages that are short.
pub const CACHE: &str = "attn::cache";
/// Plans that are made.
pub const PLAN: &str = "attn::plan";
/// Steps: a span for each.
pub const STEP: &str = "attn::step";

/// For who selects backends: this one is used.
pub fn chosen(backend: &str, device: &str, detail: &str) {
    tracing::info!(target: BACKEND, backend, device, detail, "chosen");
}

/// For who selects backends: this one is absent, or not taken.
pub fn refused(backend: &str, reason: &Unsupported) {
    tracing::debug!(target: BACKEND, backend, %reason, "refused");
}

/// For backends: a kernel was loaded for a device of architecture `arch`, from `origin`, which began at `start`.
pub fn loaded(backend: &str, kernel: &str, arch: &str, origin: &str, start: Instant) {
    let ms = start.elapsed().as_secs_f64() * 1e3;
    tracing::debug!(target: KERNEL, backend, kernel, arch, origin, ms, "loaded");
}

/// A pool was `allocated` or `grown`; a page has so many bytes.
pub(crate) fn pool(what: &str, config: &CacheConfig, page_bytes: usize) {
    let (pages, sequences) = (config.num_pages, config.num_sequences);
    let bytes = pages.saturating_mul(page_bytes);
    let (bytes, format) = (bytes.saturating_mul(config.layers), config.format);
    tracing::debug!(target: CACHE, pages, bytes, %format, sequences, "pool {what}");
}

/// The first numbers of a cache that saturate.
pub(crate) fn saturated(values: u64, layer: usize, format: KvFormat) {
    let advice = format.saturation_notice(values);
    tracing::warn!(target: CACHE, values, layer, %format, advice, "saturated");
}

/// Keys of a cache have outlier channels for the first time.
pub(crate) fn outliers(ratio: f32, layer: usize, format: KvFormat) {
    let advice = format.outlier_notice(ratio);
    tracing::warn!(target: CACHE, ratio, layer, %format, advice, "outlier channels");
}

/// A call needs more pages than are free.
pub(crate) fn short(needed: usize, free: usize, total: usize) {
    tracing::debug!(target: CACHE, needed, free, total, "pages short");
}

/// For backends: a plan was made that is no [`Plan`](crate::Plan), which tells for itself.
pub fn prepared(backend: &str, problem: &Problem, format: KvFormat) {
    tracing::debug!(
        target: PLAN,
        backend,
        %format,
        sequences = problem.batch(),
        query_tokens = problem.query_tokens(),
        longest = problem.kv_lens.iter().max(),
        "prepared"
    );
}

/// The span of a step, which ends when this is dropped.
#[must_use]
pub struct Step(#[expect(dead_code, reason = "held for its end")] EnteredSpan);

/// For backends: the span of attention that does not go through [`DecodeAttention::decode`](crate::DecodeAttention::decode), which has it.
#[inline]
pub fn attend(backend: &str, problem: &Problem) -> Step {
    let span = tracing::trace_span!(
        target: STEP,
        "attend",
        backend,
        sequences = problem.batch(),
        query_tokens = problem.query_tokens(),
    );
    Step(span.entered())
}

/// The span of an append.
#[inline]
pub(crate) fn append(sequences: usize, tokens: usize) -> Step {
    Step(tracing::trace_span!(target: STEP, "append", sequences, tokens).entered())
}
