//! `cargo xtask soak`: kills processes of a training run again and again, damages its files, and
//! compares its end with an undisturbed run.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    cmd::{Call, Result},
    devices, workspace,
};

/// Kills ranks of a training run at random moments, damages its files and starts it twice at once.
/// Then checks that losses and model equal an undisturbed run to the bit.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of processes that train
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Number of kills; in the first half the run is also started a second time before every third
    /// kill
    #[arg(long, default_value_t = 20)]
    kills: usize,
    /// Number of steps of the run
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// Seed of the moments and ranks
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Profile of the build
    #[arg(long, default_value = "release")]
    profile: String,
}

/// Time limit for all processes to exit after a kill.
const LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the next step of a run.
const STEP_LIMIT: Duration = Duration::from_secs(240);
/// The run is started a second time before every kill with this multiple.
const SECOND_EVERY: usize = 3;
/// Often, so that many kills fall into the writing of a checkpoint.
const CHECKPOINT_EVERY: &str = "2";

pub(crate) fn run(args: &Args) -> Result {
    if args.ranks == 0 || args.steps <= args.kills {
        return Err("at least 1 rank, and more steps than kills, are needed".into());
    }
    let soak = SoakRun::new(args)?;
    println!("== {} steps on {} ranks, undisturbed", args.steps, args.ranks);
    soak.finish("undisturbed")?;
    let mut slowest = Duration::ZERO;
    let (mut n_refused, mut n_damaged) = (0, 0);
    for kill in 0..args.kills {
        let report = soak.disturb("disturbed", kill)?;
        let damage = soak.damage("disturbed", kill)?;
        slowest = slowest.max(report.ended_after);
        n_refused += usize::from(report.is_second_refused);
        n_damaged += usize::from(damage.is_some());
        let damage = damage.unwrap_or_else(|| "nothing is damaged".into());
        println!("== kill {} of {}: {report}; {damage}", kill + 1, args.kills);
    }
    soak.finish("disturbed")?;
    if soak.losses("disturbed")? != soak.losses("undisturbed")? {
        return Err("the losses differ from the undisturbed run".into());
    }
    if soak.model("disturbed")? != soak.model("undisturbed")? {
        return Err("the model differs from the undisturbed run".into());
    }
    println!(
        "== {} kills on {} ranks, {n_refused} second starts refused, {n_damaged} files damaged: all \
         processes ended within {:.1} s, losses and model are those of the undisturbed run",
        args.kills,
        args.ranks,
        slowest.as_secs_f64()
    );
    Ok(())
}

/// A soak: its options, program and folder.
struct SoakRun<'a> {
    args: &'a Args,
    program: PathBuf,
    home: PathBuf,
}

/// The outcome of one kill.
struct SoakReport {
    rank: usize,
    step: usize,
    ended_after: Duration,
    /// Whether a second start before the kill was rejected.
    is_second_refused: bool,
}

impl std::fmt::Display for SoakReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rank, step, ended_after, is_second_refused } = self;
        if *is_second_refused {
            write!(f, "a second start refused, ")?;
        }
        let seconds = ended_after.as_secs_f64();
        write!(f, "process {rank} after step {step}, all ended after {seconds:.1} s")
    }
}

impl<'a> SoakRun<'a> {
    fn new(args: &'a Args) -> Result<Self> {
        let build = Call::cargo(devices::MPI_TESTS).arg("--no-run");
        // The default of tests has the settings of `dev`.
        let build =
            if args.profile == "dev" { build } else { build.arg("--profile").arg(&args.profile) };
        build.run()?;
        let target = workspace::read()?.target_directory.into_std_path_buf();
        let folder = if args.profile == "dev" { "debug" } else { &args.profile };
        let program = target.join(folder).join("candle-distributed");
        let home = target.join("soak");
        if home.exists() {
            fs::remove_dir_all(&home)?;
        }
        fs::create_dir_all(&home)?;
        Ok(Self { args, program, home })
    }

