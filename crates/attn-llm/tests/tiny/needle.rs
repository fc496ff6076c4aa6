//! Numbers hidden in a text: where they lie, and what counts as found.

use attn_llm::Haystack;

use super::*;

fn compared<'a>(model: &'a Model, formats: &'a [Option<KvFormat>], chunk: usize) -> Comparison<'a> {
    Comparison {
        model,
        reference: None,
        backend: backend(),
        formats,
        centres: true,
        k_bias: 0.0,
        chunk,
    }
}

/// Kills a cache that is not taken back behind a question: the next one would be asked over another text.
#[test]
fn every_needle_is_asked_for_over_the_haystack_alone() {
    let (model, tokenizer) = model();
    let whole = Haystack::new(&tokenizer, &text(400), 500, 3, 7).unwrap();
    assert_eq!((whole.length(), whole.probes.len()), (500, 3));
    let formats = ["bf16", "int8", "int4"].map(|name| Some(name.parse().unwrap()));
    let formats = [&[None], &formats[..]].concat();
    let recall = |haystack: &Haystack, chunk| {
        let comparison = compared(&model, &formats, chunk);
        attn_llm::recall(&comparison, std::slice::from_ref(haystack), &mut |_| ()).unwrap()
    };
    let together = recall(&whole, 64);
    let kl: Vec<f64> = together.iter().map(|recall| recall.mean_kl()).collect();
    assert!(kl[0] == 0.0 && kl.is_sorted_by(|a, b| a < b), "{kl:?}");
    assert!(together[1..] == recall(&whole, 19)[1..], "chunks of 19");
    for (i, probe) in whole.probes.iter().enumerate() {
        let alone = Haystack {
            probes: vec![probe.clone()],
            ..whole.clone()
        };
        for (alone, together) in recall(&alone, 64).iter().zip(&together) {
            assert_eq!(alone.found[0][0], together.found[0][i]);
            assert_eq!(alone.kl[0][0], together.kl[0][i], "{}", alone.name());
        }
    }
}

#[test]
fn a_number_counts_as_found_if_all_its_digits_are_the_likeliest_tokens() {
    let (model, tokenizer) = model();
    let mut haystack = Haystack::new(&tokenizer, &text(200), 300, 1, 0).unwrap();
    // What this model says behind the question.
    let mut tokens = [&haystack.tokens[..], &haystack.probes[0].question].concat();
    let mut answer = Vec::new();
    for _ in 0..4 {
        let mut kv = ExactKv::new(model.config(), 1, tokens.len());
        let all = logits(&model, &mut kv, &tokens, 64);
        let last = &all[all.len() - VOCAB..];
        let top = (0..VOCAB).max_by(|a, b| last[*a].total_cmp(&last[*b]));
        answer.push(top.unwrap() as u32);
        tokens.push(top.unwrap() as u32);
    }
    for wrong in [None, Some(0), Some(3)] {
        haystack.probes[0].answer = answer.clone();
        if let Some(i) = wrong {
            haystack.probes[0].answer[i] ^= 1;
        }
        let formats = [None];
        let comparison = compared(&model, &formats, 64);
        let recalls = attn_llm::recall(&comparison, &[haystack.clone()], &mut |_| ()).unwrap();
        assert_eq!(
            recalls[0].share_found(),
            f64::from(u8::from(wrong.is_none()))
        );
    }
}

#[test]
fn haystacks_have_their_needles_at_even_depths_and_are_the_same_every_time() {
    let (_, tokenizer) = model();
    let hay = text(600);
    let make = |length, needles, seed| Haystack::new(&tokenizer, &hay, length, needles, seed);
    let made = make(512, 3, 0).unwrap();
    assert_eq!(made, make(512, 3, 0).unwrap());
    assert_ne!(made, make(512, 3, 1).unwrap());
    for probe in &made.probes {
        let sentence = tokenizer.decode(&made.tokens[probe.position..]).unwrap();
        let number = tokenizer.decode(&probe.answer).unwrap();
        let question = tokenizer.decode(&probe.question).unwrap();
        let says = question.rsplit("Answer: ").next().unwrap();
        assert!(
            number.len() == 5 && number.parse::<u32>().is_ok(),
            "{number}"
        );
        assert!(
            sentence.starts_with(&format!("\n\n{says}{number}.\n\n")),
            "{sentence}"
        );
    }
    let positions: Vec<usize> = made.probes.iter().map(|p| p.position).collect();
    // The sentences before it, and one, three and five sixths of the rest.
    assert!(positions.is_sorted() && positions[0] < 80, "{positions:?}");
    for (length, needles, says) in [
        (512, 0, "1 to 16"),
        (512, 17, "1 to 16"),
        (60, 1, "or more for 1 needles"),
        (2000, 1, "or more for a length of 2000"),
    ] {
        let error = make(length, needles, 0).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let (model, _) = model();
    let error = attn_llm::recall(&compared(&model, &[None], 8), &[], &mut |_| ());
    assert!(error.unwrap_err().to_string().contains("0 of them"));
}
