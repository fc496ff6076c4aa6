//! Appends by slots with rotary positions: pages hold the bytes of `KvCache::append` of rows that the reference rotated, queries are its to the bit.

use anyhow::{Context, Result, bail};
use attn_bench::cuda::Buffers;
use attn_conformance::{case::noise, trials::Trials};
use attn_core::{
    CacheConfig, DecodeAttention, Error, Heads, HostPages, KvCache, KvFormat, RotaryStyle,
};
use attn_cpu::CpuBackend;
use attn_cuda::{
    CudaBackend, CudaError, Options,
    internals::context,
    native::{DeviceAddress, Dtype, NativeAppend, Pages, RotaryArgs, SlotAppendArgs},
};
use cudarc::driver::CudaSlice;

use crate::{
    numbers, passes,
    rotary::{Kind, Places, Table},
};

const KV_HEADS: usize = 3;
const SEQUENCES: usize = 3;
const PAGE: usize = 64;

fn pool_of(cache: &KvCache) -> Result<&[u8]> {
    let pages = cache.store().as_any().downcast_ref::<HostPages>();
    let pool = pages.and_then(|pages| pages.pool(0));
    pool.context("the CPU's pages lie in host memory")
}

/// A pool on the GPU beside a cache of the CPU.
struct Engine<'a> {
    gpu: &'a CudaBackend,
    buffers: Buffers,
    append: NativeAppend,
    cache: KvCache,
    pool: CudaSlice<u8>,
    head_dim: usize,
}

/// New tokens of a launch, in its number format and as f32.
struct New {
    k: Vec<f32>,
    v: Vec<f32>,
    slots: Vec<i64>,
    residuals: Vec<u32>,
    positions: Vec<i64>,
}

impl<'a> Engine<'a> {
    fn new(gpu: &'a CudaBackend, format: KvFormat, head_dim: usize) -> Result<Self> {
        let buffers = Buffers::new(context(gpu))?;
        let heads = Heads {
            q: KV_HEADS,
            kv: KV_HEADS,
            dim: head_dim,
        };
        let mut config = CacheConfig::builder(format, heads)
            .sequences(SEQUENCES)
            .max_len(600)
            .build();
        config.page_size = PAGE;
        let cache = CpuBackend::new().create_cache(&config)?;
        Ok(Engine {
            append: gpu.prepare_append_rotary(&config)?,
            pool: buffers.upload(pool_of(&cache)?)?,
            gpu,
            buffers,
            cache,
            head_dim,
        })
    }

    /// Appends so many tokens to each sequence of the CPU's cache, rotated; a token without a slot comes before each sequence's.
    fn tokens(&mut self, counts: [usize; SEQUENCES], table: &Table, dtype: Dtype) -> Result<New> {
        let row = KV_HEADS * self.head_dim;
        let mut new = New {
            k: Vec::new(),
            v: Vec::new(),
            slots: Vec::new(),
            residuals: Vec::new(),
            positions: Vec::new(),
        };
        for (b, count) in counts.into_iter().enumerate() {
            let first = self.cache.table().lens[b];
            let seed = (first * 10 + b) as u64;
            let [k, v] =
                [1000, 2000].map(|side| numbers::rounded(dtype, &noise(seed + side, count * row)));
            let mut rotated = k.clone();
            table.rotate(&mut rotated, row, self.head_dim, b, first);
            self.cache.append(b, &rotated, &v)?;
            let padding = [table.kind.k_padding, 0];
            for ((all, own), padding) in [(&mut new.k, k), (&mut new.v, v)].into_iter().zip(padding)
            {
                all.extend(vec![f32::NAN; row + padding]);
                for token in own.chunks_exact(row) {
                    all.extend(token);
                    all.extend(vec![f32::NAN; padding]);
                }
            }
            new.slots.push(-1);
            new.residuals.push(u32::MAX);
            new.positions.push(Table::of_padding(b));
            let pages = self.cache.table();
            for at in first..first + count {
                let page = at / PAGE;
                let home = pages.pages[b][page] as usize;
                new.slots.push((home * PAGE + at % PAGE) as i64);
                let behind = pages.pages[b].len() - 1 - page;
                let kept = pages.residual_pages[b].iter().rev().nth(behind);
                new.residuals.push(kept.copied().unwrap_or(u32::MAX));
                new.positions.push(table.position(b, at) as i64);
            }
        }
        Ok(new)
    }

    /// One launch of these tokens.
    fn launch(&self, new: &New, dtype: Dtype, rotary: RotaryArgs) -> Result<(), Error> {
        let b = &self.buffers;
        let row = KV_HEADS * self.head_dim;
        let k = b.upload(&numbers::bytes(dtype, &new.k))?;
        let v = b.upload(&numbers::bytes(dtype, &new.v))?;
        let (slots, residuals) = (b.upload(&new.slots)?, b.upload(&new.residuals)?);
        let args = SlotAppendArgs {
            k: b.address(&k),
            v: b.address(&v),
            dtype,
            k_token_stride: new.k.len() / new.slots.len(),
            v_token_stride: row,
            pool: Pages::new(
                b.address(&self.pool),
                self.cache.layout(),
                self.cache.config().num_pages,
            ),
            slots: b.address(&slots),
            residual_pages: b.address(&residuals),
            k_tensor_scales: DeviceAddress::NULL,
            v_tensor_scales: DeviceAddress::NULL,
            tokens: new.slots.len(),
            rotary: Some(rotary),
        };
        // SAFETY: the arrays lie on the device until the download that waits for the launch or, after a refusal, until nothing runs; slots and
        // residual pages are the CPU's cache's own, whose pool has as many pages; positions are rows of the table, or the checking launch refuses.
        unsafe { self.gpu.append_slots_on(&self.append, b.raw(), &args) }?;
        b.download(&slots).map(drop)
    }
}

