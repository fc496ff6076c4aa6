//! `attn-eval generate`, `perplexity`, `needle` and `layers` on a small random model that the test writes.

#[path = "../../attn-cli/tests/program/mod.rs"]
mod program;

#[cfg(feature = "hub")]
#[path = "models/hub.rs"]
mod hub;
#[path = "models/tiny.rs"]
mod tiny;

use program::*;
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_attn-eval");

/// A folder with the model, and its path.
fn model() -> (Folder, String) {
    let folder = Folder::new();
    let path = folder.path("tiny.gguf");
    std::fs::write(&path, tiny::gguf()).unwrap();
    (folder, path)
}

/// A command over the model on the CPU, with more arguments.
fn with<'a>(command: &'a str, model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let first = [command, "--backend", "cpu", "--model", model];
    [&first, more].concat()
}

fn generated(model: &str, more: &[&str]) -> Value {
    let all = [&["--json"], more].concat();
    json(&run(&with("generate", model, &all)))
}

#[test]
fn generate_prints_text_with_speed_and_bytes_beside_it() {
    let (_folder, model) = model();
    let made = generated(&model, &["--tokens", "12", "Once upon a time"]);
    let of = &made["formats"][0];
    assert_eq!(of["kv"], "int8");
    assert_eq!(of["prompt_tokens"], 16);
    let tokens = of["tokens"][0].as_array().unwrap();
    assert!((1..=12).contains(&tokens.len()), "{made}");
    assert!(of["cache_bytes"].as_u64().unwrap() > 0);
    let output = run(&with(
        "generate",
        &model,
        &["--tokens", "12", "Once upon a time"],
    ));
    assert_eq!(output.status.code(), Some(0));
    // The text alone is on standard output.
    let text_of = of["texts"][0].as_str().unwrap();
    assert_eq!(text(&output.stdout), format!("{text_of}\n"));
    let beside = text(&output.stderr);
    assert!(beside.contains("int8: prompt 16 tokens"), "{beside}");
    assert!(beside.contains("cache 0."), "{beside}");
}

#[test]
fn keys_that_are_not_known_are_named_beside_the_text() {
    let (folder, model) = model();
    let mut bytes = std::fs::read(&model).unwrap();
    let key = "tokenizer.ggml.pre";
    let mut places = bytes.windows(key.len());
    let at = places.position(|window| window == key.as_bytes()).unwrap();
    bytes[at + key.len() - 1] ^= 2;
    let path = folder.path("other.gguf");
    std::fs::write(&path, bytes).unwrap();
    for json in [&[][..], &["--json"]] {
        let more = [json, &["--tokens", "2", "a"]].concat();
        let output = run(&with("generate", &path, &more));
        let beside = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{beside}");
        assert!(beside.contains("other.gguf: its metadata"), "{beside}");
        assert!(beside.contains("\"tokenizer.ggml.prg\""), "{beside}");
    }
}

#[test]
fn a_prompts_text_is_the_same_in_any_batch_and_changes_with_the_seed() {
    let (_folder, model) = model();
    let prompts = ["To be, or not to be", "To be, or else", "To bed"];
    let drawn = |more: &[&str], prompts: &[&str]| {
        let first = ["--tokens", "20", "--temperature", "1.5"];
        let made = generated(&model, &[&first, more, prompts].concat());
        let tokens = made["formats"][0]["tokens"].as_array().unwrap();
        tokens.clone()
    };
    let alone: Vec<Value> = prompts
        .iter()
        .map(|prompt| drawn(&["--seed", "1"], &[prompt]).remove(0))
        .collect();
    for more in [
        ["--seed", "1", "--batch", "1"],
        ["--seed", "1", "--batch", "2"],
        ["--seed", "1", "--chunk", "3"],
    ] {
        assert_eq!(drawn(&more, &prompts), alone, "{more:?}");
    }
    assert_ne!(drawn(&["--seed", "2"], &prompts), alone);
    // Several texts name their prompts.
    let output = run(&with("generate", &model, &["--tokens", "4", "one", "two"]));
    let printed = text(&output.stdout);
    assert!(
        printed.contains("[int8] one") && printed.contains("[int8] two"),
        "{printed}"
    );
}

