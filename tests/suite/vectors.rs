//! Decoded bits and other engines' rows equal the golden vectors, which `vectors/decode.py` and `vectors/make.py` compute in exact rationals.
//! Page bytes are checked in attn-core.

use attn_conformance::check::first_difference;
use attn_core::{
    DecodeAttention, DecodeStep, Heads, KvSource, Problem,
    convert::rows::{RowFormat, fbgemm_int4_row, q4_0_row, q8_0_row},
};
use attn_cpu::{CpuBackend, Reference};

use crate::golden::{cache, read, settings, value};

#[test]
fn decoded_bits_equal_the_golden_vectors() {
    let text = read("decode.txt");
    let mut lines = text.lines();
    let mut cases = 0;
    while let Some(header) = lines.next() {
        let mut settings = settings(header);
        let kv_len: usize = settings["kv_len"].parse().unwrap();
        settings.entry("head_dim").or_insert("64");
        settings.extend([
            ("page_size", "64"),
            ("heads", "1"),
            ("tokens", settings["kv_len"]),
        ]);
        let cache = cache(&settings, kv_len, |config| {
            CpuBackend::new().create_cache(config).unwrap()
        });
        let dim = cache.config().head_dim;
        let mut problem = Problem::new(Heads::new(2, 1, dim), vec![kv_len]);
        problem.scores.softcap = settings["softcap"].parse().ok();
        problem.scores.window_left = settings["window"].parse().ok();
        let slope: Option<f32> = settings["alibi"].parse().ok();
        problem.scores.alibi_slopes = slope.map(|slope| vec![slope; 2]);
        let sinks = settings.get("sinks").map(|sinks| sinks.split(','));
        problem.scores.sinks = sinks.map(|sinks| sinks.map(|sink| sink.parse().unwrap()).collect());
        let factor: f32 = settings.get("query").map_or(1.0, |x| x.parse().unwrap());
        let element = |i: usize| ((i % dim.k) * 37 + i / dim.k * 11 + 5) % 129;
        let token: Vec<f32> = (0..2 * dim.k)
            .map(|i| (element(i) as f32 - 64.0) / 64.0 * factor)
            .collect();
        // The row of the first query token is golden; the others ask the same, so that it has neighbours which see more.
        let q_len = settings.get("q_len").map_or(1, |x| x.parse().unwrap());
        problem.q_lens = vec![q_len];
        let q = token.repeat(q_len);
        let want: Vec<Vec<f32>> = lines
            .by_ref()
            .take(2)
            .map(|line| {
                let words = line.split(' ').map(|w| u32::from_str_radix(w, 16).unwrap());
                words.map(f32::from_bits).collect()
            })
            .collect();
        let (reference, cpu) = (Reference::new(), CpuBackend::new());
        let backends: [(&str, &dyn DecodeAttention); 2] =
            [("reference", &reference), ("cpu", &cpu)];
        for (name, backend) in backends {
            let plan = backend.plan(&problem, cache.config().format).unwrap();
            let (mut out, mut lse) = (vec![f32::NAN; 2 * q_len * dim.v], vec![f32::NAN; 2 * q_len]);
            let kv = KvSource::Cache(&cache);
            let mut step = DecodeStep::new(&plan, &q, kv, &mut out)
                .and_then(|step| step.with_lse(&mut lse))
                .unwrap();
            backend.decode(&mut step).unwrap();
            for head in 0..2 {
                let got = [&out[head * dim.v..][..dim.v], &lse[head..][..1]].concat();
                let found = first_difference(&format!("head {head}: "), &got, &want[head]);
                assert_eq!(found, None, "{name}, {header}");
            }
        }
        cases += 1;
    }
    assert_eq!(cases, 46);
}

#[test]
fn foreign_rows_equal_the_golden_vectors() {
    let text = read("rows.txt");
    assert_eq!(text.lines().count(), 24);
    for line in text.lines() {
        let [name, token, hex] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let t = token.parse().unwrap();
        let x: Vec<f32> = (0..128).map(|d| value(0, 0, t, d)).collect();
        let mut row = vec![0; hex.len() / 2];
        match name.strip_prefix("fbgemm-int4-g") {
            Some(groups) => fbgemm_int4_row(&x, groups.parse().unwrap(), &mut row).unwrap(),
            None if name == "q8_0" => q8_0_row(&x, &mut row).unwrap(),
            None => q4_0_row(&x, &mut row).unwrap(),
        }
        let got: String = row.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(got, hex, "{name}, token {t}");
    }
    assert_eq!(RowFormat::FbgemmInt4(4).row_bytes(128), 80);
}
