//! Contiguous caches: where rows lie, how long the slices must be, and where a bad value is found.

use attn_core::{Error, Heads, Int8Scale, KvFormat, KvView, Problem, Scheme, StridedRows};
use rstest::rstest;

const HEADS: usize = 3;
const CAPACITY: usize = 7;
const LENS: [usize; 3] = [4, 0, 7];

#[rstest]
#[case("f16", 128, 0)]
#[case("fp8", 64, 0)]
#[case("int8-plain", 64, 1)]
#[case("int8-g32", 64, 2)]
fn rows_lie_where_the_order_of_the_axes_says(
    #[case] format: &str,
    #[case] row: usize,
    #[case] groups: usize,
) {
    let bits = format.parse::<KvFormat>().unwrap().k.code_bits();
    let rows = LENS.len() * HEADS * CAPACITY;
    let codes: Vec<u8> = (0..rows * row).map(|i| (i * 7 % 251) as u8).collect();
    let scales: Vec<u16> = (0..rows * groups).map(|i| i as u16).collect();
    let bnsh = StridedRows::bnsh(&codes, &scales, HEADS, CAPACITY, row, groups);
    let bsnh = StridedRows::bsnh(&codes, &scales, HEADS, CAPACITY, row, groups);
    for b in 0..LENS.len() {
        for head in 0..HEADS {
            for t in 0..CAPACITY {
                for (view, index) in [
                    (&bnsh, (b * HEADS + head) * CAPACITY + t),
                    (&bsnh, (b * CAPACITY + t) * HEADS + head),
                ] {
                    for d in [0, 1, 63] {
                        let at = index * row + d * bits / 8;
                        let expected = match bits {
                            16 => u16::from_le_bytes([codes[at], codes[at + 1]]),
                            _ => codes[at].into(),
                        };
                        assert_eq!(view.code(bits, [b, head, t], d), expected);
                    }
                    for g in 0..groups {
                        let expected = scales[index * groups + g];
                        assert_eq!(view.scale([b, head, t], g), expected);
                    }
                }
            }
        }
    }
}

fn problem(lens: &[usize]) -> Problem {
    Problem::new(Heads::new(HEADS, HEADS, 64), lens.to_vec())
}

#[rstest]
#[case(&[4, 0, 7])]
#[case(&[4, 7, 0])]
#[case(&[7, 7, 1])]
#[case(&[1, 0, 0])]
fn slices_end_no_sooner_than_the_last_row_that_is_read(
    #[case] lens: &[usize],
    #[values(false, true)] heads_first: bool,
    #[values(0, 1)] side: usize,
) {
    let (problem, format) = (problem(lens), "int8-g32".parse().unwrap());
    let rows = |elements: usize| {
        let step = elements + 16;
        let (head, token) = if heads_first {
            (CAPACITY * step, step)
        } else {
            (step, HEADS * step)
        };
        let strides = [HEADS * CAPACITY * step, head, token];
        let last = lens.iter().enumerate().filter(|(_, len)| **len > 0);
        let ends = last.map(|(b, len)| b * strides[0] + 2 * head + (len - 1) * token + elements);
        (strides, ends.max().unwrap())
    };
    let ((code_strides, bytes), (scale_strides, scales)) = (rows(64), rows(2));
    let (codes, values) = (vec![1; bytes], vec![0x3c00; scales]);
    let with = |short_codes: usize, short_scales: usize| {
        let whole = StridedRows {
            codes: &codes,
            code_strides,
            scales: &values,
            scale_strides,
        };
        let mut both = [whole; 2];
        both[side].codes = &codes[short_codes..];
        both[side].scales = &values[short_scales..];
        KvView::new(&problem, format, both[0], both[1], [&[], &[]]).map(|_| ())
    };
    with(0, 0).unwrap();
    for (short, name) in [((1, 0), ["k codes", "v codes"][side]), ((0, 1), "scales")] {
        let error = with(short.0, short.1).unwrap_err();
        let needed_here = if name == "scales" { scales } else { bytes };
        assert!(
            matches!(error, Error::Length { what, given, needed }
                if what == name && needed == needed_here && given == needed_here - 1),
            "{error}"
        );
    }
}

