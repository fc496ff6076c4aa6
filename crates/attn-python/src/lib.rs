//! The extension module `attn._attn`: what the Python package `attn` is built on. `python/attn` documents the interface.
//!
//! It links neither torch nor CUDA: arrays come as DLPack capsules, streams as integers, and the driver is loaded where there is one.

#[cfg(feature = "cuda")]
mod arrays;
mod cache;
mod dlpack;
mod engine;
mod errors;
#[cfg(feature = "cuda")]
mod gpu;
mod host_pages;
mod image;
mod modifiers;
#[cfg(feature = "cuda")]
mod native;
#[cfg(feature = "cuda")]
mod rotary;
#[cfg(feature = "cuda")]
mod transfer;

use attn::BackendId;
use pyo3::prelude::*;

/// Each backend: its name, its device, what is known of it, and why it cannot be used where it cannot.
#[pyfunction]
fn devices(py: Python<'_>) -> Vec<(String, Option<String>, String, Option<String>)> {
    let describe = |id: BackendId| match py.detach(|| engine::open(id.into())) {
        Ok(device) => {
            let info = device.backend().device();
            (
                id.to_string(),
                Some(info.name.clone()),
                info.detail.clone(),
                None,
            )
        }
        Err(error) => (
            id.to_string(),
            None,
            String::new(),
            Some(error.value(py).to_string()),
        ),
    };
    BackendId::ALL.into_iter().map(describe).collect()
}

/// The version of the library.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

#[pymodule]
fn _attn(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::stand_beside(module)?;
    module.add("HEAD_DIMS", attn::HEAD_DIMS)?;
    module.add_class::<cache::Cache>()?;
    module.add_class::<host_pages::HostPages>()?;
    #[cfg(feature = "cuda")]
    module.add_class::<native::Plan>()?;
    #[cfg(feature = "cuda")]
    module.add_class::<transfer::Transfer>()?;
    #[cfg(feature = "cuda")]
    module.add_class::<transfer::MergeSpans>()?;
    module.add_function(wrap_pyfunction!(cache::merge_spans, module)?)?;
    module.add_function(wrap_pyfunction!(devices, module)?)?;
    module.add_function(wrap_pyfunction!(image::image_header, module)?)?;
    module.add_function(wrap_pyfunction!(image::page_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(version, module)?)
}
