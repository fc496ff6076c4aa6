//! Where rows in a caller's memory lie, on the host or on the cache's GPU: C's pointers and strides as the library's rows.

use std::ffi::c_void;

use attn::{
    AttendRows, Elements, ElementsMut, HeadDim, RowsMut,
    backends::cuda::{
        CudaMemory,
        native::{DeviceAddress, Stream},
    },
};

use crate::{
    arguments::{self, elements, elements_mut},
    rows::Rows,
    status::{Failure, Status},
};

/// The memory of a call's rows.
#[derive(Clone, Copy)]
pub(crate) enum Memory {
    Host,
    /// That of the GPU of this number, ordered by the stream.
    Device(usize, Stream),
}

impl Memory {
    /// The memory of the device that a stream belongs to; the host's without a stream.
    pub fn of(device: &attn::Device, stream: Option<Stream>) -> Result<Self, Failure> {
        let Some(stream) = stream else {
            return Ok(Memory::Host);
        };
        device.cuda("stream")?;
        Ok(Memory::Device(device.name().ordinal, stream))
    }
}

/// Where a caller's rows `[tokens][heads][dim]` lie, with its strides of tokens and heads in elements; 0 is that of rows side by side.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    shape: [usize; 3],
    strides: [usize; 2],
}

/// Numbers to read.
pub(crate) enum Numbers<'a> {
    Host(Elements<'a>),
    Device(CudaMemory),
}

/// Numbers to write.
pub(crate) enum NumbersMut<'a> {
    Host(ElementsMut<'a>),
    Device(CudaMemory),
}

impl Place {
    pub fn new(what: &str, shape: [usize; 3], [token, head]: [usize; 2]) -> Result<Self, Failure> {
        let [_, heads, dim] = shape;
        let refused = |sentence| Err(Failure::new(Status::Shape, sentence));
        let head = if head == 0 { dim } else { head };
        if head < dim {
            return refused(format!(
                "{what}_head_stride is {head}; a head has {dim} elements"
            ));
        }
        let packed = heads.saturating_mul(head);
        let token = if token == 0 { packed } else { token };
        if head == dim && token < packed {
            return refused(format!(
                "{what}_token_stride is {token}; a token has {packed} elements"
            ));
        }
        Ok(Place {
            shape,
            strides: [token, head],
        })
    }

    /// Elements up to the last row's end, saturating.
    fn reach(&self) -> usize {
        let ([tokens, heads, dim], [token, head]) = (self.shape, self.strides);
        if self.shape.contains(&0) {
            return 0;
        }
        let last = (tokens - 1).saturating_mul(token);
        last.saturating_add((heads - 1).saturating_mul(head))
            .saturating_add(dim)
    }

    /// The rows and what lies between them, to be read.
    ///
    /// # Safety
    /// `pointer` is NULL or has the rows and what lies between them in this memory, of the type that `dtype` says; on a device they stay as they are until the work that is
    /// enqueued on the stream, a live one of the device's primary context, has run.
    pub unsafe fn numbers<'a>(
        &self,
        (what, memory): (&str, Memory),
        dtype: u32,
        pointer: *const c_void,
    ) -> Result<Numbers<'a>, Failure> {
        let Memory::Device(ordinal, stream) = memory else {
            // SAFETY: this function's contract.
            let all = unsafe { elements(what, dtype, pointer, self.reach()) }?;
            return Ok(Numbers::Host(all));
        };
        let (at, dtype) = (
            DeviceAddress::new(pointer as u64),
            arguments::dtype(dtype)?.into(),
        );
        // SAFETY: this function's contract.
        let all = unsafe { CudaMemory::to_read(ordinal, at, self.reach(), dtype, stream) };
        Ok(Numbers::Device(all))
    }

    /// The rows and what lies between them, to be written.
    ///
    /// # Safety
    /// Those of [`Place::numbers`], of memory that nothing else uses meanwhile.
    pub unsafe fn numbers_mut<'a>(
        &self,
        (what, memory): (&str, Memory),
        dtype: u32,
        pointer: *mut c_void,
    ) -> Result<NumbersMut<'a>, Failure> {
        let Memory::Device(ordinal, stream) = memory else {
            // SAFETY: this function's contract.
            let all = unsafe { elements_mut(what, dtype, pointer, self.reach()) }?;
            return Ok(NumbersMut::Host(all));
        };
        let (at, dtype) = (
            DeviceAddress::new(pointer as u64),
            arguments::dtype(dtype)?.into(),
        );
        // SAFETY: this function's contract.
        let all = unsafe { CudaMemory::to_write(ordinal, at, self.reach(), dtype, stream) };
        Ok(NumbersMut::Device(all))
    }

    /// The rows of numbers that this place has described.
    pub fn rows<'a>(&self, numbers: &'a Numbers<'_>) -> Result<attn::Rows<'a>, Failure> {
        Ok(match numbers {
            Numbers::Host(all) => attn::Rows::strided(*all, self.shape, self.strides)?,
            Numbers::Device(all) => {
                let ([tokens, heads, dim], [token, head]) = (self.shape, self.strides);
                attn::Rows::on_device(all, [1, tokens, heads, dim], [0, token, head])?
            }
        })
    }

    /// The rows of numbers that this place has described, to be written, which take the host's numbers with them.
    pub fn rows_mut<'a>(&self, numbers: &'a mut NumbersMut<'a>) -> Result<RowsMut<'a>, Failure> {
        Ok(match numbers {
            NumbersMut::Host(all) => {
                let all = std::mem::replace(all, ElementsMut::F32(&mut []));
                RowsMut::strided(all, self.shape, self.strides)?
            }
            NumbersMut::Device(all) => {
                let ([tokens, heads, dim], [token, head]) = (self.shape, self.strides);
                RowsMut::on_device(all, [1, tokens, heads, dim], [0, token, head])?
            }
        })
    }
}

