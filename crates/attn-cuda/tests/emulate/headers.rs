//! Every header of the CUDA kernels compiles by itself: it includes what it uses, so a reader finds each name that it mentions.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use attn_core::{HeadDim, KvFormat};
use attn_kernels::cuda::{Arch, Instance, Kernel, KernelConfig, KvLayout};
use libtest_mimic::Trial;

use super::{HEADER, Kernels, OPTIMIZATION, compiled, compiler};

pub fn trials(kernels: &Arc<Kernels>) -> Vec<Trial> {
    let files = attn_kernels::CUDA.iter().map(|(name, _)| *name);
    let headers = files.filter(|name| name.ends_with(".cuh") || name.ends_with(".h"));
    let trial = |name: &'static str| {
        let kernels = kernels.clone();
        Trial::test(format!("header {name} compiles alone"), move || {
            compile(&kernels, name).map_err(|error| format!("{error:#}").into())
        })
    };
    headers.map(trial).collect()
}

/// A header without a kernel around it, with the macros of an instance that could include it.
fn compile(kernels: &Kernels, header: &str) -> Result<()> {
    kernels.compile_machine().map_err(|error| anyhow!(error))?;
    let sources = kernels.sources.path();
    let options = instance_with(header).options(Arch::Sm90a);
    let mut compiler = compiler(OPTIMIZATION);
    compiler
        .args(["-fsyntax-only", "-D__CUDA_ARCH__=900", "-I"])
        .arg(sources)
        .arg("-include")
        .arg(sources.join(HEADER))
        .args(options.iter().filter(|option| option.starts_with("-D")))
        .args(["-x", "c++"])
        .arg(sources.join(header));
    compiled(&mut compiler, &sources.join("nothing"), header)
}

/// An instance whose kernel includes the header: what lies in a kernel's folder is that kernel's alone.
fn instance_with(header: &str) -> Instance {
    let (format, head_dim) = (KvFormat::INT4, HeadDim::same(128));
    if header.starts_with("ops/") {
        return Instance::Append {
            format,
            head_dim,
            page_size: 64,
            rotary: true,
        };
    }
    let (kernel, row_groups) = if header.starts_with("attend/low_latency/") {
        (Kernel::LowLatencyGlobal, 1)
    } else if header.starts_with("attend/many_rows/") {
        (Kernel::ManyRows, 8)
    } else {
        (Kernel::SplitKv, 1)
    };
    Instance::Decode {
        format,
        head_dim,
        layout: KvLayout::Pages(64),
        config: KernelConfig {
            kernel,
            row_groups,
            row_warps: 1,
            stages: 4,
            ctas: 1,
            producers: usize::from(kernel == Kernel::ManyRows),
        },
        score_mods: true,
        spans: false,
        centres: false,
    }
}
