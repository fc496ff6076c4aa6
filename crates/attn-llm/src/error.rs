//! Errors as values: the file or the request that was refused, what is allowed, and the next step.

use std::{io, path::PathBuf};

/// The reason why a model was not loaded, or a request not answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that cannot be read.
    #[error("cannot read {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A file that holds no model of a supported kind.
    #[error("{} is no model that runs here: {reason}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// More tokens than a sequence has room for.
    #[error(
        "the sequence would have {needed} tokens, but there is room for {limit}; shorten the text, or raise the context up to what the model takes"
    )]
    Context {
        /// Tokens that the request needs.
        needed: usize,
        /// Tokens that there is room for.
        limit: usize,
    },
    /// A request that no model can answer.
    #[error("{what} is {given}; allowed: {allowed}")]
    Request {
        /// The part of the request.
        what: &'static str,
        /// The value given.
        given: String,
        /// The values allowed.
        allowed: String,
    },
    /// A model of huggingface.co that cannot be had.
    #[error(
        "cannot fetch {name}: {reason}; check the name and the network, or give the path of a file or folder"
    )]
    Hub {
        /// The model.
        name: String,
        /// The file that is missing, and why.
        reason: String,
    },
    /// Text that the tokenizer cannot turn into tokens, or back.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    /// The cache or the attention refused.
    #[error(transparent)]
    Attention(#[from] attn::Error),
    /// A matrix product that failed.
    #[error("a matrix product failed")]
    Product(#[from] candle_core::Error),
}
