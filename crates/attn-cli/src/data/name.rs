//! The name of a layer: as the file has it, and as it is printed.

use std::fmt::{self, Write};

/// A layer's name. What is printed of it has no control characters, which could change a terminal or a table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LayerName(String);

impl LayerName {
    /// The name that a file has.
    pub fn new(name: impl Into<String>) -> Self {
        LayerName(name.into())
    }

    /// The name as the file has it.
    pub fn raw(&self) -> &str {
        &self.0
    }

    /// The name of a tensor of the layer, as the file has it.
    pub fn tensor(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.0)
    }
}

impl fmt::Display for LayerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c.is_control() {
            true => write!(f, "{}", c.escape_default()),
            false => f.write_char(c),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_printed_escaped_and_kept_in_tensors_names() {
        let name = LayerName::new("é\u{1b}[2J\n\u{9b}");
        assert_eq!(name.to_string(), r"é\u{1b}[2J\n\u{9b}");
        assert_eq!(name.tensor("k"), "é\u{1b}[2J\n\u{9b}.k");
    }
}
