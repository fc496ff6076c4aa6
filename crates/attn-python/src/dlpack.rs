//! Arrays of other libraries, by DLPack (version 0: `DLManagedTensor` in a capsule named `dltensor`, github.com/dmlc/dlpack).
//!
//! A capsule is borrowed: it is not renamed, so whoever made it frees the tensor when the capsule dies, which an [`Array`] prevents.

use std::{
    ffi::{CStr, c_void},
    fmt,
};

#[cfg(feature = "cuda")]
use attn::backends::cuda::{
    CudaMemory,
    native::{DeviceAddress, Stream},
};
use attn::{ElementsMut, Rows, RowsMut};
use half::{bf16, f16};
use pyo3::{prelude::*, types::PyCapsule};

use crate::errors;

const NAME: &CStr = c"dltensor";

/// `kDLCPU` and `kDLCUDAHost`: memory that the CPU reads.
const HOST: [i32; 2] = [1, 3];
/// `kDLCUDA` and `kDLCUDAManaged`.
const CUDA: [i32; 2] = [2, 13];

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Number format of an array.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    U8,
    I32,
    I64,
}

impl Dtype {
    /// `kDLInt` is 0, `kDLUInt` 1, `kDLFloat` 2, `kDLBfloat` 4.
    fn of(tensor: &Tensor) -> Option<Self> {
        match (tensor.code, tensor.bits, tensor.lanes) {
            (2, 32, 1) => Some(Dtype::F32),
            (2, 16, 1) => Some(Dtype::F16),
            (4, 16, 1) => Some(Dtype::Bf16),
            (1, 8, 1) => Some(Dtype::U8),
            (0, 32, 1) => Some(Dtype::I32),
            (0, 64, 1) => Some(Dtype::I64),
            _ => None,
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Dtype::U8 => 1,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::I64 => 8,
        }
    }
}

/// The name in numpy and torch: errors show formats by `{:?}`, alone and in lists.
impl fmt::Debug for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "float32",
            Dtype::F16 => "float16",
            Dtype::Bf16 => "bfloat16",
            Dtype::U8 => "uint8",
            Dtype::I32 => "int32",
            Dtype::I64 => "int64",
        })
    }
}

/// What numpy and torch call the elements of DLPack's type code, of so many bits and lanes.
fn type_name(code: u8, bits: u8, lanes: u16) -> String {
    let kind = match code {
        0 => "int",
        1 => "uint",
        2 => "float",
        4 => "bfloat",
        5 => "complex",
        6 => return "bool".to_owned(),
        7 => return "float8_e3m4".to_owned(),
        8 => return "float8_e4m3".to_owned(),
        9 => return "float8_e4m3b11fnuz".to_owned(),
        10 => return "float8_e4m3fn".to_owned(),
        11 => return "float8_e4m3fnuz".to_owned(),
        12 => return "float8_e5m2".to_owned(),
        13 => return "float8_e5m2fnuz".to_owned(),
        14 => return "float8_e8m0fnu".to_owned(),
        17 => return "float4_e2m1fn".to_owned(),
        other => return format!("DLPack's code {other} with {bits} bits"),
    };
    match lanes {
        1 => format!("{kind}{bits}"),
        lanes => format!("{kind}{bits} in vectors of {lanes}"),
    }
}

/// An array that lives as long as its capsule, which this holds.
pub struct Array<'py> {
    /// What the array is called in errors.
    pub what: &'static str,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// In elements.
    pub strides: Vec<i64>,
    /// The CUDA device that has it; none for host memory.
    pub cuda: Option<i32>,
    address: usize,
    /// The memory of rows on a GPU, in the order of a stream: that of arrays which calls of a cache take.
    #[cfg(feature = "cuda")]
    memory: Option<CudaMemory>,
    _capsule: Bound<'py, PyCapsule>,
}

