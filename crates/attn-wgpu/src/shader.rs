//! Which specialisation of `kernels/wgsl` a problem runs on, and the pipelines made so far.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use attn_core::{Error, Int4Scale, Int8Scale, KvFormat, PageLayout, Problem, Scheme};

use crate::{
    error::{WgpuError, device},
    gpu::{Gpu, asked},
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
    pub device: DeviceKey,
}

/// What of the device chooses constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DeviceKey {
    /// Lanes of a subgroup, 1 for none.
    pub subgroup: usize,
    /// Bytes of workgroup memory.
    pub shared_bytes: usize,
    /// Whether the next tile's K, and a tile's V, are asked for ahead.
    pub ahead: [bool; 2],
    /// Rows whose dependent steps overlap.
    pub together: usize,
    /// What products run on, where a format has one group per row.
    pub products: Products,
    /// Units of 16 dims that a stage of the matrix kernel holds: 2 or 4.
    pub units: usize,
}

/// What multiplies integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Products {
    /// Packed dot products of four bytes.
    Packed,
    /// Cooperative matrices: formats with one group per row, head_dim up to 128, pages.
    Matrices,
    /// The kernel of [`Products::Matrices`] with each of its operations spelled out, to test it on adapters without them: slow.
    SpelledOut,
}

/// What may be tried on a device: it changes speed, never bits. `Default` leaves each to the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Tuning {
    /// Whether maxima and sums are taken by subgroup operations, where present, or by atomics in workgroup memory.
    pub subgroups: Option<bool>,
    /// Bytes of workgroup memory of one workgroup, at most the device's.
    pub shared_bytes: Option<usize>,
    /// Whether the next tile's K, and a tile's V, are asked for ahead: it takes registers.
    pub ahead: Option<[bool; 2]>,
    /// Rows that a step of the row loops takes together: 1, 2 or 4; of integer formats with head_dim up to 128.
    pub together: Option<usize>,
    /// Query rows of one workgroup, at most: 1, 2, 4 or 8.
    pub rows: Option<usize>,
    /// What multiplies integers; cooperative matrices only where the device has them.
    pub products: Option<Products>,
    /// Units of 16 dims that a stage of the matrix kernel holds: 2 or 4.
    pub units: Option<usize>,
    /// Segments of a sequence that a workgroup of the matrix kernel takes, at most.
    pub segments: Option<usize>,
}

impl DeviceKey {
    pub fn of(gpu: &Gpu, tuning: &Tuning) -> Self {
        let software = gpu.info.device_type == wgpu::DeviceType::Cpu;
        // Atomics in workgroup memory took 0.83 to 0.96 of the time of subgroup operations on an H200, and no more on llvmpipe.
        let subgroups = tuning.subgroups.unwrap_or(false);
        // More would cost occupancy.
        let shared = tuning.shared_bytes.unwrap_or(32768);
        DeviceKey {
            subgroup: if subgroups { gpu.subgroup as usize } else { 1 },
            shared_bytes: shared.min(gpu.limits.max_compute_workgroup_storage_size as usize),
            ahead: tuning.ahead.unwrap_or([!software; 2]),
            // Two: 0.95 (int8), 0.93 (int4) and 0.91 (int4-g1) of the time of one on an H200 (batch 512).
            together: tuning.together.unwrap_or(if software { 1 } else { 2 }),
            products: match tuning.products {
                Some(Products::Matrices) if gpu.has_matrix => Products::Matrices,
                Some(Products::SpelledOut) => Products::SpelledOut,
                None if gpu.has_matrix && asked("matrix") => Products::Matrices,
                _ => Products::Packed,
            },
            // 0.78 of the time with 4 on an H200 (int8, batch 512): more workgroups at once.
            units: tuning.units.unwrap_or(2),
        }
    }
}

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

/// Constants that every kernel on pages of this layout has.
pub(crate) fn layout_constants(layout: &PageLayout) -> Constants {
    let mut constants: Constants = KINDS
        .iter()
        .map(|(name, value)| ((*name).to_owned(), *value))
        .collect();
    let mut set = |name: &str, value: usize| {
        constants.insert(name.to_owned(), value as i64);
    };
    let (k, v) = (layout.format.k, layout.format.v);
    set("D", layout.head_dim);
    set("PS", layout.page_size);
    set("UNITS", layout.head_dim / 16);
    set("K", kind(k) as usize);
    set("V", kind(v) as usize);
    set("K_BITS", k.code_bits());
    set("V_BITS", v.code_bits());
    set("KG", k.groups(layout.head_dim));
    set("VG", v.groups(layout.head_dim));
    set("RUN_VECS", layout.run_bytes() / 16);
    set("K_PARAMS", layout.k_params().start / 4);
    set("V_CODES", layout.v_codes().start / 16);
    set("V_PARAMS", layout.v_params().start / 4);
    constants
}

