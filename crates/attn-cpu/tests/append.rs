//! The vectorized quantizers write the bytes of the scalar ones, which define them, whatever the rows, the instruction set and the threads.

use attn_conformance::noise::Noise;
use attn_core::{
    Append, CacheConfig, DecodeAttention, HEAD_DIMS, Heads, KvCache, KvFormat, Scheme,
    layout::PAGE_SIZES,
    quant,
    rotation::{block, rotate_back},
};
use attn_cpu::{CpuBackend, Isa, Options, Reference};
use half::f16;

/// Repeatable random numbers.
struct Random(Noise);

impl Random {
    fn bits(&mut self) -> u32 {
        (self.0.bits() >> 32) as u32
    }

    fn below(&mut self, n: usize) -> usize {
        self.0.below(n)
    }

    /// From -1 to 1.
    fn unit(&mut self) -> f32 {
        self.0.unit()
    }

    /// Any finite number.
    fn finite(&mut self) -> f32 {
        loop {
            let x = f32::from_bits(self.bits());
            if x.is_finite() {
                return x;
            }
        }
    }
}

/// A number up to two units in the last place from `x`.
fn nudged(x: f32, random: &mut Random) -> f32 {
    let by = random.below(5) as i32 - 2;
    let moved = f32::from_bits(x.to_bits().wrapping_add_signed(by));
    if moved.is_finite() { moved } else { x }
}

/// Half-way between two codes of a scale, or close to it.
fn near_tie(scale: f32, most: usize, random: &mut Random) -> f32 {
    let x = (random.below(2 * most) as f32 - most as f32 + 0.5) * scale;
    nudged(x, random)
}

/// A row of one of the kinds that quantizers get wrong.
fn row(dim: usize, scale: f32, random: &mut Random) -> Vec<f32> {
    let kind = random.below(10);
    let size = 2.0f32.powi(random.below(40) as i32 - 20);
    let mut row: Vec<f32> = (0..dim)
        .map(|_| match kind {
            0 => 0.0,
            1 => [0.0, -0.0][random.below(2)],
            2 => f32::from_bits(random.bits() & 0x807f_ffff),
            3 => f32::MAX * random.unit(),
            4 => random.finite(),
            5 => near_tie(scale, 130, random),
            // Ties and neighbours of e4m3.
            6 => {
                let code = quant::from_fp8((random.below(126) + 1) as u8);
                let next = f32::from_bits(code.to_bits() + (1 << 19));
                nudged(next * scale, random)
            }
            7 => near_tie(f16::from_f32(size).to_f32(), 127, random),
            8 => size * random.unit(),
            _ => random.unit() * 2.0f32.powi(random.below(30) as i32 - 24),
        })
        .collect();
    if kind == 7 {
        // The scale of int8 is then exactly the one of the ties.
        row[random.below(dim)] = 127.0 * f16::from_f32(size).to_f32();
    }
    row
}

/// K or V of some tokens, as the scheme takes them; rows for int4 have ties relative to their own shift.
fn tokens(count: usize, dim: usize, scheme: Scheme, scale: f32, random: &mut Random) -> Vec<f32> {
    let mut all = Vec::new();
    for _ in 0..count {
        let mut x = row(dim, scale, random);
        if matches!(scheme, Scheme::Int4(_)) && random.below(3) == 0 {
            let (step, shift) = (
                f16::from_f32(random.unit().abs()).to_f32(),
                f16::from_f32(random.unit()).to_f32(),
            );
            x.fill_with(|| nudged(shift + (random.below(15) as f32 + 0.5) * step, random));
            (x[0], x[dim - 1]) = (shift, shift + 15.0 * step);
        }
        if matches!(scheme, Scheme::RotatedInt4 { .. }) && random.below(3) == 0 {
            // Stored rows of whole half steps, or close to them.
            let step = 2.0f32.powi(random.below(20) as i32 - 10);
            x.fill_with(|| (random.below(256) as f32 - 128.0) * step);
            x.iter_mut().step_by(16).for_each(|x| *x = 128.0 * step);
            rotate_back(&mut x, block(dim));
            let nudge = random.below(2) == 0;
            x.iter_mut()
                .filter(|_| nudge)
                .for_each(|x| *x = nudged(*x, random));
        }
        let most = scheme.max_magnitude();
        all.extend(x.iter().map(|x| x.clamp(-most, most)));
    }
    all
}

