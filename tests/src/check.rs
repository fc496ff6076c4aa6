//! The claims, checked for one case and for a whole table.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use attn_core::{
    DecodeAttention, DecodeStep, Error, KvCache, KvFormat, KvSource, Scheme, Unsupported,
};

use crate::{
    case::{Build, Case, Inputs},
    oracle::{self, Queries},
    table::{Size, table},
};

/// What a run over a table found.
#[derive(Debug, Default)]
pub struct Report {
    /// Cases run, refused ones included.
    pub cases: usize,
    /// One text per failure: seed, case, first wrong index, both values with bits.
    pub failures: Vec<String>,
    /// One text per case for which the backend has no kernel and need not have one ([`Case::is_required`]).
    pub refusals: Vec<String>,
    /// The digest of all outputs of the cases that ran in the integer arithmetic, in the table's order.
    pub integer_digest: u64,
    /// The digest of all outputs of the other cases.
    pub float_digest: u64,
}

impl Report {
    /// The report over cases in the table's order, and what each came to.
    pub fn new<'a>(outcomes: impl Iterator<Item = (&'a Case, &'a Outcome)>) -> Self {
        let mut report = Report::default();
        let mut digests = [Vec::new(), Vec::new()];
        for (case, outcome) in outcomes {
            report.cases += 1;
            match outcome {
                Outcome::Passed(hash) => {
                    digests[usize::from(!is_in_integers(case))].extend([
                        case.seed as u32,
                        *hash as u32,
                        (hash >> 32) as u32,
                    ]);
                }
                Outcome::Failed(text) => report.failures.push(text.clone()),
                Outcome::Refused(text) => report.refusals.push(text.clone()),
            }
        }
        let [integer, float] = digests.map(|words| digest(words.into_iter()));
        (report.integer_digest, report.float_digest) = (integer, float);
        report
    }
}

/// What one case came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All claims hold; a digest of the outputs' bits.
    Passed(u64),
    /// One does not.
    Failed(String),
    /// The backend has no kernel for the case, which is not one of the required.
    Refused(String),
}

/// What decode may add to the errors of the cache and of the query's 8 bits, against the f64 oracle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Relative L2 error of all outputs.
    pub out: f64,
    /// Error of a log-sum-exp, relative to it or to 10 where that is more.
    pub lse: f64,
}

/// The bounds of a case.
///
/// *Integer*: a weight of one byte is off by at most a step, 1/255 to 1/204 of the tile's largest; V's scales are read within 2^(1/128), 0.54 %; errors of
/// many weights add like noise: at most 1.7e-2 in the table. The log-sum-exp sums weights before they are bytes: a score on the grid of 64ths errs by up to
/// 2^-7 in base 2, 5.4e-3 in natural units, which shows whole where one token dominates; f16 adds 2^-11, 4.9e-4, and scores their last bits: 6.5e-4 of 10.
///
/// With centres of K the score of the centre is on the grid, too, and errs by 2^-17 of the products of query and centre, which cancel with those of query and
/// key where scores are far smaller: 3e-3 of 10.
///
/// *Float on the CPU*: a dot product of D terms errs by √D·2^-24 of its terms, amplified by scores of some tens: 3e-5.
///
/// *Float elsewhere*: Q is exact in 16 bits, but a tensor core takes weights of 11 bits (f16) or 8 (bf16), each off by at most 2^-12 or 2^-9
/// of itself; twice that. Weights for V in integers may be bytes, as in the integer arithmetic.
///
/// *Integer that may use floats*: of a backend that uses none, results err as those of integers. Else queries and keys have 11 bits, which scores of some
/// tens amplify. The emulation in attn-cuda's tests has tighter bounds.
pub fn bounds(backend: &dyn DecodeAttention, case: &Case) -> Bounds {
    let (k, v) = (case.format.k, case.format.v);
    let bf16 = k == Scheme::Bf16 || v == Scheme::Bf16;
    if is_exact(backend, case) && !case.format.is_integer() {
        return Bounds {
            out: 3e-5,
            lse: 3e-5,
        };
    }
    let is_fast = case.problem.may_use_floats(case.format);
    let lse = match (k.is_integer(), bf16) {
        (true, _) if is_fast => 2e-3,
        (true, _) if case.format.is_integer() && case.centres => 3e-3,
        (true, _) if case.format.is_integer() => 6.5e-4,
        (true, _) => 1e-4,
        (false, false) => 5e-4,
        (false, true) => 4e-3,
    };
    let out = if v.is_integer() {
        2e-2
    } else if bf16 {
        4e-3
    } else {
        5e-4
    };
    Bounds { out, lse }
}

