//! The specialisation of `append.wgsl` and `centre.wgsl`.

use attn_core::{HeadDim, KvFormat};

use super::{
    Constants, SpecialiseError,
    constants::{kernel_text, layout_constants, set},
};

/// Everything that chooses constants of the kernels that write a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AppendKey {
    /// The schemes of the pages.
    pub format: KvFormat,
    /// Elements per head.
    pub head_dim: HeadDim,
    /// Tokens per page.
    pub page_size: usize,
    /// Storage buffers that the pool lies in.
    pub pools: usize,
    /// Whether K has centres.
    pub centres: bool,
}

impl AppendKey {
    fn constants(&self) -> Constants {
        let mut constants = layout_constants(self.format, self.head_dim, self.page_size);
        let [k, v] = self.format.groups(self.head_dim);
        let most = k.count().max(v.count());
        let own = [
            ("AG", most),
            ("POOLS", self.pools),
            ("CENTRES", usize::from(self.centres)),
        ];
        set(&mut constants, &own);
        constants
    }

    /// The text of `append.wgsl`, or of `centre.wgsl` for a cache with centres.
    ///
    /// # Errors
    /// [`SpecialiseError`] for a mistake in the text.
    pub fn text(&self, file: &str) -> Result<String, SpecialiseError> {
        kernel_text(file, &self.constants())
    }
}
