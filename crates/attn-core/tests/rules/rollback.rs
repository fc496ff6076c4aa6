//! An engine takes tokens back, asks for room for the next step, and attends any sequences in a batch.

use attn_conformance::noise::Noise;
use attn_core::{Append, CacheConfig, Error, HostPages, KvCache, KvSource, Plan, Problem};
use rstest::rstest;

use crate::texts::{DIM, ONE_HEAD, grow_to, values};

fn cache(format: &str, page_size: usize, pages: usize) -> KvCache {
    let config = CacheConfig::builder(format.parse().unwrap(), ONE_HEAD)
        .centres(false)
        .unit_tensor_scales()
        .sequences(4)
        .page_size(page_size)
        .pages(pages)
        .build();
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

/// The pages of a sequence that got `len` tokens of text 1 one by one.
fn straight(format: &str, page_size: usize, len: usize) -> Vec<Vec<u8>> {
    let mut cache = cache(format, page_size, 128);
    (1..=len).for_each(|to| grow_to(&mut cache, 0, 1, to).unwrap());
    cache.read_back(0).unwrap()
}

#[rstest]
fn tokens_taken_back_leave_a_straight_runs_bytes(
    #[values("int8", "int4", "int8/int4", "int4-g1", "fp8", "int4-r2-w4")] format: &str,
    #[values(16, 64, 128)] page_size: usize,
) {
    let mut cache = cache(format, page_size, 64);
    // Five drafts at a time, of which some are right, over several borders of pages and tiles.
    let mut right = 0;
    for step in 0..90 {
        let kept = step * 7 % 6;
        grow_to(&mut cache, 0, 1, right + kept).unwrap();
        grow_to(&mut cache, 0, 2, right + 5).unwrap();
        right += kept;
        cache.truncate(0, right).unwrap();
        if step % 3 == 0 {
            assert_eq!(
                cache.read_back(0).unwrap(),
                straight(format, page_size, right),
                "{right}"
            );
        }
    }
    assert!(right > 200);
    let used = 64 - cache.free_pages();
    cache.truncate(0, 0).unwrap();
    assert_eq!((cache.free_pages(), used > 0), (64, true));
}

/// Of a sequence that only grew.
#[rstest]
fn sixty_four_tokens_can_be_taken_back(
    #[values("int4", "int8/int4", "int4-r2-w4")] format: &str,
    #[values(16, 64, 128)] page_size: usize,
    #[values(1, 40, 64)] at_once: usize,
) {
    for len in [64, 65, 100, 128, 191, 192, 300] {
        let mut cache = cache(format, page_size, 64);
        while cache.table().lens[0] < len {
            let to = (cache.table().lens[0] + at_once).min(len);
            grow_to(&mut cache, 0, 1, to).unwrap();
        }
        cache.truncate(0, len - 64).unwrap();
        assert_eq!(
            cache.read_back(0).unwrap(),
            straight(format, page_size, len - 64),
            "{len}"
        );
        // And what was taken back comes again.
        grow_to(&mut cache, 0, 1, len).unwrap();
        assert_eq!(
            cache.read_back(0).unwrap(),
            straight(format, page_size, len),
            "{len}"
        );
    }
}

/// The fewest tokens that can be kept, and the most queries.
#[rstest]
fn a_refusal_names_what_can_be_kept(
    #[values("int4", "int8/int4", "int4-w4", "int8")] format: &str,
    #[values(16, 64, 128)] page_size: usize,
    #[values(0, 250)] dropped: usize,
) {
    let mut cache = cache(format, page_size, 128);
    grow_to(&mut cache, 0, 1, 533).unwrap();
    grow_to(&mut cache, 0, 1, 700).unwrap();
    cache.drop_before(0, dropped).unwrap();
    let kept_from = cache.table().first_tokens[0];
    let given = if dropped > 0 { kept_from + 1 } else { 150 };
    match cache.check_truncate(0, given) {
        Err(Error::Truncate {
            longest_prefix,
            least,
            ..
        }) => {
            // The first tile's residuals are there while it is; and where all is dropped there is nothing to read.
            let first = if dropped > 0 {
                kept_from
            } else {
                page_size.max(64)
            };
            assert_eq!(longest_prefix, first);
            for len in 1..=700 {
                let is_taken = cache.check_truncate(0, len).is_ok();
                let can = (kept_from..=longest_prefix).contains(&len) || len >= least;
                assert_eq!(is_taken, can, "{len}, {least}");
            }
        }
        other => {
            other.unwrap();
            assert!(format == "int8" || format == "int4-w4" && dropped > 0);
        }
    }
    let queries = |q_len| cache.check_queries(&Problem::new(ONE_HEAD, [700]).q_len(q_len));
    match queries(650) {
        Err(Error::ResidualQueries { most, q_len, .. }) => {
            assert_eq!(q_len, 650);
            for q_len in 1..=650 {
                assert_eq!(queries(q_len).is_ok(), q_len <= most, "{q_len}, {most}");
            }
        }
        Err(Error::Dropped { .. }) => assert!(dropped > 0),
        other => {
            other.unwrap();
            assert!(format == "int8" && dropped == 0);
        }
    }
}

/// Rounds of drafts of which any number is right, in formats with a window: the image is a straight run's after each, and a restored one goes back by 64
/// tokens, as a straight run does.
#[rstest]
fn rounds_of_drafts_leave_a_straight_run(
    #[values("int4", "int8/int4", "int4-r2-w4", "int4-w4/int4", "int4/int8")] format: &str,
    #[values(16, 32, 64, 128)] page_size: usize,
    #[values(64, 150)] max_q_len: usize,
) {
    let new = || {
        let config = CacheConfig::builder(format.parse().unwrap(), ONE_HEAD)
            .centres(false)
            .sequences(2)
            .page_size(page_size)
            .max_q_len(max_q_len)
            .max_len(2000)
            .build();
        let store = HostPages::new(&config).unwrap();
        KvCache::new(config, Box::new(store)).unwrap()
    };
    let (mut drafted, mut straight) = (new(), new());
    let (mut right, mut noise) = (0, Noise::new((page_size + max_q_len) as u64));
    let mut below = |n: usize| noise.below(n);
    while right < 900 {
        // Few drafts in most rounds, so that some are taken back just behind a border.
        let drafts = 1 + match below(3) {
            0 => below(max_q_len),
            _ => below(8),
        };
        let kept = below(drafts + 1);
        let [k, v] = [0, 100].map(|side| {
            let (good, wrong) = (right + kept, right + drafts);
            [values(1 + side, right, good), values(2 + side, good, wrong)].concat()
        });
        drafted.append(0, &k, &v).unwrap();
        right += kept;
        drafted.truncate(0, right).unwrap();
        grow_to(&mut straight, 0, 1, right).unwrap();
        assert!(
            drafted.image(0).unwrap() == straight.image(0).unwrap(),
            "{right}"
        );
    }
    let image = drafted.image(0).unwrap();
    drafted.restore(1, &image).unwrap();
    drafted.truncate(1, right - 64).unwrap();
    straight.truncate(0, right - 64).unwrap();
    for (cache, sequence) in [(&mut drafted, 1), (&mut straight, 0)] {
        grow_to(cache, sequence, 1, right).unwrap();
    }
    assert!(drafted.image(1).unwrap() == straight.image(0).unwrap());
}

#[rstest]
fn pages_that_were_taken_back_are_taken_again_in_their_order(
    #[values("int8", "int4")] format: &str,
) {
    let mut cache = cache(format, 16, 64);
    grow_to(&mut cache, 0, 1, 64).unwrap();
    grow_to(&mut cache, 0, 1, 128).unwrap();
    let before = cache.table().clone();
    assert!(before.pages[0].len() == 8);
    cache.truncate(0, 64).unwrap();
    grow_to(&mut cache, 0, 1, 128).unwrap();
    assert_eq!(*cache.table(), before);
}

#[test]
fn what_the_residuals_do_not_reach_is_refused_and_nothing_changes() {
    let mut cache = cache("int4", 16, 64);
    grow_to(&mut cache, 0, 1, 500).unwrap();
    let before = (
        cache.table().clone(),
        cache.free_pages(),
        cache.read_back(0).unwrap(),
    );
    for (len, what) in [
        (
            300,
            "can be truncated to 64 or to 320, but to no length between, such as 300: the format",
        ),
        (
            501,
            "is 501, but sequence 0 has 500 tokens; pass at most 500",
        ),
    ] {
        let said = cache.truncate(0, len).unwrap_err().to_string();
        assert!(said.contains(what), "{said}");
        let after = (
            cache.table().clone(),
            cache.free_pages(),
            cache.read_back(0).unwrap(),
        );
        assert_eq!(after, before);
    }
    assert!(matches!(
        cache.truncate(9, 0),
        Err(Error::Sequence { given: 9, count: 4 })
    ));
    // Without its first tile a sequence is never that short.
    cache.drop_before(0, 64).unwrap();
    let said = cache.truncate(0, 65).unwrap_err().to_string();
    assert!(
        said.contains("to 64 or to 320, but to no length between, such as 65:"),
        "{said}"
    );
    let said = cache.truncate(0, 63).unwrap_err().to_string();
    assert!(
        said.contains("to 0 or to 64, but to no length between, such as 63:"),
        "{said}"
    );
    // A format without a window goes back any way.
    let mut plain = self::cache("int8", 16, 64);
    grow_to(&mut plain, 0, 1, 500).unwrap();
    plain.truncate(0, 3).unwrap();
    assert_eq!(plain.read_back(0).unwrap(), straight("int8", 16, 3));
}

/// However far it grew, a sequence goes back to its first tile, and goes on as one that was never longer. Kills a truncation that keeps residual pages of the
/// tokens that went, or drops those of the first tile.
#[rstest]
fn goes_back_to_its_first_tile_from_any_length(
    #[values("int4", "int8/int4-w4", "int4-r2/int8")] format: &str,
    #[values(16, 32, 64, 128)] page_size: usize,
    #[values(1, 17, 63, 64)] len: usize,
) {
    let mut cache = cache(format, page_size, 200);
    grow_to(&mut cache, 0, 1, 700).unwrap();
    cache.fork(0, 1).unwrap();
    let whole = cache.read_back(1).unwrap();
    cache.truncate(0, len).unwrap();
    assert_eq!(
        cache.read_back(0).unwrap(),
        straight(format, page_size, len)
    );
    for to in [len + 3, 200, 600] {
        grow_to(&mut cache, 0, 1, to).unwrap();
        let found = cache.read_back(0).unwrap();
        assert_eq!(found, straight(format, page_size, to), "{to}");
    }
    assert_eq!(cache.read_back(1).unwrap(), whole);
    for sequence in [0, 1] {
        cache.free_sequence(sequence).unwrap();
    }
    assert_eq!(cache.free_pages(), 200);
}

#[rstest]
fn a_fork_keeps_what_its_brother_takes_back(#[values("int8", "int4")] format: &str) {
    let mut cache = cache(format, 16, 64);
    grow_to(&mut cache, 0, 1, 90).unwrap();
    cache.fork(0, 1).unwrap();
    let whole = cache.read_back(1).unwrap();
    // Into a page that both have, then other tokens.
    cache.truncate(0, 70).unwrap();
    grow_to(&mut cache, 0, 2, 75).unwrap();
    assert_eq!(cache.read_back(1).unwrap(), whole);
    cache.truncate(0, 70).unwrap();
    grow_to(&mut cache, 0, 1, 90).unwrap();
    assert_eq!(cache.read_back(0).unwrap(), cache.read_back(1).unwrap());
    cache.free_sequence(0).unwrap();
    cache.free_sequence(1).unwrap();
    assert_eq!(cache.free_pages(), 64);
}

#[rstest]
fn a_sequence_that_was_taken_back_moves(#[values("int4", "int8")] format: &str) {
    let mut cache = cache(format, 64, 64);
    grow_to(&mut cache, 0, 1, 256).unwrap();
    cache.truncate(0, 192).unwrap();
    let pages = cache.read_back(0).unwrap();
    cache.restore_pages(1, 192, &pages).unwrap();
    for sequence in [0, 1] {
        grow_to(&mut cache, sequence, 1, 300).unwrap();
    }
    assert_eq!(cache.read_back(1).unwrap(), cache.read_back(0).unwrap());
    // With fewer residuals than the next token reads it would not be the same sequence.
    if format == "int4" {
        cache.truncate(1, 290).unwrap();
        let mut pages = cache.read_back(1).unwrap();
        pages.truncate(6);
        let refused = cache.restore_pages(2, 290, &pages);
        assert!(matches!(refused, Err(Error::Length { what: "pages", .. })));
    }
}

#[rstest]
fn as_many_pages_are_needed_as_an_append_takes(#[values("int8", "int4")] format: &str) {
    let mut cache = cache(format, 16, 40);
    grow_to(&mut cache, 0, 1, 20).unwrap();
    cache.fork(0, 1).unwrap();
    for step in 0..60 {
        let appends = [
            Append {
                sequence: step % 2,
                tokens: step * 5 % 11,
            },
            Append {
                sequence: 2,
                tokens: step % 4,
            },
        ];
        let (needed, free) = (cache.pages_needed(&appends).unwrap(), cache.free_pages());
        let tokens: usize = appends.iter().map(|a| a.tokens).sum();
        let rows = values(step, 0, tokens);
        let fits = cache.append_batch(&appends, &rows, &rows).is_ok();
        assert_eq!(fits, needed <= free, "step {step}: {needed} of {free}");
        if !fits {
            assert_eq!(cache.free_pages(), free);
            cache.free_sequence(step % 2).unwrap();
        }
    }
    let twice = [Append {
        sequence: 1,
        tokens: 1,
    }; 2];
    assert!(matches!(
        cache.pages_needed(&twice),
        Err(Error::Repeated { sequence: 1 })
    ));
}

#[test]
fn a_batch_has_any_sequences_in_any_order() {
    let mut cache = cache("int8", 16, 40);
    for (sequence, len) in [(0, 3), (2, 40), (3, 7)] {
        grow_to(&mut cache, sequence, sequence, len).unwrap();
    }
    let chosen = cache.sequences(&[3, 2, 3]).unwrap();
    assert_eq!(chosen.table().lens, [7, 40, 7]);
    assert_eq!(chosen.table().pages[1], cache.table().pages[2]);
    assert!(matches!(
        cache.sequences(&[0, 4]),
        Err(Error::Sequence { given: 4, count: 4 })
    ));
    // The problem's lengths are those of the chosen sequences.
    let plan = |lens| {
        Plan::new(
            "test",
            &Problem::new(ONE_HEAD, lens),
            "int8".parse().unwrap(),
            (),
        )
    };
    let plan = plan([7, 40, 7]).unwrap();
    let (q, mut out) = ([1.0; 3 * DIM], [0.0; 3 * DIM]);
    let step = attn_core::DecodeStep::new(&plan, &q, KvSource::Sequences(&chosen), &mut out);
    assert_eq!(step.unwrap().problem().kv_lens, [7, 40, 7]);
    let others = cache.sequences(&[2, 2, 3]).unwrap();
    let refused = attn_core::DecodeStep::new(&plan, &q, KvSource::Sequences(&others), &mut out);
    assert!(matches!(
        refused.err(),
        Some(Error::KvLen {
            sequence: 0,
            tokens: 40,
            planned: 7
        })
    ));
}
