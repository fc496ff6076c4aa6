//! Expressions of the preprocessor: integers of 64 bits, the constants of a specialisation and C's operators.

use std::collections::HashMap;

/// Parentheses, `!`, `-` and `?:` inside one another in an expression.
pub(super) const MOST_TERMS: usize = 64;

/// The constants of one specialisation.
pub type Constants = HashMap<String, i64>;

/// Whether `text` has the form of a name.
pub(super) fn is_name(text: &str) -> bool {
    let mut chars = text.chars();
    let first = chars.next();
    first.is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The value of an expression.
///
/// # Errors
/// The reason, if it is no expression, names something else than a constant, or leaves the range of i64.
pub(super) fn evaluate(text: &str, constants: &Constants) -> Result<i64, String> {
    let mut parser = Parser {
        rest: text.trim(),
        constants,
        terms: 0,
    };
    let value = parser.choice()?;
    if parser.rest.is_empty() {
        Ok(value)
    } else {
        Err(format!("{:?} is left over", parser.rest))
    }
}

struct Parser<'a> {
    rest: &'a str,
    constants: &'a Constants,
    /// The current depth of nesting.
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
    /// Takes the token, if the rest begins with it.
    fn take(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest.trim_start();
                true
            }
            None => false,
        }
    }

    /// Parses by `part`, nested one level deeper.
    fn deeper(&mut self, part: fn(&mut Self) -> Result<i64, String>) -> Result<i64, String> {
        if self.terms == MOST_TERMS {
            return Err("is nested too deep".into());
        }
        self.terms += 1;
        let value = part(self)?;
        self.terms -= 1;
        Ok(value)
    }

    /// `a ? b : c`, or what binds more tightly.
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

    /// Operators of `level` and the levels that bind more tightly.
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

    /// A number, a constant, or an expression in parentheses; `!` and `-` before them.
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
