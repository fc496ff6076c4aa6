//! Finds, loads and calls NVRTC, NVIDIA's run-time compiler of CUDA kernels; used by `build.rs` and at run time.
//!
//! Loading a library runs its initializers, so only these places are searched, in this order:
//!
//! 1. `ATTN_NVRTC`, an absolute path of a folder or of a file in it; if it is set, no other place is searched;
//! 2. the dynamic loader's own path, unless `LD_LIBRARY_PATH` has a relative or empty entry;
//! 3. the absolute entries of `LD_LIBRARY_PATH`;
//! 4. `/usr/local/cuda/lib64`, `$CUDA_PATH/lib64`, `/usr/local/cuda-*/lib64`;
//! 5. the wheels of `pip install nvidia-cuda-nvrtc` (`lib/python3*/{site,dist}-packages/nvidia/c*/lib`) below `VIRTUAL_ENV`,
//!    `CONDA_PREFIX`, the parent of each absolute entry of `PATH` that has a `python3` (and of the link's target, if that is a link),
//!    and `~/.local`.
//!
//! Relative paths, such as the current directory, are never searched. `libnvrtc-builtins` must be loaded before a `libnvrtc` that is
//! opened by its path.

use std::{
    env,
    ffi::{CStr, CString, OsString, c_char, c_int, c_void},
    fs,
    path::{Path, PathBuf},
    ptr,
};

use libloading::Library;

/// The end of an error message: how to install the compiler.
pub const NEXT_STEP: &str = "install it with `pip install nvidia-cuda-nvrtc` (driver 580 or newer) or `pip install nvidia-cuda-nvrtc-cu12`, \
     or point ATTN_NVRTC at a folder that holds libnvrtc.so";

/// NVRTC, loaded into this process.
#[derive(Debug)]
pub struct Nvrtc {
    library: Library,
    _builtins: Option<Library>,
    /// The path of the library, or the name by which the dynamic loader found it.
    pub path: PathBuf,
    /// Major and minor version of NVRTC.
    pub version: (i32, i32),
}

type Program = *mut c_void;

/// The folders `base/<an entry whose name starts with prefix>/rest` that exist, last name first.
fn glob(base: &Path, prefix: &str, rest: &str) -> Vec<PathBuf> {
    let mut found: Vec<_> = fs::read_dir(base)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path().join(rest))
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    found.reverse();
    found
}

/// `lib/python3*/site-packages/nvidia/*/lib` of a Python prefix.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for packages in ["site-packages/nvidia", "dist-packages/nvidia"] {
        for nvidia in glob(&prefix.join("lib"), "python3", packages) {
            all.extend(glob(&nvidia, "c", "lib"));
        }
    }
    all
}

/// The environment variables that the search depends on; the build script runs again when one of them changes.
pub const VARIABLES: [&str; 7] = [
    "ATTN_NVRTC",
    "LD_LIBRARY_PATH",
    "CUDA_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PATH",
    "HOME",
];

/// Reads one environment variable.
type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

fn process_env(name: &str) -> Option<OsString> {
    env::var_os(name)
}

/// The path in a variable, if it is absolute. A relative one would depend on the current directory.
fn absolute(env: Env<'_>, name: &str) -> Option<PathBuf> {
    env(name)
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
}

/// The entries of the dynamic loader's search path; an empty one stands for the current directory.
fn library_path(env: Env<'_>) -> Vec<PathBuf> {
    let list = env("LD_LIBRARY_PATH").unwrap_or_default();
    if list.is_empty() {
        return Vec::new();
    }
    // The dynamic loader accepts semicolons as separators, too.
    let entries = env::split_paths(&list).map(PathBuf::into_os_string);
    entries
        .flat_map(|entry| match entry.to_str() {
            Some(text) => text.split(';').map(PathBuf::from).collect(),
            None => vec![PathBuf::from(entry)],
        })
        .collect()
}

/// The Python prefixes to search: `VIRTUAL_ENV`, `CONDA_PREFIX`, those of every absolute entry of `PATH` with a `python3`, and `~/.local`.
fn prefixes(env: Env<'_>) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .iter()
        .filter_map(|name| absolute(env, name))
        .collect();
    let path = env("PATH").unwrap_or_default();
    for bin in env::split_paths(&path).filter(|bin| bin.is_absolute()) {
        if bin.join("python3").exists() {
            all.extend(bin.parent().map(Path::to_path_buf));
            // A link may point into a virtual environment, whose packages lie at the target.
            let link = fs::read_link(bin.join("python3")).ok();
            all.extend(link.and_then(|l| Some(bin.join(l).parent()?.parent()?.to_path_buf())));
        }
    }
    all.extend(absolute(env, "HOME").map(|home| home.join(".local")));
    all
}

