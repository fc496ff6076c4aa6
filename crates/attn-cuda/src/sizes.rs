//! Numbers that callers give, on their way into kernels' parameters: products that do not wrap, conversions that do not cut.

use attn_core::Error;

/// The product of `factors`.
///
/// # Errors
/// [`Error::Parameter`] for `what` if it needs more than 64 bits.
pub fn product(what: &'static str, factors: &[usize]) -> Result<usize, Error> {
    let product = factors.iter().try_fold(1usize, |p, n| p.checked_mul(*n));
    product.ok_or_else(|| {
        let factors: Vec<String> = factors.iter().map(usize::to_string).collect();
        let allowed = "less than 2^64; decode fewer sequences or make a smaller cache";
        Error::parameter(what, format_args!("{}", factors.join(" · ")), allowed)
    })
}

/// `n` as the kernels take counts.
///
/// # Errors
/// [`Error::Parameter`] for `what` if `n` needs more than 31 bits.
pub(crate) fn int(what: &'static str, n: usize) -> Result<i32, Error> {
    i32::try_from(n).map_err(|_| {
        Error::parameter(
            what,
            n,
            "at most 2147483647, which is what CUDA kernels count to",
        )
    })
}

/// Entries of the second and of the third axis of a CUDA grid.
const GRID_ROWS: usize = 65_535;

/// Refuses a launch with more of `what` than an axis of its grid has room for. `allowed` names the limit, 65535, and the next step.
///
/// # Errors
/// [`Error::Parameter`].
pub(crate) fn check_grid(what: &'static str, n: usize, allowed: &'static str) -> Result<(), Error> {
    if n > GRID_ROWS {
        return Err(Error::parameter(what, n, allowed));
    }
    Ok(())
}

/// Refuses more KV heads than an append launch has room for.
pub(crate) fn check_heads(num_kv_heads: usize) -> Result<(), Error> {
    let allowed = "1 to 65535 on CUDA, whose grids have no more rows";
    check_grid("num_kv_heads", num_kv_heads, allowed)
}

/// A length to count down to or a limit to compare with: what needs more than 31 bits is the largest that kernels know.
pub(crate) fn int_limit(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// An axis of a grid: what needs more than 32 bits becomes a size that the driver refuses.
pub(crate) fn axis(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Strides as the kernels take them. One that needs more than 63 bits lies along an axis with one entry, and is multiplied by 0 alone:
/// no memory has a second entry that far away.
pub(crate) fn strides<const N: usize>(of: [usize; N]) -> [i64; N] {
    of.map(|stride| i64::try_from(stride).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_that_wrap_are_refused() {
        assert_eq!(product("x", &[]).unwrap(), 1);
        assert_eq!(product("x", &[1 << 31, 1 << 32]).unwrap(), 1 << 63);
        assert_eq!(product("x", &[0, usize::MAX]).unwrap(), 0);
        // A pool of 2^31 pages of 2^33 bytes.
        let error = product("page pool", &[1 << 31, 1 << 33]).unwrap_err();
        let said = error.to_string();
        assert!(
            said.contains("page pool") && said.contains("2147483648 · 8589934592"),
            "{said}"
        );
    }

    #[test]
    fn more_than_an_axis_of_a_grid_has_room_for_is_refused() {
        check_grid("sequences", 65_535, "at most 65535").unwrap();
        for (n, given) in [(65_536, "65536"), (usize::MAX, "2^64 - 1")] {
            let said = check_grid("sequences", n, "at most 65535").unwrap_err();
            let given = format!("sequences is {given}");
            assert!(said.to_string().contains(&given), "{said}");
        }
    }

    #[test]
    fn more_heads_than_a_grid_has_rows_are_refused() {
        check_heads(65_535).unwrap();
        assert!(check_heads(65_536).is_err());
    }

    #[test]
    fn conversions_keep_the_number_or_refuse_it() {
        assert_eq!(int("x", i32::MAX as usize).unwrap(), i32::MAX);
        for n in [1 << 31, (1 << 32) + 7, usize::MAX] {
            assert!(matches!(
                int("tokens", n),
                Err(Error::Parameter { what: "tokens", .. })
            ));
            assert_eq!(int_limit(n), i32::MAX);
        }
        assert_eq!((int_limit(5), axis(5), axis(1 << 32)), (5, 5, u32::MAX));
        assert_eq!(strides([1, 1 << 63, usize::MAX]), [1, i64::MAX, i64::MAX]);
    }
}