#[test]
fn side_by_side_says_how_long_formats_agree() {
    let (_folder, model) = model();
    let arguments = [
        "--kv",
        "bf16,int4",
        "--tokens",
        "40",
        "--side-by-side",
        "A | B",
    ];
    let output = run(&with("generate", &model, &arguments));
    let table = text(&output.stdout);
    let made = generated(&model, &["--kv", "bf16,int4", "--tokens", "40", "A | B"]);
    let tokens = |i: usize| made["formats"][i]["tokens"][0].as_array().unwrap().clone();
    let (first, second) = (tokens(0), tokens(1));
    let same = first
        .iter()
        .zip(&second)
        .take_while(|(a, b)| a == b)
        .count();
    assert!(same < first.len(), "4 bits change no token of {first:?}");
    for line in [
        format!("| bf16 | {} tokens |", first.len()),
        format!("| int4 | {same} tokens |"),
    ] {
        assert!(table.contains(&line), "{line} is not in {table}");
    }
}

/// A text of many words.
fn prose(folder: &Folder) -> String {
    let path = folder.path("prose.txt");
    let words = (0..200).map(|i: u32| format!("word{} ", i.wrapping_mul(2_654_435_761) % 1000));
    std::fs::write(&path, words.collect::<String>()).unwrap();
    path
}

#[test]
fn perplexity_prints_a_table_json_and_a_plot() {
    let (folder, model) = model();
    let (prose, plot) = (prose(&folder), folder.path("kl.svg"));
    let arguments = [
        "--text",
        &prose,
        "--tokens",
        "100",
        "--pieces",
        "2",
        "--kv",
        "f32,int8,int4-g1",
    ];
    let output = run(&with(
        "perplexity",
        &model,
        &[&arguments[..], &["--plot", &plot]].concat(),
    ));
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(
        table.contains("2 pieces of 100 tokens, products in f32"),
        "{table}"
    );
    assert!(table.contains("| f32 | 1024 |"), "{table}");
    let svg = std::fs::read_to_string(&plot).unwrap();
    assert!(svg.contains("int4-g1") && svg.contains("bytes per token"));
    let made = json(&run(&with(
        "perplexity",
        &model,
        &[&arguments[..], &["--json"]].concat(),
    )));
    let kl = |i: usize| made["formats"][i]["mean_kl"].as_f64().unwrap();
    assert_eq!(kl(0), 0.0);
    assert!(0.0 < kl(1) && kl(1) < kl(2), "{made}");
    // The table and JSON have the same figures.
    assert!(table.contains(&format!("{:.3} |", kl(2) * 1e3)), "{table}");
    // A plot that exists stays, and nothing is computed.
    let again = run(&with(
        "perplexity",
        &model,
        &[&arguments[..], &["--plot", &plot]].concat(),
    ));
    refused(&again, &["kl.svg", "--force"]);
    // So does an input.
    for input in [&prose, &model] {
        let forced = [&arguments[..], &["--plot", input, "--force"]].concat();
        let before = std::fs::read(input).unwrap();
        let output = run(&with("perplexity", &model, &forced));
        refused(&output, &[input, "both input and output"]);
        assert!(std::fs::read(input).unwrap() == before);
    }
    // Packed weights of f32 are f32: the same predictions but for the order of sums.
    let packed = [&arguments[..], &["--products", "packed", "--json"]].concat();
    let made = json(&run(&with("perplexity", &model, &packed)));
    assert_eq!(made["products"], "packed");
    assert!(
        made["formats"][0]["mean_kl"].as_f64().unwrap() < 1e-6,
        "{made}"
    );
}

#[test]
fn needle_prints_a_table_and_json() {
    let (folder, model) = model();
    let prose = prose(&folder);
    let arguments = [
        "--text",
        &prose,
        "--contexts",
        "300,400",
        "--needles",
        "2",
        "--kv",
        "f32,int4",
    ];
    let made = json(&run(&with(
        "needle",
        &model,
        &[&arguments[..], &["--json"]].concat(),
    )));
    let table = printed(&with("needle", &model, &arguments));
    assert!(table.contains("| K/V | 300 | 400 |"), "{table}");
    let kl = |context: usize, i: usize| {
        let kl = made["contexts"][context]["formats"][i]["mean_kl"].as_f64();
        kl.unwrap()
    };
    for context in [0, 1] {
        assert_eq!(kl(context, 0), 0.0);
        let text = format!("{:.2} |", kl(context, 1) * 1e3);
        assert!(kl(context, 1) > 0.0 && table.contains(&text), "{table}");
    }
    let found = &made["contexts"][1]["formats"][1]["found_of_needles"];
    assert_eq!(found[0].as_array().unwrap().len(), 2, "{made}");
    let refusal = |more: &[&str], says: &str| {
        let all = [&["--text", &prose], more].concat();
        refused(&run(&with("needle", &model, &all)), &[says]);
    };
    refusal(&["--contexts", "513"], "room for 512");
    refusal(
        &["--contexts", "100", "--needles", "9"],
        "or more for 9 needles",
    );
    refusal(
        &["--contexts", "500", "--rounds", "9", "--needles", "1"],
        "9 rounds of 500",
    );
}

