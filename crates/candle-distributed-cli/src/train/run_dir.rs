//! The folder of a run: what it is, its metrics, its checkpoints and its model.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use candle_nn::VarMap;
use serde::Serialize;
use serde_json::Value;

use crate::{
    error::{Error, Result},
    input, output,
    train::{curve, memory, metrics::Metrics, parameters, session::Session, settings::Settings},
};

const METRICS: &str = "metrics.jsonl";
const MODEL: &str = "model.safetensors";
const CURVE: &str = "loss.svg";
const CHECKPOINTS: &str = "checkpoints";

/// The folder of run `number`, where `--out` names none.
pub(crate) fn numbered(number: u32) -> PathBuf {
    Path::new("runs").join(format!("{number:04}"))
}

/// Where the run in `path` keeps its checkpoints.
pub(crate) fn checkpoints(path: &Path) -> PathBuf {
    path.join(CHECKPOINTS)
}

/// The steps of the run in `path`.
pub(crate) fn metrics(path: &Path) -> Result<Metrics> {
    Metrics::read(&path.join(METRICS))
}

/// Whether the run in `path` is complete.
pub(crate) fn is_complete(path: &Path) -> Result<bool> {
    is_there(path.join(MODEL))
}

fn is_there(path: PathBuf) -> Result<bool> {
    path.try_exists().map_err(|source| Error::read(path, source))
}

/// A folder that holds one run and never overwrites another.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// The last of its sessions is this one.
    settings: Settings,
    metrics: File,
}

impl RunDir {
    /// Makes the folder `path`, which must not hold a run.
    pub(crate) fn create(path: &Path, settings: &Settings) -> Result<Self> {
        if let Some(run) = Self::claim(path, settings)? {
            return Ok(run);
        }
        let held = Error::usage(format!("{} already holds a run or a model", path.display()));
        Err(held.hinted("resume that run with --resume, or choose another folder"))
    }

    /// Makes the first free folder of those that [`numbered`] names, and returns its number.
    pub(crate) fn create_numbered(settings: &Settings) -> Result<(u32, Self)> {
        let mut number = 1_u32;
        loop {
            match Self::claim(&numbered(number), settings)? {
                Some(run) => return Ok((number, run)),
                None => number += 1,
            }
        }
    }

    /// Opens the folder `path` to resume at `step`: metrics from there on are dropped, because the
    /// steps are about to be done again.
    pub(crate) fn resume(path: &Path, settings: &Settings, step: u64) -> Result<Self> {
        fs::create_dir_all(path).map_err(|source| Error::write(path, source))?;
        let metrics = path.join(METRICS);
        let known = match input::read_if_there(&metrics)? {
            Some(known) => String::from_utf8_lossy(&known).into_owned(),
            // A run may be killed before its first step, and `--resume` may start one.
            None => String::new(),
        };
        let is_kept = |line: &&str| step_of(line).is_some_and(|of_line| of_line < step);
        let kept: String =
            known.lines().take_while(is_kept).flat_map(|line| [line, "\n"]).collect();
        output::file(&metrics, kept.as_bytes())?;
        let file = File::options().append(true).open(&metrics);
        Self::open(path, settings, file.map_err(|source| Error::write(&metrics, source))?)
    }

    /// Makes the folder `path`; `None` if it holds a run or a model already.
    fn claim(path: &Path, settings: &Settings) -> Result<Option<Self>> {
        fs::create_dir_all(path).map_err(|source| Error::write(path, source))?;
        if is_complete(path)? || is_there(checkpoints(path))? {
            return Ok(None);
        }
        // Of two programs that start at once, one makes this file and the other fails to.
        match File::create_new(path.join(METRICS)) {
            Ok(metrics) => Self::open(path, settings, metrics).map(Some),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(Error::write(path, error)),
        }
    }

