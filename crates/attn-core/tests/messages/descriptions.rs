//! Formats, problems and caches that cannot be.

use attn_core::{BackendId, CacheConfig, KvFormat, Problem, Scheme};

use crate::calls::*;

pub fn parsed() -> Vec<Refusal> {
    let format = |name: &str| name.parse::<KvFormat>().unwrap_err();
    vec![
        ("a format with a space behind it", format("int8 ")),
        ("a format whose V has no such scheme", format("int8/int3")),
        (
            "a format with a control character",
            format("\u{1b}[31mint8"),
        ),
        ("a format as long as a file", format(&"int8".repeat(1000))),
        ("a scheme", "INT8".parse::<Scheme>().unwrap_err()),
        ("a backend", "gpu".parse::<BackendId>().unwrap_err()),
    ]
}

pub fn problems() -> Vec<Refusal> {
    let with = |change: fn(&mut Problem)| {
        let mut problem = problem(&[5, 3]);
        change(&mut problem);
        problem.check().unwrap_err()
    };
    vec![
        ("a head_dim of 72", with(|p| p.head_dim = 72.into())),
        (
            "3 query heads of 2 KV heads",
            with(|p| (p.num_q_heads, p.num_kv_heads) = (3, 2)),
        ),
        (
            "129 query heads of a KV head",
            with(|p| p.num_q_heads = 129),
        ),
        (
            "2^17 KV heads",
            with(|p| (p.num_q_heads, p.num_kv_heads) = (1 << 17, 1 << 17)),
        ),
        (
            "a sequence of more than 2^20 tokens",
            with(|p| p.kv_lens[0] = (1 << 20) + 1),
        ),
        ("2^40 query tokens", with(|p| p.q_lens = vec![1 << 40; 2])),
        (
            "query tokens of 3 sequences for 2",
            with(|p| p.q_lens = vec![1; 3]),
        ),
        (
            "part of a span ahead of the cached tokens",
            with(|p| p.tokens_before = vec![0, 100]),
        ),
        (
            "more tokens ahead than a sequence has",
            with(|p| p.tokens_before = vec![0, 1 << 20]),
        ),
        (
            "more tokens that follow than a sequence has",
            with(|p| p.tokens_after = vec![0, 1 << 20]),
        ),
        (
            "a softmax scale of 1e30",
            with(|p| p.scores.softmax_scale = Some(1e30)),
        ),
        ("a soft cap of 0", with(|p| p.scores.softcap = Some(0.0))),
        (
            "a slope of infinity",
            with(|p| p.scores.alibi_slopes = Some(vec![0.5, f32::INFINITY])),
        ),
        (
            "a sink of NaN",
            with(|p| p.scores.sinks = Some(vec![f32::NAN, 0.0])),
        ),
        (
            "a slope for each KV head",
            with(|p| p.scores.alibi_slopes = Some(vec![0.5])),
        ),
        (
            "a shard that ends inside a span",
            problem(&[100])
                .tokens_after([5])
                .check_shards()
                .unwrap_err(),
        ),
    ]
}

pub fn configs() -> Vec<Refusal> {
    let with = |format: &str, change: fn(&mut CacheConfig)| {
        let mut config = config(format);
        change(&mut config);
        config.check().unwrap_err()
    };
    vec![
        ("pages of 48 tokens", with("int8", |c| c.page_size = 48)),
        (
            "checkpoints at every 100 tokens",
            with("int4", |c| c.checkpoints = 100),
        ),
        ("no KV head", with("int8", |c| c.num_kv_heads = 0)),
        ("2^40 pages", with("int8", |c| c.num_pages = 1 << 40)),
        (
            "2^25 sequences",
            with("int8", |c| c.num_sequences = 1 << 25),
        ),
        ("no layer", with("int8", |c| c.layers = 0)),
        (
            "pages that no kernel addresses",
            with("f16", |c| {
                (c.num_kv_heads, c.head_dim.k, c.page_size) = (65536, 256, 128)
            }),
        ),
        (
            "a pool of more than all memory",
            with("f16", |c| {
                (c.num_q_heads, c.num_kv_heads) = (65536, 65536);
                (c.layers, c.num_pages) = (1024, u32::MAX as usize);
            }),
        ),
        (
            "int8-g32 with a head_dim of 80",
            with("int8-g32", |c| c.head_dim = 80.into()),
        ),
        ("int4-g8 with a head_dim of 64", with("int4-g8", |_| ())),
        (
            "a format of static scales, and none given",
            with("fp8", |c| c.k_tensor_scales.clear()),
        ),
        (
            "the same of int8-tensor for V, in 32 layers",
            with("int8/int8-tensor", |c| {
                (c.layers, c.v_tensor_scales) = (32, Vec::new());
            }),
        ),
        (
            "static scales of two heads, and one KV head",
            with("fp8", |c| c.v_tensor_scales = vec![0.5; 2]),
        ),
        (
            "static scales for a format that has none",
            with("int8", |c| c.k_tensor_scales = vec![0.5]),
        ),
        (
            "a static scale of 0",
            with("fp8", |c| c.v_tensor_scales[0] = 0.0),
        ),
    ]
}
