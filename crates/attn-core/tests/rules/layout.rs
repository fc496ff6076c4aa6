//! Pages: every code and parameter has a place of its own, what a page leaves unwritten is known, and so is what no quantizer writes.

use std::ops::Range;

use attn_core::{
    Error, KvFormat, PageLayout, Scheme, Window,
    layout::{CodeAddr, Part, Side, k_code, load_param, store_param, v_code},
    quant::Param,
};
use half::f16;

/// Layouts of every scheme on each side, beside itself and beside another.
fn layouts() -> Vec<PageLayout> {
    let mut all = Vec::new();
    for (i, k) in Scheme::ALL.into_iter().enumerate() {
        for v in [k, Scheme::ALL[(i + 3) % Scheme::ALL.len()], Scheme::Bf16] {
            let equal = [(64, 16), (64, 64), (80, 32), (128, 128)];
            let equal = equal.map(|(dim, size)| ((dim, dim), size));
            let unlike = [((192, 128), 64), ((64, 512), 16)];
            for (dim, size) in equal.into_iter().chain(unlike) {
                all.extend(PageLayout::new(KvFormat::new(k, v), dim, size, 2));
            }
        }
    }
    all
}

type Address = fn(usize, usize, usize, usize, usize) -> CodeAddr;
/// One side of a run: its scheme and dims, codes, parameters, addresses.
type SideParts = ((Scheme, usize), Range<usize>, Range<usize>, Address);

fn sides(layout: &PageLayout) -> [SideParts; 2] {
    let (KvFormat { k, v, .. }, dim) = (layout.format(), layout.head_dim());
    [
        ((k, dim.k), layout.k_codes(), layout.k_params(), k_code),
        ((v, dim.v), layout.v_codes(), layout.v_params(), v_code),
    ]
}

/// Groups of a token's row that have parameters.
fn groups(scheme: Scheme, dim: usize) -> usize {
    if scheme.has_row_scales() {
        scheme.groups(dim).count()
    } else {
        0
    }
}

#[test]
fn parts_follow_each_other_and_runs_fill_the_pool() {
    let mut seen = 0;
    for layout in layouts() {
        let size = layout.page_size();
        let mut at = 0;
        for ((scheme, dim), codes, params, _) in sides(&layout) {
            assert_eq!(codes, at..at + size * dim * scheme.code_bits() / 8);
            let each = match scheme {
                Scheme::Int4(_) => 4,
                _ => 2,
            };
            assert_eq!(
                params,
                codes.end..codes.end + size * groups(scheme, dim) * each
            );
            at = params.end;
        }
        assert_eq!((layout.run_bytes(), layout.page_bytes()), (at, 2 * at));
        assert_eq!(layout.bytes_per_token(), at as f64 / size as f64);
        assert_eq!(layout.run(0, 0), 0..at);
        assert_eq!(layout.run(0, 1), at..2 * at);
        assert_eq!(layout.run(3, 1), 7 * at..8 * at);
        // Images of sequences are checked in chunks of 32 bytes.
        assert_eq!(layout.run_bytes() % 32, 0);
        let tiles = layout.format().window().tiles();
        for (tokens, home) in [(0, 0), (1, 1), (size - 1, 1), (size, 1), (size + 1, 2)] {
            assert_eq!(
                layout.pages_of(tokens),
                if tiles == 0 { home } else { 2 * home }
            );
        }
        // The 64 tokens before the last one read the first tile, their own and those of the window before it.
        let last = 101 - ((100 * size + 1 - 64) / 64 + 1 - tiles) * 64 / size;
        let residuals = if tiles == 0 {
            0
        } else {
            last + 64usize.div_ceil(size)
        };
        assert_eq!(layout.pages_of(100 * size + 1), 101 + residuals);
        seen += 1;
    }
    assert!(seen > 80, "{seen}");
}

