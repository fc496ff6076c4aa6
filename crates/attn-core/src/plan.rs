//! A problem that a backend has prepared.

use std::{any::Any, fmt, sync::Arc};

use crate::{
    error::Error,
    events,
    format::KvFormat,
    problem::{MAX_TOKENS, Problem},
    process,
};

/// The plans that are kept for the calls that come: those of decoding, of drafts, of a prompt's pieces.
pub const KEPT_PLANS: usize = 8;

impl Problem {
    /// The problem to plan for where plans are kept while sequences grow: its sequences are all as long as its longest one, and an eighth more at most, so that
    /// few plans serve all lengths; one with tokens ahead ([`Problem::tokens_before`]) no longer than these leave room for. Of shards ([`Problem::tokens_after`]), whose following tokens differ from step to step, it is the problem itself.
    ///
    /// ```
    /// use attn_core::{Heads, Problem};
    ///
    /// let problem = Problem::new(Heads::new(4, 1, 64), [1000, 3]);
    /// assert_eq!(problem.to_plan().kv_lens, [1024, 1024]);
    /// ```
    #[must_use]
    pub fn to_plan(&self) -> Problem {
        let mut planned = self.clone();
        if self.tokens_after.is_empty() {
            let longest = planned_len(self.kv_lens.iter().copied().max().unwrap_or(0));
            for (b, len) in planned.kv_lens.iter_mut().enumerate() {
                let room = MAX_TOKENS.saturating_sub(self.before(b));
                *len = longest.min(room).max(*len);
            }
        }
        planned
    }
}

/// The length to plan for where the longest sequence has `len` tokens.
fn planned_len(len: usize) -> usize {
    let step = (len.max(1).next_power_of_two() / 16).max(64);
    len.max(1).next_multiple_of(step)
}

/// A problem prepared for one backend, by [`DecodeAttention::plan`](crate::DecodeAttention::plan).
///
/// A plan is made once and serves every step of the same batch, heads and modifiers whose sequences are at most as long as the problem's:
/// plan for the longest lengths that will come. Cloning a plan is cheap; the clones share what the backend has prepared.
#[derive(Clone)]
#[must_use]
pub struct Plan {
    backend: &'static str,
    problem: Arc<Problem>,
    format: KvFormat,
    prepared: Arc<dyn Any + Send + Sync>,
}

impl Plan {
    /// For backends: checks a problem, and makes a plan that keeps what the backend has `prepared` for it.
    ///
    /// # Errors
    /// Those of [`Problem::check`], [`KvFormat::check`] and [`process::check`].
    pub fn new<T: Any + Send + Sync>(
        backend: &'static str,
        problem: &Problem,
        format: KvFormat,
        prepared: T,
    ) -> Result<Self, Error> {
        process::check()?;
        problem.check()?;
        format.check(problem.head_dim)?;
        events::prepared(backend, problem, format);
        Ok(Plan {
            backend,
            problem: Arc::new(problem.clone()),
            format,
            prepared: Arc::new(prepared),
        })
    }

    /// The name of the backend that made the plan.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.backend
    }

    /// The problem with the longest lengths that a step may have.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The format of the cache.
    #[must_use]
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// For backends: what [`Plan::new`] was given, if it was a `T`.
    #[must_use]
    pub fn prepared<T: Any>(&self) -> Option<&T> {
        self.prepared.downcast_ref()
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Plan");
        fields.field("backend", &self.backend);
        fields.field("format", &self.format);
        fields.field("problem", &self.problem);
        fields.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Heads;

    #[test]
    fn a_plan_serves_an_eighth_more_tokens_at_most() {
        let [mut plans, mut last] = [0, usize::MAX];
        for len in 0..=1 << 20 {
            let planned = planned_len(len);
            assert!(planned >= len && planned <= 1 << 20, "{len}");
            assert!(planned - len <= 64 || 8 * (planned - len) <= len, "{len}");
            plans += usize::from(planned != last);
            last = planned;
        }
        assert!(plans < 120, "{plans}");
    }

    /// Kills lengths that the tokens ahead leave no room for.
    #[test]
    fn a_last_shard_is_planned_no_longer_than_a_sequence_may_be() {
        let heads = Heads::new(1, 1, 64);
        for (lens, before, planned) in [
            (vec![67_584], vec![980_992], vec![67_584]),
            (
                vec![600_000, 1000],
                vec![0, 524_288],
                vec![655_360, 524_288],
            ),
            (vec![1000], vec![2048], vec![1024]),
        ] {
            let shard = Problem::new(heads, lens).tokens_before(before);
            shard.check().unwrap();
            let plan = shard.to_plan();
            plan.check().unwrap();
            assert_eq!(plan.kv_lens, planned);
        }
    }

    #[test]
    fn shards_are_planned_as_they_are() {
        let heads = Heads::new(1, 1, 64);
        let shard = Problem::new(heads, [1024]).tokens_after([(1 << 20) - 1024]);
        assert_eq!(shard.to_plan(), shard);
    }
}