/// The decode kernels' constants, and the bytes of workgroup memory that they take.
pub(crate) fn decode_constants(key: &DecodeKey) -> (Constants, usize) {
    let layout = PageLayout {
        format: key.format,
        head_dim: key.head_dim,
        page_size: key.page_size,
        num_kv_heads: 1,
    };
    let v = key.format.v;
    let integer = key.format.is_integer();
    let mut constants = layout_constants(&layout);
    let (d, r) = (key.head_dim, key.rows);
    let group_dims = d / v.groups(d);
    let matrix = on_matrices(key);
    // Dims of a lane: of 4-bit V, an even number of them, as they share bytes in pairs.
    let v_rows = if v.code_bits() == 4 { d / 2 } else { d };
    let chunks = match (v.code_bits(), d) {
        (4, 192) => 3,
        _ => d.div_ceil(128),
    };
    let rows_per_lane = v_rows.div_ceil(32 * chunks);
    let dims_per_lane = if key.view && v.code_bits() == 8 {
        4
    } else {
        rows_per_lane * (d / v_rows)
    };
    // Longer rows take the registers themselves.
    let ahead = key.device.ahead.map(|ahead| ahead && integer && d <= 128);
    let together = if integer && d <= 128 {
        key.device.together
    } else {
        1
    };
    let scaled = matches!(
        v,
        Scheme::Int8(Int8Scale::Token | Int8Scale::Group32) | Scheme::Int4(_)
    );
    for (name, value) in [
        ("INTEGER", usize::from(integer)),
        ("PLAIN", usize::from(matrix == Some(Products::SpelledOut))),
        ("PU", key.device.units),
        ("R", r),
        (
            "SG",
            if matrix.is_some() {
                32
            } else {
                key.device.subgroup
            },
        ),
        ("POOLS", key.pools),
        ("VIEW", usize::from(key.view)),
        ("SOFTCAP", usize::from(key.softcap)),
        ("ALIBI", usize::from(key.alibi)),
        ("V_SCALED", usize::from(scaled)),
        ("GD", group_dims),
        ("CH", chunks),
        ("DPL", dims_per_lane),
        ("V_ROWS", v_rows),
        ("RPL", rows_per_lane),
        ("RU", together.clamp(1, r)),
        ("K_AHEAD", usize::from(ahead[0])),
        ("V_AHEAD", usize::from(ahead[1])),
    ] {
        constants.insert(name.to_owned(), value as i64);
    }
    (constants, workgroup_bytes(key))
}

/// Bytes of workgroup memory that the split kernel takes.
fn workgroup_bytes(key: &DecodeKey) -> usize {
    if let Some(products) = on_matrices(key) {
        return matrix_bytes(key, products == Products::SpelledOut);
    }
    let KvFormat { k, v } = key.format;
    let (d, r, integer) = (key.head_dim, key.rows, key.format.is_integer());
    let (units, k_groups, v_groups) = (d / 16, k.groups(d), v.groups(d));
    // As declared in decode_split.wgsl and reduce.wgsl.
    let whole = key.device.subgroup == 32;
    let mut bytes = 20 * r;
    bytes += if integer {
        36 * r * units + 4 * r + v_groups * (128 * r + 8 * r + 4) + (v_groups - 1) * 128 * r
    } else {
        256 * r + 512 * v_groups + 64 * r * units
    };
    bytes += if integer && whole { 128 } else { 256 } * r;
    if !whole {
        bytes += 4 * (2 * r + v_groups * (2 + 3 * r));
    }
    if key.alibi {
        bytes += 4 * r;
    }
    if integer && k == Scheme::Int4(Int4Scale::Channel) {
        bytes += channel_bytes(r, units);
    } else if integer && matches!(k, Scheme::Int4(_)) {
        bytes += 4 * r * units + 4 * r * k_groups;
    }
    bytes
}

/// Of `channel_arrays.wgsl`.
fn channel_bytes(rows: usize, units: usize) -> usize {
    132 * units + 8 * rows * units + 12 * rows
}

