//! Bars of progress on standard error, where that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over `count` pieces of work that names the one at hand and the time that is left; its caller takes it away at the end.
#[must_use]
pub fn bar(count: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}, {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(count as u64).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
