//! Where the program prints: results on standard output, remarks on standard error.
//!
//! Nothing here panics. A remark that cannot be printed is dropped; a result that cannot be printed ends the program: quietly if the reader
//! of a pipe is gone, with a sentence otherwise.

use std::{
    fmt,
    io::{self, Write},
};

use serde_json::Value;

/// Both streams, and the form of the results.
pub struct Console<'a> {
    out: &'a mut dyn Write,
    err: &'a mut dyn Write,
    /// Whether results are one JSON value instead of tables.
    pub json: bool,
}

impl<'a> Console<'a> {
    /// Prints tables until `json` is set.
    pub fn new(out: &'a mut dyn Write, err: &'a mut dyn Write) -> Self {
        Console {
            out,
            err,
            json: false,
        }
    }

    /// Prints one or more lines of a result.
    pub fn line(&mut self, text: impl fmt::Display) -> Result<(), PrintError> {
        writeln!(self.out, "{text}").map_err(PrintError)
    }

    /// Prints a part of a line at once.
    pub fn text(&mut self, text: impl fmt::Display) -> Result<(), PrintError> {
        write!(self.out, "{text}").map_err(PrintError)?;
        self.flush()
    }

    /// Prints lines of a table, unless the result is to be JSON.
    pub fn table(&mut self, text: impl fmt::Display) -> Result<(), PrintError> {
        if self.json { Ok(()) } else { self.line(text) }
    }

    /// Prints the result as JSON, unless it is to be a table.
    pub fn value(&mut self, value: &Value) -> Result<(), PrintError> {
        if self.json { self.line(value) } else { Ok(()) }
    }

    /// Prints a remark beside the result.
    pub fn remark(&mut self, text: impl fmt::Display) {
        // A remark is worth less than the result that goes on.
        let _ = writeln!(self.err, "{text}");
    }

    /// Hands everything printed to the system.
    pub fn flush(&mut self) -> Result<(), PrintError> {
        self.out.flush().map_err(PrintError)
    }
}

/// Standard output took no more.
#[derive(Debug)]
pub struct PrintError(pub io::Error);

impl PrintError {
    /// Whether the reader of a pipe is gone, as in `attn bench --list | head -1`.
    pub fn is_closed_pipe(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

impl fmt::Display for PrintError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "cannot print the result; check where standard output goes and the space left there",
        )
    }
}

impl std::error::Error for PrintError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}
