//! The threads of a backend: the caller's rayon pool, the caller's choice, or the process's pool whose workers share no CPU.

use std::sync::{Arc, OnceLock};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::affinity;

/// Where a backend's work runs.
#[derive(Debug, Clone)]
pub(crate) enum Threads {
    /// In the rayon pool that the caller is inside of, else in [`shared`], or in rayon's global pool where that is not made.
    Shared,
    /// In the rayon pool that the caller is inside of, else in rayon's global pool.
    Callers,
    /// Always here.
    Own(Arc<ThreadPool>),
}

impl Threads {
    /// A pool's number of workers, for a caller that is inside of none.
    pub fn count(&self) -> usize {
        self.pool().map_or_else(rayon::current_num_threads, |pool| {
            pool.current_num_threads()
        })
    }

    /// Runs `f` on these threads, and gives it their number. With one thread `f` runs on the caller's and must not go to rayon.
    ///
    /// Small work stays on the caller's thread where it would have to wake the workers first.
    pub fn run<T: Send>(&self, is_small: bool, f: impl FnOnce(usize) -> T + Send) -> T {
        if is_small && rayon::current_thread_index().is_none() {
            return f(1);
        }
        match self.pool() {
            None => f(rayon::current_num_threads()),
            Some(pool) => match pool.current_num_threads() {
                1 => f(1),
                count => pool.install(|| f(count)),
            },
        }
    }

    /// Runs `f` inside the pool, even if that has one thread.
    pub fn install<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        match self.pool() {
            None => f(),
            Some(pool) => pool.install(f),
        }
    }

    /// The pool to enter, if the work is not to stay where rayon would run it.
    fn pool(&self) -> Option<&ThreadPool> {
        match self {
            Threads::Own(pool) => Some(pool),
            Threads::Shared if rayon::current_thread_index().is_none() => shared(),
            _ => None,
        }
    }
}

/// The process's pool, made when it is first needed, with as many workers as rayon's global pool. `None` if that has one worker or more
/// than there are CPUs, if the system does not say which there are, or starts no threads.
fn shared() -> Option<&'static ThreadPool> {
    static SHARED: OnceLock<Option<ThreadPool>> = OnceLock::new();
    let make = || {
        let count = Some(rayon::current_num_threads()).filter(|&count| count > 1)?;
        let shares = affinity::shares(&affinity::allowed(), affinity::core_of, count)?;
        start(count, Some(shares)).ok()
    };
    SHARED.get_or_init(make).as_ref()
}

/// A pool of `count` workers; `pinned` ones share no CPU, if there are as many.
pub(crate) fn own(count: usize, pinned: bool) -> Result<ThreadPool, rayon::ThreadPoolBuildError> {
    let shares = match pinned {
        true => affinity::shares(&affinity::allowed(), affinity::core_of, count),
        false => None,
    };
    start(count, shares)
}

fn start(
    count: usize,
    shares: Option<Vec<Vec<usize>>>,
) -> Result<ThreadPool, rayon::ThreadPoolBuildError> {
    let builder = ThreadPoolBuilder::new()
        .num_threads(count)
        .thread_name(|worker| format!("attn-cpu-{worker}"));
    match shares {
        Some(shares) => builder.start_handler(move |worker| affinity::confine(&shares[worker])),
        None => builder,
    }
    .build()
}
