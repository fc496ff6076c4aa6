//! Decode attention over a quantized KV cache: pick a backend, keep a cache on it, attend.
//!
//! ```
//! use attn::{CacheConfig, DecodeStep, Heads, KvFormat, KvSource, Problem};
//!
//! let backend = attn::select(None)?.backend;
//! let heads = Heads::new(4, 1, 64);
//! let config = CacheConfig::builder(KvFormat::INT8, heads).max_len(1024).build();
//! let mut cache = backend.create_cache(&config)?;
//! // Planned once, for lengths up to the longest; the first step that the kernels are compiled for takes longer.
//! let plan = backend.plan(&Problem::new(heads, [1024]), KvFormat::INT8)?;
//! cache.append(0, &[0.5; 64], &[2.0; 64])?;
//! let (q, mut out) = ([1.0; 4 * 64], [0.0; 4 * 64]);
//! let mut step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)?;
//! backend.decode(&mut step)?;
//! assert!((out[0] - 2.0).abs() < 0.02);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

use std::fmt;

mod device;
mod session;
mod session_rows;

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub use attn_core::{
    Append, Arithmetic, Attend, Attended, AttnState, BackendId, CacheAccess, CacheBuilder,
    CacheConfig, CacheLayer, CachedSequences, CheckpointPage, DecodeAttention, DecodeStep,
    DeviceInfo, DeviceMemory, DeviceResults, DeviceRows, DeviceSteps, Dtype, ElementIndex,
    Elements, ElementsMut, Error, ErrorKind, FirstTile, Given, HEAD_DIMS, HeadDim, Heads,
    HostPages, HostStore, Int8Scale, KvCache, KvFormat, KvMemory, KvSource, KvView, MAX_HEAD_DIM,
    PackedRows, PageLayout, PagePool, PageStore, PageTable, Plan, PoolPages, Problem, Recent,
    Rotary, RotaryScaling, RotaryStyle, RotaryTable, RowPlaces, Rows, RowsMut, Scheme,
    ScoreModifiers, SelectedPages, SequenceImage, SlotAppend, SlotCentres, SpanStates, SpansStep,
    StepInputs, StepOutputs, StridedRows, TokenWrite, TruncateLimit, Unsupported, WideRows,
    WideRowsMut, Window, arithmetic, cache, centres, convert, events, format, formats, layout,
    problem, process, quant, rotary,
};

pub use device::{Device, DeviceName};
pub use session::Session;
pub use session_rows::{AttendRows, SpanRows};

/// The backends, each under the feature of its name.
pub mod backends {
    #[cfg(feature = "cpu")]
    pub use attn_cpu as cpu;
    #[cfg(feature = "cuda-unversioned")]
    pub use attn_cuda as cuda;
    #[cfg(feature = "wgpu")]
    pub use attn_wgpu as wgpu;
}

/// Opens one backend.
///
/// # Errors
/// [`Unsupported::Absent`] with the reason and the next step, also where this build leaves the backend's feature out.
///
/// ```
/// use attn::{BackendId, DecodeAttention};
///
/// let cpu = attn::open(BackendId::Cpu)?;
/// assert_eq!(cpu.device().backend, "cpu");
/// # Ok::<(), attn::Unsupported>(())
/// ```
pub fn open(id: BackendId) -> Result<Box<dyn DecodeAttention>, Unsupported> {
    let opened = open_backend(id);
    match &opened {
        Ok(backend) => tell_chosen(&**backend),
        Err(reason) => events::refused(id.name(), reason),
    }
    opened
}

/// Tells subscribers that a backend is used.
fn tell_chosen(backend: &dyn DecodeAttention) {
    let info = backend.device();
    events::chosen(info.backend, &info.name, &info.detail);
}

/// Opens a backend without logging the choice.
fn open_backend(id: BackendId) -> Result<Box<dyn DecodeAttention>, Unsupported> {
    match id {
        #[cfg(feature = "cuda-unversioned")]
        BackendId::Cuda => attn_cuda::open(),
        #[cfg(feature = "wgpu")]
        BackendId::Wgpu => attn_wgpu::open(),
        #[cfg(feature = "cpu")]
        BackendId::Cpu => attn_cpu::open(),
        #[allow(
            unreachable_patterns,
            reason = "with every feature, only backends that a later version of core names"
        )]
        _ => Err(Unsupported::NotBuilt { backend: id.name() }),
    }
}

/// What [`select`] chose, and why not the others.
#[non_exhaustive]
pub struct Selection {
    /// The backend.
    pub backend: Box<dyn DecodeAttention>,
    /// Its name.
    pub id: BackendId,
    /// The backends tried before it, with their reasons.
    pub refused: Vec<(BackendId, Unsupported)>,
}

impl Selection {
    /// A backend that was opened without trying another.
    #[must_use]
    pub fn new(id: BackendId, backend: Box<dyn DecodeAttention>) -> Self {
        Selection {
            backend,
            id,
            refused: Vec::new(),
        }
    }
}

impl fmt::Debug for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Selection({}, refused: {:?})", self.id, self.refused)
    }
}

/// Opens `wanted`, else the one that `ATTN_BACKEND` names, else the best present (an emulated device is not). A backend that was named is never replaced by another.
///
/// # Errors
/// [`Error::Unsupported`] if the named backend is absent; [`Error::Parameter`] if `ATTN_BACKEND` names none, or is not UTF-8.
///
/// ```
/// let selection = attn::select(None)?;
/// for (id, reason) in &selection.refused {
///     println!("{id} is not used: {reason}");
/// }
/// println!("{}: {}", selection.id, selection.backend.device().name);
/// # Ok::<(), attn::Error>(())
/// ```
pub fn select(wanted: Option<BackendId>) -> Result<Selection, Error> {
    let named = match wanted {
        Some(id) => Some(id.into()),
        None => DeviceName::from_env()?,
    };
    let (device, refused) = device::best(named)?;
    Ok(Selection {
        id: device.name().id,
        backend: device.into_backend(),
        refused,
    })
}
