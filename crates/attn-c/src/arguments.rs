//! Arguments of C callers as Rust's: NULL, misaligned pointers and other versions' structs are refused here.

use std::{
    ffi::{CStr, c_char},
    slice,
    sync::{Mutex, MutexGuard},
};

use attn::{Elements, ElementsMut, process};
use half::{bf16, f16};

use crate::status::{Failure, Status, call};

/// Type of the numbers in a caller's memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// float.
    F32 = 0,
    /// 16-bit IEEE numbers.
    F16 = 1,
    /// The upper halves of float.
    Bf16 = 2,
}

impl Dtype {
    /// Bytes of a number.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }
}

impl From<Dtype> for attn::Dtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => attn::Dtype::F32,
            Dtype::F16 => attn::Dtype::F16,
            Dtype::Bf16 => attn::Dtype::Bf16,
        }
    }
}

/// A struct of the interface, which begins with its own size.
///
/// # Safety
/// The type is `repr(C)`, and its first field is a `usize`, which callers set to the struct's size.
pub(crate) unsafe trait Config: Copy {
    /// The name of the type in C.
    const NAME: &'static str;
}

pub(crate) fn refused(sentence: String) -> Failure {
    Failure::new(Status::Parameter, sentence)
}

fn check_pointer<T>(what: &str, pointer: *const T) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(refused(format!("{what} is NULL")));
    }
    if !pointer.is_aligned() {
        return Err(refused(format!(
            "{what} is {pointer:p}; it must be a multiple of {} bytes",
            align_of::<T>()
        )));
    }
    Ok(())
}

/// A struct of the caller's.
///
/// # Safety
/// `pointer` is NULL or points to a struct whose first field is its size.
pub(crate) unsafe fn config<T: Config>(pointer: *const T) -> Result<T, Failure> {
    check_pointer(T::NAME, pointer)?;
    // SAFETY: the first field is a `usize` by the trait's contract.
    let size = unsafe { pointer.cast::<usize>().read() };
    if size != size_of::<T>() {
        return Err(refused(format!(
            "{}.struct_size is {size}; set it to sizeof({}), which is {} in this version of the library",
            T::NAME,
            T::NAME,
            size_of::<T>()
        )));
    }
    // SAFETY: as large as the struct says, and aligned; it holds numbers and pointers, for which every pattern of bits is a value.
    Ok(unsafe { pointer.read() })
}

/// `len` values of the caller's; none where `len` is 0.
///
/// # Safety
/// `pointer` is NULL or points to `len` values that nothing writes meanwhile.
pub(crate) unsafe fn list<'a, T>(
    what: &str,
    pointer: *const T,
    len: usize,
) -> Result<&'a [T], Failure> {
    if len == 0 {
        return Ok(&[]);
    }
    check_pointer(what, pointer)?;
    check_len::<T>(what, len)?;
    // SAFETY: the caller's contract.
    Ok(unsafe { slice::from_raw_parts(pointer, len) })
}

/// A list as [`list`] makes it, to be written.
///
/// # Safety
/// `pointer` is NULL or points to `len` values that nothing else uses meanwhile.
pub(crate) unsafe fn list_mut<'a, T>(
    what: &str,
    pointer: *mut T,
    len: usize,
) -> Result<&'a mut [T], Failure> {
    if len == 0 {
        return Ok(&mut []);
    }
    check_pointer(what, pointer.cast_const())?;
    check_len::<T>(what, len)?;
    // SAFETY: the caller's contract.
    Ok(unsafe { slice::from_raw_parts_mut(pointer, len) })
}

fn check_len<T>(what: &str, len: usize) -> Result<(), Failure> {
    let bytes = len.checked_mul(size_of::<T>());
    if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
        let sentence = format!("{what} of {len} values is more than memory can hold");
        return Err(Failure::new(Status::Shape, sentence));
    }
    Ok(())
}

/// Values that may be missing.
///
/// # Safety
/// Those of [`list`].
pub(crate) unsafe fn optional<'a, T>(
    what: &str,
    pointer: *const T,
    len: usize,
) -> Result<Option<&'a [T]>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    unsafe { list(what, pointer, len) }.map(Some)
}

