//! Finds what can be mutated in a source file: places in the text, and what may stand there instead.

use std::ops::Range;

use anyhow::{Context, Result};
use syn::{
    Attribute, BinOp, Expr, Lit, Stmt, Token,
    parse::Parser,
    punctuated::Punctuated,
    spanned::Spanned,
    visit::{self, Visit},
};

/// One replacement.
#[derive(Debug, Clone)]
pub struct Edit {
    /// The original, on one line.
    pub from: String,
    /// What a reader sees in its place.
    pub to: String,
    /// What the compiler sees in its place; empty for conditions and statements, which have forms of their own.
    pub text: String,
}

/// How the replacements of a place are compiled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// An expression that is chosen in place of the original.
    Replace,
    /// A condition: its first edit makes it false, its second true.
    Condition,
    /// A condition that must hold: its edit makes it true.
    Must,
    /// A statement that its edit leaves out.
    Drop,
}

/// A place in a file with its edits.
#[derive(Debug, Clone)]
pub struct Site {
    /// Bytes of the file.
    pub range: Range<usize>,
    /// The line of its first byte, from 1.
    pub line: usize,
    /// The function that it is in, with the type of a method.
    pub function: String,
    /// How its edits are compiled in.
    pub form: Form,
    /// What may stand there.
    pub edits: Vec<Edit>,
}

/// The places of a file in the order of their first bytes, outer ones first, and the extents of its functions.
pub struct Found {
    /// The places.
    pub sites: Vec<Site>,
    /// Name and bytes of each function.
    pub functions: Vec<(String, Range<usize>)>,
}

/// Parses a file and finds its places.
///
/// # Errors
/// If it is not Rust.
pub fn find(source: &str) -> Result<Found> {
    let file = syn::parse_file(source).context("not a Rust file")?;
    let mut finder = Finder {
        source,
        path: Vec::new(),
        found: Found {
            sites: Vec::new(),
            functions: Vec::new(),
        },
    };
    finder.visit_file(&file);
    let mut found = finder.found;
    found.sites.retain(|site| !site.edits.is_empty());
    found
        .sites
        .sort_by_key(|site| (site.range.start, std::cmp::Reverse(site.range.end)));
    Ok(found)
}

struct Finder<'a> {
    source: &'a str,
    path: Vec<String>,
    found: Found,
}

/// Whether an item is compiled for tests or for another machine only.
fn left_out(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = match &attribute.meta {
            syn::Meta::List(list) if list.path.is_ident("cfg") => list.tokens.to_string(),
            syn::Meta::Path(path) => return path.is_ident("test"),
            _ => return false,
        };
        text.starts_with("test") || text.contains("aarch64")
    })
}

/// Whether a condition binds names, so that nothing may stand around it.
fn binds(expr: &Expr) -> bool {
    match expr {
        Expr::Let(_) => true,
        Expr::Binary(binary) => binds(&binary.left) || binds(&binary.right),
        Expr::Paren(paren) => binds(&paren.expr),
        _ => false,
    }
}

/// Other operators for one.
fn swaps(op: &BinOp) -> &'static [&'static str] {
    match op {
        BinOp::Lt(_) => &["<=", ">"],
        BinOp::Le(_) => &["<", ">"],
        BinOp::Gt(_) => &[">=", "<"],
        BinOp::Ge(_) => &[">", "<"],
        BinOp::Eq(_) => &["!="],
        BinOp::Ne(_) => &["=="],
        BinOp::And(_) => &["||"],
        BinOp::Or(_) => &["&&"],
        BinOp::Add(_) => &["-"],
        BinOp::Sub(_) => &["+"],
        BinOp::Mul(_) => &["/"],
        BinOp::Div(_) | BinOp::Rem(_) => &["*"],
        BinOp::Shl(_) => &[">>"],
        BinOp::Shr(_) => &["<<"],
        BinOp::BitAnd(_) => &["|"],
        BinOp::BitOr(_) => &["&"],
        BinOp::AddAssign(_) => &["-="],
        BinOp::SubAssign(_) => &["+="],
        BinOp::MulAssign(_) => &["/="],
        BinOp::DivAssign(_) => &["*="],
        BinOp::BitAndAssign(_) => &["|="],
        BinOp::BitOrAssign(_) => &["&="],
        _ => &[],
    }
}

fn other_method(name: &str) -> Option<&'static str> {
    Some(match name {
        "max" => "min",
        "min" => "max",
        "all" => "any",
        "any" => "all",
        "is_some" => "is_none",
        "is_none" => "is_some",
        _ => return None,
    })
}

/// A literal's other value: an integer and one, a float twice (0 becomes 1).
fn other_literal(lit: &Lit) -> Option<String> {
    match lit {
        Lit::Int(int) => {
            let value: u128 = int.base10_parse().ok()?;
            Some(format!("{}{}", value.checked_add(1)?, int.suffix()))
        }
        Lit::Float(float) => {
            let value: f64 = float.base10_digits().parse().ok()?;
            let other = if value == 0.0 { 1.0 } else { 2.0 * value };
            other
                .is_finite()
                .then(|| format!("{other:?}{}", float.suffix()))
        }
        _ => None,
    }
}

