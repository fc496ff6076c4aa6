//! Kernel images: embedded by `build.rs`, else from the disk cache (`image_cache`), else compiled by NVRTC and
//! kept there.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use attn_kernels::cuda::{
    Instance, Target,
    instance::Key,
    nvrtc::{self, Nvrtc},
};

use crate::image_cache::{self, CacheError};

/// `(key, image)` of every embedded instance.
mod embedded {
    include!(concat!(env!("OUT_DIR"), "/embedded.rs"));
}

/// Why there is no image.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// No embedded image, none cached, no compiler.
    #[error("no compiler for its kernels: {0}; {next}", next = nvrtc::NEXT_STEP)]
    NoCompiler(String),
    /// The cache is refused, so nothing in it was read, and there is no compiler.
    #[error("{cache}; nor is there a compiler for its kernels: {compiler}; {next}", next = nvrtc::NEXT_STEP)]
    Cache {
        /// Why the cache is refused.
        cache: CacheError,
        /// Why there is no compiler.
        compiler: String,
    },
    /// The compiler refused the source.
    #[error("{0}; report it, and use backend \"cpu\" meanwhile")]
    Compile(String),
}

/// Origin of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The program itself.
    Embedded,
    /// The disk cache.
    Cached,
    /// NVRTC, just now.
    Compiled,
}

impl Origin {
    /// The name that events have.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Embedded => "embedded",
            Origin::Cached => "cached",
            Origin::Compiled => "compiled",
        }
    }
}

/// The compiler, looked for once.
pub fn compiler() -> Result<&'static Nvrtc, ImageError> {
    static COMPILER: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
    COMPILER
        .get_or_init(Nvrtc::load)
        .as_ref()
        .map_err(|reason| ImageError::NoCompiler(reason.clone()))
}

/// The kernel sources: this program's own, or those in the folder that `ATTN_KERNELS` names, for work on the kernels.
pub fn sources() -> &'static [(&'static str, &'static str)] {
    static SOURCES: OnceLock<Vec<(&'static str, &'static str)>> = OnceLock::new();
    let Some(folder) = env::var_os("ATTN_KERNELS") else {
        return attn_kernels::CUDA;
    };
    SOURCES.get_or_init(|| {
        let mut files = Vec::new();
        read_below(Path::new(&folder), "", &mut files);
        files.sort_unstable();
        files
    })
}

/// Adds the text of every readable file below a folder, by its path from there on, as `#include` names it. A missing one is named by the compiler.
fn read_below(folder: &Path, within: &str, files: &mut Vec<(&'static str, &'static str)>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let name = format!("{within}{name}");
        if path.is_dir() {
            read_below(&path, &format!("{name}/"), files);
        } else if let Ok(text) = fs::read_to_string(&path) {
            // Read once per process.
            files.push((name.leak(), text.leak()));
        }
    }
}

/// Images that this program carries.
pub fn embedded_count() -> usize {
    embedded::IMAGES.len()
}

/// The image of an instance, ready for the driver: machine code, or PTX that ends in NUL.
///
/// `fresh` passes over the cache, for an entry that the driver refused.
///
/// # Errors
/// [`ImageError`].
pub fn image(
    instance: &Instance,
    target: impl Into<Target>,
    fresh: bool,
) -> Result<(Vec<u8>, Origin), ImageError> {
    let target = target.into();
    let key = instance.key(sources(), target);
    if let Some(image) = embedded_image(&key) {
        return Ok((image.to_vec(), Origin::Embedded));
    }
    let folder = image_cache::folder();
    let cached = if fresh {
        Ok(None)
    } else {
        cached_image(folder.clone(), &key)
    };
    if let Ok(Some(image)) = cached {
        return Ok((image, Origin::Cached));
    }
    let compiler = compiler().map_err(|error| without_compiler(error, cached.err()))?;
    let image = compiler
        .compile(sources(), instance.source(), &instance.options(target))
        .map_err(ImageError::Compile)?;
    // A cache that cannot be written, or must not be, costs time, nothing else.
    if let Ok(Some(folder)) = folder {
        let _ = image_cache::write_entry(&folder, &key, &image);
    }
    Ok((image, Origin::Compiled))
}

