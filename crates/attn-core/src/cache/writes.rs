//! What backends whose kernels and copies check no address compare before they write tokens, and before they read or write pages.

use super::TokenWrite;
use crate::{
    error::{Error, refuse},
    format::Window,
    layout::PageLayout,
};

/// For backends: the tokens of K and V of these shapes, `[tokens, num_kv_heads, head_dim]` with K's and V's own head_dim.
///
/// # Errors
/// [`Error::Shape`] for other heads than the layout's, and for another number of tokens of V than of K.
pub fn tokens_of(layout: &PageLayout, rows: [[usize; 3]; 2]) -> Result<usize, Error> {
    let tokens = rows[0][0];
    let shapes = rows.into_iter().zip(layout.shapes(tokens));
    for (what, (given, needed)) in ["k", "v"].into_iter().zip(shapes) {
        if given != needed {
            return Err(Error::Shape {
                what,
                given,
                needed,
            });
        }
    }
    Ok(tokens)
}

/// For backends: refuses writes that would lead a kernel outside of its buffers.
///
/// # Errors
/// [`Error::Parameter`] for pages that a pool of `num_pages` lacks, tokens that a page lacks, sources beyond the `tokens` tokens of K and V, and residual pages that the
/// format lacks.
pub fn check_writes(
    layout: &PageLayout,
    num_pages: usize,
    writes: &[TokenWrite],
    tokens: usize,
) -> Result<(), Error> {
    let has_residuals = layout.format().window() != Window::None;
    for write in writes {
        let pages = [Some(write.page), write.residual_page];
        if let Some(page) = pages.iter().flatten().find(|p| **p as usize >= num_pages) {
            let given = format_args!("{page} of {num_pages}");
            return refuse("page to write", given, "a page of the pool");
        }
        let residual = write.residual_page;
        if residual == Some(write.page) || residual.is_some() && !has_residuals {
            let given = format_args!("{residual:?} beside page {}", write.page);
            let allowed = "another page where the format keeps residuals, else none";
            return refuse("residual page", given, allowed);
        }
        if write.token >= layout.page_size() {
            let given = format_args!("{} of {}", write.token, layout.page_size());
            return refuse("token to write", given, "a token of the page");
        }
        if write.source >= tokens {
            let given = format_args!("{} of {tokens}", write.source);
            return refuse("source of a token", given, "a token of k and v");
        }
    }
    Ok(())
}

/// For backends: refuses pages that a pool of `num_pages` lacks, and other than their `bytes`.
///
/// # Errors
/// [`Error::Parameter`] for a page outside of the pool; [`Error::Length`].
pub fn check_pages(
    layout: &PageLayout,
    num_pages: usize,
    pages: &[u32],
    bytes: usize,
) -> Result<(), Error> {
    if let Some(page) = pages.iter().find(|page| **page as usize >= num_pages) {
        let given = format_args!("{page} of {num_pages}");
        return refuse("page", given, "a page of the pool, counted from 0");
    }
    let needed = pages.len().saturating_mul(layout.page_bytes());
    if bytes != needed {
        return Err(Error::Length {
            what: "page bytes",
            given: bytes,
            needed,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cache::{Append, KvCache},
        cache_config::CacheConfig,
        format::KvFormat,
        host_pages::HostPages,
        problem::Heads,
    };

    /// Where 72 tokens go, behind 60 of the same sequence, in a pool of 6 pages of 64 tokens.
    fn writes(format: KvFormat) -> (PageLayout, Vec<TokenWrite>) {
        let heads = Heads::new(1, 1, 64);
        let builder = CacheConfig::builder(format, heads).centres(false);
        let config = builder.page_size(64).pages(6).build();
        let pages = HostPages::new(&config).unwrap();
        let mut cache = KvCache::new(config, Box::new(pages)).unwrap();
        let mut all = Vec::new();
        for tokens in [60, 72] {
            let append = Append {
                sequence: 0,
                tokens,
            };
            let noted = cache.append_with(&[append], |_, writes| {
                all = writes.to_vec();
                Ok(())
            });
            noted.unwrap();
        }
        (*cache.layout(), all)
    }

    #[test]
    fn writes_outside_the_pool_or_the_sources_are_refused() {
        type Spoil = fn(&mut TokenWrite);
        for format in [KvFormat::INT8, KvFormat::INT4] {
            let (layout, all) = writes(format);
            let pages = 6;
            check_writes(&layout, pages, &all, 72).unwrap();
            let mut spoils: Vec<(&str, Spoil)> = vec![
                ("page to write", |write| write.page = 6),
                ("page to write", |write| write.page = u32::MAX),
                ("page to write", |write| write.residual_page = Some(6)),
                ("residual page", |write| {
                    write.residual_page = Some(write.page)
                }),
                ("token to write", |write| write.token = 64),
                ("token to write", |write| write.token = usize::MAX),
                ("source of a token", |write| write.source = 72),
                ("source of a token", |write| write.source = usize::MAX),
            ];
            if format == KvFormat::INT8 {
                spoils.push(("residual page", |write| {
                    write.residual_page = Some(5 - write.page);
                }));
            }
            for (i, (refused, spoil)) in spoils.into_iter().enumerate() {
                for at in [0, 40, 71] {
                    let mut all = all.clone();
                    spoil(&mut all[at]);
                    match check_writes(&layout, pages, &all, 72) {
                        Err(Error::Parameter { what, .. }) => assert_eq!(what, refused, "{i}"),
                        other => panic!("{refused} {i} of token {at}: {other:?}"),
                    }
                }
            }
        }
    }

    #[test]
    fn k_and_v_are_whole_tokens_of_one_count() {
        let layout = PageLayout::new(KvFormat::INT8, 64, 64, 1).unwrap();
        assert_eq!(tokens_of(&layout, [[2, 1, 64]; 2]).unwrap(), 2);
        for (k, v, refused) in [
            ([1, 2, 64], [1, 2, 64], "k"),
            ([2, 1, 32], [2, 1, 32], "k"),
            ([2, 1, 64], [1, 1, 64], "v"),
            ([1, 1, 64], [2, 1, 64], "v"),
        ] {
            match tokens_of(&layout, [k, v]) {
                Err(Error::Shape { what, .. }) => assert_eq!(what, refused),
                other => panic!("{k:?}, {v:?}: {other:?}"),
            }
        }
        let layout = PageLayout::new(KvFormat::INT8, (192, 128), 64, 1).unwrap();
        assert_eq!(tokens_of(&layout, [[2, 1, 192], [2, 1, 128]]).unwrap(), 2);
        assert!(tokens_of(&layout, [[2, 1, 192]; 2]).is_err());
        assert!(tokens_of(&layout, [[2, 1, 128]; 2]).is_err());
    }

    #[test]
    fn pages_are_in_the_pool_and_have_their_bytes() {
        let layout = PageLayout::new(KvFormat::INT8, 64, 64, 1).unwrap();
        let size = layout.page_bytes();
        let check = |pages: &[u32], bytes| check_pages(&layout, 3, pages, bytes);
        check(&[2, 0], 2 * size).unwrap();
        check(&[], 0).unwrap();
        for bytes in [0, size, 2 * size - 1, 3 * size] {
            let refused = check(&[2, 0], bytes).unwrap_err();
            assert!(matches!(refused, Error::Length { .. }), "{refused}");
        }
        for page in [3, u32::MAX] {
            let refused = check(&[0, page], 2 * size).unwrap_err();
            assert!(matches!(refused, Error::Parameter { .. }), "{refused}");
        }
    }
}
