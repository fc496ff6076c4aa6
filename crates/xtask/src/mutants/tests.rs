//! Which tests reach a mutant, and whether one of them fails.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    build::{Mutant, Program},
    list::List,
};

/// Tests that take less run together.
const QUICK: Duration = Duration::from_millis(150);
/// Bytes of address space of a test in KiB: a mutant may ask for more memory without end.
const MEMORY_KIB: &str = "8388608";

/// One test of one program.
pub struct Test {
    /// Index of its program.
    pub program: usize,
    /// Its name.
    pub name: String,
    /// How long it takes alone.
    pub time: Duration,
}

/// The tests, and those that reach each mutant.
pub struct Reach {
    /// All tests.
    pub tests: Vec<Test>,
    /// Indices of the tests by mutant.
    pub of: BTreeMap<u32, Vec<usize>>,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Passed,
    Failed,
    TimedOut,
}

/// What became of a mutant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// A test failed; its program.
    Noticed(String),
    /// A test took too long; its program.
    TimedOut(String),
    /// Every test that reaches it passed.
    Unnoticed,
    /// No test reaches it.
    NotReached,
}

impl Verdict {
    /// Whether a test noticed.
    pub fn noticed(&self) -> bool {
        matches!(self, Verdict::Noticed(_) | Verdict::TimedOut(_))
    }
}

/// A command for tests of a program: the CPU alone, the small table, no adapter, bounded memory.
fn command(program: &Program, names: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -v \"$0\"; exec \"$@\"", MEMORY_KIB])
        .arg(&program.path)
        .args(["--exact", "--test-threads=1"])
        .args(names)
        .current_dir(&program.folder)
        .envs([
            ("ATTN_REQUIRE", "cpu"),
            ("ATTN_TABLE", "reduced"),
            ("VK_DRIVER_FILES", "/dev/null"),
            ("VK_ICD_FILENAMES", "/dev/null"),
            ("RUST_BACKTRACE", "0"),
        ])
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    command
}

fn kill(child: &mut Child) -> Result<()> {
    // The group: a test of a program starts others.
    let group = format!("-{}", child.id());
    let status = Command::new("kill").args(["-KILL", "--", &group]).status();
    ensure!(status.is_ok_and(|s| s.success()), "cannot end a test");
    child.wait()?;
    Ok(())
}

fn run(mut command: Command, limit: Duration) -> Result<(End, Duration)> {
    let start = Instant::now();
    let mut child = command.spawn().context("cannot run a test")?;
    let mut pause = Duration::from_micros(500);
    loop {
        if let Some(status) = child.try_wait()? {
            let end = if status.success() {
                End::Passed
            } else {
                End::Failed
            };
            return Ok((end, start.elapsed()));
        }
        if start.elapsed() > limit {
            kill(&mut child)?;
            return Ok((End::TimedOut, limit));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// Runs `work(i)` for each index, `jobs` at a time.
fn in_parallel(count: usize, jobs: usize, work: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        let worker = || -> Result<()> {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= count {
                    return Ok(());
                }
                work(i)?;
            }
        };
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        for worker in workers {
            match worker.join() {
                Ok(result) => result?,
                Err(_) => bail!("a worker panicked"),
            }
        }
        Ok(())
    })
}

fn names(program: &Program) -> Result<Vec<String>> {
    let output = Command::new(&program.path)
        .args(["--list", "--format", "terse"])
        .current_dir(&program.folder)
        .output()
        .with_context(|| format!("cannot run {}", program.path.display()))?;
    let text = String::from_utf8(output.stdout).context("a test's name is not UTF-8")?;
    let tests = text.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(tests.map(str::to_owned).collect())
}

/// Runs each test alone without a mutant, and notes its time and what it reaches.
///
/// # Errors
/// If a test fails without a mutant.
pub fn reach(programs: &[Program], list: &List, folder: &Path, jobs: usize) -> Result<Reach> {
    let mut tests = Vec::new();
    for (program, at) in programs.iter().enumerate() {
        for name in names(at)? {
            if !list.without_tests.iter().any(|part| name.contains(part)) {
                let time = Duration::ZERO;
                tests.push(Test {
                    program,
                    name,
                    time,
                });
            }
        }
    }
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    let times = Mutex::new(vec![Duration::ZERO; tests.len()]);
    let limit = Duration::from_secs(600);
    in_parallel(tests.len(), jobs, |i| {
        let (test, file) = (&tests[i], folder.join(i.to_string()));
        let program = &programs[test.program];
        let mut covering = command(program, &[&test.name]);
        covering.env("ATTN_MUTANT_COVERAGE", &file);
        run(covering, limit)?;
        // Some tests count allocations, which the notes of what is reached make, too.
        let (end, time) = run(command(program, &[&test.name]), limit)?;
        ensure!(
            end == End::Passed,
            "{} {} fails without any mutant",
            program.name,
            test.name
        );
        times.lock().expect("no panic")[i] = time;
        Ok(())
    })?;
    for (test, time) in tests.iter_mut().zip(times.into_inner().expect("no panic")) {
        test.time = time;
    }
    let mut of: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for i in 0..tests.len() {
        let Ok(text) = fs::read_to_string(folder.join(i.to_string())) else {
            continue;
        };
        let mut reached: Vec<u32> = text.lines().filter_map(|id| id.parse().ok()).collect();
        reached.sort_unstable();
        reached.dedup();
        for id in reached {
            of.entry(id).or_default().push(i);
        }
    }
    Ok(Reach { tests, of })
}

