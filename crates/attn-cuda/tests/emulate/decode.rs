//! Decode: the integer cases of the conformance table and random shapes, to the bit, and float formats in `many_rows.cu`, within bounds.

mod centred;
mod covering;
mod inputs;
mod jobs;
mod shapes;

use std::sync::Arc;

use anyhow::{Result, ensure};
use attn_conformance::{
    Case, Size,
    check::{decode_rows, first_difference},
    oracle::{self, Queries},
    random::random,
    table,
    trials::COLUMNS,
};
use attn_core::{
    DecodeAttention, Error, KvMemory, KvSource, Scheme, StridedRows, error::Unsupported,
};
use attn_cpu::{CpuBackend, Reference};
use attn_cuda::{
    internals::{LaunchPlan, PlanKind},
    native::{
        DecodeArgs, DeviceAddress, DeviceKv, Dtype, Grid, KvLayout, ListBlocksArgs, ViewRows,
    },
};
use attn_kernels::cuda::{
    Arch, DeviceLimits, Instance, Kernel, KernelChoice, Preferences, params::QueryBlock,
};

use libtest_mimic::Trial;

use self::{
    centred::Centred,
    covering::covering,
    inputs::{Inputs, aligned},
    jobs::Shapes,
};
use crate::{Kernels, address, numbers, paged_rows::PagedRows, pages::padded_at};

/// Tiles times heads and row blocks that one shape may have: seconds, as every lane of every warp is a fiber.
const LARGEST: usize = 160;
/// The largest shape on a larger GPU, where there are many sequences or long ones: cuts between many CTAs, merges that they share.
const LARGEST_OF_MANY: usize = 700;
/// Tokens of a long sequence.
const LONG: usize = 3000;
/// Tokens of the longest sequence of plans that serve short ones, too: partials are spans by the host's choice.
const REACH: usize = 100_000;
/// Query tokens that a plan for any lengths has beside those of a step.
const SPARE_TOKENS: usize = 37;

/// The kernel that a job is to have.
fn prefers(kernel: KernelChoice) -> Preferences {
    Preferences {
        kernel,
        dequantize: Some(false),
        are_blocks: false,
    }
}

/// One shape, how its K and V lie, and its kernel's launch.
struct Job {
    kind: PlanKind,
    /// Tokens of the plan's longest sequence, if it is longer than the shape's.
    reach: usize,
    case: Case,
    layout: KvLayout,
    arch: Arch,
    plan: LaunchPlan,
    /// Where the shape's cache has centres of K.
    centred: Option<Centred>,
}

impl Job {
    /// `None` for shapes that are left to GPUs: floats but in `many_rows.cu`, as the arithmetic does not define them to the bit, and large
    /// shapes, which take too long.
    fn new(
        kind: PlanKind,
        case: Case,
        layout: KvLayout,
        preferences: Preferences,
        arch: Arch,
    ) -> Result<Option<Self>> {
        let many_rows = preferences.kernel == KernelChoice::ManyRows;
        let p = &case.problem;
        let tiles: usize = p.kv_lens.iter().map(|len| len.div_ceil(64).max(1)).sum();
        let rows = p.heads_per_kv() * p.max_q_len();
        let is_long = p.kv_lens.iter().any(|&len| len > LONG);
        let (largest, sms) = if is_long && p.max_q_len() >= 256 {
            (LARGEST_OF_MANY, 3)
        } else if p.batch() > 32 || is_long {
            (LARGEST_OF_MANY, 24)
        } else {
            (LARGEST, 1 + case.seed as usize % 5)
        };
        // Many rows go through a kernel that attends 64 at a time.
        let at_once = if many_rows && rows > 8 { 64 } else { 8 };
        let is_covered = case.format.is_integer() || many_rows;
        if !is_covered || tiles * p.num_kv_heads * rows.div_ceil(at_once) > largest {
            return Ok(None);
        }
        // Clusters of up to 8 CTAs, or of up to 4, and alone with an item where there are many.
        let sms = match preferences.kernel {
            KernelChoice::LowLatency | KernelChoice::LowLatencyGlobal => {
                [56, 20][case.seed as usize % 2]
            }
            _ => sms,
        };
        let limits = DeviceLimits::new(arch.shared_limit(), sms);
        let mut planned = p.clone();
        if kind == PlanKind::Ragged {
            // As many blocks of other sequences, and some more: entries that stay empty.
            planned.q_lens.rotate_left(1);
            planned.q_lens[0] += SPARE_TOKENS;
        }
        let plan = LaunchPlan::new(kind, limits, &preferences, &planned, case.format, layout);
        let plan = match plan {
            // Shared memory and registers hold not all heads of more than 256 elements.
            Err(Error::Unsupported(Unsupported::NoKernel { .. })) if p.head_dim.max() > 256 => {
                return Ok(None);
            }
            plan => plan?,
        };
        Ok(Some(Job {
            kind,
            reach: 0,
            case,
            layout,
            arch,
            plan,
            centred: None,
        }))
    }

