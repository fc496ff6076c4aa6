//! What callers with bugs do to the safe interface: pinned memory that changes right after a call, stores that say of themselves what is
//! not so, strides and sizes at the ends of their types. Each gets the CPU's bits or a typed error, and the GPU works on.

use std::{any::Any, thread};

use anyhow::{Context, Result, anyhow, bail, ensure};
use attn_conformance::{case::noise, check::first_difference, trials::Trials};
use attn_core::{
    Append, CacheAccess, CacheConfig, DecodeAttention, DecodeStep, Error, Heads, Int8Scale,
    KvCache, KvFormat, KvSource, KvView, PageLayout, PageStore, Problem, Scheme, StridedRows,
    TokenWrite, WideRows,
};
use attn_cpu::CpuBackend;
use attn_cuda::{
    CudaBackend, CudaPages,
    internals::{context, stream_of},
    native::{
        AppendArgs, AppendShape, DecodeArgs, DeviceAddress, DeviceKv, Dtype, KvLayout, KvRows,
        PagedSequences, Pages, ViewRows,
    },
};
use cudarc::driver::{DeviceRepr, PinnedHostSlice, ValidAsZeroBits};

use libtest_mimic::Trial;

use crate::{driver, passes};

const FORMAT: KvFormat = KvFormat::same(Scheme::Int8(Int8Scale::Token));
const DIM: usize = 128;
const PAGE: usize = 64;

fn config(heads: usize, sequences: usize, tokens: usize) -> CacheConfig {
    let mut config = CacheConfig::builder(FORMAT, Heads::new(heads, heads, DIM))
        .centres(false)
        .sequences(sequences)
        .max_len(tokens)
        .build();
    config.page_size = PAGE;
    config.num_pages = sequences * tokens.div_ceil(PAGE);
    config
}

/// Outputs and log-sum-exps of one decode.
fn decode(
    backend: &dyn DecodeAttention,
    problem: &Problem,
    q: &[f32],
    kv: KvSource<'_>,
) -> Result<(Vec<f32>, Vec<f32>), Error> {
    let plan = backend.plan(problem, FORMAT)?;
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; problem.rows()]);
    backend.decode(&mut DecodeStep::new(&plan, q, kv, &mut out)?.with_lse(&mut lse)?)?;
    Ok((out, lse))
}

fn equal(what: &str, got: &(Vec<f32>, Vec<f32>), want: &(Vec<f32>, Vec<f32>)) -> Result<()> {
    let found = first_difference("out", &got.0, &want.0)
        .or_else(|| first_difference("lse", &got.1, &want.1));
    match found {
        None => Ok(()),
        Some(text) => bail!("{what}: {text}"),
    }
}

/// Numbers in page-locked memory, which the driver copies from while the caller goes on.
fn pinned<T: DeviceRepr + ValidAsZeroBits + Copy>(
    gpu: &CudaBackend,
    x: &[T],
) -> Result<PinnedHostSlice<T>> {
    // SAFETY: every element is written before any is read.
    let mut there = driver(unsafe { context(gpu).alloc_pinned_with_flags::<T>(x.len(), 0) })?;
    driver(there.as_mut_slice())?.copy_from_slice(x);
    Ok(there)
}

/// Some sequences on both devices, and a decode of them.
struct Pair {
    gpu: KvCache,
    problem: Problem,
    q: Vec<f32>,
    want: (Vec<f32>, Vec<f32>),
}

impl Pair {
    fn new(gpu: &CudaBackend) -> Result<Self> {
        Pair::of(gpu, &[700, 65])
    }

