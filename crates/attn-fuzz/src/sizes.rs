//! Fuzzes numbers of 2^31, 2^53, 2^63 and their neighbours wherever a caller can give one: typed errors, and neither a panic, a
//! wrapped product, nor an allocation beyond the child's memory.

use arbitrary::Unstructured;
use attn_core::{
    Append, AttnState, CacheConfig, DecodeAttention, DecodeStep, Error, HeadDim, Heads, Int8Scale,
    KvFormat, KvSource, KvView, Problem, Rows, Scheme, SpanStates, StridedRows, convert::rows,
};
use attn_cpu::Reference;

use crate::{
    draw::Draw,
    hold,
    pages::{self, Shape},
};

/// The check of a cache's config under test.
pub type Check = fn(&CacheConfig) -> Result<(), Error>;

/// Draws numbers; see the module.
///
/// # Errors
/// What does not hold.
pub fn fuzz(u: &mut Unstructured<'_>) -> Result<(), String> {
    fuzz_check(u, CacheConfig::check)
}

/// Fuzzes another check in place of the library's.
///
/// # Errors
/// What does not hold.
pub fn fuzz_check(u: &mut Unstructured<'_>, check: Check) -> Result<(), String> {
    let mut draw = Draw(u);
    match draw.range(0..=6) {
        0 | 1 => problem(&mut draw),
        2 | 3 => config(&mut draw, check),
        4 => cache(&mut draw),
        5 => view(&mut draw),
        _ => rest(&mut draw),
    }
}

/// An ordinary number, or an extreme one.
fn either(draw: &mut Draw<'_, '_>, ordinary: &[usize]) -> usize {
    if draw.once_in(5) {
        draw.size()
    } else {
        draw.pick(ordinary)
    }
}

/// Elements of K and of V of a head, of which either may be an extreme number.
fn dims(draw: &mut Draw<'_, '_>) -> HeadDim {
    let HeadDim { k, v } = draw.head_dim();
    if draw.once_in(3) {
        return HeadDim {
            k: either(draw, &[k]),
            v: either(draw, &[v]),
        };
    }
    HeadDim { k, v }
}

fn drawn_problem(draw: &mut Draw<'_, '_>) -> Problem {
    let kv = either(draw, &[1, 2, 8]);
    let heads = if draw.once_in(4) {
        draw.size()
    } else {
        kv.wrapping_mul(draw.range(1..=140))
    };
    let dim = dims(draw);
    let lens: Vec<usize> = (0..draw.range(0..=4))
        .map(|_| either(draw, &[0, 1, 64, 1 << 20]))
        .collect();
    let mut problem = Problem::new(Heads::new(heads, kv, dim), lens);
    problem.q_lens = vec![either(draw, &[0, 1, 2, 16, 1 << 20]); problem.batch()];
    problem.scores.causal = draw.once_in(2);
    problem.scores.window_left = draw.once_in(2).then(|| draw.size());
    problem.scores.chunk = draw.once_in(4).then(|| draw.size());
    if draw.once_in(4) {
        problem.scores.softcap = Some(draw.float());
    }
    if draw.once_in(4) {
        problem.scores.softmax_scale = Some(draw.float());
    }
    if draw.once_in(4) {
        let slopes = if draw.once_in(3) {
            draw.range(0..=5)
        } else {
            heads.min(1 << 16)
        };
        problem.scores.alibi_slopes = Some(vec![draw.float(); slopes]);
    }
    if draw.once_in(4) {
        let sinks = if draw.once_in(3) {
            draw.range(0..=5)
        } else {
            heads.min(1 << 16)
        };
        problem.scores.sinks = Some(vec![draw.float(); sinks]);
    }
    problem
}

/// Rows of the result, saturating in 128 bits.
fn rows_of(p: &Problem) -> u128 {
    let rows: u128 = p.q_lens.iter().map(|len| *len as u128).sum();
    rows.saturating_mul(p.num_q_heads as u128)
}

/// Elements of the queries and of the result, saturating in 128 bits.
fn elements(p: &Problem) -> [u128; 2] {
    [p.head_dim.k, p.head_dim.v].map(|dim| rows_of(p).saturating_mul(dim as u128))
}

