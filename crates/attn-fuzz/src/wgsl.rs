//! Fuzzes the WGSL preprocessor: any text and any constants give a module or an error, soon; expressions have the values of
//! an evaluator of 128 bits here.

use arbitrary::Unstructured;
use attn_kernels::wgsl::{Constants, specialise};

use crate::{draw::Draw, hold};

/// A preprocessor: the main file's text, an included file's, constants.
pub type Specialise = fn(&str, &str, &Constants) -> Result<String, String>;

fn subject(main: &str, other: &str, constants: &Constants) -> Result<String, String> {
    let source = |name: &str| match name {
        "main" => Some(main),
        "other" => Some(other),
        _ => None,
    };
    specialise("main", constants, &source).map_err(|error| error.to_string())
}

/// Draws templates; see the module.
///
/// # Errors
/// What does not hold.
pub fn fuzz(u: &mut Unstructured<'_>) -> Result<(), String> {
    fuzz_with(u, subject)
}

/// Fuzzes another preprocessor in place of the library's.
///
/// # Errors
/// What does not hold.
pub fn fuzz_with(u: &mut Unstructured<'_>, specialise: Specialise) -> Result<(), String> {
    let mut draw = Draw(u);
    let constants: Constants = NAMES
        .iter()
        .map(|name| ((*name).to_owned(), value(&mut draw)))
        .collect();
    if draw.once_in(2) {
        return expression(&mut draw, &constants, specialise);
    }
    let (main, other) = (text(&mut draw), text(&mut draw));
    match specialise(&main, &other, &constants) {
        Ok(module) => {
            hold!(module.len() < 1 << 28, "{} bytes of WGSL", module.len());
            hold!(
                !module.lines().any(|line| line.trim().starts_with('#')),
                "a directive is left in {module:?} of {main:?}"
            );
        }
        Err(error) => hold!(!error.is_empty(), "an error without a text"),
    }
    Ok(())
}

const NAMES: [&str; 4] = ["N", "HEAD_DIM", "a", "_x1"];

fn value(draw: &mut Draw<'_, '_>) -> i64 {
    match draw.range(0..=3) {
        0 => draw.pick(&[0, 1, -1, i64::MIN, i64::MAX, i64::MIN + 1, 1 << 32]),
        1 => draw.bits() as i64,
        _ => draw.range(0..=12) as i64 - 2,
    }
}

const OPERATORS: [&str; 13] = [
    "||", "&&", "==", "!=", "<=", ">=", "<", ">", "+", "-", "*", "/", "%",
];

/// A tree of operators, as text and as its value; none where it has no value of 64 bits.
fn tree(draw: &mut Draw<'_, '_>, constants: &Constants, depth: usize) -> (String, Option<i64>) {
    let leaf = depth == 0 || draw.once_in(4);
    if leaf && draw.once_in(2) {
        let name = draw.pick(&NAMES);
        return (name.to_owned(), constants.get(name).copied());
    }
    if leaf {
        let number = value(draw) & i64::MAX;
        return (number.to_string(), Some(number));
    }
    let mut below = || tree(draw, constants, depth - 1);
    let ((a, x), (b, y)) = (below(), below());
    match draw.range(0..=15) {
        0 => (format!("!({a})"), x.map(|x| i64::from(x == 0))),
        1 => (format!("-({a})"), x.and_then(i64::checked_neg)),
        2 => {
            let (c, z) = tree(draw, constants, depth - 1);
            // Every part is evaluated, so an overflow anywhere is an error.
            let picked = x
                .zip(y)
                .zip(z)
                .map(|((x, y), z)| if x != 0 { y } else { z });
            (format!("(({a}) ? ({b}) : ({c}))"), picked)
        }
        _ => {
            let operator = draw.pick(&OPERATORS);
            let picked = x.zip(y).and_then(|(x, y)| binary(operator, x, y));
            (format!("({a}){operator} ({b})"), picked)
        }
    }
}

fn binary(operator: &str, x: i64, y: i64) -> Option<i64> {
    let (x, y) = (i128::from(x), i128::from(y));
    let value = match operator {
        "||" => i128::from(x != 0 || y != 0),
        "&&" => i128::from(x != 0 && y != 0),
        "==" => i128::from(x == y),
        "!=" => i128::from(x != y),
        "<=" => i128::from(x <= y),
        ">=" => i128::from(x >= y),
        "<" => i128::from(x < y),
        ">" => i128::from(x > y),
        "+" => x + y,
        "-" => x - y,
        "*" => x * y,
        _ if y == 0 => return None,
        "/" => x / y,
        // A remainder exists where its quotient does.
        _ if i64::try_from(x / y).is_err() => return None,
        _ => x % y,
    };
    i64::try_from(value).ok()
}

fn expression(
    draw: &mut Draw<'_, '_>,
    constants: &Constants,
    specialise: Specialise,
) -> Result<(), String> {
    let (text, value) = tree(draw, constants, 3);
    let got = specialise(&format!("x$({text})y"), "", constants);
    match (&got, value) {
        (Ok(got), Some(value)) => {
            let want = format!("x{value}y\n");
            hold!(
                *got == want,
                "{text} of {constants:?} is {got:?}, not {want:?}"
            );
        }
        (Err(_), None) => {}
        _ => return Err(format!("{text} of {constants:?} is {got:?}, not {value:?}")),
    }
    Ok(())
}

/// Lines of directives, well-formed and not.
fn text(draw: &mut Draw<'_, '_>) -> String {
    const LINES: [&str; 15] = [
        "#end",
        "#end",
        "#else",
        "#elif N > 3",
        "#if N",
        "#if a == HEAD_DIM",
        "#for i in 0..N",
        "#for j in -3..HEAD_DIM",
        "#for N in a..a + 3",
        "#let M = N * 2",
        "#include \"other\"",
        "#include \"main\"",
        "#include \"none\"",
        "let x = y[$(i % 2)] + $(N);",
        "plain $(",
    ];
    const TOKENS: [&str; 22] = [
        "#if ",
        "#for ",
        "#let ",
        "#include ",
        "#elif ",
        " in ",
        "..",
        "=",
        "$(",
        ")",
        "(",
        "!",
        "-",
        "?",
        ":",
        "N",
        "i",
        "9223372036854775807",
        "99999999999999999999",
        "\"",
        "é",
        "%",
    ];
    let mut text = String::new();
    for _ in 0..draw.range(0..=24) {
        match draw.range(0..=9) {
            0 => {
                for _ in 0..draw.range(0..=8) {
                    text += draw.pick(&TOKENS);
                }
            }
            1 => {
                let token = draw.pick(&["(", "!", "-", "1?", "#if 1\n", "#for q in 0..1\n", "$(("]);
                text += draw.pick(&["", "$(", "#if "]);
                let rare = draw.once_in(20);
                text += &token.repeat(draw.pick(&[3, 50, 70, 300, if rare { 100_000 } else { 9 }]));
            }
            2 if draw.once_in(9) => text += "#for i in 0..9223372036854775807",
            2 => text += &String::from_utf8_lossy(&draw.bits().to_le_bytes()),
            _ => text += draw.pick(&LINES),
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finds(specialise: Specialise) -> bool {
        crate::finds(500, fuzz, |u| fuzz_with(u, specialise))
    }

    #[test]
    fn a_wrong_value_is_found() {
        assert!(finds(|main, other, constants| {
            Ok(subject(main, other, constants)?.replace('3', "4"))
        }));
    }

    #[test]
    fn a_directive_left_in_place_is_found() {
        assert!(finds(|main, _, _| Ok(main.to_owned())));
    }
}