/// Runs `work` on a caller's queries, outputs and, if it asks for them, log-sum-exps, of so many query tokens, query heads and elements of a head.
///
/// # Safety
/// `rows` are as their type documents them, in this memory, with all of these; outputs overlap nothing else but, between them, the queries.
pub(crate) unsafe fn with_rows<T>(
    rows: &Rows,
    (tokens, heads, dim): (usize, usize, HeadDim),
    memory: Memory,
    work: impl FnOnce(AttendRows<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let strides = [rows.q_token_stride, rows.q_head_stride];
    let in_q = Place::new("q", [tokens, heads, dim.k], strides)?;
    let strides = [rows.out_token_stride, rows.out_head_stride];
    let in_out = Place::new("out", [tokens, heads, dim.v], strides)?;
    let in_lse = Place::new("lse", [tokens, heads, 1], [0; 2])?;
    // Outputs between the queries of a fused array: the host's queries are copied before the outputs' memory is borrowed.
    let shared = share((rows.q, in_q), (rows.out.cast_const(), in_out), rows.dtype)?;
    // SAFETY: this function's contract; what is borrowed here is given back ahead of the outputs' where the two share memory.
    let q = unsafe { in_q.numbers(("q", memory), rows.dtype, rows.q) }?;
    let copied = match memory {
        Memory::Host if shared => Some(in_q.rows(&q)?.to_wide()?),
        _ => None,
    };
    let q = match &copied {
        Some(copied) => copied.into(),
        None => in_q.rows(&q)?,
    };
    // SAFETY: this function's contract.
    let mut out = unsafe { in_out.numbers_mut(("out", memory), rows.dtype, rows.out) }?;
    let mut lse = match rows.lse.is_null() {
        true => None,
        false => {
            let (f32, at) = (arguments::Dtype::F32 as u32, rows.lse.cast());
            // SAFETY: this function's contract.
            Some(unsafe { in_lse.numbers_mut(("lse", memory), f32, at) }?)
        }
    };
    let lse: Option<Result<RowsMut<'_>, Failure>> = lse.as_mut().map(|lse| in_lse.rows_mut(lse));
    work(AttendRows {
        q,
        out: in_out.rows_mut(&mut out)?,
        lse: lse.transpose()?,
    })
}

/// Whether two callers' arrays, each with what lies between its rows, share a byte.
fn share(
    a: (*const c_void, Place),
    b: (*const c_void, Place),
    dtype: u32,
) -> Result<bool, Failure> {
    let bytes = arguments::dtype(dtype)?.bytes();
    let span = |(pointer, place): (*const c_void, Place)| {
        let start = pointer as usize;
        (
            start,
            start.saturating_add(place.reach().saturating_mul(bytes)),
        )
    };
    let ((a, a_end), (b, b_end)) = (span(a), span(b));
    Ok(a < b_end && b < a_end)
}
