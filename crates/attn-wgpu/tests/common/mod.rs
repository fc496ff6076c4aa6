//! What the tests on an adapter share.

use attn_wgpu::WgpuBackend;

/// The backend, or `None` where no adapter is, which is printed, and fails under `ATTN_REQUIRE=wgpu`.
pub fn open_or_skip() -> Option<WgpuBackend> {
    match WgpuBackend::open() {
        Ok(backend) => Some(backend),
        Err(reason) => {
            let required = std::env::var("ATTN_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|name| name == "wgpu"), "{reason}");
            println!("skipped: {reason}");
            None
        }
    }
}
