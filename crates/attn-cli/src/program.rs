//! How a program begins and ends, for `attn` and for `attn-eval`: arguments, threads, backends, exit codes.
//!
//! A program ends with 0; with 1 if a check or a device failed, or a result is NaN; with 2 and a sentence after misuse or if something cannot be
//! read, written or printed; and with 141, quietly, if the reader of its output is gone (as a shell reports programs that SIGPIPE ends).

use std::{
    env, fs,
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use anyhow::{Context, Result};
use attn::{BackendId, DecodeAttention, Error, ErrorKind, Selection, Unsupported};
use clap::{CommandFactory, Parser};
use clap_complete::Shell;

use crate::{
    console::{Console, PrintError},
    target::Target,
    threads,
};

/// Exit codes.
const PASSED: u8 = 0;
const FAILED: u8 = 1;
const REFUSED: u8 = 2;
const PIPE_CLOSED: u8 = 141;

/// How backends are opened: as the library does it, or as a test needs it.
pub struct Backends {
    /// Opens one backend.
    pub open: fn(BackendId) -> Result<Box<dyn DecodeAttention>, Unsupported>,
    /// Opens the named backend, or the best one that is here.
    pub select: fn(Option<BackendId>) -> Result<Selection, Error>,
}

impl Backends {
    /// The backends of this machine, as the library opens them.
    pub fn here() -> Self {
        Backends {
            open: |id| attn::open(id).map_err(of_program),
            select: |wanted| {
                attn::select(wanted).map_err(|error| match error {
                    Error::Unsupported(reason) => of_program(reason).into(),
                    error => error,
                })
            },
        }
    }
}

/// The refusal of a backend, where the program leaves it out with the way to a program that has it.
fn of_program(reason: Unsupported) -> Unsupported {
    match reason {
        Unsupported::NotBuilt { backend } => Unsupported::Absent {
            backend,
            reason: "this build of the program leaves it out".to_owned(),
            next_step: format!("build the program's package with `--features {backend}`"),
        },
        reason => reason,
    }
}

/// The arguments of a program.
pub trait Arguments: Parser {
    /// Whether the results are to be JSON.
    fn json(&self) -> bool;

    /// Whether the command decodes on rayon's own pool.
    fn decodes(&self) -> bool;

    /// Whether an error is that of a device which failed, and not a refusal.
    fn is_of_device(error: &anyhow::Error) -> bool {
        let mut causes = error
            .chain()
            .filter_map(|cause| cause.downcast_ref::<Error>());
        causes.any(|error| error.kind() == ErrorKind::Device)
    }

    /// Runs the command; whether what it checked is right.
    ///
    /// # Errors
    /// If the command is misused, or something cannot be read, written or printed.
    fn run(self, console: &mut Console<'_>, backends: &Backends) -> Result<bool>;
}

/// Runs a program with this process's arguments, and gives its exit code.
pub fn main<A: Arguments>() -> ExitCode {
    let (mut out, mut err) = (io::stdout().lock(), io::stderr());
    let mut console = Console::new(&mut out, &mut err);
    ExitCode::from(match A::try_parse() {
        Ok(args) => {
            let threads = start_threads(&args);
            let result = threads.and_then(|()| run(args, &mut console, &Backends::here()));
            ending::<A>(result, &mut console)
        }
        Err(usage) if usage.use_stderr() => {
            let _ = usage.print();
            REFUSED
        }
        // What `--help` and `--version` print is the result.
        Err(help) => {
            let printed = help.print().and_then(|()| io::stdout().flush());
            ending::<A>(
                printed.map(|()| true).map_err(|e| PrintError(e).into()),
                &mut console,
            )
        }
    })
}

/// Runs a command in the form of results that it asks for; whether what it checked is right.
pub(crate) fn run<A: Arguments>(
    args: A,
    console: &mut Console<'_>,
    backends: &Backends,
) -> Result<bool> {
    console.json = args.json();
    args.run(console, backends)
}

/// Refuses a wrong number of threads, and starts them for commands that decode on rayon's own pool.
fn start_threads<A: Arguments>(args: &A) -> Result<()> {
    let asked = threads::asked(env::var_os(threads::VARIABLE).as_deref())?;
    if args.decodes() {
        threads::start(asked)?;
    }
    Ok(())
}

/// The exit code for what a command came to, after a sentence about what went wrong.
pub(crate) fn ending<A: Arguments>(result: Result<bool>, console: &mut Console<'_>) -> u8 {
    let printed = console.flush();
    match result.and_then(|passed| Ok(printed.map(|()| passed)?)) {
        Ok(true) => PASSED,
        Ok(false) => FAILED,
        Err(error) => match error.downcast_ref::<PrintError>() {
            Some(print) if print.is_closed_pipe() => PIPE_CLOSED,
            _ => {
                let name = A::command();
                console.remark(format_args!("{}: {error:#}", name.get_name()));
                match A::is_of_device(&error) {
                    true => FAILED,
                    false => REFUSED,
                }
            }
        },
    }
}

/// Prints a script that completes the commands and options of a program in a shell.
///
/// # Errors
/// If standard output takes no more.
pub fn completions<A: CommandFactory>(shell: Shell, console: &mut Console<'_>) -> Result<()> {
    let mut script = Vec::new();
    let mut command = A::command();
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut script);
    console.line(String::from_utf8_lossy(&script).trim_end())?;
    Ok(())
}

/// Writes the manual of a program and of each command into a folder, as pages for `man`, over pages that are there only with `force`; without a folder, prints the
/// program's.
///
/// # Errors
/// If the folder cannot be written, or a page exists and is to stay, and nothing is written then; or if standard output takes no more.
pub fn manual<A: CommandFactory>(
    folder: Option<&Path>,
    force: bool,
    console: &mut Console<'_>,
) -> Result<()> {
    let Some(folder) = folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(A::command()).render(&mut page)?;
        return Ok(console.line(String::from_utf8_lossy(&page).trim_end())?);
    };
    let made = tempfile::tempdir().context("cannot make a temporary folder; check TMPDIR")?;
    clap_mangen::generate_to(A::command(), made.path()).context("cannot write the manual")?;
    fs::create_dir_all(folder).with_context(|| {
        format!(
            "cannot write {}; name a folder that is writable",
            folder.display()
        )
    })?;
    let mut pages = Vec::new();
    for page in fs::read_dir(made.path())? {
        let page = page?;
        let target = Target::new(&folder.join(page.file_name()), force, &[])?;
        pages.push((target, fs::read(page.path())?));
    }
    for (target, page) in &pages {
        target.write(page)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Args;

    /// Standard output that fails in one way.
    struct Broken(io::ErrorKind);

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(self.0.into())
        }
    }

    #[test]
    fn endings_have_the_documented_codes() {
        let end = |result: Result<bool>| {
            let (mut out, mut err) = (Vec::new(), Vec::new());
            let code = ending::<Args>(result, &mut Console::new(&mut out, &mut err));
            (code, String::from_utf8(err).unwrap())
        };
        assert_eq!(end(Ok(true)), (0, String::new()));
        assert_eq!(end(Ok(false)), (1, String::new()));
        let sentence = "attn: no such thing\n".to_owned();
        assert_eq!(end(Err(anyhow::anyhow!("no such thing"))), (2, sentence));
    }

    /// Kills a device's failure that a script takes for misuse: whatever command meets it, and whatever it was doing.
    #[test]
    fn a_device_that_fails_ends_a_program_with_1() {
        let end = |error: anyhow::Error| {
            let (mut out, mut err) = (Vec::new(), Vec::new());
            ending::<Args>(Err(error), &mut Console::new(&mut out, &mut err))
        };
        let failed = || Error::Device {
            backend: "cuda",
            doing: "decoding",
            source: "an illegal address".into(),
        };
        assert_eq!(end(failed().into()), 1);
        let context = anyhow::Error::from(failed()).context("layer 3");
        assert_eq!(end(context), 1);
        let refused = Error::Parameter {
            what: "format",
            given: "int3".to_owned(),
            allowed: "int4",
        };
        assert_eq!(end(refused.into()), 2);
    }

    #[test]
    fn a_stream_that_fails_at_the_last_flush_is_noticed() {
        for (kind, code) in [
            (io::ErrorKind::BrokenPipe, 141),
            (io::ErrorKind::StorageFull, 2),
        ] {
            let (mut out, mut err) = (Broken(kind), Vec::new());
            let ended = ending::<Args>(Ok(true), &mut Console::new(&mut out, &mut err));
            assert_eq!(ended, code);
            // The end of a pipe is quiet.
            assert_eq!(err.is_empty(), code == 141);
        }
    }
}
