//! Pages in host memory that Python's caller owns: appended to by slots, attended through its page table. `attn.HostPages` is built on it.

use attn::{
    DecodeAttention, DecodeStep, Error, Heads, KvSource, PageLayout, PagePool, Problem,
    SlotCentres, backends::cpu::CpuBackend, centres::centres_bytes,
};
use pyo3::{prelude::*, types::PyCapsule};

use crate::{dlpack::Array, errors, modifiers::Modifiers};

/// The layout of the pages, and the backend that writes and reads them.
#[pyclass(frozen, module = "attn._attn")]
pub struct HostPages {
    backend: CpuBackend,
    layout: PageLayout,
    /// Bytes from where a page begins to where the next one does, if pages have centres of K.
    stride: Option<usize>,
}

impl HostPages {
    /// Sequences in a pool of such pages.
    fn pool<'a>(
        &self,
        bytes: &'a [u8],
        table: &[u32],
        lens: &[usize],
    ) -> Result<PagePool<'a>, Error> {
        match self.stride {
            Some(stride) => PagePool::with_centres(&self.layout, stride, bytes, table, lens),
            None => PagePool::new(&self.layout, bytes, table, lens),
        }
    }

    /// Bytes of a sequence's centres.
    fn centres_bytes(&self) -> usize {
        centres_bytes(self.layout.num_kv_heads(), self.layout.head_dim().k)
    }
}

/// What an attention reads beside its arrays, attribute by attribute.
#[derive(FromPyObject)]
pub struct HostStep {
    /// Cached tokens of each sequence.
    kv_lens: Vec<usize>,
    /// Query tokens of each sequence.
    q_lens: Vec<usize>,
    modifiers: Modifiers,
}

/// What an attention reads and writes, as capsules of arrays in host memory.
#[derive(FromPyObject)]
pub struct HostArrays<'py> {
    /// `[query tokens, heads, dim]`.
    q: Bound<'py, PyCapsule>,
    /// As q.
    out: Bound<'py, PyCapsule>,
    /// float32 `[query tokens, heads]`, if they are asked for.
    lse: Option<Bound<'py, PyCapsule>>,
    /// uint8, whole pages.
    pool: Bound<'py, PyCapsule>,
    /// int32 `[sequences, pages]`.
    page_table: Bound<'py, PyCapsule>,
}

#[pymethods]
impl HostPages {
    #[new]
    fn new(
        format: &str,
        kv_heads: usize,
        head_dim: (usize, usize),
        page_size: usize,
        centres: bool,
        page_stride: Option<usize>,
    ) -> PyResult<Self> {
        let format = format.parse().map_err(errors::of)?;
        let layout = PageLayout::new(format, head_dim, page_size, kv_heads).map_err(errors::of)?;
        let backend = CpuBackend::open().map_err(errors::unsupported)?;
        let mut pages = HostPages {
            backend,
            layout,
            stride: None,
        };
        if centres {
            let needed = layout.page_bytes().saturating_add(pages.centres_bytes());
            pages.stride = Some(page_stride.unwrap_or(needed));
        }
        // An empty pool of them: formats that need more than their pages are refused now.
        pages.pool(&[], &[], &[]).map_err(errors::of)?;
        Ok(pages)
    }

    #[getter]
    fn page_bytes(&self) -> usize {
        let centres = self.stride.map_or(0, |_| self.centres_bytes());
        self.layout.page_bytes() + centres
    }

    #[getter]
    fn page_stride(&self) -> usize {
        self.stride.unwrap_or(self.layout.page_bytes())
    }

    /// `centres`: int32 first pages and positions, where pages have centres.
    fn append_slots(
        &self,
        py: Python<'_>,
        k: &Bound<'_, PyCapsule>,
        v: &Bound<'_, PyCapsule>,
        pool: &Bound<'_, PyCapsule>,
        slots: &Bound<'_, PyCapsule>,
        centres: Option<(Bound<'_, PyCapsule>, Bound<'_, PyCapsule>)>,
    ) -> PyResult<()> {
        let (k, v) = (Array::new("k", k)?, Array::new("v", v)?);
        let (mut pool, slots) = (Array::new("pool", pool)?, Array::new("slots", slots)?);
        let centres = match &centres {
            Some((pages, positions)) => Some((
                Array::new("first_pages", pages)?,
                Array::new("positions", positions)?,
            )),
            None => None,
        };
        let centres = match (&centres, self.stride) {
            (Some((first_pages, positions)), Some(stride)) => Some(SlotCentres {
                stride,
                first_pages: first_pages.i32s()?,
                positions: positions.i32s()?,
            }),
            _ => None,
        };
        let (k, v, slots, pool) = (k.rows()?, v.rows()?, slots.i64s()?, pool.bytes_mut()?);
        let (backend, layout) = (&self.backend, &self.layout);
        py.detach(|| backend.append_slots(layout, pool, slots, k, v, centres))
            .map_err(errors::of)
    }

    fn attend(&self, py: Python<'_>, arrays: HostArrays<'_>, step: HostStep) -> PyResult<()> {
        let mut out = Array::new("out", &arrays.out)?;
        let q = Array::new("q", &arrays.q)?;
        q.check_rank(3, "[query tokens, heads, dim]")?;
        let (pool, table) = (
            Array::new("pool", &arrays.pool)?,
            Array::new("page_table", &arrays.page_table)?,
        );
        let lse = arrays.lse.as_ref().map(|lse| Array::new("lse", lse));
        let mut lse = lse.transpose()?;
        let heads = Heads::new(
            q.shape[1],
            self.layout.num_kv_heads(),
            self.layout.head_dim(),
        );
        let problem = Problem::new(heads, step.kv_lens.clone())
            .q_lens(step.q_lens)
            .scores(step.modifiers.into());
        // Outputs between the queries of one array: the queries are copied before the outputs' memory is borrowed.
        let copied = match q.shares_memory_with(&out)? {
            true => Some(q.rows()?.to_wide().map_err(errors::of)?),
            false => None,
        };
        let q = match &copied {
            Some(copied) => copied.into(),
            None => q.rows()?,
        };
        let lse = lse.as_mut().map(Array::f32s_mut).transpose()?;
        let (out, pool, table) = (out.rows_mut()?, pool.bytes()?, table.i32s()?);
        py.detach(|| {
            // A negative page is none of the pool, which is said of the number that it is without a sign.
            let table: Vec<u32> = table.iter().map(|page| page.cast_unsigned()).collect();
            let pool = self.pool(pool, &table, &step.kv_lens)?;
            let plan = self.backend.plan(&problem, self.layout.format())?;
            let mut step = DecodeStep::new(&plan, q, KvSource::Pool(&pool), out)?;
            if let Some(lse) = lse {
                step = step.with_lse(lse)?;
            }
            self.backend.decode(&mut step)
        })
        .map_err(errors::of)
    }
}
