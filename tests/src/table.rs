//! The table of cases that every backend runs.

mod centres;
mod chunks;
mod kept;
mod wide;

use attn_core::{Arithmetic, Error, KvFormat, Scheme};

use crate::case::{Build, Case, Inputs};

/// How much of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// All of it.
    Full,
    /// A few small cases of every kind, one at a time: for runs under a sanitizer.
    Reduced,
}

impl Size {
    /// What `ATTN_TABLE` says: `full` (also if unset) or `reduced`.
    ///
    /// # Errors
    /// [`Error::Parameter`] for any other value.
    pub fn from_env() -> Result<Size, Error> {
        match std::env::var("ATTN_TABLE").as_deref() {
            Err(_) | Ok("" | "full") => Ok(Size::Full),
            Ok("reduced") => Ok(Size::Reduced),
            Ok(other) => Err(Error::parameter("ATTN_TABLE", other, "full, reduced")),
        }
    }
}

/// Lengths around every edge: page, tile, segment (256 tokens), span (1024).
const EDGES: [usize; 20] = [
    0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 1023, 1024, 1025,
];

struct Table {
    cases: Vec<Case>,
}

impl Table {
    fn add(&mut self, case: Case) {
        let number = self.cases.len() as u64 + 1;
        self.cases.push(Case {
            seed: number,
            ..case
        });
    }
}

fn formats(names: &[&str]) -> Vec<KvFormat> {
    names
        .iter()
        .map(|name| name.parse().expect("a format's name"))
        .collect()
}

/// The cases of one size, numbered from 1: a number always means the same case of that size.
pub fn table(size: Size) -> Vec<Case> {
    let mut table = Table { cases: Vec::new() };
    match size {
        Size::Full => full(&mut table),
        Size::Reduced => reduced(&mut table),
    }
    table.cases
}

fn reduced(table: &mut Table) {
    for format in formats(&[
        "int8",
        "int4",
        "int4-g4",
        "int8/int4",
        "int8-tensor/int8-g32",
        "f16",
        "bf16",
        "fp8",
    ]) {
        for (build, q_len) in [(Build::Chunks, 1), (Build::Shuffled, 3), (Build::Forked, 2)] {
            let mut case = Case::new([4, 2], 64, &[70, 0, 300], format);
            if build == Build::Forked {
                case = Case::new([3, 1], 128, &[77, 140], format);
            }
            case.build = build;
            case.problem.q_lens = vec![q_len; case.problem.batch()];
            table.add(case);
        }
    }
    for format in formats(&["int8-plain", "int8-g32", "bf16", "fp8"]) {
        for build in [Build::Bnsh, Build::Bsnh] {
            let mut case = Case::new([4, 2], 64, &[0, 1, 70], format);
            case.build = build;
            table.add(case);
        }
    }
    // Many rows of other caches, and of small pages.
    for (name, build, page_size) in [
        ("bf16", Build::Bsnh, 64),
        ("fp8", Build::Bnsh, 64),
        ("bf16", Build::AtOnce, 16),
        ("int8", Build::AtOnce, 16),
        ("int4", Build::AtOnce, 32),
    ] {
        let mut case = Case::new([6, 1], 128, &[130, 40], formats(&[name])[0]);
        case.problem.q_lens = vec![20, 3];
        (case.build, case.page_size) = (build, page_size);
        table.add(case);
    }
    let mut case = Case::new([12, 1], 128, &[1, 1100], KvFormat::INT8);
    case.problem.q_lens = vec![4; case.problem.batch()];
    case.problem.scores.window_left = Some(900);
    case.problem.scores.softcap = Some(30.0);
    table.add(case);
    table.add(without_window());
    sinks(table, "int8");
    sinks(table, "bf16");
    for format in formats(&["int8", "int4", "bf16"]) {
        let mut case = Case::new([4, 2], 64, &[300, 130, 64], format);
        case.problem.q_lens = vec![2, 1, 0];
        case.problem.scores.window_left = Some(20);
        case.build = Build::Dropped;
        table.add(case);
    }
    for format in formats(&["int8", "int4", "bf16"]) {
        let mut case = Case::new([4, 2], 64, &[70, 90, 5, 33], format);
        case.problem.q_lens = vec![1, 20, 0, 33];
        case.build = Build::AtOnce;
        table.add(case);
    }
    far_scores(table, &["int8", "int4"]);
    kept::taken_back(table);
    centres::few(table);
    wide::few(table);
    chunks::few(table);
    wide::written_as_floats(
        table,
        &[("fp8", (192, 128), 8), ("int8/int4", (192, 128), 8)],
    );
}

