//! Which kernels are chosen, and that they fit.

use super::{
    super::{config::H200_MEMORY_PACE, launch::Launch},
    *,
};
use attn_core::{Arithmetic, Heads};

/// A decode step of `[query heads, KV heads, dims]`.
fn step([q, kv, dim]: [usize; 3], kv_lens: impl Into<Vec<usize>>) -> Problem {
    Problem::new(Heads::new(q, kv, dim), kv_lens)
}

fn shape(rows: usize, format: KvFormat, head_dim: impl Into<HeadDim>, layout: KvLayout) -> Shape {
    Shape {
        rows,
        format,
        head_dim: head_dim.into(),
        layout,
        score_mods: false,
    }
}

#[test]
fn every_problem_fits_shared_memory_and_covers_its_rows() {
    for limit in [163 * 1024, 227 * 1024] {
        for rows in 1..=1024 {
            for dim in [64, 80, 96, 128, 192, 256] {
                for format in [KvFormat::INT8, KvFormat::INT4, KvFormat::same(Scheme::F16)] {
                    let Some(g) = shape(rows, format, dim, KvLayout::Pages(64))
                        .all(limit)
                        .next()
                    else {
                        let largest = format == KvFormat::same(Scheme::F16) && dim == 256;
                        assert!(largest && limit < 200 * 1024, "{format} {dim} {rows}");
                        continue;
                    };
                    let launch =
                        Launch::new(&g, &step([2 * rows, 2, dim], vec![5000; 3]), format, LIMITS);
                    assert!(launch.row_blocks * g.rows() >= rows, "{rows}");
                    assert!(
                        g.threads() <= 512
                            && shared_bytes(&g, format, dim.into(), KvLayout::Pages(64), limit)
                                <= limit
                    );
                }
            }
        }
    }
}

#[test]
fn short_batches_split_segments_by_tile() {
    let g = shape(4, KvFormat::INT8, 128, KvLayout::Pages(64))
        .split_kv(227 * 1024)
        .unwrap();
    let is_split = |heads: usize, batch: usize, kv_len| {
        let problem = step([4 * heads, heads, 128], vec![kv_len; batch]);
        Launch::new(&g, &problem, KvFormat::INT8, LIMITS).partial_per_segment
    };
    assert!(is_split(8, 1, 1024));
    assert!(!is_split(1, 512, 8192));
    assert!(!is_split(1, 1, 1 << 20));
}

const LIMITS: DeviceLimits = DeviceLimits {
    shared_limit: BULK_SHARED,
    sms: 132,
    memory_pace: H200_MEMORY_PACE,
};

fn chosen(problem: &Problem, format: KvFormat, kernel: KernelChoice) -> KernelConfig {
    let preferences = Preferences {
        kernel,
        ..Preferences::default()
    };
    select(problem, format, KvLayout::Pages(64), LIMITS, &preferences)
        .unwrap()
        .config
}

