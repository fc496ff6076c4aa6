//! An engine's decode loop: own stream, own buffers, one CUDA graph of append and decode, replayed while sequences grow.
//!
//! `cargo run --release -p attn-cuda --example engine`

use std::error::Error;

use attn_core::{CacheConfig, Heads, KvFormat, Problem};
use attn_cuda::{
    CudaBackend,
    native::{
        AppendArgs, AppendShape, DecodeArgs, DeviceAddress, DeviceKv, Dtype, KvLayout, KvRows,
        PagedSequences, Pages, Stream,
    },
};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, sys};

const BATCH: usize = 4;
const Q_HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const PAGE_SIZE: usize = 64;
const MAX_LEN: usize = 4096;
const STEPS: i32 = 1000;

fn main() -> Result<(), Box<dyn Error>> {
    let gpu = match CudaBackend::open() {
        Ok(gpu) => gpu,
        Err(reason) => {
            println!("{reason}");
            return Ok(());
        }
    };
    // The engine's own stream and memory, here by cudarc: any other binding serves, as only handles are passed. The context is the device's
    // primary one, as the backend's is.
    let context = CudaContext::new(0)?;
    // SAFETY: every slice below is used on one stream.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;

    // Once: what is stored, and the longest lengths to come.
    let format = KvFormat::INT4;
    let mut config = CacheConfig::builder(format, Heads::new(KV_HEADS, KV_HEADS, HEAD_DIM))
        .sequences(BATCH)
        .max_len(MAX_LEN)
        .build();
    config.page_size = PAGE_SIZE;
    let append = gpu.prepare_op(AppendShape {
        layout: config.layout()?,
        rotary: false,
    })?;
    let problem = Problem::new(
        Heads::new(Q_HEADS, KV_HEADS, HEAD_DIM),
        vec![MAX_LEN; BATCH],
    );
    let plan = gpu.prepare(&problem, format, KvLayout::Pages(PAGE_SIZE))?;

    // The engine's memory. Which page belongs to whom is the engine's business: here sequence b has pages b, b + BATCH, …
    let pages = MAX_LEN / PAGE_SIZE;
    let table: Vec<u32> = (0..BATCH * pages)
        .map(|i| (i / pages + i % pages * BATCH) as u32)
        .collect();
    // Behind the home pages, those of the residuals: as many for each sequence as the format keeps, in slots.
    let slots = format.residual_slots(PAGE_SIZE, 1);
    let residuals: Vec<u32> = (0..BATCH * slots)
        .map(|i| (BATCH * pages + i) as u32)
        .collect();
    let pool: CudaSlice<u8> =
        stream.alloc_zeros(config.num_pages * config.layout()?.page_bytes())?;
    let workspace: CudaSlice<u8> = stream.alloc_zeros(plan.workspace_bytes())?;
    let page_table = stream.clone_htod(&table)?;
    let residual_table = match slots {
        0 => None,
        _ => Some(stream.clone_htod(&residuals)?),
    };
    let residual_pages = match &residual_table {
        None => DeviceAddress::NULL,
        Some(table) => at(table, &stream),
    };
    let mut kv_lens = stream.clone_htod(&[0i32; BATCH])?;
    let mut k: CudaSlice<f32> = stream.alloc_zeros(BATCH * KV_HEADS * HEAD_DIM)?;
    let mut v: CudaSlice<f32> = stream.alloc_zeros(BATCH * KV_HEADS * HEAD_DIM)?;
    let q: CudaSlice<f32> = stream.alloc_zeros(BATCH * Q_HEADS * HEAD_DIM)?;
    let out: CudaSlice<f32> = stream.alloc_zeros(BATCH * Q_HEADS * HEAD_DIM)?;
    let lse: CudaSlice<f32> = stream.alloc_zeros(BATCH * Q_HEADS)?;

    let sequences = PagedSequences {
        pool: Pages::new(at(&pool, &stream), &config.layout()?, config.num_pages),
        page_table: at(&page_table, &stream),
        page_table_stride: pages,
        residual_pages,
        residual_slots: slots,
        kv_lens: at(&kv_lens, &stream),
        tensor_scales: [DeviceAddress::NULL; 2],
    };
    let append_args = AppendArgs {
        rows: KvRows {
            k: at(&k, &stream),
            v: at(&v, &stream),
            dtype: Dtype::F32,
            k_token_stride: KV_HEADS * HEAD_DIM,
            v_token_stride: KV_HEADS * HEAD_DIM,
        },
        sequences,
        batch: BATCH,
        tokens: 1,
        rotary: None,
    };
    let [q_at, out_at] = [at(&q, &stream), at(&out, &stream)];
    let (kv, workspace_at) = (DeviceKv::Paged(sequences), at(&workspace, &stream));
    let decode_args = DecodeArgs {
        lse: at(&lse, &stream),
        ..DecodeArgs::new(q_at, out_at, Dtype::F32, kv, workspace_at)
    };

    // Captured once. Lengths are read on the device, so every replay decodes what has been appended by then.
    stream.synchronize()?;
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    // SAFETY: every buffer above is as long as documented and outlives the graph; pages and residual pages are in the pool and
    // belong to one sequence each; lengths stay within MAX_LEN.
    // The workspace was allocated zeroed and is this plan's alone.
    unsafe {
        gpu.append_decode_on(
            &append,
            &plan,
            Stream::from_raw(stream.cu_stream().cast()),
            &append_args,
            &decode_args,
        )
    }?;
    let graph = stream
        .end_capture(
            sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH,
        )?
        .ok_or("the capture gave no graph")?;

    for step in 1..=STEPS {
        // The model's layers write these on the device; here every token is (step, 1).
        stream.memcpy_htod(&vec![step as f32; k.len()], &mut k)?;
        stream.memcpy_htod(&vec![1.0f32; v.len()], &mut v)?;
        stream.memcpy_htod(&[step; BATCH], &mut kv_lens)?;
        graph.launch()?;
    }
    let (out, lse) = (stream.clone_dtoh(&out)?, stream.clone_dtoh(&lse)?);
    stream.synchronize()?;
    // A zero query weighs every token alike: V is 1 everywhere, and so is the output; lse is the logarithm of their number.
    println!(
        "{STEPS} steps of {BATCH} sequences: out[0] = {}, lse[0] = {} (ln {STEPS} = {})",
        out[0],
        lse[0],
        (STEPS as f32).ln()
    );
    Ok(())
}

fn at<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> DeviceAddress {
    DeviceAddress::new(slice.device_ptr(stream).0)
}
