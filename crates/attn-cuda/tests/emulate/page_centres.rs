//! Pages that have their sequences' centres of K: appends by the kernels, against the pages and the centres of a cache byte by byte.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use attn_conformance::case::noise;
use attn_core::{
    Append, CacheConfig, HeadDim, Heads, HostPages, KvCache, PageLayout, centres::centres_bytes,
};
use attn_cpu::Reference;
use attn_cuda::{
    internals::{CentredLaunch, centred_launches},
    native::{
        AppendShape, CentreTokens, DeviceAddress, Dtype, KvRows, PageCentres, Pages,
        SlotAppendArgs, SlotCentres,
    },
};
use libtest_mimic::Trial;

use crate::{Kernels, address};

/// Tokens of each of three sequences, call by call: one by one across the first tile's end, whole prompts, drafts across it, a sequence that is cut and goes on otherwise.
const STEPS: [[usize; 3]; 12] = [
    [1, 0, 0],
    [1, 63, 0],
    [1, 1, 1],
    [59, 1, 70],
    [1, 1, 1],
    [1, 1, 0],
    [1, 1, 1],
    [1, 0, 1],
    [3, 60, 1],
    [1, 1, 1],
    [70, 1, 3],
    [1, 1, 1],
];

/// A format, dims of a key and a value, KV heads, and tokens of a page.
type Job = (&'static str, HeadDim, usize, usize);

const JOBS: [Job; 4] = [
    ("int8", HeadDim { k: 128, v: 128 }, 3, 64),
    ("int8/int4-w0", HeadDim { k: 64, v: 64 }, 2, 128),
    ("int8/int8-plain", HeadDim { k: 80, v: 80 }, 1, 64),
    ("int8", HeadDim { k: 192, v: 128 }, 1, 64),
];

/// What a launch of an append takes, in memory that lives as long.
struct Step {
    slots: Vec<i64>,
    first_pages: Vec<u32>,
    positions: Vec<i32>,
}

impl Step {
    /// Of the tokens behind `lens`; with a token in front of all others that goes nowhere.
    fn new(cache: &KvCache, lens: [usize; 3], tokens: [usize; 3]) -> Self {
        let (mut slots, mut first_pages, mut positions) = (vec![-1], vec![u32::MAX], vec![63]);
        for sequence in 0..3 {
            let pages = &cache.table().pages[sequence];
            let page_size = cache.layout().page_size();
            for position in lens[sequence]..lens[sequence] + tokens[sequence] {
                let page = pages[position / page_size];
                slots.push((page as usize * page_size + position % page_size) as i64);
                first_pages.push(pages[0]);
                positions.push(position as i32);
            }
        }
        Step {
            slots,
            first_pages,
            positions,
        }
    }
}

/// What differs first.
fn differs((name, head_dim, heads, page_size): Job, kernels: &Kernels) -> Result<Option<String>> {
    use attn_core::DecodeAttention;
    let of = Heads::new(heads, heads, head_dim);
    let builder = CacheConfig::builder(name.parse()?, of).centres(true);
    let config = builder
        .sequences(3)
        .page_size(page_size)
        .max_len(400)
        .build();
    let mut cache = Reference::new().create_cache(&config)?;
    let layout = config.layout()?;
    // A page's centres, and room that no page has.
    let stride = layout.page_bytes() + centres_bytes(heads, head_dim.k) + 32;
    let mut memory = vec![0u128; config.num_pages * stride / 16];
    let pool = Pages {
        stride,
        ..Pages::new(address(&memory), &layout, config.num_pages)
    };
    for (n, tokens) in STEPS.into_iter().enumerate() {
        let lens = [0, 1, 2].map(|s| cache.table().lens[s]);
        let all: usize = tokens.iter().sum();
        let [k, v] = head_dim.both().map(|dim| heads * dim);
        let mut rows = [k, v].map(|row| noise(n as u64 + row as u64, (all + 1) * row));
        let common = noise(7, k);
        let keys = rows[0].iter_mut().enumerate();
        keys.for_each(|(i, x)| *x += 20.0 * common[i % k]);
        let appends: Vec<Append> = (0..3)
            .map(|sequence| Append {
                sequence,
                tokens: tokens[sequence],
            })
            .collect();
        cache.append_batch(&appends, &rows[0][k..], &rows[1][v..])?;
        let step = Step::new(&cache, lens, tokens);
        let PageCentres { at, stride } = PageCentres::new(&pool, &layout)?;
        let args = SlotAppendArgs {
            rows: KvRows {
                k: address(&rows[0]),
                v: address(&rows[1]),
                dtype: Dtype::F32,
                k_token_stride: k,
                v_token_stride: v,
            },
            pool,
            tensor_scales: [DeviceAddress::NULL; 2],
            slots: address(&step.slots),
            residual_pages: DeviceAddress::NULL,
            tokens: all + 1,
            rotary: None,
            centres: Some(SlotCentres {
                centres: at,
                stride,
                count: pool.num_pages,
                rows: address(&step.first_pages),
                positions: address(&step.positions),
                tokens: CentreTokens::All,
            }),
        };
        let shape = AppendShape {
            layout,
            rotary: false,
        };
        for launch in centred_launches(&args, tokens.iter().all(|&count| count <= 1))? {
            // SAFETY: rows, lists and the pool live until here, and places are those of the cache, which has as many pages.
            unsafe {
                match launch {
                    CentredLaunch::Store(args) => kernels.launch(&shape, &args),
                    CentredLaunch::Make(args) => kernels.launch(&layout, &args),
                }
            }?;
        }
        let got = bytemuck::cast_slice_mut(&mut memory);
        if let Some(text) = compare(&cache, &layout, got, pool.stride) {
            return Ok(Some(format!("after step {n}, {tokens:?}: {text}")));
        }
    }
    Ok(None)
}

/// What pages and centres of the cache's sequences are otherwise in the pool.
fn compare(cache: &KvCache, layout: &PageLayout, got: &[u8], stride: usize) -> Option<String> {
    let pages = cache.store().as_any().downcast_ref::<HostPages>()?;
    let dim = layout.head_dim().k;
    for sequence in 0..3 {
        let table = &cache.table().pages[sequence];
        for head in 0..layout.num_kv_heads() {
            for &page in table {
                let at = page as usize * stride + layout.run(0, head).start;
                let want = pages.run(0, page, head);
                if let Some(i) = (0..want.len()).find(|&i| want[i] != got[at + i]) {
                    return Some(format!(
                        "byte {i} of head {head} of page {page} is {:#04x}, expected {:#04x}",
                        got[at + i],
                        want[i]
                    ));
                }
            }
            let count = match cache.table().lens[sequence] {
                0 => 0,
                1..64 => 1,
                _ => 2,
            };
            let want = pages.centres(0, sequence, head)?;
            for (n, want) in want.into_iter().enumerate().take(count) {
                let at = table[0] as usize * stride + layout.page_bytes();
                let at = at + (head * 2 + n) * dim * 2;
                let want: Vec<u8> = want.iter().flat_map(|x| x.to_le_bytes()).collect();
                if got[at..at + want.len()] != want {
                    return Some(format!("centre {n} of head {head} of sequence {sequence}"));
                }
            }
        }
    }
    None
}

/// A test for each kind of pages.
pub fn trials(kernels: &Arc<Kernels>) -> Vec<Trial> {
    let trial = |job: Job| {
        let kernels = kernels.clone();
        let (name, head_dim, _, page_size) = job;
        let name = format!("page centres {name}, d{head_dim}, page {page_size}");
        Trial::test(name, move || match differs(job, &kernels) {
            Ok(None) => Ok(()),
            Ok(Some(text)) => Err(text.into()),
            Err(error) => Err(anyhow!("{error:#}").into()),
        })
    };
    JOBS.into_iter().map(trial).collect()
}
