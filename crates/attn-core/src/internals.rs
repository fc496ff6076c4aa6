//! Functions for the project's own tests; not for other users, and they may change in any release.

use crate::{cache::KvCache, error::Error};

/// Puts a cache's free pages in the given order of allocation, so that tests can place pages at will.
///
/// # Errors
/// [`Error::Parameter`] if `order` is not a permutation of the free pages.
pub fn order_free_pages(cache: &mut KvCache, order: &[u32]) -> Result<(), Error> {
    cache.order_free_pages(order)
}
