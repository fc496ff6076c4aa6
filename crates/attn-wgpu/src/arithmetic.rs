//! The scalar functions of `docs/arithmetic.md` on this adapter, compared with the CPU's bits: they decide which claim the adapter can be held to.

use attn_core::{
    Error,
    arithmetic::{
        ROUND, exp2_float, exp2i, fold_factors, ftz, lse, merge_factors, pow2, query_step, rcp,
        softcap, weight_units,
    },
    grid::{self, GRID, SCORE_BASE},
};
use attn_kernels::wgsl::{self, params::ArithmeticParams};
use half::f16;
use wgpu::BufferUsages;

use crate::{gpu::Gpu, pipeline};

/// The comparison of one function on this adapter with the CPU.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ArithmeticCheck {
    /// The function or expression.
    pub function: &'static str,
    /// Whether decode relies on it; the others show how the compiler treats plain expressions.
    pub relied_on: bool,
    /// Number of inputs.
    pub tried: usize,
    /// Results that differ from the CPU's bits.
    pub differing: usize,
    /// The first result that differs: inputs, the adapter's bits, the CPU's bits.
    pub first: Option<([f32; 3], u32, u32)>,
}

impl std::fmt::Display for ArithmeticCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:<28} {} of {} differ",
            self.function, self.differing, self.tried
        )?;
        if let Some(([x, y, z], got, want)) = self.first {
            write!(
                f,
                "; first at x = {x:e}, y = {y:e}, z = {z:e}: {got:#010x} for {want:#010x}"
            )?;
        }
        Ok(())
    }
}

/// A function: its name, whether decode relies on it, its inputs, and the CPU's answer.
type Function = (
    &'static str,
    bool,
    fn() -> Vec<[f32; 3]>,
    fn([f32; 3]) -> f32,
);

fn rhe(x: f32) -> f32 {
    x.round_ties_even() + 0.0
}

/// The new exponent, or both factors' product, of which one is 1.
fn joined((m, [alpha, beta]): (f32, [f32; 2]), is_factor: bool) -> f32 {
    if is_factor { alpha * beta } else { m }
}

