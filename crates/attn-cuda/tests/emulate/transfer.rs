//! What moves cached tokens and results: exports to rows of floats, copies of pages, merges of states; each must be the CPU's, bit for bit.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use attn_conformance::case::noise;
use attn_core::{
    AttnState, CacheConfig, DecodeAttention, Heads, HostPages, KvCache, convert::dequantize,
};
use attn_cpu::CpuBackend;
use attn_cuda::{
    internals::{
        copy_pages_grid, copy_pages_params, export_grid, export_params, merge_states_grid,
        merge_states_params,
    },
    native::{CopyPagesArgs, DeviceAddress, Dtype, ExportArgs, MergeStatesArgs, Pages},
};
use attn_kernels::cuda::Instance;
use libtest_mimic::Trial;

use crate::{Kernels, address, numbers};

/// Format, head_dim, page_size, KV heads, number format.
const EXPORTS: [(&str, usize, usize, usize, Dtype); 12] = [
    ("int8", 128, 64, 2, Dtype::F32),
    ("int8", 80, 32, 1, Dtype::F16),
    ("int4", 128, 64, 2, Dtype::F32),
    ("int4", 256, 16, 1, Dtype::Bf16),
    ("int4-r2-w4/int8-plain", 192, 64, 2, Dtype::F32),
    ("int8/int4", 96, 32, 2, Dtype::F32),
    ("int4-w0/int4-w4", 128, 16, 1, Dtype::F16),
    ("int4-g4", 128, 128, 1, Dtype::F32),
    ("int8-g32/int4-g2", 64, 32, 2, Dtype::F32),
    ("int8-tensor", 64, 16, 3, Dtype::F32),
    ("fp8/f16", 80, 64, 2, Dtype::F32),
    ("bf16/fp8", 128, 32, 1, Dtype::Bf16),
];

/// Cached tokens of each sequence, and the range of each that is exported.
const RANGES: [(usize, std::ops::Range<usize>); 4] =
    [(5, 0..5), (200, 1..200), (131, 70..99), (64, 64..64)];

/// Words of zeros, so that vectors are loaded and stored at multiples of their size.
fn zeros(bytes: usize) -> Vec<u128> {
    vec![0; bytes.div_ceil(16)]
}

