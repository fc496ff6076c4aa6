//! One device: how its adapter is chosen, what it offers, and every call that can fail on it.
//!
//! Limits and features are the adapter's, never assumed. `ATTN_WGPU_ADAPTER` names an adapter by a part of its name;
//! `ATTN_WGPU_FEATURES=none` leaves WebGPU's default limits and no optional feature.

use std::sync::{Arc, Mutex, OnceLock};

use attn_core::{Error, Unsupported};
use wgpu::{DeviceType, ErrorFilter, Features, Limits};

use crate::{
    append::Appends,
    error::{BACKEND, WgpuError, device},
};

/// A device and its queue, with what was asked of its adapter.
pub(crate) struct Gpu {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub info: wgpu::AdapterInfo,
    pub limits: Limits,
    pub appends: Appends,
    lost: Arc<OnceLock<String>>,
    /// Error scopes are per thread, but submissions to one device take turns anyway.
    turn: Mutex<()>,
}

pub(crate) fn absent(reason: impl Into<String>, next_step: &str) -> Unsupported {
    Unsupported::Absent {
        backend: BACKEND,
        reason: reason.into(),
        next_step: next_step.to_owned(),
    }
}

const INSTALL: &str =
    "install libvulkan1 (and mesa-vulkan-drivers for a software adapter), or use backend \"cpu\"";

/// Discrete before integrated before software.
fn rank(info: &wgpu::AdapterInfo) -> usize {
    match info.device_type {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    }
}

/// `software`, `discrete`, …: so that nobody takes llvmpipe for a GPU.
pub(crate) fn kind(info: &wgpu::AdapterInfo) -> &'static str {
    ["discrete", "integrated", "virtual", "other", "software"][rank(info)]
}

impl Gpu {
    /// Chooses an adapter and opens its device.
    pub fn open() -> Result<Self, Unsupported> {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        descriptor.flags = wgpu::InstanceFlags::empty();
        let instance = wgpu::Instance::new(descriptor);
        let mut adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
        adapters.sort_by_key(|adapter| rank(&adapter.get_info()));
        if adapters.is_empty() {
            return Err(absent("no Vulkan, Metal or DX12 adapter", INSTALL));
        }
        let wanted = std::env::var("ATTN_WGPU_ADAPTER").unwrap_or_default();
        let names: Vec<_> = adapters.iter().map(|a| a.get_info().name).collect();
        let found = names
            .iter()
            .position(|name| name.to_lowercase().contains(&wanted.to_lowercase()));
        let Some(index) = found else {
            let reason = format!(
                "no adapter's name contains ATTN_WGPU_ADAPTER={wanted}; there are: {}",
                names.join(", ")
            );
            return Err(absent(reason, "set it to a part of one of these"));
        };
        Self::of_adapter(&adapters.swap_remove(index))
    }

    fn of_adapter(adapter: &wgpu::Adapter) -> Result<Self, Unsupported> {
        let bare = std::env::var("ATTN_WGPU_FEATURES").is_ok_and(|value| value == "none");
        let (features, limits) = if bare {
            (Features::empty(), Limits::default())
        } else {
            (
                adapter.features() & Features::TIMESTAMP_QUERY,
                adapter.limits(),
            )
        };
        let request = adapter.request_device(&wgpu::DeviceDescriptor {
            label: Some("attn"),
            required_features: features,
            required_limits: limits,
            ..Default::default()
        });
        let (device, queue) = pollster::block_on(request)
            .map_err(|error| absent(format!("{}: {error}", adapter.get_info().name), INSTALL))?;
        Self::of_device(device, queue)
    }

