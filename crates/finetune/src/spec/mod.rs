//! What makes a run the same run when it is resumed: `run.json`.

use std::path::{Path, PathBuf};

use candle_distributed::{
    batch::{DynamicBatchStrategy, Packing},
    types::{Fingerprint, Seed},
};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    hint, input, output,
    train::{
        data::{Batching, ORDER_STREAM, Schedule},
        finetune::{ADAPTED, Finetune, Rows},
        model::Model,
        recipe::Recipe,
        session::Session,
    },
};

pub(crate) const FILE: &str = "run.json";

/// The version of the format of the file.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// What makes a run the same run when it is resumed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) format_version: u32,
    pub(crate) seed: u64,
    pub(crate) steps: u64,
    /// The text to learn from; `None` for short stories.
    pub(crate) data: Option<PathBuf>,
    /// The fingerprint of that text, in hexadecimal digits.
    pub(crate) text: String,
    pub(crate) max_tokens: u64,
    /// Whether a loss that is not a number lets the run go on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) allow_non_finite: bool,
    /// The model, and how it is trained.
    pub(crate) finetune: Finetune,
    /// How it learns.
    #[serde(default, skip_serializing_if = "Recipe::is_default")]
    pub(crate) recipe: Recipe,
    /// Where it ran, in order. A run that has begun has at least one.
    pub(crate) sessions: Vec<Session>,
    /// The fingerprint of what makes it this run, by which damage is noticed.
    pub(crate) identity: String,
    /// The files that the run wrote into the folder of its model, once there is one: others may be
    /// put beside them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) model_files: Vec<String>,
    /// The fingerprint of the model's file, or of those files, once there are some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) model_fingerprint: Option<String>,
}

