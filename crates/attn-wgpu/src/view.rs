//! Contiguous caches of other engines (BNSH, BSNH), read in place.
//!
//! The kernels load 16 bytes of K and 4 of V at a time: offsets and strides must be multiples of that. A host's view is uploaded as it is,
//! or imported as pages (`import.rs`) if its strides do not suit or it exceeds a binding.

use attn_core::{Error, KvFormat, KvView, Problem, Scheme, StridedRows, view::reach};
use wgpu::BufferUsages;

use crate::{
    error::{WgpuError, device},
    gpu::Gpu,
    pipeline::Stored,
};

/// Rows of K or V in the caller's buffers: `head_dim` codes side by side per (sequence, KV head, token), and their f16 scales.
#[derive(Debug, Clone, Copy)]
pub struct SideRows<'a> {
    /// The codes, with `BufferUsages::STORAGE`.
    pub codes: &'a wgpu::Buffer,
    /// Offset of the first row in bytes.
    pub codes_at: usize,
    /// Bytes from one sequence, KV head, token to the next.
    pub code_strides: [usize; 3],
    /// f16 scales `[…][group]`; none for schemes without.
    pub scales: Option<&'a wgpu::Buffer>,
    /// Index of the first row's first scale.
    pub scales_at: usize,
    /// Scales from one sequence, KV head, token to the next.
    pub scale_strides: [usize; 3],
}

/// A contiguous cache in the caller's buffers.
#[derive(Debug, Clone, Copy)]
pub struct DeviceView<'a> {
    /// The schemes of K and V: f16, bf16, fp8 or an int8 scheme whose rows are not rotated.
    pub format: KvFormat,
    /// The rows of K.
    pub k: SideRows<'a>,
    /// The rows of V.
    pub v: SideRows<'a>,
    /// K's static scale per KV head; empty for schemes without.
    pub k_tensor_scales: &'a [f32],
    /// V's static scale per KV head; empty for schemes without.
    pub v_tensor_scales: &'a [f32],
}

/// The buffers that a kernel binds, and the places of each sequence's rows (`view.wgsl`).
type Checked = (Vec<Stored>, Vec<Vec<u32>>);

fn refuse<T>(what: &'static str, given: String, needed: String) -> Result<T, Error> {
    Err(device(
        "preparing a view",
        WgpuError::Buffer {
            what,
            given,
            needed,
        },
    ))
}

/// `{first row, KV head to KV head, token to token}` of sequence `b` in units of `unit`: 0 for steps that are never taken. The others end
/// inside a binding (`reach`), whose indices fit into 32 bits.
fn words(problem: &Problem, b: usize, at: usize, strides: [usize; 3], unit: usize) -> [u32; 3] {
    let len = problem.kv_lens[b];
    if len == 0 {
        return [0; 3];
    }
    let steps = [b, problem.num_kv_heads - 1, len - 1];
    let [sequence, head, token] = [0, 1, 2].map(|i| if steps[i] == 0 { 0 } else { strides[i] });
    [at + b * sequence, head, token].map(|x| (x / unit) as u32)
}

impl SideRows<'_> {
    /// Bytes of codes and of scales that the problem reads.
    fn check(
        &self,
        gpu: &Gpu,
        what: &'static str,
        (scheme, dim): (Scheme, usize),
        problem: &Problem,
        align: usize,
    ) -> Result<[u64; 2], Error> {
        let strides = self.code_strides;
        if [self.codes_at]
            .iter()
            .chain(&strides)
            .any(|x| x % align != 0)
        {
            let given = format!("starts at {}, strides {strides:?}", self.codes_at);
            return refuse(what, given, format!("multiples of {align} bytes"));
        }
        let row = dim * scheme.code_bits() / 8;
        let most = gpu.largest_binding();
        // A number that saturates is longer than any buffer.
        let fits = |what, buffer: &wgpu::Buffer, elems: usize, width: u64| {
            let needed = (elems as u64).saturating_mul(width);
            let usable = buffer.usage().contains(BufferUsages::STORAGE);
            match usable && needed <= buffer.size().min(most) {
                true => Ok(needed),
                false => refuse(
                    what,
                    format!("has {} bytes, usage {:?}", buffer.size(), buffer.usage()),
                    format!("{needed} bytes, at most {most} and usage STORAGE"),
                ),
            }
        };
        let end = reach(problem, self.codes_at, strides, row);
        let codes = fits(what, self.codes, end, 1)?;
        if !scheme.has_row_scales() {
            return Ok([codes, 0]);
        }
        let Some(scales) = self.scales else {
            return refuse(what, "has no scales".into(), "f16 scales".into());
        };
        let groups = scheme.groups(dim).count();
        let end = reach(problem, self.scales_at, self.scale_strides, groups);
        // The kernels read whole words.
        let end = end.saturating_add(end % 2);
        Ok([codes, fits("scales", scales, end, 2)?])
    }
}

