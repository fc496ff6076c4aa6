//! What the program writes: values, and files that are whole or not there.

mod program;

use std::fs;

use program::{Folder, attn, json, refused, run, tensor, text};

const TOKENS: usize = 70;
const HEADS: usize = 2;
const DIM: usize = 64;

/// Numbers that f16 holds exactly, each once: head 1 a hundred times head 0, V negative.
fn numbers(side: usize) -> Vec<f32> {
    let sign = [1.0, -1.0][side];
    let number = |i: usize| {
        let head = i / (TOKENS * DIM);
        let by = [1.0 / 1024.0, 0.125][head];
        sign * by * (1 + i % (TOKENS * DIM) % 2047) as f32
    };
    (0..HEADS * TOKENS * DIM).map(number).collect()
}

/// A file with one layer of those numbers.
fn input(folder: &Folder, name: &str, layer: &str) -> String {
    let shape = [HEADS, TOKENS, DIM];
    let [k, v] = [0, 1].map(numbers);
    let (k_name, v_name) = (format!("{layer}.k"), format!("{layer}.v"));
    let tensors = [(&*k_name, &shape[..], &k[..]), (&*v_name, &shape, &v)];
    folder.write(name, &tensors, "0.125")
}

#[test]
fn equal_inputs_give_equal_bytes() {
    let folder = Folder::new();
    let file = folder.path("in");
    // Several layers: the order of their metadata must not be that of a hash map.
    let x = numbers(0);
    let shape = [HEADS, TOKENS, DIM];
    let names = ["a", "b", "c", "d", "e"].map(|layer| [format!("{layer}.k"), format!("{layer}.v")]);
    let tensors: Vec<_> = names
        .as_flattened()
        .iter()
        .map(|name| (&**name, &shape[..], &x[..]))
        .collect();
    folder.write("in", &tensors, "0.125");
    let made = [0, 1, 2].map(|i| {
        let pages = folder.path(&format!("pages{i}"));
        json(&run(&[
            "quantize",
            &file,
            &pages,
            "--kv",
            "int8-tensor",
            "--json",
        ]));
        fs::read(pages).unwrap()
    });
    assert_eq!(made[0], made[1]);
    assert_eq!(made[0], made[2]);
    // Every tensor of f32 lies at a multiple of its size.
    let tensors = safetensors::SafeTensors::deserialize(&made[0]).unwrap();
    let header = 8 + u64::from_le_bytes(made[0][..8].try_into().unwrap()) as usize;
    assert_eq!(header % 8, 0);
    let base = made[0].as_ptr().addr();
    for (name, view) in tensors.tensors() {
        let at = view.data().as_ptr().addr() - base;
        assert!(
            view.dtype() != safetensors::Dtype::F32 || at % 4 == 0,
            "{name} at {at}"
        );
    }
}

/// Relative L2 difference of one head.
fn head_error(got: &[f32], want: &[f32], head: usize) -> f64 {
    let part = head * TOKENS * DIM..(head + 1) * TOKENS * DIM;
    let (mut error, mut norm) = (0.0, 0.0);
    for (a, b) in got[part.clone()].iter().zip(&want[part]) {
        error += f64::from(a - b).powi(2);
        norm += f64::from(*b).powi(2);
    }
    (error / norm).sqrt()
}

#[test]
fn every_head_of_k_and_of_v_comes_back_with_its_own_values() {
    for (kv, allowed) in [
        ("f16", 0.0),
        ("bf16", 0.01),
        ("fp8", 0.06),
        ("int8", 0.02),
        ("int8-plain", 0.02),
        ("int8-tensor", 0.02),
        ("int4", 0.2),
        ("int8/int4", 0.2),
        ("int4-g1/int4-g4", 0.2),
    ] {
        let folder = Folder::new();
        let file = input(&folder, "in", "one");
        let (pages, back) = (folder.path("pages"), folder.path("back"));
        let made = json(&run(&["quantize", &file, &pages, "--kv", kv, "--json"]));
        json(&run(&["dequantize", &pages, &back, "--json"]));
        for (side, name) in ["k", "v"].into_iter().enumerate() {
            let (shape, got) = tensor(&back, &format!("one.{name}"));
            assert_eq!(shape, [HEADS, TOKENS, DIM]);
            let want = numbers(side);
            for head in 0..HEADS {
                let error = head_error(&got, &want, head);
                assert!(error <= allowed, "{kv} {name}, head {head}: {error}");
            }
            let printed = &made["layers"][0][format!("{name}_error")];
            let printed = printed.as_f64().unwrap();
            assert!(printed <= allowed, "{kv} {name}: {printed}");
            assert_eq!(printed == 0.0, kv == "f16", "{kv} {name}: {printed}");
        }
    }
}

