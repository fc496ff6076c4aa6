//! Block-sparse attention: a KV head that attends selected pages has the bits of a sequence that consists of their tokens alone.

use attn_conformance::{case::noise, check::first_difference, trials::Trials};
use attn_core::{
    Attend, CacheConfig, DecodeAttention, DecodeStep, Error, Heads, KvCache, KvFormat, KvSource,
    Problem, ScoreModifiers, SelectedPages,
};

const HEADS: Heads = Heads {
    q: 8,
    kv: 2,
    dim: attn_core::HeadDim::same(64),
};
const ROW: usize = 64;
/// One within a page, one with a full last page in every size, and one of several spans.
const LENS: [usize; 4] = [5, 256, 700, 2500];

/// Adds the tests of this file.
pub fn add(mut trials: Trials<Box<dyn DecodeAttention>>) -> Trials<Box<dyn DecodeAttention>> {
    for (format, page_size, centres) in [
        ("int8", 64, true),
        ("int8", 128, false),
        ("int8", 16, true),
        ("int8-g32", 32, false),
        ("int4-g1", 64, false),
        ("bf16", 16, false),
        ("int4", 64, true),
        ("int8/int4", 128, false),
        ("int4-r2-w4", 64, true),
        ("fp8", 64, false),
        ("int8-tensor", 32, false),
    ] {
        let with = if centres { ", with centres" } else { "" };
        let name = format!("{format}: selected pages of {page_size} tokens{with}");
        trials = trials.test(name, move |backend| {
            selected(&**backend, format, page_size, centres)
        });
    }
    trials.test(
        "selected pages: what cannot have their bits is refused",
        |backend| {
            refused(&**backend);
            refused_steps(&**backend);
        },
    )
}

fn cache(backend: &dyn DecodeAttention, config: &CacheConfig) -> KvCache {
    backend
        .create_cache(config)
        .unwrap_or_else(|error| panic!("{}: {error}", config.format))
}

/// Pages of each KV head of each sequence, about every second one; head 1 of the first sequence has none.
fn choose(page_size: usize, centres: bool, format: KvFormat) -> Vec<Vec<u32>> {
    // Of formats with a window the first tile, and the newest pages.
    let newest = format.max_residual_pages(page_size, 1);
    let kept = match centres || newest > 0 {
        true => 64usize.div_ceil(page_size),
        false => 0,
    };
    let bits = noise(7, LENS.len() * HEADS.kv * 256);
    let of = |i: usize| -> Vec<u32> {
        let count = LENS[i / HEADS.kv].div_ceil(page_size);
        let is_kept = |page: usize| page < kept || newest > 0 && page + newest >= count;
        let is_chosen = |page: &usize| is_kept(*page) || bits[i * 256 + page] > 0.0;
        let chosen = (0..count).filter(is_chosen);
        chosen.map(|page| page as u32).collect()
    };
    (0..LENS.len() * HEADS.kv)
        .map(|i| if i == 1 { Vec::new() } else { of(i) })
        .collect()
}

/// The rows of a KV head's tokens on its pages.
fn tokens_of(rows: &[f32], [len, head]: [usize; 2], page_size: usize, pages: &[u32]) -> Vec<f32> {
    let tokens = pages.iter().flat_map(|page| {
        let first = *page as usize * page_size;
        first..(first + page_size).min(len)
    });
    let row = |token: usize| rows[(token * HEADS.kv + head) * ROW..][..ROW].to_vec();
    tokens.flat_map(row).collect()
}

fn decode(
    backend: &dyn DecodeAttention,
    (problem, format): (&Problem, KvFormat),
    q: &[f32],
    kv: KvSource<'_>,
) -> Result<[Vec<f32>; 2], Error> {
    let plan = backend.plan(problem, format)?;
    let mut out = vec![f32::NAN; problem.out_elements()];
    let mut lse = vec![f32::NAN; problem.rows()];
    let mut step = DecodeStep::new(&plan, q, kv, &mut out)?.with_lse(&mut lse)?;
    backend.decode(&mut step)?;
    Ok([out, lse])
}

