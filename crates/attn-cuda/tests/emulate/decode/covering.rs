//! Fewer kernels, chosen so that no two options that meet in one of all kernels are left apart: the test suite's choice, as compiling them is what
//! takes its time. `ATTN_TABLE=reduced` has them all.

use std::collections::{HashMap, HashSet};

use attn_kernels::cuda::{Arch, Instance};

use super::Job;

/// Two traits that a job has together.
type Pair = [usize; 2];

/// What is compiled.
type Compiled = (Instance, Arch);

impl Job {
    /// The kernel that attends.
    pub(super) fn instance(&self) -> Instance {
        match self.case.centres || self.centred.is_some() {
            true => self.plan.instance.with_centres(),
            false => self.plan.instance,
        }
    }

    fn compiled(&self) -> Compiled {
        (self.instance(), self.arch)
    }

    /// What its kernel is compiled for, and how it is used.
    fn traits(&self) -> Vec<String> {
        let options = self.instance().options(self.arch).into_iter();
        // How many tiles fit into shared memory follows from all others.
        let compiled =
            |option: &String| option.starts_with("-D") && !option.starts_with("-DATTN_STAGES=");
        let mut all: Vec<String> = options.filter(compiled).collect();
        all.extend([
            self.arch.name().to_owned(),
            format!("{:?}", self.plan.config.kernel),
            format!("{:?}", self.kind),
        ]);
        all.extend(
            self.plan
                .dequantized
                .iter()
                .map(|pages| pages.instance.source().to_owned()),
        );
        all
    }
}

/// Numbers of traits.
#[derive(Default)]
struct Traits(HashMap<String, usize>);

impl Traits {
    fn pairs(&mut self, job: &Job) -> Vec<Pair> {
        let number = |name| {
            let next = self.0.len();
            *self.0.entry(name).or_insert(next)
        };
        let mut all: Vec<usize> = job.traits().into_iter().map(number).collect();
        all.sort_unstable();
        let pairs = all
            .iter()
            .enumerate()
            .map(|(i, a)| all[i + 1..].iter().map(|b| [*a, *b]));
        pairs.flatten().collect()
    }
}

/// Those of `jobs` whose kernels have, with those of `others`, every pair of traits that there is, and how many kernels are left out.
pub(super) fn covering(jobs: Vec<Job>, others: &[Job]) -> (Vec<Job>, usize) {
    let mut traits = Traits::default();
    let mut chosen: HashSet<Compiled> = others.iter().map(Job::compiled).collect();
    let mut covered: HashSet<Pair> = others.iter().flat_map(|job| traits.pairs(job)).collect();
    // Kernels in the order of their first jobs, so that the choice is the same in every run.
    let mut kernels: Vec<(Compiled, HashSet<Pair>)> = Vec::new();
    let mut at: HashMap<Compiled, usize> = HashMap::new();
    for job in &jobs {
        let pairs = traits.pairs(job);
        if chosen.contains(&job.compiled()) {
            covered.extend(pairs);
            continue;
        }
        let at = *at.entry(job.compiled()).or_insert(kernels.len());
        if at == kernels.len() {
            kernels.push((job.compiled(), HashSet::new()));
        }
        kernels[at].1.extend(pairs);
    }
    loop {
        for (_, pairs) in &mut kernels {
            pairs.retain(|pair| !covered.contains(pair));
        }
        // The first of those with the most pairs that no other has so far.
        let most = kernels
            .iter()
            .map(|(_, pairs)| pairs.len())
            .max()
            .unwrap_or(0);
        let Some((kernel, pairs)) = kernels
            .iter()
            .find(|(_, pairs)| pairs.len() == most && most > 0)
        else {
            break;
        };
        chosen.insert(*kernel);
        covered.extend(pairs);
    }
    let left = kernels
        .iter()
        .filter(|(kernel, _)| !chosen.contains(kernel))
        .count();
    let is_chosen = |job: &Job| chosen.contains(&job.compiled());
    (jobs.into_iter().filter(is_chosen).collect(), left)
}
