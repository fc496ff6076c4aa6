//! The vector kernels give the reference's bits, for every instruction set that this machine has, at any number of threads.

use attn_conformance::noise::Noise;
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Heads, Int8Scale, KvFormat, KvSource, KvView,
    Problem, Scheme, StridedRows,
};
use attn_cpu::{CpuBackend, Isa, Options, Reference};

fn noise(seed: u64) -> impl FnMut() -> f32 {
    let mut noise = Noise::new(seed);
    move || 3.0 * noise.unit()
}

/// Inputs of a problem: K and V per sequence, and Q.
struct Inputs {
    kv: Vec<[Vec<f32>; 2]>,
    q: Vec<f32>,
}

fn inputs(problem: &Problem) -> Inputs {
    let mut next = noise(7);
    let kv = problem.kv_lens.iter().map(|len| {
        let n = len * problem.num_kv_heads * problem.head_dim.k;
        // Every second token is larger, so that scales and maxima move.
        let mut side = || -> Vec<f32> {
            (0..n)
                .map(|i| next() * (1.0 + (i / 97 % 5) as f32))
                .collect()
        };
        [side(), side()]
    });
    let kv = kv.collect();
    let q = (0..problem.rows() * problem.head_dim.k)
        .map(|_| next())
        .collect();
    Inputs { kv, q }
}

fn bits(
    backend: &dyn DecodeAttention,
    problem: &Problem,
    format: KvFormat,
    q: &[f32],
    kv: KvSource<'_>,
) -> Vec<u32> {
    let plan = backend.plan(problem, format).unwrap();
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; problem.rows()]);
    let mut step = DecodeStep::new(&plan, q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .unwrap();
    backend.decode(&mut step).unwrap();
    out.iter().chain(&lse).map(|x| x.to_bits()).collect()
}

fn cached(
    problem: &Problem,
    format: KvFormat,
    page_size: usize,
    inputs: &Inputs,
) -> attn_core::KvCache {
    let max = problem.kv_lens.iter().copied().max().unwrap();
    let mut config = CacheConfig::builder(format, problem.heads())
        .unit_tensor_scales()
        .sequences(problem.batch())
        .max_len(max)
        .page_size(page_size)
        .build();
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        scales.iter_mut().for_each(|s| *s = 0.09);
    }
    let mut cache = CpuBackend::new().create_cache(&config).unwrap();
    let garbage = vec![0xff; cache.layout().page_bytes()];
    for page in 0..config.num_pages {
        cache.write_page(page as u32, &garbage).unwrap();
    }
    for (b, [k, v]) in inputs.kv.iter().enumerate() {
        let v: &[f32] = if format.latents { &[] } else { v };
        cache.append(b, k, v).unwrap();
    }
    cache
}

/// Holds every instruction set at each thread count to the reference.
fn compare(
    problem: &Problem,
    format: KvFormat,
    q: &[f32],
    kv: KvSource<'_>,
    threads: &[usize],
    what: &str,
) {
    let want = bits(&Reference::new(), problem, format, q, kv);
    for isa in Isa::available() {
        let backend = CpuBackend::with_options(&Options::default().isa(isa)).unwrap();
        for &threads in threads {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            let got = pool.install(|| bits(&backend, problem, format, q, kv));
            let first = want.iter().zip(&got).position(|(a, b)| a != b);
            let pair = first.map(|i| (i, f32::from_bits(want[i]), f32::from_bits(got[i])));
            assert_eq!(pair, None, "{what} {format} on {isa} at {threads} threads");
        }
    }
}

#[test]
fn bits_equal_reference_for_every_pair_isa_and_thread_count() {
    let mut problem = Problem::new(Heads::new(6, 2, 128), vec![0, 1, 65, 333, 1100]);
    problem.q_lens = vec![2; problem.batch()];
    let inputs = inputs(&problem);
    for k in Scheme::ALL {
        for v in Scheme::ALL {
            let format = KvFormat::new(k, v);
            if format.check(128).is_ok() {
                let cache = cached(&problem, format, 64, &inputs);
                compare(
                    &problem,
                    format,
                    &inputs.q,
                    KvSource::Cache(&cache),
                    &[1, 3],
                    "pages",
                );
            }
        }
    }
}

fn formats() -> Vec<KvFormat> {
    let same = Scheme::ALL.into_iter().map(KvFormat::same);
    let int8_k = KvFormat::new(Scheme::Int8(Int8Scale::Token), Scheme::Int4(4));
    let fp8_v = KvFormat::new(Scheme::Bf16, Scheme::Fp8E4m3);
    let few = [KvFormat::INT4, KvFormat::INT8_LATENTS, int8_k, fp8_v];
    same.chain(few).collect()
}

