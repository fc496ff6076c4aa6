//! How far the rows of a table of pages lie apart, which launches take as one number.

/// Entries from one row of a table `[rows, columns]` to the next, of which a launch reads the first `read` rows. `stride` is what the array says.
///
/// # Errors
/// What to tell of a table with fewer rows, or of rows that overlap.
pub fn rows_apart(
    what: &str,
    shape: [usize; 2],
    stride: i64,
    read: usize,
) -> Result<usize, String> {
    let [rows, columns] = shape;
    if rows < read {
        return Err(format!(
            "{what} has {rows} rows, but the plan has {read} sequences"
        ));
    }
    // The stride of a single row says nothing.
    if read <= 1 {
        return Ok(columns);
    }
    match usize::try_from(stride) {
        Ok(stride) if stride >= columns => Ok(stride),
        _ => Err(format!(
            "{what} has the shape {shape:?} and rows {stride} entries apart, which overlap; allowed: {columns} or more, as `.contiguous()` gives"
        )),
    }
}

/// As [`rows_apart`], of a table whose columns a launch counts by the same number: rows lie side by side.
///
/// # Errors
/// Those of [`rows_apart`], and what to tell of rows that lie further apart.
pub fn rows_side_by_side(
    what: &str,
    shape: [usize; 2],
    stride: i64,
    read: usize,
) -> Result<usize, String> {
    let apart = rows_apart(what, shape, stride, read)?;
    if apart == shape[1] {
        return Ok(apart);
    }
    Err(format!(
        "{what} has the shape {shape:?} and rows {apart} entries apart; allowed: {}, side by side, as `.contiguous()` gives",
        shape[1]
    ))
}
