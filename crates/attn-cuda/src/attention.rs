//! One attention on a GPU: the lists that its launch reads, K and V in pages or as a view's rows, and the launch. Its other rows lie on the device:
//! callers with rows in host memory copy them there first.

use attn_core::{CacheLayer, Error, PageStore, PageTable, Problem};

use crate::{
    call_memory::CallMemory,
    device::Device,
    device_tables::DeviceTables,
    native::{
        self, Beside, CentresArgs, DecodeArgs, DeviceAddress, DeviceKv, Dtype, NativePlan,
        PagedSequences, Pages, SpansArgs, Stream, alibi_slopes_log2, launch_decode_as,
    },
    sizes,
    staged_view::StagedView,
    staging::{ListPlace, Lists},
    store::CudaPages,
};

/// Where attention reads queries and writes results: outputs and log-sum-exps, or the states of spans.
pub(crate) struct AttentionRows {
    pub(crate) q: DeviceAddress,
    /// The type of queries and outputs.
    pub(crate) dtype: Dtype,
    pub(crate) out: DeviceAddress,
    /// Null where nobody asks for them.
    pub(crate) lse: DeviceAddress,
    /// Maxima and sums, and O.
    pub(crate) states: Option<[DeviceAddress; 2]>,
}

/// K and V of an attention.
pub(crate) enum AttentionKv<'a> {
    /// Sequences in the pages of a pool.
    Pages {
        pool: Pages,
        tensor_scales: [DeviceAddress; 2],
        tables: DeviceTables,
        /// Of a cache with centres.
        centres: Option<LayerCentres>,
    },
    /// A view's rows in host memory, which the caller copies to the device ahead of the launch.
    View(StagedView<'a>),
}

/// Centres of K, which keys of a layer lack.
pub(crate) struct LayerCentres {
    /// Those of all sequences, side by side.
    at: DeviceAddress,
    /// Elements of each.
    len: usize,
    /// Whose each sequence has.
    rows: Vec<u32>,
}

impl AttentionKv<'_> {
    /// The sequences of a layer that `table` lists, in the pages of the layer's store.
    ///
    /// # Errors
    /// Those of [`DeviceTables::of_cache`]; [`Error::Parameter`] for a sequence that the store has no centres of.
    pub(crate) fn of_layer(
        store: &CudaPages,
        layer: CacheLayer<'_>,
        table: &PageTable,
        problem: &Problem,
    ) -> Result<Self, Error> {
        let config = layer.cache().config();
        let (layout, entries) = (
            layer.layout_of(table),
            table.entries_of_page(config.num_kv_heads),
        );
        let pool = store.pool(layer.index(), store.pages_to_read());
        Ok(AttentionKv::Pages {
            pool: Pages::new(pool.at, &layout, pool.num_pages * entries),
            tensor_scales: store.tensor_scale_addresses(layer.index()),
            tables: DeviceTables::of_cache(problem, table, config, store.num_pages() * entries)?,
            centres: match store.centres() {
                Some(centres) => {
                    let rows = centres.rows_of(&table.sequences, problem.batch(), entries)?;
                    Some(LayerCentres {
                        at: centres.at(layer.index()),
                        len: centres.len_of_row() / entries,
                        rows,
                    })
                }
                None => None,
            },
        })
    }
}

/// One attention, checked by its caller.
pub(crate) struct Attention<'a> {
    /// With the lengths of this call.
    pub(crate) problem: &'a Problem,
    pub(crate) plan: &'a NativePlan,
    pub(crate) rows: AttentionRows,
    pub(crate) kv: AttentionKv<'a>,
    /// What a view's rows are copied to; not read for pages.
    pub(crate) view_at: DeviceAddress,
}

/// Numbers as kernels read them.
fn ints(what: &'static str, list: &[usize]) -> Result<Vec<i32>, Error> {
    let ints = list.iter().map(|&n| sizes::int(what, n));
    ints.collect()
}

/// The lists that a launch reads, and the place of each among them: those that differ from call to call come first.
struct AttentionLists {
    all: Lists,
    lens: ListPlace,
    page_table: ListPlace,
    residual_pages: ListPlace,
    centre_rows: ListPlace,
    query_blocks: ListPlace,
    slopes: ListPlace,
    sinks: ListPlace,
    tokens_before: ListPlace,
    tokens_after: ListPlace,
    /// A view's static scales of K and V.
    tensor_scales: [ListPlace; 2],
}

impl AttentionLists {
    fn new(of: &Attention<'_>) -> Result<Self, Error> {
        let (problem, scores) = (of.problem, &of.problem.scores);
        let (tables, tensor_scales) = match &of.kv {
            AttentionKv::Pages { tables, .. } => (Some(tables), [&[][..]; 2]),
            AttentionKv::View(view) => {
                let tables = view.pages().map(|pages| &pages.tables);
                (tables, view.tensor_scales())
            }
        };
        let centre_rows = match &of.kv {
            AttentionKv::Pages {
                centres: Some(centres),
                ..
            } => &centres.rows[..],
            _ => &[],
        };
        let slopes = alibi_slopes_log2(scores.alibi_slopes.as_deref().unwrap_or(&[]));
        // Sinks of shards belong to the merge.
        let sinks = scores.sinks.as_deref().filter(|_| of.rows.states.is_none());
        let mut all = Lists::default();
        Ok(AttentionLists {
            lens: all.add(&ints("kv_len", &problem.kv_lens)?)?,
            page_table: all.add(tables.map_or(&[], |tables| &tables.table))?,
            residual_pages: all.add(tables.map_or(&[], |tables| &tables.residuals))?,
            centre_rows: all.add(centre_rows)?,
            query_blocks: all.add(of.plan.query_blocks())?,
            slopes: all.add(&slopes)?,
            sinks: all.add(sinks.unwrap_or(&[]))?,
            tokens_before: all.add(&ints("tokens_before", &problem.tokens_before)?)?,
            tokens_after: all.add(&ints("tokens_after", &problem.tokens_after)?)?,
            tensor_scales: [all.add(tensor_scales[0])?, all.add(tensor_scales[1])?],
            all,
        })
    }

