//! A paged, quantized cache for Python: rows come and go as DLPack capsules, of host memory or of the cache's GPU.

mod options;
mod spans;

use std::{
    ffi::CString,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use attn::{
    Append, AttendRows, CacheConfig, Device, Error, KvFormat, Rows, Scheme, SequenceImage, Session,
    SpanRows, Window, process,
};
use pyo3::{
    exceptions::PyRuntimeWarning,
    prelude::*,
    types::{PyBytes, PyCapsule},
};

use crate::{
    dlpack::{self, Array},
    engine, errors,
};
use options::{Attending, CacheOptions, StepOptions, appends};

pub use spans::merge_spans;

/// A cache's session, whose end leaves the thread's device as it is, whenever Python collects it.
struct HeldSession(Option<Mutex<Session>>);

impl HeldSession {
    fn new(session: Session) -> Self {
        HeldSession(Some(Mutex::new(session)))
    }

    fn lock(&self) -> MutexGuard<'_, Session> {
        let session = self.0.as_ref().expect("a session until it is dropped");
        session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HeldSession {
    fn drop(&mut self) {
        let _callers = engine::keep_context();
        drop(self.0.take());
    }
}

/// The cache behind `attn.Cache`, which documents it.
#[pyclass(frozen, module = "attn._attn")]
pub struct Cache {
    session: HeldSession,
    device: Arc<Device>,
    config: CacheConfig,
    /// Whether the first numbers that saturate have been told.
    has_warned: [AtomicBool; 2],
}

impl Cache {
    /// Waits for the cache's other calls. A process that was forked from the cache's is refused before it waits, since a thread that it lacks may have
    /// held the lock.
    fn lock(&self) -> Result<MutexGuard<'_, Session>, Error> {
        process::check()?;
        Ok(self.session.lock())
    }

    /// Runs `work` on the cache without the interpreter's lock; the thread's device is behind it what it was.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Session) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let _callers = engine::keep_context();
        py.detach(|| work(&mut *self.lock()?)).map_err(errors::of)
    }

    /// Warns once each of numbers that were stored as the end of the format's range, and of keys that it stores badly. The tokens are in the cache, also where a filter
    /// makes an exception of the warning.
    fn warn_of_numbers(&self, py: Python<'_>) -> PyResult<()> {
        let has_warned = |i: usize| self.has_warned[i].load(Ordering::Relaxed);
        if has_warned(0) && has_warned(1) {
            return Ok(());
        }
        let (saturated, outliers) = self.with(py, |session| {
            Ok((session.saturated(), session.outlier_notice()))
        })?;
        let saturated = saturated.filter(|values| *values > 0).map(|values| {
            let notice = self.config.format.saturation_notice(values);
            format!("{notice}; stats().saturated counts them")
        });
        for (notice, has_warned) in [saturated, outliers].into_iter().zip(&self.has_warned) {
            let Some(notice) = notice.filter(|_| !has_warned.swap(true, Ordering::Relaxed)) else {
                continue;
            };
            let text = CString::new(format!("attn.Cache: {notice}"))?;
            // The caller of the Python method that has called this one.
            PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &text, 2)?;
        }
        Ok(())
    }
}

/// K and V of new tokens; of latents K alone.
struct KvArrays<'py> {
    k: Array<'py>,
    v: Option<Array<'py>>,
}

impl<'py> KvArrays<'py> {
    fn to_read(
        k: &Bound<'py, PyCapsule>,
        v: Option<&Bound<'py, PyCapsule>>,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        let v = v.map(|v| Array::to_read("v", v, stream));
        Ok(KvArrays {
            k: Array::to_read("k", k, stream)?,
            v: v.transpose()?,
        })
    }

    /// Those of [`dlpack::kv_rows`].
    fn rows(&self, config: &CacheConfig) -> PyResult<[Rows<'_>; 2]> {
        let shape = [config.num_kv_heads, config.head_dim.v];
        dlpack::kv_rows(&self.k, self.v.as_ref(), shape)
    }
}

#[pymethods]
impl Cache {
    #[new]
    #[pyo3(signature = (options, device))]
    fn new(py: Python<'_>, options: CacheOptions, device: Option<&str>) -> PyResult<Self> {
        let config = options.config()?;
        let device = match device {
            Some(name) => {
                let name = engine::parse(name)?;
                py.detach(|| engine::open(name))?
            }
            None => py.detach(engine::best)?,
        };
        let _callers = engine::keep_context();
        let session = py.detach(|| Session::new(device.clone(), &config));
        Ok(Cache {
            session: HeldSession::new(session.map_err(errors::of)?),
            device,
            config,
            has_warned: Default::default(),
        })
    }

    /// `cpu`, `wgpu`, `cuda:0`.
    #[getter]
    fn device(&self) -> String {
        self.device.name().to_string()
    }

