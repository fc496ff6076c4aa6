//! What attends: sequences of a cache, their query tokens, the layer, and what changes scores. The one place that makes the [`Problem`] of it.

use crate::{
    cache::{CachedSequences, KvCache, SelectedPages},
    error::{Error, refuse},
    problem::{Heads, Problem},
    score_modifiers::ScoreModifiers,
};

/// What attends to a cache. The last query token of a sequence stands at its last cached token, so a step appends first.
///
/// ```
/// use attn_core::{Attend, CacheConfig, Heads, HostPages, KvCache, KvFormat};
///
/// let heads = Heads::new(4, 1, 64);
/// let config = CacheConfig::builder(KvFormat::INT8, heads).sequences(3).max_len(64).build();
/// let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
/// cache.append(2, &[0.5; 5 * 64], &[2.0; 5 * 64])?;
/// // The two newest tokens of sequence 2.
/// let at = Attend { q_lens: Some(&[2]), ..Attend::new(heads.q, &[2]) };
/// let attended = at.of_cache(&cache)?;
/// assert_eq!((&attended.problem().kv_lens[..], attended.problem().out_shape()), (&[5][..], [2, 4, 64]));
/// # Ok::<(), attn_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Attend<'a> {
    /// The layer of the cache; 0 in a cache of one.
    pub layer: usize,
    /// The number of query heads: a multiple of the cache's KV heads, at most 128 for each.
    pub q_heads: usize,
    /// The sequences of the cache, in any order. Rows come in this order: all query tokens of the first one, then those of the next.
    pub sequences: &'a [usize],
    /// The query tokens of each sequence; none for one each.
    pub q_lens: Option<&'a [usize]>,
    /// Of shards, the tokens of each sequence that lie in shards ahead ([`Problem::tokens_before`]); else empty.
    pub tokens_before: &'a [usize],
    /// Of shards, the tokens of each sequence that follow in other shards ([`Problem::tokens_after`]); else empty.
    pub tokens_after: &'a [usize],
    /// The pages that each KV head of each sequence attends ([`SelectedPages`]), of one query token for each sequence; none for all pages.
    ///
    /// ```
    /// use attn_core::{Attend, CacheConfig, Heads, HostPages, KvCache, KvFormat, SelectedPages};
    ///
    /// let heads = Heads::new(4, 2, 64);
    /// let config = CacheConfig::builder(KvFormat::INT8, heads).page_size(64).centres(false).max_len(256).build();
    /// let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// let tokens = vec![0.5; 150 * 2 * 64];
    /// cache.append(0, &tokens, &tokens)?;
    /// // Of three pages KV head 0 attends the first and the last one, which has 22 tokens, KV head 1 the second.
    /// let selected = SelectedPages { pages: &[0, 2, 1], counts: &[2, 1] };
    /// let at = Attend { pages: Some(selected), ..Attend::new(heads.q, &[0]) };
    /// assert_eq!(at.of_cache(&cache)?.problem().kv_lens, [64 + 22, 64]);
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub pages: Option<SelectedPages<'a>>,
    /// What changes scores. Of selected pages the softmax scale and the soft cap alone: all else goes by a token's place or by the query head.
    pub scores: ScoreModifiers,
}

impl<'a> Attend<'a> {
    /// One query token of each sequence, in the first layer, without modifiers.
    #[must_use]
    pub fn new(q_heads: usize, sequences: &'a [usize]) -> Self {
        Attend {
            layer: 0,
            q_heads,
            sequences,
            q_lens: None,
            tokens_before: &[],
            tokens_after: &[],
            pages: None,
            scores: ScoreModifiers::default(),
        }
    }

    /// The number of query tokens of all sequences, saturating: the tokens of the rows.
    #[must_use]
    pub fn query_tokens(&self) -> usize {
        match self.q_lens {
            Some(lens) => lens.iter().fold(0, |n, len| n.saturating_add(*len)),
            None => self.sequences.len(),
        }
    }

