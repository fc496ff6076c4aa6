//! Appends with rotary positions, by slots and behind sequences: pages hold the bytes of `KvCache::append` of rows that the reference rotated,
//! queries are its to the bit, and a decode behind an append reads them rotated.

use anyhow::{Result, bail};
use attn_bench::cuda::Buffers;
use attn_conformance::{case::noise, trials::Trials};
use attn_core::{
    CacheConfig, DecodeAttention, Error, Heads, KvCache, KvFormat, Problem, RotaryStyle,
};
use attn_cpu::CpuBackend;
use attn_cuda::{
    CudaBackend, CudaError, Options,
    internals::context,
    native::{
        AppendArgs, AppendShape, DecodeArgs, DeviceAddress, DeviceKv, Dtype, KvLayout, KvRows,
        NativePlan, PagedSequences, Pages, Prepared, RotaryArgs, RotaryQueries, SlotAppendArgs,
    },
};
use cudarc::driver::CudaSlice;

use crate::{
    numbers,
    pages::{Tables, pool_of},
    passes,
    rotary::{Kind, Places, Table},
};

const KV_HEADS: usize = 3;
const SEQUENCES: usize = 3;
const PAGE: usize = 64;

/// A pool on the GPU beside a cache of the CPU.
struct Engine<'a> {
    gpu: &'a CudaBackend,
    buffers: Buffers,
    append: Prepared<AppendArgs>,
    slot_append: Prepared<SlotAppendArgs>,
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
        let heads = Heads::new(KV_HEADS, KV_HEADS, head_dim);
        let mut config = CacheConfig::builder(format, heads)
            .centres(false)
            .sequences(SEQUENCES)
            .max_len(600)
            .build();
        config.page_size = PAGE;
        let cache = CpuBackend::new().create_cache(&config)?;
        let shape = AppendShape {
            layout: config.layout()?,
            rotary: true,
        };
        Ok(Engine {
            append: gpu.prepare_op(shape)?,
            slot_append: gpu.prepare_op(shape)?,
            pool: buffers.upload(pool_of(&cache)?)?,
            gpu,
            buffers,
            cache,
            head_dim,
        })
    }

    /// Appends so many tokens to each sequence of the CPU's cache, rotated; a token without a slot comes before each sequence's where there are slots.
    fn tokens(
        &mut self,
        counts: [usize; SEQUENCES],
        table: &Table,
        dtype: Dtype,
        with_slots: bool,
    ) -> Result<New> {
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
                if with_slots {
                    all.extend(vec![f32::NAN; row + padding]);
                }
                for token in own.chunks_exact(row) {
                    all.extend(token);
                    all.extend(vec![f32::NAN; padding]);
                }
            }
            if with_slots {
                new.slots.push(-1);
                new.residuals.push(u32::MAX);
                new.positions.push(Table::of_padding(b));
            }
            let pages = self.cache.table();
            for at in first..first + count {
                let page = at / PAGE;
                let home = pages.pages[b][page] as usize;
                new.slots.push((home * PAGE + at % PAGE) as i64);
                let kept = pages.residual_page(b, page);
                new.residuals.push(kept.unwrap_or(u32::MAX));
                new.positions.push(table.position(b, at) as i64);
            }
        }
        Ok(new)
    }

    fn pages(&self) -> Pages {
        let (layout, config) = (self.cache.layout(), self.cache.config());
        Pages::new(self.buffers.address(&self.pool), layout, config.num_pages)
    }

    /// The first byte of the pool that is not the CPU's.
    fn pool_difference(&self) -> Result<Option<String>> {
        let (got, want) = (self.buffers.download(&self.pool)?, pool_of(&self.cache)?);
        let page_bytes = self.cache.layout().page_bytes();
        let i = (0..want.len()).find(|&i| got[i] != want[i]);
        Ok(i.map(|i| format!("byte {i} of the pool, in page {}, differs", i / page_bytes)))
    }

    /// One launch of these tokens by slots.
    fn launch(&self, new: &New, dtype: Dtype, rotary: RotaryArgs) -> Result<(), Error> {
        let b = &self.buffers;
        let row = KV_HEADS * self.head_dim;
        let k = b.upload(&numbers::bytes(dtype, &new.k))?;
        let v = b.upload(&numbers::bytes(dtype, &new.v))?;
        let (slots, residuals) = (b.upload(&new.slots)?, b.upload(&new.residuals)?);
        let args = SlotAppendArgs {
            rows: KvRows {
                k: b.address(&k),
                v: b.address(&v),
                dtype,
                k_token_stride: new.k.len() / new.slots.len(),
                v_token_stride: row,
            },
            pool: self.pages(),
            tensor_scales: [DeviceAddress::NULL; 2],
            slots: b.address(&slots),
            residual_pages: b.address(&residuals),
            tokens: new.slots.len(),
            rotary: Some(rotary),
            centres: None,
        };
        // SAFETY: the arrays lie on the device until the download that waits for the launch or, after a refusal, until nothing runs; slots and
        // residual pages are the CPU's cache's own, whose pool has as many pages; positions are rows of the table, or the checking launch refuses.
        unsafe { self.gpu.enqueue(&self.slot_append, b.raw(), &args) }?;
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
        let new = engine.tokens(counts, &table, dtype, true)?;
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
        if let Some(text) = engine.pool_difference()? {
            bail!("{counts:?}: {text}");
        }
    }
    Ok(())
}

