//! The CPUs of the pool's workers.

use attn_cpu::internals::shares;
#[cfg(target_os = "linux")]
use attn_cpu::internals::{allowed, confine};

/// Four cores of two threads, numbered as Linux does: siblings four apart.
fn smt(cpu: usize) -> usize {
    cpu % 4
}

#[test]
fn workers_get_whole_cores_first_and_siblings_last() {
    let all: Vec<usize> = (0..8).collect();
    let of = |workers| shares(&all, smt, workers);
    assert_eq!(of(2).unwrap(), [[0, 4, 1, 5], [2, 6, 3, 7]]);
    assert_eq!(of(3).unwrap(), [vec![0, 4], vec![1, 5], vec![2, 6, 3, 7]]);
    assert_eq!(of(4).unwrap(), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!(of(6).unwrap(), [[0], [1], [2], [3], [4], [5]]);
    assert_eq!(of(8).unwrap().concat(), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!((of(9), of(0)), (None, None));
    // Siblings with neighbouring numbers, and a mask with half a core.
    let of = |workers| shares(&[2, 3, 6], |cpu| cpu / 2, workers);
    assert_eq!(of(1).unwrap(), [[2, 3, 6]]);
    assert_eq!(of(2).unwrap(), [vec![2, 3], vec![6]]);
    assert_eq!(of(3).unwrap(), [[2], [6], [3]]);
    assert_eq!(shares(&[], smt, 1), None);
}

#[test]
#[cfg(target_os = "linux")]
fn a_confined_thread_runs_on_its_cpus_alone() {
    let before = allowed();
    let last = *before.last().expect("a CPU to run on");
    std::thread::spawn(move || {
        confine(&[last]);
        assert_eq!(allowed(), [last]);
    })
    .join()
    .unwrap();
    assert_eq!(allowed(), before);
}
