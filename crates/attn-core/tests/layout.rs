//! Pages: every code and parameter has a place of its own, what a page leaves unwritten is known, and so is what no quantizer writes.

use std::ops::Range;

use attn_core::{
    Error, Int4Scale, KvFormat, PageLayout, Scheme,
    layout::{CodeAddr, k_code, load_param, store_param, v_code},
    quant::Param,
};
use half::f16;

const CHANNEL: Scheme = Scheme::Int4(Int4Scale::Channel);

/// Layouts of every scheme on each side, beside itself and beside another.
fn layouts() -> Vec<PageLayout> {
    let mut all = Vec::new();
    for (i, k) in Scheme::ALL.into_iter().enumerate() {
        for v in [k, Scheme::ALL[(i + 3) % Scheme::ALL.len()], Scheme::Bf16] {
            for (dim, size) in [(64, 16), (64, 64), (80, 32), (128, 128)] {
                all.extend(PageLayout::new(KvFormat { k, v }, dim, size, 2));
            }
        }
    }
    all
}

type Address = fn(usize, usize, usize, usize, usize) -> CodeAddr;
/// One side of a run: its scheme, codes, parameters, addresses.
type Side = (Scheme, Range<usize>, Range<usize>, Address);

fn sides(layout: &PageLayout) -> [Side; 2] {
    let format = layout.format();
    [
        (format.k, layout.k_codes(), layout.k_params(), k_code),
        (format.v, layout.v_codes(), layout.v_params(), v_code),
    ]
}

/// Groups of a token's row that have parameters; dims of a page for `Int4 Channel`.
fn groups(scheme: Scheme, dim: usize) -> usize {
    match scheme {
        CHANNEL => dim,
        _ if scheme.has_row_scales() => scheme.groups(dim),
        _ => 0,
    }
}

#[test]
fn parts_follow_each_other_and_runs_fill_the_pool() {
    let mut seen = 0;
    for layout in layouts() {
        let (dim, size) = (layout.head_dim(), layout.page_size());
        let mut at = 0;
        for (scheme, codes, params, _) in sides(&layout) {
            assert_eq!(codes, at..at + size * dim * scheme.code_bits() / 8);
            let each = match scheme {
                Scheme::Int4(_) => 4,
                _ => 2,
            };
            let rows = if scheme == CHANNEL { 1 } else { size };
            assert_eq!(
                params,
                codes.end..codes.end + rows * groups(scheme, dim) * each
            );
            at = params.end;
        }
        assert_eq!((layout.run_bytes(), layout.page_bytes()), (at, 2 * at));
        assert_eq!(layout.bytes_per_token(), at as f64 / size as f64);
        assert_eq!(layout.run(0, 0), 0..at);
        assert_eq!(layout.run(0, 1), at..2 * at);
        assert_eq!(layout.run(3, 1), 7 * at..8 * at);
        assert_eq!(layout.has_tail_page(), layout.format().k == CHANNEL);
        for (tokens, home) in [(0, 0), (1, 1), (size - 1, 1), (size, 1), (size + 1, 2)] {
            let tail = layout.has_tail_page() && tokens % size != 0;
            assert_eq!(layout.pages_of(tokens), home + usize::from(tail));
        }
        seen += 1;
    }
    assert!(seen > 80, "{seen}");
}

#[test]
fn every_code_has_bits_of_its_own() {
    for layout in layouts() {
        let (dim, size) = (layout.head_dim(), layout.page_size());
        for (scheme, codes, _, address) in sides(&layout) {
            let (bits, mut used) = (scheme.code_bits(), vec![0u8; codes.len()]);
            for (t, d) in (0..size).flat_map(|t| (0..dim).map(move |d| (t, d))) {
                let at = address(bits, dim, size, t, d);
                assert!(at.shift == 0 || bits == 4 && at.shift == 4);
                let mask = if bits == 4 { 0xf << at.shift } else { 0xff };
                for i in 0..bits.div_ceil(8) {
                    assert_eq!(used[at.byte + i] & mask, 0, "{scheme} ({t}, {d})");
                    used[at.byte + i] |= mask;
                }
            }
            assert!(used.iter().all(|byte| *byte == 0xff), "{scheme}");
        }
    }
}