    fn of(gpu: &CudaBackend, lens: &[usize]) -> Result<Self> {
        let cpu = CpuBackend::new();
        let longest = lens.iter().copied().max().unwrap_or(0);
        let config = config(2, lens.len(), longest);
        let (mut here, mut there) = (cpu.create_cache(&config)?, gpu.create_cache(&config)?);
        for (b, &len) in lens.iter().enumerate() {
            let [k, v] = [0, 1].map(|i| noise(10 + 2 * b as u64 + i, len * 2 * DIM));
            here.append(b, &k, &v)?;
            there.append(b, &k, &v)?;
        }
        let problem = Problem::new(Heads::new(8, 2, DIM), lens.to_vec());
        let q = noise(5, problem.rows() * DIM);
        let want = decode(&cpu, &problem, &q, KvSource::Cache(&here))?;
        Ok(Pair {
            gpu: there,
            problem,
            q,
            want,
        })
    }

    /// Whether the GPU still answers as it should.
    fn works(&self, gpu: &CudaBackend, after: &str) -> Result<()> {
        let got = decode(gpu, &self.problem, &self.q, KvSource::Cache(&self.gpu));
        let got = got.with_context(|| format!("a decode after {after}"))?;
        equal(&format!("a decode after {after}"), &got, &self.want)
    }
}

/// K and V may be overwritten as soon as `append` has returned: 16 MiB of each, of which the last are copied last and overwritten first.
fn appended_memory_is_free(gpu: &CudaBackend) -> Result<()> {
    let (heads, tokens) = (8, 4096);
    let config = config(heads, 1, tokens);
    let [k, v] = [1, 2].map(|seed| noise(seed, tokens * heads * DIM));
    let mut pageable = gpu.create_cache(&config)?;
    pageable.append(0, &k, &v)?;
    let want = pageable.read_back(0)?;
    let mut cache = gpu.create_cache(&config)?;
    for round in 0..5 {
        let (mut pinned_k, mut pinned_v) = (pinned(gpu, &k)?, pinned(gpu, &v)?);
        let (k, v) = (
            driver(pinned_k.as_mut_slice())?,
            driver(pinned_v.as_mut_slice())?,
        );
        cache.append(0, &*k, &*v)?;
        for x in [v, k] {
            x.iter_mut().rev().for_each(|x| *x = f32::NAN);
        }
        let equal = cache.read_back(0)? == want;
        ensure!(
            equal,
            "round {round}: pages hold what was written after append"
        );
        cache.free_sequence(0)?;
    }
    Ok(())
}

/// A page's bytes may be overwritten as soon as `write_page` has returned: a page of 8 MiB.
fn written_memory_is_free(gpu: &CudaBackend) -> Result<()> {
    let heads = 512;
    let mut cache = gpu.create_cache(&config(heads, 2, PAGE))?;
    for b in 0..2 {
        let [k, v] = [0, 1].map(|i| noise(2 * b as u64 + i, PAGE * heads * DIM));
        cache.append(b, &k, &v)?;
    }
    let want = cache.read_back(0)?;
    let page = cache.table().pages[1][0];
    for round in 0..5 {
        let mut bytes = pinned(gpu, &want[0])?;
        let bytes = driver(bytes.as_mut_slice())?;
        cache.write_page(page, bytes)?;
        bytes.iter_mut().rev().for_each(|x| *x = 0);
        let equal = cache.read_back(1)? == want;
        ensure!(
            equal,
            "round {round}: a page holds what was written after write_page"
        );
    }
    Ok(())
}

/// Queries may be overwritten, and outputs read, as soon as `decode` has returned.
fn decoded_memory_is_free(gpu: &CudaBackend, pair: &Pair) -> Result<()> {
    let plan = gpu.plan(&pair.problem, FORMAT)?;
    let mut q = pinned(gpu, &pair.q)?;
    let mut out = pinned(gpu, &vec![f32::NAN; pair.q.len()])?;
    let mut lse = pinned(gpu, &vec![f32::NAN; pair.problem.rows()])?;
    let q = driver(q.as_mut_slice())?;
    let (out, lse) = (driver(out.as_mut_slice())?, driver(lse.as_mut_slice())?);
    let kv = KvSource::Cache(&pair.gpu);
    gpu.decode(&mut DecodeStep::new(&plan, &*q, kv, &mut *out)?.with_lse(lse)?)?;
    let got = (out.to_vec(), lse.to_vec());
    q.fill(f32::NAN);
    equal("pinned queries and outputs", &got, &pair.want)
}