#[test]
fn bits_equal_reference_for_every_head_dim_and_page_size() {
    for head_dim in [64, 80, 96, 128, 192, 256] {
        for page_size in [16, 32, 64, 128] {
            // Few rows and many: the kernels of many rows unpack a tile first.
            let problem = Problem::new(
                Heads::new(if page_size == 64 { 15 } else { 5 }, 1, head_dim),
                vec![331, 129],
            );
            let inputs = inputs(&problem);
            for format in formats() {
                if format.check(head_dim).is_ok() {
                    let cache = cached(&problem, format, page_size, &inputs);
                    let what = format!("head_dim {head_dim}, page_size {page_size}");
                    compare(
                        &problem,
                        format,
                        &inputs.q,
                        KvSource::Cache(&cache),
                        &[2],
                        &what,
                    );
                }
            }
        }
    }
}

#[test]
fn bits_equal_reference_for_every_mask_and_number_of_rows() {
    for (q_len, q_heads, kv_heads) in [(1, 1, 1), (3, 7, 1), (5, 4, 2), (16, 4, 1), (1, 64, 1)] {
        for variant in 0..6 {
            let mut problem = Problem::new(Heads::new(q_heads, kv_heads, 64), vec![3, 200, 577]);
            problem.q_lens = vec![q_len; problem.batch()];
            problem.scores.causal = variant % 2 == 0;
            if variant == 2 || variant == 3 {
                problem.scores.window_left = Some(if variant == 2 { 70 } else { 5 });
            }
            if variant >= 3 {
                problem.scores.softcap = Some(3.5);
            }
            if variant >= 4 {
                problem.scores.alibi_slopes =
                    Some((0..q_heads).map(|h| 0.5f32.powi(h as i32 % 7)).collect());
            }
            if variant % 2 == 1 {
                let sink = |h| [0.5, -1e6, 4.0, 90.0][h % 4];
                problem.scores.sinks = Some((0..q_heads).map(sink).collect());
            }
            let inputs = inputs(&problem);
            for format in formats() {
                if format.check(64).is_ok() {
                    let cache = cached(&problem, format, 64, &inputs);
                    let what =
                        format!("q_len {q_len}, {q_heads}/{kv_heads} heads, variant {variant}");
                    compare(
                        &problem,
                        format,
                        &inputs.q,
                        KvSource::Cache(&cache),
                        &[2],
                        &what,
                    );
                }
            }
        }
    }
}

#[test]
fn bits_equal_reference_on_long_sequences_and_far_maxima() {
    for (len, rows) in [(20_000, 2), (70_000, 1)] {
        let mut problem = Problem::new(Heads::new(rows, 1, 64), vec![len]);
        problem.scores.softmax_scale = Some(3.0);
        let inputs = inputs(&problem);
        for format in [KvFormat::INT8, KvFormat::INT4, KvFormat::same(Scheme::F16)] {
            let cache = cached(&problem, format, 64, &inputs);
            compare(
                &problem,
                format,
                &inputs.q,
                KvSource::Cache(&cache),
                &[1, 2, 5],
                "long",
            );
        }
    }
}

#[test]
fn bits_equal_reference_on_views() {
    let (batch, heads, capacity, dim) = (2, 2, 210, 80);
    let mut problem = Problem::new(Heads::new(6, heads, dim), vec![0; batch]);
    problem.kv_lens = vec![201, 77];
    let mut next = noise(3);
    let q: Vec<f32> = (0..problem.rows() * dim).map(|_| next()).collect();
    for scheme in Scheme::ALL {
        let in_views = scheme.code_bits() != 4 && !scheme.is_rotated();
        if !in_views || scheme.check(dim).is_err() {
            continue;
        }
        let row_bytes = dim * scheme.code_bits() / 8;
        let bytes = |seed: u64| -> Vec<u8> {
            let mut next = noise(seed);
            let mut code = |_| match scheme {
                Scheme::F16 => half::f16::from_f32(next()).to_le_bytes().to_vec(),
                Scheme::Bf16 => half::bf16::from_f32(next()).to_le_bytes().to_vec(),
                _ => vec![((next() * 40.0) as i32 as u8) & 0xf7],
            };
            (0..batch * heads * capacity * dim)
                .flat_map(&mut code)
                .collect()
        };
        let (k, v) = (bytes(11), bytes(12));
        let scales: Vec<u16> = (0..batch * heads * capacity * scheme.groups(dim).count())
            .map(|i| half::f16::from_f32(0.01 + (i % 13) as f32 * 0.003).to_bits())
            .collect();
        let scales = if scheme.has_row_scales() {
            &scales[..]
        } else {
            &[]
        };
        let tensor = vec![0.5; if scheme.has_tensor_scale() { heads } else { 0 }];
        for heads_first in [true, false] {
            let groups = scheme.groups(dim).count();
            let side = |codes| match heads_first {
                true => StridedRows::bnsh(codes, scales, heads, capacity, row_bytes, groups),
                false => StridedRows::bsnh(codes, scales, heads, capacity, row_bytes, groups),
            };
            let (format, both) = (KvFormat::same(scheme), [&tensor[..]; 2]);
            let view = KvView::new(&problem, format, side(&k), side(&v), both).unwrap();
            compare(&problem, format, &q, KvSource::View(&view), &[2], "view");
        }
    }
}

