//! Files of pages: damaged ones are refused, by their checksum and without it.

mod program;

use std::fs;

use program::{
    DIM, Folder, HEADS, attn, json, numbers, one_layer, quantize, refused, run, tensor, text,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_attn");

/// Writes a file with other metadata in place of `from`, as one without a checksum, so that the rest of it is what is checked.
fn with_metadata(bytes: &[u8], from: &str, to: &str, path: &str) {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let changed = text(&bytes[8..8 + header]).replace(from, to);
    let mut changed: serde_json::Value = serde_json::from_str(&changed).unwrap();
    let metadata = changed["__metadata__"].as_object_mut().unwrap();
    metadata.remove("checksum").expect("the file has one");
    let mut changed = changed.to_string();
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
fn pages_with_sizes_that_no_file_has_are_refused() {
    let (folder, file) = one_layer();
    let [pages, bad, out] = folder.paths(["pages", "bad", "out"]);
    quantize(&file, &pages, "fp8");
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
        let (from, to) = (
            &text[start - 3..end],
            format!("{}{value}", &text[start - 3..start]),
        );
        with_metadata(&bytes, from, &to, &bad);
        let output = attn(&["dequantize", &bad, &out]).output().unwrap();
        refused(&output, &["`one` has", key, value, "damaged"]);
    }
    assert_eq!(folder.names(), ["bad", "in", "pages"]);
}

#[test]
fn files_of_another_version_or_without_pages_are_refused() {
    let (folder, file) = one_layer();
    let [pages, bad, out] = folder.paths(["pages", "bad", "out"]);
    quantize(&file, &pages, "int8-tensor");
    let bytes = fs::read(&pages).unwrap();
    for (from, to, says) in [
        (
            "pages 3",
            "pages 1",
            "holds `pages 1`, but this version reads `pages 3`; make it again with `attn quantize`",
        ),
        (
            "pages 3",
            "\\u001b[2Jpages 3",
            r"holds `\u{1b}[2Jpages 3`, but",
        ),
        (
            "one.pages",
            "one.pagez",
            "tensor \"one.pagez\" belongs to no layer",
        ),
        (
            "\"one\":",
            "\"own\":",
            "belongs to no layer of its metadata",
        ),
        (
            "{\"__metadata__\":{",
            "{\"__metadata__\":{\"two\":\"{\\\"tokens\\\":1,\\\"num_kv_heads\\\":1,\\\"head_dim\\\":64}\",",
            "layer two is damaged",
        ),
        (
            "\"page_size\":\"64\"",
            "\"page_size\":\"17\"",
            "layer one is damaged",
        ),
        ("one.k_scales", "one.k_scalez", "\"one.k_scalez\" belongs"),
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
    let (folder, file) = one_layer();
    let [pages, bad, out] = folder.paths(["pages", "bad", "out"]);
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
            with_metadata(&whole, "one.residual_pages", "two.residual_pages", &bad);
            let says = ["\"two.residual_pages\" belongs to no layer"];
            refused(&run(&["dequantize", &bad, &out]), &says);
            // One page fewer, of more bytes.
            let shape = format!("[5,{}]", bytes / 10);
            with_metadata(&whole, &shape, &format!("[1,{}]", bytes / 2), &bad);
            refused(
                &run(&["dequantize", &bad, &out]),
                &["one.pages is not U8 [5,"],
            );
        }
    }
}

#[test]
fn a_flipped_bit_in_a_file_of_pages_is_refused() {
    let folder = Folder::new();
    let x = [0.5f32, -1.0, 0.25, 2.0].repeat(3 * 64 / 4);
    let shape = [3, 1, 64];
    let names = ["a.k", "a.v", "b.k", "b.v"];
    let tensors = names.map(|name| (name, &shape[..], &x[..]));
    let file = folder.write("in", &tensors, "0.125");
    let pages = folder.path("pages");
    let quantize = ["quantize", &file, &pages, "--kv", "int4", "--page-size"];
    json(&run(&[&quantize[..], &["16", "--json"]].concat()));
    let whole = fs::read(&pages).unwrap();
    let read = |bytes: &[u8]| attn_cli::pages::read_pages(bytes);
    assert!(read(&whole).unwrap().is_verified);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut bytes = whole.clone();
    let mut spaces = 0;
    // Each bit of the header, and one of every seventh byte of the pages.
    let bits = (0..header * 8).chain((header * 8..whole.len() * 8).step_by(57));
    for bit in bits {
        bytes[bit / 8] ^= 1 << (bit % 8);
        if let Ok(pages) = read(&bytes) {
            // Spaces behind the header are no content.
            assert!(pages.is_verified && bit < header * 8, "bit {bit} is taken");
            assert_eq!(whole[bit / 8], b' ', "bit {bit} is taken");
            spaces += 1;
        }
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    assert!(spaces < 64, "{spaces}");
}

#[test]
fn files_without_a_checksum_are_read_and_said_to_have_none() {
    let (folder, file) = one_layer();
    let [pages, old, out] = folder.paths(["pages", "old", "out"]);
    quantize(&file, &pages, "f16");
    with_metadata(&fs::read(&pages).unwrap(), "", "", &old);
    let inspected = run(&["inspect", &old]);
    assert!(
        text(&inspected.stdout).contains("without a checksum: lengths and codes"),
        "{}",
        text(&inspected.stdout)
    );
    assert_eq!(
        json(&run(&["inspect", &old, "--json"]))["is_verified"],
        false
    );
    assert_eq!(
        json(&run(&["inspect", &pages, "--json"]))["is_verified"],
        true
    );
    let done = run(&["dequantize", &old, &out]);
    assert!(
        text(&done.stderr).contains("old has no checksum"),
        "{}",
        text(&done.stderr)
    );
    assert_eq!(tensor(&out, "one.k").1, numbers(0));
}

/// Kills a search through all layers for each tensor: it would take minutes here.
#[test]
fn a_file_of_many_layers_is_read_once() {
    let folder = Folder::new();
    let [many, out] = folder.paths(["many", "out"]);
    let shape = r#"{"tokens":1,"num_kv_heads":1,"head_dim":64}"#;
    let (mut header, mut metadata) = (serde_json::Map::new(), serde_json::Map::new());
    for (key, value) in [("attn", "pages 3"), ("kv", "int8"), ("page_size", "64")] {
        metadata.insert(key.to_owned(), value.into());
    }
    for i in 0..30_000 {
        metadata.insert(format!("x{i}"), shape.into());
        let none = serde_json::json!({ "dtype": "U8", "shape": [0], "data_offsets": [0, 0] });
        header.insert(format!("x{i}.pages"), none);
    }
    header.insert("__metadata__".to_owned(), metadata.into());
    let header = serde_json::Value::from(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(&many, [&length[..], header.as_bytes()].concat()).unwrap();
    let start = std::time::Instant::now();
    refused(&run(&["dequantize", &many, &out]), &["x0 is damaged"]);
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}
