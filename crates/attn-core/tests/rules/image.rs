//! Sequences as blocks of bytes: what an image says, what is refused, and that a refused image changes nothing.

use attn_core::{
    CacheConfig, Error, HeadDim, Heads, HostPages, KvCache, KvFormat, PageTable, SequenceImage,
};
use rstest::rstest;

const HEADS: Heads = Heads {
    q: 4,
    kv: 2,
    dim: HeadDim::same(64),
};

fn config(format: &str) -> CacheConfig {
    let format: KvFormat = format.parse().unwrap();
    let scales = |has: bool, scales: [f32; 2]| if has { scales.to_vec() } else { Vec::new() };
    CacheConfig::builder(format, HEADS)
        .centres(false)
        .sequences(3)
        .max_len(400)
        .tensor_scales(
            scales(format.k.has_tensor_scale(), [0.5, 0.25]),
            scales(format.v.has_tensor_scale(), [2.0, 0.125]),
        )
        .build()
}

fn cache_of(config: CacheConfig) -> KvCache {
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

fn tokens(n: usize, seed: usize) -> Vec<f32> {
    (0..n * HEADS.kv * HEADS.dim.k)
        .map(|i| ((i * 37 + seed * 101) % 129) as f32 / 16.0 - 4.0)
        .collect()
}

/// A cache whose sequence 0 has `n` tokens.
fn filled(format: &str, n: usize) -> KvCache {
    let mut cache = cache_of(config(format));
    cache.append(0, &tokens(n, 1), &tokens(n, 2)).unwrap();
    cache
}

/// All that a refused call must leave as it was.
fn books(cache: &KvCache) -> (PageTable, usize, Vec<Vec<Vec<u8>>>) {
    let bytes = (0..3).map(|s| cache.read_back(s).unwrap()).collect();
    (cache.table().clone(), cache.free_pages(), bytes)
}

fn refusal(bytes: &[u8]) -> Error {
    SequenceImage::from_bytes(bytes).unwrap_err()
}

/// And says what they are.
#[rstest]
fn an_image_gives_another_cache_the_same_pages(
    #[values(
        "int8",
        "int4",
        "int8/int4-w4",
        "int4-g2",
        "fp8/int8-tensor",
        "bf16",
        "f16"
    )]
    format: &str,
    #[values(0, 1, 64, 70, 330)] n: usize,
) {
    let cache = filled(format, n);
    let pages = cache.read_back(0).unwrap();
    let image = cache.image(0).unwrap();
    assert_eq!(image.tokens(), n);
    assert_eq!(image.layout(), cache.layout());
    let [k, v] = image.tensor_scales();
    assert_eq!(k, cache.config().k_tensor_scales);
    assert_eq!(v, cache.config().v_tensor_scales);
    assert_eq!(image.pages(), pages.concat());
    assert_eq!(image.as_bytes().len(), cache.image_bytes(0).unwrap());

    let stored = image.clone().into_bytes();
    let read = SequenceImage::from_bytes(&stored[..]).unwrap();
    assert_eq!(read, image);
    let mut other = cache_of(config(format));
    // Other pages than in the first cache.
    other.append(1, &tokens(3, 5), &tokens(3, 6)).unwrap();
    other.restore(2, &read).unwrap();
    assert_eq!(other.table().lens, [0, 3, n]);
    assert_eq!(other.read_back(2).unwrap(), pages);
    // What comes next is what comes next there.
    let mut cache = cache;
    for (cache, sequence) in [(&mut cache, 0), (&mut other, 2)] {
        cache
            .append(sequence, &tokens(9, 3), &tokens(9, 4))
            .unwrap();
    }
    assert_eq!(other.image(2).unwrap(), cache.image(0).unwrap());
}

#[test]
fn an_image_of_a_truncated_sequence_has_fewer_residual_pages_and_comes_back() {
    let mut cache = filled("int4", 330);
    // Twice what is promised, and as far as the residuals of a run of pages of 64 reach.
    cache.truncate(0, 200).unwrap();
    let straight = filled("int4", 200);
    assert_eq!(
        straight.read_back(0).unwrap().len(),
        cache.read_back(0).unwrap().len() + 1
    );
    let image = cache.image(0).unwrap();
    cache.restore(1, &image).unwrap();
    assert_eq!(cache.read_back(1).unwrap(), cache.read_back(0).unwrap());
    assert_eq!(cache.image(1).unwrap(), image);
}

