//! Text from prompts: a batch that prompts join as others leave it, in chunks, over shared prefixes.
//!
//! A prompt's text depends on the prompt, the model, the format and the seed alone: neither on the other prompts nor on chunks or slots.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    error::Error,
    kv::{Kv, PagedKv},
    model::{Model, Piece, Wanted},
};

/// How texts are generated.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The most tokens to generate for a prompt.
    pub max_tokens: usize,
    /// The most tokens of a prompt that are computed at once.
    pub chunk: usize,
    /// 0 takes the likeliest token; above, tokens are drawn from the softmax of logits over the temperature.
    pub temperature: f32,
    /// The seed of each prompt's own draws.
    pub seed: u64,
    /// Tokens that end a text.
    pub ends: Vec<u32>,
}

/// What a batch of prompts came to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Generation {
    /// The tokens of each prompt's text, without the token that ended it.
    pub texts: Vec<Vec<u32>>,
    /// Tokens of prompts that were computed; a shared prefix counts once.
    pub prompt_tokens: usize,
    /// Tokens that were generated after a prompt's first.
    pub decoded_tokens: usize,
    /// Time of steps that compute prompts.
    pub prompt_time: Duration,
    /// Time of steps that decode alone.
    pub decode_time: Duration,
    /// The most bytes of pages that were in use at once.
    pub cache_bytes: usize,
}

/// What comes while texts are generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// More of the prompts is computed.
    Prompt {
        /// Tokens so far, of all prompts; a shared prefix counts once.
        done: usize,
        /// Tokens of all prompts.
        of: usize,
    },
    /// A prompt's text goes on.
    Token {
        /// The prompt's number.
        prompt: usize,
        /// The text's next token.
        token: u32,
    },
}

/// A prompt in a slot of the batch.
struct Slot {
    prompt: usize,
    /// Tokens to be computed next: the rest of the prompt, or the latest token.
    pending: Vec<u32>,
    draws: StdRng,
}

/// Number of slots and tokens that [`generate()`] needs of its cache: sequences, and room in each.
#[must_use]
pub fn room(prompts: &[Vec<u32>], slots: usize, max_tokens: usize) -> (usize, usize) {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    // One sequence keeps the shared prefix.
    (slots + 1, longest.saturating_add(max_tokens))
}

/// Generates a text for each prompt in all but one of the cache's sequences, which are empty; `on_event` gets each prompt's tokens as they come.
///
/// # Errors
/// [`Error::Request`] for an empty prompt; those of [`Model::forward`] and of `on_event`. Sequences may be left with tokens then.
pub fn generate(
    model: &Model,
    kv: &mut PagedKv,
    prompts: &[Vec<u32>],
    options: &Options,
    on_event: &mut dyn FnMut(Event) -> Result<(), Error>,
) -> Result<Generation, Error> {
    let batch = Batch::new(model, kv, prompts, options)?;
    batch.run(on_event)
}

struct Batch<'a> {
    model: &'a Model,
    kv: &'a mut PagedKv,
    prompts: &'a [Vec<u32>],
    options: &'a Options,
    waiting: VecDeque<usize>,
    /// Tokens of prompts that are computed in all.
    of_prompts: usize,
    slots: Vec<Option<Slot>>,
    done: Generation,
}

impl<'a> Batch<'a> {
    fn new(
        model: &'a Model,
        kv: &'a mut PagedKv,
        prompts: &'a [Vec<u32>],
        options: &'a Options,
    ) -> Result<Self, Error> {
        let slots = kv.lens().len().saturating_sub(1);
        let refuse = |what, given: String, allowed: &str| {
            Err(Error::Request {
                what,
                given,
                allowed: allowed.to_owned(),
            })
        };
        if let Some(i) = prompts.iter().position(Vec::is_empty) {
            return refuse(
                "a prompt",
                format!("empty (number {i})"),
                "one token or more",
            );
        }
        if slots == 0 || options.chunk == 0 {
            let given = format!("{slots} slots and chunks of {}", options.chunk);
            return refuse("the batch", given, "one slot or more, one token or more");
        }
        if !(options.temperature >= 0.0 && options.temperature.is_finite()) {
            let given = options.temperature.to_string();
            return refuse("the temperature", given, "0 or a positive number");
        }
        Ok(Batch {
            waiting: (0..prompts.len()).collect(),
            of_prompts: 0,
            slots: (0..slots).map(|_| None).collect(),
            done: Generation {
                texts: vec![Vec::new(); prompts.len()],
                ..Generation::default()
            },
            model,
            kv,
            prompts,
            options,
        })
    }

    fn run(
        mut self,
        on_event: &mut dyn FnMut(Event) -> Result<(), Error>,
    ) -> Result<Generation, Error> {
        let prefix = self.compute_prefix(on_event)?;
        loop {
            self.admit(prefix)?;
            if self.slots.iter().all(Option::is_none) {
                self.kv.free(self.slots.len())?;
                return Ok(self.done);
            }
            self.step(on_event)?;
        }
    }

