//! Rows at strides: which are taken, where they lie, and that a call reads no other element.

use attn_core::{
    Append, CacheConfig, DecodeStep, Error, HeadDim, Heads, HostPages, KvCache, KvFormat, KvSource,
    Plan, Problem, Rows, RowsMut, WideRows,
};
use half::{bf16, f16};
use rstest::rstest;

const DIM: usize = 64;
const HEADS: Heads = Heads {
    q: 4,
    kv: 2,
    dim: HeadDim::same(DIM),
};

/// Element d of the row of a token and a head, which all three types hold exactly.
fn value(token: usize, head: usize, d: usize) -> f32 {
    ((token * 31 + head * 17 + d * 7) % 127) as f32 / 64.0 - 1.0
}

/// Rows `[tokens, heads, DIM]` side by side.
fn packed(tokens: usize, heads: usize) -> Vec<f32> {
    let rows = (0..tokens).flat_map(|t| (0..heads).map(move |h| (t, h)));
    rows.flat_map(|(t, h)| (0..DIM).map(move |d| value(t, h, d)))
        .collect()
}

/// The same rows at strides, `[sequences, tokens, heads]`, with NaN between and behind them.
fn apart([sequences, tokens, heads]: [usize; 3], strides: [usize; 3]) -> Vec<f32> {
    let mut x = vec![f32::NAN; sequences * tokens * heads * DIM * 4];
    for (b, t, h) in (0..sequences)
        .flat_map(|b| (0..tokens).flat_map(move |t| (0..heads).map(move |h| (b, t, h))))
    {
        let at = b * strides[0] + t * strides[1] + h * strides[2];
        for d in 0..DIM {
            x[at + d] = value(b * tokens + t, h, d);
        }
    }
    x
}

