//! One token in the cache, attended on the best adapter of Vulkan, Metal or DX12; says why where there is none. `cargo run --release --example adapter`

use attn_core::{CacheConfig, DecodeStep, Error, Heads, KvFormat, KvSource, Problem};

fn main() -> Result<(), Error> {
    let backend = match attn_wgpu::open() {
        Ok(backend) => backend,
        Err(reason) => {
            println!("{reason}");
            return Ok(());
        }
    };
    let heads = Heads::new(4, 1, 64);
    let config = CacheConfig::builder(KvFormat::INT8, heads)
        .max_len(64)
        .build();
    let mut cache = backend.create_cache(&config)?;
    cache.append(0, &[0.5; 64], &[2.0; 64])?;
    let plan = backend.plan(&Problem::new(heads, [64]), KvFormat::INT8)?;
    let (q, mut out) = ([1.0; 4 * 64], [0.0; 4 * 64]);
    backend.decode(&mut DecodeStep::new(
        &plan,
        &q,
        KvSource::Cache(&cache),
        &mut out,
    )?)?;
    println!(
        "{}: attention over one token gives its V, {}",
        backend.device().name,
        out[0]
    );
    Ok(())
}
