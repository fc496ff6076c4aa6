//! Which CPUs a worker may run on: a share of the process's CPUs, disjoint from every other worker's.
//!
//! Two workers that the scheduler may place freely often share a CPU while another idles, and a step then takes as long as with one
//! thread. Where the calls do not exist, [`allowed`] knows no CPU, and nothing is pinned.

/// The CPUs that the calling thread may run on, ascending; none where the system does not say. A cpuset and `taskset` narrow them.
#[cfg(target_os = "linux")]
pub fn allowed() -> Vec<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let Ok(set) = sched_getaffinity(None) else {
        return Vec::new();
    };
    (0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect()
}

/// No CPU: this system does not say.
#[cfg(not(target_os = "linux"))]
pub fn allowed() -> Vec<usize> {
    Vec::new()
}

/// Confines the calling thread to these CPUs. A system that refuses leaves it free, which changes speed alone.
#[cfg(target_os = "linux")]
pub fn confine(cpus: &[usize]) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    let _ = sched_setaffinity(None, &set);
}

/// Leaves the calling thread free: this system has no call for it.
#[cfg(not(target_os = "linux"))]
pub fn confine(_: &[usize]) {}

/// The number of a CPU's core: its lowest SMT sibling, or the CPU itself where sysfs does not say.
pub(crate) fn core_of(cpu: usize) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let list = std::fs::read_to_string(path).unwrap_or_default();
    // `0,64` or `0-1`: the lowest comes first.
    let first = list.split([',', '-', '\n']).next();
    first.and_then(|cpu| cpu.parse().ok()).unwrap_or(cpu)
}

/// Shares CPUs out among workers: whole cores while there are enough, then one CPU each, the first of every core before the second.
///
/// `None` if a worker would get none. A worker gets several CPUs where there are more than workers: a process that a quota limits to
/// two of 64 CPUs must not crowd onto the same two as its neighbours.
pub fn shares(
    allowed: &[usize],
    core_of: impl Fn(usize) -> usize,
    workers: usize,
) -> Option<Vec<Vec<usize>>> {
    if workers == 0 || workers > allowed.len() {
        return None;
    }
    let mut cores: Vec<(usize, Vec<usize>)> = Vec::new();
    for &cpu in allowed {
        let number = core_of(cpu);
        match cores.iter_mut().find(|(core, _)| *core == number) {
            Some((_, cpus)) => cpus.push(cpu),
            None => cores.push((number, vec![cpu])),
        }
    }
    let cores: Vec<Vec<usize>> = cores.into_iter().map(|(_, cpus)| cpus).collect();
    if workers <= cores.len() {
        let first = |worker: usize| worker * cores.len() / workers;
        let share = |worker: usize| cores[first(worker)..first(worker + 1)].concat();
        return Some((0..workers).map(share).collect());
    }
    let deepest = cores.iter().map(Vec::len).max().unwrap_or(0);
    let siblings = (0..deepest).flat_map(|i| cores.iter().filter_map(move |core| core.get(i)));
    Some(siblings.take(workers).map(|&cpu| vec![cpu]).collect())
}
