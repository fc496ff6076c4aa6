//! The description of a cache, and the limits of its numbers.

use crate::{
    centres::centres_bytes,
    error::{Error, refuse},
    format::{KvFormat, Scheme},
    head_dim::HeadDim,
    layout::{MAX_KV_HEADS, PageLayout},
    problem::{Heads, MAX_TOKENS},
    segments::TILE,
};

/// The description of a cache to create.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CacheConfig {
    /// The schemes of K and V.
    pub format: KvFormat,
    /// Number of query heads of the steps to come, so that [`CacheConfig::check`] refuses a number that no step can have. Pages do not depend on it.
    pub num_q_heads: usize,
    /// Number of KV heads.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: HeadDim,
    /// Tokens per page: 16, 32, 64 or 128.
    pub page_size: usize,
    /// Number of layers, which share lengths and pages: a page of a sequence is a page in every layer's pool.
    pub layers: usize,
    /// Number of pages of the page table, and of each layer's pool.
    pub num_pages: usize,
    /// Number of sequences, all empty at first.
    pub num_sequences: usize,
    /// Tokens of the longest sequence that the cache was asked for ([`CacheBuilder::max_len`], [`CacheBuilder::lens`]), at most [`MAX_TOKENS`]: no
    /// sequence has more, whatever the pool has room for. 0 where none was named; sequences grow as far as pages last.
    pub max_len: usize,
    /// The most query tokens that a step has of one sequence, for formats with a window: appends keep the residuals that so many new tokens read.
    /// Steps of other formats have any number.
    pub max_q_len: usize,
    /// Tokens from one checkpoint of a sequence to the next, for formats with a window: a multiple of 64 and of the page size; 0 for none
    /// ([`CacheBuilder::checkpoints`]).
    pub checkpoints: usize,
    /// Whether a centre is taken off each sequence's keys before they are stored ([`CacheBuilder::centres`]).
    pub centres: bool,
    /// Static K scale per layer and KV head, `[layers, num_kv_heads]`, which fp8 and int8-tensor need; empty for other schemes.
    pub k_tensor_scales: Vec<f32>,
    /// Static V scale per layer and KV head, which fp8 and int8-tensor need; empty for other schemes.
    pub v_tensor_scales: Vec<f32>,
}

/// Query tokens of a step unless the user says otherwise: decode and speculation need no residuals beyond those that are always kept.
const DEFAULT_MAX_Q_LEN: usize = 64;

/// Most layers of a cache.
pub(crate) const MAX_LAYERS: usize = 1024;

/// Most sequences of a cache.
const MAX_SEQUENCES: usize = 1 << 24;

impl CacheConfig {
    /// Starts a cache of one layer and pages of 64 tokens, with one empty sequence. Formats with static scales, such as fp8, need them by
    /// [`CacheBuilder::tensor_scales`] or [`CacheBuilder::unit_tensor_scales`].
    ///
    /// ```
    /// use attn_core::{CacheConfig, Heads, KvFormat};
    ///
    /// let heads = Heads::new(32, 8, 128);
    /// let config = CacheConfig::builder(KvFormat::INT8, heads)
    ///     .sequences(16)
    ///     .max_len(8192)
    ///     .build();
    /// assert_eq!(config.num_pages, 16 * 8192 / 64);
    /// ```
    pub fn builder(format: KvFormat, heads: Heads) -> CacheBuilder {
        CacheBuilder {
            config: CacheConfig {
                format,
                num_q_heads: heads.q,
                num_kv_heads: heads.kv,
                head_dim: heads.dim,
                page_size: 64,
                layers: 1,
                num_pages: 0,
                num_sequences: 1,
                max_len: 0,
                max_q_len: DEFAULT_MAX_Q_LEN,
                checkpoints: 0,
                centres: format.check_centres().is_ok(),
                k_tensor_scales: Vec::new(),
                v_tensor_scales: Vec::new(),
            },
            max_len: 0,
            lens: None,
            pages: None,
        }
    }

    /// Number of pages that one sequence of `kv_len` tokens takes at most, residual pages included, and those of its checkpoints.
    #[must_use]
    pub fn pages_for(&self, kv_len: usize) -> usize {
        let home = kv_len.div_ceil(self.page_size.max(1));
        let residual = self
            .format
            .max_residual_pages(self.page_size, self.max_q_len);
        let checkpoints = kv_len.checked_div(self.checkpoints).unwrap_or(0);
        let kept = checkpoints.saturating_mul(self.checkpoint_pages());
        home.saturating_add(residual.saturating_add(kept).min(home))
    }

