//! Shards of a sequence, attended apart and finished together, have the bits of the whole.

use std::ops::Range;

use attn_conformance::noise::uniform;
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Error, HeadDim, Heads, KvCache, KvFormat, KvSource,
    Problem, SpanStates, SpansStep,
};
use attn_cpu::{CpuBackend, Isa, Options, Reference};

const HEADS: Heads = Heads {
    q: 6,
    kv: 2,
    dim: HeadDim::same(64),
};

/// Sequences of so many tokens and query tokens, in shards that end at the same spans.
struct Case {
    format: KvFormat,
    problem: Problem,
    /// The first token of each shard but the first.
    cuts: &'static [usize],
    /// Whether keys lack their centres, where the format allows it.
    centres: bool,
}

impl Case {
    fn new(format: &str, lens: &[usize], q_lens: &[usize], cuts: &'static [usize]) -> Self {
        Case {
            format: format.parse().unwrap(),
            problem: Problem::new(HEADS, lens).q_lens(q_lens),
            cuts,
            centres: true,
        }
    }

    fn q(&self) -> Vec<f32> {
        uniform(1, 0..self.problem.out_elements())
            .iter()
            .map(|x| 4.0 * x)
            .collect()
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
    fn cache(
        &self,
        backend: &dyn DecodeAttention,
        tokens: impl Fn(usize) -> Range<usize>,
    ) -> Result<KvCache, Error> {
        self.cache_behind(backend, tokens, None)
    }

    /// A cache of these tokens of each sequence, which are a later shard's where there is a first shard's cache.
    fn cache_behind(
        &self,
        backend: &dyn DecodeAttention,
        tokens: impl Fn(usize) -> Range<usize>,
        first_shard: Option<&KvCache>,
    ) -> Result<KvCache, Error> {
        let longest = self.problem.kv_lens.iter().max().unwrap();
        let [k_scales, v_scales] = self.scales();
        let has_centres = self.centres && self.format.check_centres().is_ok();
        let mut config = CacheConfig::builder(self.format, HEADS)
            .centres(has_centres)
            .sequences(self.problem.batch())
            .max_len(*longest)
            .max_q_len(self.problem.max_q_len())
            .build();
        (config.k_tensor_scales, config.v_tensor_scales) = (k_scales, v_scales);
        let mut cache = backend.create_cache(&config)?;
        let row = HEADS.kv * HEADS.dim.k;
        for (b, (len, q_len)) in self
            .problem
            .kv_lens
            .iter()
            .zip(&self.problem.q_lens)
            .enumerate()
        {
            let [k, v] = [0, 1].map(|side| uniform(10 + 2 * b as u64 + side, 0..len * row));
            let all = tokens(*len);
            if let Some(first_shard) = first_shard.filter(|_| !all.is_empty()) {
                let before = all.start / 1024 * 1024;
                cache.begin_shard(b, before, &first_shard.shard_centres(b)?)?;
            }
            let old = all.start..all.end.min(len - q_len).max(all.start);
            for part in [old.clone(), old.end..all.end] {
                let of = part.start * row..part.end * row;
                cache.append(b, &k[of.clone()], &v[of])?;
            }
        }
        Ok(cache)
    }

    fn whole(&self, backend: &dyn DecodeAttention) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let cache = self.cache(backend, |len| 0..len)?;
        let plan = backend.plan(&self.problem, self.format)?;
        let (q, mut out) = (self.q(), vec![f32::NAN; self.problem.out_elements()]);
        let mut lse = vec![f32::NAN; self.problem.rows()];
        let step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)?;
        backend.decode(&mut step.with_lse(&mut lse)?)?;
        Ok((out, lse))
    }

    fn shards(
        &self,
        backend: &dyn DecodeAttention,
        attend: impl Fn(&SpansStep<'_>) -> Result<SpanStates, Error>,
    ) -> Result<Vec<SpanStates>, Error> {
        let q = self.q();
        let first_shard = self.cache(backend, |len| self.range(0, len))?;
        let of = |shard| {
            let ranges: Vec<_> = self
                .problem
                .kv_lens
                .iter()
                .map(|len| self.range(shard, *len))
                .collect();
            let mut problem = self.problem.clone();
            problem.kv_lens = ranges.iter().map(|range| range.len()).collect();
            let all = self.problem.kv_lens.iter().zip(&ranges);
            problem.tokens_after = all.map(|(len, range)| len - range.end).collect();
            problem.tokens_before = ranges
                .iter()
                .map(|range| range.start / 1024 * 1024)
                .collect();
            // Sinks belong to the end.
            problem.scores.sinks = None;
            let behind = Some(&first_shard).filter(|_| shard > 0);
            let cache = self.cache_behind(backend, |len| self.range(shard, len), behind)?;
            let plan = backend.plan(&problem, self.format)?;
            attend(&SpansStep::new(&plan, &q, KvSource::Cache(&cache))?)
        };
        (0..=self.cuts.len()).map(of).collect()
    }

    fn finished(&self, shards: &[SpanStates]) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let mut out = vec![f32::NAN; self.problem.out_elements()];
        let mut lse = vec![f32::NAN; self.problem.rows()];
        let [_, v_scales] = self.scales();
        SpanStates::finish(
            shards,
            &self.problem,
            self.format,
            &v_scales,
            (&mut out, &mut lse),
        )?;
        Ok((out, lse))
    }
}

fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for format in [
        "int8",
        "int4",
        "int8/int4",
        "int4-g4",
        "int8-tensor",
        "int4-r2-w4",
        "bf16",
        "fp8",
    ] {
        // A query in the last shard alone; queries on both sides of a cut, with a sequence that ends before it, and one without queries.
        all.push(Case::new(format, &[2500, 1024], &[1, 1], &[1024, 2048]));
        all.push(Case::new(
            format,
            &[2060, 700, 1500],
            &[70, 3, 0],
            &[1024, 2048],
        ));
    }
    for format in ["int8", "int4"] {
        // Just behind a cut: the window of residuals reaches into the shard before.
        all.push(Case::new(format, &[2049, 2113], &[1, 2], &[2048]));
        let mut masked = Case::new(format, &[3100, 1300], &[40, 5], &[1024, 1024, 3072]);
        let problem = &mut masked.problem;
        (problem.scores.window_left, problem.scores.softcap) = (Some(900), Some(20.0));
        problem.scores.alibi_slopes = Some(vec![0.01, 0.0, -0.02, 0.3, 0.5, 0.001]);
        problem.scores.sinks = Some(vec![0.5, -2.0, 6.0, 0.0, 3.0, -1e6]);
        all.push(masked);
        let mut not_causal = Case::new(format, &[2090, 900], &[5, 2], &[2048]);
        not_causal.problem.scores.causal = false;
        all.push(not_causal);
        let mut plain = Case::new(format, &[2500, 1024], &[1, 1], &[1024, 2048]);
        plain.centres = false;
        all.push(plain);
    }
    all
}

#[test]
fn shards_have_the_bits_of_the_whole() -> Result<(), Error> {
    let options = [Isa::best(), Isa::Portable].map(|isa| Options::default().isa(isa).threads(2));
    for (i, case) in cases().into_iter().enumerate() {
        for options in &options {
            let cpu = CpuBackend::with_options(options)?;
            let whole = case.whole(&cpu)?;
            let shards = case.shards(&cpu, |step| cpu.attend_spans(step))?;
            assert!(
                case.finished(&shards)? == whole,
                "case {i}, {}",
                case.format
            );
        }
    }
    Ok(())
}

/// Kills a rule that takes any shard's first tile for the sequence's: a shard that is not told what lies ahead of it has other bits.
#[test]
fn the_first_tile_of_a_later_shard_is_like_any_other() -> Result<(), Error> {
    let (cpu, reference) = (CpuBackend::new(), Reference::new());
    for format in ["int4", "int8/int4", "int4-w4", "int4-w0", "int8"] {
        // Over centres of K a shard that is told otherwise than it was begun is refused.
        let mut case = Case::new(format, &[2500], &[1], &[1024]);
        case.centres = false;
        let cache = case.cache(&cpu, |len| 1024..len)?;
        let attend = |before: usize| {
            let mut problem = case.problem.clone().tokens_before([before]);
            problem.kv_lens = vec![2500 - 1024];
            let plan = cpu.plan(&problem, case.format)?;
            let q = case.q();
            let step = SpansStep::new(&plan, &q, KvSource::Cache(&cache))?;
            let states = cpu.attend_spans(&step)?;
            assert!(states == reference.attend_spans(&step)?, "{format}");
            Ok::<_, Error>(states)
        };
        let (second, fourth, first) = (attend(1024)?, attend(3072)?, attend(0)?);
        assert!(second == fourth, "{format}");
        let has_window = !["int4-w0", "int8"].contains(&format);
        assert_eq!(second != first, has_window, "{format}");
    }
    Ok(())
}

