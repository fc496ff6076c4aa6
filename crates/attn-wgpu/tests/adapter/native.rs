//! The native entry: appends and a step in one encoder of the caller's, from and into the caller's buffers.

use attn_conformance::{noise, trials::Trials};
use attn_core::{
    Append, CacheConfig, DecodeAttention, DecodeStep, Error, Heads, Int8Scale, KvCache, KvFormat,
    KvSource, KvView, Problem, Scheme, StridedRows, Unsupported,
};
use attn_cpu::{CpuBackend, Reference};
use attn_wgpu::{DeviceView, SideRows, WgpuBackend, WgpuError, wgpu};
use wgpu::BufferUsages as Usage;

const HEADS: [usize; 2] = [6, 2];
const DIM: usize = 80;

/// Deterministic numbers in -1..1, some rows of them large, some zero.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let scaled = |i: usize| noise::at(seed.into(), i) * [1.0, 0.0, 3e4, 1e-6, 1.0][i / DIM % 5];
    (0..n).map(scaled).collect()
}

pub fn buffer(backend: &WgpuBackend, bytes: u64, usage: Usage) -> wgpu::Buffer {
    backend
        .wgpu_device()
        .create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes,
            usage,
            mapped_at_creation: false,
        })
}

pub fn upload(backend: &WgpuBackend, x: &[f32]) -> wgpu::Buffer {
    let usage = Usage::STORAGE | Usage::COPY_DST;
    let buffer = buffer(backend, 4 * x.len() as u64, usage);
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    backend.wgpu_queue().write_buffer(&buffer, 0, &bytes);
    buffer
}

pub fn download(backend: &WgpuBackend, from: &wgpu::Buffer) -> Vec<u32> {
    let staging = buffer(backend, from.size(), Usage::MAP_READ | Usage::COPY_DST);
    let mut encoder = backend
        .wgpu_device()
        .create_command_encoder(&Default::default());
    encoder.copy_buffer_to_buffer(from, 0, &staging, 0, from.size());
    backend.wgpu_queue().submit([encoder.finish()]);
    staging.map_async(wgpu::MapMode::Read, .., |outcome| outcome.unwrap());
    let wait = wgpu::PollType::wait_indefinitely();
    backend.wgpu_device().poll(wait).unwrap();
    let view = staging.get_mapped_range(..).unwrap();
    let words = view.chunks_exact(4);
    words
        .map(|w| u32::from_le_bytes(w.try_into().unwrap()))
        .collect()
}

/// Appends to both sequences and decodes, all in one encoder; the pages' bytes and (in the integer arithmetic) the answer are the reference's.
fn step(backend: &WgpuBackend, caches: &mut [KvCache; 2], appends: [(usize, usize); 2], seed: u32) {
    let row = HEADS[1] * DIM;
    let tokens = appends[0].1 + appends[1].1;
    let (k, v) = (noise(tokens * row, seed), noise(tokens * row, seed + 7));
    let [theirs, ours] = caches;
    let mut at = 0;
    for (sequence, count) in appends {
        let range = at * row..(at + count) * row;
        theirs
            .append(sequence, &k[range.clone()], &v[range])
            .unwrap();
        at += count;
    }
    let mut problem = Problem::new(
        Heads::new(HEADS[0], HEADS[1], DIM),
        theirs.table().lens.clone(),
    );
    problem.scores.softmax_scale = Some(1e-3);
    if seed % 2 == 1 {
        problem.scores.sinks = Some(vec![0.5, -3.0, 8.0, 1e6, -1e6, 0.0]);
    }
    let q = noise(problem.rows() * DIM, seed + 9);
    let buffers = [&k, &v, &q].map(|x| upload(backend, x));
    let out = buffer(
        backend,
        4 * q.len() as u64,
        Usage::STORAGE | Usage::COPY_SRC,
    );
    let lse = buffer(
        backend,
        4 * problem.rows() as u64,
        Usage::STORAGE | Usage::COPY_SRC,
    );
    let mut encoder = backend
        .wgpu_device()
        .create_command_encoder(&Default::default());
    let [k, v, q_buffer] = &buffers;
    backend
        .record_append(
            &mut encoder,
            ours,
            &appends.map(|(sequence, tokens)| Append { sequence, tokens }),
            k,
            v,
        )
        .unwrap();
    let prepared = backend.prepare(&problem, ours).unwrap();
    backend
        .record(&mut encoder, &prepared, q_buffer, &out, &lse)
        .unwrap();
    backend.wgpu_queue().submit([encoder.finish()]);

    for sequence in 0..2 {
        let (a, b) = (theirs.read_back(sequence), ours.read_back(sequence));
        assert_eq!(a.unwrap(), b.unwrap(), "pages of sequence {sequence}");
    }
    let format = theirs.config().format;
    if !format.is_integer() {
        return;
    }
    let cpu = CpuBackend::new();
    let mut cache = cpu.create_cache(theirs.config()).unwrap();
    for sequence in 0..2 {
        let tokens = theirs.table().lens[sequence];
        let pages = theirs.read_back(sequence).unwrap();
        cache.restore_pages(sequence, tokens, &pages).unwrap();
    }
    let plan = cpu.plan(&problem, format).unwrap();
    let (mut want, mut want_lse) = (vec![0.0; q.len()], vec![0.0; problem.rows()]);
    let kv = KvSource::Cache(&cache);
    let mut step = DecodeStep::new(&plan, &q, kv, &mut want)
        .and_then(|step| step.with_lse(&mut want_lse))
        .unwrap();
    cpu.decode(&mut step).unwrap();
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&want), download(backend, &out), "{format}: out");
    assert_eq!(bits(&want_lse), download(backend, &lse), "{format}: lse");
}

