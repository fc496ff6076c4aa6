//! The disk cache of compiled kernel images: its folder, the permissions it requires, and the form of an entry.
//!
//! An entry is machine code that the GPU will run. The folder and every entry must therefore belong to this process's user or to root, and
//! no other user may have write permission; anything else is a [`CacheError`] and is not read. An entry is written to a temporary file
//! and renamed, so concurrent processes are safe. It holds a BLAKE3 hash of its key and image, so a damaged or renamed entry is refused.

use std::{
    env,
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicUsize, Ordering},
};

use attn_kernels::cuda::instance::{Key, hex};

/// The first bytes of an entry; the number changes with the form.
const MAGIC: &[u8; 8] = b"ATTNIMG2";

/// Why the kernel cache or one of its entries is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// `ATTN_CACHE_DIR` is a relative path, which depends on the current directory.
    #[error("the kernel cache {path} is a relative path; set ATTN_CACHE_DIR to an absolute one")]
    Relative {
        /// The folder given.
        path: PathBuf,
    },
    /// A folder or an entry belongs to another user.
    #[error(
        "the kernel cache's {path} belongs to user {owner}, and only user {user} and root may own it; remove it, or set ATTN_CACHE_DIR to a folder of your own"
    )]
    Owner {
        /// The folder or entry.
        path: PathBuf,
        /// User id of its owner.
        owner: u32,
        /// Effective user id of this process.
        user: u32,
    },
    /// Users other than its owner may write a folder or an entry.
    #[error(
        "the kernel cache's {path} may be written by others (mode {mode:03o}), and only its owner may write it; run `chmod go-w` on it, or set ATTN_CACHE_DIR to a folder of your own"
    )]
    Writable {
        /// The folder or entry.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The path of the folder is not a folder, or the path of an entry is not a file.
    #[error("the kernel cache's {path} is not a {wanted}; remove it")]
    Kind {
        /// The path.
        path: PathBuf,
        /// What should be there: `folder` or `file`.
        wanted: &'static str,
    },
    /// The hash of an entry does not match its bytes.
    #[error(
        "the kernel cache's {path} is damaged; remove it, or compile it again where there is a compiler"
    )]
    Damaged {
        /// The entry.
        path: PathBuf,
    },
    /// The operating system refused to read or write a path.
    #[error("the kernel cache's {path} cannot be read: {reason}")]
    Unreadable {
        /// The folder or entry.
        path: PathBuf,
        /// The operating system's message.
        reason: String,
    },
}

/// The cache's folder: `$ATTN_CACHE_DIR`, else `$XDG_CACHE_HOME/attn`, else `~/.cache/attn`; `None` if no variable is set.
///
/// A relative `XDG_CACHE_HOME` or `HOME` is ignored, as the XDG specification requires.
///
/// # Errors
/// [`CacheError::Relative`] for a relative `ATTN_CACHE_DIR`.
pub fn folder() -> Result<Option<PathBuf>, CacheError> {
    folder_of(&|name| env::var_os(name))
}