    fn is_known_many_rows(&self) -> bool {
        self.plan.config.kernel.is_many_rows() && self.kind == PlanKind::Known
    }

    /// A shape by a plan for sequences of [`REACH`] tokens, on a GPU that is large for it.
    fn of_long_plan(case: Case, preferences: Preferences) -> Result<Self> {
        let limits = DeviceLimits::new(Arch::Sm90a.shared_limit(), 24);
        let job = Self::of_longer(case, preferences, limits, REACH)?;
        let is_global = job.plan.config.kernel == Kernel::LowLatencyGlobal;
        ensure!(
            is_global || !job.plan.launch.partial_per_segment,
            "the plan is for few tokens"
        );
        Ok(job)
    }

    /// A shape by an H100's plan for 16 teams of a cluster, which are more than there are rows to merge.
    fn of_cluster_plan(case: Case) -> Result<Self> {
        let mut limits = DeviceLimits::new(Arch::Sm90a.shared_limit(), 132);
        limits.memory_pace = 3.35e6;
        let job = Self::of_longer(case, prefers(KernelChoice::LowLatency), limits, 16_384)?;
        let launch = &job.plan.launch;
        ensure!(
            launch.cluster * launch.teams == 16,
            "the plan is for fewer teams"
        );
        Ok(job)
    }

    fn of_longer(
        case: Case,
        preferences: Preferences,
        limits: DeviceLimits,
        reach: usize,
    ) -> Result<Self> {
        let layout = KvLayout::Pages(case.page_size);
        let mut planned = case.problem.clone();
        planned.kv_lens[0] = reach;
        let kind = PlanKind::Known;
        let plan = LaunchPlan::new(kind, limits, &preferences, &planned, case.format, layout)?;
        Ok(Job {
            kind,
            reach,
            case,
            layout,
            arch: Arch::Sm90a,
            plan,
            centred: None,
        })
    }

    /// The list of blocks as the device makes it.
    fn listed(&self, kernels: &Kernels) -> Result<Vec<QueryBlock>> {
        let ends = self
            .case
            .problem
            .query_ranges()
            .map(|range| range.end as i32);
        let starts: Vec<i32> = std::iter::once(0).chain(ends).collect();
        let anything = QueryBlock {
            sequence: -1,
            first: -1,
            tokens: 1 << 20,
            behind: -1,
        };
        let mut planned = self.case.problem.clone();
        planned.q_lens[0] += SPARE_TOKENS;
        let mut list = vec![anything; self.plan.num_blocks()];
        let args = ListBlocksArgs {
            cu_seqlens_q: address(&starts),
            to: DeviceAddress::new(list.as_mut_ptr() as u64),
        };
        // SAFETY: starts are one more than the sequences, and the list has as many entries as the plan says.
        unsafe { kernels.launch(&self.plan.list_numbers(&planned)?, &args) }?;
        Ok(list)
    }

