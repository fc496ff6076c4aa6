//! Q, K and V of a model's layers over a text, as attention gets them: behind the rotary positions.

use attn::Append;

use crate::{
    error::Error,
    kv::{ExactKv, Kv},
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

/// A cache that keeps what it is given.
struct Kept {
    kv: ExactKv,
    layers: Vec<LayerRows>,
}

impl Kv for Kept {
    fn lens(&self) -> &[usize] {
        self.kv.lens()
    }

    fn begin(&mut self, appends: &[Append]) -> Result<(), Error> {
        self.kv.begin(appends)
    }

    fn cancel(&mut self) -> Result<(), Error> {
        self.kv.cancel()
    }

    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), Error> {
        for kept in self.layers.iter_mut().filter(|kept| kept.layer == layer) {
            kept.q.extend_from_slice(q);
            kept.k.extend_from_slice(k);
            kept.v.extend_from_slice(v);
        }
        self.kv.attend(layer, q, k, v, out)
    }
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
    let mut kept = Kept {
        kv: ExactKv::new(model.config(), 1, tokens.len()),
        layers: layers.iter().map(empty).collect(),
    };
    for tokens in tokens.chunks(chunk) {
        let piece = Piece {
            sequence: 0,
            tokens,
        };
        model.forward(&[piece], &mut kept, Wanted::Last)?;
        progress(kept.kv.lens()[0]);
    }
    Ok(kept.layers)
}
