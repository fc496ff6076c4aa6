//! Pages in host memory that Python's caller owns: appended to by slots, attended through its page table. `attn.HostPages` is built on it.

use attn::{
    DecodeAttention, DecodeStep, Heads, KvSource, PageLayout, PagePool, PoolPages, Problem,
    SlotCentres, backends::cpu::CpuBackend,
};
use pyo3::{prelude::*, types::PyCapsule};

use crate::{
    dlpack::{self, Array},
    errors,
    modifiers::Modifiers,
};

/// The layout of the pages, and the backend that writes and reads them.
#[pyclass(frozen, module = "attn._attn")]
pub struct HostPages {
    backend: CpuBackend,
    pages: PoolPages,
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
        let lie = || {
            let mut pages = PoolPages::new(&layout)?;
            if centres {
                pages = pages.with_centres()?;
            }
            pages.apart(page_stride.unwrap_or(pages.bytes()))
        };
        let pages = lie().map_err(errors::of)?;
        Ok(HostPages { backend, pages })
    }

    #[getter]
    fn page_bytes(&self) -> usize {
        self.pages.bytes()
    }

    #[getter]
    fn page_stride(&self) -> usize {
        self.pages.stride()
    }

    /// `centres`: int32 first pages and positions, where pages have centres.
    fn append_slots(
        &self,
        py: Python<'_>,
        k: &Bound<'_, PyCapsule>,
        v: Option<&Bound<'_, PyCapsule>>,
        pool: &Bound<'_, PyCapsule>,
        slots: &Bound<'_, PyCapsule>,
        centres: Option<(Bound<'_, PyCapsule>, Bound<'_, PyCapsule>)>,
    ) -> PyResult<()> {
        let k = Array::new("k", k)?;
        let v = v.map(|v| Array::new("v", v)).transpose()?;
        let (mut pool, slots) = (Array::new("pool", pool)?, Array::new("slots", slots)?);
        let centres = match &centres {
            Some((pages, positions)) => Some((
                Array::new("first_pages", pages)?,
                Array::new("positions", positions)?,
            )),
            None => None,
        };
        let centres = match &centres {
            Some((first_pages, positions)) => Some(SlotCentres {
                first_pages: first_pages.i32s()?,
                positions: positions.i32s()?,
            }),
            None => None,
        };
        let [_, [_, heads, v_dim]] = self.pages.layout().shapes(0);
        let [k, v] = dlpack::kv_rows(&k, v.as_ref(), [heads, v_dim])?;
        let (slots, pool) = (slots.i64s()?, pool.bytes_mut()?);
        let (backend, pages) = (&self.backend, &self.pages);
        py.detach(|| backend.append_slots(pages, pool, slots, k, v, centres))
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
        let entries = entries_of(&table, step.kv_lens.len())?;
        let lse = arrays.lse.as_ref().map(|lse| Array::new("lse", lse));
        let mut lse = lse.transpose()?;
        let heads = Heads::new(
            q.shape[1],
            self.pages.layout().num_kv_heads(),
            self.pages.layout().head_dim(),
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
        let (out, pool, table) = (out.rows_mut()?, pool.bytes()?, &table.i32s()?[..entries]);
        py.detach(|| {
            // A negative page is none of the pool, which is said of the number that it is without a sign.
            let table: Vec<u32> = table.iter().map(|page| page.cast_unsigned()).collect();
            let pool = PagePool::of(&self.pages, pool, &table, &step.kv_lens)?;
            let plan = self.backend.plan(&problem, self.pages.layout().format())?;
            let mut step = DecodeStep::new(&plan, q, KvSource::Pool(&pool), out)?;
            if let Some(lse) = lse {
                step = step.with_lse(lse)?;
            }
            self.backend.decode(&mut step)
        })
        .map_err(errors::of)
    }
}

/// Entries of the table's rows of so many sequences; it may have more rows.
fn entries_of(table: &Array<'_>, sequences: usize) -> PyResult<usize> {
    table.check_rank(2, "[sequences, pages]")?;
    let [rows, columns] = [table.shape[0], table.shape[1]];
    match rows >= sequences {
        true => Ok(sequences * columns),
        false => Err(errors::shape(format!(
            "page_table has {rows} rows, but kv_lens has {sequences} sequences; pass a row for each"
        ))),
    }
}