    /// The first difference of the kernel's answer from the CPU's.
    fn differs(&self, cpu: &CpuBackend, kernels: &Kernels) -> Result<Option<String>> {
        let contiguous = self.case.is_view().then(|| self.case.contiguous());
        let view = contiguous.as_ref().map(|c| c.view(&self.case.problem));
        let view = view.transpose()?;
        let cache = match (&view, &self.centred) {
            (Some(_), _) => None,
            (None, None) => Some(self.case.built(cpu)?),
            (None, Some(centred)) => Some(centred.built(&self.case)?),
        };
        let sequences = match (&cache, &self.centred) {
            (Some(cache), Some(centred)) => Some(cache.sequences(centred.order)?),
            _ => None,
        };
        let source = match (&sequences, &cache, &view) {
            (Some(sequences), ..) => KvSource::Sequences(sequences),
            (None, Some(cache), _) => KvSource::Cache(cache),
            (None, None, Some(view)) => KvSource::View(view),
            (None, None, None) => unreachable!("what is no view has a cache"),
        };
        let inputs = Inputs::new(&self.case, source, &self.plan, self.reach)?;
        let expected: &dyn DecodeAttention = match &self.centred {
            Some(_) => &Reference::new(),
            None => cpu,
        };
        // Twice, the second time in the first one's workspace.
        let has_f16 = self.case.q().iter().all(|x| x.abs() <= 65504.0);
        let narrow = if has_f16 && self.case.seed.is_multiple_of(2) {
            Dtype::F16
        } else {
            Dtype::Bf16
        };
        for dtype in [Dtype::F32, narrow] {
            let q = numbers::rounded(dtype, &self.case.q());
            let want = decode_rows(expected, &self.case, &q, source)?;
            if let Some(centred) = &self.centred {
                centred.check(&want.1)?;
            }
            let [out, got_lse] = self.emulate(kernels, source, &inputs, &q, dtype)?;
            let found = match self.case.format.is_integer() {
                _ if self.is_fast() => {
                    // A view has the rows that a cache of the case would.
                    let built = match &cache {
                        Some(_) => None,
                        None => Some(self.case.built(cpu)?),
                    };
                    let Some(cache) = cache.as_ref().or(built.as_ref()) else {
                        unreachable!("one of them is there")
                    };
                    let (want, lse) = oracle::attend(&self.case.problem, cache, &q, Queries::Exact);
                    let want: Vec<f32> = want.iter().map(|x| *x as f32).collect();
                    let want_lse: Vec<f32> = lse.iter().map(|x| *x as f32).collect();
                    self.is_far((&out, &got_lse), &(want, want_lse), dtype)
                }
                true => first_difference("out", &out, &numbers::rounded(dtype, &want.0))
                    .or_else(|| first_difference("lse", &got_lse, &want.1)),
                false => self.is_far((&out, &got_lse), &want, dtype),
            };
            if let Some(text) = found {
                return Ok(Some(format!("{dtype:?}: {text}")));
            }
        }
        Ok(None)
    }

    /// Whether integers are attended as floats.
    fn is_fast(&self) -> bool {
        let are_floats = self
            .plan
            .dequantized
            .is_some_and(|pages| !pages.are_integers());
        are_floats && self.case.format.is_integer()
    }

    /// Where floats are further from the CPU's than weights of 8 (bf16) or 11 bits and the rounding of outputs explain.
    fn is_far(
        &self,
        (out, lse): (&[f32], &[f32]),
        (want, want_lse): &(Vec<f32>, Vec<f32>),
        dtype: Dtype,
    ) -> Option<String> {
        let is_bf16 = self.case.format.k == Scheme::Bf16;
        let weights = match () {
            () if is_bf16 => 4e-3,
            // Queries, keys and values of 11 bits, too.
            () if self.is_fast() => 2e-3,
            () => 5e-4,
        };
        let rounding = match dtype {
            Dtype::F32 => 0.0,
            Dtype::F16 => 5e-4,
            Dtype::Bf16 => 4e-3,
        };
        let square = |x: f32| f64::from(x) * f64::from(x);
        let errors = out.iter().zip(want).map(|(a, b)| square(a - b));
        let (error, norm) = (
            errors.sum::<f64>(),
            want.iter().map(|x| square(*x)).sum::<f64>(),
        );
        let far = (error / norm.max(1e-30)).sqrt();
        // A comparison that NaN fails.
        if !(far <= weights + rounding) {
            return Some(format!("relative L2 error {far:e}"));
        }
        let is_close =
            |(a, b): (&f32, &f32)| a == b || (a - b).abs() <= weights as f32 * b.abs().max(10.0);
        let i = lse.iter().zip(want_lse).position(|pair| !is_close(pair))?;
        Some(format!(
            "lse[{i}] is {:e}, expected {:e}",
            lse[i], want_lse[i]
        ))
    }