/// The kernel that `docs/data/h200-kernels.csv` has as the faster one is chosen.
#[test]
fn latency_and_full_waves_go_to_teams_that_share_tiles() {
    // Each of the shapes, (tokens, batch).
    let all = |format: &str, [q, kv]: [usize; 2], shapes: &[(usize, usize)], want: Kernel| {
        let format = format.parse().unwrap();
        for &(kv_len, batch) in shapes {
            let problem = step([q, kv, 128], vec![kv_len; batch]);
            let got = chosen(&problem, format, KernelChoice::Auto).kernel;
            assert_eq!(got, want, "{format}, {kv_len} tokens, batch {batch}");
        }
    };
    let (split_kv, cluster, global) = (
        Kernel::SplitKv,
        Kernel::LowLatencyCluster,
        Kernel::LowLatencyGlobal,
    );
    all("int8", [32, 8], &[(1, 1), (1024, 1), (4096, 1)], cluster);
    all("int8", [32, 8], &[(8192, 1), (32_768, 1)], global);
    // A few percent slower for the longest, faster for all that are shorter.
    all("int8", [32, 8], &[(131_072, 1)], global);
    all("int8", [32, 8], &[(262_144, 1)], split_kv);
    all("int8/int4", [32, 8], &[(131_072, 1)], split_kv);
    // Where memory is slower, more instructions cost less (H100: 27.7 and 23.9 µs).
    let h100 = DeviceLimits {
        memory_pace: 3.35e6,
        ..LIMITS
    };
    let of = |limits| {
        let (problem, preferences) = (step([32, 8, 128], [32_768]), Preferences::default());
        let (format, layout) = (KvFormat::INT8_INT4, KvLayout::Pages(64));
        let config = select(&problem, format, layout, limits, &preferences);
        config.map(|selected| selected.config.kernel)
    };
    assert_eq!((of(LIMITS), of(h100)), (Some(split_kv), Some(global)));
    all("int8", [8, 1], &[(8192, 32), (8192, 85)], global);
    all("int8", [8, 1], &[(8192, 64), (8192, 128)], cluster);
    all("int8", [8, 1], &[(8192, 256), (8192, 512)], split_kv);
    all("int8", [8, 2], &[(65_536, 1)], split_kv);
    let short = [(128, 1), (512, 1), (2048, 1), (4096, 1), (128, 8)];
    all("f16", [32, 32], &short, cluster);
    all("f16", [32, 32], &[(128, 16)], split_kv);
    all("bf16", [8, 1], &[(8192, 512), (8192, 400)], cluster);
    all("bf16", [8, 1], &[(8192, 300)], split_kv);
    all("bf16", [32, 8], &[(4096, 64), (1024, 128)], cluster);
    all("bf16", [32, 8], &[(8192, 1), (32_768, 1)], global);
    all("int4", [8, 1], &[(8192, 512)], split_kv);
}

#[test]
fn head_dims_choose_for_themselves() {
    for (head_dim, batch, want) in [
        (64, 256, Kernel::SplitKv),
        (96, 167, Kernel::SplitKv),
        (192, 85, Kernel::LowLatencyGlobal),
        (256, 64, Kernel::LowLatencyCluster),
    ] {
        let problem = step([8, 1, head_dim], vec![8192; batch]);
        let got = chosen(&problem, KvFormat::INT8, KernelChoice::Auto);
        assert_eq!(got.kernel, want, "{head_dim}");
    }
}

#[test]
fn a_kernel_can_be_had_always_and_never() {
    let problem = step([8, 1, 128], vec![8192; 512]);
    let of = |problem: &Problem, preference| {
        let config = chosen(problem, KvFormat::INT8, preference);
        let launch = Launch::new(&config, problem, KvFormat::INT8, LIMITS);
        (config.kernel, launch.grid)
    };
    let always = of(&problem, KernelChoice::LowLatency);
    assert_eq!(always, (Kernel::LowLatencyCluster, [1, 1, 512]));
    let never = of(&problem, KernelChoice::SplitKv(None));
    assert_eq!(never, (Kernel::SplitKv, [264, 1, 1]));
    assert_eq!(
        of(&problem, KernelChoice::LowLatencyGlobal).0,
        Kernel::SplitKv
    );
    let long = step([8, 1, 128], vec![300, 1]);
    assert_eq!(
        of(&long, KernelChoice::LowLatencyGlobal).0,
        Kernel::LowLatencyGlobal
    );
    let few = step([8, 1, 128], vec![100]);
    assert_eq!(of(&few, KernelChoice::SplitKv(None)).0, Kernel::SplitKv);
}

/// fp8 of many dims, as both ways were measured on an H200.
#[test]
fn fp8_of_many_dims_is_dequantized_where_split_kv_reads_it_often() {
    let fp8 = KvFormat::same(Scheme::Fp8E4m3);
    for (heads, dim, batch, kv_len, q_len, is_faster) in [
        ([32, 4], (192, 128), 8, 8192, 4, false),
        ([32, 4], (192, 128), 8, 8192, 16, true),
        ([8, 1], (256, 256), 8, 8192, 4, false),
        ([8, 1], (256, 256), 8, 8192, 16, true),
        ([128, 1], (192, 192), 8, 8192, 1, true),
        ([48, 1], (256, 256), 64, 8192, 1, false),
        ([32, 4], (192, 128), 1, 2048, 16, false),
        ([32, 4], (192, 128), 1, 4096, 4096, true),
    ] {
        let mut problem = step([heads[0], heads[1], 128], vec![kv_len; batch]).q_len(q_len);
        problem.head_dim = dim.into();
        let layout = KvLayout::Pages(64);
        let attended = dequantized(&problem, fp8, layout, LIMITS, &Preferences::default());
        assert_eq!(
            attended.is_some(),
            is_faster,
            "{heads:?} {dim:?} {kv_len} {q_len}"
        );
    }
}

