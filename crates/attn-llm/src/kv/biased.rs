//! A cache whose keys get a constant: what a bias of K in slowly turning rotary pairs does to a format. Softmax does not see it, since it changes all scores of a
//! row alike.

use attn::Append;

use super::Kv;
use crate::{config::ModelConfig, error::Error};

/// Rotary pairs that get a part of the constant: the slowest ones.
const PAIRS: usize = 5;

/// A cache behind a constant that is added to every key.
pub struct BiasedKv {
    kv: Box<dyn Kv>,
    /// The constant, `[head_dim]`.
    bias: Vec<f32>,
    /// A step's keys with the constant.
    keys: Vec<f32>,
}

impl BiasedKv {
    /// A constant of this norm in the five slowest rotary pairs of each KV head.
    #[must_use]
    pub fn new(kv: Box<dyn Kv>, model: &ModelConfig, norm: f32) -> Self {
        let dim = model.heads.dim;
        let (pairs, count) = (dim / 2, PAIRS.min(dim / 2));
        let each = norm / ((2 * count) as f32).sqrt();
        let mut bias = vec![0.0; dim];
        for i in pairs - count..pairs {
            let (a, b) = model.rope.style.pair(i, pairs);
            (bias[a], bias[b]) = (each, each);
        }
        let keys = Vec::new();
        BiasedKv { kv, bias, keys }
    }
}

impl Kv for BiasedKv {
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
        self.keys.clear();
        let rows = k.chunks_exact(self.bias.len());
        let biased = rows.flat_map(|row| row.iter().zip(&self.bias).map(|(x, c)| x + c));
        self.keys.extend(biased);
        self.kv.attend(layer, q, &self.keys, v, out)
    }
}
