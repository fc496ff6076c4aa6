//! Unfinished attention over a shard of a sequence's tokens, and what finishes it: the bits of one device over all tokens.

use crate::{
    error::{ElementIndex, Error, filled, refuse},
    format::KvFormat,
    layout::Side,
    problem::Problem,
    row_state::{self, RowEnd},
    segments::num_spans,
};

/// The states of the spans of a shard, for each row of a problem: `(m, l, O)` of `docs/arithmetic.md`, in base 2, before the epilogue.
///
/// A shard is a run of whole spans of 1024 tokens of a sequence, but for the last, and a problem of its own
/// ([`Problem::tokens_after`]). What it hands over are its spans' states, not one state: a device merges spans one after the other, and
/// sums that are rounded depend on their order. [`SpanStates::finish`] makes the same merges over all shards. [`DecodeAttention::attend_spans`](crate::DecodeAttention::attend_spans)
/// makes such states in host memory, and the native entry of `attn-cuda` in a GPU's, in the same layout.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanStates {
    rows: usize,
    head_dim: usize,
    /// `[span][row][2]`.
    max_sums: Vec<f32>,
    /// `[span][row][head_dim]`.
    o: Vec<f32>,
}

impl SpanStates {
    /// `max_sums` are m and l, `[spans][rows][2]`, and `o` is `[spans][rows][head_dim]`. A row that sees no token of a span has −∞ for m there; its l
    /// and O count nothing. Spans behind the end of a sequence are such ones.
    ///
    /// # Errors
    /// [`Error::Length`] for other numbers than whole spans; [`Error::NotFinite`] for numbers that no state has; [`Error::Parameter`] for sizes whose
    /// products exceed 64 bits.
    pub fn new(
        rows: usize,
        head_dim: usize,
        max_sums: Vec<f32>,
        o: Vec<f32>,
    ) -> Result<Self, Error> {
        check_sizes(rows, head_dim)?;
        let of_span = 2 * rows;
        let spans = max_sums.len().checked_div(of_span).unwrap_or(0);
        let length = |what, given, needed| Error::Length {
            what,
            given,
            needed,
        };
        if max_sums.len() != spans * of_span {
            let needed = spans.saturating_add(1).saturating_mul(of_span);
            return Err(length("max_sums", max_sums.len(), needed));
        }
        let needed = spans.saturating_mul(rows).saturating_mul(head_dim);
        if o.len() != needed {
            return Err(length("o", o.len(), needed));
        }
        for (i, ml) in max_sums.chunks_exact(2).enumerate() {
            let is_seen = ml[0] != f32::NEG_INFINITY;
            if let Some(k) = ml.iter().position(|x| is_seen && !x.is_finite()) {
                return Err(Error::NotFinite {
                    what: "max_sums",
                    at: ElementIndex::Flat(2 * i + k),
                    value: ml[k],
                });
            }
            let row = &o[i * head_dim..][..head_dim];
            if let Some(k) = row.iter().position(|x| is_seen && !x.is_finite()) {
                return Err(Error::NotFinite {
                    what: "o",
                    at: ElementIndex::Flat(i * head_dim + k),
                    value: row[k],
                });
            }
        }
        Ok(SpanStates {
            rows,
            head_dim,
            max_sums,
            o,
        })
    }

    /// States of a problem's rows, as many as its longest sequence has spans, that have seen no token yet: for a backend to fill
    /// ([`SpanStates::set`]).
    ///
    /// # Errors
    /// Those of [`Problem::check`]; [`Error::OutOfMemory`].
    pub fn unseen(problem: &Problem) -> Result<Self, Error> {
        problem.check()?;
        let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
        Self::empty(num_spans(longest), problem.rows(), problem.head_dim.v)
    }

    fn empty(spans: usize, rows: usize, head_dim: usize) -> Result<Self, Error> {
        check_sizes(rows, head_dim)?;
        let states = spans.saturating_mul(rows);
        let mut max_sums = filled("maxima and sums of spans", states.saturating_mul(2), 0.0)?;
        max_sums
            .chunks_exact_mut(2)
            .for_each(|ml| ml[0] = f32::NEG_INFINITY);
        Ok(SpanStates {
            rows,
            head_dim,
            max_sums,
            o: filled("states of spans", states.saturating_mul(head_dim), 0.0)?,
        })
    }

