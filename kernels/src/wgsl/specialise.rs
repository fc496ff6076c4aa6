//! The preprocessor that makes one WGSL module of the files of `kernels/wgsl`: constants, conditions, unrolled loops, includes, templates.
//!
//! | line | meaning |
//! |---|---|
//! | `#include "file"` | the file's lines, processed |
//! | `#let NAME = EXPR` | a constant from here on |
//! | `#if EXPR`, `#elif EXPR`, `#else`, `#end` | conditional lines |
//! | `#for NAME in A..B`, `#end` | the lines once for each integer of `A..B` |
//! | `#def NAME(CONSTANT, …): IN, … -> OUT, …`, `#end` | a template: statements that read the locals `IN` of the function around them, and declare or change `OUT` |
//! | `#use NAME(EXPR, …)` | the template's lines, with its constants set |
//!
//! In a template's interface `name_*` stands for all locals whose names begin so. A template that uses another local of the function, and a
//! function that uses another local of the template, are refused.
//!
//! `$(EXPR)` in any other line becomes its value. Expressions are integers with `?: || && == != < <= > >= + - * / % ! ()`.
//! Unrolling by text keeps every accumulator a scalar, whatever a driver's compiler does with loops.
//!
//! Any text is either specialised or refused: arithmetic is checked, and nesting, work and the length of the result are bounded.

mod expression;
mod locals;

use std::{collections::HashMap, fmt};

pub use expression::Constants;
use expression::{evaluate, is_name};
use locals::{Interface, Locals};

/// The deepest nesting of includes.
const MOST_INCLUDES: usize = 8;
/// The deepest nesting of blocks, includes among them.
const MOST_BLOCKS: usize = 64;
/// The most bytes of a result.
pub const MOST_OUT: usize = 4 << 20;
/// The most bytes of lines that one specialisation reads; a line counts each time that it is read.
const MOST_WORK: usize = 64 << 20;

/// Why a source could not be specialised: a mistake in `kernels/wgsl`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialiseError {
    line: String,
    reason: String,
}

impl fmt::Display for SpecialiseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel line {:?}: {}", self.line, self.reason)
    }
}

impl std::error::Error for SpecialiseError {}

/// Specialises `file` under `constants`; `source` finds a file's text.
///
/// # Errors
/// [`SpecialiseError`] naming the line: for a directive or an expression that cannot be read, an integer beyond i64, and for text that
/// nests deeper, takes more work or grows longer than any kernel does.
pub fn specialise<'a>(
    file: &str,
    constants: &Constants,
    source: &dyn Fn(&str) -> Option<&'a str>,
) -> Result<String, SpecialiseError> {
    let text = source(file).ok_or_else(|| fail(file, "there is no such file"))?;
    let lines: Vec<&str> = text.lines().collect();
    let mut run = Run {
        constants: constants.clone(),
        source,
        templates: HashMap::new(),
        locals: Locals::default(),
        out: String::new(),
        includes: 0,
        blocks: 0,
        work: 0,
    };
    run.block(&lines)?;
    Ok(run.out)
}

fn fail(line: &str, reason: impl Into<String>) -> SpecialiseError {
    SpecialiseError {
        line: line.trim().to_owned(),
        reason: reason.into(),
    }
}

/// Statements with an interface.
#[derive(Clone)]
struct Template<'a> {
    constants: Vec<&'a str>,
    interface: Interface<'a>,
    body: Vec<&'a str>,
}

struct Run<'a, 's> {
    constants: Constants,
    source: &'s dyn Fn(&str) -> Option<&'a str>,
    templates: HashMap<String, Template<'a>>,
    locals: Locals<'a>,
    out: String,
    includes: usize,
    blocks: usize,
    work: usize,
}