#[test]
fn an_existing_file_is_replaced_only_by_force() {
    let folder = Folder::new();
    let file = input(&folder, "in", "one");
    let (pages, back) = (folder.path("pages"), folder.path("back"));
    fs::write(&pages, "mine").unwrap();
    fs::write(&back, "mine").unwrap();
    let quantize = ["quantize", &file, &pages, "--kv", "int8"];
    refused(&run(&quantize), &["pages exists", "--force"]);
    assert_eq!(fs::read(&pages).unwrap(), b"mine");
    json(&run(&[&quantize[..], &["--force", "--json"]].concat()));

    let dequantize = ["dequantize", &pages, &back];
    refused(&run(&dequantize), &["back exists", "--force"]);
    assert_eq!(fs::read(&back).unwrap(), b"mine");
    json(&run(&[&dequantize[..], &["--force", "--json"]].concat()));
    assert_eq!(tensor(&back, "one.k").0, [HEADS, TOKENS, DIM]);
    assert_eq!(folder.names(), ["back", "in", "pages"]);
}

#[test]
fn an_existing_chart_is_refused_before_anything_is_measured() {
    let folder = Folder::new();
    let chart = folder.path("chart.svg");
    fs::write(&chart, "mine").unwrap();
    let shapes = ["context/8-2-ctx1024", "context/8-2-ctx4096"];
    let bench = [&["bench", "--runs", "1", "--plot", &chart], &shapes[..]].concat();
    refused(&run(&bench), &["chart.svg exists", "--force"]);
    assert_eq!(fs::read(&chart).unwrap(), b"mine");
    let nowhere = folder.path("no/such/folder.svg");
    refused(
        &run(&["bench", "--plot", &nowhere, "context/"]),
        &["folder does not exist"],
    );
    let output = run(&[&bench[..], &["--force"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(fs::read_to_string(&chart).unwrap().contains("</svg>"));
    assert_eq!(folder.names(), ["chart.svg"]);
}

#[test]
fn an_input_under_another_name_is_never_the_output() {
    let folder = Folder::new();
    let file = input(&folder, "in", "one");
    let before = fs::read(&file).unwrap();
    let hard = folder.path("hard");
    fs::hard_link(&file, &hard).unwrap();
    let mut others = vec![file.clone(), hard, folder.path("./in")];
    #[cfg(unix)]
    {
        others.push(folder.path("soft"));
        std::os::unix::fs::symlink(&file, &others[3]).unwrap();
    }
    for other in &others {
        for force in [&[][..], &["--force"]] {
            let args = ["quantize", &file, other, "--kv", "int8"];
            let output = run(&[&args, force].concat());
            refused(&output, &["both input and output"]);
        }
    }
    assert_eq!(fs::read(&file).unwrap(), before);
}

/// Runs the program in a shell that lets it write 1,024 bytes per file, or 512: a full disk, as the program sees one.
#[cfg(unix)]
#[test]
fn a_write_that_fails_leaves_the_old_file_and_no_other() {
    let folder = Folder::new();
    let file = input(&folder, "in", "one");
    let limited = |output: &str, force: &str| {
        let script = "trap '' XFSZ; ulimit -f 1; exec \"$@\"";
        let program = env!("CARGO_BIN_EXE_attn");
        let args = ["quantize", &file, output, "--kv", "int8"];
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", script, "sh", program]).args(args);
        shell.args((!force.is_empty()).then_some(force));
        shell.output().expect("a shell")
    };
    let (old, new) = (folder.path("old"), folder.path("new"));
    fs::write(&old, "mine").unwrap();
    refused(&limited(&old, "--force"), &["cannot write", "space left"]);
    refused(&limited(&new, ""), &["cannot write", "space left"]);
    assert_eq!(fs::read(&old).unwrap(), b"mine");
    assert_eq!(folder.names(), ["in", "old"]);
}

#[test]
fn layers_that_cannot_be_read_back_are_refused_before_anything_is_written() {
    let folder = Folder::new();
    let out = folder.path("out");
    for name in ["attn", "kv", "page_size"] {
        let file = input(&folder, "in", name);
        let output = run(&["quantize", &file, &out, "--kv", "int8"]);
        refused(&output, &[&format!("layer {name} cannot"), "rename"]);
    }
    for shape in [[2, 0, 64], [0, 3, 64], [2, 3, 0], [1 << 53, 0, 64]] {
        let tensors = [("one.k", &shape[..], &[][..]), ("one.v", &shape, &[])];
        let file = folder.write("in", &tensors, "0.125");
        for kv in ["int8", "fp8"] {
            let output = run(&["quantize", &file, &out, "--kv", kv]);
            refused(&output, &["one.k is [", "at least one"]);
        }
        refused(&run(&["run", &file]), &["one.k is [", "at least one"]);
    }
    assert_eq!(folder.names(), ["in"]);
}

#[test]
fn layers_whose_names_only_resemble_settings_are_written_and_read() {
    let folder = Folder::new();
    let (pages, back) = (folder.path("pages"), folder.path("back"));
    for name in ["kv.0", "attn.kv", "page_size "] {
        let file = input(&folder, "in", name);
        let output = run(&["quantize", &file, &pages, "--kv", "f16", "--force"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        json(&run(&["dequantize", &pages, &back, "--force", "--json"]));
        assert_eq!(tensor(&back, &format!("{name}.v")).1, numbers(1));
    }
}

#[test]
fn pages_with_sizes_that_no_file_has_are_refused() {
    let folder = Folder::new();
    let file = input(&folder, "in", "one");
    let (pages, bad, out) = (folder.path("pages"), folder.path("bad"), folder.path("out"));
    json(&run(&["quantize", &file, &pages, "--kv", "fp8", "--json"]));
    let bytes = fs::read(&pages).unwrap();
    for (key, value) in [
        ("tokens", "0"),
        ("tokens", "9007199254740993"),
        ("num_kv_heads", "9007199254740993"),
        ("head_dim", "9007199254740992"),
    ] {
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let text = text(&bytes[8..8 + header]);
        let start = text.find(&format!("{key}\\\":")).expect("the key") + key.len() + 3;
        let end = start + text[start..].find([',', '}']).unwrap();
        let mut changed = format!("{}{value}{}", &text[..start], &text[end..]);
        while !changed.len().is_multiple_of(8) {
            changed.push(' ');
        }
        let mut all = (changed.len() as u64).to_le_bytes().to_vec();
        all.extend(changed.as_bytes());
        all.extend(&bytes[8 + header..]);
        fs::write(&bad, all).unwrap();
        let output = attn(&["dequantize", &bad, &out]).output().unwrap();
        refused(&output, &["`one` has", key, value, "damaged"]);
    }
    assert_eq!(folder.names(), ["bad", "in", "pages"]);
}

#[test]
fn heads_of_zeros_have_pages_in_every_format() {
    let folder = Folder::new();
    let (shape, zeros) = ([HEADS, TOKENS, DIM], [0.0; HEADS * TOKENS * DIM]);
    let tensors = [("one.k", &shape[..], &zeros[..]), ("one.v", &shape, &zeros)];
    let file = folder.write("in", &tensors, "0.125");
    let (pages, back) = (folder.path("pages"), folder.path("back"));
    for kv in ["fp8", "int8", "int8-tensor", "int4"] {
        let args = ["quantize", &file, &pages, "--kv", kv, "--force", "--json"];
        assert_eq!(json(&run(&args))["layers"][0]["k_error"], 0.0, "{kv}");
        json(&run(&["dequantize", &pages, &back, "--force", "--json"]));
        assert_eq!(tensor(&back, "one.k").1, zeros, "{kv}");
    }
}

#[test]
fn tables_of_pages_end_with_the_file_and_its_bytes() {
    let folder = Folder::new();
    let file = input(&folder, "in", "one");
    let (pages, back) = (folder.path("pages"), folder.path("back"));
    let printed = |args: &[&str]| {
        let output = run(args);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let table = printed(&["quantize", &file, &pages, "--kv", "f16"]);
    let bytes = |path: &str| fs::metadata(path).unwrap().len();
    assert!(
        table.starts_with("| layer | tokens | bytes | K error | V error |\n"),
        "{table}"
    );
    assert!(
        table.contains("\n| one | 70 | 65536 | 0.000 % | 0.000 % |\n"),
        "{table}"
    );
    let end = format!("\n{} bytes of f16 pages in {pages}\n", bytes(&pages));
    assert!(table.ends_with(&end), "{table}");

    let line = printed(&["dequantize", &pages, &back]);
    let want = format!(
        "1 layers of f16 pages as f32 in {back}, {} bytes\n",
        bytes(&back)
    );
    assert_eq!(line, want);

    let table = printed(&["inspect", &pages, "--against", &file]);
    assert!(table.starts_with("pages of 64 tokens in f16\n"), "{table}");
    // Two pages of 64 tokens, of which 70 are cached.
    assert!(
        table.contains("| one | 70 | 2 | 64 | 65536 | 468.1 | 0.000 % | 0.000 % |"),
        "{table}"
    );
    let table = printed(&["inspect", &file]);
    assert!(table.starts_with("K and V to quantize\n"), "{table}");
    assert!(table.contains("| one | 70 | 2 | 64 | F32 | "), "{table}");
}

#[test]
fn inspect_prints_errors_in_percent_and_compares_like_with_like() {
    let folder = Folder::new();
    let file = input(&folder, "in", "one");
    let (pages, other) = (folder.path("pages"), input(&folder, "other", "two"));
    let made = json(&run(&["quantize", &file, &pages, "--kv", "int4", "--json"]));
    let output = run(&["inspect", &pages, "--against", &file]);
    let percent =
        |side: &str| format!("{:.3} %", made["layers"][0][side].as_f64().unwrap() * 100.0);
    let errors = format!("| {} | {} |", percent("k_error"), percent("v_error"));
    assert!(
        text(&output.stdout).contains(&errors),
        "{}",
        text(&output.stdout)
    );
    let none = run(&["inspect", &pages, "--against", &other]);
    assert!(
        text(&none.stderr).contains("has no layer one"),
        "{}",
        text(&none.stderr)
    );
    let x = [0.5; 2 * 3 * 64];
    let short = [
        ("one.k", &[2, 3, 64][..], &x[..]),
        ("one.v", &[2, 3, 64], &x),
    ];
    let short = folder.write("short", &short, "0.125");
    let differs = run(&["inspect", &pages, "--against", &short]);
    assert_eq!(differs.status.code(), Some(2));
    assert!(
        text(&differs.stderr).contains("but [3, 2, 64]"),
        "{}",
        text(&differs.stderr)
    );
}

/// Writes a file with other metadata in place of `from`.
fn with_metadata(bytes: &[u8], from: &str, to: &str, path: &str) {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut changed = text(&bytes[8..8 + header]).replace(from, to);
    while !changed.len().is_multiple_of(8) {
        changed.push(' ');
    }
    let length = (changed.len() as u64).to_le_bytes();
    fs::write(
        path,
        [&length[..], changed.as_bytes(), &bytes[8 + header..]].concat(),
    )
    .unwrap();
}

#[test]
fn files_of_another_version_or_without_pages_are_refused() {
    let folder = Folder::new();
    let file = input(&folder, "in", "one");
    let (pages, bad, out) = (folder.path("pages"), folder.path("bad"), folder.path("out"));
    json(&run(&[
        "quantize",
        &file,
        &pages,
        "--kv",
        "int8-tensor",
        "--json",
    ]));
    let bytes = fs::read(&pages).unwrap();
    for (from, to, says) in [
        (
            "pages 2",
            "pages 1",
            "holds `pages 1`, but this version reads `pages 2`; make it again with `attn quantize`",
        ),
        ("one.pages", "one.pagez", "no tensor NAME.pages"),
        (
            "\"page_size\":\"64\"",
            "\"page_size\":\"17\"",
            "layer one is damaged",
        ),
        ("one.k_scales", "one.k_scalez", "layer one is damaged"),
    ] {
        with_metadata(&bytes, from, to, &bad);
        refused(&run(&["dequantize", &bad, &out]), &[says]);
    }
    // Two scales of f32 become four of f16.
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = text(&bytes[8..8 + header]);
    let at = header.find("\"one.k_scales\"").unwrap();
    let entry = &header[at..at + header[at..].find('}').unwrap()];
    let changed = entry
        .replace("F32", "F16")
        .replace("\"shape\":[2]", "\"shape\":[4]");
    assert_ne!(changed, entry);
    with_metadata(&bytes, entry, &changed, &bad);
    refused(
        &run(&["dequantize", &bad, &out]),
        &["one.k_scales is F16; it must be f32"],
    );
}

#[test]
fn residual_pages_lie_beside_the_pages_and_are_not_optional() {
    let folder = Folder::new();
    let file = input(&folder, "in", "one");
    let (pages, bad, out) = (folder.path("pages"), folder.path("bad"), folder.path("out"));
    let quantize = ["quantize", &file, &pages, "--page-size", "16", "--json"];
    for (kv, residuals, bytes) in [
        // 70 tokens are five pages of 16: codes of 4 bits, and a scale.
        ("int4", true, 10 * 16 * HEADS * 2 * (DIM / 2 + 2)),
        ("int8/int4", true, 10 * 16 * HEADS * (3 * DIM / 2 + 4)),
        ("int4-w0", false, 5 * 16 * HEADS * 2 * (DIM / 2 + 2)),
    ] {
        let made = json(&run(&[&quantize[..], &["--kv", kv, "--force"]].concat()));
        assert_eq!(made["layers"][0]["bytes"], bytes, "{kv}");
        let whole = fs::read(&pages).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&whole).unwrap();
        let shape = tensors
            .tensor("one.residual_pages")
            .map(|x| x.shape().to_vec());
        assert_eq!(shape.ok(), residuals.then(|| vec![5, bytes / 10]), "{kv}");
        if residuals {
            with_metadata(&whole, "one.residual_pages", "one.residual_pagez", &bad);
            let says = ["layer one is damaged: one.residual_pages has 0 bytes"];
            refused(&run(&["dequantize", &bad, &out]), &says);
        }
    }
}

#[test]
fn the_least_layer_and_the_largest_static_code_come_back() {
    let folder = Folder::new();
    let x: Vec<f32> = (0..64).map(|i| i as f32 / 7.0 - 3.0).collect();
    let shape = [1, 1, 64];
    let tensors = [("one.k", &shape[..], &x[..]), ("one.v", &shape, &x)];
    let file = folder.write("in", &tensors, "0.125");
    let (pages, back) = (folder.path("pages"), folder.path("back"));
    json(&run(&[
        "quantize",
        &file,
        &pages,
        "--kv",
        "int8-tensor",
        "--json",
    ]));
    json(&run(&["dequantize", &pages, &back, "--json"]));
    let (shape, got) = tensor(&back, "one.v");
    assert_eq!(shape, [1, 1, 64]);
    // The scale maps the largest magnitude to code 127, and back.
    assert!((got[63] - x[63]).abs() < 1e-5, "{} for {}", got[63], x[63]);
}

#[test]
fn tensors_that_do_not_fit_each_other_are_refused() {
    let folder = Folder::new();
    let x = [0.5; 2 * 4 * 64];
    let kv = [2, 2, 64];
    let run_on = |tensors: &[(&str, &[usize], usize)]| {
        let tensors: Vec<_> = tensors
            .iter()
            .map(|(name, shape, n)| (*name, *shape, &x[..*n]))
            .collect();
        run(&[
            "run",
            &folder.write("in", &tensors, "0.125"),
            "--backend",
            "cpu",
        ])
    };
    let (k, v) = (("x.k", &kv[..], 256), ("x.v", &kv[..], 256));
    refused(
        &run_on(&[k, ("x.v", &[2, 1, 64], 128)]),
        &["K and V need the same shape"],
    );
    let q = ("x.q", &[1, 2, 64][..], 128);
    refused(
        &run_on(&[k, v, ("x.q", &[1, 2, 32], 64)]),
        &["x.q has head_dim 32, but x.k has 64"],
    );
    refused(
        &run_on(&[k, v, ("x.q", &[1, 3, 64], 192)]),
        &["x.q does not fit x.k"],
    );
    let (out, lse) = (("x.out", &[1, 2, 64][..], 128), ("x.lse", &[1, 2][..], 2));
    let says = ["x.out must have the shape of x.q"];
    refused(&run_on(&[k, v, q, ("x.out", &[1, 1, 64], 64), lse]), &says);
    refused(&run_on(&[k, v, q, out, ("x.lse", &[1, 1], 1)]), &says);
    let whole = run_on(&[k, v, q, out, lse]);
    assert_eq!(whole.status.code(), Some(0), "{}", text(&whole.stderr));
    assert!(
        text(&whole.stdout)
            .contains("2 query heads, 2 KV heads, head_dim 64, q_len 1, 2 tokens; x\n")
    );
}
