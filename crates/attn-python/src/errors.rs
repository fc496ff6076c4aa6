//! The library's errors as Python's: each kind is a class of `attn._errors`, and the message is the library's own sentence.

use attn::{Error, Unsupported};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

/// An error of the class of this name in `attn._errors`.
fn raise(class: &str, message: String) -> PyErr {
    Python::attach(|py| {
        let made = py
            .import("attn._errors")
            .and_then(|module| module.getattr(class))
            .and_then(|class| class.call1((message.clone(),)));
        match made {
            Ok(value) => PyErr::from_value(value),
            // The module is part of the package; without it, the sentence still arrives.
            Err(_) => PyRuntimeError::new_err(message),
        }
    })
}

/// A refused argument: of launches on a GPU, as those of caches are refused by the library below.
#[cfg(feature = "cuda")]
pub fn parameter(message: impl Into<String>) -> PyErr {
    raise("ParameterError", message.into())
}

/// An array of the wrong shape, type or place.
pub fn shape(message: impl Into<String>) -> PyErr {
    raise("ShapeError", message.into())
}

/// A state of the process in which nothing works.
pub fn device(message: impl Into<String>) -> PyErr {
    raise("DeviceError", message.into())
}

/// The library's error; a device's failure with all of its causes.
pub fn of(error: Error) -> PyErr {
    let class = match &error {
        Error::Parameter { .. } | Error::BadBytes { .. } | Error::Layer { .. } => "ParameterError",
        Error::Length { .. }
        | Error::Shape { .. }
        | Error::Mismatch { .. }
        | Error::ImageMismatch { .. }
        | Error::Step { .. }
        | Error::Dropped { .. } => "ShapeError",
        Error::NotFinite { .. } | Error::Magnitude { .. } | Error::QueryRange { .. } => {
            "NumberError"
        }
        Error::CacheFull { .. } => "CacheFullError",
        Error::Sequence { .. } => "SequenceError",
        Error::OutOfMemory { .. } => "OutOfMemoryError",
        Error::Unsupported(_) => "UnsupportedError",
        Error::Device { .. } | Error::WrongBackend { .. } => "DeviceError",
        _ => "AttnError",
    };
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        message.push_str(": ");
        message.push_str(&error.to_string());
        cause = error.source();
    }
    raise(class, message)
}

/// The refusal of a backend.
pub fn unsupported(reason: Unsupported) -> PyErr {
    of(Error::Unsupported(reason))
}