#[test]
fn a_bad_scale_is_found_in_the_row_that_has_it_and_nowhere_else() {
    let problem = problem(&LENS);
    let rows = LENS.len() * HEADS * CAPACITY;
    let codes = vec![0x80; rows * 64];
    for bsnh in [false, true] {
        for bad in 0..rows {
            let mut scales = vec![0x7bff; rows];
            scales[bad] = 0x7c00;
            let good = vec![0; rows];
            let (b, head, t) = if bsnh {
                (bad / HEADS / CAPACITY, bad % HEADS, bad / HEADS % CAPACITY)
            } else {
                (
                    bad / HEADS / CAPACITY,
                    bad / CAPACITY % HEADS,
                    bad % CAPACITY,
                )
            };
            assert!(head < HEADS);
            let [bad_rows, good_rows] = [&scales, &good].map(|scales| {
                if bsnh {
                    StridedRows::bsnh(&codes, scales, HEADS, CAPACITY, 64, 1)
                } else {
                    StridedRows::bnsh(&codes, scales, HEADS, CAPACITY, 64, 1)
                }
            });
            for [k, v] in [[bad_rows, good_rows], [good_rows, bad_rows]] {
                let found = KvView::new(
                    &problem,
                    KvFormat::same(Scheme::Int8(Int8Scale::Token)),
                    k,
                    v,
                    [&[], &[]],
                );
                match found.err() {
                    None => assert!(t >= LENS[b]),
                    Some(Error::BadBytes { what, offset, .. }) => {
                        assert!(t < LENS[b]);
                        assert_eq!((what, offset), ("view scale", bad));
                    }
                    Some(other) => panic!("{other}"),
                }
            }
        }
    }
}

#[rstest]
#[case("f16", 0x7bff, 0x7c00)]
#[case("f16", 0xfbff, 0xfc01)]
#[case("bf16", 0x5880, 0x5881)]
#[case("bf16", 0xd880, 0xd881)]
#[case("fp8", 0x7e, 0x7f)]
#[case("fp8", 0xfe, 0xff)]
fn a_bad_code_is_found_in_any_place_of_a_row(
    #[case] format: &str,
    #[case] good: u16,
    #[case] bad: u16,
    #[values(0, 1, 62, 63)] d: usize,
) {
    let format: KvFormat = format.parse().unwrap();
    let width = format.k.code_bits() / 8;
    let problem = problem(&[2]);
    let scales = [1.0; HEADS];
    let scales = if format.k.has_tensor_scale() {
        &scales[..]
    } else {
        &[]
    };
    for (code, found) in [(good, false), (bad, true)] {
        let mut codes = vec![0; HEADS * 2 * 64 * width];
        let at = (5 * 64 + d) * width;
        codes[at..at + width].copy_from_slice(&code.to_le_bytes()[..width]);
        let rows = StridedRows::bnsh(&codes, &[], HEADS, 2, 64 * width, 0);
        let view = KvView::new(&problem, format, rows, rows, [scales, scales]);
        assert_eq!(view.is_err(), found, "{code:#x}: {view:?}");
    }
}

#[test]
fn schemes_without_rows_of_their_own_and_odd_groups_are_refused() {
    let codes = [0; 4096];
    let scales = [0; 64];
    for (format, dim, name) in [
        ("int4-g1/int8-plain", 64, "view scheme"),
        ("int8-plain/int4-g1", 64, "view scheme"),
        ("int4", 64, "view scheme"),
        ("int8", 64, "view scheme"),
        ("int8-plain/int8", 64, "view scheme"),
        ("int8-g32/int8-plain", 80, "format"),
        ("int8-plain/int8-g32", 80, "format"),
    ] {
        let problem = Problem::new(Heads::new(1, 1, dim), vec![2]);
        let rows = StridedRows::bnsh(&codes, &scales, 1, 2, dim, 2);
        let error = KvView::new(&problem, format.parse().unwrap(), rows, rows, [&[], &[]]).err();
        assert!(
            matches!(error, Some(Error::Parameter { what, .. }) if what == name),
            "{format}: {error:?}"
        );
    }
}

#[test]
fn a_sequence_without_tokens_may_have_rows_that_no_slice_reaches() {
    let format = KvFormat::same(Scheme::Int8(Int8Scale::Token));
    for (lens, rows) in [
        (
            [1, 0],
            StridedRows::bnsh(&[5; 64], &[0x3c00], 1, 100, 64, 1),
        ),
        ([0, 0], StridedRows::bnsh(&[], &[], 1, 100, 64, 1)),
    ] {
        let problem = Problem::new(Heads::new(1, 1, 64), lens);
        KvView::new(&problem, format, rows, rows, [&[], &[]]).unwrap();
    }
}

#[test]
fn trusted_values_do_not_make_a_problem_or_a_number_of_scales_right() {
    let codes = vec![0u8; HEADS * CAPACITY * 64];
    let rows = || StridedRows::bsnh(&codes, &[], HEADS, CAPACITY, 64, 1);
    let format: KvFormat = "fp8".parse().unwrap();
    let whole = [1.0; HEADS];
    let made = |problem: &Problem, scales: &[f32]| {
        KvView::with_trusted_values(problem, format, rows(), rows(), [&whole, scales]).is_ok()
    };
    let mut problem = problem(&[CAPACITY]);
    assert!(made(&problem, &whole));
    assert!(!made(&problem, &whole[1..]));
    assert!(!made(&problem, &[1.0, f32::NAN, 1.0]));
    problem.scores.softmax_scale = Some(f32::NAN);
    assert!(!made(&problem, &whole));
}
