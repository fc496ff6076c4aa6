//! Rows that a session attends and where the results go.

use crate::{Error, Rows, RowsMut};

/// What attends and where the results go, `[query tokens, num_q_heads, head_dim]`, sequence after sequence: in host memory, or all on the device of the cache.
#[derive(Debug)]
pub struct AttendRows<'a> {
    /// The queries.
    pub q: Rows<'a>,
    /// The outputs. On a device they have the queries' type.
    pub out: RowsMut<'a>,
    /// The log-sum-exps, f32 `[query tokens, num_q_heads, 1]` side by side, if they are asked for.
    pub lse: Option<RowsMut<'a>>,
}

impl<'a> AttendRows<'a> {
    /// Queries and outputs.
    #[must_use]
    pub fn new(q: impl Into<Rows<'a>>, out: impl Into<RowsMut<'a>>) -> Self {
        AttendRows {
            q: q.into(),
            out: out.into(),
            lse: None,
        }
    }

    /// The rows in the shape of the problem.
    pub(crate) fn split(self, parts: usize) -> Result<Self, Error> {
        Ok(AttendRows {
            q: self.q.split("q", parts)?,
            out: self.out.split("out", parts)?,
            lse: match self.lse {
                Some(lse) => Some(lse.split("lse", parts)?),
                None => None,
            },
        })
    }

    /// Asks for the log-sum-exps, too.
    #[must_use]
    pub fn with_lse(mut self, lse: impl Into<RowsMut<'a>>) -> Self {
        self.lse = Some(lse.into());
        self
    }
}

/// The queries of shards, and where the states of their spans go ([`SpanStates`](crate::SpanStates)): in host memory, or all on the device of the cache.
#[derive(Debug)]
pub struct SpanRows<'a> {
    /// The queries, `[query tokens, num_q_heads, head_dim]`.
    pub q: Rows<'a>,
    /// Spans of 1024 tokens, at least those of the longest sequence, 1 to 1024. States of spans that a sequence does not have are those that see no token.
    pub spans: usize,
    /// f32 `[spans·query tokens, num_q_heads, 2]` side by side: maxima, −∞ where a row sees no token of a span, and sums.
    pub max_sums: RowsMut<'a>,
    /// f32 `[spans·query tokens, num_q_heads, head_dim]` side by side; means nothing where a row sees no token.
    pub o: RowsMut<'a>,
}
