//! Numbers that are hidden in a long text, and whether the model finds them over a cache.
//!
//! A [`Haystack`] is a text with sentences in it that give a number each, at depths spread evenly over it. Every number is asked for at the end of
//! the same text, and the cache is taken back to that end in between. Answers are teacher-forced: each digit is predicted behind the right ones.

use attn::KvFormat;

use crate::{
    error::Error,
    kv::{ExactKv, Kv},
    model::Wanted,
    perplexity::{Comparison, Rows, forward},
    tokenizer::Tokenizer,
};

/// What numbers are of, in sentences; two that begin alike would be taken for each other by small models.
const NAMES: [&str; 16] = [
    "Oslo", "Lima", "Cairo", "Paris", "Tokyo", "Delhi", "Quito", "Rome", "Seoul", "Berlin",
    "Havana", "Nairobi", "Dublin", "Vienna", "Warsaw", "Madrid",
];

/// Digits of a number.
const DIGITS: usize = 5;

/// A number that is hidden, and how it is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Probe {
    /// Where the number is: tokens of the haystack before its sentence.
    pub position: usize,
    /// Tokens that ask, up to the answer.
    pub question: Vec<u32>,
    /// The number's tokens.
    pub answer: Vec<u32>,
}

/// A text with hidden numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Haystack {
    /// The text.
    pub tokens: Vec<u32>,
    /// The numbers, in the order of the text.
    pub probes: Vec<Probe>,
}

impl Haystack {
    /// Hides `needles` numbers at the middles of as many equal parts of a text, so that the text and the longest question with its answer have `length` tokens. `seed`
    /// chooses the numbers.
    ///
    /// # Errors
    /// [`Error::Request`] if there are no needles or more than 16, if the needles alone are longer than `length`, and if the text is too short; [`Error::Tokenizer`].
    pub fn new(
        tokenizer: &Tokenizer,
        text: &[u32],
        length: usize,
        needles: usize,
        seed: u64,
    ) -> Result<Self, Error> {
        if !(1..=NAMES.len()).contains(&needles) {
            return Err(Error::Request {
                what: "the number of needles",
                given: needles.to_string(),
                allowed: format!("1 to {}", NAMES.len()),
            });
        }
        let encode = |text: &str| tokenizer.encode_inside(text);
        let mut state = seed;
        let mut hidden = Vec::new();
        for i in 0..needles {
            let name = NAMES[(seed as usize).wrapping_add(i) % NAMES.len()];
            let number = number(&mut state);
            let mut question = encode(&format!(
                "\n\nQuestion: What is the secret number of {name}?\nAnswer: The secret number of {name} is"
            ))?;
            // A token without a digit, as of a space alone, belongs to the question.
            let mut answer = encode(&format!(" {number}"))?;
            let mut blanks = 0;
            for &token in &answer {
                match tokenizer
                    .decode(&[token])?
                    .contains(|c: char| c.is_ascii_digit())
                {
                    true => break,
                    false => blanks += 1,
                }
            }
            let digits = answer.split_off(blanks);
            let statement = [
                encode(&format!("\n\nThe secret number of {name} is"))?,
                answer.clone(),
                digits.clone(),
                encode(".\n\n")?,
            ];
            question.extend(answer);
            hidden.push((statement.concat(), question, digits));
        }
        let longest = hidden.iter().map(|(_, q, a)| q.len() + a.len()).max();
        let longest = longest.unwrap_or(0);
        let sentences: usize = hidden.iter().map(|(sentence, ..)| sentence.len()).sum();
        let Some(hay) = length.checked_sub(longest + sentences) else {
            return Err(Error::Request {
                what: "the length of a text with needles",
                given: format!("{length} tokens"),
                allowed: format!("{} or more for {needles} needles", longest + sentences),
            });
        };
        if hay > text.len() {
            return Err(Error::Request {
                what: "the text",
                given: format!("{} tokens", text.len()),
                allowed: format!("{hay} or more for a length of {length}"),
            });
        }
        let mut haystack = Haystack {
            tokens: Vec::new(),
            probes: Vec::new(),
        };
        let mut used = 0;
        for (i, (sentence, question, answer)) in hidden.into_iter().enumerate() {
            let end = hay * (2 * i + 1) / (2 * needles);
            haystack.tokens.extend(&text[used..end]);
            used = end;
            haystack.probes.push(Probe {
                position: haystack.tokens.len(),
                question,
                answer,
            });
            haystack.tokens.extend(sentence);
        }
        haystack.tokens.extend(&text[used..hay]);
        Ok(haystack)
    }

