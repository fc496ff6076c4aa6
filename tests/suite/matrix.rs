//! The README's table of what runs where. `ATTN_UPDATE=1 cargo test -p attn-conformance --test suite matrix` writes it again.
//!
//! Formats, their bytes and errors, and which claim a backend is held to, are what the code gives; each line of the rest names the tests that hold it on the
//! backends that are here.

use std::{env, fmt::Write, fs, path::Path};

use attn_conformance::check::are_bits_specified;
use attn_core::{KvFormat, PageLayout};
use attn_cpu::CpuBackend;

use crate::layers::{decode, layers};

const BACKENDS: [&str; 3] = ["cpu", "cuda", "wgpu"];

/// Formats of a line, those in integers in bold, and what is said of them behind their names.
const FORMATS: [(&[&str], &str); 3] = [
    (&["int8"], ""),
    (&["int8/int4", "int4"], " (K/V)"),
    (&["bf16", "fp8"], " with scales of 1, and `f16`"),
];

/// A line without figures: what there is, and the cell of each backend; and the tests that hold it, as files and texts in them.
type Line = (&'static str, [&'static str; 3], &'static [Test]);
type Test = (&'static str, &'static str);

const LINES: [Line; 11] = [
    (
        "heads of 64 to 576 dims, those of K and of V apart; up to 128 query heads over a KV head",
        ["yes", "yes; above 256 no floats beside integers", "yes"],
        &[("tests/src/table/wide.rs", "fn all(")],
    ),
    (
        "any number of query tokens for each sequence; windows, chunks, soft cap, ALiBi, sinks",
        ["yes", "yes", "yes"],
        &[("tests/conformance/main.rs", "trials.cases(")],
    ),
    (
        "forks, truncation, dropped windows and ranges, images of sequences, layers in one cache",
        ["yes", "yes", "yes"],
        &[
            (
                "tests/conformance/engines.rs",
                "drafts that are taken back leave no trace",
            ),
            ("tests/conformance/cache_layers.rs", "fn add("),
            ("tests/src/table/kept.rs", "fn dropped("),
        ],
    ),
    (
        "centres of K: biases of a model's keys cost nothing, and 4 and 8 bits err less; a warning where they are no help",
        ["yes", "yes", "yes"],
        &[
            ("tests/src/table/centres.rs", "fn all("),
            (
                "crates/attn/tests/events.rs",
                "fn keys_with_outlier_channels_are_told_once_for_each_cache(",
            ),
        ],
    ),
    (
        "a caller's stream and memory",
        [
            "–",
            "streams, CUDA graphs, an engine's own pages",
            "encoders, buffers",
        ],
        &[
            (
                "crates/attn-python/tests/test_cuda_plan.py",
                "def test_a_graph_replays_growing_sequences(",
            ),
            (
                "crates/attn-wgpu/tests/adapter/hostile.rs",
                "hostile: a recorded append that fails gives its pages back",
            ),
        ],
    ),
    (
        "RoPE in the append",
        ["on the host", "in the launch", "on the host"],
        &[(
            "crates/attn-python/tests/test_cuda_plan.py",
            "def test_steps_with_rotary_positions(",
        )],
    ),
    (
        "other engines' caches in place",
        ["contiguous", "contiguous, paged", "contiguous"],
        &[
            ("tests/src/case/contiguous.rs", "codes: vec![0xff"),
            (
                "crates/attn-cuda/tests/gpu/rows_in_pages.rs",
                "native: rows in pages, {format}",
            ),
        ],
    ),
    (
        "tokens sharded over devices, with one device's bits",
        ["yes", "yes", "–"],
        &[
            (
                "crates/attn-cpu/tests/shards.rs",
                "fn shards_have_the_bits_of_the_whole(",
            ),
            (
                "crates/attn-python/tests/test_distributed.py",
                "def test_gpus_together_have_the_bits_of_one_gpu(",
            ),
            (
                "crates/attn-wgpu/tests/adapter/hostile.rs",
                "hostile: shards are refused",
            ),
        ],
    ),
    (
        "faster prompts without promised bits (`Arithmetic::Fast`)",
        ["–", "yes", "–"],
        &[
            (
                "crates/attn-python/tests/test_cache.py",
                "def test_fast_is_exact_on_a_cpu(",
            ),
            (
                "crates/attn-python/tests/test_cuda.py",
                "def test_fast_prompts_are_near_the_cpus_and_few_tokens_have_its_bits(",
            ),
        ],
    ),
    (
        "block-sparse attention: the pages that a selector chose for each KV head",
        ["yes", "yes", "yes"],
        &[
            (
                "tests/conformance/selected_pages.rs",
                "{format}: selected pages of {page_size} tokens{with}",
            ),
            (
                "crates/attn-python/tests/test_cuda_plan.py",
                "def test_pages_chosen_for_each_kv_head_have_the_bits_of_these_pages_alone(",
            ),
        ],
    ),
    (
        "pages in the caller's memory, by slots and a table",
        ["yes", "yes", "–"],
        &[
            (
                "crates/attn-cpu/tests/page_pool.rs",
                "fn a_pool_has_the_bytes_and_the_bits_of_a_cache(",
            ),
            (
                "crates/attn-python/tests/test_cuda_plan.py",
                "def test_slots_and_ragged_queries(",
            ),
        ],
    ),
];

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Bytes of a token of 64 dims, in percent of bf16's.
fn bytes(format: KvFormat) -> f64 {
    let of = |format| PageLayout::new(format, 64, 64, 1).unwrap().page_bytes() as f64;
    100.0 * of(format) / of("bf16".parse().unwrap())
}

