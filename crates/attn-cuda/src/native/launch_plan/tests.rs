//! What plans are made of: kernels, workspaces, parameters, and what is refused.

use super::*;
use attn_core::{Arithmetic, HeadDim, Heads, Scheme};
use attn_kernels::cuda::{Arch, KernelChoice, embedded::common};

use super::super::{DeviceAddress, DeviceKv, PagedSequences, Pages};

fn limits() -> DeviceLimits {
    DeviceLimits::new(227 * 1024, 132)
}

fn plan(heads: usize, kv_lens: Vec<usize>) -> (Problem, Result<LaunchPlan, Error>) {
    plan_of(PlanKind::Known, KvFormat::INT8, heads, kv_lens)
}

fn plan_of(
    kind: PlanKind,
    format: KvFormat,
    heads: usize,
    kv_lens: Vec<usize>,
) -> (Problem, Result<LaunchPlan, Error>) {
    let problem = Problem::new(Heads::new(4 * heads, heads, 128), kv_lens);
    let preferences = Preferences::default();
    let plan = LaunchPlan::new(
        kind,
        limits(),
        &preferences,
        &problem,
        format,
        KvLayout::Pages(64),
    );
    (problem, plan)
}

#[test]
fn a_decode_step_over_shards_of_a_preset_has_an_embedded_kernel() {
    for (arch, sms) in [(Arch::Sm80, 108), (Arch::Sm90a, 132)] {
        let limits = DeviceLimits::new(arch.shared_limit(), sms);
        let embedded = common(arch);
        for (format, dim, q) in [
            (KvFormat::INT8, 64, 8),
            (KvFormat::INT8, 128, 32),
            (KvFormat::INT4, 64, 32),
            (KvFormat::INT4, 128, 64),
        ] {
            let problem = Problem::new(Heads::new(q, 8, dim), vec![100_000; 5]);
            let (kind, layout) = (PlanKind::Spans, KvLayout::Pages(64));
            let preferences = Preferences::default();
            let plan = LaunchPlan::new(kind, limits, &preferences, &problem, format, layout);
            let instance = plan.unwrap().instance;
            assert!(embedded.contains(&instance), "{arch:?}: {instance:?}");
            let head_dim = HeadDim::same(dim);
            let merge = Instance::MergeSpans { format, head_dim };
            assert!(embedded.contains(&merge), "{arch:?}: {merge:?}");
        }
    }
}

/// Kills a plan for shards by a kernel that leaves no states of spans, which would write elsewhere.
#[test]
fn shards_are_attended_by_the_kernel_that_leaves_spans_or_refused() {
    let a100 = DeviceLimits::new(Arch::Sm80.shared_limit(), 108);
    for (format, dim, limits, is_served) in [
        ("int8", HeadDim::same(512), limits(), true),
        ("bf16", HeadDim::same(256), limits(), true),
        ("bf16", HeadDim::same(256), a100, false),
        ("bf16", HeadDim::same(512), limits(), false),
        ("fp8", HeadDim::same(512), limits(), false),
        ("bf16-latents", HeadDim { k: 576, v: 512 }, limits(), false),
    ] {
        let problem = Problem::new(Heads::new(8, 1, dim), [4096]);
        let plan = |kind| {
            let (format, layout) = (format.parse().unwrap(), KvLayout::Pages(64));
            let preferences = Preferences::default();
            LaunchPlan::new(kind, limits, &preferences, &problem, format, layout)
        };
        plan(PlanKind::Known).unwrap();
        match plan(PlanKind::Spans) {
            Ok(plan) => assert!(
                is_served && plan.config.kernel == Kernel::SplitKv,
                "{format} {dim}"
            ),
            Err(refused) => {
                assert!(!is_served, "{format} {dim}: {refused}");
                assert!(refused.to_string().contains("shards of"), "{refused}");
            }
        }
    }
}

