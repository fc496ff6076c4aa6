//! One NVIDIA GPU: found without panicking, its kernels loaded once.

use std::{
    collections::HashMap,
    ffi::c_void,
    marker::PhantomData,
    ptr,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use attn_core::{DeviceInfo, Error, Unsupported, events, process};
use cudarc::{
    driver::{
        CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DevicePtrMut,
        DeviceRepr, DriverError, result, sys,
    },
    nvrtc::Ptx,
};

use attn_kernels::cuda::{
    Arch, DeviceLimits, Exponential, H200_MEMORY_PACE, Instance, Launch, Preferences, Target,
};

use crate::{
    callers_context::CallersContext,
    error::{BACKEND, CudaError, absent, failed, refused_by_driver},
    image_cache,
    images::{self, Origin},
    options::Options,
    sizes,
};

/// Waits for a stream when it is dropped, so that no copy reads or writes borrowed host memory after that, however the function ends.
///
/// The driver's asynchronous copies return at once where the host's memory is pinned. Declare it behind what is copied: what is
/// declared last is dropped first.
pub struct WaitOnDrop<'a>(sys::CUstream, PhantomData<&'a CudaStream>);

impl WaitOnDrop<'_> {
    /// # Safety
    /// The stream is alive, and its context current on this thread, until the value is dropped.
    pub unsafe fn on(stream: sys::CUstream) -> Self {
        WaitOnDrop(stream, PhantomData)
    }

    /// Waits now, and returns the outcome of the work.
    pub fn finish(self) -> Result<(), DriverError> {
        let waited = self.wait();
        std::mem::forget(self);
        waited
    }

    /// Not `CudaStream::synchronize`, which returns without waiting where an earlier call has failed.
    fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: `on`'s contract.
        match unsafe { result::stream::synchronize(self.0) } {
            Ok(()) => Ok(()),
            Err(error) => {
                // While another thread captures a graph, a wait can be refused to threads that have not said that it is meant. If the
                // device itself has failed, this fails, too, and no copy runs any more.
                let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
                // SAFETY: swaps a number of this thread's with the driver; and `on`'s contract.
                unsafe {
                    sys::cuThreadExchangeStreamCaptureMode(&raw mut mode).result()?;
                    let waited = result::stream::synchronize(self.0);
                    sys::cuThreadExchangeStreamCaptureMode(&raw mut mode).result()?;
                    waited.map_err(|_| error)
                }
            }
        }
    }
}

impl Drop for WaitOnDrop<'_> {
    fn drop(&mut self) {
        // An error is the device's, which the next call reports.
        let _ = self.wait();
    }
}

/// A loaded kernel.
#[derive(Debug)]
pub(crate) struct LoadedKernel {
    function: CudaFunction,
    // Bytes of a CTA, or of each of its teams.
    shared_bytes: usize,
    // Whether it may begin before the launch ahead of it has ended.
    overlaps: bool,
}

/// A kernel's entry. Its own lock is held while it is compiled, so that other kernels can be loaded meanwhile.
type Entry = Arc<Mutex<Option<Arc<LoadedKernel>>>>;

/// A GPU and its loaded kernels.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) arch: Arch,
    pub(crate) shared_limit: usize,
    pub(crate) sms: usize,
    memory_pace: f64,
    pub(crate) preferences: Preferences,
    // Version of the driver, as in cuDriverGetVersion.
    pub(crate) version: i32,
    pub(crate) check: Option<CudaSlice<u8>>,
    pub(crate) info: DeviceInfo,
    // Whose powers of two integer kernels take, once one has been loaded, or the options have said it.
    pub(crate) exponential: Mutex<Option<Exponential>>,
    kernels: Mutex<HashMap<Instance, Entry>>,
}

/// Oldest driver that has every function called here, whichever CUDA version the bindings are of.
const MIN_DRIVER: i32 = 12000;
/// Oldest driver that captures launches which overlap the one ahead.
const MIN_OVERLAP: i32 = 12030;

/// Whether the driver's library can be loaded. The bindings' own answer exists only where they load it at run time, which another crate of
/// the build may change.
fn has_driver() -> bool {
    let names = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];
    names.into_iter().any(|name| {
        // SAFETY: loading libcuda runs its initializers; the system's driver is made to be loaded by any process.
        unsafe { libloading::Library::new(name) }.is_ok()
    })
}

/// Bytes in a microsecond of memory with this clock and bus, which moves a bit on both edges; an H200's where the driver does not tell.
fn memory_pace(khz: i32, bits: i32) -> f64 {
    match f64::from(khz) * f64::from(bits) / 4000.0 {
        pace if khz > 0 && bits > 0 => pace,
        _ => H200_MEMORY_PACE,
    }
}