fn selected(backend: &dyn DecodeAttention, format: &str, page_size: usize, centres: bool) {
    let format: KvFormat = format.parse().expect("a format's name");
    let config = |heads: Heads, lens: Vec<usize>| {
        let mut builder = CacheConfig::builder(format, heads).page_size(page_size);
        if format.k.has_tensor_scale() {
            builder = builder.tensor_scales(vec![0.5; heads.kv], vec![0.25; heads.kv]);
        }
        builder.centres(centres).lens(lens).build()
    };
    let mut whole = cache(backend, &config(HEADS, LENS.to_vec()));
    let pages = choose(page_size, centres, format);
    let rows: Vec<[Vec<f32>; 2]> = (0..LENS.len())
        .map(|s| [1, 2].map(|side| noise((4 * s + side) as u64, LENS[s] * HEADS.kv * ROW)))
        .collect();
    for (s, [k, v]) in rows.iter().enumerate() {
        whole.append(s, k, v).unwrap();
    }
    // Sequences in another order than the cache's.
    let order = [2, 0, 3, 1];
    let of_order = |i: usize| order[i / HEADS.kv] * HEADS.kv + i % HEADS.kv;
    let chosen: Vec<&[u32]> = (0..pages.len()).map(|i| &pages[of_order(i)][..]).collect();
    let counts: Vec<usize> = chosen.iter().map(|own| own.len()).collect();
    let all = chosen.concat();
    let of_one = Heads::new(HEADS.q / HEADS.kv, 1, ROW);
    let alone: Vec<[Vec<f32>; 2]> = (0..pages.len())
        .map(|i| {
            let (s, head) = (of_order(i) / HEADS.kv, i % HEADS.kv);
            [0, 1].map(|side| tokens_of(&rows[s][side], [LENS[s], head], page_size, chosen[i]))
        })
        .collect();
    let lens: Vec<usize> = alone.iter().map(|[k, _]| k.len() / ROW).collect();
    let mut apart = cache(backend, &config(of_one, lens.clone()));
    for (i, [k, v]) in alone.iter().enumerate() {
        apart.append(i, k, v).unwrap();
    }
    let scores = ScoreModifiers {
        softcap: Some(30.0),
        ..ScoreModifiers::default()
    };
    let selected = SelectedPages {
        pages: &all,
        counts: &counts,
    };
    let at = Attend {
        pages: Some(selected),
        scores: scores.clone(),
        ..Attend::new(HEADS.q, &order)
    };
    let attended = at.of_cache(&whole).unwrap();
    assert_eq!(attended.problem().kv_lens, lens);
    let q = noise(3, attended.problem().q_elements());
    let kv = KvSource::Sequences(attended.sequences());
    let got = decode(backend, (attended.problem(), format), &q, kv).unwrap();
    let problem = Problem::new(of_one, lens).scores(scores);
    let want = decode(backend, (&problem, format), &q, KvSource::Cache(&apart)).unwrap();
    for (what, (got, want)) in ["out", "lse"].into_iter().zip(got.iter().zip(&want)) {
        assert_eq!(first_difference(what, got, want), None);
    }
    let none = &got[1][(2 * HEADS.kv - 1) * 4..][..4];
    assert!(none.iter().all(|lse| *lse == f32::NEG_INFINITY), "{none:?}");
}

/// A cache whose first sequence has 200 tokens, on pages of 64.
fn of_200_tokens(backend: &dyn DecodeAttention, format: &str, centres: bool) -> KvCache {
    let format = format.parse().expect("a format's name");
    let builder = CacheConfig::builder(format, HEADS).page_size(64);
    let mut cache = cache(backend, &builder.centres(centres).max_len(256).build());
    let rows = noise(1, 200 * HEADS.kv * ROW);
    cache.append(0, &rows, &rows).unwrap();
    cache
}