#[test]
fn integers_become_floats_in_prompts_that_say_so_alone() {
    let heads = Heads::new(16, 1, 128);
    let plan = |kind, arithmetic, q_len, dequantize| {
        let problem = Problem::new(heads, [4096]).q_len(q_len);
        let problem = problem.arithmetic(arithmetic);
        let (format, layout) = (KvFormat::INT8, KvLayout::Pages(64));
        let preferences = Preferences {
            dequantize,
            ..Preferences::default()
        };
        LaunchPlan::new(kind, limits(), &preferences, &problem, format, layout).unwrap()
    };
    let (exact, fast) = (Arithmetic::Exact, Arithmetic::Fast);
    for (kind, arithmetic, q_len, dequantize, want) in [
        (PlanKind::Known, fast, 32, None, true),
        (PlanKind::Ragged, fast, 32, None, true),
        // Too few rows for what it takes, whatever it gains; a step of few tokens; exact ones.
        (PlanKind::Known, fast, 31, None, false),
        (PlanKind::Known, fast, 17, Some(true), true),
        (PlanKind::Known, fast, 16, Some(true), false),
        (PlanKind::Known, exact, 4096, Some(true), false),
        (PlanKind::Known, fast, 4096, Some(false), false),
        // Shards have one device's bits.
        (PlanKind::Spans, fast, 4096, Some(true), false),
    ] {
        let plan = plan(kind, arithmetic, q_len, dequantize);
        let given = format!("{kind:?}, {arithmetic:?}, {q_len} tokens, {dequantize:?}");
        assert_eq!(plan.dequantized.is_some(), want, "{given}");
        let is_f16 =
            matches!(plan.instance, Instance::Decode { format, .. } if format.k == Scheme::F16);
        assert_eq!(is_f16, want, "{given}");
        // Pages of f16, a table, and scales.
        let workspace = plan.workspace_bytes() - plan.before_dequantized();
        let pages = 64 * (2 * 64 * 128 * 2) + 256 + 256;
        assert_eq!(workspace, if want { pages } else { 0 }, "{given}");
    }
}

#[test]
fn what_takes_many_copies_to_a_tile_is_written_again_for_prompts() {
    let heads = Heads::new(32, 8, 128);
    let a100 = DeviceLimits::new(Arch::Sm80.shared_limit(), 108);
    let bf16 = KvFormat::same(Scheme::Bf16);
    let [gather, rows] = [Some("gather_pages"), Some("dequantize_rows")];
    for (format, limits, layout, q_len, want) in [
        (bf16, limits(), KvLayout::Pages(16), 128, gather),
        (KvFormat::INT8, limits(), KvLayout::Pages(16), 128, gather),
        (KvFormat::INT4, a100, KvLayout::Pages(32), 2048, gather),
        (bf16, limits(), KvLayout::Pages(16), 127, None),
        (KvFormat::INT8, a100, KvLayout::Pages(64), 2048, None),
        (bf16, limits(), KvLayout::Pages(128), 2048, None),
        // Rows come by tensor maps where there is a copy engine, a box or two for each page.
        (bf16, limits(), KvLayout::PagedRows(64), 2048, None),
        (bf16, limits(), KvLayout::PagedRows(16), 128, rows),
        (bf16, a100, KvLayout::PagedRows(64), 128, rows),
        (bf16, a100, KvLayout::Rows, 127, None),
    ] {
        let problem = Problem::new(heads, [4096]).q_len(q_len);
        let (kind, preferences) = (PlanKind::Known, Preferences::default());
        let plan = LaunchPlan::new(kind, limits, &preferences, &problem, format, layout).unwrap();
        let given = format!("{format}, {layout:?}, {q_len} tokens");
        let made = plan.dequantized.map(|pages| pages.instance.name());
        assert_eq!(made, want, "{given}");
        assert!(plan.config.kernel.is_many_rows(), "{given}");
        let attended = match want {
            Some(_) => KvLayout::Pages(64),
            None => layout,
        };
        let is_so = matches!(plan.instance, Instance::Decode { format: of, layout, .. } if of == format && layout == attended);
        assert!(is_so, "{given}: {:?}", plan.instance);
    }
}

#[test]
fn query_blocks_stay_whole_where_sequences_of_as_many_rows_are_split() {
    let kernel = |kv_lens: Vec<usize>, q_len: usize| {
        let heads = Heads::new(32, 2, 128);
        let problem = Problem::new(heads, kv_lens).q_len(q_len);
        let (kind, layout) = (PlanKind::Known, KvLayout::Pages(64));
        let (format, preferences) = (KvFormat::INT8, Preferences::default());
        let plan = LaunchPlan::new(kind, limits(), &preferences, &problem, format, layout);
        plan.unwrap().config.kernel
    };
    // 64 blocks of 8 tokens in two KV heads; as many sequences with 8 tokens each, whose lengths on the device the plan does not know.
    assert_eq!(kernel(vec![8192], 512), Kernel::ManyRowsWhole);
    assert_eq!(kernel(vec![8192; 64], 8), Kernel::ManyRows);
    assert_eq!(kernel(vec![8192; 528], 8), Kernel::ManyRowsWhole);
}

#[test]
fn a_cache_beyond_its_share_of_memory_is_attended_as_it_is() {
    let heads = Heads::new(32, 8, 128);
    // 2^18 tokens of 4 KB; twice as much where some are written with residuals, too.
    for (format, batch, want) in [
        (KvFormat::INT8, 8, true),
        (KvFormat::INT8, 9, false),
        (KvFormat::INT4, 4, true),
        (KvFormat::INT4, 5, false),
    ] {
        let problem = Problem::new(heads, vec![32_768; batch]).q_len(2048);
        let problem = problem.arithmetic(Arithmetic::Fast);
        let (kind, layout) = (PlanKind::Known, KvLayout::Pages(64));
        let preferences = Preferences::default();
        let plan = LaunchPlan::new(kind, limits(), &preferences, &problem, format, layout);
        let got = plan.unwrap().dequantized.is_some();
        assert_eq!(got, want, "{format}, {batch} sequences");
    }
}