    /// Residual pages that a sequence keeps for each of its checkpoints at most, in each layer: those of the window before it. 0 for a cache without checkpoints, and for formats
    /// without a window, which are truncated to any length.
    ///
    /// ```
    /// use attn_core::{CacheConfig, Heads, KvFormat};
    ///
    /// let heads = Heads::new(32, 8, 128);
    /// let config = CacheConfig::builder(KvFormat::INT4, heads).checkpoints(1024).max_len(8192).build();
    /// assert_eq!((config.checkpoint_pages(), config.checkpoint_bytes()?), (2, 2 * 67584));
    /// // 128 home pages, 5 of residuals of the first tile and the newest ones, and 2 for each checkpoint.
    /// assert_eq!(config.num_pages, 128 + 5 + 8 * 2);
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    #[must_use]
    pub fn checkpoint_pages(&self) -> usize {
        let window = TILE * self.format.window().tiles();
        window.min(self.checkpoints) / self.page_size.max(1)
    }

    /// Bytes that each checkpoint of a sequence takes at most, in all layers: those of [`CacheConfig::checkpoint_pages`].
    ///
    /// # Errors
    /// Those of [`CacheConfig::check`].
    pub fn checkpoint_bytes(&self) -> Result<usize, Error> {
        self.check()?;
        Ok(self.layers * self.checkpoint_pages() * self.layout()?.page_bytes())
    }

    /// Whether the residuals of a sequence's home page `home` are in the window of a checkpoint behind it.
    pub(crate) fn keeps_at_checkpoint(&self, home: usize) -> bool {
        let every = self.checkpoints / self.page_size.max(1);
        home.checked_rem(every)
            .is_some_and(|place| place >= every - self.checkpoint_pages())
    }

    /// Slots of a sequence's residual pages ([`KvFormat::residual_slots`]).
    #[must_use]
    pub fn residual_slots(&self) -> usize {
        self.format.residual_slots(self.page_size, self.max_q_len)
    }

    /// The layout of the cache's pages.
    ///
    /// # Errors
    /// Those of [`PageLayout::new`].
    pub fn layout(&self) -> Result<PageLayout, Error> {
        PageLayout::new(
            self.format,
            self.head_dim,
            self.page_size,
            self.num_kv_heads,
        )
    }

    /// Bytes of one sequence's centres of K in one layer, `[num_kv_heads, 2, head_dim.k]` in bf16; 0 for a cache without.
    #[must_use]
    pub fn centres_bytes(&self) -> usize {
        match self.centres {
            true => centres_bytes(self.num_kv_heads, self.head_dim.k),
            false => 0,
        }
    }

    /// The static scales of K and of V of one layer, per KV head; empty for schemes that have none, and for layers beyond the last.
    #[must_use]
    pub fn tensor_scales(&self, layer: usize) -> [&[f32]; 2] {
        let heads = self.num_kv_heads;
        let first = layer.saturating_mul(heads);
        let of_layer = first..first.saturating_add(heads);
        [&self.k_tensor_scales, &self.v_tensor_scales]
            .map(|scales| scales.get(of_layer.clone()).unwrap_or_default())
    }

    /// Size of all layers' pools in bytes.
    ///
    /// # Errors
    /// Those of [`CacheConfig::check`].
    pub fn pool_bytes(&self) -> Result<usize, Error> {
        self.check()?;
        Ok(self.layers * self.num_pages * self.layout()?.page_bytes())
    }

