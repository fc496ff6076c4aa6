//! One decode of the common trait: the inputs that are copied to the arena, and their addresses there.

use attn_core::{Error, KvMemory, KvView, PageLayout, PageStore, StepInputs};

use attn_kernels::cuda::KvLayout;

use crate::{
    device::Device,
    device_tables::DeviceTables,
    native::{
        self, DecodeArgs, DeviceAddress, DeviceKv, DeviceRows, Dtype, ImportArgs, NativeImport,
        NativePlan, PagedSequences, Pages, alibi_slopes_log2,
    },
    sizes,
    store::CudaPages,
    upload::{Upload, bytes_of},
};

/// The inputs of a decode, computed from its step before anything is copied.
pub(crate) struct Inputs {
    lens: Vec<i32>,
    /// The longest of `lens`.
    longest: usize,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    /// Slots of residual pages of a sequence.
    slots: usize,
    pub(crate) tables: DeviceTables,
    /// The import of a view that decode does not read in place.
    pub(crate) import: Option<NativeImport>,
    imported_bytes: usize,
}

impl Inputs {
    /// Inputs for K and V as the launch takes them: a view is read in place, or copied into pages. `store` has a cache's pages.
    pub(crate) fn new(
        device: &Device,
        step: &StepInputs<'_>,
        store: Option<&CudaPages>,
        layout: KvLayout,
    ) -> Result<Self, Error> {
        let (problem, page_size) = (step.problem(), layout.page_size());
        let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
        let lens = problem.kv_lens.iter();
        let lens = lens
            .map(|&len| sizes::int("kv_len", len))
            .collect::<Result<_, _>>()?;
        let slopes = alibi_slopes_log2(problem.scores.alibi_slopes.as_deref().unwrap_or(&[]));
        let sinks = problem.scores.sinks.clone().unwrap_or_default();
        let (mut import, mut imported_bytes, mut slots) = (None, 0, 0);
        let tables = match step.kv().memory() {
            KvMemory::Pages(layer, table) => {
                let num_pages = store.map_or(0, |store| store.num_pages());
                let config = layer.cache().config();
                slots = config.format.residual_slots(page_size, config.max_q_len);
                let sizes = [page_size, slots];
                DeviceTables::of_cache(problem, table, sizes, num_pages)?
            }
            KvMemory::View(_) if layout.is_rows() => DeviceTables::default(),
            KvMemory::View(_) => {
                let (format, heads) = (step.plan().format(), problem.num_kv_heads);
                let layout = PageLayout::new(format, problem.head_dim, page_size, heads)?;
                let tables = DeviceTables::in_order(problem.batch(), longest, page_size)?;
                let sizes = [tables.table.len(), layout.page_bytes()];
                imported_bytes = sizes::product("bytes of a view in pages", &sizes)?;
                import = Some(native::prepare_import(device, layout)?);
                tables
            }
        };
        Ok(Inputs {
            lens,
            longest,
            slopes,
            sinks,
            slots,
            tables,
            import,
            imported_bytes,
        })
    }
}

/// Offsets of a decode's parts in the arena.
pub(crate) struct Parts {
    workspace: usize,
    out: usize,
    lse: usize,
    q: usize,
    lens: usize,
    slopes: usize,
    sinks: usize,
    query_blocks: usize,
    pub(crate) imported: usize,
    table: usize,
    residuals: usize,
    /// Codes of K and V, their scales, their static scales.
    view: [usize; 6],
}

