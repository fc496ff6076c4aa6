//! The plan of a decode launch: kernel, grid, workspace and parameters. Pure functions of the problem and of the device's limits.

mod limits;

use attn_core::{
    Error, KvFormat, PageLayout, Problem, Unsupported, arithmetic::LOG2_E, error::refuse,
    layout::Side, segments::num_spans,
};

use attn_kernels::cuda::{
    DeviceLimits, Instance, Kernel, KernelChoice, KernelConfig, KvLayout, Launch, Preferences,
    instance,
    params::{DecodeParams, DequantizeParams, FastDivmod, QueryBlock},
    select::{self, Candidate, Selected},
    smem::shared_bytes,
};

use self::limits::{MOST_WORK, check_counts, check_work, work};
use super::{
    DeviceAddress,
    decode_args::{CentresArgs, DecodeArgs, SpansArgs},
    dequantize::Dequantized,
    dtype,
    kv::check_scale_address,
    query_blocks::{Blocks, Launched, PlanKind, listed},
};
use crate::{device::Device, error::BACKEND, sizes};

/// The launch of a problem, for lengths up to its longest.
#[derive(Debug, Clone)]
pub struct LaunchPlan {
    /// Kernel with everything that it is compiled for.
    pub instance: Instance,
    /// Configuration of its CTAs.
    pub config: KernelConfig,
    /// The kernels that cover the problem, that of `config` among them.
    pub candidates: Vec<Candidate>,
    /// Dynamic shared memory of a CTA, or of each of its teams, bytes.
    pub shared_bytes: usize,
    /// Grid, and the partials that its CTAs exchange.
    pub launch: Launch,
    pub(super) max_kv_len: usize,
    /// Pages that a launch makes of the cache, and that the others attend in its place.
    pub dequantized: Option<Dequantized>,
    layout: KvLayout,
    /// The format of the cache, also where its dequantized pages are attended.
    format: KvFormat,
    /// The layout of a page; `None` if the cache is rows of another engine.
    pages: Option<PageLayout>,
    /// Blocks of query tokens that the host knows.
    query_blocks: Vec<QueryBlock>,
    /// Entries of the list of blocks; 0 without one.
    pub(super) num_blocks: usize,
    /// Query tokens of a block, at most.
    pub(super) block_tokens: usize,
    /// Blocks that one launch attends: the workspace has room for their partials.
    per_launch: usize,
    counters_bytes: usize,
    max_sum_bytes: usize,
    partial_o_bytes: usize,
    /// States of the rows that warpgroups of `many_rows.cu` attend, and wide rows that are brought together, behind the partials.
    row_states_bytes: usize,
    /// Whether a nonzero word of every partial has arrived. There are no arrival counts then.
    partials_are_zeroed: bool,
}

/// The most bytes of partials where the blocks of query tokens may be divided among several launches.
const MOST_PARTIALS: usize = 256 << 20;

/// A problem's kernel, and what it was selected among.
struct Chosen {
    instance: Instance,
    selected: Selected,
    /// Bytes of a CTA, or of each of its teams.
    shared: usize,
}

/// The kernel of a problem.
pub(crate) fn choose(
    device: &Device,
    problem: &Problem,
    format: KvFormat,
    layout: KvLayout,
) -> Result<Instance, Unsupported> {
    let (limits, preferences) = (device.limits(), &device.preferences);
    let kind = PlanKind::Known;
    let launched = Launched::new(kind, problem, format, layout, limits, preferences)?;
    let preferences = launched.preferences(preferences);
    let chosen = configure(limits, &preferences, &launched, format, layout)?;
    Ok(chosen.instance)
}

fn configure(
    limits: DeviceLimits,
    preferences: &Preferences,
    launched: &Launched<'_>,
    format: KvFormat,
    layout: KvLayout,
) -> Result<Chosen, Unsupported> {
    let problem = &*launched.problem;
    let refuse = |(what, built): (String, String)| Unsupported::NoKernel {
        backend: BACKEND,
        what,
        built,
    };
    instance::covered(format, layout).map_err(refuse)?;
    let Some(selected) = select::select(problem, format, layout, limits, preferences) else {
        return Err(refuse((
            format!(
                "{format} with head_dim {} in {} KiB of shared memory",
                problem.head_dim,
                limits.shared_limit / 1024
            ),
            "what fits, such as smaller head_dims".into(),
        )));
    };
    let config = selected.config;
    check_counts(problem).map_err(refuse)?;
    if matches!(launched.blocks, Blocks::Sequences) {
        let work = work(problem, config, problem.kv_lens.iter().copied());
        check_work(problem, work).map_err(refuse)?;
    }
    Ok(Chosen {
        instance: Instance::configured(problem, format, layout, config),
        shared: shared_bytes(
            &config,
            format,
            problem.head_dim,
            layout,
            limits.shared_limit,
        ),
        selected,
    })
}

