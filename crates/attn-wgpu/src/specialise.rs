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

use std::{collections::HashMap, fmt};

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
/// [`SpecialiseError`] naming the line.
pub fn specialise(
    file: &str,
    constants: &Constants,
    source: &dyn Fn(&str) -> Option<&'static str>,
) -> Result<String, SpecialiseError> {
    let text = source(file).ok_or_else(|| fail(file, "there is no such file"))?;
    let lines: Vec<&str> = text.lines().collect();
    let mut run = Run {
        constants: constants.clone(),
        source,
        out: String::new(),
        depth: 0,
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

struct Run<'a> {
    constants: Constants,
    source: &'a dyn Fn(&str) -> Option<&'static str>,
    out: String,
    depth: usize,
}

/// The index of the `#end` that closes the block opened before `lines`, and the branch lines at its level.
fn close(lines: &[&str], opener: &str) -> Result<(usize, Vec<usize>), SpecialiseError> {
    let (mut depth, mut branches) = (0, Vec::new());
    for (i, line) in lines.iter().enumerate() {
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

impl Run<'_> {
    fn block(&mut self, lines: &[&str]) -> Result<(), SpecialiseError> {
        let mut i = 0;
        while i < lines.len() {
            let line = lines[i];
            let trimmed = line.trim();
            i += 1;
            if let Some(rest) = trimmed.strip_prefix("#include ") {
                let name = rest.trim().trim_matches('"');
                let text =
                    (self.source)(name).ok_or_else(|| fail(line, "there is no such file"))?;
                if self.depth == 8 {
                    return Err(fail(line, "includes are nested too deep"));
                }
                self.depth += 1;
                self.block(&text.lines().collect::<Vec<_>>())?;
                self.depth -= 1;
            } else if let Some(rest) = trimmed.strip_prefix("#let ") {
                let (name, value) = rest
                    .split_once('=')
                    .ok_or_else(|| fail(line, "lacks an ="))?;
                let value = self.value(value, line)?;
                self.constants.insert(name.trim().to_owned(), value);
            } else if let Some(condition) = trimmed.strip_prefix("#if ") {
                let (end, branches) = close(&lines[i..], line)?;
                let body = &lines[i..i + end];
                i += end + 1;
                self.conditional(condition, body, &branches, line)?;
            } else if let Some(rest) = trimmed.strip_prefix("#for ") {
                let (end, _) = close(&lines[i..], line)?;
                let body = &lines[i..i + end];
                i += end + 1;
                let (name, range) = rest
                    .split_once(" in ")
                    .ok_or_else(|| fail(line, "lacks an in"))?;
                let (from, to) = range
                    .split_once("..")
                    .ok_or_else(|| fail(line, "lacks a .."))?;
                let (from, to) = (self.value(from, line)?, self.value(to, line)?);
                let name = name.trim();
                let outer = self.constants.get(name).copied();
                for value in from..to {
                    self.constants.insert(name.to_owned(), value);
                    self.block(body)?;
                }
                match outer {
                    Some(value) => self.constants.insert(name.to_owned(), value),
                    None => self.constants.remove(name),
                };
            } else if trimmed.starts_with('#') {
                return Err(fail(line, "is no directive that belongs here"));
            } else {
                self.text(line)?;
            }
        }
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
                return self.block(&body[start..next]);
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
            let mut depth = 1;
            let end = inside
                .find(|c| {
                    depth += match c {
                        '(' => 1,
                        ')' => -1,
                        _ => 0,
                    };
                    depth == 0
                })
                .ok_or_else(|| fail(line, "has an open $("))?;
            let value = self.value(&inside[..end], line)?;
            self.out.push_str(&value.to_string());
            rest = &inside[end + 1..];
        }
        self.out.push_str(rest);
        self.out.push('\n');
        Ok(())
    }

    fn value(&self, text: &str, line: &str) -> Result<i64, SpecialiseError> {
        let mut parser = Parser {
            rest: text.trim(),
            constants: &self.constants,
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

    fn choice(&mut self) -> Result<i64, String> {
        let condition = self.binary(0)?;
        if !self.take("?") {
            return Ok(condition);
        }
        let yes = self.choice()?;
        if !self.take(":") {
            return Err("lacks a :".into());
        }
        let no = self.choice()?;
        Ok(if condition != 0 { yes } else { no })
    }

    fn binary(&mut self, level: usize) -> Result<i64, String> {
        let Some(operators) = LEVELS.get(level) else {
            return self.atom();
        };
        let mut a = self.binary(level + 1)?;
        while let Some(operator) = operators.iter().find(|o| self.take(o)) {
            let b = self.binary(level + 1)?;
            a = match *operator {
                "||" => i64::from(a != 0 || b != 0),
                "&&" => i64::from(a != 0 && b != 0),
                "==" => i64::from(a == b),
                "!=" => i64::from(a != b),
                "<=" => i64::from(a <= b),
                ">=" => i64::from(a >= b),
                "<" => i64::from(a < b),
                ">" => i64::from(a > b),
                "+" => a + b,
                "-" => a - b,
                "*" => a * b,
                "/" | "%" if b == 0 => return Err("divides by 0".into()),
                "/" => a / b,
                _ => a % b,
            };
        }
        Ok(a)
    }

    fn atom(&mut self) -> Result<i64, String> {
        if self.take("!") {
            return Ok(i64::from(self.atom()? == 0));
        }
        if self.take("-") {
            return Ok(-self.atom()?);
        }
        if self.take("(") {
            let value = self.choice()?;
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
}
