//! The specialisation of `append.wgsl`.

use attn_core::KvFormat;

use super::{
    Constants, SpecialiseError,
    constants::{kernel_text, layout_constants, set},
};

/// Everything that chooses constants of the append kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AppendKey {
    /// The schemes of the pages.
    pub format: KvFormat,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Storage buffers that the pool lies in.
    pub pools: usize,
}

impl AppendKey {
    fn constants(&self) -> Constants {
        let mut constants = layout_constants(self.format, self.head_dim, self.page_size);
        let groups = [self.format.k, self.format.v].map(|scheme| scheme.groups(self.head_dim));
        let most = groups[0].max(groups[1]);
        set(&mut constants, &[("AG", most), ("POOLS", self.pools)]);
        constants
    }

    /// The kernel's text.
    ///
    /// # Errors
    /// [`SpecialiseError`] for a mistake in the text.
    pub fn text(&self) -> Result<String, SpecialiseError> {
        kernel_text("append.wgsl", &self.constants())
    }
}
