//! Rows of tables of pages at any strides that Python's arrays have: where launches read them, and which are refused.

#[path = "../src/native/table_rows.rs"]
mod table_rows;

use table_rows::{rows_apart, rows_side_by_side};

#[test]
fn rows_of_a_wider_table_are_read_at_its_stride_and_a_single_row_at_any() {
    for (shape, stride, read, apart) in [
        ([3, 5], 5, 3, 5),
        ([3, 5], 9, 3, 9),
        // More rows than sequences.
        ([7, 5], 9, 3, 9),
        ([1, 5], 0, 1, 5),
        ([1, 5], 1, 1, 5),
        ([4, 5], 9, 1, 5),
        ([0, 5], 5, 0, 5),
        ([3, 0], 1, 3, 1),
    ] {
        let given = rows_apart("page_table", shape, stride, read);
        assert_eq!(given, Ok(apart), "{shape:?} {stride} {read}");
    }
}

#[test]
fn rows_that_overlap_or_are_missing_are_refused_with_what_is_allowed() {
    // An expanded row, a table seen through a sliding window, one that runs backwards.
    for stride in [0, 1, 4, -5] {
        let said = rows_apart("page_table", [3, 5], stride, 3).unwrap_err();
        let given = format!("page_table has the shape [3, 5] and rows {stride} entries apart");
        assert!(said.starts_with(&given), "{said}");
        assert!(said.contains("allowed: 5 or more"), "{said}");
    }
    let said = rows_apart("page_table", [2, 5], 5, 3).unwrap_err();
    assert_eq!(said, "page_table has 2 rows, but the plan has 3 sequences");
}

/// Launches take the last pages' slots, a ring, for all entries of a row behind the first pages'.
#[test]
fn rows_of_residual_pages_lie_side_by_side() {
    let columns = |shape, stride, read| rows_side_by_side("residual_pages", shape, stride, read);
    assert_eq!(columns([3, 5], 5, 3), Ok(5));
    assert_eq!(columns([1, 5], 9, 1), Ok(5));
    let said = columns([3, 5], 9, 3).unwrap_err();
    assert!(said.contains("rows 9 entries apart; allowed: 5"), "{said}");
    assert!(columns([3, 5], 0, 3).unwrap_err().contains("overlap"));
}
