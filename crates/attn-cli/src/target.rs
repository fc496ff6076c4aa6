//! Files that the program writes: whole or not at all, and never over another file unasked.
//!
//! The bytes go to a temporary file in the same folder, are flushed to the disk, and take the target's name in one step. Whatever fails
//! before that leaves the target as it was, and no temporary file.

use std::{
    fs,
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use tempfile::{Builder, NamedTempFile};

/// A path that may be written.
#[derive(Debug)]
pub struct Target {
    path: PathBuf,
    force: bool,
}

impl Target {
    /// Checks a path before any work is done; `inputs` are all files that must not be replaced by what is made of them.
    pub fn new(path: &Path, force: bool, inputs: &[PathBuf]) -> Result<Self> {
        let shown = path.display();
        match fs::metadata(path) {
            Ok(found) => {
                ensure!(
                    found.is_file(),
                    "{shown} is not a regular file; name a file to write"
                );
                for input in inputs {
                    refuse_same(input, path)?;
                }
                if !force {
                    return Err(exists(path));
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                ensure!(
                    fs::symlink_metadata(path).is_err(),
                    "{shown} is a link to a file that does not exist; remove the link, or write to another file"
                );
                ensure!(
                    path.file_name().is_some() && folder(path).is_dir(),
                    "cannot write {shown}; its folder does not exist: make it, or write to another one"
                );
            }
            Err(error) => {
                return Err(error).with_context(|| cannot_write(path));
            }
        }
        Ok(Target {
            path: path.to_owned(),
            force,
        })
    }

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        // Through a symbolic link: the file that it names is replaced, not the link.
        let place = fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        let mut file = temporary(&place).with_context(|| cannot_write(&self.path))?;
        file.write_all(bytes)
            .and_then(|()| file.as_file().sync_all())
            .with_context(|| {
                format!(
                    "cannot write {}; check the space left on its disk",
                    self.path.display()
                )
            })?;
        let done = if self.force {
            file.persist(&place)
        } else {
            file.persist_noclobber(&place)
        };
        match done {
            Ok(_) => {}
            Err(failed) if failed.error.kind() == ErrorKind::AlreadyExists => {
                return Err(exists(&self.path));
            }
            Err(failed) => return Err(failed.error).with_context(|| cannot_write(&self.path)),
        }
        // The name is durable once its folder is on the disk, too. Not every file system can flush folders.
        #[cfg(unix)]
        if let Ok(folder) = fs::File::open(folder(&place)) {
            let _ = folder.sync_all();
        }
        Ok(())
    }
}

fn exists(path: &Path) -> anyhow::Error {
    anyhow::anyhow!(
        "{} exists; add --force to replace it, or write to another file",
        path.display()
    )
}

fn cannot_write(path: &Path) -> String {
    format!(
        "cannot write {}; check that its folder exists and is writable",
        path.display()
    )
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// An empty file beside `place`, with the permissions that `place` has or would have if it were written directly.
fn temporary(place: &Path) -> std::io::Result<NamedTempFile> {
    let mut builder = Builder::new();
    builder.prefix(".attn-").suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // The process's umask narrows them.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let file = builder.tempfile_in(folder(place))?;
    if let Ok(found) = fs::metadata(place) {
        file.as_file().set_permissions(found.permissions())?;
    }
    Ok(file)
}

/// Refuses one file under two names; hard and symbolic links are found.
fn refuse_same(input: &Path, output: &Path) -> Result<()> {
    // Opening a pipe to compare it would wait for its other end.
    if !fs::metadata(input).is_ok_and(|found| found.is_file()) {
        return Ok(());
    }
    let same = same_file::is_same_file(input, output).with_context(|| {
        format!(
            "cannot compare {} with {}; check their permissions",
            input.display(),
            output.display()
        )
    })?;
    if same {
        bail!(
            "{} is both input and output; write to another file",
            input.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(path: &Path, force: bool, inputs: &[PathBuf]) -> String {
        Target::new(path, force, inputs).unwrap_err().to_string()
    }

    fn entries(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn files_appear_whole_and_are_replaced_only_by_force() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        Target::new(&path, false, &[])
            .unwrap()
            .write(b"one")
            .unwrap();
        assert!(refusal(&path, false, &[]).contains("add --force"));
        Target::new(&path, true, &[])
            .unwrap()
            .write(b"two")
            .unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(entries(folder.path()), 1);
    }

    #[test]
    fn a_file_that_appears_during_the_work_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        let target = Target::new(&path, false, &[]).unwrap();
        fs::write(&path, b"another's").unwrap();
        let error = target.write(b"ours").unwrap_err().to_string();
        assert!(error.contains("add --force"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"another's");
        assert_eq!(entries(folder.path()), 1);
    }

    #[test]
    fn folders_devices_and_paths_without_a_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let lost = folder.path().join("no/such/folder/out");
        assert!(refusal(&lost, true, &[]).contains("folder does not exist"));
        for path in [folder.path(), Path::new("/dev/null"), Path::new("..")] {
            if path.exists() {
                assert!(refusal(path, true, &[]).contains("not a regular file"));
            }
        }
        assert!(refusal(Path::new(""), true, &[]).contains("cannot write"));
    }

    #[test]
    fn one_file_under_two_names_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let [other, input, link] = ["other", "in", "link"].map(|name| folder.path().join(name));
        fs::write(&other, b"data").unwrap();
        fs::write(&input, b"data").unwrap();
        fs::hard_link(&input, &link).unwrap();
        for output in [&input, &link] {
            let text = refusal(output, true, &[other.clone(), input.clone()]);
            assert!(text.contains("both input and output"), "{text}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_stay_links_and_permissions_stay_as_they_are() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let [file, link, lost] = ["file", "link", "lost"].map(|name| folder.path().join(name));
        fs::write(&file, b"old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&file, &link).unwrap();
        Target::new(&link, true, &[])
            .unwrap()
            .write(b"new")
            .unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        symlink(folder.path().join("nothing"), &lost).unwrap();
        assert!(refusal(&lost, true, &[]).contains("is a link to a file"));
    }

    #[test]
    fn a_name_that_no_file_can_have_is_no_existing_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x".repeat(300));
        assert!(refusal(&path, false, &[]).contains("cannot write"));
        let target = Target { path, force: false };
        let error = target.write(b"data").unwrap_err().to_string();
        assert!(error.contains("cannot write"), "{error}");
        assert_eq!(entries(folder.path()), 0);
    }

    #[test]
    fn names_without_a_folder_are_files_of_the_current_one() {
        assert_eq!(folder(Path::new("out")), Path::new("."));
        assert_eq!(folder(Path::new("a/out")), Path::new("a"));
        assert!(Target::new(Path::new("no-such-file-is-here"), false, &[]).is_ok());
    }

    #[test]
    fn an_input_that_is_no_file_is_not_compared() {
        let folder = tempfile::tempdir().unwrap();
        let (path, missing) = (folder.path().join("out"), folder.path().join("in"));
        fs::write(&path, b"old").unwrap();
        assert!(Target::new(&path, true, &[missing]).is_ok());
    }

    #[cfg(unix)]
    #[test]
    fn new_files_are_no_programs() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        Target::new(&path, false, &[]).unwrap().write(b"x").unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o111, 0, "{mode:o}");
        assert_eq!(mode & 0o600, 0o600, "{mode:o}");
    }
}
