//! One decode of the common trait: the inputs that are copied to the arena, and their addresses there.

use attn_core::{Error, KvMemory, KvView, PageLayout, PageStore, PageTable, Problem, StepInputs};

use crate::{
    device::Device,
    native::{
        self, DecodeArgs, DeviceAddress, DeviceKv, Dtype, ImportArgs, NativeImport, NativePlan,
        alibi_slopes_log2,
    },
    sizes,
    store::CudaPages,
    upload::{Upload, bytes_of},
};

/// The page table that a launch reads.
#[derive(Debug, Default)]
pub(crate) struct DeviceTables {
    /// `[batch][stride]`.
    pub(crate) table: Vec<u32>,
    /// `[batch][slots]`, of a cache whose format has a window.
    residuals: Vec<u32>,
    pub(crate) stride: usize,
}

/// An empty list with room for `count` entries: an allocation that fails must not end the process.
fn with_room<T>(count: usize) -> Result<Vec<T>, Error> {
    let mut list = Vec::new();
    let asked = list.try_reserve_exact(count);
    asked.map_err(|_| Error::OutOfMemory {
        what: "the page table",
        bytes: count.saturating_mul(size_of::<T>()),
    })?;
    Ok(list)
}

impl DeviceTables {
    /// The tables of the problem's sequences. Checks that every page is in the pool of `num_pages`, and that lengths have their pages.
    fn of_cache(
        problem: &Problem,
        cache: &PageTable,
        [page_size, slots]: [usize; 2],
        num_pages: usize,
    ) -> Result<Self, Error> {
        let differ = |what, problem: String| {
            Err(Error::Mismatch {
                what,
                problem,
                cache: format!("a pool of {num_pages} pages"),
            })
        };
        let batch = problem.batch();
        if cache.pages.len() < batch || cache.residual_pages.len() < batch {
            return differ("batch", batch.to_string());
        }
        let pages = &cache.pages[..batch];
        let longest = pages.iter().map(Vec::len).max().unwrap_or(0);
        let stride = longest.max(1);
        let entries = sizes::product("entries of the page table", &[batch, stride])?;
        let residual_entries = sizes::product("slots of residual pages", &[batch, slots])?;
        let (mut table, mut residuals) = (with_room(entries)?, with_room(residual_entries)?);
        for (b, (own, kv_len)) in pages.iter().zip(&problem.kv_lens).enumerate() {
            if own.len() < kv_len.div_ceil(page_size) {
                return differ("kv_len", format!("{kv_len} in {} pages", own.len()));
            }
            let of_last = &cache.residual_pages[b];
            if slots > 0 && of_last.is_empty() && !own.is_empty() {
                return differ("residual pages", format!("those of sequence {b}"));
            }
            let mut all = own.iter().chain(of_last);
            if let Some(page) = all.find(|page| **page as usize >= num_pages) {
                return differ("page", page.to_string());
            }
            table.extend(own);
            table.resize((b + 1) * stride, 0);
            residuals.resize((b + 1) * slots, 0);
            for (i, page) in (0..own.len()).rev().zip(of_last.iter().rev()).take(slots) {
                residuals[b * slots + i % slots] = *page;
            }
        }
        Ok(DeviceTables {
            table,
            residuals,
            stride,
        })
    }

    /// Tables of pages in order, as many for each sequence as the longest needs.
    fn in_order(batch: usize, max_kv_len: usize, page_size: usize) -> Result<Self, Error> {
        let stride = max_kv_len.div_ceil(page_size).max(1);
        let pages = sizes::product("pages of a view", &[batch, stride])?;
        let last = u32::try_from(pages).map_err(|_| Error::Parameter {
            what: "pages of a view",
            given: pages.to_string(),
            allowed: "less than 2^32; decode fewer sequences at once",
        })?;
        let mut table = with_room(pages)?;
        table.extend(0..last);
        Ok(DeviceTables {
            table,
            residuals: Vec::new(),
            stride,
        })
    }
}

