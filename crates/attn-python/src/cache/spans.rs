//! The merge of the states of shards' spans in host memory.

use attn::{Heads, KvFormat, Problem, SpanStates};
use pyo3::{prelude::*, types::PyCapsule};

use crate::{dlpack::Array, errors};

/// What a merge of spans' states reads and writes in host memory, as capsules.
#[derive(FromPyObject)]
pub struct HostMerge<'py> {
    /// float32 `[states, query tokens, heads, 2]`.
    max_sums: Bound<'py, PyCapsule>,
    /// float32 `[states, query tokens, heads, dim]`.
    o: Bound<'py, PyCapsule>,
    /// float32 `[query tokens, heads, dim]`.
    out: Bound<'py, PyCapsule>,
    /// float32 `[query tokens, heads]`.
    lse: Bound<'py, PyCapsule>,
    sinks: Option<Vec<f32>>,
    v_scales: Option<Vec<f32>>,
    kv_heads: usize,
}

/// Merges the states of all shards' spans in host memory, and finishes: what `attn.merge_spans` is built on.
///
/// # Errors
/// `ShapeError`, `ParameterError`, `NumberError`; the outputs are not written then.
#[pyfunction]
pub fn merge_spans(py: Python<'_>, format: &str, arrays: HostMerge<'_>) -> PyResult<()> {
    let format: KvFormat = format.parse().map_err(errors::of)?;
    let (max_sums, o) = (
        Array::new("max_sums", &arrays.max_sums)?,
        Array::new("o", &arrays.o)?,
    );
    let needed = "[states, query tokens, heads, dim]";
    o.check_rank(4, needed)?;
    let [states, tokens, heads, dim] = [0, 1, 2, 3].map(|i| o.shape[i]);
    if max_sums.shape != [states, tokens, heads, 2] {
        return Err(errors::shape(format!(
            "max_sums has the shape {:?}, and o {:?}; needed: [states, query tokens, heads, 2] and {needed}",
            max_sums.shape, o.shape
        )));
    }
    let wide = |array: &Array<'_>| array.rows()?.to_wide().map_err(errors::of);
    let (max_sums, o) = (wide(&max_sums)?, wide(&o)?);
    let mut outputs = [
        Array::new("out", &arrays.out)?,
        Array::new("lse", &arrays.lse)?,
    ];
    let [out, lse] = &mut outputs;
    let (attn::ElementsMut::F32(out), attn::ElementsMut::F32(lse)) =
        (out.elements_mut()?, lse.elements_mut()?)
    else {
        return Err(errors::shape("out or lse is not of type float32"));
    };
    let heads = Heads::new(heads, arrays.kv_heads, dim);
    let mut problem = Problem::new(heads, [0]).q_lens([tokens]);
    problem.scores.sinks = arrays.sinks;
    py.detach(|| {
        problem.check()?;
        let v_scales = arrays.v_scales.unwrap_or_default();
        let all = SpanStates::new(problem.rows(), dim, max_sums, o)?;
        SpanStates::finish(&[all], &problem, format, &v_scales, (out, lse))
    })
    .map_err(errors::of)
}
