//! What a token costs in each format: bytes of K and V beside those of bf16, for 8 KV heads of 128 dims. `cargo run --example bytes`

use attn_core::{CacheConfig, Error, Heads, KvFormat};

fn main() -> Result<(), Error> {
    let heads = Heads::new(32, 8, 128);
    let bytes = |format: KvFormat| -> Result<f64, Error> {
        let config = CacheConfig::builder(format, heads)
            .unit_tensor_scales()
            .build();
        Ok(config.layout()?.bytes_per_token() * heads.kv as f64)
    };
    let plain = bytes("bf16".parse()?)?;
    for name in ["bf16", "fp8", "int8", "int8/int4", "int4"] {
        let each = bytes(name.parse()?)?;
        println!(
            "{name:10} {each:6.0} bytes a token, {:3.0} %",
            100.0 * each / plain
        );
    }
    Ok(())
}
