//! The folder of a run: what it is, its metrics, its checkpoints and its model.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use candle_distributed::types::Seed;
use candle_nn::VarMap;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    error::{Error, Result},
    output,
    train::{curve, memory, metrics::Metrics, model::Config, parameters},
};

const SETTINGS: &str = "run.json";
const METRICS: &str = "metrics.jsonl";
const MODEL: &str = "model.safetensors";
const CURVE: &str = "loss.svg";
const CHECKPOINTS: &str = "checkpoints";

/// The form of the settings.
pub(crate) const FORMAT_VERSION: u32 = 1;

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
    /// The sizes of the model; runs of earlier versions do not tell them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<Config>,
    /// Where it ran, in order; runs of earlier versions do not tell it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sessions: Vec<Session>,
}

/// A part of a run, from its begin or from where it was gone on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Session {
    /// How many steps were done before it.
    pub(crate) first_step: u64,
    pub(crate) world_size: u64,
    /// How many of these devices the process had that writes this.
    pub(crate) devices_here: u64,
    /// Whether they were processors, whose memory is that of the process.
    pub(crate) on_processors: bool,
    /// The most memory that the process had, if it came to an orderly end and the system tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peak_bytes: Option<u64>,
}

impl Settings {
    /// Those of the run in `path`, if there is one.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>> {
        let path = path.join(SETTINGS);
        let Some(text) = read(&path)? else { return Ok(None) };
        match serde_json::from_slice::<Self>(&text) {
            Ok(settings) if settings.format_version == FORMAT_VERSION => Ok(Some(settings)),
            Ok(Self { format_version, .. }) => Err(Error::Usage(format!(
                "{} has the format_version {format_version}, this program reads {FORMAT_VERSION}",
                path.display()
            ))),
            Err(source) => Err(Error::Json { path, what: "the settings of a run", source }),
        }
    }

    /// A number that another run hardly has, or this one at another step.
    pub(crate) fn fingerprint(&self, step: u64) -> u32 {
        let text = u64::from_str_radix(&self.text, 16).unwrap_or_default();
        let of_all = [self.seed, self.steps, text, self.max_tokens, step]
            .into_iter()
            .fold(Seed::new(0), Seed::derive);
        u32::try_from(of_all.as_u64() >> 32).unwrap_or_default()
    }

    fn write(&self, path: &Path) -> Result<()> {
        let path = path.join(SETTINGS);
        let text = serde_json::to_string_pretty(self).map_err(io::Error::from);
        output::file(
            &path,
            text.map_err(|source| Error::Write { path: path.clone(), source })?.as_bytes(),
        )
    }

    /// The same, with another session after those whose steps are kept.
    pub(crate) fn with_session(mut self, session: Session) -> Self {
        self.sessions.retain(|earlier| earlier.first_step < session.first_step);
        self.sessions.push(session);
        self
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

/// The steps of the run in `path`.
pub(crate) fn metrics(path: &Path) -> Result<Metrics> {
    Metrics::read(&path.join(METRICS))
}

/// Whether the run in `path` has come to its end.
pub(crate) fn is_complete(path: &Path) -> Result<bool> {
    is_there(path.join(MODEL))
}

fn is_there(path: PathBuf) -> Result<bool> {
    path.try_exists().map_err(|source| Error::Read { path, source })
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
        let holds_one = || {
            let held = Error::Usage(format!("{} already holds a run or a model", path.display()));
            held.hinted("--resume goes on with a run; another one needs another folder")
        };
        Self::claim(path, settings)?.ok_or_else(holds_one)
    }

    /// Makes the first folder of those that [`numbered`] names that is free, and returns its
    /// number.
    pub(crate) fn create_numbered(settings: &Settings) -> Result<(u32, Self)> {
        let mut number = 1_u32;
        loop {
            match Self::claim(&numbered(number), settings)? {
                Some(run) => return Ok((number, run)),
                None => number += 1,
            }
        }
    }

    /// Opens the folder `path` to go on at `step`: metrics of later steps are forgotten, for they
    /// will come again.
    pub(crate) fn resume(path: &Path, settings: &Settings, step: u64) -> Result<Self> {
        let metrics = path.join(METRICS);
        let failed = |source| Error::Write { path: metrics.clone(), source };
        fs::create_dir_all(path).map_err(failed)?;
        let known = read(&metrics)?.unwrap_or_default();
        let known = String::from_utf8_lossy(&known);
        let is_kept = |line: &&str| step_of(line).is_some_and(|of_line| of_line < step);
        let kept: String =
            known.lines().take_while(is_kept).flat_map(|line| [line, "\n"]).collect();
        output::file(&metrics, kept.as_bytes())?;
        Self::open(path, settings, File::options().append(true).open(&metrics).map_err(failed)?)
    }

    /// `None` if there is a run or a model in `path` already.
    fn claim(path: &Path, settings: &Settings) -> Result<Option<Self>> {
        let failed = |source| Error::Write { path: path.into(), source };
        fs::create_dir_all(path).map_err(failed)?;
        if is_complete(path)? || is_there(checkpoints(path))? {
            return Ok(None);
        }
        match File::create_new(path.join(METRICS)) {
            Ok(metrics) => Self::open(path, settings, metrics).map(Some),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(failed(error)),
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

    /// This session, if it is known.
    pub(crate) fn session(&self) -> Option<&Session> {
        self.settings.sessions.last()
    }

    /// Adds to the settings how much memory this session took, and draws how the run went so far.
    pub(crate) fn end_session(&mut self) -> Result<()> {
        if let Some(session) =
            self.settings.sessions.last_mut().filter(|session| session.on_processors)
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
        written.map_err(|source| Error::Write { path: self.path.join(METRICS), source })
    }

    /// Brings the metrics to disk, so that a checkpoint never knows of more steps than they do.
    pub(crate) fn sync(&self) -> Result<()> {
        self.metrics
            .sync_data()
            .map_err(|source| Error::Write { path: self.path.join(METRICS), source })
    }

    /// Writes the model, which ends the run.
    pub(crate) fn save(&self, vars: &VarMap) -> Result<()> {
        let path = self.path.join(MODEL);
        let bytes = parameters::by_name(vars).map_err(io::Error::other).and_then(|vars| {
            let tensors = vars.iter().map(|(name, var)| (name, var.as_tensor()));
            safetensors::serialize(tensors, None).map_err(io::Error::other)
        });
        output::file(&path, &bytes.map_err(|source| Error::Write { path: path.clone(), source })?)
    }
}

/// The step that a line of the metrics is about; none for half a line.
fn step_of(line: &str) -> Option<u64> {
    serde_json::from_str::<Value>(line).ok()?["step"].as_u64()
}

/// What a file holds, if it is there.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { path: path.into(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(first_step: u64) -> Session {
        Session {
            first_step,
            world_size: 2,
            devices_here: 2,
            on_processors: true,
            peak_bytes: None,
        }
    }

    fn settings() -> Settings {
        Settings {
            format_version: 1,
            seed: 7,
            steps: 20,
            data: None,
            text: String::new(),
            max_tokens: 4096,
            model: None,
            sessions: vec![session(0)],
        }
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
    fn settings_of_earlier_versions_are_read_and_forgotten_sessions_forgotten() {
        let parent = tempfile::tempdir().unwrap();
        let earlier = r#"{"format_version": 1, "seed": 7, "steps": 20, "data": null, "text": "", "max_tokens": 4096}"#;
        fs::write(parent.path().join(SETTINGS), earlier).unwrap();
        let known = Settings::read(parent.path()).unwrap().unwrap();
        assert_eq!(known, Settings { sessions: vec![], ..settings() });

        let resumed =
            [0, 8, 12, 8].into_iter().fold(known, |known, step| known.with_session(session(step)));
        assert_eq!(resumed.sessions, [session(0), session(8)]);
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
