//! The one conformance suite: what every backend of `attn` is held to, third parties' included.
//!
//! [`check_backend`] compares a backend with the reference: cache bytes equal, integer decode equal to the bit,
//! float decode within a bound of an f64 oracle and the same bits twice.
#![forbid(unsafe_code)]

pub mod case;
pub mod check;
#[cfg(feature = "trials")]
pub mod events;
pub mod fake;
pub mod noise;
pub mod oracle;
pub mod random;
pub mod table;
#[cfg(feature = "trials")]
pub mod trials;

pub use case::{Build, Case, Inputs};
pub use check::{Outcome, Report, cases_from_env, check_backend, check_case, check_table};
pub use table::{Size, table};
