//! The adapter's packed dot products of bytes and nothing else: what bounds steps of many query rows.

use attn_core::Error;
use attn_wgpu::{WgpuBackend, internals::products_kernel};
use wgpu::BufferUsages as Usage;

use super::buffer;

/// `CHAINS` and `UNROLLED` of `products.wgsl`.
const CHAINS: usize = 16;
const UNROLLED: usize = 4;

/// Lanes of a workgroup there.
const LANES: usize = 64;

/// Workgroups: several times what any GPU holds at once; few for a program on the CPU.
const WORKGROUPS: u32 = 16384;
const SOFTWARE_WORKGROUPS: u32 = 64;

/// Microseconds of a piece of work: longer than a launch, short enough to lie between disturbances.
const PIECE_US: f64 = 2000.0;
const MOST_ROUNDS: f64 = 1e6;

/// Work of about [`PIECE_US`], and what it is bound to.
pub(super) struct Products {
    pipeline: wgpu::ComputePipeline,
    words: wgpu::Buffer,
    group: wgpu::BindGroup,
    workgroups: u32,
    rounds: u32,
}

/// What `words` holds: the rounds, and bytes of either sign.
fn words(rounds: u32) -> Vec<u32> {
    let codes = (1..=CHAINS as u32).map(|c| c.wrapping_mul(0x9E37_79B9));
    [rounds].into_iter().chain(codes).collect()
}

impl Products {
    pub fn new(backend: &WgpuBackend, software: bool) -> Result<Self, Error> {
        let pipeline = products_kernel(backend)?;
        let gpu = backend.wgpu_device();
        let workgroups = if software {
            SOFTWARE_WORKGROUPS
        } else {
            WORKGROUPS
        };
        let bytes = 4 * words(0).len() as u64;
        let words = buffer(gpu, bytes, Usage::STORAGE | Usage::COPY_DST);
        let sums = 4 * u64::from(workgroups) * LANES as u64;
        let sums = buffer(gpu, sums, Usage::STORAGE);
        let entries: Vec<_> = (0..)
            .zip([&words, &sums])
            .map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding,
                resource: buffer.as_entire_binding(),
            })
            .collect();
        let group = gpu.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        });
        let mut products = Products {
            pipeline,
            words,
            group,
            workgroups,
            rounds: 0,
        };
        products.set_rounds(backend, 8);
        Ok(products)
    }

    fn set_rounds(&mut self, backend: &WgpuBackend, rounds: u32) {
        self.rounds = rounds;
        let words = words(rounds);
        let bytes = bytemuck::cast_slice(&words);
        backend.wgpu_queue().write_buffer(&self.words, 0, bytes);
    }

    /// A piece of work.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.group, &[]);
        pass.dispatch_workgroups(self.workgroups, 1, 1);
    }

    /// Operations of a piece: four products and four sums each.
    pub fn operations(&self) -> f64 {
        let lanes = self.workgroups as usize * LANES;
        8.0 * (lanes * CHAINS * UNROLLED) as f64 * f64::from(self.rounds)
    }

    /// Makes the next pieces as long as they should be, after one took `us`.
    pub fn fit(&mut self, backend: &WgpuBackend, us: f64) {
        let rounds = f64::from(self.rounds) * PIECE_US / us.max(1.0);
        if !(0.5..2.0).contains(&(us / PIECE_US)) {
            self.set_rounds(backend, rounds.clamp(1.0, MOST_ROUNDS) as u32);
        }
    }
}
