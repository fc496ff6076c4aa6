//! Runs fuzzers in child processes, and prints the seed of each find.
//!
//! A child of limited memory tries one input after the other, and writes before each which one it is: when the child dies or
//! hangs, that input is the find, and another child goes on with the next. A panic is caught inside the child.

use std::{
    collections::hash_map::RandomState,
    fs::{self, File},
    hash::BuildHasher,
    io::{Read, Write},
    os::unix::fs::FileExt,
    panic::{AssertUnwindSafe, catch_unwind, set_hook},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use arbitrary::Unstructured;
use attn_conformance::noise::Noise;

use crate::{FUZZERS, Fuzzer, draw::input};

/// Address space of a child in KiB: what asks for more than any input needs fails there.
const MEMORY_KIB: u64 = 6 << 20;
/// An input that takes longer is a find.
const HANG: Duration = Duration::from_secs(60);
/// A fuzzer stops after so many finds.
const MOST_FINDS: usize = 10;

/// How to start: `attn-fuzz [--seconds N | --minutes N] [--seed S] [--only NAME] [--input SEED]`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Seconds for each fuzzer.
    pub seconds: u64,
    /// The run's seed; another one each time where none is given.
    pub seed: u64,
    /// This fuzzer alone.
    pub only: Option<Fuzzer>,
    /// This input alone, of the fuzzer that is named.
    pub input: Option<u64>,
}

/// What one fuzzer came to.
#[derive(Debug, Default)]
struct Count {
    inputs: u64,
    finds: Vec<(u64, String)>,
}

fn number(text: &str) -> Result<u64> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.with_context(|| format!("{text} is no number; give it as 17 or as 0x11"))
}

/// The fuzzer of a name.
///
/// # Errors
/// Lists the names there are.
pub fn by_name(name: &str) -> Result<Fuzzer> {
    let found = FUZZERS.into_iter().find(|f| f.name == name);
    found.with_context(|| {
        let names: Vec<_> = FUZZERS.iter().map(|f| f.name).collect();
        format!("there is no fuzzer {name}; there are: {}", names.join(", "))
    })
}

impl Options {
    /// Reads the arguments after the program's name.
    ///
    /// # Errors
    /// A sentence for what is unknown, lacks its value, or has one that is no number.
    pub fn parse(arguments: &[String]) -> Result<Options> {
        let mut options = Options {
            seconds: 20,
            seed: RandomState::new().hash_one(0),
            only: None,
            input: None,
        };
        let mut rest = arguments.iter();
        while let Some(flag) = rest.next() {
            let value = rest
                .next()
                .with_context(|| format!("{flag} lacks its value"))?;
            match flag.as_str() {
                "--seconds" => options.seconds = number(value)?,
                "--minutes" => options.seconds = number(value)?.saturating_mul(60),
                "--seed" => options.seed = number(value)?,
                "--only" => options.only = Some(by_name(value)?),
                "--input" => options.input = Some(number(value)?),
                _ => bail!(
                    "{flag} is no option; there are --seconds N, --minutes N, --seed S, --only NAME, --input SEED"
                ),
            }
        }
        ensure!(
            options.input.is_none() || options.only.is_some(),
            "--input needs --only NAME: a seed is that of one fuzzer's input"
        );
        Ok(options)
    }
}

/// The seed of a run's input `index` for one fuzzer.
fn seed_of(run: u64, name: &str, index: u64) -> u64 {
    let next = |state: u64| Noise::new(state).bits();
    let of_name = name
        .bytes()
        .fold(run, |state, byte| next(state ^ u64::from(byte)));
    next(of_name.wrapping_add(index))
}

/// Runs one input; a panic is an error with its text and place.
///
/// # Errors
/// What does not hold.
pub fn try_input(fuzzer: &Fuzzer, seed: u64) -> Result<(), String> {
    let bytes = input(seed);
    let run = || (fuzzer.run)(&mut Unstructured::new(&bytes));
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("with a value that is no text");
        let place = LAST_PANIC.lock().map(|place| place.clone());
        Err(format!("panic at {}: {text}", place.unwrap_or_default()))
    })
}

