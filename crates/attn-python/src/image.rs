//! What the bytes of a sequence's image say, and the bytes of pages.

use attn::{KvFormat, PageLayout, SequenceImage};
use pyo3::{prelude::*, types::PyBytes};

use crate::errors;

/// The header of an image, attribute by attribute of Python's `attn.SequenceImage`.
#[derive(IntoPyObject)]
pub struct ImageHeader {
    format: String,
    heads: usize,
    dim: usize,
    v_dim: usize,
    page_size: usize,
    layers: usize,
    tokens: usize,
    k_scales: Vec<f32>,
    v_scales: Vec<f32>,
    page_bytes: usize,
    /// Bytes of the image ahead of the pages.
    header_bytes: usize,
    /// Bytes of the pages, but for the residual pages at checkpoints behind them.
    pages_bytes: usize,
    /// Bytes of the centres of K behind the pages; 0 for the image of a cache without.
    centres_bytes: usize,
}

/// Reads an image's header; refuses damaged bytes, by their checksum.
#[pyfunction]
pub fn image_header(py: Python<'_>, image: &Bound<'_, PyBytes>) -> PyResult<ImageHeader> {
    let bytes = image.as_bytes();
    let image = py.detach(|| SequenceImage::from_bytes(bytes));
    let image = image.map_err(errors::of)?;
    let layout = image.layout();
    let [k_scales, v_scales] = image.tensor_scales().map(<[f32]>::to_vec);
    Ok(ImageHeader {
        format: layout.format().to_string(),
        heads: layout.num_kv_heads(),
        dim: layout.head_dim().k,
        v_dim: layout.head_dim().v,
        page_size: layout.page_size(),
        layers: image.layers(),
        tokens: image.tokens(),
        k_scales,
        v_scales,
        page_bytes: layout.page_bytes(),
        header_bytes: bytes.len()
            - image.pages().len()
            - image.checkpoint_pages().len()
            - image.centres().len(),
        pages_bytes: image.pages().len(),
        centres_bytes: image.centres().len(),
    })
}

/// Bytes of a page of a layer: K, V and their scales, of all KV heads.
#[pyfunction]
pub fn page_bytes(
    format: &str,
    heads: usize,
    head_dim: (usize, usize),
    page_size: usize,
) -> PyResult<usize> {
    let format: KvFormat = format.parse().map_err(errors::of)?;
    let layout = PageLayout::new(format, head_dim, page_size, heads).map_err(errors::of)?;
    Ok(layout.page_bytes())
}