/// The inputs of a decode, computed from its step before anything is copied.
pub(crate) struct Inputs {
    lens: Vec<i32>,
    /// The longest of `lens`.
    longest: usize,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    /// Slots of residual pages of a sequence.
    pub(crate) slots: usize,
    pub(crate) tables: DeviceTables,
    /// The import of a view that decode does not read in place.
    pub(crate) import: Option<NativeImport>,
    imported_bytes: usize,
}

impl Inputs {
    /// Inputs for pages of `page_size` tokens, or 0 for a view that is read in place. `store` has a cache's pages.
    pub(crate) fn new(
        device: &Device,
        step: &StepInputs<'_>,
        store: Option<&CudaPages>,
        page_size: usize,
    ) -> Result<Self, Error> {
        let problem = step.problem();
        let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
        let lens = problem.kv_lens.iter();
        let lens = lens
            .map(|&len| sizes::int("kv_len", len))
            .collect::<Result<_, _>>()?;
        let slopes = alibi_slopes_log2(problem.alibi_slopes.as_deref().unwrap_or(&[]));
        let sinks = problem.sinks.clone().unwrap_or_default();
        let (mut import, mut imported_bytes, mut slots) = (None, 0, 0);
        let tables = match step.kv().memory() {
            KvMemory::Pages(cache, table) => {
                let num_pages = store.map_or(0, |store| store.num_pages());
                let config = cache.config();
                slots = config.format.residual_slots(page_size, config.max_q_len);
                let sizes = [page_size, slots];
                DeviceTables::of_cache(problem, table, sizes, num_pages)?
            }
            KvMemory::View(_) if page_size == 0 => DeviceTables::default(),
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
    pub(crate) table: usize,
    pub(crate) residuals: usize,
    /// Codes of K and V, their scales, their static scales.
    pub(crate) view: [usize; 6],
}

impl Parts {
    /// `out` tells how many bytes the outputs take; `lse` has an element for each `head_dim` of them.
    pub(crate) fn reserve<'a>(
        upload: &mut Upload<'a>,
        step: &StepInputs<'a>,
        plan: &'a NativePlan,
        inputs: &'a Inputs,
        out: &[f32],
    ) -> Result<Self, Error> {
        let out_bytes = size_of_val(out);
        Ok(Parts {
            workspace: upload.reserve(plan.workspace_bytes())?,
            out: upload.reserve(out_bytes)?,
            lse: upload.reserve(out_bytes / step.problem().head_dim)?,
            q: upload.add(bytes_of(step.q()))?,
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
    pub(crate) fn some(&self, given: bool, offset: usize) -> DeviceAddress {
        self.at(offset).given(given)
    }

    /// Codes and scales of a view's K and V.
    pub(crate) fn rows(&self, view: &KvView<'_>) -> [[DeviceAddress; 2]; 2] {
        let [k, v, k_scales, v_scales, ..] = self.parts.view;
        [
            [
                self.at(k),
                self.some(view.format().k.has_row_scales(), k_scales),
            ],
            [
                self.at(v),
                self.some(view.format().v.has_row_scales(), v_scales),
            ],
        ]
    }

    pub(crate) fn import_args(&self, view: &KvView<'_>, inputs: &Inputs) -> ImportArgs {
        let [k, v] = self.rows(view);
        ImportArgs {
            k,
            v,
            code_strides: [view.k().code_strides, view.v().code_strides],
            scale_strides: [view.k().scale_strides, view.v().scale_strides],
            pool: self.at(self.parts.imported),
            page_table: self.at(self.parts.table),
            page_table_stride: inputs.tables.stride,
            kv_lens: self.at(self.parts.lens),
            batch: inputs.lens.len(),
            max_kv_len: inputs.longest,
        }
    }

    pub(crate) fn decode_args(
        &self,
        kv: DeviceKv,
        scales: [DeviceAddress; 2],
        plan: &NativePlan,
        inputs: &Inputs,
    ) -> DecodeArgs {
        DecodeArgs {
            q: self.at(self.parts.q),
            out: self.at(self.parts.out),
            lse: self.at(self.parts.lse),
            dtype: Dtype::F32,
            kv,
            kv_lens: self.at(self.parts.lens),
            query_blocks: self.some(!plan.query_blocks().is_empty(), self.parts.query_blocks),
            k_tensor_scales: scales[0],
            v_tensor_scales: scales[1],
            alibi_slopes: self.some(!inputs.slopes.is_empty(), self.parts.slopes),
            sinks: self.some(!inputs.sinks.is_empty(), self.parts.sinks),
            workspace: self.at(self.parts.workspace),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::Heads;

    fn page_table(pages: &[&[u32]], residuals: &[&[u32]]) -> PageTable {
        let lists = |all: &[&[u32]]| all.iter().map(|own| own.to_vec()).collect();
        let mut table = PageTable::default();
        table.pages = lists(pages);
        table.residual_pages = lists(residuals);
        table.lens = vec![0; pages.len()];
        table
    }

    fn table(
        lens: &[usize],
        of: &PageTable,
        slots: usize,
        num_pages: usize,
    ) -> Result<DeviceTables, Error> {
        let heads = Heads {
            q: 1,
            kv: 1,
            dim: 64,
        };
        let problem = Problem::new(heads, lens);
        DeviceTables::of_cache(&problem, of, [32, slots], num_pages)
    }

    #[test]
    fn a_page_table_has_a_row_for_each_sequence() {
        let of = page_table(&[&[4, 2, 0], &[], &[3]], &[&[], &[], &[]]);
        let made = table(&[65, 0, 32], &of, 0, 5).unwrap();
        assert_eq!((made.stride, &made.residuals[..]), (3, &[][..]));
        assert_eq!(made.table, [4, 2, 0, 0, 0, 0, 3, 0, 0]);
        assert_eq!(table(&[65], &of, 0, 5).unwrap().table, [4, 2, 0]);
    }

    #[test]
    fn residual_pages_stand_in_the_slots_of_their_home_pages() {
        let of = page_table(&[&[4, 2, 0], &[], &[3]], &[&[7, 8], &[], &[9]]);
        // Home pages 1 and 2 of the first sequence, and page 0 of the last.
        let made = table(&[65, 0, 32], &of, 2, 10).unwrap();
        assert_eq!(made.residuals, [8, 7, 0, 0, 9, 0]);
        // More slots than residual pages.
        let made = table(&[65, 0, 32], &of, 4, 10).unwrap();
        assert_eq!(made.residuals, [0, 7, 8, 0, 0, 0, 0, 0, 9, 0, 0, 0]);
        let none = page_table(&[&[4, 2, 0]], &[&[]]);
        assert!(table(&[65], &none, 2, 10).is_err(), "no residual page");
    }

    #[test]
    fn a_table_that_leads_out_of_the_pool_is_refused() {
        let of = page_table(&[&[4, 2], &[3]], &[&[], &[]]);
        for num_pages in [0, 1, 2, 4] {
            assert!(table(&[64, 32], &of, 0, num_pages).is_err(), "{num_pages}");
        }
        let of = page_table(&[&[0]], &[&[7]]);
        assert!(table(&[1], &of, 2, 7).is_err() && table(&[1], &of, 2, 8).is_ok());
        let short = page_table(&[&[0, 1]], &[&[]]);
        assert!(table(&[64], &short, 0, 2).is_ok() && table(&[65], &short, 0, 2).is_err());
        assert!(
            table(&[1, 1], &short, 0, 2).is_err(),
            "a sequence that is not there"
        );
    }

    #[test]
    fn a_view_of_too_many_pages_is_refused_before_memory_is_asked_for() {
        let made = DeviceTables::in_order(2, 65, 32).unwrap();
        assert_eq!((made.stride, made.table), (3, vec![0, 1, 2, 3, 4, 5]));
        for (batch, max_kv_len) in [(1 << 18, 1 << 20), (1 << 60, 1 << 20), (usize::MAX, 64)] {
            assert!(
                DeviceTables::in_order(batch, max_kv_len, 64).is_err(),
                "{batch}"
            );
        }
    }
}