#[test]
fn what_is_stored_is_loaded() {
    for layout in layouts() {
        let (dim, size) = (layout.head_dim(), layout.page_size());
        for (scheme, codes, params, address) in sides(&layout) {
            let bits = scheme.code_bits();
            let mut run = vec![0xa5; layout.run_bytes()];
            let code = |t: usize, d: usize| ((t * 257 + d * 31) & ((1 << bits) - 1)) as u16;
            // A low nibble is written before the high one of its byte: by token, then by dim.
            for (t, d) in (0..size).flat_map(|t| (0..dim).map(move |d| (t, d))) {
                let at = address(bits, dim, size, t, d);
                at.store(&mut run[codes.clone()], bits, code(t, d));
            }
            for (t, d) in (0..size).flat_map(|t| (0..dim).map(move |d| (t, d))) {
                let at = address(bits, dim, size, t, d);
                assert_eq!(at.load(&run[codes.clone()], bits), code(t, d));
            }
            let param = |t: usize, g: usize| Param {
                scale: f16::from_bits((t * 64 + g) as u16),
                shift: match scheme {
                    Scheme::Int4(_) => f16::from_bits((0x4000 + t * 64 + g) as u16),
                    _ => f16::ZERO,
                },
            };
            let (groups, rows) = (
                groups(scheme, dim),
                if scheme == CHANNEL { 0 } else { size },
            );
            for (t, g) in (0..rows).flat_map(|t| (0..groups).map(move |g| (t, g))) {
                store_param(&mut run[params.clone()], scheme, size, t, g, param(t, g));
            }
            for (t, g) in (0..rows).flat_map(|t| (0..groups).map(move |g| (t, g))) {
                let found = load_param(&run[params.clone()], scheme, size, t, g);
                assert_eq!(found, param(t, g));
            }
            // Nothing else was touched.
            let touched = codes.start..if rows * groups > 0 {
                params.end
            } else {
                codes.end
            };
            for (i, byte) in run.iter().enumerate() {
                assert!(touched.contains(&i) || *byte == 0xa5, "{scheme}: byte {i}");
            }
        }
    }
}

#[test]
fn a_canonical_page_keeps_what_its_tokens_wrote_and_nothing_else() {
    for layout in layouts() {
        let (dim, size) = (layout.head_dim(), layout.page_size());
        for (tokens, k_open) in [(0, false), (1, false), (size - 3, true), (size, false)] {
            let mut page = vec![0xff; layout.page_bytes()];
            layout.canonical(&mut page, tokens, k_open).unwrap();
            for head in 0..2 {
                let run = &page[layout.run(0, head)];
                for (side, (scheme, codes, params, address)) in
                    sides(&layout).into_iter().enumerate()
                {
                    let (bits, whole) = (scheme.code_bits(), 0xffffu16);
                    let open = k_open && side == 0;
                    for (t, d) in (0..size).flat_map(|t| (0..dim).map(move |d| (t, d))) {
                        let at = address(bits, dim, size, t, d);
                        let kept = t < tokens && !open;
                        let expected = if kept { whole >> (16 - bits) } else { 0 };
                        assert_eq!(at.load(&run[codes.clone()], bits), expected);
                    }
                    for pair in params.clone().step_by(2).enumerate() {
                        let (i, at) = pair;
                        let each = if matches!(scheme, Scheme::Int4(_)) {
                            2
                        } else {
                            1
                        };
                        // Parameters of a page of channels belong to no token.
                        let kept = (scheme == CHANNEL || i / each % size < tokens) && !open;
                        let expected = if kept { [0xff; 2] } else { [0; 2] };
                        assert_eq!(run[at..at + 2], expected, "{scheme}: parameter {i}");
                    }
                }
            }
        }
        let mut short = vec![0; layout.page_bytes() - 1];
        assert!(matches!(
            layout.canonical(&mut short, 1, false),
            Err(Error::Length { what: "page", .. })
        ));
        let mut page = vec![0; layout.page_bytes()];
        assert!(layout.canonical(&mut page, size, false).is_ok());
        assert!(layout.canonical(&mut page, size + 1, false).is_err());
    }
}