/// What steps behind the sequences need on the GPU: new tokens, their queries, tables.
struct Step {
    k: CudaSlice<u8>,
    v: CudaSlice<u8>,
    q: CudaSlice<u8>,
    rotated: CudaSlice<u8>,
    out: CudaSlice<u8>,
    workspace: CudaSlice<u8>,
    positions: CudaSlice<i64>,
    cos_sin: CudaSlice<u8>,
    kv_lens: CudaSlice<i32>,
    page_table: CudaSlice<u32>,
    residual_pages: CudaSlice<u32>,
    tables: Tables,
    plan: NativePlan,
}

impl Step {
    fn new(
        engine: &Engine<'_>,
        new: &New,
        tokens: usize,
        table: &Table,
        dtype: Dtype,
    ) -> Result<Self> {
        let (b, config) = (&engine.buffers, engine.cache.config());
        let heads = Heads::new(table.kind.q_heads, KV_HEADS, engine.head_dim);
        let problem = Problem::new(heads, vec![600; SEQUENCES]).q_lens(vec![tokens; SEQUENCES]);
        let (format, layout) = (config.format, KvLayout::Pages(PAGE));
        let plan = engine.gpu.prepare(&problem, format, layout)?;
        let slots = format.residual_slots(PAGE, config.max_q_len);
        let tables = Tables::new(&engine.cache, slots, 600);
        let q = numbers::bytes(dtype, &noise(9, problem.rows() * engine.head_dim));
        Ok(Step {
            k: b.upload(&numbers::bytes(dtype, &new.k))?,
            v: b.upload(&numbers::bytes(dtype, &new.v))?,
            rotated: b.bytes(q.len())?,
            out: b.bytes(q.len())?,
            q: b.upload(&q)?,
            workspace: b.bytes(plan.workspace_bytes())?,
            positions: b.upload(&new.positions)?,
            cos_sin: b.upload::<u8>(bytemuck::cast_slice(&table.words))?,
            kv_lens: b.upload(&tables.lens)?,
            page_table: b.upload(&tables.pages)?,
            residual_pages: b.upload(&tables.residuals)?,
            tables,
            plan,
        })
    }

    fn sequences(&self, engine: &Engine<'_>) -> PagedSequences {
        let b = &engine.buffers;
        let at = [&self.page_table, &self.residual_pages].map(|table| b.address(table));
        let none = [DeviceAddress::NULL; 2];
        let at = [at[0], at[1], b.address(&self.kv_lens)];
        self.tables.sequences(engine.pages(), at, none)
    }

    fn append_args(
        &self,
        engine: &Engine<'_>,
        tokens: usize,
        table: &Table,
        dtype: Dtype,
    ) -> AppendArgs {
        let (b, kind, row) = (&engine.buffers, table.kind, KV_HEADS * engine.head_dim);
        AppendArgs {
            rows: KvRows {
                k: b.address(&self.k),
                v: b.address(&self.v),
                dtype,
                k_token_stride: row + kind.k_padding,
                v_token_stride: row,
            },
            sequences: self.sequences(engine),
            batch: SEQUENCES,
            tokens,
            rotary: Some(RotaryArgs {
                style: kind.style,
                rotary_dim: kind.dim,
                cos_sin: b.address(&self.cos_sin),
                cos_sin_dtype: kind.table,
                num_positions: 700,
                positions: match kind.numbered {
                    true => DeviceAddress::NULL,
                    false => b.address(&self.positions),
                },
                queries: Some(RotaryQueries {
                    q: b.address(&self.q),
                    out: b.address(&self.rotated),
                    heads: kind.q_heads,
                    token_stride: kind.q_heads * engine.head_dim,
                    out_token_stride: kind.q_heads * engine.head_dim,
                }),
            }),
        }
    }

    fn decode_args(&self, engine: &Engine<'_>, dtype: Dtype) -> DecodeArgs {
        let b = &engine.buffers;
        let [q, out] = [b.address(&self.rotated), b.address(&self.out)];
        let kv = DeviceKv::Paged(self.sequences(engine));
        DecodeArgs::new(q, out, dtype, kv, b.address(&self.workspace))
    }
}