#[test]
fn a_cache_is_dequantized_for_prompts_that_read_it_often() {
    let is_dequantized = |format: &str, q_len: usize, change: &dyn Fn(&mut Problem)| {
        let mut problem = step([16, 1, 128], [8192])
            .q_len(q_len)
            .arithmetic(Arithmetic::Fast);
        change(&mut problem);
        let (format, layout) = (format.parse().unwrap(), KvLayout::Pages(64));
        let preferences = Preferences::default();
        let attended = dequantized(&problem, format, layout, LIMITS, &preferences);
        assert!(attended.is_none_or(|as_pages| as_pages == (KvFormat::same(Scheme::F16), layout)));
        attended.is_some()
    };
    let as_it_is = |_: &mut Problem| ();
    // 16 heads read each token for every query token. Any scales do, and pairs; K and V of 16 bits are attended as they are.
    for (format, from) in [
        ("int8", 32),
        ("int4", 32),
        ("int4-g4", 32),
        ("int8-tensor", 32),
        ("int8/int4", 32),
        ("fp8", 256),
        ("f16/fp8", 256),
    ] {
        assert!(is_dequantized(format, from, &as_it_is), "{format}");
        assert!(!is_dequantized(format, from - 1, &as_it_is), "{format}");
    }
    for format in ["f16", "bf16", "bf16/int8", "fp8/int8"] {
        assert!(!is_dequantized(format, 4096, &as_it_is), "{format}");
    }
    // By all sequences; not by dims that `many_rows.cu` does not have, and not where bits are promised.
    let with_short = |p: &mut Problem| (p.q_lens, p.kv_lens) = (vec![1, 32], vec![8192; 2]);
    assert!(!is_dequantized("int8", 32, &with_short));
    assert!(!is_dequantized("int8", 4096, &|p| p.head_dim = 160.into()));
    assert!(is_dequantized("int8", 4096, &|p| p.head_dim = 192.into()));
    assert!(!is_dequantized("int8", 4096, &|p| p.scores.arithmetic = Arithmetic::Exact));
    assert!(is_dequantized("fp8", 4096, &|p| p.scores.arithmetic = Arithmetic::Exact));
    // Small pages are put together as they are.
    for format in [KvFormat::same(Scheme::Bf16), KvFormat::INT8, KvFormat::INT4] {
        let of_pages = |page_size| {
            let problem = step([16, 1, 128], [8192]).q_len(32);
            let layout = KvLayout::Pages(page_size);
            dequantized(&problem, format, layout, LIMITS, &Preferences::default())
        };
        let together = Some((format, KvLayout::Pages(64)));
        for (page_size, want) in [(16, together), (32, together), (64, None), (128, None)] {
            assert_eq!(of_pages(page_size), want, "{page_size}");
        }
    }
    // Rows of other caches, too.
    let problem = step([16, 1, 128], [8192]).q_len(4096);
    for layout in [KvLayout::Pages(16), KvLayout::Rows, KvLayout::PagedRows(16)] {
        let fp8 = KvFormat::same(Scheme::Fp8E4m3);
        let attended = dequantized(&problem, fp8, layout, LIMITS, &Preferences::default());
        assert_eq!(
            attended,
            Some((KvFormat::same(Scheme::F16), KvLayout::Pages(64))),
            "{layout:?}"
        );
    }
}

#[test]
fn a_formats_rows_alone_say_from_when_on_they_are_many() {
    for (format, few) in [("int8", 32), ("bf16", 24), ("f16", 24), ("fp8", 16)] {
        let takes = |rows, batch: usize| {
            let problem = step([rows, 1, 128], vec![8192; batch]);
            let layout = KvLayout::Pages(64);
            let preferences = Preferences::default();
            let format = format.parse().unwrap();
            many_rows(&problem, format, layout, LIMITS, &preferences).is_some()
        };
        for batch in [1, 256] {
            assert!(!takes(few, batch), "{format}, {few} rows");
            assert!(takes(few + 1, batch), "{format}, {} rows", few + 1);
        }
    }
}

