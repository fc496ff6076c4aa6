//! Rows that lie apart have the bits of rows side by side: tokens, queries and outputs of every type. What lies between them is not read, nor written.

use attn_conformance::{Case, check::first_difference, trials::Trials};
use attn_core::{Append, DecodeAttention, DecodeStep, KvFormat, KvSource, Rows, RowsMut};
use half::{bf16, f16};

const DIM: usize = 64;

/// Elements from one token and one head to the next, of so many tokens and heads.
type Strides = fn(tokens: usize, heads: usize) -> [usize; 2];

/// Where an engine's rows lie.
const LAYOUTS: [(&str, Strides); 4] = [
    ("a fused projection", |_, heads| [(heads + 3) * DIM, DIM]),
    ("heads first", |tokens, _| [DIM, tokens * DIM]),
    ("heads apart", |_, heads| [heads * (DIM + 16) + 5, DIM + 16]),
    ("heads first, tokens apart", |tokens, _| {
        [DIM + 1, tokens * (DIM + 1) + 7]
    }),
];

/// Adds the tests of this file.
pub fn add(mut trials: Trials<Box<dyn DecodeAttention>>) -> Trials<Box<dyn DecodeAttention>> {
    for format in ["int8", "int8/int4", "bf16"] {
        let name = format!("{format}: rows at strides are rows side by side");
        trials = trials.test(name, move |backend| strided(&**backend, format));
    }
    trials
}

/// Where the rows of tokens and heads begin.
fn places(tokens: usize, heads: usize, [token, head]: [usize; 2]) -> impl Iterator<Item = usize> {
    (0..tokens).flat_map(move |t| (0..heads).map(move |h| t * token + h * head))
}

/// Rows side by side as rows at strides, with `gap` between and behind them.
fn spread<T: Copy>(x: &[T], heads: usize, strides: [usize; 2], gap: T) -> Vec<T> {
    let tokens = x.len() / (heads * DIM);
    let end = places(tokens, heads, strides)
        .max()
        .map_or(0, |at| at + DIM);
    let mut all = vec![gap; end + 3];
    for (at, row) in places(tokens, heads, strides).zip(x.chunks_exact(DIM)) {
        all[at..at + DIM].copy_from_slice(row);
    }
    all
}

fn strided(backend: &dyn DecodeAttention, format: &str) {
    let format: KvFormat = format.parse().expect("a format's name");
    // One token, drafts, and a prompt that is long enough for several threads to write its rows.
    let mut case = Case::new([8, 2], DIM, &[300, 5, 200], format);
    case.problem.q_lens = vec![1, 5, 130];
    macro_rules! hold {
        ($number:ty) => {
            for (name, strides) in LAYOUTS {
                let name = format!("{}, {name}", stringify!($number));
                same_bits::<$number>(backend, &case, strides, &name);
            }
        };
    }
    hold!(f32);
    hold!(f16);
    hold!(bf16);
}

/// What rows are made of.
trait Number: Copy + PartialEq + std::fmt::Debug {
    const NAN: Self;
    const SEVEN: Self;
    fn of(x: f32) -> Self;
    fn wide(self) -> f32;
    fn rows(x: &[Self], shape: [usize; 3], strides: [usize; 2]) -> Rows<'_>;
    fn rows_mut(x: &mut [Self], shape: [usize; 3], strides: [usize; 2]) -> RowsMut<'_>;
}

macro_rules! number {
    ($number:ty, $seven:expr, $of:expr, $wide:expr) => {
        impl Number for $number {
            const NAN: Self = <$number>::NAN;
            const SEVEN: Self = $seven;
            fn of(x: f32) -> Self {
                $of(x)
            }
            fn wide(self) -> f32 {
                $wide(self)
            }
            fn rows(x: &[Self], shape: [usize; 3], strides: [usize; 2]) -> Rows<'_> {
                Rows::strided(x, shape, strides).unwrap()
            }
            fn rows_mut(x: &mut [Self], shape: [usize; 3], strides: [usize; 2]) -> RowsMut<'_> {
                RowsMut::strided(x, shape, strides).unwrap()
            }
        }
    };
}
number!(f32, 7.0, |x| x, |x| x);
number!(f16, f16::from_f32_const(7.0), f16::from_f32, f16::to_f32);
number!(
    bf16,
    bf16::from_f32_const(7.0),
    bf16::from_f32,
    bf16::to_f32
);

fn same_bits<T: Number>(backend: &dyn DecodeAttention, case: &Case, strides: Strides, name: &str) {
    let (problem, config) = (&case.problem, case.config());
    let (lens, heads) = (&problem.kv_lens, problem.num_kv_heads);
    let all = |side: usize| -> Vec<T> {
        let rows = (0..lens.len()).flat_map(|b| case.kv(b)[side][..lens[b] * heads * DIM].to_vec());
        rows.map(T::of).collect()
    };
    let [k, v] = [all(0), all(1)];
    let count = |sequence: usize| Append {
        sequence,
        tokens: lens[sequence],
    };
    let appends: Vec<Append> = (0..lens.len()).map(count).collect();
    let tokens: usize = lens.iter().sum();
    let shape = [tokens, heads, DIM];
    // K and V lie in different ways.
    let (in_k, in_v) = (strides(tokens, heads), LAYOUTS[0].1(tokens, heads));
    let [far_k, far_v] = [(&k, in_k), (&v, in_v)].map(|(x, at)| spread(x, heads, at, T::NAN));
    let mut cache = backend.create_cache(&config).unwrap();
    let rows = |x, at| T::rows(x, shape, at);
    cache
        .append_batch(&appends, rows(&far_k, in_k), rows(&far_v, in_v))
        .unwrap();
    let mut near = backend.create_cache(&config).unwrap();
    let own = [heads * DIM, DIM];
    near.append_batch(&appends, rows(&k, own), rows(&v, own))
        .unwrap();
    for b in 0..lens.len() {
        let same = cache.image(b).unwrap() == near.image(b).unwrap();
        assert!(same, "{name}: sequence {b}");
    }

    let (tokens, heads) = (problem.query_tokens(), problem.num_q_heads);
    let q: Vec<T> = case.q().into_iter().map(T::of).collect();
    let plan = backend.plan(problem, case.format).unwrap();
    let decode = |q: Rows<'_>, out: RowsMut<'_>| {
        let mut lse = vec![f32::NAN; problem.rows()];
        let step = DecodeStep::new(&plan, q, KvSource::Cache(&cache), out);
        let mut step = step.and_then(|step| step.with_lse(&mut lse)).unwrap();
        backend.decode(&mut step).unwrap();
        lse
    };
    let (shape, own) = ([tokens, heads, DIM], [heads * DIM, DIM]);
    let mut want = vec![T::NAN; q.len()];
    let want_lse = decode(T::rows(&q, shape, own), T::rows_mut(&mut want, shape, own));
    let in_q = strides(tokens, heads);
    let far_q = spread(&q, heads, in_q, T::NAN);
    // Outputs lie as the queries do, and in each other way.
    for (_, strides) in LAYOUTS {
        let in_out = strides(tokens, heads);
        let expected = spread(&want, heads, in_out, T::SEVEN);
        let mut out = vec![T::SEVEN; expected.len()];
        let lse = decode(
            T::rows(&far_q, shape, in_q),
            T::rows_mut(&mut out, shape, in_out),
        );
        let [out, expected] =
            [out, expected].map(|x| x.into_iter().map(T::wide).collect::<Vec<_>>());
        assert_eq!(first_difference(name, &out, &expected), None);
        assert_eq!(first_difference(name, &lse, &want_lse), None);
    }
}
