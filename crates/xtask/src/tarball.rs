//! `cargo xtask tarball`: headers, libraries, and what pkg-config and CMake read, as one archive for C and C++ programs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// What the libraries need of the system, as `rustc --print native-static-libs` names it.
const SYSTEM: &[&str] = if cfg!(target_os = "linux") {
    &["m", "pthread", "dl", "gcc_s"]
} else if cfg!(target_os = "macos") {
    &["m", "pthread"]
} else {
    &["ws2_32", "userenv", "ntdll", "bcrypt", "dbghelp"]
};

/// The files of the shared library.
struct Shared {
    /// The library itself, from the release's folder.
    file: String,
    /// What a linker takes in its place, on Windows.
    import: String,
    /// The name that the loader looks for.
    soname: String,
}

/// Writes `target/tarball/attn-VERSION-TARGET.tar.gz`; with `built`, from the static library that the tests have built, else from one that is
/// built here with these features of attn-c.
///
/// # Errors
/// If the library cannot be built or linked, or a file cannot be written.
pub fn run(root: &Path, built: bool, features: Option<&str>) -> Result<()> {
    let folder = root.join("target/tarball");
    let _ = fs::remove_dir_all(&folder);
    let version = env!("CARGO_PKG_VERSION");
    let name = format!("attn-{version}-{}", target()?);
    let release = folder.join(&name);
    for part in ["include", "lib/pkgconfig", "lib/cmake/attn"] {
        fs::create_dir_all(release.join(part))?;
    }
    let libraries = libraries(root, built, features)?;
    let source = root.join("crates/attn-c");
    for header in ["attn.h", "attn.hpp"] {
        fs::copy(
            source.join("include").join(header),
            release.join("include").join(header),
        )?;
    }
    for text in ["LICENSE-MIT", "LICENSE-APACHE", "CHANGELOG.md", "docs/c.md"] {
        let to = Path::new(text).file_name().context("a file")?;
        fs::copy(root.join(text), release.join(to))?;
    }
    let abi = abi(&source)?;
    let archive = if cfg!(windows) {
        "attn.lib"
    } else {
        "libattn.a"
    };
    let archive = format!("lib/{archive}");
    let found = libraries.join(if cfg!(windows) {
        "attn_c.lib"
    } else {
        "libattn_c.a"
    });
    fs::copy(&found, release.join(&archive))
        .with_context(|| format!("no {}; run the tests of attn-c first", found.display()))?;
    let shared = shared(&libraries, &release, &abi, version)?;
    descriptions(&source, &release, &archive, &shared, &abi)?;
    let file = format!("{name}.tar.gz");
    let status = Command::new("tar")
        .current_dir(&folder)
        .args(["-czf", &file, &name])
        .status();
    ensure!(status.context("cannot run tar")?.success(), "tar failed");
    let bytes = fs::metadata(folder.join(&file))?.len();
    println!("target/tarball/{file}: {:.1} MB", bytes as f64 / 1e6);
    Ok(())
}

/// The target that this program is compiled for, which cargo builds for by default.
fn target() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output()?;
    let text = String::from_utf8(output.stdout)?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names a host")?.to_owned())
}

/// The folder of attn-c's libraries.
fn libraries(root: &Path, built: bool, features: Option<&str>) -> Result<PathBuf> {
    let target = match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => root.join("target"),
    };
    if built {
        return Ok(target.join("release/deps"));
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .current_dir(root)
        .args(["build", "--release", "--package", "attn-c"]);
    if let Some(features) = features {
        cargo.args(["--features", features]);
    }
    ensure!(
        cargo.status()?.success(),
        "cargo build --package attn-c failed"
    );
    Ok(target.join("release"))
}

/// `ATTN_ABI_VERSION` of the header.
fn abi(source: &Path) -> Result<String> {
    let header = fs::read_to_string(source.join("include/attn.h"))?;
    let line = header
        .lines()
        .find_map(|line| line.strip_prefix("#define ATTN_ABI_VERSION "));
    Ok(line.context("attn.h defines ATTN_ABI_VERSION")?.to_owned())
}

