//! The formats of a cache: a scheme for K and a scheme for V.

use crate::{
    error::{Error, refuse},
    groups::Groups,
    head_dim::{HeadDim, Side},
    rotation,
    segments::TILE,
};

/// Most dims of a group of half steps: sums over more of them are no exact f32 (`127 · 255 · 512 < 2^24`).
const MAX_HALF_STEPS: usize = 512;

/// Most quantization groups of a token's dims in any scheme.
pub const MAX_GROUPS: usize = 8;

/// Where the scales of an int8 scheme lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Int8Scale {
    /// One f16 per token and KV head.
    Token,
    /// One f16 per 32 dims of a token.
    Group32,
    /// One static f32 per KV head.
    Tensor,
}

/// Tiles of 64 tokens that a row reads with residuals, beside the sequence's first: its own and those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Window {
    /// None: no residuals are kept.
    None,
    /// Two tiles: the last 65 to 128 tokens.
    Two,
    /// Four tiles: the last 193 to 256 tokens.
    Four,
}

impl Window {
    /// Number of tiles.
    #[must_use]
    pub fn tiles(self) -> usize {
        match self {
            Window::None => 0,
            Window::Two => 2,
            Window::Four => 4,
        }
    }

    /// Tokens whose residuals a sequence keeps at least: twice the window, so that some query tokens may be verified at once.
    #[must_use]
    pub fn kept_tokens(self) -> usize {
        2 * TILE * self.tiles()
    }

    /// Residual pages that a sequence keeps at least, where it has as many home pages: those of [`Window::kept_tokens`], and those that the window, a
    /// tile of drafts and a tile to take back can lie in, so that taking drafts back leaves what [`KvFormat::saved_residual_pages`] counts.
    fn kept_pages(self, page_size: usize) -> usize {
        if self == Window::None {
            return 0;
        }
        let read = TILE * (self.tiles() + 2);
        let straddled = usize::from(page_size > TILE);
        (self.kept_tokens() / page_size).max(read / page_size + straddled)
    }
}

/// The largest magnitude of a bf16 cache, 2^50: with queries of at most 2^64, scores stay below 2^122 and sums over 2^20 tokens below 2^70.
pub const BF16_MAX: f32 = 1_125_899_906_842_624.0;

/// The largest magnitude of a rotated row, 2^100: sums of its elements stay below f32's largest number.
pub const ROTATED_MAX: f32 = f32::from_bits((127 + 100) << 23);

/// How one of K, V is stored; `FORMATS.md` has the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float, 4 exponent and 3 mantissa bits, one static f32 scale per KV head.
    Fp8E4m3,
    /// Symmetric 8-bit integers.
    Int8(Int8Scale),
    /// Asymmetric 4-bit integers, `x = scale·u + shift`, with 1, 2, 4 or 8 groups of a token's dims.
    Int4(u8),
    /// Symmetric 8-bit integers of rotated rows, one f16 scale per token and KV head.
    RotatedInt8,
    /// 4-bit half steps of rotated rows, `x = scale·(2u − 15)`, with residuals for the newest tokens.
    RotatedInt4 {
        /// Groups of a token's dims, each with an f16 scale: 1, 2, 4 or 8.
        groups: u8,
        /// What is read with residuals.
        window: Window,
    },
}

impl Scheme {
    /// Every scheme, in the order of `FORMATS.md`; of the rotated int4 schemes those of one and of two groups.
    pub const ALL: [Scheme; 15] = [
        Scheme::F16,
        Scheme::Bf16,
        Scheme::Fp8E4m3,
        Scheme::Int8(Int8Scale::Token),
        Scheme::Int8(Int8Scale::Group32),
        Scheme::Int8(Int8Scale::Tensor),
        Scheme::Int4(1),
        Scheme::Int4(2),
        Scheme::Int4(4),
        Scheme::Int4(8),
        Scheme::RotatedInt8,
        Scheme::rotated_int4(1, Window::Two),
        Scheme::rotated_int4(1, Window::None),
        Scheme::rotated_int4(1, Window::Four),
        Scheme::rotated_int4(2, Window::Two),
    ];

    pub(crate) const fn rotated_int4(groups: u8, window: Window) -> Self {
        Scheme::RotatedInt4 { groups, window }
    }