/// The folders that are searched after the dynamic loader's own path; all are absolute.
fn folders(env: Env<'_>) -> Vec<PathBuf> {
    let mut all = library_path(env);
    all.retain(|folder| folder.is_absolute());
    all.push(PathBuf::from("/usr/local/cuda/lib64"));
    all.extend(absolute(env, "CUDA_PATH").map(|path| path.join("lib64")));
    all.extend(glob(Path::new("/usr/local"), "cuda-", "lib64"));
    for prefix in prefixes(env) {
        all.extend(wheels(&prefix));
    }
    all
}

/// The existing files and folders that decide which library is found, for a build script to watch.
///
/// The first NVIDIA wheel under a Python prefix is not noticed: cargo watches a folder with everything below it, and `site-packages` is too
/// large for that.
pub fn watched(found: Option<&Nvrtc>) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = absolute(&process_env, "ATTN_NVRTC").into_iter().collect();
    let loaded = found.map(|nvrtc| nvrtc.path.clone());
    all.extend(loaded.filter(|path| path.is_absolute()));
    // Cargo adds folders of its own to `LD_LIBRARY_PATH`, and they change with every build.
    let fixed = |name: &str| {
        (name != "LD_LIBRARY_PATH")
            .then(|| process_env(name))
            .flatten()
    };
    all.extend(folders(&fixed));
    all.retain(|path| path.exists());
    all
}

/// Opens a library; `global` makes its symbols visible to libraries that are opened later.
fn open(path: &Path, global: bool) -> Result<Library, libloading::Error> {
    #[cfg(unix)]
    {
        use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
        let flags = RTLD_NOW | if global { RTLD_GLOBAL } else { RTLD_LOCAL };
        // SAFETY: opening runs the library's initializers; NVRTC and its builtins are made to be loaded by any process.
        unsafe { Library::open(Some(path), flags) }.map(Into::into)
    }
    #[cfg(not(unix))]
    {
        let _ = global;
        // SAFETY: opening runs the library's initializers; NVRTC and its builtins are made to be loaded by any process.
        unsafe { Library::new(path) }
    }
}

/// The newest file in `folder` whose name starts with `stem`.
fn newest(folder: &Path, stem: &str) -> Option<PathBuf> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with(stem))
        })
        .collect();
    names.sort();
    names.pop()
}

impl Nvrtc {
    /// Finds and loads the compiler.
    ///
    /// # Errors
    /// A message that names the places searched, or the last error of loading a library.
    pub fn load() -> Result<Self, String> {
        Self::load_from(&process_env)
    }

    fn load_from(env: Env<'_>) -> Result<Self, String> {
        let mut message = String::from(
            "no libnvrtc.so on the library path, in /usr/local/cuda* or in Python wheels",
        );
        if let Some(given) = env("ATTN_NVRTC").map(PathBuf::from) {
            return Self::from_given(&given)
                .map_err(|error| format!("ATTN_NVRTC={}: {error}", given.display()));
        }
        // The dynamic loader searches every entry of its path. If one is relative, the loader is not asked, and `folders` has the
        // absolute entries.
        let leads_elsewhere = library_path(env).iter().any(|entry| !entry.is_absolute());
        let by_name: &[&str] = if cfg!(unix) && !leads_elsewhere {
            &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
        } else {
            &[]
        };
        for name in by_name {
            if let Ok(library) = open(Path::new(name), false) {
                match Self::new(library, None, name.into()) {
                    Ok(nvrtc) => return Ok(nvrtc),
                    Err(error) => message = error,
                }
            }
        }
        for folder in folders(env) {
            match Self::from_folder(&folder) {
                Some(Ok(nvrtc)) => return Ok(nvrtc),
                Some(Err(error)) => message = error,
                None => {}
            }
        }
        Err(message)
    }

