//! Shards of sequences, attended apart by launches that leave the states of spans, and merged by one more: the states and the results of the CPU, bit
//! for bit, on a GPU and where the kernels' text is emulated.

use std::ops::Range;

use anyhow::{Result, ensure};
use attn_conformance::case::noise;
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, HeadDim, Heads, KvCache, KvFormat, KvSource, Problem,
    SpanStates, SpansStep,
};
use attn_cpu::CpuBackend;
use attn_cuda::native::{
    DecodeArgs, DeviceAddress, DeviceKv, Dtype, KvLayout, MergeSpansArgs, SpansArgs,
    alibi_slopes_log2,
};

use crate::{
    common_transfer::Machine,
    numbers,
    pages::{Tables, padded, padded_at, pool_of},
};

const HEADS: Heads = Heads {
    q: 6,
    kv: 2,
    dim: HeadDim::same(64),
};
const PAGE: usize = 64;

/// Sequences in shards that end at the same tokens.
#[derive(Debug, Clone)]
pub struct Case {
    name: &'static str,
    format: KvFormat,
    problem: Problem,
    /// The first token of each shard but the first.
    cuts: &'static [usize],
    /// The longest length of the shards' plans, where that is more than a shard has.
    longest: usize,
}

impl Case {
    fn new(
        (name, format): (&'static str, &str),
        lens: &[usize],
        q_lens: &[usize],
        cuts: &'static [usize],
    ) -> Self {
        Case {
            name,
            format: format.parse().expect("a format's name"),
            problem: Problem::new(HEADS, lens).q_lens(q_lens),
            cuts,
            longest: 0,
        }
    }

    /// One of each kind.
    pub fn all() -> Vec<Self> {
        let decode = ("a query in the last shard", "int8");
        let mut all = vec![
            Case::new(decode, &[2500, 1024], &[1, 1], &[1024, 2048]),
            // Blocks of query tokens on both sides of a cut, whose window of residuals reaches into the shard before.
            Case::new(
                ("queries about a cut", "int4"),
                &[2060, 700, 900],
                &[20, 3, 0],
                &[1024, 2048],
            ),
            Case::new(
                ("just behind a cut", "int8/int4"),
                &[1025, 1089],
                &[2, 2],
                &[1024],
            ),
            Case::new(
                ("static scales", "int8-tensor"),
                &[1100, 300],
                &[1, 1],
                &[1024],
            ),
            Case::new(("groups", "int4-g4"), &[1500], &[1], &[1024]),
        ];
        let mut masked = Case::new(
            ("masks and an empty shard", "int8"),
            &[2100, 1300],
            &[9, 5],
            &[1024, 1024],
        );
        let problem = &mut masked.problem;
        (problem.scores.window_left, problem.scores.softcap) = (Some(900), Some(20.0));
        problem.scores.alibi_slopes = Some(vec![0.01, 0.0, -0.02, 0.3, 0.5, 0.001]);
        problem.scores.sinks = Some(vec![0.5, -2.0, 6.0, 0.0, 3.0, -1e6]);
        all.push(masked);
        // Sequences of no token, and queries before the first one: sinks are all that their rows have.
        let mut unseen = Case::new(
            ("rows that see nothing", "int8"),
            &[1100, 0, 2],
            &[1, 2, 5],
            &[1024],
        );
        unseen.problem.scores.sinks = Some(vec![0.5, -2.0, 6.0, 0.0, 3.0, -1e6]);
        all.push(unseen);
        let mut not_causal = Case::new(("not causal", "int4"), &[1050, 900], &[5, 2], &[1024]);
        not_causal.problem.scores.causal = false;
        all.push(not_causal);
        // As an engine has it: each rank's plan is for its share, and most sequences have not come that far.
        let mut grows = Case::new(
            ("plans for longer shards", "int8"),
            &[2049, 1030, 65],
            &[1, 1, 1],
            &[2048],
        );
        grows.longest = 2048;
        all.push(grows);
        all
    }

    pub fn name(&self) -> String {
        format!("shards, {}: {}", self.format, self.name)
    }

    fn scales(&self) -> [Vec<f32>; 2] {
        [self.format.k, self.format.v].map(|scheme| match scheme.has_tensor_scale() {
            true => vec![0.01, 0.02],
            false => Vec::new(),
        })
    }

    /// Tokens of a sequence in a shard.
    fn range(&self, shard: usize, len: usize) -> Range<usize> {
        let cut = |i: usize| self.cuts.get(i).copied().unwrap_or(usize::MAX).min(len);
        let first = shard.checked_sub(1).map_or(0, cut);
        first..cut(shard).max(first)
    }

    /// A cache of these tokens of each sequence, whose last ones come as a step brings them.
    fn cache(&self, cpu: &CpuBackend, tokens: impl Fn(usize) -> Range<usize>) -> Result<KvCache> {
        let problem = &self.problem;
        let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
        let mut config = CacheConfig::builder(self.format, HEADS)
            .centres(false)
            .sequences(problem.batch())
            .page_size(PAGE)
            .max_len(longest)
            .max_q_len(problem.max_q_len())
            .build();
        [config.k_tensor_scales, config.v_tensor_scales] = self.scales();
        let mut cache = cpu.create_cache(&config)?;
        let row = HEADS.kv * HEADS.dim.k;
        let lens = problem.kv_lens.iter().zip(&problem.q_lens);
        for (b, (len, q_len)) in lens.enumerate() {
            let [k, v] = [0, 1].map(|side| noise(10 + 2 * b as u64 + side, len * row));
            let all = tokens(*len);
            let old = all.start..all.end.min(len.saturating_sub(*q_len)).max(all.start);
            for part in [old.clone(), old.end..all.end] {
                let of = part.start * row..part.end * row;
                cache.append(b, &k[of.clone()], &v[of])?;
            }
        }
        Ok(cache)
    }

    /// The problem of a shard, as the CPU attends it.
    fn of_shard(&self, shard: usize) -> Problem {
        let lens = &self.problem.kv_lens;
        let ranges: Vec<_> = lens.iter().map(|len| self.range(shard, *len)).collect();
        let mut problem = self.problem.clone();
        problem.kv_lens = ranges.iter().map(Range::len).collect();
        let ahead = shard.checked_sub(1).map_or(0, |i| self.cuts[i]);
        problem.tokens_before = vec![ahead; lens.len()];
        problem.tokens_after = lens
            .iter()
            .zip(&ranges)
            .map(|(len, range)| len - range.end)
            .collect();
        problem.scores.sinks = None;
        problem
    }

    /// All shards on the machine, then their merge, against the CPU's.
    pub fn run<M: Machine>(&self, machine: &M) -> Result<()> {
        let cpu = CpuBackend::new();
        let q: Vec<f32> = noise(1, self.problem.q_elements())
            .iter()
            .map(|x| 4.0 * x)
            .collect();
        let mut shards = Vec::new();
        for shard in 0..=self.cuts.len() {
            let problem = self.of_shard(shard);
            let cache = self.cache(&cpu, |len| self.range(shard, len))?;
            let plan = cpu.plan(&problem, self.format)?;
            let want = cpu.attend_spans(&SpansStep::new(&plan, &q, KvSource::Cache(&cache))?)?;
            let got = attend(machine, &problem, self.longest, &cache, &q)?;
            same_states(&got, &want).map_err(|error| error.context(format!("shard {shard}")))?;
            shards.push(got);
        }
        let cache = self.cache(&cpu, |len| 0..len)?;
        let plan = cpu.plan(&self.problem, self.format)?;
        let (mut out, mut lse) = (
            vec![f32::NAN; self.problem.out_elements()],
            vec![f32::NAN; self.problem.rows()],
        );
        let step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)?;
        cpu.decode(&mut step.with_lse(&mut lse)?)?;
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let (got, got_lse) = self.merge(machine, &shards, dtype)?;
            ensure!(got == numbers::bytes(dtype, &out), "outputs in {dtype:?}");
            ensure!(got_lse == numbers::bytes(Dtype::F32, &lse), "log-sum-exps");
        }
        Ok(())
    }

    /// The bytes of outputs and log-sum-exps.
    fn merge<M: Machine>(
        &self,
        machine: &M,
        shards: &[SpanStates],
        dtype: Dtype,
    ) -> Result<(Vec<u8>, Vec<u8>)> {
        let problem = &self.problem;
        let rows = problem.rows();
        let all = |of: fn(&SpanStates) -> &[f32]| -> Vec<f32> {
            shards.iter().flat_map(|shard| of(shard).to_vec()).collect()
        };
        let nothing = numbers::bytes(dtype, &vec![f32::NAN; problem.out_elements()]);
        let [_, v_scales] = self.scales();
        let sinks = problem.scores.sinks.clone().unwrap_or_default();
        let mut memory = [
            machine.upload(bytemuck::cast_slice(&all(SpanStates::max_sums)))?,
            machine.upload(bytemuck::cast_slice(&all(SpanStates::o)))?,
            machine.upload(&nothing)?,
            machine.upload(&vec![0xff; 4 * rows])?,
            machine.upload(bytemuck::cast_slice(&sinks))?,
            machine.upload(bytemuck::cast_slice(&v_scales))?,
        ];
        let [max_sums, o, out, lse, sinks_at, v_scales_at] =
            memory.each_mut().map(|memory| machine.address(memory));
        let some = |list: &[f32], at| {
            if list.is_empty() {
                DeviceAddress::NULL
            } else {
                at
            }
        };
        let args = MergeSpansArgs {
            max_sums,
            o,
            states: shards.iter().map(SpanStates::spans).sum(),
            rows_apart: rows,
            rows,
            num_q_heads: problem.num_q_heads,
            num_kv_heads: problem.num_kv_heads,
            out,
            dtype,
            lse,
            sinks: some(&sinks, sinks_at),
            v_tensor_scales: some(&v_scales, v_scales_at),
        };
        // SAFETY: the addresses are those of memory that lives until here, as large as `MergeSpansArgs` asks.
        unsafe { machine.enqueue((self.format, problem.head_dim.v), &args) }?;
        Ok((machine.download(&memory[2])?, machine.download(&memory[3])?))
    }
}