    /// Spans.
    #[must_use]
    pub fn spans(&self) -> usize {
        self.max_sums.len().checked_div(2 * self.rows).unwrap_or(0)
    }

    /// Rows: query tokens times query heads.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// m and l, `[spans][rows][2]`.
    #[must_use]
    pub fn max_sums(&self) -> &[f32] {
        &self.max_sums
    }

    /// O, `[spans][rows][head_dim]`.
    #[must_use]
    pub fn o(&self) -> &[f32] {
        &self.o
    }

    /// Writes the states to memory for those of as many spans or more, `[spans][rows][2]` and `[spans][rows][head_dim]`; the spans behind these see no token.
    ///
    /// # Errors
    /// [`Error::Length`] for less memory; nothing is written then.
    pub fn write(&self, max_sums: &mut [f32], o: &mut [f32]) -> Result<(), Error> {
        let all = [
            ("max_sums", max_sums, self.max_sums(), f32::NEG_INFINITY),
            ("o", o, self.o(), 0.0),
        ];
        for (what, room, states, _) in &all {
            if room.len() < states.len() {
                return Err(Error::Length {
                    what,
                    given: room.len(),
                    needed: states.len(),
                });
            }
        }
        for (_, room, states, unseen) in all {
            let (seen, others) = room.split_at_mut(states.len());
            seen.copy_from_slice(states);
            others.fill(unseen);
        }
        Ok(())
    }

