//! The options of a run.

use std::path::{Path, PathBuf};

use crate::{
    cost::sharding::Sharding,
    data::dataset::Rows,
    error::{Result, spec::SpecError},
    spec::{Recipe, Spec, variant_name},
    text::examples::Overlong,
};

/// The options of a run: model, texts, batches, learning, sharding, and the folder of the run.
///
/// `None` stands for the default of a new run, or for the value that a resumed run started with. A
/// resumed run rejects other values, but for `out`, `data`, `sharding` and `checkpoint_every`, which
/// may change.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Folder of the run, or `None` for the next free one under `runs`.
    pub out: Option<PathBuf>,
    /// Whether to resume the run in `out`, or to start it if it is new.
    pub resume: bool,
    /// Folder of the model, as Hugging Face's tools write it or of a run that has ended, or `None` for
    /// a small new model of bytes.
    pub model: Option<PathBuf>,
    /// Number of blocks of the small model: 2 by default.
    pub n_layers: Option<usize>,
    /// Width of the residual stream of the small model: 128 by default.
    pub hidden: Option<usize>,
    /// Number of attention heads of the small model: 4 by default.
    pub n_heads: Option<usize>,
    /// Seed of random weights, which replace the weights in the folder of the model.
    pub init: Option<u64>,
    /// File or folder of the texts, or `None` for short stories that the small model learns from.
    pub data: Option<PathBuf>,
    /// Most tokens of a sequence: by default as many as the longest has.
    pub context: Option<usize>,
    /// Layout of sequences in rows: padded by default.
    pub rows: Option<Rows>,
    /// Treatment of longer texts: by default they are an error, and the small model splits them.
    pub overlong: Option<Overlong>,
    /// Number of sequences in a step of all devices, or of packed rows.
    pub batch_size: Option<u64>,
    /// Most padded tokens in a step of all devices: by default 4096, or one longest sequence for each
    /// device.
    pub max_tokens: Option<u64>,
    /// Number of steps: 300 by default.
    pub steps: Option<u64>,
    /// Seed of random weights and of the order of the examples: 0 by default.
    pub seed: Option<u64>,
    /// Fraction of the examples that is held out for validation.
    pub validation: Option<f64>,
    /// Number of steps from one validation to the next: 50 by default.
    pub validate_every: Option<u64>,
    /// Whether the run ends with a model into which its adapters are merged.
    pub merge: bool,
    /// Options of learning.
    pub recipe: Recipe,
    /// Sharding of the model, or `None` if every device has all of it.
    pub sharding: Option<Sharding>,
    /// Number of steps from one checkpoint to the next: 50 by default.
    pub checkpoint_every: Option<u64>,
    /// Whether the run goes on after a loss that is not finite.
    pub allow_non_finite: bool,
}

impl RunOptions {
    /// Returns the folder of the run to resume.
    pub(super) fn resumed(&self) -> Option<&Path> {
        self.out.as_deref().filter(|_| self.resume)
    }

    /// Checks values that are invalid for every run.
    pub(super) fn check(&self) -> Result<()> {
        for (name, value) in [
            ("batch_size", self.batch_size),
            ("validate_every", self.validate_every),
            ("checkpoint_every", self.checkpoint_every),
            ("steps", self.steps),
        ] {
            if value == Some(0) {
                return Err(SpecError::setting(name, &0, "at least 1".into()).into());
            }
        }
        for (name, path) in [("model", &self.model), ("data", &self.data)] {
            if let Some(path) = path.as_ref().filter(|path| path.to_str().is_none()) {
                return Err(SpecError::NotUtf8 { name, path: path.clone() }.into());
            }
        }
        Ok(())
    }

    /// Checks that no option contradicts the description of the run that is resumed.
    pub(super) fn check_resumed(&self, known: &Spec) -> Result<()> {
        let inputs = &known.finetune;
        let own = inputs.folder.is_none().then_some(&inputs.config);
        let size = |field: &str| own.map(|config| config[field].to_string());
        let validation = inputs.validation;
        let model = self.model.as_ref().filter(|_| own.is_some());
        for (name, asked, started) in [
            ("context", text(self.context), text(Some(inputs.context))),
            ("n_layers", text(self.n_layers), size("num_hidden_layers")),
            ("hidden", text(self.hidden), size("hidden_size")),
            ("n_heads", text(self.n_heads), size("num_attention_heads")),
            ("steps", text(self.steps), text(Some(known.steps))),
            ("seed", text(self.seed), text(Some(known.seed))),
            ("max_tokens", text(self.max_tokens), text(Some(known.max_tokens))),
            ("init", text(self.init), text(inputs.init)),
            ("rows", self.rows.as_ref().map(variant_name), Some(variant_name(&inputs.rows))),
            ("batch_size", text(self.batch_size), text(inputs.batch_size)),
            (
                "overlong",
                self.overlong.as_ref().map(variant_name),
                Some(variant_name(&inputs.overlong)),
            ),
            ("validation", text(self.validation), text(validation.map(|known| known.fraction))),
            (
                "validate_every",
                text(self.validate_every),
                text(validation.map(|known| known.every)),
            ),
            ("merge", self.merge.then(String::new), inputs.merge.then(String::new)),
            ("model", text(model.map(|path| path.display())), None),
        ] {
            check_same(name, asked, started)?;
        }
        for ((name, asked), (_, started)) in
            self.recipe.options().into_iter().zip(known.recipe.options())
        {
            check_same(name, asked, started)?;
        }
        Ok(())
    }
}

fn text(value: Option<impl ToString>) -> Option<String> {
    value.map(|value| value.to_string())
}

/// Checks that an option is not given another value than the run started with.
fn check_same(name: &'static str, asked: Option<String>, started: Option<String>) -> Result<()> {
    if asked.is_none() || asked == started {
        return Ok(());
    }
    Err(SpecError::ResumeMismatch { name, started }.into())
}