/// The functions in the order of `check_arithmetic.wgsl`.
const FUNCTIONS: [Function; 33] = [
    ("exp2f(x)", true, noise, |[x, _, _]| exp2_float(x)),
    ("rcp(y)", true, noise, |[_, y, _]| rcp(y)),
    ("lse(x, y)", true, noise, |[x, y, _]| lse(x.ceil(), y)),
    ("softcap(x, y, z)", true, noise, |[x, y, z]| {
        softcap(x, y, z)
    }),
    ("x·y + z, product hidden", true, noise, |[x, y, z]| {
        x * y + z
    }),
    ("rhe(x·y), product hidden", true, noise, |[x, y, _]| {
        rhe(x * y)
    }),
    ("f32(i32)", true, noise, |[_, _, z]| {
        z.to_bits() as i32 as f32
    }),
    ("f16 value", true, noise, |[_, _, z]| {
        let h = z.to_bits() & 0x7FFF;
        match h >> 10 {
            0 => h as f32 * exp2i(-24),
            _ => f32::from_bits((h << 13) + 0x3800_0000),
        }
    }),
    ("fold by powers of two", true, noise, |[x, _, z]| {
        ftz(x * exp2i(-20)) + z * exp2i(-3)
    }),
    ("ceil through its key", true, noise, |[x, _, _]| x.ceil()),
    ("pow2(ceil(x) + 40)", true, noise, |[x, _, _]| {
        pow2(x.ceil() + 40.0)
    }),
    ("p22 of a weight", true, noise, |[x, _, _]| {
        weight_units(exp2_float(x)) as f32
    }),
    ("x·y + z, plain", false, noise, |[x, y, z]| x * y + z),
    ("2 - x·y, plain", false, noise, |[x, y, _]| 2.0 - x * y),
    ("rhe(x·y), plain", false, noise, |[x, y, _]| {
        f32::from_bits((x * y + ROUND).to_bits())
    }),
    ("z·(2 - x·y), plain", false, noise, |[x, y, z]| {
        z * (2.0 - x * y)
    }),
    ("(x + ROUND) - ROUND", true, noise, |[x, _, _]| {
        (x + ROUND) - ROUND
    }),
    ("query's step", true, noise, |[_, y, _]| query_step(y)[0]),
    ("query's inverse", true, noise, |[_, y, _]| query_step(y)[1]),
    ("factors of a fold", true, noise, |[x, y, z]| {
        joined(fold_factors(x.ceil(), x.ceil() + z.ceil()), y < 4.0)
    }),
    ("factors of a merge", true, noise, |[x, y, z]| {
        joined(merge_factors(x.ceil(), x.ceil() + z.ceil()), y < 4.0)
    }),
    ("score on the grid", true, grid_scores, |[x, y, _]| {
        grid::grid_score(x, y, SCORE_BASE).max(131_072.0)
    }),
    (
        "exponent of a tile",
        true,
        tile_scores,
        |[x, _, _]| match grid::grid_score(x, 1.0, SCORE_BASE) {
            y if grid::is_near(y) => grid::grid_ceil(y) - SCORE_BASE + grid::WEIGHT_SHIFT,
            _ => x.ceil() + grid::WEIGHT_SHIFT,
        },
    ),
    ("point of a weight", true, tile_scores, |[x, y, z]| {
        let top = grid::grid_score(x, 1.0, SCORE_BASE);
        let point = match grid::is_near(top) {
            // The step that a score took counts on the grid alone.
            true => {
                let moved = f32::from_bits(y.to_bits().wrapping_add_signed(z as i32));
                grid::weight_point(
                    grid::grid_score(moved, 1.0, SCORE_BASE),
                    grid::grid_ceil(top),
                )
            }
            false => {
                let below = (y - x.ceil()).max(-65_536.0);
                grid::weight_point(grid::grid_score(below, 1.0, SCORE_BASE), SCORE_BASE)
            }
        };
        point as f32
    }),
    ("powers of two on the grid", true, powers, |[x, _, _]| {
        exp2i(x as i32 / GRID)
    }),
    ("weight in f16", true, points, |[x, _, _]| {
        grid::weight_units(x as i32) as f32
    }),
    ("point of a scale", true, scales, |[x, _, _]| {
        grid::scale_point(f16::from_f32(x)).map_or(f32::NAN, |point| point as f32)
    }),
    ("step of weights", true, steps, |[x, y, _]| {
        grid::weight_step(x as i32, y as u32)[0]
    }),
    ("inverse of a step", true, steps, |[x, y, _]| {
        grid::weight_step(x as i32, y as u32)[1]
    }),
    ("score from a centre's base", true, based, |[x, y, z]| {
        grid::grid_score(x, y, z).clamp(131_072.0, 262_144.0)
    }),
    (
        "exponent from a base",
        true,
        based,
        |[x, y, z]| match grid::grid_score(x, y, z) {
            top if grid::is_near(top) => grid::grid_ceil(top) - SCORE_BASE + grid::WEIGHT_SHIFT,
            _ => (x * y + (z - SCORE_BASE)).ceil() + grid::WEIGHT_SHIFT,
        },
    ),
    ("score off the grid", true, based, |[x, y, z]| {
        x * y + (z - SCORE_BASE)
    }),
    ("weight of one byte", true, bytes, |[x, y, z]| {
        let inverse = grid::step_inverse(y);
        f32::from(grid::weight_byte(x as i32, inverse, z as usize))
    }),
];

/// Random inputs of a function.
const TRIED: usize = 16384;

/// Numbers in 0..1.
fn random() -> impl FnMut() -> f32 {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 24) as f32
    }
}

/// x in -125..0, y in 0.5..64, z of any sign from 2^-11 to 2^21.
fn noise() -> Vec<[f32; 3]> {
    let mut next = random();
    (0..TRIED)
        .map(|i| {
            let x = -next() * if i % 2 == 0 { 125.0 } else { 4.0 };
            let y = (0.5 + next()) * exp2i((next() * 6.0) as i32);
            let z = (next() - 0.5) * exp2i((next() * 32.0) as i32 - 10);
            [x, y, if z == 0.0 { 1.0 } else { z }]
        })
        .collect()
}