fn recorded_appends_and_steps_have_the_references_bytes(backend: &WgpuBackend) {
    for (name, page_size) in [
        ("int8", 64),
        ("int4", 64),
        // The first tile's residuals lie in four pages, and beside those of later tiles.
        ("int4", 16),
        ("int8/int4", 128),
        ("int4-w4/int8", 64),
        ("int8-plain/int4-w0", 64),
        ("int4-g1", 64),
        ("int4/int4-g1", 64),
        ("int8-plain/int4", 64),
        ("bf16/fp8", 64),
        ("int4/bf16", 64),
    ] {
        let format: KvFormat = match name.parse() {
            Ok(format) => format,
            Err(error) => panic!("{error}"),
        };
        let config = CacheConfig::builder(format, Heads::new(HEADS[1], HEADS[1], DIM))
            .centres(false)
            .unit_tensor_scales()
            .page_size(page_size)
            .sequences(2)
            .max_len(300)
            .build();
        let reference = Reference::new();
        let mut caches = [
            reference.create_cache(&config).unwrap(),
            backend.create_cache(&config).unwrap(),
        ];
        // Parts of pages, pages that fill, several pages at once, one token, none.
        let steps = [[3, 60], [61, 5], [1, 130], [0, 1], [70, 64]];
        for (i, [a, b]) in steps.into_iter().enumerate() {
            step(backend, &mut caches, [(0, a), (1, b)], i as u32);
        }
    }
}

fn refused_appends_change_nothing(backend: &WgpuBackend) {
    let config = CacheConfig::builder(KvFormat::INT8, Heads::new(HEADS[1], HEADS[1], DIM))
        .centres(false)
        .sequences(2)
        .max_len(64)
        .build();
    let mut cache = backend.create_cache(&config).unwrap();
    let k = upload(backend, &noise(2 * HEADS[1] * DIM, 1));
    let mut encoder = backend
        .wgpu_device()
        .create_command_encoder(&Default::default());
    let mut refusal = |appends: &[(usize, usize)]| {
        let appends = appends.iter();
        let appends: Vec<_> = appends
            .map(|&(sequence, tokens)| Append { sequence, tokens })
            .collect();
        let error = backend.record_append(&mut encoder, &mut cache, &appends, &k, &k);
        assert_eq!(cache.table().lens, [0, 0]);
        format!("{:?}", error.unwrap_err())
    };
    for (appends, part) in [
        (&[(0, 3)][..], "has 1280 bytes"),
        (&[(0, 1), (0, 1)], "Repeated { sequence: 0 }"),
        (&[(2, 1)], "Sequence"),
    ] {
        let text = refusal(appends);
        assert!(text.contains(part), "{text}");
    }
}

