//! What can only be asked of a device by running something on it.

use attn_core::Error;

use crate::gpu::Gpu;

const LANES: &str = "
@group(0) @binding(0) var<storage, read_write> found: array<u32>;
@compute @workgroup_size(128)
fn lanes(@builtin(local_invocation_index) tid: u32, @builtin(subgroup_invocation_id) lane: u32, @builtin(subgroup_size) size: u32) {
    found[tid] = select(1u, size, lane == tid % size && subgroupBroadcastFirst(tid) == tid - lane);
}
";

/// The size of subgroups if it is 8, 16 or 32 and lane i of them is thread i: what `reduce.wgsl` relies on; else 1.
pub(crate) fn subgroup_lanes(gpu: &Gpu) -> Result<u32, Error> {
    let found = gpu.buffer(
        "attn probe",
        512,
        wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
    )?;
    gpu.guarded("probing subgroups", || {
        let module = gpu
            .device
            .create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some("lanes"),
                source: wgpu::ShaderSource::Wgsl(LANES.into()),
            });
        let pipeline = gpu
            .device
            .create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some("lanes"),
                layout: None,
                module: &module,
                entry_point: None,
                compilation_options: Default::default(),
                cache: None,
            });
        let group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &[wgpu::BindGroupEntry {
                binding: 0,
                resource: found.as_entire_binding(),
            }],
        });
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(1, 1, 1);
        }
        gpu.queue.submit([encoder.finish()]);
    })?;
    let bytes = gpu.read("probing subgroups", &[(&found, 0, 512)])?;
    let first = bytes[0];
    let all_equal = bytes.chunks_exact(4).all(|word| word == [first, 0, 0, 0]);
    Ok(match first {
        8 | 16 | 32 if all_equal => u32::from(first),
        _ => 1,
    })
}