/// As declared in matrix_split.wgsl, matrix.wgsl and matrix_plain.wgsl.
fn matrix_bytes(key: &DecodeKey, plain: bool) -> usize {
    let (d, r) = (key.head_dim, key.rows);
    let staged = (64 * (4 * key.device.units + 5)).max(16 * (d / 4 + 2)) + 16 * 18;
    let sums = 4 * 4 * 328;
    let rows = 4 * r * (d / 16) + 28 * r + if key.alibi { 4 * r } else { 0 };
    let query = match key.format.k {
        Scheme::Int4(Int4Scale::Channel) => channel_bytes(r, d / 16),
        _ => 4 * r * (d / 16) + 4 * r,
    };
    let codes = if plain {
        4 * staged + 512 + 64 * (d / 4 + 2)
    } else {
        8 * staged
    };
    codes + sums + rows + query
}

/// Which kernel on matrices, if any: one group per row, and sums of at most 128 products.
fn on_matrices(key: &DecodeKey) -> Option<Products> {
    let KvFormat { k, v } = key.format;
    let fits = key.format.is_integer()
        && !key.view
        && key.head_dim <= 128
        && k.groups(key.head_dim) == 1
        && v.groups(key.head_dim) == 1;
    (fits && key.device.products != Products::Packed).then_some(key.device.products)
}

/// What a step reads: how pages lie, or that there are none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub format: KvFormat,
    pub page_size: usize,
    pub pools: usize,
    pub view: bool,
}

/// The rows of a workgroup for a problem: as many as it has, up to 8, that fit into workgroup memory.
pub(crate) fn decode_key(
    problem: &Problem,
    layout: Layout,
    device: DeviceKey,
    most_rows: usize,
) -> DecodeKey {
    let rows = problem.heads_per_kv() * problem.q_len;
    let mut key = DecodeKey {
        format: layout.format,
        head_dim: problem.head_dim,
        page_size: layout.page_size,
        rows: rows.next_power_of_two().min(most_rows),
        softcap: problem.softcap.is_some(),
        alibi: problem.alibi_slopes.is_some(),
        pools: layout.pools,
        view: layout.view,
        device,
    };
    if on_matrices(&key).is_some() {
        // All rows of a matrix, there or not.
        let whole = DecodeKey { rows: 8, ..key };
        if workgroup_bytes(&whole) <= device.shared_bytes {
            return whole;
        }
        key.device.products = Products::Packed;
    }
    while key.rows > 1 && decode_constants(&key).1 > device.shared_bytes {
        key.rows /= 2;
    }
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

/// The entry point of the split kernel; its file is named alike.
pub(crate) fn split_name(key: &DecodeKey) -> &'static str {
    match on_matrices(key) {
        Some(_) => "matrix_split",
        None => "decode_split",
    }
}

/// The text of a decode kernel: a split kernel or `decode_merge`.
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
        // SAFETY: without bounds checks an index past a binding is undefined; the kernels index
        // - tables by what `launch.rs` wrote into the same buffer, of the size it computed;
        // - pools by pages of `KvCache`'s books, all below `num_pages`, and offsets inside a page by `PageLayout`;
        // - q, states, out and lse by problem shapes whose buffers' sizes `launch.rs` checks before it records;
        // - an append's jobs by what `append.rs` wrote, its pages of `KvCache`'s books, its tokens within buffers whose sizes are checked;
        // - workgroup arrays by constants of `decode_constants`, whose loops end at the arrays' lengths.
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

/// Binds buffers, at the numbers that a kernel gives them, to a pipeline's group 0.
pub(crate) fn bind<'a>(
    gpu: &Gpu,
    pipeline: &Pipeline,
    buffers: impl IntoIterator<Item = (u32, &'a wgpu::Buffer)>,
) -> wgpu::BindGroup {
    let entries: Vec<_> = buffers
        .into_iter()
        .map(|(binding, buffer)| wgpu::BindGroupEntry {
            binding,
            resource: buffer.as_entire_binding(),
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

    /// The split and the merge kernel.
    pub fn decode(&self, gpu: &Gpu, key: &DecodeKey) -> Result<[Pipeline; 2], Error> {
        let mut made = self.decode.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(pair) = made.get(key) {
            return Ok(pair.clone());
        }
        let split = split_name(key);
        let text = |name| {
            decode_text(&format!("{name}.wgsl"), key)
                .map_err(|e| device("specialising a kernel", WgpuError::from(e)))
        };
        let pair = [
            compile(gpu, split, text(split)?)?,
            compile(gpu, "decode_merge", text("decode_merge")?)?,
        ];
        made.insert(*key, pair.clone());
        Ok(pair)
    }
}
