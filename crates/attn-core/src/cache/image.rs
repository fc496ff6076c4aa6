//! A sequence outside of a cache: one block of bytes that says what it holds, to be kept in memory, in a file, or sent.

use std::{borrow::Cow, ops::Range};

use super::centres::check_before;
use crate::{
    cache_config::{CacheConfig, MAX_LAYERS},
    centres::centres_bytes,
    error::{Error, Given, refuse},
    format::{KvFormat, Window},
    layout::PageLayout,
    page_bytes::SequencePages,
    problem::MAX_TOKENS,
};

/// The first bytes of every image.
const MAGIC: &[u8; 8] = b"attn-seq";

/// The version of the header and of the pages' bytes.
const VERSION: u32 = 2;

/// Where the checksum lies in the header.
const CHECKSUM: usize = 16;

/// Whether centres of K follow the pages.
const HAS_CENTRES: usize = 52;

/// Tokens of the sequence that lie in shards ahead.
const TOKENS_BEFORE: usize = 56;

/// Residual pages that are kept at checkpoints; the indices of their home pages lie behind the tensor scales.
const CHECKPOINT_PAGES: usize = 60;

/// Where the format's name lies, filled up with zeros.
const FORMAT: Range<usize> = 64..124;

/// Elements of a value where they are another number than a key's, else 0.
const V_DIM: usize = 124;

/// Where the tensor scales begin; the header ends behind them and the home pages of checkpoints, at a multiple of [`ALIGN`].
const SCALES: usize = V_DIM + 4;

const ALIGN: usize = 64;

/// A sequence's tokens in a cache's own pages, with all that they mean something by: format, shape, tensor scales.
///
/// [`KvCache::image`](crate::KvCache::image) makes one and [`KvCache::restore`](crate::KvCache::restore) takes one, on any backend; the outputs over the restored sequence have the same bits. The
/// bytes are one block with a header ([`formats`](crate::formats), "A sequence as one block"), so they can be written to a file or sent as they are.
///
/// ```
/// use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat, SequenceImage};
///
/// let heads = Heads::new(4, 1, 64);
/// let config = CacheConfig::builder(KvFormat::INT8, heads).sequences(2).max_len(256).build();
/// let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
/// cache.append(0, &[0.5; 3 * 64], &[2.0; 3 * 64])?;
///
/// let stored: Vec<u8> = cache.image(0)?.into_bytes();
/// cache.free_sequence(0)?;
/// let image = SequenceImage::from_bytes(&stored[..])?;
/// assert_eq!(image.tokens(), 3);
/// cache.restore(1, &image)?;
/// assert_eq!(cache.table().lens, [0, 3]);
/// # Ok::<(), attn_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceImage<'a> {
    description: Description,
    bytes: Cow<'a, [u8]>,
}

/// What an image's header says.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Description {
    /// The pages of each layer.
    pages: SequencePages,
    layers: usize,
    /// The indices of the full home pages whose residuals are kept at checkpoints, in order.
    checkpoints: Vec<usize>,
    /// Whether centres of K follow the pages.
    centres: bool,
    /// Tokens of the sequence that lie in shards ahead.
    tokens_before: usize,
    /// Static scales of K and of V, one layer behind the other.
    tensor_scales: [Vec<f32>; 2],
}

impl<'a> SequenceImage<'a> {
    /// Bytes that [`Description::write_header`] has completed.
    pub(super) fn new(description: Description, bytes: Vec<u8>) -> Self {
        let bytes = bytes.into();
        SequenceImage { description, bytes }
    }

    /// Takes the bytes of [`SequenceImage::as_bytes`], owned or borrowed, and checks the header, the size and the checksum.
    ///
    /// The values in the pages are checked by [`KvCache::restore`](crate::KvCache::restore).
    ///
    /// # Errors
    /// [`Error::Parameter`] for what is not a whole image of this version, or damaged; [`Error::Length`] for other pages than the tokens have.
    pub fn from_bytes(bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self, Error> {
        let bytes = bytes.into();
        let description = Description::parse(&bytes)?;
        let stored = long(&bytes, CHECKSUM);
        let found = checksum(&bytes);
        if found != stored {
            return refuse(
                "the checksum of a sequence's image",
                format_args!("{found:016x} where its header has {stored:016x}"),
                "the header's; the image is damaged, save the sequence again",
            );
        }
        Ok(SequenceImage { description, bytes })
    }

    /// The header and the pages: what [`SequenceImage::from_bytes`] takes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The image's bytes, owned.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_owned()
    }