fn cache(sequences: usize) -> KvCache {
    let config = CacheConfig::builder(KvFormat::INT8_INT4, HEADS)
        .sequences(sequences)
        .max_len(128)
        .max_q_len(128)
        .build();
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

const MAX: usize = usize::MAX;

#[rstest]
#[case::too_short([3, 2, 64], [128, 64], 383, "the slice of strided rows must have 384 elements, not 383")]
#[case::a_gap_too_short([2, 2, 64], [200, 100], 363, "must have 364 elements, not 363")]
#[case::elements([MAX, 2, 64], [0, 0], 64, "[18446744073709551615, 2, 64] at the strides [0, 0]; allowed: rows whose elements a slice of less than 2^64")]
#[case::wraps_to_nothing([1 << 32, 1 << 32, 64], [0, 0], 64, "less than 2^64")]
#[case::stride([3, 2, 64], [MAX, 64], 384, "strides [18446744073709551615, 64]; allowed")]
#[case::strides_together([2, 2, 64], [MAX - 64, 64], 384, "less than 2^64")]
#[case::behind_the_last([2, 1, 64], [MAX - 62, 0], 384, "less than 2^64")]
fn rows_that_do_not_lie_in_their_slice_are_refused(
    #[case] shape: [usize; 3],
    #[case] strides: [usize; 2],
    #[case] len: usize,
    #[case] says: &str,
) {
    let mut x = vec![0.0f32; len];
    for error in [
        Rows::strided(&x, shape, strides).unwrap_err(),
        RowsMut::strided(&mut x, shape, strides).unwrap_err(),
    ] {
        assert!(error.to_string().contains(says), "{error}");
        let is_short = matches!(error, Error::Length { given, .. } if given == len);
        assert_eq!(is_short, says.contains("must have"), "{error}");
        assert!(is_short || matches!(error, Error::Parameter { .. }));
    }
}

#[rstest]
#[case([3, 2, 64], [128, 63])]
#[case([3, 2, 64], [127, 64])]
#[case([3, 2, 64], [0, 64])]
#[case([3, 2, 64], [64, 191])]
#[case([3, 2, 64], [63, 192])]
#[case([3, 1, 64], [63, 64])]
#[case([1, 2, 64], [128, 0])]
fn rows_to_write_that_overlap_are_refused_and_may_be_read(
    #[case] shape: [usize; 3],
    #[case] strides: [usize; 2],
) {
    let mut x = vec![0.0f32; 1000];
    assert!(Rows::strided(&x, shape, strides).is_ok());
    let error = RowsMut::strided(&mut x, shape, strides).unwrap_err();
    let found = matches!(&error, Error::Parameter { what: "shape of strided rows", given, .. }
        if given.contains(&format!("strides {strides:?}")));
    assert!(
        found && error.to_string().contains("do not overlap"),
        "{error}"
    );
}

#[rstest]
#[case::side_by_side([3, 2, 64], [128, 64], 384)]
#[case::transposed([3, 2, 64], [64, 192], 384)]
#[case::of_a_token_none_is_asked([1, 2, 64], [0, 64], 128)]
#[case::of_a_head_none_is_asked([3, 1, 64], [64, 0], 192)]
#[case::no_token([0, 2, 64], [MAX, MAX], 0)]
#[case::no_head([2, 0, 64], [MAX, MAX], 0)]
#[case::no_element([2, 2, 0], [MAX, MAX], 0)]
#[case::a_longer_slice([3, 2, 64], [128, 64], 1000)]
fn rows_that_fit_are_taken(
    #[case] shape: [usize; 3],
    #[case] strides: [usize; 2],
    #[case] len: usize,
) {
    let mut x = vec![0.0f32; len];
    let elements: usize = shape.iter().product();
    let rows = Rows::strided(&x, shape, strides).unwrap();
    assert_eq!((rows.len(), rows.is_empty()), (elements, elements == 0));
    assert_eq!(rows.to_wide().unwrap().len(), elements);
    let rows = RowsMut::strided(&mut x, shape, strides).unwrap();
    assert_eq!((rows.len(), rows.is_empty()), (elements, elements == 0));
}

#[test]
fn sequences_of_rows_to_write_do_not_overlap_either() {
    let mut x = vec![0.0f32; 4096];
    let shape = [2, 3, 2, 64];
    for (strides, fits) in [
        ([384, 128, 64], true),
        ([384, 64, 192], true),
        ([64, 256, 128], true),
        ([383, 64, 192], false),
        ([64, 128, 64], false),
        ([63, 256, 128], false),
    ] {
        assert!(Rows::strided_batch(&x, shape, strides).is_ok());
        let rows = RowsMut::strided_batch(&mut x, shape, strides);
        assert_eq!(rows.is_ok(), fits, "{strides:?}");
    }
}

/// `[sequences, tokens, heads]` and their strides.
#[rstest]
#[case::side_by_side([1, 5, 2], [0, 128, 64])]
#[case::a_fused_projection([1, 5, 2], [0, 512, 64])]
#[case::heads_with_gaps([1, 5, 2], [0, 160, 80])]
#[case::transposed([1, 5, 2], [0, 64, 320])]
#[case::one_token([1, 1, 2], [0, 0, 100])]
#[case::batch([2, 3, 2], [384, 128, 64])]
#[case::transposed_batch([2, 3, 2], [384, 64, 192])]
#[case::fused_batch([2, 3, 2], [1200, 256, 64])]
#[case::single_tokens([3, 1, 2], [300, 7, 64])]
#[case::sequences_inside([2, 3, 2], [64, 256, 128])]
fn rows_apart_are_read_where_they_lie_and_nothing_between(
    #[case] counts: [usize; 3],
    #[case] strides: [usize; 3],
) {
    let ([sequences, tokens, heads], x) = (counts, apart(counts, strides));
    let want = packed(sequences * tokens, heads);
    let shape = [sequences, tokens, heads, DIM];
    let halves: Vec<f16> = x.iter().map(|x| f16::from_f32(*x)).collect();
    let brains: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
    let appends: Vec<Append> = (0..sequences)
        .map(|sequence| Append { sequence, tokens })
        .collect();
    let mut side_by_side = cache(sequences);
    side_by_side.append_batch(&appends, &want, &want).unwrap();
    for rows in [
        Rows::strided_batch(&x, shape, strides),
        Rows::strided_batch(&halves, shape, strides),
        Rows::strided_batch(&brains, shape, strides),
    ] {
        let rows = rows.unwrap();
        assert_eq!(rows.to_wide().unwrap(), want);
        let mut cache = cache(sequences);
        cache.append_batch(&appends, rows, rows).unwrap();
        for b in 0..sequences {
            assert!(cache.image(b).unwrap() == side_by_side.image(b).unwrap());
        }
    }
}

#[test]
fn bad_numbers_are_counted_among_the_rows_alone() {
    // [heads, tokens, dim] of 2 heads and 3 tokens.
    let (mut x, good) = (packed(6, 1), packed(3, 2));
    let mut cache = cache(1);
    for (bad, wanted) in [(f32::INFINITY, "k is inf"), (2e30, "k is 2e30")] {
        x[3 * DIM + 5] = bad;
        let rows = Rows::strided(&x, [3, 2, DIM], [DIM, 3 * DIM]).unwrap();
        let error = cache.append(0, rows, &good).unwrap_err().to_string();
        let wanted = format!("{wanted} at token 0, head 1, dim 5; ");
        assert!(error.starts_with(&wanted), "{error}");
    }
    let plan = Plan::new(
        "test",
        &Problem::new(HEADS, [0, 0]),
        KvFormat::INT8_INT4,
        (),
    )
    .unwrap();
    let two = self::cache(2);
    let (mut q, mut out) = (vec![1.0; 2 * 4 * DIM], vec![0.0; 2 * 4 * DIM]);
    for (bad, wanted) in [(f32::NAN, "q is NaN"), (1e30, "q·softmax_scale·log2(e) is")] {
        // Head 1 of token 0.
        q[2 * DIM + 1] = bad;
        let rows = Rows::strided(&q, [2, 4, DIM], [DIM, 2 * DIM]).unwrap();
        let step = DecodeStep::new(&plan, rows, KvSource::Cache(&two), &mut out);
        let error = step.err().expect("the query is refused").to_string();
        assert!(error.starts_with(wanted), "{error}");
        assert!(error.contains(" at token 0, head 1, dim 1; "), "{error}");
    }
}

#[rstest]
#[case([4, 2, 64], [128, 64])]
#[case([3, 1, 64], [128, 64])]
#[case([3, 4, 32], [128, 32])]
fn rows_of_another_shape_are_refused_and_change_nothing(
    #[case] given: [usize; 3],
    #[case] strides: [usize; 2],
) {
    let x = packed(4, 2);
    let (rows, good) = (Rows::strided(&x, given, strides).unwrap(), &x[..3 * 128]);
    let needed = [3, 2, 64];
    let mut cache = cache(1);
    let append = [Append {
        sequence: 0,
        tokens: 3,
    }];
    for (error, name) in [
        (cache.append_batch(&append, rows, good), "k"),
        (cache.append_batch(&append, good, rows), "v"),
    ] {
        let found = matches!(error, Err(Error::Shape { what, given: g, needed: n })
            if what == name && g == given && n == needed);
        assert!(found, "{error:?}");
    }
    assert_eq!(cache.table().lens, [0]);
    let error = cache.append(0, rows, rows);
    assert_eq!(error.is_ok(), given == [4, 2, 64], "{error:?}");
}

#[test]
fn queries_and_outputs_of_another_shape_are_refused() {
    let cache = cache(3);
    let plan = Plan::new(
        "test",
        &Problem::new(HEADS, [0; 3]),
        KvFormat::INT8_INT4,
        (),
    )
    .unwrap();
    let (x, mut y) = (vec![1.0; 3 * 4 * DIM], vec![0.0; 3 * 4 * DIM]);
    let (needed, wrong) = ([3, 4, DIM], [4, 3, DIM]);
    let kv = KvSource::Cache(&cache);
    let shape = |shape: [usize; 3]| (shape, [shape[1] * DIM, DIM]);
    for (q, out, name) in [(wrong, needed, "q"), (needed, wrong, "out")] {
        let ((q, in_q), (out, in_out)) = (shape(q), shape(out));
        let q = Rows::strided(&x, q, in_q).unwrap();
        let out = RowsMut::strided(&mut y, out, in_out).unwrap();
        let error = DecodeStep::new(&plan, q, kv, out).err();
        let found = matches!(error, Some(Error::Shape { what, given, needed: n })
            if what == name && given == wrong && n == needed);
        assert!(found, "{error:?}");
    }
}

#[test]
fn backends_get_rows_in_place_or_side_by_side() {
    let cache = cache(2);
    let plan = Plan::new(
        "test",
        &Problem::new(HEADS, [0; 2]),
        KvFormat::INT8_INT4,
        (),
    )
    .unwrap();
    let (shape, strides) = ([2, 4, DIM], [DIM, 2 * DIM]);
    let q: Vec<f32> = (0..2 * 4 * DIM).map(|i| i as f32).collect();
    let mut out = vec![-1.0; 2 * 4 * DIM + 1];
    let rows = Rows::strided(&q, shape, strides).unwrap();
    let outputs = RowsMut::strided(&mut out, shape, strides).unwrap();
    let mut step = DecodeStep::new(&plan, rows, KvSource::Cache(&cache), outputs).unwrap();
    let (inputs, outputs) = step.parts();
    let q = inputs.q();
    assert_eq!((q.shape(), q.len(), q.contiguous()), (shape, 512, None));
    assert_eq!(q.row(1, 2)[3], (5 * DIM + 3) as f32);
    let second = q.packed(1..2).unwrap();
    let firsts: Vec<f32> = second.chunks(DIM).map(|row| row[0]).collect();
    assert_eq!(firsts, [1, 3, 5, 7].map(|row| (row * DIM) as f32));
    assert!(q.packed(1..1).unwrap().is_empty());
    let both = q.gathered(&[1..2, 0..1]).unwrap();
    let firsts: Vec<f32> = both.chunks(DIM).map(|row| row[0]).collect();
    assert_eq!(
        firsts,
        [1, 3, 5, 7, 0, 2, 4, 6].map(|row| (row * DIM) as f32)
    );
    assert!(q.gathered(&[]).unwrap().is_empty());
    // A step over another step's rows.
    let mut again =
        DecodeStep::new(&plan, q, KvSource::Cache(&cache), outputs.out).expect("the same rows");
    let out_rows = again.parts().1.out;
    assert_eq!(out_rows.shape(), shape);
    let mut packed = out_rows.packed().unwrap();
    let numbers = packed.as_mut_slice().iter_mut().enumerate();
    numbers.for_each(|(i, x)| *x = i as f32);
    packed.finish();
    assert!(again.parts().1.out.into_contiguous().is_none());
    // Row (t, h) lies at 64·t + 128·h.
    for (t, h) in (0..2).flat_map(|t| (0..4).map(move |h| (t, h))) {
        let at = t * DIM + h * 2 * DIM;
        assert_eq!(out[at + 9], ((t * 4 + h) * DIM + 9) as f32);
    }
    assert_eq!(out[512], -1.0);
    assert!(WideRows::new(&out, shape).is_err());
    let own = WideRows::new(&out[..512], shape).unwrap();
    assert_eq!(own.contiguous(), Some(&out[..512]));
}
