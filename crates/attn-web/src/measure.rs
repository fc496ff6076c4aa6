//! Layers of a file, attended in a format on one device: bytes, error, speed, and the digest of all outputs' bits.

use anyhow::{Result, ensure};
use attn::{
    CacheConfig, DecodeAttention, DecodeStep, Heads, KvCache, KvFormat, KvSource, Problem,
    backends::wgpu::{WgpuBackend, wgpu},
};
use attn_cli::{
    data::{Kv, Layer, Layers, load_bytes},
    figures::Difference,
};
use attn_conformance::{check::digest, oracle};
use serde_json::{Value, json};
use wgpu::BufferUsages;

/// Formats that the page compares.
pub const FORMATS: [&str; 6] = ["int8", "int8/int4", "int4", "fp8", "bf16", "f16"];
/// The shortest context that the page offers, in tokens.
const SHORTEST: usize = 256;
/// Milliseconds that the steps of a layer are timed for, at least.
const TIMED_MS: f64 = 50.0;
/// The most steps that are timed together.
const MOST_STEPS: usize = 1024;

/// Where steps run.
pub enum Device {
    /// The CPU backend.
    Cpu(Box<dyn DecodeAttention>),
    /// The wgpu backend: WebGPU in a browser.
    Gpu(WgpuBackend),
}

impl Device {
    fn backend(&self) -> &dyn DecodeAttention {
        match self {
            Device::Cpu(backend) => &**backend,
            Device::Gpu(backend) => backend,
        }
    }

    async fn decode(&self, step: &mut DecodeStep<'_>) -> Result<()> {
        match self {
            Device::Cpu(backend) => backend.decode(step)?,
            Device::Gpu(backend) => backend.decode_async(step).await?,
        }
        Ok(())
    }

    /// The device's name and what it says of itself.
    #[must_use]
    pub fn describe(&self) -> [String; 2] {
        let device = self.backend().device();
        [device.name.clone(), device.detail.clone()]
    }
}

/// Layers with queries, and the exact results of their first tokens.
pub struct Inputs(Layers);

impl Inputs {
    /// Reads a safetensors file with NAME.k, NAME.v and NAME.q per layer.
    ///
    /// # Errors
    /// A sentence that says what the file lacks.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        Ok(Inputs(load_bytes(bytes, None)?))
    }

    /// Tokens of the shortest layer.
    #[must_use]
    pub fn tokens(&self) -> usize {
        let tokens = self.0.layers.iter().map(|layer| layer.kv.seq);
        tokens.min().unwrap_or(0)
    }

    /// The contexts to offer: powers of two from 256 on, and all tokens.
    #[must_use]
    pub fn contexts(&self) -> Vec<usize> {
        let tokens = self.tokens();
        let powers = std::iter::successors(Some(SHORTEST), |tokens| Some(2 * tokens));
        let shorter = powers.take_while(|context| *context < tokens);
        shorter.chain([tokens]).collect()
    }

    /// The shape of the first layer and the number of layers, in words.
    #[must_use]
    pub fn describe(&self) -> String {
        let layers = &self.0.layers;
        let first = &layers[0];
        format!(
            "{} layers · {} query heads on {} KV heads of {} dims · {} tokens · {} query tokens",
            layers.len(),
            first.q_heads,
            first.kv.kv_heads,
            first.kv.head_dim,
            first.kv.seq,
            first.q_len
        )
    }

    /// The first `context` tokens of each layer, attended by the file's queries, as if those were of the last of these tokens; the exact results are computed
    /// in f64.
    ///
    /// # Errors
    /// Fewer than the query tokens, or more than the file's tokens.
    pub fn at(&self, context: usize) -> Result<Inputs> {
        let layers = self.0.layers.iter().map(|layer| {
            let kv = &layer.kv;
            ensure!(
                (layer.q_len..=kv.seq).contains(&context),
                "{}: a context of {context} tokens; allowed: {} to {}",
                kv.name,
                layer.q_len,
                kv.seq
            );
            let elements = context * kv.kv_heads * kv.head_dim;
            let kv = Kv {
                name: kv.name.clone(),
                k: kv.k[..elements].to_vec(),
                v: kv.v[..elements].to_vec(),
                seq: context,
                ..*kv
            };
            let problem = problem(&kv, layer.q_heads, layer.q_len, self.0.scale);
            let (out, lse) = oracle::attend_rows(&problem, &layer.q, &kv.k, &kv.v);
            let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect();
            Ok(Layer {
                kv,
                q: layer.q.clone(),
                out: narrow(out),
                lse: narrow(lse),
                ..*layer
            })
        });
        Ok(Inputs(Layers {
            layers: layers.collect::<Result<_>>()?,
            ..self.0
        }))
    }
}

