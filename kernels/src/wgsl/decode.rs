//! The specialisation of `decode_split.wgsl` and `decode_merge.wgsl`.

use attn_core::{HeadDim, Int8Scale, KvFormat, Problem, Scheme};

use super::{
    Constants, SpecialiseError,
    constants::{kernel_text, layout_constants, set},
    split::Split,
};

/// Lanes of a workgroup of `decode_split.wgsl`: `T`.
const LANES: usize = 64;

/// Threads of a workgroup of `decode_merge.wgsl`.
const MERGE_THREADS: usize = 256;

/// Everything that chooses constants of the decode kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DecodeKey {
    /// The schemes of K and V.
    pub format: KvFormat,
    /// Elements per head.
    pub head_dim: HeadDim,
    /// Tokens per page.
    pub page_size: usize,
    /// Query rows of one workgroup: 1, 2, 4 or 8.
    pub rows: usize,
    /// Whether scores have a soft cap.
    pub softcap: bool,
    /// Whether scores have ALiBi slopes.
    pub alibi: bool,
    /// Storage buffers that the pool lies in.
    pub pools: usize,
    /// Whether rows are read where another engine put them, instead of pages.
    pub view: bool,
    /// Whether K has centres.
    pub centres: bool,
    /// The tokens of one workgroup.
    pub split: Split,
}

impl DecodeKey {
    /// Dims of a workgroup of `decode_merge.wgsl`: those of its threads, or few where splits are tiles, because rows are few then and each has many partials; but
    /// whole blocks where V is rotated.
    fn merge_dims(&self) -> usize {
        let dim = self.head_dim.v;
        let [_, block] = self.format.rotated_blocks(self.head_dim);
        let block = block.unwrap_or(1);
        match self.split {
            Split::Segment => dim.min(MERGE_THREADS.next_multiple_of(block)),
            Split::Tile => block.max(32),
        }
    }

    /// Workgroups of `decode_merge.wgsl` that share the dims of a query row.
    #[must_use]
    pub fn merge_parts(&self) -> usize {
        self.head_dim.v.div_ceil(self.merge_dims())
    }
}

/// Choices that change speed, never bits. `Default` leaves each to the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Tuning {
    /// Bytes of workgroup memory that one workgroup may take, at most the device's.
    pub shared_bytes: Option<usize>,
    /// Most query rows of one workgroup: 1, 2, 4 or 8. Another number counts as the next of these below it, 0 as 1.
    pub rows: Option<usize>,
    /// Whether a workgroup takes a single tile, or a segment.
    pub by_tiles: Option<bool>,
}

impl Tuning {
    /// Query rows of one workgroup, at most: a power of two.
    fn most_rows(&self) -> usize {
        1 << self.rows.unwrap_or(8).clamp(1, 8).ilog2()
    }
}

/// How the cache that a step reads lies in buffers.
#[derive(Debug, Clone, Copy)]
pub struct KvLayout {
    /// The schemes of K and V.
    pub format: KvFormat,
    /// Tokens per page.
    pub page_size: usize,
    /// Storage buffers that the pool lies in.
    pub pools: usize,
    /// Whether rows are read where another engine put them, instead of pages.
    pub view: bool,
    /// Whether K has centres.
    pub centres: bool,
}

/// The decode kernels' constants.
fn decode_constants(key: &DecodeKey) -> Constants {
    let v = key.format.v;
    let mut constants = layout_constants(key.format, key.head_dim, key.page_size);
    let (d, r) = (key.head_dim.v, key.rows);
    // Dims of a lane: of 4-bit V pairs of them, as they share bytes; of bytes along the dims, as views and latents have them, the four of a word. Long rows take turns.
    let v_rows = if v.code_bits() == 4 { d / 2 } else { d };
    let by_words = v.code_bits() == 8 && (key.view || key.format.latents);
    let chunks = match (v.code_bits(), d) {
        _ if by_words => d.div_ceil(4 * LANES),
        (8 | 16, 192) => 3,
        _ => d.div_ceil(128),
    };
    let rows_per_lane = v_rows.div_ceil(LANES * chunks);
    let dims_per_lane = if by_words {
        4
    } else {
        rows_per_lane * (d / v_rows)
    };
    let values = [
        ("R", r),
        ("POOLS", key.pools),
        ("VIEW", usize::from(key.view)),
        ("CENTRES", usize::from(key.centres)),
        ("SOFTCAP", usize::from(key.softcap)),
        ("ALIBI", usize::from(key.alibi)),
        ("PER_SEGMENT", key.split.per_segment()),
        ("MD", key.merge_dims()),
        ("CH", chunks),
        ("DPL", dims_per_lane),
        ("V_BY_WORDS", usize::from(by_words)),
        ("V_ROWS", v_rows),
        ("RPL", rows_per_lane),
    ];
    set(&mut constants, &values);
    constants
}

