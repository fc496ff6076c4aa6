//! Where rows in a caller's host memory lie.

use std::ffi::c_void;

use attn::RowsMut;

use crate::{
    arguments::{self, elements_mut},
    status::{Failure, Status},
};

/// Where a caller's rows `[tokens][heads][dim]` lie, with its strides of tokens and heads in elements; 0 is that of rows side by side.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    shape: [usize; 3],
    strides: [usize; 2],
}

impl Place {
    pub fn new(what: &str, shape: [usize; 3], [token, head]: [usize; 2]) -> Result<Self, Failure> {
        let [_, heads, dim] = shape;
        let refused = |sentence| Err(Failure::new(Status::Shape, sentence));
        let head = if head == 0 { dim } else { head };
        if head < dim {
            return refused(format!(
                "{what}_head_stride is {head}; a head has {dim} elements"
            ));
        }
        let packed = heads.saturating_mul(head);
        let token = if token == 0 { packed } else { token };
        if head == dim && token < packed {
            return refused(format!(
                "{what}_token_stride is {token}; a token has {packed} elements"
            ));
        }
        Ok(Place {
            shape,
            strides: [token, head],
        })
    }

    /// Elements up to the last row's end, saturating.
    fn reach(&self) -> usize {
        let ([tokens, heads, dim], [token, head]) = (self.shape, self.strides);
        if self.shape.contains(&0) {
            return 0;
        }
        let last = (tokens - 1).saturating_mul(token);
        last.saturating_add((heads - 1).saturating_mul(head))
            .saturating_add(dim)
    }

    /// # Safety
    /// `pointer` is NULL or has the rows and what lies between them, of the type that `dtype` says.
    pub unsafe fn rows<'a>(
        self,
        what: &str,
        dtype: u32,
        pointer: *const c_void,
    ) -> Result<attn::Rows<'a>, Failure> {
        // SAFETY: this function's contract.
        let all = unsafe { arguments::elements(what, dtype, pointer, self.reach()) }?;
        Ok(attn::Rows::strided(all, self.shape, self.strides)?)
    }

    /// # Safety
    /// Rows as [`Place::rows`] gives them, of memory that nothing else uses meanwhile.
    pub unsafe fn rows_mut<'a>(
        self,
        what: &str,
        dtype: u32,
        pointer: *mut c_void,
    ) -> Result<RowsMut<'a>, Failure> {
        // SAFETY: this function's contract.
        let all = unsafe { elements_mut(what, dtype, pointer, self.reach()) }?;
        Ok(RowsMut::strided(all, self.shape, self.strides)?)
    }
}

/// Whether two callers' arrays, each with what lies between its rows, share a byte.
pub(crate) fn share(
    a: (*const c_void, Place),
    b: (*const c_void, Place),
    dtype: u32,
) -> Result<bool, Failure> {
    let bytes = arguments::dtype(dtype)?.bytes();
    let span = |(pointer, place): (*const c_void, Place)| {
        let start = pointer as usize;
        (
            start,
            start.saturating_add(place.reach().saturating_mul(bytes)),
        )
    };
    let ((a, a_end), (b, b_end)) = (span(a), span(b));
    Ok(a < b_end && b < a_end)
}