/// The last `q_len` tokens of `kv` as queries.
fn problem(kv: &Kv, q_heads: usize, q_len: usize, scale: f32) -> Problem {
    let heads = Heads {
        q: q_heads,
        kv: kv.kv_heads,
        dim: kv.head_dim.into(),
    };
    let mut problem = Problem::new(heads, [kv.seq]);
    problem.q_lens = vec![q_len];
    problem.scores.softmax_scale = Some(scale);
    problem
}

/// What a format came to on one device.
pub struct Measured {
    /// Bytes of codes and parameters of one token and KV head, K and V.
    pub bytes_per_token: f64,
    /// Dims of a head.
    pub head_dim: usize,
    /// The relative L2 error of all outputs.
    pub error: f64,
    /// The digest of the bits of all outputs and log-sum-exps.
    pub digest: u64,
    /// Milliseconds of a step of one query token through all layers; none without a clock.
    pub step_ms: Option<f64>,
}

impl Measured {
    /// The figures as JSON, the digest as 16 hexadecimal digits.
    #[must_use]
    pub fn value(&self) -> Value {
        json!({
            "bytes": self.bytes_per_token, "dims": self.head_dim, "error": self.error, "digest": format!("{:016x}", self.digest),
            "step_ms": self.step_ms, "tokens_per_s": self.step_ms.map(|ms| 1e3 / ms),
        })
    }
}

/// Attends all layers in a format: the file's queries for the error and the digest, and the last one alone for the time by `clock`, in milliseconds.
///
/// # Errors
/// Those of the backend.
pub async fn measure(
    device: &Device,
    inputs: &Inputs,
    format: KvFormat,
    clock: Option<fn() -> f64>,
) -> Result<Measured> {
    let (mut difference, mut bits) = (Difference::default(), Vec::new());
    let (mut bytes_per_token, mut step_ms) = (0.0, clock.map(|_| 0.0));
    let scale = inputs.0.scale;
    for layer in &inputs.0.layers {
        let kv = &layer.kv;
        let config: CacheConfig = kv.cache(format).build();
        let mut cache = device.backend().create_cache(&config)?;
        cache.append(0, &kv.k, &kv.v)?;
        let problem = problem(kv, layer.q_heads, layer.q_len, scale);
        let [out, lse] = attend(device, &problem, &cache, &layer.q).await?;
        difference.add(&out, &layer.out);
        bits.extend(out.iter().chain(&lse).map(|x| x.to_bits()));
        bytes_per_token = cache.layout().bytes_per_token();
        if let (Some(clock), Some(ms)) = (clock, &mut step_ms) {
            *ms += time(device, layer, scale, &cache, clock).await?;
        }
    }
    Ok(Measured {
        bytes_per_token,
        head_dim: inputs.0.layers[0].kv.head_dim,
        error: difference.relative(),
        digest: digest(bits.into_iter()),
        step_ms,
    })
}

/// Outputs and log-sum-exps of a step over a cache.
async fn attend(
    device: &Device,
    problem: &Problem,
    cache: &KvCache,
    q: &[f32],
) -> Result<[Vec<f32>; 2]> {
    let plan = device.backend().plan(problem, cache.config().format)?;
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; problem.rows()]);
    let mut step =
        DecodeStep::new(&plan, q, KvSource::Cache(cache), &mut out)?.with_lse(&mut lse)?;
    device.decode(&mut step).await?;
    Ok([out, lse])
}