/// Where the last panic was.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// The child: `child NAME RUN_SEED FIRST MILLISECONDS FOLDER`.
fn child(arguments: &[String]) -> Result<()> {
    let [name, run_seed, first, time, folder] = arguments else {
        bail!("a child takes five arguments");
    };
    let (fuzzer, run_seed) = (by_name(name)?, number(run_seed)?);
    let (first, time) = (number(first)?, Duration::from_millis(number(time)?));
    let folder = Path::new(folder);
    let progress = File::create(folder.join("progress"))?;
    let mut report = File::options()
        .append(true)
        .create(true)
        .open(folder.join("finds"))?;
    note_panics();
    let end = Instant::now() + time;
    let mut index = first;
    let mut finds = 0;
    loop {
        progress.write_all_at(&index.to_le_bytes(), 0)?;
        if Instant::now() >= end || finds == MOST_FINDS {
            progress.write_all_at(b"done", 8)?;
            return Ok(());
        }
        let seed = seed_of(run_seed, fuzzer.name, index);
        if let Err(text) = try_input(&fuzzer, seed) {
            writeln!(report, "{seed:#x} {}", text.replace('\n', " | "))?;
            finds += 1;
        }
        index += 1;
    }
}

/// Keeps a panic's place instead of printing it.
fn note_panics() {
    set_hook(Box::new(|info| {
        if let (Some(place), Ok(mut last)) = (info.location(), LAST_PANIC.lock()) {
            *last = place.to_string();
        }
    }));
}

/// Starts this program again, under the limit of memory; its standard error goes to a file.
fn start(arguments: &[String], folder: &Path) -> Result<Child> {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("ulimit -v {MEMORY_KIB} && exec \"$0\" \"$@\""))
        .arg(std::env::current_exe()?)
        .args(arguments)
        .env("TMPDIR", folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(folder.join("stderr"))?);
    command.spawn().context("cannot start a child")
}

/// The input that a child is at, and whether it is done.
fn read_progress(folder: &Path) -> Option<(u64, bool)> {
    let bytes = fs::read(folder.join("progress")).ok()?;
    let index = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    Some((index, bytes.get(8..) == Some(b"done")))
}

