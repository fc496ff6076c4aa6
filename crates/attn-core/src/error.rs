//! Errors as values: which backend or check refused, the value given, the values allowed, and the next step.
//!
//! `docs/errors.md` shows every one of them as users read it.

mod given;
mod truncate_limit;
mod unsupported;

use crate::format::{KvFormat, Scheme};
use given::Count;
pub(crate) use given::Many;
pub use given::{ElementIndex, Given};
pub use truncate_limit::TruncateLimit;
pub use unsupported::Unsupported;

/// The reason why a call was refused. The cache and the outputs are unchanged, but for [`Error::StepLeftOpen`] and where [`Error::Device`] is said to
/// change them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape or parameter outside what the library defines; [`Error::parameter`] makes it.
    #[error("{what} is {given}; allowed: {allowed}")]
    Parameter {
        /// The parameter's name.
        what: &'static str,
        /// The value given.
        given: String,
        /// The values allowed, and the next step where it is not obvious.
        allowed: &'static str,
    },
    /// A slice of the wrong length.
    #[error("{what} must have {}, not {}", Many(*needed, "element"), Count(*given))]
    Length {
        /// The slice's name.
        what: &'static str,
        /// Elements given.
        given: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A format with static scales, and no scales.
    #[error(
        "{what} is missing: {scheme} stores numbers as multiples of static scales; give {}, one for each KV head of each layer: the largest magnitude to come, \
         divided by {}; scales of 1 (in Rust `unit_tensor_scales`) hold {}", Many(*needed, "scale"), scheme.largest_static_code().unwrap_or(1.0),
        held_at_scale_1(*scheme)
    )]
    MissingScales {
        /// `k_scales` or `v_scales`.
        what: &'static str,
        /// The scheme of that side.
        scheme: Scheme,
        /// Scales that it needs.
        needed: usize,
    },
    /// Static scales in another number than the format has.
    #[error("{what} has {}, but {scheme} {}", Many(*given, "scale"), needed_scales(*needed))]
    ScaleCount {
        /// `k_scales` or `v_scales`.
        what: &'static str,
        /// The scheme of that side.
        scheme: Scheme,
        /// Scales given.
        given: usize,
        /// Scales that the scheme needs: 0 for one without static scales.
        needed: usize,
    },
    /// Rows of another shape.
    #[error(
        "{what} has rows of the shape {given:?}; needed: {needed:?}, which is [tokens, heads, dim]"
    )]
    Shape {
        /// The name of the rows.
        what: &'static str,
        /// Their tokens, heads and dim.
        given: [usize; 3],
        /// Those that the call needs.
        needed: [usize; 3],
    },
    /// Rows in another memory, of another type, or at other places than the call takes.
    #[error("{what} {given}; needed: {needed}")]
    Rows {
        /// The name of the rows.
        what: &'static str,
        /// Where they are, or what they hold.
        given: String,
        /// What the call takes.
        needed: String,
    },
    /// NaN or infinity in K, V or Q, or in another list of numbers.
    #[error(
        "{what} is {value} at {at}; only finite numbers are taken: look for the layer that made it"
    )]
    NotFinite {
        /// The name of the numbers, such as `k`, `v` or `q`.
        what: &'static str,
        /// The first bad element.
        at: ElementIndex,
        /// The bad value.
        value: f32,
    },
    /// A finite K or V that the scheme cannot hold.
    #[error(
        "{what} is {value:e} at {at}; {scheme} takes magnitudes up to {limit:e}: look for the layer that made it, or use another format"
    )]
    Magnitude {
        /// `k` or `v`.
        what: &'static str,
        /// The first such element.
        at: ElementIndex,
        /// The value.
        value: f32,
        /// The scheme.
        scheme: Scheme,
        /// The largest magnitude that the scheme takes.
        limit: f32,
    },
    /// A query too large for the arithmetic.
    #[error(
        "q·softmax_scale·log2(e) is {value:e} at {at}; its magnitude must stay at or below 2^64: check the scale of Q"
    )]
    QueryRange {
        /// The first such element of `q`.
        at: ElementIndex,
        /// The scaled value.
        value: f32,
    },
    /// An allocation that failed.
    #[error(
        "there is no memory for {what} of {} bytes; ask for less, or use a machine with more", Count(*bytes)
    )]
    OutOfMemory {
        /// The thing to allocate.
        what: &'static str,
        /// Bytes needed.
        bytes: usize,
    },
    /// The pool has too few free pages.
    #[error(
        "the cache needs {} more pages, but {free} of {total} are free; free a sequence, or make a cache of more `pages`, or with room for more \
         tokens (`max_len`, `max_tokens`)", Count(*needed)
    )]
    CacheFull {
        /// Pages needed by the call.
        needed: usize,
        /// Pages free.
        free: usize,
        /// Pages in the pool.
        total: usize,
    },
    /// Tokens beyond the most that a sequence has.
    #[error(
        "sequence {sequence} would have {} tokens, dropped ones included; allowed: at most {limit}, since positions count from its first token: free \
         the sequence, and append the tokens that are still needed to an empty one", Count(*tokens)
    )]
    TooLong {
        /// The sequence.
        sequence: usize,
        /// The tokens that it would have, with those of shards ahead.
        tokens: usize,
        /// The most tokens of a sequence.
        limit: usize,
    },
    /// A device that failed in a step, and again when the step was taken back. The step is open, until [`KvCache::cancel_step`](crate::KvCache::cancel_step)
    /// can write back the old residuals whose pages it took.
    #[error(
        "{first}; then old residuals could not be written back, and the step stays open: repeat `cancel_step` until it succeeds, or create the cache anew"
    )]
    StepLeftOpen {
        /// Why the step was taken back.
        first: Box<Error>,
        /// Why it could not be.
        #[source]
        second: Box<Error>,
    },
    /// A sequence the cache does not have.
    #[error("sequence {} does not exist; the cache has {count}, counted from 0", Count(*given))]
    Sequence {
        /// The index given.
        given: usize,
        /// Sequences in the cache.
        count: usize,
    },
    /// A layer the cache does not have.
    #[error("layer {} does not exist; the cache has {count}, counted from 0", Count(*given))]
    Layer {
        /// The index given.
        given: usize,
        /// Layers of the cache.
        count: usize,
    },
    /// A sequence with tokens, for a call that fills an empty one.
    #[error(
        "{what} fills an empty sequence, but sequence {sequence} has {}; free it first, or choose another",
        Many(*tokens, "token")
    )]
    NotEmpty {
        /// The call.
        what: &'static str,
        /// The sequence.
        sequence: usize,
        /// Its tokens.
        tokens: usize,
    },
    /// A sequence that a call names twice.
    #[error(
        "sequence {sequence} is named twice; name each sequence once in a call, with all of its tokens"
    )]
    Repeated {
        /// The sequence.
        sequence: usize,
    },
    /// A token behind a sequence's end.
    #[error("{what} is {}, but sequence {sequence} has {}; pass at most {tokens}", Count(*given), Many(*tokens, "token"))]
    PastEnd {
        /// The argument that names the token.
        what: &'static str,
        /// Its value.
        given: usize,
        /// The sequence.
        sequence: usize,
        /// Its tokens.
        tokens: usize,
    },
    /// A cache of several layers, for a call that takes one.
    #[error("{what} takes a cache of one layer, and this one has {layers}; {next}")]
    SeveralLayers {
        /// The call.
        what: &'static str,
        /// Layers of the cache.
        layers: usize,
        /// What a cache of several layers has instead.
        next: &'static str,
    },
    /// A call that does not go with the step that [`KvCache::reserve`](crate::KvCache::reserve) has opened, or that needs one.
    #[error("{what} is refused: {state}; {next}")]
    Step {
        /// The call.
        what: &'static str,
        /// What is open, or that nothing is.
        state: String,
        /// The next step.
        next: &'static str,
    },
    /// A plan for another kind of cache.
    #[error(
        "{what} is {problem} in the plan but {cache} in the cache; plan with the cache's own value"
    )]
    Mismatch {
        /// The quantity that differs.
        what: &'static str,
        /// The plan's value.
        problem: String,
        /// The cache's value.
        cache: String,
    },
    /// A plan for another number of sequences.
    #[error(
        "the plan is for {}, but the call has {given}; plan for {given}, or choose {planned} of the cache",
        Many(*planned, "sequence")
    )]
    Batch {
        /// Sequences of the plan.
        planned: usize,
        /// Sequences that the call attends.
        given: usize,
    },
    /// A sequence of another length than the plan's.
    #[error(
        "sequence {sequence} has {}, but the plan is for {planned}; plan with the cache's own lengths",
        Many(*tokens, "token")
    )]
    KvLen {
        /// The sequence's place in the step's batch.
        sequence: usize,
        /// Its tokens.
        tokens: usize,
        /// The tokens that the plan has for it.
        planned: usize,
    },
    /// Query tokens that read residuals which the cache no longer has. Formats with a window keep residuals of the newest tokens alone.
    #[error(
        "sequence {sequence} has {}, but {format} keeps residuals for its newest {most} alone; raise `max_q_len`, which is {max_q_len}, \
         when the cache is made, or append and attend in pieces of at most {max_q_len} tokens",
        Many(*q_len, "query token")
    )]
    ResidualQueries {
        /// The sequence's place in the step's batch.
        sequence: usize,
        /// Its query tokens.
        q_len: usize,
        /// The query tokens that can be attended at most.
        most: usize,
        /// The most tokens of an append that the cache keeps as queries: [`CacheConfig::max_q_len`](crate::CacheConfig::max_q_len).
        max_q_len: usize,
        /// The cache's format.
        format: KvFormat,
    },
    /// A truncation to fewer tokens than the sequence can go back to.
    #[error(
        "sequence {sequence} has {tokens} tokens and can be truncated to {longest_prefix} or to {least}, but to no length between, such as {given}: {limit}. Truncate to {longest_prefix} and append \
         the tokens from there again"
    )]
    Truncate {
        /// The sequence.
        sequence: usize,
        /// Its tokens.
        tokens: usize,
        /// The tokens that were to be kept.
        given: usize,
        /// The most tokens, fewer than those, that can be kept: from there on tokens are appended again.
        longest_prefix: usize,
        /// The fewest tokens, more than those, that can be kept.
        least: usize,
        /// What stands against the others.
        limit: TruncateLimit,
    },
    /// Tokens that [`KvCache::drop_before`](crate::KvCache::drop_before) has freed.
    #[error(
        "{what} takes tokens of sequence {sequence} from {first} on, but those before {kept} were dropped; drop only tokens that no window sees any more, or free \
         the sequence and append it again"
    )]
    Dropped {
        /// The call that needs them.
        what: &'static str,
        /// The sequence: its place in the step's batch, or in the cache for other calls.
        sequence: usize,
        /// The first token that the call takes.
        first: usize,
        /// The first token that is kept.
        kept: usize,
    },
    /// The image of a sequence of another kind of cache.
    #[error(
        "{what} is {image} in the image but {cache} in the cache; restore it into a cache of its own kind"
    )]
    ImageMismatch {
        /// The quantity that differs.
        what: &'static str,
        /// The image's value.
        image: String,
        /// The cache's value.
        cache: String,
    },
    /// A backend's store that was not made from the cache's config.
    #[error(
        "{what} is {store} in the store but {config} in the config; make the store from the cache's own config"
    )]
    StoreMismatch {
        /// The quantity that differs.
        what: &'static str,
        /// The config's value.
        config: String,
        /// The store's value.
        store: String,
    },
    /// Rows of another scheme than the pages that they are converted to or from.
    #[error(
        "the rows are {rows}, but the pages are {pages}; take pages of the rows' own scheme, or rows of the pages'"
    )]
    RowScheme {
        /// The scheme of the rows.
        rows: Scheme,
        /// The scheme of the pages.
        pages: Scheme,
    },
    /// A cache, plan or step that another backend made.
    #[error("{backend}: the {what} was made by another backend; make it with this one")]
    WrongBackend {
        /// The backend that was called.
        backend: &'static str,
        /// `cache` or `plan`.
        what: &'static str,
    },
    /// Bytes that no quantizer of the format can have written.
    #[error(
        "{what} at offset {offset} is no {scheme} value; the data is damaged or of another format"
    )]
    BadBytes {
        /// The kind of the bytes.
        what: &'static str,
        /// Offset of the bytes.
        offset: usize,
        /// The format expected.
        scheme: Scheme,
    },
    /// A problem that the backend cannot run.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A failure of the device.
    #[error("{backend}: {doing} failed")]
    Device {
        /// The backend.
        backend: &'static str,
        /// The operation that failed.
        doing: &'static str,
        /// The driver's own error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// The numbers that a scheme with static scales holds at scale 1, for [`Error::MissingScales`].
fn held_at_scale_1(scheme: Scheme) -> String {
    let numbers = match scheme.is_integer() {
        true => "whole numbers",
        false => "numbers",
    };
    let largest = scheme.largest_static_code().unwrap_or(1.0);
    format!("{numbers} up to {largest}")
}

/// What a scheme does with static scales, for [`Error::ScaleCount`].
fn needed_scales(needed: usize) -> String {
    match needed {
        0 => "has no static ones; leave them out".to_owned(),
        needed => format!(
            "needs {}, one for each KV head of each layer",
            Count(needed)
        ),
    }
}

/// What a caller can do about an error. The statuses of the C interface and the exceptions of the Python package are these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// An argument that the library does not define.
    Parameter,
    /// Arguments that do not fit each other or the cache.
    Shape,
    /// NaN, infinity, or a number beyond what the format or the arithmetic takes.
    Number,
    /// The pool has too few free pages.
    CacheFull,
    /// A sequence that the cache does not have.
    Sequence,
    /// There is no memory for it.
    OutOfMemory,
    /// The device is absent, or has no kernel for the problem.
    Unsupported,
    /// The device failed, or a handle is of another device.
    Device,
}