/// Appends in pieces of several sizes to two sequences, and gives the bytes of their pages.
fn bytes(backend: &dyn DecodeAttention, config: &CacheConfig, kv: &[Vec<f32>; 2]) -> Vec<Vec<u8>> {
    let mut cache: KvCache = backend.create_cache(config).unwrap();
    let row = config.num_kv_heads * config.head_dim.k;
    let total = kv[0].len() / row;
    let mut at = 0;
    for (i, piece) in [1, 7, 1, 60, 3, usize::MAX].into_iter().enumerate() {
        let n = piece.min(total - at);
        let first = n / (i + 1);
        let appends = [(0, first), (1, n - first)];
        let appends = appends.map(|(sequence, tokens)| Append { sequence, tokens });
        let [k, v] = [0, 1].map(|side: usize| &kv[side][at * row..(at + n) * row]);
        cache.append_batch(&appends, k, v).unwrap();
        at += n;
    }
    [0, 1].map(|b| cache.read_back(b).unwrap()).concat()
}

fn backends() -> Vec<(String, CpuBackend)> {
    let with = |options: &Options| CpuBackend::with_options(options).unwrap();
    let mut all: Vec<_> = Isa::available()
        .map(|isa| {
            let one = Options::default().isa(isa).threads(1);
            (isa.to_string(), with(&one))
        })
        .collect();
    for threads in [2, 3] {
        let options = Options::default().threads(threads);
        all.push((format!("{threads} threads"), with(&options)));
    }
    all
}

fn compare(format: KvFormat, dim: usize, page_size: usize, count: usize, seed: u64) {
    if format.check(dim).is_err() {
        return;
    }
    let (kv_heads, mut random) = (3, Random(Noise::new(seed)));
    let heads = Heads::new(kv_heads, kv_heads, dim);
    let mut config = CacheConfig::builder(format, heads)
        .centres(false)
        .unit_tensor_scales()
        .sequences(2)
        .max_len(count)
        .build();
    config.page_size = page_size;
    config.num_pages = 2 * (count.div_ceil(page_size) + 2);
    config.num_pages += 2 * format.residual_pages(page_size, count, 0);
    let scale = [1.0, 0.037, 1.0 / 64.0, 1e-15, 1e15, 0.1][random.below(6)];
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        scales.fill(scale);
    }
    let kv = [format.k, format.v]
        .map(|scheme| tokens(count * kv_heads, dim, scheme, scale, &mut random));
    let want = bytes(&Reference::new(), &config, &kv);
    for (name, backend) in backends() {
        let got = bytes(&backend, &config, &kv);
        assert!(
            got == want,
            "{format}, head_dim {dim}, pages of {page_size}, seed {seed}: {name} writes other bytes"
        );
    }
}

#[test]
fn rows_of_every_kind_scheme_and_head_dim_have_the_scalar_quantizers_bytes() {
    let mut seed = 1;
    for scheme in Scheme::ALL {
        let format = KvFormat::same(scheme);
        for dim in HEAD_DIMS {
            for page_size in PAGE_SIZES {
                compare(format, dim, page_size, 150, seed);
                seed += 1;
            }
        }
    }
}

#[test]
fn every_token_of_an_append_of_thousands_is_written() {
    // The last piece brings one sequence 1488 tokens, and the other 7440.
    for (seed, format) in ["int8/int4", "fp8"].into_iter().enumerate() {
        compare(format.parse().unwrap(), 64, 64, 9000, seed as u64);
    }
}

#[test]
fn long_appends_of_mixed_formats_have_the_scalar_quantizers_bytes_on_any_number_of_threads() {
    for (seed, format) in [
        "int8/int4-g1",
        "f16/int8-plain",
        "fp8/bf16",
        "int4-g2/int8-g32",
        "int8/int4",
        "int4-r2-w4/int4",
        "int4/int4-w0",
    ]
    .into_iter()
    .enumerate()
    {
        compare(format.parse().unwrap(), 128, 64, 1500, seed as u64);
    }
}
