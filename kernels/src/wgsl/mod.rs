//! The host's side of `kernels/wgsl`: which constants a problem specialises a kernel with, and the parameter blocks.
//!
//! Reading order: [`specialise`](mod@specialise) (the preprocessor), [`constants`], [`params`], [`split`], [`decode`], [`append`].

pub mod append;
pub mod constants;
pub mod decode;
pub mod params;
pub mod specialise;
pub mod split;

pub use constants::kernel_text;
pub use specialise::{Constants, SpecialiseError, specialise};

/// The text of `read.wgsl`, the kernel that only reads.
///
/// # Errors
/// [`SpecialiseError`] for a mistake in the text.
pub fn read_text() -> Result<String, SpecialiseError> {
    kernel_text("read.wgsl", &Constants::new())
}

/// The text of `products.wgsl`, the kernel that only multiplies.
///
/// # Errors
/// [`SpecialiseError`] for a mistake in the text.
pub fn products_text() -> Result<String, SpecialiseError> {
    kernel_text("products.wgsl", &Constants::new())
}

/// The text of `check_arithmetic.wgsl`, the kernel that evaluates the functions of `arithmetic.wgsl`.
///
/// # Errors
/// [`SpecialiseError`] for a mistake in the text.
pub fn arithmetic_text() -> Result<String, SpecialiseError> {
    kernel_text("check_arithmetic.wgsl", &Constants::new())
}
