//! Import circles inside a crate: files whose modules use each other, directly or through others.
//!
//! An edge is a path in a file (in a `use`, an expression, a type or a macro) that leads to another file of the crate; a re-export leads to
//! the file it names. Tests (`#[cfg(test)]`) may use anything, and a submodule its parents.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Result, anyhow, ensure};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Circles that stay: the crate's folder, its files, and why.
const ALLOWED: &[(&str, &[&str], &str)] = &[(
    "crates/attn-core",
    &["error.rs", "format.rs", "head_dim.rs"],
    "an error names the scheme that it is about, and the checks of schemes and of head dims return errors",
)];

/// Prints every circle inside a crate of the workspace.
///
/// # Errors
/// If one is not allowed, or an allowed one is gone.
pub fn run(root: &Path) -> Result<()> {
    let mut folders = vec![root.join("kernels"), root.join("tests")];
    for entry in fs::read_dir(root.join("crates"))? {
        folders.push(entry?.path());
    }
    folders.sort();
    let (mut refused, mut kept) = (0, 0);
    for folder in folders {
        let name = folder.strip_prefix(root)?.display().to_string();
        let read = |file: &Path| fs::read_to_string(folder.join("src").join(file)).ok();
        let edges = Crate::of(&read)?.edges();
        for circle in circles(&edges) {
            if ALLOWED
                .iter()
                .any(|(of, files, _)| *of == name && *files == circle)
            {
                kept += 1;
                continue;
            }
            refused += 1;
            println!("{name}: {}", circle.join(", "));
            for ((from, to), line) in &edges {
                if circle.contains(from) && circle.contains(to) {
                    println!("  {from}:{line} uses {to}");
                }
            }
        }
    }
    ensure!(
        kept == ALLOWED.len(),
        "an allowed circle is gone: remove it from circles.rs"
    );
    ensure!(refused == 0, "{refused} import circles");
    println!("no import circles, {kept} allowed");
    Ok(())
}

/// Names joined by `::`; of a module from the crate's root, of a use as it is written.
type Names = Vec<String>;
/// Uses of a file by a file, with the line of the first one.
type Edges = BTreeMap<(String, String), usize>;

#[derive(Default)]
struct Module {
    file: String,
    /// Paths in the module, with their lines.
    paths: Vec<(usize, Names)>,
    /// Re-exported names, and the paths they stand for.
    exports: BTreeMap<String, Names>,
}

struct Crate<'a> {
    /// The text of a file, named from the crate's `src`.
    read: &'a dyn Fn(&Path) -> Option<String>,
    modules: BTreeMap<Names, Module>,
}

impl<'a> Crate<'a> {
    fn of(read: &'a dyn Fn(&Path) -> Option<String>) -> Result<Self> {
        let modules = BTreeMap::new();
        let mut found = Crate { read, modules };
        let tops = ["lib.rs", "main.rs"].map(Path::new);
        if let Some(top) = tops.into_iter().find(|top| read(top).is_some()) {
            found.add_file(top, Path::new(""), Names::new())?;
        }
        Ok(found)
    }

    fn add_file(&mut self, file: &Path, folder: &Path, at: Names) -> Result<()> {
        let text = (self.read)(file).unwrap_or_default();
        let tokens: TokenStream = text
            .parse()
            .map_err(|e| anyhow!("{}: {e}", file.display()))?;
        self.add(file, folder, at, tokens)
    }

    /// Adds the module of `tokens`, and its submodules, whose files lie in `folder`.
    fn add(&mut self, file: &Path, folder: &Path, at: Names, tokens: TokenStream) -> Result<()> {
        let mut module = Module {
            file: file.display().to_string(),
            ..Module::default()
        };
        let mut item: Vec<TokenTree> = Vec::new();
        for token in tokens {
            let braced = matches!(&token, TokenTree::Group(g) if g.delimiter() == Delimiter::Brace);
            let is_use = item
                .iter()
                .any(|t| matches!(t, TokenTree::Ident(i) if i == "use"));
            let ends = (braced && !is_use) || token.to_string() == ";";
            item.push(token);
            if ends {
                self.add_item(&mut module, folder, &at, std::mem::take(&mut item))?;
            }
        }
        self.modules.insert(at, module);
        Ok(())
    }

    fn add_item(
        &mut self,
        module: &mut Module,
        folder: &Path,
        at: &Names,
        item: Vec<TokenTree>,
    ) -> Result<()> {
        let words: Vec<String> = item.iter().map(|token| token.to_string()).collect();
        if words
            .iter()
            .any(|word| word.replace(' ', "") == "[cfg(test)]")
        {
            return Ok(());
        }
        let find = |word: &str| words.iter().position(|w| w == word);
        if let (Some(i), true) = (find("mod"), find("fn").is_none()) {
            let name = words[i + 1].clone();
            let (inner, next) = (
                [&at[..], std::slice::from_ref(&name)].concat(),
                folder.join(name),
            );
            if let Some(TokenTree::Group(body)) = item.get(i + 2) {
                return self.add(Path::new(&module.file), &next, inner, body.stream());
            }
            for file in [next.with_extension("rs"), next.join("mod.rs")] {
                if (self.read)(&file).is_some() {
                    self.add_file(&file, &next, inner.clone())?;
                }
            }
            return Ok(());
        }
        let first = module.paths.len();
        collect(item.into_iter().collect(), &[], &mut module.paths);
        if find("pub").is_some() && find("use").is_some() {
            for (_, path) in &module.paths[first..] {
                module
                    .exports
                    .extend(path.last().map(|name| (name.clone(), path.clone())));
            }
        }
        Ok(())
    }

