//! The jobs of shapes: which kernels attend each of them here.

use anyhow::Result;
use attn_conformance::Case;
use attn_core::KvFormat;
use attn_cuda::{internals::PlanKind, native::KvLayout};
use attn_kernels::cuda::{Arch, Kernel, KernelChoice, Preferences};

use super::{
    Job,
    centred::centred_shapes,
    prefers,
    shapes::{chosen, many_rows, short_ones, wide_rows},
};

/// The jobs of the shapes so far, and how many shapes are left to GPUs.
#[derive(Default)]
pub(super) struct Shapes {
    pub(super) jobs: Vec<Job>,
    pub(super) left: usize,
    /// Shapes of rows: each second one has them in pages.
    views: usize,
}

impl Shapes {
    pub(super) fn add(&mut self, case: Case) -> Result<()> {
        if !case.is_view() {
            return self.add_as(&case, KvLayout::Pages(case.page_size));
        }
        self.views += 1;
        let layout = match self.views % 2 {
            0 => KvLayout::Rows,
            _ => KvLayout::PagedRows([16, 64, 32, 128][self.views / 2 % 4]),
        };
        self.add_as(&case, layout)
    }

    pub(super) fn add_as(&mut self, case: &Case, layout: KvLayout) -> Result<()> {
        let job_of =
            |kind, preferences| Job::new(kind, case.clone(), layout, preferences, Arch::Sm90a);
        let job = |kernel| job_of(PlanKind::Known, prefers(kernel));
        match job(KernelChoice::SplitKv(None))? {
            Some(job) => self.jobs.push(job),
            None => self.left += 1,
        }
        self.add_many_rows(case, layout, PlanKind::Known)?;
        for (job, kernel) in [
            (job(KernelChoice::LowLatency)?, Kernel::LowLatencyCluster),
            (
                job(KernelChoice::LowLatencyGlobal)?,
                Kernel::LowLatencyGlobal,
            ),
        ] {
            self.jobs
                .extend(job.filter(|job| job.plan.config.kernel == kernel));
        }
        let from_f16 = Preferences {
            dequantize: Some(true),
            ..prefers(KernelChoice::ManyRows)
        };
        // Lists that the device makes are read as those of the host: of shapes with one number of query tokens, every third has both.
        let is_listed = case.problem.uniform_q_len().is_none() || case.seed.is_multiple_of(3);
        let kinds = [PlanKind::Known, PlanKind::Ragged];
        for kind in &kinds[..1 + usize::from(is_listed)] {
            let job = job_of(*kind, from_f16)?;
            self.jobs
                .extend(job.filter(|job| job.plan.dequantized.is_some()));
        }
        if case.problem.max_q_len() > 1 && is_listed {
            let split_kv = prefers(KernelChoice::SplitKv(None));
            self.jobs.extend(job_of(PlanKind::Ragged, split_kv)?);
            self.add_many_rows(case, layout, PlanKind::Ragged)?;
        }
        Ok(())
    }

    /// Shapes that are chosen for a kernel's own edges. What else attends those of `many_rows.cu`, or by a list of the device's, is left in `self.jobs`; the rest is returned.
    pub(super) fn add_chosen(&mut self) -> Result<Vec<Job>> {
        let of_table = std::mem::take(&mut self.jobs);
        for case in many_rows() {
            self.jobs.extend(without_copy_engine(&case)?);
            self.add(case)?;
        }
        let (own, others): (Vec<Job>, Vec<Job>) = std::mem::take(&mut self.jobs)
            .into_iter()
            .partition(|job| job.is_known_many_rows());
        self.jobs = own;
        for case in chosen() {
            self.jobs.extend(without_copy_engine(&case)?);
            self.add(case)?;
        }
        for case in wide_rows() {
            let layouts = match case.is_view() {
                true => vec![KvLayout::Rows, KvLayout::PagedRows(16)],
                false => vec![KvLayout::Pages(case.page_size)],
            };
            for layout in layouts {
                self.add_many_rows(&case, layout, PlanKind::Known)?;
                if case.problem.max_q_len() > 1 {
                    self.add_many_rows(&case, layout, PlanKind::Ragged)?;
                }
            }
            if !case.format.is_integer() {
                self.jobs.extend(without_copy_engine(&case)?);
            }
            self.jobs.extend(from_f16(&case)?);
        }
        let of_cluster = Case::new([10, 10], 128, &[9000], KvFormat::INT8);
        self.jobs.push(Job::of_cluster_plan(of_cluster)?);
        for case in short_ones() {
            for kernel in [KernelChoice::SplitKv(None), KernelChoice::LowLatencyGlobal] {
                self.jobs
                    .push(Job::of_long_plan(case.clone(), prefers(kernel))?);
            }
        }
        self.add_centred(centred_shapes())?;
        let chosen = std::mem::replace(&mut self.jobs, of_table);
        self.jobs.extend(others);
        Ok(chosen)
    }

    /// By `many_rows.cu` alone, where it covers the shape.
    pub(super) fn add_many_rows(
        &mut self,
        case: &Case,
        layout: KvLayout,
        kind: PlanKind,
    ) -> Result<()> {
        let preferences = prefers(KernelChoice::ManyRows);
        let job = Job::new(kind, case.clone(), layout, preferences, Arch::Sm90a)?;
        let is_covered = |job: &Job| job.plan.config.kernel.is_many_rows();
        self.jobs.extend(job.filter(is_covered));
        Ok(())
    }
}

/// A shape whose cache becomes f16 first, where it can.
fn from_f16(case: &Case) -> Result<Option<Job>> {
    let layout = match case.is_view() {
        true => KvLayout::Rows,
        false => KvLayout::Pages(case.page_size),
    };
    let preferences = Preferences {
        dequantize: Some(true),
        ..prefers(KernelChoice::ManyRows)
    };
    let job = Job::new(
        PlanKind::Known,
        case.clone(),
        layout,
        preferences,
        Arch::Sm90a,
    )?;
    Ok(job.filter(|job| job.plan.dequantized.is_some()))
}

/// The kernel of many rows as an A100 has it, and from pages of the workspace where rows are attended so there alone.
fn without_copy_engine(case: &Case) -> Result<Vec<Job>> {
    let layout = match case.is_view() {
        true if case.seed.is_multiple_of(2) => KvLayout::Rows,
        true => KvLayout::PagedRows(16),
        false => KvLayout::Pages(case.page_size),
    };
    let as_it_is = prefers(KernelChoice::ManyRows);
    let from_pages = Preferences {
        dequantize: Some(true),
        ..as_it_is
    };
    let job =
        |preferences, arch| Job::new(PlanKind::Known, case.clone(), layout, preferences, arch);
    let is_made = |job: &Job| job.plan.dequantized.is_some();
    let many_rows = job(as_it_is, Arch::Sm80)?.filter(|job| job.plan.config.kernel.is_many_rows());
    let elsewhere = job(from_pages, Arch::Sm90a)?.is_some_and(|job| is_made(&job));
    let made = job(from_pages, Arch::Sm80)?.filter(|job| is_made(job) && !elsewhere);
    Ok(many_rows.into_iter().chain(made).collect())
}
