//! Fuzzes [`AttnState`]: which values it takes, and how two states merge, against f64.

use arbitrary::Unstructured;
use attn_core::{AttnState, Error};

use crate::{draw::Draw, hold};

/// The merge under test.
pub type Merge = fn(&mut AttnState, &AttnState) -> Result<(), Error>;

/// Draws states of hostile values; see the module.
///
/// # Errors
/// What does not hold.
pub fn fuzz(u: &mut Unstructured<'_>) -> Result<(), String> {
    fuzz_merge(u, AttnState::merge_state)
}

/// Fuzzes another merge in place of the library's.
///
/// # Errors
/// What does not hold.
pub fn fuzz_merge(u: &mut Unstructured<'_>, merge: Merge) -> Result<(), String> {
    let mut draw = Draw(u);
    if draw.once_in(8) {
        return sizes(&mut draw);
    }
    let (rows, dim) = (draw.range(0..=4), draw.pick(&[1, 2, 3, 8, 64]));
    let hostile = draw.once_in(2);
    let Some(a) = state(&mut draw, rows, dim, hostile)? else {
        return Ok(());
    };
    let other_rows = if draw.once_in(8) { rows + 1 } else { rows };
    let Some(b) = state(&mut draw, other_rows, dim, hostile)? else {
        return Ok(());
    };
    let mut joined = a.clone();
    if merge(&mut joined, &b).is_err() {
        hold!(rows != other_rows, "a merge of equal shapes is refused");
        hold!(
            bits(&joined) == bits(&a),
            "a refused merge changed the state"
        );
        return Ok(());
    }
    hold!(
        rows == other_rows,
        "a merge of {rows} and {other_rows} rows is taken"
    );
    check_merge(&a, &b, &joined)?;
    let mut reversed = b.clone();
    merge(&mut reversed, &a).map_err(|e| e.to_string())?;
    hold!(
        same_but_unseen(&reversed, &joined),
        "a merge depends on the order of two states: {a:?} {b:?}"
    );
    let empty = AttnState::empty(rows, dim).map_err(|e| e.to_string())?;
    let mut left = empty.clone();
    merge(&mut left, &a).map_err(|e| e.to_string())?;
    let mut right = a.clone();
    merge(&mut right, &empty).map_err(|e| e.to_string())?;
    for merged in [left, right] {
        hold!(
            same_but_unseen(&merged, &a),
            "an empty state changes {a:?} to {merged:?}"
        );
    }
    Ok(())
}

fn bits(state: &AttnState) -> Vec<u32> {
    let all = state.out().iter().chain(state.lse());
    all.map(|x| x.to_bits()).collect()
}

/// Equal bits, apart from outputs of rows that saw no token.
fn same_but_unseen(merged: &AttnState, state: &AttnState) -> bool {
    let dim = state.out().len() / state.lse().len().max(1);
    let rows = state.lse().iter().zip(merged.lse()).enumerate();
    rows.fold(true, |same, (i, (a, b))| {
        let row = |s: &AttnState| -> Vec<u32> {
            s.out()[i * dim..][..dim]
                .iter()
                .map(|x| x.to_bits())
                .collect()
        };
        let unseen = *a == f32::NEG_INFINITY;
        same && a.to_bits() == b.to_bits() && (unseen || row(state) == row(merged))
    })
}

/// A state of drawn values, where they are allowed; checks that exactly those are taken.
fn state(
    draw: &mut Draw<'_, '_>,
    rows: usize,
    dim: usize,
    hostile: bool,
) -> Result<Option<AttnState>, String> {
    let next = |draw: &mut Draw<'_, '_>| {
        if hostile && draw.once_in(3) {
            draw.float()
        } else {
            draw.small()
        }
    };
    let mut lse: Vec<f32> = (0..rows).map(|_| next(draw) * 8.0).collect();
    let mut out: Vec<f32> = (0..rows * dim).map(|_| next(draw)).collect();
    for (i, x) in lse.iter_mut().enumerate() {
        if draw.once_in(6) {
            *x = f32::NEG_INFINITY;
            out[i * dim..][..dim].fill(0.0);
        }
    }
    if draw.once_in(16) {
        out.push(0.0);
    }
    let fits = out.len() == rows * dim;
    let allowed = lse.iter().all(|x| *x < f32::INFINITY)
        && out.iter().all(|x| x.abs() <= f32::powi(2.0, 126));
    let text = format!("{dim} {out:?} {lse:?}");
    match AttnState::new(dim, out, lse) {
        Ok(state) => {
            hold!(fits && allowed, "taken: {text}");
            Ok(Some(state))
        }
        Err(Error::Length { .. }) if !fits => Ok(None),
        Err(error) => {
            hold!(!allowed, "refused with `{error}`: {text}");
            Ok(None)
        }
    }
}