impl LaunchPlan {
    /// Refuses a batch that would be too much work if all of its sequences were as long as the longest: a native plan's may be.
    pub(super) fn check_longest(&self, problem: &Problem) -> Result<(), Error> {
        if self.num_blocks > 0 {
            return Ok(());
        }
        let longest = problem.kv_lens.iter().map(|_| self.max_kv_len);
        let refuse = |(what, built)| Unsupported::NoKernel {
            backend: "cuda",
            what,
            built,
        };
        check_work(problem, work(problem, self.config, longest)).map_err(refuse)?;
        Ok(())
    }

    /// The plan for K and V that lie so.
    ///
    /// # Errors
    /// Those of [`Problem::check`] and [`KvFormat::check`]; [`Unsupported::NoKernel`] where no kernel covers the problem.
    pub fn new(
        kind: PlanKind,
        limits: DeviceLimits,
        preferences: &Preferences,
        problem: &Problem,
        format: KvFormat,
        layout: KvLayout,
    ) -> Result<Self, Error> {
        problem.check()?;
        format.check(problem.head_dim)?;
        let leaves_spans = kind == PlanKind::Spans;
        let preferences = &match leaves_spans {
            false => *preferences,
            // The kernel that leaves them.
            true => Preferences {
                kernel: KernelChoice::SplitKv(preferences.kernel.config()),
                ..*preferences
            },
        };
        let dequantized = Dequantized::of(problem, format, layout, limits, preferences);
        let pages = match layout {
            KvLayout::Pages(tokens) => {
                let heads = problem.num_kv_heads;
                Some(PageLayout::new(format, problem.head_dim, tokens, heads)?)
            }
            KvLayout::Rows | KvLayout::PagedRows(_) => None,
        };
        // What is attended.
        let of_cache = format;
        let (dequantized, format, kv_layout) = match dequantized {
            Some((dequantized, format, layout)) => (Some(dequantized), format, layout),
            None => (None, format, layout),
        };
        let launched = Launched::new(kind, problem, format, kv_layout, limits, preferences)?;
        let preferences = launched.preferences(preferences);
        let Chosen {
            mut instance,
            selected,
            shared: shared_bytes,
        } = configure(limits, &preferences, &launched, format, kv_layout)?;
        let config = selected.config;
        if leaves_spans && config.kernel != Kernel::SplitKv {
            // Others leave no states of spans.
            return Err(Error::from(Unsupported::NoKernel {
                backend: BACKEND,
                what: format!(
                    "shards of {format} with head_dim {} in {} KiB of shared memory",
                    problem.head_dim,
                    limits.shared_limit / 1024
                ),
                built:
                    "shards of what fits split_kv.cu, such as integer formats and smaller head_dims"
                        .to_owned(),
            }));
        }
        let max_kv_len = problem.kv_lens.iter().copied().max().unwrap_or(0);
        let heads = problem.num_kv_heads;
        let mut launch = Launch::new(&config, &launched.problem, format, limits);
        if let (true, Instance::Decode { spans, .. }) = (leaves_spans, &mut instance) {
            *spans = true;
            launch.partial_per_segment = false;
            launch.max_partials = num_spans(max_kv_len).max(1);
        }
        let (query_blocks, num_blocks) = match &launched.blocks {
            Blocks::Sequences => (Vec::new(), 0),
            Blocks::Listed(list) => (listed(list)?, list.len()),
            Blocks::OnDevice(entries) => (Vec::new(), *entries),
        };
        let per_launch = match num_blocks {
            0 => problem.batch(),
            blocks => {
                let row = config.rows().saturating_mul(4 * (problem.head_dim.v + 2));
                let partials = match leaves_spans {
                    true => 1,
                    false => launch.partials(1, heads).saturating_mul(row).max(1),
                };
                let work = work(&launched.problem, config, std::iter::once(max_kv_len));
                let most = (MOST_PARTIALS / partials).min((MOST_WORK / work.max(1)) as usize);
                most.clamp(1, blocks)
            }
        };
        let partials = match leaves_spans {
            true => 0,
            false => launch.partials(per_launch, heads),
        };
        let aligned = |factors: &[usize]| {
            let what = "bytes of the workspace";
            // Of a sum of three no part may have more than a quarter.
            sizes::product(what, &[4, sizes::product(what, factors)?])?;
            Ok::<_, Error>(sizes::product(what, factors)?.next_multiple_of(256))
        };
        let partials_are_zeroed = config.kernel == Kernel::LowLatencyGlobal;
        Ok(LaunchPlan {
            instance,
            config,
            candidates: selected.candidates,
            shared_bytes,
            launch,
            max_kv_len,
            dequantized,
            layout,
            format: of_cache,
            pages,
            query_blocks,
            num_blocks,
            block_tokens: launched.problem.max_q_len(),
            per_launch,
            counters_bytes: if partials_are_zeroed || leaves_spans {
                0
            } else {
                aligned(&[per_launch, heads, launch.row_blocks, 8])?
            },
            max_sum_bytes: aligned(&[partials, config.rows(), 8])?,
            partial_o_bytes: aligned(&[partials, config.rows(), problem.head_dim.v, 4])?,
            row_states_bytes: match config.kernel {
                kernel if kernel.is_many_rows() => {
                    aligned(&[launch.grid[0], config.state_rows(), problem.head_dim.v, 4])?
                }
                _ => 0,
            },
            partials_are_zeroed,
        })
    }

