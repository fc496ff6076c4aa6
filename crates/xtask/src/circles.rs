//! Import circles inside a crate: files whose modules use each other, directly or through others.
//!
//! An edge is a path in a file (`use`, expression, type or macro) that leads to another file of the crate; a re-export leads to
//! the file it names. Tests (`#[cfg(test)]`) may use anything, and a submodule its parents.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Result, ensure};
use proc_macro2::{TokenStream, TokenTree};
use syn::{Attribute, Item, UseTree, visit::Visit};

/// Circles that stay: the crate's folder, its files, and why.
const ALLOWED: &[(&str, &[&str], &str)] = &[(
    "crates/attn-core",
    &["error.rs", "format.rs"],
    "an error names the scheme that it is about, and the schemes' checks return errors",
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
        let edges = Modules::of(&read)?.edges();
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

/// A module's path from the crate's root.
type ModulePath = Vec<String>;
/// Uses of a file by a file, with the line of the first one.
type Edges = BTreeMap<(String, String), usize>;

struct Module {
    file: String,
    items: Vec<Item>,
    /// Re-exported names, and where they lead.
    exports: BTreeMap<String, ModulePath>,
}

#[derive(Default)]
struct Modules(BTreeMap<ModulePath, Module>);

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|a| {
        let test = |tokens: &TokenStream| tokens.to_string() == "test";
        a.path().is_ident("cfg") && a.meta.require_list().is_ok_and(|list| test(&list.tokens))
    })
}

impl Modules {
    /// The modules of a crate whose files, named from its `src`, `read` gives.
    fn of(read: &dyn Fn(&Path) -> Option<String>) -> Result<Self> {
        let mut modules = Modules::default();
        for top in ["lib.rs", "main.rs"].map(Path::new) {
            if let Some(text) = read(top) {
                let items = syn::parse_file(&text)?.items;
                modules.add(read, top, Path::new(""), &[], items)?;
                break;
            }
        }
        Ok(modules)
    }

    /// Adds a module of `file`, and its submodules, whose files lie in `folder`.
    fn add(
        &mut self,
        read: &dyn Fn(&Path) -> Option<String>,
        file: &Path,
        folder: &Path,
        at: &[String],
        items: Vec<Item>,
    ) -> Result<()> {
        let mut exports = BTreeMap::new();
        for item in &items {
            match item {
                Item::Mod(module) if !is_test(&module.attrs) => {
                    let name = module.ident.to_string();
                    let (inner, next) = ([at, &[name.clone()]].concat(), folder.join(&name));
                    if let Some((_, items)) = &module.content {
                        self.add(read, file, &next, &inner, items.clone())?;
                    }
                    for file in [next.with_extension("rs"), next.join("mod.rs")] {
                        if let Some(text) = read(&file).filter(|_| module.content.is_none()) {
                            let items = syn::parse_file(&text)?.items;
                            self.add(read, &file, &next, &inner, items)?;
                        }
                    }
                }
                Item::Use(item) if !matches!(item.vis, syn::Visibility::Inherited) => {
                    leaves(&item.tree, &mut Vec::new(), &mut |path, name| {
                        exports.insert(name, path);
                    });
                }
                _ => {}
            }
        }
        let file = file.display().to_string();
        let module = Module {
            file,
            items,
            exports,
        };
        self.0.insert(at.to_vec(), module);
        Ok(())
    }

    /// The file that `path`, written in module `at`, leads to.
    fn file_of(&self, at: &ModulePath, path: &[String], depth: usize) -> Option<&str> {
        let (first, _) = path.split_first()?;
        let (mut now, mut rest) = match first.as_str() {
            "crate" => (Vec::new(), &path[1..]),
            "self" => (at.clone(), &path[1..]),
            "super" => (at[..at.len().checked_sub(1)?].to_vec(), &path[1..]),
            name if self.0.contains_key(&[&at[..], &[name.to_owned()]].concat()) => {
                (at.clone(), path)
            }
            _ => return None,
        };
        while let Some((name, after)) = rest.split_first() {
            let child = [&now[..], std::slice::from_ref(name)].concat();
            if name == "super" {
                now.pop()?;
            } else if self.0.contains_key(&child) {
                now = child;
            } else {
                let export = self.0.get(&now)?.exports.get(name).filter(|_| depth < 8);
                let found = export.and_then(|path| self.file_of(&now, path, depth + 1));
                return found.or_else(|| self.file(&now));
            }
            rest = after;
        }
        self.file(&now)
    }

    fn file(&self, at: &ModulePath) -> Option<&str> {
        self.0.get(at).map(|module| module.file.as_str())
    }

    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (at, module) in &self.0 {
            let mut paths = Paths::default();
            module.items.iter().for_each(|item| paths.visit_item(item));
            for (line, path) in paths.0 {
                let Some(to) = self.file_of(at, &path, 0) else {
                    continue;
                };
                let mut above = (0..at.len()).filter_map(|n| self.file(&at[..n].to_vec()));
                if to != module.file && above.all(|file| file != to) {
                    let edge = (module.file.clone(), to.to_owned());
                    edges.entry(edge).or_insert(line);
                }
            }
        }
        edges
    }
}

/// Calls `each` with the path and the name of each leaf of a `use`.
fn leaves(tree: &UseTree, at: &mut Vec<String>, each: &mut impl FnMut(ModulePath, String)) {
    match tree {
        UseTree::Path(path) => {
            at.push(path.ident.to_string());
            leaves(&path.tree, at, each);
            at.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, at, each)),
        UseTree::Glob(_) => each(at.clone(), "*".to_owned()),
        UseTree::Name(name) => {
            let name = name.ident.to_string();
            each([&at[..], std::slice::from_ref(&name)].concat(), name);
        }
        UseTree::Rename(rename) => {
            let path = [&at[..], &[rename.ident.to_string()]].concat();
            each(path, rename.rename.to_string());
        }
    }
}

/// Paths with their lines, tests and inline modules apart: those are modules of their own.
#[derive(Default)]
struct Paths(Vec<(usize, Vec<String>)>);

impl Visit<'_> for Paths {
    fn visit_item_mod(&mut self, _: &syn::ItemMod) {}

    fn visit_item_use(&mut self, item: &syn::ItemUse) {
        let line = item.use_token.span.start().line;
        leaves(&item.tree, &mut Vec::new(), &mut |path, _| {
            self.0.push((line, path));
        });
    }

    fn visit_path(&mut self, path: &syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if names.len() > 1 {
            let line = path.segments[0].ident.span().start().line;
            self.0.push((line, names));
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, invocation: &syn::Macro) {
        self.visit_path(&invocation.path);
        self.tokens(invocation.tokens.clone());
    }
}

impl Paths {
    /// Paths among a macro's tokens: names joined by colons.
    fn tokens(&mut self, tokens: TokenStream) {
        let (mut line, mut path, mut colons) = (0, Vec::new(), 0);
        for token in tokens {
            match token {
                TokenTree::Punct(p) if p.as_char() == ':' => colons += 1,
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.push_tokens(line, &mut path);
                        line = name.span().start().line;
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Group(group) => self.tokens(group.stream()),
                _ => colons = 0,
            }
        }
        self.push_tokens(line, &mut path);
    }

    /// Takes a path of tokens; where `super` leads depends on the modules that the macro makes.
    fn push_tokens(&mut self, line: usize, path: &mut Vec<String>) {
        let path = std::mem::take(path);
        if path.len() > 1 && path[0] != "super" {
            self.0.push((line, path));
        }
    }
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
        let circles = circles(&Modules::of(&read).unwrap().edges());
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