/// The file is read by what reads the files of `attn run`.
#[test]
fn layers_writes_a_file_that_attn_run_reads() {
    let (folder, model) = model();
    let (prose, out) = (prose(&folder), folder.path("layers.safetensors"));
    let command = |more: &[&str]| {
        let first = ["layers", "--model", &model, "--text", &prose];
        run(&[&first[..], more, &[&out]].concat())
    };
    let chosen = ["--layers", "1,0", "--tokens", "90", "--queries", "5"];
    let made = json(&command(&[&chosen[..], &["--json"]].concat()));
    assert_eq!(made["tokens"], 90);
    let read = attn_cli::data::load(Some(out.as_ref()), None).unwrap();
    assert_eq!((read.layers.len(), read.scale), (2, 0.125));
    for (i, layer) in read.layers.iter().enumerate() {
        assert_eq!(layer.kv.name.raw(), format!("layers.{i}"));
        assert_eq!(
            (layer.kv.seq, layer.kv.kv_heads, layer.kv.head_dim),
            (90, 1, 64)
        );
        assert_eq!((layer.q_len, layer.q_heads), (5, 2));
        assert!(layer.out.iter().all(|x| x.is_finite()));
    }
    // A first token of its own, and fewer queries: the same rows where both have them.
    let shorter = ["--layers", "0", "--tokens", "80", "--force"];
    assert_eq!(command(&shorter).status.code(), Some(0));
    let again = attn_cli::data::load(Some(out.as_ref()), None).unwrap();
    let (k, first) = (&again.layers[0].kv.k, &read.layers[0].kv.k);
    assert_eq!((again.layers[0].q_len, k.len()), (8, 80 * 64));
    assert!(k[..] == first[..k.len()]);
    let moved = [
        "--layers", "0", "--tokens", "80", "--first", "10", "--force",
    ];
    assert_eq!(command(&moved).status.code(), Some(0));
    let moved = attn_cli::data::load(Some(out.as_ref()), None).unwrap();
    assert!(moved.layers[0].kv.k != *k);
    refused(&command(&chosen), &["layers.safetensors", "--force"]);
    let [config, weights] = ["config.json", "model.safetensors"].map(|name| folder.path(name));
    for file in [&config, &weights] {
        std::fs::write(file, "{}").unwrap();
    }
    for (model, input) in [
        (&model, &prose),
        (&model, &model),
        (&folder.path(""), &config),
        (&folder.path(""), &weights),
        (&weights, &weights),
        (&weights, &config),
    ] {
        let first = ["layers", "--model", model, "--text", &prose];
        let output = run(&[&first[..], &shorter, &[input]].concat());
        refused(&output, &[input, "both input and output"]);
    }
    let refusal = |more: &[&str], says: &str| {
        refused(&command(&[more, &["--force"]].concat()), &[says]);
    };
    refusal(&["--layers", "2", "--tokens", "90"], "0 to 1, each once");
    refusal(&["--layers", "0", "--tokens", "513"], "room for 512");
    refusal(
        &["--layers", "0", "--tokens", "500", "--first", "9999999"],
        "--first",
    );
}

