//! What moves cached tokens and results: exports to rows of floats, copies of pages, merges of states. Each must be the CPU's, bit for bit, on
//! a GPU and where the kernels' text is emulated.

use anyhow::{Result, ensure};
use attn_conformance::case::noise;
use attn_core::{
    AttnState, CacheConfig, DecodeAttention, HeadDim, Heads, KvCache, KvFormat, Problem,
    convert::dequantize,
};
use attn_cpu::CpuBackend;
use attn_cuda::native::{
    CopyPagesArgs, DecodeArgs, DeviceAddress, Dtype, ExportArgs, KvLayout, KvRows, MergeStatesArgs,
    Op, Pages, SpansArgs,
};

use crate::{
    numbers,
    pages::{Tables, padded, padded_at, pool_of},
};

/// What runs the kernels: memory for their arguments, and launches that end before they return.
pub trait Machine {
    /// Bytes that a kernel reads or writes, at a multiple of 16.
    type Memory;
    fn upload(&self, bytes: &[u8]) -> Result<Self::Memory>;
    fn address(&self, memory: &mut Self::Memory) -> DeviceAddress;
    fn download(&self, memory: &Self::Memory) -> Result<Vec<u8>>;
    /// # Safety
    /// Those of `CudaBackend::enqueue`.
    unsafe fn enqueue<O: Op>(&self, shape: O::Shape, op: &O) -> Result<()>;
    /// The query blocks of a plan of `PlanKind::Spans` for this problem, as words; none where it has none.
    fn query_blocks(&self, planned: (&Problem, KvFormat, KvLayout)) -> Result<Vec<[i32; 4]>>;
    /// A launch of such a plan.
    ///
    /// # Safety
    /// Those of `attend_spans_on`.
    unsafe fn attend_spans(
        &self,
        planned: (&Problem, KvFormat, KvLayout),
        args: &DecodeArgs,
        to: &SpansArgs,
    ) -> Result<()>;
}

/// Format, head_dim, page_size, KV heads, number format.
const EXPORTS: [(&str, HeadDim, usize, usize, Dtype); 18] = [
    ("int8", HeadDim::same(128), 64, 2, Dtype::F32),
    ("int8", HeadDim::same(80), 32, 1, Dtype::F16),
    ("int4", HeadDim::same(128), 64, 2, Dtype::F32),
    ("int4", HeadDim::same(256), 16, 1, Dtype::Bf16),
    (
        "int4-r2-w4/int8-plain",
        HeadDim::same(192),
        64,
        2,
        Dtype::F32,
    ),
    ("int8/int4", HeadDim::same(96), 32, 2, Dtype::F32),
    ("int4-w0/int4-w4", HeadDim::same(128), 16, 1, Dtype::F16),
    ("int4-g4", HeadDim::same(128), 128, 1, Dtype::F32),
    ("int8-g32/int4-g2", HeadDim::same(64), 32, 2, Dtype::F32),
    ("int8-tensor", HeadDim::same(64), 16, 3, Dtype::F32),
    ("fp8/f16", HeadDim::same(80), 64, 2, Dtype::F32),
    ("bf16/fp8", HeadDim::same(128), 32, 1, Dtype::Bf16),
    ("int8", HeadDim { k: 192, v: 128 }, 64, 2, Dtype::Bf16),
    ("int4/int8", HeadDim { k: 64, v: 160 }, 32, 1, Dtype::F32),
    ("int4", HeadDim::same(512), 64, 1, Dtype::F16),
    ("int8/int4", HeadDim { k: 576, v: 512 }, 64, 1, Dtype::F32),
    (
        "int8-latents",
        HeadDim { k: 576, v: 512 },
        16,
        1,
        Dtype::Bf16,
    ),
    (
        "bf16-latents",
        HeadDim { k: 192, v: 128 },
        64,
        2,
        Dtype::F32,
    ),
];

/// Cached tokens of each sequence, and the range of each that is exported.
const RANGES: [(usize, std::ops::Range<usize>); 4] =
    [(5, 0..5), (200, 1..200), (131, 70..99), (64, 64..64)];

fn filled_cache(config: &CacheConfig) -> Result<KvCache> {
    let mut cache = CpuBackend::new().create_cache(config)?;
    let [k, v] = config.head_dim.both();
    // Latents are K alone.
    let v = if config.format.latents { 0 } else { v };
    let rows = [k, v].map(|dim| config.num_kv_heads * dim);
    for (b, (len, _)) in RANGES.iter().enumerate() {
        let [k, v] = [0, 1].map(|side| noise(70 + 2 * b as u64 + side as u64, len * rows[side]));
        cache.append(b, &k, &v)?;
    }
    Ok(cache)
}

