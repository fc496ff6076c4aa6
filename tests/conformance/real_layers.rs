//! What `attn run` decodes: pages and answers are the CPU's, byte for byte and bit for bit.

use attn_conformance::{check::first_difference, trials::Trials};
use attn_core::{DecodeAttention, KvFormat};
use attn_cpu::CpuBackend;

use crate::layers::{decode, layers};

/// Adds the tests of this file.
pub fn add(mut trials: Trials<Box<dyn DecodeAttention>>) -> Trials<Box<dyn DecodeAttention>> {
    for format in ["int8", "int8-g32", "int8/int4-g1", "int4", "int4-g4"] {
        let name = format!("{format}: real layers have the CPU's bits");
        trials = trials.test(name, move |backend| has_the_cpus_bits(&**backend, format));
    }
    trials
}

fn has_the_cpus_bits(backend: &dyn DecodeAttention, format: &str) {
    let format: KvFormat = format.parse().expect("a format's name");
    for layer in layers() {
        let (_, cache, out, lse) = decode(&CpuBackend::new(), format, &layer);
        let (_, theirs, their_out, their_lse) = decode(backend, format, &layer);
        assert!(
            cache.image(0).unwrap() == theirs.image(0).unwrap(),
            "layer {}: pages and centres",
            layer.name
        );
        let found = first_difference("out", &their_out, &out)
            .or_else(|| first_difference("lse", &their_lse, &lse));
        assert_eq!(found, None, "layer {}", layer.name);
    }
}
