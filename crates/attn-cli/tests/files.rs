//! What the program writes: values, and files that are whole or not there.

mod program;

use std::fs;

use program::{
    DIM, Folder, HEADS, TOKENS, dequantize, input, json, numbers, one_layer, printed, quantize,
    refused, run, tensor, text,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_attn");

#[test]
fn equal_inputs_give_equal_bytes() {
    let folder = Folder::new();
    let file = folder.path("in");
    // Several layers: the order of their metadata must not be that of a hash map.
    let x = numbers(0);
    let shape = [TOKENS, HEADS, DIM];
    let names = ["a", "b", "c", "d", "e"].map(|layer| [format!("{layer}.k"), format!("{layer}.v")]);
    let tensors: Vec<_> = names
        .as_flattened()
        .iter()
        .map(|name| (&**name, &shape[..], &x[..]))
        .collect();
    folder.write("in", &tensors, "0.125");
    let made = [0, 1, 2].map(|i| {
        let pages = folder.path(&format!("pages{i}"));
        quantize(&file, &pages, "int8-tensor");
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
    let rows = |x: &[f32]| -> Vec<f32> {
        let rows = x.chunks(DIM).skip(head).step_by(HEADS);
        rows.flatten().copied().collect()
    };
    let (mut error, mut norm) = (0.0, 0.0);
    for (a, b) in rows(got).iter().zip(&rows(want)) {
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
        let (folder, file) = one_layer();
        let [pages, back] = folder.paths(["pages", "back"]);
        let made = quantize(&file, &pages, kv);
        dequantize(&pages, &back);
        for (side, name) in ["k", "v"].into_iter().enumerate() {
            let (shape, got) = tensor(&back, &format!("one.{name}"));
            assert_eq!(shape, [TOKENS, HEADS, DIM]);
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
    let (folder, file) = one_layer();
    let [pages, back] = folder.paths(["pages", "back"]);
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
    assert_eq!(tensor(&back, "one.k").0, [TOKENS, HEADS, DIM]);
    assert_eq!(folder.names(), ["back", "in", "pages"]);
}

#[test]
fn an_input_under_another_name_is_never_the_output() {
    let (folder, file) = one_layer();
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
    let (folder, file) = one_layer();
    let limited = |output: &str, force: &str| {
        let script = "trap '' XFSZ; ulimit -f 1; exec \"$@\"";
        let args = ["quantize", &file, output, "--kv", "int8"];
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", script, "sh", PROGRAM]).args(args);
        shell.args((!force.is_empty()).then_some(force));
        shell.output().expect("a shell")
    };
    let [old, new] = folder.paths(["old", "new"]);
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
    for name in ["attn", "kv", "page_size", "checksum"] {
        let file = input(&folder, "in", name);
        let output = run(&["quantize", &file, &out, "--kv", "int8"]);
        refused(&output, &[&format!("layer {name} cannot"), "rename"]);
    }
    for shape in [[0, 2, 64], [3, 0, 64], [3, 2, 0], [0, 1 << 53, 64]] {
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
    let [pages, back] = folder.paths(["pages", "back"]);
    for name in ["kv.0", "attn.kv", "page_size "] {
        let file = input(&folder, "in", name);
        printed(&["quantize", &file, &pages, "--kv", "f16", "--force"]);
        json(&run(&["dequantize", &pages, &back, "--force", "--json"]));
        assert_eq!(tensor(&back, &format!("{name}.v")).1, numbers(1));
    }
}

#[test]
fn heads_of_zeros_have_pages_in_every_format() {
    let folder = Folder::new();
    let (shape, zeros) = ([TOKENS, HEADS, DIM], [0.0; HEADS * TOKENS * DIM]);
    let tensors = [("one.k", &shape[..], &zeros[..]), ("one.v", &shape, &zeros)];
    let file = folder.write("in", &tensors, "0.125");
    let [pages, back] = folder.paths(["pages", "back"]);
    for kv in ["fp8", "int8", "int8-tensor", "int4"] {
        let args = ["quantize", &file, &pages, "--kv", kv, "--force", "--json"];
        assert_eq!(json(&run(&args))["layers"][0]["k_error"], 0.0, "{kv}");
        json(&run(&["dequantize", &pages, &back, "--force", "--json"]));
        assert_eq!(tensor(&back, "one.k").1, zeros, "{kv}");
    }
}

#[test]
fn tables_of_pages_end_with_the_file_and_its_bytes() {
    let (folder, file) = one_layer();
    let [pages, back] = folder.paths(["pages", "back"]);
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
    let end = format!(
        "\nK and V read as [seq, kv_heads, head_dim]\n{} bytes of f16 pages in {pages}\n",
        bytes(&pages)
    );
    assert!(table.ends_with(&end), "{table}");

    let line = printed(&["dequantize", &pages, &back]);
    let want = format!(
        "1 layers of f16 pages as f32 in {back}, {} bytes\n",
        bytes(&back)
    );
    assert_eq!(line, want);

    let table = printed(&["inspect", &pages, "--against", &file]);
    let begin = "pages of 64 tokens in f16; their checksum is right\n";
    assert!(table.starts_with(begin), "{table}");
    // Two pages of 64 tokens, of which 70 are cached.
    assert!(
        table.contains("| one | 70 | 2 | 64 | 65536 | 468.1 | 0.000 % | 0.000 % |"),
        "{table}"
    );
    let table = printed(&["inspect", &file]);
    let begin = "K and V to quantize, read as [seq, kv_heads, head_dim]\n";
    assert!(table.starts_with(begin), "{table}");
    assert!(table.contains("| one | 70 | 2 | 64 | F32 | "), "{table}");
}

#[test]
fn inspect_prints_errors_in_percent_and_compares_like_with_like() {
    let (folder, file) = one_layer();
    let (pages, other) = (folder.path("pages"), input(&folder, "other", "two"));
    let made = quantize(&file, &pages, "int4");
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
        ("one.k", &[3, 2, 64][..], &x[..]),
        ("one.v", &[3, 2, 64], &x),
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

#[test]
fn the_least_layer_and_the_largest_static_code_come_back() {
    let folder = Folder::new();
    let x: Vec<f32> = (0..64).map(|i| i as f32 / 7.0 - 3.0).collect();
    let shape = [1, 1, 64];
    let tensors = [("one.k", &shape[..], &x[..]), ("one.v", &shape, &x)];
    let file = folder.write("in", &tensors, "0.125");
    let [pages, back] = folder.paths(["pages", "back"]);
    quantize(&file, &pages, "int8-tensor");
    dequantize(&pages, &back);
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
        &run_on(&[k, ("x.v", &[1, 2, 64], 128)]),
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
    let says = ["they must have the shape of x.q, [1, 2, 64], and [1, 2]"];
    for (shape, n) in [(&[1, 1, 64][..], 64), (&[2, 1, 64], 128), (&[128], 128)] {
        refused(&run_on(&[k, v, q, ("x.out", shape, n), lse]), &says);
    }
    for (shape, n) in [(&[1, 1][..], 1), (&[2, 1], 2), (&[2], 2)] {
        refused(&run_on(&[k, v, q, out, ("x.lse", shape, n)]), &says);
    }
    // One of both exact results, and queries of no token.
    refused(&run_on(&[k, v, q, out]), &["x.out, but no x.lse"]);
    refused(&run_on(&[k, v, q, lse]), &["x.lse, but no x.out"]);
    let none = ("x.q", &[0, 2, 64][..], 0);
    refused(&run_on(&[k, v, none]), &["at least one query token"]);
    refused(&run_on(&[k, v, ("y.v", &kv, 256)]), &["y.v, but no y.k"]);
    let whole = run_on(&[k, v, q, out, lse]);
    assert_eq!(whole.status.code(), Some(0), "{}", text(&whole.stderr));
    assert!(
        text(&whole.stdout)
            .contains("2 query heads, 2 KV heads, head_dim 64, q_len 1, 2 tokens; x; K and V read as [seq, kv_heads, head_dim]\n")
    );
}

#[test]
fn the_order_of_k_and_v_is_the_files_or_the_one_that_is_asked_for() {
    let folder = Folder::new();
    // Heads first: the numbers of each head side by side.
    let turned = |x: &[f32]| -> Vec<f32> {
        let head = |h| x.chunks(DIM).skip(h).step_by(HEADS).flatten().copied();
        (0..HEADS).flat_map(head).collect()
    };
    let shape = [HEADS, TOKENS, DIM];
    let [k, v] = [0, 1].map(|side| turned(&numbers(side)));
    let tensors = [("one.k", &shape[..], &k[..]), ("one.v", &shape, &v)];
    let file = folder.write("in", &tensors, "0.125");
    let [pages, back] = folder.paths(["pages", "back"]);
    let quantize = [
        "quantize", &file, &pages, "--kv", "f16", "--force", "--json",
    ];
    let made = json(&run(&[&quantize[..], &["--layout", "heads-first"]].concat()));
    assert_eq!(made["layout"], "[kv_heads, seq, head_dim]");
    assert_eq!(made["layers"][0]["tokens"], TOKENS);
    dequantize(&pages, &back);
    assert_eq!(
        tensor(&back, "one.k"),
        (vec![TOKENS, HEADS, DIM], numbers(0))
    );
    // What dequantize writes names its order, which no option overrules.
    let again = ["quantize", &back, &pages, "--kv", "f16", "--force"];
    refused(
        &run(&[&again[..], &["--layout", "heads-first"]].concat()),
        &["says that K and V are [seq, kv_heads, head_dim]"],
    );
    json(&run(&[&again[..], &["--json"]].concat()));
    let against = ["inspect", &pages, "--against", &file, "--json"];
    let same = json(&run(&[&against[..], &["--layout", "heads-first"]].concat()));
    assert_eq!(same["layers"][0]["k_error"], 0.0);
    // Without a word it is the library's order: two tokens of 70 heads.
    assert_eq!(json(&run(&quantize))["layers"][0]["tokens"], HEADS);
    // What can only be mistaken is refused.
    let x = vec![0.5; 2 * 300 * 64];
    let shape = [2, 300, 64];
    let tensors = [("one.k", &shape[..], &x[..]), ("one.v", &shape, &x)];
    let many = folder.write("many", &tensors, "0.125");
    for command in [&["inspect", &many][..], &["run", &many]] {
        refused(&run(command), &["300 KV heads of 2 tokens", "--layout"]);
    }
}

#[test]
fn names_of_layers_are_printed_without_control_characters() {
    let folder = Folder::new();
    let name = "a\u{1b}[31m\nb";
    let file = input(&folder, "in", name);
    let [pages, back] = folder.paths(["pages", "back"]);
    let made = run(&["quantize", &file, &pages, "--kv", "f16"]);
    let seen = run(&["inspect", &pages]);
    for output in [&made, &seen] {
        let table = text(&output.stdout);
        assert!(table.contains(r"| a\u{1b}[31m\nb | 70 |"), "{table}");
        assert!(!table.contains('\u{1b}'), "{table}");
    }
    refused(&run(&["run", &file]), &[r"no tensor a\u{1b}[31m\nb.q"]);
    // The name itself is kept.
    let done = dequantize(&pages, &back);
    assert_eq!(done["layers"][0]["layer"], name);
    assert_eq!(tensor(&back, &format!("{name}.v")).1, numbers(1));
}
