//! The kernels whose images a build takes along: those that most models need, so that none is compiled at their first step.

use std::collections::HashSet;

use attn_core::{Arithmetic, HeadDim, Heads, KvFormat, Problem, Scheme};

use super::{
    arch::Arch,
    config::KvLayout,
    instance::{Instance, covered},
};

/// The instances that `build.rs` embeds: presets, with centres of K and without, and plain floats on pages of 64, few rows and prompts of `many_rows.cu`, and their
/// appends; of the presets' shards a decode step's, and their merge; and latents and heads of 512 dims.
pub fn common(arch: Arch) -> Vec<Instance> {
    let mut all = vec![
        Instance::Check,
        Instance::GridFunctions,
        Instance::CopyPages,
        Instance::MergeStates,
    ];
    for format in [
        KvFormat::INT8,
        KvFormat::INT8_INT4,
        KvFormat::INT4,
        KvFormat::same(Scheme::Bf16),
    ] {
        for head_dim in [64, 128].map(HeadDim::same) {
            for rotary in [false, true] {
                all.push(Instance::Append {
                    format,
                    head_dim,
                    page_size: 64,
                    rotary,
                });
            }
            if format.check_centres().is_ok() {
                all.push(Instance::Centre {
                    format,
                    head_dim,
                    page_size: 64,
                });
            }
            for rows in [8, 16] {
                let problem = Problem::new(Heads::new(rows, 1, head_dim), vec![1]);
                let layout = KvLayout::Pages(64);
                if covered(format, layout).is_ok() {
                    let limit = arch.shared_limit();
                    let decode = Instance::all_decode(&problem, format, layout, limit);
                    // Shards have one device's bits where sums are integers, and most models have up to 8 query heads to a KV head.
                    if format.is_integer() && rows == 8 {
                        all.extend(decode.iter().find_map(Instance::leaving_spans));
                        all.push(Instance::MergeSpans { format, head_dim });
                    }
                    all.extend(decode);
                }
            }
            // Few tokens, and blocks of prompts of two and of three warpgroups.
            for (heads, q_len) in [(16, 3), (4, 32), (16, 64)] {
                let problem = Problem::new(Heads::new(heads, 1, head_dim), [64]).q_len(q_len);
                all.extend(many_rows(&problem, format, arch.shared_limit()));
            }
        }
    }
    all.extend(wide(arch));
    let centred: Vec<Instance> = all.iter().copied().map(Instance::with_centres).collect();
    all.extend(centred);
    let mut seen = HashSet::new();
    all.retain(|instance| seen.insert(*instance));
    all
}

/// Decode steps of wide rows as models have them, by `many_rows.cu` with `wgmma`, and appends: latents in 8 and 16 bits, and heads of 512 dims in 16 bits.
fn wide(arch: Arch) -> Vec<Instance> {
    if arch != Arch::Sm90a {
        return Vec::new();
    }
    let latents = HeadDim { k: 576, v: 512 };
    let bf16 = KvFormat::same(Scheme::Bf16);
    let bf16_latents = KvFormat {
        latents: true,
        ..bf16
    };
    let shapes = [
        (KvFormat::INT8_LATENTS, latents, 128),
        (bf16_latents, latents, 128),
        (bf16, HeadDim::same(512), 8),
    ];
    let of = |(format, head_dim, rows)| {
        let problem = Problem::new(Heads::new(rows, 1, head_dim), vec![1]);
        let layout = KvLayout::Pages(64);
        let mut all = Instance::all_decode(&problem, format, layout, arch.shared_limit());
        all.retain(|instance| instance.name() == "many_rows");
        all.push(Instance::Append {
            format,
            head_dim,
            page_size: 64,
            rotary: false,
        });
        all
    };
    shapes.into_iter().flat_map(of).collect()
}

/// `many_rows.cu` for a problem, and what makes prompts fast ([`Arithmetic::Fast`]).
fn many_rows(problem: &Problem, format: KvFormat, shared_limit: usize) -> Vec<Instance> {
    let problem = problem.clone().arithmetic(Arithmetic::Fast);
    let layout = KvLayout::Pages(64);
    let mut all = Instance::all_decode(&problem, format, layout, shared_limit);
    all.retain(|instance| matches!(instance.name(), "many_rows" | "dequantize"));
    all
}