    /// For backends: sets a row's state of a span, `[m, l]` and O.
    ///
    /// # Panics
    /// If there is no such span or row, or O has another length than head_dim.
    pub fn set(&mut self, span: usize, row: usize, max_sum: [f32; 2], o: &[f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert!(span < self.spans(), "span {span} of {}", self.spans());
        let at = span * self.rows + row;
        self.max_sums[2 * at..][..2].copy_from_slice(&max_sum);
        self.o[at * self.head_dim..][..self.head_dim].copy_from_slice(o);
    }

    /// Merges the spans' states of all shards in their order, then each row's sink, and writes every element of `out` `[query tokens, num_q_heads, head_dim]`
    /// and `lse` `[query tokens, num_q_heads]`: the bits of one device over all tokens, for integer formats on any backend, where the shards are a
    /// sequence's tokens in order and each but the last is of whole spans.
    ///
    /// `problem` is that of any shard or of the whole: its rows and sinks count. `v_tensor_scales` are those of formats with static scales, else empty.
    ///
    /// # Errors
    /// [`Error::Length`] for shards and outputs of other rows than the problem's; those of [`Scheme::check_scales`](crate::Scheme::check_scales) for V's scales.
    /// Nothing is written then.
    pub fn finish(
        shards: &[SpanStates],
        problem: &Problem,
        format: KvFormat,
        v_tensor_scales: &[f32],
        (out, lse): (&mut [f32], &mut [f32]),
    ) -> Result<(), Error> {
        problem.check()?;
        let (rows, dim) = (problem.rows(), problem.head_dim.v);
        format
            .v
            .check_scales(Side::V, v_tensor_scales, problem.num_kv_heads)?;
        let mut lengths = vec![
            ("out", out.len(), problem.out_elements()),
            ("lse", lse.len(), rows),
        ];
        for shard in shards {
            lengths.push(("rows of a shard", shard.rows, rows));
            lengths.push(("head_dim of a shard", shard.head_dim, dim));
        }
        if let Some((what, given, needed)) = lengths.into_iter().find(|x| x.1 != x.2) {
            return Err(Error::Length {
                what,
                given,
                needed,
            });
        }
        for (row, (out, lse)) in out.chunks_exact_mut(dim).zip(lse).enumerate() {
            let head = row % problem.num_q_heads;
            let scale = v_tensor_scales.get(head / problem.heads_per_kv());
            let end = RowEnd {
                sink: problem.scores.sinks.as_ref().map(|sinks| sinks[head]),
                v_tensor_scale: scale.copied().unwrap_or(1.0),
                rotated: format.rotated_blocks(problem.head_dim)[1],
            };
            let mut state = [f32::NEG_INFINITY, 0.0];
            for shard in shards {
                for span in 0..shard.spans() {
                    let at = span * rows + row;
                    let ml = [shard.max_sums[2 * at], shard.max_sums[2 * at + 1]];
                    row_state::merge(&mut state, out, ml, &shard.o[at * dim..][..dim]);
                }
            }
            *lse = row_state::finish(state, out, end);
        }
        Ok(())
    }
}

/// Refuses sizes whose products exceed 64 bits, also where there is no span: places of states are counted in these products.
fn check_sizes(rows: usize, head_dim: usize) -> Result<(), Error> {
    match rows.checked_mul(head_dim.max(2)) {
        Some(_) => Ok(()),
        None => refuse(
            "the shape of a span's states",
            format_args!("{rows} rows of {head_dim} elements"),
            "rows whose elements a slice of less than 2^64 can hold",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Heads, Scheme};

    const NONE: f32 = f32::NEG_INFINITY;

    fn problem() -> Problem {
        let heads = Heads::new(2, 1, 64);
        Problem::new(heads, [1])
    }

    /// One row of every dim alike beside one that sees nothing.
    fn state(spans: &[(f32, f32, f32)]) -> SpanStates {
        let mut all = SpanStates::empty(spans.len(), 2, 64).unwrap();
        for (i, (m, l, o)) in spans.iter().enumerate() {
            all.set(i, 0, [*m, *l], &[*o; 64]);
        }
        all
    }

    fn finish(shards: &[SpanStates]) -> ([f32; 128], [f32; 2]) {
        let (mut out, mut lse) = ([f32::NAN; 128], [f32::NAN; 2]);
        let format = KvFormat::same(Scheme::Bf16);
        SpanStates::finish(shards, &problem(), format, &[], (&mut out, &mut lse)).unwrap();
        (out, lse)
    }

    #[test]
    fn spans_merge_one_after_the_other_whatever_shard_they_are_of() {
        // 1 + 2^-24 + 2^-24 is 1 one after the other, and 1 + 2^-23 where the last two merge first.
        let small = 2f32.powi(-24);
        let all = [(0.0, 1.0, 1.0), (0.0, 1.0, small), (0.0, 1.0, small)];
        let whole = finish(&[state(&all)]);
        assert!((whole.0[0] - 1.0 / 3.0).abs() < 1e-6);
        assert_eq!(finish(&[state(&all[..1]), state(&all[1..])]), whole);
        assert_eq!(
            finish(&[
                state(&all[..1]),
                state(&[]),
                state(&all[1..2]),
                state(&all[2..])
            ]),
            whole
        );
        let merged_first = state(&[(0.0, 2.0, 2.0 * small)]);
        assert_ne!(finish(&[state(&all[..1]), merged_first]), whole);
        // Spans that a row does not see change nothing, whatever their numbers are.
        let mut unseen = state(&[all[0], (NONE, f32::NAN, f32::NAN), all[1], all[2]]);
        assert_eq!(finish(&[unseen.clone()]), whole);
        unseen.set(1, 0, [0.0, 1.0], &[1.0; 64]);
        assert_ne!(finish(&[unseen]), whole);
        assert_eq!((whole.0[64..].to_vec(), whole.1[1]), (vec![0.0; 64], NONE));
    }

    #[test]
    fn rows_that_see_nothing_are_zero_whatever_the_caller_s_memory_held() {
        for format in ["bf16", "int8", "fp8"] {
            let format: KvFormat = format.parse().unwrap();
            let scales: &[f32] = if format.v.has_tensor_scale() {
                &[0.5]
            } else {
                &[]
            };
            for held in [f32::NAN, f32::INFINITY, -1.0] {
                for shards in [
                    vec![],
                    vec![state(&[])],
                    vec![state(&[(NONE, 1.0, 2.0)]); 2],
                ] {
                    for sinks in [None, Some(vec![0.5, -1e6])] {
                        let mut problem = problem();
                        problem.scores.sinks = sinks.clone();
                        let (mut out, mut lse) = ([held; 128], [held; 2]);
                        let outputs = (&mut out[..], &mut lse[..]);
                        SpanStates::finish(&shards, &problem, format, scales, outputs).unwrap();
                        assert_eq!(out.map(f32::to_bits), [0; 128]);
                        let want = sinks.unwrap_or(vec![NONE; 2]);
                        let near = |(a, b): (&f32, &f32)| a == b || (a - b).abs() <= b.abs() * 1e-6;
                        assert!(lse.iter().zip(&want).all(near), "{lse:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn each_row_has_the_static_scale_of_its_own_kv_head() {
        let heads = Heads::new(6, 2, 64);
        let problem = Problem::new(heads, [1, 1]);
        let rows = problem.rows();
        let ones = SpanStates::new(rows, 64, [0.0, 1.0].repeat(rows), vec![1.0; rows * 64]);
        let (mut out, mut lse) = (vec![f32::NAN; rows * 64], vec![f32::NAN; rows]);
        let (format, outputs) = (
            KvFormat::same(Scheme::Fp8E4m3),
            (&mut out[..], &mut lse[..]),
        );
        SpanStates::finish(&[ones.unwrap()], &problem, format, &[0.5, 4.0], outputs).unwrap();
        // To the last bit but one, which the reciprocal of 1 loses.
        let eighths: Vec<f32> = out
            .chunks_exact(64)
            .map(|row| (row[0] * 8.0).round())
            .collect();
        assert_eq!(eighths, [4.0, 4.0, 4.0, 32.0, 32.0, 32.0].repeat(2));
    }

    #[test]
    fn static_scales_of_v_are_needed_and_those_of_k_are_not() {
        let finish = |format: &str, scales: &[f32]| {
            let (mut out, mut lse) = ([7.0; 128], [7.0; 2]);
            let (format, outputs) = (format.parse().unwrap(), (&mut out[..], &mut lse[..]));
            let result = SpanStates::finish(&[], &problem(), format, scales, outputs);
            assert_eq!(out[0] == 7.0, result.is_err());
            result
        };
        for (format, scales, said) in [
            ("fp8", &[][..], "v_scales is missing: fp8 stores"),
            (
                "int8/int8-tensor",
                &[],
                "v_scales is missing: int8-tensor stores",
            ),
            (
                "fp8",
                &[0.5, 0.5],
                "v_scales has 2 scales, but fp8 needs 1,",
            ),
            ("fp8", &[f32::NAN], "v_scales is NaN at index 0"),
            (
                "fp8/int8",
                &[0.5],
                "v_scales has 1 scale, but int8 has no static ones",
            ),
        ] {
            let refused = finish(format, scales).unwrap_err().to_string();
            assert!(refused.starts_with(said), "{refused}");
        }
        finish("fp8/int8", &[]).unwrap();
        finish("int8/fp8", &[0.5]).unwrap();
    }

    #[test]
    fn what_is_no_state_is_refused() {
        let new =
            |max_sums: &[f32], o: usize| SpanStates::new(2, 64, max_sums.to_vec(), vec![0.5; o]);
        let good = new(&[1.0, 2.0, NONE, f32::NAN], 128).unwrap();
        assert_eq!((good.spans(), good.rows()), (1, 2));
        assert!(matches!(
            new(&[1.0; 6], 128),
            Err(Error::Length {
                what: "max_sums",
                needed: 8,
                ..
            })
        ));
        assert!(matches!(
            new(&[1.0; 4], 127),
            Err(Error::Length {
                what: "o",
                needed: 128,
                ..
            })
        ));
        for bad in [[f32::NAN, 1.0], [f32::INFINITY, 1.0], [0.0, f32::INFINITY]] {
            let refused = new(&[0.0, 1.0, bad[0], bad[1]], 128).unwrap_err();
            assert!(
                matches!(
                    refused,
                    Error::NotFinite {
                        what: "max_sums",
                        ..
                    }
                ),
                "{refused}"
            );
        }
        let mut o = vec![0.5; 128];
        o[70] = f32::NAN;
        let refused = SpanStates::new(2, 64, vec![0.0, 1.0, 0.0, 1.0], o).unwrap_err();
        assert!(matches!(
            refused,
            Error::NotFinite {
                what: "o",
                at: ElementIndex::Flat(70),
                ..
            }
        ));
        let (mut out, mut lse) = ([7.0; 128], [7.0; 2]);
        let shards = [SpanStates::empty(1, 3, 64).unwrap()];
        let outputs = (&mut out[..], &mut lse[..]);
        let format = KvFormat::same(Scheme::Bf16);
        let refused = SpanStates::finish(&shards, &problem(), format, &[], outputs);
        assert!(matches!(
            refused,
            Err(Error::Length {
                what: "rows of a shard",
                ..
            })
        ));
        assert_eq!((out, lse), ([7.0; 128], [7.0; 2]));
    }
}
