//! Pages of the caller's with centres of K have the bytes and the bits of a cache with centres, in whatever calls their tokens come.

use attn_conformance::noise::Noise;
use attn_core::{
    Append, CacheConfig, DecodeAttention, DecodeStep, Error, HeadDim, Heads, HostPages, KvCache,
    KvFormat, KvSource, PageLayout, PagePool, PoolPages, Problem, SlotCentres,
    centres::centres_bytes,
};
use attn_cpu::{CpuBackend, Options, Reference};

/// What the bytes hold that no call is to write.
const UNTOUCHED: u8 = 0xee;

fn heads(dim: HeadDim) -> Heads {
    Heads { q: 6, kv: 2, dim }
}

fn layout(name: &str, dim: HeadDim, page_size: usize) -> PageLayout {
    PageLayout::new(name.parse().unwrap(), dim, page_size, 2).unwrap()
}

/// Keys that have much in common, so that centres are large.
fn keys(n: usize, random: &mut Noise) -> Vec<f32> {
    (0..n).map(|i| random.unit() + (i % 7) as f32).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Sequences 0 and 1 of their own, and sequence 2 which shares 64 or 128 tokens with sequence 0, a page; in a cache and in a pool.
struct Both<'b> {
    backend: &'b CpuBackend,
    heads: Heads,
    cache: KvCache,
    layout: PageLayout,
    stride: usize,
    pool: Vec<u8>,
    table: Vec<u32>,
    lens: [usize; 3],
    random: Noise,
}

/// Pages of each sequence.
const EACH: usize = 4;

impl<'b> Both<'b> {
    fn new(
        backend: &'b CpuBackend,
        name: &str,
        dim: HeadDim,
        page_size: usize,
        slack: usize,
    ) -> Self {
        let (heads, layout) = (heads(dim), layout(name, dim, page_size));
        let config = CacheConfig::builder(layout.format(), heads)
            .page_size(page_size)
            .sequences(3)
            .pages(3 * EACH)
            .centres(true)
            .build();
        let stride = layout.page_bytes() + centres_bytes(2, dim.k) + slack;
        let mut table: Vec<u32> = (0..3 * EACH).map(|i| 5 * i as u32 % 13).collect();
        table[2 * EACH] = table[0];
        let mut pool = vec![UNTOUCHED; 13 * stride];
        for page in pool.chunks_exact_mut(stride) {
            page[..layout.page_bytes()].fill(0);
        }
        Both {
            backend,
            heads,
            cache: backend.create_cache(&config).unwrap(),
            layout,
            stride,
            pool,
            table,
            lens: [0; 3],
            random: Noise::new(3),
        }
    }

    /// The slot, the first page and the position of a sequence's token.
    fn place(&self, sequence: usize, position: usize) -> (i64, i32, i32) {
        let (pages, page_size) = (
            &self.table[sequence * EACH..][..EACH],
            self.layout.page_size(),
        );
        let first = pages[position / page_size] as usize * page_size;
        let slot = first + position % page_size;
        (slot as i64, pages[0] as i32, position as i32)
    }

    /// One call of so many tokens of each sequence, which come to the pool in another order, with tokens between them that have no slot.
    fn append(&mut self, tokens: [usize; 3]) {
        let mut appends = Vec::new();
        let mut places = Vec::new();
        for (sequence, tokens) in tokens.into_iter().enumerate().filter(|(_, n)| *n > 0) {
            let from = self.lens[sequence];
            appends.push(Append { sequence, tokens });
            places.extend((from..from + tokens).map(|t| self.place(sequence, t)));
            self.lens[sequence] += tokens;
        }
        let [row_k, row_v] = self.layout.shapes(1).map(|[_, heads, dim]| heads * dim);
        let k = keys(places.len() * row_k, &mut self.random);
        let v = keys(places.len() * row_v, &mut self.random);
        self.cache.append_batch(&appends, &k, &v).unwrap();

        let mut order: Vec<usize> = (0..places.len()).collect();
        if self.random.below(2) == 0 {
            (1..order.len()).for_each(|i| order.swap(i, self.random.below(i + 1)));
        }
        let (mut to_k, mut to_v) = (vec![f32::NAN; row_k], vec![f32::NAN; row_v]);
        let (mut slots, mut first_pages, mut positions) = (vec![-1], vec![i32::MAX], vec![-9]);
        for i in order {
            to_k.extend_from_slice(&k[i * row_k..][..row_k]);
            to_v.extend_from_slice(&v[i * row_v..][..row_v]);
            let (slot, first_page, position) = places[i];
            slots.push(slot);
            first_pages.push(first_page);
            positions.push(position);
        }
        let pages = centred(&self.layout, self.stride).unwrap();
        let centres = SlotCentres {
            first_pages: &first_pages,
            positions: &positions,
        };
        let pool = &mut self.pool;
        self.backend
            .append_slots(&pages, pool, &slots, &to_k, &to_v, Some(centres))
            .unwrap();
    }