    /// Bits of one stored element, without scales.
    #[must_use]
    pub fn code_bits(self) -> usize {
        match self {
            Scheme::F16 | Scheme::Bf16 => 16,
            Scheme::Fp8E4m3 | Scheme::Int8(_) | Scheme::RotatedInt8 => 8,
            Scheme::Int4(_) | Scheme::RotatedInt4 { .. } => 4,
        }
    }

    /// Whether products with it are sums of integers (`docs/arithmetic.md`).
    #[must_use]
    pub fn is_integer(self) -> bool {
        !matches!(self, Scheme::F16 | Scheme::Bf16 | Scheme::Fp8E4m3)
    }

    /// Whether a static f32 scale per KV head belongs to it.
    #[must_use]
    pub fn has_tensor_scale(self) -> bool {
        self.largest_static_code().is_some()
    }

    /// The largest code of a scheme with static scales: numbers beyond the scale times this saturate. `None` for other schemes.
    #[must_use]
    pub fn largest_static_code(self) -> Option<f32> {
        match self {
            Scheme::Fp8E4m3 => Some(448.0),
            Scheme::Int8(Int8Scale::Tensor) => Some(127.0),
            _ => None,
        }
    }

    /// Whether f16 scales belong to each token's row.
    #[must_use]
    pub fn has_row_scales(self) -> bool {
        self.is_integer() && !self.has_tensor_scale()
    }

    /// Whether rows are rotated before they are stored (`docs/arithmetic.md`, section 2).
    #[must_use]
    pub fn is_rotated(self) -> bool {
        matches!(self, Scheme::RotatedInt8 | Scheme::RotatedInt4 { .. })
    }

    /// Whether it stores latents ([`KvFormat::latents`]): each element of a row has a code of its own, and one scale at most counts for all that V has.
    pub(crate) fn has_latents(self) -> bool {
        let is_float = !self.is_integer();
        is_float || matches!(self, Scheme::RotatedInt8 | Scheme::Int8(Int8Scale::Token))
    }

    /// Whether each scale has a shift beside it.
    #[must_use]
    pub fn has_shifts(self) -> bool {
        matches!(self, Scheme::Int4(_))
    }

    /// What a row reads with residuals.
    #[must_use]
    pub fn window(self) -> Window {
        match self {
            Scheme::RotatedInt4 { window, .. } => window,
            _ => Window::None,
        }
    }

    /// Whether a row reads a tile with residuals (`docs/arithmetic.md`, section 4): the sequence's first tile, and those of the window. Tiles are counted
    /// from the first cached token, `row_tile` is that of the row's position, and `tokens_before` tokens lie in shards ahead.
    #[must_use]
    pub fn reads_fine(self, tile: usize, row_tile: usize, tokens_before: usize) -> bool {
        match self.window() {
            Window::None => false,
            window => (tile == 0 && tokens_before == 0) || row_tile < tile + window.tiles(),
        }
    }

    /// Quantization groups of a side of `dim` elements (1 where there is a single scale, or none), but for K of latents, which [`KvFormat::groups`] knows.
    #[must_use]
    pub fn groups(self, dim: usize) -> Groups {
        let dims = match self {
            Scheme::Int8(Int8Scale::Group32) => 32,
            Scheme::Int4(groups) | Scheme::RotatedInt4 { groups, .. } => {
                dim / usize::from(groups.max(1))
            }
            _ => dim,
        };
        Groups::of_dims(dim, dims)
    }

    /// The largest magnitude that the scheme takes: larger ones are refused, since scores and sums of them would overflow f32.
    ///
    /// The other schemes saturate or scale, so they take every finite f32.
    #[must_use]
    pub fn max_magnitude(self) -> f32 {
        match self {
            Scheme::Bf16 => BF16_MAX,
            _ if self.is_rotated() => ROTATED_MAX,
            _ => f32::MAX,
        }
    }

    /// The largest magnitude that is stored as the code nearest to it, with a static scale where the scheme has one: larger numbers saturate, which
    /// is to be stored as the largest code. `f32::MAX` for schemes without such an end, whose scales follow the numbers or whose exponents
    /// reach them.
    ///
    /// f16 scales end at 65504, so that numbers beyond 8·10^6 saturate in a scheme that has them, too; this is no such end, as it is one of a row.
    #[must_use]
    pub fn range(self, tensor_scale: f32) -> f32 {
        // Halfway from the largest code to the one that would come next. Such a tie goes to the even one of them: 448, but 128 and 65536.
        let (halfway, ties_to_largest) = match self {
            Scheme::Fp8E4m3 => (464.0 * f64::from(tensor_scale), true),
            Scheme::Int8(Int8Scale::Tensor) => (127.5 * f64::from(tensor_scale), false),
            Scheme::F16 => (65520.0, false),
            _ => return f32::MAX,
        };
        let nearest = halfway as f32;
        match f64::from(nearest) {
            x if x < halfway || (x == halfway && ties_to_largest) => nearest,
            _ => nearest.next_down(),
        }
    }

