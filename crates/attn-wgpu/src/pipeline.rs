//! Compiled kernels: making and binding one, and the decode pipelines made so far.

use std::{
    collections::HashMap,
    num::NonZeroU64,
    sync::{Arc, Mutex},
    time::Instant,
};

use attn_core::{Error, Problem, events};
use attn_kernels::wgsl::{
    SpecialiseError,
    decode::{DecodeKey, KvLayout, Tuning, decode_key, decode_text},
};

use crate::{
    error::{BACKEND, WgpuError, device},
    gpu::{Gpu, IN_BROWSER},
};

/// A compute pipeline, whatever its bind group layout.
pub(crate) type Pipeline = Arc<wgpu::ComputePipeline>;

/// The decode pipelines of one backend by their constants, and the tuning that chooses those.
#[derive(Default)]
pub(crate) struct Pipelines {
    decode: Mutex<HashMap<DecodeKey, [Pipeline; 2]>>,
    pub tuning: Tuning,
}

/// Bytes of workgroup memory that a kernel may take on this device; more than the default would cost occupancy.
fn shared_bytes(gpu: &Gpu, tuning: &Tuning) -> usize {
    let most = gpu.limits.max_compute_workgroup_storage_size as usize;
    tuning.shared_bytes.unwrap_or(32768).min(most)
}

/// Makes a pipeline of a kernel's specialised text; `name` is its entry point.
pub(crate) fn compile(
    gpu: &Gpu,
    name: &'static str,
    text: Result<String, SpecialiseError>,
) -> Result<Pipeline, Error> {
    let text = text.map_err(|e| device("specialising a kernel", WgpuError::from(e)))?;
    // A browser has no such clock.
    let start = (!IN_BROWSER).then(Instant::now);
    let made = gpu.guarded("compiling a kernel", || {
        // SAFETY: without bounds checks an index past a binding is undefined. Of what the kernels index by, release builds check
        // - the pages of a step: `launch::KvTables::check` compares those from the first tile on that any row sees, where workgroups begin
        //   (`find_work` of decode_split.wgsl), with the pool's count, and their number with kv_len;
        // - the sequences of a step over centres of K: `Pool::check_sequences`;
        // - the pages, residual pages, tokens, sources and sequences of an append: `append::check`; those of first tiles: `append::check_tiles`;
        // - a view's offsets and strides: `view.rs` computes the end of the last row in checked arithmetic;
        // - callers' buffers (k and v of an append, a view's, q, out, lse): as many bytes as the kernels reach are bound (`first`), which
        //   wgpu compares with the buffer that it finds;
        // - 32-bit indices: no binding is longer than `Gpu::largest_binding`, which bounds the pool and its centres (`Pool::new`), the partials,
        //   tables and queries (`launch::check_sizes`), an append's table (`append::grid`), and the callers' buffers above; workgroups
        //   are counted below 2^32 (`Gpu::most_workgroups`);
        // - whose pools and steps these are: `WgpuBackend::pages` and `Prepared::record` refuse those of another device.
        // Tables and partials are indexed by what `launch.rs` and `append.rs` write into the tables they allocate, places inside a page and
        // workgroup arrays by constants of the same layout; check_arithmetic.wgsl, products.wgsl and read.wgsl stop at
        // arrayLength. No index comes from values.
        // Loops end: their bounds are integers of the tables (of products.wgsl its first word), and the variables only grow.
        let module = unsafe {
            gpu.device.create_shader_module_trusted(
                wgpu::ShaderModuleDescriptor {
                    label: Some(name),
                    source: wgpu::ShaderSource::Wgsl(text.into()),
                },
                wgpu::ShaderRuntimeChecks::unchecked(),
            )
        };
        Arc::new(
            gpu.device
                .create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                    label: Some(name),
                    layout: None,
                    module: &module,
                    entry_point: Some(name),
                    compilation_options: wgpu::PipelineCompilationOptions {
                        zero_initialize_workgroup_memory: false,
                        ..Default::default()
                    },
                    cache: None,
                }),
        )
    })?;
    if let Some(start) = start {
        events::loaded(BACKEND, name, &gpu.info.name, "compiled", start);
    }
    Ok(made)
}

/// The first `bytes` of a caller's buffer, which has as many; where a kernel reads none, those of one vector, since a binding has some. For a handle of another instance wgpu finds another buffer; it compares the
/// size with that one, so a kernel never reaches past a buffer.
pub(crate) fn first(buffer: &wgpu::Buffer, bytes: u64) -> wgpu::BufferBinding<'_> {
    wgpu::BufferBinding {
        buffer,
        offset: 0,
        size: NonZeroU64::new(bytes.max(16).min(buffer.size())),
    }
}

/// The first `bytes` of a buffer of the cache, and the number at which the decode kernels bind it.
#[derive(Clone)]
pub(crate) struct Stored {
    pub binding: u32,
    pub buffer: wgpu::Buffer,
    pub bytes: u64,
}

/// Binds buffers, at the numbers that a kernel gives them, to a pipeline's group 0.
pub(crate) fn bind<'a>(
    gpu: &Gpu,
    pipeline: &Pipeline,
    buffers: impl IntoIterator<Item = (u32, wgpu::BufferBinding<'a>)>,
) -> wgpu::BindGroup {
    let entries: Vec<_> = buffers
        .into_iter()
        .map(|(binding, buffer)| wgpu::BindGroupEntry {
            binding,
            resource: wgpu::BindingResource::Buffer(buffer),
        })
        .collect();
    gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &entries,
    })
}

impl Pipelines {
    pub fn tuned(tuning: Tuning) -> Self {
        Pipelines {
            tuning,
            ..Default::default()
        }
    }

    /// The constants of the kernels for a problem on this device.
    pub fn key(&self, gpu: &Gpu, problem: &Problem, layout: KvLayout) -> DecodeKey {
        let mut tuning = self.tuning;
        if gpu.info.device_type == wgpu::DeviceType::Cpu {
            // llvmpipe's compiler takes seconds for eight unrolled rows.
            tuning.rows = tuning.rows.or(Some(2));
        }
        decode_key(problem, layout, shared_bytes(gpu, &tuning), &tuning)
    }

    /// The split kernel and the merge kernel.
    pub fn decode(&self, gpu: &Gpu, key: &DecodeKey) -> Result<[Pipeline; 2], Error> {
        let mut made = self.decode.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(pair) = made.get(key) {
            return Ok(pair.clone());
        }
        let pair = [
            compile(gpu, "decode_split", decode_text("decode_split.wgsl", key))?,
            compile(gpu, "decode_merge", decode_text("decode_merge.wgsl", key))?,
        ];
        made.insert(*key, pair.clone());
        Ok(pair)
    }
}
