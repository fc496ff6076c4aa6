//! A launch that only reads, and whether a decode launch exists: for the project's own timings.

use attn_core::{Error, KvFormat, Problem, error::refuse};
use attn_kernels::cuda::{Instance, KvLayout, params::ReadParams};

use super::{
    grid::{COPY_THREADS, Grid},
    launch_plan::LaunchPlan,
    op::{Op, Prepared},
    query_blocks::PlanKind,
};
use crate::{gpu::CudaBackend, handles::DeviceAddress};

/// A read of `bytes` bytes, a multiple of 16, and nothing else: the ceiling of decode's speed.
///
/// Prepared by [`prepare_read`].
///
/// # Safety
/// `from` holds `bytes` bytes of device memory and `sink` 4.
#[derive(Debug, Clone, Copy)]
pub struct ReadArgs {
    /// What is read.
    pub from: DeviceAddress,
    /// Its bytes.
    pub bytes: usize,
    /// A word that the compiler must think is written.
    pub sink: DeviceAddress,
}

// SAFETY: `attn_read` takes one ReadParams, asserted on both sides, and writes the sink alone.
unsafe impl Op for ReadArgs {
    /// SMs of the device.
    type Shape = usize;
    type Params = ReadParams;
    const DOING: &'static str = "reading";
    /// Stages of `read.cu`, and its barriers.
    const SHARED_BYTES: usize = 6 * 16384 + 128;

    fn instances(_: &usize) -> Result<Vec<Instance>, Error> {
        Ok(vec![Instance::Read])
    }

    fn params(&self, _: &usize) -> Result<ReadParams, Error> {
        if !self.bytes.is_multiple_of(16) {
            return refuse("bytes to read", self.bytes, "a multiple of 16");
        }
        Ok(ReadParams {
            from: self.from.get(),
            bytes: self.bytes as u64,
            sink: self.sink.get(),
        })
    }

    fn grid(&self, sms: &usize) -> Grid {
        Grid::new([2 * sms, 1, 1], COPY_THREADS)
    }
}

/// Loads the kernel of [`ReadArgs`], for as many CTAs as the device runs at once.
///
/// # Errors
/// [`Error::Device`].
pub fn prepare_read(gpu: &CudaBackend) -> Result<Prepared<ReadArgs>, Error> {
    gpu.prepare_op(gpu.device.sms)
}

/// Whether [`CudaBackend::prepare`] has a kernel for these arguments; loads none.
///
/// # Errors
/// Those of [`CudaBackend::prepare`], but for the device's.
pub fn check_native(
    gpu: &CudaBackend,
    problem: &Problem,
    format: KvFormat,
    layout: KvLayout,
) -> Result<(), Error> {
    let (limits, preferences) = (gpu.device.limits(), &gpu.device.preferences);
    let kind = PlanKind::Known;
    LaunchPlan::new(kind, limits, preferences, problem, format, layout).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_whole_vectors_by_two_ctas_of_each_sm() {
        let read = |bytes| ReadArgs {
            from: DeviceAddress::new(0x100),
            bytes,
            sink: DeviceAddress::new(0x200),
        };
        assert_eq!(read(4096).params(&132).unwrap().bytes, 4096);
        assert_eq!(read(4096).grid(&132).ctas, [264, 1, 1]);
        for bytes in [1, 8, 4088] {
            let said = read(bytes).params(&132).unwrap_err().to_string();
            assert!(said.contains("a multiple of 16"), "{said}");
        }
    }
}