/// What the documentation of `Problem` allows.
fn problem_can_be(p: &Problem) -> bool {
    let per_kv = p.num_q_heads.checked_div(p.num_kv_heads).unwrap_or(0);
    let fits = |elements: u128| elements.saturating_mul(4) <= isize::MAX as u128;
    let slope = |s: &f32| *s == 0.0 || (1e-20..=1e3).contains(&s.abs());
    let sink = |s: &f32| (-1e6..=1e6).contains(s);
    pages::HEAD_DIMS.contains(&p.head_dim.k)
        && pages::HEAD_DIMS.contains(&p.head_dim.v)
        && (1..=65536).contains(&p.num_kv_heads)
        && (1..=128).contains(&per_kv)
        && p.num_q_heads.is_multiple_of(p.num_kv_heads)
        && p.q_lens.iter().all(|len| *len <= 1 << 20)
        && p.kv_lens.iter().all(|len| *len <= 1 << 20)
        && elements(p).into_iter().all(fits)
        && (1e-15..=1e15).contains(&p.score_scale())
        && p.scores
            .chunk
            .is_none_or(|chunk| chunk > 0 && p.scores.causal)
        && p.scores
            .softcap
            .is_none_or(|cap| (1e-3..=1e3).contains(&cap))
        && p.scores
            .alibi_slopes
            .as_ref()
            .is_none_or(|slopes| slopes.len() == p.num_q_heads && slopes.iter().all(slope))
        && p.scores
            .sinks
            .as_ref()
            .is_none_or(|sinks| sinks.len() == p.num_q_heads && sinks.iter().all(sink))
}

fn problem(draw: &mut Draw<'_, '_>) -> Result<(), String> {
    let problem = drawn_problem(draw);
    let can_be = problem_can_be(&problem);
    let checked = problem.check();
    hold!(checked.is_ok() == can_be, "{checked:?} for {problem:?}");
    let (rows, _) = (problem.rows(), problem.heads_per_kv());
    let exact = rows_of(&problem);
    hold!(
        rows as u128 == exact.min(usize::MAX as u128),
        "{rows} rows of {problem:?}"
    );
    for b in 0..problem.kv_lens.len() {
        for i in [0, 1, 15, draw.size()] {
            let seen = problem.visible(b, i);
            if can_be && i < problem.q_lens[b] {
                let want = visible(&problem, b, i);
                hold!(
                    seen == want || (seen.is_empty() && want.is_empty()),
                    "query token {i} of {b} sees {seen:?}, not {want:?}: {problem:?}"
                );
            }
        }
    }
    let format = draw.format();
    let Ok(plan) = Reference::new().plan(&problem, format) else {
        return Ok(());
    };
    hold!(can_be, "{problem:?} is planned");
    let config = CacheConfig::builder(format, Heads::new(1, 1, 64))
        .unit_tensor_scales()
        .sequences(1)
        .max_len(16)
        .build();
    let Ok(cache) = Reference::new().create_cache(&config) else {
        return Ok(());
    };
    let mut given = [draw.range(0..=200); 2];
    if draw.once_in(2) {
        given[1] = draw.range(0..=200);
    }
    let rows = draw.range(0..=8);
    let (q, mut out, mut lse) = (vec![1.0; given[0]], vec![0.0; given[1]], vec![0.0; rows]);
    let step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)
        .and_then(|step| step.with_lse(&mut lse));
    let fits = exact == rows as u128 && elements(&problem) == given.map(|n| n as u128);
    hold!(
        fits || step.is_err(),
        "{given:?} elements, {rows} rows for {problem:?}"
    );
    Ok(())
}

/// The tokens that a query token sees, in 128 bits.
fn visible(p: &Problem, b: usize, i: usize) -> std::ops::Range<usize> {
    let (len, i) = (p.kv_lens[b] as i128, i as i128);
    let position = len - p.q_lens[b] as i128 + i;
    let end = if p.scores.causal {
        (position + 1).clamp(0, len)
    } else {
        len
    };
    let of_window = p.scores.window_left.map_or(0, |w| position - w as i128);
    let of_chunk = p.scores.chunk.map_or(0, |chunk| match position {
        0.. => position - position % chunk as i128,
        _ => 0,
    });
    let start = of_window.max(of_chunk).clamp(0, end);
    start as usize..end as usize
}