    /// The file that `path`, written in module `at`, leads to.
    fn file_of(&self, at: &[String], path: &[String], depth: usize) -> Option<&str> {
        let child = |now: &[String], name: &String| [now, std::slice::from_ref(name)].concat();
        let (mut now, mut rest) = match path.first()?.as_str() {
            "crate" => (Names::new(), &path[1..]),
            "self" => (at.to_vec(), &path[1..]),
            "super" => (at[..at.len().checked_sub(1)?].to_vec(), &path[1..]),
            _ if self.modules.contains_key(&child(at, &path[0])) => (at.to_vec(), path),
            _ => return None,
        };
        while let Some((name, after)) = rest.split_first() {
            if name == "super" {
                now.pop()?;
            } else if self.modules.contains_key(&child(&now, name)) {
                now = child(&now, name);
            } else {
                let export = self
                    .modules
                    .get(&now)?
                    .exports
                    .get(name)
                    .filter(|_| depth < 8);
                let found = export.and_then(|path| self.file_of(&now, path, depth + 1));
                return found.or_else(|| self.file(&now));
            }
            rest = after;
        }
        self.file(&now)
    }

    fn file(&self, at: &[String]) -> Option<&str> {
        self.modules.get(at).map(|module| module.file.as_str())
    }

    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (at, module) in &self.modules {
            for (line, path) in &module.paths {
                let mut above = (0..at.len()).filter_map(|n| self.file(&at[..n]));
                let to = self.file_of(at, path, 0).unwrap_or(&module.file);
                if to != module.file && above.all(|file| file != to) {
                    let edge = (module.file.clone(), to.to_owned());
                    edges.entry(edge).or_insert(*line);
                }
            }
        }
        edges
    }
}

/// Adds the paths among `tokens`, which stand behind `prefix::`; a group behind `::` is a list of paths with the same beginning.
fn collect(tokens: TokenStream, prefix: &[String], paths: &mut Vec<(usize, Names)>) {
    let (mut line, mut path, mut colons) = (0, prefix.to_vec(), 2);
    for token in tokens {
        match token {
            TokenTree::Punct(p) if p.as_char() == ':' => colons += 1,
            TokenTree::Ident(name) => {
                if colons != 2 {
                    paths.push((line, path));
                    path = prefix.to_vec();
                }
                line = name.span().start().line;
                path.push(name.to_string());
                colons = 0;
            }
            TokenTree::Group(group) => {
                let joined = colons == 2 && path.len() > prefix.len();
                let prefix = if joined { &path[..] } else { prefix };
                collect(group.stream(), prefix, paths);
                colons = 0;
            }
            _ => colons = 0,
        }
    }
    paths.push((line, path));
    paths.retain(|(_, path)| path.len() > 1);
}

/// The sets of files that reach each other, each in order of names.
fn circles(edges: &Edges) -> BTreeSet<Vec<String>> {
    let reach = |from: &String| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(at) = open.pop() {
            let next = edges.keys().filter(|(a, _)| *a == at).map(|(_, b)| b);
            open.extend(next.filter(|b| seen.insert((*b).clone())).cloned());
        }
        seen
    };
    let reached: BTreeMap<_, _> = edges.keys().map(|(from, _)| (from, reach(from))).collect();
    let in_circles = reached.iter().filter(|(from, to)| to.contains(**from));
    let circle = |(from, to): (&&String, &BTreeSet<String>)| {
        let returns = |b: &&String| reached.get(*b).is_some_and(|to| to.contains(*from));
        to.iter().filter(returns).cloned().collect()
    };
    in_circles.map(circle).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The circles of a made-up crate.
    fn of(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let read = |file: &Path| {
            let found = files.iter().find(|(name, _)| Path::new(name) == file);
            found.map(|(_, text)| (*text).to_owned())
        };
        let circles = circles(&Crate::of(&read).unwrap().edges());
        circles.into_iter().collect()
    }

    const LIB: (&str, &str) = ("lib.rs", "mod a; mod b; mod c; pub use b::B;");

    #[test]
    fn a_circle_through_re_exports_macros_and_submodules_is_found() {
        let files = [
            LIB,
            ("a.rs", "use crate::B;"),
            (
                "b.rs",
                "pub struct B; mod inner { fn f() { g!(crate::c::f()) } }",
            ),
            ("c/mod.rs", "mod d; pub fn f() { d::f() }"),
            ("c/d.rs", "pub fn f() { super::super::a::f() }"),
        ];
        assert_eq!(of(&files), [["a.rs", "b.rs", "c/d.rs", "c/mod.rs"]]);
    }

    #[test]
    fn tests_and_uses_of_a_parent_make_no_circle() {
        let files = [
            LIB,
            (
                "a.rs",
                "use crate::b::B; #[cfg(test)] mod tests { use crate::c::C; }",
            ),
            ("b.rs", "pub struct B; // crate::a"),
            (
                "c/mod.rs",
                "mod d; use crate::{a, b::{self, B}}; pub struct C;",
            ),
            ("c/d.rs", "use super::C; fn f(x: std::b::B) {}"),
        ];
        assert_eq!(of(&files), Vec::<Vec<String>>::new());
    }
}
