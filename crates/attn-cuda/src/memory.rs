//! A caller's numbers in the GPU's memory: the one place where an address becomes rows, and what kernels ask of rows.

use std::any::Any;

use attn_core::{DeviceMemory, DeviceRows, Dtype, Error};

use crate::{
    handles::{DeviceAddress, Stream},
    native::KvRows,
};

/// Kernels read and write 16 bytes at once.
const ALIGNMENT: usize = 16;

/// Numbers in a GPU's memory, and the stream that orders what is done with them: what [`Rows::on_device`](attn_core::Rows::on_device) makes rows of.
///
/// ```no_run
/// use attn_core::{Dtype, Error, Rows};
/// use attn_cuda::{CudaMemory, native::{DeviceAddress, Stream}};
///
/// fn rows(address: u64, stream: *mut std::ffi::c_void) -> Result<(), Error> {
///     let (at, stream) = (DeviceAddress::new(address), Stream::from_raw(stream));
///     // SAFETY: the caller's memory of the first GPU has 3 tokens of 8 heads of 128 numbers, and stays until the work on the stream has run.
///     let memory = unsafe { CudaMemory::to_read(0, at, 3 * 8 * 128, Dtype::Bf16, stream) };
///     let k = Rows::on_device(&memory, [1, 3, 8, 128], [0, 8 * 128, 128])?;
///     # let _ = k;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct CudaMemory {
    ordinal: usize,
    at: DeviceAddress,
    elements: usize,
    dtype: Dtype,
    /// The address of the stream's handle.
    stream: usize,
    is_writable: bool,
}

impl CudaMemory {
    /// `elements` numbers from an address on, on the GPU of this number, to be read.
    ///
    /// # Safety
    /// - `stream` is a live stream of that GPU's primary context.
    /// - The GPU's memory has the numbers at the address, and nothing writes them, until the work that calls with this memory have enqueued on `stream` has run. Work
    ///   that writes them is ahead of it on the stream.
    #[must_use]
    pub unsafe fn to_read(
        ordinal: usize,
        at: DeviceAddress,
        elements: usize,
        dtype: Dtype,
        stream: Stream,
    ) -> Self {
        CudaMemory {
            ordinal,
            at,
            elements,
            dtype,
            stream: stream.as_raw() as usize,
            is_writable: false,
        }
    }

    /// The same, to be read or written.
    ///
    /// # Safety
    /// As [`CudaMemory::to_read`], and nothing else reads or writes the numbers until the work on `stream` has run.
    #[must_use]
    pub unsafe fn to_write(
        ordinal: usize,
        at: DeviceAddress,
        elements: usize,
        dtype: Dtype,
        stream: Stream,
    ) -> Self {
        // SAFETY: this function's contract.
        let memory = unsafe { CudaMemory::to_read(ordinal, at, elements, dtype, stream) };
        CudaMemory {
            is_writable: true,
            ..memory
        }
    }
}

