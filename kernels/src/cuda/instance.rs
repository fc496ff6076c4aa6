//! One compiled kernel: its source file, its macros and compiler options, and the key of its image.

use attn_core::{HeadDim, Int8Scale, KvFormat, Problem, Scheme};

use super::{
    arch::{Exponential, Target},
    config::{Kernel, KernelConfig, KvLayout, SM_TEAMS},
    select::{self, Shape},
    split::has_score_mods,
};

/// A kernel with everything that it is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Instance {
    /// `split_kv.cu`, `low_latency.cu` or `many_rows.cu`.
    Decode {
        /// Format of the cache.
        format: KvFormat,
        /// Elements per head.
        head_dim: HeadDim,
        /// How K and V lie.
        layout: KvLayout,
        /// Configuration of a CTA.
        config: KernelConfig,
        /// Whether window, soft cap and ALiBi are compiled in (`ATTN_SCORE_MODS`).
        score_mods: bool,
        /// Whether spans' states are left unmerged (`ATTN_SPANS`); `split_kv.cu` alone.
        spans: bool,
        /// Whether keys lack centres of K (`ATTN_CENTRES`).
        centres: bool,
    },
    /// `append.cu`.
    Append {
        /// Format of the cache.
        format: KvFormat,
        /// Elements per head.
        head_dim: HeadDim,
        /// Tokens per page.
        page_size: usize,
        /// Whether K and queries are rotated by their positions (`ATTN_ROTARY`).
        rotary: bool,
    },
    /// `centre.cu`.
    Centre {
        /// Format of the cache.
        format: KvFormat,
        /// Elements per head.
        head_dim: HeadDim,
        /// Tokens per page.
        page_size: usize,
    },
    /// `import.cu`.
    Import {
        /// Format of the cache.
        format: KvFormat,
        /// Elements per head.
        head_dim: HeadDim,
        /// Tokens per page.
        page_size: usize,
    },
    /// `export.cu`.
    Export {
        /// Format of the cache.
        format: KvFormat,
        /// Elements per head.
        head_dim: HeadDim,
        /// Tokens per page.
        page_size: usize,
    },
    /// `dequantize.cu`.
    Dequantize {
        /// Format of the cache.
        format: KvFormat,
        /// Elements per head.
        head_dim: HeadDim,
        /// Tokens per page.
        page_size: usize,
    },
    /// `dequantize_rows.cu`.
    DequantizeRows {
        /// Format of the cache.
        format: KvFormat,
        /// Elements per head.
        head_dim: HeadDim,
        /// Tokens of a page of rows; 0: rows of whole sequences.
        page_size: usize,
    },
    /// `gather_pages.cu`.
    GatherPages {
        /// Format of the cache.
        format: KvFormat,
        /// Elements per head.
        head_dim: HeadDim,
        /// Tokens per page.
        page_size: usize,
    },
    /// `copy_pages.cu`.
    CopyPages,
    /// `merge_states.cu`.
    MergeStates,
    /// `merge_spans.cu`.
    MergeSpans {
        /// Format of the cache.
        format: KvFormat,
        /// Elements per head.
        head_dim: HeadDim,
    },
    /// `query_blocks.cu`.
    QueryBlocks,
    /// `check.cu`.
    Check,
    /// `grid_functions.cu`.
    GridFunctions,
    /// `read.cu`.
    Read,
}

/// The schemes as the kernels name them, in the order of [`scheme_id`]; `params.h` has them as an enum.
pub(crate) const SCHEMES: [&str; 9] = [
    "F16",
    "BF16",
    "FP8",
    "INT8_TOKEN",
    "INT8_GROUP",
    "INT8_TENSOR",
    "INT4",
    "ROTATED_INT8",
    "ROTATED_INT4",
];

/// The value of `ATTN_K` or `ATTN_V`: an index into [`SCHEMES`].
fn scheme_id(scheme: Scheme) -> usize {
    match scheme {
        Scheme::F16 => 0,
        Scheme::Bf16 => 1,
        Scheme::Fp8E4m3 => 2,
        Scheme::Int8(Int8Scale::Token) => 3,
        Scheme::Int8(Int8Scale::Group32) => 4,
        Scheme::Int8(Int8Scale::Tensor) => 5,
        Scheme::Int4(_) => 6,
        Scheme::RotatedInt8 => 7,
        Scheme::RotatedInt4 { .. } => 8,
    }
}

