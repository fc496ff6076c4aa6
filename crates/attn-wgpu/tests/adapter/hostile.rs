//! Counts, strides and handles that no engine should pass: each is a typed refusal, and nothing is changed.

use attn_conformance::trials::Trials;
use attn_core::{
    Append, CacheConfig, DecodeAttention, DecodeStep, Error, Heads, Int8Scale, KvCache, KvFormat,
    KvSource, KvView, PageStore, Problem, Scheme, StridedRows, Unsupported,
};
use attn_cpu::Reference;
use attn_wgpu::{DevicePages, DeviceView, SideRows, WgpuBackend, WgpuError, wgpu};
use wgpu::BufferUsages as Usage;

use super::native::{bindings_of, with_limits};

const HEADS: usize = 2;
const DIM: usize = 64;
const PLAIN: KvFormat = KvFormat::same(Scheme::Int8(Int8Scale::Token));

fn buffer(backend: &WgpuBackend, size: u64) -> wgpu::Buffer {
    let device = backend.wgpu_device();
    device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size,
        usage: Usage::STORAGE | Usage::COPY_DST,
        mapped_at_creation: false,
    })
}

fn encoder(backend: &WgpuBackend) -> wgpu::CommandEncoder {
    let device = backend.wgpu_device();
    device.create_command_encoder(&Default::default())
}

fn cache(backend: &dyn DecodeAttention) -> KvCache {
    let config = CacheConfig::builder(KvFormat::INT8, Heads::new(HEADS, HEADS, DIM))
        .centres(false)
        .sequences(2)
        .max_len(64)
        .build();
    backend.create_cache(&config).unwrap()
}

/// Whether the refusal is of a caller's buffer.
fn is_of_buffer(error: &Error) -> bool {
    let Error::Device { source, .. } = error else {
        return false;
    };
    matches!(source.downcast_ref(), Some(WgpuError::Buffer { .. }))
}

fn appends_of_any_count_that_buffers_lack_are_refused(backend: &WgpuBackend) {
    let mut cache = cache(backend);
    let k = buffer(backend, (4 * HEADS * DIM) as u64);
    let mut encoder = encoder(backend);
    let row = 4 * HEADS * DIM;
    for appends in [
        &[(0, 2)][..],
        &[(0, usize::MAX)],
        &[(0, usize::MAX), (1, 1)],
        &[(0, usize::MAX), (1, 2)],
        &[(0, 1 << 63), (1, 1 << 63)],
        &[(0, usize::MAX / row + 1)],
        &[(0, usize::MAX / row + 2)],
        &[(0, 1 << 32)],
        &[(0, 1 << 62)],
    ] {
        let appends = appends.iter();
        let appends: Vec<_> = appends
            .map(|&(sequence, tokens)| Append { sequence, tokens })
            .collect();
        let refused = backend.record_append(&mut encoder, &mut cache, &appends, &k, &k);
        let error = refused.unwrap_err();
        assert!(is_of_buffer(&error), "{appends:?}: {error:?}");
        assert_eq!(cache.table().lens, [0, 0]);
        assert_eq!(cache.free_pages(), 2);
    }
}

fn pools_beyond_the_device_are_refused(backend: &WgpuBackend) {
    let mut config = CacheConfig::builder(KvFormat::INT8, Heads::new(HEADS, HEADS, DIM))
        .centres(false)
        .sequences(2)
        .max_len(64)
        .build();
    for num_pages in [1 << 31, u32::MAX as usize] {
        config.num_pages = num_pages;
        let refused = backend.create_cache(&config).map(|_| ());
        assert!(
            matches!(
                refused,
                Err(Error::Unsupported(Unsupported::NoKernel { .. }))
            ),
            "{num_pages}: {refused:?}"
        );
    }
    for num_pages in [1 << 32, usize::MAX] {
        config.num_pages = num_pages;
        let refused = backend.create_cache(&config).map(|_| ());
        assert!(
            matches!(refused, Err(Error::Parameter { .. })),
            "{num_pages}: {refused:?}"
        );
    }
}

