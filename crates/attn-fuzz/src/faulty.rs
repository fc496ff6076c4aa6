//! Backends that are wrong in one way each, for the tests of the fuzzers themselves.

use std::sync::atomic::{AtomicU32, Ordering};

use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, DeviceInfo, Error, HostPages, HostStore, KvCache,
    KvFormat, KvSource, PageStore, Plan, Problem, TokenWrite, Unsupported, WideRows,
    cache::CacheAccess,
};
use attn_cpu::Reference;

use crate::backends::Backends;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The last output's lowest bit, where there are more than 20 tokens.
    Bit,
    /// Every output is 2 % too large.
    Size,
    /// Every output of the integer arithmetic is 15 % too large.
    IntegerSize,
    /// Residuals are read as 8, the middle of a coarse step.
    Coarse,
    /// The second append to a cache writes one byte more.
    Page,
    /// The second append to a cache writes no residuals.
    Residuals,
}

struct Faulty {
    inner: Reference,
    fault: Fault,
}

impl DecodeAttention for Faulty {
    fn device(&self) -> &DeviceInfo {
        self.inner.device()
    }

    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported> {
        self.inner.supports(problem, format)
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        if !matches!(self.fault, Fault::Page | Fault::Residuals) {
            return self.inner.create_cache(config);
        }
        let pages = HostPages::new(config)?;
        KvCache::new(
            config.clone(),
            Box::new(FaultyPages {
                pages,
                fault: self.fault,
                calls: AtomicU32::new(0),
            }),
        )
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        self.inner.plan(problem, format)
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        if self.fault == Fault::Coarse {
            return without_residuals(&self.inner, step);
        }
        self.inner.execute(step)?;
        let is_integer = step.plan().format().is_integer();
        let long = step.problem().kv_lens.iter().any(|len| *len > 20);
        let out = step.parts().1.out.into_contiguous();
        let out = out.expect("its tests give contiguous rows");
        match self.fault {
            Fault::Bit if long => {
                if let Some(x) = out.last_mut() {
                    *x = f32::from_bits(x.to_bits() ^ 1);
                }
            }
            Fault::Size => out.iter_mut().for_each(|x| *x *= 1.02),
            Fault::IntegerSize if is_integer => out.iter_mut().for_each(|x| *x *= 1.15),
            _ => {}
        }
        Ok(())
    }
}

/// Decodes a copy of the step's cache whose residuals are all 8.
fn without_residuals(backend: &Reference, step: &mut DecodeStep<'_>) -> Result<(), Error> {
    let (inputs, outputs) = step.parts();
    let KvSource::Cache(cache) = inputs.kv() else {
        return backend.execute(step);
    };
    let mut config = cache.config().clone();
    let lens = &cache.table().lens;
    config.num_pages = lens.iter().map(|len| config.pages_for(*len)).sum();
    let mut copy = backend.create_cache(&config)?;
    for (sequence, &len) in lens.iter().enumerate() {
        let mut pages = cache.read_back(sequence)?;
        let home = len.div_ceil(config.page_size);
        pages[home..].iter_mut().for_each(|page| page.fill(0x88));
        copy.restore_pages(sequence, len, &pages)?;
    }
    let kv = KvSource::Cache(&copy);
    let mut step = DecodeStep::new(inputs.plan(), inputs.q(), kv, outputs.out)?;
    if let Some(lse) = outputs.lse {
        step = step.with_lse(lse)?;
    }
    backend.execute(&mut step)
}

struct FaultyPages {
    pages: HostPages,
    fault: Fault,
    calls: AtomicU32,
}

impl HostStore for FaultyPages {
    fn pages(&self) -> &HostPages {
        &self.pages
    }

    fn pages_mut(&mut self) -> &mut HostPages {
        &mut self.pages
    }

    fn append(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        let is_second = self.calls.fetch_add(1, Ordering::Relaxed) == 1;
        let mut writes = writes.to_vec();
        if is_second && self.fault == Fault::Residuals {
            writes.iter_mut().for_each(|w| w.residual_page = None);
        }
        self.pages.append(access, layer, &writes, k, v)?;
        if is_second && self.fault == Fault::Page {
            let mut page = self.pages.read_page(access, layer, writes[0].page)?;
            page[0] ^= 1;
            self.pages
                .write_page(access, layer, writes[0].page, &page)?;
        }
        Ok(())
    }
}

fn backends(reference: Fault, other: Fault) -> Backends {
    let of = |fault| -> Box<dyn DecodeAttention> {
        Box::new(Faulty {
            inner: Reference::new(),
            fault,
        })
    };
    Backends {
        reference: of(reference),
        others: vec![("faulty".to_owned(), of(other))],
    }
}

/// The one that is compared with the reference flips a bit.
pub fn one_wrong_bit() -> Backends {
    backends(Fault::None, Fault::Bit)
}

/// Both are wrong alike.
pub fn all_wrong() -> Backends {
    backends(Fault::Size, Fault::Size)
}

/// Both are wrong alike where K and V are integers.
pub fn integers_wrong() -> Backends {
    backends(Fault::IntegerSize, Fault::IntegerSize)
}

/// Both read a cache without its residuals.
pub fn all_coarse() -> Backends {
    backends(Fault::Coarse, Fault::Coarse)
}

/// The second append to a cache writes no residuals.
pub fn lost_residuals() -> Backends {
    backends(Fault::Residuals, Fault::None)
}

/// The second append to a cache leaves another bit.
pub fn wrong_pages() -> Backends {
    backends(Fault::Page, Fault::None)
}