fn drawn_config(draw: &mut Draw<'_, '_>) -> CacheConfig {
    let heads = either(draw, &[1, 2, 8]);
    let mut config =
        CacheConfig::builder(draw.cache_format(), Heads::new(heads, heads, dims(draw)))
            .unit_tensor_scales()
            .sequences(either(draw, &[0, 1, 3]))
            .max_len(either(draw, &[0, 1, 100, 4096]))
            .build();
    if draw.once_in(2) {
        config.page_size = either(draw, &[16, 32, 64, 128]);
    }
    if draw.once_in(2) {
        config.num_pages = either(draw, &[0, 1, 7]);
    }
    if draw.once_in(6) {
        config.num_q_heads = either(draw, &[0, 1, 16, 127, 128, 129, 1024, usize::MAX]);
    }
    if draw.once_in(6) {
        let scale = draw.float();
        config.k_tensor_scales.push(scale);
    }
    if draw.once_in(12) {
        config.format.v = draw.scheme();
    }
    if draw.once_in(12) {
        config.format.k = Scheme::Int4(draw.bits() as u8);
    }
    config
}

/// What FORMATS.md and the documentation of `CacheConfig` allow.
fn config_can_be(c: &CacheConfig) -> bool {
    let scales = |scheme: Scheme, scales: &[f32]| {
        let has = matches!(scheme, Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor));
        scales.len() == if has { c.num_kv_heads } else { 0 }
            && scales.iter().all(|s| (1e-15..=1e15).contains(s))
    };
    let page = || c.num_kv_heads as u128 * pages::run_bytes(&shape(c)) as u128;
    pages::is_defined(c.format, c.head_dim)
        && [16, 32, 64, 128].contains(&c.page_size)
        && (1..=65536).contains(&c.num_kv_heads)
        && (1..=128).contains(&(c.num_q_heads / c.num_kv_heads))
        && c.num_q_heads.is_multiple_of(c.num_kv_heads)
        && page() <= i32::MAX as u128
        && (!c.centres || pages::can_have_centres(c.format))
        && c.num_pages <= u32::MAX as usize
        && c.num_sequences <= 1 << 24
        && c.max_len <= 1 << 20
        && c.num_pages as u128 * page() <= isize::MAX as u128
        && scales(c.format.k, &c.k_tensor_scales)
        && scales(c.format.v, &c.v_tensor_scales)
        && (!c.format.latents || c.k_tensor_scales == c.v_tensor_scales)
}

fn shape(c: &CacheConfig) -> Shape {
    Shape {
        format: c.format,
        head_dim: c.head_dim,
        page_size: c.page_size,
        heads: c.num_kv_heads,
    }
}

fn config(draw: &mut Draw<'_, '_>, check: Check) -> Result<(), String> {
    let config = drawn_config(draw);
    let (tokens, size) = (draw.size(), config.page_size.max(1));
    let counts = pages::page_counts(config.format, size, tokens);
    let (needed, given) = (counts.map(|n| n as u128), config.pages_for(tokens));
    // Pages of another size have no number, but no panic either.
    hold!(
        ![16, 32, 64, 128].contains(&size)
            || given as u128 == needed.iter().sum::<u128>().min(usize::MAX as u128),
        "{given} pages, not {needed:?}, for {tokens} tokens of {config:?}"
    );
    let _ = (config.layout(), config.pool_bytes());
    let (can_be, checked) = (config_can_be(&config), check(&config));
    hold!(checked.is_ok() == can_be, "{checked:?} for {config:?}");
    match Reference::new().create_cache(&config) {
        Ok(cache) => {
            hold!(can_be, "a cache of {config:?} is made");
            let free = cache.free_pages();
            hold!(free == config.num_pages, "{free} free pages of {config:?}");
        }
        // More than a gigabyte was asked for.
        Err(error @ Error::OutOfMemory { .. }) => {
            let pool = config.num_pages as u128 * pages::run_bytes(&shape(&config)) as u128;
            let centres = 4 * config.num_kv_heads as u128 * config.head_dim.k as u128;
            let of_sequence = 48 + if config.centres { centres } else { 0 };
            let bytes =
                pool * config.num_kv_heads as u128 + config.num_sequences as u128 * of_sequence;
            hold!(bytes > 1 << 29, "{config:?} is refused: {error}");
        }
        Err(error) => hold!(!can_be, "a cache of {config:?} is refused: {error}"),
    }
    Ok(())
}