/// Kills centres that a fast launch would leave out: it attends what the keys dequantize to.
#[test]
fn centres_reach_exact_launches_alone() {
    let heads = Heads::new(16, 1, 128);
    let [at, rows] = [0x500, 0x600].map(DeviceAddress::new);
    let centres = CentresArgs::side_by_side(at, 256, rows);
    let params = |format: &str, arithmetic| {
        let problem = Problem::new(heads, [4096]).q_len(64);
        let problem = problem.arithmetic(arithmetic);
        let (kind, layout) = (PlanKind::Known, KvLayout::Pages(64));
        let (preferences, format) = (Preferences::default(), format.parse().unwrap());
        let plan = LaunchPlan::new(kind, limits(), &preferences, &problem, format, layout);
        plan?.centres_params(&centres, DecodeParams::default())
    };
    let made = params("int8", Arithmetic::Exact).unwrap();
    assert_eq!((made.centres, made.centre_rows), (0x500, 0x600));
    assert_eq!((made.centre_stride, made.centre_rows_stride), (256, 1));
    let refused = params("int8", Arithmetic::Fast).unwrap_err().to_string();
    assert!(refused.contains("Arithmetic::Exact"), "{refused}");
    assert!(params("int8-plain", Arithmetic::Exact).is_err());
}

#[test]
fn prompts_of_presets_have_embedded_kernels_on_hopper() {
    let embedded = common(Arch::Sm90a);
    for format in [KvFormat::INT8, KvFormat::INT4] {
        for arithmetic in [Arithmetic::Exact, Arithmetic::Fast] {
            for dim in [64, 128] {
                let heads = Heads::new(32, 8, dim);
                let problem = Problem::new(heads, [4096, 300]).q_lens([4096, 200]);
                let problem = problem.arithmetic(arithmetic);
                let (kind, layout) = (PlanKind::Known, KvLayout::Pages(64));
                let preferences = Preferences::default();
                let plan = LaunchPlan::new(kind, limits(), &preferences, &problem, format, layout);
                let plan = plan.unwrap();
                let is_fast = arithmetic == Arithmetic::Fast;
                assert_eq!(plan.dequantized.is_some(), is_fast, "{format}");
                let makes = plan.dequantized.map(|pages| pages.instance);
                for instance in [Some(plan.instance), makes].into_iter().flatten() {
                    assert!(embedded.contains(&instance), "{instance:?}");
                }
            }
        }
    }
}

fn is_too_much<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Unsupported(Unsupported::NoKernel { what, .. })) if what.contains("half tiles"))
}

#[test]
fn work_that_kernels_cannot_add_up_is_refused() {
    // 2 · 16384 tiles, 4096 segments and 32 for each of 32 heads: 2^30 are 909.4 such sequences.
    let long = 1 << 20;
    assert!(plan(32, vec![long; 909]).1.is_ok());
    for batch in [910, 2048, 4096, 1 << 17] {
        assert!(is_too_much(plan(32, vec![long; batch]).1), "{batch}");
    }
    // Counted one by one, with what every sequence costs.
    let (problem, mixed) = plan(32, [vec![long; 890], vec![0; 10_000]].concat());
    assert!(mixed.is_ok());
    // A native plan's lengths may all become the longest.
    assert!(is_too_much(mixed.unwrap().check_longest(&problem)));
    assert!(is_too_much(plan(65_536, vec![1; 500]).1));
    let (problem, few) = plan(8, vec![long; 1000]);
    few.unwrap().check_longest(&problem).unwrap();
}

fn args(page_table_stride: usize) -> DecodeArgs {
    let null = DeviceAddress::NULL;
    let kv = DeviceKv::Paged(PagedSequences {
        pool: Pages {
            at: DeviceAddress::NULL,
            stride: 2 * (2 * 64 * 128 + 2 * 64 * 2),
            num_pages: 1,
        },
        page_table: DeviceAddress::NULL,
        page_table_stride,
        residual_pages: DeviceAddress::NULL,
        residual_slots: 0,
        kv_lens: DeviceAddress::NULL,
        tensor_scales: [DeviceAddress::NULL; 2],
    });
    DecodeArgs::new(null, null, super::super::Dtype::F32, kv, null)
}

