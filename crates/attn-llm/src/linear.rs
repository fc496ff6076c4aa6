//! Products with a weight matrix, whose bits on a CPU do not depend on the rows beside a row.

use std::{fmt, str::FromStr, sync::Arc};

use candle_core::{
    Device, Module, Tensor,
    quantized::{QMatMul, QTensor},
};

use rayon::prelude::*;

use crate::error::Error;

/// How matrix products are computed, by candle.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Products {
    /// On the CPU, of weights that are dequantized to f32 when they are read.
    #[default]
    F32,
    /// On the CPU, of weights as a GGUF file packs them. They take a quarter of the memory or less, but candle rounds activations to 8 bits, which
    /// moves the next token's distribution further than an int8 cache does, and its instruction set is that of the build
    /// (`RUSTFLAGS="-C target-cpu=native"`).
    Packed,
    /// On the first CUDA device, of weights in f32, by cuBLAS, whose bits depend on the number of rows. Needs the feature `cuda`.
    Cuda,
}

impl Products {
    /// All ways, those included that this build lacks.
    pub const ALL: [Products; 3] = [Products::F32, Products::Packed, Products::Cuda];

    /// The device of the weights.
    pub(crate) fn device(self) -> Result<Device, Error> {
        match self {
            Products::F32 | Products::Packed => Ok(Device::Cpu),
            Products::Cuda if !candle_core::utils::cuda_is_available() => Err(Error::Request {
                what: "the device of products",
                given: "cuda, which this build lacks".to_owned(),
                allowed:
                    "cpu; build attn-eval with the feature products-cuda where CUDA's compiler is"
                        .to_owned(),
            }),
            Products::Cuda => Ok(Device::new_cuda(0)?),
        }
    }
}

impl fmt::Display for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Products::F32 => "f32",
            Products::Packed => "packed",
            Products::Cuda => "cuda",
        })
    }
}

impl FromStr for Products {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let known = Products::ALL.into_iter().find(|p| p.to_string() == name);
        known.ok_or_else(|| Error::Request {
            what: "the kind of products",
            given: name.to_owned(),
            allowed: "f32, packed, cuda".to_owned(),
        })
    }
}

/// Rows of an f32 product are a multiple of this. One row alone would take another kernel, which adds in another order.
const ROWS: usize = 8;

enum Weight {
    /// `[outputs, inputs]` in f32.
    Full(Tensor),
    /// `[outputs, inputs]` in a GGUF file's blocks.
    Packed(QMatMul),
}

/// A matrix `[outputs, inputs]` and its bias.
pub(crate) struct Linear {
    weight: Weight,
    bias: Option<Vec<f32>>,
    pub inputs: usize,
    pub outputs: usize,
}

impl Linear {
    /// Takes f32 weights `[outputs, inputs]`, on the device of the products.
    pub fn new(weight: &Tensor, bias: Option<Vec<f32>>) -> Result<Self, Error> {
        let (outputs, inputs) = weight.dims2()?;
        Ok(Linear {
            weight: Weight::Full(weight.contiguous()?),
            bias,
            inputs,
            outputs,
        })
    }

    /// Takes weights `[outputs, inputs]` in a file's blocks.
    pub fn packed(weight: Arc<QTensor>, bias: Option<Vec<f32>>) -> Result<Self, Error> {
        let (outputs, inputs) = weight.shape().dims2()?;
        Ok(Linear {
            weight: Weight::Packed(QMatMul::from_arc(weight)?),
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
        let mut y = match &self.weight {
            // As the left factor, weights are read as they lie; as the right one, gemm would rearrange all of them for each product.
            Weight::Full(weight) => {
                let y = weight.matmul(&x.to_device(weight.device())?.t()?)?;
                transposed(&y.flatten_all()?.to_vec1()?, rows, padded)
            }
            Weight::Packed(weight) => weight
                .forward(&x.narrow(0, 0, rows)?)?
                .flatten_all()?
                .to_vec1()?,
        };
        if let Some(bias) = &self.bias {
            for row in y.chunks_exact_mut(self.outputs) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
        Ok(y)
    }
}

/// The first `rows` columns of `[outputs, padded]` as rows.
fn transposed(y: &[f32], rows: usize, padded: usize) -> Vec<f32> {
    let outputs = y.len() / padded;
    let mut out = vec![0.0; rows * outputs];
    out.par_chunks_exact_mut(outputs)
        .enumerate()
        .for_each(|(row, out)| {
            let column = y[row..].iter().step_by(padded);
            out.iter_mut().zip(column).for_each(|(out, y)| *out = *y);
        });
    out
}
