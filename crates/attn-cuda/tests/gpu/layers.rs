//! Layers of a cache whose rows lie on the device, on the caller's stream, held to the CPU's bits.

use anyhow::{Context, Result, bail, ensure};
use attn_bench::cuda::Buffers;
use attn_conformance::{case::noise, check::first_difference, trials::Trials};
use attn_core::{
    Append, CacheConfig, DecodeAttention, DecodeStep, Error, Heads, KvCache, KvFormat, KvSource,
    Problem, SpansStep,
};
use attn_cpu::CpuBackend;
use attn_cuda::{
    CudaBackend, DeviceSteps, QueryRows, SpanRows,
    internals::context,
    native::{DeviceAddress, Dtype, KvRows},
};
use cudarc::driver::CudaSlice;

use crate::passes;

const LAYERS: usize = 3;
const HEADS: Heads = Heads {
    q: 8,
    kv: 2,
    dim: 128,
};
const ROW: usize = HEADS.kv * HEADS.dim;

/// K and V of one layer's tokens.
fn rows(seed: u64, layer: usize, tokens: usize) -> [Vec<f32>; 2] {
    [0, 50].map(|side| noise(seed + side + 1000 * layer as u64, tokens * ROW))
}

/// One cache on each device with the same tokens, and what its steps on the GPU keep.
struct Pair<'a> {
    gpu: &'a CudaBackend,
    cpu: CpuBackend,
    there: KvCache,
    here: KvCache,
    steps: DeviceSteps,
    buffers: Buffers,
}

impl Pair<'_> {
    /// One step: layers are written and attended in turn, from device memory there.
    fn step(&mut self, seed: u64, appends: &[Append]) -> Result<()> {
        let tokens: usize = appends.iter().map(|a| a.tokens).sum();
        self.steps.reserve(&mut self.there, appends)?;
        self.here.reserve(appends)?;
        for layer in 0..LAYERS {
            let [k, v] = rows(seed, layer, tokens);
            self.here.write(layer, &k, &v)?;
            self.write(layer, [&k, &v])?;
            self.attend(layer, appends)
                .with_context(|| format!("step {seed}, layer {layer}"))?;
        }
        ensure!(self.there.table() == self.here.table(), "the tables differ");
        self.compare_bytes()
    }

    fn write(&mut self, layer: usize, [k, v]: [&[f32]; 2]) -> Result<()> {
        let (k, v) = (self.buffers.upload(k)?, self.buffers.upload(v)?);
        let tokens = KvRows {
            k: self.buffers.address(&k),
            v: self.buffers.address(&v),
            dtype: Dtype::F32,
            k_token_stride: ROW,
            v_token_stride: ROW,
        };
        // SAFETY: the buffers hold the step's rows, outlive the wait, and the stream is theirs.
        unsafe {
            self.steps
                .write(&mut self.there, layer, &tokens, self.buffers.raw())
        }?;
        Ok(self.steps.wait()?)
    }

    fn attend(&mut self, layer: usize, appends: &[Append]) -> Result<()> {
        let chosen: Vec<usize> = appends.iter().map(|a| a.sequence).collect();
        let here = self.here.layer(layer)?.sequences(&chosen)?;
        let problem = Problem::new(HEADS, here.table().lens.clone());
        let q = noise(7, problem.rows() * HEADS.dim);
        let (mut want, mut lse) = (vec![0.0; q.len()], vec![0.0; problem.rows()]);
        let plan = self.cpu.plan(&problem, self.here.config().format)?;
        let step = DecodeStep::new(&plan, &q, KvSource::Sequences(&here), &mut want)?;
        self.cpu.decode(&mut step.with_lse(&mut lse)?)?;

        let there = self.there.layer(layer)?.sequences(&chosen)?;
        let (q, out) = (self.buffers.upload(&q)?, self.buffers.floats(q.len())?);
        let rows = QueryRows {
            q: self.buffers.address(&q),
            out: self.buffers.address(&out),
            dtype: Dtype::F32,
            lse: DeviceAddress::NULL,
        };
        // SAFETY: the buffers hold the problem's rows, outlive the wait, and the stream is theirs.
        unsafe {
            self.steps
                .attend(&there, &problem, &rows, self.buffers.raw())
        }?;
        self.steps.wait()?;
        if let Some(text) = first_difference("out", &self.buffers.download(&out)?, &want) {
            bail!("{text}");
        }
        self.compare_states(layer, &chosen, &q, &problem)
    }

    /// The states of the sequences' one span, and of one that they do not have.
    fn compare_states(
        &mut self,
        layer: usize,
        chosen: &[usize],
        q: &CudaSlice<f32>,
        problem: &Problem,
    ) -> Result<()> {
        let here = self.here.layer(layer)?.sequences(chosen)?;
        let on_host = self.buffers.download(q)?;
        let plan = self.cpu.plan(problem, self.here.config().format)?;
        let step = SpansStep::new(&plan, &on_host, KvSource::Sequences(&here))?;
        let want = self.cpu.attend_spans(&step)?;

        let there = self.there.layer(layer)?.sequences(chosen)?;
        let (rows, spans) = (problem.rows(), 2);
        let max_sums = self.buffers.floats(2 * spans * rows)?;
        let o = self.buffers.floats(spans * rows * HEADS.dim)?;
        let rows_of = SpanRows {
            q: self.buffers.address(q),
            dtype: Dtype::F32,
            spans,
            max_sums: self.buffers.address(&max_sums),
            o: self.buffers.address(&o),
        };
        // SAFETY: the buffers hold the problem's rows and the states of two spans, outlive the wait, and the stream is theirs.
        unsafe {
            self.steps
                .attend_spans(&there, problem, &rows_of, self.buffers.raw())
        }?;
        self.steps.wait()?;
        let (max_sums, o) = (
            self.buffers.download(&max_sums)?,
            self.buffers.download(&o)?,
        );
        let (first, second) = max_sums.split_at(2 * rows);
        for (what, got, want) in [
            ("maxima and sums", first, want.max_sums()),
            ("O", &o[..rows * HEADS.dim], want.o()),
        ] {
            if let Some(text) = first_difference(what, got, want) {
                bail!("states of spans: {text}");
            }
        }
        let unseen = second.iter().step_by(2).all(|m| *m == f32::NEG_INFINITY);
        ensure!(unseen, "a span that no sequence has is seen");
        // Fewer spans than tokens need.
        let none = SpanRows {
            spans: 0,
            ..rows_of
        };
        // SAFETY: the call is refused before it reads a row.
        let refused = unsafe {
            self.steps
                .attend_spans(&there, problem, &none, self.buffers.raw())
        };
        ensure!(
            matches!(refused, Err(Error::Parameter { what: "spans", .. })),
            "{refused:?}"
        );
        Ok(())
    }

    fn compare_bytes(&self) -> Result<()> {
        for sequence in 0..3 {
            let [there, here] = [&self.there, &self.here].map(|cache| cache.read_back(sequence));
            ensure!(there? == here?, "bytes of sequence {sequence}");
        }
        Ok(())
    }
}

