//! Products with a weight matrix, whose bits do not depend on the rows beside a row.
//!
//! Weights are dequantized once, to f32. candle's products with packed weights round activations to 8 bits, which moves the next token's
//! distribution by more than an int8 cache does, and pick their instruction set when they are compiled.

use candle_core::{Device, Tensor};

use crate::error::Error;

/// Rows of a product are a multiple of this. One row alone would take another kernel, which adds in another order.
const ROWS: usize = 8;

/// A matrix `[outputs, inputs]` and its bias.
pub(crate) struct Linear {
    /// `[inputs, outputs]`: a view of the file's order.
    weight: Tensor,
    bias: Option<Vec<f32>>,
    pub inputs: usize,
    pub outputs: usize,
}

impl Linear {
    /// Takes f32 weights `[outputs, inputs]`.
    pub fn new(weight: &Tensor, bias: Option<Vec<f32>>) -> Result<Self, Error> {
        let (outputs, inputs) = weight.dims2()?;
        Ok(Linear {
            weight: weight.t()?,
            bias,
            inputs,
            outputs,
        })
    }

    /// `x` `[rows, inputs]` times the matrix: `[rows, outputs]`.
    pub fn forward(&self, x: &[f32]) -> Result<Vec<f32>, Error> {
        let rows = x.len() / self.inputs;
        if rows == 0 {
            return Ok(Vec::new());
        }
        let padded = rows.next_multiple_of(ROWS);
        let mut full = Vec::with_capacity(padded * self.inputs);
        full.extend_from_slice(x);
        full.resize(padded * self.inputs, 0.0);
        let x = Tensor::from_vec(full, (padded, self.inputs), &Device::Cpu)?;
        let y = x.matmul(&self.weight)?;
        let mut y: Vec<f32> = y.flatten_all()?.to_vec1()?;
        y.truncate(rows * self.outputs);
        if let Some(bias) = &self.bias {
            for row in y.chunks_exact_mut(self.outputs) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
        Ok(y)
    }
}