/// Appends behind the sequences, of many tokens and of one, with a decode of the rotated queries: one after the other, then as one step.
fn stepped(gpu: &CudaBackend, name: &str, head_dim: usize, kind: Kind, dtype: Dtype) -> Result<()> {
    let mut engine = Engine::new(gpu, name.parse()?, head_dim)?;
    let table = Table::new(kind)?;
    for tokens in [14, 1, 1, 3, 16, 1] {
        let new = engine.tokens([tokens; SEQUENCES], &table, dtype, false)?;
        let mut step = Step::new(&engine, &new, tokens, &table, dtype)?;
        let (b, stream) = (&engine.buffers, engine.buffers.raw());
        let append = step.append_args(&engine, tokens, &table, dtype);
        let decode = step.decode_args(&engine, dtype);
        // SAFETY: the arrays lie on the device until the downloads that wait for the launches; pages and lengths are those of the CPU's cache, whose
        // pool has as many pages; positions are rows of the table.
        unsafe { gpu.enqueue(&engine.append, stream, &append) }?;
        let rotated = b.download(&step.rotated)?;
        let mut want = numbers::rounded(
            dtype,
            &noise(9, tokens * SEQUENCES * kind.q_heads * head_dim),
        );
        for (i, token) in want.chunks_exact_mut(kind.q_heads * head_dim).enumerate() {
            let (sequence, at) = (i / tokens, i % tokens);
            let first = engine.cache.table().lens[sequence] - tokens;
            table.rotate(
                token,
                kind.q_heads * head_dim,
                head_dim,
                sequence,
                first + at,
            );
        }
        anyhow::ensure!(
            rotated == numbers::bytes(dtype, &want),
            "{tokens} tokens: queries"
        );
        // SAFETY: as above; the workspace is zeroed, and used by this plan alone.
        unsafe { gpu.decode_on(&step.plan, stream, &decode) }?;
        let out = b.download(&step.out)?;
        anyhow::ensure!(out.iter().any(|byte| *byte != 0), "nothing was attended");
        // What is not rotated again in time is attended as zeros.
        let zeros = vec![0u8; rotated.len()];
        b.copy(&zeros, &mut step.rotated)?;
        b.copy(&zeros, &mut step.out)?;
        // SAFETY: as above.
        unsafe { gpu.append_decode_on(&engine.append, &step.plan, stream, &append, &decode) }?;
        anyhow::ensure!(
            b.download(&step.out)? == out,
            "{tokens} tokens: one step differs"
        );
        anyhow::ensure!(
            b.download(&step.rotated)? == rotated,
            "{tokens} tokens: queries of one step"
        );
        if let Some(text) = engine.pool_difference()? {
            bail!("{tokens} tokens: {text}");
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
        numbered: false,
    };
    let table = Table::new(kind)?;
    let mut engine = Engine::new(gpu, KvFormat::INT8, 64)?;
    let mut new = engine.tokens([2, 1, 1], &table, Dtype::F32, true)?;
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
    let new = engine.tokens([2; SEQUENCES], &table, Dtype::F32, false)?;
    for (token, position, is_right) in [(3, 9, true), (3, 700, false), (5, -1, false)] {
        let mut new = New {
            positions: new.positions.clone(),
            k: new.k.clone(),
            v: new.v.clone(),
            slots: Vec::new(),
            residuals: Vec::new(),
        };
        new.positions[token] = position;
        let of_queries = Table::new(Kind { q_heads: 3, ..kind })?;
        let step = Step::new(&engine, &new, 2, &of_queries, Dtype::F32)?;
        let append = step.append_args(&engine, 2, &of_queries, Dtype::F32);
        // SAFETY: as in `stepped`; the checking launch refuses other positions than rows of the table.
        let got = unsafe { gpu.enqueue(&engine.append, engine.buffers.raw(), &append) };
        match got {
            Ok(()) if is_right => {}
            Err(Error::Device { source, .. }) if !is_right => match source.downcast_ref() {
                Some(CudaError::Check {
                    what: "positions",
                    index,
                    ..
                }) if *index == token => {}
                _ => bail!("expected a refusal of positions, got {source}"),
            },
            other => bail!("position {position} of a token behind its sequence: {other:?}"),
        }
        engine.buffers.download(&step.rotated)?;
    }
    engine.slot_append = gpu.prepare_op(AppendShape {
        layout: engine.cache.config().layout()?,
        rotary: false,
    })?;
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
                numbered: in_place,
            };
            let place = if in_place { "in place" } else { "elsewhere" };
            let title = format!(
                "native: {name}, d{head_dim}, RoPE {dim} {style:?} {table:?}, {dtype:?}, q {place}"
            );
            trials = trials.test(title.clone(), move |gpu| {
                passes(appended(gpu, name, head_dim, kind, dtype));
            });
            let title = format!("{title}, steps");
            trials = trials.test(title, move |gpu| {
                passes(stepped(gpu, name, head_dim, kind, dtype));
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