fn aligned(bytes: &[u8]) -> Vec<u128> {
    let mut words = zeros(bytes.len());
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

fn pool_of(cache: &KvCache) -> Result<&[u8]> {
    let pages = cache.store().as_any().downcast_ref::<HostPages>();
    Ok(pages.context("the CPU's pages lie in host memory")?.pool())
}

fn filled_cache(config: &CacheConfig) -> Result<KvCache> {
    let mut cache = CpuBackend::new().create_cache(config)?;
    let row = config.num_kv_heads * config.head_dim;
    for (b, (len, _)) in RANGES.iter().enumerate() {
        let [k, v] = [0, 1].map(|side| noise(70 + 2 * b as u64 + side, len * row));
        cache.append(b, &k, &v)?;
    }
    Ok(cache)
}

fn export(
    kernels: &Kernels,
    (name, head_dim, page_size, heads, dtype): (&str, usize, usize, usize, Dtype),
) -> Result<()> {
    let format = name.parse()?;
    let of = Heads {
        q: heads,
        kv: heads,
        dim: head_dim,
    };
    let mut config = CacheConfig::builder(format, of)
        .sequences(RANGES.len())
        .max_len(200)
        .build();
    config.page_size = page_size;
    config.num_pages = RANGES.len() * config.pages_for(200);
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        scales.iter_mut().for_each(|scale| *scale = 0.02);
    }
    let (cache, layout) = (filled_cache(&config)?, config.layout()?);
    let table = cache.table();
    let slots = format.residual_slots(page_size, 1);
    let stride = table.pages.iter().map(Vec::len).max().unwrap_or(0);
    let (mut pages, mut residuals) = (
        vec![u32::MAX; RANGES.len() * stride],
        vec![u32::MAX; RANGES.len() * slots.max(1)],
    );
    for (b, list) in table.pages.iter().enumerate() {
        pages[b * stride..][..list.len()].copy_from_slice(list);
        let kept = &table.residual_pages[b];
        for (i, page) in kept.iter().enumerate() {
            residuals[b * slots + (list.len() - kept.len() + i) % slots] = *page;
        }
    }
    let lens: Vec<i32> = table.lens.iter().map(|len| *len as i32).collect();
    let (mut starts, mut firsts) = (vec![0i32], Vec::new());
    for (_, range) in &RANGES {
        firsts.push(range.start as i32);
        starts.push(starts[starts.len() - 1] + range.len() as i32);
    }
    let row = heads * head_dim;
    // Rows of another width than the tokens, so that a mistaken stride shows.
    let strides = [row, row + 8];
    let (tokens, element) = (
        starts[RANGES.len()] as usize,
        numbers::bytes(dtype, &[0.0]).len(),
    );
    let mut out = strides.map(|stride| zeros(tokens * stride * element));
    let pool = aligned(pool_of(&cache)?);
    let some = |scales: &[f32]| match scales {
        [] => DeviceAddress::NULL,
        scales => address(scales),
    };
    let args = ExportArgs {
        k: DeviceAddress::new(out[0].as_mut_ptr() as u64),
        v: DeviceAddress::new(out[1].as_mut_ptr() as u64),
        dtype,
        k_token_stride: strides[0],
        v_token_stride: strides[1],
        pool: address(&pool),
        page_table: address(&pages),
        page_table_stride: stride,
        residual_pages: address(&residuals),
        residual_slots: slots,
        kv_lens: address(&lens),
        row_starts: address(&starts),
        first_tokens: address(&firsts),
        k_tensor_scales: some(&config.k_tensor_scales),
        v_tensor_scales: some(&config.v_tensor_scales),
        batch: RANGES.len(),
        max_tokens: 199,
    };
    let instance = Instance::Export {
        format,
        head_dim,
        page_size,
    };
    let (grid, threads) = export_grid(&layout, args.batch, args.max_tokens);
    // SAFETY: export.cu takes an ExportParams; its addresses are those of memory that lives until here, as large as `ExportArgs` asks.
    unsafe { kernels.run(&instance, &export_params(&args, &layout)?, grid, threads) }?;
    for (b, (len, range)) in RANGES.iter().enumerate() {
        let sides = dequantize(
            &layout,
            &cache.read_back(b)?,
            *len,
            &config.k_tensor_scales,
            &config.v_tensor_scales,
        )?;
        for (side, want) in sides.iter().enumerate() {
            let got: &[u8] = bytemuck::cast_slice(&out[side]);
            for t in range.clone() {
                let at = (starts[b] as usize + t - range.start) * strides[side] * element;
                let want = numbers::bytes(dtype, &want[t * row..][..row]);
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
fn copy_pages(kernels: &Kernels) -> Result<()> {
    let (page_bytes, pages) = (20_016, 9);
    let (from_stride, to_stride) = (page_bytes, page_bytes + 48);
    let from: Vec<u8> = (0..pages * from_stride)
        .map(|i| (i * 31 >> 3) as u8)
        .collect();
    let (from, mut to) = (aligned(&from), zeros(pages * to_stride));
    let pairs: [[i64; 2]; 7] = [[3, 0], [8, 5], [-1, 1], [0, 8], [9, 2], [2, -1], [4, 9]];
    let args = CopyPagesArgs {
        from: Pages {
            at: address(&from),
            stride: from_stride,
            num_pages: pages,
        },
        to: Pages {
            at: DeviceAddress::new(to.as_mut_ptr() as u64),
            stride: to_stride,
            num_pages: pages,
        },
        page_bytes,
        pairs: address(&pairs),
        num_pairs: pairs.len(),
    };
    let (grid, threads) = copy_pages_grid(&args);
    // SAFETY: copy_pages.cu takes a CopyPagesParams; its addresses are those of memory that lives until here, as large as `Pages` says.
    unsafe {
        kernels.run(
            &Instance::CopyPages,
            &copy_pages_params(&args)?,
            grid,
            threads,
        )
    }?;
    let [from, to]: [&[u8]; 2] = [bytemuck::cast_slice(&from), bytemuck::cast_slice(&to)];
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
fn merge(kernels: &Kernels, head_dim: usize, in_dtype: Dtype, out_dtype: Dtype) -> Result<()> {
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
    let narrow = aligned(&numbers::bytes(in_dtype, &outs));
    let outs = numbers::numbers(in_dtype, bytemuck::cast_slice(&narrow));
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
    let (mut out, mut lse) = (zeros(bytes.len()), vec![0f32; rows]);
    let args = MergeStatesArgs {
        outs: address(&narrow),
        lses: address(&lses),
        out_stride,
        lse_stride,
        in_dtype,
        out: DeviceAddress::new(out.as_mut_ptr() as u64),
        out_dtype,
        lse: DeviceAddress::new(lse.as_mut_ptr() as u64),
        states,
        rows,
        head_dim,
    };
    let (grid, threads) = merge_states_grid(rows);
    // SAFETY: merge_states.cu takes a MergeStatesParams; its addresses are those of memory that lives until here, as large as
    // `MergeStatesArgs` asks.
    unsafe {
        kernels.run(
            &Instance::MergeStates,
            &merge_states_params(&args)?,
            grid,
            threads,
        )
    }?;
    let got: &[u8] = bytemuck::cast_slice(&out);
    ensure!(got[..bytes.len()] == bytes, "outputs");
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    ensure!(
        bits(&lse) == bits(want.lse()),
        "log-sum-exps {lse:?}, expected {:?}",
        want.lse()
    );
    Ok(())
}

/// A test for each kind.
pub fn trials(kernels: &Arc<Kernels>) -> Vec<Trial> {
    type Run = Box<dyn FnOnce(&Kernels) -> Result<()> + Send>;
    let mut all: Vec<(String, Run)> = vec![("copies of pages".to_owned(), Box::new(copy_pages))];
    for kind in EXPORTS {
        let (name, head_dim, page_size, heads, dtype) = kind;
        let name = format!(
            "export, {name}, head_dim {head_dim}, pages of {page_size}, {heads} KV heads, {dtype:?}"
        );
        all.push((name, Box::new(move |kernels| export(kernels, kind))));
    }
    for (head_dim, from, to) in [
        (128, Dtype::F32, Dtype::F32),
        (80, Dtype::F16, Dtype::F16),
        (256, Dtype::Bf16, Dtype::F32),
        (192, Dtype::F32, Dtype::Bf16),
    ] {
        let name = format!("merge of states, head_dim {head_dim}, {from:?} to {to:?}");
        all.push((
            name,
            Box::new(move |kernels| merge(kernels, head_dim, from, to)),
        ));
    }
    let trial = |(name, run): (String, Run)| {
        let kernels = kernels.clone();
        Trial::test(name, move || {
            run(&kernels).map_err(|error| format!("{error:#}").into())
        })
    };
    all.into_iter().map(trial).collect()
}
