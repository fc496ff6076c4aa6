//! Writes a file in which every mutant is compiled, and one is chosen at run time.

use std::ops::Range;

use super::sites::{Form, Found, Site};

/// Where a mutant lies in the written file.
pub struct Placed {
    /// Its number.
    pub id: u32,
    /// The place with all of its mutants.
    pub whole: Range<usize>,
    /// Its own branch.
    pub own: Range<usize>,
}

/// A written file.
pub struct Rendered {
    /// Its text.
    pub text: String,
    /// Its mutants.
    pub placed: Vec<Placed>,
    /// Pairs of bytes (here, in the source) at which copied text begins.
    copies: Vec<(usize, usize)>,
}

impl Rendered {
    /// The byte of the source that a byte of the text belongs to.
    pub fn in_source(&self, at: usize) -> usize {
        let next = self.copies.partition_point(|copy| copy.0 <= at);
        let Some((here, source)) = next.checked_sub(1).map(|i| self.copies[i]) else {
            return 0;
        };
        source + (at - here)
    }
}

/// Writes `source` with the mutants for which `live` holds; `first` is the number of the file's first.
pub fn render(source: &str, found: &Found, first: u32, live: &dyn Fn(u32) -> bool) -> Rendered {
    let mut ids = Vec::new();
    let mut next = first;
    for site in &found.sites {
        ids.push(next);
        next += site.edits.len() as u32;
    }
    let mut writer = Writer {
        source,
        sites: &found.sites,
        ids: &ids,
        live,
        done: Rendered {
            text: String::new(),
            placed: Vec::new(),
            copies: Vec::new(),
        },
    };
    writer.copy(0..source.len(), 0);
    writer.done
}

struct Writer<'a> {
    source: &'a str,
    sites: &'a [Site],
    ids: &'a [u32],
    live: &'a dyn Fn(u32) -> bool,
    done: Rendered,
}

impl Writer<'_> {
    fn push(&mut self, text: &str) -> Range<usize> {
        let start = self.done.text.len();
        self.done.text.push_str(text);
        start..self.done.text.len()
    }

    /// Copies a range of the source with the sites from `next` on that lie in it; the first site behind it comes back.
    fn copy(&mut self, range: Range<usize>, mut next: usize) -> usize {
        let mut at = range.start;
        while next < self.sites.len() && self.sites[next].range.start < range.end {
            let site = self.sites[next].range.clone();
            self.verbatim(at..site.start);
            at = site.end;
            next = self.site(next);
        }
        self.verbatim(at..range.end);
        next
    }

    fn verbatim(&mut self, range: Range<usize>) {
        let text = &self.source[range.clone()];
        let here = self.push(text);
        self.done.copies.push((here.start, range.start));
    }

    fn site(&mut self, index: usize) -> usize {
        let site = &self.sites[index];
        let first = self.ids[index];
        let ids: Vec<u32> = (first..).take(site.edits.len()).collect();
        let alive: Vec<u32> = ids.iter().copied().filter(|id| (self.live)(*id)).collect();
        if alive.is_empty() {
            return self.copy(site.range.clone(), index + 1);
        }
        let active = |id: u32| format!("crate::__mutants::active({id})");
        let start = self.done.text.len();
        let mut own = Vec::new();
        let after = match site.form {
            Form::Replace => {
                self.push("(");
                for id in &alive {
                    self.push(&format!("if {} {{ ", active(*id)));
                    let range = self.push(&site.edits[(id - first) as usize].text);
                    own.push((*id, range));
                    self.push(" } else ");
                }
                self.push("{ ");
                let after = self.copy(site.range.clone(), index + 1);
                self.push(" })");
                after
            }
            Form::Condition | Form::Must => {
                self.push("(");
                for id in &alive {
                    let never = site.form == Form::Condition && *id == first;
                    let text = if never {
                        format!("!{} && ", active(*id))
                    } else {
                        format!("({} || ", active(*id))
                    };
                    let range = self.push(&text);
                    own.push((*id, range));
                }
                self.push("(");
                let after = self.copy(site.range.clone(), index + 1);
                let always = alive
                    .iter()
                    .any(|id| site.form == Form::Must || *id != first);
                self.push(if always { ")))" } else { "))" });
                after
            }
            Form::Drop => {
                let range = self.push(&format!("if !{} {{ ", active(first)));
                own.push((first, range));
                let after = self.copy(site.range.clone(), index + 1);
                self.push(" }");
                after
            }
        };
        let whole = start..self.done.text.len();
        for (id, own) in own {
            let whole = whole.clone();
            self.done.placed.push(Placed { id, whole, own });
        }
        after
    }
}

/// The module that says which mutant is on, for each crate with mutants.
pub fn switch(count: usize) -> String {
    SWITCH.replace("COUNT", &count.to_string())
}

const SWITCH: &str = r#"//! Which mutant is on: `ATTN_MUTANT`. Those that are reached are appended to `ATTN_MUTANT_COVERAGE`.
use std::{
    env,
    io::Write,
    sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
};

const UNREAD: u32 = u32::MAX;
const COVER: u32 = u32::MAX - 1;
const NONE: u32 = u32::MAX - 2;
static ON: AtomicU32 = AtomicU32::new(UNREAD);
static REACHED: [AtomicBool; COUNT] = [const { AtomicBool::new(false) }; COUNT];

#[inline(always)]
pub(crate) fn active(id: u32) -> bool {
    let on = ON.load(Relaxed);
    on == id || (on >= COVER && slow(id))
}

#[cold]
#[inline(never)]
fn slow(id: u32) -> bool {
    if ON.load(Relaxed) == UNREAD {
        let on = match env::var("ATTN_MUTANT") {
            Ok(text) => text.parse().expect("ATTN_MUTANT is a number"),
            Err(_) if env::var_os("ATTN_MUTANT_COVERAGE").is_some() => COVER,
            Err(_) => NONE,
        };
        ON.store(on, Relaxed);
    }
    if ON.load(Relaxed) == COVER && !REACHED[id as usize].swap(true, Relaxed) {
        let path = env::var_os("ATTN_MUTANT_COVERAGE").expect("read above");
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).expect("a writable file");
        file.write_all(format!("{id}\n").as_bytes()).expect("a writable file");
    }
    ON.load(Relaxed) == id
}
"#;

#[cfg(test)]
mod tests {
    use super::{super::sites::find, *};

    #[test]
    fn dead_mutants_leave_the_source_as_it_is() {
        let source = "fn f(a: u8) -> bool { if a < 3 { g(a + 1)?; } a == 2 }";
        let found = find(source).unwrap();
        assert_eq!(render(source, &found, 0, &|_| false).text, source);
    }

    #[test]
    fn what_is_written_is_rust_and_names_every_mutant() {
        let source = "fn f(a: u8) -> bool { if a < 3 { g(a + 1)?; } -a == 2 }";
        let found = find(source).unwrap();
        let rendered = render(source, &found, 5, &|id| id != 6);
        syn::parse_file(&rendered.text).unwrap();
        let count = rendered.text.matches("active(").count();
        assert_eq!(rendered.placed.len(), count);
        let call = rendered.text.rfind("g(").unwrap();
        assert!(source[rendered.in_source(call)..].starts_with("g(a + 1)"));
    }
}
