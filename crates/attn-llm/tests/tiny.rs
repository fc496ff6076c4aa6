//! A random model of two layers, written as GGUF and as safetensors, against a plain forward pass; batches, chunks, and damaged files.

#[path = "tiny/model.rs"]
mod model;
#[path = "tiny/needle.rs"]
mod needle;

use std::{fs, sync::Arc};

use attn::{DecodeAttention, KvFormat};
use attn_llm::{
    Around, Comparison, Error, Event, ExactKv, Kv, Model, NewRows, Options, PagedKv, Piece,
    Products, Wanted, generate::room,
};
use candle_core::quantized::{GgmlDType, gguf_file};
use model::*;

fn backend() -> Arc<dyn DecodeAttention> {
    Arc::from(attn::open(attn::BackendId::Cpu).unwrap())
}

fn paged(model: &Model, format: &str, sequences: usize, len: usize) -> PagedKv {
    let format: KvFormat = format.parse().unwrap();
    PagedKv::new(backend(), model.config(), format, sequences, len, 64, true).unwrap()
}

#[test]
fn logits_are_those_of_the_formulas() {
    let (model, _) = model();
    let tokens = text(90);
    let want = plain(&weights(), &Settings::new(), &tokens);
    let mut exact = ExactKv::new(model.config(), 1, 90);
    let error = difference(&logits(&model, &mut exact, &tokens, 32), &want);
    assert!(error < 1e-5, "f32: {error:e}");
    for (format, bound) in [("bf16", 0.01), ("int8", 0.02), ("int4", 0.2)] {
        let mut kv = paged(&model, format, 1, 90);
        let error = difference(&logits(&model, &mut kv, &tokens, 32), &want);
        // A quantized cache is near, and not the f32 one.
        assert!((1e-5..bound).contains(&error), "{format}: {error:e}");
    }
}

#[test]
fn logits_have_the_same_bits_in_every_chunking_and_batch() {
    let (model, _) = model();
    let tokens = text(150);
    for format in ["bf16", "int8", "int4"] {
        let whole = logits(&model, &mut paged(&model, format, 1, 150), &tokens, 64);
        for chunk in [1, 7, 33] {
            let cut = logits(&model, &mut paged(&model, format, 1, 150), &tokens, chunk);
            assert!(whole == cut, "{format}, chunks of {chunk}");
        }
        // Beside another sequence's tokens.
        let mut kv = paged(&model, format, 2, 150);
        let beside = text(40);
        let pieces = [(0, &beside[..]), (1, &tokens[..60])]
            .map(|(sequence, tokens)| Piece { sequence, tokens });
        let batch = model.forward(&pieces, &mut kv, Wanted::All).unwrap();
        assert!(batch[40 * VOCAB..] == whole[..60 * VOCAB], "{format}");
    }
}

fn options(chunk: usize, temperature: f32) -> Options {
    Options {
        max_tokens: 24,
        chunk,
        temperature,
        seed: 5,
        ends: vec![256],
    }
}

fn texts(model: &Model, prompts: &[Vec<u32>], slots: usize, options: &Options) -> Vec<Vec<u32>> {
    let (sequences, len) = room(prompts, slots, options.max_tokens);
    let mut kv = paged(model, "int4", sequences, len);
    let mut streamed = vec![Vec::new(); prompts.len()];
    let mut prompted = Vec::new();
    let mut on_event = |event| {
        match event {
            Event::Token { prompt, token } => streamed[prompt].push(token),
            Event::Prompt { done, of } => prompted.push((done, of)),
            _ => panic!("unknown: {event:?}"),
        }
        Ok(())
    };
    let done = attn_llm::generate(model, &mut kv, prompts, options, &mut on_event).unwrap();
    // Progress rises up to all of the prompts.
    assert!(prompted.is_sorted_by(|a, b| a.0 < b.0 && a.1 == b.1));
    assert_eq!(prompted.last().map(|(done, of)| of - done), Some(0));
    assert_eq!(prompted.last().unwrap().1, done.prompt_tokens);
    assert_eq!(streamed, done.texts);
    assert_eq!(kv.bytes(), 0, "every page is free again");
    done.texts
}

