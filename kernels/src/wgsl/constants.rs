//! The constants that every kernel on pages of a layout has, and the text of a kernel.

use std::sync::LazyLock;

use attn_core::{HeadDim, Int8Scale, KvFormat, PageLayout, Scheme, layout::Side};

use super::{
    params::{AppendParams, ArithmeticParams, CentreParams, DecodeParams},
    specialise::{Constants, SpecialiseError, specialise},
};

/// The names of the schemes in the kernels; a scheme's number is its place here.
const SCHEMES: [&str; 8] = [
    "TOKEN", "G32", "TENSOR", "GROUPS", "STEPS", "F16", "BF16", "FP8",
];

/// The number of a scheme in the kernels, where rotated int8 is int8 of other rows.
fn scheme_number(scheme: Scheme) -> usize {
    match scheme {
        Scheme::Int8(Int8Scale::Token) | Scheme::RotatedInt8 => 0,
        Scheme::Int8(Int8Scale::Group32) => 1,
        Scheme::Int8(Int8Scale::Tensor) => 2,
        Scheme::Int4(_) => 3,
        Scheme::RotatedInt4 { .. } => 4,
        Scheme::F16 => 5,
        Scheme::Bf16 => 6,
        Scheme::Fp8E4m3 => 7,
    }
}

/// Stages of butterflies that rotate a row by blocks; none where it is not rotated.
fn strides(block: Option<usize>) -> usize {
    block.map_or(0, |block| block.ilog2() as usize)
}

/// Sets constants by name.
pub(super) fn set(constants: &mut Constants, values: &[(&str, usize)]) {
    let values = values
        .iter()
        .map(|(name, x)| ((*name).to_owned(), *x as i64));
    constants.extend(values);
}

/// The constants that every kernel on pages of this layout has; kernels address a page by one KV head's run.
///
/// # Panics
/// For a layout that no page can have: keys are made of checked problems and caches.
pub(super) fn layout_constants(format: KvFormat, head_dim: HeadDim, page_size: usize) -> Constants {
    let layout = PageLayout::new(format, head_dim, page_size, 1);
    let layout = layout.expect("kernels are chosen for checked layouts");
    let (k, v) = (format.k, format.v);
    let [k_block, v_block] = format.rotated_blocks(head_dim);
    let [k_groups, v_groups] = format.groups(head_dim);
    let query_parts = format.query_parts(head_dim).count();
    let v_residuals = layout.residual(Side::V).map_or(0, |part| part.codes.start);
    let mut constants = Constants::new();
    for (number, name) in SCHEMES.iter().enumerate() {
        constants.insert((*name).to_owned(), number as i64);
    }
    set(
        &mut constants,
        &[
            ("KD", head_dim.k),
            ("VD", head_dim.v),
            ("PS", page_size),
            ("UNITS", head_dim.k / 16),
            ("K", scheme_number(k)),
            ("V", scheme_number(v)),
            ("K_BITS", k.code_bits()),
            ("V_BITS", v.code_bits()),
            ("KG", k_groups.count()),
            ("VG", v_groups.count()),
            ("K_GROUP_DIMS", k_groups.dims()),
            ("V_GROUP_DIMS", v_groups.dims()),
            ("QUERY_PARTS", query_parts),
            ("K_SCALED", usize::from(k.has_row_scales())),
            ("V_SCALED", usize::from(v.has_row_scales())),
            ("K_STRIDES", strides(k_block)),
            ("V_STRIDES", strides(v_block)),
            ("LATENTS", usize::from(format.latents)),
            ("K_WINDOW", k.window().tiles()),
            ("V_WINDOW", v.window().tiles()),
            ("V_RESIDUALS", v_residuals / 16),
            (
                "FIRST_RESIDUAL_PAGES",
                format.first_residual_pages(page_size),
            ),
            ("RUN_VECS", layout.run_bytes() / 16),
            ("K_PARAMS", layout.k_params().start / 4),
            ("V_CODES", layout.v_codes().start / 16),
            ("V_PARAMS", layout.v_params().start / 4),
        ],
    );
    constants
}

/// A file of `kernels/wgsl`, or a parameter block, whose text `params.rs` makes.
fn source(name: &str) -> Option<&'static str> {
    static BLOCKS: LazyLock<[(&str, String); 4]> = LazyLock::new(|| {
        [
            ("decode_params", DecodeParams::wgsl()),
            ("append_params", AppendParams::wgsl()),
            ("centre_params", CentreParams::wgsl()),
            ("arithmetic_params", ArithmeticParams::wgsl()),
        ]
    });
    let block = BLOCKS.iter().find(|(block, _)| *block == name);
    let file = || crate::WGSL.iter().find(|(file, _)| *file == name);
    match block {
        Some((_, text)) => Some(text),
        None => file().map(|(_, text)| *text),
    }
}

/// The text of a kernel with these constants.
///
/// # Errors
/// [`SpecialiseError`] for a mistake in the text.
pub fn kernel_text(file: &str, constants: &Constants) -> Result<String, SpecialiseError> {
    specialise(file, constants, &source)
}
