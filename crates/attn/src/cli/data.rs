//! Attention inputs of a real model from a safetensors file.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use half::f16;
use safetensors::{Dtype, SafeTensors};

/// The bundled tensors; `tests/data/README.md` says where they come from.
static BUNDLED: &[u8] = include_bytes!("../../../../tests/data/smollm2-decode.safetensors");

/// One layer: `k`, `v` as `[seq, kv_heads, head_dim]` (the order of an append), `q`, `out` as `[q_len, q_heads, head_dim]`.
pub struct Layer {
    pub name: String,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub q: Vec<f32>,
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub kv_heads: usize,
    pub seq: usize,
    pub q_len: usize,
    pub q_heads: usize,
    pub head_dim: usize,
}

/// All layers of a file, and the scale of its scores.
pub fn load(file: Option<&Path>) -> Result<(Vec<Layer>, f32)> {
    let owned;
    let bytes = match file {
        None => BUNDLED,
        Some(path) => {
            owned =
                std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            &owned
        }
    };
    let (_, header) = SafeTensors::read_metadata(bytes).context("not a safetensors file")?;
    let tensors = SafeTensors::deserialize(bytes).context("not a safetensors file")?;
    let scale = match header.metadata().as_ref().and_then(|m| m.get("scale")) {
        Some(scale) => scale
            .parse()
            .context("the file's metadata `scale` is not a number")?,
        None => bail!(
            "the file's metadata has no `scale`; write softmax_scale there, for example 0.125"
        ),
    };
    let mut names: Vec<String> = tensors
        .names()
        .iter()
        .filter_map(|n| n.strip_suffix(".k").map(str::to_owned))
        .collect();
    names.sort();
    ensure!(
        !names.is_empty(),
        "the file has no tensor NAME.k; it needs NAME.k, .v, .q, .out and .lse per layer"
    );
    let layers = names
        .into_iter()
        .map(|name| layer(&tensors, name))
        .collect::<Result<_>>()?;
    Ok((layers, scale))
}

fn tensor(tensors: &SafeTensors<'_>, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
    let view = tensors
        .tensor(name)
        .with_context(|| format!("the file has no tensor {name}"))?;
    let data = match view.dtype() {
        Dtype::F16 => view
            .data()
            .chunks_exact(2)
            .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
        Dtype::F32 => view
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
        other => bail!("{name} is {other:?}; f16 and f32 are read"),
    };
    Ok((view.shape().to_vec(), data))
}

fn layer(tensors: &SafeTensors<'_>, name: String) -> Result<Layer> {
    let get = |suffix: &str| tensor(tensors, &format!("{name}.{suffix}"));
    let ((k_shape, k), (v_shape, v)) = (get("k")?, get("v")?);
    let ((q_shape, q), (_, out), (_, lse)) = (get("q")?, get("out")?, get("lse")?);
    let &[kv_heads, seq, head_dim] = &k_shape[..] else {
        bail!("{name}.k is not [kv_heads, seq, head_dim]")
    };
    let &[q_len, q_heads, q_dim] = &q_shape[..] else {
        bail!("{name}.q is not [q_len, q_heads, head_dim]")
    };
    ensure!(
        v_shape == k_shape,
        "{name}.v has another shape than {name}.k"
    );
    ensure!(
        q_dim == head_dim,
        "{name}.q and {name}.k differ in head_dim"
    );
    ensure!(
        out.len() == q.len() && lse.len() == q_len * q_heads,
        "{name}.out or .lse has the wrong shape"
    );
    let by_token = |x: Vec<f32>| -> Vec<f32> {
        let rows = (0..seq).flat_map(|t| (0..kv_heads).map(move |h| (h * seq + t) * head_dim));
        rows.flat_map(|at| x[at..at + head_dim].to_vec()).collect()
    };
    Ok(Layer {
        k: by_token(k),
        v: by_token(v),
        name,
        q,
        out,
        lse,
        kv_heads,
        seq,
        q_len,
        q_heads,
        head_dim,
    })
}