impl Instance {
    /// The kernels of all decode steps that differ from this problem's in batch and lengths alone.
    pub fn all_decode(
        problem: &Problem,
        format: KvFormat,
        layout: KvLayout,
        shared_limit: usize,
    ) -> Vec<Self> {
        let mut all: Vec<_> = Shape::new(problem, format, layout)
            .all(shared_limit)
            .map(|config| Self::configured(problem, format, layout, config))
            .collect();
        if let Some((attended, pages)) =
            select::dequantized_as(problem, format, layout, shared_limit)
        {
            let kernels: Vec<_> = Shape::new(problem, attended, pages)
                .all_many_rows(shared_limit)
                .map(|config| Self::configured(problem, attended, pages, config))
                .collect();
            if !kernels.is_empty() {
                all.push(Self::dequantize(problem.head_dim, format, layout, attended));
                all.extend(kernels);
            }
        }
        all
    }

    /// What makes pages of 64 tokens of a cache, in a format of 16-bit floats or in the cache's own.
    pub fn dequantize(
        head_dim: HeadDim,
        format: KvFormat,
        layout: KvLayout,
        attended: KvFormat,
    ) -> Self {
        match layout {
            KvLayout::Pages(page_size) if attended == format => Instance::GatherPages {
                format,
                head_dim,
                page_size,
            },
            KvLayout::Pages(page_size) => Instance::Dequantize {
                format,
                head_dim,
                page_size,
            },
            KvLayout::Rows | KvLayout::PagedRows(_) => Instance::DequantizeRows {
                format,
                head_dim,
                page_size: layout.row_page_size(),
            },
        }
    }

    /// The decode kernel for caches with centres of K in place of this one, which is for those without; itself, of formats whose caches have none.
    #[must_use]
    pub fn with_centres(mut self) -> Self {
        if let Instance::Decode {
            format,
            layout,
            centres,
            ..
        } = &mut self
        {
            *centres = format.check_centres().is_ok() && !layout.is_rows();
        }
        self
    }

    /// The kernel that leaves the states of spans in place of the results of this one; none but `split_kv.cu` does.
    pub(super) fn leaving_spans(&self) -> Option<Self> {
        let mut leaving = *self;
        match &mut leaving {
            Instance::Decode { config, spans, .. } if config.kernel == Kernel::SplitKv => {
                *spans = true;
            }
            _ => return None,
        }
        Some(leaving)
    }

    /// The decode kernel of a problem in this configuration.
    pub fn configured(
        problem: &Problem,
        format: KvFormat,
        layout: KvLayout,
        config: KernelConfig,
    ) -> Self {
        Instance::Decode {
            format,
            head_dim: problem.head_dim,
            layout,
            config,
            score_mods: has_score_mods(problem),
            spans: false,
            centres: false,
        }
    }

    /// The most teams of its CTAs that have shared memory of their own.
    pub fn max_teams(&self) -> usize {
        match self {
            Instance::Decode { config, .. } if config.kernel.is_low_latency() => SM_TEAMS,
            _ => 1,
        }
    }

