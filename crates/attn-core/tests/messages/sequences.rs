//! Sequences of a cache, and their images.

use attn_core::{CacheConfig, SequenceImage, internals::order_free_pages};

use crate::calls::*;

pub fn sequences() -> Vec<Refusal> {
    let mut cache = filled("int4", 700);
    append(&mut cache, 1, 3).unwrap();
    let mut described = config("int4");
    (described.checkpoints, described.num_pages) = (256, 30);
    let mut with_checkpoints = cache_of(described);
    append(&mut with_checkpoints, 0, 900).unwrap();
    let mut dropped = filled("int8", 700);
    dropped.drop_before(0, 300).unwrap();
    let order = order_free_pages(&mut dropped, &[0, 0]).unwrap_err();
    vec![
        (
            "a truncation beyond the residuals",
            cache.truncate(0, 100).unwrap_err(),
        ),
        (
            "a truncation between two checkpoints",
            with_checkpoints.truncate(0, 600).unwrap_err(),
        ),
        (
            "a truncation into dropped tokens",
            dropped.truncate(0, 100).unwrap_err(),
        ),
        (
            "a truncation to more tokens than there are",
            cache.truncate(0, 701).unwrap_err(),
        ),
        (
            "a drop of more tokens than there are",
            cache.drop_before(0, 1 << 40).unwrap_err(),
        ),
        (
            "a copy of a sequence with dropped tokens",
            dropped.read_back(0).unwrap_err(),
        ),
        (
            "a fork onto a sequence with tokens",
            cache.fork(0, 1).unwrap_err(),
        ),
        ("a fork onto itself", cache.fork(0, 0).unwrap_err()),
        (
            "a page behind the pool's last",
            cache.write_page(20, &[]).unwrap_err(),
        ),
        ("a page of no bytes", cache.write_page(0, &[]).unwrap_err()),
        ("an order of pages that are not free", order),
    ]
}

pub fn images() -> Vec<Refusal> {
    let mut cache = filled("fp8", 70);
    append(&mut cache, 1, 1).unwrap();
    let image = cache.image(0).unwrap();
    let restored = |change: fn(&mut CacheConfig)| {
        let mut config = config("fp8");
        change(&mut config);
        cache_of(config).restore(0, &image).unwrap_err()
    };
    let damaged = |at: usize, value: u8| {
        let mut bytes = image.as_bytes().to_vec();
        bytes[at] = value;
        SequenceImage::from_bytes(bytes).unwrap_err()
    };
    let mut pages = cache.read_back(0).unwrap();
    pages[0][3] = 0x7f;
    let mut free = filled("fp8", 0);
    vec![
        (
            "an image of another page size",
            restored(|c| c.page_size = 32),
        ),
        (
            "an image of other static scales",
            restored(|c| c.v_tensor_scales[0] = 0.5),
        ),
        (
            "an image for a sequence with tokens",
            cache.restore(1, &image).unwrap_err(),
        ),
        (
            "another file",
            SequenceImage::from_bytes(&b"PK\x03\x04, which is a zip"[..]).unwrap_err(),
        ),
        ("an image of version 1", damaged(8, 1)),
        ("an image of a later version", damaged(8, 9)),
        (
            "an image that was cut off",
            SequenceImage::from_bytes(&image.as_bytes()[..200]).unwrap_err(),
        ),
        ("an image with a changed byte", damaged(300, 1)),
        (
            "pages with NaN",
            free.restore_pages(0, 70, &pages).unwrap_err(),
        ),
    ]
}