/// A name.
///
/// # Safety
/// `pointer` is NULL or points to text that ends with a zero byte.
pub(crate) unsafe fn text<'a>(what: &str, pointer: *const c_char) -> Result<&'a str, Failure> {
    check_pointer(what, pointer)?;
    // SAFETY: the caller's contract.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str()
        .map_err(|_| refused(format!("{what} is {text:?}, which is not UTF-8")))
}

/// A place for one result.
///
/// # Safety
/// `pointer` is NULL or writable.
pub(crate) unsafe fn place<'a, T>(what: &str, pointer: *mut T) -> Result<&'a mut T, Failure> {
    check_pointer(what, pointer.cast_const())?;
    // SAFETY: the caller's contract.
    Ok(unsafe { &mut *pointer })
}

/// A handle.
///
/// # Safety
/// `pointer` is NULL or a handle that has not been destroyed.
pub(crate) unsafe fn handle<'a, T>(what: &str, pointer: *const T) -> Result<&'a T, Failure> {
    check_pointer(what, pointer)?;
    // SAFETY: the caller's contract.
    Ok(unsafe { &*pointer })
}

/// Destroys a handle; NULL is none. A panic on the way stays inside.
///
/// # Safety
/// `pointer` is NULL or a handle, made by `Box::into_raw`, that is used for the last time.
pub(crate) unsafe fn destroy<T>(pointer: *mut T) {
    let _ = call(|| {
        if !pointer.is_null() {
            // SAFETY: the caller's contract.
            drop(unsafe { Box::from_raw(pointer) });
        }
        Ok(())
    });
}

/// Waits for the handle's other calls; refuses a handle in which a call has panicked. A process that was forked from the handle's is refused before it
/// waits, since a thread that it lacks may have held the lock.
pub(crate) fn lock<T>(state: &Mutex<T>) -> Result<MutexGuard<'_, T>, Failure> {
    process::check()?;
    state.lock().map_err(|_| {
        let sentence =
            "the handle is unusable, since a call on it ended by a defect of attn; destroy it";
        Failure::new(Status::Internal, sentence)
    })
}

/// `len` numbers to read.
///
/// # Safety
/// Those of [`list`], of the type that `dtype` says.
pub(crate) unsafe fn elements<'a>(
    what: &str,
    dtype: u32,
    pointer: *const std::ffi::c_void,
    len: usize,
) -> Result<Elements<'a>, Failure> {
    // SAFETY: the caller's contract.
    unsafe {
        Ok(match self::dtype(dtype)? {
            Dtype::F32 => Elements::F32(list(what, pointer.cast::<f32>(), len)?),
            Dtype::F16 => Elements::F16(list(what, pointer.cast::<f16>(), len)?),
            Dtype::Bf16 => Elements::Bf16(list(what, pointer.cast::<bf16>(), len)?),
        })
    }
}

/// `len` numbers to write.
///
/// # Safety
/// Those of [`list_mut`], of the type that `dtype` says.
pub(crate) unsafe fn elements_mut<'a>(
    what: &str,
    dtype: u32,
    pointer: *mut std::ffi::c_void,
    len: usize,
) -> Result<ElementsMut<'a>, Failure> {
    // SAFETY: the caller's contract.
    unsafe {
        Ok(match self::dtype(dtype)? {
            Dtype::F32 => ElementsMut::F32(list_mut(what, pointer.cast::<f32>(), len)?),
            Dtype::F16 => ElementsMut::F16(list_mut(what, pointer.cast::<f16>(), len)?),
            Dtype::Bf16 => ElementsMut::Bf16(list_mut(what, pointer.cast::<bf16>(), len)?),
        })
    }
}

/// The type of numbers that a struct's field names. Fields are integers, since C may store any value in one.
pub(crate) fn dtype(value: u32) -> Result<Dtype, Failure> {
    [Dtype::F32, Dtype::F16, Dtype::Bf16]
        .into_iter()
        .find(|dtype| *dtype as u32 == value)
        .ok_or_else(|| {
            refused(format!(
                "dtype is {value}; allowed: ATTN_DTYPE_F32, ATTN_DTYPE_F16, ATTN_DTYPE_BF16"
            ))
        })
}
