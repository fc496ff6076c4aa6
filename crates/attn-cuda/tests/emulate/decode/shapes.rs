//! Shapes for the emulation beside the conformance table and random ones.

use attn_conformance::{Build, Case};
use attn_core::{Arithmetic, HeadDim, Int8Scale, KvFormat, Scheme};

/// Int8 as rows have it.
const PLAIN: Scheme = Scheme::Int8(Int8Scale::Token);

/// Shapes that meet what random ones seldom do.
pub(super) fn chosen() -> Vec<Case> {
    // Merges of many partials, which CTAs share: of segments and of spans; alone, and among others.
    let mut all: Vec<Case> = [
        ([4, 1], vec![5000]),
        ([8, 1], vec![20_000, 100]),
        ([6, 2], vec![4000]),
    ]
    .into_iter()
    .map(|(heads, lens)| Case::new(heads, 64, &lens, KvFormat::INT8))
    .collect();
    // Teams whose first page is not the likely one; a cluster of one CTA, whose warps merge whole rows.
    let mut pages = Case::new([4, 1], 64, &[1500, 700], KvFormat::INT8);
    pages.page_size = 16;
    pages.seed = 2; // for the larger GPU
    all.push(pages);
    all.push(Case::new([8, 1], 128, &[600; 16], KvFormat::INT8));
    // Merges in a cluster, by 32 dims of rows that are not rotated, of which warps have 48.
    for (dim, format) in [((192, 192), "int8-plain"), ((128, 192), "int8-tensor")] {
        let format = format.parse().expect("a format's name");
        all.push(Case::new([2, 1], HeadDim::from(dim), &[300, 70], format));
    }
    // Latents that are stored once, of few rows: pages that hold a part of a tile, all of it, and more.
    for (page_size, dim) in [(16, (128, 128)), (64, (192, 128)), (128, (576, 512))] {
        let mut latents = Case::new(
            [6, 1],
            HeadDim::from(dim),
            &[300, 70],
            KvFormat::INT8_LATENTS,
        );
        latents.page_size = page_size;
        all.push(latents);
    }
    // Rows of contiguous caches and of pages of 16 and 128 tokens, over many tiles.
    for (build, seed) in [(Build::Bnsh, 0), (Build::Bsnh, 3)] {
        let mut rows = Case::new([4, 1], 64, &[1500, 300, 64], KvFormat::same(PLAIN));
        (rows.build, rows.seed) = (build, seed);
        all.push(rows);
    }
    all.extend(windows());
    all.extend(far_first_tiles());
    all
}

/// Windows alone leave scores as they are: of 130,000 scores of this seed some would be rounded to another 64th if the row's step came first.
fn windows() -> [Case; 2] {
    [(&[130; 80][..], 1), (&[200], 80)].map(|(lens, q_len)| {
        let mut case = Case::new([16, 1], 64, lens, KvFormat::INT8);
        case.problem.q_lens = vec![q_len; lens.len()];
        case.problem.scores.window_left = Some(100);
        (case.build, case.seed) = (Build::AtOnce, 2);
        case
    })
}

/// Shapes whose rows read the first tile with residuals, and tiles behind it without: by every kernel, in pages that hold a part of it, all of it, and more, and by rings
/// of residual pages that the lanes of a warp hold, and larger ones.
fn far_first_tiles() -> Vec<Case> {
    let shapes = [
        ("int4", 16, [3, 1], 128, &[700, 330, 40][..], &[1, 1, 1][..]),
        ("int8/int4", 16, [4, 1], 64, &[450, 200], &[3, 2]),
        ("int4-w4", 16, [4, 1], 64, &[650, 400], &[1, 1]),
        ("int4", 32, [8, 1], 64, &[520], &[2]),
        ("int4", 64, [4, 1], 64, &[1300, 260], &[1, 1]),
        ("int4-r2", 128, [4, 1], 128, &[600, 300], &[1, 1]),
        ("int8/int4", 128, [4, 1], 64, &[900, 129], &[1, 1]),
        // Query blocks, the first of which stand in the tiles behind the first; on an H100 and an A100 by many rows, too.
        ("int4", 16, [4, 1], 64, &[450], &[200]),
        ("int4-w4", 16, [2, 1], 64, &[700], &[130]),
        ("int4", 64, [4, 2], 64, &[400, 66], &[90, 66]),
        ("int4/int8", 128, [4, 1], 64, &[470, 300], &[70, 9]),
    ];
    let mut all: Vec<Case> = shapes
        .into_iter()
        .map(|(format, page_size, heads, dim, kv_lens, q_lens)| {
            let format = format.parse().expect("a format's name");
            let mut case = Case::new(heads, dim, kv_lens, format);
            case.problem.q_lens = q_lens.to_vec();
            (case.build, case.page_size) = (Build::AtOnce, page_size);
            case
        })
        .collect();
    let mut not_causal = all[4].clone();
    not_causal.problem.scores.causal = false;
    not_causal.problem.q_lens = vec![3, 1];
    all.push(not_causal);
    for (i, case) in all.iter_mut().enumerate() {
        case.seed = i as u64;
    }
    all
}

