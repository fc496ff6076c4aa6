//! Shards of sequences, of whose spans steps leave the states.

use attn::SpanStates;

use super::*;

/// Where the states of a step's spans go.
pub(super) struct States<'py> {
    /// float32 `[spans, query tokens, heads, 2]`: maxima and sums.
    pub max_sums: Array<'py>,
    /// float32 `[spans, query tokens, heads, dim]`.
    pub o: Array<'py>,
}

impl<'py> States<'py> {
    /// The arrays in two capsules; refuses other shapes than those of the queries' states.
    pub fn new(problem: &Problem, [max_sums, o]: [&Bound<'py, PyCapsule>; 2]) -> PyResult<Self> {
        let states = States {
            max_sums: Array::new("max_sums", max_sums)?,
            o: Array::new("o", o)?,
        };
        let rows = [problem.query_tokens(), problem.num_q_heads];
        for (array, last) in [(&states.max_sums, 2), (&states.o, problem.head_dim)] {
            let spans = states.o.shape.first().copied().unwrap_or(0);
            let needed = [spans, rows[0], rows[1], last];
            if array.shape != needed || spans == 0 {
                return Err(errors::shape(format!(
                    "{} has the shape {:?}; needed: {needed:?}, the spans of the longest sequence first",
                    array.what, array.shape
                )));
            }
        }
        Ok(states)
    }

    /// Writes a step's states; spans behind its last one see no token.
    fn write(&mut self, from: &SpanStates) -> PyResult<()> {
        let arrays = [
            (&mut self.max_sums, from.max_sums(), f32::NEG_INFINITY),
            (&mut self.o, from.o(), 0.0),
        ];
        for (array, values, unseen) in arrays {
            let what = array.what;
            let attn::ElementsMut::F32(room) = array.elements_mut()? else {
                return Err(errors::shape(format!("{what} is not of type float32")));
            };
            if room.len() < values.len() {
                return Err(errors::shape(format!(
                    "{what} holds {} elements, but the step's spans have {}; pass one span for each 1024 tokens of the longest sequence",
                    room.len(),
                    values.len()
                )));
            }
            let (seen, others) = room.split_at_mut(values.len());
            seen.copy_from_slice(values);
            others.fill(unseen);
        }
        Ok(())
    }
}

impl Cache {
    pub(super) fn attend_spans_on_host(
        &self,
        py: Python<'_>,
        q: &Array<'_>,
        mut states: States<'_>,
        attended: &Attended,
    ) -> PyResult<()> {
        let q = q.rows()?;
        let made = self.on_host(py, |inner| {
            let backend = self.device.backend();
            let layer = inner.cache.layer(attended.layer)?;
            let (sequences, problem) = (&attended.sequences, &attended.problem);
            let steps = &mut inner.host_steps;
            steps.attend_spans(backend, layer, sequences, problem, q)
        })?;
        states.write(&made)
    }
}

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
    let heads = Heads {
        q: heads,
        kv: arrays.kv_heads,
        dim,
    };
    let mut problem = Problem::new(heads, [0]).q_lens([tokens]);
    problem.sinks = arrays.sinks;
    py.detach(|| {
        problem.check()?;
        let scales = match format.v.has_tensor_scale() {
            true => problem.num_kv_heads,
            false => 0,
        };
        let v_scales = arrays.v_scales.unwrap_or_else(|| vec![1.0; scales]);
        let all = SpanStates::new(problem.rows(), dim, max_sums, o)?;
        SpanStates::finish(&[all], &problem, format, &v_scales, (out, lse))
    })
    .map_err(errors::of)
}
