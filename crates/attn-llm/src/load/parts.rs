//! Tensors by name, under the names of GGUF files or of safetensors, and the model that they make.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor, quantized::QTensor};

use super::{
    kind::{Kind, Output, Presence},
    quoted,
};
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

    /// Tensors that files may have and no model here needs: frequencies that the configuration gives, too.
    fn unneeded(self, layers: usize) -> Vec<String> {
        let of_layer = |i: usize| match self {
            Names::Gguf => format!("blk.{i}.attn_rot_embd.weight"),
            Names::Safetensors => format!("model.layers.{i}.self_attn.rotary_emb.inv_freq"),
        };
        let of_model = match self {
            Names::Gguf => ROPE_FACTORS,
            Names::Safetensors => "model.rotary_emb.inv_freq",
        };
        let all = (0..layers).map(of_layer);
        all.chain([of_model.to_owned()]).collect()
    }
}

/// The tensor of a GGUF file with Llama 3's divisors of frequencies, which its configuration reads.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Tensors of a file, by name.
pub(super) trait Tensors {
    /// The names of all of them.
    fn names(&self) -> Vec<String>;

    /// A tensor in f32; none if the file lacks it.
    fn get(&mut self, name: &str) -> Result<Option<Tensor>, String>;

    /// A tensor in the file's own blocks; none if the file lacks it.
    fn packed(&mut self, name: &str) -> Result<Option<QTensor>, String>;
}

/// A model under construction: tensors are taken by name, and their shapes checked.
pub(super) struct Parts<'a> {
    pub tensors: &'a mut dyn Tensors,
    pub names: Names,
    pub kind: Kind,
    pub products: Products,
    /// Where weights of products lie.
    pub device: Device,
}

/// Which tensors of a file a model takes.
struct Taken(BTreeSet<String>);