    /// Loads the library from the given folder, or from the folder of the given file.
    fn from_given(given: &Path) -> Result<Self, String> {
        if !given.is_absolute() {
            return Err("it is a relative path; give an absolute one".into());
        }
        let folder = if given.is_dir() {
            given
        } else {
            given.parent().unwrap_or(given)
        };
        Self::from_folder(folder).unwrap_or_else(|| Err("it holds no libnvrtc.so".into()))
    }

    /// Loads the newest library in the folder; `None` if it has none.
    fn from_folder(folder: &Path) -> Option<Result<Self, String>> {
        let path = newest(folder, "libnvrtc.so")?;
        let builtins = newest(folder, "libnvrtc-builtins.so")
            .map(|path| open(&path, true))
            .transpose();
        let loaded = builtins.and_then(|builtins| Ok((open(&path, false)?, builtins)));
        Some(match loaded {
            Ok((library, builtins)) => Self::new(library, builtins, path),
            Err(error) => Err(error.to_string()),
        })
    }

    fn new(library: Library, builtins: Option<Library>, path: PathBuf) -> Result<Self, String> {
        let mut nvrtc = Nvrtc {
            library,
            _builtins: builtins,
            path,
            version: (0, 0),
        };
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        let version = nvrtc.symbol::<Version>("nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: nvrtcVersion writes two ints.
        let code = unsafe { version(&mut major, &mut minor) };
        nvrtc.version = (major, minor);
        if code == 0 && major >= 12 {
            Ok(nvrtc)
        } else {
            Err(format!(
                "{}: NVRTC {major}.{minor} is too old; 12.0 or newer is needed",
                nvrtc.path.display()
            ))
        }
    }

    fn symbol<T: Copy>(&self, name: &str) -> Result<T, String> {
        // SAFETY: every caller names the type that NVRTC's header gives the function.
        let symbol = unsafe { self.library.get::<T>(name.as_bytes()) };
        symbol
            .map(|s| *s)
            .map_err(|error| format!("{}: {error}", self.path.display()))
    }

    /// Compiles the file `unit` of `files`; the others are its headers. Returns machine code for an `sm_*` architecture, else PTX.
    ///
    /// # Errors
    /// A message with the compiler's log.
    pub fn compile(
        &self,
        files: &[(&str, &str)],
        unit: &str,
        options: &[String],
    ) -> Result<Vec<u8>, String> {
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

        let c_string =
            |text: &str| CString::new(text).map_err(|_| "a source holds a NUL byte".to_owned());
        let (_, source) = files
            .iter()
            .find(|(name, _)| *name == unit)
            .ok_or_else(|| format!("there is no kernel source {unit}"))?;
        let (source, unit_name) = (c_string(source)?, c_string(unit)?);
        let mut texts = Vec::new();
        let mut names = Vec::new();
        for (name, text) in files.iter().filter(|(name, _)| *name != unit) {
            names.push(c_string(name)?);
            texts.push(c_string(text)?);
        }
        let arguments = options
            .iter()
            .map(|option| c_string(option))
            .collect::<Result<Vec<_>, _>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (texts_at, names_at, arguments_at) =
            (pointers(&texts), pointers(&names), pointers(&arguments));
        let create = self.symbol::<Create>("nvrtcCreateProgram")?;
        let compile = self.symbol::<Compile>("nvrtcCompileProgram")?;
        let destroy = self.symbol::<Destroy>("nvrtcDestroyProgram")?;
        let machine_code = options.iter().any(|o| o.contains("=sm_"));
        let (size_name, get_name) = if machine_code {
            ("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        } else {
            ("nvrtcGetPTXSize", "nvrtcGetPTX")
        };
        let (size, get) = (
            self.symbol::<Size>(size_name)?,
            self.symbol::<Get>(get_name)?,
        );
        let (log_size, get_log) = (
            self.symbol::<Size>("nvrtcGetProgramLogSize")?,
            self.symbol::<Get>("nvrtcGetProgramLog")?,
        );
        let mut program: Program = ptr::null_mut();
        // SAFETY: all strings end in NUL and outlive the program; the two arrays have one entry per header.
        let code = unsafe {
            create(
                &mut program,
                source.as_ptr(),
                unit_name.as_ptr(),
                texts_at.len() as c_int,
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        if code != 0 {
            return Err(format!("nvrtcCreateProgram failed with error {code}"));
        }
        let read = |size: Size, get: Get| {
            let mut bytes = 0;
            // SAFETY: `program` is alive until `destroy` below; `bytes` is a size_t.
            if unsafe { size(program, &mut bytes) } != 0 {
                return Err(format!("{unit}: the compiler gave no size"));
            }
            let mut buffer = vec![0u8; bytes.max(1)];
            // SAFETY: the buffer holds as many bytes as the compiler just asked for.
            match unsafe { get(program, buffer.as_mut_ptr().cast()) } {
                0 => Ok(buffer),
                code => Err(format!("{unit}: the compiler gave no image (error {code})")),
            }
        };
        // SAFETY: the program was created above; the options outlive the call.
        let code = unsafe { compile(program, arguments_at.len() as c_int, arguments_at.as_ptr()) };
        let result = if code == 0 {
            read(size, get)
        } else {
            let log = read(log_size, get_log).unwrap_or_default();
            let log = CStr::from_bytes_until_nul(&log)
                .map(CStr::to_string_lossy)
                .unwrap_or_default();
            Err(format!(
                "{unit} does not compile (NVRTC {}.{}, error {code}): {log}",
                self.version.0, self.version.1
            ))
        };
        // SAFETY: created above, destroyed once.
        unsafe { destroy(&mut program) };
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An environment that has these variables alone.
    fn of<'a>(variables: &'a [(&'a str, &'a Path)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        |name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, path)| path.as_os_str().to_owned())
        }
    }

    /// The path, made relative to the current directory.
    fn relative(path: &Path) -> PathBuf {
        let here = env::current_dir().unwrap();
        let up = here.components().skip(1).map(|_| "..");
        let relative: PathBuf = up.collect();
        relative.join(path.strip_prefix("/").unwrap())
    }

    /// A Python prefix with the folder that the wheel would install.
    fn prefix() -> tempfile::TempDir {
        let prefix = tempfile::tempdir().unwrap();
        let wheel = "lib/python3.12/site-packages/nvidia/cu13/lib";
        fs::create_dir_all(prefix.path().join(wheel)).unwrap();
        fs::create_dir(prefix.path().join("bin")).unwrap();
        fs::write(prefix.path().join("bin/python3"), "").unwrap();
        prefix
    }

    #[test]
    fn absolute_places_are_searched_and_relative_ones_are_not() {
        let prefix = prefix();
        let (root, bin) = (prefix.path().to_path_buf(), prefix.path().join("bin"));
        let below = |path: &Path| {
            folders(&of(&[("PATH", path)]))
                .iter()
                .any(|f| f.starts_with(&root))
        };
        assert!(below(&bin));
        let relative_bin = relative(&bin);
        assert!(
            relative_bin.join("python3").exists(),
            "the path leads there"
        );
        for variable in [
            "PATH",
            "VIRTUAL_ENV",
            "CONDA_PREFIX",
            "CUDA_PATH",
            "LD_LIBRARY_PATH",
        ] {
            let path = if variable == "PATH" {
                &relative_bin
            } else {
                &relative(&root)
            };
            let searched = folders(&of(&[(variable, path)]));
            assert!(
                searched.iter().all(|folder| folder.is_absolute()),
                "{variable}: {searched:?}"
            );
        }
        let home = relative(&root);
        let searched = folders(&of(&[("HOME", &home)]));
        assert!(searched.iter().all(|folder| folder.is_absolute()));
    }

    #[test]
    fn a_relative_attn_nvrtc_is_refused_with_its_name() {
        for given in [".", "lib", "../lib/libnvrtc.so"] {
            let message = Nvrtc::load_from(&of(&[("ATTN_NVRTC", Path::new(given))])).unwrap_err();
            assert!(
                message.contains(given) && message.contains("absolute"),
                "{message}"
            );
        }
    }

    #[test]
    fn empty_entries_of_the_library_path_count_as_the_current_directory() {
        for (path, is_safe) in [
            ("", true),
            ("/a:/b", true),
            ("/a;/b", true),
            (":/a", false),
            ("/a:", false),
            ("/a::/b", false),
            ("/a;.", false),
            ("lib:/a", false),
        ] {
            let entries = library_path(&of(&[("LD_LIBRARY_PATH", Path::new(path))]));
            assert_eq!(entries.iter().all(|e| e.is_absolute()), is_safe, "{path:?}");
        }
    }
}