/// What goes by a token's place or by the query head.
fn refused_steps(backend: &dyn DecodeAttention) {
    let plain = of_200_tokens(backend, "int8", false);
    let base = || Attend {
        pages: Some(SelectedPages {
            pages: &[1, 3, 0],
            counts: &[2, 1],
        }),
        q_lens: Some(&[1]),
        tokens_before: &[0],
        tokens_after: &[0],
        ..Attend::new(HEADS.q, &[0])
    };
    let with = |scores: ScoreModifiers| Attend { scores, ..base() };
    let none = ScoreModifiers::default;
    assert_eq!(
        Attend {
            q_lens: Some(&[2, 3]),
            ..base()
        }
        .query_tokens(),
        5
    );
    base().of_cache(&plain).unwrap();
    for (name, at) in [
        (
            "q_lens",
            Attend {
                q_lens: Some(&[2]),
                ..base()
            },
        ),
        (
            "q_lens",
            Attend {
                q_lens: Some(&[0]),
                ..base()
            },
        ),
        (
            "shards",
            Attend {
                tokens_before: &[1024],
                ..base()
            },
        ),
        (
            "shards",
            Attend {
                tokens_after: &[1],
                ..base()
            },
        ),
        (
            "window_left",
            with(ScoreModifiers {
                window_left: Some(9),
                ..none()
            }),
        ),
        (
            "chunk",
            with(ScoreModifiers {
                chunk: Some(64),
                ..none()
            }),
        ),
        (
            "alibi_slopes",
            with(ScoreModifiers {
                alibi_slopes: Some(vec![0.0; HEADS.q]),
                ..none()
            }),
        ),
        (
            "sinks",
            with(ScoreModifiers {
                sinks: Some(vec![0.0; HEADS.q]),
                ..none()
            }),
        ),
    ] {
        let said = at.of_cache(&plain).err().map(|error| error.to_string());
        let is_named = said.as_ref().is_some_and(|said| said.contains(name));
        assert!(is_named, "{name}: {said:?}");
    }
}

fn refused(backend: &dyn DecodeAttention) {
    let (plain, centred, int4) = (
        of_200_tokens(backend, "int8", false),
        of_200_tokens(backend, "int8", true),
        of_200_tokens(backend, "int4", true),
    );
    let attend = |cache: &KvCache, pages: &[u32], counts: &[usize]| {
        let pages = Some(SelectedPages { pages, counts });
        let at = Attend {
            pages,
            ..Attend::new(HEADS.q, &[0])
        };
        at.of_cache(cache).map(drop)
    };
    attend(&plain, &[1, 3, 0], &[2, 1]).unwrap();
    attend(&centred, &[0, 3, 0], &[2, 1]).unwrap();
    attend(&int4, &[0, 3, 0], &[2, 1]).unwrap();
    for (name, result) in [
        (
            "a page that is not there",
            attend(&plain, &[1, 4, 0], &[2, 1]),
        ),
        ("twice", attend(&plain, &[1, 1, 0], &[2, 1])),
        ("descending", attend(&plain, &[1, 0, 0], &[2, 1])),
        (
            "without the first page",
            attend(&centred, &[1, 3, 0], &[2, 1]),
        ),
        (
            "without the newest page",
            attend(&int4, &[0, 2, 0], &[2, 1]),
        ),
        ("without the first tile", attend(&int4, &[1, 3, 0], &[2, 1])),
    ] {
        assert!(
            matches!(result, Err(Error::Parameter { .. })),
            "{name}: {result:?}"
        );
    }
    let scaled = |second: f32| {
        let builder = CacheConfig::builder("fp8".parse().expect("a name"), HEADS)
            .tensor_scales([0.5, second], [0.5; 2]);
        let mut cache = cache(backend, &builder.max_len(256).build());
        let rows = noise(1, 200 * HEADS.kv * ROW);
        cache.append(0, &rows, &rows).unwrap();
        attend(&cache, &[1, 3, 0], &[2, 1])
    };
    scaled(0.5).unwrap();
    let result = scaled(0.25);
    assert!(matches!(result, Err(Error::Parameter { .. })), "{result:?}");
    for (name, result) in [
        ("counts", attend(&plain, &[1, 3, 0], &[3])),
        ("pages", attend(&plain, &[1, 3, 0], &[1, 1])),
    ] {
        assert!(
            matches!(result, Err(Error::Length { .. })),
            "{name}: {result:?}"
        );
    }
}
