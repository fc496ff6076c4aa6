//! What changes scores.

use attn::{Arithmetic, ScoreModifiers};

use crate::{
    arguments::optional,
    status::{Failure, Status},
};

/// A flag of attn_modifiers: query tokens see all cached tokens, also those behind them.
pub const ATTN_NOT_CAUSAL: u32 = 1;

/// A flag of attn_modifiers: steps of an integer format in which some sequence has more than 16 query tokens may be computed by floats, which is faster on
/// a GPU with tensor cores. The answer is as near to attention over the same cache, but no bits are promised.
pub const ATTN_FAST: u32 = 2;

/// What changes scores. All zero: causal, with the factor 1/sqrt(head_dim), and nothing else.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Modifiers {
    /// Factor of q·k; 0: 1/sqrt(head_dim).
    pub scale: f32,
    /// Soft cap: scaled scores become softcap·tanh(score/softcap); 0: none.
    pub softcap: f32,
    /// Tokens that a query token sees at most, its own included; 0: all.
    pub window: usize,
    /// Tokens of a chunk, of which a query token sees its own alone; 0: none.
    pub chunk: usize,
    /// ALiBi: a slope for each query head, or NULL.
    pub alibi_slopes: *const f32,
    /// Attention sinks: a logit for each query head that takes part in the softmax and has no value, or NULL.
    pub sinks: *const f32,
    /// ATTN_NOT_CAUSAL and ATTN_FAST, or 0.
    pub flags: u32,
}

impl Modifiers {
    /// The library's modifiers, for so many query heads.
    ///
    /// # Safety
    /// The lists are NULL or have a number for each query head.
    pub(crate) unsafe fn scores(&self, q_heads: usize) -> Result<ScoreModifiers, Failure> {
        if self.flags & !(ATTN_NOT_CAUSAL | ATTN_FAST) != 0 {
            let sentence = format!(
                "flags is {:#x}; allowed: 0, ATTN_NOT_CAUSAL, ATTN_FAST",
                self.flags
            );
            return Err(Failure::new(Status::Parameter, sentence));
        }
        let given = |number: f32| Some(number).filter(|number| *number != 0.0);
        // SAFETY: this function's contract.
        let [slopes, sinks] = unsafe {
            [
                optional("alibi_slopes", self.alibi_slopes, q_heads)?,
                optional("sinks", self.sinks, q_heads)?,
            ]
        };
        Ok(ScoreModifiers {
            softmax_scale: given(self.scale),
            causal: self.flags & ATTN_NOT_CAUSAL == 0,
            softcap: given(self.softcap),
            window_left: self.window.checked_sub(1),
            chunk: (self.chunk > 0).then_some(self.chunk),
            alibi_slopes: slopes.map(<[f32]>::to_vec),
            sinks: sinks.map(<[f32]>::to_vec),
            arithmetic: match self.flags & ATTN_FAST {
                0 => Arithmetic::Exact,
                _ => Arithmetic::Fast,
            },
        })
    }
}
