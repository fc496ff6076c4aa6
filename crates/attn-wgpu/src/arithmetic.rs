//! The scalar functions of `docs/arithmetic.md` on this adapter, compared with the CPU's bits: they decide which claim the adapter can be held to.

use attn_core::{
    Error,
    arithmetic::{
        ROUND, ROUND_WEIGHT, WEIGHT_MAX, exp2_float, exp2_weight, exp2i, ftz, lse, pow2,
        query_step, rcp, softcap, threshold, weight_byte, weight_step, weight_units,
    },
};
use attn_kernels::wgsl::{self, params::ArithmeticParams};
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

type Function = (&'static str, bool, fn([f32; 3]) -> f32);

fn rhe(x: f32) -> f32 {
    x.round_ties_even() + 0.0
}

fn weight(x: f32) -> f32 {
    exp2_weight((-x).min(WEIGHT_MAX))
}

/// The functions in the order of `check_arithmetic.wgsl`.
const FUNCTIONS: [Function; 23] = [
    ("exp2w(-x)", true, |[x, _, _]| weight(x)),
    ("exp2f(x)", true, |[x, _, _]| exp2_float(x)),
    ("rcp(y)", true, |[_, y, _]| rcp(y)),
    ("lse(x, y)", true, |[x, y, _]| lse(x.ceil(), y)),
    ("softcap(x, y, z)", true, |[x, y, z]| softcap(x, y, z)),
    ("x·y + z, product hidden", true, |[x, y, z]| x * y + z),
    ("rhe(x·y), product hidden", true, |[x, y, _]| rhe(x * y)),
    ("f32(i32)", true, |[_, _, z]| z.to_bits() as i32 as f32),
    ("f16 value", true, |[_, _, z]| {
        let h = z.to_bits() & 0x7FFF;
        match h >> 10 {
            0 => h as f32 * exp2i(-24),
            _ => f32::from_bits((h << 13) + 0x3800_0000),
        }
    }),
    ("fold by powers of two", true, |[x, _, z]| {
        ftz(x * exp2i(-20)) + z * exp2i(-3)
    }),
    ("ceil through its key", true, |[x, _, _]| x.ceil()),
    ("pow2(-ceil(x))", true, |[x, _, _]| pow2(-x.ceil())),
    ("p22 of a weight", true, |[x, _, _]| {
        weight_units(weight(x)) as f32
    }),
    ("x·y + z, plain", false, |[x, y, z]| x * y + z),
    ("2 - x·y, plain", false, |[x, y, _]| 2.0 - x * y),
    ("rhe(x·y), plain", false, |[x, y, _]| {
        f32::from_bits((x * y + ROUND).to_bits())
    }),
    ("z·(2 - x·y), plain", false, |[x, y, z]| z * (2.0 - x * y)),
    ("(x + ROUND) - ROUND", true, |[x, _, _]| (x + ROUND) - ROUND),
    ("query's step", true, |[_, y, _]| query_step(y)[0]),
    ("query's inverse", true, |[_, y, _]| query_step(y)[1]),
    ("step of weights, 3 bits", true, |[_, y, _]| {
        weight_step(y, 3)
    }),
    ("step of weights, 2 bits", true, |[_, y, _]| {
        weight_step(y, 2)
    }),
    ("weight of one byte", true, |[x, y, _]| {
        f32::from(weight_byte(-x, 2.0, threshold(y as usize)))
    }),
];

/// Inputs per function.
const TRIED: usize = 16384;

/// The inputs: x in -125..0, y in 0.5..64, z of any sign from 2^-11 to 2^21.
fn inputs() -> Vec<[f32; 3]> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 24) as f32
    };
    (0..TRIED)
        .map(|i| {
            let x = -next() * if i % 2 == 0 { 125.0 } else { 4.0 };
            let y = (0.5 + next()) * exp2i((next() * 6.0) as i32);
            let z = (next() - 0.5) * exp2i((next() * 32.0) as i32 - 10);
            [x, y, if z == 0.0 { 1.0 } else { z }]
        })
        .collect()
}

pub(crate) fn check(gpu: &Gpu) -> Result<Vec<ArithmeticCheck>, Error> {
    let text = wgsl::arithmetic_text();
    let pipeline = pipeline::compile(gpu, "check_arithmetic", text)?;
    let inputs = inputs();
    let rows: Vec<[f32; 4]> = (0..FUNCTIONS.len())
        .flat_map(|f| inputs.iter().map(move |&[x, y, z]| [x, y, z, f as f32]))
        .collect();
    let bytes = 4 * rows.len() as u64;
    let write = BufferUsages::COPY_DST;
    let params = gpu.buffer("attn arithmetic", 20, BufferUsages::UNIFORM | write)?;
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
            weight_up: ROUND_WEIGHT,
            weight_down: ROUND_WEIGHT,
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
    let bytes = gpu.read("checking the arithmetic", &[(&result, 0, bytes)])?;
    let words: Vec<u32> = bytes
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    Ok(compare(&inputs, &words))
}

/// The GPU's result bits, function by function, beside the CPU's of the same inputs.
fn compare(inputs: &[[f32; 3]], words: &[u32]) -> Vec<ArithmeticCheck> {
    FUNCTIONS
        .iter()
        .zip(words.chunks_exact(TRIED))
        .map(|(&(function, relied_on, cpu), words)| {
            let differing: Vec<_> = inputs
                .iter()
                .zip(words)
                .map(|(&x, &got)| (x, got, cpu(x).to_bits()))
                .filter(|(_, got, want)| got != want)
                .collect();
            ArithmeticCheck {
                function,
                relied_on,
                tried: TRIED,
                differing: differing.len(),
                first: differing.first().copied(),
            }
        })
        .collect()
}