/// Extreme numbers into the calls of a small cache: none changes it.
fn cache(draw: &mut Draw<'_, '_>) -> Result<(), String> {
    let dim = draw.head_dim();
    let config = CacheConfig::builder(draw.format(), Heads::new(1, 1, dim))
        .unit_tensor_scales()
        .centres(false)
        .sequences(2)
        .max_len(200)
        .build();
    let Ok(mut cache) = Reference::new().create_cache(&config) else {
        return Ok(());
    };
    cache
        .append(0, &vec![1.0; dim.k * 3], &vec![1.0; dim.v * 3])
        .map_err(|e| e.to_string())?;
    let before = (cache.table().clone(), cache.free_pages());
    for _ in 0..4 {
        let (s, n) = (draw.size(), draw.size());
        let done = match draw.range(0..=6) {
            0 => cache.append(s.max(2), &vec![0.0; dim.k], &vec![0.0; dim.v]),
            1 => cache.append_with(
                &[Append {
                    sequence: draw.range(0..=1),
                    tokens: n.max(1000),
                }],
                |_, _| Ok(()),
            ),
            2 => cache.append_with(
                &[
                    Append {
                        sequence: 0,
                        tokens: n.max(300),
                    },
                    Append {
                        sequence: 1,
                        tokens: draw.size().max(300),
                    },
                ],
                |_, _| Ok(()),
            ),
            3 => cache.fork(draw.range(0..=1), s.max(2)),
            4 => cache.free_sequence(s.max(2)),
            5 => cache.restore_pages(1, n.max(1), &[]),
            _ => cache.write_page((n as u32).max(64), &[]),
        };
        hold!(
            done.is_err(),
            "{s} or {n} is taken by a cache of 2 sequences"
        );
        let after = (cache.table().clone(), cache.free_pages());
        hold!(before == after, "{s} or {n} changed the cache");
        hold!(s < 2 || cache.read_back(s).is_err(), "sequence {s} is read");
    }
    Ok(())
}

/// Extreme strides and sizes into views: a view that is taken reaches every token.
fn view(draw: &mut Draw<'_, '_>) -> Result<(), String> {
    let lens: Vec<usize> = (0..draw.range(0..=3)).map(|_| draw.range(0..=5)).collect();
    let dim = HeadDim::from(draw.pick(&[(64, 64), (64, 80), (80, 64), (64, 128), (128, 64)]));
    let mut problem = Problem::new(Heads::new(2, 2, dim), lens);
    if draw.once_in(3) {
        problem = drawn_problem(draw);
    }
    let (codes, scales) = (
        vec![0u8; draw.range(0..=5000)],
        vec![0u16; draw.range(0..=99)],
    );
    let mut side = || {
        let [heads, capacity, row, groups] = [(); 4].map(|()| either(draw, &[1, 2, 5, 64, 128]));
        match draw.range(0..=2) {
            0 => StridedRows::bnsh(&codes, &scales, heads, capacity, row, groups),
            1 => StridedRows::bsnh(&codes, &scales, heads, capacity, row, groups),
            _ => StridedRows {
                codes: &codes,
                code_strides: [draw.size(), draw.size(), draw.size()],
                scales: &scales,
                scale_strides: [draw.size(), draw.size(), draw.size()],
            },
        }
    };
    let (k, v) = (side(), side());
    let format = KvFormat::same(Scheme::Int8(Int8Scale::Token));
    if let Ok(view) = KvView::new(&problem, format, k, v, [&[], &[]]) {
        hold!(problem_can_be(&problem), "{problem:?} has a view");
        if problem.rows() < 1000 {
            let q = vec![1.0; problem.rows() * problem.head_dim.k];
            let kv = KvSource::View(&view);
            let rows = crate::backends::decode(&Reference::new(), &problem, format, &q, kv);
            let rows = rows.map_err(|e| e.to_string())?;
            hold!(
                rows[0].iter().all(|x| *x == 0.0),
                "zeros decode to {:?}",
                rows[0]
            );
        }
    }
    Ok(())
}