/// Compares each row with the f64 sum of both sides by their weights.
fn check_merge(a: &AttnState, b: &AttnState, joined: &AttnState) -> Result<(), String> {
    let rows = a.lse().len();
    let dim = a.out().len().checked_div(rows).unwrap_or(0);
    for r in 0..rows {
        let [la, lb, got] = [a, b, joined].map(|s| f64::from(s.lse()[r]));
        if la.max(lb) == f64::NEG_INFINITY {
            hold!(got == f64::NEG_INFINITY, "two empty rows have lse {got}");
            continue;
        }
        let max = la.max(lb);
        let (wa, wb) = ((la - max).exp(), (lb - max).exp());
        let want = max + (wa + wb).ln();
        let slack = 2e-6 * want.abs().max(1.0);
        hold!(
            (got - want).abs() <= slack,
            "lse of {la} and {lb} is {got}, not {want}"
        );
        for d in 0..dim {
            let [x, y, got] = [a, b, joined].map(|s| f64::from(s.out()[r * dim + d]));
            let want = (x * wa + y * wb) / (wa + wb);
            let size = [x, y].into_iter().zip([la, lb]);
            let size = size.filter(|(_, l)| *l > f64::NEG_INFINITY);
            let size = size.map(|(x, _)| x.abs()).fold(0.0, f64::max);
            let slack = size * 1e-6 + 1e-37;
            hold!(
                (got - want).abs() <= slack,
                "out of {x} ({la}) and {y} ({lb}) is {got}, not {want}"
            );
        }
    }
    Ok(())
}

/// Shapes whose products overflow.
fn sizes(draw: &mut Draw<'_, '_>) -> Result<(), String> {
    let (dim, lse) = (draw.size(), vec![0.0; draw.range(0..=3)]);
    let given = draw.range(0..=8);
    let fits = dim > 0 && lse.len().checked_mul(dim) == Some(given);
    let made = AttnState::new(dim, vec![0.0; given], lse.clone());
    hold!(
        made.is_ok() == fits,
        "{given} outputs for {} rows of {dim}: {made:?}",
        lse.len()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finds(merge: Merge) -> bool {
        crate::finds(2000, fuzz, |u| fuzz_merge(u, merge))
    }

    fn rebuilt(state: &AttnState, out: Vec<f32>, lse: Vec<f32>) -> AttnState {
        let dim = if state.lse().is_empty() {
            0
        } else {
            out.len() / lse.len()
        };
        AttnState::new(dim, out, lse).unwrap_or_else(|_| state.clone())
    }

    #[test]
    fn a_merge_with_exchanged_weights_is_found() {
        assert!(finds(|a, b| {
            let (mut x, mut y) = (a.clone(), b.clone());
            if a.lse().len() == b.lse().len() && !a.lse().is_empty() {
                x = rebuilt(a, a.out().to_vec(), b.lse().to_vec());
                y = rebuilt(b, b.out().to_vec(), a.lse().to_vec());
            }
            x.merge_state(&y)?;
            *a = x;
            Ok(())
        }));
    }

    #[test]
    fn a_merge_that_loses_a_bit_of_the_lse_is_found() {
        assert!(finds(|a, b| {
            a.merge_state(b)?;
            let lse = a.lse().iter().map(|x| x * 1.0001).collect();
            *a = rebuilt(a, a.out().to_vec(), lse);
            Ok(())
        }));
    }
}
