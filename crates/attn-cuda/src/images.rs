//! Kernel images: embedded by `build.rs`, else from the disk cache, else compiled by NVRTC and kept there.
//!
//! The cache is `$ATTN_CACHE_DIR`, else `$XDG_CACHE_HOME/attn`, else `~/.cache/attn`; an entry is written beside its place
//! and renamed, so concurrent processes are safe, and carries its length and a checksum, so a damaged one is rebuilt.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{
    instance::{Arch, Instance, fnv128},
    nvrtc::{self, Nvrtc},
};

/// `(key, image)` of every embedded instance.
mod embedded {
    include!(concat!(env!("OUT_DIR"), "/embedded.rs"));
}

const MAGIC: &[u8; 8] = b"ATTNIMG1";

/// Why there is no image.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// No embedded image, none cached, no compiler.
    #[error("no compiler for its kernels: {0}; {next}", next = nvrtc::NEXT_STEP)]
    NoCompiler(String),
    /// The compiler refused the source.
    #[error("{0}; report it, and use backend \"cpu\" meanwhile")]
    Compile(String),
}

/// Where an image came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// This program.
    Embedded,
    /// The disk cache.
    Cached,
    /// NVRTC, just now.
    Compiled,
}

/// The compiler, looked for once.
pub fn compiler() -> Result<&'static Nvrtc, ImageError> {
    static COMPILER: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
    COMPILER
        .get_or_init(Nvrtc::load)
        .as_ref()
        .map_err(|reason| ImageError::NoCompiler(reason.clone()))
}

/// The kernel sources: this program's own, or those in the folder that `ATTN_KERNELS` names, for who changes them.
pub fn sources() -> &'static [(&'static str, &'static str)] {
    static SOURCES: OnceLock<Vec<(&'static str, &'static str)>> = OnceLock::new();
    let Some(folder) = env::var_os("ATTN_KERNELS") else {
        return attn_kernels::CUDA;
    };
    SOURCES.get_or_init(|| {
        let mut files: Vec<(&str, &str)> = fs::read_dir(&folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                let text = fs::read_to_string(entry.path()).ok()?;
                // Read once per process.
                Some((&*name.leak(), &*text.leak()))
            })
            .collect();
        files.sort_unstable();
        files
    })
}

/// Images that this program carries.
pub fn embedded_count() -> usize {
    embedded::IMAGES.len()
}

/// The cache's folder; `None` where the environment names no place.
pub fn cache_dir() -> Option<PathBuf> {
    let of = |name: &str| {
        env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    of("ATTN_CACHE_DIR")
        .or_else(|| Some(of("XDG_CACHE_HOME")?.join("attn")))
        .or_else(|| Some(of("HOME")?.join(".cache").join("attn")))
}

fn entry_path(dir: &Path, key: u128) -> PathBuf {
    dir.join(format!("{key:032x}.image"))
}

/// Reads an entry; `None` if it is absent or damaged.
fn read_entry(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    let (head, image) = bytes.split_at_checked(32)?;
    let length = u64::from_le_bytes(head[8..16].try_into().ok()?);
    let sum = u128::from_le_bytes(head[16..32].try_into().ok()?);
    let sound = &head[..8] == MAGIC && length == image.len() as u64 && sum == fnv128(image);
    sound.then(|| image.to_vec())
}

fn write_entry(path: &Path, image: &[u8]) -> io::Result<()> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend((image.len() as u64).to_le_bytes());
    bytes.extend(fnv128(image).to_le_bytes());
    bytes.extend(image);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}-{count}.tmp", process::id()));
    fs::write(&temporary, bytes)?;
    fs::rename(&temporary, path).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

/// The image of an instance, ready for the driver: machine code, or PTX that ends in NUL.
///
/// `fresh` passes over the cache, for an entry that the driver refused.
///
/// # Errors
/// [`ImageError`].
pub fn image(
    instance: &Instance,
    arch: Arch,
    fresh: bool,
) -> Result<(Vec<u8>, Origin), ImageError> {
    let key = instance.key(sources(), arch);
    if let Ok(at) = embedded::IMAGES.binary_search_by_key(&key, |(key, _)| *key) {
        return Ok((embedded::IMAGES[at].1.to_vec(), Origin::Embedded));
    }
    let path = cache_dir().map(|dir| entry_path(&dir, key));
    if !fresh && let Some(image) = path.as_deref().and_then(read_entry) {
        return Ok((image, Origin::Cached));
    }
    let image = compiler()?
        .compile(sources(), instance.unit(), &instance.options(arch))
        .map_err(ImageError::Compile)?;
    // A cache that cannot be written costs time, nothing else.
    let _ = path.map(|path| write_entry(&path, &image));
    Ok((image, Origin::Compiled))
}

/// Whether [`image`] would succeed without compiling anything, or a compiler is there.
pub fn obtainable(instance: &Instance, arch: Arch) -> Result<(), ImageError> {
    let key = instance.key(sources(), arch);
    let known = embedded::IMAGES
        .binary_search_by_key(&key, |(key, _)| *key)
        .is_ok()
        || cache_dir().is_some_and(|dir| entry_path(&dir, key).exists());
    if known {
        Ok(())
    } else {
        compiler().map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_entry_reads_as_absent() {
        let dir = env::temp_dir().join(format!("attn-images-{}", process::id()));
        let path = entry_path(&dir, 7);
        write_entry(&path, b"kernel").unwrap();
        assert_eq!(read_entry(&path).as_deref(), Some(&b"kernel"[..]));
        let good = fs::read(&path).unwrap();
        for i in 0..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert_eq!(read_entry(&path), None, "byte {i}");
        }
        for len in 0..good.len() {
            fs::write(&path, &good[..len]).unwrap();
            assert_eq!(read_entry(&path), None, "{len} bytes");
        }
        write_entry(&path, b"rebuilt").unwrap();
        assert_eq!(read_entry(&path).as_deref(), Some(&b"rebuilt"[..]));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn append_and_check_compile_where_there_is_a_compiler() {
        let Ok(nvrtc) = compiler() else {
            eprintln!("skipped: no NVRTC");
            return;
        };
        for arch in [Arch::Sm80, Arch::Sm90a, Arch::Compute80] {
            let append = Instance::Append {
                format: attn_core::KvFormat::INT4,
                head_dim: 80,
                page_size: 64,
            };
            let import = Instance::Import {
                format: "fp8/int8-g32".parse().unwrap(),
                head_dim: 96,
                page_size: 32,
            };
            for instance in [append, import, Instance::Check, Instance::Read] {
                let image =
                    nvrtc.compile(attn_kernels::CUDA, instance.unit(), &instance.options(arch));
                assert!(!image.unwrap().is_empty());
            }
        }
    }
}
