//! A pool in host memory: zeroed, no shorter than its pages, and on a boundary that suits the machine.

use attn_core::{CacheConfig, Heads, HostPages};

#[test]
fn a_new_pool_is_zeroed_and_lies_on_a_boundary() {
    // Pages of 4096 bytes: pools of less than 2 MiB start on a cache line, larger ones on a huge page.
    for (pages, boundary) in [(1, 64), (3, 64), (511, 64), (512, 2 << 20), (1000, 2 << 20)] {
        let heads = Heads::new(1, 1, 64);
        let config = CacheConfig::builder("f16".parse().unwrap(), heads)
            .page_size(16)
            .pages(pages)
            .build();
        // Several at a time: one alone may lie on a boundary by chance.
        let pools: Vec<_> = (0..4).map(|_| HostPages::new(&config).unwrap()).collect();
        for pool in &pools {
            let pool = pool.pool(0).unwrap();
            assert!(pool.len() >= pages * 4096);
            assert!(pool.iter().all(|byte| *byte == 0));
            assert_eq!(pool.as_ptr().addr() % boundary, 0, "{pages} pages");
        }
    }
}