impl Finder<'_> {
    fn text(&self, range: Range<usize>) -> &str {
        &self.source[range]
    }

    fn add(&mut self, range: Range<usize>, form: Form, edits: Vec<Edit>) {
        let line = 1 + self.source[..range.start].matches('\n').count();
        self.found.sites.push(Site {
            range,
            line,
            function: self.path.join("::"),
            form,
            edits,
        });
    }

    fn edit(&self, range: Range<usize>, to: &str, text: String) -> Edit {
        Edit {
            from: one_line(self.text(range)),
            to: one_line(to),
            text,
        }
    }

    fn condition(&mut self, expr: &Expr) {
        if binds(expr) {
            return;
        }
        let range = expr.span().byte_range();
        let edits = ["false", "true"].map(|to| self.edit(range.clone(), to, String::new()));
        self.add(range, Form::Condition, edits.into());
    }

    fn function(&mut self, name: String, range: Range<usize>, inside: impl FnOnce(&mut Self)) {
        self.path.push(name);
        self.found.functions.push((self.path.join("::"), range));
        inside(self);
        self.path.pop();
    }

    /// Arguments of a macro that are ordinary expressions.
    fn arguments(&mut self, mac: &syn::Macro) {
        let name = match mac.path.segments.last() {
            Some(last) => last.ident.to_string(),
            None => return,
        };
        let list = Punctuated::<Expr, Token![,]>::parse_terminated;
        match name.as_str() {
            "ensure" | "assert" => {
                let Ok(arguments) = list.parse2(mac.tokens.clone()) else {
                    return;
                };
                if let Some(first) = arguments.first() {
                    let range = first.span().byte_range();
                    let edit = self.edit(range.clone(), "true", String::new());
                    self.add(range, Form::Must, vec![edit]);
                    self.visit_expr(first);
                }
            }
            "format" | "println" | "print" | "write" | "writeln" | "json" | "vec" => {
                let Ok(arguments) = list.parse2(mac.tokens.clone()) else {
                    return;
                };
                for argument in &arguments {
                    match argument {
                        // A name for a placeholder.
                        Expr::Assign(assign) => self.visit_expr(&assign.right),
                        // An object of `json!`.
                        Expr::Block(_) => {}
                        other => self.visit_expr(other),
                    }
                }
            }
            _ => {}
        }
    }
}