/// The table of variants, which the compiler holds to be whole, and the kind of each.
macro_rules! kinds {
    ($of:ident { $($variant:ident: $kind:ident,)* }) => {
        impl $of {
            /// For tests: the names of all variants, each with its kind.
            #[doc(hidden)]
            pub const VARIANTS: &'static [(&'static str, ErrorKind)] =
                &[$((stringify!($variant), ErrorKind::$kind)),*];

            /// For tests: the variant's row of `VARIANTS`.
            #[doc(hidden)]
            #[must_use]
            pub fn variant(&self) -> (&'static str, ErrorKind) {
                match self {
                    $($of::$variant { .. } => (stringify!($variant), ErrorKind::$kind),)*
                }
            }
        }
    };
}

kinds! { Error {
    Parameter: Parameter,
    Length: Shape,
    MissingScales: Parameter,
    ScaleCount: Shape,
    Shape: Shape,
    Rows: Shape,
    NotFinite: Number,
    Magnitude: Number,
    QueryRange: Number,
    OutOfMemory: OutOfMemory,
    CacheFull: CacheFull,
    TooLong: Parameter,
    StepLeftOpen: Device,
    Sequence: Sequence,
    Layer: Parameter,
    NotEmpty: Parameter,
    Repeated: Parameter,
    PastEnd: Parameter,
    SeveralLayers: Parameter,
    Step: Shape,
    Mismatch: Shape,
    Batch: Shape,
    KvLen: Shape,
    ResidualQueries: Shape,
    Truncate: Shape,
    Dropped: Shape,
    ImageMismatch: Shape,
    StoreMismatch: Shape,
    RowScheme: Shape,
    WrongBackend: Device,
    BadBytes: Parameter,
    Unsupported: Unsupported,
    Device: Device,
} }