/// Scores up to twice as far as the grid reaches, so that rows are on it in some tiles and off it in others; and rows without a step, whose scores are 0,
/// beside tokens that they do not see.
fn far_scores(table: &mut Table, names: &[&str]) {
    for format in formats(names) {
        let of = |softmax_scale| {
            let mut case = Case::new([4, 2], 64, &[1, 2, 70, 300], format);
            case.problem.scores.softmax_scale = Some(softmax_scale);
            case.problem.q_lens = vec![3; case.problem.batch()];
            case
        };
        table.add(of(500.0));
        let mut case = of(800.0);
        case.problem.scores.alibi_slopes = Some(vec![0.5, 100.0, 0.125, 0.0]);
        case.problem.scores.window_left = Some(40);
        table.add(case);
        let mut case = of(1.0);
        case.inputs = Inputs::Zeros;
        case.problem.scores.window_left = Some(1);
        table.add(case);
    }
}

/// More query tokens than decode has: prompts, pieces of prompts behind others, beside tokens that are decoded.
fn prompts(table: &mut Table) {
    for format in formats(&["int8", "int4", "int8/int4", "int4-g1", "fp8", "bf16"]) {
        let ragged = || {
            let mut case = Case::new([4, 2], 64, &[300, 17, 200, 5, 64, 400, 130], format);
            case.problem.q_lens = vec![1, 17, 63, 0, 64, 65, 127];
            (case.build, case.alone) = (Build::AtOnce, true);
            case
        };
        table.add(ragged());
        let mut case = ragged();
        case.problem.scores.causal = false;
        case.problem.scores.alibi_slopes = Some(vec![0.5, 0.25, 0.125, 0.0]);
        case.problem.scores.sinks = Some(vec![0.5, -2.0, 6.0, 1e6]);
        table.add(case);
        let mut case = ragged();
        (case.problem.scores.window_left, case.problem.scores.softcap) = (Some(70), Some(20.0));
        case.problem.q_lens.reverse();
        table.add(case);
        let mut case = Case::new([16, 1], 128, &[700, 33, 90], format);
        case.problem.q_lens = vec![3, 33, 20];
        (case.build, case.alone) = (Build::AtOnce, true);
        table.add(case);
    }
    // Tiles of several pages, and of rows.
    for format in formats(&["int8", "int4", "int4-g1", "fp8", "bf16"]) {
        for (page_size, head_dim) in [(16, 128), (32, 96)] {
            let mut case = Case::new([16, 1], head_dim, &[200, 33, 90], format);
            case.problem.q_lens = vec![3, 33, 20];
            (case.build, case.page_size) = (Build::Shuffled, page_size);
            table.add(case);
        }
    }
    // Other dims, and rows.
    for format in formats(&["bf16", "int8"]) {
        for head_dim in [80, 192, 256] {
            let mut case = Case::new([8, 2], head_dim, &[300, 17, 0, 64], format);
            case.problem.q_lens = vec![70, 17, 0, 64];
            (case.build, case.problem.scores.arithmetic) = (Build::AtOnce, Arithmetic::Fast);
            table.add(case);
        }
    }
    for format in formats(&["bf16", "fp8"]) {
        for (build, head_dim) in [
            (Build::Bnsh, 128),
            (Build::Bsnh, 96),
            (Build::Bnsh, 64),
            (Build::Bsnh, 256),
        ] {
            let mut case = Case::new([8, 2], head_dim, &[300, 17, 0, 64], format);
            case.problem.q_lens = vec![70, 17, 0, 64];
            case.build = build;
            table.add(case);
        }
    }
    for format in formats(&["int8-plain", "int8-g32"]) {
        let mut case = Case::new([32, 2], 96, &[150, 17, 64], format);
        case.problem.q_lens = vec![70, 17, 64];
        (case.build, case.problem.scores.arithmetic) = (Build::Bsnh, Arithmetic::Fast);
        table.add(case);
    }
    for format in formats(&[
        "int8",
        "int4",
        "int8/int4",
        "int4-g1",
        "int8-tensor",
        "int4-g4",
        "int8-g32",
    ]) {
        // Rows enough that CUDA attends f16. The query tokens of a block stand in one tile: else some would read more residuals than the oracle does.
        let mut case = Case::new([32, 2], 64, &[300, 17, 192, 5, 64, 384, 130], format);
        case.problem.q_lens = vec![1, 17, 63, 0, 64, 64, 2];
        (case.build, case.problem.scores.arithmetic) = (Build::AtOnce, Arithmetic::Fast);
        table.add(case);
        let mut case = Case::new([16, 1], 128, &[300, 32, 192], format);
        case.problem.q_lens = vec![3, 32, 128];
        (case.build, case.problem.scores.arithmetic) = (Build::AtOnce, Arithmetic::Fast);
        case.problem.scores.sinks = Some(vec![0.5; 16]);
        table.add(case);
    }
    for format in formats(&["int8", "int4", "bf16"]) {
        let mut case = Case::new([3, 1], 64, &[1100, 2], format);
        case.problem.q_lens = vec![1000, 1];
        (case.build, case.alone) = (Build::AtOnce, true);
        table.add(case);
        let mut case = Case::new([2, 1], 192, &[150], format);
        case.problem.q_lens = vec![100];
        (case.build, case.page_size) = (Build::AtOnce, 16);
        table.add(case);
    }
}

