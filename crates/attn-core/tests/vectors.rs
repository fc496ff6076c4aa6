//! The bytes of pages equal the vectors of `tests/vectors`, which an independent program computes in exact rationals.

use std::{collections::HashMap, fs, path::Path};

use attn_core::{
    CacheConfig, Heads, HostPages, KvCache, KvFormat,
    rotation::{rotate_back, rotate_stored},
};
use rstest::rstest;

/// The inputs of `make.py`.
fn value(side: usize, head: usize, t: usize, d: usize) -> f32 {
    match (t, side, d) {
        (0, _, 0) => 63.5,
        (0, ..) => ((d * 29 + head * 7 + side * 3 + 254) % 509) as f32 / 4.0 - 63.5,
        (1, ..) => 0.0,
        (2, 1, 5) => f32::MAX,
        (2, 0, 7) => -f32::from_bits(3),
        _ => {
            let n = t * 7919 + head * 104_729 + side * 1299 + d * d * 31 + d * 17 + 11;
            ((n % 2001) as f32 - 1000.0) / 128.0
        }
    }
}

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors");
    fs::read_to_string(path.join(format!("{name}.txt"))).unwrap()
}

type Settings<'a> = HashMap<&'a str, &'a str>;

/// A vector file: its settings, and each page's title and bytes.
fn parse(text: &str) -> (Settings<'_>, Vec<(&str, Vec<u8>)>) {
    let mut lines = text.lines();
    let settings = lines.next().unwrap().split(' ');
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
    let settings = settings.map(|pair| pair.split_once('=').unwrap());
    (settings.collect(), pages)
}

fn cache(settings: &Settings<'_>, step: usize) -> KvCache {
    let number = |key: &str| settings[key].parse::<usize>().unwrap();
    let (dim, heads, tokens) = (number("head_dim"), number("heads"), number("tokens"));
    let format = KvFormat {
        k: settings["k"].parse().unwrap(),
        v: settings["v"].parse().unwrap(),
    };
    let all = Heads {
        q: heads,
        kv: heads,
        dim,
    };
    let mut config = CacheConfig::builder(format, all)
        .page_size(number("page_size"))
        .max_len(tokens)
        .build();
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        scales.fill(0.125);
    }
    let store = HostPages::new(&config).unwrap();
    let mut cache = KvCache::new(config, Box::new(store)).unwrap();
    let row = heads * dim;
    let [k, v] = [(0, format.k), (1, format.v)].map(|(side, scheme)| -> Vec<f32> {
        let value = |i: usize| value(side, i % row / dim, i / row, i % dim);
        let values = (0..tokens * row).map(value);
        values.map(|x| x.min(scheme.max_magnitude())).collect()
    });
    for (k, v) in k.chunks(step * row).zip(v.chunks(step * row)) {
        cache.append(0, k, v).unwrap();
    }
    cache
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
#[case("int4-long", 5)]
#[case("int8-int4-d128", 2)]
#[case("int4-r2-w4-int4-d128", 4)]
fn pages_equal_the_vectors(#[case] name: &str, #[case] least: usize) {
    let text = read(name);
    let (settings, pages) = parse(&text);
    assert!(pages.len() >= least);
    for step in [1, 7, 1000] {
        let found = cache(&settings, step).read_back(0).unwrap();
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
    let text = read("rotation");
    let lines: Vec<(&str, Vec<u32>)> = text
        .lines()
        .map(|line| {
            let (name, bits) = line.split_once(' ').unwrap();
            let bits = bits.split(' ').map(|b| u32::from_str_radix(b, 16).unwrap());
            (name, bits.collect())
        })
        .collect();
    assert_eq!(lines.len(), 18);
    for lines in lines.chunks(3) {
        let [("row", row), ("stored", stored), ("query", query)] = lines else {
            panic!("rows, each stored and as a query")
        };
        for (rotate, expected) in [
            (rotate_stored as fn(&mut [f32]), stored),
            (rotate_back, query),
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
    let manual = include_str!("../FORMATS.md");
    let mut checked = 0;
    for block in manual.split("```text\n").skip(1) {
        let mut lines = block.split("```").next().unwrap().lines();
        let name = lines.next().and_then(|l| l.strip_prefix("tests/vectors/"));
        let Some(name) = name.and_then(|name| name.strip_suffix(".txt")) else {
            continue;
        };
        let text = read(name);
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
