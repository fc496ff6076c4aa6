//! Tensors by name, under the names of GGUF files or of safetensors, and the model that they make.

use candle_core::{DType, Device, Tensor, quantized::QTensor};

use crate::{
    config::ModelConfig,
    linear::{Linear, Products},
    model::{Layer, Model},
};

/// Names of a model's tensors: those of GGUF files, and those of safetensors.
#[derive(Clone, Copy)]
pub(super) enum Names {
    Gguf,
    Safetensors,
}

/// The parts of a layer in both sets of names.
const PARTS: [[&str; 2]; 11] = [
    ["attn_norm", "input_layernorm"],
    ["attn_q", "self_attn.q_proj"],
    ["attn_k", "self_attn.k_proj"],
    ["attn_v", "self_attn.v_proj"],
    ["attn_output", "self_attn.o_proj"],
    ["attn_q_norm", "self_attn.q_norm"],
    ["attn_k_norm", "self_attn.k_norm"],
    ["ffn_norm", "post_attention_layernorm"],
    ["ffn_gate", "mlp.gate_proj"],
    ["ffn_up", "mlp.up_proj"],
    ["ffn_down", "mlp.down_proj"],
];

impl Names {
    /// The name of a layer's part, of which the GGUF name is given.
    fn layer(self, layer: usize, part: &str) -> String {
        match self {
            Names::Gguf => format!("blk.{layer}.{part}"),
            Names::Safetensors => {
                let pair = PARTS.iter().find(|[gguf, _]| *gguf == part);
                format!(
                    "model.layers.{layer}.{}",
                    pair.map_or(part, |[_, name]| name)
                )
            }
        }
    }

    pub fn embeddings(self) -> &'static str {
        match self {
            Names::Gguf => "token_embd.weight",
            Names::Safetensors => "model.embed_tokens.weight",
        }
    }

    fn norm(self) -> &'static str {
        match self {
            Names::Gguf => "output_norm.weight",
            Names::Safetensors => "model.norm.weight",
        }
    }

    fn output(self) -> &'static str {
        match self {
            Names::Gguf => "output.weight",
            Names::Safetensors => "lm_head.weight",
        }
    }
}

/// Tensors of a file, by name.
pub(super) trait Tensors {
    /// A tensor in f32; none if the file lacks it.
    fn get(&mut self, name: &str) -> Result<Option<Tensor>, String>;

    /// A tensor in the file's own blocks; none if the file lacks it.
    fn packed(&mut self, name: &str) -> Result<Option<QTensor>, String>;
}

/// A model under construction: tensors are taken by name, and their shapes checked.
pub(super) struct Parts<'a> {
    pub tensors: &'a mut dyn Tensors,
    pub names: Names,
    pub products: Products,
    /// Where weights of products lie.
    pub device: Device,
}

