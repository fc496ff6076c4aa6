//! Pools of pages to time: filled once by the append kernel, then copied.

use attn_core::{CacheConfig, Error, Problem, Rotary, RotaryScaling, RotaryStyle};
use attn_cuda::native::{
    AppendArgs, AppendShape, DeviceAddress, Dtype, KvRows, PagedSequences, Prepared, RotaryArgs,
    RotaryQueries, SlotAppendArgs,
};
use cudarc::driver::CudaSlice;

use super::{Buffers, CudaTimer, NOISE, Rotation};
use crate::{Operation, Workload, noise};

/// The table of a pool that lies in the arena.
pub(super) struct Pages {
    num_pages: usize,
    page_bytes: usize,
    stride: usize,
    page_table: CudaSlice<u32>,
    /// The slots of every sequence, where the format has a window.
    residual_pages: Option<CudaSlice<u32>>,
    residual_slots: usize,
    /// Slots of the sequences' last tokens, for an append by slots.
    slots: Option<CudaSlice<i64>>,
    /// The residual pages of these tokens, where the format has a window.
    slot_residuals: Option<CudaSlice<u32>>,
    /// What an append rotates K by.
    rotary: Option<Box<OnDevice>>,
    /// Elements of a token's K.
    rows: [usize; 2],
}

/// Rotary positions of the sequences' last tokens, and their queries.
struct OnDevice {
    cos_sin: CudaSlice<f32>,
    num_positions: usize,
    positions: CudaSlice<i64>,
    /// bf16 `[batch][heads][dim]`.
    q: CudaSlice<u16>,
    heads: usize,
    dim: usize,
}

impl OnDevice {
    fn new(buffers: &Buffers, problem: &Problem) -> Result<Self, Error> {
        let (heads, dim) = (problem.num_q_heads, problem.head_dim.k);
        let longest = problem.kv_lens.iter().copied().max().unwrap_or(0).max(1);
        let table = Rotary::new(dim, 5e5, &RotaryScaling::None)?.table(0..longest)?;
        // `supports` has refused empty sequences.
        let positions: Vec<i64> = problem.kv_lens.iter().map(|len| *len as i64 - 1).collect();
        let q = noise(7, positions.len() * heads * dim).into_iter();
        let q: Vec<u16> = q.map(|x| (x.to_bits() >> 16) as u16).collect();
        Ok(OnDevice {
            cos_sin: buffers.upload(table.cos_sin())?,
            num_positions: longest,
            positions: buffers.upload(&positions)?,
            q: buffers.upload(&q)?,
            heads,
            dim,
        })
    }

    fn args(&self, buffers: &Buffers) -> RotaryArgs {
        let q = buffers.address(&self.q);
        let stride = self.heads * self.dim;
        RotaryArgs {
            style: RotaryStyle::HalfSplit,
            rotary_dim: self.dim,
            cos_sin: buffers.address(&self.cos_sin),
            cos_sin_dtype: Dtype::F32,
            num_positions: self.num_positions,
            positions: buffers.address(&self.positions),
            queries: Some(RotaryQueries {
                q,
                out: q,
                heads: self.heads,
                token_stride: stride,
                out_token_stride: stride,
            }),
        }
    }
}

impl Pages {
    /// The sequences in the copy at `pool`.
    pub(super) fn sequences(
        &self,
        buffers: &Buffers,
        pool: DeviceAddress,
        kv_lens: DeviceAddress,
        tensor_scales: [DeviceAddress; 2],
    ) -> PagedSequences {
        let residuals = self.residual_pages.as_ref();
        PagedSequences {
            pool: self.pool(pool),
            page_table: buffers.address(&self.page_table),
            page_table_stride: self.stride,
            residual_pages: residuals.map_or(DeviceAddress::NULL, |table| buffers.address(table)),
            residual_slots: self.residual_slots,
            kv_lens,
            tensor_scales,
        }
    }

    fn pool(&self, at: DeviceAddress) -> attn_cuda::native::Pages {
        attn_cuda::native::Pages {
            at,
            stride: self.page_bytes,
            num_pages: self.num_pages,
        }
    }