impl Settings {
    /// The settings of the run in `path`, if there is one.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>> {
        let path = path.join(FILE);
        let Some(text) = input::read_if_there(&path)? else { return Ok(None) };
        let settings: Self = serde_json::from_slice(&text)
            .map_err(|source| Error::json(&path, "the settings of a run", source))?;
        settings.check(&path)?;
        Ok(Some(settings))
    }

    /// Checks that this program can read the settings, and that they are as they were written.
    fn check(&self, path: &Path) -> Result<()> {
        let name = path.display();
        if self.format_version != FORMAT_VERSION {
            return Err(Error::usage(format!(
                "{name} has format_version {}, and this program reads {FORMAT_VERSION}",
                self.format_version
            )));
        }
        if self.identity != self.identity() || self.sessions.is_empty() {
            return Err(Error::usage(format!(
                "{name} is damaged: seed, steps, text, max_tokens, finetune, recipe \
                 or sessions is not what was written"
            )));
        }
        self.recipe.check(self.steps)?;
        self.check_adapters()
    }

    /// Refuses adapters of parameters that have learnt nothing.
    pub(crate) fn check_adapters(&self) -> Result<()> {
        match (self.recipe.lora, &self.finetune.folder) {
            (Some(rank), None) => {
                let missing = format!("--lora {rank} needs the --model that its adapters are for");
                Err(Error::usage(missing).hinted(hint::MODEL_OPTION))
            }
            _ => Ok(()),
        }
    }

    /// Writes the settings of the run in `path`.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let path = path.join(FILE);
        output::file(&path, &self.encoded(&path)?)
    }

    /// The same where there must be none yet.
    pub(crate) fn write_new(&self, path: &Path) -> Result<()> {
        let path = path.join(FILE);
        output::new_file(&path, &self.encoded(&path)?)
    }

    fn encoded(&self, path: &Path) -> Result<Vec<u8>> {
        serde_json::to_vec_pretty(self).map_err(|source| Error::write(path, source.into()))
    }

    /// The model.
    pub(crate) fn trained_model(&self) -> Result<Model> {
        let llama = self.finetune.llama()?;
        Ok(Model(match self.recipe.adapters(&ADAPTED)? {
            Some(lora) => llama.with_lora(lora),
            None => llama,
        }))
    }

    /// The folder of the weights that it began with; `None` if they were made at random.
    pub(crate) fn pretrained(&self) -> Option<&Path> {
        match self.finetune.init {
            Some(_) => None,
            None => self.finetune.folder.as_deref(),
        }
    }

    /// Whether sequences share the rows of a batch.
    pub(crate) fn is_packed(&self) -> bool {
        self.finetune.rows == Rows::Packed
    }

    /// How sequences are put into steps.
    pub(crate) fn batching(&self) -> Batching {
        let bucketed = Batching::bucketed(self.max_tokens);
        let Finetune { rows, batch_size, context, .. } = self.finetune;
        match (rows, batch_size) {
            (Rows::Padded, None) => bucketed,
            (Rows::Padded, Some(_)) => Batching {
                strategy: DynamicBatchStrategy::PadToMax,
                max_batch_size: batch_size,
                ..bucketed
            },
            (Rows::Packed, _) => Batching {
                strategy: DynamicBatchStrategy::Pack(Packing::BestFit),
                max_tokens: context as u64,
                max_batch_size: None,
                batches: (self.max_tokens / context as u64).max(1),
            },
        }
    }

    /// The steps of sequences of these lengths.
    pub(crate) fn schedule(&self, lengths: Vec<u64>) -> Result<Schedule> {
        let seed = Seed::new(self.seed).derive(ORDER_STREAM);
        Schedule::new(lengths, seed, &self.batching())
    }

    /// A hash of all that decides about the parameters after each step, in hexadecimal digits.
    pub(crate) fn identity(&self) -> String {
        let mut fingerprint: Fingerprint =
            [self.seed, self.steps, self.max_tokens].into_iter().collect();
        fingerprint.write_bytes(self.text.as_bytes());
        fingerprint.write_bytes(self.finetune.words().as_bytes());
        fingerprint.write_bytes(self.recipe.words().as_bytes());
        format!("{:016x}", fingerprint.finish())
    }

    /// Returns the latest session, which a run has that is read or trained.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    pub(crate) fn session(&self) -> &Session {
        self.sessions.last().expect("a run is opened by one of its sessions")
    }

    /// Returns the settings with their identity.
    pub(crate) fn sealed(self) -> Self {
        Self { identity: self.identity(), ..self }
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
    use crate::{
        hf::{examples::Overlong, folder::Folder},
        train::{built_in, finetune::tokenizer_fingerprint},
    };

    fn session(first_step: u64) -> Session {
        Session {
            first_step,
            world_size: 2,
            devices_here: 2,
            on_processors: true,
            sharding: None,
            base_bytes: None,
            step_traffic: None,
            peak_bytes: None,
        }
    }

    /// The model of this program.
    pub(crate) fn finetune() -> Finetune {
        finetune_of(&built_in::Sizes::default())
    }

    /// The same of other sizes.
    pub(crate) fn finetune_of(sizes: &built_in::Sizes) -> Finetune {
        let config = built_in::config(sizes, None).unwrap();
        let folder = Folder::of_config(config.to_string()).unwrap();
        Finetune {
            folder: None,
            config,
            weights: None,
            init: Some(7),
            tokenizer: tokenizer_fingerprint(&folder),
            context: 128,
            rows: Rows::Padded,
            overlong: Overlong::Split,
            batch_size: None,
            validation: None,
            merge: true,
        }
    }

    pub(crate) fn settings() -> Settings {
        let settings = Settings {
            format_version: 1,
            seed: 7,
            steps: 20,
            data: None,
            text: String::new(),
            max_tokens: 4096,
            allow_non_finite: false,
            finetune: finetune(),
            recipe: Recipe::default(),
            sessions: vec![session(0)],
            identity: String::new(),
            model_files: vec![],
            model_fingerprint: None,
        };
        settings.sealed()
    }

    #[test]
    fn sessions_whose_steps_are_lost_are_dropped() {
        let steps = [8, 12, 8];
        let resumed =
            steps.into_iter().fold(settings(), |known, step| known.with_session(session(step)));
        assert_eq!(resumed.sessions, [session(0), session(8)]);
    }

    #[test]
    fn an_identity_tells_runs_apart() {
        let run = settings();
        let other = Finetune { init: Some(8), ..finetune() };
        let clipped = serde_json::from_str(r#"{"max_grad_norm": 1}"#).unwrap();
        let others = [
            Settings { seed: 8, ..run.clone() },
            Settings { steps: 21, ..run.clone() },
            Settings { max_tokens: 4097, ..run.clone() },
            Settings { text: String::from("0"), ..run.clone() },
            Settings { recipe: clipped, ..run.clone() },
            Settings { finetune: other, ..run.clone() },
        ];
        let mut identities: BTreeSet<String> = others.iter().map(Settings::identity).collect();
        identities.insert(run.identity());
        assert_eq!(identities.len(), 7);
        // The same run elsewhere, or on other devices, is the same run.
        let moved = Settings { data: Some("text".into()), sessions: vec![], ..run.clone() };
        assert_eq!(moved.identity(), run.identity());
    }

    #[test]
    fn settings_that_have_changed_on_disk_are_refused() {
        let parent = tempfile::tempdir().unwrap();
        let run = settings();
        run.write(parent.path()).unwrap();
        assert_eq!(Settings::read(parent.path()).unwrap().unwrap(), run);
        let file = parent.path().join(FILE);
        let written = fs::read_to_string(&file).unwrap();
        for (from, to) in [("\"seed\": 7", "\"seed\": 5"), ("\"steps\": 20", "\"steps\": 21")] {
            fs::write(&file, written.replace(from, to)).unwrap();
            let error = Settings::read(parent.path()).unwrap_err().to_string();
            assert!(error.contains("run.json is damaged"), "{error}");
        }
    }
}
