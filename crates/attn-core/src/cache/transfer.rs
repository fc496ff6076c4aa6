//! Moves sequences out of a cache as bytes and back in, all layers at once: [`KvCache::image`], [`KvCache::restore`]; single pages by
//! [`KvCache::read_back`], [`KvCache::restore_pages`], [`KvCache::write_page`].

use std::ops::Range;

use super::{
    CacheAccess, CheckpointPage, KvCache, SequenceImage, append::check_len,
    centres::check_elements, image::Description,
};
use crate::{
    error::{Error, filled, refuse, reserve},
    page_bytes::SequencePages,
};

/// The residual pages at checkpoints that a sequence gets from an image.
#[derive(Default)]
struct AtCheckpoints<'a> {
    /// The place of each among those of a layer, and its home page.
    places: Vec<(usize, usize)>,
    /// Bytes of all that the image has of a layer.
    layer_bytes: usize,
    /// Those of the first layer, then of the next.
    bytes: &'a [u8],
}

impl KvCache {
    /// A sequence as one block of bytes, to be restored into this or another cache of the same format and shape, on any backend: home pages, then
    /// the residual pages that the next tokens read, unwritten bytes zeroed, of the first layer, then of the next; then the residual pages that it keeps at checkpoints
    /// ([`CacheBuilder::checkpoints`](crate::CacheBuilder::checkpoints)), so that it goes back to them after a restore, too; last the centres of K, of a cache that has some. A sequence with dropped tokens is
    /// refused, as their pages are gone, and so is one with tokens of an open step.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Dropped`], [`Error::Step`], [`Error::OutOfMemory`], [`Error::Device`].
    pub fn image(&self, sequence: usize) -> Result<SequenceImage<'static>, Error> {
        let mut bytes = filled("the image of a sequence", self.image_bytes(sequence)?, 0)?;
        self.write_image(sequence, &mut bytes)?;
        let description = self.description(sequence)?;
        Ok(SequenceImage::new(description, bytes))
    }

    /// Number of bytes of [`KvCache::image`].
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Dropped`], [`Error::Step`].
    pub fn image_bytes(&self, sequence: usize) -> Result<usize, Error> {
        Ok(self.description(sequence)?.bytes())
    }

    /// Writes the bytes of [`KvCache::image`] to memory of the caller, [`KvCache::image_bytes`] long.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Dropped`], [`Error::Step`]; [`Error::Length`], and nothing is written; [`Error::Device`], and `out` holds anything.
    pub fn write_image(&self, sequence: usize, out: &mut [u8]) -> Result<(), Error> {
        let description = self.description(sequence)?;
        if out.len() != description.bytes() {
            return Err(Error::Length {
                what: "the image of a sequence",
                given: out.len(),
                needed: description.bytes(),
            });
        }
        let bytes = &mut out[description.header_bytes()..];
        let (pages, rest) = bytes.split_at_mut(description.pages_bytes());
        let (at_checkpoints, centres) = rest.split_at_mut(description.checkpoints_bytes());
        self.read_pages(sequence, description.pages(), 0..self.config.layers, pages)?;
        self.read_checkpoints(sequence, description.pages(), at_checkpoints)?;
        self.read_all_centres(sequence, centres)?;
        description.write_header(out);
        Ok(())
    }

    /// A sequence's home pages in order, then its residual pages, unwritten bytes zeroed: those of its first tile and of its last home pages, as many as any run of so many
    /// tokens keeps ([`KvFormat::saved_residual_pages`](crate::KvFormat::saved_residual_pages)), or fewer where [`KvCache::truncate`] took back more than it
    /// promises; of the first layer, then of the next. The pages of [`KvCache::image`], to be compared.
    /// [`CacheLayer::read_back`](super::CacheLayer::read_back) gives those of one layer, for [`convert::export`](crate::convert::export).
    ///
    /// # Errors
    /// [`Error::Parameter`] for a cache with centres of K, without which its pages mean nothing; [`Error::Sequence`], [`Error::Dropped`], [`Error::Step`], [`Error::OutOfMemory`], [`Error::Device`].
    pub fn read_back(&self, sequence: usize) -> Result<Vec<Vec<u8>>, Error> {
        self.read_back_layers(sequence, 0..self.config.layers)
    }

    pub(super) fn read_back_layers(
        &self,
        sequence: usize,
        layers: Range<usize>,
    ) -> Result<Vec<Vec<u8>>, Error> {
        self.pages_held(sequence)?;
        self.check_no_centres("a copy of the pages")?;
        self.pages_of_layers(sequence, layers)
    }

    /// The pages of [`KvCache::read_back`] in some layers, whether or not they lack centres.
    pub(super) fn pages_of_layers(
        &self,
        sequence: usize,
        layers: Range<usize>,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let held = self.pages_held(sequence)?;
        let size = self.layout.page_bytes();
        let count = held.count().saturating_mul(layers.len());
        let mut bytes = filled("the pages of a sequence", count.saturating_mul(size), 0)?;
        self.read_pages(sequence, &held, layers, &mut bytes)?;
        Ok(bytes.chunks_exact(size).map(<[u8]>::to_vec).collect())
    }

    fn description(&self, sequence: usize) -> Result<Description, Error> {
        let held = self.pages_held(sequence)?;
        let before = self.table.tokens_before[sequence];
        let checkpoints = self.checkpoints_before(sequence, held.without_residuals().end);
        let homes = checkpoints.iter().map(|of| of.home).collect();
        Ok(Description::new(held, homes, before, &self.config))
    }

    /// The pages to save of a sequence: its home pages, and the residual pages that any run of so many tokens keeps.
    fn pages_held(&self, sequence: usize) -> Result<SequencePages, Error> {
        self.check_sequence(sequence)?;
        self.check_settled("a copy of the pages", sequence)?;
        self.check_undropped("a copy of the pages", sequence)?;
        let (len, table) = (self.table.lens[sequence], &self.table);
        let held = table.residual_pages[sequence].len();
        let format = self.config.format;
        let kept = format.saved_residual_pages(self.config.page_size, len);
        let count = table.pages[sequence].len() + held.min(kept);
        SequencePages::new(self.layout, len, count)
    }

    /// Reads a sequence's pages of some layers, unwritten bytes zeroed.
    fn read_pages(
        &self,
        sequence: usize,
        held: &SequencePages,
        layers: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let residuals = &self.table.residual_pages[sequence];
        let (first, last) = residuals.split_at(self.table.first_held(sequence));
        let saved = last.len() - (held.residuals() - first.len());
        let home = self.table.pages[sequence].iter();
        let pages = home.chain(first).chain(&last[saved..]);
        let pages: Vec<u32> = pages.copied().collect();
        let bytes = pages.len() * self.layout.page_bytes();
        // Of an empty sequence there are no bytes, and no layer's part.
        for (layer, out) in layers.zip(out.chunks_exact_mut(bytes.max(1))) {
            self.store
                .read_pages(&CacheAccess::here()?, layer, &pages, out)?;
            held.canonical(out);
        }
        Ok(())
    }

    /// Reads the residual pages that a sequence keeps at checkpoints, of all layers, unwritten bytes zeroed.
    fn read_checkpoints(
        &self,
        sequence: usize,
        held: &SequencePages,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let pages = self.checkpoints_before(sequence, held.without_residuals().end);
        let pages: Vec<u32> = pages.iter().map(|of| of.page).collect();
        let size = self.layout.page_bytes();
        let layers = out.chunks_exact_mut((pages.len() * size).max(1));
        for (layer, out) in layers.enumerate() {
            self.store
                .read_pages(&CacheAccess::here()?, layer, &pages, out)?;
            self.layout.canonical_residuals(out);
        }
        Ok(())
    }

    /// Fills an empty sequence with an image that this or another cache gave. Of its residual pages at checkpoints the sequence gets those that this cache keeps, too
    /// ([`CacheConfig::checkpoints`](crate::CacheConfig::checkpoints)).
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::NotEmpty`]; [`Error::ImageMismatch`] for the image of another kind of cache, by
    /// format, shape or tensor scales; [`Error::CacheFull`]; [`Error::BadBytes`] for values that no quantizer writes; [`Error::Device`]. The
    /// sequences are unchanged then, but that a shard without tokens ([`KvCache::begin_shard`]) is none any more where the device fails to write centres.
    pub fn restore(&mut self, sequence: usize, image: &SequenceImage<'_>) -> Result<(), Error> {
        self.check_restore(sequence)?;
        let description = image.description();
        description.check_cache(&self.config)?;
        let homes = description.checkpoints().iter().copied().enumerate();
        let places = homes.filter(|(_, home)| self.config.keeps_at_checkpoint(*home));
        let at_checkpoints = AtCheckpoints {
            places: places.collect(),
            layer_bytes: description.checkpoints().len() * self.layout.page_bytes(),
            bytes: image.checkpoint_pages(),
        };
        self.pages
            .check_room(description.pages().count() + at_checkpoints.places.len())?;
        check_elements("a centre of K of a sequence's image", image.centres())?;
        self.fill(
            sequence,
            description.pages(),
            image.pages(),
            &at_checkpoints,
            image.centres(),
        )?;
        self.table.tokens_before[sequence] = description.tokens_before();
        Ok(())
    }

    /// Fills an empty sequence with `tokens` tokens from pages of this cache's format, shape and tensor scales, which the pages do not say: those of
    /// [`KvCache::read_back`], or of [`convert::import`](crate::convert::import) for one layer after the other. An image says it: [`KvCache::restore`].
    ///
    /// # Errors
    /// [`Error::Parameter`] for a cache with centres of K; [`Error::Sequence`]; [`Error::NotEmpty`]; [`Error::TooLong`]; [`Error::Length`], [`Error::BadBytes`] for other than such pages;
    /// [`Error::CacheFull`]; [`Error::Device`]. The sequences are unchanged then.
    pub fn restore_pages(
        &mut self,
        sequence: usize,
        tokens: usize,
        pages: &[Vec<u8>],
    ) -> Result<(), Error> {
        self.check_restore(sequence)?;
        self.check_no_centres("pages to restore")?;
        check_len(sequence, tokens)?;
        let layers = self.config.layers;
        if !pages.len().is_multiple_of(layers) {
            return Err(Error::Length {
                what: "pages",
                given: pages.len(),
                needed: pages.len().next_multiple_of(layers),
            });
        }
        let each = pages.len() / layers;
        let held = SequencePages::new(self.layout, tokens, each)?;
        held.check_lengths(pages)?;
        self.pages.check_room(held.count())?;
        let mut bytes = Vec::new();
        let size = pages.len() * self.layout.page_bytes();
        reserve("the pages of a sequence", &mut bytes, size)?;
        pages.iter().for_each(|page| bytes.extend_from_slice(page));
        self.fill(sequence, &held, &bytes, &AtCheckpoints::default(), &[])
    }

    fn check_restore(&self, sequence: usize) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        self.check_empty("a restore", sequence)
    }

    /// Fills an empty sequence with the bytes of pages, for which there is room.
    fn fill(
        &mut self,
        sequence: usize,
        held: &SequencePages,
        bytes: &[u8],
        at_checkpoints: &AtCheckpoints<'_>,
        centres: &[u8],
    ) -> Result<(), Error> {
        let size = self.layout.page_bytes();
        let layers = || bytes.chunks_exact((held.count() * size).max(1));
        layers().try_for_each(|bytes| held.check(bytes.chunks_exact(size)))?;
        let taken = (0..held.count() + at_checkpoints.places.len())
            .map(|_| self.pages.take())
            .collect::<Result<Vec<u32>, _>>()?;
        let (pages, kept) = taken.split_at(held.count());
        let written = layers().enumerate().try_for_each(|(layer, bytes)| {
            self.store
                .write_pages(&CacheAccess::here()?, layer, pages, bytes)
        });
        let written = written
            .and_then(|()| self.write_checkpoints(at_checkpoints, kept))
            .and_then(|()| self.write_all_centres(sequence, centres));
        if written.is_err() {
            taken
                .into_iter()
                .rev()
                .for_each(|page| self.pages.release(page));
            return written;
        }
        let (home, residuals) = pages.split_at(held.home());
        let kept = at_checkpoints.places.iter().zip(kept);
        let kept = kept.map(|(&(_, home), &page)| CheckpointPage { home, page });
        self.table.checkpoint_pages[sequence] = kept.collect();
        self.table.residual_pages[sequence] = residuals.to_vec();
        self.table.pages[sequence] = home.to_vec();
        self.table.lens[sequence] = held.tokens();
        self.table.tokens_before[sequence] = 0;
        self.take_up_checkpoints(sequence);
        Ok(())
    }

    /// Writes an image's residual pages at checkpoints to as many pages, in all layers.
    fn write_checkpoints(
        &mut self,
        AtCheckpoints {
            places,
            layer_bytes,
            bytes,
        }: &AtCheckpoints<'_>,
        pages: &[u32],
    ) -> Result<(), Error> {
        let size = self.layout.page_bytes();
        let layers = bytes.chunks_exact((*layer_bytes).max(1)).enumerate();
        for (layer, bytes) in layers {
            for ((place, _), page) in places.iter().zip(pages) {
                let bytes = &bytes[place * size..][..size];
                self.store
                    .write_page(&CacheAccess::here()?, layer, *page, bytes)?;
            }
        }
        Ok(())
    }

    /// Writes one page's bytes as they are, those of the first layer and then of the next, for restoring an offloaded page or to overwrite a page in
    /// tests.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a page outside the pool, [`Error::Length`] for other than one page of each layer.
    pub fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), Error> {
        if page as usize >= self.config.num_pages {
            return refuse(
                "page",
                format_args!("{page} of {}", self.config.num_pages),
                "a page of the pool, counted from 0",
            );
        }
        let needed = self.config.layers * self.layout.page_bytes();
        if bytes.len() != needed {
            return Err(Error::Length {
                what: "page bytes",
                given: bytes.len(),
                needed,
            });
        }
        self.write_all_layers(page, bytes)
    }
}