/// Calls over other caches, with other plans, from several threads: they share the memory in which the device keeps lists, rows and a workspace, one call at a time.
fn threads_share_host_memory(gpu: &CudaBackend) -> Result<()> {
    let all: [&[usize]; 4] = [&[700, 65], &[3], &[300, 1, 64, 129, 700], &[5000]];
    thread::scope(|scope| {
        let calls = all.map(|lens| {
            scope.spawn(move || -> Result<()> {
                for _ in 0..4 {
                    let pair = Pair::of(gpu, lens)?;
                    (0..4).try_for_each(|_| pair.works(gpu, "calls of other threads"))?;
                }
                Ok(())
            })
        });
        for call in calls {
            call.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        Ok(())
    })
}

/// Somebody's store, which leads to a small one of this backend and claims other pages.
struct Liar {
    leads_to: &'static CudaPages,
    layout: PageLayout,
    num_pages: usize,
}

impl PageStore for Liar {
    fn layout(&self) -> PageLayout {
        self.layout
    }

    fn num_pages(&self) -> usize {
        self.num_pages
    }

    fn append(
        &mut self,
        _: &CacheAccess,
        _: usize,
        _: &[TokenWrite],
        _: WideRows<'_>,
        _: WideRows<'_>,
    ) -> Result<(), Error> {
        Ok(())
    }

    fn read_pages(
        &self,
        _: &CacheAccess,
        _: usize,
        _: &[u32],
        out: &mut [u8],
    ) -> Result<(), Error> {
        out.fill(0);
        Ok(())
    }

    fn write_pages(&mut self, _: &CacheAccess, _: usize, _: &[u32], _: &[u8]) -> Result<(), Error> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self.leads_to
    }
}

/// A cache of `tokens` tokens of `heads` heads that has no more than one page of one head on the device.
fn lying_cache(gpu: &CudaBackend, heads: usize, tokens: usize) -> Result<KvCache> {
    // As long as the program: a store lives as long as its cache, and this one is borrowed by another.
    let small: &'static KvCache = Box::leak(Box::new(gpu.create_cache(&config(1, 1, PAGE))?));
    let leads_to = small.store().as_any().downcast_ref::<CudaPages>();
    let config = config(heads, 1, tokens);
    let store = Liar {
        leads_to: leads_to.context("the backend's own store")?,
        layout: config.layout()?,
        num_pages: config.num_pages,
    };
    let mut cache = KvCache::new(config, Box::new(store))?;
    cache.append_with(
        &[Append {
            sequence: 0,
            tokens,
        }],
        |_, _| Ok(()),
    )?;
    Ok(cache)
}

/// Pages that a store claims, and does not have, are not read.
fn claimed_pages_are_not_read(gpu: &CudaBackend) -> Result<()> {
    for (heads, tokens) in [(1, 1 << 18), (1, PAGE + 1), (2, PAGE)] {
        let cache = lying_cache(gpu, heads, tokens)?;
        let problem = Problem::new(Heads::new(4 * heads, heads, DIM), vec![tokens]);
        let q = noise(1, problem.rows() * DIM);
        match decode(gpu, &problem, &q, KvSource::Cache(&cache)) {
            Err(Error::Parameter { what: "page", .. }) if heads == 1 => {}
            Err(Error::WrongBackend { what: "cache", .. }) if heads == 2 => {}
            other => bail!("{heads} heads, {tokens} tokens that are not there: {other:?}"),
        }
    }
    Ok(())
}

