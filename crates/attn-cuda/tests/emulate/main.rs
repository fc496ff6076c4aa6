//! Equality without a GPU: the CUDA kernels' own text, compiled by g++ for threads that are fibers (`kernels/host`), against the CPU.
//!
//! The suite compiles chosen kernels of the reduced conformance table and of a few random shapes (`decode/covering.rs`). `ATTN_TABLE=reduced` takes
//! all of them, `ATTN_TABLE=full` and `ATTN_STRESS=40` more. Without g++, or on another processor than x86-64, all of it is ignored with the reason.

#[path = "../common/transfer.rs"]
mod common_transfer;
#[path = "../common/numbers.rs"]
mod numbers;
#[path = "../common/paged_rows.rs"]
mod paged_rows;
#[path = "../common/pages.rs"]
mod pages;
#[path = "../common/rotary.rs"]
mod rotary;
#[path = "../common/shards.rs"]
mod shards;

mod append;
mod centres;
mod decode;
mod grid_functions;
mod headers;
mod page_centres;
mod query_blocks;
mod transfer;

use std::{
    collections::HashMap,
    ffi::{CStr, c_char, c_void},
    fs,
    path::Path,
    process::{Command, ExitCode},
    sync::{Arc, Mutex, OnceLock},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use attn_conformance::Size;
use attn_cuda::native::{DeviceAddress, Op};
use attn_kernels::cuda::{Arch, Instance, Target};
use libloading::Library;
use libtest_mimic::{Arguments, Completion, Trial};
use tempfile::TempDir;

/// `attn_emulate` of `kernels/host/emulate.cpp`: null, or what went wrong.
type Emulate = unsafe extern "C" fn(*const c_void, *const u32, u32) -> *const c_char;

/// A compiled kernel, or why there is none. A library has one machine, which runs one launch at a time.
type Compiled = Arc<OnceLock<Result<Mutex<Library>, String>>>;

/// The kernels, each compiled when a test first runs it.
pub struct Kernels {
    sources: TempDir,
    machine: OnceLock<Result<(), String>>,
    compiled: Mutex<HashMap<(Instance, Target), Compiled>>,
}

impl Kernels {
    fn new() -> Result<Self> {
        let sources = tempfile::tempdir()?;
        // The host's files come last and take the place of the GPU's.
        for (name, text) in attn_kernels::CUDA.iter().chain(attn_kernels::HOST) {
            let file = sources.path().join(name);
            fs::create_dir_all(file.parent().context("a file lies in a folder")?)?;
            fs::write(file, text)?;
        }
        Ok(Kernels {
            sources,
            machine: OnceLock::new(),
            compiled: Mutex::default(),
        })
    }

    /// Has the emulated machine compiled ahead of the first kernel, and its header: half of what a small kernel takes.
    fn compile_machine(&self) -> Result<(), String> {
        let compile = || {
            let (text, header) = (
                self.sources.path().join(MACHINE),
                self.sources.path().join(HEADER),
            );
            // First, as g++ would take the header compiled with other options.
            let mut compiler = compiler("-O2");
            compiler.arg("-c").arg(&text);
            compiled(&mut compiler, &text.with_extension("o"), MACHINE)?;
            let mut compiler = self::compiler(OPTIMIZATION);
            compiler.args(["-x", "c++-header"]).arg(&header);
            compiled(&mut compiler, &header.with_extension("h.gch"), HEADER)
        };
        let done = self
            .machine
            .get_or_init(|| compile().map_err(|error| format!("{error:#}")));
        done.clone()
    }

    /// The place of a kernel, and its number.
    fn place(&self, instance: &Instance, target: Target) -> (Compiled, usize) {
        let mut all = self
            .compiled
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let number = all.len();
        (all.entry((*instance, target)).or_default().clone(), number)
    }

    /// Runs a small launch to its end, as [`attn_cuda::CudaBackend::enqueue`] enqueues it.
    ///
    /// # Safety
    /// Those of `enqueue`, in host memory.
    unsafe fn launch<O: Op>(&self, shape: &O::Shape, op: &O) -> Result<()> {
        let grid = op.grid(shape);
        if grid.is_empty() {
            return Ok(());
        }
        let (instances, params) = (O::instances(shape)?, op.params(shape)?);
        // SAFETY: the kernel takes an `O::Params` by the trait's contract; the rest is this function's.
        unsafe { self.run(&instances[op.kernel()], &params, grid.ctas, grid.threads) }
    }

    /// Runs one launch of an H100's kernel to its end.
    ///
    /// # Safety
    /// The kernel takes a `P`; the addresses in it are as good as a launch on a GPU asks.
    unsafe fn run<P>(
        &self,
        instance: &Instance,
        params: &P,
        grid: [usize; 3],
        threads: usize,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.run_as(Arch::Sm90a, instance, params, grid, threads) }
    }

    /// Runs one launch of a kernel for another target to its end.
    ///
    /// # Safety
    /// Those of [`Self::run`].
    unsafe fn run_as<P>(
        &self,
        target: impl Into<Target>,
        instance: &Instance,
        params: &P,
        grid: [usize; 3],
        threads: usize,
    ) -> Result<()> {
        let (grid, target) = (grid.map(|n| n as u32), target.into());
        let (place, number) = self.place(instance, target);
        let compiled = place.get_or_init(|| {
            self.compile_machine()?;
            let library = compile(self.sources.path(), *instance, target, number);
            library
                .map(Mutex::new)
                .map_err(|error| format!("{error:#}"))
        });
        let library = match compiled {
            Ok(library) => library
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner()),
            Err(error) => return Err(anyhow!("{error}")),
        };
        // SAFETY: emulate.cpp defines it so.
        let run = unsafe { library.get::<Emulate>(b"attn_emulate\0") }?;
        // SAFETY: the caller's contract; three numbers of the grid; the lock keeps other launches of this library out.
        let error = unsafe { run((&raw const *params).cast(), grid.as_ptr(), threads as u32) };
        if !error.is_null() {
            // SAFETY: a text of the library's, which stays loaded.
            bail!("{}", unsafe { CStr::from_ptr(error) }.to_string_lossy());
        }
        Ok(())
    }
}

