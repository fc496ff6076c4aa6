//! Pages that the caller owns have the bytes of a cache's and give the bits of a step over it, wherever they lie; what does not fit them is refused and changes nothing.

use attn_conformance::noise::Noise;
use attn_core::{
    Append, CacheConfig, DecodeAttention, DecodeStep, Error, HeadDim, Heads, KvCache, KvFormat,
    KvSource, PageLayout, PagePool, PoolPages, Problem, ScoreModifiers,
};
use attn_cpu::{CpuBackend, Options, Reference};

const HEADS: Heads = Heads {
    q: 6,
    kv: 2,
    dim: HeadDim::same(64),
};
const FORMATS: [&str; 10] = [
    "int8",
    "int8-plain",
    "int8-g32",
    "int8/int4-w0",
    "int4-w0",
    "int4-g1",
    "int4-g4",
    "bf16",
    "f16",
    "bf16/int8",
];

fn format(name: &str) -> KvFormat {
    name.parse().unwrap()
}

fn layout(name: &str, page_size: usize) -> PageLayout {
    PageLayout::new(format(name), HEADS.dim, page_size, HEADS.kv).unwrap()
}

fn numbers(n: usize, random: &mut Noise) -> Vec<f32> {
    (0..n).map(|_| random.unit()).collect()
}

/// Sequences of these lengths in a cache and in a pool, by appends of up to 90 tokens of several sequences at once.
struct Both {
    cache: KvCache,
    pool: Vec<u8>,
    table: Vec<u32>,
    lens: Vec<usize>,
}

impl Both {
    fn new(backend: &CpuBackend, name: &str, page_size: usize, lens: &[usize]) -> Both {
        let layout = layout(name, page_size);
        let each = lens
            .iter()
            .map(|len| len.div_ceil(page_size))
            .max()
            .unwrap();
        let config = CacheConfig::builder(format(name), HEADS)
            .page_size(page_size)
            .sequences(lens.len())
            .pages(each * lens.len())
            .centres(false)
            .build();
        let mut cache = backend.create_cache(&config).unwrap();
        // Every third page of the pool is nobody's; a sequence's go backwards.
        let pages = each * lens.len();
        let table: Vec<u32> = (0..pages).map(|i| 3 * (pages - i) as u32 - 1).collect();
        let mut pool = vec![0; 3 * pages * layout.page_bytes()];
        let mut random = Noise::new(7);
        let mut done = vec![0; lens.len()];
        while done != lens {
            let mut appends = Vec::new();
            let mut slots = Vec::new();
            for (sequence, (done, len)) in done.iter_mut().zip(lens).enumerate() {
                let tokens = (len - *done).min(1 + random.below(90));
                if tokens == 0 {
                    continue;
                }
                appends.push(Append { sequence, tokens });
                slots.extend((*done..*done + tokens).map(|t| {
                    let page = table[sequence * each + t / page_size];
                    i64::from(page) * page_size as i64 + (t % page_size) as i64
                }));
                *done += tokens;
            }
            let n = slots.len() * HEADS.kv * HEADS.dim.k;
            let (k, v) = (numbers(n, &mut random), numbers(n, &mut random));
            cache.append_batch(&appends, &k, &v).unwrap();
            backend
                .append_slots(
                    &PoolPages::new(&layout).unwrap(),
                    &mut pool,
                    &slots,
                    &k,
                    &v,
                    None,
                )
                .unwrap();
        }
        Both {
            cache,
            pool,
            table,
            lens: lens.to_vec(),
        }
    }

    fn layout(&self) -> &PageLayout {
        self.cache.layout()
    }

    fn check_bytes(&self, what: &str) {
        let (page, each) = (
            self.layout().page_bytes(),
            self.table.len() / self.lens.len(),
        );
        for (sequence, table) in self.table.chunks_exact(each).enumerate() {
            let pages = self.cache.read_back(sequence).unwrap();
            for (i, (own, at)) in pages.iter().zip(table).enumerate() {
                let given = &self.pool[*at as usize * page..][..page];
                assert!(given == own, "{what}: page {i} of sequence {sequence}");
            }
        }
        let nobodys = self.pool.chunks_exact(page).enumerate();
        let mut nobodys = nobodys.filter(|(i, _)| i % 3 != 2);
        assert!(nobodys.all(|(_, bytes)| bytes.iter().all(|b| *b == 0)));
    }

    fn attend(
        &self,
        backend: &dyn DecodeAttention,
        problem: &Problem,
        kv: KvSource<'_>,
    ) -> (Vec<u32>, Vec<u32>) {
        let q = numbers(problem.rows() * HEADS.dim.k, &mut Noise::new(11));
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; problem.rows()]);
        let plan = backend.plan(problem, self.layout().format()).unwrap();
        let step = DecodeStep::new(&plan, &q, kv, &mut out).unwrap();
        backend
            .decode(&mut step.with_lse(&mut lse).unwrap())
            .unwrap();
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect();
        (bits(&out), bits(&lse))
    }
}