/// Whether [`image`] would succeed without compiling anything, or a compiler is there.
///
/// A cached entry counts once it has been read and its hash compared.
///
/// # Errors
/// [`ImageError`].
pub fn obtainable(instance: &Instance, target: Target) -> Result<(), ImageError> {
    let key = instance.key(sources(), target);
    if embedded_image(&key).is_some() {
        return Ok(());
    }
    obtainable_from(image_cache::folder(), &key, || compiler().map(drop))
}

fn obtainable_from(
    folder: Result<Option<PathBuf>, CacheError>,
    key: &Key,
    compiler: impl FnOnce() -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    match cached_image(folder, key) {
        Ok(Some(_)) => Ok(()),
        cached => compiler().map_err(|error| without_compiler(error, cached.err())),
    }
}

fn embedded_image(key: &Key) -> Option<&'static [u8]> {
    let at = embedded::IMAGES.binary_search_by_key(&key, |(key, _)| key);
    at.ok().map(|at| embedded::IMAGES[at].1)
}

/// The cache's image for a key, or the reason why the cache is refused.
fn cached_image(
    folder: Result<Option<PathBuf>, CacheError>,
    key: &Key,
) -> Result<Option<Vec<u8>>, CacheError> {
    match folder? {
        Some(folder) => image_cache::read_entry(&folder, key),
        None => Ok(None),
    }
}

/// Names the cache's refusal where the image might have been there.
fn without_compiler(error: ImageError, cache: Option<CacheError>) -> ImageError {
    match (error, cache) {
        (ImageError::NoCompiler(compiler), Some(cache)) => ImageError::Cache { cache, compiler },
        (error, _) => error,
    }
}

#[cfg(test)]
mod tests {
    use attn_core::HeadDim;
    use attn_kernels::cuda::Arch;

    use super::*;

    #[test]
    fn only_a_sound_entry_or_a_compiler_makes_a_kernel_obtainable() {
        let root = tempfile::tempdir().unwrap();
        let (folder, key) = (root.path().join("attn"), [3; 32]);
        let nowhere = || Err(ImageError::NoCompiler("nowhere".into()));
        let ask =
            |folder: Result<Option<PathBuf>, CacheError>| obtainable_from(folder, &key, nowhere);
        let given = || Ok(Some(folder.clone()));
        assert!(matches!(ask(given()), Err(ImageError::NoCompiler(_))));
        assert!(matches!(ask(Ok(None)), Err(ImageError::NoCompiler(_))));
        image_cache::write_entry(&folder, &key, b"kernel").unwrap();
        assert!(ask(given()).is_ok());
        let path = image_cache::entry_path(&folder, &key);
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        let said = ask(given()).unwrap_err().to_string();
        for part in [
            path.to_str().unwrap(),
            "damaged",
            "nowhere",
            nvrtc::NEXT_STEP,
        ] {
            assert!(said.contains(part), "{said}");
        }
        assert!(obtainable_from(given(), &key, || Ok(())).is_ok());
        let relative = Err(CacheError::Relative { path: "x".into() });
        assert!(matches!(ask(relative), Err(ImageError::Cache { .. })));
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
                head_dim: HeadDim::same(80),
                page_size: 64,
                rotary: false,
            };
            let import = Instance::Import {
                format: "fp8/int8-g32".parse().unwrap(),
                head_dim: HeadDim::same(96),
                page_size: 32,
            };
            let export = Instance::Export {
                format: attn_core::KvFormat::INT4,
                head_dim: HeadDim::same(96),
                page_size: 32,
            };
            let dequantize = Instance::Dequantize {
                format: attn_core::KvFormat::INT4,
                head_dim: HeadDim::same(96),
                page_size: 16,
            };
            let gather = Instance::GatherPages {
                format: attn_core::KvFormat::INT4,
                head_dim: HeadDim::same(80),
                page_size: 32,
            };
            let rows = Instance::DequantizeRows {
                format: "int8-g32/fp8".parse().unwrap(),
                head_dim: HeadDim::same(80),
                page_size: 16,
            };
            let (copy, merge) = (Instance::CopyPages, Instance::MergeStates);
            for instance in [
                append,
                import,
                export,
                dequantize,
                rows,
                gather,
                copy,
                merge,
                Instance::QueryBlocks,
                Instance::Check,
                Instance::GridFunctions,
                Instance::Read,
            ] {
                let image = nvrtc.compile(
                    attn_kernels::CUDA,
                    instance.source(),
                    &instance.options(arch),
                );
                assert!(!image.unwrap().is_empty());
            }
        }
    }
}
