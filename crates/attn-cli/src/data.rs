//! Attention inputs of a real model from a safetensors file.

mod layout;
mod name;

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use attn::{CacheBuilder, CacheConfig, Heads, KvFormat, Problem, Scheme};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};

pub use self::{layout::Layout, name::LayerName};

/// The bundled tensors; `data/README.md` says where they come from.
static BUNDLED: &[u8] = include_bytes!("../data/smollm2-decode.safetensors");

/// K and V of one layer.
pub struct Kv {
    /// The layer's name.
    pub name: LayerName,
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
        let heads = Heads::new(self.kv_heads, self.kv_heads, self.head_dim);
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

/// Layers with a tensor of this suffix, sorted.
fn names(tensors: &SafeTensors<'_>, suffix: &str) -> Vec<LayerName> {
    let mut names: Vec<LayerName> = tensors
        .names()
        .iter()
        .filter_map(|name| name.strip_suffix(suffix).map(LayerName::new))
        .collect();
    names.sort();
    names
}

/// The least static scale that a cache takes: that of a head of zeros.
const LEAST_SCALE: f32 = 1e-15;

/// Static scales per KV head that map the largest magnitude to the largest code.
fn tensor_scales(scheme: Scheme, x: &[f32], heads: usize, head_dim: usize) -> Vec<f32> {
    let Some(largest) = scheme.largest_static_code() else {
        return Vec::new();
    };
    let amax = |h: usize| {
        let rows = x.chunks_exact(head_dim).skip(h).step_by(heads);
        rows.flatten().fold(0.0f32, |a, v| a.max(v.abs()))
    };
    (0..heads)
        .map(|h| (amax(h) / largest).max(LEAST_SCALE))
        .collect()
}

/// K and V of a file, and the order that they were read in.
pub struct Inputs {
    /// The order in the file.
    pub layout: Layout,
    /// All layers, by name.
    pub layers: Vec<Kv>,
}

/// An entry of a file's metadata.
fn metadata(bytes: &[u8], key: &str) -> Result<Option<String>> {
    let (_, header) = SafeTensors::read_metadata(bytes)?;
    let metadata = header.metadata().as_ref();
    Ok(metadata.and_then(|metadata| metadata.get(key).cloned()))
}

/// K and V of all layers of a file, in the order that it names, or that was asked for.
pub fn load_kv(bytes: &[u8], asked: Option<Layout>) -> Result<Inputs> {
    let tensors = parse(bytes)?;
    let names = names(&tensors, ".k");
    ensure!(
        !names.is_empty(),
        "the file has no tensor NAME.k; it needs NAME.k and NAME.v, {}, per layer",
        Layout::TokensFirst
    );
    for name in self::names(&tensors, ".v") {
        ensure!(
            names.contains(&name),
            "the file has {name}.v, but no {name}.k; K and V go together"
        );
    }
    let layout = Layout::of(metadata(bytes, "layout")?.as_deref(), asked)?;
    let layers = names.into_iter().map(|name| kv(&tensors, name, layout));
    Ok(Inputs {
        layout,
        layers: layers.collect::<Result<_>>()?,
    })
}

/// Layers with queries and exact results, as a file has them.
pub struct Layers {
    /// The order of K and V in the file.
    pub layout: Layout,
    /// All layers, by name.
    pub layers: Vec<Layer>,
    /// The scale of the scores: the metadata's `scale`, or 1 / sqrt(head_dim).
    pub scale: f32,
}

/// All layers of a file; of the bundled one, if there is no other.
pub fn load(file: Option<&Path>, asked: Option<Layout>) -> Result<Layers> {
    let owned;
    let bytes = match file {
        None => BUNDLED,
        Some(path) => {
            owned = read(path)?;
            &owned
        }
    };
    load_bytes(bytes, asked)
}

/// All layers of a file's bytes.
pub fn load_bytes(bytes: &[u8], asked: Option<Layout>) -> Result<Layers> {
    let Inputs { layout, layers } = load_kv(bytes, asked)?;
    let tensors = parse(bytes)?;
    let scale = match metadata(bytes, "scale")? {
        Some(scale) => scale
            .parse()
            .context("the file's metadata `scale` is not a number")?,
        None => (layers[0].head_dim as f32).sqrt().recip(),
    };
    let layers = layers.into_iter().map(|kv| layer(&tensors, kv, scale));
    Ok(Layers {
        layout,
        layers: layers.collect::<Result<_>>()?,
        scale,
    })
}

/// A tensor's shape and values; none if the file lacks it.
type Values = Option<(Vec<usize>, Vec<f32>)>;

fn optional(tensors: &SafeTensors<'_>, name: &LayerName, suffix: &str) -> Result<Values> {
    let Ok(view) = tensors.tensor(&name.tensor(suffix)) else {
        return Ok(None);
    };
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
        other => bail!("{name}.{suffix} is {other:?}; f16, bf16 and f32 are read"),
    };
    Ok(Some((view.shape().to_vec(), data)))
}

