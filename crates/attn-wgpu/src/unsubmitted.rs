//! Appends that callers' encoders have taken and that the device has yet to do: nothing reads what they write before.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use attn_core::{Error, TokenWrite, segments::TILE};

use crate::{
    error::{WgpuError, device},
    gpu::{Gpu, IN_BROWSER},
};

/// How many recorded appends write each page of a pool, and make centres of K of each sequence. They leave when the device has done them, or when their
/// encoder is dropped.
#[derive(Default)]
struct Counts {
    pages: HashMap<u32, usize>,
    sequences: HashMap<usize, usize>,
}

/// The recorded appends to one pool that the device has yet to do.
#[derive(Default, Clone)]
pub(crate) struct Unsubmitted(Arc<Mutex<Counts>>);

/// One recorded append.
struct Waiting {
    all: Unsubmitted,
    pages: Vec<u32>,
    sequences: Vec<usize>,
}

/// Counts keys down, and forgets those that reach 0.
fn leave<K: Copy + Eq + Hash>(counts: &mut HashMap<K, usize>, keys: &[K]) {
    for key in keys {
        if let Some(count) = counts.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(key);
            }
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut counts = self.all.locked();
        leave(&mut counts.pages, &self.pages);
        leave(&mut counts.sequences, &self.sequences);
    }
}

impl Unsubmitted {
    fn locked(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an append that an encoder has taken.
    pub fn note(&self, encoder: &wgpu::CommandEncoder, writes: &[TokenWrite]) {
        let pages = writes.iter().flat_map(|w| [Some(w.page), w.residual_page]);
        let mut pages: Vec<u32> = pages.flatten().collect();
        pages.sort_unstable();
        pages.dedup();
        // Tokens of first tiles make both centres.
        let firsts = writes.iter().filter(|write| write.position < TILE);
        let mut sequences: Vec<usize> = firsts.map(|write| write.sequence).collect();
        sequences.dedup();
        let mut counts = self.locked();
        for page in &pages {
            *counts.pages.entry(*page).or_default() += 1;
        }
        for sequence in &sequences {
            *counts.sequences.entry(*sequence).or_default() += 1;
        }
        drop(counts);
        let waiting = Waiting {
            all: self.clone(),
            pages,
            sequences,
        };
        encoder.on_submitted_work_done(move || drop(waiting));
    }

    /// Refuses to read pages that an encoder has yet to write.
    pub fn check_pages(&self, gpu: &Gpu, pages: &[u32]) -> Result<(), Error> {
        let is_written = |counts: &Counts| pages.iter().any(|p| counts.pages.contains_key(p));
        self.check(gpu, "reading pages", is_written)
    }

    /// Refuses to read centres of K that an encoder has yet to make.
    pub fn check_centres(&self, gpu: &Gpu, sequence: usize) -> Result<(), Error> {
        let is_made = |counts: &Counts| counts.sequences.contains_key(&sequence);
        self.check(gpu, "reading centres of K", is_made)
    }

    /// Whether an encoder has yet to write any page.
    pub fn are_any(&self, gpu: &Gpu) -> bool {
        let any = |counts: &Counts| !counts.pages.is_empty();
        self.check(gpu, "reading keys", any).is_err()
    }

    fn check(
        &self,
        gpu: &Gpu,
        doing: &'static str,
        is_awaited: impl Fn(&Counts) -> bool,
    ) -> Result<(), Error> {
        // A browser reads nothing back (`Gpu::blocking`).
        if IN_BROWSER || !is_awaited(&self.locked()) {
            return Ok(());
        }
        // What was submitted is done then, and has left.
        gpu.wait(doing)?;
        match is_awaited(&self.locked()) {
            false => Ok(()),
            true => Err(device(doing, WgpuError::Unsubmitted)),
        }
    }
}
