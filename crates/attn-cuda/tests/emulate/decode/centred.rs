//! Caches with centres of K: shapes, and how their caches come to be. What is expected is the specification's scalar program.

use anyhow::{Result, ensure};
use attn_conformance::{Build, Case, case::noise};
use attn_core::{
    DecodeAttention, HostPages, KvCache, KvFormat, PageTable,
    centres::{CENTRES, centres_bytes},
};
use attn_cpu::Reference;
use attn_cuda::{internals::CentresArgs, native::DeviceAddress};
use attn_kernels::cuda::{Arch, KernelChoice, KvLayout, Preferences};

use super::{Job, PlanKind, Shapes, prefers, shapes::wide_rows};
use crate::address;

/// The centres of a cache, as launches take them.
pub(super) struct Centres {
    /// `[sequence][num_kv_heads][2][head_dim]`, where vectors of eight bytes are aligned.
    centres: Vec<u64>,
    /// Elements of a sequence's.
    len: usize,
    rows: Vec<u32>,
}

impl Centres {
    /// Those of all sequences, and whose each listed sequence has; none of a cache without. An empty sequence has nobody's.
    pub(super) fn of(cache: &KvCache, table: &PageTable) -> Option<Self> {
        let config = cache.config();
        let pages = cache.store().as_any().downcast_ref::<HostPages>()?;
        let bytes = centres_bytes(config.num_kv_heads, config.head_dim.k);
        let mut centres = vec![0u64; config.num_sequences * bytes / 8];
        let all: &mut [u16] = bytemuck::cast_slice_mut(&mut centres);
        let places = all.chunks_exact_mut(CENTRES * config.head_dim.k);
        for (i, place) in places.enumerate() {
            let (sequence, head) = (i / config.num_kv_heads, i % config.num_kv_heads);
            let both = pages.centres(0, sequence, head)?;
            let numbers = place.iter_mut().zip(both.iter().copied().flatten());
            numbers.for_each(|(to, from)| *to = from.to_bits());
        }
        let rows = table
            .sequences
            .iter()
            .map(|&of| match cache.table().lens[of] {
                0 => u32::MAX,
                _ => of as u32,
            });
        Some(Centres {
            centres,
            len: bytes / 2,
            rows: rows.collect(),
        })
    }

    pub(super) fn args(&self) -> CentresArgs {
        // As `Centres::rows_of` has it: none where each sequence has the centres of its own number.
        let is_own = self
            .rows
            .iter()
            .enumerate()
            .all(|(b, row)| b == *row as usize);
        let rows = match is_own {
            true => DeviceAddress::NULL,
            false => address(&self.rows),
        };
        CentresArgs::side_by_side(address(&self.centres), self.len, rows)
    }
}

/// How a shape's cache with centres is filled.
#[derive(Debug, Clone)]
pub(super) struct Centred {
    /// The cache's sequence that each sequence of the problem is.
    pub(super) order: &'static [usize],
    /// The size of what all keys of a head have in common, in noise's.
    common: f32,
    /// Whether rows' scores are beyond the grid's range, and others within.
    is_far: bool,
}

