//! The program `attn`: decode attention on real data, from the command line.
//!
//! A library for this project's fuzzers alone: [`main`] is the program, and the public modules may change in any release.
//!
//! It ends with 0; with 1 if a check or a device failed, or a result is NaN; with 2 and a sentence after misuse or if something cannot be
//! read, written or printed; and with 141, quietly, if the reader of its output is gone (as a shell reports programs that SIGPIPE ends).

use std::{
    env,
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Result;
use attn::{BackendId, DecodeAttention, Error, Selection, Unsupported};
use clap::{CommandFactory, Parser, Subcommand};

mod bench;
mod check;
pub mod console;
pub mod data;
#[cfg(test)]
mod faulty;
pub mod figures;
pub mod inspect;
#[cfg(feature = "llm")]
mod llm;
mod measured;
pub mod pages;
mod plot;
pub mod quantize;
mod run;
pub mod target;
mod threads;

use console::{Console, PrintError};

/// Decode attention over a quantized KV cache.
#[derive(Parser)]
#[command(version, about)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Print JSON instead of tables; a figure that is no number is the string NaN, inf or -inf.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Decode over real K, V and Q in several formats, beside the exact result (the default).
    Run(run::RunArgs),
    /// Which backends are here, and why the others are not.
    Devices,
    /// Hold the backends that are here to the conformance table.
    Check {
        /// Only this backend.
        #[arg(long)]
        backend: Option<BackendId>,
    },
    /// Time named workloads, or a shape of your own, beside a pure read of as many bytes.
    Bench(bench::BenchArgs),
    /// K and V of a safetensors file as pages of a format, in another safetensors file.
    Quantize(quantize::QuantizeArgs),
    /// The pages of `attn quantize` back as f32 K and V.
    Dequantize(quantize::DequantizeArgs),
    /// The content of a file of pages, or of K and V, checked.
    Inspect(inspect::InspectArgs),
    /// Text from prompts: a whole model, whose cache is of a format.
    #[cfg(feature = "llm")]
    Generate(llm::GenerateArgs),
    /// What cache formats do to a model's predictions of a text.
    #[cfg(feature = "llm")]
    Perplexity(llm::PerplexityArgs),
    /// Text from prompts; not in this build, which has no feature `llm`.
    #[cfg(not(feature = "llm"))]
    #[command(disable_help_flag = true)]
    Generate(ModelArgs),
    /// What cache formats do to a model's predictions of a text; not in this build, which has no feature `llm`.
    #[cfg(not(feature = "llm"))]
    #[command(disable_help_flag = true)]
    Perplexity(ModelArgs),
    /// A script that completes commands and options in a shell, on standard output.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// The arguments of commands that this build leaves out.
#[cfg(not(feature = "llm"))]
#[derive(clap::Args)]
struct ModelArgs {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<std::ffi::OsString>,
}

/// How backends are opened: as the library does it, or as a test needs it.
struct Backends {
    open: fn(BackendId) -> Result<Box<dyn DecodeAttention>, Unsupported>,
    select: fn(Option<BackendId>) -> Result<Selection, Error>,
}

/// The refusal of a backend, where the program leaves it out with the way to a program that has it.
fn of_program(reason: Unsupported) -> Unsupported {
    match reason {
        Unsupported::NotBuilt { backend } => Unsupported::Absent {
            backend,
            reason: "this build of attn leaves it out".to_owned(),
            next_step: format!("build attn-cli with `--features {backend}`"),
        },
        reason => reason,
    }
}

/// Exit codes.
const PASSED: u8 = 0;
const FAILED: u8 = 1;
const REFUSED: u8 = 2;
const PIPE_CLOSED: u8 = 141;

/// Runs the program with this process's arguments, and gives its exit code.
pub fn main() -> ExitCode {
    let (mut out, mut err) = (io::stdout().lock(), io::stderr());
    let mut console = Console::new(&mut out, &mut err);
    let here = Backends {
        open: |id| attn::open(id).map_err(of_program),
        select: |wanted| {
            attn::select(wanted).map_err(|error| match error {
                Error::Unsupported(reason) => of_program(reason).into(),
                error => error,
            })
        },
    };
    ExitCode::from(match Args::try_parse() {
        Ok(args) => {
            let threads = start_threads(&args);
            let result = threads.and_then(|()| dispatch(args, &mut console, &here));
            ending(result, &mut console)
        }
        Err(usage) if usage.use_stderr() => {
            let _ = usage.print();
            REFUSED
        }
        // What `--help` and `--version` print is the result.
        Err(help) => {
            let printed = help.print().and_then(|()| io::stdout().flush());
            ending(
                printed.map(|()| true).map_err(|e| PrintError(e).into()),
                &mut console,
            )
        }
    })
}

/// Refuses a wrong number of threads, and starts them for commands that decode on rayon's own pool.
fn start_threads(args: &Args) -> Result<()> {
    let asked = threads::asked(env::var_os(threads::VARIABLE).as_deref())?;
    match args.command {
        None | Some(Command::Run(_) | Command::Check { .. }) => threads::start(asked),
        #[cfg(feature = "llm")]
        Some(Command::Generate(_) | Command::Perplexity(_)) => threads::start(asked),
        _ => Ok(()),
    }
}

/// The exit code for what a command came to, after a sentence about what went wrong.
fn ending(result: Result<bool>, console: &mut Console<'_>) -> u8 {
    let printed = console.flush();
    match result.and_then(|passed| Ok(printed.map(|()| passed)?)) {
        Ok(true) => PASSED,
        Ok(false) => FAILED,
        Err(error) => match error.downcast_ref::<PrintError>() {
            Some(print) if print.is_closed_pipe() => PIPE_CLOSED,
            _ => {
                console.remark(format_args!("attn: {error:#}"));
                REFUSED
            }
        },
    }
}

/// Refuses a command that takes the feature `llm`.
#[cfg(not(feature = "llm"))]
fn no_models(command: &str) -> Result<bool> {
    anyhow::bail!(
        "this build has no `attn {command}`: it takes the feature llm; `cargo build --release -p attn-cli --features llm` builds it, with `hub` in place of `llm` \
         for models by their names on huggingface.co"
    )
}

/// Runs a command; whether what it checked is right.
fn dispatch(args: Args, console: &mut Console<'_>, backends: &Backends) -> Result<bool> {
    console.json = args.json;
    match args.command {
        None => run::run(&run::RunArgs::default(), console, backends),
        Some(Command::Run(run)) => run::run(&run, console, backends),
        Some(Command::Bench(bench)) => bench::bench(&bench, console, backends),
        Some(Command::Devices) => check::devices(console, backends).map(|()| true),
        Some(Command::Check { backend }) => check::check(backend, console, backends),
        Some(Command::Quantize(args)) => quantize::quantize(&args, console).map(|()| true),
        Some(Command::Inspect(args)) => inspect::inspect(&args, console).map(|()| true),
        #[cfg(feature = "llm")]
        Some(Command::Generate(args)) => llm::generate(&args, console, backends).map(|()| true),
        #[cfg(feature = "llm")]
        Some(Command::Perplexity(args)) => llm::perplexity(&args, console, backends),
        #[cfg(not(feature = "llm"))]
        Some(Command::Generate(_)) => no_models("generate"),
        #[cfg(not(feature = "llm"))]
        Some(Command::Perplexity(_)) => no_models("perplexity"),
        Some(Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "attn", &mut script);
            console.line(String::from_utf8_lossy(&script).trim_end())?;
            Ok(true)
        }
        Some(Command::Dequantize(args)) => quantize::dequantize(&args, console).map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let code = ending(result, &mut Console::new(&mut out, &mut err));
            (code, String::from_utf8(err).unwrap())
        };
        assert_eq!(end(Ok(true)), (0, String::new()));
        assert_eq!(end(Ok(false)), (1, String::new()));
        let sentence = "attn: no such thing\n".to_owned();
        assert_eq!(end(Err(anyhow::anyhow!("no such thing"))), (2, sentence));
    }

    #[test]
    fn a_stream_that_fails_at_the_last_flush_is_noticed() {
        for (kind, code) in [
            (io::ErrorKind::BrokenPipe, 141),
            (io::ErrorKind::StorageFull, 2),
        ] {
            let (mut out, mut err) = (Broken(kind), Vec::new());
            let ended = ending(Ok(true), &mut Console::new(&mut out, &mut err));
            assert_eq!(ended, code);
            // The end of a pipe is quiet.
            assert_eq!(err.is_empty(), code == 141);
        }
    }
}