/// What every kernel includes first.
const HEADER: &str = "machine.h";
/// What every kernel is linked with.
const MACHINE: &str = "machine.cpp";
/// Of kernels: compiling takes most of the time, not running.
const OPTIMIZATION: &str = "-Og";

/// g++ with the options that kernels and their header share, as a compiled header asks.
fn compiler(optimization: &str) -> Command {
    let mut compiler = Command::new("g++");
    compiler.args([
        "-std=c++17",
        optimization,
        "-w",
        "-mfma",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        // Each library keeps its own statics: tests run side by side.
        "-fno-gnu-unique",
        "-fPIC",
        "-fvisibility=hidden",
    ]);
    compiler
}

/// Has g++ write a file.
fn compiled(compiler: &mut Command, to: &Path, what: &str) -> Result<()> {
    let output = compiler.arg("-o").arg(to).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "g++ refuses {what}: {said}");
    Ok(())
}

fn compile(sources: &Path, instance: Instance, target: Target, number: usize) -> Result<Library> {
    let library = sources.join(format!("kernel{number}.so"));
    let options = instance.options(target);
    let mut compiler = compiler(OPTIMIZATION);
    compiler
        .arg("-shared")
        .arg("-I")
        .arg(sources)
        .arg("-include")
        .arg(sources.join(HEADER))
        .arg(match target.arch {
            Arch::Sm90a => "-D__CUDA_ARCH__=900",
            Arch::Sm80 | Arch::Compute80 => "-D__CUDA_ARCH__=800",
        })
        // A low limit, so that CTAs withdraw their claims in the middle of others' counts.
        .arg("-DATTN_SPIN_LIMIT=2")
        .args(options.iter().filter(|option| option.starts_with("-D")))
        .arg(format!("-DATTN_UNIT=\"{}\"", instance.source()))
        .args(entry(instance))
        .arg(sources.join("emulate.cpp"))
        .arg(sources.join(MACHINE).with_extension("o"));
    compiled(&mut compiler, &library, instance.source())?;
    // SAFETY: the library was made from the kernels' text just now; it has no initializers with effects of their own.
    Ok(unsafe { Library::new(&library) }?)
}