    #[pyo3(signature = (k, v, sequences, tokens, stream=None))]
    fn append(
        &self,
        py: Python<'_>,
        k: &Bound<'_, PyCapsule>,
        v: Option<&Bound<'_, PyCapsule>>,
        sequences: Vec<usize>,
        tokens: Vec<usize>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let kv = KvArrays::to_read(k, v, stream)?;
        let appends = appends(&sequences, &tokens)?;
        let [k, v] = kv.rows(&self.config)?;
        self.with(py, |session| session.append(&appends, k, v))?;
        self.warn_of_numbers(py)
    }

    /// Begins a step of all layers: takes its pages, and counts its tokens.
    fn reserve(&self, py: Python<'_>, sequences: Vec<usize>, tokens: Vec<usize>) -> PyResult<()> {
        let appends = appends(&sequences, &tokens)?;
        self.with(py, |session| session.reserve(&appends))
    }

    /// Writes one layer of the open step.
    #[pyo3(signature = (layer, k, v, stream=None))]
    fn write(
        &self,
        py: Python<'_>,
        layer: usize,
        k: &Bound<'_, PyCapsule>,
        v: Option<&Bound<'_, PyCapsule>>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let kv = KvArrays::to_read(k, v, stream)?;
        let [k, v] = kv.rows(&self.config)?;
        self.with(py, |session| session.write(layer, k, v))?;
        self.warn_of_numbers(py)
    }