/// Bytes of workgroup memory that the split kernel takes, as declared there.
pub fn workgroup_bytes(key: &DecodeKey) -> usize {
    let KvFormat { k, v, .. } = key.format;
    let (dim, r) = (key.head_dim, key.rows);
    let units = dim.k / 16;
    let [k_groups, v_groups] = key.format.groups(dim).map(|groups| groups.count());
    let parts = key.format.query_parts(dim).count();
    let is_centred = k.is_integer() && k.code_bits() == 4;
    let scored_whole = k == Scheme::Int8(Int8Scale::Group32) || is_centred && k_groups > 1;
    let halves = k.is_integer() && units % 2 == 0 && !scored_whole;
    let (mut bytes, mut slots) = (16 * r + if key.alibi { 4 * r } else { 0 }, 2 * r);
    if k.is_integer() {
        bytes += 16 * r * units + 4 * r;
        slots += r + if is_centred { r * k_groups } else { 0 };
        if parts > 1 {
            (bytes, slots) = (bytes + 4 * r, slots + r);
        }
    } else {
        bytes += 64 * r * units;
    }
    if key.centres {
        bytes += 8 * r;
    }
    if v.is_integer() {
        bytes += v_groups * (24 * r + 320 * r.div_ceil(4) + 64 * r);
        slots += v_groups * (r + r.div_ceil(2));
    } else {
        bytes += 256 * r;
    }
    if halves || v.has_shifts() {
        bytes += 4 * 72 * r * if halves { parts } else { 1 };
    }
    if v.has_shifts() {
        bytes += v_groups * (256 + 36 * r);
    }
    bytes + 4 * slots
}

/// The kernels of a problem: the rows of a workgroup are as many as it has, up to 8, that fit into workgroup memory.
pub fn decode_key(
    problem: &Problem,
    layout: KvLayout,
    shared_bytes: usize,
    tuning: &Tuning,
) -> DecodeKey {
    let rows = problem.heads_per_kv() * problem.max_q_len();
    let mut key = DecodeKey {
        format: layout.format,
        head_dim: problem.head_dim,
        page_size: layout.page_size,
        rows: rows.next_power_of_two().min(tuning.most_rows()),
        softcap: problem.scores.softcap.is_some(),
        alibi: problem.scores.alibi_slopes.is_some(),
        pools: layout.pools,
        view: layout.view,
        centres: layout.centres,
        split: Split::Segment,
    };
    while key.rows > 1 && workgroup_bytes(&key) > shared_bytes {
        key.rows /= 2;
    }
    let asked = tuning.by_tiles.map(|by_tiles| {
        if by_tiles {
            Split::Tile
        } else {
            Split::Segment
        }
    });
    key.split = Split::choose(problem, key.rows, asked);
    key
}

/// The text of `decode_split.wgsl` or `decode_merge.wgsl`.
///
/// # Errors
/// [`SpecialiseError`] for a mistake in the text.
pub fn decode_text(file: &str, key: &DecodeKey) -> Result<String, SpecialiseError> {
    kernel_text(file, &decode_constants(key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::Heads;

    #[test]
    fn any_tuning_gives_kernels_of_one_two_four_or_eight_rows() {
        let problem = Problem::new(Heads::new(64, 1, 64), vec![1]);
        let layout = KvLayout {
            format: KvFormat::INT8,
            page_size: 64,
            pools: 1,
            view: false,
            centres: false,
        };
        for (asked, rows) in [
            (0, 1),
            (1, 1),
            (3, 2),
            (4, 4),
            (7, 4),
            (100, 8),
            (usize::MAX, 8),
        ] {
            let mut tuning = Tuning {
                rows: Some(asked),
                ..Default::default()
            };
            assert_eq!(decode_key(&problem, layout, 32768, &tuning).rows, rows);
            tuning.shared_bytes = Some(0);
            assert_eq!(decode_key(&problem, layout, 0, &tuning).rows, 1);
        }
    }

    /// Kills a panel that begins at the sequence's last token, from which 16 tokens may lie behind the page, and behind the pool.
    #[test]
    fn panels_of_latents_in_small_pages_begin_at_multiples_of_16_tokens() {
        let problem = Problem::new(Heads::new(1, 1, 64), vec![100]);
        for (name, page_size) in [
            ("int8-latents", 16),
            ("int8-latents", 32),
            ("int8-plain-latents", 16),
        ] {
            let layout = KvLayout {
                format: name.parse().unwrap(),
                page_size,
                pools: 1,
                view: false,
                centres: false,
            };
            let key = decode_key(&problem, layout, 16384, &Tuning::default());
            let text = decode_text("decode_split.wgsl", &key).unwrap();
            let panels: Vec<_> = text
                .lines()
                .filter(|line| line.contains("let latents_"))
                .collect();
            assert!(!panels.is_empty(), "{name}");
            for panel in panels {
                assert!(panel.ends_with("last) & ~15u);"), "{name}: {panel}");
            }
        }
    }

    #[test]
    fn the_largest_kernels_are_far_from_the_preprocessors_bounds() {
        let mut problem = Problem::new(Heads::new(64, 1, 256), vec![1]);
        (problem.scores.softcap, problem.scores.alibi_slopes) = (Some(1.0), Some(vec![1.0; 64]));
        let mut longest = 0;
        for format in ["int4-g1", "int8-g32/int4-g8", "int4", "int4-r8-w4"] {
            let format: KvFormat = format.parse().unwrap();
            let layout = KvLayout {
                format,
                page_size: 64,
                pools: 8,
                view: false,
                centres: format.check_centres().is_ok(),
            };
            let key = decode_key(&problem, layout, 65536, &Tuning::default());
            for file in ["decode_split.wgsl", "decode_merge.wgsl"] {
                longest = longest.max(decode_text(file, &key).unwrap().len());
            }
        }
        println!("the longest kernel has {longest} bytes");
        assert!(longest < crate::wgsl::specialise::MOST_OUT / 4);
    }
}