fn export<M: Machine>(
    machine: &M,
    (name, head_dim, page_size, heads, dtype): (&str, HeadDim, usize, usize, Dtype),
) -> Result<()> {
    let format = name.parse()?;
    let of = Heads::new(heads, heads, head_dim);
    let mut config = CacheConfig::builder(format, of)
        .centres(false)
        .unit_tensor_scales()
        .sequences(RANGES.len())
        .max_len(200)
        .build();
    config.page_size = page_size;
    config.num_pages = RANGES.len() * config.pages_for(200);
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        scales.iter_mut().for_each(|scale| *scale = 0.02);
    }
    let (cache, layout) = (filled_cache(&config)?, config.layout()?);
    let tables = Tables::new(&cache, format.residual_slots(page_size, 1), 0);
    let (mut starts, mut firsts) = (vec![0i32], Vec::new());
    for (_, range) in &RANGES {
        firsts.push(range.start as i32);
        starts.push(starts[starts.len() - 1] + range.len() as i32);
    }
    let rows = head_dim.both().map(|dim| heads * dim);
    // Rows of another width than the tokens, so that a mistaken stride shows.
    let strides = [rows[0], rows[1] + 8];
    let (tokens, element) = (
        starts[RANGES.len()] as usize,
        numbers::bytes(dtype, &[0.0]).len(),
    );
    let none = vec![0u8; tokens * strides[0].max(strides[1]) * element];
    let [mut k, mut v] = [machine.upload(&none)?, machine.upload(&none)?];
    let at = |x: &[u8]| machine.upload(x);
    let mut inputs = [
        at(&padded(pool_of(&cache)?, &layout))?,
        at(bytemuck::cast_slice(&tables.pages))?,
        at(bytemuck::cast_slice(&tables.residuals))?,
        at(bytemuck::cast_slice(&tables.lens))?,
        at(bytemuck::cast_slice(&starts))?,
        at(bytemuck::cast_slice(&firsts))?,
        at(bytemuck::cast_slice(&config.k_tensor_scales))?,
        at(bytemuck::cast_slice(&config.v_tensor_scales))?,
    ];
    let [
        pool,
        page_table,
        residual_pages,
        kv_lens,
        row_starts,
        first_tokens,
        k_tensor_scales,
        v_tensor_scales,
    ] = inputs.each_mut().map(|memory| machine.address(memory));
    let some = |scales: &[f32], at| match scales {
        [] => DeviceAddress::NULL,
        _ => at,
    };
    let args = ExportArgs {
        rows: KvRows {
            k: machine.address(&mut k),
            v: machine.address(&mut v),
            dtype,
            k_token_stride: strides[0],
            v_token_stride: strides[1],
        },
        sequences: tables.sequences(
            padded_at(pool, &layout, config.num_pages),
            [page_table, residual_pages, kv_lens],
            [
                some(&config.k_tensor_scales, k_tensor_scales),
                some(&config.v_tensor_scales, v_tensor_scales),
            ],
        ),
        row_starts,
        first_tokens,
        batch: RANGES.len(),
        max_tokens: 199,
    };
    // SAFETY: the addresses are those of memory that lives until here, as large as `ExportArgs` asks; pages are those of the cache.
    unsafe { machine.enqueue(layout, &args) }?;
    let out = [machine.download(&k)?, machine.download(&v)?];
    for (b, (len, range)) in RANGES.iter().enumerate() {
        let sides = dequantize(
            &layout,
            &cache.read_back(b)?,
            *len,
            &config.k_tensor_scales,
            &config.v_tensor_scales,
        )?;
        for (side, want) in sides.iter().enumerate() {
            let got = &out[side];
            for t in range.clone() {
                let at = (starts[b] as usize + t - range.start) * strides[side] * element;
                let want = numbers::bytes(dtype, &want[t * rows[side]..][..rows[side]]);
                ensure!(
                    got[at..][..want.len()] == want,
                    "side {side}, sequence {b}, token {t}"
                );
            }
        }
    }
    Ok(())
}

/// Pairs in any order, some skipped, into pages that lie further apart.
fn copy_pages<M: Machine>(machine: &M) -> Result<()> {
    let (page_bytes, pages) = (20_016, 9);
    let (from_stride, to_stride) = (page_bytes, page_bytes + 48);
    let from: Vec<u8> = (0..pages * from_stride)
        .map(|i| ((i * 31) >> 3) as u8)
        .collect();
    let pairs: [[i64; 2]; 7] = [[3, 0], [8, 5], [-1, 1], [0, 8], [9, 2], [2, -1], [4, 9]];
    let mut memory = [
        machine.upload(&from)?,
        machine.upload(&vec![0; pages * to_stride])?,
        machine.upload(bytemuck::cast_slice(&pairs))?,
    ];
    let [from_at, to_at, pairs_at] = memory.each_mut().map(|memory| machine.address(memory));
    let args = CopyPagesArgs {
        from: Pages {
            at: from_at,
            stride: from_stride,
            num_pages: pages,
        },
        to: Pages {
            at: to_at,
            stride: to_stride,
            num_pages: pages,
        },
        page_bytes,
        pairs: pairs_at,
        num_pairs: pairs.len(),
    };
    // SAFETY: the addresses are those of memory that lives until here, as large as `Pages` says.
    unsafe { machine.enqueue((), &args) }?;
    let to = machine.download(&memory[1])?;
    for page in 0..pages {
        let source = pairs
            .iter()
            .find(|pair| pair[1] == page as i64 && (0..9).contains(&pair[0]));
        let (got, gap) = to[page * to_stride..][..to_stride].split_at(page_bytes);
        let is_right = match source {
            Some(pair) => got == &from[pair[0] as usize * from_stride..][..page_bytes],
            None => got.iter().all(|byte| *byte == 0),
        };
        ensure!(is_right && gap.iter().all(|byte| *byte == 0), "page {page}");
    }
    Ok(())
}

