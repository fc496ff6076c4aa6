//! Each claim of the suite, over a backend that breaks that claim alone.

use std::{
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use attn_conformance::{
    Build, Case, Inputs, Outcome, Size, cases_from_env, check, check_case, check_table,
    fake::{FakeBackend, FakePages},
    table,
};
use attn_core::{
    CacheConfig, DecodeAttention, Error, Heads, KvFormat, KvSource, Problem, SpansStep, Unsupported,
};
use attn_cpu::Reference;

/// The reference, of which a test changes one thing.
fn spoilt() -> FakeBackend {
    FakeBackend::of(Reference::new())
}

fn case(format: &str) -> Case {
    Case::new([2, 1], 64, &[70, 9], format.parse().unwrap())
}

fn outcome(backend: &FakeBackend, case: &Case) -> Outcome {
    check_case(&Reference::new(), backend, case)
}

fn failure(backend: &FakeBackend, case: &Case) -> String {
    match outcome(backend, case) {
        Outcome::Failed(text) => text,
        other => panic!("{other:?}"),
    }
}

fn flip(out: &mut [f32]) {
    out[7] = f32::from_bits(out[7].to_bits() ^ 1);
}

#[test]
fn a_backend_that_says_nothing_of_shards_refuses_them() {
    let backend = spoilt();
    let (heads, format) = (Heads::new(1, 1, 64), KvFormat::INT8);
    let config = CacheConfig::builder(format, heads).max_len(64).build();
    let mut cache = backend.create_cache(&config).unwrap();
    cache.append(0, &[0.5; 64], &[2.0; 64]).unwrap();
    let plan = backend.plan(&Problem::new(heads, [64]), format).unwrap();
    let q = [0.5; 64];
    let step = SpansStep::new(&plan, &q, KvSource::Cache(&cache)).unwrap();
    // The same step is one of the backend that it wraps.
    assert_eq!(Reference::new().attend_spans(&step).unwrap().spans(), 1);
    let refused = backend.attend_spans(&step).unwrap_err();
    assert!(
        matches!(refused, Error::Unsupported(Unsupported::NoKernel { .. })),
        "{refused}"
    );
}

#[test]
fn the_first_cache_byte_that_differs_is_named() {
    let backend = spoilt().with_caches(|config| {
        let mut config = config.clone();
        config.k_tensor_scales.iter_mut().for_each(|s| *s *= 2.0);
        Reference::new().create_cache(&config)
    });
    let text = failure(&backend, &case("int8-tensor"));
    assert!(
        text.contains("cache byte 0 of page 0 of sequence 0 is"),
        "{text}"
    );
}

#[test]
fn another_number_of_pages_is_a_failure() {
    // Pages without a window are as large, but no residual pages belong to them.
    let backend = spoilt().with_caches(|config| {
        let mut config = config.clone();
        config.format = "int4-w0".parse()?;
        Reference::new().create_cache(&config)
    });
    let text = failure(&backend, &case("int4"));
    assert!(
        text.contains("sequence 0 has 2 pages, expected 4"),
        "{text}"
    );
}

#[test]
fn appends_to_a_fork_that_reach_its_sibling_are_a_failure() {
    let caches = AtomicUsize::new(0);
    // The first cache is the one that is decoded; appends to the others write page 0, too.
    let backend = spoilt().with_caches(move |config| {
        let pages = FakePages::new(config)?;
        match caches.fetch_add(1, Ordering::Relaxed) {
            0 => pages.cache(),
            _ => pages
                .with_appends(|pages, call| {
                    call.write(pages, call.writes)?;
                    call.change_page(pages, 0)
                })
                .cache(),
        }
    });
    let mut forked = case("int8");
    forked.build = Build::Forked;
    let text = failure(&backend, &forked);
    assert!(
        text.contains("appending to the fork changed its sibling"),
        "{text}"
    );
}

#[test]
fn inputs_of_the_largest_magnitudes_are_compared_in_bytes_alone() {
    let backend = spoilt().with_answers(|answer| answer.out.fill(f32::NAN));
    let mut extreme = case("int8");
    extreme.inputs = Inputs::Extreme;
    assert_eq!(outcome(&backend, &extreme), Outcome::Passed(0));
    // Huge ones also in bits, and for numbers that are finite, but not with the oracle.
    let mut huge = case("bf16");
    huge.inputs = Inputs::Huge;
    assert!(failure(&backend, &huge).contains("out[0] is NaN"));
    let backend = spoilt().named("theirs");
    let backend = backend.with_answers(|answer| answer.out.iter_mut().for_each(|x| *x *= 1.5));
    assert!(matches!(outcome(&backend, &huge), Outcome::Passed(_)));
    huge.inputs = Inputs::Noise;
    assert!(failure(&backend, &huge).contains("relative L2 error"));
}

#[test]
fn every_sequence_is_decoded_alone() {
    for (b, len) in [70, 9].into_iter().enumerate() {
        // Changes the answer of this sequence where it is alone.
        let backend = spoilt().with_answers(move |answer| {
            if answer.problem.kv_lens == [len] {
                flip(answer.out);
            }
        });
        let mut alone = case("int8");
        assert!(matches!(outcome(&backend, &alone), Outcome::Passed(_)));
        alone.alone = true;
        let text = failure(&backend, &alone);
        assert!(
            text.contains(&format!("sequence {b} alone: out[7] is")),
            "{text}"
        );
    }
}

#[test]
fn results_of_another_length_differ() {
    let differ = |got: &[f32], want: &[f32]| check::first_difference("out", got, want);
    assert_eq!(differ(&[1.0], &[1.0]), None);
    for (got, want) in [(&[1.0][..], &[1.0, 2.0][..]), (&[1.0, 2.0], &[1.0])] {
        let text = differ(got, want).unwrap();
        let counts = format!("out has {} values, expected {}", got.len(), want.len());
        assert_eq!(text, counts);
    }
}

/// FNV-1a over the bytes of words.
fn fnv(words: impl IntoIterator<Item = u32>) -> u64 {
    let bytes = words.into_iter().flat_map(u32::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[test]
fn digests_are_fnv_1a_of_the_outputs_and_then_of_the_cases() {
    // The published value for the four bytes "foob" checks the function here.
    assert_eq!(fnv([u32::from_le_bytes(*b"foob")]), 0xdd12_0e79_0c25_12af);
    let backend = Reference::new();
    let cases = [("int8", 17), ("bf16", 18), ("int4", 19)].map(|(format, seed)| Case {
        seed,
        ..case(format)
    });
    let hashes = cases.each_ref().map(|case| {
        let cache = case.cache(&backend, usize::MAX).unwrap();
        let (out, lse) = check::decode(&backend, case, &cache).unwrap();
        let hash = fnv(out.iter().chain(&lse).map(|x| x.to_bits()));
        assert_eq!(check_case(&backend, &backend, case), Outcome::Passed(hash));
        hash
    });
    let words = |i: usize| {
        [
            cases[i].seed as u32,
            hashes[i] as u32,
            (hashes[i] >> 32) as u32,
        ]
    };
    let report = check_table(&backend, &backend, &cases, 1, &mut |_, _| ());
    assert_eq!(report.integer_digest, fnv([words(0), words(2)].concat()));
    assert_eq!(report.float_digest, fnv(words(1)));
}

#[test]
fn every_case_of_a_table_is_reported_once_with_its_place() {
    let backend = spoilt().with_answers(|answer| flip(answer.out));
    let cases = [1, 2, 3].map(|seed| Case {
        seed,
        ..case("int8")
    });
    let mut places = Vec::new();
    let mut progress = |done, of| places.push((done, of));
    let report = check_table(&Reference::new(), &backend, &cases, 1, &mut progress);
    assert_eq!(places, [(1, 3), (2, 3), (3, 3)]);
    for (seed, text) in (1..).zip(&report.failures) {
        assert!(text.starts_with(&format!("seed {seed}: ")), "{text}");
    }
    assert_eq!((report.cases, report.failures.len()), (3, 3));
}

#[test]
fn labels_fit_their_columns_and_name_one_case_each() {
    for size in [Size::Full, Size::Reduced] {
        let cases = table(size);
        let labels: Vec<String> = cases.iter().map(|case| case.label(75)).collect();
        for (case, label) in cases.iter().zip(&labels) {
            let number = format!("case {:04} ", case.seed);
            assert!(label.starts_with(&number), "{label}: {case}");
            // All of them have room for everything.
            assert_eq!(*label, case.label(usize::MAX - 1));
            let others = labels.iter().filter(|other| other.starts_with(&number));
            assert_eq!(others.count(), 1, "{label}");
        }
    }
    let mut case = Case {
        seed: 17,
        page_size: 16,
        build: Build::Forked,
        inputs: Inputs::Zeros,
        ..case("int8/int4")
    };
    let whole = "case 0017 int8/int4 q2/kv1 d64 page 16 Zeros Forked";
    assert_eq!(case.label(whole.len()), whole);
    let cut = "case 0017 int8/int4 q2/kv1 d64 page 16 Zeros";
    assert_eq!(case.label(whole.len() - 1), cut);
    case.problem.q_lens = vec![0, 20];
    case.problem.scores.window_left = Some(3);
    case.problem.scores.causal = false;
    (case.page_size, case.inputs) = (64, Inputs::Noise);
    assert_eq!(
        case.label(80),
        "case 0017 int8/int4 q2/kv1 d64 q_len 0-20 Forked noncausal window"
    );
}

/// Cases that are decoded at this moment, and the most that ever were.
static RUNNING: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

#[test]
fn as_many_cases_run_at_a_time_as_were_asked_for() {
    let backend = spoilt().with_answers(|_| {
        MOST.fetch_max(1 + RUNNING.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
        // A second thread, if there is one, comes before this case ends.
        let start = Instant::now();
        while MOST.load(Ordering::SeqCst) < 2 && start.elapsed() < Duration::from_millis(150) {
            thread::sleep(Duration::from_millis(1));
        }
        RUNNING.fetch_sub(1, Ordering::SeqCst);
    });
    let cases = [case("int8"), case("int8")];
    for (threads, most) in [(1, 1), (0, 1), (2, 2)] {
        MOST.store(0, Ordering::SeqCst);
        let report = check_table(&Reference::new(), &backend, &cases, threads, &mut |_, _| ());
        assert_eq!((report.cases, report.failures.len()), (2, 0));
        assert_eq!(MOST.load(Ordering::SeqCst), most, "{threads} threads");
    }
}

/// Names the child process of the test below, and whether its backend is a program on the CPU.
const CHILD: &str = "TEST_CASES_OF_THE_ENVIRONMENT";

#[test]
fn the_environment_chooses_the_cases() {
    if let Some(kind) = std::env::var_os(CHILD) {
        let backend = match kind == "software" {
            true => spoilt().software(),
            false => spoilt(),
        };
        match cases_from_env(&backend) {
            Ok((cases, threads)) => {
                let seeds: Vec<_> = cases.iter().map(|case| case.seed).collect();
                println!("{} cases from {} on {threads}.", cases.len(), seeds[0]);
            }
            Err(error) => println!("{error}."),
        }
        return;
    }
    let run = |kind: &str, names: &[(&str, &str)]| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([
            "--exact",
            "claims::the_environment_chooses_the_cases",
            "--nocapture",
        ]);
        child.env_remove("ATTN_TABLE").env_remove("ATTN_CASE");
        child.env(CHILD, kind).envs(names.iter().copied());
        String::from_utf8(child.output().unwrap().stdout).unwrap()
    };
    let [full, reduced] = [Size::Full, Size::Reduced].map(|size| table(size).len());
    let threads = thread::available_parallelism().unwrap();
    let full = format!("{full} cases from 1 on {threads}.");
    let reduced = format!("{reduced} cases from 1 on 1.");
    let (full_table, reduced_table) = (("ATTN_TABLE", "full"), ("ATTN_TABLE", "reduced"));
    for (kind, names, says) in [
        ("hardware", &[][..], &*full),
        ("hardware", &[reduced_table], &reduced),
        // A program on the CPU is slow: it has all cases only where they are asked for.
        ("software", &[], &reduced),
        ("software", &[full_table], &full),
        (
            "hardware",
            &[reduced_table, ("ATTN_CASE", "17")],
            "1 cases from 17 on 1.",
        ),
        (
            "hardware",
            &[reduced_table, ("ATTN_CASE", "0")],
            "ATTN_CASE is \"0\"; allowed: the seed",
        ),
    ] {
        let text = run(kind, names);
        assert!(text.contains(says), "{kind} {names:?}: {text}, not {says}");
    }
}