    /// Makes sequence 2, which has sequence 0's whole first page.
    fn share(&mut self) {
        let tokens = self.layout.page_size();
        self.cache.fork(0, 2).unwrap();
        self.cache.truncate(2, tokens).unwrap();
        self.lens[2] = tokens;
    }

    fn check(&self, what: &str) {
        let page_bytes = self.layout.page_bytes();
        let store = self.cache.store().as_any().downcast_ref::<HostPages>();
        let store = store.unwrap();
        let mut first_pages = Vec::new();
        for (sequence, len) in self.lens.into_iter().enumerate() {
            let pages = &self.cache.table().pages[sequence];
            let own = &self.table[sequence * EACH..];
            for (i, (page, at)) in pages.iter().zip(own).enumerate() {
                let wanted = &store.pool(0).unwrap()[*page as usize * page_bytes..][..page_bytes];
                let given = &self.pool[*at as usize * self.stride..][..page_bytes];
                assert!(given == wanted, "{what}: page {i} of sequence {sequence}");
            }
            if len > 0 {
                first_pages.push(own[0] as usize);
                let mut wanted = Vec::new();
                for head in 0..2 {
                    let centres = store.centres(0, sequence, head).unwrap();
                    let elements = centres.into_iter().enumerate().flat_map(|(i, centre)| {
                        let made = i == 0 || len > 64;
                        centre.iter().map(move |c| made.then_some(c.to_le_bytes()))
                    });
                    wanted.extend(elements);
                }
                let at = own[0] as usize * self.stride + page_bytes;
                let given = self.pool[at..].as_chunks::<2>().0;
                for (given, wanted) in given.iter().zip(wanted) {
                    assert!(wanted.is_none_or(|c| c == *given), "{what}: centres");
                }
            }
        }
        let centres_end = page_bytes + centres_bytes(2, self.heads.dim.k);
        for (i, page) in self.pool.chunks_exact(self.stride).enumerate() {
            let from = match first_pages.contains(&i) {
                true => centres_end,
                false => page_bytes,
            };
            let untouched = page[from..].iter().all(|b| *b == UNTOUCHED);
            assert!(untouched, "{what}: behind page {i}");
        }
    }

    fn attend(
        &self,
        backend: &dyn DecodeAttention,
        problem: &Problem,
        kv: KvSource<'_>,
    ) -> [Vec<u32>; 2] {
        let q = keys(
            problem.rows() * self.heads.dim.k,
            &mut Noise::new(problem.rows() as u64),
        );
        let mut out = vec![0.0; problem.rows() * self.heads.dim.v];
        let mut lse = vec![0.0; problem.rows()];
        let plan = backend.plan(problem, self.layout.format()).unwrap();
        let step = DecodeStep::new(&plan, &q, kv, &mut out).unwrap();
        backend
            .decode(&mut step.with_lse(&mut lse).unwrap())
            .unwrap();
        [bits(&out), bits(&lse)]
    }

    fn check_results(&self, what: &str) {
        let pages = centred(&self.layout, self.stride).unwrap();
        let pool = PagePool::of(&pages, &self.pool, &self.table, &self.lens);
        let pool = pool.unwrap();
        let several = self.lens.map(|len| len.min(7)).to_vec();
        for q_lens in [vec![1; 3], several] {
            let problem = Problem::new(self.heads, self.lens.to_vec()).q_lens(q_lens);
            let wanted = self.attend(self.backend, &problem, KvSource::Cache(&self.cache));
            let given = self.attend(self.backend, &problem, KvSource::Pool(&pool));
            assert!(given == wanted, "{what}");
            let scalar = self.attend(&Reference::new(), &problem, KvSource::Pool(&pool));
            assert!(scalar == wanted, "{what}, scalar");
        }
    }
}

