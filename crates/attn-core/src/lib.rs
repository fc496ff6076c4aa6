//! The definitions that all backends of `attn` share: the problem, the cache, its formats, the errors.
//!
//! For query head `h` of sequence `b`, KV head `g = h / heads_per_kv`, query token `i`:
//!
//! ```text
//! s[t]   = softmax_scale · Σ_d q[b,i,h,d] · K[b,g,t,d]   (+ soft cap, ALiBi, masks)
//! out[d] = Σ_t softmax(s)[t] · V[b,g,t,d]
//! lse    = ln Σ_t exp(s[t])
//! ```
//!
//! A sink of the query head is one more logit, without a V, in softmax's sum and in `lse`.
//!
//! K and V are the dequantized cache. Reading order: [`format`](mod@format) (what is stored), [`layout`] (where),
//! [`quant`] (how it is rounded), [`cache`] (which sequence owns which page), [`convert`] (other engines' caches), [`problem`], [`backend`].
//! `docs/arithmetic.md` defines the bits of the answer; [`arithmetic`] and [`grid`] hold its scalar functions, [`segments`] its order.
#![forbid(unsafe_code)]

pub mod arithmetic;
mod attend;
pub mod backend;
mod backend_id;
pub mod cache;
mod cache_config;
pub mod centres;
pub mod convert;
mod device_rows;
mod device_steps;
mod elements;
pub mod error;
pub mod events;
pub mod format;
mod format_names;
pub mod grid;
mod groups;
mod head_dim;
pub mod host_pages;
#[doc(hidden)]
pub mod internals;
pub mod layout;
mod page_allocator;
mod page_bytes;
mod page_pool;
mod plan;
pub mod problem;
pub mod process;
pub mod quant;
mod query_block;
mod recent;
pub mod rotary;
pub mod rotation;
mod row_layout;
mod row_memory;
pub mod row_state;
mod rows;
mod score_modifiers;
pub mod segments;
mod settings;
mod span_states;
pub mod state;
mod step;
mod tensor_scales;
pub mod view;
mod visible;
mod wide_rows;

/// The bytes of every format.
#[doc = include_str!("../FORMATS.md")]
pub mod formats {}

pub use attend::{Attend, Attended};
pub use backend::{DecodeAttention, DeviceInfo};
pub use backend_id::BackendId;
pub use cache::{
    Append, CacheAccess, CacheLayer, CachedSequences, CheckpointPage, FirstTile, KvCache,
    PageStore, PageTable, SelectedPages, SequenceImage, TokenWrite,
};
pub use cache_config::{CacheBuilder, CacheConfig};
pub use device_rows::{DeviceMemory, DeviceRows, Dtype, all_on_device};
pub use device_steps::{DeviceResults, DeviceSteps};
pub use elements::{Elements, ElementsMut};
pub use error::{ElementIndex, Error, ErrorKind, Given, TruncateLimit, Unsupported};
pub use format::{Int8Scale, KvFormat, Scheme, Window};
pub use groups::Groups;
pub use head_dim::{HEAD_DIMS, HeadDim, MAX_HEAD_DIM};
pub use host_pages::{HostPages, HostStore};
pub use layout::PageLayout;
pub use page_pool::{PagePool, PoolPages, SlotAppend, SlotCentres};
pub use plan::{KEPT_PLANS, Plan};
pub use problem::{Heads, Problem};
pub use query_block::QueryBlock;
pub use recent::Recent;
pub use rotary::{Rotary, RotaryScaling, RotaryStyle, RotaryTable};
pub use rows::{Rows, RowsMut};
pub use score_modifiers::{Arithmetic, ScoreModifiers};
pub use settings::Settings;
pub use span_states::SpanStates;
pub use state::AttnState;
pub use step::{DecodeStep, KvMemory, KvSource, SpansStep, StepInputs, StepOutputs};
pub use view::{KvView, StridedRows};
pub use wide_rows::{PackedRows, RowPlaces, WideRows, WideRowsMut};
