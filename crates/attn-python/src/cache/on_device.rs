//! Steps whose rows lie on the cache's GPU.

use attn::{
    BackendId,
    backends::cuda::{
        QueryRows, SpanRows,
        native::{DeviceAddress, Dtype as CudaDtype, KvRows, Stream},
    },
};

use super::*;
use crate::{dlpack::Dtype, gpu::stream_of};

impl Inner {
    /// What the steps keep, made at the first one.
    fn device_steps(&mut self, device: &Device) -> Result<(&mut DeviceSteps, &mut KvCache), Error> {
        let gpu = device.cuda("array, which lies on a CUDA device,")?;
        let steps = match self.device_steps.take() {
            Some(steps) => steps,
            None => gpu.prepare_steps(&self.cache)?,
        };
        Ok((self.device_steps.insert(steps), &mut self.cache))
    }
}

/// A number format that the kernels take.
fn dtype(array: &Array<'_>) -> PyResult<CudaDtype> {
    match array.dtype {
        Dtype::F32 => Ok(CudaDtype::F32),
        Dtype::F16 => Ok(CudaDtype::F16),
        Dtype::Bf16 => Ok(CudaDtype::Bf16),
        _ => Err(errors::shape(format!(
            "{} has elements of type {:?}; allowed: float32, float16, bfloat16",
            array.what, array.dtype
        ))),
    }
}

/// Tokens of all sequences.
fn count(appends: &[Append]) -> usize {
    appends
        .iter()
        .fold(0, |n, append| n.saturating_add(append.tokens))
}

impl Cache {
    /// Refuses an array that is not on the cache's device, or whose rows are not contiguous from dim `first` on.
    fn check_on_device(&self, array: &Array<'_>, first: usize) -> PyResult<()> {
        let name = self.device.name();
        let own = i32::try_from(name.ordinal).ok();
        if array.cuda.is_none() || array.cuda != own || name.id != BackendId::Cuda {
            return Err(errors::shape(format!(
                "{} lies on {}, and the cache on {}; bring all arrays of a call to the cache's device, or all to the CPU",
                array.what,
                array
                    .cuda
                    .map_or("the CPU".into(), |device| format!("cuda:{device}")),
                name
            )));
        }
        if !array.is_contiguous_from(first) {
            return Err(errors::shape(format!(
                "{} has the strides {:?}; its heads and dims must be contiguous",
                array.what, array.strides
            )));
        }
        if array.len() > 0 && !array.address().is_multiple_of(16) {
            return Err(errors::shape(format!(
                "{} begins at an address that is no multiple of 16 bytes; copy it",
                array.what
            )));
        }
        Ok(())
    }