    /// Takes a caller's device.
    pub fn of_device(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self, Unsupported> {
        let info = device.adapter_info();
        let limits = device.limits();
        if limits.max_compute_invocations_per_workgroup < 256
            || limits.max_storage_buffers_per_shader_stage < 5
            || limits.max_compute_workgroup_storage_size < 16384
        {
            let reason = format!(
                "{}: 256 threads, 5 storage buffers and 16384 bytes per workgroup are needed",
                info.name
            );
            return Err(absent(
                reason,
                "use a device with WebGPU's default limits, or backend \"cpu\"",
            ));
        }
        let lost = Arc::new(OnceLock::new());
        let report = lost.clone();
        device.set_device_lost_callback(move |reason, message| {
            // The first reason stays.
            let _ = report.set(format!("{reason:?}: {message}"));
        });
        Ok(Gpu {
            appends: Appends::default(),
            device,
            queue,
            info,
            limits,
            lost,
            turn: Mutex::new(()),
        })
    }

    /// Runs `work`, and returns the first error that the device reports about it.
    pub fn guarded<T>(&self, doing: &'static str, work: impl FnOnce() -> T) -> Result<T, Error> {
        let _turn = self.turn.lock().unwrap_or_else(|e| e.into_inner());
        self.alive(doing)?;
        let scopes = [
            ErrorFilter::Internal,
            ErrorFilter::OutOfMemory,
            ErrorFilter::Validation,
        ]
        .map(|filter| self.device.push_error_scope(filter));
        let value = work();
        let mut first = None;
        for scope in scopes.into_iter().rev() {
            first = first.or(pollster::block_on(scope.pop()));
        }
        self.alive(doing)?;
        match first {
            None => Ok(value),
            Some(error @ wgpu::Error::OutOfMemory { .. }) => {
                Err(device(doing, WgpuError::OutOfMemory(error)))
            }
            Some(error) => Err(device(doing, WgpuError::Failed(error))),
        }
    }

    fn alive(&self, doing: &'static str) -> Result<(), Error> {
        match self.lost.get() {
            None => Ok(()),
            Some(reason) => Err(device(doing, WgpuError::Lost(reason.clone()))),
        }
    }

    /// A buffer of at least 4 bytes, zeroed.
    pub fn buffer(
        &self,
        label: &'static str,
        bytes: u64,
        usage: wgpu::BufferUsages,
    ) -> Result<wgpu::Buffer, Error> {
        let size = bytes.max(4).next_multiple_of(4);
        if size > self.limits.max_buffer_size {
            return Err(device(
                label,
                WgpuError::Buffer {
                    what: label,
                    given: format!("would take {size} bytes"),
                    needed: format!(
                        "at most {} on this device; attend fewer sequences at once",
                        self.limits.max_buffer_size
                    ),
                },
            ));
        }
        self.guarded(label, || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage,
                mapped_at_creation: false,
            })
        })
    }

    /// A buffer that holds `bytes` (a multiple of 4) when the next commands run.
    pub fn filled(
        &self,
        label: &'static str,
        bytes: &[u8],
        usage: wgpu::BufferUsages,
    ) -> Result<wgpu::Buffer, Error> {
        let usage = usage | wgpu::BufferUsages::COPY_DST;
        let buffer = self.buffer(label, bytes.len() as u64, usage)?;
        if !bytes.is_empty() {
            self.guarded(label, || self.queue.write_buffer(&buffer, 0, bytes))?;
        }
        Ok(buffer)
    }

    /// Submits commands.
    pub fn submit(&self, doing: &'static str, encoder: wgpu::CommandEncoder) -> Result<(), Error> {
        self.guarded(doing, || self.queue.submit([encoder.finish()]))
            .map(|_| ())
    }

    /// Waits for all submitted work.
    pub fn wait(&self, doing: &'static str) -> Result<(), Error> {
        self.device
            .poll(wgpu::PollType::wait_indefinitely())
            .map_err(|error| device(doing, WgpuError::Poll(error)))?;
        self.alive(doing)
    }

    /// Reads parts of buffers (made with `COPY_SRC`; offsets and lengths multiples of 4), waiting for all work before.
    pub fn read(
        &self,
        doing: &'static str,
        parts: &[(&wgpu::Buffer, u64, u64)],
    ) -> Result<Vec<u8>, Error> {
        let total: u64 = parts.iter().map(|part| part.2).sum();
        if total == 0 {
            return Ok(Vec::new());
        }
        let staging = self.buffer(
            "attn read back",
            total,
            wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        )?;
        let mapped = Arc::new(Mutex::new(None));
        let result = mapped.clone();
        self.guarded(doing, || {
            let mut encoder = self.device.create_command_encoder(&Default::default());
            let mut at = 0;
            for &(buffer, offset, bytes) in parts {
                encoder.copy_buffer_to_buffer(buffer, offset, &staging, at, bytes);
                at += bytes;
            }
            self.queue.submit([encoder.finish()]);
            staging.map_async(wgpu::MapMode::Read, .., move |outcome| {
                *result.lock().unwrap_or_else(|e| e.into_inner()) = Some(outcome);
            });
        })?;
        self.wait(doing)?;
        let outcome = mapped.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(Err(error)) = outcome {
            return Err(device(doing, WgpuError::Map(error)));
        }
        let view = staging
            .get_mapped_range(..total)
            .map_err(|error| device(doing, WgpuError::Lost(error.to_string())))?;
        Ok(view.to_vec())
    }
}