/// Layers that are recorded have the bytes and the bits of the host's writes; one that cannot be recorded is still to be written.
fn recorded_layers_are_those_of_the_hosts_writes(backend: &WgpuBackend) {
    let heads = Heads::new(HEADS[0], HEADS[1], DIM);
    for format in [KvFormat::INT8, KvFormat::INT4] {
        let config = CacheConfig::builder(format, heads)
            .centres(false)
            .unit_tensor_scales()
            .layers(2)
            .sequences(2);
        let config = config.max_len(200).build();
        let [mut host, mut recorded] = [(); 2].map(|()| backend.create_cache(&config).unwrap());
        for counts in [[130, 3], [1, 62]] {
            let tokens = counts[0] + counts[1];
            let appends = [0, 1].map(|sequence| Append {
                sequence,
                tokens: counts[sequence],
            });
            host.reserve(&appends).unwrap();
            recorded.reserve(&appends).unwrap();
            let mut problem = Problem::new(heads, host.table().lens.clone());
            problem.scores.softmax_scale = Some(1e-3);
            let q = noise(problem.rows() * DIM, 9);
            for layer in [1, 0] {
                let [k, v] = [1, 2].map(|seed| noise(tokens * HEADS[1] * DIM, seed + 2 * layer));
                let layer = layer as usize;
                host.write(layer, &k, &v).unwrap();
                let [k, v, short] = [&k, &v, &k[..DIM]].map(|x| upload(backend, x));
                let mut encoder = backend
                    .wgpu_device()
                    .create_command_encoder(&Default::default());
                let refused = backend.record_write(&mut encoder, &mut recorded, layer, &short, &v);
                assert!(matches!(refused, Err(Error::Device { .. })));
                let early = backend.prepare_layer(&problem, recorded.layer(layer).unwrap());
                assert!(matches!(early, Err(Error::Step { .. })));
                backend
                    .record_write(&mut encoder, &mut recorded, layer, &k, &v)
                    .unwrap();
                let prepared = backend
                    .prepare_layer(&problem, recorded.layer(layer).unwrap())
                    .unwrap();
                let result = Usage::STORAGE | Usage::COPY_SRC;
                let out = buffer(backend, 4 * q.len() as u64, result);
                let lse = buffer(backend, 4 * problem.rows() as u64, result);
                let queries = upload(backend, &q);
                backend
                    .record(&mut encoder, &prepared, &queries, &out, &lse)
                    .unwrap();
                backend.wgpu_queue().submit([encoder.finish()]);

                let plan = backend.plan(&problem, format).unwrap();
                let mut want = vec![0.0; q.len()];
                let kv = KvSource::Layer(host.layer(layer).unwrap());
                let mut step = DecodeStep::new(&plan, &q, kv, &mut want).unwrap();
                backend.decode(&mut step).unwrap();
                let bits: Vec<u32> = want.iter().map(|x| x.to_bits()).collect();
                assert_eq!(bits, download(backend, &out), "{format}, layer {layer}");
            }
            for sequence in 0..2 {
                let [got, want] = [&recorded, &host].map(|cache| cache.read_back(sequence));
                assert!(got.unwrap() == want.unwrap(), "{format}: {sequence}");
            }
        }
        let whole = backend.prepare(&Problem::new(heads, host.table().lens.clone()), &host);
        assert!(matches!(whole, Err(Error::SeveralLayers { .. })));
    }
}

fn an_engines_rows_are_read_where_they_lie(backend: &WgpuBackend) {
    let (len, format) = (150, KvFormat::same(Scheme::Int8(Int8Scale::Token)));
    let bytes = |n: usize, seed: u32| -> Vec<u8> {
        let codes = noise(n, seed).into_iter();
        codes
            .map(|x| (x.clamp(-1.0, 1.0) * 127.0) as i8 as u8)
            .collect()
    };
    let row = HEADS[1] * DIM;
    let (k, v) = (bytes(len * row, 3), bytes(len * row, 4));
    let scales: Vec<u16> = (0..len * HEADS[1]).map(|i| 0x2000 + i as u16).collect();
    let side = |codes| StridedRows::bsnh(codes, &scales, HEADS[1], len, DIM, 1);
    let problem = Problem::new(Heads::new(HEADS[0], HEADS[1], DIM), vec![len]);
    let host = KvView::new(&problem, format, side(&k), side(&v), [&[], &[]]).unwrap();
    let q = noise(problem.rows() * DIM, 5);
    let cpu = CpuBackend::new();
    let plan = cpu.plan(&problem, format).unwrap();
    let (mut want, mut want_lse) = (vec![0.0; q.len()], vec![0.0; problem.rows()]);
    let kv = KvSource::View(&host);
    let mut step = DecodeStep::new(&plan, &q, kv, &mut want)
        .and_then(|step| step.with_lse(&mut want_lse))
        .unwrap();
    cpu.decode(&mut step).unwrap();

    // The same rows behind 32 bytes of something else, the scales behind two.
    let put = |before: usize, x: &[u8]| {
        let usage = Usage::STORAGE | Usage::COPY_DST;
        let whole = buffer(backend, (before + x.len()) as u64, usage);
        backend.wgpu_queue().write_buffer(&whole, before as u64, x);
        whole
    };
    let scale_bytes: Vec<u8> = scales.iter().flat_map(|x| x.to_le_bytes()).collect();
    let [k, v, scales] = [put(32, &k), put(32, &v), put(4, &scale_bytes)];
    let rows = |codes, codes_at| SideRows {
        codes,
        codes_at,
        code_strides: host.k().code_strides,
        scales: Some(&scales),
        scales_at: 2,
        scale_strides: host.k().scale_strides,
    };
    let view = |codes_at| DeviceView {
        format,
        k: rows(&k, codes_at),
        v: rows(&v, 32),
        k_tensor_scales: &[],
        v_tensor_scales: &[],
    };
    for misplaced in [24, 48] {
        let refused = backend.prepare_view(&problem, &view(misplaced));
        assert!(matches!(refused, Err(Error::Device { .. })), "{misplaced}");
    }
    let prepared = backend.prepare_view(&problem, &view(32)).unwrap();
    let q = upload(backend, &q);
    let result = Usage::STORAGE | Usage::COPY_SRC;
    let out = buffer(backend, 4 * want.len() as u64, result);
    let lse = buffer(backend, 4 * want_lse.len() as u64, result);
    let mut encoder = backend
        .wgpu_device()
        .create_command_encoder(&Default::default());
    backend
        .record(&mut encoder, &prepared, &q, &out, &lse)
        .unwrap();
    backend.wgpu_queue().submit([encoder.finish()]);
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&want), download(backend, &out));
    assert_eq!(bits(&want_lse), download(backend, &lse));
}