#[test]
fn static_scales_are_needed_but_for_those_of_v_in_a_shard() {
    let format: KvFormat = "int8-tensor".parse().unwrap();
    let (none, at) = (DeviceAddress::NULL, DeviceAddress::new(0x100));
    let page = PageLayout::new(format, 128, 64, 2).unwrap();
    for (kind, of_v) in [(PlanKind::Known, Some("v_scales")), (PlanKind::Spans, None)] {
        let (problem, plan) = plan_of(kind, format, 2, vec![700]);
        let plan = plan.unwrap();
        for (tensor_scales, missing) in [
            ([none, at], Some("k_scales")),
            ([at, none], of_v),
            ([at, at], None),
        ] {
            let mut args = args(11);
            if let DeviceKv::Paged(sequences) = &mut args.kv {
                (sequences.pool, sequences.tensor_scales) =
                    (Pages::new(none, &page, 1), tensor_scales);
            }
            match plan.params(&problem, &args) {
                Ok(_) => assert_eq!(missing, None),
                Err(Error::MissingScales { what, .. }) => assert_eq!(missing, Some(what)),
                Err(other) => panic!("{other}"),
            }
        }
    }
}

#[test]
fn sinks_of_a_problem_have_an_address() {
    let (problem, plan) = plan(2, vec![700]);
    let (plan, mut args) = (plan.unwrap(), args(11));
    let with_sinks = problem.clone().sinks([1.0; 8]);
    let refused = plan.params(&with_sinks, &args).unwrap_err();
    assert!(matches!(refused, Error::Parameter { what: "sinks", .. }));
    assert_eq!(plan.params(&problem, &args).unwrap().sinks, 0);
    args.sinks = DeviceAddress::new(0x100);
    for problem in [problem, with_sinks] {
        assert_eq!(plan.params(&problem, &args).unwrap().sinks, 0x100);
    }
}

#[test]
fn numbers_of_more_than_31_bits_are_refused() {
    let (problem, plan) = plan(2, vec![700]);
    let plan = plan.unwrap();
    let params = plan.params(&problem, &args(11)).unwrap();
    let page_bytes = 2 * (2 * 64 * 128 + 2 * 64 * 2);
    assert_eq!(
        (params.page_table_stride, params.page_stride),
        (11, page_bytes)
    );
    for stride in [1 << 31, (1 << 32) + 11, usize::MAX] {
        let what = "page_table_stride";
        let result = plan.params(&problem, &args(stride));
        assert!(matches!(result, Err(Error::Parameter { what: w, .. }) if w == what));
    }
}

/// Kills offsets from the workspace for what lies in the scratch memory, and partials that rely on zeros there.
#[test]
fn scratch_memory_has_all_but_what_is_zeroed() {
    let heads = Heads::new(16, 1, 128);
    let (workspace, scratch) = (DeviceAddress::new(0x1000), DeviceAddress::new(0x8000_0000));
    for (q_len, batch, kernel) in [
        (1, 64, KernelChoice::Auto),
        (4096, 1, KernelChoice::Auto),
        (1, 1, KernelChoice::LowLatencyGlobal),
    ] {
        let problem = Problem::new(heads, vec![8192; batch]).q_len(q_len);
        let problem = problem.arithmetic(Arithmetic::Fast);
        let kind = PlanKind::Ragged;
        let preferences = Preferences {
            kernel,
            ..Preferences::default()
        };
        let (format, layout) = (KvFormat::INT8, KvLayout::Pages(64));
        let plan = LaunchPlan::new(kind, limits(), &preferences, &problem, format, layout).unwrap();
        let given = format!("{q_len} tokens, batch {batch}, {:?}", plan.config.kernel);
        let sizes = [plan.zeroed_bytes(), plan.scratch_bytes()];
        assert_eq!(
            sizes.iter().sum::<usize>(),
            plan.workspace_bytes(),
            "{given}"
        );
        let at = |scratch| {
            let args = DecodeArgs {
                workspace,
                scratch,
                query_blocks: DeviceAddress::new(0x100),
                ..args(128)
            };
            let params = plan.params(&problem, &args).unwrap();
            let made = plan.dequantize_params(&args, params).0;
            [
                params.counters,
                params.partial_max_sum,
                params.partial_o,
                made.map_or(0, |made| made.pages),
            ]
        };
        let [within, apart] = [at(DeviceAddress::NULL), at(scratch)];
        assert_eq!([within[0], apart[0]], [0x1000; 2], "{given}");
        let moved = match plan.config.kernel {
            Kernel::LowLatencyGlobal => 0,
            _ => scratch.get() - workspace.offset(plan.zeroed_bytes()).get(),
        };
        let moves = |i: usize| apart[i].wrapping_sub(within[i]);
        assert_eq!([moves(1), moves(2)], [moved; 2], "{given}");
        assert_eq!(moves(3), if within[3] > 0 { moved } else { 0 }, "{given}");
    }
}
