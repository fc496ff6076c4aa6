//! Equality without a GPU: the decode and append kernels' own text, compiled for the host (`kernels/host`), against the CPU.

mod append;
mod decode;

use std::{
    collections::{HashMap, HashSet},
    ffi::{CStr, c_char, c_void},
    fs,
    path::Path,
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use attn_cpu::CpuBackend;
use attn_cuda::native::DeviceAddress;
use attn_kernels::cuda::{Arch, Instance};
use libloading::Library;
use rayon::prelude::*;

/// `attn_emulate` of `kernels/host/emulate.cpp`: null, or what went wrong.
type Emulate = unsafe extern "C" fn(*const c_void, *const u32, u32) -> *const c_char;

/// The kernels of some shapes, compiled side by side.
pub struct Kernels(HashMap<Instance, Library>);

impl Kernels {
    fn new(instances: HashSet<Instance>) -> Result<Self> {
        ensure!(
            cfg!(target_arch = "x86_64"),
            "the emulation sets x86-64's floating point modes"
        );
        let found = Command::new("g++").arg("--version").output();
        found.context("cannot run g++, which compiles the kernels for this machine")?;
        let sources = tempfile::tempdir()?;
        // The host's files come last and take the place of the GPU's.
        for (name, text) in attn_kernels::CUDA.iter().chain(attn_kernels::HOST) {
            fs::write(sources.path().join(name), text)?;
        }
        let instances: Vec<Instance> = instances.into_iter().collect();
        let compiled = instances.par_iter().enumerate().map(|(number, instance)| {
            let library = compile(sources.path(), *instance, number)?;
            Ok((*instance, library))
        });
        Ok(Kernels(compiled.collect::<Result<_>>()?))
    }

    /// Runs one launch to its end.
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
        let grid = grid.map(|n| n as u32);
        // SAFETY: emulate.cpp defines it so.
        let run = unsafe { self.0[instance].get::<Emulate>(b"attn_emulate\0") }?;
        // SAFETY: the caller's contract; three numbers of the grid.
        let error = unsafe { run((&raw const *params).cast(), grid.as_ptr(), threads as u32) };
        if !error.is_null() {
            // SAFETY: a text of the library's, which stays loaded.
            bail!("{}", unsafe { CStr::from_ptr(error) }.to_string_lossy());
        }
        Ok(())
    }
}

fn compile(sources: &Path, instance: Instance, number: usize) -> Result<Library> {
    let library = sources.join(format!("kernel{number}.so"));
    let options = instance.options(Arch::Sm90a);
    let output = Command::new("g++")
        .args([
            "-std=c++17",
            "-O1",
            "-w",
            "-mfma",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
        ])
        .args(["-fPIC", "-shared", "-D__CUDA_ARCH__=900"])
        // A low limit, so that CTAs withdraw their claims in the middle of others' counts.
        .arg("-DATTN_SPIN_LIMIT=2")
        .args(options.iter().filter(|option| option.starts_with("-D")))
        .arg(format!("-DATTN_UNIT=\"{}\"", instance.source()))
        .arg(format!(
            "-DATTN_APPENDS={}",
            usize::from(instance.entry() == "attn_append")
        ))
        .arg("-o")
        .arg(&library)
        .arg(sources.join("emulate.cpp"))
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "g++ refuses {}: {said}",
        instance.source()
    );
    // SAFETY: the library was made from the kernels' text just now; it has no initializers with effects of their own.
    Ok(unsafe { Library::new(&library) }?)
}

/// The address of a slice, for a kernel that takes it for the device's.
fn address<T>(of: &[T]) -> DeviceAddress {
    DeviceAddress::new(of.as_ptr() as u64)
}

/// Runs `count` random shapes from `seed` on, or the table's, and the appends; those that are small enough.
pub fn run(count: usize, seed: u64, table: bool) -> Result<()> {
    let (cpu, start) = (CpuBackend::new(), Instant::now());
    let jobs = decode::Jobs::new(count, seed, table)?;
    let appends = append::jobs();
    let appending = appends.iter().map(append::Job::instance);
    let kernels = Kernels::new(jobs.instances().chain(appending).collect())?;
    let failures = jobs.run(&cpu, &kernels) + append::run(&appends, &cpu, &kernels);
    println!(
        "emulate: {} kernels, {failures} failures, {:.0} s",
        kernels.0.len(),
        start.elapsed().as_secs_f64()
    );
    ensure!(failures == 0, "{failures} shapes differ");
    Ok(())
}