/// Shapes of a plan for long sequences, whose partials are segments where it finds these: one that all CTAs share, merges of few and of many
/// partials, work items of a team's own, and lengths for which spans stay.
pub(super) fn short_ones() -> Vec<Case> {
    [
        ([4, 1], 64, vec![1000], "int8"),
        ([8, 2], 64, vec![2900], "int8"),
        ([4, 1], 64, vec![5000, 300], "int8"),
        ([4, 2], 64, vec![0, 64, 1025], "int8"),
        ([4, 1], 64, vec![17_000], "int8"),
        // Tiles' values: of rows that are not rotated, of two row groups, with residuals.
        ([4, 1], 128, vec![700, 1], "int8-plain"),
        ([12, 1], 128, vec![1300], "int8-plain"),
        ([12, 1], 64, vec![300, 1500], "int8"),
        ([3, 1], 128, vec![900], "int4"),
    ]
    .into_iter()
    .map(|(heads, dim, lens, format)| {
        let format = format.parse().expect("a format's name");
        Case::new(heads, dim, &lens, format)
    })
    .collect()
}

/// In place of a page's tokens: rows of other engines, head after head or token after token.
const BY_HEADS: usize = 0;
const BY_TOKENS: usize = 1;

/// Formats of a line of shapes have commas between.
const FLOAT_LATENTS: &str = "bf16-latents,fp8-latents";