/// Pages with centres, so far apart.
fn centred(layout: &PageLayout, stride: usize) -> Result<PoolPages, Error> {
    PoolPages::new(layout)?.with_centres()?.apart(stride)
}

/// Kills an append that makes a centre too early, too late or of another page, that takes the wrong one off a key, that writes behind other pages, and a step
/// over a pool that reads another's centres or none.
#[test]
fn a_pool_has_the_bytes_and_the_bits_of_a_cache_with_centres() {
    let cuts: [&[[usize; 3]]; 4] = [
        // A prompt at once, and one token at a time around the end of the other's first tile.
        &[
            [200, 0, 0],
            [0, 61, 0],
            [0, 1, 0],
            [0, 1, 0],
            [0, 1, 0],
            [0, 1, 0],
            [0, 1, 0],
            [0, 1, 0],
        ],
        // Both at once; each ends the first tile with the other elsewhere.
        &[[1, 0, 0], [30, 64, 0], [33, 1, 0], [1, 3, 0], [135, 40, 0]],
        &[[64, 66, 0], [1, 60, 0], [128, 1, 0]],
        &[[130, 130, 0], [3, 3, 0]],
    ];
    for threads in [1, 2] {
        let backend = CpuBackend::with_options(&Options::default().threads(threads)).unwrap();
        let dims = [HeadDim::same(64), HeadDim::same(80), (192, 128).into()];
        for (i, dim) in dims.into_iter().enumerate() {
            for (name, page_size) in [
                ("int8", 64),
                ("int8", 128),
                ("int8/int4-w0", 64),
                ("int8/int4-w0", 128),
            ] {
                for (j, calls) in cuts.iter().enumerate() {
                    let slack = [0, 4096, 16][i];
                    let mut both = Both::new(&backend, name, dim, page_size, slack);
                    let what = format!("{name} {dim}, pages of {page_size}, cut {j}");
                    for call in *calls {
                        both.append(*call);
                        both.check(&what);
                    }
                    both.check_results(&what);
                    both.share();
                    for tokens in [1, 20, 70] {
                        both.append([0, 0, tokens]);
                        both.check(&what);
                    }
                    both.check_results(&what);
                }
            }
        }
    }
}

