//! What fuzzers found, reduced to explicit cases; and the driver's own promises.

use std::process::{Command, Output};

fn driver(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attn-fuzz"));
    command.args(arguments).env_remove("ATTN_BIN");
    command.output().expect("attn-fuzz starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_driver_counts_inputs_and_repeats_one() {
    let output = driver(&["--only", "states", "--seconds", "1", "--seed", "7"]);
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{table}");
    assert!(
        table.starts_with("seed 0x7, 1 s for each fuzzer"),
        "{table}"
    );
    assert!(
        table.contains("| states | AttnState and its merge | "),
        "{table}"
    );
    let output = driver(&["--only", "states", "--input", "0x17"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
}

#[test]
fn a_find_gives_its_seed_and_exit_code_1() {
    // Without the program, each input of this fuzzer fails.
    let output = driver(&["--only", "program", "--seconds", "2", "--seed", "1"]);
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    let line = printed.lines().find(|line| line.starts_with("FIND"));
    let seed = line.and_then(|line| line.split("--input ").nth(1)?.split(':').next());
    let output = driver(&["--only", "program", "--input", seed.expect(&printed)]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
}

#[test]
fn bad_options_are_refused() {
    for arguments in [
        &["--only", "none"][..],
        &["--seconds"],
        &["--input", "1"],
        &["--seed", "x"],
    ] {
        let output = driver(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(
            text(&output.stderr).starts_with("attn-fuzz: "),
            "{arguments:?}"
        );
    }
}