impl Error {
    /// [`Error::Parameter`]: `what` is `given`, and `allowed` says what may be, with the next step where it is not obvious. A `&str` that is given is a caller's
    /// text and is quoted; [`format_args!`] is shown as it is.
    ///
    /// ```
    /// use attn_core::Error;
    ///
    /// let error = Error::parameter("format", "int8 ", "f16, int8");
    /// assert_eq!(error.to_string(), "format is \"int8 \"; allowed: f16, int8");
    /// ```
    #[must_use]
    pub fn parameter(what: &'static str, given: impl Into<Given>, allowed: &'static str) -> Self {
        Error::Parameter {
            what,
            given: given.into().0,
            allowed,
        }
    }

    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.variant().1
    }
}

/// Refuses one parameter, as [`Error::parameter`] says it.
///
/// # Errors
/// [`Error::Parameter`], always.
#[doc(hidden)]
pub fn refuse<T>(
    what: &'static str,
    given: impl Into<Given>,
    allowed: &'static str,
) -> Result<T, Error> {
    Err(Error::parameter(what, given, allowed))
}

/// A vector of `len` copies of `value`, or [`Error::OutOfMemory`]: an allocation that fails must not end the process.
pub(crate) fn filled<T: Clone>(what: &'static str, len: usize, value: T) -> Result<Vec<T>, Error> {
    let asked = Vec::<T>::new().try_reserve_exact(len);
    asked.map_err(|_| Error::OutOfMemory {
        what,
        bytes: len.saturating_mul(size_of::<T>()),
    })?;
    // A second request, since only `vec!` gets zeroed memory without touching it.
    Ok(vec![value; len])
}

