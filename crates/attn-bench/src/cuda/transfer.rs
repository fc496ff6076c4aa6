//! Timings of what an engine does with pages beside attention: rows from pages, pages between pools, results merged over shards.

use attn_core::{CacheConfig, Error, Heads, KvFormat, Scheme};
use attn_cuda::{
    internals::{copy_on, failed},
    native::{
        CopyPagesArgs, DeviceAddress, Dtype, ExportArgs, KvRows, MergeStatesArgs, PagedSequences,
        Pages,
    },
};

use super::{CudaTimer, driver};
use crate::Timing;

const HEADS: usize = 8;
const DIM: usize = 128;
const BATCH: usize = 8;
const LEN: usize = 8192;
const PAGE_SIZE: usize = 64;
/// Bytes that a copy to the host moves: what PCIe takes some milliseconds for.
const SWAPPED: usize = 64 << 20;
/// Launches of one graph, where a launch takes microseconds.
const SMALL_LAUNCHES: usize = 50;
/// Launches of one graph, where a launch moves far more than L2 holds.
const LARGE_LAUNCHES: usize = 4;

/// What one transfer took.
#[derive(Debug, Clone)]
pub struct Transfer {
    /// What was done.
    pub name: String,
    /// Bytes read and written.
    pub bytes: usize,
    /// The work.
    pub work: Timing,
    /// The driver's copy that reads and writes as many bytes, in the same run; none where no copy is comparable.
    pub copy: Option<Timing>,
}

