//! Compiles the CUDA kernels that tests and timings use, on all cores, into the cache; or into files for a disassembler.

use std::{
    collections::BTreeSet,
    env, fs,
    path::PathBuf,
    process::{Command, ExitCode},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use attn_bench::{Operation, cuda::layout, workloads};
use attn_conformance::{Case, Size, random, table};
use attn_core::{KvFormat, Problem};
use attn_cuda::internals;
use attn_kernels::cuda::{Arch, Instance, KvLayout, embedded::common, instance::covered};
use clap::Parser;

fn arch(name: &str) -> Result<Arch, String> {
    Arch::from_name(name).ok_or_else(|| "allowed: sm_80, sm_90a, compute_80".to_owned())
}

/// Kernels of one problem, in pages and alone.
fn add(all: &mut Vec<Instance>, problem: &Problem, format: KvFormat, layout: KvLayout, arch: Arch) {
    if let KvLayout::Pages(page_size) = layout {
        all.push(Instance::Append {
            format,
            head_dim: problem.head_dim,
            page_size,
            rotary: false,
        });
        if format.check_centres().is_ok() {
            all.push(Instance::Centre {
                format,
                head_dim: problem.head_dim,
                page_size,
            });
        }
    }
    if covered(format, layout).is_ok() {
        let decode = Instance::all_decode(problem, format, layout, arch.shared_limit());
        all.extend(decode.iter().copied().map(Instance::with_centres));
        all.extend(decode);
    }
}

/// What `attn bench` times, each once.
fn timed(arch: Arch) -> Vec<Instance> {
    let mut all = vec![Instance::Read];
    for workload in workloads() {
        let layout = layout(&workload);
        add(&mut all, &workload.problem, workload.format, layout, arch);
        if workload.operation == Operation::AppendRotary {
            all.push(Instance::Append {
                format: workload.format,
                head_dim: workload.problem.head_dim,
                page_size: workload.page_size,
                rotary: true,
            });
        }
    }
    once(all, arch)
}

fn once(mut all: Vec<Instance>, arch: Arch) -> Vec<Instance> {
    let mut seen = BTreeSet::new();
    all.retain(|instance| seen.insert(instance.key(&[], arch)));
    all
}

/// All instances, each once.
fn instances(arch: Arch) -> Vec<Instance> {
    let mut cases = table(Size::Full);
    cases.extend(table(Size::Reduced));
    cases.extend(random::shapes());
    let mut all = of_cases(&cases, arch);
    all.extend(timed(arch));
    once(all, arch)
}

/// The kernels of these cases, and the checking kernel.
fn of_cases(cases: &[Case], arch: Arch) -> Vec<Instance> {
    let mut all = vec![Instance::Check];
    for case in cases {
        let Case {
            problem,
            format,
            page_size,
            ..
        } = case;
        add(
            &mut all,
            problem,
            *format,
            KvLayout::Pages(*page_size),
            arch,
        );
        if case.is_view() {
            let in_place = covered(*format, KvLayout::Rows).is_ok();
            add(
                &mut all,
                problem,
                *format,
                if in_place {
                    KvLayout::Rows
                } else {
                    KvLayout::Pages(64)
                },
                arch,
            );
            if !in_place && covered(*format, KvLayout::Pages(64)).is_ok() {
                all.push(Instance::Import {
                    format: *format,
                    head_dim: problem.head_dim,
                    page_size: 64,
                });
            }
        }
    }
    once(all, arch)
}

/// Compiles the CUDA kernels that tests and timings use.
#[derive(Parser)]
struct Options {
    /// The architecture: sm_80, sm_90a or compute_80.
    #[arg(long, default_value = "sm_90a", value_parser = arch)]
    arch: Arch,
    /// Only these of every so many, as `i/n`.
    #[arg(long)]
    shard: Option<String>,
    /// Only those that `build.rs` embeds.
    #[arg(long)]
    common: bool,
    /// Only those that `attn bench` times.
    #[arg(long)]
    timed: bool,
    /// Only those of the reduced table.
    #[arg(long)]
    reduced: bool,
    /// Leave out decode kernels for keys that lack centres of K, which differ from the others ahead of the first tile alone.
    #[arg(long)]
    no_centres: bool,
    /// Of decode kernels of which there are both kinds, only those for keys that lack centres of K.
    #[arg(long, conflicts_with = "no_centres")]
    only_centres: bool,
    /// Print source files and options instead.
    #[arg(long)]
    list: bool,
    /// Also write each image here, for a disassembler.
    #[arg(long)]
    dump: Option<PathBuf>,
}

/// A file name with an image's source, architecture and macros.
fn file_name(instance: &Instance, arch: Arch) -> String {
    let options = instance.options(arch);
    let macros = options.iter().filter_map(|o| o.strip_prefix("-DATTN_"));
    let words: Vec<_> = macros.map(|m| m.replace('=', "")).collect();
    format!(
        "{}-{}-{}.cubin",
        instance.name(),
        arch.name(),
        words.join("-")
    )
}

/// Compiles them in as many processes as there are cores, or lists them.
fn run(options: &Options) -> Result<()> {
    let arch = options.arch;
    let mut all = if options.common {
        common(arch)
    } else if options.timed {
        timed(arch)
    } else if options.reduced {
        of_cases(&table(Size::Reduced), arch)
    } else {
        instances(arch)
    };
    if options.no_centres {
        let lacks = |instance: &Instance| {
            let macros = instance.options(arch);
            macros.iter().any(|option| option == "-DATTN_CENTRES=1")
        };
        all.retain(|instance| !lacks(instance));
    }
    if options.only_centres {
        all.retain(|instance| instance.with_centres() == *instance);
    }
    if options.list {
        for instance in &all {
            println!("{} {}", instance.source(), instance.options(arch).join(" "));
        }
        return Ok(());
    }
    if let Some(shard) = &options.shard {
        let (i, n) = shard.split_once('/').context("--shard takes i/n")?;
        let (i, n): (usize, usize) = (i.parse()?, n.parse()?);
        all = all.into_iter().skip(i).step_by(n.max(1)).collect();
        for instance in &all {
            let (image, _) = internals::image(instance, arch, false)
                .with_context(|| instance.options(arch).join(" "))?;
            if let Some(dir) = &options.dump {
                fs::create_dir_all(dir)?;
                fs::write(dir.join(file_name(instance, arch)), image)?;
            }
        }
        return Ok(());
    }
    let start = Instant::now();
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let program = env::current_exe()?;
    let passed: Vec<String> = env::args().skip(1).collect();
    let children = (0..cores)
        .map(|i| {
            Command::new(&program)
                .args(&passed)
                .args(["--shard", &format!("{i}/{cores}")])
                .spawn()
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut failed = 0;
    for mut child in children {
        failed += usize::from(!child.wait()?.success());
    }
    ensure!(
        failed == 0,
        "{failed} of {cores} compiling processes failed"
    );
    println!(
        "images: {} kernels for {} in {:.1} s",
        all.len(),
        arch.name(),
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("attn-images: {error:#}");
            ExitCode::FAILURE
        }
    }
}