impl Parts<'_> {
    fn optional(&mut self, name: &str, shape: &[usize]) -> Result<Option<Tensor>, String> {
        let Some(tensor) = self.tensors.get(name)? else {
            return Ok(None);
        };
        check_shape(name, tensor.dims(), shape)?;
        let tensor = tensor.to_dtype(DType::F32).map_err(|e| e.to_string())?;
        Ok(Some(tensor))
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, String> {
        let tensor = self.optional(name, shape)?;
        tensor.ok_or_else(|| format!("it has no tensor {name}"))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, String> {
        values(&self.tensor(name, &[len])?)
    }

    fn linear(
        &mut self,
        layer: usize,
        part: &str,
        outputs: usize,
        inputs: usize,
    ) -> Result<Linear, String> {
        let name = self.names.layer(layer, part);
        let bias = self.optional(&format!("{name}.bias"), &[outputs])?;
        let bias = bias.as_ref().map(values).transpose()?;
        let name = format!("{name}.weight");
        let product = self.product(&name, [outputs, inputs], bias)?;
        product.ok_or_else(|| format!("it has no tensor {name}"))
    }

    /// Products with a matrix of the file; none if the file lacks it.
    fn product(
        &mut self,
        name: &str,
        shape: [usize; 2],
        bias: Option<Vec<f32>>,
    ) -> Result<Option<Linear>, String> {
        let product = if self.products == Products::Packed {
            let Some(packed) = self.tensors.packed(name)? else {
                return Ok(None);
            };
            check_shape(name, packed.shape().dims(), &shape)?;
            Linear::packed(packed.into(), bias)
        } else {
            let Some(weight) = self.optional(name, &shape)? else {
                return Ok(None);
            };
            let weight = weight.to_device(&self.device);
            Linear::new(&weight.map_err(|e| e.to_string())?, bias)
        };
        product.map(Some).map_err(|e| e.to_string())
    }

    /// Products with the embeddings `[vocab, hidden]`.
    fn tied(&mut self, embeddings: &Tensor, shape: [usize; 2]) -> Result<Linear, String> {
        if self.products == Products::Packed {
            let tied = self.product(self.names.embeddings(), shape, None)?;
            return tied.ok_or_else(|| "it has no embeddings".to_owned());
        }
        let weight = embeddings.to_device(&self.device);
        let tied = weight
            .map_err(Into::into)
            .and_then(|w| Linear::new(&w, None));
        tied.map_err(|e| e.to_string())
    }

    fn layer(&mut self, i: usize, config: &ModelConfig) -> Result<Layer, String> {
        let (hidden, feed_forward) = (config.hidden, config.feed_forward);
        let dim = config.heads.dim;
        let (q, kv) = (config.heads.q * dim, config.heads.kv * dim);
        let weight = |part| format!("{}.weight", self.names.layer(i, part));
        let [attention_norm, feed_forward_norm, q_norm, k_norm] =
            ["attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"].map(weight);
        let mut head_norm = |name: &str| {
            let norm = self.optional(name, &[dim])?;
            norm.as_ref().map(values).transpose()
        };
        let (q_norm, k_norm) = (head_norm(&q_norm)?, head_norm(&k_norm)?);
        Ok(Layer {
            attention_norm: self.vector(&attention_norm, hidden)?,
            q: self.linear(i, "attn_q", q, hidden)?,
            k: self.linear(i, "attn_k", kv, hidden)?,
            v: self.linear(i, "attn_v", kv, hidden)?,
            attention_output: self.linear(i, "attn_output", hidden, q)?,
            q_norm,
            k_norm,
            feed_forward_norm: self.vector(&feed_forward_norm, hidden)?,
            gate: self.linear(i, "ffn_gate", feed_forward, hidden)?,
            up: self.linear(i, "ffn_up", feed_forward, hidden)?,
            down: self.linear(i, "ffn_down", hidden, feed_forward)?,
        })
    }

    /// The model; `progress` gets the layers read so far, and their number.
    pub fn model(
        &mut self,
        config: ModelConfig,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Model, String> {
        let shape = [config.vocab, config.hidden];
        let hidden = config.hidden;
        let embeddings = self.tensor(self.names.embeddings(), &shape)?;
        // Without a matrix of its own, the output is the embeddings'.
        let output = match self.product(self.names.output(), shape, None)? {
            Some(own) => own,
            None => self.tied(&embeddings, shape)?,
        };
        let number = config.windows.len();
        let mut layers = Vec::new();
        for i in 0..number {
            layers.push(self.layer(i, &config)?);
            progress(i + 1, number);
        }
        Ok(Model {
            embeddings: values(&embeddings)?,
            layers,
            norm: self.vector(self.names.norm(), hidden)?,
            output,
            config,
        })
    }
}

fn check_shape(name: &str, given: &[usize], needed: &[usize]) -> Result<(), String> {
    match given == needed {
        true => Ok(()),
        false => Err(format!(
            "tensor {name} has the shape {given:?}, but the model's needs {needed:?}"
        )),
    }
}

/// The elements of a tensor, all of them finite.
pub(super) fn values(tensor: &Tensor) -> Result<Vec<f32>, String> {
    let flat = tensor.flatten_all().and_then(|t| t.to_vec1());
    let values: Vec<f32> = flat.map_err(|e| e.to_string())?;
    match values.iter().all(|x| x.is_finite()) {
        true => Ok(values),
        false => Err("a tensor has an element that is NaN or infinite".to_owned()),
    }
}

/// candle's device of tensors while files are read.
pub(super) const CPU: Device = Device::Cpu;