/// Shapes of wide rows in `many_rows.cu`: parts of K and of V, row blocks, spans that several teams have, whole work items, pages of every size, masks.
pub(super) fn wide_rows() -> Vec<Case> {
    let same = HeadDim::same;
    let latents = HeadDim::from((576, 512));
    let narrow = HeadDim::from((320, 256));
    let shapes = [
        (
            64,
            [16, 1],
            latents,
            &[200, 70, 0][..],
            &[1, 1, 1][..],
            "int8",
        ),
        (64, [128, 1], latents, &[130], &[1], "int8"),
        (16, [20, 1], latents, &[140, 64], &[2, 1], "int8"),
        (64, [4, 1], same(256), &[1100, 2100], &[20, 3], "int8"),
        (
            128,
            [6, 2],
            same(256),
            &[300, 200, 5],
            &[60, 1, 0],
            "int8-plain",
        ),
        (32, [4, 1], (192, 128).into(), &[130, 70], &[33, 3], "int8"),
        (64, [16, 1], same(512), &[300, 65], &[1, 1], "int8-tensor"),
        (64, [12, 1], narrow, &[1500], &[1], "int8-plain/int8"),
        (64, [3, 1], same(160), &[400, 100], &[30, 7], "int8"),
        (16, [4, 1], same(192), &[130, 100], &[130, 40], "int8"),
        // Spans of a work item in many teams, and more work items than eight for each.
        (64, [12, 1], (64, 128).into(), &[4500, 70], &[1, 1], "int8"),
        (64, [12, 1], (64, 128).into(), &[130; 40], &[1; 40], "int8"),
        // Latents that are stored once: pages of every size, several spans, whole work items, narrower ones.
        (
            64,
            [16, 1],
            latents,
            &[1100, 70, 0],
            &[1, 1, 1],
            "int8-latents",
        ),
        (128, [20, 1], latents, &[140, 64], &[2, 1], "int8-latents"),
        (
            16,
            [12, 1],
            narrow,
            &[1100, 70],
            &[2, 1],
            "int8-plain-latents",
        ),
        (32, [12, 1], same(128), &[130; 40], &[1; 40], "int8-latents"),
        // Floats of more than 256 dims: latents, both sides apart, unlike ones, whole work items, spans in many teams, pages of every size, rows of other engines.
        (64, [16, 1], latents, &[1100, 70, 0], &[1; 3], FLOAT_LATENTS),
        (
            128,
            [20, 1],
            latents,
            &[140, 64],
            &[4, 1],
            "f16-latents,fp8-latents",
        ),
        (16, [12, 1], latents, &[1100, 70], &[2, 1], "fp8-latents"),
        (16, [12, 1], narrow, &[130; 40], &[1; 40], FLOAT_LATENTS),
        (64, [4, 1], same(512), &[1100, 70], &[20, 3], "bf16,fp8"),
        (32, [6, 2], latents, &[70, 130, 0], &[3, 1, 0], "bf16,fp8"),
        (128, [4, 1], same(320), &[200, 70], &[17, 1], "f16"),
        (
            16,
            [12, 1],
            (64, 320).into(),
            &[130; 40],
            &[1; 40],
            "f16,fp8",
        ),
        (
            BY_HEADS,
            [4, 1],
            same(512),
            &[200, 70],
            &[20, 3],
            "bf16,fp8",
        ),
        (
            BY_TOKENS,
            [6, 2],
            (512, 256).into(),
            &[130, 5],
            &[3, 1],
            "f16",
        ),
    ];
    let mut all: Vec<Case> = shapes
        .into_iter()
        .flat_map(|(page_size, heads, dim, kv_lens, q_lens, formats)| {
            formats.split(',').map(move |format| {
                let format = format.parse().expect("a format's name");
                let mut case = Case::new(heads, dim, kv_lens, format);
                case.problem.q_lens = q_lens.to_vec();
                match page_size {
                    BY_HEADS => case.build = Build::Bnsh,
                    BY_TOKENS => case.build = Build::Bsnh,
                    pages => (case.build, case.page_size) = (Build::AtOnce, pages),
                }
                case
            })
        })
        .enumerate()
        .map(|(i, case)| Case {
            seed: i as u64,
            ..case
        })
        .collect();
    let mut masked = all[3].clone();
    (
        masked.problem.scores.window_left,
        masked.problem.scores.softcap,
    ) = (Some(150), Some(20.0));
    masked.problem.scores.alibi_slopes = Some(vec![0.25; 4]);
    let mut not_causal = all[8].clone();
    not_causal.problem.scores.causal = false;
    not_causal.problem.scores.sinks = Some(vec![0.5, -2.0, 6.0]);
    // What becomes f16 first: of 8 bits without residuals, where the problem says so.
    for (seed, (dim, format)) in [
        (same(512), "int8-plain"),
        ((320, 256).into(), "int8-tensor"),
        (same(512), "int4"),
        ((64, 320).into(), "int8-plain"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut fast = Case::new([4, 1], dim, &[200, 70], format.parse().expect("a name"));
        fast.problem.q_lens = vec![33, 3];
        fast.problem.scores.arithmetic = Arithmetic::Fast;
        (fast.build, fast.seed) = (Build::AtOnce, 40 + seed as u64);
        all.push(fast);
    }
    // Scores so far apart that states are rescaled within segments.
    let mut far = all[3].clone();
    far.problem.scores.softmax_scale = Some(20.0);
    all.extend([masked, not_causal, far]);
    all
}

/// Shapes of `many_rows.cu`: one warp's rows and two warpgroups', spans that several teams have, whole work items, every mask and scheme.
pub(super) fn many_rows() -> Vec<Case> {
    let case = |heads, dim, kv_lens: &[usize], q_lens: &[usize], format: &str| {
        let format = format.parse().expect("a format's name");
        let mut case = Case::new(heads, dim, kv_lens, format);
        case.problem.q_lens = q_lens.to_vec();
        case.build = Build::AtOnce;
        case
    };
    let mut all = vec![
        case([12, 1], 64, &[2900, 70], &[1, 1], "int8"),
        case([16, 1], 128, &[1100], &[3], "int8-plain"),
        case([64, 1], 64, &[2000, 0], &[2, 1], "int8"),
        case([6, 2], 64, &[300, 200, 5], &[60, 1, 0], "int8-tensor"),
        case([4, 1], 96, &[130, 70], &[100, 3], "int8"),
        // More work items than eight for each team.
        case([16, 1], 64, &[200; 40], &[1; 40], "int8"),
        case([4, 2], 64, &[65; 24], &[20; 24], "int8-plain/int8-tensor"),
        // Bytes of one side beside nibbles of the other, with residuals and without.
        case([4, 1], 128, &[1100, 70], &[64, 3], "int8/int4"),
        case([12, 1], 64, &[250, 70], &[17, 3], "int8-tensor/int4-w0"),
        case([16, 1], 96, &[200; 40], &[3; 40], "int4/int8-plain"),
        case([48, 1], 128, &[300, 0], &[1, 1], "int4-g1/int8-tensor"),
        // Floats: pages that end inside a tile, rows without a token, spans that teams share, whole work items.
        case([16, 1], 64, &[1100, 65], &[3, 1], "bf16"),
        case([64, 1], 128, &[1500, 0, 130], &[2, 1, 2], "bf16"),
        case([6, 2], 64, &[300, 200, 5], &[60, 1, 0], "f16"),
        case([12, 1], 96, &[700, 100], &[1, 1], "f16"),
        case([16, 1], 128, &[1100, 190], &[3, 8], "fp8"),
        case([4, 1], 96, &[130, 70], &[100, 3], "fp8"),
        case([12, 1], 64, &[2900, 70], &[1, 1], "fp8"),
        case([16, 1], 64, &[200; 40], &[1; 40], "fp8"),
        // Prompts whose blocks teams share, and whose shorter ones are whole.
        case([1, 1], 64, &[4500, 2500], &[256, 256], "bf16"),
    ];
    // Tiles of several pages, whose pieces come one by one, and of residuals.
    for (page_size, heads, dim, kv_lens, q_lens, format) in [
        (16, [16, 1], 128, &[400, 190][..], &[3, 8][..], "int8"),
        (32, [6, 2], 64, &[130, 70, 5], &[30, 1, 0], "int8-plain"),
        (16, [4, 1], 128, &[192, 70], &[64, 3], "int4"),
        (32, [12, 1], 96, &[250, 70], &[17, 3], "int4-g1"),
        (16, [12, 1], 64, &[250, 70], &[17, 3], "int8/int4"),
        (128, [4, 1], 96, &[320, 70], &[20, 3], "int4/int8"),
        (16, [4, 1], 96, &[130, 70], &[33, 3], "bf16"),
        (32, [12, 1], 64, &[300, 100], &[2, 1], "fp8"),
        (128, [64, 1], 64, &[400, 0, 130], &[2, 1, 2], "f16"),
    ] {
        let mut pieces = case(heads, dim, kv_lens, q_lens, format);
        pieces.page_size = page_size;
        all.push(pieces);
    }
    // Other dims: a step of one tile, and widths that no vector divides. Queries of f32 beside them are found again for each tile.
    for (heads, dim, kv_lens, q_lens, format) in [
        ([4, 1], 256, &[200, 70][..], &[20, 3][..], "bf16"),
        ([4, 1], 192, &[130, 70], &[20, 3], "f16"),
        ([6, 2], 80, &[130, 70, 5], &[30, 1, 0], "bf16"),
        ([16, 1], 80, &[200, 100], &[2, 1], "f16"),
    ] {
        all.push(case(heads, dim, kv_lens, q_lens, format));
    }
    // Values of fewer dims than keys, in pages that are attended as they are and in smaller ones; few rows, which one warpgroup has.
    for (page_size, heads, dim, kv_lens, q_lens, format) in [
        (
            64,
            [4, 1],
            (192, 128),
            &[200, 70, 0][..],
            &[40, 3, 1][..],
            "bf16",
        ),
        (128, [12, 1], (192, 128), &[1100, 65], &[3, 1], "f16"),
        (32, [4, 1], (256, 64), &[130, 70], &[20, 3], "bf16"),
        (64, [48, 1], (256, 256), &[300], &[1], "f16"),
    ] {
        let format = format.parse().expect("a format's name");
        let mut unlike = Case::new(heads, HeadDim::from(dim), kv_lens, format);
        unlike.problem.q_lens = q_lens.to_vec();
        (unlike.build, unlike.page_size) = (Build::AtOnce, page_size);
        all.push(unlike);
    }
    // Few rows, which an A100 has no other kernel for.
    all.push(case([8, 1], 256, &[300, 65, 0], &[1, 1, 1], "bf16"));
    // Rows of other engines, by every swizzle.
    for (i, (heads, dim, kv_lens, q_lens, format)) in [
        ([16, 1], 128, &[400, 65][..], &[3, 1][..], "bf16"),
        ([4, 1], 96, &[130, 70], &[33, 3], "f16"),
        ([6, 2], 64, &[130, 70, 5], &[30, 1, 0], "bf16"),
        ([16, 1], 128, &[200, 190], &[3, 8], "fp8"),
        ([4, 1], 96, &[130, 70], &[33, 3], "fp8"),
        ([12, 1], 64, &[130, 70], &[17, 1], "fp8"),
        ([6, 2], 80, &[130, 70, 5], &[30, 1, 0], "bf16"),
        ([4, 1], 256, &[200, 70], &[20, 3], "f16"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut rows = case(heads, dim, kv_lens, q_lens, format);
        rows.build = [Build::Bnsh, Build::Bsnh][i % 2];
        all.push(rows);
    }
    for (i, (dim, format)) in [
        (64, "int8-plain"),
        (96, "int8-g32"),
        (128, "int8-tensor"),
        (80, "f16/fp8"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut rows = case([4, 1], dim, &[130, 70], &[33, 3], format);
        rows.problem.scores.arithmetic = Arithmetic::Fast;
        rows.build = [Build::Bnsh, Build::Bsnh][i % 2];
        all.push(rows);
    }
    let mut masked = case([8, 1], 64, &[1300, 200], &[30, 11], "int8");
    (
        masked.problem.scores.window_left,
        masked.problem.scores.softcap,
    ) = (Some(150), Some(20.0));
    (masked.page_size, masked.problem.scores.alibi_slopes) = (128, Some(vec![0.25; 8]));
    all.push(masked.clone());
    for format in ["bf16", "fp8"] {
        masked.format = format.parse().expect("a format's name");
        all.push(masked.clone());
    }
    let mut not_causal = case([3, 1], 64, &[400, 100], &[30, 7], "int8");
    not_causal.problem.scores.causal = false;
    not_causal.problem.scores.sinks = Some(vec![0.5, -2.0, 6.0]);
    all.push(not_causal.clone());
    not_causal.format = KvFormat::same(Scheme::F16);
    all.push(not_causal);
    // Integers as floats: every scheme and pair, pages that end inside a tile, rows in two warpgroups or in one. Tiles with residuals, where all rows of a
    // block stand in one tile: else some read more residuals than the oracle.
    for (heads, dim, kv_lens, q_lens, format) in [
        ([6, 2], 64, &[300, 200, 5][..], &[60, 1, 0][..], "int8"),
        ([4, 1], 96, &[130, 70], &[100, 3], "int8-plain"),
        ([16, 1], 128, &[1100, 190], &[3, 18], "int8-tensor"),
        ([4, 1], 128, &[192, 70], &[64, 3], "int4"),
        ([4, 1], 96, &[320, 70], &[20, 3], "int4"),
        ([3, 1], 64, &[1300, 70], &[40, 3], "int4-w0"),
        ([12, 1], 96, &[250, 70], &[17, 3], "int4-g1"),
        ([12, 1], 64, &[250, 70], &[17, 3], "int8/int4"),
        ([4, 1], 128, &[200; 24], &[20; 24], "int4-g1/int8-tensor"),
        // Several scales of a token, in small pages and large ones.
        ([4, 1], 128, &[150, 70], &[33, 3], "int4-g4"),
        ([4, 1], 96, &[150, 70], &[33, 3], "int8-g32"),
        ([2, 1], 64, &[180, 70], &[40, 3], "int8-plain/int4-g2"),
    ] {
        let mut fast = case(heads, dim, kv_lens, q_lens, format);
        fast.problem.scores.arithmetic = Arithmetic::Fast;
        fast.page_size = match format {
            "int4-g4" | "int4-w0" => 16,
            "int8-g32" => 32,
            "int8-plain/int4-g2" => 128,
            _ => 64,
        };
        all.push(fast);
    }
    masked.problem.scores.arithmetic = Arithmetic::Fast;
    for format in ["int8", "int4"] {
        masked.format = format.parse().expect("a format's name");
        all.push(masked.clone());
    }
    for (i, case) in all.iter_mut().enumerate() {
        case.seed = i as u64;
    }
    all
}
