//! Errors as values: which backend or check refused, the value given, the values allowed, and the next step.

use crate::format::Scheme;

/// The reason why a call was refused. The cache and the outputs are unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape or parameter outside what the library defines.
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
    #[error(
        "{what} holds {given} elements, but the problem needs {needed}; pass exactly that many"
    )]
    Length {
        /// The slice's name.
        what: &'static str,
        /// Elements given.
        given: usize,
        /// Elements needed.
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
    /// NaN or infinity in K, V or Q.
    #[error(
        "{what}[{index}] is {value}; only finite numbers can be attended to: look for the layer that made it"
    )]
    NotFinite {
        /// `k`, `v` or `q`.
        what: &'static str,
        /// Flat index of the first bad element; what lies between strided rows is not counted.
        index: usize,
        /// The bad value.
        value: f32,
    },
    /// A finite K or V that the scheme cannot hold.
    #[error(
        "{what}[{index}] is {value:e}; {scheme} takes magnitudes up to {limit:e}: look for the layer that made it, or use another format"
    )]
    Magnitude {
        /// `k` or `v`.
        what: &'static str,
        /// Flat index of the first such element.
        index: usize,
        /// The value.
        value: f32,
        /// The scheme.
        scheme: Scheme,
        /// The largest magnitude that the scheme takes.
        limit: f32,
    },
    /// An allocation that failed.
    #[error(
        "there is no memory for {what} of {bytes} bytes; ask for less, or use a machine with more"
    )]
    OutOfMemory {
        /// The thing to allocate.
        what: &'static str,
        /// Bytes needed.
        bytes: usize,
    },
    /// A query too large for the arithmetic.
    #[error(
        "q[{index}]·softmax_scale·log2(e) is {value:e}; its magnitude must stay at or below 2^64: check the scale of Q"
    )]
    QueryRange {
        /// Flat index of the element.
        index: usize,
        /// The scaled value.
        value: f32,
    },
    /// The pool has no page left.
    #[error(
        "the cache needs {needed} more pages, but {free} of {total} are free; free a sequence or create a larger pool"
    )]
    CacheFull {
        /// Pages needed by the call.
        needed: usize,
        /// Pages free.
        free: usize,
        /// Pages in the pool.
        total: usize,
    },
    /// A sequence the cache does not have.
    #[error("sequence {given} does not exist; the cache holds {count} (0..{count})")]
    Sequence {
        /// The index given.
        given: usize,
        /// Sequences in the cache.
        count: usize,
    },
    /// A layer the cache does not have.
    #[error("layer {given} does not exist; the cache has {count} (0..{count})")]
    Layer {
        /// The index given.
        given: usize,
        /// Layers of the cache.
        count: usize,
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
    /// A problem that disagrees with the cache.
    #[error(
        "{what} is {problem} in the problem but {cache} in the cache; plan with the cache's own value"
    )]
    Mismatch {
        /// The quantity that differs.
        what: &'static str,
        /// The problem's value.
        problem: String,
        /// The cache's value.
        cache: String,
    },
    /// Tokens that [`KvCache::drop_before`](crate::KvCache::drop_before) has freed.
    #[error(
        "{what} takes tokens of sequence {sequence} from {first} on, but those before {kept} were dropped; drop what no window sees any more, or free the sequence and append it again"
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
        "{what} at byte {offset} is no {scheme} value; the file is damaged or of another format"
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

/// Refuses one parameter.
pub(crate) fn refuse<T>(
    what: &'static str,
    given: impl ToString,
    allowed: &'static str,
) -> Result<T, Error> {
    Err(Error::Parameter {
        what,
        given: given.to_string(),
        allowed,
    })
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

/// Makes room for `more` elements, or [`Error::OutOfMemory`].
pub(crate) fn reserve<T>(what: &'static str, list: &mut Vec<T>, more: usize) -> Result<(), Error> {
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
            index,
            value: x[index],
        }),
        None => Ok(()),
    }
}

/// Why a backend is absent, or cannot run a problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// No device, driver or adapter.
    #[error("{backend}: {reason}; {next_step}")]
    Absent {
        /// The backend.
        backend: &'static str,
        /// The missing part.
        reason: String,
        /// How to repair it.
        next_step: String,
    },
    /// A device without a kernel for the problem.
    #[error("{backend}: {what} has no kernel; built: {built}. Use backend \"cpu\"")]
    NoKernel {
        /// The backend.
        backend: &'static str,
        /// The thing asked for.
        what: String,
        /// The kernels that exist.
        built: String,
    },
}