    /// Starts the run, or resumes it.
    fn start(&self, name: &str) -> Result<Child> {
        let mut command = Command::new("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]);
        command.arg(self.args.ranks.to_string()).arg(&self.program);
        command.args([
            "train",
            "--engine",
            "mpi",
            "--resume",
            "--checkpoint-every",
            CHECKPOINT_EVERY,
            "--steps",
        ]);
        command.arg(self.args.steps.to_string()).arg("--out").arg(self.home.join(name));
        let log = File::options().create(true).append(true).open(self.home.join("log"))?;
        Ok(command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?)
    }

    /// Runs to the end.
    fn finish(&self, name: &str) -> Result {
        let mut run = self.start(name)?;
        let (mut steps, mut since) = (0, Instant::now());
        while run.try_wait()?.is_none() {
            let now = self.steps(name);
            if now != steps {
                (steps, since) = (now, Instant::now());
            }
            if since.elapsed() > STEP_LIMIT {
                self.end_all(name, &mut run)?;
                return Err(format!("the run made no step in {STEP_LIMIT:?} after {steps}").into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        if run.wait()?.success() { Ok(()) } else { Err(self.failed("the run failed")) }
    }

    /// Resumes the run, and kills one of its processes at a random moment.
    fn disturb(&self, name: &str, kill: usize) -> Result<SoakReport> {
        let random = |what: &str, limit: usize| random(self.args.seed, kill, what, limit);
        let (share, rank) =
            (self.args.steps / (self.args.kills + 1), random("rank", self.args.ranks));
        let step = kill * share + random("step", share.max(1));
        let mut run = self.start(name)?;
        let start = Instant::now();
        let mut processes = Vec::new();
        // The kill may hit a step, the writing of a checkpoint, or the start.
        let pause = Duration::from_micros(random("pause", 100_000) as u64);
        while self.steps(name) < step || processes.len() < self.args.ranks {
            processes = self.processes(name)?;
            if run.try_wait()?.is_some() {
                return Err(self.failed("the run ended before the kill"));
            }
            if start.elapsed() > STEP_LIMIT {
                self.end_all(name, &mut run)?;
                return Err(format!("step {step} was not reached in {STEP_LIMIT:?}").into());
            }
        }
        let is_second_refused = self.has_second_start(kill);
        if is_second_refused {
            self.refuse_second(name)?;
        }
        thread::sleep(pause);
        signal("-KILL", processes[rank])?;
        let killed = Instant::now();
        while run.try_wait()?.is_none() || !self.processes(name)?.is_empty() {
            if killed.elapsed() > LIMIT {
                self.end_all(name, &mut run)?;
                return Err(
                    format!("not all processes had ended {LIMIT:?} after one was killed").into()
                );
            }
            thread::sleep(Duration::from_millis(20));
        }
        if run.wait()?.success() {
            return Err(self.failed("the run succeeded although a process was killed"));
        }
        let ended_after = killed.elapsed();
        Ok(SoakReport { rank, step: self.steps(name), ended_after, is_second_refused })
    }

    /// Returns true if the run is started a second time before this kill. Only the first half has
    /// second starts: the run must not end during the several steps until the rejection. A soak of
    /// fewer than four kills therefore has none.
    fn has_second_start(&self, kill: usize) -> bool {
        kill.is_multiple_of(SECOND_EVERY) && kill + 1 < self.args.kills / 2
    }

    /// Starts the run a second time while it trains; the second start must fail and harm nothing.
    fn refuse_second(&self, name: &str) -> Result {
        let mut second = self.start(name)?;
        let start = Instant::now();
        while second.try_wait()?.is_none() {
            if start.elapsed() > LIMIT {
                self.end_all(name, &mut second)?;
                return Err(format!("a second start was not refused within {LIMIT:?}").into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        if second.wait()?.success() {
            return Err(self.failed("a second start of the run succeeded during the first"));
        }
        Ok(())
    }

    /// Flips a bit in a file of the newest checkpoint, at random and only if there is an older
    /// checkpoint; returns a description of the damage.
    fn damage(&self, name: &str, kill: usize) -> Result<Option<String>> {
        let random = |what: &str, limit: usize| random(self.args.seed, kill, what, limit);
        let mut checkpoints = folders(&self.home.join(name).join("checkpoints"))?;
        checkpoints.retain(|path| path.extension().is_none());
        checkpoints.sort();
        let [.., _, newest] = &checkpoints[..] else { return Ok(None) };
        if random("damage", 2) == 0 {
            return Ok(None);
        }
        let mut files: Vec<PathBuf> = entries(newest)?;
        files.sort();
        let file = &files[random("file", files.len())];
        let mut bytes = fs::read(file)?;
        let offset = random("byte", bytes.len());
        bytes[offset] ^= 1 << random("bit", 8);
        fs::write(file, bytes)?;
        Ok(Some(format!("byte {offset} of {} is damaged", file.display())))
    }

    /// Returns the number of steps in the metrics.
    fn steps(&self, name: &str) -> usize {
        let metrics = fs::read_to_string(self.home.join(name).join("metrics.jsonl"));
        metrics.map_or(0, |metrics| metrics.lines().count())
    }

    /// Returns the processes that train, without the launcher.
    fn processes(&self, name: &str) -> Result<Vec<u32>> {
        let pattern = format!(
            "^{} train .*--out {}$",
            self.program.display(),
            self.home.join(name).display()
        );
        let found = Command::new("pgrep").args(["-f", &pattern]).output()?;
        Ok(String::from_utf8(found.stdout)?.lines().filter_map(|line| line.parse().ok()).collect())
    }

    fn end_all(&self, name: &str, run: &mut Child) -> Result {
        self.processes(name)?.into_iter().try_for_each(|process| signal("-KILL", process))?;
        run.kill()?;
        run.wait()?;
        Ok(())
    }

    fn failed(&self, what: &str) -> Box<dyn std::error::Error> {
        format!("{what}; its output is in {}", self.home.join("log").display()).into()
    }

    fn losses(&self, name: &str) -> Result<Vec<Value>> {
        let metrics = fs::read_to_string(self.home.join(name).join("metrics.jsonl"))?;
        let losses =
            metrics.lines().map(|line| Ok(serde_json::from_str::<Value>(line)?["loss"].clone()));
        losses.collect()
    }

    fn model(&self, name: &str) -> Result<Vec<u8>> {
        Ok(fs::read(self.home.join(name).join("model/model.safetensors"))?)
    }
}

/// Returns the entries of a folder, none if it is missing.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(folder)?;
    Ok(entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<_>>()?)
}

/// Returns the folders in a folder, none if it is missing.
fn folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut entries = entries(folder)?;
    entries.retain(|path| path.is_dir());
    Ok(entries)
}

/// Returns a number below `below` that depends on all arguments.
#[expect(clippy::expect_used, reason = "a number below a `usize` is a `usize`")]
fn random(seed: u64, kill: usize, what: &str, limit: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    (seed, kill, what).hash(&mut hasher);
    usize::try_from(hasher.finish() % limit as u64).expect("it is below a `usize`")
}

fn signal(signal: &str, process: u32) -> Result {
    // A process that has exited meanwhile needs no signal.
    Command::new("kill").args([signal, &process.to_string()]).stderr(Stdio::null()).status()?;
    Ok(())
}