    /// Tokens of the text with the longest question and answer.
    #[must_use]
    pub fn length(&self) -> usize {
        self.tokens.len() + self.longest_probe()
    }

    fn longest_probe(&self) -> usize {
        let lens = self
            .probes
            .iter()
            .map(|p| p.question.len() + p.answer.len());
        lens.max().unwrap_or(0)
    }
}

/// A number of [`DIGITS`] digits, the first not 0; by SplitMix64, so that it is the same on every machine.
fn number(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let least = 10u64.pow(DIGITS as u32 - 1);
    least + (z ^ (z >> 31)) % (9 * least)
}

/// What a format came to over haystacks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Recall {
    /// The format; none is f32, in plain attention.
    pub format: Option<KvFormat>,
    /// For each haystack and needle, whether every token of the number is the likeliest one.
    pub found: Vec<Vec<bool>>,
    /// For each haystack and needle, the mean over the number's tokens of Σ p·ln(p / q), where p is the token's distribution over an f32 cache, and q over
    /// this one.
    pub kl: Vec<Vec<f64>>,
}

impl Recall {
    fn new(format: Option<KvFormat>) -> Self {
        Recall {
            format,
            found: Vec::new(),
            kl: Vec::new(),
        }
    }

    /// The name of the format, or f32.
    #[must_use]
    pub fn name(&self) -> String {
        let format = self.format.map(|format| format.to_string());
        format.unwrap_or_else(|| "f32".to_owned())
    }

    /// The share of needles whose number is found.
    #[must_use]
    pub fn share_found(&self) -> f64 {
        let found = self.found.concat();
        found.iter().filter(|found| **found).count() as f64 / found.len() as f64
    }

    /// The mean divergence of all numbers' tokens.
    #[must_use]
    pub fn mean_kl(&self) -> f64 {
        let kl = self.kl.concat();
        kl.iter().sum::<f64>() / kl.len() as f64
    }
}

/// Asks for every number of every haystack over an f32 cache and over each format; `progress` gets the tokens of haystacks done so far, all formats together.
///
/// [`Comparison::reference`] is the model of the f32 cache that all are compared with, as in [`crate::perplexity()`].
///
/// # Errors
/// [`Error::Request`] for no haystack, an empty one, one without needles, a question or an answer without tokens, and chunks of none; those of
/// [`crate::Model::forward`].
pub fn recall(
    comparison: &Comparison<'_>,
    haystacks: &[Haystack],
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Recall>, Error> {
    let is_empty = |probe: &Probe| probe.question.is_empty() || probe.answer.is_empty();
    let is_wrong = |hay: &Haystack| {
        hay.tokens.is_empty() || hay.probes.is_empty() || hay.probes.iter().any(is_empty)
    };
    if haystacks.is_empty() || comparison.chunk == 0 || haystacks.iter().any(is_wrong) {
        return Err(Error::Request {
            what: "the list of haystacks",
            given: format!("{} of them, in chunks of {}", haystacks.len(), comparison.chunk),
            allowed: "one or more, each with text, and with questions that have answers; chunks of one or more".to_owned(),
        });
    }
    let reference = comparison.reference.unwrap_or(comparison.model);
    let config = comparison.model.config();
    let bias = comparison.bias();
    let formats = comparison.formats.iter().copied();
    let mut recalls: Vec<Recall> = formats.map(Recall::new).collect();
    let mut done = 0;
    for haystack in haystacks {
        let length = haystack.length();
        let mut asked = |kv: &mut dyn Kv, step: &mut Step<'_>| {
            let answers = ask(haystack, comparison.chunk, kv, step)?;
            done += haystack.tokens.len();
            progress(done);
            Ok::<_, Error>(answers)
        };
        let exact = || ExactKv::new(config, 1, length);
        let wanted = asked(&mut exact(), &mut |kv, tokens, wanted| {
            forward(reference, kv, tokens, wanted)
        })?;
        for recall in &mut recalls {
            let own = match recall.format {
                // A cache takes a question at once, however small chunks are.
                Some(format) => {
                    let chunk = comparison.chunk.max(haystack.longest_probe());
                    let mut kv = comparison.paged(format, length, chunk)?;
                    asked(&mut kv, &mut |kv, tokens, wanted| {
                        comparison.forward(kv, &bias, tokens, wanted)
                    })?
                }
                None if comparison.reference.is_some() => {
                    asked(&mut exact(), &mut |kv, tokens, wanted| {
                        forward(comparison.model, kv, tokens, wanted)
                    })?
                }
                None => wanted.clone(),
            };
            let (mut found, mut kl) = (Vec::new(), Vec::new());
            for (probe, (wanted, own)) in haystack.probes.iter().zip(wanted.iter().zip(&own)) {
                let wanted = Rows::new(wanted, config.vocab);
                let own = Rows::new(own, config.vocab);
                let n = probe.answer.len();
                let of_token = |i| wanted.divergence(&own, i);
                kl.push((0..n).map(of_token).sum::<f64>() / n as f64);
                let mut pairs = own.top.iter().zip(&probe.answer);
                found.push(pairs.all(|(top, token)| *top == *token as usize));
            }
            recall.found.push(found);
            recall.kl.push(kl);
        }
    }
    Ok(recalls)
}

