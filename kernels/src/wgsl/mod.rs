//! The host's side of `kernels/wgsl`: which constants a problem specialises a kernel with, and the parameter blocks.
//!
//! Reading order: [`specialise`](mod@specialise) (the preprocessor), [`constants`], [`params`], [`split`], [`decode`], [`append`].

pub mod append;
pub mod constants;
pub mod decode;
pub mod params;
pub mod specialise;
pub mod split;

pub use constants::kernel_text;
pub use specialise::{Constants, SpecialiseError, specialise};

/// The text of `read.wgsl`, the kernel that only reads.
///
/// # Errors
/// [`SpecialiseError`] for a mistake in the text.
pub fn read_text() -> Result<String, SpecialiseError> {
    kernel_text("read.wgsl", &Constants::new())
}

/// The text of `check_arithmetic.wgsl`, the kernel that evaluates the functions of `arithmetic.wgsl`.
///
/// # Errors
/// [`SpecialiseError`] for a mistake in the text.
pub fn arithmetic_text() -> Result<String, SpecialiseError> {
    kernel_text("check_arithmetic.wgsl", &Constants::new())
}

#[cfg(test)]
mod dump_tmp {
    use super::{append::AppendKey, decode::*, *};
    use attn_core::{KvFormat, Problem, Scheme};
    fn each_decode(
        problem: &Problem,
        format: KvFormat,
        page_size: usize,
        pools: usize,
        each: &mut impl FnMut(&str, &str),
    ) {
        let viewed = [format.k, format.v]
            .iter()
            .all(|scheme| !matches!(scheme, Scheme::Int4(_)));
        let views = [false, true].into_iter().filter(|view| viewed || !view);
        for (view, shared_bytes) in views.flat_map(|view| [16384, 32768].map(|bytes| (view, bytes)))
        {
            let layout = KvLayout {
                format,
                page_size,
                pools,
                view,
            };
            let mut tuning = Tuning::default();
            tuning.by_tiles = Some(view);
            let key = decode_key(problem, layout, shared_bytes, &tuning);
            for name in ["decode_split", "decode_merge"] {
                let text = decode_text(&format!("{name}.wgsl"), &key).unwrap();
                each(&format!("{name} for {key:?}"), &text);
            }
        }
    }
    #[test]
    fn dump() {
        let dir = std::env::var("ATTN_DUMP").unwrap();
        let mut n = 0;
        let mut each = |name: &str, text: &str| {
            n += 1;
            std::fs::write(format!("{dir}/{n:05}.wgsl"), format!("// {name}\n{text}")).unwrap();
        };
        each("law.wgsl", &arithmetic_text().unwrap());
        each("read.wgsl", &read_text().unwrap());
        let shapes = [
            (64, 128, 8),
            (80, 64, 1),
            (96, 64, 2),
            (128, 64, 8),
            (192, 32, 4),
            (256, 16, 8),
            (256, 64, 8),
        ];
        let formats = Scheme::ALL.map(|k| Scheme::ALL.map(|v| KvFormat { k, v }));
        for (i, format) in formats.into_iter().flatten().enumerate() {
            for (head_dim, page_size, rows) in
                shapes.into_iter().cycle().skip(i % 7).step_by(2).take(3)
            {
                if format.check(head_dim, page_size).is_err() {
                    continue;
                }
                let pools = 1 + rows / 4;
                let key = AppendKey {
                    format,
                    head_dim,
                    page_size,
                    pools,
                };
                each(&format!("append.wgsl for {key:?}"), &key.text().unwrap());
                let mut problem = Problem::new(rows, 1, head_dim, vec![1]);
                if rows == 2 {
                    problem.softcap = Some(1.0);
                    problem.alibi_slopes = Some(vec![1.0; 2]);
                }
                each_decode(&problem, format, page_size, pools, &mut each);
            }
        }
    }
}