/// Makes room for `more` elements: an allocation that fails must not end the process.
///
/// # Errors
/// [`Error::OutOfMemory`].
#[doc(hidden)]
pub fn reserve<T>(what: &'static str, list: &mut Vec<T>, more: usize) -> Result<(), Error> {
    let asked = list.try_reserve_exact(more);
    asked.map_err(|_| Error::OutOfMemory {
        what,
        bytes: more.saturating_mul(size_of::<T>()),
    })
}

/// The first number that `is_bad`. Whole blocks are tested without an early exit, which lets the compiler use vectors.
pub(crate) fn first(x: &[f32], is_bad: impl Fn(f32) -> bool) -> Option<usize> {
    const BLOCK: usize = 256;
    let mut blocks = x.chunks(BLOCK);
    let block = blocks.position(|block| block.iter().fold(false, |bad, v| bad | is_bad(*v)))?;
    let start = block * BLOCK;
    let within = x[start..].iter().position(|v| is_bad(*v))?;
    Some(start + within)
}

/// Refuses NaN and infinity.
pub(crate) fn check_finite(what: &'static str, x: &[f32]) -> Result<(), Error> {
    match first(x, |v| !v.is_finite()) {
        Some(index) => Err(Error::NotFinite {
            what,
            at: ElementIndex::Flat(index),
            value: x[index],
        }),
        None => Ok(()),
    }
}

kinds! { Unsupported {
    Absent: Unsupported,
    NotBuilt: Unsupported,
    NoKernel: Unsupported,
    Undefined: Unsupported,
    Forked: Unsupported,
} }