/// The relative L2 error of attention outputs on the bundled layers, in percent.
fn error(format: KvFormat) -> f64 {
    let (mut wrong, mut whole) = (0.0, 0.0);
    for layer in layers() {
        let (_, _, out, _) = decode(&CpuBackend::new(), format, &layer);
        for (got, want) in out.iter().zip(&layer.out) {
            wrong += f64::from(got - want).powi(2);
            whole += f64::from(*want).powi(2);
        }
    }
    100.0 * (wrong / whole).sqrt()
}

/// The cell of a backend: what the suite holds it to.
fn claim(backend: &str, format: KvFormat) -> &'static str {
    match (are_bits_specified(backend, format), backend) {
        // As `open` measures; the note below the table says when.
        (true, "wgpu") => "specified bits ¹",
        (true, _) => "specified bits",
        (false, _) => "within a bound, repeatable",
    }
}

fn table() -> String {
    let mut text = String::from(
        "| | `cpu`: AVX-512, AVX2, NEON, portable SIMD | `cuda`: Linux, sm_80 and newer | `wgpu`: Vulkan, Metal, DX12, WebGPU |\n|---|---|---|---|\n",
    );
    for (names, behind) in FORMATS {
        let formats: Vec<KvFormat> = names.iter().map(|name| name.parse().unwrap()).collect();
        let list = |of: &dyn Fn(KvFormat) -> String| {
            formats
                .iter()
                .map(|format| of(*format))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let is_preset = formats.iter().all(|format| format.is_integer());
        let bold = if is_preset { "**" } else { "" };
        let names: Vec<String> = names
            .iter()
            .map(|name| format!("{bold}`{name}`{bold}"))
            .collect();
        let [bytes, errors] = [
            list(&|format| format!("{:.0}", bytes(format))),
            list(&|format| format!("{:.1}", error(format))),
        ];
        write!(
            text,
            "| {}{behind}: {bytes} % of bf16's bytes, {errors} % error |",
            names.join(", ")
        )
        .unwrap();
        for backend in BACKENDS {
            let claims: Vec<_> = formats
                .iter()
                .map(|format| claim(backend, *format))
                .collect();
            assert!(
                claims.iter().all(|claim| *claim == claims[0]),
                "{names:?} are one line on {backend}"
            );
            write!(text, " {} |", claims[0]).unwrap();
        }
        text.push('\n');
    }
    for (what, cells, _) in LINES {
        writeln!(text, "| {what} | {} |", cells.join(" | ")).unwrap();
    }
    text
}

#[test]
fn the_readmes_table_is_current() {
    let path = root().join("README.md");
    let page = fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- table: what runs where -->\n", "<!-- end of table -->");
    let (before, rest) = page.split_once(begin).expect("the table's first line");
    let (current, after) = rest.split_once(end).expect("the table's last line");
    let table = table();
    if env::var("ATTN_UPDATE").is_ok_and(|update| update == "1") {
        fs::write(&path, format!("{before}{begin}{table}{end}{after}")).unwrap();
        return;
    }
    assert!(
        current == table,
        "the README's table is old; run ATTN_UPDATE=1 cargo test -p attn-conformance --test suite matrix\n{table}"
    );
}

#[test]
fn every_line_of_the_readmes_table_names_tests_that_are_there() {
    for (what, _, tests) in LINES {
        for (file, name) in tests {
            let text = fs::read_to_string(root().join(file)).unwrap_or_default();
            assert!(text.contains(name), "{what}: {file} has no `{name}`");
        }
    }
}
