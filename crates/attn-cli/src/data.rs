//! Attention inputs of a real model from a safetensors file.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use attn::{CacheBuilder, CacheConfig, Heads, KvFormat, Problem, Scheme};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};

/// The bundled tensors; `data/README.md` says where they come from.
static BUNDLED: &[u8] = include_bytes!("../data/smollm2-decode.safetensors");

/// K and V of one layer.
pub struct Kv {
    /// The layer's name in the file.
    pub name: String,
    /// K as `[seq, kv_heads, head_dim]`, the order of an append.
    pub k: Vec<f32>,
    /// V, in the same order.
    pub v: Vec<f32>,
    /// The number of KV heads.
    pub kv_heads: usize,
    /// The number of tokens.
    pub seq: usize,
    /// The number of dims of a head.
    pub head_dim: usize,
}

impl Kv {
    /// A cache with room for the layer, and static scales for it where the format has some.
    pub fn cache(&self, format: KvFormat) -> CacheBuilder {
        let heads = Heads {
            q: self.kv_heads,
            kv: self.kv_heads,
            dim: self.head_dim,
        };
        let scales = |scheme, x| tensor_scales(scheme, x, self.kv_heads, self.head_dim);
        CacheConfig::builder(format, heads)
            .max_len(self.seq)
            .tensor_scales(scales(format.k, &self.k), scales(format.v, &self.v))
    }
}

/// One layer with its queries and the exact result: the file's, or computed in f64 from its K, V and Q.
pub struct Layer {
    /// K and V.
    pub kv: Kv,
    /// Queries as `[q_len, q_heads, head_dim]`.
    pub q: Vec<f32>,
    /// The exact outputs as `[q_len, q_heads, head_dim]`.
    pub out: Vec<f32>,
    /// The exact log-sum-exp as `[q_len, q_heads]`.
    pub lse: Vec<f32>,
    /// The number of query tokens.
    pub q_len: usize,
    /// The number of query heads.
    pub q_heads: usize,
}

/// The bytes of a file.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| {
        format!(
            "cannot read {}; check the path and its permissions",
            path.display()
        )
    })
}

/// Parses a safetensors file.
pub fn parse(bytes: &[u8]) -> Result<SafeTensors<'_>> {
    SafeTensors::deserialize(bytes)
        .context("not a safetensors file; write one with NAME.k and NAME.v per layer")
}

/// Names before `suffix`, sorted.
pub fn names(tensors: &SafeTensors<'_>, suffix: &str) -> Vec<String> {
    let mut names: Vec<String> = tensors
        .names()
        .iter()
        .filter_map(|name| name.strip_suffix(suffix).map(str::to_owned))
        .collect();
    names.sort();
    names
}

/// The least static scale that a cache takes: that of a head of zeros.
const LEAST_SCALE: f32 = 1e-15;

/// Static scales per KV head that map the largest magnitude to the largest code.
fn tensor_scales(scheme: Scheme, x: &[f32], heads: usize, head_dim: usize) -> Vec<f32> {
    let largest = if scheme == Scheme::Fp8E4m3 {
        448.0
    } else {
        127.0
    };
    let amax = |h: usize| {
        let rows = x.chunks_exact(head_dim).skip(h).step_by(heads);
        rows.flatten().fold(0.0f32, |a, v| a.max(v.abs()))
    };
    if !scheme.has_tensor_scale() {
        return Vec::new();
    }
    (0..heads)
        .map(|h| (amax(h) / largest).max(LEAST_SCALE))
        .collect()
}

/// K and V of all layers of a file.
pub fn load_kv(bytes: &[u8]) -> Result<Vec<Kv>> {
    let tensors = parse(bytes)?;
    let names = names(&tensors, ".k");
    ensure!(
        !names.is_empty(),
        "the file has no tensor NAME.k; it needs NAME.k and NAME.v, [kv_heads, seq, head_dim], per layer"
    );
    names.into_iter().map(|name| kv(&tensors, name)).collect()
}

/// All layers of a file, and the scale of its scores: the metadata's `scale`, or 1 / sqrt(head_dim).
pub fn load(file: Option<&Path>) -> Result<(Vec<Layer>, f32)> {
    let owned;
    let bytes = match file {
        None => BUNDLED,
        Some(path) => {
            owned = read(path)?;
            &owned
        }
    };
    let layers = load_kv(bytes)?;
    let tensors = parse(bytes)?;
    let (_, header) = SafeTensors::read_metadata(bytes)?;
    let scale = match header.metadata().as_ref().and_then(|m| m.get("scale")) {
        Some(scale) => scale
            .parse()
            .context("the file's metadata `scale` is not a number")?,
        None => (layers[0].head_dim as f32).sqrt().recip(),
    };
    let layers = layers
        .into_iter()
        .map(|kv| layer(&tensors, kv, scale))
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
        Dtype::BF16 => view
            .data()
            .chunks_exact(2)
            .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
        Dtype::F32 => view
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
        other => bail!("{name} is {other:?}; f16, bf16 and f32 are read"),
    };
    Ok((view.shape().to_vec(), data))
}