/// Waits for a child; what it died of, if it did not end by itself.
fn watch(child: &mut Child, folder: &Path) -> Result<Option<String>> {
    let mut last = (None, Instant::now());
    loop {
        if let Some(status) = child.try_wait()? {
            let done = read_progress(folder).is_some_and(|(_, done)| done);
            if status.success() && done {
                return Ok(None);
            }
            let mut text = String::new();
            File::open(folder.join("stderr"))?.read_to_string(&mut text)?;
            return Ok(Some(format!("the child died ({status}): {}", text.trim())));
        }
        let now = read_progress(folder).map(|(index, _)| index);
        if last.0 != now {
            last = (now, Instant::now());
        } else if last.1.elapsed() > HANG {
            child.kill()?;
            child.wait()?;
            return Ok(Some(format!("no end after {} s", HANG.as_secs())));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Runs one fuzzer for its time.
fn fuzz(fuzzer: &Fuzzer, options: &Options, folder: &Path) -> Result<Count> {
    let mut count = Count::default();
    let end = Instant::now() + Duration::from_secs(options.seconds);
    loop {
        let left = end.saturating_duration_since(Instant::now()).as_millis();
        let _ = fs::remove_file(folder.join("progress"));
        let arguments = [
            "child".to_owned(),
            fuzzer.name.to_owned(),
            options.seed.to_string(),
            count.inputs.to_string(),
            left.to_string(),
            folder.display().to_string(),
        ];
        let death = watch(&mut start(&arguments, folder)?, folder)?;
        let Some((index, _)) = read_progress(folder) else {
            bail!(
                "the child of {} did not start: {}",
                fuzzer.name,
                death.unwrap_or_default()
            );
        };
        count.inputs = index;
        if let Some(text) = death {
            let seed = seed_of(options.seed, fuzzer.name, index);
            count.finds.push((seed, text));
            count.inputs += 1;
        }
        let inside = fs::read_to_string(folder.join("finds")).unwrap_or_default();
        if Instant::now() + Duration::from_secs(1) >= end
            || count.finds.len() + inside.lines().count() >= MOST_FINDS
        {
            for line in inside.lines() {
                let (seed, text) = line.split_once(' ').unwrap_or((line, ""));
                count.finds.push((number(seed)?, text.to_owned()));
            }
            return Ok(count);
        }
    }
}

/// Runs one input in a child, and prints what it came to.
fn replay(fuzzer: &Fuzzer, seed: u64, folder: &Path) -> Result<bool> {
    let arguments = ["one".to_owned(), fuzzer.name.to_owned(), seed.to_string()];
    let status = start(&arguments, folder)?.wait()?;
    let text = fs::read_to_string(folder.join("stderr"))?;
    println!("{}: input {seed:#x}: {status}", fuzzer.name);
    print!("{text}");
    Ok(status.success())
}

/// The child of [`replay`]: `one NAME SEED`.
fn one(arguments: &[String]) -> Result<()> {
    let [name, seed] = arguments else {
        bail!("`one` takes a fuzzer and a seed");
    };
    note_panics();
    try_input(&by_name(name)?, number(seed)?).map_err(anyhow::Error::msg)
}

/// A folder for the files of one fuzzer's children, removed at the end.
fn folder_for(name: &str) -> Result<tempfile::TempDir> {
    let prefix = format!("attn-fuzz-{name}-");
    // Files are flushed to their disk, which is memory where there is such a folder.
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() {
        memory.to_owned()
    } else {
        std::env::temp_dir()
    };
    Ok(tempfile::Builder::new()
        .prefix(&prefix)
        .tempdir_in(parent)?)
}

/// Runs what the options ask for, and prints the table of inputs; whether nothing was found.
///
/// # Errors
/// If a child cannot be started.
pub fn run(options: &Options) -> Result<bool> {
    if let (Some(fuzzer), Some(seed)) = (&options.only, options.input) {
        return replay(fuzzer, seed, folder_for(fuzzer.name)?.path());
    }
    println!(
        "seed {:#x}, {} s for each fuzzer",
        options.seed, options.seconds
    );
    let chosen: Vec<Fuzzer> = match options.only {
        Some(fuzzer) => vec![fuzzer],
        None => FUZZERS.to_vec(),
    };
    let mut rows = Vec::new();
    for fuzzer in chosen {
        let count = fuzz(&fuzzer, options, folder_for(fuzzer.name)?.path())?;
        for (seed, text) in &count.finds {
            println!("FIND {}: --only {0} --input {seed:#x}: {text}", fuzzer.name);
        }
        rows.push((fuzzer, count));
    }
    println!("\n| fuzzer | tries | inputs | finds |\n|---|---|---|---|");
    for (fuzzer, count) in &rows {
        let finds = count.finds.len();
        println!(
            "| {} | {} | {} | {finds} |",
            fuzzer.name, fuzzer.door, count.inputs
        );
    }
    let inputs: u64 = rows.iter().map(|(_, count)| count.inputs).sum();
    let finds: usize = rows.iter().map(|(_, count)| count.finds.len()).sum();
    println!("| all | | {inputs} | {finds} |");
    if let Some((fuzzer, _)) = rows.iter().find(|(_, count)| count.inputs == 0) {
        bail!("{} tried no input", fuzzer.name);
    }
    Ok(finds == 0)
}

/// The whole program: 0 without a find, 1 with one, 2 if it could not run.
pub fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.first().map(String::as_str) {
        Some("child") => child(&arguments[1..]).map(|()| true),
        Some("one") => one(&arguments[1..]).map(|()| true),
        _ => Options::parse(&arguments).and_then(|options| run(&options)),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("attn-fuzz: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// A folder of this process for the files that fuzzers write.
pub fn scratch() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("attn-fuzz-files-{}", std::process::id()));
    let _ = fs::create_dir_all(&folder);
    folder
}
