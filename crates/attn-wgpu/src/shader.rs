//! Which specialisation of `kernels/wgsl` a problem runs on, and the pipelines made so far.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};

use attn_core::{Error, Int4Scale, Int8Scale, KvFormat, PageLayout, Problem, Scheme};

use crate::{
    error::{WgpuError, device},
    gpu::Gpu,
    launch::Item,
    specialise::{Constants, SpecialiseError, specialise},
};

/// Everything that chooses constants of the decode kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DecodeKey {
    pub format: KvFormat,
    pub head_dim: usize,
    pub page_size: usize,
    /// Query rows of one workgroup: 1, 2, 4 or 8.
    pub rows: usize,
    pub softcap: bool,
    pub alibi: bool,
    /// Storage buffers that the pool lies in.
    pub pools: usize,
    /// Whether rows are read where another engine put them, instead of pages.
    pub view: bool,
    pub item: Item,
}

/// What may be tried on a device: it changes speed, never bits. `Default` leaves each to the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Tuning {
    /// Bytes of workgroup memory of one workgroup, at most the device's.
    pub shared_bytes: Option<usize>,
    /// Query rows of one workgroup, at most: 1, 2, 4 or 8; another number counts as the next of these below it, 0 as 1.
    pub rows: Option<usize>,
    /// Whether a workgroup takes a single tile, where segments are no longer than four, or a segment.
    pub by_tiles: Option<bool>,
}

impl Tuning {
    /// What `ATTN_WGPU_ITEMS` asks for.
    pub(crate) fn from_env() -> Result<Self, String> {
        let by_tiles = match std::env::var("ATTN_WGPU_ITEMS").as_deref() {
            Err(_) | Ok("" | "auto") => None,
            Ok("tiles") => Some(true),
            Ok("segments") => Some(false),
            Ok(other) => {
                return Err(format!(
                    "ATTN_WGPU_ITEMS is {other}; allowed: auto, tiles, segments"
                ));
            }
        };
        Ok(Tuning {
            by_tiles,
            ..Default::default()
        })
    }

    /// Query rows of one workgroup, at most: a power of two.
    fn rows(&self) -> usize {
        1 << self.rows.unwrap_or(8).clamp(1, 8).ilog2()
    }

    /// Bytes of workgroup memory on this device; more than that would cost occupancy.
    fn shared_bytes(&self, gpu: &Gpu) -> usize {
        let most = gpu.limits.max_compute_workgroup_storage_size as usize;
        self.shared_bytes.unwrap_or(32768).min(most)
    }
}

/// Lanes of a workgroup of `decode_split.wgsl`: `T`.
const LANES: usize = 64;

/// The number of a scheme in the kernels.
fn kind(scheme: Scheme) -> i64 {
    match scheme {
        Scheme::Int8(Int8Scale::Token) => 0,
        Scheme::Int8(Int8Scale::Group32) => 1,
        Scheme::Int8(Int8Scale::Tensor) => 2,
        Scheme::Int4(Int4Scale::Groups(_)) => 3,
        Scheme::Int4(Int4Scale::Channel) => 4,
        Scheme::F16 => 5,
        Scheme::Bf16 => 6,
        Scheme::Fp8E4m3 => 7,
    }
}

const KINDS: [(&str, i64); 8] = [
    ("TOKEN", 0),
    ("G32", 1),
    ("TENSOR", 2),
    ("GROUPS", 3),
    ("CHANNEL", 4),
    ("F16", 5),
    ("BF16", 6),
    ("FP8", 7),
];

/// The layout of pages of one KV head.
///
/// # Panics
/// For what no page can hold: keys are made of checked problems and caches.
pub(crate) fn one_head(format: KvFormat, head_dim: usize, page_size: usize) -> PageLayout {
    PageLayout::new(format, head_dim, page_size, 1).expect("kernels are chosen for checked layouts")
}

/// Constants that every kernel on pages of this layout has.
pub(crate) fn layout_constants(layout: &PageLayout) -> Constants {
    let mut constants: Constants = KINDS
        .iter()
        .map(|(name, value)| ((*name).to_owned(), *value))
        .collect();
    let mut set = |name: &str, value: usize| {
        constants.insert(name.to_owned(), value as i64);
    };
    let (k, v) = (layout.format().k, layout.format().v);
    set("D", layout.head_dim());
    set("PS", layout.page_size());
    set("UNITS", layout.head_dim() / 16);
    set("K", kind(k) as usize);
    set("V", kind(v) as usize);
    set("K_BITS", k.code_bits());
    set("V_BITS", v.code_bits());
    set("KG", k.groups(layout.head_dim()));
    set("VG", v.groups(layout.head_dim()));
    set("RUN_VECS", layout.run_bytes() / 16);
    set("K_PARAMS", layout.k_params().start / 4);
    set("V_CODES", layout.v_codes().start / 16);
    set("V_PARAMS", layout.v_params().start / 4);
    constants
}