/// Kills a pool that is read or written by another page's, token's or head's place, and vector kernels that differ from the reference over it.
#[test]
fn a_pool_has_the_bytes_and_the_bits_of_a_cache() {
    for threads in [1, 2] {
        let backend = CpuBackend::with_options(&Options::default().threads(threads)).unwrap();
        for (name, page_size) in FORMATS.into_iter().zip([16, 32, 64, 128].repeat(3)) {
            let both = Both::new(&backend, name, page_size, &[300, 17, 64, 1]);
            let what = format!("{name}, pages of {page_size}, {threads} threads");
            both.check_bytes(&what);
            let pool = PagePool::new(both.layout(), &both.pool, &both.table, &both.lens).unwrap();
            let scores = ScoreModifiers {
                window_left: Some(100),
                ..ScoreModifiers::default()
            };
            for problem in [
                Problem::new(HEADS, both.lens.clone()),
                Problem::new(HEADS, both.lens.clone()).q_lens(vec![70, 3, 0, 1]),
                Problem::new(HEADS, both.lens.clone()).scores(scores),
            ] {
                let wanted = both.attend(&backend, &problem, KvSource::Cache(&both.cache));
                let given = both.attend(&backend, &problem, KvSource::Pool(&pool));
                assert!(given == wanted, "{what}");
                let scalar = both.attend(&Reference::new(), &problem, KvSource::Pool(&pool));
                assert!(!format(name).is_integer() || scalar == wanted, "{what}");
            }
        }
    }
}

/// Kills a page of several heads that is not as many pages of one, one behind the other.
#[test]
fn pages_chosen_for_each_kv_head_have_the_bits_of_these_pages_alone() {
    let backend = CpuBackend::new();
    for (name, page_size) in FORMATS.into_iter().zip([16, 32, 64, 128].repeat(3)) {
        let both = Both::new(&backend, name, page_size, &[300, 17]);
        let head = PageLayout::new(format(name), HEADS.dim, page_size, 1).unwrap();
        let each = both.table.len() / 2;
        // All pages in another order for one head, and the first and the last for the other.
        let last = 299 / page_size;
        let chosen: [Vec<usize>; 2] = [(0..last).rev().chain([last]).collect(), vec![0, last]];
        let tail = 300 - last * page_size;
        let lens: Vec<usize> = chosen
            .iter()
            .map(|pages| (pages.len() - 1) * page_size + tail)
            .collect();
        let mut table = vec![u32::MAX; 2 * each];
        let mut alone = Vec::new();
        for (g, pages) in chosen.iter().enumerate() {
            for (i, &page) in pages.iter().enumerate() {
                let at = both.table[page] as usize * HEADS.kv + g;
                table[g * each + i] = at as u32;
                let bytes = head.page_bytes();
                alone.extend_from_slice(&both.pool[at * bytes..][..bytes]);
            }
        }
        let numbers: Vec<u32> = (0..2 * each as u32)
            .map(|i| match i as usize / each {
                0 => i,
                _ => i - each as u32 + chosen[0].len() as u32,
            })
            .collect();
        let heads = Heads {
            q: HEADS.q / HEADS.kv,
            kv: 1,
            dim: HEADS.dim,
        };
        let problem = Problem::new(heads, lens.clone());
        let [given, wanted] = [(&both.pool, &table), (&alone, &numbers)].map(|(pool, table)| {
            let pool = PagePool::new(&head, pool, table, &lens).unwrap();
            both.attend(&backend, &problem, KvSource::Pool(&pool))
        });
        assert!(given == wanted, "{name}, pages of {page_size}");
        // What is left out counts.
        let whole = Problem::new(HEADS, both.lens.clone());
        let whole = both.attend(&backend, &whole, KvSource::Cache(&both.cache));
        assert!(given.0 != whole.0[..given.0.len()], "{name}");
    }
}

/// Kills an append that looks at tokens without a slot, and one that writes them.
#[test]
fn tokens_without_a_slot_may_be_anything_and_go_nowhere() {
    let (backend, layout) = (CpuBackend::new(), layout("int8", 16));
    let row = HEADS.kv * HEADS.dim.k;
    let mut random = Noise::new(3);
    let (mut k, v) = (numbers(3 * row, &mut random), numbers(3 * row, &mut random));
    let mut alone = vec![0; 2 * layout.page_bytes()];
    let [first, last] = [0..row, 2 * row..3 * row];
    for (slot, at) in [(17, first), (2, last)] {
        backend
            .append_slots(
                &PoolPages::new(&layout).unwrap(),
                &mut alone,
                &[slot],
                &k[at.clone()],
                &v[at],
                None,
            )
            .unwrap();
    }
    k[row..2 * row].fill(f32::NAN);
    let mut pool = vec![0; 2 * layout.page_bytes()];
    backend
        .append_slots(
            &PoolPages::new(&layout).unwrap(),
            &mut pool,
            &[17, -1, 2],
            &k,
            &v,
            None,
        )
        .unwrap();
    assert!(pool == alone);
    // A slot that comes twice has its last token.
    backend
        .append_slots(
            &PoolPages::new(&layout).unwrap(),
            &mut pool,
            &[2, i64::MIN, 17],
            &k,
            &v,
            None,
        )
        .unwrap();
    backend
        .append_slots(
            &PoolPages::new(&layout).unwrap(),
            &mut pool,
            &[2, -1, 2],
            &k,
            &v,
            None,
        )
        .unwrap();
    assert!(pool[..layout.page_bytes()] == alone[..layout.page_bytes()]);
}