impl<'py> Array<'py> {
    /// The array in a capsule that `__dlpack__` gave.
    ///
    /// # Errors
    /// `ShapeError` for another capsule, a type that nothing here takes, and a device that is neither the CPU nor CUDA.
    pub fn new(what: &'static str, capsule: &Bound<'py, PyCapsule>) -> PyResult<Self> {
        let pointer = capsule.pointer_checked(Some(NAME)).map_err(|_| {
            errors::shape(format!(
                "{what} is no fresh DLPack capsule; pass what `__dlpack__()` gives"
            ))
        })?;
        // SAFETY: a capsule of this name holds a DLManagedTensor, whose first field is the tensor, until it is consumed, which renames it.
        let tensor = unsafe { pointer.cast::<Tensor>().as_ref() };
        let dtype = Dtype::of(tensor).ok_or_else(|| {
            errors::shape(format!(
                "{what} has elements of type {}; allowed: float32, float16, bfloat16; convert it, with .to(torch.float32) or .astype(numpy.float32)",
                type_name(tensor.code, tensor.bits, tensor.lanes)
            ))
        })?;
        let cuda = match tensor.device_type {
            host if HOST.contains(&host) => None,
            cuda if CUDA.contains(&cuda) => Some(tensor.device_id),
            other => {
                return Err(errors::shape(format!(
                    "{what} lies on DLPack's device type {other}; allowed: the CPU, CUDA; copy it there"
                )));
            }
        };
        let rank = usize::try_from(tensor.ndim).unwrap_or(0);
        // SAFETY: a tensor has `ndim` numbers at `shape`, and at `strides` unless that is null.
        let (shape, strides) = unsafe {
            let list = |at: *const i64| {
                (rank > 0 && !at.is_null()).then(|| std::slice::from_raw_parts(at, rank).to_vec())
            };
            (list(tensor.shape).unwrap_or_default(), list(tensor.strides))
        };
        let shape: Vec<usize> = shape
            .iter()
            .map(|n| usize::try_from(*n).unwrap_or(0))
            .collect();
        let strides = strides.unwrap_or_else(|| row_major(&shape));
        let offset = usize::try_from(tensor.byte_offset).unwrap_or(0);
        Ok(Array {
            what,
            dtype,
            strides,
            cuda,
            address: (tensor.data as usize).wrapping_add(offset),
            shape,
            #[cfg(feature = "cuda")]
            memory: None,
            _capsule: capsule.clone(),
        })
    }

    /// An array that a call of a cache reads; on a GPU behind what the stream has to do, the default one for none.
    ///
    /// # Errors
    /// Those of [`Array::new`] and [`Array::rows`].
    pub fn to_read(
        what: &'static str,
        capsule: &Bound<'py, PyCapsule>,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        Self::new(what, capsule)?.on_stream(stream, false)
    }

    /// An array that a call of a cache writes.
    ///
    /// # Errors
    /// Those of [`Array::to_read`].
    pub fn to_write(
        what: &'static str,
        capsule: &Bound<'py, PyCapsule>,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        Self::new(what, capsule)?.on_stream(stream, true)
    }

    #[cfg(not(feature = "cuda"))]
    fn on_stream(self, _: Option<u64>, _: bool) -> PyResult<Self> {
        Ok(self)
    }

    #[cfg(feature = "cuda")]
    fn on_stream(mut self, stream: Option<u64>, write: bool) -> PyResult<Self> {
        let Some(device) = self.cuda else {
            return Ok(self);
        };
        let dtype = match self.dtype {
            Dtype::F32 => attn::Dtype::F32,
            Dtype::F16 => attn::Dtype::F16,
            Dtype::Bf16 => attn::Dtype::Bf16,
            _ => return Err(self.wrong_type()),
        };
        let device = usize::try_from(device).unwrap_or(usize::MAX);
        let at = DeviceAddress::new(self.address());
        let elements = self.place()?.elements;
        let stream = stream_of(stream.unwrap_or(0));
        // SAFETY: the exporter keeps the array's elements while the capsule lives, and the caller's library keeps their memory until the work that is enqueued on its current
        // stream has run; what lies between them is of one allocation with them. The stream is that library's current one, of the device's primary context, or 0, which is
        // the default stream. An array to write is one that the package has just made, or that the caller gave it to be written.
        self.memory = Some(unsafe {
            match write {
                true => CudaMemory::to_write(device, at, elements, dtype, stream),
                false => CudaMemory::to_read(device, at, elements, dtype, stream),
            }
        });
        Ok(self)
    }