/// What the oracle's queries may count as: 8 bits where the backend multiplies integers. K in integers beside V in floats is multiplied by either
/// kind of queries, as suits a GPU; all rows of a case by the same.
fn queries(backend: &dyn DecodeAttention, case: &Case) -> &'static [Queries] {
    match (case.format.k.is_integer(), is_exact(backend, case)) {
        (true, true) if case.format.is_integer() => &[Queries::Rounded],
        (true, false) => &[Queries::Exact, Queries::Rounded],
        _ => &[Queries::Exact],
    }
}

/// Whether the arithmetic fixes every bit of a format's answers on a backend: in integers anywhere, in floats on the CPU.
#[must_use]
pub fn are_bits_specified(backend: &str, format: KvFormat) -> bool {
    format.is_integer() || backend == "cpu"
}

/// Whether every bit of a case's answer is specified.
fn is_exact(backend: &dyn DecodeAttention, case: &Case) -> bool {
    let name = backend.device().backend;
    let is_fast = name != "cpu" && case.problem.may_use_floats(case.format);
    are_bits_specified(name, case.format) && !is_fast
}

/// Whether every backend answers a case in the integer arithmetic.
fn is_in_integers(case: &Case) -> bool {
    case.format.is_integer() && !case.problem.may_use_floats(case.format)
}

/// Outputs and log-sum-exps.
type Rows = (Vec<f32>, Vec<f32>);

/// Decodes a case from a cache; outputs are poisoned first.
///
/// # Errors
/// The backend's.
pub fn decode(backend: &dyn DecodeAttention, case: &Case, cache: &KvCache) -> Result<Rows, Error> {
    decode_from(backend, case, KvSource::Cache(cache))
}

/// Decodes a case from wherever its K and V lie, into outputs filled with NaN.
///
/// # Errors
/// The backend's.
pub fn decode_from(
    backend: &dyn DecodeAttention,
    case: &Case,
    source: KvSource<'_>,
) -> Result<Rows, Error> {
    decode_rows(backend, case, &case.q(), source)
}

/// Decodes a case with queries of the caller's.
pub fn decode_rows(
    backend: &dyn DecodeAttention,
    case: &Case,
    q: &[f32],
    source: KvSource<'_>,
) -> Result<Rows, Error> {
    let plan = backend.plan(&case.problem, case.format)?;
    let mut out = vec![f32::NAN; case.problem.out_elements()];
    let mut lse = vec![f32::NAN; case.problem.rows()];
    let mut step = DecodeStep::new(&plan, q, source, &mut out)?.with_lse(&mut lse)?;
    backend.decode(&mut step)?;
    Ok((out, lse))
}

/// Where two results first differ in bits, as a text.
pub fn first_difference(what: &str, got: &[f32], want: &[f32]) -> Option<String> {
    if got.len() != want.len() {
        return Some(format!(
            "{what} has {} values, expected {}",
            got.len(),
            want.len()
        ));
    }
    let i = got
        .iter()
        .zip(want)
        .position(|(a, b)| a.to_bits() != b.to_bits())?;
    let (a, b) = (got[i], want[i]);
    Some(format!(
        "{what}[{i}] is {a:e} ({:#010x}), expected {b:e} ({:#010x})",
        a.to_bits(),
        b.to_bits()
    ))
}

