//! Timestamps of an adapter, around runs.

use attn_core::Error;
use attn_wgpu::{WgpuBackend, WgpuError, internals::device};
use wgpu::BufferUsages as Usage;

use super::{MOST_RUNS, buffer, poll};

/// Timestamps, two for each run, and their way to the host.
pub(super) struct Stamps {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    read: wgpu::Buffer,
    /// Microseconds per tick.
    period: f64,
}

impl Stamps {
    const BYTES: u64 = 16 * MOST_RUNS as u64;

    pub(super) fn new(backend: &WgpuBackend) -> Option<Self> {
        let gpu = backend.wgpu_device();
        if !gpu.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        Some(Stamps {
            queries: gpu.create_query_set(&wgpu::QuerySetDescriptor {
                label: None,
                ty: wgpu::QueryType::Timestamp,
                count: 2 * MOST_RUNS as u32,
            }),
            resolved: buffer(gpu, Self::BYTES, Usage::QUERY_RESOLVE | Usage::COPY_SRC),
            read: buffer(gpu, Self::BYTES, Usage::COPY_DST | Usage::MAP_READ),
            period: f64::from(backend.wgpu_queue().get_timestamp_period()) / 1000.0,
        })
    }

    /// Stamps the end of all work before: an empty pass has a beginning.
    pub(super) fn stamp(&self, encoder: &mut wgpu::CommandEncoder, index: u32) {
        encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: None,
            timestamp_writes: Some(wgpu::ComputePassTimestampWrites {
                query_set: &self.queries,
                beginning_of_pass_write_index: Some(index),
                end_of_pass_write_index: None,
            }),
        });
    }

    /// Microseconds between the two stamps of each of `runs` runs, which have been submitted.
    pub(super) fn elapsed(&self, backend: &WgpuBackend, runs: usize) -> Result<Vec<f64>, Error> {
        let failed = |text: String| device("reading timestamps", WgpuError::Lost(text));
        let (gpu, queue) = (backend.wgpu_device(), backend.wgpu_queue());
        let mut encoder = gpu.create_command_encoder(&Default::default());
        encoder.resolve_query_set(&self.queries, 0..2 * runs as u32, &self.resolved, 0);
        encoder.copy_buffer_to_buffer(&self.resolved, 0, &self.read, 0, 16 * runs as u64);
        queue.submit([encoder.finish()]);
        self.read.map_async(wgpu::MapMode::Read, .., |_| ());
        poll(gpu, None)?;
        let ticks: Vec<u64> = {
            let view = self.read.get_mapped_range(..16 * runs as u64);
            let view = view.map_err(|error| failed(error.to_string()))?;
            view.chunks_exact(8).map(pod).collect()
        };
        self.read.unmap();
        let us = |pair: &[u64]| pair[1].saturating_sub(pair[0]) as f64 * self.period;
        Ok(ticks.chunks_exact(2).map(us).collect())
    }
}

/// A timestamp from its bytes.
fn pod(bytes: &[u8]) -> u64 {
    bytemuck::pod_read_unaligned(bytes)
}