impl DeviceView<'_> {
    /// Refuses a view that the kernels cannot read in place. Its format has been checked ([`KvFormat::check_rows`]).
    pub(crate) fn check(&self, gpu: &Gpu, problem: &Problem) -> Result<Checked, Error> {
        let k = self
            .k
            .check(gpu, "k", (self.format.k, problem.head_dim.k), problem, 16)?;
        let v = self
            .v
            .check(gpu, "v", (self.format.v, problem.head_dim.v), problem, 4)?;
        let scales = [self.k_tensor_scales, self.v_tensor_scales];
        self.format.check_scales(scales, problem.num_kv_heads)?;
        let stored = |binding, buffer: &wgpu::Buffer, bytes| Stored {
            binding,
            buffer: buffer.clone(),
            bytes,
        };
        let mut all = vec![stored(4, self.k.codes, k[0]), stored(5, self.v.codes, v[0])];
        for (binding, scheme, rows, bytes) in [
            (6, self.format.k, &self.k, k[1]),
            (7, self.format.v, &self.v, v[1]),
        ] {
            let scales = rows.scales.filter(|_| scheme.has_row_scales());
            all.extend(scales.map(|scales| stored(binding, scales, bytes)));
        }
        let lists = (0..problem.batch())
            .map(|b| {
                let codes = [(&self.k, 16), (&self.v, 4)]
                    .map(|(rows, unit)| words(problem, b, rows.codes_at, rows.code_strides, unit));
                // Only a scheme with scales has its scales' strides checked, and read.
                let scales = [(&self.k, self.format.k), (&self.v, self.format.v)];
                let scales = scales.map(|(rows, scheme)| match scheme.has_row_scales() {
                    true => words(problem, b, rows.scales_at, rows.scale_strides, 1),
                    false => [0; 3],
                });
                codes.into_iter().chain(scales).flatten().collect()
            })
            .collect();
        Ok((all, lists))
    }
}

/// One side of a host's view on the device.
pub(crate) struct Uploaded {
    codes: wgpu::Buffer,
    code_strides: [usize; 3],
    scales: Option<wgpu::Buffer>,
    scale_strides: [usize; 3],
}

impl Uploaded {
    pub fn rows(&self) -> SideRows<'_> {
        SideRows {
            codes: &self.codes,
            codes_at: 0,
            code_strides: self.code_strides,
            scales: self.scales.as_ref(),
            scales_at: 0,
            scale_strides: self.scale_strides,
        }
    }
}

/// Uploads a host's view as it is; `None` if it must be imported instead.
pub(crate) fn upload(
    gpu: &Gpu,
    view: &KvView<'_>,
    problem: &Problem,
) -> Result<Option<[Uploaded; 2]>, Error> {
    let most = gpu.largest_binding();
    let suits = |rows: &StridedRows<'_>, align: usize| {
        rows.code_strides.iter().all(|stride| stride % align == 0)
            && (rows.codes.len() + 16) as u64 <= most
            && 2 * (rows.scales.len() + 2) as u64 <= most
    };
    if !suits(view.k(), 16) || !suits(view.v(), 4) {
        return Ok(None);
    }
    let side = |rows: &StridedRows<'_>, scheme: Scheme, dim: usize| -> Result<Uploaded, Error> {
        let row = dim * scheme.code_bits() / 8;
        let used = reach(problem, 0, rows.code_strides, row);
        let scales = if scheme.has_row_scales() {
            let groups = scheme.groups(dim).count();
            let used = reach(problem, 0, rows.scale_strides, groups);
            let bytes = bytemuck::cast_slice(&rows.scales[..used.min(rows.scales.len())]);
            Some(write(gpu, bytes)?)
        } else {
            None
        };
        Ok(Uploaded {
            codes: write(gpu, &rows.codes[..used.min(rows.codes.len())])?,
            code_strides: rows.code_strides,
            scales,
            scale_strides: rows.scale_strides,
        })
    };
    Ok(Some([
        side(view.k(), view.format().k, problem.head_dim.k)?,
        side(view.v(), view.format().v, problem.head_dim.v)?,
    ]))
}

/// A storage buffer with these bytes, its end padded to 16.
fn write(gpu: &Gpu, bytes: &[u8]) -> Result<wgpu::Buffer, Error> {
    let size = bytes.len().next_multiple_of(16).max(16);
    let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
    let buffer = gpu.buffer("attn view", size as u64, usage)?;
    let (whole, rest) = bytes.split_at(bytes.len() / 4 * 4);
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    gpu.guarded("writing a view", || {
        gpu.queue.write_buffer(&buffer, 0, whole);
        gpu.queue.write_buffer(
            &buffer,
            whole.len() as u64,
            &last[..rest.len().next_multiple_of(4)],
        );
    })?;
    Ok(buffer)
}