    fn cancel_step(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, Session::cancel_step)
    }

    /// The sequences of the open step, and the tokens of each.
    fn open_step(&self, py: Python<'_>) -> PyResult<Option<Vec<(usize, usize)>>> {
        self.with(py, |session| {
            let pair = |append: &Append| (append.sequence, append.tokens);
            let step = session.open_step();
            Ok(step.map(|appends| appends.iter().map(pair).collect()))
        })
    }

    #[pyo3(signature = (q, out, lse, options, stream=None))]
    fn attend(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyCapsule>,
        out: &Bound<'_, PyCapsule>,
        lse: Option<&Bound<'_, PyCapsule>>,
        options: StepOptions,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let (q, mut out) = (
            Array::to_read("q", q, stream)?,
            Array::to_write("out", out, stream)?,
        );
        let lse = lse.map(|lse| Array::to_write_numbers("lse", lse, stream));
        let mut lse = lse.transpose()?;
        let attending = Attending::new(&q, options)?;
        // Outputs between the queries of one array: the queries are copied before the outputs' memory is borrowed.
        let copied = match q.shares_memory_with(&out)? {
            true => Some(q.rows()?.to_wide().map_err(errors::of)?),
            false => None,
        };
        let rows = AttendRows {
            q: match &copied {
                Some(copied) => copied.into(),
                None => q.rows()?,
            },
            out: out.rows_mut()?,
            lse: lse.as_mut().map(Array::rows_mut).transpose()?,
        };
        self.with(py, |session| session.attend(&attending.at(), rows))
    }

    /// Attends shards, and leaves the states of their spans in two arrays: maxima and sums, and O.
    #[pyo3(signature = (q, max_sums, o, options, stream=None))]
    fn attend_spans(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyCapsule>,
        max_sums: &Bound<'_, PyCapsule>,
        o: &Bound<'_, PyCapsule>,
        options: StepOptions,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let q = Array::to_read("q", q, stream)?;
        let mut max_sums = Array::to_write("max_sums", max_sums, stream)?;
        let mut o = Array::to_write("o", o, stream)?;
        let attending = Attending::new(&q, options)?;
        o.check_rank(4, "[spans, query tokens, heads, dim]")?;
        let rows = SpanRows {
            q: q.rows()?,
            spans: o.shape[0],
            max_sums: max_sums.rows_mut()?,
            o: o.rows_mut()?,
        };
        self.with(py, |session| session.attend_spans(&attending.at(), rows))
    }

    fn fork(&self, py: Python<'_>, source: usize, target: usize) -> PyResult<()> {
        self.with(py, |session| session.fork(source, target))
    }

    fn truncate(&self, py: Python<'_>, sequence: usize, tokens: usize) -> PyResult<()> {
        self.with(py, |session| session.truncate(sequence, tokens))
    }

    fn check_truncate(&self, py: Python<'_>, sequence: usize, tokens: usize) -> PyResult<()> {
        self.with(py, |session| session.check_truncate(sequence, tokens))
    }

    fn longest_prefix(&self, py: Python<'_>, sequence: usize, tokens: usize) -> PyResult<usize> {
        self.with(py, |session| session.longest_prefix(sequence, tokens))
    }

    fn free(&self, py: Python<'_>, sequence: usize) -> PyResult<()> {
        self.with(py, |session| session.free(sequence))
    }

    fn drop_before(&self, py: Python<'_>, sequence: usize, token: usize) -> PyResult<()> {
        self.with(py, |session| session.drop_before(sequence, token))
    }

    fn drop_range(
        &self,
        py: Python<'_>,
        sequence: usize,
        start: usize,
        end: usize,
    ) -> PyResult<usize> {
        self.with(py, |session| session.drop_range(sequence, start..end))
    }

    fn shard_centres(&self, py: Python<'_>, sequence: usize) -> PyResult<Vec<u8>> {
        self.with(py, |session| session.shard_centres(sequence))
    }

    fn begin_shard(
        &self,
        py: Python<'_>,
        sequence: usize,
        tokens_before: usize,
        centres: &[u8],
    ) -> PyResult<()> {
        self.with(py, |session| {
            session.begin_shard(sequence, tokens_before, centres)
        })
    }

    fn add_sequences(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.with(py, |session| session.add_sequences(count))
    }

    fn add_pages(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.with(py, |session| session.add_pages(count))
    }

    fn pages_needed(
        &self,
        py: Python<'_>,
        sequences: Vec<usize>,
        tokens: Vec<usize>,
    ) -> PyResult<usize> {
        let appends = appends(&sequences, &tokens)?;
        self.with(py, |session| session.pages_needed(&appends))
    }

    /// Numbers that were stored as the end of the format's range; none where they are not counted.
    fn saturated(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.with(py, |session| Ok(session.saturated()))
    }

    /// How uneven the channels of the keys are; none before the first look.
    fn key_outliers(&self, py: Python<'_>) -> PyResult<Option<f32>> {
        self.with(py, |session| Ok(session.key_outliers()))
    }

    fn lens(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.with(py, |session| Ok(session.table().lens.clone()))
    }

    /// The first token of each sequence that was not dropped.
    fn first_tokens(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.with(py, |session| Ok(session.table().first_tokens.clone()))
    }

    fn free_pages(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |session| Ok(session.free_pages()))
    }

    /// Pages that one sequence of so many tokens takes, those of its residuals included.
    fn pages_for(&self, tokens: usize) -> usize {
        self.config.pages_for(tokens)
    }

    fn num_pages(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |session| Ok(session.config().num_pages))
    }

    /// Whether the newest tokens have residuals, which older ones have given up.
    #[getter]
    fn has_window(&self) -> bool {
        self.config.format.window() != Window::None
    }

    /// The largest magnitudes that K and V may have.
    #[getter]
    fn largest(&self) -> [f32; 2] {
        let KvFormat { k, v, .. } = self.config.format;
        [k, v].map(Scheme::max_magnitude)
    }

    /// Whether keys are stored without their centres.
    #[getter]
    fn centres(&self) -> bool {
        self.config.centres
    }

    /// Bytes of a page in each layer.
    #[getter]
    fn page_bytes(&self) -> PyResult<usize> {
        Ok(self.config.layout().map_err(errors::of)?.page_bytes())
    }

    /// Bytes that a sequence takes for each of its checkpoints, in all layers.
    #[getter]
    fn checkpoint_bytes(&self) -> PyResult<usize> {
        self.config.checkpoint_bytes().map_err(errors::of)
    }

    /// A sequence as one block of bytes.
    fn save<'py>(&self, py: Python<'py>, sequence: usize) -> PyResult<Bound<'py, PyBytes>> {
        let image = self.with(py, |session| session.image(sequence))?;
        Ok(PyBytes::new(py, image.as_bytes()))
    }

    /// Fills an empty sequence from the bytes that `save` gave.
    fn restore(&self, py: Python<'_>, sequence: usize, image: &Bound<'_, PyBytes>) -> PyResult<()> {
        let bytes = image.as_bytes();
        self.with(py, |session| {
            session.restore(sequence, &SequenceImage::from_bytes(bytes)?)
        })
    }

    /// A cache of its own with the same sequences.
    fn copy(&self, py: Python<'_>) -> PyResult<Self> {
        let (session, config) = self.with(py, |session| {
            let copy = session.copy()?;
            let config = copy.config().clone();
            Ok((copy, config))
        })?;
        Ok(Cache {
            session: HeldSession::new(session),
            device: self.device.clone(),
            config,
            has_warned: [0, 1].map(|i| AtomicBool::new(self.has_warned[i].load(Ordering::Relaxed))),
        })
    }

    /// Writes a sequence's dequantized K and V of a layer, float32 `[tokens, heads, dim]` on the host.
    fn export(
        &self,
        py: Python<'_>,
        sequence: usize,
        layer: usize,
        k: &Bound<'_, PyCapsule>,
        v: &Bound<'_, PyCapsule>,
    ) -> PyResult<()> {
        let (mut k, mut v) = (Array::new("k", k)?, Array::new("v", v)?);
        let [from_k, from_v] = self.with(py, |session| session.export(sequence, layer))?;
        for (rows, values) in [(&mut k, from_k), (&mut v, from_v)] {
            let what = rows.what;
            let mut elements = rows.elements_mut()?;
            if elements.len() != values.len() {
                return Err(errors::shape(format!(
                    "{what} holds {} elements, but the sequence has {}",
                    elements.len(),
                    values.len()
                )));
            }
            elements.write(&values);
        }
        Ok(())
    }
}