    /// An array of numbers that a call of a cache writes as rows of one number each: its last dim is that of heads.
    ///
    /// # Errors
    /// Those of [`Array::to_read`].
    pub fn to_write_numbers(
        what: &'static str,
        capsule: &Bound<'py, PyCapsule>,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        let mut array = Self::new(what, capsule)?;
        array.shape.push(1);
        array.strides.push(1);
        array.on_stream(stream, true)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Address of the first element, in the memory of its device.
    #[cfg(feature = "cuda")]
    pub fn address(&self) -> u64 {
        self.address as u64
    }

    /// Refuses an array of another rank.
    pub fn check_rank(&self, rank: usize, shape: &str) -> PyResult<()> {
        if self.shape.len() == rank {
            return Ok(());
        }
        Err(errors::shape(format!(
            "{} has the shape {:?}; needed: {shape}",
            self.what, self.shape
        )))
    }

    /// Whether the dims from `first` on lie as in a C array.
    pub fn is_contiguous_from(&self, first: usize) -> bool {
        let expected = row_major(&self.shape);
        let dims = self.shape.iter().zip(&self.strides).zip(&expected);
        let is_empty = self.len() == 0;
        is_empty
            || dims
                .skip(first)
                .all(|((n, stride), own)| *n == 1 || stride == own)
    }

    fn not_on_host(&self, device: i32) -> PyErr {
        errors::shape(format!(
            "{} lies on CUDA device {device}, and the cache's steps run on host memory; copy it to the CPU, or make the cache with device=\"cuda\"",
            self.what
        ))
    }

    /// Refuses an array on another device, and one that is not aligned.
    fn check_host(&self) -> PyResult<()> {
        if let Some(device) = self.cuda {
            return Err(self.not_on_host(device));
        }
        let size = self.dtype.bytes();
        if self.len() > 0 && !self.address.is_multiple_of(size) {
            return Err(errors::shape(format!(
                "{} is not aligned to its {size}-byte elements; copy it",
                self.what
            )));
        }
        Ok(())
    }

    /// Refuses what [`Array::check_host`] does, and an array that a C array is not.
    fn check_contiguous(&self) -> PyResult<()> {
        self.check_host()?;
        if !self.is_contiguous_from(0) {
            return Err(errors::shape(format!(
                "{} has the strides {:?}; pass a contiguous array",
                self.what, self.strides
            )));
        }
        Ok(())
    }

    /// Where rows `[tokens, heads, dim]` or `[sequences, tokens, heads, dim]` lie.
    ///
    /// # Errors
    /// `ShapeError` for an array of another rank, whose dims run backwards, or whose last dim is not contiguous.
    fn place(&self) -> PyResult<Place> {
        let shape: [usize; 4] = match *self.shape {
            [tokens, heads, dim] => [1, tokens, heads, dim],
            [sequences, tokens, heads, dim] => [sequences, tokens, heads, dim],
            _ => return Err(self.refused_strides("needed: three or four dims")),
        };
        if shape.contains(&0) {
            let strides = [0; 3];
            let elements = 0;
            return Ok(Place {
                shape,
                strides,
                elements,
            });
        }
        let mut strides = [0; 4];
        let dims = shape.iter().zip(&mut strides).rev();
        for ((n, own), stride) in dims.zip(self.strides.iter().rev()) {
            // The stride of a single element says nothing.
            let stride = if *n == 1 { 0 } else { *stride };
            let forwards = usize::try_from(stride);
            *own = forwards.map_err(|_| self.refused_strides("dims run forwards; copy it"))?;
        }
        let [strides @ .., last] = strides;
        if last != 1 && shape[3] != 1 {
            return Err(self.refused_strides("the last dim is contiguous; copy it"));
        }
        let mut elements = shape[3];
        for (n, stride) in shape.into_iter().zip(strides) {
            elements = elements.saturating_add((n - 1).saturating_mul(stride));
        }
        // No memory is larger, which slices rely on.
        if elements.saturating_mul(self.dtype.bytes()) > isize::MAX as usize {
            return Err(self.refused_strides("no memory is as large"));
        }
        Ok(Place {
            shape,
            strides,
            elements,
        })
    }

    fn refused_strides(&self, reason: &str) -> PyErr {
        errors::shape(format!(
            "{} has the shape {:?} and the strides {:?}: {reason}",
            self.what, self.shape, self.strides
        ))
    }

    /// The array's rows `[tokens, heads, dim]`, or of sequences `[sequences, tokens, heads, dim]`.
    ///
    /// # Errors
    /// Those of [`Array::place`]; `ShapeError` for another type, and for an array on a device that [`Array::to_read`] has not made.
    pub fn rows(&self) -> PyResult<Rows<'_>> {
        let Place {
            shape,
            strides,
            elements,
        } = self.place()?;
        #[cfg(feature = "cuda")]
        if let Some(memory) = &self.memory {
            return Rows::on_device(memory, shape, strides).map_err(errors::of);
        }
        self.check_host()?;
        let rows = match self.dtype {
            Dtype::F32 => Rows::strided_batch(self.slice::<f32>(elements), shape, strides),
            Dtype::F16 => Rows::strided_batch(self.slice::<f16>(elements), shape, strides),
            Dtype::Bf16 => Rows::strided_batch(self.slice::<bf16>(elements), shape, strides),
            _ => return Err(self.wrong_type()),
        };
        rows.map_err(errors::of)
    }