/// Tests that run together.
struct Run<'a> {
    program: usize,
    names: Vec<&'a str>,
    time: Duration,
}

/// How often a run was tried for mutants of a file, and how often it noticed.
type Record<'a> = BTreeMap<(&'a str, usize, Option<&'a str>), [u32; 2]>;

impl<'a> Run<'a> {
    /// What it is called in a record: one test, or a program's quick ones.
    fn key(&self, file: &'a str) -> (&'a str, usize, Option<&'a str>) {
        let alone = self.names.len() == 1 && self.time >= QUICK;
        let alone = alone.then(|| self.names.first().copied());
        (file, self.program, alone.flatten())
    }
}

/// The runs that a mutant may need: quick tests of a program together, the others alone.
fn runs<'a>(reach: &'a Reach, id: u32) -> Vec<Run<'a>> {
    let mut quick: BTreeMap<usize, Run<'a>> = BTreeMap::new();
    let mut runs = Vec::new();
    for test in reach.of.get(&id).into_iter().flatten() {
        let Test {
            program,
            name,
            time,
        } = &reach.tests[*test];
        let (program, names, time) = (*program, vec![&**name], *time);
        if time >= QUICK {
            runs.push(Run {
                program,
                names,
                time,
            });
            continue;
        }
        match quick.get_mut(&program) {
            Some(run) => {
                run.names.extend(names);
                run.time += time;
            }
            None => {
                let run = Run {
                    program,
                    names,
                    time,
                };
                quick.insert(program, run);
            }
        }
    }
    runs.extend(quick.into_values());
    runs
}

/// Puts those first that notice most in their time, as far as is known of the file's other mutants.
fn sort<'a>(runs: &mut [Run<'a>], record: &Record<'a>, file: &'a str) {
    runs.sort_by_cached_key(|run| {
        let [tried, noticed] = record.get(&run.key(file)).copied().unwrap_or_default();
        let share = (f64::from(noticed) + 0.5) / (f64::from(tried) + 1.0);
        // A process takes some milliseconds to start.
        ((run.time.as_secs_f64() + 0.01) / share * 1e6) as u64
    });
}

/// Tries each mutant of `ids`, `jobs` at a time, calling `progress(done, id, verdict)` after each.
///
/// # Errors
/// If a test cannot be started.
pub fn try_all(
    programs: &[Program],
    reach: &Reach,
    (mutants, ids): (&[Mutant], &[u32]),
    jobs: usize,
    progress: &(dyn Fn(usize, u32, &Verdict) + Sync),
) -> Result<BTreeMap<u32, Verdict>> {
    let verdicts = Mutex::new(BTreeMap::new());
    let record = Mutex::new(Record::new());
    in_parallel(ids.len(), jobs, |i| {
        let id = ids[i];
        let verdict = try_one(programs, reach, (id, &mutants[id as usize].file), &record)?;
        let mut verdicts = verdicts.lock().expect("no panic");
        progress(verdicts.len() + 1, id, &verdict);
        verdicts.insert(id, verdict);
        Ok(())
    })?;
    Ok(verdicts.into_inner().expect("no panic"))
}

fn try_one<'a>(
    programs: &[Program],
    reach: &'a Reach,
    (id, file): (u32, &'a str),
    record: &Mutex<Record<'a>>,
) -> Result<Verdict> {
    let mut runs = runs(reach, id);
    if runs.is_empty() {
        return Ok(Verdict::NotReached);
    }
    sort(&mut runs, &record.lock().expect("no panic"), file);
    for one in runs {
        let program = &programs[one.program];
        let mut command = command(program, &one.names);
        command.env("ATTN_MUTANT", id.to_string());
        let limit = one.time * 3 + Duration::from_secs(5);
        let end = run(command, limit)?.0;
        {
            let mut record = record.lock().expect("no panic");
            let [tried, noticed] = record.entry(one.key(file)).or_default();
            *tried += 1;
            *noticed += u32::from(end != End::Passed);
        }
        match end {
            End::Passed => {}
            End::Failed => return Ok(Verdict::Noticed(program.name.clone())),
            End::TimedOut => return Ok(Verdict::TimedOut(program.name.clone())),
        }
    }
    Ok(Verdict::Unnoticed)
}
