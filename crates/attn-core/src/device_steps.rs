//! Calls over a cache whose rows lie in the device's memory: what a backend does for them, and the cache's part.

use crate::{
    attend::Attended,
    cache::{Append, CacheAccess, KvCache, PageStore, TokenWrite},
    device_rows::DeviceRows,
    error::Error,
    rows::Rows,
};

/// Where the results of an attention go on a device.
#[derive(Debug, Clone, Copy)]
pub enum DeviceResults<'a> {
    /// Of whole sequences.
    Rows {
        /// The outputs, of the shape [`Problem::out_shape`](crate::Problem::out_shape).
        out: DeviceRows<'a>,
        /// The log-sum-exps, of the shape [`Attended::lse_rows`], if they are asked for.
        lse: Option<DeviceRows<'a>>,
    },
    /// Of shards, whose sinks belong to the merge: the states of `spans` spans, of the shapes [`Attended::state_rows`].
    Spans {
        /// The number of spans.
        spans: usize,
        /// Maxima and sums.
        max_sums: DeviceRows<'a>,
        /// O.
        o: DeviceRows<'a>,
    },
}

/// A backend's part of the calls over one cache whose rows lie in its device's memory ([`DecodeAttention::device_steps`](crate::DecodeAttention::device_steps)).
///
/// Work is enqueued on what orders the rows, such as a stream, and comes behind the work of the calls before, wherever that was enqueued. What comes from the host then,
/// or reads pages there, comes behind [`DeviceSteps::wait`]. Rows of one call are of one type and in one order, which the backend checks. Dropping the value waits.
pub trait DeviceSteps: Send {
    /// Refuses K and V that [`DeviceSteps::write`] would refuse, before pages are taken for them.
    ///
    /// # Errors
    /// [`Error::Rows`] for rows that the device does not read where they are; [`Error::Parameter`], [`Error::Device`].
    fn check_write(&mut self, kv: [DeviceRows<'_>; 2]) -> Result<(), Error>;

    /// Lets what the cache's store does by itself, such as copies of pages, come behind the work of the calls so far.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn order_store(&mut self) -> Result<(), Error>;

    /// Enqueues the writes of one layer's tokens: the bytes of [`PageStore::append`]. K and V have a row for each write.
    ///
    /// # Errors
    /// Those of [`DeviceSteps::check_write`]; [`Error::WrongBackend`] for another backend's store.
    fn write(
        &mut self,
        access: &CacheAccess,
        store: &dyn PageStore,
        layer: usize,
        writes: &[TokenWrite],
        kv: [DeviceRows<'_>; 2],
    ) -> Result<(), Error>;

    /// Enqueues attention: writes every row of the results.
    ///
    /// # Errors
    /// [`Error::Shape`] for rows of other shapes than [`Attended`] says; those of [`Problem::check_shards`](crate::Problem::check_shards) and
    /// [`Problem::check_spans`](crate::Problem::check_spans) for states of spans; [`Error::Rows`], [`Error::Parameter`]; [`Error::WrongBackend`] for another backend's cache;
    /// [`Error::Unsupported`], [`Error::Device`].
    fn attend(
        &mut self,
        attended: &Attended<'_>,
        q: DeviceRows<'_>,
        results: DeviceResults<'_>,
    ) -> Result<(), Error>;

    /// Waits for the work of all calls: what the host then reads of the cache's pages is what they wrote.
    ///
    /// # Errors
    /// [`Error::Device`] with a failure of that work.
    fn wait(&self) -> Result<(), Error>;
}

impl KvCache {
    /// Appends tokens to several sequences at once, as [`KvCache::append_batch`] does, from rows on the device of the cache.
    ///
    /// # Errors
    /// Those of [`KvCache::append_batch`] but for values, which the host does not read; those of [`DeviceSteps::write`]. Lengths and pages are unchanged then.
    pub fn append_on(
        &mut self,
        steps: &mut dyn DeviceSteps,
        appends: &[Append],
        [k, v]: [Rows<'_>; 2],
    ) -> Result<(), Error> {
        let kv = self.device_tokens(Append::total(appends), [k, v])?;
        let admitted = self.admit_append(appends)?;
        steps.check_write(kv)?;
        steps.order_store()?;
        self.append_admitted(admitted, None, |store, writes| {
            let written = steps.write(&CacheAccess::here()?, store, 0, writes, kv);
            if written.is_err() {
                // Parts of the append that are enqueued may write pages that get back what they held. A device that fails again says so there.
                let _ = steps.order_store();
            }
            written
        })
    }

    /// Begins a model's step, as [`KvCache::reserve`] does, behind the work of the calls on the device: pages that it copies or takes again hold what that
    /// wrote.
    ///
    /// # Errors
    /// Those of [`KvCache::reserve`] and [`DeviceSteps::order_store`]. Lengths and pages are unchanged then.
    pub fn reserve_on(
        &mut self,
        steps: &mut dyn DeviceSteps,
        appends: &[Append],
    ) -> Result<(), Error> {
        steps.order_store()?;
        self.reserve(appends)
    }

    /// Writes one layer of the open step, as [`KvCache::write`] does, from rows on the device of the cache.
    ///
    /// # Errors
    /// Those of [`KvCache::write`] but for values, which the host does not read; those of [`DeviceSteps::write`]. The layer counts as not written then.
    pub fn write_on(
        &mut self,
        steps: &mut dyn DeviceSteps,
        layer: usize,
        [k, v]: [Rows<'_>; 2],
    ) -> Result<(), Error> {
        let kv = self.device_tokens(self.tokens_to_write(layer)?, [k, v])?;
        steps.check_write(kv)?;
        self.write_in_span(layer, None, |store, writes| {
            steps.write(&CacheAccess::here()?, store, layer, writes, kv)
        })
    }

    /// K and V of so many tokens on the device.
    fn device_tokens<'a>(
        &self,
        tokens: usize,
        [k, v]: [Rows<'a>; 2],
    ) -> Result<[DeviceRows<'a>; 2], Error> {
        let [of_k, of_v] = self.layout().shapes(tokens);
        Ok([k.device_rows("k", of_k)?, v.device_rows("v", of_v)?])
    }
}
