//! A cache whose store does a part of a call, and fails.

use attn_core::{
    CacheAccess, CacheConfig, Error, HostPages, HostStore, KvCache, PageStore, TokenWrite, WideRows,
};

/// What a store is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// To append tokens.
    Tokens,
    /// To write whole pages.
    Pages,
}

/// How many of a call's tokens or pages are written before it fails; as many as it has: it does not.
type Allows = Box<dyn Fn(Call, usize) -> usize + Send + Sync>;

/// Pages in host memory, as far as `allows` has it.
struct Limited {
    inner: HostPages,
    allows: Allows,
}

/// A cache of which each call does what `allows` says.
pub fn limited(
    config: CacheConfig,
    allows: impl Fn(Call, usize) -> usize + Send + Sync + 'static,
) -> KvCache {
    let store = Limited {
        inner: HostPages::new(&config).unwrap(),
        allows: Box::new(allows),
    };
    KvCache::new(config, Box::new(store)).unwrap()
}

/// The error of a device that fails on demand.
pub fn failure(doing: &'static str) -> Error {
    Error::Device {
        backend: "test",
        doing,
        source: "as asked".into(),
    }
}

impl HostStore for Limited {
    fn pages(&self) -> &HostPages {
        &self.inner
    }

    fn pages_mut(&mut self) -> &mut HostPages {
        &mut self.inner
    }

    fn append(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        let allowed = (self.allows)(Call::Tokens, writes.len()).min(writes.len());
        let done = &writes[..allowed];
        self.inner.append(access, layer, done, k, v)?;
        match allowed < writes.len() {
            true => Err(failure("writing tokens")),
            false => Ok(()),
        }
    }

    fn write_pages(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        pages: &[u32],
        bytes: &[u8],
    ) -> Result<(), Error> {
        let allowed = (self.allows)(Call::Pages, pages.len()).min(pages.len());
        let size = self.inner.layout().page_bytes();
        let (done, bytes) = (&pages[..allowed], &bytes[..allowed * size]);
        self.inner.write_pages(access, layer, done, bytes)?;
        match allowed < pages.len() {
            true => Err(failure("writing pages")),
            false => Ok(()),
        }
    }
}