/// The states that the machine leaves of a shard, by a plan for `longest` tokens or as many as the sequences have.
fn attend<M: Machine>(
    machine: &M,
    problem: &Problem,
    longest: usize,
    cache: &KvCache,
    q: &[f32],
) -> Result<SpanStates> {
    let (config, layout) = (cache.config(), cache.layout());
    let slots = config.format.residual_slots(PAGE, problem.max_q_len());
    // What lies ahead and follows in other shards is known to the device alone.
    let mut planned = problem.clone();
    planned.tokens_before.clear();
    planned.tokens_after.clear();
    planned
        .kv_lens
        .iter_mut()
        .for_each(|len| *len = longest.max(*len));
    let longest = planned.kv_lens.iter().copied().max().unwrap_or(0);
    let tables = Tables::new(cache, slots, longest);
    let ints = |tokens: &[usize]| -> Vec<i32> { tokens.iter().map(|n| *n as i32).collect() };
    let (before, after) = (ints(&problem.tokens_before), ints(&problem.tokens_after));
    let (rows, spans) = (problem.rows(), longest.div_ceil(1024).max(1));
    let blocks = machine.query_blocks((&planned, config.format, KvLayout::Pages(PAGE)))?;
    let upload = |bytes: &[u8]| machine.upload(bytes);
    let mut memory = [
        upload(&padded(pool_of(cache)?, layout))?,
        upload(bytemuck::cast_slice(&tables.pages))?,
        upload(bytemuck::cast_slice(&tables.residuals))?,
        upload(bytemuck::cast_slice(&tables.lens))?,
        upload(bytemuck::cast_slice(&before))?,
        upload(bytemuck::cast_slice(&after))?,
        upload(bytemuck::cast_slice(q))?,
        upload(bytemuck::cast_slice(&config.k_tensor_scales))?,
        upload(bytemuck::cast_slice(&alibi_slopes_log2(
            problem.scores.alibi_slopes.as_deref().unwrap_or(&[]),
        )))?,
        upload(bytemuck::cast_slice(&blocks))?,
        // NaN: what is not written shows, unless its maximum says that nothing is seen.
        upload(&vec![0xff; 8 * spans * rows])?,
        upload(&vec![0xff; 4 * spans * rows * HEADS.dim.k])?,
    ];
    let [
        pool,
        page_table,
        residual_pages,
        kv_lens,
        tokens_before,
        tokens_after,
        q,
        k_scales,
        slopes,
        blocks_at,
        max_sums,
        o,
    ] = memory.each_mut().map(|memory| machine.address(memory));
    let some = |is: bool, at| if is { at } else { DeviceAddress::NULL };
    let args = DecodeArgs {
        q,
        out: DeviceAddress::NULL,
        dtype: Dtype::F32,
        lse: DeviceAddress::NULL,
        kv: DeviceKv::Paged(tables.sequences(
            padded_at(pool, layout, config.num_pages),
            [page_table, residual_pages, kv_lens],
            [
                some(!config.k_tensor_scales.is_empty(), k_scales),
                DeviceAddress::NULL,
            ],
        )),
        query_blocks: some(!blocks.is_empty(), blocks_at),
        alibi_slopes: some(problem.scores.alibi_slopes.is_some(), slopes),
        sinks: DeviceAddress::NULL,
        workspace: DeviceAddress::NULL,
        scratch: DeviceAddress::NULL,
    };
    let to = SpansArgs {
        tokens_before,
        tokens_after,
        max_sums,
        o,
    };
    // SAFETY: the addresses are those of memory that lives until here, as large as `DecodeArgs` and `SpansArgs` ask; pages are those of the cache.
    unsafe { machine.attend_spans((&planned, config.format, KvLayout::Pages(PAGE)), &args, &to) }?;
    let numbers_of = |memory| anyhow::Ok(numbers::numbers(Dtype::F32, &machine.download(memory)?));
    let (max_sums, o) = (numbers_of(&memory[10])?, numbers_of(&memory[11])?);
    Ok(SpanStates::new(rows, HEADS.dim.k, max_sums, o)?)
}

/// Refuses states that differ where a row sees tokens; `want` has no spans behind the longest sequence.
fn same_states(got: &SpanStates, want: &SpanStates) -> Result<()> {
    let (rows, dim) = (got.rows(), HEADS.dim.v);
    for at in 0..got.spans() * rows {
        let ml = |of: &SpanStates| match of.max_sums().get(2 * at..2 * at + 2) {
            Some(ml) if ml[0] > f32::NEG_INFINITY => Some([ml[0], ml[1]].map(f32::to_bits)),
            _ => None,
        };
        let (span, row) = (at / rows, at % rows);
        ensure!(
            ml(got) == ml(want),
            "span {span}, row {row}: {:?}, expected {:?}",
            ml(got),
            ml(want)
        );
        if ml(got).is_some() {
            let bits = |of: &SpanStates| {
                of.o()[at * dim..][..dim]
                    .iter()
                    .map(|x| x.to_bits())
                    .collect::<Vec<_>>()
            };
            ensure!(bits(got) == bits(want), "O of span {span}, row {row}");
        }
    }
    ensure!(
        got.spans() >= want.spans(),
        "{} spans, expected {}",
        got.spans(),
        want.spans()
    );
    Ok(())
}