    fn emulate(
        &self,
        kernels: &Kernels,
        source: KvSource<'_>,
        inputs: &Inputs,
        q: &[f32],
        dtype: Dtype,
    ) -> Result<[Vec<f32>; 2]> {
        let (case, plan) = (&self.case, &self.plan);
        let some = |slice: &[f32]| {
            if slice.is_empty() {
                DeviceAddress::NULL
            } else {
                address(slice)
            }
        };
        let paged = match (self.layout, source.memory()) {
            (KvLayout::PagedRows(tokens), KvMemory::View(view)) => {
                let heads_first = case.seed.is_multiple_of(2);
                Some(PagedRows::new(view, &case.problem, tokens, heads_first))
            }
            _ => None,
        };
        let paged_codes = paged
            .as_ref()
            .map(|paged| [aligned(&paged.codes[0]), aligned(&paged.codes[1])]);
        let kv_lens = address(&inputs.lens);
        let kv = match source.memory() {
            KvMemory::Pages(layer, _) => {
                let cache = layer.cache();
                let config = cache.config();
                let tables = &inputs.tables;
                let at = address(&inputs.pool);
                DeviceKv::Paged(tables.sequences(
                    padded_at(at, cache.layout(), config.num_pages + 1),
                    [address(&tables.pages), address(&tables.residuals), kv_lens],
                    [&config.k_tensor_scales, &config.v_tensor_scales].map(|scales| some(scales)),
                ))
            }
            KvMemory::Pool(_) => unreachable!("cases have caches and views"),
            KvMemory::View(view) => {
                let rows = |rows: &StridedRows<'_>| [address(rows.codes), address(rows.scales)];
                let tensor_scales = [view.k_tensor_scales(), view.v_tensor_scales()].map(some);
                match (&paged, &paged_codes) {
                    (Some(paged), Some([k, v])) => paged.kv(
                        [address(k), address(v)],
                        [&paged.scales[0], &paged.scales[1]].map(|scales| address(scales)),
                        [address(&paged.table), kv_lens],
                        tensor_scales,
                    ),
                    _ => DeviceKv::Rows(ViewRows {
                        k: rows(view.k()),
                        v: rows(view.v()),
                        code_strides: [view.k().code_strides, view.v().code_strides],
                        scale_strides: [view.k().scale_strides, view.v().scale_strides],
                        kv_lens,
                        tensor_scales,
                    }),
                }
            }
        };
        let list = match self.kind {
            PlanKind::Known | PlanKind::Spans => plan.query_blocks().to_vec(),
            PlanKind::Ragged => self.listed(kernels)?,
        };
        let q = aligned(&numbers::bytes(dtype, q));
        let mut out = aligned(&numbers::bytes(
            dtype,
            &vec![f32::NAN; case.problem.out_elements()],
        ));
        let mut lse = vec![f32::NAN; case.problem.rows()];
        // What launches leave nothing in lies in the workspace and, in the second run, apart.
        let mut scratch = match dtype {
            Dtype::F32 => Vec::new(),
            _ => vec![u64::MAX; plan.scratch_bytes() / 8 + 32],
        };
        let args = DecodeArgs {
            q: address(&q),
            out: DeviceAddress::new(out.as_mut_ptr() as u64),
            dtype,
            lse: DeviceAddress::new(lse.as_mut_ptr() as u64),
            kv,
            query_blocks: address(&list),
            alibi_slopes: some(&inputs.slopes),
            sinks: some(case.problem.scores.sinks.as_deref().unwrap_or(&[])),
            workspace: DeviceAddress::new(inputs.workspace_at as u64),
            scratch: match scratch.is_empty() {
                true => DeviceAddress::NULL,
                false => {
                    let at = scratch.as_mut_ptr().expose_provenance();
                    DeviceAddress::new(at.next_multiple_of(256) as u64)
                }
            },
        };
        let mut params = plan.params(&case.problem, &args)?;
        if let Some(centres) = &inputs.centres {
            params = plan.centres_params(&centres.args(), params)?;
        }
        let (made, params) = plan.dequantize_params(&args, params);
        if let (Some(made), Some(pages)) = (made, &plan.dequantized) {
            let Grid { ctas, threads } = pages.grid();
            // SAFETY: its kernel takes a DequantizeParams; it reads what decode kernels do, and writes to the workspace.
            unsafe { kernels.run_as(self.arch, &pages.instance, &made, ctas, threads) }?;
        }
        let instance = self.instance();
        let (grid, threads) = (plan.launch.grid, plan.launch.threads);
        for params in plan.launches(params) {
            // SAFETY: decode kernels take a DecodeParams, whose addresses are those of memory that lives until the end of this
            // function, as large as `DecodeArgs` asks; tables of home and residual pages come from the cache's own page table.
            unsafe { kernels.run_as(self.arch, &instance, &params, grid, threads) }?;
        }
        ensure!(
            inputs.is_zeroed(plan),
            "the workspace is not left as it was"
        );
        let out = bytemuck::cast_slice(&out);
        Ok([numbers::numbers(dtype, out), lse])
    }
}

