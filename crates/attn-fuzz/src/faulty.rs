//! Backends that are wrong in one way each, for the tests of the fuzzers themselves.

use attn_conformance::fake::{FakeBackend, FakePages};
use attn_core::{CacheConfig, DecodeAttention, DecodeStep, Error, KvCache, KvSource};
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

/// The reference with a fault.
fn faulty(fault: Fault) -> Box<dyn DecodeAttention> {
    let backend = FakeBackend::of(Reference::new());
    Box::new(match fault {
        Fault::None => backend,
        Fault::Page | Fault::Residuals => {
            backend.with_caches(move |config| faulty_cache(config, fault))
        }
        Fault::Coarse => backend.with_execute(without_residuals),
        Fault::Size => backend.with_answers(|answer| enlarge(answer.out, 1.02)),
        Fault::IntegerSize => backend.with_answers(|answer| {
            if answer.format.is_integer() {
                enlarge(answer.out, 1.15);
            }
        }),
        Fault::Bit => backend.with_answers(|answer| {
            let is_long = answer.problem.kv_lens.iter().any(|len| *len > 20);
            if let (true, Some(x)) = (is_long, answer.out.last_mut()) {
                *x = f32::from_bits(x.to_bits() ^ 1);
            }
        }),
    })
}

fn enlarge(out: &mut [f32], factor: f32) {
    out.iter_mut().for_each(|x| *x *= factor);
}

/// Decodes a copy of the step's cache whose residuals are all 8.
fn without_residuals(
    backend: &dyn DecodeAttention,
    step: &mut DecodeStep<'_>,
) -> Result<(), Error> {
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

/// A cache whose second append is faulty.
fn faulty_cache(config: &CacheConfig, fault: Fault) -> Result<KvCache, Error> {
    let mut appends = 0;
    let pages = FakePages::new(config)?.with_appends(move |pages, call| {
        appends += 1;
        let mut writes = call.writes.to_vec();
        if appends == 2 && fault == Fault::Residuals {
            writes.iter_mut().for_each(|w| w.residual_page = None);
        }
        call.write(pages, &writes)?;
        if appends == 2 && fault == Fault::Page {
            call.change_page(pages, writes[0].page)?;
        }
        Ok(())
    });
    pages.cache()
}

fn backends(reference: Fault, other: Fault) -> Backends {
    Backends {
        reference: faulty(reference),
        others: vec![("faulty".to_owned(), faulty(other))],
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
