//! Fuzzes the program `attn` itself on whole and damaged files: exit code 0, 1 or 2, no panic, a sentence with an error, no
//! output file on failure, and an end.

use std::{
    fs::{self, File as FsFile},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use arbitrary::Unstructured;

use crate::{
    draw::Draw,
    driver::scratch,
    hold,
    tensors::{File, draw_format},
};

/// A run that takes longer is a find.
const HANG: Duration = Duration::from_secs(30);

/// Where the program is: `ATTN_BIN`, which `cargo xtask fuzz` sets.
///
/// # Errors
/// Says how to set it.
pub fn program() -> Result<PathBuf, String> {
    let path = std::env::var_os("ATTN_BIN").map(PathBuf::from);
    let path = path.filter(|path| path.is_file());
    path.ok_or_else(|| "ATTN_BIN names no program attn; start `cargo xtask fuzz`".to_owned())
}

/// Draws files and starts the program on them; see the module.
///
/// # Errors
/// What does not hold.
pub fn fuzz(u: &mut Unstructured<'_>) -> Result<(), String> {
    fuzz_program(u, &program()?)
}

/// Fuzzes another program in place of `attn`.
///
/// # Errors
/// What does not hold.
pub fn fuzz_program(u: &mut Unstructured<'_>, program: &Path) -> Result<(), String> {
    let mut draw = Draw(u);
    let folder = tempfile::tempdir_in(scratch()).map_err(|e| e.to_string())?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (file, _) = File::draw(&mut draw);
    let (format, page_size) = draw_format(&mut draw);
    let whole = draw.once_in(3);
    let bytes = if whole {
        file.bytes()
    } else {
        file.damage(&mut draw)
    };
    fs::write(path("in"), bytes).map_err(|e| e.to_string())?;
    if draw.once_in(3) {
        let arguments = [
            "run",
            &path("in"),
            "--backend",
            "cpu",
            "--kv",
            &format.to_string(),
        ];
        return start(program, &arguments, &path("in")).map(|_| ());
    }
    let page_size = page_size.to_string();
    let arguments = [
        "quantize",
        &path("in"),
        &path("pages"),
        "--kv",
        &format.to_string(),
        "--page-size",
        &page_size,
    ];
    if !start(program, &arguments, &path("pages"))? {
        return Ok(());
    }
    let made = fs::read(path("pages")).map_err(|e| e.to_string())?;
    let mut made = File::parse(&made).ok_or("pages are in no file")?;
    if draw.once_in(2) {
        made = made.without_checksum();
    }
    let damaged = made.damage(&mut draw);
    fs::write(path("pages"), damaged).map_err(|e| e.to_string())?;
    start(
        program,
        &["dequantize", &path("pages"), &path("out")],
        &path("out"),
    )?;
    Ok(())
}

/// Runs the program; whether it succeeded. `output` exists after a success, and after a failure only if it is the input.
fn start(program: &Path, arguments: &[&str], output: &str) -> Result<bool, String> {
    let is_new = !Path::new(output).exists();
    let errors = format!("{output}.stderr");
    let stderr = FsFile::create(&errors).map_err(|e| e.to_string())?;
    // What a program writes by mistake stays in the folder that is deleted.
    let folder = Path::new(output).parent().ok_or("no folder")?;
    let mut child = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .env_remove("ATTN_BACKEND")
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .map_err(|e| e.to_string())?;
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            break status;
        }
        if began.elapsed() > HANG {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("no end: {arguments:?}"));
        }
        thread::sleep(Duration::from_micros(500));
    };
    let text = fs::read_to_string(&errors).unwrap_or_default();
    fs::remove_file(&errors).map_err(|e| e.to_string())?;
    let said = text.trim();
    hold!(
        matches!(status.code(), Some(0..=2)) && !said.contains("panicked"),
        "{arguments:?} ended with {status}: {said}"
    );
    let good = status.success();
    hold!(
        good || !said.is_empty(),
        "{arguments:?} failed without a sentence"
    );
    let exists = Path::new(output).exists();
    hold!(
        !is_new || exists == good,
        "{arguments:?} ended with {status}, output file: {exists}"
    );
    Ok(good)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::input;
    use std::os::unix::fs::PermissionsExt;

    fn finds(script: &str) -> bool {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        (0..20).any(|seed| fuzz_program(&mut Unstructured::new(&input(seed)), &path).is_err())
    }

    #[test]
    fn a_program_that_leaves_a_file_behind_is_found() {
        assert!(finds("echo half > $3; echo sorry >&2; exit 2"));
    }

    #[test]
    fn a_program_that_panics_is_found() {
        assert!(finds("echo thread main panicked >&2; exit 2"));
        assert!(finds("echo abort >&2; exit 101"));
    }

    #[test]
    fn a_program_that_only_refuses_is_not() {
        assert!(!finds("echo no >&2; exit 2"));
    }
}
