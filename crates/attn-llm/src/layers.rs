//! Q, K and V of a model's layers over a text, as attention gets them: behind the rotary positions.

use crate::{
    error::Error,
    kv::{Around, ExactKv, Kv, NewRows},
    model::{Model, Piece, Wanted},
};

/// What one layer's attention got for a text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LayerRows {
    /// The layer's number, from 0 on.
    pub layer: usize,
    /// `[tokens, q heads, head_dim]`.
    pub q: Vec<f32>,
    /// `[tokens, kv heads, head_dim]`.
    pub k: Vec<f32>,
    /// Of K's shape.
    pub v: Vec<f32>,
}

/// Q, K and V of the named layers over a text, in the order of `layers`. Attention runs in plain f32.
///
/// # Errors
/// [`Error::Request`] for a layer that the model lacks, one that is named twice, no layer, no token, and chunks of none; those of [`Model::forward`].
pub fn rows(
    model: &Model,
    tokens: &[u32],
    layers: &[usize],
    chunk: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<LayerRows>, Error> {
    let number = model.config().windows.len();
    let is_wrong = |(i, layer): (usize, &usize)| *layer >= number || layers[..i].contains(layer);
    if layers.is_empty() || layers.iter().enumerate().any(is_wrong) {
        return Err(Error::Request {
            what: "the list of layers",
            given: format!("{layers:?}"),
            allowed: format!("one or more of 0 to {}, each once", number - 1),
        });
    }
    if tokens.is_empty() || chunk == 0 {
        return Err(Error::Request {
            what: "the text",
            given: format!("{} tokens, in chunks of {chunk}", tokens.len()),
            allowed: "one token or more, chunks of one or more".to_owned(),
        });
    }
    let empty = |&layer: &usize| LayerRows {
        layer,
        q: Vec::new(),
        k: Vec::new(),
        v: Vec::new(),
    };
    let mut kept: Vec<LayerRows> = layers.iter().map(empty).collect();
    let mut keep = |rows: NewRows<'_>, attend: &mut dyn FnMut(&[f32]) -> Result<(), Error>| {
        for kept in kept.iter_mut().filter(|kept| kept.layer == rows.layer) {
            kept.q.extend_from_slice(rows.q);
            kept.k.extend_from_slice(rows.k);
            kept.v.extend_from_slice(rows.v);
        }
        attend(rows.k)
    };
    let mut kv = Around {
        kv: &mut ExactKv::new(model.config(), 1, tokens.len()),
        around: &mut keep,
    };
    for tokens in tokens.chunks(chunk) {
        let piece = Piece {
            sequence: 0,
            tokens,
        };
        model.forward(&[piece], &mut kv, Wanted::Last)?;
        progress(kv.lens()[0]);
    }
    Ok(kept)
}
