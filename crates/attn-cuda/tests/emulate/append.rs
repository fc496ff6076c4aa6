//! Append: calls of one and of several tokens, behind their sequences and by slots, from floats of three kinds; after each the pool must be the
//! CPU's, byte by byte. With rotary positions the CPU appends what the reference has rotated, and queries are rotated beside K.

use std::sync::Arc;

use anyhow::Result;
use attn_conformance::case::noise;
use attn_core::{CacheConfig, DecodeAttention, HeadDim, Heads, KvCache, RotaryStyle};
use attn_cpu::CpuBackend;
use attn_cuda::native::{
    AppendArgs, AppendShape, DeviceAddress, Dtype, KvRows, Pages, SlotAppendArgs,
};
use half::{bf16, f16};
use libtest_mimic::Trial;

use crate::{
    Kernels, address,
    pages::{PADDING, Tables, padded_at, pool_of},
    rotary::{Kind, Places, Table, words},
};

/// What lies between pages.
const PAD: u8 = 0xa5;

/// Format, head_dim, page_size, KV heads.
const KINDS: [Shape; 26] = [
    ("int8", HeadDim::same(128), 64, 5),
    ("int8", HeadDim::same(80), 32, 1),
    ("int8-plain", HeadDim::same(128), 64, 3),
    ("int8-g32", HeadDim::same(64), 32, 2),
    ("int8-tensor", HeadDim::same(64), 16, 3),
    ("int4", HeadDim::same(128), 64, 2),
    ("int4", HeadDim::same(64), 128, 5),
    ("int4", HeadDim::same(80), 16, 1),
    ("int4", HeadDim::same(256), 64, 1),
    ("int4-r2-w4/int8-plain", HeadDim::same(192), 64, 2),
    ("int8/int4", HeadDim::same(96), 32, 2),
    ("int4-w0/int4-w4", HeadDim::same(128), 16, 1),
    ("int4-g1", HeadDim::same(96), 32, 4),
    ("int4-g4", HeadDim::same(128), 64, 1),
    ("int4-g8", HeadDim::same(256), 16, 1),
    ("int8-plain/int4-g2", HeadDim::same(128), 128, 2),
    ("fp8", HeadDim::same(80), 64, 2),
    ("bf16/f16", HeadDim::same(128), 32, 1),
    ("int8", HeadDim { k: 192, v: 128 }, 64, 2),
    ("int4/int8", HeadDim { k: 64, v: 320 }, 16, 1),
    ("int4", HeadDim::same(512), 64, 1),
    ("int8-plain/int4-g4", HeadDim { k: 576, v: 512 }, 32, 1),
    ("int8-latents", HeadDim { k: 576, v: 512 }, 64, 1),
    ("int8-plain-latents", HeadDim { k: 192, v: 128 }, 16, 3),
    ("bf16-latents", HeadDim { k: 192, v: 128 }, 32, 2),
    ("fp8-latents", HeadDim { k: 576, v: 512 }, 64, 1),
];

