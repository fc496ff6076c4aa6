//! A lost device: every call says so, and nothing is changed.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use attn_conformance::trials::Trials;
use attn_core::{
    Append, CacheConfig, DecodeAttention, DecodeStep, Error, Heads, Int8Scale, KvCache, KvFormat,
    KvSource, KvView, Plan, Problem, Scheme, StridedRows, Unsupported,
};
use attn_wgpu::{DeviceView, SideRows, WgpuBackend, WgpuError, wgpu};
use wgpu::BufferUsages as Usage;

const HEADS: usize = 2;
const DIM: usize = 64;
const PLAIN: KvFormat = KvFormat::same(Scheme::Int8(Int8Scale::Token));
const ROW: usize = HEADS * DIM;

/// A backend of the test's own, whose device it destroys.
fn open() -> WgpuBackend {
    WgpuBackend::open().expect("an adapter that was opened before")
}

fn buffer(backend: &WgpuBackend, size: usize) -> wgpu::Buffer {
    let device = backend.wgpu_device();
    device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: size as u64,
        usage: Usage::STORAGE | Usage::COPY_DST,
        mapped_at_creation: false,
    })
}

fn encoder(backend: &WgpuBackend) -> wgpu::CommandEncoder {
    let device = backend.wgpu_device();
    device.create_command_encoder(&Default::default())
}

/// The refusal is of a lost device, and says what to do.
fn is_lost<T>(call: &str, refused: Result<T, Error>) {
    let error = match refused {
        Ok(_) => panic!("{call} succeeded on a lost device"),
        Err(error) => error,
    };
    let Error::Device { source, .. } = &error else {
        panic!("{call}: {error:?}");
    };
    let lost = source.downcast_ref::<WgpuError>();
    assert!(
        matches!(lost, Some(WgpuError::Lost(_))),
        "{call}: {source:?}"
    );
    let text = source.to_string();
    for part in ["the device is lost", "open the backend again", "restore"] {
        assert!(text.contains(part), "{call}: {text}");
    }
}

fn every_call_on_a_lost_device_says_that_it_is_lost() {
    let backend = open();
    let config = CacheConfig::builder(KvFormat::INT4, Heads::new(HEADS, HEADS, DIM))
        .centres(false)
        .sequences(3)
        .max_len(100)
        .build();
    let mut cache = backend.create_cache(&config).unwrap();
    let tokens = vec![0.5; 10 * ROW];
    let long = vec![0.5; 60 * ROW];
    cache.append(0, &tokens, &tokens).unwrap();
    let pages = cache.read_back(0).unwrap();
    let (table, free) = (cache.table().clone(), cache.free_pages());
    let problem = Problem::new(Heads::new(HEADS, HEADS, DIM), vec![10]);
    let step = backend.prepare(&problem, &cache).unwrap();
    let k = buffer(&backend, 4096);
    let rows = SideRows {
        codes: &k,
        codes_at: 0,
        code_strides: [0; 3],
        scales: Some(&k),
        scales_at: 0,
        scale_strides: [0; 3],
    };
    let view = DeviceView {
        format: PLAIN,
        k: rows,
        v: rows,
        k_tensor_scales: &[],
        v_tensor_scales: &[],
    };
    let mut encoder = encoder(&backend);

    let page = vec![0; cache.layout().page_bytes()];
    backend.wgpu_device().destroy();
    is_lost("create_cache", backend.create_cache(&config));
    is_lost("append", cache.append(0, &tokens, &tokens));
    // These need another page, a residual page and both.
    is_lost("a long append", cache.append(0, &long, &long));
    is_lost("a first append", cache.append(1, &tokens, &tokens));
    cache.fork(0, 2).unwrap();
    is_lost("an append that copies", cache.append(2, &tokens, &tokens));
    cache.free_sequence(2).unwrap();
    is_lost("read_back", cache.read_back(0));
    is_lost("write_page", cache.write_page(0, &page));
    is_lost("restore", cache.restore_pages(2, 10, &pages));
    is_lost("prepare", backend.prepare(&problem, &cache));
    is_lost("prepare_view", backend.prepare_view(&problem, &view));
    is_lost("record", backend.record(&mut encoder, &step, &k, &k, &k));
    for tokens in [0, 4, 8] {
        let appended = backend.record_append(
            &mut encoder,
            &mut cache,
            &[Append {
                sequence: 0,
                tokens,
            }],
            &k,
            &k,
        );
        is_lost("record_append", appended);
    }
    is_lost("check_arithmetic", backend.check_arithmetic());
    is_lost("read_kernel", attn_wgpu::internals::read_kernel(&backend));
    is_lost(
        "products_kernel",
        attn_wgpu::internals::products_kernel(&backend),
    );
    assert_eq!((cache.table(), cache.free_pages()), (&table, free));
    // What is gone is the device: the sequence can be given up, and its pages are free again.
    cache.free_sequence(0).unwrap();
    assert_eq!(cache.free_pages(), config.num_pages);
}