/// What `emulate.cpp` calls.
fn entry(instance: Instance) -> [String; 5] {
    let params = match instance {
        Instance::Decode { .. } => "DecodeParams",
        Instance::Append { .. } => "AppendParams",
        Instance::Centre { .. } => "CentreParams",
        Instance::Import { .. } => "ImportParams",
        Instance::Export { .. } => "ExportParams",
        Instance::Dequantize { .. }
        | Instance::DequantizeRows { .. }
        | Instance::GatherPages { .. } => "DequantizeParams",
        Instance::CopyPages => "CopyPagesParams",
        Instance::MergeStates => "MergeStatesParams",
        Instance::MergeSpans { .. } => "MergeSpansParams",
        Instance::QueryBlocks => "QueryBlocksParams",
        Instance::GridFunctions => "GridFunctionsParams",
        Instance::Check | Instance::Read => unreachable!("no test runs them"),
    };
    let decodes = matches!(instance, Instance::Decode { .. });
    let takes_maps = matches!(instance, Instance::Decode { layout, .. } if layout.is_rows());
    [
        format!("-DATTN_ENTRY={}", instance.entry()),
        format!("-DATTN_PARAMS={params}"),
        format!("-DATTN_DECODES={}", usize::from(decodes)),
        format!("-DATTN_FLUSHES={}", usize::from(instance.flushes())),
        format!("-DATTN_TAKES_MAPS={}", usize::from(takes_maps)),
    ]
}

/// The address of a slice, for a kernel that takes it for the device's.
fn address<T>(of: &[T]) -> DeviceAddress {
    DeviceAddress::new(of.as_ptr() as u64)
}

/// Why nothing can be emulated here.
fn obstacle() -> Option<String> {
    if !cfg!(target_arch = "x86_64") {
        return Some("the emulation sets x86-64's floating point modes".to_owned());
    }
    let found = Command::new("g++").arg("--version").output();
    let error = found.err()?;
    Some(format!(
        "g++ compiles the kernels for this machine, and cannot be run: {error}"
    ))
}

fn from_env(name: &str, default: u64) -> Result<u64> {
    match std::env::var(name) {
        Err(_) => Ok(default),
        Ok(value) => value
            .parse()
            .with_context(|| format!("{name} is {value}; allowed: a whole number")),
    }
}

fn trials() -> Result<Vec<Trial>> {
    if let Some(reason) = obstacle() {
        let ignored = move || Ok(Completion::ignored_with(reason));
        return Ok(vec![Trial::ignorable_test("emulation", ignored)]);
    }
    let size = match std::env::var_os("ATTN_TABLE") {
        None => None,
        Some(_) => Some(Size::from_env()?),
    };
    let kernels = Arc::new(Kernels::new()?);
    let mut all = append::trials(&kernels);
    all.extend(centres::trials(&kernels));
    all.extend(page_centres::trials(&kernels));
    all.extend(transfer::trials(&kernels));
    all.extend(query_blocks::trials(&kernels));
    all.extend(grid_functions::trials(&kernels));
    all.extend(headers::trials(&kernels));
    let (count, seed) = (
        from_env("ATTN_STRESS", 6)?,
        from_env("ATTN_STRESS_SEED", 1)?,
    );
    all.extend(decode::trials(&kernels, size, count, seed)?);
    Ok(all)
}

fn main() -> Result<ExitCode> {
    let mut arguments = Arguments::from_args();
    // Tests wait for a kernel's compiler and for each other's launches of it: twice as many as cores keep these busy.
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    arguments.test_threads.get_or_insert(2 * cores);
    Ok(libtest_mimic::run(&arguments, trials()?).exit_code())
}
