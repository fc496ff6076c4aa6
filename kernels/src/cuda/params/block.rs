//! How a parameter block is defined once, as a Rust struct and as its text in C++.

use std::fmt::Write;

/// A field of a block, as C++ declares it.
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: &'static str,
    /// Elements of an array; 0 for a single value.
    pub(super) count: usize,
    #[cfg(test)]
    pub(super) size: usize,
    pub(super) doc: &'static [&'static str],
}

/// A block, as C++ declares it.
pub(super) struct Block {
    pub(super) name: &'static str,
    pub(super) size: usize,
    pub(super) doc: &'static [&'static str],
    pub(super) fields: &'static [Field],
}

/// Elements of an array type; 0 for a single value.
pub(super) trait Count {
    const COUNT: usize = 0;
}
impl Count for u64 {}
impl Count for i32 {}
impl Count for i64 {}
impl Count for u32 {}
impl Count for f32 {}
impl<T, const N: usize> Count for [T; N] {
    const COUNT: usize = N;
}

/// Defines each struct and its description for `params.h`. A field gives its Rust type and the C++ type of the same bytes.
macro_rules! blocks {
    ($(
        $(#[doc = $doc:literal])* $(#[repr(align($align:literal))])?
        struct $name:ident { $( $(#[doc = $text:literal])* $field:ident: $rust:ty = $kind:literal, )* }
    )*) => {
        $(
            $(#[doc = $doc])*
            #[repr(C $(, align($align))?)]
            #[derive(Debug, Clone, Copy, Default, PartialEq)]
            #[allow(rustdoc::broken_intra_doc_links, reason = "brackets give the shape of an array")]
            pub struct $name { $( $(#[doc = $text])* pub $field: $rust, )* }
        )*
        /// All blocks, in the order of `params.h`.
        const BLOCKS: &[Block] = &[$( Block {
            name: stringify!($name),
            size: size_of::<$name>(),
            doc: &[$($doc),*],
            fields: &[$( Field {
                name: stringify!($field),
                kind: $kind,
                count: <$rust as Count>::COUNT,
                #[cfg(test)]
                size: size_of::<$rust>(),
                doc: &[$($text),*],
            } ),*],
        } ),*];
    };
}

/// Appends the block's C++ text.
pub(super) fn write_block(text: &mut String, block: &Block) {
    text.push('\n');
    for line in block.doc {
        writeln!(text, "//{line}").expect("strings take all");
    }
    writeln!(text, "struct {} {{", block.name).expect("strings take all");
    for field in block.fields {
        let array = match field.count {
            0 => String::new(),
            n => format!("[{n}]"),
        };
        let declaration = format!("    {} {}{array};", field.kind, field.name);
        let doc = field.doc.concat();
        writeln!(text, "{declaration:<46} //{doc}").expect("strings take all");
    }
    let (name, size) = (block.name, block.size);
    writeln!(
        text,
        "}};\nstatic_assert(sizeof({name}) == {size}, \"params.rs\");"
    )
    .expect("strings take all");
}
