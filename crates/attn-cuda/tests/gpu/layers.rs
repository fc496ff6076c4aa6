//! Layers of a cache whose rows lie on the device, on the caller's stream, held to the CPU's bits.

use anyhow::{Context, Result, bail, ensure};
use attn_bench::cuda::Buffers;
use attn_conformance::{case::noise, check::first_difference, trials::Trials};
use attn_core::{
    Append, Attend, CacheConfig, DecodeAttention, DecodeStep, DeviceMemory, DeviceResults,
    DeviceSteps, Dtype, Error, HeadDim, Heads, KvCache, KvFormat, KvSource, Problem, Rows, RowsMut,
    Scheme, SpansStep,
};
use attn_cpu::{CpuBackend, Reference};
use attn_cuda::{CudaBackend, CudaMemory, internals::context};
use cudarc::driver::CudaSlice;

use crate::passes;

const LAYERS: usize = 3;
const HEADS: Heads = Heads {
    q: 8,
    kv: 2,
    dim: HeadDim::same(128),
};
const ROW: usize = HEADS.kv * HEADS.dim.k;

/// Strides of queries and results side by side.
const STRIDES: [usize; 3] = [0, HEADS.q * HEADS.dim.k, HEADS.dim.k];

fn side_by_side([tokens, heads, dim]: [usize; 3]) -> [usize; 4] {
    [1, tokens, heads, dim]
}

/// One query token of each of these sequences.
fn at(layer: usize, sequences: &[usize]) -> Attend<'_> {
    Attend {
        layer,
        ..Attend::new(HEADS.q, sequences)
    }
}

/// K and V of one layer's tokens.
fn rows(seed: u64, layer: usize, tokens: usize) -> [Vec<f32>; 2] {
    [0, 50].map(|side| noise(seed + side + 1000 * layer as u64, tokens * ROW))
}

/// One cache on each device with the same tokens, and what its steps on the GPU keep.
struct Pair<'a> {
    gpu: &'a CudaBackend,
    cpu: Box<dyn DecodeAttention>,
    there: KvCache,
    here: KvCache,
    steps: Box<dyn DeviceSteps>,
    buffers: Buffers,
}

impl Pair<'_> {
    /// One step: layers are written and attended in turn, from device memory there.
    fn step(&mut self, seed: u64, appends: &[Append]) -> Result<()> {
        let tokens: usize = appends.iter().map(|a| a.tokens).sum();
        self.there.reserve_on(&mut *self.steps, appends)?;
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

    /// The numbers of a buffer, which outlives the wait that ends each call here.
    fn memory(&self, buffer: &CudaSlice<f32>) -> CudaMemory {
        let (at, stream) = (self.buffers.address(buffer), self.buffers.raw());
        // SAFETY: the buffer has the numbers, outlives the wait, and the stream is the buffers'.
        unsafe { CudaMemory::to_write(0, at, buffer.len(), Dtype::F32, stream) }
    }

    fn write(&mut self, layer: usize, [k, v]: [&[f32]; 2]) -> Result<()> {
        let (k, v) = (self.buffers.upload(k)?, self.buffers.upload(v)?);
        let (k, v) = (self.memory(&k), self.memory(&v));
        let tokens = k.elements() / ROW;
        let rows = |memory| {
            let shape = [1, tokens, HEADS.kv, HEADS.dim.k];
            Rows::on_device(memory, shape, [0, ROW, HEADS.dim.k])
        };
        let kv = [rows(&k)?, rows(&v)?];
        self.there.write_on(&mut *self.steps, layer, kv)?;
        Ok(self.steps.wait()?)
    }

    fn attend(&mut self, layer: usize, appends: &[Append]) -> Result<()> {
        let chosen: Vec<usize> = appends.iter().map(|a| a.sequence).collect();
        let here = self.here.layer(layer)?.sequences(&chosen)?;
        let problem = Problem::new(HEADS, here.table().lens.clone());
        let q = noise(7, problem.rows() * HEADS.dim.k);
        let (mut want, mut lse) = (vec![0.0; q.len()], vec![0.0; problem.rows()]);
        let plan = self.cpu.plan(&problem, self.here.config().format)?;
        let step = DecodeStep::new(&plan, &q, KvSource::Sequences(&here), &mut want)?;
        self.cpu.decode(&mut step.with_lse(&mut lse)?)?;

        let there = at(layer, &chosen).of_cache(&self.there)?;
        let (q, out) = (self.buffers.upload(&q)?, self.buffers.floats(q.len())?);
        let (of_q, of_out) = (self.memory(&q), self.memory(&out));
        let of_q = Rows::on_device(&of_q, side_by_side(there.problem().q_shape()), STRIDES)?;
        let of_out =
            RowsMut::on_device(&of_out, side_by_side(there.problem().out_shape()), STRIDES)?;
        let of_q = of_q.device_rows("q", there.problem().q_shape())?;
        let of_out = of_out.device_rows("out", there.problem().out_shape())?;
        let results = DeviceResults::Rows {
            out: of_out,
            lse: None,
        };
        self.steps.attend(&there, of_q, results)?;
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
        // With rows in host memory.
        let in_theirs = self.there.layer(layer)?.sequences(chosen)?;
        let plan = self.gpu.plan(problem, self.there.config().format)?;
        let step = SpansStep::new(&plan, &on_host, KvSource::Sequences(&in_theirs))?;
        if self.gpu.attend_spans(&step)? != want {
            bail!("states on the host of layer {layer}");
        }

        let there = at(layer, chosen).of_cache(&self.there)?;
        let (rows, spans) = (problem.rows(), 2);
        let max_sums = self.buffers.floats(2 * spans * rows)?;
        let o = self.buffers.floats(spans * rows * HEADS.dim.k)?;
        let memories = [q, &max_sums, &o].map(|buffer| self.memory(buffer));
        let of_q = Rows::on_device(
            &memories[0],
            side_by_side(there.problem().q_shape()),
            STRIDES,
        )?;
        let of_q = of_q.device_rows("q", there.problem().q_shape())?;
        let states = |spans| {
            let [of_max_sums, of_o] = there.state_rows(spans);
            let max_sums = [0, HEADS.q * 2, 2];
            let max_sums = RowsMut::on_device(&memories[1], side_by_side(of_max_sums), max_sums)?;
            let o = RowsMut::on_device(&memories[2], side_by_side(of_o), STRIDES)?;
            Ok::<_, Error>(DeviceResults::Spans {
                spans,
                max_sums: max_sums.device_rows("max_sums", of_max_sums)?,
                o: o.device_rows("o", of_o)?,
            })
        };
        self.steps.attend(&there, of_q, states(spans)?)?;
        self.steps.wait()?;
        let (max_sums, o) = (
            self.buffers.download(&max_sums)?,
            self.buffers.download(&o)?,
        );
        let (first, second) = max_sums.split_at(2 * rows);
        for (what, got, want) in [
            ("maxima and sums", first, want.max_sums()),
            ("O", &o[..rows * HEADS.dim.k], want.o()),
        ] {
            if let Some(text) = first_difference(what, got, want) {
                bail!("states of spans: {text}");
            }
        }
        let unseen = second.iter().step_by(2).all(|m| *m == f32::NEG_INFINITY);
        ensure!(unseen, "a span that no sequence has is seen");
        // Fewer spans than tokens need.
        let refused = self.steps.attend(&there, of_q, states(0)?);
        ensure!(
            matches!(refused, Err(Error::Parameter { what: "spans", .. })),
            "{refused:?}"
        );
        Ok(())
    }

    fn compare_bytes(&self) -> Result<()> {
        for sequence in 0..3 {
            let [there, here] = [&self.there, &self.here].map(|cache| cache.image(sequence));
            let (there, here) = (there?, here?);
            let same = there.as_bytes() == here.as_bytes();
            ensure!(same, "bytes of sequence {sequence}");
        }
        Ok(())
    }
}