/// The backend over a device of its own, of these limits.
pub fn with_limits(
    backend: &WgpuBackend,
    required_limits: wgpu::Limits,
) -> Result<WgpuBackend, Unsupported> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.flags = wgpu::InstanceFlags::empty();
    let instance = wgpu::Instance::new(descriptor);
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let name = backend.wgpu_device().adapter_info().name;
    let mut adapters = adapters.into_iter();
    let adapter = adapters.find(|adapter| adapter.get_info().name == name);
    let opened = adapter.unwrap().request_device(&wgpu::DeviceDescriptor {
        required_limits,
        ..Default::default()
    });
    let (device, queue) = pollster::block_on(opened).unwrap();
    WgpuBackend::with_device(device, queue)
}

/// WebGPU's default limits, with bindings of so many bytes.
pub fn bindings_of(max_storage_buffer_binding_size: u64) -> wgpu::Limits {
    wgpu::Limits {
        max_storage_buffer_binding_size,
        ..Default::default()
    }
}

/// Kills staging memory as long as the input: the first tokens of new sequences, which are written together, lie apart by a whole prompt.
fn new_sequences_are_appended_whose_tokens_no_binding_holds_at_once(backend: &WgpuBackend) {
    let small = with_limits(backend, bindings_of(256 << 10)).unwrap();
    let config = CacheConfig::builder(KvFormat::INT8, Heads::new(2, 2, 64))
        .sequences(4)
        .max_len(400)
        .build();
    let appends = [0, 1, 2, 3].map(|sequence| Append {
        sequence,
        tokens: 400,
    });
    let [k, v] = [1, 2].map(|seed| noise::uniform(seed, 0..4 * 400 * 2 * 64));
    let [theirs, ours] = [&Reference::new() as &dyn DecodeAttention, &small].map(|backend| {
        let mut cache = backend.create_cache(&config).unwrap();
        cache.append_batch(&appends, &k, &v).unwrap();
        [0, 1, 2, 3].map(|sequence| cache.image(sequence).unwrap().as_bytes().to_vec())
    });
    assert!(theirs == ours);
}