/// Rows of one block whose scores stay on the grid of section 5 or leave it, on either side, tile by tile; rows of zeros, whose step is 0; rows that see
/// a part of a tile, or nothing of it.
#[test]
fn bits_equal_reference_where_scores_leave_the_grid() {
    // Largest scores of about a thousand times these.
    const FACTORS: [f32; 8] = [1.0, -1.0, 60.0, -70.0, 1e7, -1e15, 0.0, 8.0];
    let (dim, heads) = (64, FACTORS.len());
    let mut next = noise(23);
    for (q_len, alibi, softcap) in [
        (1, false, None),
        (3, false, None),
        (70, false, None),
        (3, true, None),
        (3, true, Some(1000.0)),
        (2, false, Some(1000.0)),
    ] {
        let mut problem = Problem::new(Heads::new(heads, 1, dim), vec![389, 70]);
        problem.q_lens = vec![q_len; 2];
        problem.scores.softcap = softcap;
        problem.scores.window_left = (q_len == 3).then_some(150);
        if alibi {
            let slope = |h: usize| [1000.0, -1000.0, 0.5, 0.0][h % 4];
            problem.scores.alibi_slopes = Some((0..heads).map(slope).collect());
        }
        // Elements of one sign, so that all scores of a row have one; each tile of another size.
        let kv = problem.kv_lens.iter().map(|len| {
            let size = |t: usize| [0.01, 1.0, 30.0, 0.0, 3.0, 1000.0, 1.0][t / 64];
            let k = (0..len * dim).map(|i| size(i / dim) * (10.0 + next()));
            let k = k.collect();
            [k, (0..len * dim).map(|_| next()).collect()]
        });
        let kv = kv.collect();
        let element = |i: usize| FACTORS[i / dim % heads] * (1.0 + 0.1 * next());
        let q = (0..problem.rows() * dim).map(element).collect();
        let inputs = Inputs { kv, q };
        let plain = KvFormat::same(Scheme::Int8(Int8Scale::Token));
        for format in formats().into_iter().chain([plain]) {
            if format.check(dim).is_err() || !format.is_integer() {
                continue;
            }
            let cache = cached(&problem, format, 64, &inputs);
            let kv = KvSource::Cache(&cache);
            if softcap.is_none() {
                // The reference's rows are on both sides of the grid, and on it.
                let all = bits(&Reference::new(), &problem, format, &inputs.q, kv);
                let lse = all[inputs.q.len()..].iter().map(|x| f32::from_bits(*x));
                let base2 = lse.map(|lse| lse * std::f32::consts::LOG2_E);
                let sides = base2.fold([0; 3], |mut sides, s| {
                    sides[1 + usize::from(s > 65_536.0) - usize::from(s < -65_408.0)] += 1;
                    sides
                });
                assert!(sides.iter().all(|n| *n > 0), "{format} {sides:?}");
            }
            let what = format!("q_len {q_len}, alibi {alibi}, softcap {softcap:?}");
            compare(&problem, format, &inputs.q, kv, &[2], &what);
        }
    }
}

/// Sums of products over all dims of a wide head: keys of one sign and queries of nearly one size, whose sums end near those of the largest codes. Scores
/// are so far from the grid that the last bit of a sum shows.
#[test]
fn bits_equal_reference_where_sums_of_wide_heads_are_largest() {
    for dim in [512, 576] {
        let mut next = noise(31);
        // Few rows read the cache in place, many rows unpacked codes.
        for q_heads in [3, 17] {
            let mut problem = Problem::new(Heads::new(q_heads, 1, dim), vec![150, 1]);
            problem.scores.softmax_scale = Some(40.0);
            let kv = problem.kv_lens.iter().map(|len| {
                let k = (0..len * dim).map(|i| [7.5, -7.5, 7.0][i / dim % 3]);
                [k.collect(), (0..len * dim).map(|_| next()).collect()]
            });
            let kv = kv.collect();
            let mut element = |i: usize| [1.0, -1.0][i / dim % 2] * (0.98 + next() / 150.0);
            let q = (0..problem.rows() * dim).map(&mut element).collect();
            let inputs = Inputs { kv, q };
            for scheme in Scheme::ALL.into_iter().filter(|scheme| scheme.is_integer()) {
                let format = KvFormat::same(scheme);
                if format.check(dim).is_ok() {
                    let cache = cached(&problem, format, 64, &inputs);
                    let kv = KvSource::Cache(&cache);
                    let what = format!("{q_heads} heads of {dim}");
                    compare(&problem, format, &inputs.q, kv, &[2], &what);
                }
            }
        }
    }
}
