//! A paged, quantized cache for Python: rows come and go as DLPack capsules, of host memory or of the cache's GPU.

#[cfg(feature = "cuda")]
mod on_device;
mod spans;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(feature = "cuda")]
use attn::backends::cuda::DeviceSteps;
use attn::{
    Append, CacheConfig, Device, Error, Heads, HostRows, HostSteps, KvCache, KvFormat, Problem,
    SequenceImage, Window, convert, process,
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyCapsule},
};

use crate::{dlpack::Array, engine, errors, modifiers::Modifiers};

use spans::States;
pub use spans::merge_spans;

/// A cache and what its steps keep. The steps are dropped first: they wait for what still reads the pool.
struct Inner {
    #[cfg(feature = "cuda")]
    device_steps: Option<DeviceSteps>,
    host_steps: HostSteps,
    cache: KvCache,
}

impl Inner {
    fn new(cache: KvCache) -> Self {
        Inner {
            #[cfg(feature = "cuda")]
            device_steps: None,
            host_steps: HostSteps::default(),
            cache,
        }
    }
}

/// The cache behind `attn.Cache`, which documents it.
#[pyclass(frozen, module = "attn._attn")]
pub struct Cache {
    inner: Mutex<Inner>,
    device: Arc<Device>,
    config: CacheConfig,
}

/// What a step attends, beside its rows.
#[derive(FromPyObject)]
pub struct StepOptions {
    sequences: Vec<usize>,
    q_lens: Vec<usize>,
    /// The tokens of each sequence that follow in other shards; empty without shards.
    tokens_after: Vec<usize>,
    layer: usize,
    modifiers: Modifiers,
}

/// What a step attends, checked but for its lengths.
struct Attended {
    problem: Problem,
    sequences: Vec<usize>,
    layer: usize,
}

/// The description of a cache, attribute by attribute of Python's.
#[derive(FromPyObject)]
pub struct CacheOptions {
    format: String,
    /// Query heads of the steps to come, where they are known.
    q_heads: Option<usize>,
    heads: usize,
    dim: usize,
    max_tokens: usize,
    sequences: usize,
    layers: usize,
    pages: Option<usize>,
    page_size: usize,
    max_q_len: usize,
    k_scales: Option<Vec<f32>>,
    v_scales: Option<Vec<f32>>,
}

impl CacheOptions {
    fn config(self) -> PyResult<CacheConfig> {
        let format: KvFormat = self.format.parse().map_err(errors::of)?;
        let heads = Heads {
            q: self.q_heads.unwrap_or(self.heads),
            kv: self.heads,
            dim: self.dim,
        };
        let mut builder = CacheConfig::builder(format, heads)
            .sequences(self.sequences)
            .layers(self.layers)
            .max_len(self.max_tokens)
            .page_size(self.page_size)
            .max_q_len(self.max_q_len);
        if let Some(pages) = self.pages {
            builder = builder.pages(pages);
        }
        let scales = |given: Option<Vec<f32>>, is_static: bool| match given {
            None if is_static => Err(errors::parameter(format!(
                "scales are missing: {format} stores numbers as multiples of static scales, so k_scales and v_scales give one for each KV head of K and of V \
                 that is static: the largest magnitude to come, divided by 448 for fp8 and by 127 for int8-tensor"
            ))),
            given => Ok(given.unwrap_or_default()),
        };
        let k = scales(self.k_scales, format.k.has_tensor_scale())?;
        let v = scales(self.v_scales, format.v.has_tensor_scale())?;
        Ok(builder.tensor_scales(k, v).build())
    }
}

