//! The tests of `common/transfer.rs` on a GPU.

use anyhow::Result;
use attn_bench::cuda::Buffers;
use attn_conformance::trials::Trials;
use attn_core::{KvFormat, Problem};
use attn_cuda::{
    CudaBackend,
    internals::context,
    native::{DecodeArgs, DeviceAddress, KvLayout, Op, PlanFor, PlanKind, SpansArgs},
};
use cudarc::driver::CudaSlice;

use crate::{
    common_transfer::{Machine, Test},
    passes,
    shards::Case,
};

/// For plans that leave the states of spans.
const SPANS: PlanFor = PlanFor {
    kind: PlanKind::Spans,
    centres: false,
};

/// A GPU, and memory on it.
struct OnGpu<'a>(&'a CudaBackend, Buffers);

impl Machine for OnGpu<'_> {
    type Memory = CudaSlice<u8>;

    fn upload(&self, bytes: &[u8]) -> Result<Self::Memory> {
        // No slice is empty.
        Ok(self.1.upload(if bytes.is_empty() { &[0] } else { bytes })?)
    }

    fn address(&self, memory: &mut Self::Memory) -> DeviceAddress {
        self.1.address(memory)
    }

    fn download(&self, memory: &Self::Memory) -> Result<Vec<u8>> {
        Ok(self.1.download(memory)?)
    }

    unsafe fn enqueue<O: Op>(&self, shape: O::Shape, op: &O) -> Result<()> {
        let prepared = self.0.prepare_op(shape)?;
        // SAFETY: this function's contract.
        Ok(unsafe { self.0.enqueue(&prepared, self.1.raw(), op) }?)
    }

    fn query_blocks(
        &self,
        (problem, format, layout): (&Problem, KvFormat, KvLayout),
    ) -> Result<Vec<[i32; 4]>> {
        let plan = self.0.prepare_for(problem, format, layout, SPANS)?;
        let blocks = plan.query_blocks().iter();
        Ok(blocks
            .map(|b| [b.sequence, b.first, b.tokens, b.behind])
            .collect())
    }

    unsafe fn attend_spans(
        &self,
        (problem, format, layout): (&Problem, KvFormat, KvLayout),
        args: &DecodeArgs,
        to: &SpansArgs,
    ) -> Result<()> {
        let plan = self.0.prepare_for(problem, format, layout, SPANS)?;
        // SAFETY: this function's contract.
        Ok(unsafe { self.0.attend_spans_on(&plan, self.1.raw(), args, to) }?)
    }
}

/// Adds a trial for each test.
pub fn add(mut trials: Trials<CudaBackend>) -> Trials<CudaBackend> {
    for test in Test::all() {
        trials = trials.test(format!("native: {}", test.name()), move |gpu| {
            let buffers = Buffers::new(context(gpu));
            passes(
                buffers
                    .map_err(Into::into)
                    .and_then(|buffers| test.run(&OnGpu(gpu, buffers))),
            );
        });
    }
    for case in Case::all() {
        trials = trials.test(format!("native: {}", case.name()), move |gpu| {
            let buffers = Buffers::new(context(gpu));
            passes(
                buffers
                    .map_err(Into::into)
                    .and_then(|buffers| case.run(&OnGpu(gpu, buffers))),
            );
        });
    }
    trials
}
