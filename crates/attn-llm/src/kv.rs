//! Where the layers of a model keep K and V, and attend: pages of this library, or plain f32.

mod exact;
mod paged;

pub use exact::ExactKv;
pub use paged::PagedKv;

use attn::Append;

use crate::error::Error;

/// K and V of every layer and sequence, and attention over them.
///
/// A step begins with [`Kv::begin`], which says how many tokens each sequence gets; [`Kv::attend`] follows once for each layer, in order. A step that
/// fails is taken back by [`Kv::cancel`].
pub trait Kv {
    /// Tokens of each sequence, those of the step that has begun included.
    fn lens(&self) -> &[usize];

    /// Begins a step: `appends` names each sequence at most once, in ascending order.
    ///
    /// # Errors
    /// [`Error::Context`] if a sequence has no room for its tokens; those of planning and of [`attn::KvCache::reserve`]. Nothing is changed then.
    fn begin(&mut self, appends: &[Append]) -> Result<(), Error>;

    /// Takes back the step that began last, whichever layers it has reached: sequences are as they were before it.
    ///
    /// # Errors
    /// Those of [`attn::KvCache::cancel_step`] and [`attn::KvCache::truncate`].
    fn cancel(&mut self) -> Result<(), Error>;

    /// Appends `k` and `v` `[tokens, kv heads, head_dim]` to a layer, and attends `q` `[tokens, q heads, head_dim]` into `out`, of q's shape.
    ///
    /// # Errors
    /// Those of [`attn::KvCache::write`] and [`attn::DecodeStep::new`].
    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), Error>;
}

/// What a layer's attention gets of a step: its number, and Q, K and V of the new tokens.
#[derive(Debug, Clone, Copy)]
pub struct NewRows<'a> {
    /// The layer's number, from 0 on.
    pub layer: usize,
    /// `[tokens, q heads, head_dim]`.
    pub q: &'a [f32],
    /// `[tokens, kv heads, head_dim]`.
    pub k: &'a [f32],
    /// Of K's shape.
    pub v: &'a [f32],
}

/// What [`Around`] calls in place of [`Kv::attend`]: with the layer's rows, and the call to make, with keys.
pub type AroundAttend<'a> =
    dyn FnMut(NewRows<'_>, &mut dyn FnMut(&[f32]) -> Result<(), Error>) -> Result<(), Error> + 'a;

/// A cache whose attention goes through a function, which makes the call: to time it, to let it fail, to change keys, or to keep rows.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// use attn_llm::{Around, Error, Kv, NewRows};
///
/// fn timed(kv: &mut dyn Kv, step: impl FnOnce(&mut dyn Kv) -> Result<(), Error>) -> Result<Duration, Error> {
///     let mut attention = Duration::ZERO;
///     let mut around = |rows: NewRows<'_>, attend: &mut dyn FnMut(&[f32]) -> Result<(), Error>| {
///         let start = Instant::now();
///         let done = attend(rows.k);
///         attention += start.elapsed();
///         done
///     };
///     step(&mut Around { kv, around: &mut around })?;
///     Ok(attention)
/// }
/// ```
pub struct Around<'a> {
    /// The cache.
    pub kv: &'a mut dyn Kv,
    /// What its attention goes through.
    pub around: &'a mut AroundAttend<'a>,
}

impl Kv for Around<'_> {
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
        let kv = &mut *self.kv;
        let rows = NewRows { layer, q, k, v };
        (self.around)(rows, &mut |k| kv.attend(layer, q, k, v, out))
    }
}

/// Refuses sequences that would grow beyond `limit`, or that do not exist.
fn check_room(lens: &[usize], appends: &[Append], limit: usize) -> Result<(), Error> {
    for append in appends {
        let Some(len) = lens.get(append.sequence) else {
            return Err(attn::Error::Sequence {
                given: append.sequence,
                count: lens.len(),
            }
            .into());
        };
        let needed = len.saturating_add(append.tokens);
        if needed > limit {
            return Err(Error::Context { needed, limit });
        }
    }
    Ok(())
}
