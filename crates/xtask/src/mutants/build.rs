//! The copy of the workspace with all mutants in it, and its test programs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{
    Key,
    list::List,
    render::{Rendered, render, switch},
    sites::{Found, find},
};

/// A mutant.
#[derive(Debug, Clone)]
pub struct Mutant {
    /// Its file.
    pub file: String,
    /// Its line, from 1.
    pub line: usize,
    /// Its function.
    pub function: String,
    /// The original.
    pub from: String,
    /// What stands in its place.
    pub to: String,
}

/// A source file with its places.
pub struct Source {
    /// Its path in the workspace.
    pub path: String,
    text: String,
    found: Found,
    first: u32,
}

/// A test program.
#[derive(Debug, Clone)]
pub struct Program {
    /// A name to print.
    pub name: String,
    /// The program.
    pub path: PathBuf,
    /// Where it runs: its package's folder.
    pub folder: PathBuf,
}

/// Finds the places of all files; a mutant's number is its index.
///
/// # Errors
/// If a file cannot be read or parsed.
pub fn mutants(root: &Path, files: &[String]) -> Result<(Vec<Source>, Vec<Mutant>)> {
    let (mut sources, mut all) = (Vec::new(), Vec::new());
    for path in files {
        let text = fs::read_to_string(root.join(path)).with_context(|| path.clone())?;
        let found = find(&text).with_context(|| path.clone())?;
        let first = all.len() as u32;
        for site in &found.sites {
            all.extend(site.edits.iter().map(|edit| Mutant {
                file: path.clone(),
                line: site.line,
                function: site.function.clone(),
                from: edit.from.clone(),
                to: edit.to.clone(),
            }));
        }
        sources.push(Source {
            path: path.clone(),
            text,
            found,
            first,
        });
    }
    Ok((sources, all))
}

/// Writes a file unless it is there already: cargo goes by the time of the last change.
fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// The crate root that a file belongs to.
fn crate_root(root: &Path, file: &str) -> Result<String> {
    let (package, _) = file
        .rsplit_once("src/")
        .with_context(|| format!("{file} is not in a folder src"))?;
    let rest = file.rsplit_once("src/").map_or("", |parts| parts.1);
    let program = format!("{package}src/bin/attn.rs");
    if (rest.starts_with("cli/") || rest.starts_with("bin/")) && root.join(&program).is_file() {
        return Ok(program);
    }
    Ok(format!("{package}src/lib.rs"))
}

/// The copied workspace.
pub struct Tree {
    root: PathBuf,
    tree: PathBuf,
    build: PathBuf,
}

impl Tree {
    /// In `target/mutants` of the workspace at `root`.
    pub fn new(root: &Path) -> Self {
        let target = root.join("target/mutants");
        Tree {
            root: root.to_owned(),
            tree: target.join("tree"),
            build: target.join("build"),
        }
    }

    /// Copies what git tracks, but for the files with mutants; what it does not track any more is removed.
    fn copy(&self, with_mutants: &BTreeSet<String>) -> Result<()> {
        let listed = Command::new("git")
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(&self.root)
            .output()
            .context("cannot run git")?;
        ensure!(listed.status.success(), "git ls-files failed");
        let names = String::from_utf8(listed.stdout).context("a file name is not UTF-8")?;
        let names: BTreeSet<&str> = names.split('\0').filter(|name| !name.is_empty()).collect();
        for name in &names {
            let from = self.root.join(name);
            if !with_mutants.contains(*name) && from.is_file() {
                put(&self.tree.join(name), &fs::read(from)?)?;
            }
        }
        remove_others(&self.tree, &self.tree, &names)
    }