/// A test for each kernel of each shape: the chosen ones, the conformance table's, and `count` random ones from `seed` on. Without a size, of the
/// reduced table's kernels and of random shapes' those that [`covering`] chooses.
pub fn trials(
    kernels: &Arc<Kernels>,
    size: Option<Size>,
    count: u64,
    seed: u64,
) -> Result<Vec<Trial>> {
    let mut shapes = Shapes::default();
    let random = (seed..seed + count).map(random);
    for case in table(size.unwrap_or(Size::Reduced))
        .into_iter()
        .chain(random)
    {
        shapes.add(case)?;
    }
    let mut jobs = shapes.add_chosen()?;
    let others = match size {
        Some(_) => shapes.jobs,
        None => {
            let (others, left) = covering(shapes.jobs, &jobs);
            println!(
                "decode: {left} kernels whose options meet in others are left to ATTN_TABLE=reduced"
            );
            others
        }
    };
    jobs.extend(others);
    println!(
        "decode: {} shapes of floats, too large to emulate or without a kernel, are left to GPUs",
        shapes.left
    );
    let cpu = Arc::new(CpuBackend::new());
    let trial = |job: Job| {
        let (cpu, kernels) = (cpu.clone(), kernels.clone());
        let layout = match job.layout {
            KvLayout::PagedRows(tokens) => format!(" rows-in-pages-{tokens}"),
            KvLayout::Pages(_) | KvLayout::Rows => String::new(),
        };
        let kind = match job.kind {
            PlanKind::Known | PlanKind::Spans => "",
            PlanKind::Ragged => " listed",
        };
        let reach = if job.reach > 0 { " long-plan" } else { "" };
        let kernel = job.plan.config.kernel;
        let arch = match job.arch {
            Arch::Sm90a => String::new(),
            other => format!(" {}", other.name()),
        };
        let made = match job.plan.dequantized {
            Some(pages) if matches!(pages.instance, Instance::GatherPages { .. }) => " gathered",
            Some(_) => " dequantized",
            None => "",
        };
        let centred = job.centred.as_ref().map_or("", |_| " centred");
        let how = format!("decode {kernel:?}{made}{centred}{arch}{layout}{kind}{reach}: ");
        let name = format!("{how}{}", job.case.label(COLUMNS - how.len()));
        Trial::test(name, move || match job.differs(&cpu, &kernels) {
            Ok(None) => Ok(()),
            Ok(Some(text)) => Err(format!("{}: {text}", job.case).into()),
            Err(error) => Err(format!("{}: {error:#}", job.case).into()),
        })
    };
    Ok(jobs.into_iter().map(trial).collect())
}