/// Sums and steps of rows whose rounded product is a middle between two points of the grid, for most of them, at every magnitude.
fn grid_scores() -> Vec<[f32; 3]> {
    let mut next = random();
    (0..TRIED)
        .map(|i| {
            let step = (1.0 + next()) * exp2i((next() * 80.0) as i32 - 60);
            let middle = 2.0 * (next() * exp2i((next() * 23.0) as i32)).floor() + 1.0;
            let score = middle / 128.0 * if i % 2 == 0 { 1.0 } else { -1.0 };
            let a = score / step;
            // Neighbours of the quotient have products that round to the same number, or to the next one.
            [f32::from_bits(a.to_bits() + i as u32 % 3 - 1), step, 0.0]
        })
        .collect()
}

/// What rows' steps multiply, steps, and bases of scores: on the grid, below and above it, of either sign and far beyond. Most sums are near a middle
/// between two points of the grid, many of them so near that every bit of the product counts.
fn based() -> Vec<[f32; 3]> {
    let mut next = random();
    (0..TRIED)
        .map(|i| {
            let kind = i % 6;
            let base = match kind {
                0 | 1 => 131_072.0 + (next() * 8_388_608.0).floor() / 64.0,
                2 => next() * 131_072.0,
                // Just beyond the grid's end: a score on the grid is small, and its rounded product lacks less than the sum's last bits.
                4 => 262_144.0 + (1.0 + next() * 3.0).floor() / 32.0,
                3 => 262_144.0 * (1.0 + next()) * exp2i((next() * 24.0) as i32),
                _ => (-1.0 - next()) * exp2i((next() * 42.0) as i32),
            };
            // Steps of few bits have products that are exact, or nearly.
            let mut step = (1.0 + next()) * exp2i((next() * 80.0) as i32 - 60);
            if i % 3 == 0 {
                step = f32::from_bits(step.to_bits() & !0xF_FFFF);
            }
            let point = match kind {
                4 => 262_143.0 + f64::from((next() * 64.0).floor()) / 64.0,
                _ => 131_000.0 + f64::from((next() * 131_272.0 * 64.0).floor()) / 64.0,
            };
            let a = ((point + 1.0 / 128.0 - f64::from(base)) / f64::from(step)) as f32;
            let near = [0, 1, 1, 2][i / 6 % 4];
            [f32::from_bits(a.to_bits() + near - 1), step, base]
        })
        .collect()
}

/// A row's largest score in a tile, a smaller one and the step that its bits have taken: on the grid, around its ends and far beyond.
fn tile_scores() -> Vec<[f32; 3]> {
    let mut next = random();
    (0..TRIED)
        .map(|i| {
            let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
            let x = sign
                * match i % 8 {
                    0 | 1 => (0.5 + next()) * exp2i((next() * 122.0) as i32),
                    2 | 3 => 65_536.0 + (next() * 512.0 - 256.0).round() / 128.0,
                    4 | 5 => 65_408.0 + (next() * 512.0 - 256.0).round() / 128.0,
                    _ => next() * 65_000.0,
                };
            let below = next() * exp2i((next() * 40.0) as i32 - 8);
            [x, x - below, (next() * 3.0).floor() - 1.0]
        })
        .collect()
}

/// All points of weights.
fn points() -> Vec<[f32; 3]> {
    let lowest = -126 * GRID;
    let all = lowest..=-(grid::WEIGHT_SHIFT as i32) * GRID;
    all.map(|point| [point as f32, 0.0, 0.0]).collect()
}

/// All points of powers of two that weights and scales have.
fn powers() -> Vec<[f32; 3]> {
    let all = -126..=16;
    all.map(|power| [(power * GRID) as f32, 0.0, 0.0]).collect()
}