#[test]
fn write_image_writes_all_or_nothing() {
    let cache = filled("int8", 70);
    let size = cache.image_bytes(0).unwrap();
    for size in [0, size - 1, size + 1] {
        let mut out = vec![7; size];
        let error = cache.write_image(0, &mut out).unwrap_err();
        assert!(matches!(error, Error::Length { .. }), "{error}");
        assert!(out.iter().all(|byte| *byte == 7));
    }
    let mut out = vec![7; size];
    cache.write_image(0, &mut out).unwrap();
    assert_eq!(out, cache.image(0).unwrap().as_bytes());
    assert!(matches!(
        cache.image(3),
        Err(Error::Sequence { given: 3, count: 3 })
    ));
    assert!(matches!(cache.image_bytes(3), Err(Error::Sequence { .. })));
    assert!(cache.write_image(3, &mut out).is_err());
}

/// The header's fields, from FORMATS.md.
#[test]
fn the_header_is_the_documented_one() {
    let cache = filled("fp8/int8-tensor", 70);
    let image = cache.image(0).unwrap().into_bytes();
    let word = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap());
    assert_eq!(&image[..8], b"attn-seq");
    assert_eq!(
        [8, 12, 24, 28, 32, 36, 40, 44].map(word),
        [2, 192, 70, 0, 1, 2, 64, 64]
    );
    assert!(image[48..64].iter().all(|byte| *byte == 0));
    assert_eq!(&image[64..79], b"fp8/int8-tensor");
    assert!(image[79..128].iter().all(|byte| *byte == 0));
    let scale = |i: usize| f32::from_bits(word(128 + 4 * i));
    assert_eq!([0, 1, 2, 3].map(scale), [0.5, 0.25, 2.0, 0.125]);
    assert!(image[144..192].iter().all(|byte| *byte == 0));
    let page = cache.layout().page_bytes();
    assert_eq!(image.len(), 192 + 2 * page);
    assert_eq!(
        u64::from_le_bytes(image[16..24].try_into().unwrap()),
        by_hand(&image)
    );
    // Five whole home pages; the newest 64 tokens read the first and the last two with residuals.
    let image = filled("int4", 320).image(0).unwrap().into_bytes();
    assert_eq!(image[48..52], [3, 0, 0, 0]);
}

/// The checksum, word after word as FORMATS.md has it.
fn by_hand(image: &[u8]) -> u64 {
    let mut image = image.to_vec();
    let len = image.len() as u64;
    image[16..24].fill(0);
    assert_eq!(len % 32, 0);
    let step = |s: u64, w: u64| (s ^ w).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let mut sums = [1, 2, 3, 4];
    for (i, word) in image.chunks_exact(8).enumerate() {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        sums[i % 4] = step(sums[i % 4], word);
    }
    sums.into_iter().fold(len, step)
}

#[rstest]
#[case("int8", 70)]
#[case("int4-g1", 5)]
fn a_changed_byte_is_found_wherever_it_lies(#[case] format: &str, #[case] n: usize) {
    let image = filled(format, n).image(0).unwrap().into_bytes();
    let header = 128;
    let ends = [image.len() - 17, image.len() - 9, image.len() - 1];
    let some = (header..image.len()).step_by(977).chain(ends);
    for at in (0..header).chain(some) {
        for bit in [0, 7] {
            let mut damaged = image.clone();
            damaged[at] ^= 1 << bit;
            assert!(SequenceImage::from_bytes(damaged).is_err(), "byte {at}");
        }
    }
    for len in (0..140).chain([image.len() - 1]) {
        refusal(&image[..len]);
    }
    let mut longer = image.clone();
    longer.push(0);
    assert!(refusal(&longer).to_string().contains("size"));
}

