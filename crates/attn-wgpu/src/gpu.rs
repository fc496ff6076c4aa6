//! One device: the choice of its adapter, its limits, and every call that can fail on it.
//!
//! Limits and features are the adapter's, never assumed; [`Options`] can ask for WebGPU's default limits and no optional feature.
//!
//! A browser answers when its page has handed the thread back. What waits is therefore an async function, [`Gpu::blocking`] waits for it elsewhere, and what
//! the browser has yet to say of work that it was given is asked for at the next wait ([`Gpu::reported`]).
//!
//! wgpu swallows the errors of a lost device, so every call first checks that the device is there ([`Gpu::alive`]).

use std::{
    any::Any,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    task::{Poll, Waker},
};

use attn_core::{Error, Unsupported, process};
use wgpu::{DeviceType, ErrorFilter, Features, Limits};

use crate::{
    error::{BACKEND, WgpuError, device},
    options::{AdapterFeatures, Options},
};

/// Whether this is a page in a browser, which cannot wait.
pub(crate) const IN_BROWSER: bool = cfg!(target_family = "wasm");

/// What a device will say of some work: the first error, if there is one.
type Report = Pin<Box<dyn Future<Output = Option<wgpu::Error>> + Send>>;

/// A device and its queue, with the adapter's properties.
pub(crate) struct Gpu {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub info: wgpu::AdapterInfo,
    pub limits: Limits,
    lost: Arc<OnceLock<String>>,
    /// Error scopes are per thread, but submissions to one device take turns anyway.
    turn: Mutex<()>,
    /// What a browser has yet to say, of the calls so named.
    reports: Mutex<Vec<(&'static str, Report)>>,
}

/// A call that the device answers by a callback.
#[derive(Clone)]
struct Answer<T>(Arc<Mutex<(Option<T>, Option<Waker>)>>);

impl<T> Answer<T> {
    fn new() -> Self {
        Answer(Arc::default())
    }

    fn locked(&self) -> MutexGuard<'_, (Option<T>, Option<Waker>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The callback.
    fn give(&self, answer: T) {
        let mut state = self.locked();
        state.0 = Some(answer);
        if let Some(waker) = state.1.take() {
            waker.wake();
        }
    }

