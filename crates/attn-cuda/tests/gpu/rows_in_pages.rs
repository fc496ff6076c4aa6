//! Rows of another engine's paged cache, read in place: the bits of the contiguous cache of the same rows.

use anyhow::{Result, bail};
use attn_bench::cuda::Buffers;
use attn_conformance::{
    Build, Case,
    check::{decode_rows, first_difference},
    trials::Trials,
};
use attn_core::{Error, KvFormat, KvSource};
use attn_cuda::{
    CudaBackend, CudaError, Options,
    internals::context,
    native::{DecodeArgs, DeviceAddress, Dtype, KvLayout},
};

use cudarc::driver::CudaSlice;

use crate::{paged_rows::PagedRows, passes};

/// Lengths around a tile, many spans, none; and few long ones, whose work low_latency.cu divides.
const LENS: [&[usize]; 2] = [&[1, 63, 64, 65, 700, 2100, 0, 130], &[3000]];

fn case(format: KvFormat, dim: usize, q_len: usize, lens: &[usize]) -> Case {
    let mut case = Case::new([8, 2], dim, lens, format);
    case.problem.q_lens = vec![q_len; lens.len()];
    case.build = Build::Bsnh;
    case
}

/// Enqueues the case with its rows in pages, and gives outputs and log-sum-exps. `last_page` takes the place of the last entry of the table.
fn decode(
    gpu: &CudaBackend,
    case: &Case,
    (page_size, heads_first): (usize, bool),
    last_page: Option<u32>,
) -> Result<[Vec<f32>; 2]> {
    let buffers = Buffers::new(context(gpu))?;
    let (problem, contiguous) = (&case.problem, case.contiguous());
    let view = contiguous.view(problem)?;
    let mut rows = PagedRows::new(&view, problem, page_size, heads_first);
    if let (Some(page), Some(last)) = (last_page, rows.table.last_mut()) {
        *last = page;
    }
    let plan = gpu.prepare(problem, case.format, KvLayout::PagedRows(page_size))?;
    let [k, v] = [
        buffers.upload(&rows.codes[0])?,
        buffers.upload(&rows.codes[1])?,
    ];
    let scales = |side: usize| match &rows.scales[side][..] {
        [] => buffers.upload(&[0]),
        scales => buffers.upload(scales),
    };
    let [k_scales, v_scales] = [scales(0)?, scales(1)?];
    let table = buffers.upload(&rows.table)?;
    let tensor_scales = |scales: &[f32]| match scales {
        [] => Ok(None),
        scales => buffers.upload(scales).map(Some),
    };
    let [of_k, of_v] = [
        tensor_scales(view.k_tensor_scales())?,
        tensor_scales(view.v_tensor_scales())?,
    ];
    let given = |scales: &Option<CudaSlice<f32>>| {
        let at = scales.as_ref().map(|scales| buffers.address(scales));
        at.unwrap_or_default()
    };
    let lens: Vec<i32> = problem.kv_lens.iter().map(|&len| len as i32).collect();
    let (lens, q) = (buffers.upload(&lens)?, buffers.upload(&case.q())?);
    let (out, lse) = (
        buffers.floats(case.q().len())?,
        buffers.floats(problem.rows())?,
    );
    let workspace = buffers.bytes(plan.workspace_bytes())?;
    let args = DecodeArgs {
        q: buffers.address(&q),
        out: buffers.address(&out),
        dtype: Dtype::F32,
        lse: buffers.address(&lse),
        kv: rows.kv(
            [buffers.address(&k), buffers.address(&v)],
            [buffers.address(&k_scales), buffers.address(&v_scales)],
            [buffers.address(&table), buffers.address(&lens)],
            [given(&of_k), given(&of_v)],
        ),
        query_blocks: DeviceAddress::NULL,
        alibi_slopes: DeviceAddress::NULL,
        sinks: DeviceAddress::NULL,
        workspace: buffers.address(&workspace),
        scratch: DeviceAddress::NULL,
    };
    // SAFETY: the buffers have the sizes of the problem and of the pages, live until the downloads, and were zeroed by their allocation; one
    // stream; where a page is not in the pool, the backend checks the table before it launches.
    unsafe { gpu.decode_on(&plan, buffers.raw(), &args) }?;
    Ok([buffers.download(&out)?, buffers.download(&lse)?])
}

fn equals_contiguous(gpu: &CudaBackend, format: KvFormat) -> Result<()> {
    for (i, page_size) in [16, 32, 64, 128].into_iter().enumerate() {
        for (lens, q_len, dim) in [(0, 1, 128), (0, 3, 64), (1, 1, 128), (1, 2, 128)] {
            let case = case(format, dim, q_len, LENS[lens]);
            let contiguous = case.contiguous();
            let view = contiguous.view(&case.problem)?;
            let (out, lse) = decode_rows(gpu, &case, &case.q(), KvSource::View(&view))?;
            let heads_first = (i + q_len) % 2 == 0;
            let got = decode(gpu, &case, (page_size, heads_first), None)?;
            let found = first_difference("out", &got[0], &out)
                .or_else(|| first_difference("lse", &got[1], &lse));
            if let Some(text) = found {
                bail!("{case}, rows in pages of {page_size}: {text}");
            }
        }
    }
    Ok(())
}

/// A page that the pool lacks is found on the device, before anything reads it.
fn a_page_outside_the_pool_is_found() -> Result<()> {
    let gpu = CudaBackend::with_options(&Options::default().check(true))?;
    let case = case("bf16".parse()?, 128, 1, &[700]);
    decode(&gpu, &case, (64, false), None)?;
    for page in [11, u32::MAX] {
        let error = match decode(&gpu, &case, (64, false), Some(page)) {
            Ok(_) => bail!("page {page} of 11 was read"),
            Err(error) => error,
        };
        let Some(Error::Device { source, .. }) = error.downcast_ref() else {
            bail!("another error: {error:#}");
        };
        let found = source.downcast_ref();
        if !matches!(
            found,
            Some(CudaError::Check {
                what: "page_table",
                ..
            })
        ) {
            bail!("another error: {source}");
        }
    }
    Ok(())
}

/// Adds a trial for each format that rows have, and one for a bad table.
pub fn add(mut trials: Trials<CudaBackend>) -> Trials<CudaBackend> {
    for format in [
        "bf16",
        "f16",
        "fp8",
        "int8-plain",
        "int8-g32",
        "int8-tensor",
        "fp8/bf16",
    ] {
        trials = trials.test(format!("native: rows in pages, {format}"), move |gpu| {
            let format = format.parse().map_err(anyhow::Error::from);
            passes(format.and_then(|format| equals_contiguous(gpu, format)));
        });
    }
    trials.test("native: rows in pages, a page outside the pool", |_| {
        passes(a_page_outside_the_pool_is_found());
    })
}