impl Taken {
    fn has(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}

impl Parts<'_> {
    /// The tensors that the model takes. Refuses a file that lacks one of them, or has others that are not known to be unneeded.
    fn taken(&self, layers: usize) -> Result<Taken, String> {
        let given: BTreeSet<String> = self.tensors.names().into_iter().collect();
        let names = self.names;
        let mut taken = BTreeSet::from([names.embeddings(), names.norm()].map(str::to_owned));
        if self.kind.output == Output::Own || given.contains(names.output()) {
            taken.insert(names.output().to_owned());
        }
        for [part, _] in PARTS {
            for (suffix, presence) in ["weight", "bias"].into_iter().zip(self.kind.presence(part)) {
                let of_layer = |i: usize| format!("{}.{suffix}", names.layer(i, part));
                if presence == Presence::Required
                    || presence == Presence::Optional && given.contains(&of_layer(0))
                {
                    taken.extend((0..layers).map(of_layer));
                }
            }
        }
        if let Some(missing) = taken.difference(&given).next() {
            return Err(format!("it has no tensor {missing}"));
        }
        let unneeded = names.unneeded(layers);
        let is_other = |name: &&String| !taken.contains(*name) && !unneeded.contains(name);
        let others: Vec<&str> = given.iter().filter(is_other).map(String::as_str).collect();
        match others.is_empty() {
            true => Ok(Taken(taken)),
            false => Err(format!(
                "it has tensors that its kind of model does not use: {}; the file is damaged, or of another kind",
                quoted(&others)
            )),
        }
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, String> {
        let tensor = self.tensors.get(name)?;
        let tensor = tensor.ok_or_else(|| format!("it has no tensor {name}"))?;
        check_shape(name, tensor.dims(), shape)?;
        tensor.to_dtype(DType::F32).map_err(|e| e.to_string())
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, String> {
        values(&self.tensor(name, &[len])?)
    }

    /// The product of a layer with one of its matrices, whose shape is `[outputs, inputs]`.
    fn linear(
        &mut self,
        layer: usize,
        part: &str,
        [outputs, inputs]: [usize; 2],
        taken: &Taken,
    ) -> Result<Linear, String> {
        let name = self.names.layer(layer, part);
        let bias = format!("{name}.bias");
        let bias = match taken.has(&bias) {
            true => Some(self.vector(&bias, outputs)?),
            false => None,
        };
        self.product(&format!("{name}.weight"), [outputs, inputs], bias)
    }

    /// Products with a matrix of the file.
    fn product(
        &mut self,
        name: &str,
        shape: [usize; 2],
        bias: Option<Vec<f32>>,
    ) -> Result<Linear, String> {
        let product = if self.products == Products::Packed {
            let packed = self.tensors.packed(name)?;
            let packed = packed.ok_or_else(|| format!("it has no tensor {name}"))?;
            check_shape(name, packed.shape().dims(), &shape)?;
            Linear::packed(packed.into(), bias)
        } else {
            let weight = self.tensor(name, &shape)?.to_device(&self.device);
            Linear::new(&weight.map_err(|e| e.to_string())?, bias)
        };
        product.map_err(|e| e.to_string())
    }

    /// The product that gives logits.
    fn output(
        &mut self,
        embeddings: &Tensor,
        shape: [usize; 2],
        taken: &Taken,
    ) -> Result<Linear, String> {
        let name = self.names.output();
        if taken.has(name) && self.kind.output != Output::Tied {
            return self.product(name, shape, None);
        }
        if taken.has(name) {
            let own = self.tensor(name, &shape)?;
            if values(&own)? != values(embeddings)? {
                return Err(format!(
                    "its embeddings are tied to the output, but it has a tensor {name} with other values; say \"tie_word_embeddings\": false, or take the tensor away"
                ));
            }
        }
        if self.products == Products::Packed {
            return self.product(self.names.embeddings(), shape, None);
        }
        let weight = embeddings.to_device(&self.device);
        let tied = weight
            .map_err(Into::into)
            .and_then(|w| Linear::new(&w, None));
        tied.map_err(|e| e.to_string())
    }

    fn layer(&mut self, i: usize, config: &ModelConfig, taken: &Taken) -> Result<Layer, String> {
        let (hidden, feed_forward) = (config.hidden, config.feed_forward);
        let dim = config.heads.dim.k;
        let (q, kv) = (config.heads.q * dim, config.heads.kv * dim);
        let names = self.names;
        let weight = |part| format!("{}.weight", names.layer(i, part));
        let mut head_norm = |part| {
            let name = weight(part);
            let is_there = taken.has(&name);
            is_there.then(|| self.vector(&name, dim)).transpose()
        };
        let (q_norm, k_norm) = (head_norm("attn_q_norm")?, head_norm("attn_k_norm")?);
        Ok(Layer {
            attention_norm: self.vector(&weight("attn_norm"), hidden)?,
            q: self.linear(i, "attn_q", [q, hidden], taken)?,
            k: self.linear(i, "attn_k", [kv, hidden], taken)?,
            v: self.linear(i, "attn_v", [kv, hidden], taken)?,
            attention_output: self.linear(i, "attn_output", [hidden, q], taken)?,
            q_norm,
            k_norm,
            feed_forward_norm: self.vector(&weight("ffn_norm"), hidden)?,
            gate: self.linear(i, "ffn_gate", [feed_forward, hidden], taken)?,
            up: self.linear(i, "ffn_up", [feed_forward, hidden], taken)?,
            down: self.linear(i, "ffn_down", [hidden, feed_forward], taken)?,
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
        let number = config.windows.len();
        let taken = self.taken(number)?;
        let embeddings = self.tensor(self.names.embeddings(), &shape)?;
        let output = self.output(&embeddings, shape, &taken)?;
        let mut layers = Vec::new();
        for i in 0..number {
            layers.push(self.layer(i, &config, &taken)?);
            progress(i + 1, number);
        }
        Ok(Model {
            embeddings: values(&embeddings)?,
            layers,
            norm: self.vector(self.names.norm(), hidden)?,
            output,
            config,
            remarks: Vec::new(),
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