    /// The sequences of the cache that attend, and the problem: heads and lengths are the cache's.
    ///
    /// # Errors
    /// [`Error::Layer`], [`Error::Sequence`]; those of [`CachedSequences::check_problem`]. With selected pages those of [`CacheLayer::selected`](crate::CacheLayer::selected), and
    /// [`Error::Length`] for other than one number for each sequence in a list, [`Error::Parameter`] for several query tokens of a sequence, shards, and score modifiers that have no meaning there.
    pub fn of_cache<'c>(&self, cache: &'c KvCache) -> Result<Attended<'c>, Error> {
        if let Some(pages) = self.pages {
            return self.of_pages(cache, pages);
        }
        let chosen = cache.layer(self.layer)?.sequences(self.sequences)?;
        let heads = Heads::new(
            self.q_heads,
            cache.config().num_kv_heads,
            cache.config().head_dim,
        );
        let mut problem = Problem::new(heads, chosen.table().lens.clone());
        if let Some(q_lens) = self.q_lens {
            problem = problem.q_lens(q_lens);
        }
        let problem = problem
            .tokens_before(self.tokens_before)
            .tokens_after(self.tokens_after)
            .scores(self.scores.clone());
        Attended::new(chosen, problem, 1)
    }

    /// Each KV head of each sequence as a sequence of one KV head.
    fn of_pages<'c>(
        &self,
        cache: &'c KvCache,
        pages: SelectedPages<'_>,
    ) -> Result<Attended<'c>, Error> {
        let config = cache.config();
        let heads = Heads::new(self.q_heads, config.num_kv_heads, config.head_dim);
        heads.check()?;
        self.check_selects()?;
        let chosen = cache.layer(self.layer)?;
        let chosen = chosen.selected(self.sequences, pages)?;
        let of_one = Heads::new(heads.q / heads.kv, 1, heads.dim);
        let problem = Problem::new(of_one, chosen.table().lens.clone()).scores(self.scores.clone());
        Attended::new(chosen, problem, heads.kv)
    }

    /// Refuses what goes by a token's place in its sequence, or by the query head.
    fn check_selects(&self) -> Result<(), Error> {
        let needed = self.sequences.len();
        let shards = [
            ("tokens_before", self.tokens_before),
            ("tokens_after", self.tokens_after),
        ];
        let shards = shards.into_iter().filter(|(_, list)| !list.is_empty());
        let lists = self.q_lens.map(|lens| ("q_lens", lens)).into_iter();
        for (what, list) in lists.chain(shards) {
            let given = list.len();
            if given != needed {
                return Err(Error::Length {
                    what,
                    given,
                    needed,
                });
            }
        }
        if let Some(q_len) = self.q_lens.and_then(|lens| lens.iter().find(|n| **n != 1)) {
            return refuse(
                "q_lens with selected pages",
                *q_len,
                "1: one query token of each sequence",
            );
        }
        let shards = [self.tokens_before, self.tokens_after].concat();
        if let Some(tokens) = shards.into_iter().find(|n| *n > 0) {
            return refuse("shards with selected pages", tokens, "no shards");
        }
        let scores = &self.scores;
        let given = [
            ("window_left", scores.window_left.is_some()),
            ("chunk", scores.chunk.is_some()),
            ("alibi_slopes", scores.alibi_slopes.is_some()),
            ("sinks", scores.sinks.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => refuse(
                "score modifiers with selected pages",
                format_args!("{name}"),
                "softmax_scale and softcap",
            ),
            None => Ok(()),
        }
    }
}

/// Sequences of a cache and the problem that attends to them, with their lengths, compared with each other: holding one is the proof.
pub struct Attended<'a> {
    sequences: CachedSequences<'a>,
    problem: Problem,
    split: usize,
}

impl<'a> Attended<'a> {
    fn new(sequences: CachedSequences<'a>, problem: Problem, split: usize) -> Result<Self, Error> {
        sequences.check_problem(&problem)?;
        Ok(Attended {
            sequences,
            problem,
            split,
        })
    }

    /// How many of the problem's query tokens a query token of the caller's is, as consecutive query heads of it: 1, or with selected pages the number of KV heads.
    #[must_use]
    pub fn split(&self) -> usize {
        self.split
    }

    /// The sequences.
    #[must_use]
    pub fn sequences(&self) -> &CachedSequences<'a> {
        &self.sequences
    }

    /// The problem.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The shape of log-sum-exps, `[query tokens, num_q_heads, 1]`.
    #[must_use]
    pub fn lse_rows(&self) -> [usize; 3] {
        let [tokens, heads, _] = self.problem.out_shape();
        [tokens, heads, 1]
    }

    /// The shapes of the states of so many spans: maxima and sums, and O.
    #[must_use]
    pub fn state_rows(&self, spans: usize) -> [[usize; 3]; 2] {
        let [tokens, heads, dim] = self.problem.out_shape();
        [2, dim].map(|last| [spans.saturating_mul(tokens), heads, last])
    }
}