/// A view of one token in each of `lens`' sequences that have any, at these strides.
fn stridden(gpu: &dyn DecodeAttention, lens: &[usize], strides: [usize; 3]) -> Result<()> {
    let codes: Vec<u8> = (0..DIM).map(|i| (i as u8).wrapping_mul(37)).collect();
    let rows = StridedRows {
        codes: &codes,
        code_strides: strides,
        scales: &[0x2400],
        scale_strides: strides,
    };
    let problem = Problem::new(Heads::new(4, 1, DIM), lens.to_vec());
    let view = KvView::new(&problem, FORMAT, rows, rows, [&[], &[]])?;
    let q = noise(4, problem.rows() * DIM);
    let of = |backend: &dyn DecodeAttention| decode(backend, &problem, &q, KvSource::View(&view));
    let (got, want) = (of(gpu)?, of(&CpuBackend::new())?);
    ensure!(
        got.0.iter().all(|x| x.is_finite()),
        "strides {strides:?}: {:?}",
        got.0
    );
    equal(&format!("strides {strides:?}"), &got, &want)
}

/// Read in place, and copied into pages.
const STRIDES: [usize; 4] = [1 << 63, usize::MAX - 15, usize::MAX, (1 << 63) + 1];

/// Strides along an axis with one entry are never taken, however long.
fn unused_strides_are_free(gpu: &CudaBackend) -> Result<()> {
    for stride in STRIDES {
        stridden(gpu, &[1], [stride; 3])?;
    }
    Ok(())
}

fn is_refused(what: &str, result: Result<(), Error>) -> Result<()> {
    match result {
        Err(Error::Parameter { .. }) => Ok(()),
        other => bail!("{what} is not refused: {other:?}"),
    }
}

/// Numbers that the kernels' parameters cannot hold are refused before anything is launched.
fn large_numbers_are_refused(gpu: &CudaBackend) -> Result<()> {
    let append = gpu.prepare_op(AppendShape {
        layout: config(2, 2, 700).layout()?,
        rotary: false,
    })?;
    let small = AppendArgs {
        rows: KvRows {
            k: DeviceAddress::NULL,
            v: DeviceAddress::NULL,
            dtype: Dtype::F32,
            k_token_stride: 2 * DIM,
            v_token_stride: 2 * DIM,
        },
        sequences: PagedSequences {
            pool: Pages {
                at: DeviceAddress::NULL,
                stride: 1 << 20,
                num_pages: 22,
            },
            page_table: DeviceAddress::NULL,
            page_table_stride: 11,
            residual_pages: DeviceAddress::NULL,
            residual_slots: 0,
            kv_lens: DeviceAddress::NULL,
            tensor_scales: [DeviceAddress::NULL; 2],
        },
        batch: 2,
        tokens: 1,
        rotary: None,
    };
    let large = (1 << 32) + 1;
    let [mut tokens, mut batch, mut stride] = [small; 3];
    (tokens.tokens, batch.batch) = (large, large);
    stride.sequences.page_table_stride = large;
    let stream = driver(context(gpu).new_stream())?;
    for (what, args) in [("tokens", tokens), ("batch", batch), ("stride", stride)] {
        // SAFETY: refused for the number that is too large; nothing is launched, and no address is used.
        let result = unsafe { gpu.enqueue(&append, stream_of(&stream), &args) };
        is_refused(what, result)?;
    }
    let plan = gpu.prepare(
        &Problem::new(Heads::new(8, 2, DIM), vec![700]),
        FORMAT,
        KvLayout::Pages(PAGE),
    )?;
    let null = DeviceAddress::NULL;
    let kv = DeviceKv::Rows(ViewRows {
        k: [DeviceAddress::NULL; 2],
        v: [DeviceAddress::NULL; 2],
        code_strides: [[0; 3]; 2],
        scale_strides: [[0; 3]; 2],
        kv_lens: DeviceAddress::NULL,
        tensor_scales: [DeviceAddress::NULL; 2],
    });
    let rows = DecodeArgs::new(null, null, Dtype::F32, kv, null);
    // SAFETY: refused as the plan is for pages; nothing is launched.
    let result = unsafe { gpu.decode_on(&plan, stream_of(&stream), &rows) };
    is_refused("rows for a plan of pages", result)?;
    let mut heads = CacheConfig::builder(FORMAT, Heads::new(65_536, 65_536, 64))
        .centres(false)
        .sequences(1)
        .max_len(16)
        .build();
    (heads.page_size, heads.num_pages) = (16, 1);
    is_refused("65536 heads", gpu.create_cache(&heads).map(drop))
}

