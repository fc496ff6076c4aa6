//! One attention on a GPU: the lists that its launch reads, K and V in pages or as a view's rows, and the launch. Its other rows lie on the device:
//! callers with rows in host memory copy them there first.

use attn_core::{CacheLayer, Error, PageStore, PageTable, Problem};

use crate::{
    call_memory::CallMemory,
    device::Device,
    device_tables::DeviceTables,
    native::{
        self, DecodeArgs, DeviceAddress, DeviceKv, Dtype, NativePlan, PagedSequences, Pages,
        SpansArgs, Stream, alibi_slopes_log2, launch_decode_as,
    },
    sizes,
    staged_view::{PlacedView, StagedView},
    staging::Lists,
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
    },
    /// A view's rows in host memory, which the caller copies to the device ahead of the launch.
    View(StagedView<'a>),
}

impl AttentionKv<'_> {
    /// The sequences of a layer that `table` lists, in the pages of the layer's store.
    ///
    /// # Errors
    /// Those of [`DeviceTables::of_cache`].
    pub(crate) fn of_layer(
        store: &CudaPages,
        layer: CacheLayer<'_>,
        table: &PageTable,
        problem: &Problem,
    ) -> Result<Self, Error> {
        let config = layer.cache().config();
        Ok(AttentionKv::Pages {
            pool: store.pages(layer.index(), store.pages_to_read()),
            tensor_scales: store.tensor_scale_addresses(layer.index()),
            tables: DeviceTables::of_cache(problem, table, config, store.num_pages())?,
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

impl Attention<'_> {
    /// Copies the call's lists where they differ from those of the call before, and enqueues the launch.
    ///
    /// # Safety
    /// - `stream` is one that [`CallMemory::lists`] takes.
    /// - `rows` are as many as the problem says, in device memory of their types, aligned to 16 bytes, and stay so until the work has run; outputs overlap nothing that
    ///   runs meanwhile. Queries are finite and in range.
    /// - K and V are the problem's: pages of a live store, or a view that the step has compared with the problem and whose copies are ahead on the stream.
    /// - `plan` is for the problem with sequences that are as long or longer, for K and V that lie so, and leaves states where `rows` has room for them.
    pub(crate) unsafe fn enqueue(
        &self,
        device: &Device,
        memory: &mut CallMemory,
        stream: Stream,
    ) -> Result<(), Error> {
        let Attention {
            problem,
            plan,
            rows,
            kv,
            view_at,
        } = self;
        let mut lists = Lists::default();
        let lens = lists.add(&ints("kv_len", &problem.kv_lens)?)?;
        let tables = match kv {
            AttentionKv::Pages { tables, .. } => Some(tables),
            AttentionKv::View(view) => view.tables(),
        };
        let table = lists.add(tables.map_or(&[], |tables| &tables.table))?;
        let residuals = lists.add(tables.map_or(&[], |tables| &tables.residuals))?;
        let blocks = lists.add(plan.query_blocks())?;
        let slopes = problem.scores.alibi_slopes.as_deref();
        let slopes = lists.add(&alibi_slopes_log2(slopes.unwrap_or(&[])))?;
        // Sinks of shards belong to the merge.
        let sinks = problem.scores.sinks.as_deref();
        let sinks = sinks.filter(|_| rows.states.is_none());
        let sinks = lists.add(sinks.unwrap_or(&[]))?;
        let after = lists.add(&ints("tokens_after", &problem.tokens_after)?)?;
        let scales = match kv {
            AttentionKv::Pages { .. } => [&[][..]; 2],
            AttentionKv::View(view) => view.tensor_scales(),
        };
        let scales = [lists.add(scales[0])?, lists.add(scales[1])?];
        // SAFETY: this function's contract.
        let base = unsafe { memory.lists(device, &lists, stream) }?;
        let sizes = [plan.workspace_bytes(), plan.zeroed_bytes()];
        // SAFETY: this function's contract.
        let workspace = unsafe { memory.workspace(device, sizes, stream) }?;
        let paged = |pool, tables: &DeviceTables, tensor_scales| PagedSequences {
            pool,
            page_table: table.at(base),
            page_table_stride: tables.stride,
            residual_pages: residuals.at(base),
            residual_slots: tables.slots,
            kv_lens: lens.at(base),
            tensor_scales,
        };
        let kv = match kv {
            AttentionKv::Pages {
                pool,
                tensor_scales,
                tables,
            } => DeviceKv::Paged(paged(*pool, tables, *tensor_scales)),
            AttentionKv::View(view) => {
                let scales = scales.map(|list| list.at(base));
                match view.placed(*view_at, lens.at(base), scales) {
                    PlacedView::InPlace(rows) => DeviceKv::Rows(rows),
                    PlacedView::Imported(import, pool, rows) => {
                        let args = import.args(rows, pool, table.at(base), problem);
                        // SAFETY: this function's contract: the step has compared the view's reach with its slices, by products that do not wrap, and strides beyond
                        // 63 bits are multiplied by 0 alone. The table counts pages up to the longest length for each sequence, for which there is room.
                        unsafe { native::enqueue(device, &import.native, stream.raw(), &args) }?;
                        DeviceKv::Paged(paged(pool, &import.tables, rows.tensor_scales))
                    }
                }
            }
        };
        let args = DecodeArgs {
            q: rows.q,
            out: rows.out,
            dtype: rows.dtype,
            lse: rows.lse,
            kv,
            query_blocks: blocks.at(base),
            alibi_slopes: slopes.at(base),
            sinks: sinks.at(base),
            workspace,
        };
        let states = rows.states.map(|[max_sums, o]| SpansArgs {
            tokens_after: after.at(base),
            max_sums,
            o,
        });
        // SAFETY: this function's contract; lists and workspace are the calls' own, written ahead on the same stream. `DeviceTables` has compared every page with the pool and
        // counted those of each sequence; imported ones are in order.
        unsafe { launch_decode_as(device, plan, stream.raw(), &args, 0, states.as_ref()) }?;
        memory.left_zero(plan.zeroed_bytes());
        Ok(())
    }
}