    /// Writes the tree with the mutants for which `live` holds.
    fn write(&self, sources: &[Source], count: usize, live: &[bool]) -> Result<Vec<Rendered>> {
        let mut rendered = Vec::new();
        let mut texts = BTreeMap::new();
        let mut roots = BTreeSet::new();
        for source in sources {
            let done = render(&source.text, &source.found, source.first, &|id| {
                live[id as usize]
            });
            texts.insert(source.path.clone(), done.text.clone());
            roots.insert(crate_root(&self.root, &source.path)?);
            rendered.push(done);
        }
        for root in &roots {
            let text = match texts.get(root) {
                Some(text) => text.clone(),
                None => fs::read_to_string(self.root.join(root))?,
            };
            let module = self.tree.join("target/__mutants.rs");
            put(&module, switch(count).as_bytes())?;
            let path = module.to_string_lossy().into_owned();
            let text = format!("{text}\n#[path = {path:?}]\nmod __mutants;\n");
            texts.insert(root.clone(), text);
        }
        self.copy(&texts.keys().cloned().collect())?;
        for (path, text) in &texts {
            put(&self.tree.join(path), text.as_bytes())?;
        }
        Ok(rendered)
    }

    /// Builds the test programs with as many mutants as compile; `live` says which.
    ///
    /// # Errors
    /// If the build fails for another reason than a mutant.
    pub fn build(
        &self,
        list: &List,
        sources: &[Source],
        keys: &[Key],
        live: &mut [bool],
    ) -> Result<Vec<Program>> {
        // What did not compile before is not tried again: each try rebuilds all that depends on the file.
        let known = self.root.join("target/mutants/do-not-compile.json");
        let mut failed: BTreeSet<Key> = match fs::read_to_string(&known) {
            Ok(text) => serde_json::from_str(&text)?,
            Err(_) => BTreeSet::new(),
        };
        for (key, live) in keys.iter().zip(live.iter_mut()) {
            *live &= !failed.contains(key);
        }
        for round in 1.. {
            let rendered = self.write(sources, live.len(), live)?;
            let (programs, errors) = self.cargo(list)?;
            if errors.is_empty() {
                return Ok(programs);
            }
            let mut dropped = BTreeSet::new();
            for error in &errors {
                dropped.extend(self.to_drop(error, sources, &rendered, live)?);
            }
            ensure!(!dropped.is_empty(), "the build failed:\n{}", errors[0].text);
            println!(
                "build {round}: {} errors, {} mutants that do not compile are left out",
                errors.len(),
                dropped.len()
            );
            for id in dropped {
                live[id as usize] = false;
                failed.insert(keys[id as usize].clone());
            }
            put(&known, serde_json::to_string(&failed)?.as_bytes())?;
        }
        unreachable!("rounds do not end")
    }

    /// The mutants that an error of the compiler speaks of.
    fn to_drop(
        &self,
        error: &CompileError,
        sources: &[Source],
        rendered: &[Rendered],
        live: &[bool],
    ) -> Result<BTreeSet<u32>> {
        let mut dropped = BTreeSet::new();
        // Spans inside one mutant's own branch first, then inside a place, then the whole function.
        for rank in 0..3 {
            for (path, bytes) in &error.spans {
                let Some(i) = sources.iter().position(|s| self.is_file(path, &s.path)) else {
                    continue;
                };
                match rank {
                    0 => {
                        let inside =
                            |r: &Range<usize>| r.start <= bytes.start && bytes.end <= r.end;
                        let own = rendered[i].placed.iter().filter(|p| inside(&p.own));
                        dropped.extend(own.map(|p| p.id));
                    }
                    1 => {
                        let touch = |r: &Range<usize>| r.start < bytes.end && bytes.start < r.end;
                        let near = rendered[i].placed.iter().filter(|p| touch(&p.whole));
                        let least = near.clone().map(|p| p.whole.len()).min();
                        let near = near.filter(|p| Some(p.whole.len()) == least);
                        dropped.extend(near.map(|p| p.id));
                    }
                    _ => {
                        let at = rendered[i].in_source(bytes.start);
                        let functions = sources[i].found.functions.iter();
                        let Some((_, range)) = functions.rev().find(|f| f.1.contains(&at)) else {
                            continue;
                        };
                        let inside = |p: &&super::render::Placed| {
                            range.contains(&rendered[i].in_source(p.whole.end))
                        };
                        dropped.extend(rendered[i].placed.iter().filter(inside).map(|p| p.id));
                    }
                }
            }
            dropped.retain(|id| live[*id as usize]);
            if !dropped.is_empty() {
                return Ok(dropped);
            }
        }
        bail!("the build failed away from every mutant:\n{}", error.text)
    }

