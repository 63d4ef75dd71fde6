//! What makes a run the same run when it is resumed: `run.json`.

use std::{
    io,
    path::{Path, PathBuf},
};

use candle_distributed::types::Fingerprint;
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    input, output,
    train::{model::Config, session::Session},
};

const FILE: &str = "run.json";

/// The version of the format of the file.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// What makes a run the same run when it is resumed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) format_version: u32,
    pub(crate) seed: u64,
    pub(crate) steps: u64,
    /// The text to learn from; this program's own sources if there is none.
    pub(crate) data: Option<PathBuf>,
    /// The fingerprint of that text, in hexadecimal digits.
    pub(crate) text: String,
    pub(crate) max_tokens: u64,
    /// The sizes of the model; runs of early versions do not record them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<Config>,
    /// Where it ran, in order; runs of early versions do not record it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sessions: Vec<Session>,
}

impl Settings {
    /// The settings of the run in `path`, if there is one.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>> {
        let path = path.join(FILE);
        let Some(text) = input::read_if_there(&path)? else { return Ok(None) };
        match serde_json::from_slice::<Self>(&text) {
            Ok(settings) if settings.format_version == FORMAT_VERSION => Ok(Some(settings)),
            Ok(Self { format_version, .. }) => Err(Error::usage(format!(
                "{} has format_version {format_version}, and this program reads {FORMAT_VERSION}",
                path.display()
            ))),
            Err(source) => Err(Error::json(path, "the settings of a run", source)),
        }
    }

    /// Writes the settings of the run in `path`.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let path = path.join(FILE);
        match serde_json::to_vec_pretty(self) {
            Ok(text) => output::file(&path, &text),
            Err(source) => Err(Error::write(path, io::Error::from(source))),
        }
    }

    /// A hash by which processes recognize that they start the same run at the same step.
    pub(crate) fn fingerprint(&self, step: u64) -> u32 {
        let mut fingerprint: Fingerprint =
            [self.seed, self.steps, self.max_tokens, step].into_iter().collect();
        fingerprint.bytes(self.text.as_bytes());
        // The upper half: a mesh compares numbers of 32 bits.
        (fingerprint.finish() >> 32) as u32
    }

    /// The same settings with another session, after those sessions whose steps are kept.
    pub(crate) fn with_session(mut self, session: Session) -> Self {
        self.sessions.retain(|earlier| earlier.first_step < session.first_step);
        self.sessions.push(session);
        self
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{collections::BTreeSet, fs};

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

    pub(crate) fn settings() -> Settings {
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
    fn settings_of_early_versions_are_read_and_sessions_whose_steps_are_lost_are_dropped() {
        let parent = tempfile::tempdir().unwrap();
        let early = r#"{
            "format_version": 1, "seed": 7, "steps": 20, "data": null, "text": "",
            "max_tokens": 4096
        }"#;
        fs::write(parent.path().join(FILE), early).unwrap();
        let known = Settings::read(parent.path()).unwrap().unwrap();
        assert_eq!(known, Settings { sessions: vec![], ..settings() });

        let steps = [0, 8, 12, 8];
        let resumed =
            steps.into_iter().fold(known, |known, step| known.with_session(session(step)));
        assert_eq!(resumed.sessions, [session(0), session(8)]);
    }

    #[test]
    fn a_fingerprint_tells_runs_and_steps_apart() {
        let run = settings();
        let others = [
            Settings { seed: 8, ..run.clone() },
            Settings { steps: 21, ..run.clone() },
            Settings { max_tokens: 4097, ..run.clone() },
            Settings { text: String::from("0"), ..run.clone() },
        ];
        let mut fingerprints: BTreeSet<u32> =
            others.iter().map(|other| other.fingerprint(0)).collect();
        fingerprints.extend([run.fingerprint(0), run.fingerprint(1)]);
        assert_eq!(fingerprints.len(), 6);
        // The same run elsewhere, or on other devices, is the same run.
        let moved = Settings { data: Some("text".into()), sessions: vec![], ..run.clone() };
        assert_eq!(moved.fingerprint(3), run.fingerprint(3));
    }
}