    /// New tokens of the cache's device, as kernels read them.
    fn new_tokens(&self, [k, v]: [&Array<'_>; 2], tokens: usize) -> PyResult<KvRows> {
        for rows in [k, v] {
            self.check_on_device(rows, 1)?;
            if rows.shape[0] != tokens {
                return Err(errors::shape(format!(
                    "{} has {} tokens, but the sequences get {tokens}",
                    rows.what, rows.shape[0]
                )));
            }
            if rows.strides[0] < 0 {
                return Err(errors::shape(format!(
                    "{} runs backwards; copy it",
                    rows.what
                )));
            }
        }
        if k.dtype != v.dtype {
            return Err(errors::shape(format!(
                "k is of type {:?}, and v of {:?}; pass both in one",
                k.dtype, v.dtype
            )));
        }
        Ok(KvRows {
            k: DeviceAddress::new(k.address()),
            v: DeviceAddress::new(v.address()),
            dtype: dtype(k)?,
            k_token_stride: k.strides[0] as usize,
            v_token_stride: v.strides[0] as usize,
        })
    }

    /// Enqueues a step on a library's stream, the default one for none, with the cache locked and without Python's lock.
    fn on_stream(
        &self,
        py: Python<'_>,
        stream: Option<u64>,
        step: impl FnOnce(&mut DeviceSteps, &mut KvCache, Stream) -> Result<(), Error> + Send,
    ) -> PyResult<()> {
        let stream = stream.unwrap_or(0);
        py.detach(|| {
            let mut inner = self.lock()?;
            let (steps, cache) = inner.device_steps(&self.device)?;
            step(steps, cache, stream_of(stream))
        })
        .map_err(errors::of)
    }

    pub(super) fn append_on_device(
        &self,
        py: Python<'_>,
        k: &Array<'_>,
        v: &Array<'_>,
        appends: &[Append],
        stream: Option<u64>,
    ) -> PyResult<()> {
        let tokens = self.new_tokens([k, v], count(appends))?;
        self.on_stream(py, stream, |steps, cache, stream| {
            // SAFETY: the arrays have been compared with the cache's heads, dims and device, and with the number of tokens; the caller's
            // library keeps their memory until the work enqueued on its current stream has run. The stream is that library's current one,
            // of the device's primary context, or 0, which is the default stream. Numbers that are not finite give rows that mean nothing.
            unsafe { steps.append(cache, appends, &tokens, stream) }
        })
    }

    pub(super) fn write_on_device(
        &self,
        py: Python<'_>,
        layer: usize,
        [k, v]: [&Array<'_>; 2],
        stream: Option<u64>,
    ) -> PyResult<()> {
        let tokens = self.new_tokens([k, v], k.shape[0])?;
        let [given, heads, dim] = [0, 1, 2].map(|i| k.shape[i]);
        self.on_stream(py, stream, |steps, cache, stream| {
            // Without an open step the write is refused, whatever its rows.
            let needed = cache.open_step().map_or(given, count);
            if given != needed {
                return Err(Error::Shape {
                    what: "k",
                    given: [given, heads, dim],
                    needed: [needed, heads, dim],
                });
            }
            // SAFETY: as for appends; the number of tokens is the open step's, which no other call changes while the cache is locked.
            unsafe { steps.write(cache, layer, &tokens, stream) }
        })
    }

    pub(super) fn attend_on_device(
        &self,
        py: Python<'_>,
        [q, out]: [&Array<'_>; 2],
        lse: Option<&Array<'_>>,
        attended: &Attended,
        stream: Option<u64>,
    ) -> PyResult<()> {
        for rows in [Some(q), Some(out), lse].into_iter().flatten() {
            self.check_on_device(rows, 0)?;
        }
        if q.dtype != out.dtype {
            return Err(errors::shape(format!(
                "q is of type {:?}, and out of {:?}; pass both in one",
                q.dtype, out.dtype
            )));
        }
        if lse.is_some_and(|lse| lse.dtype != Dtype::F32) {
            return Err(errors::shape("lse is not of type float32"));
        }
        let rows = QueryRows {
            q: DeviceAddress::new(q.address()),
            out: DeviceAddress::new(out.address()),
            dtype: dtype(q)?,
            lse: lse.map_or(DeviceAddress::NULL, |lse| DeviceAddress::new(lse.address())),
        };
        self.on_stream(py, stream, |steps, cache, stream| {
            let layer = cache.layer(attended.layer)?;
            let chosen = layer.sequences(&attended.sequences)?;
            // SAFETY: as for appends; outputs have the queries' shape, which the problem has been made of, and are the caller's to write.
            unsafe { steps.attend(&chosen, &attended.problem, &rows, stream) }
        })
    }

    pub(super) fn attend_spans_on_device(
        &self,
        py: Python<'_>,
        q: &Array<'_>,
        states: &States<'_>,
        attended: &Attended,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let arrays = [&states.max_sums, &states.o];
        for array in [q].into_iter().chain(arrays) {
            self.check_on_device(array, 0)?;
        }
        if let Some(array) = arrays.into_iter().find(|array| array.dtype != Dtype::F32) {
            return Err(errors::shape(format!(
                "{} is not of type float32",
                array.what
            )));
        }
        let rows = SpanRows {
            q: DeviceAddress::new(q.address()),
            dtype: dtype(q)?,
            spans: states.o.shape[0],
            max_sums: DeviceAddress::new(states.max_sums.address()),
            o: DeviceAddress::new(states.o.address()),
        };
        self.on_stream(py, stream, |steps, cache, stream| {
            let layer = cache.layer(attended.layer)?;
            let chosen = layer.sequences(&attended.sequences)?;
            // SAFETY: as for appends; the states' arrays have been compared with the queries' shape, and are the caller's to write.
            unsafe { steps.attend_spans(&chosen, &attended.problem, &rows, stream) }
        })
    }
}