/// Kills a choice by `split_kv.cu`, which takes three to ten times as long.
#[test]
fn floats_of_many_and_of_unlike_dims_have_many_rows() {
    let takes = |format: &str, rows, dim: (usize, usize), layout| {
        let heads = Heads::new(rows, 1, HeadDim::from(dim));
        let problem = Problem::new(heads, [8192]);
        let format = format.parse().unwrap();
        many_rows(&problem, format, layout, LIMITS, &Preferences::default()).map(|c| c.row_warps)
    };
    let pages = KvLayout::Pages(64);
    for format in ["bf16", "f16"] {
        // Those that `split_kv.cu` reads the cache for once.
        for (dim, few) in [((192, 128), 8), ((192, 192), 8), ((256, 256), 16)] {
            assert_eq!(takes(format, few, dim, pages), None, "{dim:?}");
            assert_eq!(takes(format, few + 1, dim, pages), Some(2), "{dim:?}");
            assert_eq!(takes(format, 128, dim, pages), Some(2), "{dim:?}");
        }
        for dim in [(128, 192), (128, 64), (576, 576)] {
            assert_eq!(takes(format, 128, dim, pages), None, "{dim:?}");
        }
        // The copy engine has rows of both sides by one swizzle.
        assert_eq!(takes(format, 128, (192, 128), KvLayout::Rows), None);
        assert_eq!(takes(format, 128, (192, 192), KvLayout::Rows), Some(2));
    }
    assert_eq!(takes("fp8", 128, (192, 128), pages), None);
    // Nothing else has those of more than 256 dims.
    for (format, dim) in [
        ("bf16", (512, 512)),
        ("f16", (576, 512)),
        ("fp8", (320, 320)),
        ("bf16", (64, 320)),
        ("bf16-latents", (576, 512)),
        ("fp8-latents", (320, 256)),
    ] {
        for rows in [1, 128] {
            assert_eq!(takes(format, rows, dim, pages), Some(2), "{format} {dim:?}");
        }
    }
    // The copy engine has parts of rows that its widest swizzle divides.
    assert_eq!(
        takes("bf16", 8, (512, 256), KvLayout::PagedRows(16)),
        Some(2)
    );
    assert_eq!(takes("bf16", 8, (320, 320), KvLayout::Rows), None);
    assert_eq!(takes("fp8", 8, (512, 512), KvLayout::Rows), None);
}

#[test]
fn few_rows_are_many_where_teams_have_a_span_each() {
    let takes = |format: &str, rows, batch: usize| {
        let problem = step([rows, 1, 128], vec![8192; batch]);
        let (format, layout) = (format.parse().unwrap(), KvLayout::Pages(64));
        let preferences = Preferences::default();
        many_rows(&problem, format, layout, LIMITS, &preferences).map(|config| config.row_groups)
    };
    // 8, 128, 256, 512 and 1024 spans for 132 SMs.
    let few = [None, None, Some(4), None, None];
    let more = [None, None, Some(4), Some(4), None];
    for (rows, want) in [(8, [None; 5]), (9, few), (16, few), (17, more), (32, more)] {
        for format in ["int8", "int8-plain", "int8-tensor"] {
            let got = [1, 16, 32, 64, 128].map(|batch| takes(format, rows, batch));
            assert_eq!(got, want, "{format}, {rows} rows");
        }
    }
    let all = [None, None, Some(4), Some(4), Some(4)];
    for (rows, half_steps, others) in [
        (8, [None; 5], [None; 5]),
        (9, few, [None; 5]),
        (17, few, few),
        (24, few, few),
        (25, all, few),
        (32, all, few),
    ] {
        for (format, want) in [
            ("int4", half_steps),
            ("int4-g1", others),
            ("int8/int4", others),
        ] {
            let got = [1, 16, 32, 64, 128].map(|batch| takes(format, rows, batch));
            assert_eq!(got, want, "{format}, {rows} rows");
        }
    }
    // As many spans in sequences of 1024, 2048 and 4096 tokens.
    for (batch, kv_len, rows, [int8, int4]) in [
        (256, 1024, 16, [true; 2]),
        (128, 2048, 16, [true, false]),
        (128, 2048, 17, [true; 2]),
        (64, 4096, 16, [true; 2]),
    ] {
        let problem = step([rows, 1, 128], vec![kv_len; batch]);
        let (layout, preferences) = (KvLayout::Pages(64), Preferences::default());
        for (format, want) in [(KvFormat::INT8, int8), (KvFormat::INT4, int4)] {
            let taken = many_rows(&problem, format, layout, LIMITS, &preferences);
            assert_eq!(
                taken.is_some(),
                want,
                "{format}, {kv_len} tokens, {rows} rows"
            );
        }
    }
    assert_eq!(takes("int8", 33, 32), Some(8));
    assert_eq!(takes("int4", 33, 32), Some(8));
}

