//! What changes scores.

use attn::{Arithmetic, Problem};

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
    /// ALiBi: a slope for each query head, or NULL.
    pub alibi_slopes: *const f32,
    /// Attention sinks: a logit for each query head that takes part in the softmax and has no value, or NULL.
    pub sinks: *const f32,
    /// ATTN_NOT_CAUSAL and ATTN_FAST, or 0.
    pub flags: u32,
}

impl Modifiers {
    /// The problem with these modifiers.
    ///
    /// # Safety
    /// The lists are NULL or have a number for each of the problem's query heads.
    pub(crate) unsafe fn of(&self, problem: Problem) -> Result<Problem, Failure> {
        if self.flags & !(ATTN_NOT_CAUSAL | ATTN_FAST) != 0 {
            let sentence = format!(
                "flags is {:#x}; allowed: 0, ATTN_NOT_CAUSAL, ATTN_FAST",
                self.flags
            );
            return Err(Failure::new(Status::Parameter, sentence));
        }
        let heads = problem.num_q_heads;
        let mut problem = problem.causal(self.flags & ATTN_NOT_CAUSAL == 0);
        if self.flags & ATTN_FAST != 0 {
            problem = problem.arithmetic(Arithmetic::Fast);
        }
        if self.scale != 0.0 {
            problem = problem.softmax_scale(self.scale);
        }
        if self.softcap != 0.0 {
            problem = problem.softcap(self.softcap);
        }
        problem.window_left = self.window.checked_sub(1);
        // SAFETY: this function's contract.
        unsafe {
            problem.alibi_slopes =
                optional("alibi_slopes", self.alibi_slopes, heads)?.map(<[f32]>::to_vec);
            problem.sinks = optional("sinks", self.sinks, heads)?.map(<[f32]>::to_vec);
        }
        Ok(problem)
    }
}