/// A view of `int8-plain` rows in buffers of `bytes` bytes, all strides 0.
fn view<'a>(codes: &'a wgpu::Buffer, scales: &'a wgpu::Buffer) -> DeviceView<'a> {
    let rows = SideRows {
        codes,
        codes_at: 0,
        code_strides: [0; 3],
        scales: Some(scales),
        scales_at: 0,
        scale_strides: [0; 3],
    };
    DeviceView {
        format: PLAIN,
        k: rows,
        v: rows,
        k_tensor_scales: &[],
        v_tensor_scales: &[],
    }
}

const HUGE: [usize; 8] = [
    1 << 20,
    1 << 32,
    1 << 36,
    1 << 60,
    1 << 62,
    1 << 63,
    (1 << 63) + (1 << 62),
    usize::MAX - 15,
];

fn views_whose_rows_lie_outside_their_buffers_are_refused_whatever_wraps(backend: &WgpuBackend) {
    let (codes, scales) = (buffer(backend, 4096), buffer(backend, 4096));
    let problem = Problem::new(Heads::new(HEADS, HEADS, DIM), vec![3, 5]);
    type Set = fn(&mut SideRows<'_>, usize, usize);
    let places: [Set; 4] = [
        |rows, i, huge| rows.code_strides[i] = huge,
        |rows, i, huge| rows.scale_strides[i] = huge,
        |rows, _, huge| rows.codes_at = huge,
        |rows, _, huge| rows.scales_at = huge,
    ];
    for huge in HUGE {
        for (p, set) in places.iter().enumerate() {
            for (i, of_k) in [
                (0, true),
                (1, true),
                (2, true),
                (0, false),
                (1, false),
                (2, false),
            ] {
                let mut view = view(&codes, &scales);
                let rows = if of_k { &mut view.k } else { &mut view.v };
                set(rows, i, huge);
                match backend.prepare_view(&problem, &view) {
                    Err(error) => assert!(is_of_buffer(&error), "{huge} {p} {i}: {error:?}"),
                    Ok(_) => panic!("{huge} in place {p}, {i} was accepted"),
                }
            }
        }
    }
}

fn strides_that_no_row_takes_are_of_no_concern(backend: &WgpuBackend) {
    let (codes, scales) = (buffer(backend, 4096), buffer(backend, 4096));
    for huge in HUGE {
        let mut view = view(&codes, &scales);
        for rows in [&mut view.k, &mut view.v] {
            rows.code_strides = [huge; 3];
            rows.scale_strides = [huge; 3];
        }
        // One sequence of one token and one KV head takes none; neither do empty sequences.
        let problem = Problem::new(Heads::new(1, 1, DIM), vec![1]);
        backend.prepare_view(&problem, &view).unwrap();
        (view.k.codes_at, view.v.codes_at) = (huge, huge);
        (view.k.scales_at, view.v.scales_at) = (huge, huge);
        let problem = Problem::new(Heads::new(HEADS, HEADS, DIM), vec![0; 3]);
        backend.prepare_view(&problem, &view).unwrap();
    }
}

/// Kills a binding of a caller's whole buffer where a step reads nothing of it.
fn views_without_tokens_may_lie_in_buffers_that_no_kernel_can_bind(backend: &WgpuBackend) {
    let small = with_limits(backend, bindings_of(64 << 10)).unwrap();
    let (codes, scales) = (buffer(&small, 1 << 20), buffer(&small, 1 << 20));
    let problem = Problem::new(Heads::new(HEADS, HEADS, DIM), vec![0; 3]);
    let step = small
        .prepare_view(&problem, &view(&codes, &scales))
        .unwrap();
    let [q, out, lse] = [(); 3].map(|()| buffer(&small, 4096));
    let mut encoder = encoder(&small);
    small.record(&mut encoder, &step, &q, &out, &lse).unwrap();
    small.wgpu_queue().submit([encoder.finish()]);
}

/// Kills a device that is taken and whose kernels then fail: a view of `int8-plain` binds seven storage buffers.
fn devices_with_fewer_storage_buffers_than_the_documented_are_refused(backend: &WgpuBackend) {
    let limits = |max_storage_buffers_per_shader_stage| wgpu::Limits {
        max_storage_buffers_per_shader_stage,
        ..Default::default()
    };
    match with_limits(backend, limits(7)).map(|_| ()) {
        Err(Unsupported::Absent { reason, .. }) => {
            assert!(reason.contains("8 storage buffers"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let least = with_limits(backend, limits(8)).unwrap();
    let (codes, scales) = (buffer(&least, 4096), buffer(&least, 4096));
    let problem = Problem::new(Heads::new(HEADS, HEADS, DIM), vec![1]);
    least
        .prepare_view(&problem, &view(&codes, &scales))
        .unwrap();
}

fn steps_beyond_the_device_are_refused_before_memory_is_asked_for(backend: &WgpuBackend) {
    let (codes, scales) = (buffer(backend, 4096), buffer(backend, 4096));
    let view = view(&codes, &scales);
    for (heads, kv_lens) in [
        (1, vec![1 << 20; 65_535]),
        (1, vec![1; 70_000]),
        (70_000, vec![1]),
        (60_000, vec![1 << 20; 64]),
        (1 << 32, vec![1]),
        (1 << 53, vec![1 << 20]),
        (1 << 57, vec![1 << 20]),
    ] {
        let problem = Problem::new(Heads::new(heads, heads, DIM), kv_lens);
        let refused = backend.prepare_view(&problem, &view).map(|_| ());
        assert!(
            matches!(
                refused,
                Err(Error::Unsupported(_) | Error::Parameter { .. })
            ),
            "{heads} KV heads, {} sequences: {refused:?}",
            problem.batch()
        );
        if let Ok(plan) = backend.plan(&problem, KvFormat::INT8) {
            assert_eq!(plan.problem(), &problem);
        }
    }
}

/// Kills views of latents, whose V has no rows, and formats that the core's own views refuse with another error.
fn views_of_formats_without_rows_are_refused_as_the_cores_are(backend: &WgpuBackend) {
    let (codes, scales) = (buffer(backend, 1 << 16), buffer(backend, 1 << 16));
    let bytes = vec![0; 1 << 16];
    let halves = vec![0; 1 << 16];
    let problem = Problem::new(Heads::new(HEADS, HEADS, DIM), vec![3, 5]);
    for name in [
        "int8-latents",
        "int8-plain-latents",
        "fp8-latents",
        "bf16-latents",
        "f16-latents",
        "int4",
        "int8",
        "int8-plain/int8",
        "int4-g1/int8-plain",
    ] {
        let format: KvFormat = name.parse().unwrap();
        let view = DeviceView {
            format,
            ..view(&codes, &scales)
        };
        let rows = StridedRows::bnsh(&bytes, &halves, HEADS, 5, 2 * DIM, 8);
        let of_core = KvView::new(&problem, format, rows, rows, [&[], &[]]).map(|_| ());
        let found = backend.prepare_view(&problem, &view).map(|_| ());
        assert!(matches!(of_core, Err(Error::Parameter { .. })), "{name}");
        assert_eq!(format!("{found:?}"), format!("{of_core:?}"), "{name}");
    }
}

fn tensor_scales_of_a_view_are_in_range(backend: &WgpuBackend) {
    let codes = buffer(backend, 4096);
    let problem = Problem::new(Heads::new(HEADS, HEADS, DIM), vec![3]);
    for bad in [f32::NAN, f32::INFINITY, 0.0, -1.0, 9e-16, 1.1e15] {
        let mut view = view(&codes, &codes);
        view.format = "fp8".parse().unwrap();
        let (good, bad) = ([1.0; HEADS], [1.0, bad]);
        for (k, v) in [(&good, &bad), (&bad, &good)] {
            (view.k_tensor_scales, view.v_tensor_scales) = (k, v);
            let refused = backend.prepare_view(&problem, &view).map(|_| ());
            assert!(
                matches!(refused, Err(Error::Parameter { .. })),
                "{refused:?}"
            );
        }
    }
}

fn caches_and_steps_of_another_device_are_refused(backend: &WgpuBackend) {
    let other = WgpuBackend::open().unwrap();
    let is_foreign = |refused: Result<(), Error>| {
        assert!(
            matches!(refused, Err(Error::WrongBackend { .. })),
            "{refused:?}"
        );
    };
    let problem = Problem::new(Heads::new(HEADS, HEADS, DIM), vec![0, 0]);
    let mut encoder = encoder(backend);
    let k = buffer(backend, 4096);
    for mut cache in [cache(&other), cache(&Reference::new())] {
        is_foreign(backend.prepare(&problem, &cache).map(|_| ()));
        is_foreign(backend.record_append(
            &mut encoder,
            &mut cache,
            &[Append {
                sequence: 0,
                tokens: 1,
            }],
            &k,
            &k,
        ));
    }
    let step = other.prepare(&problem, &cache(&other)).unwrap();
    is_foreign(backend.record(&mut encoder, &step, &k, &k, &k));
}

fn outputs_that_are_not_the_plans_make_no_step(backend: &WgpuBackend) {
    let cache = cache(backend);
    let problem = Problem::new(Heads::new(HEADS, HEADS, DIM), vec![0, 0]);
    let plan = backend.plan(&problem, KvFormat::INT8).unwrap();
    let q = vec![1.0; problem.rows() * DIM];
    let (right_out, right_lse) = (q.len(), problem.rows());
    for (out, lse) in [
        (right_out + 1, right_lse),
        (right_out - 1, right_lse),
        (2 * right_out, 2 * right_lse),
        (right_out / 2, right_lse / 2),
        (0, right_lse),
        (right_out, right_lse - 1),
        (right_out, right_lse + 1),
        (right_out, 0),
    ] {
        let (mut out, mut lse) = (vec![7.0; out], vec![7.0; lse]);
        let step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)
            .and_then(|step| step.with_lse(&mut lse));
        assert!(matches!(step.err(), Some(Error::Length { .. })));
    }
    let (mut out, mut lse) = (vec![7.0; right_out], vec![7.0; right_lse]);
    let kv = KvSource::Cache(&cache);
    let mut step = DecodeStep::new(&plan, &q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .unwrap();
    backend.decode(&mut step).unwrap();
    assert!(out.iter().all(|x| *x == 0.0) && lse.iter().all(|x| *x == f32::NEG_INFINITY));
}

fn nested_appends_cannot_exchange_the_stores_of_two_caches(backend: &WgpuBackend) {
    let [mut a, mut b] = [cache(backend), cache(backend)];
    let pool = |store: &dyn PageStore| {
        let pages = store.as_any().downcast_ref::<DevicePages>().unwrap();
        pages.buffers(0).as_ptr()
    };
    let own = [pool(a.store()), pool(b.store())];
    assert_ne!(own[0], own[1]);
    // Both closures get a shared store: there is nothing to swap through, and neither `append` nor `write_page` can be called on it.
    a.append_with(
        &[Append {
            sequence: 0,
            tokens: 1,
        }],
        |of_a: &dyn PageStore, _| {
            b.append_with(
                &[Append {
                    sequence: 0,
                    tokens: 1,
                }],
                |of_b: &dyn PageStore, _| {
                    assert_eq!([pool(of_a), pool(of_b)], own);
                    Ok(())
                },
            )
        },
    )
    .unwrap();
    assert_eq!([pool(a.store()), pool(b.store())], own);
}

fn a_recorded_append_that_fails_gives_its_pages_back(backend: &WgpuBackend) {
    let other = WgpuBackend::open().unwrap();
    let config = CacheConfig::builder(KvFormat::INT4, Heads::new(HEADS, HEADS, DIM))
        .centres(false)
        .sequences(2)
        .max_len(64)
        .build();
    let mut cache = backend.create_cache(&config).unwrap();
    let mut encoder = encoder(backend);
    // Long enough, but of another instance, which knows more buffers: only wgpu can tell, when pages have been reserved.
    let foreign: Vec<_> = (0..1000).map(|_| buffer(&other, 1 << 16)).collect();
    let (table, free) = (cache.table().clone(), cache.free_pages());
    for foreign in &foreign[900..910] {
        let appends = [(0, 40), (1, 64)].map(|(sequence, tokens)| Append { sequence, tokens });
        let refused = backend.record_append(&mut encoder, &mut cache, &appends, foreign, foreign);
        assert!(matches!(refused, Err(Error::Device { .. })), "{refused:?}");
        assert_eq!((cache.table(), cache.free_pages()), (&table, free));
    }
    let own = buffer(backend, 1 << 20);
    backend
        .record_append(
            &mut encoder,
            &mut cache,
            &[
                Append {
                    sequence: 0,
                    tokens: 40,
                },
                Append {
                    sequence: 1,
                    tokens: 64,
                },
            ],
            &own,
            &own,
        )
        .unwrap();
    backend.wgpu_queue().submit([encoder.finish()]);
    assert_eq!(cache.table().lens, [40, 64]);
    cache.read_back(1).unwrap();
}

/// Kills a plan or a prepared step that takes a later shard for a whole sequence: its kernels would read the shard's first tile as the sequence's.
fn shards_are_refused(backend: &WgpuBackend) {
    let heads = Heads::new(HEADS, HEADS, DIM);
    let config = CacheConfig::builder(KvFormat::INT4, heads)
        .centres(false)
        .sequences(1);
    let cache = backend.create_cache(&config.max_len(64).build()).unwrap();
    let problem = Problem::new(heads, [0]);
    backend.prepare(&problem, &cache).map(|_| ()).unwrap();
    for shard in [
        problem.clone().tokens_before([1024]),
        problem.clone().tokens_after([1024]),
    ] {
        let planned = backend.plan(&shard, KvFormat::INT4).map(|_| ());
        let prepared = backend.prepare(&shard, &cache).map(|_| ());
        for refused in [planned, prepared] {
            let no_kernel = matches!(
                refused,
                Err(Error::Unsupported(Unsupported::NoKernel { .. }))
            );
            assert!(no_kernel, "{refused:?}");
        }
    }
}

/// Adds the tests of this file.
pub fn add(trials: Trials<WgpuBackend>) -> Trials<WgpuBackend> {
    trials
        .test(
            "hostile: appends of any count that buffers lack are refused",
            appends_of_any_count_that_buffers_lack_are_refused,
        )
        .test(
            "hostile: pools beyond the device are refused",
            pools_beyond_the_device_are_refused,
        )
        .test(
            "hostile: views whose rows lie outside their buffers are refused whatever wraps",
            views_whose_rows_lie_outside_their_buffers_are_refused_whatever_wraps,
        )
        .test(
            "hostile: strides that no row takes are of no concern",
            strides_that_no_row_takes_are_of_no_concern,
        )
        .test(
            "hostile: views without tokens may lie in buffers that no kernel can bind",
            views_without_tokens_may_lie_in_buffers_that_no_kernel_can_bind,
        )
        .test(
            "hostile: devices with fewer storage buffers than the documented are refused",
            devices_with_fewer_storage_buffers_than_the_documented_are_refused,
        )
        .test(
            "hostile: steps beyond the device are refused before memory is asked for",
            steps_beyond_the_device_are_refused_before_memory_is_asked_for,
        )
        .test(
            "hostile: views of formats without rows are refused as the core's are",
            views_of_formats_without_rows_are_refused_as_the_cores_are,
        )
        .test(
            "hostile: tensor scales of a view are in range",
            tensor_scales_of_a_view_are_in_range,
        )
        .test(
            "hostile: caches and steps of another device are refused",
            caches_and_steps_of_another_device_are_refused,
        )
        .test(
            "hostile: outputs that are not the plans make no step",
            outputs_that_are_not_the_plans_make_no_step,
        )
        .test(
            "hostile: nested appends cannot exchange the stores of two caches",
            nested_appends_cannot_exchange_the_stores_of_two_caches,
        )
        .test(
            "hostile: a recorded append that fails gives its pages back",
            a_recorded_append_that_fails_gives_its_pages_back,
        )
        .test("hostile: shards are refused", shards_are_refused)
}
