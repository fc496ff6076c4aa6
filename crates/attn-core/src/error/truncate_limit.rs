//! What stands against a shorter sequence.

use std::fmt;

/// What stands against a shorter sequence ([`Error::Truncate`](crate::Error::Truncate)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TruncateLimit {
    /// Tokens in front were dropped ([`KvCache::drop_before`](crate::KvCache::drop_before)).
    Dropped,
    /// The tokens that come next would read residuals that the cache no longer has; formats with a window keep those of the first tile, of the newest tokens, and at
    /// checkpoints ([`CacheBuilder::checkpoints`](crate::CacheBuilder::checkpoints)) alone.
    Residuals,
}

impl fmt::Display for TruncateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TruncateLimit::Dropped => "the tokens in front were dropped",
            TruncateLimit::Residuals => "the format keeps residuals of the first and of the newest tokens, and at the checkpoints that a cache is made with (`checkpoints`), and the tokens that come next read those just before them",
        })
    }
}