/// What the driver itself refuses comes back as an error, too. compute-sanitizer counts such refusals, so it does not run this.
fn driver_refusals_are_errors(gpu: &CudaBackend) -> Result<()> {
    let mut huge = config(8, 1, PAGE);
    huge.num_pages = 1 << 24;
    match gpu.create_cache(&huge) {
        Err(Error::Device { .. }) => {}
        other => bail!("a pool of 2 TB: {:?}", other.map(drop)),
    }
    // No tensor map has such a stride; the sequence that it leads to is empty.
    for stride in STRIDES {
        stridden(gpu, &[1, 0], [stride; 3])?;
    }
    Ok(())
}

/// Another backend's cache and plan are refused.
fn foreign_caches_are_refused(gpu: &CudaBackend) -> Result<()> {
    let cpu = CpuBackend::new();
    let mut cache = cpu.create_cache(&config(1, 1, PAGE))?;
    cache.append(0, &[0.5; DIM], &[2.0; DIM])?;
    let problem = Problem::new(Heads::new(4, 1, DIM), vec![1]);
    let q = vec![1.0; problem.out_elements()];
    for plan in [gpu.plan(&problem, FORMAT)?, cpu.plan(&problem, FORMAT)?] {
        let mut out = vec![0.0; q.len()];
        let mut step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)?;
        match gpu.decode(&mut step) {
            Err(Error::WrongBackend {
                backend: "cuda", ..
            }) => {}
            other => bail!(
                "the CPU's cache and the {}'s plan: {other:?}",
                plan.backend()
            ),
        }
    }
    Ok(())
}

type Check = fn(&CudaBackend) -> Result<()>;

/// Each kind of misuse, by name. compute-sanitizer counts what the driver refuses as errors: skip that test there.
const CHECKS: [(&str, Check); 8] = [
    ("several threads", threads_share_host_memory),
    ("appends from pinned memory", appended_memory_is_free),
    ("pages from pinned memory", written_memory_is_free),
    (
        "stores that claim more than they have",
        claimed_pages_are_not_read,
    ),
    ("strides that are not taken", unused_strides_are_free),
    ("numbers that are too large", large_numbers_are_refused),
    ("caches of other backends", foreign_caches_are_refused),
    ("what the driver refuses", driver_refusals_are_errors),
];

/// Adds the tests of this file: after each the GPU still answers as the CPU does.
pub fn add(mut trials: Trials<CudaBackend>) -> Trials<CudaBackend> {
    for (name, check) in CHECKS {
        trials = trials.test(format!("hostile: {name}"), move |gpu| {
            let run = || {
                let pair = Pair::new(gpu)?;
                check(gpu)?;
                pair.works(gpu, name)
            };
            passes(run());
        });
    }
    trials.test("hostile: queries and outputs in pinned memory", |gpu| {
        passes(Pair::new(gpu).and_then(|pair| decoded_memory_is_free(gpu, &pair)));
    })
}

/// What the GPU's answers are compared with is itself compared with the reference.
pub fn without_a_gpu() -> Vec<Trial> {
    let of_reference = || {
        for stride in STRIDES {
            for lens in [&[1][..], &[1, 0]] {
                stridden(&attn_cpu::Reference::new(), lens, [stride; 3])
                    .map_err(|error| format!("{error:#}"))?;
            }
        }
        Ok(())
    };
    vec![Trial::test(
        "the CPU never takes unused strides",
        of_reference,
    )]
}