#[test]
fn gpus_without_a_copy_engine_have_many_rows() {
    let a100 = DeviceLimits::new(163 * 1024, 108);
    let takes = |format: &str, [rows, dim]: [usize; 2], layout| {
        let problem = step([rows, 1, dim], [8192]);
        let format = format.parse().unwrap();
        many_rows(&problem, format, layout, a100, &Preferences::default()).is_some()
    };
    let pages = KvLayout::Pages(64);
    for (format, few) in [
        ("int8", 32),
        ("int4", 32),
        ("fp8", 16),
        ("bf16", 8),
        ("f16", 8),
    ] {
        assert!(!takes(format, [few, 128], pages), "{format}, {few} rows");
        assert!(takes(format, [few + 1, 128], pages), "{format}");
        let has_rows = !format.starts_with("int");
        assert_eq!(
            takes(format, [96, 128], KvLayout::Rows),
            has_rows,
            "{format}"
        );
        assert_eq!(
            takes(format, [96, 256], pages),
            format.ends_with("16"),
            "{format}"
        );
    }
    // A stage of 32 KB for each of four teams is more than `split_kv.cu` has room for.
    let problem = step([8, 1, 256], [8192]);
    let bf16 = KvFormat::same(Scheme::Bf16);
    let config = select(&problem, bf16, pages, a100, &Preferences::default())
        .unwrap()
        .config;
    assert_eq!((config.kernel, config.row_warps), (Kernel::ManyRows, 2));
    let unwanted = Preferences {
        kernel: KernelChoice::SplitKv(None),
        ..Preferences::default()
    };
    let selects = |q_len| {
        let problem = problem.clone().q_len(q_len);
        select(&problem, bf16, pages, a100, &unwanted).is_some()
    };
    assert!(selects(16) && !selects(17));
    assert!(takes("bf16", [96, 80], KvLayout::Pages(16)));
}

#[test]
fn stages_of_16_bit_floats_hold_whole_tiles() {
    let few_dims = [64, 80, 96, 128].map(|dim| [(dim, 33, 1), (dim, 128, 2), (dim, 129, 3)]);
    for (head_dim, rows, row_warps) in few_dims
        .into_iter()
        .flatten()
        .chain([(192, 128, 2), (256, 1000, 2)])
    {
        let shape = Shape {
            rows,
            format: "bf16".parse().unwrap(),
            head_dim: HeadDim::same(head_dim),
            layout: KvLayout::Pages(64),
            score_mods: false,
        };
        let config = shape.many_rows(LIMITS.shared_limit).unwrap();
        let case = format!("{head_dim} dims, {rows} rows: {config:?}");
        assert_eq!(config.row_warps, row_warps, "{case}");
        // K and V of a tile, and of the next one.
        assert!(
            config.stages.is_multiple_of(2) && config.stages >= 4,
            "{case}"
        );
    }
}

#[test]
fn a_configuration_that_is_asked_for_is_taken() {
    let problem = step([8, 1, 128], vec![8192; 512]);
    let config: KernelConfig = "1x2x3x1".parse().unwrap();
    let preferences = Preferences {
        kernel: KernelChoice::SplitKv(Some(config)),
        ..Preferences::default()
    };
    let got = select(
        &problem,
        KvFormat::INT8,
        KvLayout::Pages(64),
        LIMITS,
        &preferences,
    );
    let got = got.unwrap();
    assert_eq!(got.config, config);
    // What was weighed is told: two kernels cover eight rows, each with an estimate, and a third 48 rows, which has none.
    let weighed = |selected: &Selected| -> Vec<_> {
        let all = selected.candidates.iter();
        all.map(|c| (c.config.kernel, c.us.is_some())).collect()
    };
    let split_kv = (Kernel::SplitKv, true);
    assert_eq!(weighed(&got), [split_kv, (Kernel::LowLatencyCluster, true)]);
    assert_eq!(got.candidates[0].config, config);
    let (layout, auto) = (KvLayout::Pages(64), Preferences::default());
    let problem = step([48, 1, 128], vec![8192; 32]);
    let many = select(&problem, KvFormat::INT8, layout, LIMITS, &auto).unwrap();
    assert_eq!(weighed(&many)[..1], [split_kv]);
    assert_eq!(weighed(&many).last(), Some(&(many.config.kernel, false)));
    assert!(many.config.kernel.is_many_rows());
}

