//! Tokenizers: from the vocabulary of a GGUF file, or from a `tokenizer.json`.

mod guard;

use std::collections::HashMap;

use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    decoders::{
        byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders, strip::Strip,
    },
    models::bpe::BPE,
    normalizers::{NFC, Prepend, Replace, Sequence as Normalizers},
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence as Splits,
        split::{Split, SplitPattern},
    },
};

use self::guard::guarded;
use crate::error::Error;

/// Turns text into tokens and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The token before every text, where the model wants one.
    begin: Option<u32>,
    /// Tokens that end a text.
    ends: Vec<u32>,
}

/// The text of tokens that come one by one; characters appear when their last token is there.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    inner: tokenizers::DecodeStream<
        'a,
        tokenizers::ModelWrapper,
        NormalizerWrapper,
        PreTokenizerWrapper,
        tokenizers::PostProcessorWrapper,
        DecoderWrapper,
    >,
    tokens: Vec<u32>,
    /// Bytes of the text that [`TextStream::push`] has returned.
    returned: usize,
}

impl TextStream<'_> {
    /// The text that a token adds; often none, if it ends within a character.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn push(&mut self, token: u32) -> Result<String, Error> {
        let text = guarded(|| self.inner.step(token));
        let text = text.map_err(Error::Tokenizer)?.unwrap_or_default();
        self.tokens.push(token);
        self.returned += text.len();
        Ok(text)
    }

    /// The rest of the text: U+FFFD for bytes at its end that are no whole character, and nothing if all are.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn finish(self) -> Result<String, Error> {
        let whole = self.tokenizer.decode(&self.tokens)?;
        Ok(whole.get(self.returned..).unwrap_or_default().to_owned())
    }
}

impl Tokenizer {
    /// From a `tokenizer.json`, whose own rules say what stands before a text. Truncation and padding, which files keep from training, are
    /// left out: a prompt has all of its tokens and no others.
    pub(crate) fn from_json(bytes: &[u8], ends: Vec<u32>) -> Result<Self, String> {
        guard::check(bytes)?;
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(bytes))?;
        inner.with_truncation(None).map_err(|e| e.to_string())?;
        inner.with_padding(None);
        Ok(Tokenizer {
            inner,
            begin: None,
            ends,
        })
    }

    /// The tokens of a text; a model that wants a token before every text gets it.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let encoding = guarded(|| self.inner.encode_fast(text, true));
        let encoding = encoding.map_err(Error::Tokenizer)?;
        let tokens = encoding.get_ids().iter().copied();
        Ok(self.begin.into_iter().chain(tokens).collect())
    }

    /// The tokens of a text inside another: without those that a model wants before or behind every text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub(crate) fn encode_inside(&self, text: &str) -> Result<Vec<u32>, Error> {
        let encoding = guarded(|| self.inner.encode_fast(text, false));
        let encoding = encoding.map_err(Error::Tokenizer)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        guarded(|| self.inner.decode(tokens, true)).map_err(Error::Tokenizer)
    }

    /// Begins the text of tokens that come one by one.
    #[must_use]
    pub fn stream(&self) -> TextStream<'_> {
        TextStream {
            tokenizer: self,
            inner: self.inner.decode_stream(true),
            tokens: Vec::new(),
            returned: 0,
        }
    }

    /// Tokens that end a text.
    #[must_use]
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }
}

/// What a GGUF file says of its tokenizer, under `tokenizer.ggml`.
pub(crate) struct GgufVocabulary {
    /// `gpt2` (pairs of bytes, with merges) or `llama` (pieces with scores).
    pub model: String,
    pub tokens: Vec<String>,
    /// For each token 3 if it is a control token, 4 if a user's; empty if the file does not say.
    pub kinds: Vec<i64>,
    pub scores: Vec<f32>,
    pub merges: Vec<String>,
    /// The rule that splits a text before merges, by llama.cpp's name.
    pub split: String,
    pub begin: Option<u32>,
    pub adds_begin: bool,
    pub adds_space: bool,
    pub ends: Vec<u32>,
}