fn rows_differ(what: &str, got: &Rows, want: &Rows) -> Option<String> {
    first_difference(&format!("{what}out"), &got.0, &want.0)
        .or_else(|| first_difference(&format!("{what}lse"), &got.1, &want.1))
}

/// Where the cached bytes of two caches first differ, as a text.
fn bytes_differ(got: &KvCache, want: &KvCache, sequences: usize) -> Result<Option<String>, Error> {
    for b in 0..sequences {
        let size = want.layout().page_bytes();
        let (got, want) = (got.image(b)?, want.image(b)?);
        if got.pages().len() != want.pages().len() {
            return Ok(Some(format!(
                "sequence {b} has {} pages, expected {}",
                got.pages().len() / size,
                want.pages().len() / size
            )));
        }
        let differs = got.centres().iter().zip(want.centres());
        if let Some(at) = { differs }.position(|(a, b)| a != b) {
            return Ok(Some(format!(
                "byte {at} of the centres of sequence {b} is {:#04x}, expected {:#04x}",
                got.centres()[at],
                want.centres()[at]
            )));
        }
        let pages = got.pages().chunks(size).zip(want.pages().chunks(size));
        for (page, (got, want)) in pages.enumerate() {
            if let Some(at) = got.iter().zip(want).position(|(a, b)| a != b) {
                return Ok(Some(format!(
                    "cache byte {at} of page {page} of sequence {b} is {:#04x}, expected {:#04x}",
                    got[at], want[at]
                )));
            }
        }
    }
    Ok(None)
}

/// Checks all claims for one case. A panic of the backend is a failure.
pub fn check_case(
    reference: &dyn DecodeAttention,
    backend: &dyn DecodeAttention,
    case: &Case,
) -> Outcome {
    let run = || claims(reference, backend, case);
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(Ok(digest))) => Outcome::Passed(digest),
        Ok(Ok(Err(text))) => Outcome::Failed(format!("{case}: {text}")),
        Ok(Err(Error::Unsupported(reason @ Unsupported::NoKernel { .. }))) => {
            if case.is_required() {
                Outcome::Failed(format!("{case}: required, but {reason}"))
            } else {
                Outcome::Refused(format!("{case}: {reason}"))
            }
        }
        Ok(Err(error)) => Outcome::Failed(format!("{case}: refused: {}", chain(&error))),
        Err(_) => Outcome::Failed(format!("{case}: panicked")),
    }
}

/// The claims in turn: the digest of the outputs, or the text of the first that fails.
fn claims(
    reference: &dyn DecodeAttention,
    backend: &dyn DecodeAttention,
    case: &Case,
) -> Result<Result<u64, String>, Error> {
    macro_rules! hold {
        ($found:expr) => {
            if let Some(text) = $found {
                return Ok(Err(text));
            }
        };
    }
    backend.supports(&case.problem, case.format)?;
    let want_cache = case.cache(reference, usize::MAX)?;
    let contiguous = case.is_view().then(|| case.contiguous());
    let view = contiguous.as_ref().map(|c| c.view(&case.problem));
    let view = view.transpose()?;
    let cache = case.built(backend)?;
    // A cache with dropped pages gives no copy of them.
    if case.build != Build::Dropped {
        hold!(bytes_differ(&cache, &want_cache, case.problem.batch())?);
    }
    if case.build == Build::Forked && !case.fork_keeps_sibling(backend)? {
        return Ok(Err("appending to the fork changed its sibling".to_owned()));
    }
    if case.inputs == Inputs::Extreme {
        return Ok(Ok(0));
    }

    let source = match &view {
        Some(view) => KvSource::View(view),
        None => KvSource::Cache(&cache),
    };
    let got = decode_from(backend, case, source)?;
    hold!(rows_differ(
        "second run's ",
        &decode_from(backend, case, source)?,
        &got
    ));
    if is_exact(backend, case) {
        let want = decode(reference, case, &want_cache)?;
        hold!(rows_differ("", &got, &want));
        if case.alone {
            hold!(alone_differs(backend, case, &got)?);
            if case.problem.scores.causal && case.format.is_integer() {
                hold!(in_pieces_differs(backend, case, &got)?);
            }
        }
    }
    hold!(against_oracle(backend, case, &want_cache, &got));
    let bits = got.0.iter().chain(&got.1).map(|x| x.to_bits());
    Ok(Ok(digest(bits)))
}