impl Device {
    /// The limits that determine a launch.
    pub(crate) fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            shared_limit: self.shared_limit,
            sms: self.sms,
            memory_pace: self.memory_pace,
        }
    }

    /// Opens the GPU that the options name; never panics.
    pub(crate) fn open(options: &Options) -> Result<Self, Unsupported> {
        process::open()?;
        if !has_driver() {
            return Err(absent(
                "no NVIDIA driver: libcuda.so.1 is not on the library path".into(),
                "install the NVIDIA driver, or use backend \"wgpu\" or \"cpu\"",
            ));
        }
        let _callers = CallersContext::keep_with_driver();
        let mut version = 0;
        // SAFETY: cuDriverGetVersion writes one int and needs no initialization.
        let _ = unsafe { sys::cuDriverGetVersion(&mut version) };
        if version < MIN_DRIVER {
            return Err(absent(
                format!(
                    "the NVIDIA driver is made for CUDA {}.{}, and 12.0 is needed",
                    version / 1000,
                    version % 1000 / 10
                ),
                "install driver 525 or newer",
            ));
        }
        let refuse = refused_by_driver;
        let context = CudaContext::new(options.ordinal).map_err(refuse)?;
        let (major, minor) = context.compute_capability().map_err(refuse)?;
        let native = Arch::of(major, minor).ok_or_else(|| {
            absent(
                format!("the GPU has compute capability {major}.{minor}, and 8.0 is needed"),
                "use backend \"wgpu\" or \"cpu\"",
            )
        })?;
        let arch = options.arch.unwrap_or(native);
        let cache = image_cache::usable_folder();
        if images::embedded_count() == 0
            && let Err(error) = images::compiler()
            && !matches!(cache, Ok(Some(_)))
        {
            let cache = cache.err().map(|refused| format!("{refused}; "));
            let reason = format!("{}{error}", cache.unwrap_or_default());
            return Err(absent(reason, "then try again"));
        }
        let attribute = |what| context.attribute(what).map_err(refuse);
        use sys::CUdevice_attribute as Attribute;
        let optin =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        let sms = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let khz = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
        let bits = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
        // SAFETY: this context's slices are used on one stream only, or by callers who order their streams themselves.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(refuse)?;
        let check = options
            .check
            .then(|| stream.alloc_zeros(16))
            .transpose()
            .map_err(refuse)?;
        let detail = format!(
            "{} kernels, {sms} SMs, driver for CUDA {}.{}{}",
            arch.name(),
            version / 1000,
            version % 1000 / 10,
            // Kernels still compile, but at every start.
            cache
                .err()
                .map_or(String::new(), |refused| format!("; {refused}"))
        );
        let info = DeviceInfo::new(BACKEND, context.name().map_err(refuse)?, detail);
        Ok(Device {
            stream,
            arch,
            shared_limit: optin.min(arch.shared_limit()),
            sms: options.sms.map_or(sms, Options::clamp_sms),
            memory_pace: memory_pace(khz, bits),
            preferences: Preferences {
                kernel: options.kernel,
                dequantize: options.dequantize,
                are_blocks: false,
            },
            version,
            check,
            info,
            exponential: Mutex::new(options.exponential),
            kernels: Mutex::default(),
            context,
        })
    }

    /// Makes the context current on this thread, which every call that reaches the driver needs first, and leaves it so ([`CallersContext`]).
    pub(crate) fn bind(&self) -> Result<(), Error> {
        process::check()?;
        let bind = self.context.bind_to_thread();
        bind.map_err(failed("binding the context"))
    }

    /// The kernel of an instance, loaded at its first use; `shared_bytes` is its dynamic shared memory by the host's formula.
    pub(crate) fn kernel(
        &self,
        instance: &Instance,
        shared_bytes: usize,
    ) -> Result<Arc<LoadedKernel>, Error> {
        process::check()?;
        let entry = {
            let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
            kernels.entry(*instance).or_default().clone()
        };
        let mut place = entry.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = &*place {
            return Ok(kernel.clone());
        }
        let kernel = self
            .load(instance, shared_bytes)
            .map_err(failed("loading a kernel"))?;
        Ok(place.insert(Arc::new(kernel)).clone())
    }

    /// The module of an instance, whatever its image comes from.
    fn module(&self, instance: &Instance, target: Target) -> Result<Arc<CudaModule>, CudaError> {
        let start = Instant::now();
        let (image, mut origin) = images::image(instance, target, false)?;
        let module = match self.context.load_module(Ptx::from_binary(image)) {
            // Another driver's or compiler's entry, perhaps: once more from the source.
            Err(_) if origin == Origin::Cached => {
                let (image, again) = images::image(instance, target, true)?;
                origin = again;
                self.context.load_module(Ptx::from_binary(image))?
            }
            loaded => loaded?,
        };
        let arch = self.arch.name();
        events::loaded(BACKEND, instance.name(), arch, origin.name(), start);
        Ok(module)
    }

    fn load(&self, instance: &Instance, shared_bytes: usize) -> Result<LoadedKernel, CudaError> {
        let target = self.target(instance)?;
        self.load_for(instance, target, shared_bytes)
    }

    /// Loads a kernel that is compiled for this target, whatever kernels of the instance are for.
    pub(crate) fn load_for(
        &self,
        instance: &Instance,
        target: Target,
        shared_bytes: usize,
    ) -> Result<LoadedKernel, CudaError> {
        let module = self.module(instance, target)?;
        // The kernel's own figure; the host's formula only chose the shape.
        let exported = match instance {
            Instance::Decode { .. } | Instance::Read => self.exported(&module, "attn_shared_bytes"),
            _ => None,
        };
        let shared_bytes = match exported {
            Some(kernel) if kernel.saturating_mul(instance.max_teams()) > self.shared_limit => {
                return Err(CudaError::SharedBytes {
                    kernel,
                    limit: self.shared_limit,
                });
            }
            Some(kernel) => kernel,
            None => shared_bytes,
        };
        let function = module.load_function(instance.entry())?;
        let most = shared_bytes.saturating_mul(instance.max_teams());
        if most > 48 * 1024 {
            function.set_attribute(
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                sizes::int_limit(most),
            )?;
        }
        Ok(LoadedKernel {
            function,
            shared_bytes,
            overlaps: self.arch == Arch::Sm90a
                && self.version >= MIN_OVERLAP
                && matches!(instance, Instance::Decode { .. } | Instance::Append { .. }),
        })
    }

    /// An int that the module exports.
    fn exported(&self, module: &Arc<CudaModule>, name: &str) -> Option<usize> {
        let global = module.get_global(name, &self.stream).ok()?;
        let mut bytes = [0u8; 4];
        if global.len() != bytes.len() {
            return None;
        }
        self.download(&global, &mut bytes).ok()?;
        usize::try_from(i32::from_le_bytes(bytes)).ok()
    }

    /// Copies to the host, and waits for it.
    pub(crate) fn download<T: DeviceRepr>(
        &self,
        from: &impl DevicePtr<T>,
        to: &mut [T],
    ) -> Result<(), DriverError> {
        let wait = self.wait_on_drop()?;
        self.stream.memcpy_dtoh(from, to)?;
        wait.finish()
    }

    /// Copies to the device, and waits for it.
    pub(crate) fn upload<T: DeviceRepr>(
        &self,
        from: &[T],
        to: &mut impl DevicePtrMut<T>,
    ) -> Result<(), DriverError> {
        let wait = self.wait_on_drop()?;
        self.stream.memcpy_htod(from, to)?;
        wait.finish()
    }

    /// Makes the context current, and waits for the device's own stream once it is dropped.
    pub(crate) fn wait_on_drop(&self) -> Result<WaitOnDrop<'_>, DriverError> {
        self.context.bind_to_thread()?;
        // SAFETY: `self`, which the value borrows, keeps the stream; its context is current, and no function of this crate that has the
        // value changes that.
        Ok(unsafe { WaitOnDrop::on(self.stream.cu_stream()) })
    }
}