/// Text with its white space narrowed, cut where it is long.
fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let line = words.join(" ");
    if line.chars().count() <= 90 {
        return line;
    }
    let head: String = line.chars().take(87).collect();
    format!("{head}...")
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !left_out(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if item.sig.constness.is_none() && !left_out(&item.attrs) {
            let name = item.sig.ident.to_string();
            self.function(name, item.span().byte_range(), |f| {
                f.visit_block(&item.block);
            });
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let of = item
            .trait_
            .as_ref()
            .and_then(|(_, path, _)| path.segments.last());
        let shown = of.is_some_and(|last| last.ident == "Display" || last.ident == "Debug");
        if shown || left_out(&item.attrs) {
            return;
        }
        let own = match &*item.self_ty {
            syn::Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
            _ => None,
        };
        self.path.push(own.unwrap_or_else(|| "impl".to_owned()));
        visit::visit_item_impl(self, item);
        self.path.pop();
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if item.sig.constness.is_none() && !left_out(&item.attrs) {
            let name = item.sig.ident.to_string();
            self.function(name, item.span().byte_range(), |f| {
                f.visit_block(&item.block);
            });
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            let name = item.sig.ident.to_string();
            self.function(name, item.span().byte_range(), |f| f.visit_block(block));
        }
    }

    // What is evaluated by the compiler, and what is no expression.
    fn visit_item_const(&mut self, _: &'ast syn::ItemConst) {}
    fn visit_item_static(&mut self, _: &'ast syn::ItemStatic) {}
    fn visit_item_macro(&mut self, _: &'ast syn::ItemMacro) {}
    fn visit_item_struct(&mut self, _: &'ast syn::ItemStruct) {}
    fn visit_item_enum(&mut self, _: &'ast syn::ItemEnum) {}
    fn visit_item_type(&mut self, _: &'ast syn::ItemType) {}
    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_impl_item_type(&mut self, _: &'ast syn::ImplItemType) {}
    fn visit_trait_item_const(&mut self, _: &'ast syn::TraitItemConst) {}
    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}
    fn visit_attribute(&mut self, _: &'ast Attribute) {}
    fn visit_pat(&mut self, _: &'ast syn::Pat) {}
    fn visit_type(&mut self, _: &'ast syn::Type) {}
    fn visit_path(&mut self, _: &'ast syn::Path) {}
    fn visit_angle_bracketed_generic_arguments(
        &mut self,
        _: &'ast syn::AngleBracketedGenericArguments,
    ) {
    }

    fn visit_expr_repeat(&mut self, expr: &'ast syn::ExprRepeat) {
        self.visit_expr(&expr.expr);
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.arguments(mac);
    }

    fn visit_stmt(&mut self, stmt: &'ast Stmt) {
        if let Stmt::Expr(Expr::Try(_), Some(_)) = stmt {
            let range = stmt.span().byte_range();
            let edit = self.edit(range.clone(), "nothing", String::new());
            self.add(range, Form::Drop, vec![edit]);
        }
        visit::visit_stmt(self, stmt);
    }

    fn visit_expr_if(&mut self, expr: &'ast syn::ExprIf) {
        self.condition(&expr.cond);
        visit::visit_expr_if(self, expr);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if let Some((_, guard)) = &arm.guard {
            self.condition(guard);
        }
        visit::visit_arm(self, arm);
    }

    fn visit_expr_binary(&mut self, expr: &'ast syn::ExprBinary) {
        let range = expr.span().byte_range();
        let logical = matches!(expr.op, BinOp::And(_) | BinOp::Or(_));
        if !(logical && (binds(&expr.left) || binds(&expr.right))) {
            let left = self.text(expr.left.span().byte_range());
            let right = self.text(expr.right.span().byte_range());
            let assigns = expr.op.span().byte_range();
            let assigns = self.text(assigns).len() > 1
                && self.text(expr.op.span().byte_range()).ends_with('=')
                && !matches!(
                    expr.op,
                    BinOp::Le(_) | BinOp::Ge(_) | BinOp::Eq(_) | BinOp::Ne(_)
                );
            let edits = swaps(&expr.op)
                .iter()
                .map(|op| {
                    let text = if assigns {
                        format!("{left} {op} {right}")
                    } else {
                        format!("({left}) {op} ({right})")
                    };
                    self.edit(range.clone(), &format!("{left} {op} {right}"), text)
                })
                .collect();
            self.add(range, Form::Replace, edits);
        }
        visit::visit_expr_binary(self, expr);
    }

    fn visit_expr_unary(&mut self, expr: &'ast syn::ExprUnary) {
        if matches!(expr.op, syn::UnOp::Neg(_) | syn::UnOp::Not(_)) {
            let range = expr.span().byte_range();
            let inner = self.text(expr.expr.span().byte_range()).to_owned();
            let edit = self.edit(range.clone(), &inner, inner.clone());
            self.add(range, Form::Replace, vec![edit]);
        }
        visit::visit_expr_unary(self, expr);
    }

    fn visit_expr_method_call(&mut self, expr: &'ast syn::ExprMethodCall) {
        if let Some(other) = other_method(&expr.method.to_string()) {
            let (range, name) = (expr.span().byte_range(), expr.method.span().byte_range());
            let head = self.text(range.start..name.start);
            let text = format!("{head}{other}{}", self.text(name.end..range.end));
            let edit = Edit {
                from: one_line(&format!(".{}", self.text(name.start..range.end))),
                to: one_line(&format!(".{other}{}", self.text(name.end..range.end))),
                text,
            };
            self.add(range, Form::Replace, vec![edit]);
        }
        visit::visit_expr_method_call(self, expr);
    }

    fn visit_expr_lit(&mut self, expr: &'ast syn::ExprLit) {
        if let Some(other) = other_literal(&expr.lit) {
            let range = expr.span().byte_range();
            let edit = self.edit(range.clone(), &other, other.clone());
            self.add(range, Form::Replace, vec![edit]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `from -> to` of each edit.
    fn edits(source: &str) -> Vec<String> {
        let sites = find(source).unwrap().sites;
        let edits = sites.into_iter().flat_map(|site| site.edits);
        edits.map(|e| format!("{} -> {}", e.from, e.to)).collect()
    }

    #[test]
    fn operators_literals_and_conditions_have_edits() {
        assert_eq!(
            edits("fn f(a: u8) -> u8 { if a < 3 { a.max(9) } else { 1 } }"),
            [
                "a < 3 -> false",
                "a < 3 -> true",
                "a < 3 -> a <= 3",
                "a < 3 -> a > 3",
                "3 -> 4",
                ".max(9) -> .min(9)",
                "9 -> 10",
                "1 -> 2"
            ]
        );
        assert_eq!(
            edits("fn f() -> R { check(1.5)?; Ok(()) }"),
            ["check(1.5)?; -> nothing", "1.5 -> 3.0"]
        );
    }

    #[test]
    fn what_the_compiler_evaluates_has_none() {
        let source = "const A: u8 = 1 + 2; static B: [u8; 3] = [0; 3]; const fn c() -> u8 { 4 }
            #[cfg(test)] mod tests { fn d() -> u8 { 5 } } impl Display for E { fn f() -> u8 { 6 } }
            fn g() { let _ = [x; 7]; match y { 8 => z, _ => w } }";
        assert_eq!(edits(source), [""; 0]);
    }

    #[test]
    fn conditions_that_bind_names_stay_whole() {
        assert_eq!(
            edits("fn f() { if let Some(x) = y && x < z {} }"),
            ["x < z -> x <= z", "x < z -> x > z"]
        );
    }
}
