//! The order of K and V in a file: the library's, or another that the file or the command line names.

use std::fmt;

use anyhow::{Result, bail, ensure};

/// Which dimension of K and V comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Layout {
    /// `[seq, kv_heads, head_dim]`, the order of an append.
    TokensFirst,
    /// `[kv_heads, seq, head_dim]`.
    HeadsFirst,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layout::TokensFirst => "[seq, kv_heads, head_dim]",
            Layout::HeadsFirst => "[kv_heads, seq, head_dim]",
        })
    }
}

/// The most KV heads of a layer with fewer tokens than heads: more of them are tokens.
const MOST_HEADS: usize = 256;

impl Layout {
    const ALL: [Layout; 2] = [Layout::TokensFirst, Layout::HeadsFirst];

    /// How a file's metadata `layout` names this order.
    pub fn words(self) -> String {
        format!("k,v {self}")
    }

    /// The order of a file: the one that its metadata names, or that was asked for, or the library's.
    pub fn of(metadata: Option<&str>, asked: Option<Layout>) -> Result<Layout> {
        let is_named =
            |layout: &Layout| metadata.is_some_and(|text| text.contains(&layout.words()));
        let named: Vec<Layout> = Layout::ALL.into_iter().filter(is_named).collect();
        match (&named[..], asked, metadata) {
            (&[named], asked, _) => {
                ensure!(
                    asked.is_none_or(|asked| asked == named),
                    "the file's metadata `layout` says that K and V are {named}; leave --layout out"
                );
                Ok(named)
            }
            (_, Some(asked), _) => Ok(asked),
            (_, None, None) => Ok(Layout::TokensFirst),
            (_, None, Some(text)) => bail!(
                "the file's metadata `layout` is {text:?}; it must contain `{}` or `{}`, or name the order with --layout",
                Layout::TokensFirst.words(),
                Layout::HeadsFirst.words()
            ),
        }
    }

    /// Tokens, KV heads and dims of a shape in this order.
    pub fn sizes(self, [first, second, dim]: [usize; 3]) -> [usize; 3] {
        match self {
            Layout::TokensFirst => [first, second, dim],
            Layout::HeadsFirst => [second, first, dim],
        }
    }

    /// Refuses tokens and heads that can only be mistaken for each other.
    pub fn check(self, name: impl fmt::Display, shape: [usize; 3]) -> Result<()> {
        let [tokens, heads, _] = self.sizes(shape);
        ensure!(
            heads <= tokens || heads <= MOST_HEADS,
            "{name} is {shape:?}, read as {self}: {heads} KV heads of {tokens} tokens; allowed: up to {MOST_HEADS} heads, or as many as tokens; name another order with --layout"
        );
        Ok(())
    }

    /// Numbers in this order as `[tokens, heads, dim]`.
    pub fn by_token(self, x: Vec<f32>, shape: [usize; 3]) -> Vec<f32> {
        if self == Layout::TokensFirst {
            return x;
        }
        let [tokens, heads, dim] = self.sizes(shape);
        let rows = (0..tokens).flat_map(|t| (0..heads).map(move |h| (h * tokens + t) * dim));
        rows.flat_map(|at| &x[at..at + dim]).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_word_counts_before_the_default_and_never_against_the_command_line() {
        let of =
            |metadata: Option<&str>, asked| Layout::of(metadata, asked).map_err(|e| e.to_string());
        let (tokens, heads) = (Layout::TokensFirst, Layout::HeadsFirst);
        assert_eq!(of(None, None), Ok(tokens));
        assert_eq!(of(None, Some(heads)), Ok(heads));
        let text = "BNSH: k,v [kv_heads, seq, head_dim]; q [q_len, q_heads, head_dim]";
        assert_eq!(of(Some(text), None), Ok(heads));
        assert_eq!(of(Some(text), Some(heads)), Ok(heads));
        let error = of(Some(text), Some(tokens)).unwrap_err();
        assert!(error.contains("leave --layout out"), "{error}");
        let words = tokens.words();
        assert_eq!(of(Some(&words), None), Ok(tokens));
        let error = of(Some("NHD"), None).unwrap_err();
        assert!(error.contains("\"NHD\""), "{error}");
        assert_eq!(of(Some("NHD"), Some(tokens)), Ok(tokens));
        // Both orders in one text name none.
        let both = format!("{} {}", tokens.words(), heads.words());
        assert!(of(Some(&both), None).is_err());
    }

    #[test]
    fn rows_of_heads_become_rows_of_tokens() {
        // Two heads of three tokens of one dim.
        let x = vec![0.0, 1.0, 2.0, 10.0, 11.0, 12.0];
        let shape = [2, 3, 1];
        assert_eq!(Layout::HeadsFirst.sizes(shape), [3, 2, 1]);
        let by_token = Layout::HeadsFirst.by_token(x.clone(), shape);
        assert_eq!(by_token, [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
        assert_eq!(Layout::TokensFirst.by_token(x.clone(), [3, 2, 1]), x);
    }

    #[test]
    fn more_heads_than_tokens_are_taken_up_to_256() {
        let check = |shape| Layout::TokensFirst.check("x.k", shape).is_ok();
        assert!(check([1, 256, 64]) && check([257, 257, 64]));
        assert!(!check([1, 257, 64]) && !check([300, 2048, 64]));
        assert!(Layout::HeadsFirst.check("x.k", [8, 300, 64]).is_ok());
    }
}