#[test]
fn the_reference_leaves_the_same_states() -> Result<(), Error> {
    let (cpu, reference) = (CpuBackend::new(), Reference::new());
    for case in
        ["int8", "int4"].map(|format| Case::new(format, &[2060, 700], &[5, 3], &[1024, 2048]))
    {
        let shards = case.shards(&cpu, |step| cpu.attend_spans(step))?;
        assert_eq!(
            shards.iter().map(SpanStates::spans).collect::<Vec<_>>(),
            [1, 1, 1]
        );
        assert!(case.shards(&reference, |step| reference.attend_spans(step))? == shards);
        assert!(case.finished(&shards)? == case.whole(&reference)?);
    }
    Ok(())
}

#[test]
fn a_shard_that_merges_its_spans_has_other_bits() -> Result<(), Error> {
    // Why shards hand over spans: merging the last two first rounds otherwise.
    let mut case = Case::new("int8", &[3000], &[1], &[1024]);
    // Scores far apart: states of one exponent add up exactly as long as their integers do.
    case.problem.scores.softmax_scale = Some(4.0);
    let cpu = CpuBackend::new();
    let shards = case.shards(&cpu, |step| cpu.attend_spans(step))?;
    assert_eq!(shards[1].spans(), 2);
    let (rows, dim) = (case.problem.rows(), HEADS.dim.v);
    let (mut max_sums, mut o) = (Vec::new(), Vec::new());
    for row in 0..rows {
        let of = |span: usize| {
            let at = span * rows + row;
            let ml = &shards[1].max_sums()[2 * at..][..2];
            ([ml[0], ml[1]], &shards[1].o()[at * dim..][..dim])
        };
        let (mut ml, mut merged) = (of(0).0, of(0).1.to_vec());
        attn_core::row_state::merge(&mut ml, &mut merged, of(1).0, of(1).1);
        max_sums.extend(ml);
        o.extend(merged);
    }
    let merged = SpanStates::new(rows, dim, max_sums, o)?;
    let (whole, other) = (
        case.whole(&cpu)?,
        case.finished(&[shards[0].clone(), merged])?,
    );
    assert!(case.finished(&shards)? == whole);
    assert!(other != whole);
    assert!(
        other
            .0
            .iter()
            .zip(&whole.0)
            .all(|(a, b)| (a - b).abs() < 1e-5)
    );
    Ok(())
}

#[test]
fn shards_that_end_inside_a_span_are_refused() -> Result<(), Error> {
    let case = Case::new("int8", &[1500], &[1], &[1024]);
    let cpu = CpuBackend::new();
    let cache = case.cache(&cpu, |_| 0..1000)?;
    let q = case.q();
    for (after, is_allowed) in [(0, true), (500, false)] {
        let mut problem = case.problem.clone();
        (problem.kv_lens, problem.tokens_after) = (vec![1000], vec![after]);
        let plan = cpu.plan(&problem, case.format)?;
        match SpansStep::new(&plan, &q, KvSource::Cache(&cache)) {
            Err(Error::Parameter {
                what: "the length of a shard",
                ..
            }) => assert!(!is_allowed),
            other => assert!(is_allowed && other.is_ok()),
        }
    }
    Ok(())
}

#[test]
fn tokens_that_follow_are_checked() {
    let problem = |after: &[usize]| Problem::new(HEADS, [100, 7]).tokens_after(after).check();
    problem(&[]).unwrap();
    problem(&[(1 << 20) - 100, 0]).unwrap();
    assert!(matches!(
        problem(&[1]),
        Err(Error::Length {
            what: "tokens_after",
            needed: 2,
            ..
        })
    ));
    for after in [(1 << 20) - 99, usize::MAX] {
        assert!(matches!(
            problem(&[after, 0]),
            Err(Error::Parameter {
                what: "tokens_after",
                ..
            })
        ));
    }
}
