//! The preprocessor that makes one WGSL module of `kernels/wgsl`: constants, conditions, unrolled loops, includes.
//!
//! | line | meaning |
//! |---|---|
//! | `#include "file"` | the file's lines, processed |
//! | `#let NAME = EXPR` | a constant from here on |
//! | `#if EXPR`, `#elif EXPR`, `#else`, `#end` | conditional lines |
//! | `#for NAME in A..B`, `#end` | the lines once for each integer of `A..B` |
//!
//! `$(EXPR)` in any other line becomes its value. Expressions are integers with `?: || && == != < <= > >= + - * / % ! ()`.
//! Unrolling by text keeps every accumulator a scalar, whatever a driver's compiler does with loops.
//!
//! Any text is either specialised or refused: arithmetic is checked, and nesting, work and the length of the result are bounded.

use std::{collections::HashMap, fmt};

/// Includes inside includes.
const MOST_INCLUDES: usize = 8;
/// Blocks inside blocks, includes among them.
const MOST_BLOCKS: usize = 64;
/// Parentheses, `!`, `-` and `?:` inside one another in an expression.
const MOST_TERMS: usize = 64;
/// Bytes of the result.
pub const MOST_OUT: usize = 4 << 20;
/// Bytes of all lines that are looked at, each time that they are.
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

/// The constants of one specialisation.
pub type Constants = HashMap<String, i64>;

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

struct Run<'a, 's> {
    constants: Constants,
    source: &'s dyn Fn(&str) -> Option<&'a str>,
    out: String,
    includes: usize,
    blocks: usize,
    work: usize,
}

/// Whether `$(…)` can name it.
fn is_name(text: &str) -> bool {
    let mut chars = text.chars();
    let first = chars.next();
    first.is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

impl Run<'_, '_> {
    /// Counts a look at `line`, and refuses the one too many.
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
            if line.starts_with("#if ") || line.starts_with("#for ") {
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

    fn block(&mut self, lines: &[&str]) -> Result<(), SpecialiseError> {
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
            } else if trimmed.starts_with('#') {
                return Err(fail(line, "is no directive that belongs here"));
            } else {
                self.text(line)?;
            }
        }
        Ok(())
    }

    /// A block inside the current one.
    fn inner(&mut self, lines: &[&str], line: &str) -> Result<(), SpecialiseError> {
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

    fn repeat(&mut self, header: &str, body: &[&str], line: &str) -> Result<(), SpecialiseError> {
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
        match outer {
            Some(value) => self.constants.insert(name.trim().to_owned(), value),
            None => self.constants.remove(name.trim()),
        };
        Ok(())
    }

    fn conditional(
        &mut self,
        first: &str,
        body: &[&str],
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
        let mut rest = line;
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
        self.out.push('\n');
        if self.out.len() > MOST_OUT {
            return Err(fail(line, format!("is beyond {MOST_OUT} bytes of text")));
        }
        Ok(())
    }

    fn value(&self, text: &str, line: &str) -> Result<i64, SpecialiseError> {
        let mut parser = Parser {
            rest: text.trim(),
            constants: &self.constants,
            terms: 0,
        };
        let value = parser.choice().map_err(|reason| fail(line, reason))?;
        if parser.rest.is_empty() {
            Ok(value)
        } else {
            Err(fail(line, format!("{:?} is left over", parser.rest)))
        }
    }
}

struct Parser<'a> {
    rest: &'a str,
    constants: &'a Constants,
    terms: usize,
}

/// Binary operators, weakest first.
const LEVELS: [&[&str]; 6] = [
    &["||"],
    &["&&"],
    &["==", "!="],
    &["<=", ">=", "<", ">"],
    &["+", "-"],
    &["*", "/", "%"],
];

/// `a operator b`.
fn apply(operator: &str, a: i64, b: i64) -> Result<i64, String> {
    let value = match operator {
        "||" => Some(i64::from(a != 0 || b != 0)),
        "&&" => Some(i64::from(a != 0 && b != 0)),
        "==" => Some(i64::from(a == b)),
        "!=" => Some(i64::from(a != b)),
        "<=" => Some(i64::from(a <= b)),
        ">=" => Some(i64::from(a >= b)),
        "<" => Some(i64::from(a < b)),
        ">" => Some(i64::from(a > b)),
        "+" => a.checked_add(b),
        "-" => a.checked_sub(b),
        "*" => a.checked_mul(b),
        "/" | "%" if b == 0 => return Err("divides by 0".into()),
        "/" => a.checked_div(b),
        _ => a.checked_rem(b),
    };
    value.ok_or_else(|| format!("{a} {operator} {b} is beyond 64 bits"))
}

impl Parser<'_> {
    fn take(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest.trim_start();
                true
            }
            None => false,
        }
    }

    /// What `part` parses, one term deeper.
    fn deeper(&mut self, part: fn(&mut Self) -> Result<i64, String>) -> Result<i64, String> {
        if self.terms == MOST_TERMS {
            return Err("is nested too deep".into());
        }
        self.terms += 1;
        let value = part(self)?;
        self.terms -= 1;
        Ok(value)
    }

    fn choice(&mut self) -> Result<i64, String> {
        let condition = self.binary(0)?;
        if !self.take("?") {
            return Ok(condition);
        }
        let yes = self.deeper(Self::choice)?;
        if !self.take(":") {
            return Err("lacks a :".into());
        }
        let no = self.deeper(Self::choice)?;
        Ok(if condition != 0 { yes } else { no })
    }

    fn binary(&mut self, level: usize) -> Result<i64, String> {
        let Some(operators) = LEVELS.get(level) else {
            return self.atom();
        };
        let mut a = self.binary(level + 1)?;
        while let Some(operator) = operators.iter().find(|o| self.take(o)) {
            let b = self.binary(level + 1)?;
            a = apply(operator, a, b)?;
        }
        Ok(a)
    }

    fn atom(&mut self) -> Result<i64, String> {
        if self.take("!") {
            return Ok(i64::from(self.deeper(Self::atom)? == 0));
        }
        if self.take("-") {
            return apply("-", 0, self.deeper(Self::atom)?);
        }
        if self.take("(") {
            let value = self.deeper(Self::choice)?;
            return if self.take(")") {
                Ok(value)
            } else {
                Err("lacks a )".into())
            };
        }
        let end = self
            .rest
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        if let Ok(value) = word.parse() {
            return Ok(value);
        }
        let known = self.constants.get(word).copied();
        known.ok_or_else(|| format!("{word:?} is not a constant"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
