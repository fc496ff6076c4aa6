//! What a caller may choose about a step changes no bit of its results: a plan for longer lengths, whether log-sum-exps are asked for,
//! and the types of queries and outputs.

use attn_conformance::{
    Case,
    check::{decode, first_difference},
    trials::Trials,
};
use attn_core::{DecodeAttention, DecodeStep, Error, KvCache, KvFormat, KvSource, Plan};
use half::{bf16, f16};

/// Sequences of every kind: empty, within a page, cut between many workers.
const LENS: [usize; 4] = [0, 5, 700, 2500];

fn case(format: &str) -> Case {
    let format: KvFormat = format.parse().expect("a format's name");
    Case::new([8, 2], 64, &LENS, format)
}

/// A plan for the case's sequences, each `more` tokens longer.
fn plan(backend: &dyn DecodeAttention, case: &Case, more: usize) -> Result<Plan, Error> {
    let mut problem = case.problem.clone();
    problem.kv_lens.iter_mut().for_each(|len| *len += more);
    backend.plan(&problem, case.format)
}

fn outputs(
    backend: &dyn DecodeAttention,
    plan: &Plan,
    q: &[f32],
    cache: &KvCache,
) -> Result<Vec<f32>, Error> {
    let mut out = vec![f32::NAN; q.len()];
    backend.decode(&mut DecodeStep::new(
        plan,
        q,
        KvSource::Cache(cache),
        &mut out,
    )?)?;
    Ok(out)
}

/// Adds the tests of this file.
pub fn add(mut trials: Trials<Box<dyn DecodeAttention>>) -> Trials<Box<dyn DecodeAttention>> {
    for format in ["int8", "int4", "int4-g1"] {
        let name = format!("{format}: a plan for longer sequences gives the same bits");
        trials = trials.test(name, move |backend| longer_plans(&**backend, format));
    }
    trials.test(
        "queries and outputs of 16 bits are those of f32, rounded",
        |backend| narrow_elements(&**backend),
    )
}

fn longer_plans(backend: &dyn DecodeAttention, format: &str) {
    let case = case(format);
    let cache = case.cache(backend, usize::MAX).unwrap();
    let (want, _) = decode(backend, &case, &cache).unwrap();
    for more in [0, 1, 300, 20_000] {
        let plan = plan(backend, &case, more).unwrap();
        let got = outputs(backend, &plan, &case.q(), &cache).unwrap();
        let found = first_difference(&format!("{more} more tokens: out"), &got, &want);
        assert_eq!(found, None);
    }
}

fn narrow_elements(backend: &dyn DecodeAttention) {
    let case = case("int8");
    let cache = case.cache(backend, usize::MAX).unwrap();
    let (plan, kv) = (plan(backend, &case, 0).unwrap(), KvSource::Cache(&cache));
    macro_rules! hold {
        ($number:ty) => {
            let narrow: Vec<$number> = case.q().iter().map(|&x| <$number>::from_f32(x)).collect();
            let wide: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
            let want = outputs(backend, &plan, &wide, &cache).unwrap();
            let mut got = vec![<$number>::NAN; want.len()];
            let mut step = DecodeStep::new(&plan, &narrow, kv, &mut got).unwrap();
            backend.decode(&mut step).unwrap();
            let found = got
                .iter()
                .zip(&want)
                .position(|(got, want)| *got != <$number>::from_f32(*want));
            assert_eq!(found, None, "{}", stringify!($number));
        };
    }
    hold!(f16);
    hold!(bf16);
}