impl CudaTimer {
    /// Times exports of 8 × 8192 tokens of 8 KV heads of 128 dims, copies of their pages, and merges of 8 × 256 rows.
    ///
    /// # Errors
    /// [`Error::Device`], also where memory is short.
    pub fn transfers(&mut self, runs: usize) -> Result<Vec<Transfer>, Error> {
        let mut all = Vec::new();
        for format in [
            KvFormat::INT8,
            KvFormat::INT4,
            KvFormat::same(Scheme::Fp8E4m3),
            KvFormat::same(Scheme::Bf16),
        ] {
            all.push(self.export(format, runs)?);
        }
        all.push(self.copied_pages(runs)?);
        all.extend(self.swapped_pages(runs)?);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            all.push(self.merge(dtype, runs)?);
        }
        Ok(all)
    }

    /// Microseconds per launch of `enqueue`, captured `launches` times.
    fn time_launches(
        &self,
        launches: usize,
        runs: usize,
        enqueue: &dyn Fn() -> Result<(), Error>,
    ) -> Result<Timing, Error> {
        let graph = self.capture(&|| (0..launches).try_for_each(|_| enqueue()))?;
        Ok(Timing::of(self.replay(&graph, launches, runs)?))
    }

    /// The driver's copy inside the device that reads half of `bytes`, and writes the other half.
    fn copy(&mut self, bytes: usize, runs: usize) -> Result<Timing, Error> {
        self.reserve(bytes)?;
        let (from, to) = self.halves(bytes);
        let stream = self.buffers.raw();
        self.time_launches(LARGE_LAUNCHES, runs, &|| {
            // SAFETY: both halves are the arena's, which no one else uses; the stream is the buffers' own.
            unsafe { copy_on(stream, from, to, bytes / 2) }
        })
    }

    /// The arena's first `bytes / 2` bytes, and as many behind them.
    fn halves(&self, bytes: usize) -> (DeviceAddress, DeviceAddress) {
        let arena = self.arena.as_ref().map(|arena| self.buffers.address(arena));
        let from = arena.unwrap_or_default();
        (from, from.offset(bytes / 2))
    }

    fn export(&mut self, format: KvFormat, runs: usize) -> Result<Transfer, Error> {
        let heads = Heads::new(HEADS, HEADS, DIM);
        let slots = format.residual_slots(PAGE_SIZE, 1);
        let home = BATCH * LEN / PAGE_SIZE;
        let config = CacheConfig::builder(format, heads)
            .centres(false)
            .sequences(BATCH)
            .pages(home + BATCH * slots)
            .build();
        let layout = config.layout()?;
        let pool_bytes = config.num_pages * layout.page_bytes();
        let row_bytes = BATCH * LEN * HEADS * DIM * 2;
        let read = home * layout.page_bytes();
        let copy = self.copy(read + 2 * row_bytes, runs)?;
        let pool = self.reserve(pool_bytes + 2 * row_bytes)?;
        let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i * 167) as u8 >> 1).collect();
        self.fill(&bytes, 0, pool_bytes)?;
        let [k, v] = [0, row_bytes].map(|at| pool.offset(pool_bytes + at));
        let at = &self.buffers;
        let table = at.upload(&(0..home as u32).collect::<Vec<_>>())?;
        let residuals: Vec<u32> = (home as u32..config.num_pages as u32).collect();
        let residuals = (slots > 0).then(|| at.upload(&residuals)).transpose()?;
        let lens = at.upload(&[LEN as i32; BATCH])?;
        let starts: Vec<i32> = (0..=BATCH).map(|b| (b * LEN) as i32).collect();
        let starts = at.upload(&starts)?;
        let scales = at.address(&self.scales);
        let args = ExportArgs {
            rows: KvRows {
                k,
                v,
                dtype: Dtype::Bf16,
                k_token_stride: HEADS * DIM,
                v_token_stride: HEADS * DIM,
            },
            sequences: PagedSequences {
                pool: Pages::new(pool, &layout, config.num_pages),
                page_table: at.address(&table),
                page_table_stride: LEN / PAGE_SIZE,
                residual_pages: residuals
                    .as_ref()
                    .map_or(DeviceAddress::NULL, |pages| at.address(pages)),
                residual_slots: slots,
                kv_lens: at.address(&lens),
                tensor_scales: [scales; 2],
            },
            row_starts: at.address(&starts),
            first_tokens: DeviceAddress::NULL,
            batch: BATCH,
            max_tokens: LEN,
        };
        let prepared = self.gpu.prepare_op(layout)?;
        let work = self.time_launches(LARGE_LAUNCHES, runs, &|| {
            // SAFETY: the arena holds the pool, and K's and V's rows behind it; the table names every page once, ranges are whole sequences;
            // the buffers live until the graph has run.
            unsafe { self.gpu.enqueue(&prepared, at.raw(), &args) }
        })?;
        Ok(Transfer {
            name: format!("export to bf16 rows, {BATCH} × {LEN} tokens, {format}"),
            bytes: read + 2 * row_bytes,
            work,
            copy: Some(copy),
        })
    }

    /// Every page of a pool's first half to its second one, in another order.
    fn copied_pages(&mut self, runs: usize) -> Result<Transfer, Error> {
        let page = PAGE_SIZE * HEADS * (DIM + 2) * 2;
        let count = BATCH * LEN / PAGE_SIZE;
        let bytes = 2 * count * page;
        let copy = self.copy(bytes, runs)?;
        let (from, to) = self.halves(bytes);
        let pages = |at| Pages {
            at,
            stride: page,
            num_pages: count,
        };
        let pairs: Vec<i64> = (0..count)
            .flat_map(|i| [i as i64, (i * 7 % count) as i64])
            .collect();
        let pairs = self.buffers.upload(&pairs)?;
        let args = CopyPagesArgs {
            from: pages(from),
            to: pages(to),
            page_bytes: page,
            pairs: self.buffers.address(&pairs),
            num_pairs: count,
        };
        let prepared = self.gpu.prepare_op(())?;
        let work = self.time_launches(LARGE_LAUNCHES, runs, &|| {
            // SAFETY: both halves are the arena's; 7 is prime to the count, a power of two, so that each page is written once.
            unsafe { self.gpu.enqueue(&prepared, self.buffers.raw(), &args) }
        })?;
        Ok(Transfer {
            name: format!("copy of {count} pages of {} KiB", page >> 10),
            bytes,
            work,
            copy: Some(copy),
        })
    }

    /// Pages from the device to pinned host memory, and back.
    fn swapped_pages(&mut self, runs: usize) -> Result<[Transfer; 2], Error> {
        let page = PAGE_SIZE * HEADS * (DIM + 2) * 2;
        let count = SWAPPED / page;
        let device = self.reserve(count * page)?;
        let context = self.buffers.stream.context();
        // SAFETY: the graphs write it before anyone reads it, and a byte has no invalid value.
        let mut host = driver(unsafe { context.alloc_pinned_with_flags::<u8>(count * page, 0) })?;
        let address = {
            let there = host
                .as_mut_ptr()
                .map_err(failed("allocating pinned memory"))?;
            DeviceAddress::new(there as u64)
        };
        let pairs: Vec<i64> = (0..count as i64).flat_map(|i| [i, i]).collect();
        let pairs = self.buffers.upload(&pairs)?;
        let prepared = self.gpu.prepare_op(())?;
        let pages = |at| Pages {
            at,
            stride: page,
            num_pages: count,
        };
        let stream = self.buffers.raw();
        let swap = |name: &str, from, to| {
            let args = CopyPagesArgs {
                from: pages(from),
                to: pages(to),
                page_bytes: page,
                pairs: self.buffers.address(&pairs),
                num_pairs: count,
            };
            let work = self.time_launches(1, runs, &|| {
                // SAFETY: the arena and the host's memory hold so many pages; each is written once.
                unsafe { self.gpu.enqueue(&prepared, stream, &args) }
            })?;
            let copy = self.time_launches(1, runs, &|| {
                // SAFETY: as above.
                unsafe { copy_on(stream, from, to, count * page) }
            })?;
            Ok::<_, Error>(Transfer {
                name: format!("{name}, {count} pages of {} KiB", page >> 10),
                bytes: count * page,
                work,
                copy: Some(copy),
            })
        };
        let both = [
            swap("swap out to pinned memory", device, address)?,
            swap("swap in from pinned memory", address, device)?,
        ];
        driver(self.buffers.stream.synchronize())?;
        Ok(both)
    }

    fn merge(&mut self, dtype: Dtype, runs: usize) -> Result<Transfer, Error> {
        let (states, rows) = (8, 256);
        let element = match dtype {
            Dtype::F32 => 4,
            _ => 2,
        };
        let outs = self.buffers.bytes(states * rows * DIM * element)?;
        let lses = self.buffers.floats(states * rows)?;
        let (out, lse) = (
            self.buffers.bytes(rows * DIM * element)?,
            self.buffers.floats(rows)?,
        );
        let at = &self.buffers;
        let args = MergeStatesArgs {
            outs: at.address(&outs),
            lses: at.address(&lses),
            out_stride: rows * DIM,
            lse_stride: rows,
            in_dtype: dtype,
            out: at.address(&out),
            out_dtype: dtype,
            lse: at.address(&lse),
            states,
            rows,
            head_dim: DIM,
        };
        let prepared = self.gpu.prepare_op(())?;
        let work = self.time_launches(SMALL_LAUNCHES, runs, &|| {
            // SAFETY: the buffers hold so many states and rows, and live until the graph has run.
            unsafe { self.gpu.enqueue(&prepared, at.raw(), &args) }
        })?;
        Ok(Transfer {
            name: format!("merge of {states} × {rows} rows, {dtype:?}"),
            bytes: (states + 1) * rows * (DIM * element + 4),
            work,
            copy: None,
        })
    }
}