fn kv(tensors: &SafeTensors<'_>, name: String) -> Result<Kv> {
    let get = |suffix: &str| tensor(tensors, &format!("{name}.{suffix}"));
    let ((k_shape, k), (v_shape, v)) = (get("k")?, get("v")?);
    let &[kv_heads, seq, head_dim] = &k_shape[..] else {
        bail!("{name}.k is {k_shape:?}; it must be [kv_heads, seq, head_dim]")
    };
    ensure!(
        !k_shape.contains(&0),
        "{name}.k is {k_shape:?}; it needs at least one KV head, one token and one dim"
    );
    ensure!(
        v_shape == k_shape,
        "{name}.v is {v_shape:?}, but {name}.k is {k_shape:?}; K and V need the same shape"
    );
    let by_token = |x: Vec<f32>| -> Vec<f32> {
        let rows = (0..seq).flat_map(|t| (0..kv_heads).map(move |h| (h * seq + t) * head_dim));
        rows.flat_map(|at| x[at..at + head_dim].to_vec()).collect()
    };
    Ok(Kv {
        k: by_token(k),
        v: by_token(v),
        name,
        kv_heads,
        seq,
        head_dim,
    })
}

fn layer(tensors: &SafeTensors<'_>, kv: Kv, scale: f32) -> Result<Layer> {
    let name = &kv.name;
    let get = |suffix: &str| tensor(tensors, &format!("{name}.{suffix}"));
    let (q_shape, q) = get("q")?;
    let &[q_len, q_heads, q_dim] = &q_shape[..] else {
        bail!("{name}.q is {q_shape:?}; it must be [q_len, q_heads, head_dim]")
    };
    ensure!(
        q_dim == kv.head_dim,
        "{name}.q has head_dim {q_dim}, but {name}.k has {}",
        kv.head_dim
    );
    let (out, lse) = match (get("out"), get("lse")) {
        (Ok((_, out)), Ok((_, lse))) => (out, lse),
        _ => exact(&kv, &q, [q_len, q_heads], scale)?,
    };
    ensure!(
        out.len() == q.len() && lse.len() == q_len * q_heads,
        "{name}.out must have the shape of {name}.q, and {name}.lse [q_len, q_heads]"
    );
    Ok(Layer {
        kv,
        q,
        out,
        lse,
        q_len,
        q_heads,
    })
}

/// Outputs and log-sum-exps of a layer whose file has none, in f64 from K and V as they are. The queries are those of the last tokens.
fn exact(
    kv: &Kv,
    q: &[f32],
    [q_len, q_heads]: [usize; 2],
    scale: f32,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let mut problem = Problem::new(
        Heads {
            q: q_heads,
            kv: kv.kv_heads,
            dim: kv.head_dim,
        },
        vec![kv.seq],
    );
    problem.q_lens = vec![q_len; problem.batch()];
    problem.softmax_scale = scale;
    problem
        .check()
        .with_context(|| format!("{}.q does not fit {}.k", kv.name, kv.name))?;
    let (out, lse) = attn_conformance::oracle::attend_rows(&problem, q, &kv.k, &kv.v);
    let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect();
    Ok((narrow(out), narrow(lse)))
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    #[test]
    fn static_scales_map_each_heads_largest_magnitude_to_the_largest_code() {
        // Two tokens of two heads of two dims.
        let x = [1.0, -448.0, 12.7, 0.0, 2.0, 3.0, -127.0, 1.0];
        let scales = |scheme| tensor_scales(scheme, &x, 2, 2);
        assert_eq!(scales(Scheme::Fp8E4m3), [1.0, 127.0 / 448.0]);
        let format: attn::KvFormat = "int8-tensor".parse().unwrap();
        assert_eq!(scales(format.k), [448.0 / 127.0, 1.0]);
        let format: attn::KvFormat = "int8".parse().unwrap();
        assert!(scales(format.k).is_empty());
        // A head of zeros has a scale all the same.
        assert_eq!(tensor_scales(Scheme::Fp8E4m3, &[0.0; 4], 2, 2), [1e-15; 2]);
    }

    #[test]
    fn exact_outputs_are_those_that_the_bundled_file_has() {
        let (layers, scale) = load(None).unwrap();
        let layer = &layers[0];
        let shape = [layer.q_len, layer.q_heads];
        let (out, lse) = exact(&layer.kv, &layer.q, shape, scale).unwrap();
        // The file's are the model's own, from f16 K and V.
        let error = crate::figures::Difference::of(&out, &layer.out).relative();
        assert!(error < 1e-3, "{error}");
        let error = crate::figures::lse_difference(&lse, &layer.lse);
        assert!(error < 1e-3, "{error}");
    }

    #[test]
    fn bundled_layers_have_the_shapes_of_their_model() {
        let (layers, scale) = load(None).unwrap();
        assert_eq!((layers.len(), scale), (6, 0.125));
        for layer in &layers {
            let kv = &layer.kv;
            assert_eq!((kv.kv_heads, kv.seq, kv.head_dim), (3, 2048, 64));
            assert_eq!((layer.q_len, layer.q_heads), (8, 9));
        }
    }

    #[test]
    fn tensors_of_each_type_have_their_values() {
        let x = [1.5f32, -2.0, 0.15625, 3.0e4];
        let bytes = |dtype| -> Vec<u8> {
            let number = |x: &f32| match dtype {
                Dtype::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
                Dtype::BF16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
                _ => x.to_le_bytes().to_vec(),
            };
            x.iter().flat_map(number).collect()
        };
        for dtype in [Dtype::F16, Dtype::BF16, Dtype::F32] {
            let bytes = bytes(dtype);
            let view = TensorView::new(dtype, vec![2, 2], &bytes).unwrap();
            let file = safetensors::serialize([("x", view)], None).unwrap();
            let (shape, got) = tensor(&parse(&file).unwrap(), "x").unwrap();
            assert_eq!(shape, [2, 2]);
            let near = |(got, want): (&f32, &f32)| (got / want - 1.0).abs() < 0.005;
            assert!(
                got.len() == 4 && got.iter().zip(&x).all(near),
                "{dtype:?}: {got:?}"
            );
        }
    }
}