/// A window of any length sees the whole cache, whatever it is cast to.
fn without_window() -> Case {
    let mut case = Case::new([4, 2], 64, &[1, 70, 300], KvFormat::INT8);
    case.problem.scores.window_left = Some(usize::MAX);
    case.problem.q_lens = vec![2; case.problem.batch()];
    case
}

fn full(table: &mut Table) {
    pairs(table);
    let main = formats(&["int8", "int4", "int4-g4", "int8/int4", "f16", "bf16", "fp8"]);
    for &format in &main {
        shapes(table, format);
        builds(table, format);
        modifiers(table, format);
    }
    windows(table);
    prompts(table);
    views(table);
    numbers(table);
    for format in formats(&["int8", "int4", "bf16"]) {
        // Many spans; the last segment and the last span are short.
        let mut case = Case::new([2, 1], 64, &[65_536 + 4 * 512 + 70], format);
        case.build = Build::AtOnce;
        table.add(case);
    }
    table.add(without_window());
    for format in ["int8", "int8-plain", "int4", "int8/int4-g1", "f16", "fp8"] {
        sinks(table, format);
    }
    merged_sinks(table);
    kept::dropped(table);
    for format in formats(&["bf16", "f16", "fp8"]) {
        // A prompt's piece behind more tokens than the longest run that a kernel sums in one go.
        let mut case = Case::new([4, 1], 64, &[4400, 30], format);
        case.problem.q_lens = vec![65, 1];
        (case.build, case.alone) = (Build::AtOnce, true);
        table.add(case);
    }
    far_scores(
        table,
        &["int8", "int4", "int8/int4", "int4-g4", "int8-tensor"],
    );
    kept::first_tiles(table);
    centres::all(table);
    wide::all(table);
    chunks::all(table);
    let unlike = [
        ("fp8", (192, 128), 64),
        ("fp8", (256, 64), 64),
        ("int8", (192, 128), 8),
        ("int8/int4", (256, 128), 8),
        ("int4", (192, 128), 8),
    ];
    wide::written_as_floats(table, &unlike);
}

/// A sink for each query head: ordinary ones, one that outweighs all tokens, one that none of them shows, and one that GPUs flush.
fn each_sink(heads: usize) -> Option<Vec<f32>> {
    let sinks = [0.75, 3.5, -2.0, 1e6, 12.0, -1e6, 1e-40, -0.0];
    Some(sinks.into_iter().cycle().take(heads).collect())
}