    /// Number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.description.pages.tokens()
    }

    /// Tokens of the sequence that lie in shards ahead ([`KvCache::begin_shard`](crate::KvCache::begin_shard)).
    #[must_use]
    pub fn tokens_before(&self) -> usize {
        self.description.tokens_before
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.description.layers
    }

    /// The layout of the pages: format, heads, dims, tokens per page.
    #[must_use]
    pub fn layout(&self) -> &PageLayout {
        self.description.pages.layout()
    }

    /// Static scales of K and of V per layer and KV head, for fp8 and int8-tensor.
    #[must_use]
    pub fn tensor_scales(&self) -> [&[f32]; 2] {
        let [k, v] = &self.description.tensor_scales;
        [k, v]
    }

    /// The pages behind each other: home pages in token order, then residual pages, of the first layer, then of the next.
    #[must_use]
    pub fn pages(&self) -> &[u8] {
        let first = self.description.header_bytes();
        &self.bytes[first..first + self.description.pages_bytes()]
    }

    /// The residual pages that the sequence keeps at checkpoints ([`CacheConfig::checkpoints`](crate::CacheConfig::checkpoints)) behind each other, in the order of their home pages: of the
    /// first layer, then of the next. Empty where it has none.
    #[must_use]
    pub fn checkpoint_pages(&self) -> &[u8] {
        let first = self.description.header_bytes() + self.description.pages_bytes();
        &self.bytes[first..first + self.description.checkpoints_bytes()]
    }

    /// The centres of K, `[layers, num_kv_heads, 2, head_dim]` in bf16 ([`centres`](crate::centres)); empty for the image of a cache without. Those that the tokens
    /// have not got are zeros.
    #[must_use]
    pub fn centres(&self) -> &[u8] {
        &self.bytes[self.bytes.len() - self.description.centres_bytes()..]
    }

    pub(super) fn description(&self) -> &Description {
        &self.description
    }
}

impl Description {
    /// The description of these pages of a cache with this configuration.
    pub fn new(
        pages: SequencePages,
        checkpoints: Vec<usize>,
        tokens_before: usize,
        config: &CacheConfig,
    ) -> Self {
        Description {
            pages,
            checkpoints,
            layers: config.layers,
            centres: config.centres,
            tokens_before,
            tensor_scales: [&config.k_tensor_scales, &config.v_tensor_scales].map(Vec::clone),
        }
    }

    pub fn pages(&self) -> &SequencePages {
        &self.pages
    }

    pub fn tokens_before(&self) -> usize {
        self.tokens_before
    }

    /// The indices of the home pages whose residuals are kept at checkpoints.
    pub fn checkpoints(&self) -> &[usize] {
        &self.checkpoints
    }

    pub fn header_bytes(&self) -> usize {
        let scales: usize = self.tensor_scales.iter().map(Vec::len).sum();
        header_bytes(scales + self.checkpoints.len())
    }

    /// Bytes of all layers' home pages and residual pages, but for those of checkpoints; saturates beyond those of any memory.
    pub fn pages_bytes(&self) -> usize {
        self.bytes_of(self.pages.count())
    }

    /// Bytes of all layers' residual pages of checkpoints.
    pub fn checkpoints_bytes(&self) -> usize {
        self.bytes_of(self.checkpoints.len())
    }

    fn bytes_of(&self, pages: usize) -> usize {
        let size = self.pages.layout().page_bytes();
        pages.saturating_mul(size).saturating_mul(self.layers)
    }

    /// Bytes of all layers' centres of K.
    pub fn centres_bytes(&self) -> usize {
        let layout = self.pages.layout();
        match self.centres {
            true => centres_bytes(layout.num_kv_heads(), layout.head_dim().k)
                .saturating_mul(self.layers),
            false => 0,
        }
    }

    /// Bytes of the image; saturates beyond those of any memory.
    pub fn bytes(&self) -> usize {
        self.pages_bytes()
            .saturating_add(self.checkpoints_bytes())
            .saturating_add(self.centres_bytes())
            .saturating_add(self.header_bytes())
    }