impl Centred {
    /// A cache whose sequences are those of the case in another order. Each begins with other tokens, is cut below 64 or to nothing, and gets its own; the problem's
    /// second sequence has the first tokens of its first one, as a fork, and then keys that have the opposite in common.
    pub(super) fn built(&self, case: &Case) -> Result<KvCache> {
        let mut config = case.config();
        config.centres = true;
        config.num_pages += 3 * config.pages_for(200);
        let mut cache = Reference::new().create_cache(&config)?;
        let [row, v_row] = config.head_dim.both().map(|dim| config.num_kv_heads * dim);
        let common = noise(case.seed + 77, row);
        for (b, &sequence) in self.order.iter().enumerate() {
            let [mut k, v] = case.kv(b);
            let each = k.iter_mut().enumerate();
            each.for_each(|(i, x)| *x += self.common * common[i % row]);
            let len = case.problem.kv_lens[b];
            // 70 tokens, which have made both centres, of which some stay.
            let (before, kept) = (len.min(70), len.min([0, 40][b % 2]));
            cache.append(sequence, &k[..before * row], &v[..before * v_row])?;
            cache.truncate(sequence, kept)?;
            cache.append(sequence, &k[kept * row..], &v[kept * v_row..])?;
        }
        let lens = &case.problem.kv_lens;
        if let (&[first, second, ..], [a, b, ..]) = (self.order, &lens[..]) {
            // Not all: a last page that two have is no place for numbers that nobody wrote.
            let shared = 50.min(*a).min(b.saturating_sub(1));
            let [mut k, v] = case.kv(1);
            let each = k.iter_mut().enumerate();
            each.for_each(|(i, x)| *x -= self.common * common[i % row]);
            cache.free_sequence(second)?;
            cache.fork(first, second)?;
            cache.truncate(second, shared)?;
            cache.append(second, &k[shared * row..], &v[shared * v_row..])?;
        }
        Ok(cache)
    }

    /// Whether the rows' scores are where the shape is to have them, by their log-sum-exps.
    pub(super) fn check(&self, lse: &[f32]) -> Result<()> {
        let is_far = |lse: &&f32| lse.is_finite() && lse.abs() > 65408.0 * std::f32::consts::LN_2;
        let far = lse.iter().filter(is_far).count();
        ensure!(
            !self.is_far || (0 < far && far < lse.len()),
            "{far} of {} rows are beyond the grid's range",
            lse.len()
        );
        Ok(())
    }
}

/// Decodes, prompts across token 64, first tiles alone, score modifiers, and scores beyond the grid's range.
pub(super) fn centred_shapes() -> Vec<(Case, Centred)> {
    type Shape = (
        &'static str,
        usize,
        [usize; 2],
        usize,
        &'static [usize],
        &'static [usize],
    );
    const SHAPES: [Shape; 20] = [
        ("int8", 64, [8, 2], 128, &[300, 70, 5], &[1, 1, 1]),
        ("int8", 16, [4, 1], 64, &[200, 1, 64], &[1, 1, 3]),
        ("int4", 64, [3, 1], 128, &[330, 65, 40], &[1, 1, 1]),
        ("int4", 16, [4, 2], 64, &[450, 63], &[2, 1]),
        ("int8/int4", 128, [4, 1], 64, &[520, 129, 0], &[1, 1, 1]),
        ("int4-r2", 128, [4, 1], 128, &[200, 300], &[1, 1]),
        ("int4/int8", 32, [12, 1], 64, &[150, 90], &[1, 2]),
        ("int8/int8-plain", 64, [4, 1], 80, &[130, 66], &[1, 1]),
        ("int4-w4", 64, [2, 1], 256, &[200, 30], &[1, 1]),
        // Two row groups in a warp, of a team and of warps alone.
        ("int8", 64, [12, 1], 64, &[150, 70], &[1, 1]),
        ("int8/int4", 64, [8, 1], 64, &[200, 66], &[4, 4]),
        // Merges of many partials.
        ("int8", 64, [4, 1], 64, &[5000, 300], &[1, 1]),
        // Prompts.
        ("int8", 64, [4, 1], 128, &[130, 70], &[100, 30]),
        ("int8", 16, [6, 2], 64, &[150, 64], &[150, 64]),
        ("int4", 64, [4, 1], 128, &[192, 70], &[140, 9]),
        ("int4", 32, [2, 1], 64, &[130, 100], &[130, 40]),
        ("int8/int4", 64, [12, 1], 96, &[80, 66], &[17, 3]),
        ("int8", 64, [16, 1], 128, &[66, 40, 200], &[3, 20, 1]),
        ("int4", 64, [16, 1], 64, &[40, 64], &[40, 10]),
        // Nothing of an empty sequence is read.
        ("int8", 64, [12, 1], 128, &[0, 130], &[1, 1]),
    ];
    let case = |(format, page_size, heads, dim, kv_lens, q_lens): Shape| {
        let format = str::parse(format).expect("a format's name");
        let mut case = Case::new(heads, dim, kv_lens, format);
        case.problem.q_lens = q_lens.to_vec();
        (case.build, case.page_size) = (Build::AtOnce, page_size);
        case
    };
    let mut all: Vec<(Case, Centred)> = Vec::new();
    let mut add = |case: Case, common: f32, is_far: bool| {
        let order: &[usize] = match case.problem.batch() {
            2 => &[1, 0],
            _ => &[2, 0, 1],
        };
        let centred = Centred {
            order,
            common,
            is_far,
        };
        all.push((case, centred));
    };
    for shape in SHAPES {
        add(case(shape), 10.0, false);
    }
    for i in [0, 3, 9, 12, 14] {
        let mut far = case(SHAPES[i]);
        far.problem.scores.softmax_scale = Some(100.0);
        add(far, 60.0, true);
        let mut modified = case(SHAPES[i]);
        modified.problem.scores.softcap = Some(300.0);
        modified.problem.scores.window_left = Some(90);
        let slopes = (0..modified.problem.num_q_heads).map(|h| 0.25 + h as f32);
        modified.problem.scores.alibi_slopes = Some(slopes.collect());
        add(modified.clone(), 10.0, false);
        // A window alone leaves scores their way to the grid.
        modified.problem.scores.softcap = None;
        modified.problem.scores.alibi_slopes = None;
        modified.problem.scores.sinks = Some(vec![3.0; modified.problem.num_q_heads]);
        add(modified, 10.0, false);
    }
    let mut not_causal = case(SHAPES[15]);
    not_causal.problem.scores.causal = false;
    add(not_causal, 10.0, false);
    for (i, (case, _)) in all.iter_mut().enumerate() {
        case.seed = i as u64;
    }
    all
}