#[test]
fn texts_are_the_same_alone_and_in_every_batch() {
    let (model, _) = model();
    let common = text(70);
    let prompts: Vec<Vec<u32>> = (0..5)
        .map(|i| [&common[..], &text(80)[i..2 * i + 1]].concat())
        .collect();
    for temperature in [0.0, 1.5] {
        let options = |chunk| options(chunk, temperature);
        let alone: Vec<_> = prompts
            .iter()
            .map(|prompt| texts(&model, std::slice::from_ref(prompt), 1, &options(64)).remove(0))
            .collect();
        assert!(alone.iter().any(|text| text.len() > 4), "{alone:?}");
        for (slots, chunk) in [(5, 64), (2, 9), (3, 1)] {
            let batch = texts(&model, &prompts, slots, &options(chunk));
            assert_eq!(batch, alone, "{slots} slots, chunks of {chunk}");
        }
    }
}

#[test]
fn seeds_change_what_is_drawn() {
    let (model, _) = model();
    let prompt = [text(20)];
    let draw = |seed| {
        let options = Options {
            seed,
            ..options(64, 3.0)
        };
        texts(&model, &prompt, 1, &options)
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}

/// Kills a bias that does not reach the keys, and an option of centres that does not reach the cache.
#[test]
fn centres_take_a_bias_off_the_keys() {
    let (model, _) = model();
    let tokens = text(200);
    let kl = |centres, k_bias| {
        let comparison = Comparison {
            model: &model,
            reference: None,
            backend: backend(),
            formats: &[Some(KvFormat::INT8)],
            centres,
            k_bias,
            chunk: 64,
        };
        attn_llm::perplexity(&comparison, &[&tokens], &mut |_| ()).unwrap()[0].mean_kl
    };
    let (plain, biased, centred) = (kl(false, 0.0), kl(false, 300.0), kl(true, 300.0));
    assert!(
        biased > 10.0 * plain && centred < 2.0 * plain,
        "{plain} {biased} {centred}"
    );
}

#[test]
fn perplexity_ranks_formats_by_their_errors() {
    let (model, _) = model();
    let tokens = text(260);
    let pieces = [&tokens[..130], &tokens[130..]];
    let formats = ["bf16", "int8", "int4-g1"].map(|name| Some(name.parse().unwrap()));
    let all = |chunk| {
        let comparison = Comparison {
            model: &model,
            reference: None,
            backend: backend(),
            formats: &[&[None], &formats[..]].concat(),
            centres: false,
            k_bias: 0.0,
            chunk,
        };
        attn_llm::perplexity(&comparison, &pieces, &mut |_| ()).unwrap()
    };
    let results = all(64);
    assert_eq!(results[0].mean_kl, 0.0);
    assert_eq!(results[0].same_top, 1.0);
    let kl: Vec<f64> = results.iter().map(|r| r.mean_kl).collect();
    assert!(kl.is_sorted_by(|a, b| a < b), "{kl:?}");
    for result in &results {
        assert!(result.p999_kl >= result.p99_kl && result.p99_kl >= result.mean_kl);
        assert_eq!(result.mean_kl_of_pieces.len(), 2);
        let mean = result.mean_kl_of_pieces.iter().sum::<f64>() / 2.0;
        assert!((mean - result.mean_kl).abs() <= 1e-12 + result.mean_kl * 1e-9);
    }
    // The f32 figure is that of the formulas.
    let mut loss = 0.0;
    for piece in pieces {
        for (row, next) in plain(&weights(), &Settings::new(), piece)
            .chunks(VOCAB)
            .zip(&piece[1..])
        {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            loss += sum.ln() - row[*next as usize];
        }
    }
    let want = (loss / 258.0).exp();
    assert!((results[0].perplexity / want - 1.0).abs() < 1e-4, "{want}");
    // Chunks change nothing.
    assert_eq!(results[1..], all(13)[1..]);
}

#[test]
fn packed_weights_are_read() {
    let want = plain(&weights(), &Settings::new(), &text(20));
    for (dtype, bound) in [
        (GgmlDType::F16, 2e-3),
        (GgmlDType::Q8_0, 0.03),
        (GgmlDType::Q4_1, 0.5),
        (GgmlDType::Q4_0, 0.5),
    ] {
        let (model, _) = Files::new()
            .load(&gguf(&weights(), &metadata(), dtype))
            .unwrap();
        let mut exact = ExactKv::new(model.config(), 1, 20);
        let error = difference(&logits(&model, &mut exact, &text(20), 20), &want);
        assert!((1e-6..bound).contains(&error), "{dtype:?}: {error:e}");
    }
}

#[test]
fn safetensors_give_the_model_and_tokens_of_the_gguf_file() {
    let (of_gguf, gguf_tokenizer) = model();
    let folder = folder(&weights(), &[]);
    for path in [
        folder.0.path().to_owned(),
        folder.0.path().join("model.safetensors"),
    ] {
        let (model, tokenizer) = attn_llm::load(&path, Products::F32, &mut |_, _| ()).unwrap();
        let tokens = text(30);
        let both = [&model, &of_gguf].map(|model| {
            let mut exact = ExactKv::new(model.config(), 1, 30);
            logits(model, &mut exact, &tokens, 30)
        });
        assert!(both[0] == both[1]);
        let words = "It's 12 — «ünï»\n";
        let ids = tokenizer.encode(words).unwrap();
        assert_eq!(ids, gguf_tokenizer.encode(words).unwrap());
        assert_eq!(ids.len(), words.len());
        assert_eq!(tokenizer.decode(&ids).unwrap(), words);
        // Characters of several tokens come whole.
        let mut stream = tokenizer.stream();
        let parts: Vec<_> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        assert_eq!(parts.concat(), words);
        assert_eq!(stream.finish().unwrap(), "");
        // Those that the end cuts are not lost.
        for count in 0..=ids.len() {
            let mut stream = tokenizer.stream();
            let mut parts: Vec<_> = ids[..count]
                .iter()
                .map(|id| stream.push(*id).unwrap())
                .collect();
            parts.push(stream.finish().unwrap());
            assert_eq!(parts.concat(), tokenizer.decode(&ids[..count]).unwrap());
        }
        assert_eq!(tokenizer.ends(), [256]);
    }
}

#[test]
fn damaged_safetensors_are_refused_with_a_sentence() {
    let refusal = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let folder = folder(&weights(), &[]);
        let mut bytes = fs::read(folder.0.path().join(name)).unwrap();
        change(&mut bytes);
        folder.write(name, bytes);
        let result = attn_llm::load(folder.0.path(), Products::F32, &mut |_, _| ());
        result.err().expect("it is damaged").to_string()
    };
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        for keep in [0, 1, 9, 300] {
            let text = refusal(name, &|bytes| bytes.truncate(keep));
            assert!(text.contains(name), "{name} cut to {keep}: {text}");
        }
    }
    let text = refusal("config.json", &|bytes| {
        let json = String::from_utf8(bytes.clone()).unwrap();
        *bytes = json.replace("qwen3", "gemma").into_bytes();
    });
    assert!(text.contains("gemma; supported: llama, mistral"), "{text}");
    let scaled = |scaling: &str| {
        refusal("config.json", &|bytes| {
            let json = String::from_utf8(bytes.clone()).unwrap();
            *bytes = json.replace("null", scaling).into_bytes();
        })
    };
    for (scaling, words) in [
        (
            r#"{"rope_type":"dynamic"}"#,
            "dynamic; supported: default, linear, llama3, yarn",
        ),
        (r#"{"rope_type":"yarn"}"#, "rope_scaling, factor is missing"),
        (r#"{"type":"yarn","factor":4,"mscale":1}"#, "mscale"),
        (
            r#"{"type":"linear","factor":0}"#,
            "factor is 0; supported: a finite number above 0",
        ),
    ] {
        let text = scaled(scaling);
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn damaged_gguf_files_are_refused_with_a_sentence() {
    let whole = gguf(&weights(), &metadata(), GgmlDType::F32);
    let files = Files::new();
    let refusal = |bytes: &[u8]| match files.load(bytes) {
        Err(error @ Error::Model { .. }) => error.to_string(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it is damaged"),
    };
    for keep in (0..4000).step_by(37).chain([whole.len() - 40]) {
        refusal(&whole[..keep]);
    }
    // Each length and count of the header as large as it can be.
    for at in [8, 16, 24] {
        let mut bytes = whole.clone();
        bytes[at..at + 8].fill(0xff);
        let text = refusal(&bytes);
        assert!(text.contains("more than the file has bytes for"), "{text}");
    }
    // Bytes anywhere in the header: a sentence, or a model that differs.
    let mut random = Random::new(11);
    for i in 0..400 {
        let mut bytes = whole.clone();
        let at = ((random.next() + 1.0) / 2.0 * 9000.0) as usize;
        bytes[at] = (i * 73) as u8;
        let _ = files.load(&bytes);
    }
    let with = |key: &str, value: gguf_file::Value| {
        let mut metadata = metadata();
        metadata.retain(|(known, _)| *known != key);
        let key: &'static str = Box::leak(key.to_owned().into_boxed_str());
        metadata.push((key, value));
        refusal(&gguf(&weights(), &metadata, GgmlDType::F32))
    };
    use gguf_file::Value::{String, U8, U32};
    let cases = [
        with("general.architecture", String("gemma3".into())),
        with("qwen3.attention.head_count", U32(0)),
        with("qwen3.attention.head_count_kv", U32(0)),
        with("qwen3.attention.key_length", U32(48)),
        with("qwen3.rope.dimension_count", U32(63)),
        with("qwen3.block_count", U32(3)),
        with("qwen3.rope.scaling.type", String("yarn".into())),
        with("tokenizer.ggml.model", String("wordpiece".into())),
        with("tokenizer.ggml.pre", String("unheard".into())),
        with("qwen3.feed_forward_length", U32(100)),
        with("general.alignment", U8(0)),
    ];
    let words = [
        "gemma3; supported: llama",
        "query heads is 0",
        "KV heads is 0",
        "",
        "63 of a head's 64",
        "no tensor blk.2.attn",
        "yarn; supported",
        "wordpiece; supported",
        "unheard; supported",
        "[192, 128]",
        "alignment",
    ];
    for (text, words) in cases.iter().zip(words) {
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn a_step_that_fails_in_any_layer_leaves_no_trace() {
    let (model, _) = model();
    let tokens = text(100);
    let pieces = |from: usize, to: usize| {
        [0, 1].map(|sequence| Piece {
            sequence,
            tokens: &tokens[from..to],
        })
    };
    let layers = model.config().windows.len();
    let kvs = || -> [Box<dyn Kv>; 3] {
        [
            Box::new(paged(&model, "int8", 2, 128)),
            Box::new(paged(&model, "int4", 2, 128)),
            Box::new(ExactKv::new(model.config(), 2, 128)),
        ]
    };
    for (mut kv, mut straight) in kvs().into_iter().zip(kvs()) {
        for kv in [&mut kv, &mut straight] {
            let all = model.forward(&pieces(0, 30), &mut **kv, Wanted::Last);
            all.unwrap();
        }
        for (layer, writes) in (0..layers).flat_map(|layer| [(layer, false), (layer, true)]) {
            // Before or behind what the layer writes.
            let mut fails =
                |rows: NewRows<'_>, attend: &mut dyn FnMut(&[f32]) -> Result<(), Error>| {
                    if rows.layer != layer || writes {
                        attend(rows.k)?;
                    }
                    match rows.layer == layer {
                        true => Err(Error::Context {
                            needed: layer,
                            limit: 0,
                        }),
                        false => Ok(()),
                    }
                };
            let mut failing = Around {
                kv: &mut *kv,
                around: &mut fails,
            };
            let error = model.forward(&pieces(40, 90), &mut failing, Wanted::Last);
            assert!(matches!(error, Err(Error::Context { needed, .. }) if needed == layer));
            assert_eq!(kv.lens(), [30, 30]);
        }
        let [got, want] = [&mut kv, &mut straight].map(|kv| {
            let all = model.forward(&pieces(30, 70), &mut **kv, Wanted::All);
            all.unwrap()
        });
        assert_eq!(got, want);
    }
}

#[test]
fn texts_beyond_the_room_are_refused_and_change_nothing() {
    let (model, _) = model();
    let mut kv = paged(&model, "int8", 1, 64);
    let tokens = text(65);
    let forward = |kv: &mut PagedKv, tokens: &[u32]| {
        let piece = Piece {
            sequence: 0,
            tokens,
        };
        model.forward(&[piece], kv, Wanted::Last)
    };
    let error = forward(&mut kv, &tokens).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Context {
                needed: 65,
                limit: 64
            }
        ),
        "{error}"
    );
    assert_eq!(kv.lens(), [0]);
    forward(&mut kv, &tokens[..64]).unwrap();
    let error = forward(&mut kv, &tokens[..1]).unwrap_err().to_string();
    assert!(error.contains("room for 64"), "{error}");
    let error = forward(&mut kv, &[VOCAB as u32]).unwrap_err().to_string();
    assert!(error.contains("0 to 271"), "{error}");
    assert!(forward(&mut kv, &[]).is_err());
    // A cache that no machine has memory for.
    let most = PagedKv::new(
        backend(),
        model.config(),
        KvFormat::INT8,
        1 << 20,
        1 << 20,
        64,
        true,
    );
    let error = most.err().expect("too large").to_string();
    assert!(
        error.contains("no memory") || error.contains("allowed"),
        "{error}"
    );
}

#[test]
fn rows_of_layers_are_what_attention_gets() {
    let (model, _) = model();
    let tokens = text(70);
    let rows =
        |layers: &[usize], chunk| attn_llm::rows(&model, &tokens, layers, chunk, &mut |_| ());
    let both = rows(&[1, 0], 64).unwrap();
    assert_eq!(both, rows(&[1, 0], 9).unwrap());
    assert_eq!(both.iter().map(|of| of.layer).collect::<Vec<_>>(), [1, 0]);
    let mut kv = ExactKv::new(model.config(), 1, 70);
    let mut keys = vec![Vec::new(); LAYERS];
    let mut around = |rows: NewRows<'_>, attend: &mut dyn FnMut(&[f32]) -> Result<(), Error>| {
        keys[rows.layer].extend_from_slice(rows.k);
        attend(rows.k)
    };
    let mut around = Around {
        kv: &mut kv,
        around: &mut around,
    };
    logits(&model, &mut around, &tokens, 64);
    for of in &both {
        assert_eq!(of.k, keys[of.layer]);
        assert_eq!((of.q.len(), of.v.len()), (70 * HEADS * DIM, of.k.len()));
    }
    for layers in [&[][..], &[2], &[0, 0]] {
        let error = rows(layers, 64).unwrap_err().to_string();
        assert!(error.contains("0 to 1, each once"), "{error}");
    }
    assert!(rows(&[0], 0).is_err());
}