    /// The answer, once it is there.
    async fn given(&self) -> T {
        poll_fn(|context| {
            let mut state = self.locked();
            match state.0.take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    state.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

pub(crate) fn absent(reason: impl Into<String>, next_step: &str) -> Unsupported {
    Unsupported::Absent {
        backend: BACKEND,
        reason: reason.into(),
        next_step: next_step.to_owned(),
    }
}

/// Bytes of a binding that 32-bit indices can reach; its smallest elements are f16 numbers.
const ADDRESSABLE_BYTES: u64 = 1 << 33;

/// Workgroups per dimension that keep the product of two dimensions below 2^32.
const MOST_WORKGROUPS: u32 = 65535;

const INSTALL: &str =
    "install libvulkan1 (and mesa-vulkan-drivers for a software adapter), or use backend \"cpu\"";

const BROWSER: &str = "use a browser with WebGPU (Chrome, Edge, Safari 26, Firefox 141 and newer), over https or from localhost";

/// The order of preference: discrete before integrated before software.
fn rank(info: &wgpu::AdapterInfo) -> usize {
    match info.device_type {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    }
}

/// The kind of an adapter, such as `discrete` or `software`.
pub(crate) fn kind(info: &wgpu::AdapterInfo) -> &'static str {
    ["discrete", "integrated", "virtual", "other", "software"][rank(info)]
}

/// An error that the device reported.
fn failure(error: wgpu::Error) -> WgpuError {
    match error {
        wgpu::Error::OutOfMemory { .. } => WgpuError::OutOfMemory(error),
        _ => WgpuError::Failed(error),
    }
}

/// The message of a panic.
fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("without a message").to_owned()
}

impl Gpu {
    /// Chooses an adapter and opens its device.
    pub async fn open(options: &Options) -> Result<Self, Unsupported> {
        process::open()?;
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        descriptor.flags = wgpu::InstanceFlags::empty();
        let instance = wgpu::Instance::new(descriptor);
        let mut adapters = instance.enumerate_adapters(wgpu::Backends::all()).await;
        adapters.sort_by_key(|adapter| rank(&adapter.get_info()));
        if adapters.is_empty() {
            return Err(match IN_BROWSER {
                true => absent("this browser offers no WebGPU adapter", BROWSER),
                false => absent("no Vulkan, Metal or DX12 adapter", INSTALL),
            });
        }
        let wanted = options.adapter.as_deref().unwrap_or_default();
        let names: Vec<_> = adapters.iter().map(|a| a.get_info().name).collect();
        let found = names
            .iter()
            .position(|name| name.to_lowercase().contains(&wanted.to_lowercase()));
        let Some(index) = found else {
            let reason = format!(
                "no adapter's name contains {wanted}; there are: {}",
                names.join(", ")
            );
            let next_step =
                "set Options::adapter or ATTN_WGPU=adapter=NAME to a part of one of these";
            return Err(absent(reason, next_step));
        };
        Self::of_adapter(&adapters.swap_remove(index), options.features).await
    }

    async fn of_adapter(
        adapter: &wgpu::Adapter,
        features: AdapterFeatures,
    ) -> Result<Self, Unsupported> {
        let (features, limits) = match features {
            AdapterFeatures::None => (Features::empty(), Limits::default()),
            AdapterFeatures::All => (
                adapter.features() & Features::TIMESTAMP_QUERY,
                adapter.limits(),
            ),
        };
        let request = adapter.request_device(&wgpu::DeviceDescriptor {
            label: Some("attn"),
            required_features: features,
            required_limits: limits,
            ..Default::default()
        });
        let (device, queue) = request
            .await
            .map_err(|error| absent(format!("{}: {error}", adapter.get_info().name), INSTALL))?;
        let gpu = Self::of_device(device, queue)?;
        // A caller's device keeps its own callback: `alive` then finds the loss, but not its reason.
        let report = gpu.lost.clone();
        gpu.device.set_device_lost_callback(move |reason, message| {
            // The first reason is kept.
            let _ = report.set(format!("{reason:?}: {message}"));
        });
        Ok(gpu)
    }

    /// Takes a caller's device.
    pub fn of_device(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self, Unsupported> {
        process::open()?;
        let info = device.adapter_info();
        let limits = device.limits();
        if limits.max_compute_invocations_per_workgroup < 256
            || limits.max_storage_buffers_per_shader_stage < 8
            || limits.max_compute_workgroup_storage_size < 16384
        {
            let reason = format!(
                "{}: 256 threads, 8 storage buffers and 16384 bytes per workgroup are needed",
                info.name
            );
            return Err(absent(
                reason,
                "use a device with WebGPU's default limits, or backend \"cpu\"",
            ));
        }
        let gpu = Gpu {
            device,
            queue,
            info,
            limits,
            lost: Arc::default(),
            turn: Mutex::new(()),
            reports: Mutex::default(),
        };
        match gpu.lives() {
            true => Ok(gpu),
            false => Err(absent("the device is lost", "make another device")),
        }
    }

    /// Bytes of the largest buffer that a kernel can bind and address.
    pub fn largest_binding(&self) -> u64 {
        self.limits
            .max_storage_buffer_binding_size
            .min(self.limits.max_buffer_size)
            .min(ADDRESSABLE_BYTES)
    }

    /// Workgroups of a dispatch in one dimension.
    pub fn most_workgroups(&self) -> usize {
        let most = self.limits.max_compute_workgroups_per_dimension;
        most.min(MOST_WORKGROUPS) as usize
    }

    /// Runs `work`, and returns the first error that the device reports about it; in a browser, one of [`Gpu::alive`].
    pub fn guarded<T>(&self, doing: &'static str, work: impl FnOnce() -> T) -> Result<T, Error> {
        let _turn = self.turn.lock().unwrap_or_else(|e| e.into_inner());
        self.alive(doing)?;
        let scopes = [
            ErrorFilter::Internal,
            ErrorFilter::OutOfMemory,
            ErrorFilter::Validation,
        ]
        .map(|filter| self.device.push_error_scope(filter));
        // wgpu identifies its handles by numbers, and panics for one of another instance.
        let value = catch_unwind(AssertUnwindSafe(work));
        // All are popped at once, the last one first.
        let scopes = scopes.into_iter().rev().map(wgpu::ErrorScopeGuard::pop);
        let first = self.reported(doing, scopes.collect());
        let failed = match (value, first) {
            (Ok(value), None) => return Ok(value),
            (Err(panic), _) => WgpuError::Panicked(text_of(&*panic)),
            (_, Some(error)) => failure(error),
        };
        // On a lost device, the loss is the cause of every failure.
        self.alive(doing)?;
        Err(device(doing, failed))
    }

    /// The first error of popped scopes, where the device says it at once. A browser's is kept for [`Gpu::settled`].
    fn reported(
        &self,
        doing: &'static str,
        scopes: Vec<impl Future<Output = Option<wgpu::Error>> + Send + 'static>,
    ) -> Option<wgpu::Error> {
        let report = async {
            let mut first = None;
            for scope in scopes {
                first = first.or(scope.await);
            }
            first
        };
        if IN_BROWSER {
            self.waiting().push((doing, Box::pin(report)));
            return None;
        }
        pollster::block_on(report)
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<(&'static str, Report)>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first error of all work so far that a browser had yet to report.
    async fn settled(&self) -> Result<(), Error> {
        let reports = std::mem::take(&mut *self.waiting());
        let mut first = None;
        for (doing, report) in reports {
            let error = report.await;
            first = first.or(error.map(|error| (doing, error)));
        }
        let Some((doing, error)) = first else {
            return Ok(());
        };
        self.alive(doing)?;
        Err(device(doing, failure(error)))
    }

    /// Waits for what an async function does, where that is possible.
    pub fn blocking<T>(
        &self,
        doing: &'static str,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        match IN_BROWSER {
            true => Err(device(doing, WgpuError::Waits)),
            false => pollster::block_on(work),
        }
    }

    /// Refuses a lost device, and a process that was forked from the one that opened it.
    pub fn alive(&self, doing: &'static str) -> Result<(), Error> {
        process::check()?;
        if self.lost.get().is_none() && !self.lives() {
            let _ = self.lost.set("destroyed or reset".to_owned());
        }
        match self.lost.get() {
            None => Ok(()),
            Some(reason) => Err(device(doing, WgpuError::Lost(reason.clone()))),
        }
    }

    /// Whether the device takes operations. It answers an invalid one with an error; a lost device, whose errors wgpu swallows, answers
    /// with none. The callback of a loss comes too late: it runs when the queue is empty and the device is polled. In a browser it is the one that there is.
    fn lives(&self) -> bool {
        if IN_BROWSER {
            return true;
        }
        let scope = self.device.push_error_scope(ErrorFilter::Validation);
        drop(self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 4,
            usage: wgpu::BufferUsages::empty(),
            mapped_at_creation: false,
        }));
        pollster::block_on(scope.pop()).is_some()
    }

    /// Creates a zeroed buffer of at least 4 bytes.
    pub fn buffer(
        &self,
        label: &'static str,
        bytes: u64,
        usage: wgpu::BufferUsages,
    ) -> Result<wgpu::Buffer, Error> {
        let size = bytes.max(4).checked_next_multiple_of(4);
        let Some(size) = size.filter(|size| *size <= self.limits.max_buffer_size) else {
            return Err(device(
                label,
                WgpuError::Buffer {
                    what: label,
                    given: format!("would take {bytes} bytes"),
                    needed: format!(
                        "at most {} on this device; attend fewer sequences at once",
                        self.limits.max_buffer_size
                    ),
                },
            ));
        };
        self.guarded(label, || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage,
                mapped_at_creation: false,
            })
        })
    }