    /// K and V of noise.
    fn rows(&self, timer: &CudaTimer) -> KvRows {
        let noise = timer.buffers.address(&timer.noise);
        KvRows {
            k: noise,
            v: noise.offset(2 * NOISE),
            dtype: Dtype::Bf16,
            k_token_stride: self.rows[0],
            v_token_stride: self.rows[1],
        }
    }

    /// The append of the last token of every sequence, of noise, by slots.
    pub(super) fn slot_append_args(
        &self,
        timer: &CudaTimer,
        pool: DeviceAddress,
        tensor_scales: [DeviceAddress; 2],
    ) -> SlotAppendArgs {
        let buffers = &timer.buffers;
        let (slots, residuals) = (self.slots.as_ref(), self.slot_residuals.as_ref());
        SlotAppendArgs {
            rows: self.rows(timer),
            pool: self.pool(pool),
            tensor_scales,
            slots: slots.map_or(DeviceAddress::NULL, |slots| buffers.address(slots)),
            residual_pages: residuals.map_or(DeviceAddress::NULL, |pages| buffers.address(pages)),
            tokens: slots.map_or(0, CudaSlice::len),
            rotary: self.rotary.as_ref().map(|rotary| rotary.args(buffers)),
            centres: None,
        }
    }

    /// The append of `tokens` tokens of noise to the first sequence.
    pub(super) fn append_args(
        &self,
        timer: &CudaTimer,
        sequences: PagedSequences,
        tokens: usize,
    ) -> AppendArgs {
        AppendArgs {
            rows: self.rows(timer),
            sequences,
            batch: 1,
            tokens,
            rotary: None,
        }
    }
}

/// Pages of every sequence, side by side for each, scattered over the pool as in an engine.
pub(super) fn scattered(counts: &[usize], stride: usize) -> Vec<u32> {
    let total: usize = counts.iter().sum();
    let prime = [7919, 7907, 7901]
        .into_iter()
        .find(|p| !total.is_multiple_of(*p))
        .unwrap_or(1);
    let mut table = vec![0; counts.len() * stride];
    let mut next = 0;
    for (b, count) in counts.iter().enumerate() {
        for page in &mut table[b * stride..][..*count] {
            *page = (next * prime % total) as u32;
            next += 1;
        }
    }
    table
}

/// The appends to a pool.
pub(super) struct Appends {
    /// Behind the sequences.
    pub(super) behind: Prepared<AppendArgs>,
    pub(super) by_slots: Prepared<SlotAppendArgs>,
}