impl<'a> Run<'a, '_> {
    /// Counts the reading of `line`, and refuses it beyond [`MOST_WORK`].
    fn spend(&mut self, line: &str) -> Result<(), SpecialiseError> {
        self.work = self.work.saturating_add(line.len() + 1);
        if self.work > MOST_WORK {
            return Err(fail(
                line,
                format!("comes after {MOST_WORK} bytes of lines"),
            ));
        }
        Ok(())
    }

    /// The index of the `#end` that closes the block opened before `lines`, and the branch lines at its level.
    fn close(
        &mut self,
        lines: &[&str],
        opener: &str,
    ) -> Result<(usize, Vec<usize>), SpecialiseError> {
        let (mut depth, mut branches) = (0usize, Vec::new());
        for (i, line) in lines.iter().enumerate() {
            self.spend(line)?;
            let line = line.trim();
            if ["#if ", "#for ", "#def "]
                .iter()
                .any(|opener| line.starts_with(opener))
            {
                depth += 1;
            } else if line == "#end" {
                if depth == 0 {
                    return Ok((i, branches));
                }
                depth -= 1;
            } else if depth == 0 && (line == "#else" || line.starts_with("#elif ")) {
                branches.push(i);
            }
        }
        Err(fail(opener, "has no #end"))
    }

    fn block(&mut self, lines: &[&'a str]) -> Result<(), SpecialiseError> {
        let mut i = 0;
        while i < lines.len() {
            let line = lines[i];
            let trimmed = line.trim();
            i += 1;
            self.spend(line)?;
            if let Some(name) = trimmed.strip_prefix("#include ") {
                self.include(name, line)?;
            } else if let Some(rest) = trimmed.strip_prefix("#let ") {
                let (name, value) = rest
                    .split_once('=')
                    .ok_or_else(|| fail(line, "lacks an ="))?;
                let value = self.value(value, line)?;
                self.set(name, value, line)?;
            } else if let Some(condition) = trimmed.strip_prefix("#if ") {
                let (end, branches) = self.close(&lines[i..], line)?;
                let body = &lines[i..i + end];
                i += end + 1;
                self.conditional(condition, body, &branches, line)?;
            } else if let Some(header) = trimmed.strip_prefix("#for ") {
                let (end, _) = self.close(&lines[i..], line)?;
                let body = &lines[i..i + end];
                i += end + 1;
                self.repeat(header, body, line)?;
            } else if let Some(header) = trimmed.strip_prefix("#def ") {
                let (end, _) = self.close(&lines[i..], line)?;
                self.define(header, &lines[i..i + end], line)?;
                i += end + 1;
            } else if let Some(call) = trimmed.strip_prefix("#use ") {
                self.expand(call, line)?;
            } else if trimmed.starts_with('#') {
                return Err(fail(line, "is no directive that belongs here"));
            } else {
                self.text(line)?;
            }
        }
        Ok(())
    }

    /// A block inside the current one.
    fn inner(&mut self, lines: &[&'a str], line: &str) -> Result<(), SpecialiseError> {
        if self.blocks == MOST_BLOCKS {
            return Err(fail(line, "is nested too deep"));
        }
        self.blocks += 1;
        self.block(lines)?;
        self.blocks -= 1;
        Ok(())
    }

    fn include(&mut self, name: &str, line: &str) -> Result<(), SpecialiseError> {
        let name = name.trim().trim_matches('"');
        let text = (self.source)(name).ok_or_else(|| fail(line, "there is no such file"))?;
        if self.includes == MOST_INCLUDES {
            return Err(fail(line, "includes are nested too deep"));
        }
        self.includes += 1;
        self.inner(&text.lines().collect::<Vec<_>>(), line)?;
        self.includes -= 1;
        Ok(())
    }

    fn set(&mut self, name: &str, value: i64, line: &str) -> Result<(), SpecialiseError> {
        let name = name.trim();
        if !is_name(name) {
            return Err(fail(line, format!("{name:?} is no name")));
        }
        self.constants.insert(name.to_owned(), value);
        Ok(())
    }

    /// `NAME(CONSTANT, …): IN, … -> OUT, …`
    fn define(
        &mut self,
        header: &'a str,
        body: &[&'a str],
        line: &str,
    ) -> Result<(), SpecialiseError> {
        let list = |text: &'a str| -> Vec<&'a str> {
            let names = text.split(',').map(str::trim);
            names.filter(|name| !name.is_empty()).collect()
        };
        let parts = header.split_once('(').and_then(|(name, rest)| {
            let (constants, rest) = rest.split_once(')')?;
            let (reads, writes) = rest.strip_prefix(':')?.split_once("->")?;
            Some((name, [constants, reads, writes].map(list)))
        });
        let Some((name, [constants, reads, writes])) = parts else {
            return Err(fail(line, "is not #def NAME(CONSTANT, …): IN, … -> OUT, …"));
        };
        let template = Template {
            constants,
            interface: Interface { reads, writes },
            body: body.to_vec(),
        };
        self.templates.insert(name.to_owned(), template);
        Ok(())
    }

    fn expand(&mut self, call: &str, line: &str) -> Result<(), SpecialiseError> {
        let parts = call
            .trim()
            .strip_suffix(')')
            .and_then(|c| c.split_once('('));
        let (name, arguments) = parts.ok_or_else(|| fail(line, "is not #use NAME(EXPR, …)"))?;
        let template = self.templates.get(name).cloned();
        let template = template.ok_or_else(|| fail(line, "there is no such template"))?;
        let arguments = arguments.split(',').filter(|text| !text.trim().is_empty());
        let values = arguments
            .map(|text| self.value(text, line))
            .collect::<Result<Vec<_>, _>>()?;
        if values.len() != template.constants.len() {
            return Err(fail(line, "has other constants than its template"));
        }
        let outer: Vec<_> = template
            .constants
            .iter()
            .map(|name| (*name, self.constants.get(*name).copied()))
            .collect();
        for (name, value) in template.constants.iter().zip(values) {
            self.set(name, value, line)?;
        }
        self.locals.begin_use(template.interface.clone());
        self.inner(&template.body, line)?;
        self.locals.end_use();
        for (name, value) in outer {
            self.restore(name, value);
        }
        Ok(())
    }

    /// Sets a constant back to its earlier value, or removes it.
    fn restore(&mut self, name: &str, value: Option<i64>) {
        match value {
            Some(value) => self.constants.insert(name.to_owned(), value),
            None => self.constants.remove(name),
        };
    }

    fn repeat(
        &mut self,
        header: &str,
        body: &[&'a str],
        line: &str,
    ) -> Result<(), SpecialiseError> {
        let (name, range) = header
            .split_once(" in ")
            .ok_or_else(|| fail(line, "lacks an in"))?;
        let (from, to) = range
            .split_once("..")
            .ok_or_else(|| fail(line, "lacks a .."))?;
        let (from, to) = (self.value(from, line)?, self.value(to, line)?);
        let outer = self.constants.get(name.trim()).copied();
        for value in from..to {
            self.spend(line)?;
            self.set(name, value, line)?;
            self.inner(body, line)?;
        }
        self.restore(name.trim(), outer);
        Ok(())
    }

    fn conditional(
        &mut self,
        first: &str,
        body: &[&'a str],
        branches: &[usize],
        line: &str,
    ) -> Result<(), SpecialiseError> {
        let mut start = 0;
        let mut condition = Some(first);
        for &next in branches.iter().chain([&body.len()]) {
            let holds = match condition {
                Some(text) => self.value(text, line)? != 0,
                None => true,
            };
            if holds {
                return self.inner(&body[start..next], line);
            }
            if next < body.len() {
                condition = body[next].trim().strip_prefix("#elif ");
                start = next + 1;
            }
        }
        Ok(())
    }

    fn text(&mut self, line: &str) -> Result<(), SpecialiseError> {
        let (start, mut rest) = (self.out.len(), line);
        while let Some(at) = rest.find("$(") {
            self.out.push_str(&rest[..at]);
            let inside = &rest[at + 2..];
            let mut depth = 1usize;
            let end = inside
                .find(|c| {
                    match c {
                        '(' => depth += 1,
                        ')' => depth -= 1,
                        _ => {}
                    }
                    depth == 0
                })
                .ok_or_else(|| fail(line, "has an open $("))?;
            let value = self.value(&inside[..end], line)?;
            self.out.push_str(&value.to_string());
            rest = &inside[end + 1..];
        }
        self.out.push_str(rest);
        let locals = self.locals.line(&self.out[start..]);
        locals.map_err(|reason| fail(line, reason))?;
        self.out.push('\n');
        if self.out.len() > MOST_OUT {
            return Err(fail(line, format!("is beyond {MOST_OUT} bytes of text")));
        }
        Ok(())
    }

    fn value(&self, text: &str, line: &str) -> Result<i64, SpecialiseError> {
        evaluate(text, &self.constants).map_err(|reason| fail(line, reason))
    }
}

#[cfg(test)]
mod tests {
    use super::{expression::MOST_TERMS, *};

    fn run(text: &'static str) -> Result<String, SpecialiseError> {
        let constants = Constants::from([("N".to_owned(), 3)]);
        specialise("a", &constants, &|name| match name {
            "a" => Some(text),
            "b" => Some("included $(i)"),
            _ => None,
        })
    }

    #[test]
    fn loops_unroll_and_includes_see_their_variables() {
        let text = "#for i in 0..N - 1\n#include \"b\"\nx$(i * 2) = y[$((i + 1) % 2)];\n#end\nz";
        let want = "included 0\nx0 = y[1];\nincluded 1\nx2 = y[0];\nz\n";
        assert_eq!(run(text).unwrap(), want);
    }

    #[test]
    fn templates_state_the_locals_that_they_share() {
        let add = "#def add(i): x -> sum_*\nlet y = x * $(i);\nlet sum_$(i) = y;\n#end\n";
        let run = |body: &str| -> Result<String, SpecialiseError> {
            run(format!("{add}fn f(x: i32, z: i32) {{\n{body}\n}}").leak())
        };
        let used = run("#for i in 1..N\n#use add(i + 1)\n#end\nlet t = sum_2 + sum_3 + v.y;");
        let text = "let y = x * 2;\nlet sum_2 = y;\nlet y = x * 3;\nlet sum_3 = y;\n";
        assert!(used.unwrap().contains(text));
        for (body, reason) in [
            (
                "#use add(1)\nlet t = y;",
                "uses \"y\", which a template keeps to itself",
            ),
            ("#use add()", "has other constants than its template"),
            ("#use sub(1)", "there is no such template"),
            (
                "#def f(): x -> a\nlet a = x + z;\n#end\n#use f()",
                "uses \"z\", which its template does not name",
            ),
            (
                "#def f(): -> b\n#use add(2)\nlet b = sum_2;\n#end\n#use f()",
                "uses \"x\", which its template does not name",
            ),
            (
                "#def f(): -> b\n#use f()\n#end\n#use f()",
                "is nested too deep",
            ),
            (
                "#def f() -> b\n#end",
                "is not #def NAME(CONSTANT, …): IN, … -> OUT, …",
            ),
        ] {
            assert_eq!(run(body).unwrap_err().reason, reason, "{body}");
        }
        assert!(run("#use add(1)\nlet y = sum_1;").is_ok());
    }

    #[test]
    fn one_branch_is_taken() {
        let text = "#let M = N == 3 ? 7 : 9\n#if M < 7 || !N\na\n#elif M == 7 && N >= 3\nb\n#else\nc\n#end";
        assert_eq!(run(text).unwrap(), "b\n");
        assert_eq!(
            run("#if N == 4\na\n#if 1\nb\n#end\n#else\nc\n#end").unwrap(),
            "c\n"
        );
    }

    #[test]
    fn mistakes_name_their_line() {
        for (text, reason) in [
            ("#if N", "has no #end"),
            ("$(N", "has an open $("),
            ("$(Q)", "\"Q\" is not a constant"),
            ("#end", "is no directive that belongs here"),
            ("#include \"c\"", "there is no such file"),
            ("$(1 / 0)", "divides by 0"),
        ] {
            assert_eq!(run(text).unwrap_err().reason, reason);
        }
    }

    #[test]
    fn numbers_beyond_64_bits_are_refused() {
        for text in [
            "$(9223372036854775807 + 1)",
            "$(-9223372036854775807 - 2)",
            "$(9223372036854775807 * 2)",
            "$((-9223372036854775807 - 1) / -1)",
            "$((-9223372036854775807 - 1) % -1)",
            "$(-(-9223372036854775807 - 1))",
        ] {
            let reason = run(text).unwrap_err().reason;
            assert!(reason.ends_with("is beyond 64 bits"), "{text}: {reason}");
        }
        let reason = run("$(9223372036854775808)").unwrap_err().reason;
        assert_eq!(reason, "\"9223372036854775808\" is not a constant");
    }

    #[test]
    fn nesting_of_any_kind_is_bounded() {
        let leak = |text: String| -> &'static str { text.leak() };
        let n = 200_000;
        for text in [
            "#if 1\n".repeat(MOST_BLOCKS + 1) + &"#end\n".repeat(MOST_BLOCKS + 1),
            "#for i in 0..1\n".repeat(MOST_BLOCKS + 1) + &"#end\n".repeat(MOST_BLOCKS + 1),
            format!("$({}1{})", "(".repeat(n), ")".repeat(n)),
            format!("$({}1)", "!".repeat(n)),
            format!("$({}1)", "-".repeat(n)),
            format!("$({}1{})", "1 ? ".repeat(n), ": 0".repeat(n)),
            format!("$({}1)", "1 ? 2 : ".repeat(n)),
            "#include \"a\"".to_owned(),
        ] {
            let start: String = text.chars().take(30).collect();
            let reason = run(leak(text)).unwrap_err().reason;
            assert!(reason.ends_with("nested too deep"), "{start}: {reason}");
        }
        let deepest = "#if 1\n".repeat(MOST_BLOCKS) + "x\n" + &"#end\n".repeat(MOST_BLOCKS);
        assert_eq!(run(leak(deepest)).unwrap(), "x\n");
        let deepest = format!("$({}7{})", "(".repeat(MOST_TERMS), ")".repeat(MOST_TERMS));
        assert_eq!(run(leak(deepest)).unwrap(), "7\n");
    }

    #[test]
    fn work_and_text_are_bounded() {
        for (text, reason) in [
            ("#for i in 0..9223372036854775807\n#end", "bytes of lines"),
            (
                "#for i in -9223372036854775807..9223372036854775807\n#if 0\nx\n#end\n#end",
                "bytes of lines",
            ),
            ("#for i in 0..1000000000\nx\n#end", "bytes of text"),
        ] {
            let error = run(text).unwrap_err();
            assert!(error.reason.ends_with(reason), "{error}");
        }
    }

    #[test]
    fn only_names_are_set() {
        for text in [
            "#let = 1",
            "#let 2 = 1",
            "#let a b = 1",
            "#for  in 0..2\n#end",
        ] {
            assert!(run(text).is_err(), "{text}");
        }
        assert_eq!(run("#let _a1 = 2\n$(_a1)").unwrap(), "2\n");
    }

    #[test]
    fn texts_of_any_pieces_are_specialised_or_refused() {
        let pieces = [
            "#if ",
            "#elif ",
            "#else",
            "#end",
            "#for ",
            "#let ",
            "#def ",
            "#use ",
            ": i -> 3",
            "#include ",
            "i",
            " in ",
            "..",
            "0",
            "3",
            "N",
            "\n",
            "\n",
            "$(",
            "(",
            ")",
            "+",
            "-",
            "!",
            "?",
            ":",
            "/",
            "%",
            "é",
            "\"b\"",
            "=",
            " ",
            "99999999999999999999",
        ];
        let (mut x, mut specialised) = (1u32, 0);
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..(x >> 8) % 40 {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                text += pieces[(x >> 8) as usize % pieces.len()];
            }
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let constants = Constants::from([("N".to_owned(), i64::MIN)]);
            let found = specialise("a", &constants, &|name| match name {
                "a" => Some(&text),
                "b" => Some("$(i)"),
                _ => None,
            });
            specialised += usize::from(found.is_ok());
        }
        assert!((100..19_900).contains(&specialised), "{specialised}");
    }
}
