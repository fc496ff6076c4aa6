//! The locals of the WGSL function that the preprocessor is in. They hold each template to the locals that its interface names.

use std::collections::HashSet;

use super::expression::is_name;

/// The locals that a template shares with the function around it.
#[derive(Clone)]
pub(super) struct Interface<'a> {
    /// Patterns of the locals that the template reads.
    pub reads: Vec<&'a str>,
    /// Patterns of the locals that it declares or changes.
    pub writes: Vec<&'a str>,
}

impl Interface<'_> {
    /// Whether the interface names a local.
    fn names(&self, name: &str) -> bool {
        matches(&self.reads, name) || matches(&self.writes, name)
    }
}

/// Whether one of the patterns stands for `name`; `start*` stands for every name that begins with `start`.
fn matches(patterns: &[&str], name: &str) -> bool {
    patterns
        .iter()
        .any(|pattern| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => *pattern == name,
        })
}

/// The use of a template that is being expanded.
struct Use<'a> {
    interface: Interface<'a>,
    /// The function's locals where the use begins.
    outer: HashSet<String>,
    /// Locals declared since.
    own: HashSet<String>,
}

/// The locals of the function that the text is in.
#[derive(Default)]
pub(super) struct Locals<'a> {
    /// Whether the text is in the function's list of parameters.
    in_header: bool,
    known: HashSet<String>,
    /// Locals of templates that their interfaces do not name.
    hidden: HashSet<String>,
    uses: Vec<Use<'a>>,
}

/// The names on a line without those of comments and members, each with the name before it and whether a colon follows.
fn names(line: &str) -> impl Iterator<Item = (&str, &str, bool)> {
    let code = line.split("//").next().unwrap_or("");
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut before = "";
    let mut rest = code;
    std::iter::from_fn(move || {
        loop {
            let start = rest.find(is_part)?;
            let member = rest[..start].ends_with('.');
            let found = &rest[start..];
            let end = found.find(|c| !is_part(c)).unwrap_or(found.len());
            let name = &found[..end];
            rest = &found[end..];
            let previous = std::mem::replace(&mut before, name);
            if !member && is_name(name) {
                return Some((name, previous, rest.starts_with(':')));
            }
        }
    })
}

impl<'a> Locals<'a> {
    /// Begins the use of a template.
    pub fn begin_use(&mut self, interface: Interface<'a>) {
        self.uses.push(Use {
            interface,
            outer: self.known.clone(),
            own: HashSet::new(),
        });
    }

    /// Ends the latest use: the function keeps the locals that the interface names, and the others of the template are hidden.
    pub fn end_use(&mut self) {
        let Some(Use {
            interface,
            outer,
            own,
        }) = self.uses.pop()
        else {
            return;
        };
        let kept = own
            .into_iter()
            .filter(|name| !matches(&interface.writes, name));
        for name in kept.filter(|name| !outer.contains(name)) {
            self.known.remove(&name);
            self.hidden.insert(name);
        }
    }

    /// Reads a line of the function's text.
    ///
    /// # Errors
    /// The reason, if the line uses a local that an interface does not name.
    pub fn line(&mut self, line: &str) -> Result<(), String> {
        if line.starts_with("fn ") {
            *self = Locals {
                in_header: true,
                ..Locals::default()
            };
        }
        for (name, before, colon) in names(line) {
            if matches!(before, "let" | "var") || (self.in_header && colon) {
                self.known.insert(name.to_owned());
                self.hidden.remove(name);
                for of in &mut self.uses {
                    of.own.insert(name.to_owned());
                }
            } else if self.hidden.contains(name) {
                return Err(format!("uses {name:?}, which a template keeps to itself"));
            }
            for Use {
                interface,
                outer,
                own,
            } in &self.uses
            {
                if outer.contains(name) && !own.contains(name) && !interface.names(name) {
                    return Err(format!("uses {name:?}, which its template does not name"));
                }
            }
        }
        self.in_header &= !line.contains('{');
        Ok(())
    }
}
