//! A caller's floating-point modes reach no bit: threads that flush subnormals or round otherwise get the bytes and the outputs of others, and keep their
//! modes.
#![cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]

use std::arch::asm;

use attn_conformance::noise;
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, HeadDim, Heads, KvFormat, KvSource, Problem,
    SpanStates, SpansStep,
};
use attn_cpu::{CpuBackend, Options, Reference};

const HEADS: Heads = Heads {
    q: 4,
    kv: 2,
    dim: HeadDim::same(64),
};

/// Modes in which a thread comes: those that flush subnormals, and those that round towards zero besides.
#[cfg(target_arch = "x86_64")]
const OTHERS: [u64; 2] = [0x1f80 | 0x8040, 0x1f80 | 0x8040 | 0x6000];
#[cfg(target_arch = "aarch64")]
const OTHERS: [u64; 2] = [1 << 24, 1 << 24 | 3 << 22];

#[cfg(target_arch = "x86_64")]
fn modes() -> u64 {
    let mut modes = 0u32;
    // SAFETY: writes the four bytes of `modes`.
    unsafe { asm!("stmxcsr [{}]", in(reg) &mut modes, options(nostack)) };
    // Without the flags of what has happened.
    u64::from(modes & !0x3f)
}

#[cfg(target_arch = "x86_64")]
fn set_modes(modes: u64) {
    let modes = modes as u32;
    // SAFETY: reads the four bytes of `modes`, of which no reserved bit is set. What is computed until the default modes are back is what this file is about.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &modes, options(nostack)) };
}

#[cfg(target_arch = "aarch64")]
fn modes() -> u64 {
    let modes;
    // SAFETY: reads a register that every program may read.
    unsafe { asm!("mrs {}, fpcr", out(reg) modes, options(nostack)) };
    modes
}

#[cfg(target_arch = "aarch64")]
fn set_modes(modes: u64) {
    // SAFETY: bits that the register has. What is computed until the default modes are back is what this file is about.
    unsafe { asm!("msr fpcr, {}", in(reg) modes, options(nostack)) };
}

/// Runs `call` in other modes, as a caller does, and sees that they are there still.
#[inline(never)]
fn in_modes<T>(other: u64, call: impl FnOnce() -> T) -> T {
    let own = modes();
    set_modes(other);
    let result = call();
    let found = modes();
    set_modes(own);
    assert_eq!(found, other, "the caller's modes");
    result
}

/// Numbers down to subnormal ones: K, V and queries whose products and sums are at the edge of f32.
fn noise(seed: usize, count: usize, size: f32) -> Vec<f32> {
    let number = |i: usize| {
        let x = 2.0 * noise::at(seed as u64, i);
        x * size * [1.0, 1e-3, 0.03][i % 3]
    };
    (0..count).map(number).collect()
}

/// Kills second centres that are summed as the calling thread rounds.
#[test]
fn centres_of_k_are_those_of_other_threads() {
    let (backend, row) = (CpuBackend::new(), HEADS.kv * HEADS.dim.k);
    let images = |other: u64| {
        let builder = CacheConfig::builder(KvFormat::INT8, HEADS).sequences(24);
        let mut cache = backend.create_cache(&builder.max_len(64).build()).unwrap();
        for b in 0..24 {
            let [mut k, v] = [0, 1].map(|side| noise(2 * b + side, 64 * row, 1.0));
            // Scales far apart, whose sums are not exact.
            let tokens = k.chunks_exact_mut(row).enumerate();
            tokens.for_each(|(t, k)| k.iter_mut().for_each(|x| *x *= 3f32.powi(t as i32 % 8)));
            in_modes(other, || cache.append(b, &k, &v).unwrap());
        }
        (0..24)
            .flat_map(|b| cache.image(b).unwrap().into_bytes())
            .collect::<Vec<_>>()
    };
    let own = images(modes());
    for other in OTHERS {
        assert!(images(other) == own, "{other:#x}");
    }
}

