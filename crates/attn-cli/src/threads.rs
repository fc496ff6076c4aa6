//! The number of threads: from `RAYON_NUM_THREADS`, or one per core.

use std::{ffi::OsStr, thread::available_parallelism};

use anyhow::{Context, Result, bail};
use attn_bench::cpu::{MOST_THREADS, check_threads};

/// The variable that names the number.
pub const VARIABLE: &str = "RAYON_NUM_THREADS";

/// One thread per core.
pub fn per_core() -> usize {
    available_parallelism().map_or(1, |cores| cores.get().min(MOST_THREADS))
}

/// What `RAYON_NUM_THREADS` asks for; as rayon has it, 0 or nothing is one per core.
pub fn asked(given: Option<&OsStr>) -> Result<usize> {
    let Some(given) = given.filter(|given| !given.is_empty()) else {
        return Ok(per_core());
    };
    match given.to_str().and_then(|text| text.parse().ok()) {
        Some(0) => Ok(per_core()),
        Some(threads) if check_threads(threads).is_ok() => Ok(threads),
        _ => bail!(
            "{VARIABLE} is {given:?}; allowed: 1 to {MOST_THREADS}; leave it unset for one per core"
        ),
    }
}

/// Starts the threads of the CPU backend.
pub fn start(threads: usize) -> Result<()> {
    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
    builder.build_global().with_context(|| {
        format!("the system does not start {threads} threads; set {VARIABLE} to fewer")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_bounded_by_a_sentence() {
        let ask = |text: &str| asked(Some(OsStr::new(text)));
        assert_eq!(ask("3").unwrap(), 3);
        assert_eq!(ask("1024").unwrap(), MOST_THREADS);
        for default in [asked(None), ask(""), ask("0")] {
            assert_eq!(default.unwrap(), per_core());
        }
        for text in ["1025", "100000", "99999999999999999999999", "-1", "two"] {
            let error = ask(text).unwrap_err().to_string();
            assert!(
                error.contains(text) && error.contains("1 to 1024"),
                "{error}"
            );
        }
    }
}
