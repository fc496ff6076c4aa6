//! Steps whose sequences bring other numbers of query tokens each time that a captured graph runs, held to the CPU's bits.

use anyhow::{Context, Result, bail};
use attn_conformance::trials::Trials;
use attn_core::{Error, KvFormat};
use attn_cuda::{
    CudaBackend, CudaError, Options,
    native::{Dtype, KvLayout, ListBlocksArgs, PlanFor, PlanKind},
};
use cudarc::driver::{CudaSlice, sys};

use crate::{
    driver,
    native::{BATCH, DIM, Engine, PAGE, Q_HEADS},
    passes,
};

/// Query tokens that a sequence has at most on average: 20 are 80 rows of a KV head, `many_rows.cu`'s; 5 are `split_kv.cu`'s.
const TOKENS: [usize; 2] = [20, 5];

/// A plan for any shares of the engine's query tokens, in place of its own.
fn ragged<'a>(
    gpu: &'a CudaBackend,
    format: KvFormat,
    tokens: usize,
) -> Result<(Engine<'a>, CudaSlice<u8>)> {
    let mut engine = Engine::new(gpu, format, tokens, Dtype::Bf16)?;
    let ragged = PlanFor {
        kind: PlanKind::Ragged,
        centres: false,
    };
    engine.plan = gpu.prepare_for(&engine.problem, format, KvLayout::Pages(PAGE), ragged)?;
    engine.workspace = engine.buffers.bytes(engine.plan.workspace_bytes())?;
    let list = engine.buffers.bytes(engine.plan.query_blocks_bytes())?;
    Ok((engine, list))
}

fn starts(q_lens: [usize; BATCH]) -> Vec<i32> {
    let mut starts = vec![0];
    q_lens
        .iter()
        .for_each(|len| starts.push(starts[starts.len() - 1] + *len as i32));
    starts
}

/// List and decode in a graph, captured once, replayed with other shares and growing sequences.
fn graph(gpu: &CudaBackend, format: KvFormat, tokens: usize) -> Result<()> {
    let (mut engine, list) = ragged(gpu, format, tokens)?;
    engine.prefill([70, 250, 900])?;
    let mut cu_seqlens_q = engine.buffers.upload(&[0i32; BATCH + 1])?;
    let stream = engine.buffers.stream.clone();
    driver(stream.synchronize())?;
    driver(stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))?;
    let mut args = engine.decode_args();
    args.query_blocks = engine.buffers.address(&list);
    let raw = engine.buffers.raw();
    let list_args = ListBlocksArgs {
        cu_seqlens_q: engine.buffers.address(&cu_seqlens_q),
        to: args.query_blocks,
    };
    // SAFETY: the buffers are the engine's, sized by its plan, and live until the graph has run.
    let listed = unsafe { gpu.enqueue(engine.plan.list_blocks()?, raw, &list_args) };
    // SAFETY: likewise; the workspace is zeroed and this plan's alone.
    let decoded = unsafe { gpu.decode_on(&engine.plan, raw, &args) };
    let graph = driver(stream.end_capture(
        sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH,
    ))?;
    listed.and(decoded)?;
    let graph = graph.context("the capture gave no graph")?;
    let all = BATCH * tokens;
    let shares = [
        [1, 1, 1],
        [0, tokens, 1],
        [all, 0, 0],
        [1, 2, all - 3],
        [0, 0, 0],
        [tokens + 2, 1, tokens - 3],
    ];
    for (step, q_lens) in shares.into_iter().enumerate() {
        for (b, len) in q_lens.into_iter().enumerate().filter(|(_, len)| *len > 0) {
            engine.next_tokens(b, 1, len, Dtype::F32)?;
            let append = engine.append_args(b, 1, len);
            // SAFETY: as in `Engine::prefill`.
            unsafe { gpu.enqueue(&engine.append, raw, &append) }?;
            driver(stream.synchronize())?;
        }
        engine.buffers.copy(&starts(q_lens), &mut cu_seqlens_q)?;
        let mut q = engine.new_queries()?;
        q.truncate(q_lens.iter().sum::<usize>() * Q_HEADS * DIM);
        driver(graph.launch())?;
        let problem = engine.problem.clone().q_lens(q_lens);
        engine.compare_with(
            &problem,
            &q,
            &format!("{format}, replay {step}, shares {q_lens:?}"),
        )?;
    }
    Ok(())
}

/// The checking launch refuses numbers that fall, or that are more than the plan's.
fn checked(options: &Options) -> Result<()> {
    let gpu = &CudaBackend::with_options(options)?;
    let (engine, list) = ragged(gpu, KvFormat::INT8, 5)?;
    let to = engine.buffers.address(&list);
    for starts in [[0, 5, 4, 6], [0, 1, 2, 16], [-1, 0, 1, 2]] {
        let cu_seqlens_q = engine.buffers.upload(&starts)?;
        let args = ListBlocksArgs {
            cu_seqlens_q: engine.buffers.address(&cu_seqlens_q),
            to,
        };
        // SAFETY: the checking launch goes first and refuses what breaks the contract.
        match unsafe { gpu.enqueue(engine.plan.list_blocks()?, engine.buffers.raw(), &args) } {
            Err(Error::Device { source, .. })
                if matches!(
                    source.downcast_ref(),
                    Some(CudaError::Check {
                        what: "cu_seqlens_q",
                        ..
                    })
                ) => {}
            other => bail!("{starts:?}: expected a refusal, got {other:?}"),
        }
    }
    Ok(())
}

/// Adds the tests of this file.
pub fn add(mut trials: Trials<CudaBackend>) -> Trials<CudaBackend> {
    for name in ["int8", "int4"] {
        for tokens in TOKENS {
            let format: KvFormat = name.parse().expect("a format's name");
            let name =
                format!("native: {name}, {tokens} query tokens on average, listed in a graph");
            trials = trials.test(name, move |gpu| passes(graph(gpu, format, tokens)));
        }
    }
    trials.test(
        "native: the checking launch refuses query tokens that fall",
        |_| {
            let options = Options::from_env().expect("the backend was opened with them");
            passes(checked(&options.check(true)));
        },
    )
}