/// Where query tokens differ from themselves when they are appended and attended some at a time: one, a few, a piece of a prompt.
fn in_pieces_differs(
    backend: &dyn DecodeAttention,
    case: &Case,
    batch: &Rows,
) -> Result<Option<String>, Error> {
    let (heads, dim) = (case.problem.num_q_heads, case.problem.head_dim);
    let pieces = [1, 2, 40, 1, 16, 200, 7];
    for (b, tokens) in case.problem.query_ranges().enumerate() {
        let (kv, kv_len) = (case.kv(b), case.problem.kv_lens[b]);
        // Query tokens before the sequence see nothing however they are attended.
        let mut len = kv_len.saturating_sub(tokens.len());
        let mut at = tokens.end - (kv_len - len);
        let mut cache = backend.create_cache(&case.only(b).config())?;
        let [k, v] = case.tokens(&kv, 0..len);
        cache.append(0, k, v)?;
        for piece in pieces.into_iter().cycle() {
            if len == kv_len {
                break;
            }
            let next = (len + piece).min(kv_len);
            let [k, v] = case.tokens(&kv, len..next);
            cache.append(0, k, v)?;
            let mut step = case.only(b);
            step.problem.kv_lens = vec![next];
            step.problem.q_lens = vec![next - len];
            let rows = at * heads..(at + next - len) * heads;
            let q = &case.q()[rows.start * dim.k..rows.end * dim.k];
            let got = decode_rows(backend, &step, q, KvSource::Cache(&cache))?;
            let out = &batch.0[rows.start * dim.v..rows.end * dim.v];
            let want = (out.to_vec(), batch.1[rows].to_vec());
            let what = format!("tokens {len} to {next} of sequence {b}, {piece} at once: ");
            let found = rows_differ(&what, &got, &want);
            if found.is_some() {
                return Ok(found);
            }
            (at, len) = (at + next - len, next);
        }
    }
    Ok(None)
}

