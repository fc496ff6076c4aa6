//! What an engine does between steps changes no bit of them: it chooses sequences, and takes back drafts that were rejected.

use attn_conformance::{
    Case,
    case::noise,
    check::{decode, decode_rows, first_difference},
    trials::Trials,
};
use attn_core::{DecodeAttention, KvFormat, KvSource};

/// Adds the tests of this file.
pub fn add(mut trials: Trials<Box<dyn DecodeAttention>>) -> Trials<Box<dyn DecodeAttention>> {
    for format in ["int8", "int4", "int8/int4"] {
        let name = format!("{format}: any sequences of a cache, in any order");
        trials = trials.test(name, move |backend| chosen(&**backend, format));
        let name = format!("{format}: drafts that are taken back leave no trace");
        trials = trials.test(name, move |backend| drafts(&**backend, format));
    }
    trials
}

fn case(format: &str, lens: &[usize]) -> Case {
    let format: KvFormat = format.parse().expect("a format's name");
    Case::new([8, 2], 64, lens, format)
}

fn chosen(backend: &dyn DecodeAttention, format: &str) {
    let case = case(format, &[0, 5, 700, 90]);
    let cache = case.cache(backend, usize::MAX).unwrap();
    let (all, all_lse) = decode(backend, &case, &cache).unwrap();
    let order = [3, 1, 3, 2];
    let (rows, heads) = (8 * 64, 8);
    let of = |x: &[f32], each: usize| -> Vec<f32> {
        order
            .iter()
            .flat_map(|b| x[b * each..(b + 1) * each].to_vec())
            .collect()
    };
    let mut some = case.clone();
    some.problem.kv_lens = order.map(|b| case.problem.kv_lens[b]).to_vec();
    let sequences = cache.sequences(&order).unwrap();
    let kv = KvSource::Sequences(&sequences);
    let (out, lse) = decode_rows(backend, &some, &of(&case.q(), rows), kv).unwrap();
    assert_eq!(first_difference("out", &out, &of(&all, rows)), None);
    assert_eq!(first_difference("lse", &lse, &of(&all_lse, heads)), None);
}

fn drafts(backend: &dyn DecodeAttention, format: &str) {
    let (len, drafts) = (200, 5);
    let row = 2 * 64;
    let [k, v] = [1, 2].map(|seed| noise(seed, len * row));
    let wrong = noise(3, drafts * row);
    let mut one = case(format, &[len]);
    let [mut cache, mut straight] = [(); 2].map(|()| backend.create_cache(&one.config()).unwrap());
    let mut at = 58;
    for cache in [&mut cache, &mut straight] {
        cache.append(0, &k[..at * row], &v[..at * row]).unwrap();
    }
    for step in 0.. {
        let next = (at + 1 + step % drafts).min(len);
        let right = at * row..next * row;
        // The drafts are appended together; the first ones were right.
        let join = |x: &[f32]| {
            [
                &x[right.clone()],
                &wrong[..drafts * row - (next - at - 1) * row],
            ]
            .concat()
        };
        cache.append(0, &join(&k), &join(&v)).unwrap();
        cache.truncate(0, next).unwrap();
        straight
            .append(0, &k[right.clone()], &v[right.clone()])
            .unwrap();
        at = next;
        one.problem.kv_lens = vec![at];
        one.problem.q_lens = vec![1];
        let q = &one.q()[..8 * 64];
        let [got, want] = [&cache, &straight]
            .map(|cache| decode_rows(backend, &one, q, KvSource::Cache(cache)).unwrap());
        assert_eq!(
            first_difference(&format!("{at} tokens: out"), &got.0, &want.0),
            None
        );
        assert_eq!(
            first_difference(&format!("{at} tokens: lse"), &got.1, &want.1),
            None
        );
        if at == len {
            return;
        }
    }
}