    /// Writes the header of an image whose pages are there already.
    pub fn write_header(&self, image: &mut [u8]) {
        let (header, layout) = (self.header_bytes(), self.pages.layout());
        let head_dim = layout.head_dim();
        image[..header].fill(0);
        image[..8].copy_from_slice(MAGIC);
        // `PageLayout` keeps these below 2^32, and no pool has more pages.
        let words = [
            (8, VERSION as usize),
            (12, header),
            (32, self.layers),
            (36, layout.num_kv_heads()),
            (40, head_dim.k),
            (44, layout.page_size()),
            (48, self.pages.residuals()),
            (HAS_CENTRES, usize::from(self.centres)),
            (TOKENS_BEFORE, self.tokens_before),
            (CHECKPOINT_PAGES, self.checkpoints.len()),
            (V_DIM, head_dim.one().map_or(head_dim.v, |_| 0)),
        ];
        for (at, word) in words {
            image[at..at + 4].copy_from_slice(&(word as u32).to_le_bytes());
        }
        image[24..32].copy_from_slice(&(self.pages.tokens() as u64).to_le_bytes());
        let name = layout.format().to_string();
        image[FORMAT][..name.len()].copy_from_slice(name.as_bytes());
        let places = image[SCALES..header].chunks_exact_mut(4);
        let scales = self.tensor_scales.iter().flatten();
        let homes = self.checkpoints.iter().map(|home| *home as u32);
        let words = scales.map(|scale| scale.to_bits()).chain(homes);
        for (place, word) in places.zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let sum = checksum(image);
        image[CHECKSUM..CHECKSUM + 8].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads a header, and compares the image's size with it.
    fn parse(image: &[u8]) -> Result<Self, Error> {
        if image.len() < SCALES || image[..8] != *MAGIC {
            return refuse(
                "the beginning of a sequence's image",
                &*String::from_utf8_lossy(&image[..image.len().min(8)]),
                "\"attn-seq\" and the rest of a header; pass the whole bytes of a saved sequence",
            );
        }
        let version = word(image, 8);
        if version != VERSION {
            return refuse(
                "the version of a sequence's image",
                version,
                "2, whose pages have the residuals of the first tile; save the sequence with this version of the library",
            );
        }
        let number = |at: usize| word(image, at) as usize;
        let format = format_of(image)?;
        let centres = match number(HAS_CENTRES) {
            0 => false,
            1 => format.check_centres().map(|()| true)?,
            other => {
                return refuse(
                    "the number of centres of K of a sequence's image",
                    other,
                    "0 or 1; the image is damaged or of a later version, save the sequence again",
                );
            }
        };
        let v_dim = match number(V_DIM) {
            0 => number(40),
            other => other,
        };
        let layout = PageLayout::new(format, (number(40), v_dim), number(44), number(36))?;
        let tokens = long(image, 24);
        if tokens > MAX_TOKENS as u64 {
            return refuse(
                "the tokens of a sequence's image",
                tokens as usize,
                "at most 1048576; the image is damaged, save the sequence again",
            );
        }
        let tokens_before = number(TOKENS_BEFORE);
        check_before(tokens_before)?;
        let home = (tokens as usize).div_ceil(layout.page_size());
        let num_pages = home.saturating_add(number(48));
        let layers = number(32);
        let has_scales = [format.k, format.v].map(|scheme| scheme.has_tensor_scale());
        let count = layers.min(MAX_LAYERS) * layout.num_kv_heads();
        let scales = has_scales.iter().filter(|has| **has).count() * count;
        let checkpoints = number(CHECKPOINT_PAGES);
        let most = match format.window() {
            Window::None => 0,
            _ => home,
        };
        if checkpoints > most {
            return refuse(
                "the residual pages at checkpoints of a sequence's image",
                checkpoints,
                "at most as many as its home pages, and 0 for a format without a window; the image is damaged, save the sequence again",
            );
        }
        let header = header_bytes(scales + checkpoints);
        // Compared before there is memory for the scales.
        if !(1..=MAX_LAYERS).contains(&layers) || number(12) != header || image.len() < header {
            return refuse(
                "the header of a sequence's image",
                format_args!("{} bytes, {layers} layers", number(12)),
                "1 to 1024 layers, and as many bytes as there are tensor scales and pages at checkpoints; the image is damaged, save the sequence again",
            );
        }
        let mut description = Description {
            pages: SequencePages::new(layout, tokens as usize, num_pages)?,
            checkpoints: vec![0; checkpoints],
            layers,
            centres,
            tokens_before,
            tensor_scales: has_scales.map(|has| vec![1.0; if has { count } else { 0 }]),
        };
        description.check_size(image)?;
        let (words, _) = image[SCALES..header].as_chunks();
        let mut words = words.iter().map(|word| u32::from_le_bytes(*word));
        let places = description.tensor_scales.iter_mut().flatten();
        for (place, scale) in places.zip(&mut words) {
            *place = f32::from_bits(scale);
        }
        for (place, home) in description.checkpoints.iter_mut().zip(words) {
            *place = home as usize;
        }
        description.check_checkpoints()?;
        let [k, v] = &description.tensor_scales;
        format.check_scales([k, v], count)?;
        Ok(description)
    }

    /// Refuses home pages of checkpoints that no sequence has beside its other residual pages.
    fn check_checkpoints(&self) -> Result<(), Error> {
        let homes = self.pages.without_residuals();
        let mut next = homes.start;
        let wrong = self.checkpoints.iter().find(|home| {
            let is_right = (next..homes.end).contains(home);
            next = **home + 1;
            !is_right
        });
        match wrong {
            None => Ok(()),
            Some(home) => refuse(
                "a home page at a checkpoint of a sequence's image",
                *home,
                "pages between the first ones and the last ones that have residuals, in order; the image is damaged, save the sequence again",
            ),
        }
    }

    /// Compares the image's size with what the header asks for.
    fn check_size(&self, image: &[u8]) -> Result<(), Error> {
        if image.len() != self.bytes() {
            return refuse(
                "the size of a sequence's image",
                format_args!(
                    "{} bytes where its header asks for {}",
                    image.len(),
                    self.bytes()
                ),
                "the header's; pass the whole image",
            );
        }
        Ok(())
    }

    /// Refuses a cache whose pages mean something else.
    ///
    /// # Errors
    /// [`Error::ImageMismatch`].
    pub fn check_cache(&self, config: &CacheConfig) -> Result<(), Error> {
        let layout = self.pages.layout();
        let (format, of_cache) = (layout.format(), config.format);
        let numbers = [
            ("layers", self.layers, config.layers),
            ("num_kv_heads", layout.num_kv_heads(), config.num_kv_heads),
            ("page_size", layout.page_size(), config.page_size),
        ];
        let numbers = numbers.map(|(what, image, cache)| {
            let texts = [image.to_string(), cache.to_string()];
            (what, image != cache, texts)
        });
        let scales = |what, image: &[f32], cache: &[f32]| {
            let differs = image.iter().zip(cache).position(|(a, b)| a != b);
            let texts = match differs {
                Some(i) => {
                    let heads = config.num_kv_heads.max(1);
                    let at = format!("for head {} of layer {}", i % heads, i / heads);
                    [image[i], cache[i]].map(|scale| format!("{} {at}", Given::from(scale)))
                }
                None => [image, cache].map(|scales| format!("{} scales", scales.len())),
            };
            (what, image != cache, texts)
        };
        let [k, v] = &self.tensor_scales;
        let formats = [format, of_cache].map(|format| format.to_string());
        let centres = [self.centres, config.centres].map(|has| has.to_string());
        let mut all = vec![("format", format != of_cache, formats)];
        all.push(("centres", self.centres != config.centres, centres));
        let (of_image, of_cache) = (layout.head_dim(), config.head_dim);
        let head_dims = [of_image, of_cache].map(|dim| dim.to_string());
        all.push(("head_dim", of_image != of_cache, head_dims));
        all.extend(numbers);
        all.push(scales("k_tensor_scales", k, &config.k_tensor_scales));
        all.push(scales("v_tensor_scales", v, &config.v_tensor_scales));
        match all.into_iter().find(|(_, differ, _)| *differ) {
            Some((what, _, [image, cache])) => Err(Error::ImageMismatch { what, image, cache }),
            None => Ok(()),
        }
    }
}

/// Bytes of a header with so many tensor scales and home pages of checkpoints.
fn header_bytes(words: usize) -> usize {
    (SCALES + 4 * words).next_multiple_of(ALIGN)
}

/// The format that a header names.
fn format_of(image: &[u8]) -> Result<KvFormat, Error> {
    let name = &image[FORMAT];
    let end = name
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(name.len());
    String::from_utf8_lossy(&name[..end]).parse()
}

fn word(image: &[u8], at: usize) -> u32 {
    number(&image[at..at + 4]) as u32
}

fn long(image: &[u8], at: usize) -> u64 {
    number(&image[at..at + 8])
}

fn number(bytes: &[u8]) -> u64 {
    let bytes = bytes.iter().rev();
    bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The checksum of an image: four sums of 64 bits, over every fourth word of 8 bytes each, which are then summed up in the same way.
fn checksum(image: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let add = |sum: u64, word: u64| (sum ^ word).wrapping_mul(FACTOR).rotate_left(29);
    let mut sums = [1, 2, 3, 4];
    let mut add_all = |bytes: &[u8]| {
        let (chunks, _) = bytes.as_chunks::<32>();
        for chunk in chunks {
            let (words, _) = chunk.as_chunks();
            for (sum, word) in sums.iter_mut().zip(words) {
                *sum = add(*sum, u64::from_le_bytes(*word));
            }
        }
    };
    // The field itself counts as zero. Headers end at a multiple of 64 bytes, and pages are of whole chunks.
    let mut first = [0; 32];
    first.copy_from_slice(&image[..32]);
    first[CHECKSUM..CHECKSUM + 8].fill(0);
    add_all(&first);
    add_all(&image[32..]);
    sums.into_iter().fold(image.len() as u64, add)
}