/// The decode kernels' constants, and the bytes of workgroup memory that they take.
pub(crate) fn decode_constants(key: &DecodeKey) -> (Constants, usize) {
    let layout = one_head(key.format, key.head_dim, key.page_size);
    let v = key.format.v;
    let integer = key.format.is_integer();
    let mut constants = layout_constants(&layout);
    let (d, r) = (key.head_dim, key.rows);
    let group_dims = d / v.groups(d);
    // Dims of a lane: of 4-bit V pairs of them, as they share bytes; of a view's bytes the four of a word. Long rows take turns.
    let v_rows = if v.code_bits() == 4 { d / 2 } else { d };
    let by_words = key.view && v.code_bits() == 8;
    let chunks = match (v.code_bits(), d) {
        _ if by_words => 1,
        (8 | 16, 192) => 3,
        _ => d.div_ceil(128),
    };
    let rows_per_lane = v_rows.div_ceil(LANES * chunks);
    let dims_per_lane = if by_words {
        4
    } else {
        rows_per_lane * (d / v_rows)
    };
    let scaled = matches!(
        v,
        Scheme::Int8(Int8Scale::Token | Int8Scale::Group32) | Scheme::Int4(_)
    );
    for (name, value) in [
        ("INTEGER", usize::from(integer)),
        ("R", r),
        ("POOLS", key.pools),
        ("VIEW", usize::from(key.view)),
        ("SOFTCAP", usize::from(key.softcap)),
        ("ALIBI", usize::from(key.alibi)),
        ("PER_SEGMENT", key.item.per_segment()),
        ("V_SCALED", usize::from(scaled)),
        ("GD", group_dims),
        ("CH", chunks),
        ("DPL", dims_per_lane),
        ("V_ROWS", v_rows),
        ("RPL", rows_per_lane),
    ] {
        constants.insert(name.to_owned(), value as i64);
    }
    (constants, workgroup_bytes(key))
}

/// Bytes of workgroup memory that the split kernel takes, as declared in decode_split.wgsl and reduce.wgsl.
fn workgroup_bytes(key: &DecodeKey) -> usize {
    let KvFormat { k, v } = key.format;
    let (d, r, integer) = (key.head_dim, key.rows, key.format.is_integer());
    let (units, k_groups, v_groups) = (d / 16, k.groups(d), v.groups(d));
    let channel = k == Scheme::Int4(Int4Scale::Channel);
    let sums = match k {
        Scheme::Int4(Int4Scale::Groups(_)) => k_groups,
        _ => 1,
    };
    let mut bytes = 16 * r + if key.alibi { 4 * r } else { 0 };
    bytes += if integer {
        32 * r * units
            + 4 * r
            + v_groups * (128 * r + 8 * r + 4)
            + 4 * 68 * r * v_groups.div_ceil(2)
    } else {
        256 * r + 512 * v_groups + 64 * r * units
    };
    let mut slots = 3 * r + v_groups * (2 + 3 * r) + r * sums;
    if channel {
        slots += 2 * r + 1;
    }
    if integer && channel {
        bytes += 128 * units + 4 * r;
    }
    bytes + 4 * slots
}

/// What a step reads: how pages lie, or that there are none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub format: KvFormat,
    pub page_size: usize,
    pub pools: usize,
    pub view: bool,
}

/// The kernels of a problem: the rows of a workgroup are as many as it has, up to 8, that fit into workgroup memory.
pub(crate) fn decode_key(
    problem: &Problem,
    layout: Layout,
    shared_bytes: usize,
    tuning: &Tuning,
) -> DecodeKey {
    let rows = problem.heads_per_kv() * problem.q_len;
    let mut key = DecodeKey {
        format: layout.format,
        head_dim: problem.head_dim,
        page_size: layout.page_size,
        rows: rows.next_power_of_two().min(tuning.rows()),
        softcap: problem.softcap.is_some(),
        alibi: problem.alibi_slopes.is_some(),
        pools: layout.pools,
        view: layout.view,
        item: Item::Segment,
    };
    while key.rows > 1 && decode_constants(&key).1 > shared_bytes {
        key.rows /= 2;
    }
    let asked = tuning
        .by_tiles
        .map(|by_tiles| if by_tiles { Item::Tile } else { Item::Segment });
    key.item = Item::choose(problem, key.rows, asked);
    key
}

fn source(name: &str) -> Option<&'static str> {
    let found = attn_kernels::WGSL.iter().find(|(file, _)| *file == name);
    found.map(|(_, text)| *text)
}

/// The text of a kernel with these constants.
pub(crate) fn kernel_text(file: &str, constants: &Constants) -> Result<String, SpecialiseError> {
    specialise(file, constants, &source)
}

/// The text of `decode_split` or `decode_merge`.
pub(crate) fn decode_text(file: &str, key: &DecodeKey) -> Result<String, SpecialiseError> {
    kernel_text(file, &decode_constants(key).0)
}

/// One pipeline, whatever its bind group layout.
pub(crate) type Pipeline = Arc<wgpu::ComputePipeline>;

/// The text of the kernel that only reads.
pub(crate) fn read_text() -> Result<String, SpecialiseError> {
    kernel_text("read.wgsl", &Constants::new())
}

