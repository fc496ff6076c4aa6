//! The three claims, checked for one case and for the whole table.

use attn_core::{
    DecodeAttention, DecodeOutput, DecodeStep, Error, KvCache, KvFormat, KvSource, Scheme,
};

use crate::{case::Case, oracle};

/// What a run over the table found.
#[derive(Debug, Default)]
pub struct Report {
    /// Cases run.
    pub cases: usize,
    /// One text per failure: case, first wrong index, both values with bits.
    pub failures: Vec<String>,
}

/// Relative L2 error allowed to decode on top of the cache's own, against the f64 oracle.
///
/// Integer: Q has 15 bits and a weight 16, so a score of magnitude s (base 2) errs by about s·2^-15 and the output by the
/// like; the tables' scores reach some tens: 3e-3 here, 3e-4 on real data (`accuracy.rs`). Float: a dot product of D terms errs by √D·2^-24 of its terms,
/// amplified by scores of the same tens: 3e-5.
pub fn bound(format: KvFormat) -> f64 {
    if format.is_integer() { 3e-3 } else { 3e-5 }
}

/// Decodes a case; outputs are poisoned first.
///
/// # Errors
/// The backend's.
pub fn decode(
    backend: &dyn DecodeAttention,
    case: &Case,
    cache: &KvCache,
) -> Result<(Vec<f32>, Vec<f32>), Error> {
    let q = case.q();
    let plan = backend.plan(&case.problem, case.format)?;
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; case.problem.rows()]);
    let step = DecodeStep::new(&plan, &q, KvSource::Cache(cache))?;
    backend.decode(
        &step,
        &mut DecodeOutput::new(&case.problem, &mut out, &mut lse)?,
    )?;
    Ok((out, lse))
}

/// Where two results first differ in bits, as a text.
pub fn first_difference(what: &str, got: &[f32], want: &[f32]) -> Option<String> {
    let i = got
        .iter()
        .zip(want)
        .position(|(a, b)| a.to_bits() != b.to_bits())?;
    let (a, b) = (got[i], want[i]);
    Some(format!(
        "{what}[{i}] is {a:e} ({:#010x}), the reference has {b:e} ({:#010x})",
        a.to_bits(),
        b.to_bits()
    ))
}

/// Checks all claims for one case; `None` if it passes.
pub fn check_case(
    reference: &dyn DecodeAttention,
    backend: &dyn DecodeAttention,
    case: &Case,
) -> Option<String> {
    let found = try_case(reference, backend, case)
        .unwrap_or_else(|error| Some(format!("refused: {error}")));
    found.map(|text| format!("{case:?}: {text}"))
}

fn try_case(
    reference: &dyn DecodeAttention,
    backend: &dyn DecodeAttention,
    case: &Case,
) -> Result<Option<String>, Error> {
    let want_cache = case.cache(reference, usize::MAX / 1_000_000)?;
    let cache = case.cache(backend, 3)?;
    for b in 0..case.problem.batch() {
        if want_cache.read_back(b)? != cache.read_back(b)? {
            return Ok(Some(format!(
                "cache bytes of sequence {b} differ from the reference's"
            )));
        }
    }
    let (out, lse) = decode(backend, case, &cache)?;
    let again = decode(backend, case, &cache)?;
    if let Some(text) = first_difference("second run's out", &again.0, &out) {
        return Ok(Some(text));
    }
    if case.format.is_integer() {
        let (want_out, want_lse) = decode(reference, case, &want_cache)?;
        let found =
            first_difference("out", &out, &want_out).or(first_difference("lse", &lse, &want_lse));
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(against_oracle(case, &want_cache, &out, &lse))
}

fn against_oracle(case: &Case, cache: &KvCache, out: &[f32], lse: &[f32]) -> Option<String> {
    let (want, want_lse) = oracle::attend(&case.problem, cache, &case.q());
    let error: f64 = out
        .iter()
        .zip(&want)
        .map(|(a, b)| (f64::from(*a) - b).powi(2))
        .sum();
    let norm: f64 = want.iter().map(|b| b * b).sum();
    let relative = if norm == 0.0 {
        error.sqrt()
    } else {
        (error / norm).sqrt()
    };
    let allowed = bound(case.format);
    // A comparison that NaN fails.
    if !(relative <= allowed) {
        return Some(format!(
            "relative L2 error {relative:e} exceeds {allowed:e}"
        ));
    }
    let wrong = lse.iter().zip(&want_lse).position(|(a, b)| {
        let (a, close) = (f64::from(*a), allowed * b.abs().max(10.0));
        a != *b && !((a - b).abs() <= close)
    })?;
    Some(format!(
        "lse[{wrong}] is {:e}, the oracle has {:e}",
        lse[wrong], want_lse[wrong]
    ))
}

/// The table: every legal pair of schemes, every head_dim, grouping, length edge and modifier.
pub fn table() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |mut case: Case, change: &dyn Fn(&mut Case)| {
        change(&mut case);
        case.seed = cases.len() as u64 + 1;
        if case
            .format
            .check(case.problem.head_dim, case.page_size)
            .is_ok()
        {
            cases.push(case);
        }
    };
    for k in Scheme::ALL {
        for v in Scheme::ALL {
            add(
                Case::new([4, 2], 128, &[0, 1, 65, 130], KvFormat { k, v }),
                &|c| c.problem.q_len = 2,
            );
        }
    }
    let formats = [
        KvFormat::INT8,
        KvFormat::INT4,
        KvFormat::same(Scheme::Bf16),
        KvFormat::same(Scheme::Fp8E4m3),
    ];
    for format in formats {
        for dim in [64, 80, 96, 192, 256] {
            add(Case::new([3, 1], dim, &[1, 77, 300], format), &|_| ());
        }
        for heads_per_kv in [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 64] {
            add(Case::new([heads_per_kv, 1], 64, &[70], format), &|_| ());
        }
        for q_len in [1, 3, 5, 8, 16] {
            add(Case::new([2, 1], 64, &[4, 66, 200], format), &|c| {
                c.problem.q_len = q_len
            });
        }
        add(
            Case::new(
                [2, 1],
                64,
                &[15, 16, 17, 63, 64, 127, 128, 129, 255, 256, 257, 511, 513],
                format,
            ),
            &|_| (),
        );
        for page_size in [16, 32, 128] {
            add(
                Case::new([2, 2], 64, &[1, 31, 33, 127, 129, 270], format),
                &|c| c.page_size = page_size,
            );
        }
        add(Case::new([2, 1], 64, &[4097], format), &|_| ());
        let base = || Case::new([4, 2], 64, &[3, 64, 150, 400], format);
        add(base(), &|c| c.problem.window_left = Some(70));
        add(base(), &|c| c.problem.softcap = Some(20.0));
        add(base(), &|c| {
            c.problem.alibi_slopes = Some(vec![0.5, 0.25, 0.125, 0.0625])
        });
        add(base(), &|c| {
            (c.problem.causal, c.problem.q_len) = (false, 4)
        });
    }
    cases
}

/// Runs the table over `backend`, calling `progress(done, of)` after each case; works for third parties' backends too.
pub fn check_backend(
    reference: &dyn DecodeAttention,
    backend: &dyn DecodeAttention,
    progress: &mut dyn FnMut(usize, usize),
) -> Report {
    let table = table();
    let mut report = Report::default();
    for case in &table {
        report.failures.extend(check_case(reference, backend, case));
        report.cases += 1;
        progress(report.cases, table.len());
    }
    report
}