/// What no quantizer writes into the last place of token t of a side; none for schemes that hold nothing but numbers.
fn spoil(layout: &PageLayout, side: usize, page: &mut [u8], head: usize, t: usize) -> bool {
    let (dim, size) = (layout.head_dim(), layout.page_size());
    let (scheme, codes, params, address) = sides(layout)[side].clone();
    let run = &mut page[layout.run(0, head)];
    let groups = groups(scheme, dim);
    if groups > 0 {
        let bad = Param {
            scale: f16::NAN,
            shift: f16::ZERO,
        };
        let (t, size, g) = if scheme == CHANNEL {
            (dim - 1, 0, 0)
        } else {
            (t, size, groups - 1)
        };
        store_param(&mut run[params], scheme, size, t, g, bad);
        return true;
    }
    let code = match scheme {
        Scheme::F16 => 0x7e00,
        Scheme::Bf16 => 0x7fc0,
        Scheme::Fp8E4m3 => 0x7f,
        _ => return false,
    };
    let at = address(scheme.code_bits(), dim, size, t, dim - 1);
    at.store(&mut run[codes], scheme.code_bits(), code);
    true
}

#[test]
fn bytes_that_no_quantizer_writes_are_found_where_tokens_are_and_only_there() {
    for layout in layouts() {
        let size = layout.page_size();
        // Two home pages, the second open; and the tail page, where there is one.
        let tokens = size + 3;
        let mut pages = vec![vec![0; layout.page_bytes()]; layout.pages_of(tokens)];
        if layout.has_tail_page() {
            pages[2] = vec![0; layout.tail_k().page_bytes()];
        }
        layout.check_pages(&pages, tokens).unwrap();
        let open = layout.has_tail_page();
        for (i, side) in (0..pages.len()).flat_map(|i| [(i, 0), (i, 1)]) {
            let stored = if i < 2 { layout } else { layout.tail_k() };
            for (head, t) in [(0, 0), (1, 2), (0, 3), (1, size - 1)] {
                let mut pages = pages.clone();
                if !spoil(&stored, side, &mut pages[i], head, t) {
                    continue;
                }
                let written = match (i, side) {
                    (0, _) => true,
                    // K of the open page lies in the tail page, and nothing else does.
                    (1, 0) if open => false,
                    (2, 1) => false,
                    _ => t < 3,
                };
                let found = layout.check_pages(&pages, tokens);
                match (written, found) {
                    (false, Ok(())) => (),
                    (true, Err(Error::BadBytes { offset, scheme, .. })) => {
                        assert_eq!(offset, stored.run(0, head).start);
                        let format = stored.format();
                        assert_eq!(scheme, [format.k, format.v][side]);
                    }
                    (_, found) => {
                        panic!(
                            "{} page {i} side {side} token {t}: {found:?}",
                            layout.format()
                        )
                    }
                }
            }
        }
    }
}

#[test]
fn pages_of_other_numbers_or_lengths_are_refused() {
    let layout = PageLayout::new(KvFormat::INT4, 64, 64, 1).unwrap();
    let page = vec![0; layout.page_bytes()];
    layout.check_pages(&[], 0).unwrap();
    layout.check_pages(std::slice::from_ref(&page), 64).unwrap();
    for (pages, tokens, name) in [
        (vec![page.clone()], 63, "pages"),
        (vec![page.clone(); 2], 64, "pages"),
        (vec![page.clone()], 0, "pages"),
        (vec![page[1..].to_vec()], 64, "page"),
    ] {
        let error = layout.check_pages(&pages, tokens).unwrap_err();
        assert!(
            matches!(error, Error::Length { what, .. } if what == name),
            "{tokens}: {error}"
        );
    }
    // A tail page is as long as its own layout says.
    let tail = layout.tail_k().page_bytes();
    assert_ne!(tail, page.len());
    layout
        .check_pages(&[page.clone(), vec![0; tail]], 5)
        .unwrap();
    assert!(layout.check_pages(&[page.clone(), page], 5).is_err());
}
