//! Commands and options that belong to the program `attn-eval`: `attn` refuses each with the command to take.

use std::{ffi::OsString, path::PathBuf};

use anyhow::{Result, bail, ensure};

/// How `attn-eval` is built and started from a checkout.
const RUN: &str = "cargo run --release -p attn-eval --";

/// Whatever stands behind a command.
#[derive(clap::Args)]
pub struct AnyArgs {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<OsString>,
}

/// Refuses a command.
pub fn command(name: &str) -> Result<bool> {
    bail!("`attn {name}` is a command of another program, attn-eval; take `{RUN} {name}`")
}

/// The options of charts.
#[derive(clap::Args)]
pub struct ChartArgs {
    #[arg(long, hide = true)]
    plot: Option<PathBuf>,
    #[arg(long, hide = true)]
    recorded: Option<PathBuf>,
    #[arg(long, hide = true, requires = "plot")]
    force: bool,
}

impl ChartArgs {
    /// Refuses them.
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.plot.is_none() && self.recorded.is_none(),
            "`attn bench` draws no charts; keep its figures with `attn bench --json … >FILE`, and draw them, or a CSV file of figures, \
             with `{RUN} plot FILE SVG`"
        );
        Ok(())
    }
}