/// Wide rows.
fn wide_shapes() -> impl Iterator<Item = (Case, Centred)> {
    let is_pair = |case: &Case| case.format == KvFormat::INT8 && case.problem.batch() == 2;
    let all = wide_rows().into_iter().filter(is_pair).map(|case| {
        let centred = Centred {
            order: &[1, 0],
            common: 10.0,
            is_far: false,
        };
        (case, centred)
    });
    // Latents, 256 and 192/128 dims.
    all.take(3)
}

impl Shapes {
    /// Wide rows by `many_rows.cu`; the other shapes by every kernel, and of pages that are gathered first.
    pub(super) fn add_centred(&mut self, all: Vec<(Case, Centred)>) -> Result<()> {
        for (case, centred) in wide_shapes() {
            let first = self.jobs.len();
            self.add_many_rows(&case, KvLayout::Pages(case.page_size), PlanKind::Known)?;
            let made = &mut self.jobs[first..];
            made.iter_mut()
                .for_each(|job| job.centred = Some(centred.clone()));
        }
        for (case, centred) in all {
            let first = self.jobs.len();
            self.add_as(&case, KvLayout::Pages(case.page_size))?;
            let gathered = Preferences {
                dequantize: Some(true),
                ..prefers(KernelChoice::ManyRows)
            };
            let layout = KvLayout::Pages(case.page_size);
            let older = Job::new(PlanKind::Known, case, layout, gathered, Arch::Sm80)?;
            self.jobs.extend(older);
            let mut made = self.jobs.split_off(first);
            // What is attended as floats would lack the centres: such plans are refused.
            made.retain(|job| {
                job.plan
                    .dequantized
                    .is_none_or(|pages| pages.are_integers())
            });
            made.iter_mut()
                .for_each(|job| job.centred = Some(centred.clone()));
            self.jobs.extend(made);
        }
        Ok(())
    }
}
