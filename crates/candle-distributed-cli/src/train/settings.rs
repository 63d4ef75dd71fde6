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
        model_file,
        pretrained::Pretrained,
        recipe::Recipe,
        session::Session,
        transformer::{Config, LINEAR_LAYERS, MODEL, Transformer},
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
    /// The text to learn from; this program's own sources if there is none.
    pub(crate) data: Option<PathBuf>,
    /// The fingerprint of that text, in hexadecimal digits.
    pub(crate) text: String,
    pub(crate) max_tokens: u64,
    /// Whether a loss that is not a number lets the run go on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) allow_non_finite: bool,
    /// The sizes of the model; runs of early versions do not record them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<Config>,
    /// The model that it began with; new parameters by its seed if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) weights: Option<Pretrained>,
    /// The model of a folder that it fine-tunes; the transformer over bytes if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) finetune: Option<Finetune>,
    /// How it learns.
    #[serde(default, skip_serializing_if = "Recipe::is_default")]
    pub(crate) recipe: Recipe,
    /// Where it ran, in order; runs of early versions do not record it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sessions: Vec<Session>,
    /// The fingerprint of what makes it this run, by which damage is noticed; early versions do not
    /// write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) identity: Option<String>,
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
        if self.identity.as_ref().is_some_and(|known| *known != self.identity()) {
            return Err(Error::usage(format!(
                "{name} is damaged: seed, steps, text, max_tokens, model, weights, finetune or recipe \
                 is not what was written"
            )));
        }
        self.config().check()?;
        self.recipe.check(self.steps)?;
        self.check_weights()
    }

    /// Refuses adapters of parameters that have learnt nothing.
    pub(crate) fn check_weights(&self) -> Result<()> {
        match (self.recipe.lora, &self.weights) {
            (Some(rank), None) if self.finetune.is_none() => {
                let missing =
                    format!("--lora {rank} needs the --weights that its adapters are for");
                Err(Error::usage(missing).hinted(hint::WEIGHTS))
            }
            _ => Ok(()),
        }
    }

    /// Refuses the model of another run that has other heads: their number leaves no trace in the
    /// shapes of its parameters, and it would be another model in silence.
    pub(crate) fn check_heads(&self) -> Result<()> {
        let Some(weights) = &self.weights else { return Ok(()) };
        let folder =
            weights.path.parent().filter(|path| model_file::in_folder(path) == weights.path);
        let Some(run) = folder.map(Self::read).transpose()?.flatten() else { return Ok(()) };
        let (found, own) = (run.config().heads, self.config().heads);
        if found == own {
            return Ok(());
        }
        let path = weights.path.display();
        let other = format!("{path} was trained with --n-heads {found}, this run has {own}");
        Err(Error::usage(other).hinted(hint::WEIGHTS))
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

    /// The sizes of the transformer over bytes. Early versions, which do not record them, trained this one alone.
    pub(crate) fn config(&self) -> Config {
        self.model.unwrap_or(MODEL)
    }

    /// The model.
    pub(crate) fn trained_model(&self) -> Result<Model> {
        let Some(finetune) = &self.finetune else {
            let lora = self.recipe.adapters(&LINEAR_LAYERS)?;
            return Ok(Model::Bytes(Transformer { config: self.config(), lora }));
        };
        let llama = finetune.llama()?;
        Ok(Model::Llama(match self.recipe.adapters(&ADAPTED)? {
            Some(lora) => llama.with_lora(lora),
            None => llama,
        }))
    }

    /// The weights that it began with, a file or a folder; random ones if there are none.
    pub(crate) fn pretrained(&self) -> Option<&Path> {
        match &self.finetune {
            Some(finetune) if finetune.init.is_some() => None,
            Some(finetune) => Some(&finetune.folder),
            None => self.weights.as_ref().map(|weights| weights.path.as_path()),
        }
    }

    /// Whether sequences share the rows of a batch.
    pub(crate) fn is_packed(&self) -> bool {
        self.finetune.as_ref().is_some_and(|finetune| finetune.rows == Rows::Packed)
    }

    /// How sequences are put into steps.
    pub(crate) fn batching(&self) -> Batching {
        let bucketed = Batching::bucketed(self.max_tokens);
        let Some(&Finetune { rows, batch_size, context, .. }) = self.finetune.as_ref() else {
            return bucketed;
        };
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
        fingerprint.bytes(self.text.as_bytes());
        if let Some(Config { vocabulary, context, layers, heads, hidden }) = self.model {
            let sizes = [vocabulary, context, layers, heads, hidden];
            fingerprint.extend(sizes.map(|size| size as u64));
        }
        if let Some(Pretrained { fingerprint: weights, .. }) = &self.weights {
            fingerprint.bytes(weights.as_bytes());
        }
        if let Some(finetune) = &self.finetune {
            fingerprint.bytes(finetune.words().as_bytes());
        }
        // Runs of earlier versions keep their identity.
        if !self.recipe.is_default() {
            fingerprint.bytes(self.recipe.words().as_bytes());
        }
        format!("{:016x}", fingerprint.finish())
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
            sharding: None,
            base_bytes: None,
            step_traffic: None,
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
            allow_non_finite: false,
            model: None,
            weights: None,
            finetune: None,
            recipe: Recipe::default(),
            sessions: vec![session(0)],
            identity: None,
            model_files: vec![],
            model_fingerprint: None,
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
    fn an_identity_tells_runs_apart() {
        let run = settings();
        let weights = Pretrained { path: "a".into(), fingerprint: String::from("0") };
        let clipped = serde_json::from_str(r#"{"max_grad_norm": 1}"#).unwrap();
        let others = [
            Settings { seed: 8, ..run.clone() },
            Settings { steps: 21, ..run.clone() },
            Settings { max_tokens: 4097, ..run.clone() },
            Settings { text: String::from("0"), ..run.clone() },
            Settings { model: Some(MODEL), ..run.clone() },
            Settings { recipe: clipped, ..run.clone() },
            Settings { weights: Some(weights.clone()), ..run.clone() },
        ];
        let mut identities: BTreeSet<String> = others.iter().map(Settings::identity).collect();
        identities.insert(run.identity());
        assert_eq!(identities.len(), 8);
        // The same run elsewhere, or on other devices, is the same run.
        let moved = Settings { data: Some("text".into()), sessions: vec![], ..run.clone() };
        assert_eq!(moved.identity(), run.identity());
    }

    #[test]
    fn settings_that_have_changed_on_disk_are_refused() {
        let parent = tempfile::tempdir().unwrap();
        let run = settings();
        let run = Settings { identity: Some(run.identity()), ..run };
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
