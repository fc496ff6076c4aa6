//! What a call returns: a status, and a sentence for people.

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char},
    panic::{AssertUnwindSafe, catch_unwind},
};

use attn::{Error, ErrorKind, Unsupported, backends::cuda::CallersContext};

/// What a call came to. After any but ATTN_STATUS_OK, the cache and the outputs are unchanged, unless the status is ATTN_STATUS_DEVICE or
/// ATTN_STATUS_INTERNAL.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Done; of calls that take a stream: enqueued.
    Ok = 0,
    /// An argument that the library does not define, such as a format's name, or NULL.
    Parameter = 1,
    /// Arguments that do not fit each other or the cache.
    Shape = 2,
    /// NaN, infinity, or a number beyond what the format or the arithmetic takes.
    Number = 3,
    /// The pool has too few free pages. Free a sequence, or create a larger pool.
    CacheFull = 4,
    /// A sequence that the cache does not have.
    Sequence = 5,
    /// There is no memory for it.
    OutOfMemory = 6,
    /// The device is absent, or has no kernel for the problem.
    Unsupported = 7,
    /// The device failed, or the handle is of another device.
    Device = 8,
    /// A defect of the library. The handles of the call are unusable but for their destruction.
    Internal = 9,
}

/// The name of an attn_status, such as "CACHE_FULL"; "UNKNOWN" for other numbers.
#[unsafe(no_mangle)]
pub extern "C" fn attn_status_name(status: u32) -> *const c_char {
    const NAMES: [&CStr; 10] = [
        c"OK",
        c"PARAMETER",
        c"SHAPE",
        c"NUMBER",
        c"CACHE_FULL",
        c"SEQUENCE",
        c"OUT_OF_MEMORY",
        c"UNSUPPORTED",
        c"DEVICE",
        c"INTERNAL",
    ];
    let name = NAMES.get(status as usize).unwrap_or(&c"UNKNOWN");
    name.as_ptr()
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// The sentence of this thread's latest call that failed: what was given, what is allowed, and the next step. Empty if none has. Valid until this
/// thread's next call that fails.
#[unsafe(no_mangle)]
pub extern "C" fn attn_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|error| error.as_ptr())
}

/// Why a call fails.
#[derive(Debug)]
pub(crate) struct Failure {
    status: Status,
    sentence: String,
}

impl Failure {
    pub fn new(status: Status, sentence: impl Into<String>) -> Self {
        Failure {
            status,
            sentence: sentence.into(),
        }
    }
}

impl From<ErrorKind> for Status {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Parameter => Status::Parameter,
            ErrorKind::Shape => Status::Shape,
            ErrorKind::Number => Status::Number,
            ErrorKind::CacheFull => Status::CacheFull,
            ErrorKind::Sequence => Status::Sequence,
            ErrorKind::OutOfMemory => Status::OutOfMemory,
            ErrorKind::Unsupported => Status::Unsupported,
            ErrorKind::Device => Status::Device,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let error = match error {
            Error::Unsupported(Unsupported::NotBuilt { backend }) => {
                Error::Unsupported(Unsupported::Absent {
                    backend,
                    reason: "this build of libattn leaves it out".to_owned(),
                    next_step: format!("build attn-c with `--features {backend}`"),
                })
            }
            error => error,
        };
        let status = error.kind().into();
        let mut sentence = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            sentence.push_str(": ");
            sentence.push_str(&error.to_string());
            cause = error.source();
        }
        Failure { status, sentence }
    }
}

impl From<Unsupported> for Failure {
    fn from(reason: Unsupported) -> Self {
        Error::Unsupported(reason).into()
    }
}

/// Runs the body of a function of the interface: its failure or panic becomes a status and a sentence.
pub(crate) fn call(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    // The caller's device is the context that is current on its thread.
    let _callers = CallersContext::keep();
    // What a panic leaves behind is not touched again: locks of handles are poisoned by it.
    let done = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        let text = text.unwrap_or_default();
        let sentence = format!("a defect of attn, please report it: {text}");
        Err(Failure::new(Status::Internal, sentence))
    });
    let Err(failure) = done else {
        return Status::Ok;
    };
    let sentence = failure.sentence.replace('\0', "\\0");
    let sentence = CString::new(sentence).unwrap_or_default();
    LAST_ERROR.with_borrow_mut(|last| *last = sentence);
    failure.status
}
