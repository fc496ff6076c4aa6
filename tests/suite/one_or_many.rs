//! A token alone and among others: the sweep over lengths that finds other libraries' kernels giving a row other bits when more rows come with it.

use attn_conformance::{Build, Case, check::decode_rows};
use attn_core::KvSource;
use attn_cpu::CpuBackend;
use rstest::rstest;

/// Each of the last `rows` tokens, decoded alone with a cache that ends with it, has the bits of the same row among all of them.
#[rstest]
#[case("int8", 4)]
#[case("int8", 33)]
#[case("int4", 4)]
#[case("int4", 33)]
#[case("int8/int4", 16)]
#[case("bf16", 17)]
fn a_row_has_the_same_bits_alone_and_among_others(#[case] format: &str, #[case] rows: usize) {
    let cpu = CpuBackend::new();
    let mut compared = 0;
    for kv_len in (88..=256).step_by(3) {
        let mut case = Case::new([4, 2], 64, &[kv_len], format.parse().unwrap());
        case.problem.q_lens = vec![rows];
        case.build = Build::AtOnce;
        let cache = case.built(&cpu).unwrap();
        let all = decode_rows(&cpu, &case, &case.q(), KvSource::Cache(&cache)).unwrap();
        // The first, one in the middle and the last.
        for i in [0, rows / 2, rows - 1] {
            let mut alone = case.clone();
            alone.problem.kv_lens = vec![kv_len - rows + 1 + i];
            alone.problem.q_lens = vec![1];
            let (elements, tokens) = (4 * 64, i * 4..(i + 1) * 4);
            let q = &case.q()[i * elements..(i + 1) * elements];
            let cache = alone.built(&cpu).unwrap();
            let one = decode_rows(&cpu, &alone, q, KvSource::Cache(&cache)).unwrap();
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(
                bits(&one.0),
                bits(&all.0[i * elements..(i + 1) * elements]),
                "kv_len {kv_len}, row {i}"
            );
            assert_eq!(
                bits(&one.1),
                bits(&all.1[tokens]),
                "kv_len {kv_len}, row {i}"
            );
            compared += 1;
        }
    }
    assert_eq!(compared, 57 * 3);
}