    /// Refuses a description that no pool can hold.
    ///
    /// # Errors
    /// [`Error::Parameter`]; [`Error::MissingScales`] where a scheme with static scales has none, [`Error::ScaleCount`] for another number of them.
    pub fn check(&self) -> Result<(), Error> {
        let layout = self.layout()?;
        let heads = Heads::new(self.num_q_heads, self.num_kv_heads, self.head_dim);
        heads.check()?;
        if self.num_pages > u32::MAX as usize {
            return refuse("num_pages", self.num_pages, "at most 2^32 - 1");
        }
        if self.num_sequences > MAX_SEQUENCES {
            return refuse("num_sequences", self.num_sequences, "at most 2^24");
        }
        if self.max_len > MAX_TOKENS {
            return refuse(
                "max_len",
                self.max_len,
                "at most 1048576 tokens of a sequence; ask for more sequences, or for a number of pages",
            );
        }
        if !self.checkpoints.is_multiple_of(self.page_size.max(TILE)) {
            return refuse(
                "checkpoints",
                self.checkpoints,
                "multiples of 64 and of the page size, tokens from one checkpoint to the next; 0 for none",
            );
        }
        if !(1..=MAX_LAYERS).contains(&self.layers) {
            return refuse("layers", self.layers, "1 to 1024");
        }
        let bytes = self.num_pages.checked_mul(layout.page_bytes());
        let bytes = bytes.and_then(|bytes| bytes.checked_mul(self.layers));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            let (pages, size) = (self.num_pages, layout.page_bytes());
            let layers = match self.layers {
                1 => String::new(),
                layers => format!(" in each of {layers} layers"),
            };
            return refuse(
                "the size of the pool",
                format_args!("{pages} pages of {size} bytes{layers}"),
                "at most 2^63 - 1; ask for fewer pages",
            );
        }
        if self.centres {
            self.format.check_centres()?;
        }
        let scales = [&self.k_tensor_scales[..], &self.v_tensor_scales];
        self.format
            .check_scales(scales, self.layers * self.num_kv_heads)
    }
}

/// A cache under description, made by [`CacheConfig::builder`].
#[derive(Debug, Clone)]
#[must_use]
pub struct CacheBuilder {
    config: CacheConfig,
    max_len: usize,
    lens: Option<Vec<usize>>,
    pages: Option<usize>,
}

impl CacheBuilder {
    /// Sets the number of sequences, of one longest length.
    pub fn sequences(mut self, sequences: usize) -> Self {
        self.config.num_sequences = sequences;
        self.lens = None;
        self
    }

    /// Sets the number of layers, which share one page table: a model's step is reserved once and written layer by layer
    /// ([`KvCache::reserve`](crate::KvCache::reserve)).
    ///
    /// ```
    /// use attn_core::{CacheConfig, Heads, KvFormat};
    ///
    /// let heads = Heads::new(32, 8, 128);
    /// let one = CacheConfig::builder(KvFormat::INT8, heads).max_len(8192).build();
    /// let config = CacheConfig::builder(KvFormat::INT8, heads).layers(36).max_len(8192).build();
    /// assert_eq!(config.num_pages, one.num_pages);
    /// assert_eq!(config.pool_bytes()?, 36 * one.pool_bytes()?);
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn layers(mut self, layers: usize) -> Self {
        self.config.layers = layers;
        self
    }

    /// Sets the number of tokens that each sequence has room for, at most [`MAX_TOKENS`].
    pub fn max_len(mut self, tokens: usize) -> Self {
        self.max_len = tokens;
        self
    }

    /// Sets the sequences, and the number of tokens that each has room for, in place of [`CacheBuilder::sequences`] and [`CacheBuilder::max_len`].
    ///
    /// ```
    /// use attn_core::{CacheConfig, Heads, KvFormat, Problem};
    ///
    /// let problem = Problem::new(Heads::new(32, 8, 128), [4096, 1000]);
    /// let config = CacheConfig::builder(KvFormat::INT8, problem.heads())
    ///     .lens(problem.kv_lens.iter().copied())
    ///     .build();
    /// assert_eq!((config.num_sequences, config.num_pages), (2, 4096 / 64 + 16));
    /// ```
    pub fn lens(mut self, lens: impl IntoIterator<Item = usize>) -> Self {
        let lens: Vec<usize> = lens.into_iter().collect();
        self.config.num_sequences = lens.len();
        self.lens = Some(lens);
        self
    }

    /// Sets the number of pages, in place of enough for the longest length of every sequence.
    pub fn pages(mut self, pages: usize) -> Self {
        self.pages = Some(pages);
        self
    }

    /// Sets the number of tokens per page: 16, 32, 64 or 128.
    pub fn page_size(mut self, tokens: usize) -> Self {
        self.config.page_size = tokens;
        self
    }

    /// Sets the most query tokens that a step has of one sequence; only formats with a window, such as `int4`, need to know. Each sequence has room
    /// for so many tokens' residuals, unless [`CacheBuilder::pages`] says otherwise; they are kept from an append to the sequence's next.
    pub fn max_q_len(mut self, tokens: usize) -> Self {
        self.config.max_q_len = tokens;
        self
    }