impl LoadedKernel {
    /// Enqueues the kernel.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameter types, whose device addresses are valid for what the kernel does
    /// until it has run on `stream`, a stream of the device's context, which is current.
    pub(crate) unsafe fn launch(
        &self,
        stream: sys::CUstream,
        grid: [usize; 3],
        threads: usize,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let launch = Launch {
            grid,
            threads,
            ..Launch::default()
        };
        // SAFETY: this function's contract.
        unsafe { self.launch_teams(stream, &launch, arguments) }
    }

    /// Enqueues the kernel, its CTAs of several teams or in clusters.
    ///
    /// # Safety
    /// Those of [`LoadedKernel::launch`].
    pub(crate) unsafe fn launch_teams(
        &self,
        stream: sys::CUstream,
        launch: &Launch,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        use sys::CUlaunchAttributeID as Id;
        let [x, y, z] = launch.grid.map(sizes::axis);
        let attribute = |id, value| sys::CUlaunchAttribute {
            id,
            pad: [0; 4],
            value,
        };
        let cluster = sys::CUlaunchAttributeValue {
            clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: sizes::axis(launch.cluster),
                y: 1,
                z: 1,
            },
        };
        let overlap = sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: 1,
        };
        let mut attributes = [
            attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, cluster),
            attribute(
                Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                overlap,
            ),
        ];
        // Also of one CTA, where its teams send each other states: those instructions are for clusters.
        let is_cluster = launch.cluster * launch.teams > 1;
        let attributes = match (is_cluster, self.overlaps) {
            (false, false) => &mut attributes[..0],
            (true, false) => &mut attributes[..1],
            (false, true) => &mut attributes[1..],
            (true, true) => &mut attributes[..],
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: sizes::axis(launch.threads),
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: sizes::axis(self.shared_bytes.saturating_mul(launch.teams)),
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY: the function belongs to a module that `self` keeps loaded; `config` and its attributes outlive the call; a kernel
        // that `overlaps` waits for the launch ahead before it reads (`after_dependencies`); the rest is this function's contract.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function.cu_function(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
            .result()
        }
    }
}