/// Most bytes of a piece with a score: each of its prefixes is looked up.
const MAX_PIECE: usize = 1024;
/// Most bytes of merges for each byte of a vocabulary of pieces, and for a small one: a piece has a merge for every place where it parts in two others, which
/// in a vocabulary of words are few.
const MAX_MERGES: usize = 64;
const SMALL_VOCABULARY: usize = 16 << 10;

/// Contractions, words, numbers of up to three digits, punctuation and space, as Llama 3 splits them.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// How Qwen 2 splits text: as Llama 3, with single digits.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl GgufVocabulary {
    /// The tokenizer; the reason if it is not supported.
    pub fn tokenizer(self) -> Result<Tokenizer, String> {
        let ids = self.tokens.iter().cloned().zip(0..);
        let vocab: HashMap<String, u32> = ids.collect();
        let mut inner = match self.model.as_str() {
            "gpt2" => self.byte_pairs(vocab)?,
            "llama" => self.pieces(vocab)?,
            model => {
                return Err(format!(
                    "its tokenizer is {model}; supported: gpt2 (byte pairs), llama (pieces with scores)"
                ));
            }
        };
        if !self.kinds.is_empty() && self.kinds.len() != self.tokens.len() {
            return Err(format!(
                "its tokenizer has {} token types for {} tokens",
                self.kinds.len(),
                self.tokens.len()
            ));
        }
        if self.adds_begin && self.begin.is_none() {
            return Err(
                "a token is to stand before every text, but its metadata has no tokenizer.ggml.bos_token_id"
                    .to_owned(),
            );
        }
        for (token, kind) in self.tokens.iter().zip(&self.kinds) {
            let added = match kind {
                3 => inner.add_special_tokens([AddedToken::from(token.clone(), true)]),
                4 => inner.add_tokens([AddedToken::from(token.clone(), false).normalized(false)]),
                _ => continue,
            };
            added.map_err(|e| format!("its tokenizer refuses the token {token:?}: {e}"))?;
        }
        Ok(Tokenizer {
            inner,
            begin: self.begin.filter(|_| self.adds_begin),
            ends: self.ends,
        })
    }

    fn byte_pairs(&self, vocab: HashMap<String, u32>) -> Result<tokenizers::Tokenizer, String> {
        let pair = |merge: &String| match merge.split_once(' ') {
            Some((a, b)) => Ok((a.to_owned(), b.to_owned())),
            None => Err(format!("its tokenizer has a merge of one part, {merge:?}")),
        };
        let merges: Vec<_> = self.merges.iter().map(pair).collect::<Result<_, _>>()?;
        let split = |pattern: &str| {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
            let split = split.map_err(|e| e.to_string())?;
            let bytes = ByteLevel::new(false, false, false);
            Ok::<_, String>(vec![split.into(), bytes.into()])
        };
        let gpt2 = ByteLevel::new(false, false, true);
        let splits: Vec<PreTokenizerWrapper> = match self.split.as_str() {
            "gpt-2" | "default" => vec![gpt2.into()],
            "smollm" => vec![Digits::new(true).into(), gpt2.into()],
            "llama-bpe" => split(LLAMA3)?,
            "qwen2" => split(QWEN2)?,
            name => {
                return Err(format!(
                    "its tokenizer splits text by {name}; supported: gpt-2, smollm, llama-bpe, qwen2"
                ));
            }
        };
        let model = BPE::builder()
            .vocab_and_merges(
                vocab
                    .into_iter()
                    .collect::<tokenizers::models::bpe::Vocab>(),
                merges,
            )
            .ignore_merges(self.split == "llama-bpe")
            .build();
        let mut tokenizer = tokenizers::Tokenizer::new(model.map_err(|e| e.to_string())?);
        if self.split == "qwen2" {
            let with = tokenizer.with_normalizer(Some(NFC));
            with.map_err(|e| e.to_string())?;
        }
        tokenizer.with_pre_tokenizer(Some(Splits::new(splits)));
        tokenizer.with_decoder(Some(ByteLevel::new(false, false, false)));
        Ok(tokenizer)
    }

    /// Pieces of words with spaces as ▁: of two pieces, those that form the piece of the greatest score are merged first.
    fn pieces(&self, vocab: HashMap<String, u32>) -> Result<tokenizers::Tokenizer, String> {
        if self.scores.len() != self.tokens.len() {
            return Err(format!(
                "its tokenizer has {} scores for {} tokens",
                self.scores.len(),
                self.tokens.len()
            ));
        }
        if let Some(piece) = self.tokens.iter().find(|piece| piece.len() > MAX_PIECE) {
            return Err(format!(
                "its tokenizer has a piece of {} bytes; allowed: up to {MAX_PIECE}",
                piece.len()
            ));
        }
        let merges = self.merges_of_pieces(&vocab)?;
        let unknown = self.kinds.iter().position(|kind| *kind == 2);
        let unknown = self.tokens.get(unknown.unwrap_or(0)).cloned();
        let model = BPE::builder()
            .vocab_and_merges(
                vocab
                    .into_iter()
                    .collect::<tokenizers::models::bpe::Vocab>(),
                merges,
            )
            .unk_token(unknown.unwrap_or_default())
            .fuse_unk(true)
            .byte_fallback(true)
            .build();
        let mut tokenizer = tokenizers::Tokenizer::new(model.map_err(|e| e.to_string())?);
        let space = Replace::new(" ", "▁").map_err(|e| e.to_string())?;
        let mut normalizers: Vec<NormalizerWrapper> = vec![space.into()];
        if self.adds_space {
            normalizers.insert(0, Prepend::new("▁".to_owned()).into());
        }
        let with = tokenizer.with_normalizer(Some(Normalizers::new(normalizers)));
        with.map_err(|e| e.to_string())?;
        let back = Replace::new("▁", " ").map_err(|e| e.to_string())?;
        let mut decoders: Vec<DecoderWrapper> =
            vec![back.into(), ByteFallback::new().into(), Fuse::new().into()];
        if self.adds_space {
            decoders.push(Strip::new(' ', 1, 0).into());
        }
        tokenizer.with_decoder(Some(Decoders::new(decoders)));
        Ok(tokenizer)
    }

    /// The pairs of pieces that form a piece, those of the greatest score first.
    fn merges_of_pieces(
        &self,
        vocab: &HashMap<String, u32>,
    ) -> Result<Vec<(String, String)>, String> {
        let given: usize = self.tokens.iter().map(String::len).sum();
        let most = given.max(SMALL_VOCABULARY).saturating_mul(MAX_MERGES);
        let (mut merges, mut bytes) = (Vec::new(), 0);
        for (piece, score) in self.tokens.iter().zip(&self.scores) {
            for (at, _) in piece.char_indices().skip(1) {
                let (a, b) = piece.split_at(at);
                let (Some(first), Some(second)) = (vocab.get(a), vocab.get(b)) else {
                    continue;
                };
                bytes += piece.len();
                if bytes > most {
                    return Err(format!(
                        "the {given} bytes of its tokenizer's pieces form each other in too many ways; allowed: merges of {most} bytes, {MAX_MERGES} for each byte of the \
                         pieces"
                    ));
                }
                merges.push((*score, *first, *second, a, b));
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let own = |(.., a, b): (f32, u32, u32, &str, &str)| (a.to_owned(), b.to_owned());
        Ok(merges.into_iter().map(own).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of pieces, all of one score.
    fn of_pieces(tokens: Vec<String>) -> GgufVocabulary {
        GgufVocabulary {
            model: "llama".to_owned(),
            scores: vec![0.0; tokens.len()],
            tokens,
            kinds: Vec::new(),
            merges: Vec::new(),
            split: String::new(),
            begin: None,
            adds_begin: false,
            adds_space: false,
            ends: Vec::new(),
        }
    }

    /// Kills merges of any number: those of 512 KiB of pieces took 360 MB.
    #[test]
    fn pieces_that_form_each_other_in_too_many_ways_are_refused() {
        let repeated = |most: usize| (1..=most).map(|n| "c".repeat(n)).collect();
        let refused = of_pieces(repeated(1024)).tokenizer().err().unwrap();
        assert!(refused.contains("524800 bytes"), "{refused}");
        assert!(refused.contains("too many ways"), "{refused}");
        let few = of_pieces(repeated(64)).tokenizer().unwrap();
        assert_eq!(few.encode(&"c".repeat(64)).unwrap(), [63]);
    }
}
