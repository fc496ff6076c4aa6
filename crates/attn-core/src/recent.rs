//! The latest of the values that are dear to make: a serving loop's plans.

/// The latest values, each found again by the key that it was made for.
///
/// ```
/// use attn_core::Recent;
///
/// let mut squares = Recent::new(2);
/// let made = squares.get_or_make(12, |n| Ok::<_, ()>(n * n));
/// assert_eq!(made, Ok(144));
/// assert_eq!(squares.get_or_make(12, |_| Err("made twice")), Ok(144));
/// ```
#[derive(Debug, Clone)]
pub struct Recent<K, V> {
    /// The newest last.
    entries: Vec<(K, V)>,
    kept: usize,
}

impl<K: PartialEq, V: Clone> Recent<K, V> {
    /// None so far; `kept` values at most, and one at least.
    #[must_use]
    pub const fn new(kept: usize) -> Self {
        Recent {
            entries: Vec::new(),
            kept,
        }
    }

    /// The value for the key: one that is kept, or the one that `make` makes, in place of the value that has been asked for longest ago.
    ///
    /// # Errors
    /// Those of `make`; the values are unchanged then.
    pub fn get_or_make<E>(
        &mut self,
        key: K,
        make: impl FnOnce(&K) -> Result<V, E>,
    ) -> Result<V, E> {
        let entry = match self.entries.iter().position(|(of, _)| *of == key) {
            Some(at) => self.entries.remove(at),
            None => {
                let value = make(&key)?;
                if self.entries.len() >= self.kept.max(1) {
                    self.entries.remove(0);
                }
                (key, value)
            }
        };
        let value = entry.1.clone();
        self.entries.push(entry);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_asked_for_longest_ago_makes_room() {
        let mut recent = Recent::new(2);
        let mut made = Vec::new();
        for key in ['a', 'b', 'a', 'c', 'a', 'b'] {
            let value = recent.get_or_make(key, |key| {
                made.push(*key);
                Ok::<_, ()>(made.len())
            });
            assert!(value.is_ok());
        }
        assert_eq!(made, ['a', 'b', 'c', 'b']);
    }

    #[test]
    fn a_value_that_cannot_be_made_takes_no_room() {
        let mut recent = Recent::new(1);
        assert_eq!(recent.get_or_make('a', |_| Ok::<_, &str>(1)), Ok(1));
        assert_eq!(recent.get_or_make('b', |_| Err("no")), Err("no"));
        assert_eq!(recent.get_or_make('a', |_| Err("no")), Ok(1));
    }
}