    /// Computes the tokens that all prompts begin with, but for each one's last, into the cache's last sequence.
    fn compute_prefix(
        &mut self,
        on_event: &mut dyn FnMut(Event) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        let prefix = shared_prefix(self.prompts);
        let rests = self.prompts.iter().map(|prompt| prompt.len() - prefix);
        self.of_prompts = prefix + rests.sum::<usize>();
        for i in (0..prefix).step_by(self.options.chunk) {
            let start = Instant::now();
            let tokens = &self.prompts[0][i..prefix.min(i + self.options.chunk)];
            let sequence = self.slots.len();
            let piece = Piece { sequence, tokens };
            self.model.forward(&[piece], self.kv, Wanted::Last)?;
            self.done.prompt_time += start.elapsed();
            self.prompts_advance(tokens.len(), on_event)?;
        }
        Ok(prefix)
    }

    fn prompts_advance(
        &mut self,
        tokens: usize,
        on_event: &mut dyn FnMut(Event) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.done.prompt_tokens += tokens;
        on_event(Event::Prompt {
            done: self.done.prompt_tokens,
            of: self.of_prompts,
        })
    }

    /// Gives free slots to waiting prompts.
    fn admit(&mut self, prefix: usize) -> Result<(), Error> {
        let keeper = self.slots.len();
        for (sequence, slot) in self.slots.iter_mut().enumerate() {
            if slot.is_some() || self.options.max_tokens == 0 {
                continue;
            }
            let Some(prompt) = self.waiting.pop_front() else {
                break;
            };
            if prefix > 0 {
                self.kv.fork(keeper, sequence)?;
            }
            *slot = Some(Slot {
                prompt,
                pending: self.prompts[prompt][prefix..].to_vec(),
                draws: StdRng::seed_from_u64(self.options.seed),
            });
        }
        Ok(())
    }

    /// Computes a chunk of each slot's prompt, or its latest token, and picks the next token where the pending ones are used up.
    fn step(&mut self, on_event: &mut dyn FnMut(Event) -> Result<(), Error>) -> Result<(), Error> {
        let start = Instant::now();
        let chunk = self.options.chunk;
        let busy = self.slots.iter().enumerate();
        let pieces: Vec<Piece<'_>> = busy
            .filter_map(|(sequence, slot)| {
                let pending = &slot.as_ref()?.pending;
                let tokens = &pending[..pending.len().min(chunk)];
                Some(Piece { sequence, tokens })
            })
            .collect();
        let logits = self.model.forward(&pieces, self.kv, Wanted::Last)?;
        let computed: Vec<(usize, usize)> = pieces
            .iter()
            .map(|piece| (piece.sequence, piece.tokens.len()))
            .collect();
        self.done.cache_bytes = self.done.cache_bytes.max(self.kv.bytes());
        let (mut of_prompts, mut decoded) = (0, 0);
        let mut tokens_of_texts = Vec::new();
        let vocab = self.model.config().vocab;
        for ((sequence, tokens), logits) in computed.into_iter().zip(logits.chunks_exact(vocab)) {
            let Some(slot) = &mut self.slots[sequence] else {
                continue;
            };
            match self.done.texts[slot.prompt].is_empty() {
                true => of_prompts += tokens,
                false => decoded += tokens,
            }
            slot.pending.drain(..tokens);
            if !slot.pending.is_empty() {
                continue;
            }
            let token = pick(logits, self.options.temperature, &mut slot.draws);
            let text = &mut self.done.texts[slot.prompt];
            let is_end = self.options.ends.contains(&token);
            if !is_end {
                text.push(token);
                let prompt = slot.prompt;
                tokens_of_texts.push(Event::Token { prompt, token });
                slot.pending.push(token);
            }
            if is_end || text.len() == self.options.max_tokens {
                self.slots[sequence] = None;
                self.kv.free(sequence)?;
            }
        }
        let time = match of_prompts {
            0 => &mut self.done.decode_time,
            _ => &mut self.done.prompt_time,
        };
        *time += start.elapsed();
        // Steps that compute prompts, too, count as theirs.
        self.done.decoded_tokens += if of_prompts == 0 { decoded } else { 0 };
        if of_prompts > 0 {
            self.prompts_advance(of_prompts, on_event)?;
        }
        tokens_of_texts.into_iter().try_for_each(on_event)
    }
}

/// The number of tokens that several prompts begin with, all but each one's last; 0 of one prompt.
fn shared_prefix(prompts: &[Vec<u32>]) -> usize {
    let [first, others @ ..] = prompts else {
        return 0;
    };
    let common = |other: &Vec<u32>| {
        let pairs = first.iter().zip(other);
        let same = pairs.take_while(|(a, b)| a == b).count();
        same.min(other.len() - 1).min(first.len() - 1)
    };
    others.iter().map(common).min().unwrap_or(0)
}

/// The likeliest token, the first of equals; or one drawn by its probability at the temperature.
fn pick(logits: &[f32], temperature: f32, draws: &mut StdRng) -> u32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if temperature == 0.0 {
        return logits.iter().position(|x| *x == largest).unwrap_or(0) as u32;
    }
    let weight = |x: &f32| f64::from((x - largest) / temperature).exp();
    let total: f64 = logits.iter().map(weight).sum();
    let mut left = draws.random::<f64>() * total;
    for (token, x) in logits.iter().enumerate() {
        left -= weight(x);
        if left <= 0.0 {
            return token as u32;
        }
    }
    // Rounding leaves a little of the total.
    logits.len() as u32 - 1
}