/// Milliseconds of a step of a layer's last query token: of as many steps as take [`TIMED_MS`] together.
async fn time(
    device: &Device,
    layer: &Layer,
    scale: f32,
    cache: &KvCache,
    clock: fn() -> f64,
) -> Result<f64> {
    let problem = problem(&layer.kv, layer.q_heads, 1, scale);
    let q = &layer.q[layer.q.len() - layer.q_heads * layer.kv.head_dim..];
    let mut steps = 1;
    loop {
        let ms = match device {
            Device::Cpu(backend) => {
                let plan = backend.plan(&problem, cache.config().format)?;
                let mut out = vec![0.0; q.len()];
                let began = clock();
                for _ in 0..steps {
                    let source = KvSource::Cache(cache);
                    backend.decode(&mut DecodeStep::new(&plan, q, source, &mut out)?)?;
                }
                clock() - began
            }
            Device::Gpu(backend) => gpu_steps(backend, &problem, cache, q, steps, clock).await?,
        };
        if ms >= TIMED_MS || steps >= MOST_STEPS {
            return Ok(ms / steps as f64);
        }
        steps *= 4;
    }
}

/// Milliseconds from the submission of `steps` recorded steps to their end.
async fn gpu_steps(
    backend: &WgpuBackend,
    problem: &Problem,
    cache: &KvCache,
    q: &[f32],
    steps: usize,
    clock: fn() -> f64,
) -> Result<f64> {
    let (device, queue) = (backend.wgpu_device(), backend.wgpu_queue());
    let buffer = |elements: usize| {
        device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("attn-web step"),
            size: 4 * elements as u64,
            usage: BufferUsages::STORAGE | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    };
    let [queries, out, lse] = [q.len(), q.len(), problem.rows()].map(buffer);
    let bytes: Vec<u8> = q.iter().flat_map(|x| x.to_le_bytes()).collect();
    queue.write_buffer(&queries, 0, &bytes);
    let prepared = backend.prepare(problem, cache)?;
    let mut encoder = device.create_command_encoder(&Default::default());
    for _ in 0..steps {
        backend.record(&mut encoder, &prepared, &queries, &out, &lse)?;
    }
    backend.finish_async().await?;
    let began = clock();
    queue.submit([encoder.finish()]);
    backend.finish_async().await?;
    Ok(clock() - began)
}

#[cfg(test)]
mod tests {
    use attn::backends::cpu::CpuBackend;

    use super::*;

    fn bundled() -> Inputs {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../attn-cli/data/smollm2-decode.safetensors"
        );
        Inputs::read(&std::fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn contexts_are_powers_of_two_up_to_all_tokens() {
        assert_eq!(bundled().contexts(), [256, 512, 1024, 2048]);
        let cut = bundled().at(300).unwrap();
        assert_eq!((cut.tokens(), cut.contexts()), (300, vec![256, 300]));
        assert_eq!(bundled().at(100).unwrap().contexts(), [100]);
    }

    #[test]
    fn a_context_that_a_file_lacks_is_refused_by_a_sentence() {
        for context in [7, 2049] {
            let error = bundled().at(context).err().unwrap().to_string();
            assert_eq!(
                error,
                format!("layer00: a context of {context} tokens; allowed: 8 to 2048")
            );
        }
    }

    /// Kills a cut that keeps other tokens than the first, or whose exact result is that of the whole file.
    #[test]
    fn a_cut_is_attended_with_the_errors_of_its_format() {
        static CALLS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let clock = || {
            let calls = CALLS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            f64::from(calls) * TIMED_MS
        };
        let cpu = Device::Cpu(Box::new(CpuBackend::new()));
        let mut digests = Vec::new();
        for context in [256, 2048] {
            let inputs = bundled().at(context).unwrap();
            let format = "int8".parse().unwrap();
            let of = |clock| pollster::block_on(measure(&cpu, &inputs, format, clock)).unwrap();
            let (measured, timed) = (of(None), of(Some(clock)));
            assert!(
                (0.005..0.02).contains(&measured.error),
                "{}",
                measured.error
            );
            assert_eq!((measured.bytes_per_token, measured.head_dim), (132.0, 64));
            assert_eq!((measured.digest, measured.step_ms), (timed.digest, None));
            // One step of each of six layers, between two calls of the clock.
            assert_eq!(timed.step_ms, Some(6.0 * TIMED_MS));
            digests.push(measured.digest);
        }
        assert_ne!(digests[0], digests[1]);
    }
}