impl Cache {
    /// Waits for the cache's other calls. A process that was forked from the cache's is refused before it waits, since a thread that it lacks may have
    /// held the lock.
    fn lock(&self) -> Result<MutexGuard<'_, Inner>, Error> {
        process::check()?;
        Ok(self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs `work` on the cache without the interpreter's lock, behind all steps on the device.
    fn on_host<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Inner) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| {
            let mut inner = self.lock()?;
            #[cfg(feature = "cuda")]
            if let Some(steps) = &inner.device_steps {
                steps.wait()?;
            }
            work(&mut inner)
        })
        .map_err(errors::of)
    }

    /// Refuses K or V of another shape than `[tokens, heads, dim]` or, on the host, `[sequences, tokens, heads, dim]`.
    fn check_rows(&self, rows: &Array<'_>) -> PyResult<()> {
        let CacheConfig {
            num_kv_heads,
            head_dim,
            ..
        } = self.config;
        let shape = format!("[tokens, {num_kv_heads}, {head_dim}]");
        if rows.cuda.is_some() || rows.shape.len() != 4 {
            rows.check_rank(3, &shape)?;
        }
        if !rows.shape.ends_with(&[num_kv_heads, head_dim]) {
            return Err(errors::shape(format!(
                "{} has the shape {:?}; needed: {shape}",
                rows.what, rows.shape
            )));
        }
        Ok(())
    }

    /// The problem of a step, but for its lengths.
    fn problem(&self, q: &Array<'_>, options: StepOptions) -> PyResult<Attended> {
        let CacheConfig {
            num_kv_heads,
            head_dim,
            ..
        } = self.config;
        let tokens = match *q.shape {
            [sequences, tokens, _, _] if q.cuda.is_none() => sequences.saturating_mul(tokens),
            _ => {
                q.check_rank(3, &format!("[query tokens, heads, {head_dim}]"))?;
                q.shape[0]
            }
        };
        let [.., q_heads, dim] = q.shape[..] else {
            unreachable!("the rank is three or four");
        };
        let heads = Heads {
            q: q_heads,
            kv: num_kv_heads,
            dim,
        };
        let batch = options.sequences.len();
        let problem = Problem::new(heads, vec![0; batch]).q_lens(options.q_lens);
        let problem = options
            .modifiers
            .of(problem.tokens_after(options.tokens_after));
        if problem.query_tokens() != tokens {
            return Err(errors::shape(format!(
                "q has {tokens} tokens, but q_lens add up to {}",
                problem.query_tokens()
            )));
        }
        Ok(Attended {
            problem,
            sequences: options.sequences,
            layer: options.layer,
        })
    }

    /// Refuses outputs of another shape than the queries'.
    fn check_outputs(q: &Array<'_>, out: &Array<'_>, lse: Option<&Array<'_>>) -> PyResult<()> {
        if out.shape != q.shape {
            return Err(errors::shape(format!(
                "out has the shape {:?}; needed: that of q, {:?}",
                out.shape, q.shape
            )));
        }
        let rows = &q.shape[..q.shape.len() - 1];
        match lse {
            Some(lse) if lse.shape != rows => Err(errors::shape(format!(
                "lse has the shape {:?}; needed: {rows:?}",
                lse.shape
            ))),
            _ => Ok(()),
        }
    }
}