    /// Sequences in the pages of `pool`, on a device that has the lists from `base` on.
    fn paged(
        &self,
        base: DeviceAddress,
        pool: Pages,
        tables: &DeviceTables,
        tensor_scales: [DeviceAddress; 2],
    ) -> PagedSequences {
        PagedSequences {
            pool,
            page_table: self.page_table.at(base),
            page_table_stride: tables.stride,
            residual_pages: self.residual_pages.at(base),
            residual_slots: tables.slots,
            kv_lens: self.lens.at(base),
            tensor_scales,
        }
    }
}

impl Attention<'_> {
    /// Copies the call's lists where they differ from those of the call before, and enqueues the launch.
    ///
    /// # Safety
    /// - `stream` is one that [`CallMemory::lists`] takes.
    /// - `rows` are as many as the problem says, in device memory of their types, aligned to 16 bytes, and stay so until the work has run; outputs overlap nothing that
    ///   runs meanwhile. Queries are finite and in range.
    /// - K and V are the problem's: pages of a live store, or a view that the step has compared with the problem, whose parts are copied to `view_at` ahead on the
    ///   stream and stay there until the work has run.
    /// - `plan` is for the problem with sequences that are as long or longer, for K and V that lie so, and leaves states where `rows` has room for them.
    pub(crate) unsafe fn enqueue(
        &self,
        device: &Device,
        memory: &mut CallMemory,
        stream: Stream,
    ) -> Result<(), Error> {
        let Attention { plan, rows, .. } = self;
        let lists = AttentionLists::new(self)?;
        // SAFETY: this function's contract.
        let base = unsafe { memory.lists(device, &lists.all, stream) }?;
        let sizes = [plan.workspace_bytes(), plan.zeroed_bytes()];
        // SAFETY: this function's contract.
        let workspace = unsafe { memory.workspace(device, sizes, stream) }?;
        // SAFETY: this function's contract; the lists are copied ahead on the same stream.
        let kv = unsafe { self.kv(device, &lists, base, stream) }?;
        let args = DecodeArgs {
            q: rows.q,
            out: rows.out,
            dtype: rows.dtype,
            lse: rows.lse,
            kv,
            query_blocks: lists.query_blocks.at(base),
            alibi_slopes: lists.slopes.at(base),
            sinks: lists.sinks.at(base),
            workspace,
            scratch: DeviceAddress::NULL,
        };
        let states = rows.states.map(|[max_sums, o]| SpansArgs {
            tokens_before: lists.tokens_before.at(base),
            tokens_after: lists.tokens_after.at(base),
            max_sums,
            o,
        });
        let centres = self.centres().map(|centres| {
            CentresArgs::side_by_side(centres.at, centres.len, lists.centre_rows.at(base))
        });
        let beside = Beside {
            spans: states.as_ref(),
            centres: centres.as_ref(),
            ..Beside::default()
        };
        // SAFETY: this function's contract; lists and workspace are the calls' own, written ahead on the same stream. `DeviceTables` has compared every page with the pool and
        // counted those of each sequence, and `Centres::rows_of` every sequence with the centres; imported pages are in order.
        unsafe { launch_decode_as(device, plan, stream.raw(), &args, &beside) }?;
        memory.left_zero(plan.zeroed_bytes());
        Ok(())
    }

    /// The centres of K of the sequences in the layer.
    fn centres(&self) -> Option<&LayerCentres> {
        match &self.kv {
            AttentionKv::Pages { centres, .. } => centres.as_ref(),
            AttentionKv::View(_) => None,
        }
    }

    /// K and V on the device, which has the lists from `base` on; brings a view that is not read in place into its pages.
    ///
    /// # Safety
    /// Those of [`Attention::enqueue`]; the lists are copied ahead on the stream.
    unsafe fn kv(
        &self,
        device: &Device,
        lists: &AttentionLists,
        base: DeviceAddress,
        stream: Stream,
    ) -> Result<DeviceKv, Error> {
        let view = match &self.kv {
            AttentionKv::Pages {
                pool,
                tensor_scales,
                tables,
                ..
            } => {
                return Ok(DeviceKv::Paged(lists.paged(
                    base,
                    *pool,
                    tables,
                    *tensor_scales,
                )));
            }
            AttentionKv::View(view) => view,
        };
        let tensor_scales = lists.tensor_scales.map(|list| list.at(base));
        let rows = view.rows(self.view_at, lists.lens.at(base), tensor_scales);
        let Some(pages) = view.pages() else {
            return Ok(DeviceKv::Rows(rows));
        };
        let pool = pages.pool(self.view_at);
        let args = pages.import_args(rows, pool, lists.page_table.at(base), self.problem);
        // SAFETY: this function's contract. `DecodeStep::new` has compared the view's reach with its slices, by products that do not wrap, and strides beyond 63 bits are
        // multiplied by 0 alone. The table counts pages up to the longest length for each sequence, and the parts have their bytes.
        unsafe { native::enqueue(device, &pages.import, stream.raw(), &args) }?;
        Ok(DeviceKv::Paged(lists.paged(
            base,
            pool,
            &pages.tables,
            tensor_scales,
        )))
    }
}