    /// The array's rows, to be written.
    ///
    /// # Errors
    /// Those of [`Array::rows`]; `ParameterError` for rows that overlap.
    pub fn rows_mut(&mut self) -> PyResult<RowsMut<'_>> {
        let Place {
            shape,
            strides,
            elements,
        } = self.place()?;
        #[cfg(feature = "cuda")]
        if let Some(device) = self.cuda {
            return match &self.memory {
                Some(memory) => RowsMut::on_device(memory, shape, strides).map_err(errors::of),
                None => Err(self.not_on_host(device)),
            };
        }
        self.check_host()?;
        let rows = match self.dtype {
            Dtype::F32 => RowsMut::strided_batch(self.slice_mut::<f32>(elements), shape, strides),
            Dtype::F16 => RowsMut::strided_batch(self.slice_mut::<f16>(elements), shape, strides),
            Dtype::Bf16 => RowsMut::strided_batch(self.slice_mut::<bf16>(elements), shape, strides),
            _ => return Err(self.wrong_type()),
        };
        rows.map_err(errors::of)
    }

    /// Whether the rows of two host arrays, with what lies between them, share a byte.
    ///
    /// # Errors
    /// Those of [`Array::place`].
    pub fn shares_memory_with(&self, other: &Array<'_>) -> PyResult<bool> {
        if self.cuda.is_some() || other.cuda.is_some() {
            return Ok(false);
        }
        let span = |array: &Array<'_>| {
            let bytes = array.place()?.elements * array.dtype.bytes();
            Ok::<_, PyErr>((array.address, array.address.saturating_add(bytes)))
        };
        let ((a, a_end), (b, b_end)) = (span(self)?, span(other)?);
        Ok(a < b_end && b < a_end)
    }

    fn wrong_type(&self) -> PyErr {
        errors::shape(format!(
            "{} has elements of type {:?}; allowed: float32, float16, bfloat16",
            self.what, self.dtype
        ))
    }

    /// The host array's elements, to be written.
    ///
    /// # Errors
    /// `ShapeError` for an array on another device, not contiguous, or of another type.
    pub fn elements_mut(&mut self) -> PyResult<ElementsMut<'_>> {
        self.check_contiguous()?;
        let len = self.len();
        Ok(match self.dtype {
            Dtype::F32 => ElementsMut::F32(self.slice_mut(len)),
            Dtype::F16 => ElementsMut::F16(self.slice_mut::<f16>(len)),
            Dtype::Bf16 => ElementsMut::Bf16(self.slice_mut::<bf16>(len)),
            _ => return Err(self.wrong_type()),
        })
    }

    /// The host array's numbers of one type, side by side.
    fn numbers<T>(&self, dtype: Dtype) -> PyResult<&[T]> {
        self.check_numbers(dtype)?;
        Ok(self.slice(self.len()))
    }

    /// Refuses what [`Array::check_contiguous`] does, and another type.
    fn check_numbers(&self, dtype: Dtype) -> PyResult<()> {
        if self.dtype != dtype {
            return Err(errors::shape(format!(
                "{} has elements of type {:?}; needed: {dtype:?}",
                self.what, self.dtype
            )));
        }
        self.check_contiguous()
    }

    /// The host array's bytes.
    ///
    /// # Errors
    /// `ShapeError` for an array on another device, not contiguous, or of another type; so below.
    pub fn bytes(&self) -> PyResult<&[u8]> {
        self.numbers(Dtype::U8)
    }

    /// The host array's bytes, to be written.
    pub fn bytes_mut(&mut self) -> PyResult<&mut [u8]> {
        self.check_numbers(Dtype::U8)?;
        Ok(self.slice_mut(self.len()))
    }

    /// The host array's numbers of 32 bits.
    pub fn i32s(&self) -> PyResult<&[i32]> {
        self.numbers(Dtype::I32)
    }

    /// The host array's numbers of 64 bits.
    pub fn i64s(&self) -> PyResult<&[i64]> {
        self.numbers(Dtype::I64)
    }

    /// The host array's floats, to be written.
    pub fn f32s_mut(&mut self) -> PyResult<&mut [f32]> {
        self.check_numbers(Dtype::F32)?;
        Ok(self.slice_mut(self.len()))
    }

    /// Callers have seen that the array is on the host, aligned and of `T`, and that its last element is the last of `len` from its first on.
    fn slice<T>(&self, len: usize) -> &[T] {
        if len == 0 {
            return &[];
        }
        // SAFETY: the exporter keeps the array's elements while the capsule lives, and what lies between them is of one allocation with them;
        // `check_host` has seen that they are aligned; every bit pattern is a number. The package's functions are documented to be the arrays'
        // only users meanwhile.
        unsafe { std::slice::from_raw_parts(self.address as *const T, len) }
    }

    fn slice_mut<T>(&mut self, len: usize) -> &mut [T] {
        if len == 0 {
            return &mut [];
        }
        // SAFETY: as for `slice`; the package passes an array to be written that it has just made, or that the caller gave it to be written.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, len) }
    }
}

/// Where the rows of an array lie.
struct Place {
    /// Sequences, tokens, heads, dim.
    shape: [usize; 4],
    /// Elements from one sequence, token, head to the next.
    strides: [usize; 3],
    /// Elements from the first to the last one.
    elements: usize,
}

/// Strides of a C array, in elements.
fn row_major(shape: &[usize]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(shape[i].max(1) as i64);
    }
    strides
}

/// The stream of a number, as libraries of Python give it.
#[cfg(feature = "cuda")]
pub fn stream_of(stream: u64) -> Stream {
    Stream::from_raw(stream as usize as *mut c_void)
}
/// Rows of K and of V; where V is none, as of latents, rows of no tokens of this many heads and dims.
///
/// # Errors
/// Those of [`Array::rows`].
pub fn kv_rows<'a>(
    k: &'a Array<'_>,
    v: Option<&'a Array<'_>>,
    [heads, v_dim]: [usize; 2],
) -> PyResult<[Rows<'a>; 2]> {
    let k = k.rows()?;
    let v = match v {
        Some(v) => v.rows()?,
        None => k.no_tokens(heads, v_dim).map_err(errors::of)?,
    };
    Ok([k, v])
}
