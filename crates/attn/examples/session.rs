//! A cache on the best device here, a prompt, and decode steps behind it: what an engine does for each layer. `cargo run --release --example session`

use attn::{
    Append, Attend, AttendRows, CacheConfig, Device, Error, HeadDim, Heads, KvFormat, Session,
};

const HEADS: Heads = Heads {
    q: 32,
    kv: 8,
    dim: HeadDim::same(128),
};

/// Stands for what a model's projections give: numbers in −1..1.
fn rows(seed: usize, tokens: usize, heads: usize) -> Vec<f32> {
    (0..tokens * heads * HEADS.dim.k)
        .map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0)
        .collect()
}

fn main() -> Result<(), Error> {
    let device = Device::best()?;
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .max_len(1024)
        .build();
    let mut session = Session::new(device.into(), &config)?;
    for (step, tokens) in [100, 1, 1, 1].into_iter().enumerate() {
        let [k, v] = [1, 2].map(|seed| rows(seed + step, tokens, HEADS.kv));
        session.append(
            &[Append {
                sequence: 0,
                tokens,
            }],
            &k,
            &v,
        )?;
        let q = rows(step, tokens, HEADS.q);
        let mut out = vec![0.0; q.len()];
        let at = Attend {
            q_lens: Some(&[tokens]),
            ..Attend::new(HEADS.q, &[0])
        };
        session.attend(&at, AttendRows::new(&q, &mut out))?;
        println!("{tokens} new tokens; the first output is {}", out[0]);
    }
    Ok(())
}
