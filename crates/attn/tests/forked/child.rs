//! A process that is forked from a test's own, and what it finds out before a deadline.

use std::{
    ffi::c_int,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::sleep,
    time::{Duration, Instant},
};

unsafe extern "C" {
    fn fork() -> c_int;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn kill(process: c_int, signal: c_int) -> c_int;
    fn _exit(status: c_int) -> !;
}

const WNOHANG: c_int = 1;
const SIGKILL: c_int = 9;

/// Far more than calls take that are refused at once.
const DEADLINE: Duration = Duration::from_secs(20);

/// Asserts that each of these holds in one forked process.
#[track_caller]
pub fn assert_in_child(claims: &[(&str, &dyn Fn() -> bool)]) {
    // SAFETY: the child has this thread alone, allocates by an allocator that its fork has left usable, and calls what is refused before it takes a lock
    // that another thread may have held. It ends without destructors.
    let child = unsafe { fork() };
    if child == 0 {
        let fails = |(_, claim): &(_, &dyn Fn() -> bool)| {
            !catch_unwind(AssertUnwindSafe(claim)).unwrap_or(false)
        };
        let first = claims.iter().position(fails);
        let status = first.map_or(0, |first| first as c_int + 1);
        // SAFETY: ends the process.
        unsafe { _exit(status) };
    }
    assert!(child > 0, "no process was forked");
    let start = Instant::now();
    let mut status = 0;
    // SAFETY: a child of this process, which nobody else waits for, and a number of this function's own.
    while unsafe { waitpid(child, &mut status, WNOHANG) } == 0 {
        if start.elapsed() > DEADLINE {
            // SAFETY: the child has not been waited for, so that its number is still its own.
            unsafe { kill(child, SIGKILL) };
            // SAFETY: as above.
            unsafe { waitpid(child, &mut status, 0) };
            panic!("a call in the forked process hangs");
        }
        sleep(Duration::from_millis(10));
    }
    match (status & 0x7f, status >> 8 & 0xff) {
        (0, 0) => {}
        (0, n) if n as usize <= claims.len() => panic!("not so: {}", claims[n as usize - 1].0),
        _ => panic!("the forked process ended with the status {status:#x}"),
    }
}