/// Kills copies of a shared page that are made before its recorded tokens are written, which would lose them.
fn what_a_recorded_append_writes_is_read_only_behind_its_submission(backend: &WgpuBackend) {
    let unsubmitted = |result: Result<(), Error>| {
        let error = result.unwrap_err();
        let Error::Device { source, .. } = &error else {
            panic!("{error:?}");
        };
        let found = matches!(source.downcast_ref(), Some(WgpuError::Unsubmitted));
        assert!(found, "{error:?}");
    };
    let encoder = || {
        let device = backend.wgpu_device();
        device.create_command_encoder(&Default::default())
    };
    for centres in [false, true] {
        let config = CacheConfig::builder(KvFormat::INT8, Heads::new(HEADS[1], HEADS[1], DIM))
            .centres(centres)
            .sequences(2)
            .max_len(100)
            .build();
        let [k, v] = [1, 2].map(|seed| noise(6 * HEADS[1] * DIM, seed));
        let [all_k, all_v] = [&k, &v].map(|x| upload(backend, x));
        let tokens = |sequence, tokens| [Append { sequence, tokens }];
        let mut theirs = Reference::new().create_cache(&config).unwrap();
        let mut cache = backend.create_cache(&config).unwrap();
        let mut first = encoder();
        backend
            .record_append(&mut first, &mut cache, &tokens(0, 6), &all_k, &all_v)
            .unwrap();
        unsubmitted(cache.image(0).map(|_| ()));
        if centres {
            unsubmitted(cache.fork(0, 1));
            backend.wgpu_queue().submit([first.finish()]);
            cache.fork(0, 1).unwrap();
        } else {
            cache.fork(0, 1).unwrap();
            let mut second = encoder();
            unsubmitted(backend.record_append(
                &mut second,
                &mut cache,
                &tokens(1, 1),
                &all_k,
                &all_v,
            ));
            assert_eq!(cache.table().lens, [6, 6]);
            backend.wgpu_queue().submit([first.finish()]);
        }
        let mut second = encoder();
        backend
            .record_append(&mut second, &mut cache, &tokens(1, 1), &all_k, &all_v)
            .unwrap();
        backend.wgpu_queue().submit([second.finish()]);
        theirs.append(0, &k, &v).unwrap();
        theirs.fork(0, 1).unwrap();
        let row = HEADS[1] * DIM;
        theirs.append(1, &k[..row], &v[..row]).unwrap();
        for sequence in [0, 1] {
            let [a, b] = [&theirs, &cache].map(|cache| cache.image(sequence).unwrap());
            assert!(a.as_bytes() == b.as_bytes(), "{sequence}, {centres}");
        }
        // What a dropped encoder would have written is awaited no more.
        let mut dropped = encoder();
        backend
            .record_append(&mut dropped, &mut cache, &tokens(0, 1), &all_k, &all_v)
            .unwrap();
        drop(dropped);
        cache.image(0).unwrap();
    }
}

/// What is awaited is what waits, to the last step: 16-bit outputs are rounded, too.
fn awaited_calls_answer_as_those_that_wait(backend: &WgpuBackend) {
    let heads = Heads {
        q: HEADS[0],
        kv: HEADS[1],
        dim: DIM.into(),
    };
    let config = CacheConfig::builder(KvFormat::INT8, heads)
        .max_len(100)
        .build();
    let mut cache = backend.create_cache(&config).unwrap();
    let rows = |seed| noise(100 * HEADS[1] * DIM, seed);
    cache.append(0, &rows(1), &rows(2)).unwrap();
    let plan = backend
        .plan(&Problem::new(heads, [100]), KvFormat::INT8)
        .unwrap();
    let q = noise(HEADS[0] * DIM, 3);
    let [mut waited, mut awaited] = [(); 2].map(|()| vec![half::f16::NAN; q.len()]);
    let mut step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut waited).unwrap();
    backend.decode(&mut step).unwrap();
    let mut step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut awaited).unwrap();
    pollster::block_on(backend.decode_async(&mut step)).unwrap();
    assert!(waited.iter().any(|x| x.to_f32() != 0.0));
    assert_eq!(waited, awaited);
    pollster::block_on(backend.finish_async()).unwrap();
    let checks = pollster::block_on(backend.check_arithmetic_async()).unwrap();
    let waited = backend.check_arithmetic().unwrap();
    assert_eq!(format!("{checks:?}"), format!("{waited:?}"));
}

/// Adds the tests of this file.
pub fn add(trials: Trials<WgpuBackend>) -> Trials<WgpuBackend> {
    trials
        .test(
            "native: recorded appends and steps have the references bytes",
            recorded_appends_and_steps_have_the_references_bytes,
        )
        .test(
            "native: refused appends change nothing",
            refused_appends_change_nothing,
        )
        .test(
            "native: recorded layers are those of the hosts writes",
            recorded_layers_are_those_of_the_hosts_writes,
        )
        .test(
            "native: an engines rows are read where they lie",
            an_engines_rows_are_read_where_they_lie,
        )
        .test(
            "native: what a recorded append writes is read only behind its submission",
            what_a_recorded_append_writes_is_read_only_behind_its_submission,
        )
        .test(
            "native: new sequences are appended whose tokens no binding holds at once",
            new_sequences_are_appended_whose_tokens_no_binding_holds_at_once,
        )
        .test(
            "native: awaited calls answer as those that wait",
            awaited_calls_answer_as_those_that_wait,
        )
}