fn layers(gpu: &CudaBackend, format: KvFormat) -> Result<()> {
    let config = CacheConfig::builder(format, HEADS).layers(LAYERS);
    let config = config.sequences(3).max_len(400).build();
    let cpu = CpuBackend::new();
    let there = gpu.create_cache(&config)?;
    let mut pair = Pair {
        gpu,
        here: cpu.create_cache(&config)?,
        steps: gpu.prepare_steps(&there)?,
        buffers: Buffers::new(context(gpu))?,
        there,
        cpu,
    };
    let append = |(sequence, tokens)| Append { sequence, tokens };
    pair.step(1, &[(0, 200), (1, 5)].map(append))?;
    pair.there.fork(0, 2)?;
    pair.here.fork(0, 2)?;
    // Both append to the page that they share; a step that fails before its last layer leaves nothing.
    let appends = [(2, 3), (0, 1), (1, 64)].map(append);
    pair.steps.reserve(&mut pair.there, &appends)?;
    let [k, v] = rows(9, 1, 68);
    pair.write(1, [&v, &k])?;
    let refused = pair.attend_unwritten();
    ensure!(matches!(refused, Err(Error::Step { .. })), "{refused:?}");
    pair.there.cancel_step()?;
    pair.compare_bytes()?;
    pair.step(2, &appends)?;
    pair.step(3, &[(0, 1), (2, 1)].map(append))?;
    // A host's write, and another cache's steps.
    pair.there.reserve(&[append((1, 1))])?;
    let other = pair.gpu.create_cache(&config)?;
    let mut others = pair.gpu.prepare_steps(&other)?;
    let refused = others.reserve(&mut pair.there, &[append((0, 1))]);
    ensure!(matches!(refused, Err(Error::Step { .. })), "{refused:?}");
    Ok(pair.there.cancel_step()?)
}

impl Pair<'_> {
    /// Attends a layer that the open step has not written.
    fn attend_unwritten(&mut self) -> Result<(), Error> {
        let there = self.there.layer(0)?.sequences(&[0])?;
        let problem = Problem::new(HEADS, there.table().lens.clone());
        let rows = QueryRows {
            q: DeviceAddress::NULL,
            out: DeviceAddress::NULL,
            dtype: Dtype::F32,
            lse: DeviceAddress::NULL,
        };
        // SAFETY: the call is refused before it reads a row.
        unsafe {
            self.steps
                .attend(&there, &problem, &rows, self.buffers.raw())
        }
    }
}

/// Adds the tests of this file.
pub fn add(mut trials: Trials<CudaBackend>) -> Trials<CudaBackend> {
    for format in ["int8", "int4"] {
        let name = format!("native: {format}, layers of a cache in steps of the device's rows");
        let format: KvFormat = format.parse().expect("a format's name");
        trials = trials.test(name, move |gpu| passes(layers(gpu, format)));
    }
    trials
}