type Shape = (&'static str, HeadDim, usize, usize);

/// Kinds of caches as in [`KINDS`], and how tokens are rotated.
const ROTATED: [(Shape, Kind); 12] = {
    use RotaryStyle::{HalfSplit, Interleaved};
    const fn kind(style: RotaryStyle, dim: usize, table: Dtype, q_heads: usize) -> Kind {
        Kind {
            style,
            dim,
            table,
            q_heads,
            in_place: true,
            k_padding: 0,
            numbered: false,
        }
    }
    const fn apart(kind: Kind, k_padding: usize) -> Kind {
        Kind {
            in_place: false,
            k_padding,
            numbered: true,
            ..kind
        }
    }
    [
        // The finest formats, from f32: a product that is not rounded changes bytes.
        (
            ("f16/int8", HeadDim::same(128), 64, 5),
            kind(HalfSplit, 128, Dtype::F32, 10),
        ),
        (
            ("int8", HeadDim::same(80), 32, 1),
            apart(kind(HalfSplit, 32, Dtype::Bf16, 3), 0),
        ),
        (
            ("int4", HeadDim::same(128), 64, 2),
            apart(kind(HalfSplit, 128, Dtype::F32, 9), 8),
        ),
        // Ten pairs: dims of a lane lie on both sides.
        (
            ("int4", HeadDim::same(80), 16, 1),
            kind(HalfSplit, 20, Dtype::F16, 1),
        ),
        (
            ("int4", HeadDim::same(256), 64, 1),
            kind(Interleaved, 256, Dtype::F32, 8),
        ),
        (
            ("int4-r2-w4/int8-plain", HeadDim::same(192), 64, 2),
            apart(kind(Interleaved, 64, Dtype::Bf16, 6), 3),
        ),
        (
            ("int4-g4", HeadDim::same(256), 32, 4),
            kind(HalfSplit, 256, Dtype::Bf16, 4),
        ),
        (
            ("fp8", HeadDim::same(64), 64, 2),
            apart(kind(HalfSplit, 64, Dtype::F32, 14), 3),
        ),
        (
            ("int8-g32", HeadDim::same(96), 32, 3),
            apart(kind(HalfSplit, 96, Dtype::F16, 3), 6),
        ),
        (
            ("f16/bf16", HeadDim::same(128), 32, 4),
            kind(Interleaved, 64, Dtype::F16, 0),
        ),
        (
            ("int8", HeadDim { k: 192, v: 128 }, 64, 2),
            apart(kind(Interleaved, 64, Dtype::F32, 3), 4),
        ),
        (
            ("int8", HeadDim { k: 576, v: 512 }, 64, 1),
            kind(HalfSplit, 64, Dtype::Bf16, 5),
        ),
    ]
};

struct Job {
    name: &'static str,
    config: CacheConfig,
    dtype: Dtype,
    /// Tokens that each sequence begins with, and those of each call.
    lens: Vec<usize>,
    calls: Vec<usize>,
    /// How tokens are rotated.
    rotary: Option<Kind>,
}

/// All kinds, each with one of the three number formats; and one token of many sequences, a third of which begin a page.
fn jobs() -> Vec<Job> {
    let job = |name, head_dim: HeadDim, page_size, heads, lens: Vec<usize>, calls: Vec<usize>| {
        let format = str::parse(name).expect("a format's name");
        let longest = lens.iter().max().unwrap_or(&0) + calls.iter().sum::<usize>();
        let mut config = CacheConfig::builder(format, Heads::new(heads, heads, head_dim))
            .centres(false)
            .unit_tensor_scales()
            .sequences(lens.len())
            .max_len(longest)
            .build();
        config.page_size = page_size;
        config.num_pages = lens.len() * config.pages_for(longest);
        for scale in config
            .k_tensor_scales
            .iter_mut()
            .chain(&mut config.v_tensor_scales)
        {
            *scale = 0.02;
        }
        Job {
            name,
            config,
            dtype: Dtype::F32,
            lens,
            calls,
            rotary: None,
        }
    };
    let mut jobs: Vec<Job> = KINDS
        .into_iter()
        .map(|(name, head_dim, page, heads)| {
            // One sequence that begins empty, one in the middle of a page, one that is about to fill its first.
            let calls = [1, 1, page - 3, 1, 1, 2, 1, page + 7, 1, 2 * page + 1, 1, 1];
            job(
                name,
                head_dim,
                page,
                heads,
                vec![0, 5, page - 1],
                calls.to_vec(),
            )
        })
        .collect();
    jobs.extend(ROTATED.map(|((name, head_dim, page, heads), kind)| {
        let (lens, calls) = (vec![0, 5, page - 1], vec![1, page - 3, 1, 2, page + 7, 1]);
        Job {
            rotary: Some(kind),
            ..job(name, head_dim, page, heads, lens, calls)
        }
    }));
    for (i, job) in jobs.iter_mut().enumerate() {
        job.dtype = [Dtype::F32, Dtype::F16, Dtype::Bf16][i % 3];
    }
    let lens = |b| match b {
        7 | 300 => 62,
        _ if b % 3 == 0 => 63,
        _ => b % 50,
    };
    jobs.push(job(
        "int4",
        HeadDim::same(64),
        64,
        1,
        (0..313).map(lens).collect(),
        vec![1, 1],
    ));
    jobs
}

/// New tokens as both sides take them.
struct Tokens {
    floats: Vec<f32>,
    bytes: Vec<u8>,
}

impl Job {
    fn shape(&self) -> Result<AppendShape> {
        Ok(AppendShape {
            layout: self.config.layout()?,
            rotary: self.rotary.is_some(),
        })
    }

    /// Elements of a token's K, and of its V, which latents have none of.
    fn rows(&self) -> [usize; 2] {
        let [k, v] = self.config.head_dim.both();
        let v = if self.config.format.latents { 0 } else { v };
        [k, v].map(|dim| self.config.num_kv_heads * dim)
    }

    /// K and V of so many tokens.
    fn tokens(&self, seed: u64, count: usize) -> [Tokens; 2] {
        let [in_k, in_v] = self.rows();
        [(0, in_k), (1, in_v)].map(|(side, row)| self.side(seed + side, count * row))
    }

    fn side(&self, seed: u64, elements: usize) -> Tokens {
        let noise = noise(seed, elements);
        let (mut floats, mut bytes) = (Vec::new(), Vec::new());
        for x in noise {
            match self.dtype {
                Dtype::F32 => {
                    floats.push(x);
                    bytes.extend(x.to_le_bytes());
                }
                Dtype::F16 => {
                    let x = f16::from_f32(x);
                    floats.push(x.to_f32());
                    bytes.extend(x.to_le_bytes());
                }
                Dtype::Bf16 => {
                    let x = bf16::from_f32(x);
                    floats.push(x.to_f32());
                    bytes.extend(x.to_le_bytes());
                }
            }
        }
        Tokens { floats, bytes }
    }

    /// The first call after which the pools differ, and where.
    fn differs(&self, cpu: &CpuBackend, kernels: &Kernels) -> Result<Option<String>> {
        let config = &self.config;
        let mut cache = cpu.create_cache(config)?;
        let [row, v_row] = self.rows();
        let table = self.rotary.map(Table::new).transpose()?;
        for (b, &len) in self.lens.iter().enumerate() {
            let [k, v] = self.tokens(10 + 2 * b as u64, len);
            cache.append(b, &k.floats, &v.floats)?;
        }
        // Kernels store up to 16 bytes at once.
        let from = pool_of(&cache)?;
        let size = cache.layout().page_bytes();
        let mut memory = vec![PAD; from.len() / size * (size + PADDING) + 16];
        let start = memory.as_ptr().addr().next_multiple_of(16) - memory.as_ptr().addr();
        let pool = &mut memory[start..];
        let places = pool.chunks_exact_mut(size + PADDING);
        let pages = from.chunks_exact(size);
        places
            .zip(pages)
            .for_each(|(to, page)| to[..size].copy_from_slice(page));
        for (call, &tokens) in self.calls.iter().enumerate() {
            let [k, v] = self.tokens(1000 * (1 + call as u64), self.lens.len() * tokens);
            for b in 0..self.lens.len() {
                let of = |row: usize| b * tokens * row..(b + 1) * tokens * row;
                let mut new = k.floats[of(row)].to_vec();
                if let Some(table) = &table {
                    let len = cache.table().lens[b];
                    table.rotate(&mut new, row, config.head_dim.k, b, len);
                }
                cache.append(b, &new, &v.floats[of(v_row)])?;
            }
            let to = pool.as_mut_ptr();
            let (new, table) = (([&k, &v], tokens), table.as_ref());
            let found = match call % 2 {
                0 => self.emulate(kernels, &cache, new, to, table)?,
                _ => self.emulate_by_slots(kernels, &cache, new, to, table)?,
            };
            if let Some(found) = found {
                return Ok(Some(format!("call {call}, {tokens} tokens: {found}")));
            }
            if let Some(found) = self.first_difference(&cache, pool)? {
                return Ok(Some(format!("call {call}, {tokens} tokens: {found}")));
            }
        }
        Ok(None)
    }

    /// The new tokens of all sequences in one launch, behind those that are there. How rotated queries differ, if they do.
    fn emulate(
        &self,
        kernels: &Kernels,
        cache: &KvCache,
        ([k, v], tokens): ([&Tokens; 2], usize),
        pool: *mut u8,
        rotary: Option<&Table>,
    ) -> Result<Option<String>> {
        let config = &self.config;
        let slots = config
            .format
            .residual_slots(config.page_size, config.max_q_len);
        let tables = Tables::new(cache, slots, 0);
        let [row, v_row] = self.rows();
        let padding = rotary.map_or(0, |table| table.kind.k_padding);
        let row_bytes = k.bytes.len() / (self.lens.len() * tokens);
        let mut k_rows = Vec::new();
        for token in k.bytes.chunks_exact(row_bytes) {
            k_rows.extend(token);
            k_rows.extend(vec![0xff; row_bytes / row * padding]);
        }
        let (k_rows, v_rows) = (words(&k_rows), words(&v.bytes));
        let positions = |table: &Table| {
            let of = |(b, &len)| (len - tokens..len).map(move |at| table.position(b, at) as i64);
            cache.table().lens.iter().enumerate().flat_map(of).collect()
        };
        let launch = match rotary {
            Some(table) => {
                let positions = positions(table);
                Some(table.launch(self.dtype, config.head_dim.k, positions, tokens as u64)?)
            }
            None => None,
        };
        let args = AppendArgs {
            rows: KvRows {
                k: address(&k_rows),
                v: address(&v_rows),
                dtype: self.dtype,
                k_token_stride: row + padding,
                v_token_stride: v_row,
            },
            sequences: tables.sequences(
                self.pages(pool)?,
                [
                    address(&tables.pages),
                    address(&tables.residuals),
                    address(&tables.lens),
                ],
                self.tensor_scales(),
            ),
            batch: self.lens.len(),
            tokens,
            rotary: launch.as_ref().zip(rotary).map(|(launch, table)| {
                launch.args(&Places {
                    cos_sin: address(&table.words),
                    positions: match table.kind.numbered {
                        true => DeviceAddress::NULL,
                        false => address(&launch.positions),
                    },
                    q: address(&launch.q),
                    out: address(&launch.out),
                })
            }),
        };
        // SAFETY: the addresses are those of memory that lives until here, as large as `AppendArgs` asks, and the tables are the cache's own.
        unsafe { kernels.launch(&self.shape()?, &args) }?;
        Ok(launch.and_then(|launch| launch.difference(bytemuck::cast_slice(&launch.out))))
    }

    /// Appends the tokens in one launch, each with its slot; one between two sequences is skipped. Returns how rotated queries differ, if they do.
    fn emulate_by_slots(
        &self,
        kernels: &Kernels,
        cache: &KvCache,
        (sides, tokens): ([&Tokens; 2], usize),
        pool: *mut u8,
        rotary: Option<&Table>,
    ) -> Result<Option<String>> {
        let (config, table) = (&self.config, cache.table());
        let own = self.rows();
        let padding = [rotary.map_or(0, |table| table.kind.k_padding), 0];
        let (mut slots, mut residuals, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let mut rows = [Vec::new(), Vec::new()];
        for (b, pages) in table.pages.iter().enumerate() {
            // What a token has that is skipped: NaN.
            slots.push(-1i64);
            residuals.push(7u32);
            positions.push(Table::of_padding(b));
            for (i, (side, rows)) in sides.iter().zip(&mut rows).enumerate() {
                let (row, padding) = (own[i], padding[i]);
                if row == 0 {
                    continue;
                }
                let row_bytes = side.bytes.len() / (self.lens.len() * tokens);
                let end = row_bytes / row * (row + padding);
                rows.resize(rows.len() + end, 0xff);
                let of_sequence = &side.bytes[b * tokens * row_bytes..][..tokens * row_bytes];
                for token in of_sequence.chunks_exact(row_bytes) {
                    let start = rows.len();
                    rows.extend(token);
                    rows.resize(start + end, 0xff);
                }
            }
            let len = table.lens[b];
            for at in len - tokens..len {
                let page = at / config.page_size;
                slots.push(
                    i64::from(pages[page]) * config.page_size as i64
                        + (at % config.page_size) as i64,
                );
                positions.push(rotary.map_or(0, |table| table.position(b, at) as i64));
                residuals.push(table.residual_page(b, page).unwrap_or(u32::MAX));
            }
        }
        let rows = rows.map(|rows| words(&rows));
        let seed = 77 + positions.len() as u64;
        let launch = match rotary {
            Some(table) => Some(table.launch(self.dtype, config.head_dim.k, positions, seed)?),
            None => None,
        };
        let args = SlotAppendArgs {
            rows: KvRows {
                k: address(&rows[0]),
                v: address(&rows[1]),
                dtype: self.dtype,
                k_token_stride: own[0] + padding[0],
                v_token_stride: own[1],
            },
            pool: self.pages(pool)?,
            tensor_scales: self.tensor_scales(),
            slots: address(&slots),
            residual_pages: address(&residuals),
            tokens: slots.len(),
            rotary: launch.as_ref().zip(rotary).map(|(launch, table)| {
                launch.args(&Places {
                    cos_sin: address(&table.words),
                    positions: address(&launch.positions),
                    q: address(&launch.q),
                    out: address(&launch.out),
                })
            }),
            centres: None,
        };
        // SAFETY: the addresses are those of memory that lives until here, as large as `SlotAppendArgs` asks, and the slots are those of the cache's own pages.
        unsafe { kernels.launch(&self.shape()?, &args) }?;
        Ok(launch.and_then(|launch| launch.difference(bytemuck::cast_slice(&launch.out))))
    }

    /// The cache's static scales, which lie in its configuration.
    fn tensor_scales(&self) -> [DeviceAddress; 2] {
        let config = &self.config;
        [&config.k_tensor_scales, &config.v_tensor_scales].map(|scales| match &scales[..] {
            [] => DeviceAddress::NULL,
            scales => address(scales),
        })
    }

    fn pages(&self, pool: *mut u8) -> Result<Pages> {
        let at = DeviceAddress::new(pool as u64);
        Ok(padded_at(at, &self.config.layout()?, self.config.num_pages))
    }

    /// All pages are compared whole, and what lies between them is as it was.
    fn first_difference(&self, cache: &KvCache, pool: &[u8]) -> Result<Option<String>> {
        let (want, layout) = (pool_of(cache)?, *cache.layout());
        let size = layout.page_bytes();
        let places = || pool.chunks_exact(size + PADDING);
        if let Some(page) = places().position(|page| page[size..] != [PAD; PADDING]) {
            return Ok(Some(format!("bytes behind page {page} were written")));
        }
        let pool = places().flat_map(|page| &page[..size]);
        let pool: Vec<u8> = pool.copied().collect();
        for page in 0..self.config.num_pages as u32 {
            for head in 0..self.config.num_kv_heads {
                let run = layout.run(page, head);
                let (got, want) = (&pool[run.clone()], &want[run]);
                if let Some(i) = (0..got.len()).find(|&i| got[i] != want[i]) {
                    return Ok(Some(format!(
                        "page {page}, head {head}, byte {i} is {:#04x}, expected {:#04x}",
                        got[i], want[i]
                    )));
                }
            }
        }
        Ok(None)
    }
}

/// A test for each kind of cache.
pub fn trials(kernels: &Arc<Kernels>) -> Vec<Trial> {
    let cpu = Arc::new(CpuBackend::new());
    let trial = |job: Job| {
        let (cpu, kernels) = (cpu.clone(), kernels.clone());
        let (config, dtype) = (&job.config, job.dtype);
        let rotated = job.rotary.map_or(String::new(), |kind| {
            let Kind {
                style, dim, table, ..
            } = kind;
            format!(", RoPE {dim} {style:?} {table:?}")
        });
        let name = format!(
            "append {}, d{}, page {}, {} sequences, {dtype:?}{rotated}",
            job.name,
            config.head_dim,
            config.page_size,
            job.lens.len()
        );
        Trial::test(name, move || match job.differs(&cpu, &kernels) {
            Ok(None) => Ok(()),
            Ok(Some(text)) => Err(text.into()),
            Err(error) => Err(format!("{error:#}").into()),
        })
    };
    jobs().into_iter().map(trial).collect()
}
