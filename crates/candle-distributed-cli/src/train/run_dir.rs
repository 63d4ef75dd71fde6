//! The folder of a run: what it is, its metrics, its checkpoints and its model.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use candle_nn::VarMap;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    error::{Error, Result},
    train::parameters,
};

const SETTINGS: &str = "run.json";
const METRICS: &str = "metrics.jsonl";
const MODEL: &str = "model.safetensors";
const CHECKPOINTS: &str = "checkpoints";

/// What makes a run the same run when it is gone on with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) format_version: u32,
    pub(crate) seed: u64,
    pub(crate) steps: u64,
    /// The text to learn from; this program's own if there is none.
    pub(crate) data: Option<PathBuf>,
    /// A number of that text, in hexadecimal digits.
    pub(crate) text: String,
    pub(crate) max_tokens: u64,
}

impl Settings {
    /// Those of the run in `path`, if there is one.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>> {
        let path = path.join(SETTINGS);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|source| Error::Json {
                path,
                what: "the settings of a run",
                source,
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Read { path, source }),
        }
    }
}

/// The folder of run `number`, of those that were given no folder.
pub(crate) fn numbered(number: u32) -> PathBuf {
    Path::new("runs").join(format!("{number:04}"))
}

/// Where the run in `path` keeps its checkpoints.
pub(crate) fn checkpoints(path: &Path) -> PathBuf {
    path.join(CHECKPOINTS)
}

/// Whether the run in `path` has come to its end.
pub(crate) fn is_complete(path: &Path) -> bool {
    path.join(MODEL).exists()
}

/// A folder that holds one run and never overwrites another.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    metrics: File,
}

impl RunDir {
    /// Makes the folder `path`, which must not hold a run.
    pub(crate) fn create(path: &Path, settings: &Settings) -> Result<Self> {
        let holds_one = || {
            let held = Error::Usage(format!("{} already holds a run or a model", path.display()));
            held.hinted("--resume goes on with a run; another one needs another folder")
        };
        Self::claim(path, settings)?.ok_or_else(holds_one)
    }

    /// Makes the first folder of those that [`numbered`] names that is free, and returns its number.
    pub(crate) fn create_numbered(settings: &Settings) -> Result<(u32, Self)> {
        let mut number = 1_u32;
        loop {
            match Self::claim(&numbered(number), settings)? {
                Some(run) => return Ok((number, run)),
                None => number += 1,
            }
        }
    }

    /// Opens the folder `path` to go on at `step`: metrics of later steps are forgotten, for they will come again.
    pub(crate) fn resume(path: &Path, settings: &Settings, step: u64) -> Result<Self> {
        let metrics = path.join(METRICS);
        let failed = |source| Error::Write { path: metrics.clone(), source };
        fs::create_dir_all(path).map_err(failed)?;
        let known = fs::read_to_string(&metrics).unwrap_or_default();
        let is_kept = |line: &&str| step_of(line).is_some_and(|of_line| of_line < step);
        let kept: String = known.lines().take_while(is_kept).flat_map(|line| [line, "\n"]).collect();
        replace(&metrics, kept.as_bytes())?;
        Self::open(path, settings, File::options().append(true).open(&metrics).map_err(failed)?)
    }

    /// `None` if there is a run or a model in `path` already.
    fn claim(path: &Path, settings: &Settings) -> Result<Option<Self>> {
        let failed = |source| Error::Write { path: path.into(), source };
        fs::create_dir_all(path).map_err(failed)?;
        if is_complete(path) {
            return Ok(None);
        }
        match File::create_new(path.join(METRICS)) {
            Ok(metrics) => Self::open(path, settings, metrics).map(Some),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    fn open(path: &Path, settings: &Settings, metrics: File) -> Result<Self> {
        let text = serde_json::to_string_pretty(settings).map_err(io::Error::from);
        let text = text.map_err(|source| Error::Write { path: path.join(SETTINGS), source })?;
        replace(&path.join(SETTINGS), text.as_bytes())?;
        Ok(Self { path: path.into(), metrics })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends one line to the metrics.
    pub(crate) fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(line).map_err(io::Error::from);
        let written = line.and_then(|line| writeln!(self.metrics, "{line}"));
        written.map_err(|source| Error::Write { path: self.path.join(METRICS), source })
    }

    /// Writes the model, which ends the run.
    pub(crate) fn save(&self, vars: &VarMap) -> Result<()> {
        let path = self.path.join(MODEL);
        let bytes = parameters::by_name(vars).map_err(io::Error::other).and_then(|vars| {
            let tensors = vars.iter().map(|(name, var)| (name, var.as_tensor()));
            safetensors::serialize(tensors, None).map_err(io::Error::other)
        });
        replace(&path, &bytes.map_err(|source| Error::Write { path: path.clone(), source })?)
    }
}

/// The step that a line of the metrics is about; none for half a line.
fn step_of(line: &str) -> Option<u64> {
    serde_json::from_str::<Value>(line).ok()?["step"].as_u64()
}

/// Writes a file beside its place and renames it, so that no reader ever sees half of one.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> io::Result<()> {
        let partial = path.with_extension("partial");
        let mut file = File::create(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(partial, path)
    };
    write().map_err(|source| Error::Write { path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings { format_version: 1, seed: 7, steps: 20, data: None, text: String::new(), max_tokens: 4096 }
    }

    #[test]
    fn a_folder_that_holds_a_run_is_never_written_again() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        RunDir::create(&run, &settings()).unwrap();
        assert_eq!(Settings::read(&run).unwrap(), Some(settings()));
        assert!(matches!(RunDir::create(&run, &settings()), Err(Error::Hinted { .. })));

        let model = parent.path().join("model");
        fs::create_dir(&model).unwrap();
        fs::write(model.join(MODEL), "weights").unwrap();
        assert!(matches!(RunDir::create(&model, &settings()), Err(Error::Hinted { .. })));
        let file = RunDir::create(&model.join(MODEL), &settings());
        assert!(matches!(file, Err(Error::Write { .. })), "a file is no folder");
    }

    #[test]
    fn metrics_after_the_checkpoint_are_forgotten() {
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
        let begun = parent.path().join("begun");
        RunDir::resume(&begun, &settings(), 0).unwrap();
        assert_eq!(Settings::read(&begun).unwrap(), Some(settings()));
    }
}