    /// Refuses head_dims that the scheme does not define.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming what is allowed.
    pub fn check(self, head_dim: usize) -> Result<(), Error> {
        let refuse = |allowed| {
            let given = format_args!("{self} with head_dim {head_dim}");
            refuse("format", given, allowed)
        };
        match self {
            Scheme::Int8(Int8Scale::Group32)
                if !head_dim.is_multiple_of(32) || head_dim > 32 * MAX_GROUPS =>
            {
                refuse("int8-g32 with a head_dim that is a multiple of 32 up to 256; use int8")
            }
            Scheme::Int4(g) | Scheme::RotatedInt4 { groups: g, .. }
                if !matches!(g, 1 | 2 | 4 | 8) =>
            {
                refuse("int4 with 1, 2, 4 or 8 groups")
            }
            Scheme::Int4(g) | Scheme::RotatedInt4 { groups: g, .. }
                if !head_dim.is_multiple_of(g as usize * 16) =>
            {
                refuse("int4 with groups of a multiple of 16 dims; use fewer groups")
            }
            Scheme::RotatedInt4 { groups: g, .. } if head_dim > g as usize * MAX_HALF_STEPS => {
                refuse("int4 with groups of at most 512 dims; use more groups, as int4-r2 has")
            }
            _ => Ok(()),
        }
    }
}

/// A scheme for K and a scheme for V, chosen independently; or one for latents.
///
/// Written `k/v`, or by one name: `bf16` means both, and `int8-latents` is `int8` of latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvFormat {
    /// K's scheme.
    pub k: Scheme,
    /// V's scheme.
    pub v: Scheme,
    /// Whether rows are latents: V of a token is the first elements of its K, as these are stored, so that it has no bytes of its own. V's scheme is
    /// K's then, with the same scale and rotated by the same blocks.
    pub latents: bool,
}

impl KvFormat {
    /// int8 K and V, rotated, with a scale per token: about fp8's bytes, and a twentieth of its divergence in a whole model.
    pub const INT8: KvFormat = KvFormat::same(Scheme::RotatedInt8);
    /// int8 K and 4-bit V, rotated: three quarters of int8's bytes.
    pub const INT8_INT4: KvFormat =
        KvFormat::new(Scheme::RotatedInt8, Scheme::rotated_int4(1, Window::Two));
    /// 4-bit K and V, rotated, with residuals for the first and the newest tokens: half of fp8's bytes, and a quarter of its divergence.
    pub const INT4: KvFormat = KvFormat::same(Scheme::rotated_int4(1, Window::Two));
    /// int8 latents, of multi-head latent attention: half the bytes of [`KvFormat::INT8`], which stores them as K and as V.
    pub const INT8_LATENTS: KvFormat = KvFormat {
        latents: true,
        ..KvFormat::INT8
    };

    /// A scheme for K and a scheme for V.
    #[must_use]
    pub const fn new(k: Scheme, v: Scheme) -> Self {
        let latents = false;
        KvFormat { k, v, latents }
    }

    /// A format with one scheme for both K and V.
    #[must_use]
    pub const fn same(scheme: Scheme) -> Self {
        KvFormat::new(scheme, scheme)
    }