/// With centres of K the specification's scalar program stands for the CPU.
fn layers(gpu: &CudaBackend, format: KvFormat, centres: bool) -> Result<()> {
    let config = CacheConfig::builder(format, HEADS)
        .unit_tensor_scales()
        .layers(LAYERS)
        .centres(centres);
    let config = config.sequences(3).max_len(400).build();
    let cpu: Box<dyn DecodeAttention> = match centres {
        true => Box::new(Reference::new()),
        false => Box::new(CpuBackend::new()),
    };
    let there = gpu.create_cache(&config)?;
    let mut pair = Pair {
        gpu,
        here: cpu.create_cache(&config)?,
        steps: gpu.device_steps(&there)?,
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
    pair.there.reserve_on(&mut *pair.steps, &appends)?;
    let [k, v] = rows(9, 1, 68);
    pair.write(1, [&v, &k])?;
    let refused = at(0, &[0]).of_cache(&pair.there).map(drop);
    ensure!(matches!(refused, Err(Error::Step { .. })), "{refused:?}");
    pair.there.cancel_step()?;
    pair.compare_bytes()?;
    pair.step(2, &appends)?;
    pair.step(3, &[(0, 1), (2, 1)].map(append))?;
    // Another cache's steps: of the same pages they order nothing but themselves, of other pages they are refused.
    pair.there.reserve(&[append((1, 1))])?;
    let other = pair.gpu.create_cache(&config)?;
    let mut others = pair.gpu.device_steps(&other)?;
    let refused = pair.there.reserve_on(&mut *others, &[append((0, 1))]);
    ensure!(matches!(refused, Err(Error::Step { .. })), "{refused:?}");
    let other = CacheConfig::builder(KvFormat::same(Scheme::Bf16), HEADS).layers(LAYERS);
    let other = pair.gpu.create_cache(&other.max_len(64).build())?;
    let mut others = pair.gpu.device_steps(&other)?;
    let row = pair.buffers.upload(&[0.5; ROW])?;
    let row = pair.memory(&row);
    let rows = Rows::on_device(&row, [1, 1, HEADS.kv, HEADS.dim.k], STRIDES)?;
    let refused = pair.there.write_on(&mut *others, 0, [rows; 2]);
    ensure!(
        matches!(refused, Err(Error::WrongBackend { .. })),
        "{refused:?}"
    );
    Ok(pair.there.cancel_step()?)
}

/// Adds the tests of this file.
pub fn add(mut trials: Trials<CudaBackend>) -> Trials<CudaBackend> {
    for format in ["int8", "int4"] {
        for centres in [false, true] {
            let what = if centres { " with centres of K" } else { "" };
            let name =
                format!("native: {format}, layers of a cache{what} in steps of the device's rows");
            let format: KvFormat = format.parse().expect("a format's name");
            trials = trials.test(name, move |gpu| passes(layers(gpu, format, centres)));
        }
    }
    trials
}