/// The logits of the next tokens over a cache.
type Step<'a> = dyn FnMut(&mut dyn Kv, &[u32], Wanted) -> Result<Vec<f32>, Error> + 'a;

/// The logits of each answer's tokens, `[tokens, vocab]`, from an empty cache.
fn ask(
    haystack: &Haystack,
    chunk: usize,
    kv: &mut dyn Kv,
    step: &mut Step<'_>,
) -> Result<Vec<Vec<f32>>, Error> {
    for tokens in haystack.tokens.chunks(chunk) {
        step(kv, tokens, Wanted::Last)?;
    }
    let mut answers = Vec::new();
    for Probe {
        question, answer, ..
    } in &haystack.probes
    {
        let tokens = [&question[..], &answer[..answer.len() - 1]].concat();
        let mut logits = step(kv, &tokens, Wanted::All)?;
        let vocab = logits.len() / tokens.len();
        answers.push(logits.split_off((question.len() - 1) * vocab));
        // Back to the end of the text.
        kv.cancel()?;
    }
    Ok(answers)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A tokenizer of single characters whose template puts a token before and one behind every text.
    fn characters() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        for (id, word) in ["<s>", "</s>", "\n"].into_iter().enumerate() {
            vocab.insert(word.to_owned(), json!(id));
        }
        for byte in b' '..=b'~' {
            vocab.insert(char::from(byte).to_string(), json!(byte - b' ' + 3));
        }
        let special = |name: &str, id: u32| json!({ "id": id, "content": name, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false });
        let one = |name: &str| json!({ "SpecialToken": { "id": name, "type_id": 0 } });
        let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
        let tokens = |name: &str, id: u32| json!({ "id": name, "ids": [id], "tokens": [name] });
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null, "decoder": null,
            "added_tokens": [special("<s>", 0), special("</s>", 1)],
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [one("<s>"), text("A"), one("</s>")],
                "pair": [one("<s>"), text("A"), text("B"), one("</s>")],
                "special_tokens": { "<s>": tokens("<s>", 0), "</s>": tokens("</s>", 1) },
            },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": [],
            },
        });
        Tokenizer::from_json(file.to_string().as_bytes(), vec![1]).unwrap()
    }

    /// Kills sentences whose first token is taken for one that stands before every text.
    #[test]
    fn needles_are_whole_behind_a_template_with_a_token_at_both_ends() {
        let tokenizer = characters();
        assert_eq!(tokenizer.encode("a").unwrap(), [0, 68, 1]);
        let text = [68; 400];
        let haystack = Haystack::new(&tokenizer, &text, 400, 2, 1).unwrap();
        for (i, probe) in haystack.probes.iter().enumerate() {
            assert!(!probe.question.contains(&1) && probe.question[..2] == [2, 2]);
            assert_eq!(probe.answer.len(), DIGITS);
            let sentence = &haystack.tokens[probe.position..];
            assert_eq!(sentence[..2], [2, 2], "{i}");
        }
        assert!(!haystack.tokens.contains(&1));
    }
}
