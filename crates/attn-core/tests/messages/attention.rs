//! Attention over a cache, states, and rotary positions.

use attn_core::{
    AttnState, DecodeStep, Heads, KvFormat, KvSource, Plan, Problem, Rotary, RotaryScaling,
    RotaryTable,
};

use crate::calls::*;

pub fn attention() -> Vec<Refusal> {
    let cache = filled("int8", 100);
    let mut prompt = filled("int4", 400);
    let long = attend(&prompt, &problem(&[400]).q_len(400), "int4", 0.5);
    prompt.drop_before(0, 200).unwrap();
    let wide = Heads {
        dim: 128.into(),
        ..HEADS
    };
    let chosen = cache.sequences(&[0, 1]).unwrap();
    let (plan, q) = (
        Plan::new("cpu", &problem(&[100]), KvFormat::INT8, ()).unwrap(),
        [0.5; 3 * ROW],
    );
    let mut out = [0.0; 2 * ROW];
    let short = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)
        .err()
        .unwrap();
    vec![
        (
            "a plan of another format",
            attend(&cache, &problem(&[100]), "int4", 0.5),
        ),
        (
            "a plan of another head_dim",
            attend(&cache, &Problem::new(wide, [100]), "int8", 0.5),
        ),
        (
            "a plan for shorter sequences",
            attend(&cache, &problem(&[64]), "int8", 0.5),
        ),
        (
            "a plan for more sequences than the cache has",
            attend(&cache, &problem(&[100, 0, 0, 0]), "int8", 0.5),
        ),
        (
            "a check of the queries of more sequences than the cache has",
            cache.check_queries(&problem(&[100, 0, 0, 0])).unwrap_err(),
        ),
        (
            "a plan for one sequence, and two that are chosen",
            chosen.check_problem(&problem(&[100])).unwrap_err(),
        ),
        (
            "queries of NaN",
            attend(&cache, &problem(&[100]), "int8", f32::NAN),
        ),
        (
            "queries of 1e30",
            attend(&cache, &problem(&[100]), "int8", 1e30),
        ),
        ("queries of another number", short),
        (
            "a prompt of 400 tokens over int4, of which the cache keeps residuals for the newest",
            long,
        ),
        (
            "queries that see dropped tokens",
            attend(&prompt, &problem(&[400]), "int4", 0.5),
        ),
    ]
}

pub fn states() -> Vec<Refusal> {
    let none = RotaryScaling::None;
    let zero = RotaryScaling::Linear { factor: 0.0 };
    let table = Rotary::new(DIM, 1e4, &none).unwrap();
    vec![
        (
            "a state with a log-sum-exp of NaN",
            AttnState::new(1, vec![0.5; 2], vec![0.5, f32::NAN]).unwrap_err(),
        ),
        (
            "outputs that cannot be added",
            AttnState::new(1, vec![3e38], vec![0.5]).unwrap_err(),
        ),
        (
            "a rotary_dim of 63",
            Rotary::new(63, 1e4, &none).unwrap_err(),
        ),
        (
            "a rotary base of 0",
            Rotary::new(DIM, 0.0, &none).unwrap_err(),
        ),
        (
            "a scaling of positions by 0",
            Rotary::new(DIM, 1e4, &zero).unwrap_err(),
        ),
        (
            "cosines of infinity",
            RotaryTable::from_cos_sin(2, &[0.0, f32::INFINITY]).unwrap_err(),
        ),
        (
            "a table of all positions",
            table.table(0..usize::MAX).unwrap_err(),
        ),
    ]
}