impl Parts {
    /// `q` are the queries side by side; outputs take as many bytes, and `lse` has an element for each `head_dim` of them.
    pub(crate) fn reserve<'a>(
        upload: &mut Upload<'a>,
        step: &StepInputs<'a>,
        plan: &'a NativePlan,
        inputs: &'a Inputs,
        q: &'a [f32],
    ) -> Result<Self, Error> {
        let out_bytes = size_of_val(q);
        Ok(Parts {
            workspace: upload.reserve(plan.workspace_bytes())?,
            out: upload.reserve(out_bytes)?,
            lse: upload.reserve(out_bytes / step.problem().head_dim)?,
            q: upload.add(bytes_of(q))?,
            lens: upload.add(bytes_of(&inputs.lens))?,
            slopes: upload.add(bytes_of(&inputs.slopes))?,
            sinks: upload.add(bytes_of(&inputs.sinks))?,
            query_blocks: upload.add(bytes_of(plan.query_blocks()))?,
            imported: upload.reserve(inputs.imported_bytes)?,
            table: upload.add(bytes_of(&inputs.tables.table))?,
            residuals: upload.add(bytes_of(&inputs.tables.residuals))?,
            view: match step.kv().memory() {
                KvMemory::Pages(..) => [0; 6],
                KvMemory::View(view) => [
                    upload.add(view.k().codes)?,
                    upload.add(view.v().codes)?,
                    upload.add(bytes_of(view.k().scales))?,
                    upload.add(bytes_of(view.v().scales))?,
                    upload.add(bytes_of(view.k_tensor_scales()))?,
                    upload.add(bytes_of(view.v_tensor_scales()))?,
                ],
            },
        })
    }
}

/// Device addresses of the parts.
pub(crate) struct Placed {
    pub(crate) base: DeviceAddress,
    pub(crate) parts: Parts,
}

impl Placed {
    pub(crate) fn at(&self, offset: usize) -> DeviceAddress {
        self.base.offset(offset)
    }

    /// The address, or null for what is not given.
    fn some(&self, given: bool, offset: usize) -> DeviceAddress {
        self.at(offset).given(given)
    }

    /// A view's rows.
    pub(crate) fn rows(&self, view: &KvView<'_>) -> DeviceRows {
        let [k, v, k_scales, v_scales, k_tensor_scales, v_tensor_scales] = self.parts.view;
        let format = view.format();
        DeviceRows {
            k: [self.at(k), self.some(format.k.has_row_scales(), k_scales)],
            v: [self.at(v), self.some(format.v.has_row_scales(), v_scales)],
            code_strides: [view.k().code_strides, view.v().code_strides],
            scale_strides: [view.k().scale_strides, view.v().scale_strides],
            kv_lens: self.at(self.parts.lens),
            tensor_scales: [
                self.some(format.k.has_tensor_scale(), k_tensor_scales),
                self.some(format.v.has_tensor_scale(), v_tensor_scales),
            ],
        }
    }

    /// The step's sequences in the pages of `pool`.
    pub(crate) fn paged(
        &self,
        inputs: &Inputs,
        pool: Pages,
        tensor_scales: [DeviceAddress; 2],
    ) -> PagedSequences {
        PagedSequences {
            pool,
            page_table: self.at(self.parts.table),
            page_table_stride: inputs.tables.stride,
            residual_pages: self.some(inputs.slots > 0, self.parts.residuals),
            residual_slots: inputs.slots,
            kv_lens: self.at(self.parts.lens),
            tensor_scales,
        }
    }

    pub(crate) fn import_args(&self, view: &KvView<'_>, inputs: &Inputs) -> ImportArgs {
        ImportArgs {
            rows: self.rows(view),
            pool: self.at(self.parts.imported),
            page_table: self.at(self.parts.table),
            page_table_stride: inputs.tables.stride,
            batch: inputs.lens.len(),
            max_kv_len: inputs.longest,
        }
    }

    pub(crate) fn decode_args(
        &self,
        kv: DeviceKv,
        plan: &NativePlan,
        inputs: &Inputs,
    ) -> DecodeArgs {
        DecodeArgs {
            q: self.at(self.parts.q),
            out: self.at(self.parts.out),
            lse: self.at(self.parts.lse),
            dtype: Dtype::F32,
            kv,
            query_blocks: self.some(!plan.query_blocks().is_empty(), self.parts.query_blocks),
            alibi_slopes: self.some(!inputs.slopes.is_empty(), self.parts.slopes),
            sinks: self.some(!inputs.sinks.is_empty(), self.parts.sinks),
            workspace: self.at(self.parts.workspace),
        }
    }
}