/// K, V and Q of a model's first layer over a text.
fn first_layer(folder: &Folder, model: &str, prose: &str) -> attn_cli::data::Layer {
    let out = folder.path("first.safetensors");
    let arguments = ["--model", model, "--text", prose, "--layers", "0"];
    let output = run(&[
        &["layers"],
        &arguments[..],
        &["--tokens", "60", "--force", &out],
    ]
    .concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let mut read = attn_cli::data::load(Some(out.as_ref()), None).unwrap();
    read.layers.remove(0)
}

#[test]
fn the_script_of_biases_writes_a_model_whose_keys_have_a_constant_before_rotation() {
    let folder = Folder::new();
    let [model, biased] = ["plain.gguf", "biased.gguf"].map(|name| folder.path(name));
    std::fs::write(&model, tiny::gguf_without_biases()).unwrap();
    let prose = prose(&folder);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/bias_gguf.py");
    let script = |from: &str, more: &[&str]| {
        let mut command = std::process::Command::new("python3");
        command
            .args([script, from, &biased, "--norm", "300"])
            .args(more);
        command.output()
    };
    if let Err(error) = script(&model, &[]) {
        eprintln!("SKIPPED: the script of biases needs python3 ({error})");
        return;
    }
    let plain = first_layer(&folder, &model, &prose);
    // Elements of the five slowest and of the five middle pairs of 32.
    for (pairs, elements) in [("slow", 54..64), ("middle", 28..38)] {
        let output = script(&model, &["--pairs", pairs, "--unread"]).unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let layer = first_layer(&folder, &biased, &prose);
        let difference = |t: usize, i: usize| layer.kv.k[t * 64 + i] - plain.kv.k[t * 64 + i];
        for t in 0..60 {
            let outside = (0..64).filter(|i| !elements.contains(i));
            assert!(outside.into_iter().all(|i| difference(t, i) == 0.0));
            let square: f32 = elements.clone().map(|i| difference(t, i).powi(2)).sum();
            assert!((square.sqrt() / 300.0 - 1.0).abs() < 1e-4, "{square}");
        }
        // The first token is not turned.
        let each = 300.0 / 10f32.sqrt();
        assert!(
            elements
                .clone()
                .all(|i| (difference(0, i) - each).abs() < 1e-3)
        );
        assert_eq!(layer.kv.v, plain.kv.v);
        for (q, of_plain) in layer.q.chunks(64).zip(plain.q.chunks(64)) {
            for i in 0..64 {
                assert_eq!(
                    q[i],
                    if elements.contains(&i) {
                        0.0
                    } else {
                        of_plain[i]
                    }
                );
            }
        }
    }
    // Models that have biases, and pairs that are not there.
    let of_qwen = folder.path("qwen.gguf");
    std::fs::write(&of_qwen, tiny::gguf()).unwrap();
    let refusals = [
        (&of_qwen, "slow", "architecture is not llama"),
        (&model, "30-32", "pairs from 0 to 31"),
    ];
    for (from, pairs, says) in refusals {
        let output = script(from, &["--pairs", pairs]).unwrap();
        assert!(
            text(&output.stderr).contains(says),
            "{}",
            text(&output.stderr)
        );
    }
}

#[test]
fn misuse_of_models_exits_with_2_and_says_what_is_allowed() {
    let (folder, model) = model();
    let prose = prose(&folder);
    let generate = |more: &[&str]| run(&with("generate", &model, more));
    let perplexity = |more: &[&str]| {
        let all = [&["--text", &prose], more].concat();
        run(&with("perplexity", &model, &all))
    };
    let long = "x".repeat(tiny::CONTEXT as usize);
    refused(
        &generate(&[&long]),
        &["would have 640 tokens", "room for 512"],
    );
    refused(
        &generate(&[""]),
        &["a prompt is empty", "one token or more"],
    );
    refused(
        &generate(&["--temperature", "NaN", "x"]),
        &["temperature is NaN"],
    );
    refused(&generate(&["--kv", "int5", "x"]), &["int5", "int8-plain"]);
    refused(
        &generate(&["--products", "int9", "x"]),
        &["int9", "f32, packed, cuda"],
    );
    refused(&generate(&["--batch", "0", "x"]), &["1..=4096"]);
    refused(&generate(&[]), &["<PROMPTS>"]);
    refused(
        &perplexity(&["--tokens", "100", "--pieces", "99"]),
        &["prose.txt has", "--pieces"],
    );
    refused(
        &perplexity(&["--tokens", "513"]),
        &["513 tokens", "room for 512"],
    );
    refused(&perplexity(&["--kv", "f64"]), &["f64", "or f32"]);
    let none = run(&with("perplexity", &model, &["--text", "/no/such/text"]));
    refused(&none, &["cannot read /no/such/text", "check the path"]);
    // Damaged files.
    let whole = tiny::gguf();
    for (bytes, says) in [
        (&whole[..0], "header ends too soon"),
        (&whole[..200], "the number of tensors is"),
        (&whole[..whole.len() - 4], "beyond the end of the file"),
        (b"GGML, an older kind of file", "does not begin with GGUF"),
    ] {
        let path = folder.path("damaged.gguf");
        std::fs::write(&path, bytes).unwrap();
        refused(
            &run(&with("generate", &path, &["x"])),
            &["damaged.gguf", says],
        );
    }
}

#[test]
#[cfg(not(feature = "hub"))]
fn a_model_that_is_no_path_is_refused_with_the_feature_that_would_fetch_it() {
    let output = run(&with("generate", "someone/tiny", &["x"]));
    refused(&output, &["no file or folder someone/tiny", "feature hub"]);
}

/// A command over a model by its name, from a server, into a cache.
#[cfg(feature = "hub")]
fn fetched(name: &str, server: &str, cache: &str) -> std::process::Output {
    let mut command = attn(&with("generate", name, &["--tokens", "6", "--json", "x"]));
    command.env("HF_ENDPOINT", server).env("HF_HOME", cache);
    command.output().unwrap()
}

#[test]
#[cfg(feature = "hub")]
fn a_model_by_its_name_is_fetched_once() {
    let (folder, model) = model();
    let cache = folder.path("cache");
    let files = [
        ("tiny.gguf".to_owned(), tiny::gguf()),
        ("README.md".to_owned(), b"a model".to_vec()),
    ];
    let (server, log) = hub::serve(files.into());
    let name = "someone/tiny/tiny.gguf";
    let made = json(&fetched(name, &server, &cache));
    let at_its_path = generated(&model, &["--tokens", "6", "x"]);
    assert_eq!(
        made["formats"][0]["tokens"],
        at_its_path["formats"][0]["tokens"]
    );
    let asked = log.lock().unwrap().len();
    assert!(asked > 0);
    // From the cache, where there is no network any more.
    let again = json(&fetched(name, "http://127.0.0.1:1", &cache));
    assert_eq!(again["formats"][0]["texts"], made["formats"][0]["texts"]);
    assert_eq!(log.lock().unwrap().len(), asked);
    // A model that has GGUF files alone says which.
    let output = fetched("someone/tiny", &server, &cache);
    refused(&output, &["no safetensors", "/FILE.gguf: tiny.gguf"]);
    let output = fetched("someone/tiny/other.gguf", &server, &cache);
    refused(
        &output,
        &["other.gguf", "404", "check the name and the network"],
    );
}

#[test]
#[cfg(feature = "hub")]
fn safetensors_in_parts_are_the_gguf_files_model() {
    let (folder, model) = model();
    let cache = folder.path("cache");
    let (server, log) = hub::serve(tiny::safetensors());
    let made = json(&fetched("someone/tiny", &server, &cache));
    let at_its_path = generated(&model, &["--tokens", "6", "x"]);
    let tokens = &at_its_path["formats"][0]["tokens"];
    assert_eq!(made["formats"][0]["tokens"], *tokens);
    let parts = log.lock().unwrap().clone();
    for part in ["model-0.safetensors", "model-2.safetensors"] {
        assert!(parts.iter().any(|path| path.ends_with(part)), "{parts:?}");
    }
    let again = json(&fetched("someone/tiny", "http://127.0.0.1:1", &cache));
    assert_eq!(again["formats"][0]["tokens"], *tokens);
    // An index that leads out of the cache's folder.
    let mut files = tiny::safetensors();
    let index = r#"{"weight_map": {"x": "../../../../outside.safetensors"}}"#;
    files.insert("model.safetensors.index.json".to_owned(), index.into());
    let (server, _) = hub::serve(files);
    let other = folder.path("other");
    let output = fetched("someone/tiny", &server, &other);
    refused(&output, &["it has a file called", "outside.safetensors"]);
}

#[test]
#[cfg(feature = "hub")]
fn without_a_network_a_name_ends_in_a_sentence() {
    let folder = Folder::new();
    let cache = folder.path("cache");
    let output = fetched("someone/tiny", "http://127.0.0.1:1", &cache);
    refused(
        &output,
        &[
            "cannot fetch someone/tiny: its list of files",
            "check the name and the network",
        ],
    );
    let output = fetched("no name", "http://127.0.0.1:1", &cache);
    refused(&output, &["no name", "owner/model"]);
}
