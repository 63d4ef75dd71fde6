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
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct RunOptions {
    /// Folder for metrics, checkpoints and the model; unless resumed, it must not hold a run yet
    /// [default: the next free runs/NUMBER]
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub out: Option<PathBuf>,
    /// Resume the run in that folder from its last checkpoint, on any number of devices, or start
    /// it if it is new
    #[cfg_attr(feature = "clap", arg(long, requires = "out"))]
    pub resume: bool,
    /// Text file, .jsonl file, or folder of such files [default: generated short stories, but not
    /// for a model of a folder]
    #[cfg_attr(feature = "clap", arg(long, value_name = "PATH"))]
    pub data: Option<PathBuf>,
    /// Number of optimizer steps [default: 300, or the number of a resumed run]
    #[cfg_attr(feature = "clap", arg(long))]
    pub steps: Option<u64>,
    /// Most tokens in a step of all devices, padding included [default: 4096, or one longest
    /// sequence per device if that is more]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub max_tokens: Option<u64>,
    /// Seed of the parameters and the shuffles [default: 0, or the seed of a resumed run]
    #[cfg_attr(feature = "clap", arg(long))]
    pub seed: Option<u64>,
    /// Write a checkpoint every N steps; the newest two are kept [default: 50]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub checkpoint_every: Option<u64>,
    /// Train on when the loss of a step is infinite or NaN, which otherwise ends the run
    #[cfg_attr(feature = "clap", arg(long))]
    pub allow_non_finite: bool,
    /// Fine-tune the model in this folder of Hugging Face's form (Llama, Qwen 2, Mistral), or of a
    /// run that has ended [default: a small new model of bytes]
    #[cfg_attr(
        feature = "clap",
        arg(
            long,
            value_name = "FOLDER",
            conflicts_with_all = ["n_layers", "hidden", "n_heads"],
            help_heading = "The model and its texts"
        )
    )]
    pub model: Option<PathBuf>,
    /// Begin with random weights of this seed, which needs only a config.json [default: the weights
    /// in the folder of the model; without a folder, the seed of the run]
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "SEED", help_heading = "The model and its texts")
    )]
    pub init: Option<u64>,
    /// Layout of sequences in the rows of a batch [default: padded]
    #[cfg_attr(feature = "clap", arg(long, value_enum, help_heading = "The model and its texts"))]
    pub rows: Option<Rows>,
    /// Number of sequences in a step of all devices, or of packed rows [default: as many as the
    /// most tokens have room for]
    #[cfg_attr(
        feature = "clap",
        arg(
            long,
            value_name = "N",
            conflicts_with = "max_tokens",
            help_heading = "The model and its texts"
        )
    )]
    pub batch_size: Option<u64>,
    /// Treatment of texts that are longer than the context [default: error; split for the small new
    /// model]
    #[cfg_attr(feature = "clap", arg(long, value_enum, help_heading = "The model and its texts"))]
    pub overlong: Option<Overlong>,
    /// Fraction of the examples to hold out: the loss on them is in validation.jsonl, and the model
    /// with the least such loss in the folder `best`
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "FRACTION", help_heading = "The model and its texts")
    )]
    pub validation: Option<f64>,
    /// Number of steps from one validation to the next [default: 50]
    #[cfg_attr(
        feature = "clap",
        arg(
            long,
            value_name = "N",
            requires = "validation",
            help_heading = "The model and its texts"
        )
    )]
    pub validate_every: Option<u64>,
    /// Also write the model with its adapters merged; random weights imply this, since they exist
    /// nowhere else
    #[cfg_attr(
        feature = "clap",
        arg(long, requires = "lora", help_heading = "The model and its texts")
    )]
    pub merge: bool,
    /// Options of learning.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub recipe: Recipe,
    /// Number of blocks [default: 2, or the number of a resumed run]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", help_heading = "The model"))]
    pub n_layers: Option<usize>,
    /// Width of the residual stream [default: 128, or the width of a resumed run]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", help_heading = "The model"))]
    pub hidden: Option<usize>,
    /// Number of attention heads, which divide the width [default: 4, or the number of a resumed
    /// run]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", help_heading = "The model"))]
    pub n_heads: Option<usize>,
    /// Most tokens of a sequence [default: as many as the longest text has, with packed rows at
    /// least 2048 if the model has as many positions; or the number of a resumed run]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", help_heading = "The model"))]
    pub context: Option<usize>,
    /// Sharding of the model, or `None` if every device has all of it.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub sharding: Option<Sharding>,
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
            check_same(name, asked.as_ref(), started)?;
        }
        for ((name, asked), (_, started)) in
            self.recipe.options().into_iter().zip(known.recipe.options())
        {
            check_same(name, asked.as_ref(), started)?;
        }
        Ok(())
    }
}

fn text(value: Option<impl ToString>) -> Option<String> {
    value.map(|value| value.to_string())
}

/// Checks that an option is not given another value than the run started with.
fn check_same(name: &'static str, asked: Option<&String>, started: Option<String>) -> Result<()> {
    if asked.is_none() || asked == started.as_ref() {
        return Ok(());
    }
    Err(SpecError::ResumeMismatch { name, started }.into())
}