    /// The file that is compiled: its path within `kernels/cuda`.
    pub fn source(&self) -> &'static str {
        match self {
            Instance::Decode { config, .. } => match config.kernel {
                Kernel::SplitKv => "attend/split_kv/split_kv.cu",
                Kernel::LowLatencyCluster | Kernel::LowLatencyGlobal => {
                    "attend/low_latency/low_latency.cu"
                }
                Kernel::ManyRows | Kernel::ManyRowsWhole => "attend/many_rows/many_rows.cu",
            },
            Instance::Append { .. } => "ops/append.cu",
            Instance::Centre { .. } => "ops/centre.cu",
            Instance::Import { .. } => "ops/import.cu",
            Instance::Export { .. } => "ops/export.cu",
            Instance::Dequantize { .. } => "ops/dequantize.cu",
            Instance::DequantizeRows { .. } => "ops/dequantize_rows.cu",
            Instance::GatherPages { .. } => "ops/gather_pages.cu",
            Instance::CopyPages => "ops/copy_pages.cu",
            Instance::MergeStates => "ops/merge_states.cu",
            Instance::MergeSpans { .. } => "ops/merge_spans.cu",
            Instance::QueryBlocks => "ops/query_blocks.cu",
            Instance::Check => "ops/check.cu",
            Instance::GridFunctions => "ops/grid_functions.cu",
            Instance::Read => "ops/read.cu",
        }
    }

    /// The file's name without folders and ending.
    pub fn name(&self) -> &'static str {
        let file = self.source().rsplit('/').next();
        file.map_or("", |file| file.trim_end_matches(".cu"))
    }

    /// The name of the kernel's function.
    pub fn entry(&self) -> &'static str {
        match self {
            Instance::Decode { .. } => "attn_decode",
            Instance::Append { .. } => "attn_append",
            Instance::Centre { .. } => "attn_centre",
            Instance::Import { .. } => "attn_import",
            Instance::Export { .. } => "attn_export",
            Instance::Dequantize { .. } => "attn_dequantize",
            Instance::DequantizeRows { .. } => "attn_dequantize_rows",
            Instance::GatherPages { .. } => "attn_gather_pages",
            Instance::CopyPages => "attn_copy_pages",
            Instance::MergeStates => "attn_merge_states",
            Instance::MergeSpans { .. } => "attn_merge_spans",
            Instance::QueryBlocks => "attn_query_blocks",
            Instance::Check => "attn_check",
            Instance::GridFunctions => "attn_grid_functions",
            Instance::Read => "attn_read",
        }
    }

    fn macros(&self) -> Vec<(&'static str, usize)> {
        let of_format = |format: KvFormat, head_dim: HeadDim, page_size, row_page_size| {
            let [k_groups, v_groups] = format.groups(head_dim);
            vec![
                ("ATTN_K", scheme_id(format.k)),
                ("ATTN_V", scheme_id(format.v)),
                ("ATTN_K_GROUP_DIMS", k_groups.dims()),
                ("ATTN_V_GROUP_DIMS", v_groups.dims()),
                ("ATTN_K_WINDOW", format.k.window().tiles()),
                ("ATTN_V_WINDOW", format.v.window().tiles()),
                ("ATTN_K_DIM", head_dim.k),
                ("ATTN_V_DIM", head_dim.v),
                ("ATTN_LATENTS", usize::from(format.latents)),
                ("ATTN_PAGE", page_size),
                ("ATTN_ROW_PAGE", row_page_size),
            ]
        };
        match *self {
            Instance::Decode {
                format,
                head_dim,
                layout,
                config,
                score_mods,
                spans,
                centres,
            } => {
                let mut all =
                    of_format(format, head_dim, layout.page_size(), layout.row_page_size());
                all.extend([
                    ("ATTN_ROW_GROUPS", config.row_groups),
                    ("ATTN_ROW_WARPS", config.row_warps),
                    ("ATTN_STAGES", config.stages),
                    ("ATTN_CTAS", config.ctas),
                    ("ATTN_SCORE_MODS", usize::from(score_mods)),
                    ("ATTN_CENTRES", usize::from(centres)),
                ]);
                if config.kernel.is_many_rows() {
                    all.push(("ATTN_PRODUCERS", config.producers));
                }
                let of_kernel: &[_] = match config.kernel {
                    Kernel::SplitKv => &[],
                    Kernel::LowLatencyCluster => &["ATTN_LOW_LATENCY"],
                    Kernel::LowLatencyGlobal => &["ATTN_MERGE_GLOBAL"],
                    Kernel::ManyRows => &["ATTN_MANY_ROWS"],
                    Kernel::ManyRowsWhole => &["ATTN_MANY_ROWS", "ATTN_WHOLE_ITEMS"],
                };
                all.extend(of_kernel.iter().map(|name| (*name, 1)));
                all.extend(spans.then_some(("ATTN_SPANS", 1)));
                all
            }
            // The state of a row depends on no configuration: what config.cuh asks for stands for any.
            Instance::MergeSpans { format, head_dim } => {
                let mut all = of_format(format, head_dim, 64, 0);
                all.extend([
                    ("ATTN_ROW_GROUPS", 1),
                    ("ATTN_ROW_WARPS", 1),
                    ("ATTN_STAGES", 2),
                    ("ATTN_CTAS", 1),
                    ("ATTN_SCORE_MODS", 0),
                    ("ATTN_CENTRES", 0),
                ]);
                all
            }
            Instance::Append {
                format,
                head_dim,
                page_size,
                rotary,
            } => {
                let mut all = of_format(format, head_dim, page_size, 0);
                all.push(("ATTN_ROTARY", usize::from(rotary)));
                all
            }
            Instance::Centre {
                format,
                head_dim,
                page_size,
            }
            | Instance::Import {
                format,
                head_dim,
                page_size,
            }
            | Instance::Export {
                format,
                head_dim,
                page_size,
            }
            | Instance::Dequantize {
                format,
                head_dim,
                page_size,
            }
            | Instance::GatherPages {
                format,
                head_dim,
                page_size,
            } => of_format(format, head_dim, page_size, 0),
            Instance::DequantizeRows {
                format,
                head_dim,
                page_size,
            } => of_format(format, head_dim, 0, page_size),
            Instance::CopyPages
            | Instance::MergeStates
            | Instance::QueryBlocks
            | Instance::Check
            | Instance::GridFunctions
            | Instance::Read => Vec::new(),
        }
    }

    /// Whether subnormals are flushed, as the arithmetic of a state asks.
    pub fn flushes(&self) -> bool {
        matches!(
            self,
            Instance::Decode { .. } | Instance::MergeSpans { .. } | Instance::GridFunctions
        )
    }

    /// Whether it puts scores on the grid of the integer arithmetic, so that its bits depend on an [`Exponential`].
    pub fn has_grid(&self) -> bool {
        match self {
            Instance::Decode { format, .. } => format.is_integer(),
            Instance::GridFunctions => true,
            _ => false,
        }
    }

    /// The compiler's options.
    pub fn options(&self, target: impl Into<Target>) -> Vec<String> {
        let target = target.into();
        let mut options = vec![
            format!("--gpu-architecture={}", target.arch.name()),
            "--std=c++17".to_owned(),
            "--fmad=false".to_owned(),
            "--device-as-default-execution-space".to_owned(),
        ];
        // The arithmetic of decode flushes subnormals; the quantizers of append keep subnormal inputs.
        if self.flushes() {
            options.push("--ftz=true".to_owned());
        }
        if self.has_grid() && target.exponential == Exponential::Polynomial {
            options.push("-DATTN_POLYNOMIAL=1".to_owned());
        }
        options.extend(
            self.macros()
                .iter()
                .map(|(name, value)| format!("-D{name}={value}")),
        );
        options
    }

    /// The key of its image: a hash of every source, the compiled file's path and the options.
    ///
    /// The key decides which machine code runs, so it is a cryptographic hash: no two texts that anybody can make share one. Each
    /// text's length comes before it, so that what belongs to which text is part of the key.
    pub fn key(&self, sources: &[(&str, &str)], target: impl Into<Target>) -> Key {
        let mut hash = blake3::Hasher::new_derive_key("attn-cuda 2026-11 kernel image");
        let mut add = |text: &str| {
            hash.update(&(text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        };
        for (name, source) in sources {
            add(name);
            add(source);
        }
        add(self.source());
        for option in self.options(target) {
            add(&option);
        }
        *hash.finalize().as_bytes()
    }
}

/// Name of an image: a BLAKE3 hash ([`Instance::key`]).
pub type Key = [u8; 32];

/// A key in hexadecimal.
pub fn hex(key: &Key) -> String {
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the decode kernels cover a format.
///
/// # Errors
/// The first text names what is not covered, the second what is.
pub fn covered(format: KvFormat, layout: KvLayout) -> Result<(), (String, String)> {
    let in_pages_alone = |scheme: Scheme| scheme.code_bits() == 4 || scheme.is_rotated();
    let has_no_rows = format.latents || in_pages_alone(format.k) || in_pages_alone(format.v);
    if layout.is_rows() && has_no_rows {
        return Err((
            format!("rows of {format}"),
            "every pair of schemes in pages, and rows of all but int4, rotated schemes and latents"
                .to_owned(),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{
        super::{arch::Arch, embedded::common},
        *,
    };

    #[test]
    fn keys_differ_where_images_do() {
        let mut keys: Vec<Key> = Vec::new();
        for arch in [Arch::Sm80, Arch::Sm90a, Arch::Compute80] {
            keys.extend(common(arch).iter().map(|i| i.key(&[("a.cu", "x")], arch)));
        }
        let polynomial = Target {
            arch: Arch::Sm80,
            exponential: Exponential::Polynomial,
        };
        let of_polynomials = common(Arch::Sm80).into_iter().filter(Instance::has_grid);
        keys.extend(of_polynomials.map(|i| i.key(&[("a.cu", "x")], polynomial)));
        keys.push(Instance::Check.key(&[("a.cu", "y")], Arch::Sm80));
        // The same bytes in a row, cut elsewhere.
        keys.push(Instance::Check.key(&[("a.c", "uy")], Arch::Sm80));
        keys.push(Instance::Check.key(&[("a.cuy", "")], Arch::Sm80));
        let count = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }

    #[test]
    fn a_configuration_names_its_source() {
        let sources = [
            Kernel::SplitKv,
            Kernel::LowLatencyCluster,
            Kernel::LowLatencyGlobal,
        ]
        .map(|kernel| {
            let config = KernelConfig {
                kernel,
                row_groups: 1,
                row_warps: 6,
                stages: 3,
                ctas: 2,
                producers: 0,
            };
            let instance = Instance::Decode {
                format: KvFormat::INT8,
                head_dim: HeadDim::same(128),
                layout: KvLayout::Pages(64),
                config,
                score_mods: false,
                spans: false,
                centres: false,
            };
            let last = instance.options(Arch::Sm90a).pop();
            (instance.source(), last.filter(|last| last.ends_with("=1")))
        });
        assert_eq!(sources[0].0, "attend/split_kv/split_kv.cu");
        assert_eq!(
            sources[1],
            (
                "attend/low_latency/low_latency.cu",
                Some("-DATTN_LOW_LATENCY=1".to_owned())
            )
        );
        assert_eq!(
            sources[2],
            (
                "attend/low_latency/low_latency.cu",
                Some("-DATTN_MERGE_GLOBAL=1".to_owned())
            )
        );
    }
}