    fn open(path: &Path, settings: &Settings, metrics: File) -> Result<Self> {
        settings.write(path)?;
        Ok(Self { path: path.into(), settings: settings.clone(), metrics })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// This session.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    pub(crate) fn session(&self) -> &Session {
        self.settings.sessions.last().expect("a run is opened by one of its sessions")
    }

    /// Adds to the settings how much memory this session took, and draws how the run went so far.
    pub(crate) fn end_session(&mut self) -> Result<()> {
        // Memory of other devices is not that of the process.
        if let Some(session) = self.settings.sessions.last_mut()
            && session.on_processors
        {
            session.peak_bytes = memory::peak_bytes();
        }
        self.settings.write(&self.path)?;
        output::file(&self.path.join(CURVE), curve::draw(&metrics(&self.path)?)?.as_bytes())
    }

    /// Appends one line to the metrics.
    pub(crate) fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(line).map_err(io::Error::from);
        let written = line.and_then(|line| writeln!(self.metrics, "{line}"));
        written.map_err(|source| Error::write(self.path.join(METRICS), source))
    }

    /// Syncs the metrics to disk, so that they never have fewer steps than a checkpoint.
    pub(crate) fn sync(&self) -> Result<()> {
        self.metrics.sync_data().map_err(|source| Error::write(self.path.join(METRICS), source))
    }

    /// Writes the model, which completes the run.
    pub(crate) fn save(&self, vars: &VarMap) -> Result<()> {
        let path = self.path.join(MODEL);
        let bytes = serialized(vars).map_err(|source| Error::write(&path, source))?;
        output::file(&path, &bytes)
    }
}

/// The parameters as a safetensors file.
fn serialized(vars: &VarMap) -> io::Result<Vec<u8>> {
    let vars = parameters::by_name(vars).map_err(io::Error::other)?;
    let tensors = vars.iter().map(|(name, var)| (name, var.as_tensor()));
    safetensors::serialize(tensors, None).map_err(io::Error::other)
}

/// The step of a line of the metrics; `None` for half a line.
fn step_of(line: &str) -> Option<u64> {
    serde_json::from_str::<Value>(line).ok()?["step"].as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{error::ErrorKind, train::settings::tests::settings};

    fn is_refused(path: &Path) -> bool {
        RunDir::create(path, &settings()).is_err_and(|error| error.hint().is_some())
    }

    #[test]
    fn a_folder_that_holds_a_run_is_never_written_again() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        RunDir::create(&run, &settings()).unwrap();
        assert_eq!(Settings::read(&run).unwrap(), Some(settings()));
        assert!(is_refused(&run));

        let model = parent.path().join("model");
        fs::create_dir(&model).unwrap();
        fs::write(model.join(MODEL), "weights").unwrap();
        assert!(is_refused(&model));
        let file = RunDir::create(&model.join(MODEL), &settings());
        let is_write = |error: Error| matches!(*error.kind, ErrorKind::Write { .. });
        assert!(file.is_err_and(is_write), "a file is no folder");
    }

    #[test]
    fn metrics_after_the_checkpoint_are_dropped() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        let lines = |steps: std::ops::Range<u64>| {
            let lines: Vec<String> = steps.map(|step| format!("{{\"step\":{step}}}\n")).collect();
            lines.concat()
        };
        RunDir::create(&run, &settings()).unwrap();
        // The last line was cut off.
        fs::write(run.join(METRICS), lines(0..6) + "{\"ste").unwrap();
        for (step, kept) in [(9, 6), (4, 4), (0, 0)] {
            let mut resumed = RunDir::resume(&run, &settings(), step).unwrap();
            assert_eq!(fs::read_to_string(run.join(METRICS)).unwrap(), lines(0..kept));
            resumed.append(&serde_json::json!({ "step": kept })).unwrap();
            assert_eq!(fs::read_to_string(run.join(METRICS)).unwrap(), lines(0..kept + 1));
        }
        let started = parent.path().join("started");
        RunDir::resume(&started, &settings(), 0).unwrap();
        assert_eq!(Settings::read(&started).unwrap(), Some(settings()));
    }
}