impl DeviceMemory for CudaMemory {
    fn elements(&self) -> usize {
        self.elements
    }

    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn device(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The rows of one call: all on one GPU and one stream.
pub(crate) struct CallRows {
    ordinal: usize,
    /// The address of the first rows' stream.
    stream: Option<usize>,
}

impl CallRows {
    /// For a call on the GPU of this number.
    pub(crate) fn on(ordinal: usize) -> Self {
        CallRows {
            ordinal,
            stream: None,
        }
    }

    /// The stream of the rows so far.
    pub(crate) fn stream(&self) -> Stream {
        Stream::from_raw(self.stream.unwrap_or(0) as *mut _)
    }

    /// K and V as appends read them: heads side by side, tokens equally far apart, both of one type.
    pub(crate) fn tokens(&mut self, [k, v]: [DeviceRows<'_>; 2]) -> Result<KvRows, Error> {
        let [k_memory, v_memory] = [self.memory(&k)?, self.memory(&v)?];
        same_type(&v, v_memory, k_memory.dtype, "k")?;
        Ok(KvRows {
            k: k_memory.at,
            v: v_memory.at,
            dtype: k_memory.dtype,
            k_token_stride: token_stride(&k, k_memory)?,
            v_token_stride: token_stride(&v, v_memory)?,
        })
    }

    /// Queries side by side, and their type.
    pub(crate) fn queries(&mut self, q: &DeviceRows<'_>) -> Result<(DeviceAddress, Dtype), Error> {
        let memory = self.memory(q)?;
        packed(q)?;
        Ok((memory.at, memory.dtype))
    }

    /// Rows to write, side by side, of the type that `like` has.
    pub(crate) fn results(
        &mut self,
        rows: &DeviceRows<'_>,
        dtype: Dtype,
        like: &str,
    ) -> Result<DeviceAddress, Error> {
        let memory = self.memory(rows)?;
        packed(rows)?;
        same_type(rows, memory, dtype, like)?;
        if !memory.is_writable {
            return Err(rows.refused("is memory to read", "memory to write"));
        }
        Ok(memory.at)
    }

    /// The backend's own description of rows: one that another type leads to says nothing that is relied on.
    fn memory<'a>(&mut self, rows: &DeviceRows<'a>) -> Result<&'a CudaMemory, Error> {
        let memory = rows.memory().as_any().downcast_ref::<CudaMemory>();
        let memory = memory.filter(|memory| memory.ordinal == self.ordinal);
        let memory = memory.ok_or_else(|| {
            rows.refused(
                format!("lies on {}", rows.memory().device()),
                format!("memory of the cache's device, cuda:{}", self.ordinal),
            )
        })?;
        if rows.end() > memory.elements {
            return Err(Error::Length {
                what: rows.what(),
                given: memory.elements,
                needed: rows.end(),
            });
        }
        if rows.end() > 0 && memory.at.is_null() {
            return Err(rows.refused("is a null address", "memory of the device"));
        }
        if rows.end() > 0 && !memory.at.get().is_multiple_of(ALIGNMENT as u64) {
            return Err(rows.refused(
                "begins at an address that is no multiple of 16 bytes",
                "rows that do; copy them",
            ));
        }
        if *self.stream.get_or_insert(memory.stream) != memory.stream {
            return Err(rows.refused(
                "has another stream than the rows before it",
                "one stream for all rows of a call",
            ));
        }
        Ok(memory)
    }
}

fn same_type(
    rows: &DeviceRows<'_>,
    memory: &CudaMemory,
    dtype: Dtype,
    like: &str,
) -> Result<(), Error> {
    if memory.dtype == dtype {
        return Ok(());
    }
    let given = format!("has numbers of {}", memory.dtype);
    Err(rows.refused(given, format!("{dtype}, as {like}")))
}

fn packed(rows: &DeviceRows<'_>) -> Result<(), Error> {
    if rows.is_packed() {
        return Ok(());
    }
    Err(rows.refused(
        "has rows that lie apart",
        "rows side by side in device memory; copy them",
    ))
}

fn token_stride(rows: &DeviceRows<'_>, memory: &CudaMemory) -> Result<usize, Error> {
    let stride = rows.token_stride().ok_or_else(|| {
        let given = "has heads that lie apart, or tokens at several distances";
        rows.refused(given, "the heads of a token side by side in device memory, and tokens equally far apart; copy the rows")
    })?;
    let bytes = stride.saturating_mul(memory.dtype.bytes());
    if rows.shape()[0] > 1 && !bytes.is_multiple_of(ALIGNMENT) {
        let given = format!("has a token every {stride} elements, {bytes} bytes");
        return Err(rows.refused(
            given,
            "a multiple of 16 bytes from token to token; copy the rows",
        ));
    }
    Ok(stride)
}

#[cfg(test)]
mod tests {
    use attn_core::{Rows, RowsMut};

    use super::*;

    const STREAM: usize = 0x50;

    fn at(address: u64, elements: usize, dtype: Dtype) -> CudaMemory {
        let stream = Stream::from_raw(STREAM as *mut _);
        // SAFETY: nothing is enqueued.
        unsafe { CudaMemory::to_write(1, DeviceAddress::new(address), elements, dtype, stream) }
    }

    /// Three tokens of 2 heads of 64 numbers at these strides.
    fn rows(memory: &dyn DeviceMemory, token: usize, head: usize) -> DeviceRows<'_> {
        let rows = Rows::on_device(memory, [1, 3, 2, 64], [0, token, head]).unwrap();
        rows.device_rows("k", [3, 2, 64]).unwrap()
    }