    /// Creates a buffer that holds `bytes` (a multiple of 4) when the next commands run.
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

    /// Submits commands, and reports a loss that the submission meets.
    pub fn submit(&self, doing: &'static str, encoder: wgpu::CommandEncoder) -> Result<(), Error> {
        self.guarded(doing, || self.queue.submit([encoder.finish()]))?;
        self.alive(doing)
    }

    /// Waits for all submitted work; in a browser, for nothing.
    pub fn wait(&self, doing: &'static str) -> Result<(), Error> {
        // wgpu panics if the driver reports a loss during the wait; by then it holds no lock.
        let polled = catch_unwind(AssertUnwindSafe(|| {
            self.device.poll(wgpu::PollType::wait_indefinitely())
        }));
        if polled.is_err() {
            let _ = self.lost.set("reset while it was waited for".to_owned());
        }
        self.alive(doing)?;
        match polled {
            Ok(Err(error)) => Err(device(doing, WgpuError::Poll(error))),
            _ => Ok(()),
        }
    }

    /// Waits for all submitted work, and reports what the device refused.
    pub async fn finish_async(&self, doing: &'static str) -> Result<(), Error> {
        if !IN_BROWSER {
            return self.wait(doing);
        }
        let done = Answer::new();
        let callback = done.clone();
        self.queue.on_submitted_work_done(move || callback.give(()));
        done.given().await;
        self.settled().await?;
        self.alive(doing)
    }

    /// Waits for all submitted work and reads parts of buffers (with `COPY_SRC`; offsets and lengths are multiples of 4).
    pub fn read(
        &self,
        doing: &'static str,
        parts: &[(&wgpu::Buffer, u64, u64)],
    ) -> Result<Vec<u8>, Error> {
        self.blocking(doing, self.read_async(doing, parts))
    }

    /// [`Gpu::read`], for callers that must not wait.
    pub async fn read_async(
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
        let mapped = Answer::new();
        let callback = mapped.clone();
        self.guarded(doing, || {
            let mut encoder = self.device.create_command_encoder(&Default::default());
            let mut at = 0;
            for &(buffer, offset, bytes) in parts {
                encoder.copy_buffer_to_buffer(buffer, offset, &staging, at, bytes);
                at += bytes;
            }
            self.queue.submit([encoder.finish()]);
            staging.map_async(wgpu::MapMode::Read, .., move |outcome| {
                callback.give(outcome);
            });
        })?;
        let outcome = match IN_BROWSER {
            true => {
                let outcome = mapped.given().await;
                self.settled().await?;
                self.alive(doing)?;
                Some(outcome)
            }
            false => {
                self.wait(doing)?;
                mapped.locked().0.take()
            }
        };
        if let Some(Err(error)) = outcome {
            return Err(device(doing, WgpuError::Map(error)));
        }
        let view = staging.get_mapped_range(..total);
        let bytes = view.map(|view| view.to_vec());
        bytes.map_err(|error| device(doing, WgpuError::Unmapped(error)))
    }
}