/// Sinks beside what changes the other logits, over sequences and rows that see nothing, and of enough rows for each kernel.
fn sinks(table: &mut Table, format: &str) {
    let of = |heads, dim, kv_lens: &[usize], q_len| {
        let format = format.parse().expect("a format's name");
        let mut case = Case::new(heads, dim, kv_lens, format);
        case.problem.scores.sinks = each_sink(heads[0]);
        case.problem.q_lens = vec![q_len; case.problem.batch()];
        case
    };
    let mut case = of([8, 2], 64, &[0, 1, 70, 300], 1);
    case.alone = true;
    table.add(case);
    // The first query tokens stand before a sequence of 2.
    let mut case = of([4, 1], 64, &[2, 66, 400], 3);
    case.problem.scores.window_left = Some(50);
    table.add(case);
    let mut case = of([8, 2], 128, &[0, 130], 2);
    case.problem.scores.softcap = Some(20.0);
    case.problem.scores.alibi_slopes = Some(vec![0.25; 8]);
    case.problem.scores.softmax_scale = Some(0.3);
    table.add(case);
    let mut case = of([3, 1], 64, &[5, 150], 2);
    case.problem.scores.causal = false;
    table.add(case);
    // 33 rows of each KV head.
    table.add(of([66, 2], 64, &[70, 0], 1));
    let case = of([4, 2], 64, &[0, 65, 300], 2);
    let is_of_views = |scheme: Scheme| scheme.code_bits() > 4 && !scheme.is_rotated();
    if is_of_views(case.format.k) && is_of_views(case.format.v) {
        for build in [Build::Bnsh, Build::Bsnh] {
            table.add(Case {
                build,
                ..case.clone()
            });
        }
    }
}

/// Sinks after every way in which a work item's partials merge: in a CTA, between CTAs, in clusters, of tiles, segments and spans.
fn merged_sinks(table: &mut Table) {
    for (heads, dim, kv_lens, q_len) in [
        ([4, 1], 64, &[500][..], 1),
        ([2, 1], 128, &[1500, 40], 2),
        ([8, 1], 64, &[6000, 100], 1),
        ([4, 2], 64, &[2500], 1),
        ([12, 1], 64, &[1300, 0], 4),
        ([64, 1], 64, &[1200, 3], 1),
        ([2, 1], 64, &[65_536 + 4 * 512 + 70], 1),
    ] {
        for format in formats(&["int8", "bf16"]) {
            let mut case = Case::new(heads, dim, kv_lens, format);
            case.problem.scores.sinks = each_sink(heads[0]);
            case.problem.q_lens = vec![q_len; case.problem.batch()];
            case.build = Build::AtOnce;
            table.add(case);
        }
    }
}

/// Every K scheme with every V scheme; rotated int4 of other groups and windows than the preset's with themselves and the presets.
fn pairs(table: &mut Table) {
    let [int8, int4] = [KvFormat::INT8.k, KvFormat::INT4.k];
    let is_variant = |s: Scheme| s.is_rotated() && ![int8, int4].contains(&s);
    for k in Scheme::ALL {
        for v in Scheme::ALL {
            let format = KvFormat::new(k, v);
            let by_preset = [int8, int4].iter().any(|s| [k, v].contains(s));
            if (is_variant(k) || is_variant(v)) && k != v && !by_preset {
                continue;
            }
            let mut case = Case::new([4, 2], 128, &[0, 1, 65, 130], format);
            case.alone = true;
            case.problem.q_lens = vec![2; case.problem.batch()];
            table.add(case);
        }
    }
}

fn shapes(table: &mut Table, format: KvFormat) {
    for head_dim in [64, 80, 96, 128, 192, 256] {
        if format.check(head_dim).is_ok() {
            table.add(Case::new([3, 1], head_dim, &[1, 77, 300], format));
        }
    }
    for heads_per_kv in [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 64] {
        table.add(Case::new([heads_per_kv * 2, 2], 64, &[70], format));
    }
    for q_len in 1..=16 {
        let mut case = Case::new([3, 1], 64, &[4, 66, 130], format);
        case.problem.q_lens = vec![q_len; case.problem.batch()];
        table.add(case);
    }
    let mut case = Case::new([16, 1], 128, &[20, 270], format);
    case.problem.q_lens = vec![16; case.problem.batch()];
    table.add(case);
    let mut case = Case::new([2, 1], 64, &EDGES, format);
    case.alone = true;
    table.add(case);
    table.add(Case::new([2, 1], 64, &[4097], format));
    for page_size in [16, 32, 64, 128] {
        if format.check(64).is_ok() {
            let mut case = Case::new([2, 2], 64, &[1, 31, 33, 127, 129, 270], format);
            case.page_size = page_size;
            table.add(case);
        }
    }
}