/// Writes words into a header and makes its checksum right again.
fn forged(image: &[u8], words: &[(usize, u32)]) -> Vec<u8> {
    let mut image = image.to_vec();
    for (at, word) in words {
        image[*at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    let sum = by_hand(&image);
    image[16..24].copy_from_slice(&sum.to_le_bytes());
    image
}

#[rstest]
#[case::magic(0, 0, "beginning")]
#[case::version_1(8, 1, "version")]
#[case::version(8, 3, "version")]
#[case::header_bytes(12, 256, "header")]
#[case::no_tokens(24, 0, "size")]
#[case::more_tokens(24, 400, "size")]
#[case::as_many_tokens_as_a_sequence_has(24, 1 << 20, "size")]
#[case::one_token_more(24, (1 << 20) + 1, "tokens")]
#[case::far_too_many_tokens(28, 1, "tokens")]
#[case::no_layer(32, 0, "layers")]
#[case::two_layers(32, 2, "size")]
#[case::layers_of_more_scales(32, 5, "5 layers")]
#[case::too_many_layers(32, 1025, "1025 layers")]
#[case::far_too_many_layers(32, u32::MAX, "layers")]
#[case::no_heads(36, 0, "num_kv_heads")]
#[case::many_heads(36, u32::MAX, "num_kv_heads")]
#[case::other_heads(36, 1, "size")]
#[case::dims(40, 65, "head_dim")]
#[case::page_size(44, 0, "page_size")]
#[case::residual_pages(48, 1, "pages")]
#[case::many_residual_pages(48, u32::MAX, "pages")]
#[case::centres(52, 1, "centres of K")]
#[case::other_centres(52, 2, "number of centres")]
#[case::shard(56, 1, "tokens_before")]
#[case::pages_at_checkpoints(60, 1, "at checkpoints")]
#[case::format(64, 0x3820_3820, "format")]
#[case::other_format(64, 0x3631_6662, "format")]
#[case::scale(128, 0, "k_scales is 0 at index 0")]
#[case::nan_scale(140, 0x7fc0_0000, "v_scales is NaN at index 1")]
fn a_header_that_says_something_else_is_refused(
    #[case] at: usize,
    #[case] word: u32,
    #[case] names: &str,
) {
    let image = filled("fp8/int8-tensor", 70).image(0).unwrap().into_bytes();
    assert_eq!(forged(&image, &[]), image);
    let error = refusal(&forged(&image, &[(at, word)])).to_string();
    assert!(error.contains(names), "{error}");
}

/// Kills a header whose home pages at checkpoints are believed: pages beside the ones that have residuals anyway, out of order or twice.
#[test]
fn home_pages_at_checkpoints_that_no_sequence_has_are_refused() {
    let mut described = config("int4");
    (described.checkpoints, described.num_pages) = (128, 60);
    let mut cache = cache_of(described);
    cache.append(0, &tokens(1000, 1), &tokens(1000, 2)).unwrap();
    let image = cache.image(0).unwrap();
    let page = 2 * cache.layout().page_bytes();
    assert_eq!(cache.table().checkpoint_pages[0].len(), 11);
    assert_eq!(image.checkpoint_pages().len() / page, 6);
    let stored = image.into_bytes();
    let homes: Vec<u32> = stored[128..192]
        .chunks_exact(4)
        .map(|home| u32::from_le_bytes(home.try_into().unwrap()))
        .collect();
    assert_eq!(homes[..12], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    for (at, home) in [
        (0, 0),
        (0, 2),
        (5, 5),
        (5, 4),
        (11, 13),
        (11, 16),
        (11, u32::MAX),
    ] {
        let error = refusal(&forged(&stored, &[(128 + 4 * at, home)])).to_string();
        assert!(error.contains("a home page at a checkpoint"), "{error}");
    }
    for (count, names) in [
        (11, "size"),
        (13, "size"),
        (16, "size"),
        (17, "at most as many as its home pages"),
    ] {
        let error = refusal(&forged(&stored, &[(60, count)])).to_string();
        assert!(error.contains(names), "{count}: {error}");
    }
    let plain = filled("int8", 70).image(0).unwrap().into_bytes();
    let error = refusal(&forged(&plain, &[(60, 1)])).to_string();
    assert!(error.contains("a format without a window"), "{error}");
}

/// A field's name, and another value for it.
type Change = (&'static str, fn(&mut CacheConfig));

#[test]
fn an_image_of_another_kind_of_cache_is_refused_and_changes_nothing() {
    let mut cache = filled("bf16", 70);
    let before = books(&cache);
    let kinds: [Change; 4] = [
        ("format", |c| c.format = "f16".parse().unwrap()),
        ("num_kv_heads", |c| c.num_kv_heads = 1),
        ("head_dim", |c| c.head_dim = 128.into()),
        ("page_size", |c| c.page_size = 32),
    ];
    for (name, change) in kinds {
        let mut config = config("bf16");
        change(&mut config);
        let mut other = cache_of(config);
        let row = other.config().num_kv_heads * other.config().head_dim.k;
        let x = vec![1.0; 70 * row];
        other.append(0, &x, &x).unwrap();
        let error = cache.restore(1, &other.image(0).unwrap()).unwrap_err();
        assert!(
            matches!(error, Error::ImageMismatch { what, .. } if what == name),
            "{error}"
        );
    }
    assert!(books(&cache) == before);
    let scales: [Change; 2] = [
        ("k_tensor_scales", |c| c.k_tensor_scales[1] = 3.0),
        ("v_tensor_scales", |c| c.v_tensor_scales[0] = 3.0),
    ];
    let mut cache = filled("fp8", 70);
    for (name, change) in scales {
        let mut config = config("fp8");
        change(&mut config);
        let mut other = cache_of(config);
        other.append(0, &tokens(1, 1), &tokens(1, 2)).unwrap();
        let error = cache.restore(1, &other.image(0).unwrap()).unwrap_err();
        assert!(
            matches!(error, Error::ImageMismatch { what, .. } if what == name),
            "{error}"
        );
    }
}

#[test]
fn a_sequence_that_is_not_there_not_empty_or_too_long_keeps_what_it_has() {
    let mut cache = filled("int4", 330);
    let image = cache.image(0).unwrap();
    cache.append(1, &tokens(330, 1), &tokens(330, 2)).unwrap();
    cache.append(2, &tokens(1, 1), &tokens(1, 2)).unwrap();
    let before = books(&cache);
    let error = cache.restore(2, &image).unwrap_err();
    assert!(
        matches!(
            error,
            Error::NotEmpty {
                sequence: 2,
                tokens: 1,
                ..
            }
        ),
        "{error}"
    );
    let error = cache.restore(3, &image).unwrap_err();
    assert!(
        matches!(error, Error::Sequence { given: 3, count: 3 }),
        "{error}"
    );
    assert!(books(&cache) == before);
    let mut small = config("int4");
    small.num_pages = image.pages().len() / cache.layout().page_bytes() - 1;
    let mut small = cache_of(small);
    assert!(matches!(
        small.restore(0, &image),
        Err(Error::CacheFull { .. })
    ));
    assert_eq!(small.free_pages(), small.config().num_pages);
    assert_eq!(small.table().lens, [0; 3]);
}

#[rstest]
#[case("f16", 0x7c00)]
#[case("fp8", 0x7f)]
#[case("int8", 0x80)]
fn values_that_no_quantizer_writes_are_refused_in_whole_pages_and_open_ones(
    #[case] format: &str,
    #[case] code: u16,
) {
    let mut cache = filled(format, 70);
    let (page, run) = (cache.layout().page_bytes(), cache.layout().run_bytes());
    let image = cache.image(0).unwrap().into_bytes();
    let pages = image.len() - 2 * page;
    let before = books(&cache);
    let width = if format == "f16" { 2 } else { 1 };
    let v_code = cache.layout().v_codes().start;
    // The first token of both pages in either head, in K and in V: written everywhere.
    for at in [
        0,
        run,
        v_code,
        run + v_code,
        page,
        page + run,
        page + v_code,
    ] {
        let mut damaged = image.clone();
        damaged[pages + at..pages + at + width].copy_from_slice(&code.to_le_bytes()[..width]);
        let damaged = forged(&damaged, &[]);
        let damaged = SequenceImage::from_bytes(damaged).unwrap();
        let error = cache.restore(1, &damaged).unwrap_err();
        assert!(
            matches!(error, Error::BadBytes { what: "code", .. }),
            "{error}"
        );
    }
    assert!(books(&cache) == before);
    // What no token wrote may hold anything.
    let mut unwritten = image.clone();
    let last_token = cache
        .layout()
        .part(attn_core::layout::Side::K)
        .code_addr(63, 0)
        .byte;
    unwritten[pages + page + last_token..][..width].copy_from_slice(&code.to_le_bytes()[..width]);
    let unwritten = SequenceImage::from_bytes(forged(&unwritten, &[])).unwrap();
    cache.restore(1, &unwritten).unwrap();
    assert_eq!(cache.read_back(1).unwrap(), cache.read_back(0).unwrap());
}
