//! Errors as values: the tensor that was refused, what was given, what is allowed.

use candle_core::{DType, DeviceLocation};

/// The reason why a call was refused. The cache is unchanged.
///
/// It converts into candle's error, so that `?` works in functions that return [`candle_core::Result`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor of another shape.
    #[error("{what} has the shape {given:?}; allowed: {allowed}")]
    Shape {
        /// The tensor's name.
        what: &'static str,
        /// Its shape.
        given: Vec<usize>,
        /// The shape that the cache takes.
        allowed: String,
    },
    /// Another number of sequences than rows of the batch.
    #[error(
        "{what} has a batch of {given}, but {needed} sequences are named; name one for each row of the batch, or pass as many rows"
    )]
    Batch {
        /// The tensor's name.
        what: &'static str,
        /// Its first dimension.
        given: usize,
        /// The sequences named.
        needed: usize,
    },
    /// A tensor of a type that is no float of 16 or 32 bits.
    #[error("{what} has elements of type {given:?}; allowed: {allowed}")]
    DType {
        /// The tensor's name.
        what: &'static str,
        /// Its type.
        given: DType,
        /// The types allowed, and the next step.
        allowed: &'static str,
    },
    /// A tensor on another device than the cache.
    #[error("{what} is on {given:?}, and the cache on {allowed:?}; move it there with to_device")]
    Device {
        /// The tensor's name.
        what: &'static str,
        /// Its device.
        given: DeviceLocation,
        /// The cache's device.
        allowed: DeviceLocation,
    },
    /// A device that has no caches in this build.
    #[error("caches cannot be on {given:?}; allowed: {allowed}")]
    NoCaches {
        /// The device.
        given: DeviceLocation,
        /// The devices allowed, and the next step.
        allowed: &'static str,
    },
    /// The cache or the attention refused.
    #[error(transparent)]
    Attention(#[from] attn::Error),
    /// candle refused, such as an allocation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => candle_core::Error::wrap(error),
        }
    }
}