fn builds(table: &mut Table, format: KvFormat) {
    for build in [
        Build::OneByOne,
        Build::AtOnce,
        Build::Shuffled,
        Build::Reused,
    ] {
        let mut case = Case::new([4, 2], 64, &[64, 0, 130, 257, 1100], format);
        (case.build, case.alone) = (build, true);
        table.add(case);
    }
    // A shared open page, a prefix that ends with its page (69 − 5), and one inside a later segment.
    for kv_lens in [[90, 75], [69, 300], [600, 500]] {
        let mut case = Case::new([4, 2], 64, &kv_lens, format);
        case.build = Build::Forked;
        table.add(case);
    }
}

fn modifiers(table: &mut Table, format: KvFormat) {
    let base = || {
        let mut case = Case::new([4, 2], 64, &[3, 64, 150, 400], format);
        case.problem.q_lens = vec![3; case.problem.batch()];
        case
    };
    for window in [0, 1, 70] {
        let mut case = base();
        case.problem.scores.window_left = Some(window);
        table.add(case);
    }
    // Whole tiles, segments and a span lie before the window.
    let mut case = Case::new([2, 1], 64, &[1500], format);
    case.problem.scores.window_left = Some(200);
    table.add(case);
    for cap in [5.0, 50.0] {
        let mut case = base();
        case.problem.scores.softcap = Some(cap);
        table.add(case);
    }
    let slopes = || Some(vec![0.5, 0.25, 0.125, 0.0]);
    let mut case = base();
    case.problem.scores.alibi_slopes = slopes();
    table.add(case);
    let mut case = base();
    case.problem.scores.causal = false;
    table.add(case);
    let mut case = base();
    case.problem.scores.alibi_slopes = slopes();
    case.problem.scores.softcap = Some(20.0);
    case.problem.scores.window_left = Some(100);
    case.problem.scores.softmax_scale = Some(0.3);
    table.add(case);
}

/// Query tokens before and behind the end of a tile read its residuals each by its own position; forks and chunks move what is kept.
fn windows(table: &mut Table) {
    for format in formats(&["int4", "int8/int4", "int4-w4/int4", "int4-r2/int4-w0"]) {
        for (q_len, page_size) in [(5, 64), (16, 16), (16, 128)] {
            let mut case = Case::new([4, 2], 64, &[66, 129, 193, 260, 330, 514, 1027], format);
            (case.page_size, case.alone) = (page_size, true);
            case.problem.q_lens = vec![q_len; case.problem.batch()];
            case.build = Build::Shuffled;
            table.add(case);
        }
        for causal in [true, false] {
            let mut case = Case::new([8, 2], 128, &[195, 450], format);
            case.problem.scores.causal = causal;
            case.problem.q_lens = vec![4; case.problem.batch()];
            case.build = Build::Forked;
            table.add(case);
        }
        let mut case = Case::new([8, 1], 64, &[2500], format);
        case.problem.scores.window_left = Some(100);
        case.problem.q_lens = vec![2; case.problem.batch()];
        table.add(case);
    }
}

fn views(table: &mut Table) {
    for format in formats(&[
        "f16",
        "bf16",
        "fp8",
        "int8-plain",
        "int8-g32",
        "int8-tensor",
        "int8-plain/int8-g32",
        "int8-g32/int8-tensor",
        "int8-plain/fp8",
        "bf16/int8-plain",
    ]) {
        for build in [Build::Bnsh, Build::Bsnh] {
            for head_dim in [64, 128] {
                let mut case = Case::new([6, 2], head_dim, &[0, 1, 65, 300], format);
                (case.build, case.alone) = (build, true);
                case.problem.q_lens = vec![2; case.problem.batch()];
                table.add(case);
            }
        }
    }
}

/// Inputs that are hard on the quantizers, in every scheme.
fn numbers(table: &mut Table) {
    for scheme in Scheme::ALL {
        let format = KvFormat::same(scheme);
        for inputs in [
            Inputs::Zeros,
            Inputs::Tiny,
            Inputs::Edge,
            Inputs::Huge,
            Inputs::Extreme,
        ] {
            let mut case = Case::new([2, 1], 128, &[70, 5, 140], format);
            case.inputs = inputs;
            table.add(case);
        }
    }
}