fn folder_of(env: &dyn Fn(&str) -> Option<OsString>) -> Result<Option<PathBuf>, CacheError> {
    let of = |name: &str| env(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    match of("ATTN_CACHE_DIR") {
        Some(path) if path.is_absolute() => return Ok(Some(path)),
        Some(path) => return Err(CacheError::Relative { path }),
        None => {}
    }
    let absolute = |name: &str| of(name).filter(|path| path.is_absolute());
    Ok(absolute("XDG_CACHE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".cache")))
        .map(|base| base.join("attn")))
}

/// The cache's folder, if it exists and its permissions allow its use.
///
/// # Errors
/// [`CacheError`] for a folder that another user owns or may write.
pub fn usable_folder() -> Result<Option<PathBuf>, CacheError> {
    match folder()? {
        Some(folder) if check_folder(&folder)? => Ok(Some(folder)),
        _ => Ok(None),
    }
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> CacheError + '_ {
    |error| CacheError::Unreadable {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

/// Refuses a path that anyone but `user` or root owns, or that others than its owner may write. Root can change the program itself, so
/// its files are trusted.
fn check_owner(path: &Path, owner: u32, mode: u32, user: u32) -> Result<(), CacheError> {
    let path = path.to_owned();
    if owner != user && owner != 0 {
        return Err(CacheError::Owner { path, owner, user });
    }
    if mode & 0o022 != 0 {
        let mode = mode & 0o777;
        return Err(CacheError::Writable { path, mode });
    }
    Ok(())
}

#[cfg(unix)]
fn check_access(path: &Path, metadata: &fs::Metadata) -> Result<(), CacheError> {
    use std::os::unix::fs::MetadataExt;
    let user = rustix::process::geteuid().as_raw();
    check_owner(path, metadata.uid(), metadata.mode(), user)
}

/// Elsewhere the system's access lists protect a user's profile, and NVRTC is not searched for (`nvrtc.rs`).
#[cfg(not(unix))]
fn check_access(path: &Path, _metadata: &fs::Metadata) -> Result<(), CacheError> {
    check_owner(path, 0, 0, 0)
}

/// Whether the folder exists; an error if it must not be used.
fn check_folder(folder: &Path) -> Result<bool, CacheError> {
    let metadata = match fs::metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        metadata => metadata.map_err(unreadable(folder))?,
    };
    if !metadata.is_dir() {
        return Err(CacheError::Kind {
            path: folder.to_owned(),
            wanted: "folder",
        });
    }
    check_access(folder, &metadata)?;
    Ok(true)
}

/// The path of a key's entry.
pub(crate) fn entry_path(folder: &Path, key: &Key) -> PathBuf {
    folder.join(format!("{}.image", hex(key)))
}

/// The hash in an entry. It covers the key, so that a renamed entry is refused.
fn checksum(key: &Key, image: &[u8]) -> [u8; 32] {
    *blake3::keyed_hash(key, image).as_bytes()
}

/// Reads the entry of a key; `None` if there is none.
///
/// # Errors
/// [`CacheError`] for an entry, or a folder, that must not be used.
pub(crate) fn read_entry(folder: &Path, key: &Key) -> Result<Option<Vec<u8>>, CacheError> {
    if !check_folder(folder)? {
        return Ok(None);
    }
    let path = entry_path(folder, key);
    let mut file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(unreadable(&path))?,
    };
    // The open file is examined, not the path: another process cannot exchange it any more.
    let metadata = file.metadata().map_err(unreadable(&path))?;
    if !metadata.is_file() {
        let wanted = "file";
        return Err(CacheError::Kind { path, wanted });
    }
    check_access(&path, &metadata)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(unreadable(&path))?;
    let image = bytes
        .strip_prefix(MAGIC)
        .and_then(|rest| rest.split_at_checked(32))
        .filter(|(sum, image)| **sum == checksum(key, image))
        .map(|(_, image)| image.to_vec());
    image.map(Some).ok_or(CacheError::Damaged { path })
}

/// Writes the entry of a key. A folder that does not exist is created with access for its owner alone.
///
/// # Errors
/// [`CacheError`] for a folder that must not be used, or that cannot be written.
pub(crate) fn write_entry(folder: &Path, key: &Key, image: &[u8]) -> Result<(), CacheError> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
        .recursive(true)
        .create(folder)
        .map_err(unreadable(folder))?;
    check_folder(folder)?;
    let path = entry_path(folder, key);
    let write = |file: &mut File| {
        file.write_all(MAGIC)?;
        file.write_all(&checksum(key, image))?;
        file.write_all(image)
    };
    write_beside(&path, write).map_err(unreadable(&path))
}

/// Creates a temporary file beside `path`, fills it by `write` and renames it to `path`; a failure leaves no temporary file.
fn write_beside(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("{}-{count}.tmp", process::id()));
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&temporary)?;
    let written = write(&mut file);
    drop(file);
    written
        .and_then(|()| fs::rename(&temporary, path))
        .inspect_err(|_| {
            let _ = fs::remove_file(&temporary);
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = [7; 32];

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    /// A folder that the cache has created, with one entry.
    fn cache() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/attn");
        write_entry(&folder, &KEY, b"kernel").unwrap();
        (root, folder)
    }

    #[test]
    fn a_damaged_or_renamed_entry_is_refused() {
        let (_root, folder) = cache();
        let path = entry_path(&folder, &KEY);
        let read = || read_entry(&folder, &KEY);
        assert_eq!(read().unwrap().as_deref(), Some(&b"kernel"[..]));
        let damaged = Err(CacheError::Damaged { path: path.clone() });
        let good = fs::read(&path).unwrap();
        for i in 0..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert_eq!(read(), damaged, "byte {i}");
        }
        for len in 0..good.len() {
            fs::write(&path, &good[..len]).unwrap();
            assert_eq!(read(), damaged, "{len} bytes");
        }
        fs::write(&path, [&good[..], b"x"].concat()).unwrap();
        assert_eq!(read(), damaged, "a byte more");
        write_entry(&folder, &KEY, b"rebuilt").unwrap();
        assert_eq!(read().unwrap().as_deref(), Some(&b"rebuilt"[..]));
        let other = [8; 32];
        fs::rename(&path, entry_path(&folder, &other)).unwrap();
        let path = entry_path(&folder, &other);
        assert_eq!(
            read_entry(&folder, &other),
            Err(CacheError::Damaged { path })
        );
        assert_eq!(read(), Ok(None));
    }

    #[test]
    fn a_write_that_fails_leaves_no_file() {
        let (_root, folder) = cache();
        let path = entry_path(&folder, &[9; 32]);
        let failed = write_beside(&path, |file| {
            file.write_all(b"half")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(names(&folder).len(), 1, "{:?}", names(&folder));
        // A rename that fails: a folder stands where the entry belongs.
        fs::create_dir_all(path.join("x")).unwrap();
        assert!(write_entry(&folder, &[9; 32], b"image").is_err());
        assert_eq!(names(&folder).len(), 2, "{:?}", names(&folder));
    }

    #[test]
    fn a_relative_cache_folder_is_refused_or_passed_over() {
        let of = |variables: &[(&str, &str)]| {
            folder_of(&|name| {
                let found = variables.iter().find(|(variable, _)| *variable == name);
                found.map(|(_, value)| value.into())
            })
        };
        let path = PathBuf::from("cache");
        assert_eq!(
            of(&[("ATTN_CACHE_DIR", "cache"), ("HOME", "/h")]),
            Err(CacheError::Relative { path })
        );
        let home = Ok(Some(PathBuf::from("/h/.cache/attn")));
        assert_eq!(of(&[("XDG_CACHE_HOME", "x"), ("HOME", "/h")]), home);
        assert_eq!(of(&[("ATTN_CACHE_DIR", ""), ("HOME", "/h")]), home);
        assert_eq!(of(&[("HOME", ".")]), Ok(None));
        assert_eq!(of(&[]), Ok(None));
    }

    #[test]
    fn only_its_user_and_root_may_own_an_entry() {
        let path = Path::new("/x");
        let check = |owner, mode| check_owner(path, owner, mode, 1000);
        assert_eq!(check(1000, 0o100_644), Ok(()));
        assert_eq!(check(0, 0o040_755), Ok(()));
        for owner in [1, 999, 1001, u32::MAX] {
            let error = check(owner, 0o600).unwrap_err();
            assert!(
                matches!(error, CacheError::Owner { user: 1000, .. }),
                "{error}"
            );
            assert!(error.to_string().contains(&owner.to_string()), "{error}");
        }
        for mode in [0o100_620, 0o100_602, 0o041_777] {
            let error = check(1000, mode).unwrap_err();
            assert!(matches!(error, CacheError::Writable { .. }), "{error}");
        }
    }

    #[cfg(unix)]
    mod unix {
        use std::os::unix::fs::{PermissionsExt, chown};

        use super::*;

        fn set_mode(path: &Path, mode: u32) {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }

        fn mode(path: &Path) -> u32 {
            fs::metadata(path).unwrap().permissions().mode() & 0o777
        }

        #[test]
        fn what_the_cache_makes_is_its_owners_alone() {
            let (_root, folder) = cache();
            assert_eq!(mode(&folder), 0o700);
            assert_eq!(mode(&entry_path(&folder, &KEY)) & 0o077, 0);
        }

        #[test]
        fn a_folder_or_entry_that_others_may_write_is_refused() {
            let (_root, folder) = cache();
            let entry = entry_path(&folder, &KEY);
            for (path, kept) in [(&folder, 0o700), (&entry, 0o600)] {
                for bad in [0o720, 0o702, 0o777] {
                    set_mode(path, bad);
                    let refused = Err(CacheError::Writable {
                        path: path.clone(),
                        mode: bad,
                    });
                    assert_eq!(read_entry(&folder, &KEY), refused);
                    if path == &folder {
                        assert_eq!(write_entry(&folder, &KEY, b"x").map(|()| None), refused);
                    }
                }
                set_mode(path, kept | 0o044);
                assert!(
                    read_entry(&folder, &KEY).unwrap().is_some(),
                    "others may read"
                );
                set_mode(path, kept);
            }
        }

        /// Only root can change a file's owner; for other users the test checks nothing, and `only_its_user_and_root_may_own_an_entry`
        /// holds the rule.
        #[test]
        fn a_folder_or_entry_given_to_another_user_is_refused() {
            let (_root, folder) = cache();
            let (user, owner) = (rustix::process::geteuid().as_raw(), 12_345);
            for path in [folder.clone(), entry_path(&folder, &KEY)] {
                if chown(&path, Some(owner), None).is_err() {
                    assert_ne!(user, 0, "root may give files away");
                    continue;
                }
                let refused = CacheError::Owner {
                    path: path.clone(),
                    owner,
                    user,
                };
                assert_eq!(read_entry(&folder, &KEY), Err(refused));
                chown(&path, Some(user), None).unwrap();
            }
            assert!(read_entry(&folder, &KEY).unwrap().is_some());
        }

        #[test]
        fn what_is_no_folder_or_no_file_is_refused() {
            let (root, folder) = cache();
            let entry = entry_path(&folder, &KEY);
            fs::remove_file(&entry).unwrap();
            fs::create_dir(&entry).unwrap();
            set_mode(&entry, 0o700);
            assert!(matches!(
                read_entry(&folder, &KEY),
                Err(CacheError::Kind { wanted: "file", .. })
            ));
            let file = root.path().join("file");
            fs::write(&file, "").unwrap();
            assert!(matches!(
                read_entry(&file, &KEY),
                Err(CacheError::Kind {
                    wanted: "folder",
                    ..
                })
            ));
            assert_eq!(read_entry(&root.path().join("none"), &KEY), Ok(None));
        }
    }
}