    /// The sides that have bytes of their own: K alone of latents.
    #[must_use]
    pub fn stored_sides(self) -> &'static [Side] {
        match self.latents {
            true => &[Side::K],
            false => &[Side::K, Side::V],
        }
    }

    /// Elements of the blocks by which rows of K, and those of V, are rotated; `None` where a side is not ([`rotation`]).
    #[must_use]
    pub fn rotated_blocks(self, head_dim: HeadDim) -> [Option<usize>; 2] {
        let of = |scheme: Scheme, dim| scheme.is_rotated().then(|| rotation::block(dim));
        let v = if self.latents { head_dim.k } else { head_dim.v };
        [of(self.k, head_dim.k), of(self.v, v)]
    }

    /// The scheme and the elements of K, and those of V.
    #[must_use]
    pub fn sides(self, head_dim: HeadDim) -> [(Scheme, usize); 2] {
        [(self.k, head_dim.k), (self.v, head_dim.v)]
    }

    /// Quantization groups of K, and those of V. K of latents in integers has two where it is wider than V: the elements that are V's, and the rest, which are a rotary key.
    #[must_use]
    pub fn groups(self, head_dim: HeadDim) -> [Groups; 2] {
        let [k, v] = self.sides(head_dim).map(|(scheme, dim)| scheme.groups(dim));
        match self.latents && self.k.has_row_scales() {
            true => [Groups::of_dims(head_dim.k, head_dim.v), v],
            false => [k, v],
        }
    }

    /// The parts of a query that have a step each: K's groups of latents, else one of all elements.
    #[must_use]
    pub fn query_parts(self, head_dim: HeadDim) -> Groups {
        match self.latents {
            true => self.groups(head_dim)[0],
            false => Groups::of_dims(head_dim.k, head_dim.k),
        }
    }

    /// Whether decode runs in the integer arithmetic, whose bits are equal on every backend.
    #[must_use]
    pub fn is_integer(self) -> bool {
        self.k.is_integer() && self.v.is_integer()
    }

    /// The larger window of K and V: what residual pages are kept for.
    #[must_use]
    pub fn window(self) -> Window {
        let [k, v] = [self.k.window(), self.v.window()];
        if k.tiles() < v.tiles() { v } else { k }
    }

    /// Home pages that hold a sequence's first tile, whose residuals a sequence keeps for good; 0 for a format without a window.
    #[must_use]
    pub fn first_residual_pages(self, page_size: usize) -> usize {
        match self.window() {
            Window::None => 0,
            _ => TILE.div_ceil(page_size.max(1)),
        }
    }

    /// Most residual pages that a sequence owns where a step has up to `max_q_len` query tokens of a sequence.
    #[must_use]
    pub fn max_residual_pages(self, page_size: usize, max_q_len: usize) -> usize {
        let last = self.max_last_residual_pages(page_size, max_q_len);
        last.saturating_add(self.first_residual_pages(page_size))
    }

    /// Most last home pages whose residuals a sequence keeps.
    fn max_last_residual_pages(self, page_size: usize, max_q_len: usize) -> usize {
        let (window, page_size) = (self.window(), page_size.max(1));
        let kept = window.kept_pages(page_size);
        if window == Window::None || max_q_len <= TILE {
            return kept;
        }
        let read = max_q_len.saturating_add((window.tiles() + 1) * TILE);
        kept.max(read.div_ceil(page_size).saturating_add(1))
    }

    /// Slots of a table that device kernels look residual pages up in ([`KvFormat::residual_slot`]): one for each of the first pages
    /// ([`KvFormat::first_residual_pages`]), then a ring for the last ones, whose length is a power of two. 0 for a format without a window.
    #[must_use]
    pub fn residual_slots(self, page_size: usize, max_q_len: usize) -> usize {
        match self.max_last_residual_pages(page_size, max_q_len) {
            0 => 0,
            pages => pages
                .checked_next_power_of_two()
                .and_then(|ring| ring.checked_add(self.first_residual_pages(page_size)))
                .unwrap_or(usize::MAX),
        }
    }

    /// The slot of home page `page`'s residual page among `slots` ([`KvFormat::residual_slots`]).
    ///
    /// # Panics
    /// If the slots have no ring, and `page` is none of the first pages.
    #[must_use]
    pub fn residual_slot(self, page_size: usize, slots: usize, page: usize) -> usize {
        residual_slot(self.first_residual_pages(page_size), slots, page)
            .expect("residual_slots has room for a ring")
    }

    /// Residual pages that a sequence of `kv_len` tokens owns when its last `q_len` tokens are to be queries of one step, or drafts to take back: those of
    /// its first and of its last home pages, each once.
    #[must_use]
    pub fn residual_pages(self, page_size: usize, kv_len: usize, q_len: usize) -> usize {
        let (window, page_size) = (self.window(), page_size.max(1));
        let pages = kv_len.div_ceil(page_size);
        let before = kv_len.saturating_sub(q_len);
        let last = self
            .saved_pages_from(page_size, before, pages)
            .max(window.kept_pages(page_size));
        self.with_first_pages(page_size, pages, last)
    }

    /// Residual pages that belong to a sequence of `kv_len` tokens outside of its cache: those of its first tile, and those that the newest 64 tokens
    /// read as queries, or that are read after these have been taken back.
    #[must_use]
    pub fn saved_residual_pages(self, page_size: usize, kv_len: usize) -> usize {
        let page_size = page_size.max(1);
        let pages = kv_len.div_ceil(page_size);
        let last = self.saved_pages_from(page_size, kv_len, pages);
        self.with_first_pages(page_size, pages, last)
    }

    /// Of `pages` home pages the number of those that are among the `last` last ones or hold the first tile.
    fn with_first_pages(self, page_size: usize, pages: usize, last: usize) -> usize {
        let first = self.first_residual_pages(page_size).min(pages);
        first + last.min(pages - first)
    }

    /// Of `pages` home pages the last ones that hold residuals which belong to the first `kv_len` tokens outside of a cache.
    fn saved_pages_from(self, page_size: usize, kv_len: usize, pages: usize) -> usize {
        if self.window() == Window::None {
            return 0;
        }
        let first = self.first_residual_token(kv_len.saturating_sub(TILE));
        pages.saturating_sub(first / page_size)
    }

    /// Residual pages of a sequence of `kv_len` tokens that the next token reads: what must be left of those when tokens are taken back.
    #[must_use]
    pub fn next_residual_pages(self, page_size: usize, kv_len: usize) -> usize {
        if self.window() == Window::None {
            return 0;
        }
        let (page_size, first) = (page_size.max(1), self.first_residual_token(kv_len));
        let pages = kv_len.div_ceil(page_size);
        let last = pages.saturating_sub(first / page_size);
        self.with_first_pages(page_size, pages, last)
    }

    /// The first token of the window that a row at `position` reads with residuals; it reads the sequence's first tile so, too.
    #[must_use]
    pub fn first_residual_token(self, position: usize) -> usize {
        let tile = (position / TILE + 1).saturating_sub(self.window().tiles());
        tile.saturating_mul(TILE)
    }

    /// The first position whose window has no token before `first`.
    pub(crate) fn first_position_with(self, first: usize) -> usize {
        (first.div_ceil(TILE) + self.window().tiles()).saturating_sub(1) * TILE
    }

    /// Refuses head_dims that no page can hold.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming what is allowed.
    pub fn check(self, head_dim: impl Into<HeadDim>) -> Result<(), Error> {
        let head_dim = head_dim.into();
        self.k.check(head_dim.k)?;
        self.v.check(head_dim.v)?;
        let [block, _] = self.rotated_blocks(head_dim);
        let is_part = head_dim.v <= head_dim.k
            && (!self.k.has_row_scales() || head_dim.k <= 2 * head_dim.v)
            && head_dim.v.is_multiple_of(block.unwrap_or(1));
        if self.latents && !(is_part && self.k.has_latents() && self.k == self.v) {
            let given = format_args!("{self} with head_dim {head_dim}");
            return refuse("format", given, LATENT_DIMS);
        }
        Ok(())
    }

    /// Refuses elements of V beside latents.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub(crate) fn check_appended_v(self, elements: usize) -> Result<(), Error> {
        match self.latents && elements > 0 {
            true => refuse(
                "v",
                format_args!("{elements} elements"),
                "none beside latents, as their V is the first elements of K; int8 stores K and V",
            ),
            false => Ok(()),
        }
    }

    /// Refuses latents.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming `what`, which takes K and V of their own alone.
    pub(crate) fn check_not_latents(self, what: &'static str) -> Result<(), Error> {
        match self.latents {
            true => refuse(
                what,
                format_args!("{self}"),
                "formats whose K and V are both stored; int8 stores latents as both",
            ),
            false => Ok(()),
        }
    }
}

/// For errors: what latents may be.
const LATENT_DIMS: &str = "latents in int8, int8-plain, fp8, bf16 or f16, with at least as many elements of K as of V, in int8 at most twice as many and, rotated, V of whole blocks by which K is rotated (the largest power of two that divides \
                           K's elements), such as 576/512; use int8, which stores K and V";

/// The slot of home page `page`'s residual page, where the first `first` pages have slots of their own and the others share a ring behind these.
pub(crate) fn residual_slot(first: usize, slots: usize, page: usize) -> Option<usize> {
    if page < first {
        return (page < slots).then_some(page);
    }
    let ring = slots.saturating_sub(first);
    Some(first + page.checked_rem(ring)?)
}
