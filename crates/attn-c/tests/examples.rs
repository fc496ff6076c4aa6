//! The examples, compiled by this machine's C and C++ compilers against the static library: what a program gets that links it.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// What `rustc --print native-static-libs` names for the library.
const SYSTEM: [&str; 5] = ["-lm", "-lpthread", "-ldl", "-lgcc_s", "-lc"];

/// Cargo builds the library beside this test's program.
fn library() -> PathBuf {
    let program = env::current_exe().expect("a test knows its own program");
    let library = program.with_file_name("libattn_c.a");
    assert!(library.exists(), "{} is missing", library.display());
    library
}

/// Compiles and runs an example with what `compiler` names, and returns what it prints.
fn run(compiler: &[&str], source: &str, device: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder for the program");
    let program = folder.path().join("example");
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(compiler[0])
        .args(&compiler[1..])
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
        .arg(own.join("include"))
        .arg(own.join("examples").join(source))
        .arg(library())
        .args(SYSTEM)
        .arg("-o")
        .arg(&program)
        .output();
    let output = output.unwrap_or_else(|error| {
        panic!(
            "{} compiles the examples, and cannot be run: {error}",
            compiler[0]
        )
    });
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{source} does not compile: {said}");
    let output = Command::new(program).arg(device).output();
    let output = output.expect("the example was compiled for this machine");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{source}: {said}");
    String::from_utf8(output.stdout).expect("the example prints UTF-8")
}

#[test]
#[cfg(target_os = "linux")]
fn c_decodes_on_the_cpu() {
    let said = run(&["cc", "-std=c99"], "decode.c", "cpu");
    assert!(said.contains("attn 0.1.0 on cpu: "), "{said}");
    assert!(said.contains("the same bits alone, in a batch"), "{said}");
    // Two sequences of 101 tokens that share their first page.
    assert!(said.contains("3 of 32 pages of "), "{said}");
}

#[test]
#[cfg(target_os = "linux")]
fn c_serves_a_model_of_several_layers() {
    let said = run(&["cc", "-std=c99"], "layers.c", "cpu");
    assert!(
        said.contains("refused, as it should be: k[5] is NaN"),
        "{said}"
    );
    assert!(
        said.contains("3 layers of 301 tokens in 2 pages each"),
        "{said}"
    );
}

#[test]
#[cfg(target_os = "linux")]
fn cpp_decodes_on_the_cpu() {
    let said = run(&["c++", "-std=c++17"], "decode.cpp", "cpu");
    assert!(
        said.contains("refused, as it should be: sequence 7 does not exist"),
        "{said}"
    );
    assert!(said.contains("the same bits when they are back"), "{said}");
}
