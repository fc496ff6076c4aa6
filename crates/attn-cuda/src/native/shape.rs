//! What a decode launch takes: kernel, grid, workspace, parameters. Pure functions of the problem and of what a device has.

use attn_core::{Error, KvFormat, PageLayout, Problem, Unsupported, arithmetic::LOG2_E};

use super::{DecodeArgs, DeviceKv};
use crate::{
    geometry::{Geometry, Launch, Limits, Unit},
    instance::{self, Instance},
    params::{DecodeParams, Divisor},
};

/// One problem's launches, for lengths up to its longest.
#[derive(Debug, Clone)]
pub struct Shape {
    /// The kernel.
    pub instance: Instance,
    /// Of its CTAs.
    pub geometry: Geometry,
    /// Dynamic shared memory of a CTA, or of each of its teams, bytes.
    pub shared_bytes: usize,
    /// The grid and what it hands over.
    pub launch: Launch,
    pub(super) max_kv_len: usize,
    page_bytes: usize,
    counters_bytes: usize,
    ml_bytes: usize,
    states_bytes: usize,
    /// Whether a slot says that it is there by not being zero; nothing is counted then.
    slots_are_zeroed: bool,
}

/// The instance, geometry and shared memory of a problem's kernel.
pub(crate) fn choose(
    limits: Limits,
    problem: &Problem,
    format: KvFormat,
    page_size: usize,
) -> Result<(Instance, Geometry, usize), Unsupported> {
    let refuse = |(what, built): (String, String)| Unsupported::NoKernel {
        backend: "cuda",
        what,
        built,
    };
    instance::covered(format, page_size).map_err(refuse)?;
    match Instance::decode(problem, format, page_size, limits) {
        Some(instance @ Instance::Decode { geometry, .. }) => {
            let shared = geometry.shared_bytes(format, problem.head_dim, page_size);
            Ok((instance, geometry, shared))
        }
        _ => Err(refuse((
            format!(
                "{format} with head_dim {} in {} KiB of shared memory",
                problem.head_dim,
                limits.shared_limit / 1024
            ),
            "what fits, such as smaller head_dims".into(),
        ))),
    }
}

impl Shape {
    /// For pages of `page_size` tokens, or 0 for a view.
    ///
    /// # Errors
    /// Those of [`Problem::check`] and [`KvFormat::check`]; [`Unsupported::NoKernel`] where no kernel covers the problem.
    pub fn new(
        limits: Limits,
        problem: &Problem,
        format: KvFormat,
        page_size: usize,
    ) -> Result<Self, Error> {
        problem.check()?;
        format.check(
            problem.head_dim,
            if page_size == 0 { 64 } else { page_size },
        )?;
        let (instance, geometry, shared_bytes) = choose(limits, problem, format, page_size)?;
        let max_kv_len = problem.kv_lens.iter().copied().max().unwrap_or(0);
        let (batch, heads) = (problem.batch(), problem.num_kv_heads);
        let launch = geometry.launch(problem, format, limits.sms);
        let slots = launch.slots(batch, heads);
        let aligned = |bytes: usize| bytes.next_multiple_of(256);
        let slots_are_zeroed = geometry.unit == Unit::HandOver;
        // Views have no pages.
        let page_bytes = match page_size {
            0 => 0,
            _ => PageLayout::new(format, problem.head_dim, page_size, heads)?.page_bytes(),
        };
        Ok(Shape {
            instance,
            geometry,
            shared_bytes,
            launch,
            max_kv_len,
            page_bytes,
            counters_bytes: if slots_are_zeroed {
                0
            } else {
                aligned(batch * heads * launch.row_blocks * 4)
            },
            ml_bytes: aligned(slots * geometry.rows() * 8),
            states_bytes: aligned(slots * geometry.rows() * problem.head_dim * 4),
            slots_are_zeroed,
        })
    }

    /// Bytes of memory that every launch needs, aligned to 256.
    pub fn workspace_bytes(&self) -> usize {
        self.counters_bytes + self.ml_bytes + self.states_bytes
    }

    /// Bytes at the workspace's start to zero once; launches leave them zero.
    pub fn zeroed_bytes(&self) -> usize {
        if self.slots_are_zeroed {
            self.workspace_bytes()
        } else {
            self.counters_bytes
        }
    }

    /// The kernel's parameter block.
    pub fn params(&self, p: &Problem, args: &DecodeArgs) -> DecodeParams {
        let strides = |s: [usize; 3]| s.map(|x| x as i64);
        let mut params = DecodeParams {
            q: args.q,
            out: args.out,
            lse: args.lse,
            dtype: args.dtype.code(),
            kv_lens: args.kv_lens,
            k_tensor_scales: args.k_tensor_scales,
            v_tensor_scales: args.v_tensor_scales,
            alibi_slopes: args.alibi_slopes,
            counters: args.workspace,
            state_ml: args.workspace + self.counters_bytes as u64,
            states: args.workspace + (self.counters_bytes + self.ml_bytes) as u64,
            log2_scale: p.softmax_scale * LOG2_E,
            softcap_inner: p.softcap.map_or(0.0, |cap| 2.0 / cap),
            softcap_outer: p.softcap.map_or(0.0, |cap| cap * LOG2_E),
            batch: p.batch() as i32,
            num_q_heads: p.num_q_heads as i32,
            num_kv_heads: p.num_kv_heads as i32,
            heads_per_kv: p.heads_per_kv() as i32,
            q_len: p.q_len as i32,
            row_blocks: self.launch.row_blocks as i32,
            max_slots: self.launch.max_slots as i32,
            window_left: p.window_left.map_or(-1, |w| w.min(1 << 30) as i32),
            causal: i32::from(p.causal),
            tile_split: i32::from(self.launch.tile_split),
            by_heads: Divisor::new(p.heads_per_kv()),
            by_row_blocks: Divisor::new(self.launch.row_blocks),
            by_ctas: Divisor::new(self.launch.grid[0]),
            by_sms: Divisor::new(self.launch.grid[0] / self.geometry.ctas),
            ..DecodeParams::default()
        };
        match args.kv {
            DeviceKv::Paged {
                pool,
                page_table,
                page_table_stride,
                tail_pages,
                ..
            } => {
                params.k = pool;
                params.page_table = page_table;
                params.page_table_stride = page_table_stride as i32;
                params.tail_pages = tail_pages;
                params.page_bytes = self.page_bytes as i32;
            }
            DeviceKv::Strided {
                k,
                v,
                code_strides,
                scale_strides,
            } => {
                [params.k, params.k_scales] = k;
                [params.v, params.v_scales] = v;
                [params.k_strides, params.v_strides] = code_strides.map(strides);
                [params.k_scale_strides, params.v_scale_strides] = scale_strides.map(strides);
            }
        }
        params
    }
}
