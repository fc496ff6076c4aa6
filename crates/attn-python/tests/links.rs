//! The extension module asks the dynamic loader for the C library alone: it runs where there is no CUDA, no torch and no libpython to link.

use std::{env, fs, path::PathBuf, process::Command};

/// Cargo builds the module beside this test's program.
fn module() -> PathBuf {
    let program = env::current_exe().expect("a test knows its own program");
    program.with_file_name("lib_attn.so")
}

#[test]
#[cfg(target_os = "linux")]
fn it_needs_the_c_library_alone() {
    let module = module();
    assert!(
        fs::metadata(&module).is_ok(),
        "{} is missing",
        module.display()
    );
    let output = Command::new("readelf").arg("-d").arg(&module).output();
    let output = output.expect("readelf of binutils, which Rust's linker comes with");
    let text = String::from_utf8(output.stdout).expect("readelf writes ASCII");
    let needed = text.lines().filter(|line| line.contains("(NEEDED)"));
    let names: Vec<&str> = needed
        .filter_map(|line| line.split_once('[')?.1.split_once(']'))
        .map(|(name, _)| name)
        .collect();
    assert!(
        names.iter().any(|name| name.starts_with("libc.so")),
        "{text}"
    );
    let allowed = [
        "libc.so",
        "libm.so",
        "libgcc_s.so",
        "libpthread.so",
        "libdl.so",
        "librt.so",
        "ld-linux",
    ];
    for name in names {
        assert!(
            allowed.iter().any(|of| name.starts_with(of)),
            "{name} is linked"
        );
    }
}