/// The text of the kernel that evaluates the law's functions.
pub(crate) fn law_text() -> Result<String, SpecialiseError> {
    kernel_text("law.wgsl", &Constants::new())
}

/// Pipelines by name and constants.
#[derive(Default)]
pub(crate) struct Pipelines {
    decode: Mutex<HashMap<DecodeKey, [Pipeline; 2]>>,
    pub tuning: Tuning,
}

/// Makes a pipeline of a specialised text.
pub(crate) fn compile(gpu: &Gpu, name: &'static str, text: String) -> Result<Pipeline, Error> {
    gpu.guarded("compiling a kernel", || {
        // SAFETY: without bounds checks an index past a binding is undefined. Of what the kernels index by, release builds check
        // - the pages of a step: `launch::Source::check` compares them with the pool's count, and their number with kv_len;
        // - the pages, tail pages, tokens and sources of an append: `append::check_writes`;
        // - a view's offsets and strides: `view.rs` computes the end of the last row in checked arithmetic;
        // - callers' buffers (k and v of an append, a view's, q, out, lse): as many bytes as the kernels reach are bound (`first`), which
        //   wgpu compares with the buffer that it finds;
        // - 32-bit indices: no binding is longer than `Gpu::largest_binding`, which bounds the pool (`DevicePages::new`), the states,
        //   tables and queries (`launch::check_sizes`), an append's table (`append::grid`), and the callers' buffers above; workgroups
        //   are counted below 2^32 (`Gpu::most_workgroups`);
        // - whose pools and steps these are: `WgpuBackend::pages` and `Prepared::record` refuse those of another device.
        // Tables and states are indexed by what `launch.rs` and `append.rs` write into the tables they allocate, places inside a page and
        // workgroup arrays by constants of the same layout; law.wgsl and read.wgsl stop at arrayLength. No index comes from values.
        // Loops end: their bounds are integers of the tables, and the variables only grow.
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
    })
}

/// The first `bytes` of a caller's buffer, which has as many. wgpu compares them with the buffer that it finds, which is another one where
/// the handle is of another instance: what a kernel reaches is there in any case.
pub(crate) fn first(buffer: &wgpu::Buffer, bytes: u64) -> wgpu::BufferBinding<'_> {
    wgpu::BufferBinding {
        buffer,
        offset: 0,
        size: NonZeroU64::new(bytes),
    }
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

    /// The kernels of a problem on this device.
    pub fn key(&self, gpu: &Gpu, problem: &Problem, layout: Layout) -> DecodeKey {
        let mut tuning = self.tuning;
        if gpu.info.device_type == wgpu::DeviceType::Cpu {
            // Its compiler takes seconds for eight rows spelled out.
            tuning.rows = tuning.rows.or(Some(2));
        }
        decode_key(problem, layout, tuning.shared_bytes(gpu), &tuning)
    }

    /// The split and the merge kernel.
    pub fn decode(&self, gpu: &Gpu, key: &DecodeKey) -> Result<[Pipeline; 2], Error> {
        let mut made = self.decode.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(pair) = made.get(key) {
            return Ok(pair.clone());
        }
        let text = |name| {
            decode_text(&format!("{name}.wgsl"), key)
                .map_err(|e| device("specialising a kernel", WgpuError::from(e)))
        };
        let pair = [
            compile(gpu, "decode_split", text("decode_split")?)?,
            compile(gpu, "decode_merge", text("decode_merge")?)?,
        ];
        made.insert(*key, pair.clone());
        Ok(pair)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_tuning_gives_kernels_of_one_two_four_or_eight_rows() {
        let problem = Problem::new(64, 1, 64, vec![1]);
        let layout = Layout {
            format: KvFormat::INT8,
            page_size: 64,
            pools: 1,
            view: false,
        };
        for (asked, rows) in [
            (0, 1),
            (1, 1),
            (3, 2),
            (4, 4),
            (7, 4),
            (100, 8),
            (usize::MAX, 8),
        ] {
            let mut tuning = Tuning {
                rows: Some(asked),
                ..Default::default()
            };
            assert_eq!(decode_key(&problem, layout, 32768, &tuning).rows, rows);
            tuning.shared_bytes = Some(0);
            assert_eq!(decode_key(&problem, layout, 0, &tuning).rows, 1);
        }
    }

    #[test]
    fn the_largest_kernels_are_far_from_the_preprocessors_bounds() {
        let mut problem = Problem::new(64, 1, 256, vec![1]);
        (problem.softcap, problem.alibi_slopes) = (Some(1.0), Some(vec![1.0; 64]));
        let mut longest = 0;
        for format in ["int4-g1", "int8-g32/int4-g1", "int4"] {
            let layout = Layout {
                format: format.parse().unwrap(),
                page_size: 64,
                pools: 8,
                view: false,
            };
            let key = decode_key(&problem, layout, 65536, &Tuning::default());
            for file in ["decode_split.wgsl", "decode_merge.wgsl"] {
                longest = longest.max(decode_text(file, &key).unwrap().len());
            }
        }
        println!("the longest kernel has {longest} bytes");
        assert!(longest < crate::specialise::MOST_OUT / 4);
    }
}