#[test]
fn every_code_has_bits_of_its_own() {
    for layout in layouts() {
        let size = layout.page_size();
        for ((scheme, dim), codes, _, address) in sides(&layout) {
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
        let size = layout.page_size();
        for ((scheme, dim), codes, params, address) in sides(&layout) {
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
            let groups = groups(scheme, dim);
            for (t, g) in (0..size).flat_map(|t| (0..groups).map(move |g| (t, g))) {
                store_param(&mut run[params.clone()], scheme, size, t, g, param(t, g));
            }
            for (t, g) in (0..size).flat_map(|t| (0..groups).map(move |g| (t, g))) {
                let found = load_param(&run[params.clone()], scheme, size, t, g);
                assert_eq!(found, param(t, g));
            }
            // Nothing else was touched.
            let touched = codes.start..if groups > 0 { params.end } else { codes.end };
            for (i, byte) in run.iter().enumerate() {
                assert!(touched.contains(&i) || *byte == 0xa5, "{scheme}: byte {i}");
            }
        }
    }
}

/// What is asserted of one side's parts: the bits that `tokens` tokens write are ones, all others zeros.
fn assert_only_written(run: &[u8], part: &Part, size: usize, tokens: usize) {
    let (bits, dim) = (part.scheme.code_bits(), part.dim());
    for (t, d) in (0..size).flat_map(|t| (0..dim).map(move |d| (t, d))) {
        let expected = if t < tokens { 0xffff >> (16 - bits) } else { 0 };
        assert_eq!(part.load_code(run, t, d), expected, "({t}, {d})");
    }
    let each = if part.scheme.has_shifts() { 2 } else { 1 };
    for (i, at) in part.params.clone().step_by(2).enumerate() {
        let expected = if i / each % size < tokens { 0xff } else { 0 };
        assert_eq!(run[at..at + 2], [expected; 2], "parameter {i}");
    }
}

#[test]
fn a_canonical_page_keeps_what_its_tokens_wrote_and_nothing_else() {
    for layout in layouts() {
        let size = layout.page_size();
        for (tokens, is_residual) in [0, 1, 9, size - 3, size]
            .into_iter()
            .flat_map(|n| [(n, false), (n, true)])
        {
            let mut page = vec![0xff; layout.page_bytes()];
            layout.canonical(&mut page, tokens, is_residual).unwrap();
            for head in 0..2 {
                let run = &page[layout.run(0, head)];
                let mut covered = 0;
                for side in [Side::K, Side::V] {
                    let part = if is_residual {
                        layout.residual(side)
                    } else {
                        Some(layout.part(side))
                    };
                    let Some(part) = part else { continue };
                    assert_eq!(part.codes.start, covered);
                    assert_only_written(run, &part, size, tokens);
                    covered = part.codes.end.max(part.params.end);
                }
                assert!(run[covered..].iter().all(|byte| *byte == 0));
            }
        }
        let mut short = vec![0; layout.page_bytes() - 1];
        assert!(matches!(
            layout.canonical(&mut short, 1, false),
            Err(Error::Length { what: "page", .. })
        ));
        let mut page = vec![0; layout.page_bytes()];
        for is_residual in [false, true] {
            assert!(layout.canonical(&mut page, size, is_residual).is_ok());
            assert!(layout.canonical(&mut page, size + 1, is_residual).is_err());
        }
    }
}

#[test]
fn residuals_lie_as_four_bit_codes_k_first_and_have_no_parameters() {
    let mut seen = 0;
    for layout in layouts() {
        let size = layout.page_size();
        let mut at = 0;
        for (side, address) in [(Side::K, k_code as Address), (Side::V, v_code)] {
            let home = layout.part(side);
            let dim = home.dim();
            let Some(part) = layout.residual(side) else {
                assert_eq!(home.scheme.window(), Window::None);
                continue;
            };
            assert_ne!(home.scheme.window(), Window::None);
            assert_eq!(part.codes, at..at + size * dim / 2);
            assert!(part.params.is_empty());
            at = part.codes.end;
            let codes: Vec<u16> = (0..dim).map(|d| (d * 7 % 256) as u16).collect();
            let (mut run, mut residuals) =
                (vec![0; layout.run_bytes()], vec![0; layout.run_bytes()]);
            home.store_codes(&mut run, size - 1, &codes);
            part.store_codes(&mut residuals, size - 1, &codes);
            for (d, code) in codes.iter().enumerate() {
                let place = address(4, dim, size, size - 1, d);
                assert_eq!(part.code_addr(size - 1, d), place);
                assert_eq!(place.load(&run[home.codes.clone()], 4), code >> 4);
                assert_eq!(place.load(&residuals[part.codes.clone()], 4), code & 15);
            }
            seen += 1;
        }
        assert!(at <= layout.run_bytes());
    }
    assert!(seen > 30, "{seen}");
}

/// What no quantizer writes into the last place of token t of a side; none for schemes that hold nothing but numbers.
fn spoil(layout: &PageLayout, side: usize, page: &mut [u8], head: usize, t: usize) -> bool {
    let size = layout.page_size();
    let ((scheme, dim), codes, params, address) = sides(layout)[side].clone();
    let run = &mut page[layout.run(0, head)];
    let groups = groups(scheme, dim);
    if groups > 0 {
        let bad = Param {
            scale: f16::NAN,
            shift: f16::ZERO,
        };
        store_param(&mut run[params], scheme, size, t, groups - 1, bad);
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
        // Two home pages, the second open, and their residual pages, in which every byte is one that tokens may write.
        let tokens = size + 3;
        let mut pages = vec![vec![0; layout.page_bytes()]; layout.pages_of(tokens)];
        pages[2..].iter_mut().for_each(|page| page.fill(0xff));
        layout.check_pages(&pages, tokens).unwrap();
        for (i, side) in (0..2).flat_map(|i| [(i, 0), (i, 1)]) {
            for (head, t) in [(0, 0), (1, 2), (0, 3), (1, size - 1)] {
                let mut pages = pages.clone();
                if !spoil(&layout, side, &mut pages[i], head, t) {
                    continue;
                }
                let found = layout.check_pages(&pages, tokens);
                match (i == 0 || t < 3, found) {
                    (false, Ok(())) => (),
                    (true, Err(Error::BadBytes { offset, scheme, .. })) => {
                        assert_eq!(offset, layout.run(0, head).start);
                        let format = layout.format();
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
fn minus_128_is_no_code_of_a_rotated_row() {
    let layout = PageLayout::new(KvFormat::INT8, 64, 64, 1).unwrap();
    for at in [layout.k_codes().start, layout.v_codes().start] {
        let mut page = vec![0; layout.page_bytes()];
        page[at] = 0x80;
        let error = layout.check_pages(&[page], 1).unwrap_err();
        assert!(
            matches!(error, Error::BadBytes { what: "code", .. }),
            "{error}"
        );
    }
}

#[test]
fn pages_of_other_numbers_or_lengths_are_refused() {
    let layout = PageLayout::new(KvFormat::INT4, 64, 64, 1).unwrap();
    let page = vec![0; layout.page_bytes()];
    layout.check_pages(&[], 0).unwrap();
    layout.check_pages(&vec![page.clone(); 2], 64).unwrap();
    // All residual pages that so many tokens keep, and, after some were taken back, those alone that the next token reads.
    for pages in 7..=10 {
        layout.check_pages(&vec![page.clone(); pages], 320).unwrap();
    }
    for (pages, tokens, name) in [
        (vec![page.clone()], 63, "pages"),
        (vec![page.clone(); 3], 64, "pages"),
        (vec![page.clone()], 0, "pages"),
        (vec![page.clone(); 11], 320, "pages"),
        (vec![page.clone(); 6], 320, "pages"),
        // A residual page is as long as any.
        (vec![page.clone(), page[1..].to_vec()], 64, "page"),
        (vec![page[1..].to_vec(), page.clone()], 64, "page"),
    ] {
        let error = layout.check_pages(&pages, tokens).unwrap_err();
        assert!(
            matches!(error, Error::Length { what, .. } if what == name),
            "{tokens}: {error}"
        );
    }
}