/// Puts the shared library into the release. On Linux and macOS it is linked of the static one under a name with the version of the interface, so
/// that a loader refuses a library of another version; on Linux each symbol has that version, too.
fn shared(libraries: &Path, release: &Path, abi: &str, version: &str) -> Result<Shared> {
    let lib = release.join("lib");
    if cfg!(windows) {
        fs::create_dir_all(release.join("bin"))?;
        fs::copy(libraries.join("attn_c.dll"), release.join("bin/attn_c.dll"))?;
        fs::copy(libraries.join("attn_c.dll.lib"), lib.join("attn_c.dll.lib"))?;
        return Ok(Shared {
            file: "bin/attn_c.dll".to_owned(),
            import: "lib/attn_c.dll.lib".to_owned(),
            soname: String::new(),
        });
    }
    let mut linker = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
    linker.current_dir(&lib);
    let names = if cfg!(target_os = "macos") {
        let names = [version, abi].map(|number| format!("libattn.{number}.dylib"));
        linker
            .args(["-dynamiclib", "-Wl,-force_load,libattn.a", "-framework"])
            .args(["CoreFoundation", "-framework", "Metal", "-framework"])
            .args(["QuartzCore", "-framework", "Foundation", "-lobjc"])
            .arg(format!("-Wl,-install_name,@rpath/{}", names[1]));
        names
    } else {
        let names = [version, abi].map(|number| format!("libattn.so.{number}"));
        fs::write(
            lib.join("versions"),
            format!("ATTN_{abi} {{ global: attn_*; local: *; }};\n"),
        )?;
        linker
            .args(["-shared", "-Wl,--gc-sections", "-Wl,-z,defs", "-s"])
            .args(["-Wl,--version-script=versions", "-Wl,--whole-archive"])
            .args(["libattn.a", "-Wl,--no-whole-archive"])
            .arg(format!("-Wl,-soname,{}", names[1]));
        names
    };
    linker.args(SYSTEM.iter().map(|name| format!("-l{name}")));
    linker.arg("-o").arg(&names[0]);
    let status = linker.status().context("cannot run cc")?;
    let _ = fs::remove_file(lib.join("versions"));
    ensure!(status.success(), "the shared library cannot be linked");
    link(&names[0], &lib.join(&names[1]))?;
    let plain = if cfg!(target_os = "macos") {
        "libattn.dylib"
    } else {
        "libattn.so"
    };
    link(&names[1], &lib.join(plain))?;
    Ok(Shared {
        file: format!("lib/{}", names[0]),
        import: String::new(),
        soname: names[1].clone(),
    })
}

/// A symbolic link.
#[cfg(unix)]
fn link(to: &str, at: &Path) -> Result<()> {
    Ok(std::os::unix::fs::symlink(to, at)?)
}

#[cfg(not(unix))]
fn link(_: &str, at: &Path) -> Result<()> {
    anyhow::bail!("{}: links are for Linux and macOS", at.display())
}

/// Writes what pkg-config and CMake read.
fn descriptions(
    source: &Path,
    release: &Path,
    archive: &str,
    shared: &Shared,
    abi: &str,
) -> Result<()> {
    let flags: Vec<_> = SYSTEM.iter().map(|name| format!("-l{name}")).collect();
    let values = [
        ("VERSION", env!("CARGO_PKG_VERSION").to_owned()),
        ("MAJOR", env!("CARGO_PKG_VERSION_MAJOR").to_owned()),
        ("MINOR", env!("CARGO_PKG_VERSION_MINOR").to_owned()),
        ("ABI", abi.to_owned()),
        ("SHARED", shared.file.clone()),
        ("IMPORT", shared.import.clone()),
        ("SONAME", shared.soname.clone()),
        ("STATIC", archive.to_owned()),
        ("SYSTEM_LIST", SYSTEM.join(";")),
        ("SYSTEM", flags.join(" ")),
    ];
    for (name, folder) in [
        ("attn.pc", "lib/pkgconfig"),
        ("attn-config.cmake", "lib/cmake/attn"),
        ("attn-config-version.cmake", "lib/cmake/attn"),
    ] {
        let template = source.join("package").join(format!("{name}.in"));
        let mut text =
            fs::read_to_string(&template).with_context(|| format!("no {}", template.display()))?;
        for (key, value) in &values {
            text = text.replace(&format!("@{key}@"), value);
        }
        ensure!(
            !text.contains('@'),
            "{name} has a placeholder without a value"
        );
        fs::write(release.join(folder).join(name), text)?;
    }
    Ok(())
}
