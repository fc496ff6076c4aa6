//! The golden vectors of `tests/vectors`: their text, the inputs of `make.py` and `decode.py`, and the caches that they describe. The module above
//! has the folder's path as `VECTORS`.

use std::{collections::HashMap, fs, path::Path};

use attn_core::{CacheConfig, HeadDim, Heads, KvCache, KvFormat};

use super::VECTORS;

/// A line `key=value key=value …`.
pub type Settings<'a> = HashMap<&'a str, &'a str>;

pub fn settings(line: &str) -> Settings<'_> {
    let pairs = line.split(' ').map(|pair| pair.split_once('='));
    pairs.map(|pair| pair.expect("key=value")).collect()
}

pub fn read(name: &str) -> String {
    let path = Path::new(VECTORS).join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// An element of K, side 0, or of V, side 1.
pub fn value(side: usize, head: usize, t: usize, d: usize) -> f32 {
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

/// What settings multiply V's row of token `t` by: 0 from the first number of `v_zero` on, up to the second; else 2^-1 for each halving.
fn factor_of_v(settings: &Settings<'_>, t: usize) -> f32 {
    let pair = |key: &str| -> [usize; 2] {
        settings.get(key).map_or([0; 2], |pair| {
            let (first, second) = pair.split_once(',').expect("two numbers");
            [first, second].map(|number| number.parse().unwrap())
        })
    };
    let [[first, end], [of_tile, of_token]] = ["v_zero", "v_halvings"].map(pair);
    if (first..end).contains(&t) {
        return 0.0;
    }
    0.5f32.powi((of_tile * (t / 64 % 2) + of_token * (t % 4)) as i32)
}

/// What settings add to dim `d` of every row of K.
fn bias_of_k(settings: &Settings<'_>, d: usize) -> f32 {
    let bias = settings.get("bias").map_or(0.0, |x| x.parse().unwrap());
    ((d * 29 + 3) % 17) as f32 / 8.0 * bias - bias
}

/// The cache that settings describe, made by `new`, with its tokens appended `step` at a time.
pub fn cache(
    settings: &Settings<'_>,
    step: usize,
    new: impl FnOnce(&CacheConfig) -> KvCache,
) -> KvCache {
    let number = |key: &str| settings[key].parse::<usize>().unwrap();
    let (heads, tokens) = (number("heads"), number("tokens"));
    let head_dim: HeadDim = settings["head_dim"].replace(',', "/").parse().unwrap();
    let format: KvFormat = match (&settings["k"], &settings["v"]) {
        (k, &"latents") => format!("{k}-latents"),
        (k, v) => format!("{k}/{v}"),
    }
    .parse()
    .unwrap();
    let all = Heads::new(heads, heads, head_dim);
    let mut config = CacheConfig::builder(format, all)
        .centres(settings.contains_key("centres"))
        .unit_tensor_scales()
        .page_size(number("page_size"))
        .max_len(tokens)
        .build();
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        scales.fill(0.125);
    }
    let mut cache = new(&config);
    let rows = head_dim.both().map(|dim| heads * dim);
    let [k, v] = [(0, format.k), (1, format.v)].map(|(side, scheme)| -> Vec<f32> {
        let factor = |t| {
            if side == 0 {
                1.0
            } else {
                factor_of_v(settings, t)
            }
        };
        let bias = |d| {
            if side == 0 {
                bias_of_k(settings, d)
            } else {
                0.0
            }
        };
        let (row, dim) = (rows[side], head_dim.both()[side]);
        let value = |i: usize| {
            value(side, i % row / dim, i / row, i % dim) * factor(i / row) + bias(i % dim)
        };
        let values = (0..tokens * row).map(value);
        values.map(|x| x.min(scheme.max_magnitude())).collect()
    });
    let [of_k, of_v] = rows.map(|row| step.max(1) * row);
    for (k, v) in k.chunks(of_k).zip(v.chunks(of_v)) {
        let v = if format.latents { &[] } else { v };
        cache.append(0, k, v).unwrap();
    }
    cache
}