/// Decodes with other values in the outputs, which a refusal keeps.
fn decodes_nothing(call: &str, backend: &WgpuBackend, plan: &Plan, kv: KvSource<'_>) {
    let problem = plan.problem();
    let q = vec![1.0; problem.rows() * DIM];
    let (mut out, mut lse) = (vec![7.0; q.len()], vec![7.0; problem.rows()]);
    let mut step = DecodeStep::new(plan, &q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .unwrap();
    is_lost(call, backend.decode(&mut step));
    assert!(out.iter().chain(&lse).all(|x| *x == 7.0), "{call}");
}

fn a_decode_on_a_lost_device_writes_nothing() {
    let backend = open();
    let config = CacheConfig::builder(PLAIN, Heads::new(HEADS, HEADS, DIM))
        .centres(false)
        .sequences(1)
        .max_len(100)
        .build();
    let mut cache: KvCache = backend.create_cache(&config).unwrap();
    let tokens = vec![0.5; 10 * ROW];
    cache.append(0, &tokens, &tokens).unwrap();
    let problem = Problem::new(Heads::new(HEADS, HEADS, DIM), vec![10]);
    let (codes, scales) = (vec![1; 10 * ROW], vec![0x3c00; 10 * HEADS]);
    // Strides that the kernels load in place, and others, which are imported as pages.
    let [mut whole, mut odd] = [StridedRows::bsnh(&codes, &scales, HEADS, 10, DIM, 1); 2];
    (whole.code_strides[0], odd.code_strides[0]) = (0, 1);
    let views =
        [whole, odd].map(|rows| KvView::new(&problem, PLAIN, rows, rows, [&[], &[]]).unwrap());
    let plan = backend.plan(&problem, PLAIN).unwrap();
    backend.wgpu_device().destroy();
    decodes_nothing("decode", &backend, &plan, KvSource::Cache(&cache));
    for view in &views {
        decodes_nothing("decode of a view", &backend, &plan, KvSource::View(view));
    }
    is_lost("plan", backend.plan(&problem, PLAIN).map(drop));
}

fn a_device_lost_with_work_under_way_is_lost_at_once() {
    let backend = open();
    let config = CacheConfig::builder(KvFormat::INT8, Heads::new(HEADS, HEADS, DIM))
        .centres(false)
        .sequences(1)
        .max_len(1 << 16)
        .build();
    let mut cache = backend.create_cache(&config).unwrap();
    let k = buffer(&backend, (4 * ROW) << 15);
    let mut encoder = encoder(&backend);
    backend
        .record_append(
            &mut encoder,
            &mut cache,
            &[Append {
                sequence: 0,
                tokens: 1 << 15,
            }],
            &k,
            &k,
        )
        .unwrap();
    backend.wgpu_queue().submit([encoder.finish()]);
    backend.wgpu_device().destroy();
    is_lost("create_cache", backend.create_cache(&config));
    is_lost("read_back", cache.read_back(0));
}

fn a_callers_device_keeps_its_callback_and_is_refused_when_lost() {
    let owner = open();
    let handles = || (owner.wgpu_device().clone(), owner.wgpu_queue().clone());
    let told = Arc::new(AtomicBool::new(false));
    let tell = told.clone();
    owner
        .wgpu_device()
        .set_device_lost_callback(move |_, _| tell.store(true, Ordering::SeqCst));
    let (device, queue) = handles();
    let backend = WgpuBackend::with_device(device, queue).unwrap();
    owner.wgpu_device().destroy();
    let config = CacheConfig::builder(KvFormat::INT8, Heads::new(HEADS, HEADS, DIM))
        .centres(false)
        .sequences(1)
        .max_len(100)
        .build();
    is_lost("create_cache", backend.create_cache(&config));
    is_lost("the owner's create_cache", owner.create_cache(&config));
    let (device, queue) = handles();
    let refused = WgpuBackend::with_device(device, queue).map(|_| ());
    match refused {
        Err(Unsupported::Absent { reason, .. }) => assert!(reason.contains("lost"), "{reason}"),
        other => panic!("{other:?}"),
    }
    let waited = wgpu::PollType::wait_indefinitely();
    owner.wgpu_device().poll(waited).unwrap();
    assert!(told.load(Ordering::SeqCst));
}

/// Adds the tests of this file.
pub fn add(trials: Trials<WgpuBackend>) -> Trials<WgpuBackend> {
    trials
        .test(
            "lost: every call on a lost device says that it is lost",
            |_| every_call_on_a_lost_device_says_that_it_is_lost(),
        )
        .test("lost: a decode on a lost device writes nothing", |_| {
            a_decode_on_a_lost_device_writes_nothing()
        })
        .test(
            "lost: a device lost with work under way is lost at once",
            |_| a_device_lost_with_work_under_way_is_lost_at_once(),
        )
        .test(
            "lost: a callers device keeps its callback and is refused when lost",
            |_| a_callers_device_keeps_its_callback_and_is_refused_when_lost(),
        )
}