/// Kills each check that a pool and an append have, and one that comes behind the first write.
#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let (backend, layout) = (CpuBackend::new(), layout("int8", 16));
    let (page, row) = (layout.page_bytes(), HEADS.kv * HEADS.dim.k);
    let (k, mut bad) = (vec![0.5; 2 * row], vec![0.5; 2 * row]);
    bad[2 * row - 1] = f32::INFINITY;
    let mut pool = vec![0; 2 * page];
    let mut refused = |slots: &[i64], k: &[f32], v: &[f32], bytes: usize| {
        let error = backend
            .append_slots(
                &PoolPages::new(&layout).unwrap(),
                &mut pool[..bytes],
                slots,
                k,
                v,
                None,
            )
            .unwrap_err();
        assert!(pool.iter().all(|b| *b == 0), "{error}");
        error
    };
    let slot = |error| matches!(error, Error::Parameter { what: "slot", .. });
    assert!(slot(refused(&[0, 32], &k, &k, 2 * page)));
    assert!(slot(refused(&[0, i64::MAX], &k, &k, 2 * page)));
    assert!(slot(refused(&[0, 16], &k, &k, page)));
    let length = |error| matches!(error, Error::Length { .. });
    assert!(length(refused(&[0, 1], &k, &k, 2 * page - 1)));
    assert!(length(refused(&[0], &k, &k, 2 * page)));
    let number = |error| matches!(error, Error::NotFinite { .. });
    assert!(number(refused(&[0, 1], &bad, &k, 2 * page)));
    assert!(number(refused(&[0, 1], &k, &bad, 2 * page)));

    let of = |layout: &PageLayout, bytes: usize, table: &[u32], lens: &[usize]| {
        PagePool::new(layout, &pool[..bytes], table, lens).map(drop)
    };
    of(&layout, 2 * page, &[1, 0], &[32]).unwrap();
    // Entries behind the last token are not looked at.
    of(&layout, 2 * page, &[1, u32::MAX], &[16]).unwrap();
    of(&layout, 2 * page, &[], &[0, 0]).unwrap();
    let refusals = [
        of(&layout, 2 * page, &[1, 2], &[17]),
        of(&layout, page, &[1, 0], &[32]),
        of(&layout, 2 * page, &[1], &[17]),
        of(&layout, 2 * page, &[1, 0, 1], &[1, 1]),
        of(&layout, 2 * page, &[0], &[]),
        of(&layout, 2 * page - 1, &[0], &[1]),
    ];
    assert!(refusals.iter().all(Result::is_err), "{refusals:?}");
    for name in ["int4", "int8/int4", "fp8", "int8-tensor", "bf16/fp8"] {
        let other = PageLayout::new(format(name), HEADS.dim, 16, HEADS.kv).unwrap();
        let error = PagePool::new(&other, &[], &[], &[]).unwrap_err();
        assert!(error.to_string().contains("int8/int4-w0"), "{error}");
        assert!(PoolPages::new(&other).is_err());
    }
    let kv = PagePool::new(&layout, &pool, &[1], &[9]).unwrap();
    let (q, mut out) = (vec![0.5; HEADS.q * 64], vec![0.0; HEADS.q * 64]);
    for (heads, name) in [(HEADS, "bf16"), (Heads { kv: 3, ..HEADS }, "int8")] {
        let plan = backend
            .plan(&Problem::new(heads, [9]), format(name))
            .unwrap();
        let step = DecodeStep::new(&plan, &q, KvSource::Pool(&kv), &mut out);
        assert!(matches!(step.map(drop), Err(Error::Mismatch { .. })));
    }
}

/// Kills an index that is made of a page's bytes.
#[test]
fn bytes_that_no_append_has_written_do_no_harm() {
    let backend = CpuBackend::new();
    for name in FORMATS {
        let layout = layout(name, 32);
        let mut random = Noise::new(5);
        let mut pool = vec![0; 8 * layout.page_bytes()];
        for fill in 0..6 {
            for byte in &mut pool {
                *byte = match fill {
                    0 => 0xff,
                    1 => 0x7c,
                    _ => random.below(256) as u8,
                };
            }
            let table: Vec<u32> = (0..8).collect();
            let kv = PagePool::new(&layout, &pool, &table, &[250]).unwrap();
            let problem = Problem::new(HEADS, [250]).q_lens(vec![9]);
            let q = numbers(problem.rows() * HEADS.dim.k, &mut random);
            let mut out = vec![0.0; q.len()];
            let plan = backend.plan(&problem, format(name)).unwrap();
            let mut step = DecodeStep::new(&plan, &q, KvSource::Pool(&kv), &mut out).unwrap();
            backend.decode(&mut step).unwrap();
        }
    }
}