    fn is_file(&self, path: &str, name: &str) -> bool {
        let path = Path::new(path);
        // Programs name files through `../`.
        let absolute = self.tree.join(path);
        absolute == self.tree.join(name)
            || absolute
                .canonicalize()
                .is_ok_and(|path| path == self.tree.join(name))
    }

    /// Builds the programs of the list; those that are there, and the errors of the first group with any.
    fn cargo(&self, list: &List) -> Result<(Vec<Program>, Vec<CompileError>)> {
        let mut programs = Vec::new();
        for group in &list.programs {
            let (found, errors) = self.cargo_test(group, &list.opt_levels)?;
            if !errors.is_empty() {
                return Ok((Vec::new(), errors));
            }
            programs.extend(found);
        }
        Ok((programs, Vec::new()))
    }

    fn cargo_test(
        &self,
        group: &[String],
        opt_levels: &BTreeMap<String, u8>,
    ) -> Result<(Vec<Program>, Vec<CompileError>)> {
        let levels = opt_levels.iter().flat_map(|(package, level)| {
            let setting = format!("profile.release.package.{package}.opt-level={level}");
            ["--config".to_owned(), setting]
        });
        let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["test", "--release", "--no-run", "-j2"])
            .arg("--message-format=json")
            .args(levels)
            .args(group)
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.build)
            .env("ATTN_EMBED", "0")
            .output()
            .context("cannot run cargo")?;
        let (mut programs, mut errors) = (Vec::new(), Vec::new());
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Ok(message) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            match message["reason"].as_str() {
                Some("compiler-message") if message["message"]["level"] == "error" => {
                    let error = compile_error(&message["message"]);
                    if !error.spans.is_empty() {
                        errors.push(error);
                    }
                }
                Some("compiler-artifact") if message["profile"]["test"] == true => {
                    programs.extend(program(&message));
                }
                _ => {}
            }
        }
        ensure!(
            output.status.success() || !errors.is_empty(),
            "cargo failed in {}, and not for an error in a source file:\n{}",
            self.tree.display(),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok((programs, errors))
    }
}

fn remove_others(root: &Path, folder: &Path, names: &BTreeSet<&str>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
        if name == "target" {
            continue;
        }
        if path.is_dir() {
            remove_others(root, &path, names)?;
        } else if !names.contains(&*name) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// An error of the compiler: its text, and the file and bytes of its spans, primary ones first.
struct CompileError {
    text: String,
    spans: Vec<(String, Range<usize>)>,
}

fn compile_error(message: &Value) -> CompileError {
    let mut spans = Vec::new();
    let empty = Vec::new();
    for primary in [true, false] {
        for span in message["spans"].as_array().unwrap_or(&empty) {
            let bytes = span["byte_start"].as_u64().zip(span["byte_end"].as_u64());
            let (Some(name), Some((start, end))) = (span["file_name"].as_str(), bytes) else {
                continue;
            };
            if span["is_primary"] == primary {
                spans.push((name.to_owned(), start as usize..end as usize));
            }
        }
        if !spans.is_empty() {
            break;
        }
    }
    CompileError {
        text: message["rendered"].as_str().unwrap_or_default().to_owned(),
        spans,
    }
}

fn program(message: &Value) -> Option<Program> {
    let path = PathBuf::from(message["executable"].as_str()?);
    let folder = Path::new(message["manifest_path"].as_str()?)
        .parent()?
        .to_owned();
    let kind = message["target"]["kind"][0].as_str()?;
    let package = folder.file_name()?.to_string_lossy().into_owned();
    let name = match kind {
        "test" => format!("{package}/{}", message["target"]["name"].as_str()?),
        _ => format!("{package} ({kind})"),
    };
    Some(Program { name, path, folder })
}