    /// Sets after how many tokens, and again after as many, a sequence keeps what [`KvCache::truncate`](crate::KvCache::truncate) needs to leave it so long: the residual pages of the window
    /// before this checkpoint. A multiple of 64 and of the page size; 0, the default, for none. Only formats with a window, such as `int4`, need checkpoints: the others are
    /// truncated to any length, and the number costs nothing there.
    ///
    /// Each checkpoint takes [`CacheConfig::checkpoint_bytes`]: with pages of 64 tokens and windows of 128, two residual pages, which is an eighth more of every 1024
    /// tokens. Each sequence has room for the checkpoints of its longest length, unless [`CacheBuilder::pages`] says otherwise. Shards count from their own first token.
    pub fn checkpoints(mut self, every_tokens: usize) -> Self {
        self.config.checkpoints = every_tokens;
        self
    }

    /// Sets whether each sequence's keys are stored without what they have in common: the first token's key is taken off those of the first 64 tokens, the
    /// mean of these off all later ones, and attention adds the two centres' scores back ([`centres`](crate::centres)). Codes of 4 and 8 bits then err less, and biases of
    /// K cost nothing. Caches whose K is int8 or int4 (rotated, of int4 with a window) and whose V is of integers have centres unless this says otherwise; others
    /// cannot have any. Without centres pages mean something by themselves: [`KvCache::restore_pages`](crate::KvCache::restore_pages) takes those of other engines, and
    /// launches over a pool's addresses read them.
    ///
    /// ```
    /// use attn_core::{CacheConfig, Heads, KvFormat};
    ///
    /// let heads = Heads::new(4, 2, 64);
    /// assert!(CacheConfig::builder(KvFormat::INT4, heads).build().centres);
    /// let fp8: KvFormat = "fp8".parse()?;
    /// let builder = CacheConfig::builder(fp8, heads).unit_tensor_scales();
    /// assert!(!builder.clone().build().centres);
    /// assert!(builder.centres(true).build().check().is_err());
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn centres(mut self, centres: bool) -> Self {
        self.config.centres = centres;
        self
    }

    /// Sets the static scales of K and V for fp8 and int8-tensor: one per KV head, which all layers have, or one per layer and KV head,
    /// `[layers, num_kv_heads]`; none for a side of another scheme. A scale is the largest magnitude to come, divided by 448 for fp8 and by 127 for
    /// int8-tensor: larger numbers saturate.
    ///
    /// ```
    /// use attn_core::{CacheConfig, Error, Heads, KvFormat};
    ///
    /// let fp8: KvFormat = "fp8".parse()?;
    /// let builder = CacheConfig::builder(fp8, Heads::new(4, 2, 64)).max_len(256);
    /// let missing = builder.clone().build().check();
    /// assert!(matches!(missing, Err(Error::MissingScales { what: "k_scales", needed: 2, .. })));
    /// builder.tensor_scales([0.02, 0.05], [0.01, 0.01]).build().check()?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn tensor_scales(mut self, k: impl Into<Vec<f32>>, v: impl Into<Vec<f32>>) -> Self {
        self.config.k_tensor_scales = k.into();
        self.config.v_tensor_scales = v.into();
        self
    }

    /// Sets every static scale that the format has to 1, for numbers that are known to fit: fp8 then takes magnitudes up to 448, and int8-tensor
    /// whole numbers up to 127. Nothing changes for formats without static scales.
    pub fn unit_tensor_scales(self) -> Self {
        let heads = self.config.num_kv_heads.min(MAX_KV_HEADS);
        let ones = |scheme: Scheme| vec![1.0; if scheme.has_tensor_scale() { heads } else { 0 }];
        let KvFormat { k, v, .. } = self.config.format;
        self.tensor_scales(ones(k), ones(v))
    }

    /// Gives the description. Numbers that no cache can have saturate; [`CacheConfig::check`] refuses them.
    #[must_use]
    pub fn build(mut self) -> CacheConfig {
        let each = self.config.pages_for(self.max_len);
        let all = match &self.lens {
            None => {
                self.config.max_len = self.max_len;
                self.config.num_sequences.saturating_mul(each)
            }
            Some(lens) => {
                self.config.max_len = lens.iter().copied().max().unwrap_or(0);
                let pages = lens.iter().map(|&len| self.config.pages_for(len));
                pages.fold(0, usize::saturating_add)
            }
        };
        self.config.num_pages = self.pages.unwrap_or(all);
        let (layers, heads) = (self.config.layers, self.config.num_kv_heads);
        for scales in [
            &mut self.config.k_tensor_scales,
            &mut self.config.v_tensor_scales,
        ] {
            if scales.len() == heads && (2..=MAX_LAYERS).contains(&layers) {
                *scales = scales.repeat(layers);
            }
        }
        self.config
    }
}
