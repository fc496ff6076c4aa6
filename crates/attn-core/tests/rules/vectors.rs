//! The bytes of pages equal the vectors of `tests/vectors`, which an independent program computes in exact rationals.

#[path = "../../../../tests/common/vectors.rs"]
mod golden;

use attn_core::{
    CacheConfig, HostPages, KvCache,
    rotation::{block, rotate_back, rotate_stored},
};
use golden::{Settings, cache, read, settings};
use rstest::rstest;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors");

/// A vector file: its settings, and each page's title and bytes.
fn parse(text: &str) -> (Settings<'_>, Vec<(&str, Vec<u8>)>) {
    let mut lines = text.lines();
    let settings = settings(lines.next().unwrap());
    let mut pages: Vec<(&str, Vec<u8>)> = Vec::new();
    for line in lines {
        if let Some(title) = line.strip_suffix(" bytes") {
            let (title, bytes) = title.rsplit_once(", ").unwrap();
            pages.push((title, vec![0; bytes.parse().unwrap()]));
            continue;
        }
        let (offset, hex) = line.split_once(": ").unwrap();
        let offset = usize::from_str_radix(offset, 16).unwrap();
        for (i, byte) in hex.split(' ').enumerate() {
            pages.last_mut().unwrap().1[offset + i] = u8::from_str_radix(byte, 16).unwrap();
        }
    }
    (settings, pages)
}

fn empty(config: &CacheConfig) -> KvCache {
    KvCache::new(config.clone(), Box::new(HostPages::new(config).unwrap())).unwrap()
}

#[rstest]
#[case("f16", 1)]
#[case("bf16", 1)]
#[case("fp8", 1)]
#[case("int8", 1)]
#[case("int8-d80", 1)]
#[case("int8-plain", 1)]
#[case("int8-g32", 1)]
#[case("int8-tensor", 1)]
#[case("int4-g1", 1)]
#[case("int4-g1-d80", 1)]
#[case("int4-g2", 1)]
#[case("int4-g4", 1)]
#[case("int4-g8", 1)]
#[case("int4", 2)]
#[case("int4-d80", 6)]
#[case("int8-d192-128", 1)]
#[case("int4-g1-int4-d64-160", 2)]
#[case("int4-long", 7)]
#[case("int8-int4-long", 16)]
#[case("int8-int4-d128", 2)]
#[case("int4-r2-w4-int4-d128", 4)]
fn pages_equal_the_vectors(#[case] name: &str, #[case] least: usize) {
    let text = read(&format!("{name}.txt"));
    let (settings, pages) = parse(&text);
    assert!(pages.len() >= least);
    for step in [1, 7, 1000] {
        let found = cache(&settings, step, empty).read_back(0).unwrap();
        assert_eq!(found.len(), pages.len());
        for (found, (title, page)) in found.iter().zip(&pages) {
            assert_eq!(found.len(), page.len(), "{title}");
            let differs = found.iter().zip(page).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{title}: the first byte that differs");
        }
    }
}

#[test]
fn rotated_rows_equal_the_vectors() {
    let text = read("rotation.txt");
    let lines: Vec<(&str, Vec<u32>)> = text
        .lines()
        .map(|line| {
            let (name, bits) = line.split_once(' ').unwrap();
            let bits = bits.split(' ').map(|b| u32::from_str_radix(b, 16).unwrap());
            (name, bits.collect())
        })
        .collect();
    assert_eq!(lines.len(), 30);
    for lines in lines.chunks(3) {
        let [("row", row), ("stored", stored), ("query", query)] = lines else {
            panic!("rows, each stored and as a query")
        };
        for (rotate, expected) in [
            (rotate_stored as fn(&mut [f32]), stored),
            (|row| rotate_back(row, block(row.len())), query),
        ] {
            let mut row: Vec<f32> = row.iter().map(|bits| f32::from_bits(*bits)).collect();
            rotate(&mut row);
            let bits: Vec<u32> = row.iter().map(|x| x.to_bits()).collect();
            assert_eq!(bits, *expected, "{} dims", row.len());
        }
    }
}

#[test]
fn worked_lines_of_the_manual_are_the_vectors() {
    let manual = include_str!("../../FORMATS.md");
    let mut checked = 0;
    for block in manual.split("```text\n").skip(1) {
        let mut lines = block.split("```").next().unwrap().lines();
        let name = lines.next().and_then(|l| l.strip_prefix("tests/vectors/"));
        let Some(name) = name.and_then(|name| name.strip_suffix(".txt")) else {
            continue;
        };
        let text = read(&format!("{name}.txt"));
        let mut left = text.lines();
        for line in lines {
            // In the file's order, so that a line of a residual page is not one of the home page.
            let line = line.split("   ").next().unwrap();
            assert!(left.any(|l| l == line), "{name} has no line {line} here");
            checked += 1;
        }
    }
    assert!(checked >= 23, "{checked}");
}