/// Counts of tokens as the library takes them.
fn appends(sequences: &[usize], tokens: &[usize]) -> PyResult<Vec<Append>> {
    if sequences.len() != tokens.len() {
        return Err(errors::shape(format!(
            "sequences names {}, but tokens has {} counts",
            sequences.len(),
            tokens.len()
        )));
    }
    let pairs = sequences.iter().zip(tokens);
    Ok(pairs
        .map(|(&sequence, &tokens)| Append { sequence, tokens })
        .collect())
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
        let cache = py.detach(|| device.backend().create_cache(&config));
        Ok(Cache {
            inner: Mutex::new(Inner::new(cache.map_err(errors::of)?)),
            device,
            config,
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
        v: &Bound<'_, PyCapsule>,
        sequences: Vec<usize>,
        tokens: Vec<usize>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let (k, v) = (Array::new("k", k)?, Array::new("v", v)?);
        for rows in [&k, &v] {
            self.check_rows(rows)?;
        }
        let appends = appends(&sequences, &tokens)?;
        if k.cuda.is_some() || v.cuda.is_some() {
            return self.append_on_device(py, &k, &v, &appends, stream);
        }
        let (k, v) = (k.rows()?, v.rows()?);
        self.on_host(py, |inner| inner.cache.append_batch(&appends, k, v))
    }

    /// Begins a step of all layers: takes its pages, and counts its tokens.
    fn reserve(&self, py: Python<'_>, sequences: Vec<usize>, tokens: Vec<usize>) -> PyResult<()> {
        let appends = appends(&sequences, &tokens)?;
        let reserve = || {
            let mut inner = self.lock()?;
            let Inner {
                #[cfg(feature = "cuda")]
                device_steps,
                cache,
                ..
            } = &mut *inner;
            #[cfg(feature = "cuda")]
            if let Some(steps) = device_steps {
                return steps.reserve(cache, &appends);
            }
            cache.reserve(&appends)
        };
        py.detach(reserve).map_err(errors::of)
    }

    /// Writes one layer of the open step.
    #[pyo3(signature = (layer, k, v, stream=None))]
    fn write(
        &self,
        py: Python<'_>,
        layer: usize,
        k: &Bound<'_, PyCapsule>,
        v: &Bound<'_, PyCapsule>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let (k, v) = (Array::new("k", k)?, Array::new("v", v)?);
        for rows in [&k, &v] {
            self.check_rows(rows)?;
        }
        if k.cuda.is_some() || v.cuda.is_some() {
            return self.write_on_device(py, layer, [&k, &v], stream);
        }
        let (k, v) = (k.rows()?, v.rows()?);
        self.on_host(py, |inner| inner.cache.write(layer, k, v))
    }

    fn cancel_step(&self, py: Python<'_>) -> PyResult<()> {
        self.on_host(py, |inner| inner.cache.cancel_step())
    }

    /// The sequences of the open step, and the tokens of each.
    fn open_step(&self, py: Python<'_>) -> PyResult<Option<Vec<(usize, usize)>>> {
        self.on_table(py, |cache| {
            let pair = |append: &Append| (append.sequence, append.tokens);
            let step = cache.open_step();
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
        let (q, mut out) = (Array::new("q", q)?, Array::new("out", out)?);
        let mut lse = lse.map(|lse| Array::new("lse", lse)).transpose()?;
        let attended = self.problem(&q, options)?;
        Self::check_outputs(&q, &out, lse.as_ref())?;
        if q.cuda.is_some() || out.cuda.is_some() {
            return self.attend_on_device(py, [&q, &out], lse.as_ref(), &attended, stream);
        }
        // Outputs between the queries of one array: the queries are copied before the outputs' memory is borrowed.
        let copied = match q.shares_memory_with(&out)? {
            true => Some(q.rows()?.to_wide().map_err(errors::of)?),
            false => None,
        };
        let q = match &copied {
            Some(copied) => copied.into(),
            None => q.rows()?,
        };
        let out = out.rows_mut()?;
        let lse = match &mut lse {
            Some(lse) => match lse.elements_mut()? {
                attn::ElementsMut::F32(lse) => Some(lse),
                _ => return Err(errors::shape("lse has 16-bit elements; needed: float32")),
            },
            None => None,
        };
        self.on_host(py, |inner| {
            let rows = HostRows { q, out, lse };
            let backend = self.device.backend();
            let layer = inner.cache.layer(attended.layer)?;
            let steps = &mut inner.host_steps;
            steps.attend_layer(backend, layer, &attended.sequences, &attended.problem, rows)
        })
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
        let q = Array::new("q", q)?;
        let attended = self.problem(&q, options)?;
        let states = States::new(&attended.problem, [max_sums, o])?;
        if q.cuda.is_some() || states.o.cuda.is_some() {
            return self.attend_spans_on_device(py, &q, &states, &attended, stream);
        }
        self.attend_spans_on_host(py, &q, states, &attended)
    }

    fn fork(&self, py: Python<'_>, source: usize, target: usize) -> PyResult<()> {
        self.on_table(py, |cache| cache.fork(source, target))
    }

    fn truncate(&self, py: Python<'_>, sequence: usize, tokens: usize) -> PyResult<()> {
        self.on_table(py, |cache| cache.truncate(sequence, tokens))
    }

    fn check_truncate(&self, py: Python<'_>, sequence: usize, tokens: usize) -> PyResult<()> {
        self.on_table(py, |cache| cache.check_truncate(sequence, tokens))
    }

    fn free(&self, py: Python<'_>, sequence: usize) -> PyResult<()> {
        self.on_table(py, |cache| cache.free_sequence(sequence))
    }

    fn drop_before(&self, py: Python<'_>, sequence: usize, token: usize) -> PyResult<()> {
        self.on_table(py, |cache| cache.drop_before(sequence, token))
    }

    fn add_sequences(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.on_table(py, |cache| cache.add_sequences(count))
    }

    fn add_pages(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.on_host(py, |inner| inner.cache.add_pages(count))
    }

    fn pages_needed(
        &self,
        py: Python<'_>,
        sequences: Vec<usize>,
        tokens: Vec<usize>,
    ) -> PyResult<usize> {
        let appends = appends(&sequences, &tokens)?;
        self.on_table(py, |cache| cache.pages_needed(&appends))
    }

    fn lens(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.on_table(py, |cache| Ok(cache.table().lens.clone()))
    }

    /// The first token of each sequence that was not dropped.
    fn first_tokens(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.on_table(py, |cache| Ok(cache.table().first_tokens.clone()))
    }

    fn free_pages(&self, py: Python<'_>) -> PyResult<usize> {
        self.on_table(py, |cache| Ok(cache.free_pages()))
    }

    /// Pages that one sequence of so many tokens takes, those of its residuals included.
    fn pages_for(&self, tokens: usize) -> usize {
        self.config.pages_for(tokens)
    }

    fn num_pages(&self, py: Python<'_>) -> PyResult<usize> {
        self.on_table(py, |cache| Ok(cache.config().num_pages))
    }

    /// Whether the newest tokens have residuals, which older ones have given up.
    #[getter]
    fn has_window(&self) -> bool {
        self.config.format.window() != Window::None
    }

    /// Bytes of a page in each layer.
    #[getter]
    fn page_bytes(&self) -> PyResult<usize> {
        Ok(self.config.layout().map_err(errors::of)?.page_bytes())
    }

    /// A sequence as one block of bytes.
    fn save<'py>(&self, py: Python<'py>, sequence: usize) -> PyResult<Bound<'py, PyBytes>> {
        let image = self.on_host(py, |inner| inner.cache.image(sequence))?;
        Ok(PyBytes::new(py, image.as_bytes()))
    }

    /// Fills an empty sequence from the bytes that `save` gave.
    fn restore(&self, py: Python<'_>, sequence: usize, image: &Bound<'_, PyBytes>) -> PyResult<()> {
        let bytes = image.as_bytes();
        self.on_host(py, |inner| {
            let image = SequenceImage::from_bytes(bytes)?;
            inner.cache.restore(sequence, &image)
        })
    }

    /// A cache of its own with the same sequences.
    fn copy(&self, py: Python<'_>) -> PyResult<Self> {
        self.on_host(py, |inner| {
            let config = inner.cache.config().clone();
            let mut cache = self.device.backend().create_cache(&config)?;
            cache.copy_from(&inner.cache)?;
            Ok(Cache {
                inner: Mutex::new(Inner::new(cache)),
                device: self.device.clone(),
                config,
            })
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
        let [from_k, from_v] = self.on_host(py, |inner| {
            let layer = inner.cache.layer(layer)?;
            let pages = layer.read_back(sequence)?;
            let tokens = inner.cache.table().lens[sequence];
            let [k_scales, v_scales] = layer.tensor_scales();
            convert::dequantize(inner.cache.layout(), &pages, tokens, k_scales, v_scales)
        })?;
        for (rows, values) in [(&mut k, from_k), (&mut v, from_v)] {
            self.check_rows(rows)?;
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

impl Cache {
    /// Runs `work`, which reads and changes the table alone.
    fn on_table<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut KvCache) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| work(&mut self.lock()?.cache))
            .map_err(errors::of)
    }
}

#[cfg(not(feature = "cuda"))]
impl Cache {
    fn append_on_device(
        &self,
        _: Python<'_>,
        k: &Array<'_>,
        _: &Array<'_>,
        _: &[Append],
        _: Option<u64>,
    ) -> PyResult<()> {
        Err(no_cuda(k))
    }

    fn write_on_device(
        &self,
        _: Python<'_>,
        _: usize,
        [k, _]: [&Array<'_>; 2],
        _: Option<u64>,
    ) -> PyResult<()> {
        Err(no_cuda(k))
    }

    fn attend_on_device(
        &self,
        _: Python<'_>,
        [q, _]: [&Array<'_>; 2],
        _: Option<&Array<'_>>,
        _: &Attended,
        _: Option<u64>,
    ) -> PyResult<()> {
        Err(no_cuda(q))
    }

    fn attend_spans_on_device(
        &self,
        _: Python<'_>,
        q: &Array<'_>,
        _: &States<'_>,
        _: &Attended,
        _: Option<u64>,
    ) -> PyResult<()> {
        Err(no_cuda(q))
    }
}

#[cfg(not(feature = "cuda"))]
fn no_cuda(array: &Array<'_>) -> PyErr {
    errors::shape(format!(
        "{} lies on a CUDA device, and this build of the package leaves CUDA out, which `pip install ./crates/attn-python` has; copy it to the CPU",
        array.what
    ))
}