/// States, names and rows.
fn rest(draw: &mut Draw<'_, '_>) -> Result<(), String> {
    let (rows, dim) = (draw.size(), draw.size());
    if let Ok(states) = SpanStates::new(rows, dim, Vec::new(), Vec::new()) {
        hold!(states.spans() == 0, "{rows} rows of {dim} have a span");
    }
    if let Ok(none) = Rows::strided(&[0.0f32; 4], [0, rows, dim], [1, 1]) {
        let wide = none.to_wide().map_err(|e| e.to_string())?;
        hold!(wide.is_empty(), "no token of {rows} heads of {dim} is some");
    }
    if let Ok(state) = AttnState::empty(rows, dim) {
        let exact = rows as u128 * dim as u128;
        hold!(
            state.lse().len() == rows && state.out().len() as u128 == exact && dim > 0,
            "{rows} rows of {dim} have {} outputs",
            state.out().len()
        );
    }
    let text = String::from_utf8_lossy(&draw.bits().to_le_bytes()).into_owned();
    let names = [
        "int4-g",
        "int4-r",
        "int4-r8-w",
        "int4-w",
        "int8/",
        "/",
        "int4/int4",
        "",
        "bf16/fp8",
        "int4-g256",
        "fp8/fp8/fp8",
    ];
    for name in [
        draw.pick(&names).to_owned() + &text,
        draw.pick(&names).to_owned(),
    ] {
        if let Ok(format) = name.parse::<KvFormat>() {
            let back = format.to_string().parse::<KvFormat>();
            hold!(back.is_ok_and(|b| b == format), "{name} is {format}");
        }
    }
    quantized_rows(draw)
}

/// Other engines' quantizers on rows of any length: refused, or within their step.
fn quantized_rows(draw: &mut Draw<'_, '_>) -> Result<(), String> {
    let len = draw.pick(&[
        0, 1, 31, 32, 33, 63, 64, 80, 96, 128, 160, 256, 320, 512, 576, 640,
    ]);
    let size = draw.pick(&[1.0, 1e-30, 1e4, 3e38]);
    let mut x = draw.noise(len, size);
    if len > 0 && draw.once_in(3) {
        let at = draw.range(0..=len - 1);
        x[at] = draw.float();
    }
    let given = draw.range(0..=2) as isize - 1;
    let finite = x.iter().all(|x| x.is_finite());
    for (bytes, name) in [(34, "q8_0"), (18, "q4_0")] {
        let needed = len / 32 * bytes;
        let mut row = vec![0; needed.saturating_add_signed(given)];
        let done = match name {
            "q8_0" => rows::q8_0_row(&x, &mut row),
            _ => rows::q4_0_row(&x, &mut row),
        };
        if done.is_ok() {
            let fits = row.len() == needed && len.is_multiple_of(32) && len > 0;
            hold!(
                fits && finite,
                "{name} takes {len} elements, {} bytes",
                row.len()
            );
        }
    }
    let groups = draw.pick(&[0, 1, 2, 3, 4, 8, 255]);
    let needed = 4 * usize::from(groups) + len / 2;
    let mut row = vec![0; needed.saturating_add_signed(given)];
    if rows::fbgemm_int4_row(&x, groups, &mut row).is_ok() {
        let fits = row.len() == needed
            && pages::HEAD_DIMS.contains(&len)
            && pages::can_be(Scheme::Int4(groups), len);
        hold!(
            fits && finite,
            "int4 of {groups} groups takes {len} elements"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finds(check: Check) -> bool {
        crate::finds(3000, fuzz, |u| fuzz_check(u, check))
    }

    #[test]
    fn a_product_that_wraps_is_found() {
        assert!(finds(|config| {
            let mut wrapped = config.clone();
            wrapped.num_pages &= u32::MAX as usize;
            wrapped.check()
        }));
    }

    #[test]
    fn a_refused_ordinary_config_is_found() {
        assert!(finds(|config| {
            let mut spoiled = config.clone();
            spoiled.page_size += usize::from(config.num_kv_heads == 2);
            spoiled.check()
        }));
    }
}
