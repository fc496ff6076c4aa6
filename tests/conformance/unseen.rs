//! Rows that see no token: every element of the outputs is written, whatever the caller's memory held, with sinks and without, by a step and by the merge
//! of spans.

use attn_conformance::{
    Case,
    case::noise,
    check::{Bounds, bounds, exceeds, first_difference},
    trials::Trials,
};
use attn_core::{
    Append, DecodeAttention, DecodeStep, Error, KvCache, KvFormat, KvSource, Problem, SpanStates,
    SpansStep,
};

const DIM: usize = 64;

/// What the caller's memory holds.
const HELD: [f32; 3] = [f32::NAN, f32::NEG_INFINITY, -1.0];

/// Adds the tests of this file.
pub fn add(mut trials: Trials<Box<dyn DecodeAttention>>) -> Trials<Box<dyn DecodeAttention>> {
    for format in ["int8", "int4", "int8-tensor", "bf16"] {
        let name = format!("{format}: rows that see no token are written");
        trials = trials.test(name, move |backend| unseen(&**backend, format));
    }
    trials
}

/// Steps of which some rows see nothing, and of which the others take each way: empty sequences, queries before the first token, windows that have moved
/// on, and a batch in which no row sees anything.
fn problems(case: &Case) -> Vec<(&'static str, Problem)> {
    let of =
        |lens: &[usize], q_lens: &[usize]| Problem::new(case.problem.heads(), lens).q_lens(q_lens);
    let mut all = vec![
        ("nothing cached", of(&[0, 0, 0], &[1, 3, 0])),
        (
            "an empty sequence among others",
            of(&[300, 0, 2500], &[1, 2, 1]),
        ),
        (
            "queries before the first token",
            of(&[2, 0, 65], &[5, 1, 70]),
        ),
    ];
    let mut not_causal = of(&[0, 40, 0], &[2, 3, 1]);
    not_causal.scores.causal = false;
    all.push(("not causal", not_causal));
    let mut behind = of(&[1024, 0, 1030], &[1, 1, 3]);
    behind.scores.window_left = Some(3);
    all.push(("a window", behind));
    all
}

fn unseen(backend: &dyn DecodeAttention, format: &str) {
    let format: KvFormat = format.parse().expect("a format's name");
    let mut case = Case::new([8, 2], DIM, &[2500; 3], format);
    case.problem.q_lens = vec![70; 3];
    for (name, problem) in problems(&case) {
        for sinks in [None, Some(vec![0.5, -2.0, 6.0, 0.0, 3.0, -1e6, 1e6, -0.0])] {
            let mut problem = problem.clone();
            problem.scores.sinks = sinks;
            case.problem.kv_lens = problem.kv_lens.clone();
            let cache = cached(backend, &case).unwrap();
            for held in HELD {
                let name = format!("{name}, sinks {:?}, memory of {held}", problem.scores.sinks);
                step(backend, &case, &problem, &cache, held, &name);
            }
        }
    }
}

/// A cache of the problem's tokens, appended at once.
fn cached(backend: &dyn DecodeAttention, case: &Case) -> Result<KvCache, Error> {
    let mut config = case.config();
    config.num_pages += 3;
    let mut cache = backend.create_cache(&config)?;
    for (sequence, &tokens) in case.problem.kv_lens.iter().enumerate() {
        let append = [Append { sequence, tokens }];
        let [k, v] = [0, 1].map(|side| noise(2 * sequence as u64 + side, tokens * 2 * DIM));
        cache.append_batch(&append, &k, &v)?;
    }
    Ok(cache)
}

fn step(
    backend: &dyn DecodeAttention,
    case: &Case,
    problem: &Problem,
    cache: &KvCache,
    held: f32,
    name: &str,
) {
    let plan = backend.plan(problem, case.format).unwrap();
    let q = noise(9, problem.out_elements());
    let memory = || {
        (
            vec![held; problem.out_elements()],
            vec![held; problem.rows()],
        )
    };
    let (mut out, mut lse) = memory();
    let kv = KvSource::Cache(cache);
    let mut step = DecodeStep::new(&plan, &q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .unwrap();
    backend.decode(&mut step).unwrap();
    assert_written(problem, &out, &lse, name);
    // A step that is not asked for log-sum-exps writes the same outputs.
    let (mut alone, _) = memory();
    backend
        .decode(&mut DecodeStep::new(&plan, &q, kv, &mut alone).unwrap())
        .unwrap();
    assert_eq!(first_difference("out", &alone, &out), None, "{name}");
    let spans = SpansStep::new(&plan, &q, kv).unwrap();
    let states = match backend.attend_spans(&spans) {
        // A backend that takes whole sequences alone.
        Err(Error::Unsupported(_)) => return,
        other => other.unwrap(),
    };
    let (mut merged, mut merged_lse) = memory();
    let scales = cache.config().v_tensor_scales.clone();
    let outputs = (&mut merged[..], &mut merged_lse[..]);
    SpanStates::finish(&[states], problem, case.format, &scales, outputs).unwrap();
    if case.format.is_integer() || backend.device().backend == "cpu" {
        assert_eq!(
            first_difference("out of spans", &merged, &out),
            None,
            "{name}"
        );
        assert_eq!(
            first_difference("lse of spans", &merged_lse, &lse),
            None,
            "{name}"
        );
        return;
    }
    // Floats on a GPU may be attended by different kernels, each of which errs by the table's bounds at most.
    let Bounds {
        out: far,
        lse: far_lse,
    } = bounds(backend, case);
    let allowed = Bounds {
        out: 2.0 * far,
        lse: 2.0 * far_lse,
    };
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect();
    let found = (&merged[..], &merged_lse[..]);
    assert_eq!(
        exceeds(allowed, found, &(wide(&out), wide(&lse))),
        None,
        "{name}"
    );
}

/// Rows that see nothing are +0 and their sink; the others are numbers.
fn assert_written(problem: &Problem, out: &[f32], lse: &[f32], name: &str) {
    let heads = problem.num_q_heads;
    let tokens = problem.query_ranges().enumerate();
    let tokens = tokens.flat_map(|(b, all)| (0..all.len()).map(move |i| (b, i)));
    let rows = tokens.flat_map(|at| (0..heads).map(move |head| (at, head)));
    let mut unseen = 0;
    for (row, ((b, i), head)) in rows.enumerate() {
        let (of_row, lse) = (&out[row * DIM..][..DIM], lse[row]);
        if !problem.visible(b, i).is_empty() {
            let numbers = of_row.iter().all(|x| x.is_finite()) && lse.is_finite();
            assert!(
                numbers,
                "{name}: row {row} sees tokens and is {of_row:?}, {lse}"
            );
            continue;
        }
        unseen += 1;
        let zeros = of_row.iter().all(|x| x.to_bits() == 0);
        assert!(zeros, "{name}: row {row} sees nothing and is {of_row:?}");
        let right = match &problem.scores.sinks {
            None => lse == f32::NEG_INFINITY,
            Some(sinks) => (lse - sinks[head]).abs() <= 1e-6 * sinks[head].abs().max(1.0),
        };
        assert!(
            right,
            "{name}: row {row} sees nothing and has the log-sum-exp {lse}"
        );
    }
    assert!(unseen > 0, "{name}: each row sees something");
}