/// Kills a second sequence that cannot begin in the call in which the first one writes the page that they share.
#[test]
fn a_shared_first_page_and_what_is_behind_it_come_in_one_call() {
    let backend = CpuBackend::new();
    let mut both = Both::new(&backend, "int8", HeadDim::same(64), 64, 0);
    let (mut slots, mut first_pages, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    for (sequence, tokens) in [(2, 64..90), (0, 0..70)] {
        for t in tokens {
            let (slot, first_page, position) = both.place(sequence, t);
            slots.push(slot);
            first_pages.push(first_page);
            positions.push(position);
        }
    }
    let row = 2 * 64;
    let (k, v) = (
        keys(96 * row, &mut both.random),
        keys(96 * row, &mut both.random),
    );
    let pages = centred(&both.layout, both.stride).unwrap();
    let centres = SlotCentres {
        first_pages: &first_pages,
        positions: &positions,
    };
    backend
        .append_slots(&pages, &mut both.pool, &slots, &k, &v, Some(centres))
        .unwrap();
    let (shared, behind) = (26 * row, 26 * row + 64 * row);
    both.cache.append(0, &k[shared..], &v[shared..]).unwrap();
    both.lens[0] = 70;
    both.share();
    both.cache.append(2, &k[..shared], &v[..shared]).unwrap();
    both.lens[2] = 90;
    assert!(k[behind..] != k[..6 * row]);
    both.check("one call");
}

/// Kills each check of centres, and one that comes behind the first write.
#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let (backend, dim) = (CpuBackend::new(), HeadDim::same(64));
    let layout = layout("int8", dim, 64);
    let stride = layout.page_bytes() + centres_bytes(2, 64);
    let mut pool = vec![0; 2 * stride];
    let rows = vec![0.5; 2 * 2 * 64];
    let mut append = |stride: usize, slots: &[i64], first_pages: &[i32], positions: &[i32]| {
        let centres = SlotCentres {
            first_pages,
            positions,
        };
        let given = centred(&layout, stride).and_then(|pages| {
            backend.append_slots(&pages, &mut pool, slots, &rows, &rows, Some(centres))
        });
        let error = given.unwrap_err();
        assert!(pool.iter().all(|b| *b == 0), "{error}");
        error
    };
    let refused = |error: Error, name: &str| match error {
        Error::Parameter { what, .. } => assert_eq!(what, name),
        error => panic!("{error}"),
    };
    refused(append(stride, &[0, 1], &[0, 2], &[0, 1]), "first page");
    refused(append(stride, &[0, 1], &[0, -1], &[0, 1]), "first page");
    refused(append(stride, &[0, 1], &[0, 0], &[0, -1]), "position");
    refused(append(stride, &[0, 128], &[0, 0], &[0, 1]), "slot");
    let of_stride = "stride of pages";
    refused(append(stride - 16, &[0, 1], &[0, 0], &[0, 1]), of_stride);
    refused(append(stride + 8, &[0, 1], &[0, 0], &[0, 1]), of_stride);
    let length = |error: Error, name: &str| match error {
        Error::Length { what, .. } => assert_eq!(what, name),
        error => panic!("{error}"),
    };
    length(append(stride, &[0, 1], &[0], &[0, 1]), "first_pages");
    length(append(stride, &[0, 1], &[0, 0], &[0, 1, 2]), "positions");
    let whole = "the pool, in whole pages";
    length(append(stride + 16, &[0, 1], &[0, 0], &[0, 1]), whole);

    let of = |name: &str, page_size: usize| {
        let layout = PageLayout::new(name.parse::<KvFormat>().unwrap(), dim, page_size, 2).unwrap();
        centred(&layout, 1 << 20).map(drop)
    };
    for name in ["int8", "int8/int4-w0", "int8/int8-plain"] {
        of(name, 64).unwrap();
        of(name, 128).unwrap();
        for page_size in [16, 32] {
            let error = of(name, page_size).unwrap_err();
            refused(error, "page_size of pages with centres of K");
        }
    }
    for name in ["int8-plain", "bf16", "int4-w0", "int4-g4", "int8/bf16"] {
        refused(of(name, 64).unwrap_err(), "centres of K");
    }
    for name in ["int4", "int8/int4", "fp8"] {
        refused(of(name, 64).unwrap_err(), "format of a caller's pages");
    }
}

/// Kills an index that is made of a page's bytes or of a centre's.
#[test]
fn bytes_that_no_append_has_written_do_no_harm() {
    let (backend, dim) = (CpuBackend::new(), HeadDim::same(64));
    for name in ["int8", "int8/int4-w0"] {
        let layout = layout(name, dim, 64);
        let stride = layout.page_bytes() + centres_bytes(2, 64);
        let mut random = Noise::new(5);
        let mut pool = vec![0; 4 * stride];
        let pages = centred(&layout, stride).unwrap();
        for fill in 0..6 {
            for byte in &mut pool {
                *byte = match fill {
                    0 => 0xff,
                    1 => 0x7f,
                    2 => 0x80,
                    _ => random.below(256) as u8,
                };
            }
            for positions in [[3, 4], [64, 65], [200, 64]] {
                let rows = keys(2 * 2 * 64, &mut random);
                let centres = SlotCentres {
                    first_pages: &[1, 1],
                    positions: &positions,
                };
                backend
                    .append_slots(&pages, &mut pool, &[3, 70], &rows, &rows, Some(centres))
                    .unwrap();
            }
            let table = [0, 1, 2, 3];
            let kv = PagePool::of(&pages, &pool, &table, &[250]).unwrap();
            let problem = Problem::new(heads(dim), [250]).q_lens(vec![9]);
            let q = keys(problem.rows() * 64, &mut random);
            let mut out = vec![0.0; q.len()];
            let plan = backend.plan(&problem, layout.format()).unwrap();
            let mut step = DecodeStep::new(&plan, &q, KvSource::Pool(&kv), &mut out).unwrap();
            backend.decode(&mut step).unwrap();
        }
    }
}