    fn said<T>(result: Result<T, Error>) -> String {
        let error = result.err().expect("a refusal");
        assert!(matches!(error, Error::Rows { .. }), "{error}");
        error.to_string()
    }

    #[test]
    fn tokens_are_read_where_heads_lie_side_by_side_at_whole_chunks() {
        let (k, v) = (at(0x100, 999, Dtype::F16), at(0x200, 999, Dtype::F16));
        let given = [rows(&k, 136, 64), rows(&v, 128, 64)];
        let mut call = CallRows::on(1);
        let tokens = call.tokens(given).unwrap();
        assert_eq!((tokens.k.get(), tokens.v.get()), (0x100, 0x200));
        assert_eq!((tokens.k_token_stride, tokens.v_token_stride), (136, 128));
        assert_eq!(
            (tokens.dtype, call.stream().as_raw() as usize),
            (Dtype::F16, STREAM)
        );

        // Latents: V is of no tokens, and lies where K does.
        let latents = Rows::on_device(&k, [1, 3, 2, 64], [0, 136, 64]).unwrap();
        let none = latents.no_tokens(2, 48).unwrap();
        let none = none.device_rows("v", [0, 2, 48]).unwrap();
        let tokens = CallRows::on(1).tokens([rows(&k, 136, 64), none]).unwrap();
        assert_eq!((tokens.k.get(), tokens.v_token_stride), (0x100, 96));

        let refusal = |k: DeviceRows<'_>| said(CallRows::on(1).tokens([k, rows(&v, 128, 64)]));
        assert!(refusal(rows(&k, 132, 64)).contains("132 elements, 264 bytes"));
        assert!(refusal(rows(&k, 144, 72)).contains("heads that lie apart"));
        let wide = at(0x100, 999, Dtype::F32);
        let said_of_v = refusal(rows(&wide, 128, 64));
        assert!(
            said_of_v.contains("has numbers of f16; needed: f32, as k"),
            "{said_of_v}"
        );
        let odd = at(0x108, 999, Dtype::F16);
        assert!(refusal(rows(&odd, 128, 64)).contains("no multiple of 16"));
        let null = at(0, 999, Dtype::F16);
        assert!(refusal(rows(&null, 128, 64)).contains("null address"));
        assert!(said(CallRows::on(0).tokens(given)).contains("lies on cuda:1"));
        let mut other = at(0x100, 999, Dtype::F16);
        other.stream = 0;
        assert!(refusal(rows(&other, 128, 64)).contains("another stream"));
    }

    #[test]
    fn results_lie_side_by_side_in_memory_to_write_of_the_queries_type() {
        let out = at(0x100, 999, Dtype::Bf16);
        let result = |memory: &CudaMemory, token| {
            let rows = RowsMut::on_device(memory, [1, 3, 2, 64], [0, token, 64]).unwrap();
            let rows = rows.device_rows("out", [3, 2, 64]).unwrap();
            CallRows::on(1).results(&rows, Dtype::Bf16, "q")
        };
        assert_eq!(result(&out, 128).unwrap().get(), 0x100);
        assert!(said(result(&out, 136)).contains("rows that lie apart"));
        assert!(said(result(&at(0x100, 999, Dtype::F16), 128)).contains("bf16, as q"));
        let read = CudaMemory {
            is_writable: false,
            ..out
        };
        assert!(said(result(&read, 128)).contains("memory to read"));
    }

    /// A description that claims more than the memory it leads to.
    #[derive(Debug)]
    struct Liar(CudaMemory);

    impl DeviceMemory for Liar {
        fn elements(&self) -> usize {
            usize::MAX
        }
        fn dtype(&self) -> Dtype {
            Dtype::F32
        }
        fn device(&self) -> String {
            self.0.device()
        }
        fn as_any(&self) -> &dyn Any {
            &self.0
        }
    }

    #[test]
    fn no_other_type_makes_rows_longer_than_the_memory_is() {
        let liar = Liar(at(0x100, 3 * 128 - 1, Dtype::F32));
        let refused = CallRows::on(1).queries(&rows(&liar, 128, 64));
        let needed = 3 * 128;
        assert!(
            matches!(refused, Err(Error::Length { needed: n, .. }) if n == needed),
            "{refused:?}"
        );
    }
}