/// The bytes of a cache, the outputs and log-sum-exps of a step, and those of the same step by spans, all computed on `backend`.
fn results(backend: &dyn DecodeAttention, format: KvFormat, other: Option<u64>) -> [Vec<u8>; 2] {
    let as_called = |call: &mut dyn FnMut()| match other {
        None => call(),
        Some(other) => in_modes(other, call),
    };
    let mut config = CacheConfig::builder(format, HEADS)
        .unit_tensor_scales()
        .sequences(2)
        .max_len(1500)
        .build();
    config.k_tensor_scales.fill(0.02);
    config.v_tensor_scales.fill(1e-15);
    let mut cache = backend.create_cache(&config).unwrap();
    let row = HEADS.kv * HEADS.dim.k;
    let lens = [1300, 70];
    for (b, len) in lens.into_iter().enumerate() {
        // V about the smallest normal number, so that elements, weighted elements and outputs are subnormal.
        let (k, v) = (
            noise(2 * b, len * row, 1.0),
            noise(2 * b + 1, len * row, 1e-36),
        );
        as_called(&mut || cache.append(b, &k, &v).unwrap());
    }
    let mut bytes = Vec::new();
    for b in 0..lens.len() {
        bytes.extend(cache.image(b).unwrap().into_bytes());
    }
    let problem = Problem::new(HEADS, lens)
        .q_lens([2, 20])
        .sinks([0.5, -1.0, 2.0, 0.0]);
    let plan = backend.plan(&problem, format).unwrap();
    let q = noise(9, problem.out_elements(), 1.0);
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; problem.rows()]);
    let mut step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .unwrap();
    as_called(&mut || backend.decode(&mut step).unwrap());
    let spans = SpansStep::new(&plan, &q, KvSource::Cache(&cache)).unwrap();
    let mut states = Vec::new();
    as_called(&mut || states.push(backend.attend_spans(&spans).unwrap()));
    let [_, v_scales] = [&config.k_tensor_scales, &config.v_tensor_scales];
    let (mut merged, mut merged_lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; problem.rows()]);
    // The merge of shards, in attn-core, flushes as the arithmetic does whatever the modes are; it rounds as its thread does.
    let mut finish = || {
        let outputs = (&mut merged[..], &mut merged_lse[..]);
        SpanStates::finish(&states, &problem, format, v_scales, outputs).unwrap();
    };
    match other {
        None => finish(),
        Some(_) => in_modes(OTHERS[0], finish),
    }
    assert!(
        merged
            .iter()
            .zip(&out)
            .all(|(a, b)| a.to_bits() == b.to_bits()),
        "{format}"
    );
    assert!(merged_lse == lse, "{format}");
    let bits = out
        .iter()
        .chain(&lse)
        .flat_map(|x| x.to_bits().to_le_bytes());
    [bytes, bits.collect()]
}

#[test]
fn no_bit_depends_on_the_modes_of_the_callers_thread_or_of_those_it_starts() {
    for format in [
        "bf16",
        "f16",
        "fp8",
        "bf16/int8-plain",
        "int8/bf16",
        "int8",
        "int4",
    ] {
        let format: KvFormat = format.parse().unwrap();
        let want = results(&Reference::new(), format, None);
        for other in OTHERS {
            assert!(
                results(&Reference::new(), format, Some(other)) == want,
                "{format}"
            );
            for threads in [1, 3] {
                // Workers start with the modes of the thread that starts them.
                let options = Options::default().threads(threads);
                let cpu = in_modes(other, || CpuBackend::with_options(&options).unwrap());
                let [bytes, bits] = results(&cpu, format, Some(other));
                assert!(
                    bytes == want[0],
                    "{format}, {threads} threads, {other:x}: bytes"
                );
                assert!(
                    bits == want[1],
                    "{format}, {threads} threads, {other:x}: bits"
                );
                // The same backend in default modes.
                assert!(results(&cpu, format, None) == want, "{format}");
            }
        }
    }
}
