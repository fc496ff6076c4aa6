//! The library's errors as Python's: each kind is a class of the package's `_errors`, and the message is the library's own sentence.

use std::sync::OnceLock;

use attn::{Error, ErrorKind, Unsupported};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

/// The module that has the classes: the package is `attn`, unless something else has loaded it under a name of its own, as Hugging Face's `kernels` does.
static CLASSES: OnceLock<String> = OnceLock::new();

/// Finds the classes beside the extension module.
pub fn stand_beside(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let name = module.name()?.to_string();
    let package = name.rsplit_once('.').map_or("attn", |(package, _)| package);
    let _ = CLASSES.set(format!("{package}._errors"));
    Ok(())
}

/// An error of the class of this name in the package's `_errors`.
fn raise(class: &str, message: String) -> PyErr {
    Python::attach(|py| {
        let made = py
            .import(CLASSES.get().map_or("attn._errors", String::as_str))
            .and_then(|module| module.getattr(class))
            .and_then(|class| class.call1((message.clone(),)));
        match made {
            Ok(value) => PyErr::from_value(value),
            // The module is part of the package; without it, the sentence still arrives.
            Err(_) => PyRuntimeError::new_err(message),
        }
    })
}

/// A refused argument, where the library below has no refusal of its own.
pub fn parameter(message: impl Into<String>) -> PyErr {
    raise("ParameterError", message.into())
}

/// An array of the wrong shape, type or place.
pub fn shape(message: impl Into<String>) -> PyErr {
    raise("ShapeError", message.into())
}

/// The refusal of a backend, where the package leaves it out with the way to a package that has it.
pub fn of_package(reason: Unsupported) -> Unsupported {
    match reason {
        Unsupported::NotBuilt { backend } => Unsupported::Absent {
            backend,
            reason: "this build of the Python package leaves it out".to_owned(),
            next_step: format!(
                "MATURIN_PEP517_ARGS=\"--features {backend}\" pip install ./crates/attn-python builds one that has it"
            ),
        },
        reason => reason,
    }
}

/// The library's error; a device's failure with all of its causes.
pub fn of(error: Error) -> PyErr {
    let error = match error {
        Error::Unsupported(reason) => Error::Unsupported(of_package(reason)),
        error => error,
    };
    let class = match error.kind() {
        ErrorKind::Parameter => "ParameterError",
        ErrorKind::Shape => "ShapeError",
        ErrorKind::Number => "NumberError",
        ErrorKind::CacheFull => "CacheFullError",
        ErrorKind::Sequence => "SequenceError",
        ErrorKind::OutOfMemory => "OutOfMemoryError",
        ErrorKind::Unsupported => "UnsupportedError",
        ErrorKind::Device => "DeviceError",
    };
    let longest_prefix = match error {
        Error::Truncate { longest_prefix, .. } => Some(longest_prefix),
        _ => None,
    };
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        message.push_str(": ");
        message.push_str(&error.to_string());
        cause = error.source();
    }
    let raised = raise(class, message);
    if let Some(tokens) = longest_prefix {
        Python::attach(|py| {
            // An error without the number still has it in its sentence.
            let _ = raised.value(py).setattr("longest_prefix", tokens);
        });
    }
    raised
}

/// The refusal of a backend.
pub fn unsupported(reason: Unsupported) -> PyErr {
    of(Error::Unsupported(reason))
}
