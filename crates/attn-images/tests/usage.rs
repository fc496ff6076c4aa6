//! The program refuses what it does not know. It is built for these tests, and `.ci/kernels` runs it.

use std::process::Command;

fn run(argument: &str, arch: &str) -> (Option<i32>, String) {
    let program = env!("CARGO_BIN_EXE_attn-images");
    let output = Command::new(program)
        .args([argument, "--arch", arch])
        .output()
        .expect("the program runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said)
}

#[test]
fn an_argument_that_it_does_not_know_is_an_error() {
    let (status, said) = run("--everything", "sm_80");
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("--everything"), "{said}");
}

#[test]
fn an_architecture_that_it_does_not_know_is_an_error() {
    let (status, said) = run("--common", "sm_70");
    assert_eq!(status, Some(2), "{said}");
    assert!(
        said.contains("allowed: sm_80, sm_90a, compute_80"),
        "{said}"
    );
}