/// Fills the pool's copies with what lies there before the work.
pub(super) fn fill(
    timer: &mut CudaTimer,
    workload: &Workload,
    scales: [DeviceAddress; 2],
) -> Result<(Appends, Pages, Rotation), Error> {
    let problem = &workload.problem;
    let batch = problem.batch();
    let page_size = workload.page_size;
    let slots = workload
        .format
        .residual_slots(page_size, problem.max_q_len());
    let counts: Vec<usize> = problem
        .kv_lens
        .iter()
        .map(|n| n.div_ceil(page_size))
        .collect();
    let total: usize = counts.iter().sum();
    let longest = counts.iter().copied().max().unwrap_or(0).max(1);
    // As long as the plan may ask.
    let stride = longest.max(workload.planned.div_ceil(page_size));
    let config = CacheConfig::builder(workload.format, problem.heads())
        .centres(false)
        .sequences(batch)
        .page_size(page_size)
        .pages(total + batch * slots)
        .build();
    let page_bytes = config.layout()?.page_bytes();
    let shape = AppendShape {
        layout: config.layout()?,
        rotary: workload.operation == Operation::AppendRotary,
    };
    let append = Appends {
        behind: timer.gpu.prepare_op(shape)?,
        by_slots: timer.gpu.prepare_op(shape)?,
    };
    let rotation = timer.rotate(workload, config.num_pages * page_bytes)?;
    // Behind the home pages, those of one sequence after the other.
    let residuals: Vec<u32> = (total as u32..config.num_pages as u32).collect();
    let pages = |table: &[u32], stride| -> Result<Pages, Error> {
        Ok(Pages {
            num_pages: config.num_pages,
            page_bytes,
            stride,
            page_table: timer.buffers.upload(table)?,
            residual_pages: match &residuals[..] {
                [] => None,
                pages => Some(timer.buffers.upload(pages)?),
            },
            slots: None,
            slot_residuals: None,
            rotary: None,
            residual_slots: slots,
            rows: problem.kv_elements(),
        })
    };
    // The first pages in their own order, and the rest of the pool from them: residual pages may hold any bytes.
    let [in_k, in_v] = problem.kv_elements();
    let widest = in_k.max(in_v);
    let first = total.min(NOISE / widest / page_size);
    let in_order = pages(&(0..first as u32).collect::<Vec<_>>(), first)?;
    let table = scattered(&counts, stride);
    let mut scattered = pages(&table, stride)?;
    if workload.operation == Operation::AppendRotary {
        scattered.rotary = Some(Box::new(OnDevice::new(&timer.buffers, problem)?));
    }
    if workload.operation.is_by_slots() {
        // `supports` has refused empty sequences.
        let last = problem.kv_lens.iter().map(|len| len - 1).enumerate();
        let slot = |(b, at)| {
            let page = table[b * stride + at / page_size] as usize;
            (page * page_size + at % page_size) as i64
        };
        let of_last: Vec<i64> = last.clone().map(slot).collect();
        scattered.slots = Some(timer.buffers.upload(&of_last)?);
        if slots > 0 {
            let format = workload.format;
            let residual = |(b, at)| {
                residuals[b * slots + format.residual_slot(page_size, slots, at / page_size)]
            };
            let of_last: Vec<u32> = last.map(residual).collect();
            scattered.slot_residuals = Some(timer.buffers.upload(&of_last)?);
        }
    }
    let lens = timer.buffers.upload(&[(first * page_size) as i32])?;
    let at = timer.buffers.address(&lens);
    let sequences = in_order.sequences(&timer.buffers, rotation.base, at, scales);
    let args = in_order.append_args(timer, sequences, first * page_size);
    // SAFETY: the arena holds the pool; pages below `first` and the first sequence's residual pages; the noise holds so many tokens; one stream.
    unsafe {
        timer
            .gpu
            .enqueue(&append.behind, timer.buffers.raw(), &args)
    }?;
    if first > 0 {
        timer.repeat(0, first * page_bytes, config.num_pages * page_bytes)?;
    }
    // Open pages, and the residual pages that belong to them.
    let before = usize::from(workload.operation != Operation::Decode);
    let lens: Vec<i32> = problem
        .kv_lens
        .iter()
        .map(|&n| (n - before) as i32)
        .collect();
    let lens_there = timer.buffers.upload(&lens)?;
    for (b, &len) in lens.iter().enumerate() {
        let at = timer.buffers.address(&lens_there).offset(4 * b);
        let mut sequences = scattered.sequences(&timer.buffers, rotation.base, at, scales);
        sequences.page_table = sequences.page_table.offset(4 * b * stride);
        sequences.residual_pages = sequences.residual_pages.offset(4 * b * slots);
        let args = scattered.append_args(timer, sequences, len as usize % page_size);
        // SAFETY: as above; the last page of sequence `b` is in its row of the table.
        unsafe {
            timer
                .gpu
                .enqueue(&append.behind, timer.buffers.raw(), &args)
        }?;
    }
    let copy = rotation.copy_bytes;
    timer.repeat(0, copy, rotation.copies * copy)?;
    Ok((append, scattered, rotation))
}

#[cfg(test)]
mod tests {
    use super::scattered;

    #[test]
    fn every_page_belongs_to_one_sequence() {
        for counts in [vec![128; 512], vec![1, 2048, 7, 0, 3], vec![7919]] {
            let stride = counts.iter().copied().max().unwrap();
            let table = scattered(&counts, stride);
            let rows = table.chunks(stride).zip(&counts);
            let mut pages: Vec<u32> = rows.flat_map(|(row, n)| row[..*n].to_vec()).collect();
            pages.sort_unstable();
            let total = counts.iter().sum::<usize>() as u32;
            assert_eq!(pages, (0..total).collect::<Vec<_>>());
        }
    }
}