/// Where a sequence decoded alone differs from itself in the batch.
fn alone_differs(
    backend: &dyn DecodeAttention,
    case: &Case,
    batch: &Rows,
) -> Result<Option<String>, Error> {
    let (heads, dim) = (case.problem.num_q_heads, case.problem.head_dim.v);
    for (b, tokens) in case.problem.query_ranges().enumerate() {
        let rows = tokens.start * heads..tokens.end * heads;
        let one = case.only(b);
        let got = decode(backend, &one, &one.built(backend)?)?;
        let want = (
            batch.0[rows.start * dim..rows.end * dim].to_vec(),
            batch.1[rows].to_vec(),
        );
        let found = rows_differ(&format!("sequence {b} alone: "), &got, &want);
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// Where a result is further from the oracle than allowed, with every kind of queries that it may have.
fn against_oracle(
    backend: &dyn DecodeAttention,
    case: &Case,
    cache: &KvCache,
    (out, lse): &Rows,
) -> Option<String> {
    if let Some(i) = out.iter().position(|x| !x.is_finite()) {
        return Some(format!("out[{i}] is {}", out[i]));
    }
    // Scores of 1e30: which token wins is a matter of the last bit.
    if case.inputs == Inputs::Huge {
        return None;
    }
    let allowed = bounds(backend, case);
    let mut found = queries(backend, case).iter().map(|queries| {
        let want = oracle::attend(&case.problem, cache, &case.q(), *queries);
        exceeds(allowed, (out, lse), &want)
    });
    // The first kind's text, if no kind is within the bounds.
    let first = found.next().flatten()?;
    found.all(|text| text.is_some()).then_some(first)
}

/// Where a result is further from expected outputs and log-sum-exps than allowed.
pub fn exceeds(
    allowed: Bounds,
    (out, lse): (&[f32], &[f32]),
    (want, want_lse): &(Vec<f64>, Vec<f64>),
) -> Option<String> {
    let error: f64 = out
        .iter()
        .zip(want)
        .map(|(a, b)| (f64::from(*a) - b).powi(2))
        .sum();
    let norm: f64 = want.iter().map(|b| b * b).sum();
    // Outputs below the smallest normal number are flushed.
    let relative = error.sqrt() / norm.sqrt().max(1e-30);
    // A comparison that NaN fails.
    if !(relative <= allowed.out) {
        return Some(format!(
            "relative L2 error {relative:e} exceeds {:e}",
            allowed.out
        ));
    }
    let wrong = lse.iter().zip(want_lse).position(|(a, b)| {
        let (a, close) = (f64::from(*a), allowed.lse * b.abs().max(10.0));
        a != *b && !((a - b).abs() <= close)
    })?;
    Some(format!(
        "lse[{wrong}] is {:e}, expected {:e}",
        lse[wrong], want_lse[wrong]
    ))
}

/// The digest of outputs' bits: FNV-1a over 32-bit words.
pub fn digest(words: impl Iterator<Item = u32>) -> u64 {
    words
        .flat_map(u32::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        })
}

/// Runs the cases that the environment asks for over `backend`, calling `progress(done, of)` after each; works for third parties' backends too.
///
/// See [`cases_from_env`]; where `ATTN_TABLE` is unset, an emulated device runs the reduced table.
///
/// # Panics
/// If the environment asks for what there is not.
pub fn check_backend(
    reference: &dyn DecodeAttention,
    backend: &dyn DecodeAttention,
    progress: &mut dyn FnMut(usize, usize),
) -> Report {
    let (cases, threads) = cases_from_env(backend).unwrap_or_else(|error| panic!("{error}"));
    check_table(reference, backend, &cases, threads, progress)
}

/// The cases of `ATTN_TABLE` (`full`, `reduced`) for a backend, of which `ATTN_CASE=17` keeps the one of that seed, and how many to run at a time.
///
/// # Errors
/// [`Error::Parameter`] for another table, or a seed that it does not have.
pub fn cases_from_env(backend: &dyn DecodeAttention) -> Result<(Vec<Case>, usize), Error> {
    let asked = Size::from_env()?;
    let size = if backend.is_software() && std::env::var_os("ATTN_TABLE").is_none() {
        Size::Reduced
    } else {
        asked
    };
    let threads = match size {
        Size::Full => thread::available_parallelism().map_or(1, usize::from),
        Size::Reduced => 1,
    };
    let mut cases = table(size);
    if let Ok(seed) = std::env::var("ATTN_CASE") {
        cases.retain(|case| case.seed.to_string() == seed);
        if cases.is_empty() {
            return Err(Error::parameter(
                "ATTN_CASE",
                &seed,
                "the seed of a case of the table",
            ));
        }
    }
    Ok((cases, threads))
}

/// Runs some cases over `backend`, `threads` at a time: backends are `Sync`, and this holds them to it.
///
/// # Panics
/// If `progress` does.
pub fn check_table(
    reference: &dyn DecodeAttention,
    backend: &dyn DecodeAttention,
    cases: &[Case],
    threads: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Report {
    let next = AtomicUsize::new(0);
    let (send, receive) = mpsc::channel();
    let mut outcomes: Vec<Option<Outcome>> = vec![None; cases.len()];
    thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            let (next, send) = (&next, send.clone());
            scope.spawn(move || {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(i) else { break };
                    let outcome = check_case(reference, backend, case);
                    if send.send((i, outcome)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(send);
        for (done, (i, outcome)) in receive.into_iter().enumerate() {
            outcomes[i] = Some(outcome);
            progress(done + 1, cases.len());
        }
    });
    Report::new(cases.iter().zip(outcomes.iter().flatten()))
}

/// An error and its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