    /// Bytes of memory that every launch needs, aligned to 256.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        let dequantized = self.dequantized.map_or(0, |pages| pages.workspace_bytes());
        self.before_dequantized() + dequantized
    }

    /// Bytes of all that lies before the pages that launches attend in place of the cache's.
    fn before_dequantized(&self) -> usize {
        self.counters_bytes + self.max_sum_bytes + self.partial_o_bytes + self.row_states_bytes
    }

    /// Bytes at the workspace's start to zero once; launches leave them zero.
    #[must_use]
    pub fn zeroed_bytes(&self) -> usize {
        if self.partials_are_zeroed {
            self.workspace_bytes()
        } else {
            self.counters_bytes
        }
    }

    /// Bytes of memory that launches leave nothing in for the next one, aligned to 256: the workspace's without those that are zero.
    #[must_use]
    pub fn scratch_bytes(&self) -> usize {
        self.workspace_bytes() - self.zeroed_bytes()
    }

    /// Where what lies behind the counters is: in the scratch memory of its own, in that of the workspace, or, of partials that are zeroed, in the workspace.
    fn behind_counters(&self, args: &DecodeArgs) -> DeviceAddress {
        match args.scratch.is_null() || self.partials_are_zeroed {
            true => args.workspace.offset(self.counters_bytes),
            false => args.scratch,
        }
    }

    /// The blocks of query tokens that a launch reads at [`DecodeArgs::query_blocks`]; none where every sequence has the same few, or the device
    /// makes the list.
    #[must_use]
    pub fn query_blocks(&self) -> &[QueryBlock] {
        &self.query_blocks
    }

    /// Whether launches leave the states of spans.
    #[must_use]
    pub fn leaves_spans(&self) -> bool {
        matches!(self.instance, Instance::Decode { spans: true, .. })
    }

    /// The parameters of a launch that leaves the states of spans, from those that [`LaunchPlan::params`] gives.
    ///
    /// # Errors
    /// [`Error::Parameter`] for more rows than kernels count to.
    pub fn spans_params(
        &self,
        p: &Problem,
        to: &SpansArgs,
        params: DecodeParams,
    ) -> Result<DecodeParams, Error> {
        Ok(DecodeParams {
            partial_max_sum: to.max_sums.get(),
            partial_o: to.o.get(),
            span_rows: sizes::int("rows", p.rows())? as u32,
            tokens_before: to.tokens_before.get(),
            tokens_after: to.tokens_after.get(),
            ..params
        })
    }

    /// The parameters of a launch over a cache with centres of K, from those that [`LaunchPlan::params`] gives.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a format whose caches have none, and a plan whose launches attend what its keys dequantize to, without their centres.
    pub fn centres_params(
        &self,
        of: &CentresArgs,
        params: DecodeParams,
    ) -> Result<DecodeParams, Error> {
        self.format.check_centres()?;
        if self.dequantized.is_some_and(|pages| !pages.are_integers()) {
            let given = format_args!("a plan of Arithmetic::Fast over a cache with centres of K");
            return refuse("plan", given, "one of Arithmetic::Exact");
        }
        Ok(DecodeParams {
            centres: of.centres.get(),
            centre_rows: of.rows.get(),
            centre_stride: of.stride as u64,
            centre_rows_stride: sizes::int(
                "entries from one sequence's centres to the next",
                of.rows_stride,
            )?,
            ..params
        })
    }

    /// Entries of the list of blocks, whoever makes it; 0 where each sequence is one.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The parameters of the launch that makes the pages to attend, where there is one, and those of launches that attend: from those that
    /// [`LaunchPlan::params`] gives.
    pub fn dequantize_params(
        &self,
        args: &DecodeArgs,
        params: DecodeParams,
    ) -> (Option<DequantizeParams>, DecodeParams) {
        let Some(dequantized) = &self.dequantized else {
            return (None, params);
        };
        let behind = self.before_dequantized() - self.counters_bytes;
        let at = self.behind_counters(args).offset(behind);
        let (make, attend) = dequantized.params(&params, self.num_blocks, at);
        (Some(make), attend)
    }

    /// The parameters of each launch, in order, from those that [`LaunchPlan::params`] or [`LaunchPlan::dequantize_params`] gives.
    pub fn launches(&self, params: DecodeParams) -> impl Iterator<Item = DecodeParams> {
        let (all, step) = (self.num_blocks, self.per_launch.max(1));
        (0..all.max(1)).step_by(step).map(move |first| {
            let mut params = params;
            if all > 0 {
                params.query_blocks += (first * size_of::<QueryBlock>()) as u64;
                params.batch = (all - first).min(step) as i32;
            }
            params
        })
    }

    /// The kernel's parameter block.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a number that needs more than 31 bits, for K and V that do not lie as the plan has them, for pages that overlap, and for a
    /// problem with sinks whose address is null; [`Error::MissingScales`].
    pub fn params(&self, p: &Problem, args: &DecodeArgs) -> Result<DecodeParams, Error> {
        if p.scores.sinks.is_some() && args.sinks.is_null() {
            return Err(Error::parameter(
                "sinks",
                format_args!("no address"),
                "the address of the problem's sinks on the device",
            ));
        }
        if self.num_blocks > 0 && args.query_blocks.is_null() {
            return Err(Error::parameter(
                "query_blocks",
                format_args!("no address"),
                "the address of the plan's query blocks on the device",
            ));
        }
        let [k_scales, v_scales] = args.kv.tensor_scales();
        check_scale_address((Side::K, self.format.k), k_scales, p.num_kv_heads)?;
        // Those of V belong to the merge of all shards.
        if !self.leaves_spans() {
            check_scale_address((Side::V, self.format.v), v_scales, p.num_kv_heads)?;
        }
        let kv = args.kv.decode_params(self.layout, self.pages.as_ref())?;
        let partials = self.behind_counters(args);
        let [window_left, chunk] = p.scores.kernel_masks();
        Ok(DecodeParams {
            q: args.q.get(),
            out: args.out.get(),
            lse: args.lse.get(),
            dtype: dtype::code(args.dtype),
            alibi_slopes: args.alibi_slopes.get(),
            sinks: args.sinks.get(),
            counters: args.workspace.get(),
            partial_max_sum: partials.get(),
            partial_o: partials.offset(self.max_sum_bytes).get(),
            row_states_at: (self.partial_o_bytes / 4) as u64,
            log2_scale: p.score_scale() * LOG2_E,
            softcap_inner: p.scores.softcap.map_or(0.0, |cap| 2.0 / cap),
            softcap_outer: p.scores.softcap.map_or(0.0, |cap| cap * LOG2_E),
            batch: sizes::int("sequences", self.per_launch)?,
            query_blocks: match self.num_blocks {
                0 => 0,
                _ => args.query_blocks.get(),
            },
            num_q_heads: sizes::int("num_q_heads", p.num_q_heads)?,
            num_kv_heads: sizes::int("num_kv_heads", p.num_kv_heads)?,
            heads_per_kv: sizes::int("heads_per_kv", p.heads_per_kv())?,
            q_len: sizes::int("q_len", self.block_tokens)?,
            row_blocks: sizes::int("row blocks", self.launch.row_blocks)?,
            max_partials: sizes::int("partials", self.launch.max_partials)?,
            window_left,
            chunk,
            causal: i32::from(p.scores.causal),
            partial_per_segment: i32::from(self.launch.partial_per_segment),
            heads_per_kv_divmod: FastDivmod::new(p.heads_per_kv()),
            row_blocks_divmod: FastDivmod::new(self.launch.row_blocks),
            ctas_divmod: FastDivmod::new(self.launch.grid[0]),
            sms_divmod: FastDivmod::new(self.launch.grid[0] / self.config.ctas),
            ..kv
        })
    }
}

#[cfg(test)]
mod tests;