/// Wide rows on an H200, int8, µs by `split_kv.cu` and by `many_rows.cu`: the faster one is chosen where they differ by a tenth and more.
#[test]
fn wide_rows_take_the_kernel_that_was_measured_faster() {
    let latents = HeadDim::from((576, 512));
    let expanded = HeadDim::from((192, 128));
    for ([q, kv], dim, ctx, batch, q_len, [split_kv, many_rows]) in [
        ([16, 1], latents, 8192, 1, 1, [31.6, 44.9]),
        ([16, 1], latents, 8192, 16, 1, [114.7, 49.5]),
        ([16, 1], latents, 8192, 32, 1, [203.0, 87.9]),
        ([16, 1], latents, 1024, 128, 1, [104.6, 48.9]),
        ([64, 1], latents, 8192, 8, 1, [181.6, 50.8]),
        ([128, 1], latents, 8192, 4, 1, [170.8, 50.1]),
        ([128, 1], latents, 8192, 32, 1, [1588.5, 183.8]),
        ([128, 1], latents, 256, 64, 1, [222.3, 38.1]),
        ([32, 2], 512.into(), 8192, 32, 1, [360.8, 153.3]),
        ([16, 1], 256.into(), 8192, 8, 1, [24.8, 30.4]),
        ([16, 1], 256.into(), 8192, 64, 1, [78.2, 94.9]),
        ([48, 1], 256.into(), 8192, 64, 1, [265.7, 106.7]),
        ([8, 4], 256.into(), 8192, 8, 16, [97.1, 54.9]),
        ([8, 4], 256.into(), 4096, 1, 4096, [591.5, 262.0]),
        ([32, 4], expanded, 8192, 8, 4, [61.3, 44.4]),
        ([32, 4], expanded, 8192, 8, 16, [239.4, 84.5]),
        ([32, 4], expanded, 4096, 1, 4096, [1790.1, 653.2]),
    ] {
        let problem = Problem::new(Heads::new(q, kv, dim), vec![ctx; batch]).q_len(q_len);
        let preferences = Preferences::default();
        let pages = KvLayout::Pages(64);
        let many = super::many_rows(&problem, KvFormat::INT8, pages, LIMITS, &preferences);
        assert_eq!(
            many.is_some(),
            many_rows < split_kv,
            "{q}/{kv} {dim}, {batch} of {ctx}"
        );
        // The estimates that are shown are those that decide.
        let selected = select(&problem, KvFormat::INT8, pages, LIMITS, &preferences).unwrap();
        let us = |candidate: &&Candidate| candidate.us.unwrap();
        let fastest = selected
            .candidates
            .iter()
            .min_by(|a, b| us(a).total_cmp(&us(b)));
        let is_chosen = |c: &Candidate| c.config.kernel.is_many_rows() == many.is_some();
        assert!(fastest.is_some_and(is_chosen), "{:?}", selected.candidates);
    }
}

/// Kills pages of residuals that wide rows would be read without, and values wider than keys, which `dequantize.cu` does not write.
#[test]
fn wide_rows_become_f16_where_they_have_no_residuals() {
    for (format, dim, want) in [
        ("int8-plain", (512, 512), true),
        ("fp8", (512, 512), true),
        ("int4", (512, 512), false),
        ("int4-w0", (512, 512), true),
        ("int4", (256, 256), true),
        ("int8-plain", (64, 320), false),
        ("bf16-latents", (576, 512), false),
    ] {
        let heads = Heads::new(8, 1, HeadDim::from(dim));
        let problem = Problem::new(heads, [4096]).q_len(4096);
        let problem = problem.arithmetic(Arithmetic::Fast);
        let (format_of, pages) = (format.parse().unwrap(), KvLayout::Pages(64));
        let found = dequantized_as(&problem, format_of, pages, LIMITS.shared_limit);
        assert_eq!(found.is_some(), want, "{format} {dim:?}");
    }
}
