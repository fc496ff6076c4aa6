//! Rotary positions of an append, as arrays on a GPU.

use attn::{
    RotaryStyle,
    backends::cuda::native::{DeviceAddress, Dtype as CudaDtype, RotaryArgs, RotaryQueries},
};
use pyo3::prelude::*;

use crate::{
    arrays::RotaryArrays,
    dlpack::{Array, Dtype},
    errors,
    gpu::Gpu,
};

impl RotaryArrays<'_> {
    /// What the launch takes, for K of this type, so many tokens, and queries of this shape.
    pub fn args(
        &self,
        gpu: &Gpu,
        dtype: CudaDtype,
        [tokens, heads, dim]: [usize; 3],
    ) -> PyResult<RotaryArgs> {
        let table = Array::new("cos_sin", &self.cos_sin)?;
        table.check_rank(2, "[positions, rotary_dim]")?;
        let (cos_sin, cos_sin_dtype) = gpu.floats(&table, 0)?;
        let queries = match &self.q {
            None => None,
            Some(q) => Some(queries(
                gpu,
                &Array::new("q", q)?,
                dtype,
                [tokens, heads, dim],
            )?),
        };
        Ok(RotaryArgs {
            style: match self.interleaved {
                true => RotaryStyle::Interleaved,
                false => RotaryStyle::HalfSplit,
            },
            rotary_dim: table.shape[1],
            cos_sin: cos_sin.address,
            cos_sin_dtype,
            num_positions: table.shape[0],
            positions: match &self.positions {
                None => DeviceAddress::NULL,
                positions => gpu.list("positions", positions.as_ref(), (Dtype::I64, 8 * tokens))?,
            },
            queries,
        })
    }
}

fn queries(
    gpu: &Gpu,
    q: &Array<'_>,
    dtype: CudaDtype,
    shape: [usize; 3],
) -> PyResult<RotaryQueries> {
    q.check_rank(3, "[tokens, heads, dim]")?;
    let (memory, q_dtype) = gpu.floats(q, 1)?;
    if q_dtype != dtype {
        return Err(errors::shape(format!(
            "q has elements of type {:?}, and k others; pass both in one",
            q.dtype
        )));
    }
    if q.shape[..] != shape {
        return Err(errors::shape(format!(
            "q has the shape {:?}; needed: {shape:?}, as k has it",
            q.shape
        )));
    }
    let row = shape[1] * shape[2];
    // Of one token the stride means nothing.
    let stride = match shape[0] {
        0 | 1 => row,
        _ => usize::try_from(q.strides[0]).unwrap_or(0),
    };
    Ok(RotaryQueries {
        q: memory.address,
        out: memory.address,
        heads: shape[1],
        token_stride: stride,
        out_token_stride: stride,
    })
}