/// Rows that every state, some, one or none saw tokens of.
fn merge<M: Machine>(
    machine: &M,
    head_dim: usize,
    in_dtype: Dtype,
    out_dtype: Dtype,
) -> Result<()> {
    let (states, rows) = (6, 11);
    let (out_stride, lse_stride) = (rows * head_dim + 16, rows + 3);
    let mut outs = noise(5, states * out_stride);
    let mut lses: Vec<f32> = noise(6, states * lse_stride)
        .iter()
        .map(|x| 30.0 * x)
        .collect();
    for i in 0..states {
        for row in 0..rows {
            let is_empty = match row {
                0 => true,
                1 => i != 3,
                2 => i == 0 || i == 4,
                _ => false,
            };
            if is_empty {
                lses[i * lse_stride + row] = f32::NEG_INFINITY;
                // What an empty state's outputs are does not matter.
                outs[i * out_stride + row * head_dim] = 1e30;
            }
        }
    }
    let narrow = numbers::bytes(in_dtype, &outs);
    let outs = numbers::numbers(in_dtype, &narrow);
    let mut want = AttnState::empty(rows, head_dim)?;
    for i in 0..states {
        let mut out = outs[i * out_stride..][..rows * head_dim].to_vec();
        let lse = &lses[i * lse_stride..][..rows];
        for (row, lse) in out.chunks_exact_mut(head_dim).zip(lse) {
            if *lse == f32::NEG_INFINITY {
                row.fill(0.0);
            }
        }
        want.merge_state(&AttnState::new(head_dim, out, lse.to_vec())?)?;
    }
    let bytes = numbers::bytes(out_dtype, want.out());
    let mut memory = [
        machine.upload(&narrow)?,
        machine.upload(bytemuck::cast_slice(&lses))?,
        machine.upload(&vec![0; bytes.len()])?,
        machine.upload(&vec![0; 4 * rows])?,
    ];
    let [outs, lses, out, lse] = memory.each_mut().map(|memory| machine.address(memory));
    let args = MergeStatesArgs {
        outs,
        lses,
        out_stride,
        lse_stride,
        in_dtype,
        out,
        out_dtype,
        lse,
        states,
        rows,
        head_dim,
    };
    // SAFETY: the addresses are those of memory that lives until here, as large as `MergeStatesArgs` asks.
    unsafe { machine.enqueue((), &args) }?;
    ensure!(machine.download(&memory[2])? == bytes, "outputs");
    let lse = numbers::numbers(Dtype::F32, &machine.download(&memory[3])?);
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    ensure!(
        bits(&lse) == bits(want.lse()),
        "log-sum-exps {lse:?}, expected {:?}",
        want.lse()
    );
    Ok(())
}

/// A test.
#[derive(Debug, Clone, Copy)]
pub enum Test {
    CopyPages,
    Export((&'static str, HeadDim, usize, usize, Dtype)),
    /// head_dim, the states' number format and the result's.
    Merge(usize, Dtype, Dtype),
}

impl Test {
    /// A test for each kind.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Test::CopyPages];
        all.extend(EXPORTS.map(Test::Export));
        all.extend([
            Test::Merge(128, Dtype::F32, Dtype::F32),
            Test::Merge(80, Dtype::F16, Dtype::F16),
            Test::Merge(256, Dtype::Bf16, Dtype::F32),
            Test::Merge(192, Dtype::F32, Dtype::Bf16),
            Test::Merge(512, Dtype::Bf16, Dtype::Bf16),
            Test::Merge(576, Dtype::F32, Dtype::F32),
        ]);
        all
    }

    pub fn name(self) -> String {
        match self {
            Test::CopyPages => "copies of pages".to_owned(),
            Test::Export((format, head_dim, page_size, heads, dtype)) => {
                format!(
                    "export, {format}, head_dim {head_dim}, pages of {page_size}, {heads} KV heads, {dtype:?}"
                )
            }
            Test::Merge(head_dim, from, to) => {
                format!("merge of states, head_dim {head_dim}, {from:?} to {to:?}")
            }
        }
    }

    pub fn run<M: Machine>(self, machine: &M) -> Result<()> {
        match self {
            Test::CopyPages => copy_pages(machine),
            Test::Export(kind) => export(machine, kind),
            Test::Merge(head_dim, from, to) => merge(machine, head_dim, from, to),
        }
    }
}