fn tensor(
    tensors: &SafeTensors<'_>,
    name: &LayerName,
    suffix: &str,
) -> Result<(Vec<usize>, Vec<f32>)> {
    optional(tensors, name, suffix)?
        .with_context(|| format!("the file has no tensor {name}.{suffix}"))
}

fn kv(tensors: &SafeTensors<'_>, name: LayerName, layout: Layout) -> Result<Kv> {
    let get = |suffix: &str| tensor(tensors, &name, suffix);
    let ((k_shape, k), (v_shape, v)) = (get("k")?, get("v")?);
    let &[first, second, dim] = &k_shape[..] else {
        bail!("{name}.k is {k_shape:?}; it must be {layout}")
    };
    let shape = [first, second, dim];
    ensure!(
        !shape.contains(&0),
        "{name}.k is {shape:?}; it needs at least one KV head, one token and one dim"
    );
    ensure!(
        v_shape == k_shape,
        "{name}.v is {v_shape:?}, but {name}.k is {k_shape:?}; K and V need the same shape"
    );
    layout.check(format_args!("{name}.k"), shape)?;
    let [seq, kv_heads, head_dim] = layout.sizes(shape);
    Ok(Kv {
        k: layout.by_token(k, shape),
        v: layout.by_token(v, shape),
        name,
        kv_heads,
        seq,
        head_dim,
    })
}

fn layer(tensors: &SafeTensors<'_>, kv: Kv, scale: f32) -> Result<Layer> {
    let name = &kv.name;
    let (q_shape, q) = tensor(tensors, name, "q")?;
    let &[q_len, q_heads, q_dim] = &q_shape[..] else {
        bail!("{name}.q is {q_shape:?}; it must be [q_len, q_heads, head_dim]")
    };
    ensure!(
        !q_shape.contains(&0),
        "{name}.q is {q_shape:?}; it needs at least one query token, one query head and one dim"
    );
    ensure!(
        q_dim == kv.head_dim,
        "{name}.q has head_dim {q_dim}, but {name}.k has {}",
        kv.head_dim
    );
    let [out, lse] = ["out", "lse"].map(|suffix| optional(tensors, name, suffix));
    let (out, lse) = match (out?, lse?) {
        (Some((out_shape, out)), Some((lse_shape, lse))) => {
            ensure!(
                out_shape == q_shape && lse_shape == [q_len, q_heads],
                "{name}.out is {out_shape:?} and {name}.lse {lse_shape:?}; they must have the shape of {name}.q, {q_shape:?}, and [{q_len}, {q_heads}]"
            );
            (out, lse)
        }
        (None, None) => exact(&kv, &q, [q_len, q_heads], scale)?,
        (out, _) => {
            let [has, lacks] = match out.is_some() {
                true => ["out", "lse"],
                false => ["lse", "out"],
            };
            bail!(
                "the file has {name}.{has}, but no {name}.{lacks}; exact results need both, or leave both out and they are computed"
            )
        }
    };
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
    let mut problem = Problem::new(Heads::new(q_heads, kv.kv_heads, kv.head_dim), vec![kv.seq]);
    problem.q_lens = vec![q_len; problem.batch()];
    problem.scores.softmax_scale = Some(scale);
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
        let Layers { layers, scale, .. } = load(None, None).unwrap();
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
        let Layers {
            layers,
            scale,
            layout,
        } = load(None, None).unwrap();
        assert_eq!((layers.len(), scale), (6, 0.125));
        assert_eq!(layout, Layout::HeadsFirst);
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
            let file = safetensors::serialize([("x.q", view)], None).unwrap();
            let name = LayerName::new("x");
            let (shape, got) = tensor(&parse(&file).unwrap(), &name, "q").unwrap();
            assert_eq!(shape, [2, 2]);
            let near = |(got, want): (&f32, &f32)| (got / want - 1.0).abs() < 0.005;
            assert!(
                got.len() == 4 && got.iter().zip(&x).all(near),
                "{dtype:?}: {got:?}"
            );
        }
    }
}