/// All scales of V.
fn scales() -> Vec<[f32; 3]> {
    let all = 1..=f16::MAX.to_bits();
    all.map(|bits| [f16::from_bits(bits).to_f32(), 0.0, 0.0])
        .collect()
}

/// All points of a largest scaled weight, and those below, with the bits of a step.
fn steps() -> Vec<[f32; 3]> {
    let all = grid::SMALLEST_POINT - GRID..=10 * GRID;
    all.flat_map(|point| [2.0, 3.0].map(|bits| [point as f32, bits, 0.0]))
        .collect()
}

/// For each mantissa of a step and each token, all points of scaled weights, down to those that no threshold shows.
fn bytes() -> Vec<[f32; 3]> {
    let mut all = Vec::new();
    for quarters in 4..=7 {
        let step = quarters as f32 / 4.0 * exp2i(-12);
        let most = ((255.0 * f64::from(step)).log2() * f64::from(GRID)).floor() as i32;
        for point in most - 15 * GRID..=most {
            all.extend((0..64).map(|t| [point as f32, step, t as f32]));
        }
    }
    all
}

pub(crate) async fn check(gpu: &Gpu) -> Result<Vec<ArithmeticCheck>, Error> {
    let text = wgsl::arithmetic_text();
    let pipeline = pipeline::compile(gpu, "check_arithmetic", text)?;
    let inputs: Vec<_> = FUNCTIONS.iter().map(|(_, _, inputs, _)| inputs()).collect();
    let rows: Vec<[f32; 4]> = (0..)
        .zip(&inputs)
        .flat_map(|(f, inputs)| inputs.iter().map(move |&[x, y, z]| [x, y, z, f as f32]))
        .collect();
    let bytes = 4 * rows.len() as u64;
    let write = BufferUsages::COPY_DST;
    let params = gpu.buffer("attn arithmetic", 12, BufferUsages::UNIFORM | write)?;
    let given = gpu.buffer(
        "attn arithmetic inputs",
        4 * bytes,
        BufferUsages::STORAGE | write,
    )?;
    let result = gpu.buffer(
        "attn arithmetic results",
        bytes,
        BufferUsages::STORAGE | BufferUsages::COPY_SRC,
    )?;
    gpu.guarded("checking the arithmetic", || {
        let constants = ArithmeticParams {
            round_up: ROUND,
            round_down: ROUND,
            zero: 0,
        };
        gpu.queue
            .write_buffer(&params, 0, bytemuck::cast_slice(&constants.words()));
        gpu.queue
            .write_buffer(&given, 0, bytemuck::cast_slice(&rows));
        let group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &[&params, &given, &result]
                .into_iter()
                .enumerate()
                .map(|(binding, buffer)| wgpu::BindGroupEntry {
                    binding: binding as u32,
                    resource: buffer.as_entire_binding(),
                })
                .collect::<Vec<_>>(),
        });
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(rows.len().div_ceil(64) as u32, 1, 1);
        }
        gpu.queue.submit([encoder.finish()]);
    })?;
    let parts = [(&result, 0, bytes)];
    let bytes = gpu.read_async("checking the arithmetic", &parts).await?;
    let words: Vec<u32> = bytes
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    Ok(compare(&inputs, &words))
}

/// The GPU's result bits, function by function, beside the CPU's of the same inputs.
fn compare(inputs: &[Vec<[f32; 3]>], mut words: &[u32]) -> Vec<ArithmeticCheck> {
    let mut checks = Vec::new();
    for ((function, relied_on, _, cpu), inputs) in FUNCTIONS.iter().zip(inputs) {
        let (results, rest) = words.split_at(inputs.len());
        words = rest;
        let differing: Vec<_> = inputs
            .iter()
            .zip(results)
            .map(|(&x, &got)| (x, got, cpu(x).to_bits()))
            .filter(|(_, got, want)| got != want)
            .collect();
        checks.push(ArithmeticCheck {
            function,
            relied_on: *relied_on,
            tried: inputs.len(),
            differing: differing.len(),
            first: differing.first().copied(),
        });
    }
    checks
}