/// Launches of many tokens and of few, compared byte by byte.
fn appended(
    gpu: &CudaBackend,
    name: &str,
    head_dim: usize,
    kind: Kind,
    dtype: Dtype,
) -> Result<()> {
    let mut engine = Engine::new(gpu, name.parse()?, head_dim)?;
    let table = Table::new(kind)?;
    for counts in [[100, 0, 300], [1, 1, 1], [5, 64, 17], [63, 1, 129]] {
        let new = engine.tokens(counts, &table, dtype)?;
        let launch = table.launch(dtype, head_dim, new.positions.clone(), 5)?;
        let b = &engine.buffers;
        let cos_sin = b.upload::<u8>(bytemuck::cast_slice(&table.words))?;
        let positions = b.upload(&launch.positions)?;
        // No slice is empty.
        let of = |words: &[u128]| match words {
            [] => b.bytes(1),
            words => b.upload::<u8>(bytemuck::cast_slice(words)),
        };
        let (q, out) = (of(&launch.q)?, of(&launch.out)?);
        let rotary = launch.args(&Places {
            cos_sin: b.address(&cos_sin),
            positions: b.address(&positions),
            q: b.address(&q),
            out: b.address(&out),
        });
        engine.launch(&new, dtype, rotary)?;
        if let Some(text) = launch.difference(&b.download(&out)?) {
            bail!("{counts:?}: {text}");
        }
        let (got, want) = (b.download(&engine.pool)?, pool_of(&engine.cache)?);
        if let Some(i) = (0..want.len()).find(|&i| got[i] != want[i]) {
            let page = i / engine.cache.layout().page_bytes();
            bail!("{counts:?}: byte {i} of the pool, in page {page}, differs");
        }
    }
    Ok(())
}

/// The checking launch refuses positions that are no rows of the table, but for tokens without a slot; the host refuses a kernel that is not loaded.
fn refused(options: &Options) -> Result<()> {
    let gpu = &CudaBackend::with_options(options)?;
    let kind = Kind {
        style: RotaryStyle::HalfSplit,
        dim: 64,
        table: Dtype::F32,
        q_heads: 0,
        in_place: true,
        k_padding: 0,
    };
    let table = Table::new(kind)?;
    let mut engine = Engine::new(gpu, KvFormat::INT8, 64)?;
    let mut new = engine.tokens([2, 1, 1], &table, Dtype::F32)?;
    let b = Buffers::new(context(gpu))?;
    let cos_sin = b.upload::<u8>(bytemuck::cast_slice(&table.words))?;
    let mut launch = |engine: &Engine<'_>, token: usize, position: i64| {
        let right = std::mem::replace(&mut new.positions[token], position);
        let positions = b.upload(&new.positions)?;
        new.positions[token] = right;
        let rotary = table
            .launch(Dtype::F32, 64, vec![], 1)
            .expect("a table of the kind")
            .args(&Places {
                cos_sin: b.address(&cos_sin),
                positions: b.address(&positions),
                q: DeviceAddress::NULL,
                out: DeviceAddress::NULL,
            });
        engine.launch(&new, Dtype::F32, rotary)
    };
    // Tokens 0, 3 and 5 have no slot, and positions of all kinds.
    launch(&engine, 1, 0)?;
    for (token, position) in [(1, -1), (2, 700), (4, 1 << 40), (6, i64::MIN)] {
        match launch(&engine, token, position) {
            Err(Error::Device { source, .. }) => match source.downcast_ref() {
                Some(CudaError::Check {
                    what: "positions", ..
                }) => {}
                _ => bail!("expected a refusal of positions, got {source}"),
            },
            other => bail!("expected a refusal of positions, got {other:?}"),
        }
    }
    engine.append = gpu.prepare_append(engine.cache.config())?;
    let said = match launch(&engine, 1, 0) {
        Err(Error::Parameter { what, .. }) => what,
        other => bail!("expected a refusal of rotary, got {other:?}"),
    };
    anyhow::ensure!(said == "rotary", "{said}");
    Ok(())
}

/// Adds the tests of this file.
pub fn add(mut trials: Trials<CudaBackend>) -> Trials<CudaBackend> {
    use RotaryStyle::{HalfSplit, Interleaved};
    for (name, head_dim, style, dim, table, dtype) in [
        ("int8", 128, HalfSplit, 128, Dtype::F32, Dtype::Bf16),
        ("int8", 80, HalfSplit, 20, Dtype::F16, Dtype::F16),
        ("int4", 128, HalfSplit, 128, Dtype::Bf16, Dtype::Bf16),
        ("int4", 256, Interleaved, 256, Dtype::F32, Dtype::F32),
        ("int4-g4", 64, Interleaved, 32, Dtype::F16, Dtype::F16),
        ("bf16", 192, HalfSplit, 192, Dtype::F32, Dtype::Bf16),
    ] {
        for in_place in [false, true] {
            let kind = Kind {
                style,
                dim,
                table,
                q_heads: if in_place { 9 } else { 12 },
                in_place,
                k_padding: if in_place { 0 } else { 3 },
            };
            let place = if in_place { "in place" } else { "elsewhere" };
            let title = format!(
                "native: {name}, {dim} of {head_dim} dims rotated {style:?} by a table in {table:?}, {dtype:?}, queries {place}"
            );
            trials = trials.test(title, move |gpu| {
                passes(appended(gpu, name, head_dim, kind, dtype));
            });
        }
    }
    trials.test(
        "native: the checking launch refuses positions outside of the table",
        |_| {
            let options = Options::from_env().expect("the backend was opened with them");
            passes(refused(&options.check(true)));
        },
    )
}
