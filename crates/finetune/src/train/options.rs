//! The options of a run.

use std::path::{Path, PathBuf};

use core_types::human::Printable;

use crate::{
    cost::sharding::Sharding,
    data::dataset::Rows,
    error::{Result, spec::SpecError},
    spec::{Recipe, Spec, variant_name},
    text::{examples::Overlong, source::TextSource},
};

/// Headings of the help.
#[cfg(feature = "clap")]
const TEXTS: &str = "Model folder and texts";
#[cfg(feature = "clap")]
const MODEL: &str = "The model";

/// The options of a run: model, texts, batches, learning, sharding, and the folder of the run.
///
/// `None` stands for the default of a new run, or for the value that a resumed run started with. A
/// resumed run rejects any other value, except for `out`, `data`, `sharding` and `checkpoint_every`,
/// which may change: `data` in its paths, and in its weights from the next step on.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct RunOptions {
    /// Folder for metrics, checkpoints and the model; a new run rejects a folder that holds a run
    /// [default: the next free runs/NUMBER]
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub out: Option<PathBuf>,
    /// Resume the run in the folder from its last checkpoint, on any number of devices, or start a
    /// run if the folder holds none
    #[cfg_attr(feature = "clap", arg(long, requires = "out"))]
    pub resume: bool,
    /// Text file, .jsonl file, or folder of such files; a model folder needs it. Several are mixed
    /// in proportion to their weights [default: generated short stories; weight 1, or the weight in
    /// a resumed run]
    #[cfg_attr(
        feature = "clap",
        arg(
            long,
            value_name = "PATH[:WEIGHT]",
            value_hint = clap::ValueHint::AnyPath,
            value_parser = source_parser()
        )
    )]
    pub data: Vec<TextSource>,
    /// Number of optimizer steps [default: 300, or the number of a resumed run]
    #[cfg_attr(feature = "clap", arg(long))]
    pub steps: Option<u64>,
    /// Maximum number of tokens in a step of all devices, padding included [default: 4096, or one
    /// longest sequence per device if that is more]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub max_tokens: Option<u64>,
    /// Seed of the parameters and the shuffles [default: 0, or the seed of a resumed run]
    #[cfg_attr(feature = "clap", arg(long))]
    pub seed: Option<u64>,
    /// Write a checkpoint every N steps; the newest two are kept [default: 50]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub checkpoint_every: Option<u64>,
    /// Continue if the loss of a step is infinite or NaN, which otherwise ends the run
    #[cfg_attr(feature = "clap", arg(long))]
    pub allow_non_finite: bool,
    /// Fine-tune the model in this folder: a Hugging Face folder (Llama, Qwen, Gemma, …), or a run
    /// that has ended [default: a small new byte-level model]
    #[cfg_attr(
        feature = "clap",
        arg(
            long,
            value_name = "FOLDER",
            conflicts_with_all = ["n_layers", "hidden", "n_heads"],
            help_heading = TEXTS
        )
    )]
    pub model: Option<PathBuf>,
    /// Start from random weights of this seed, so that the folder needs only a config.json [default:
    /// the weights in the model folder; without a folder, the seed of the run]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SEED", help_heading = TEXTS))]
    pub init: Option<u64>,
    /// Layout of sequences in the rows of a batch [default: padded]
    #[cfg_attr(feature = "clap", arg(long, value_enum, help_heading = TEXTS))]
    pub rows: Option<Rows>,
    /// Number of sequences, or of packed rows, in a step of all devices [default: as many as fit into
    /// the maximum number of tokens]
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "N", conflicts_with = "max_tokens", help_heading = TEXTS)
    )]
    pub batch_size: Option<u64>,
    /// Number of micro-batches of a step, which are trained in turn and need less memory: the next
    /// texts are cut into batches of about equal work [default: a step is one batch, planned in another
    /// way, so that it has other texts than with --accumulate 1]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", help_heading = TEXTS))]
    pub accumulate: Option<u64>,
    /// Maximum number of tokens in a micro-batch of all devices, padding included, at least one longest
    /// sequence: a step has as many micro-batches as it needs
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "N", conflicts_with = "accumulate", help_heading = TEXTS)
    )]
    pub max_tokens_per_batch: Option<u64>,
    /// Treatment of texts that are longer than the context [default: error; split for the small
    /// byte-level model]
    #[cfg_attr(feature = "clap", arg(long, value_enum, help_heading = TEXTS))]
    pub overlong: Option<Overlong>,
    /// Fraction of the examples to hold out for validation: validation.jsonl gets their losses, and
    /// the folder `best` the model with the lowest loss
    #[cfg_attr(feature = "clap", arg(long, value_name = "FRACTION", help_heading = TEXTS))]
    pub validation: Option<f64>,
    /// Number of steps between validations [default: 50]
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "N", requires = "validation", help_heading = TEXTS)
    )]
    pub validate_every: Option<u64>,
    /// Also write the model with its adapters merged; implied by random weights, which exist nowhere
    /// else
    #[cfg_attr(feature = "clap", arg(long, requires = "lora", help_heading = TEXTS))]
    pub merge: bool,
    /// Options of learning.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub recipe: Recipe,
    /// Number of blocks [default: 2, or the number of a resumed run]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", help_heading = MODEL))]
    pub n_layers: Option<usize>,
    /// Width of the residual stream [default: 128, or the width of a resumed run]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", help_heading = MODEL))]
    pub hidden: Option<usize>,
    /// Number of attention heads, which divide the width [default: 4, or the number of a resumed
    /// run]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", help_heading = MODEL))]
    pub n_heads: Option<usize>,
    /// Maximum number of tokens of a sequence [default: the length of the longest text, but for packed
    /// rows at least 2048 if the model has as many positions; or the number of a resumed run]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", help_heading = MODEL))]
    pub context: Option<usize>,
    /// Sharding of the model, or `None` if every device has the whole model.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub sharding: Option<Sharding>,
    /// Maximum memory of the texts and their tokens in bytes, or `None` without a limit.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub max_text_bytes: Option<u64>,
}

impl RunOptions {
    /// Returns the folder of the run to resume, or `None` for a new run.
    pub(super) fn resumed(&self) -> Option<&Path> {
        self.out.as_deref().filter(|_| self.resume)
    }

    /// Rejects values that are invalid for every run.
    pub(super) fn check(&self) -> Result<()> {
        for (name, value) in [
            ("batch_size", self.batch_size),
            ("accumulate", self.accumulate),
            ("validate_every", self.validate_every),
            ("checkpoint_every", self.checkpoint_every),
            ("steps", self.steps),
        ] {
            if value == Some(0) {
                return Err(SpecError::setting(name, &0, "at least 1".into()).into());
            }
        }
        let texts = self.data.iter().map(|source| ("data", &source.path));
        for (name, path) in self.model.iter().map(|path| ("model", path)).chain(texts) {
            if path.to_str().is_none() {
                let expected = "UTF-8, since run.json records it".into();
                return Err(SpecError::setting(name, &Printable(path.display()), expected).into());
            }
        }
        Ok(self.data.iter().try_for_each(TextSource::check)?)
    }

    /// Rejects options that contradict the description of the resumed run.
    pub(super) fn check_resumed(&self, spec: &Spec) -> Result<()> {
        let inputs = &spec.finetune;
        let built_in_config = inputs.folder.is_none().then_some(&inputs.config);
        let size = |field: &str| built_in_config.map(|config| config[field].to_string());
        let validation = inputs.validation;
        // The folder of a model may have moved, but the built-in model stays without a folder.
        let model = self.model.as_ref().filter(|_| built_in_config.is_some());
        for (name, requested, started) in [
            ("context", to_text(self.context), to_text(Some(inputs.context))),
            ("n_layers", to_text(self.n_layers), size("num_hidden_layers")),
            ("hidden", to_text(self.hidden), size("hidden_size")),
            ("n_heads", to_text(self.n_heads), size("num_attention_heads")),
            ("steps", to_text(self.steps), to_text(Some(spec.steps))),
            ("seed", to_text(self.seed), to_text(Some(spec.seed))),
            ("max_tokens", to_text(self.max_tokens), to_text(Some(spec.max_tokens))),
            ("init", to_text(self.init), to_text(inputs.init)),
            ("rows", self.rows.as_ref().map(variant_name), Some(variant_name(&inputs.rows))),
            ("batch_size", to_text(self.batch_size), to_text(inputs.batch_size)),
            ("accumulate", to_text(self.accumulate), to_text(inputs.accumulate)),
            (
                "max_tokens_per_batch",
                to_text(self.max_tokens_per_batch),
                to_text(inputs.max_tokens_per_batch),
            ),
            (
                "overlong",
                self.overlong.as_ref().map(variant_name),
                Some(variant_name(&inputs.overlong)),
            ),
            (
                "validation",
                to_text(self.validation),
                to_text(validation.map(|validation| validation.fraction)),
            ),
            (
                "validate_every",
                to_text(self.validate_every),
                to_text(validation.map(|validation| validation.every)),
            ),
            ("merge", self.merge.then(String::new), inputs.merge.then(String::new)),
            ("model", to_text(model.map(|path| path.display())), None),
        ] {
            check_same(name, requested.as_ref(), started)?;
        }
        let n_texts = self.data.len();
        if n_texts > 0 && n_texts != spec.data.len().max(1) {
            let started: Vec<String> = spec.texts(0, 0).iter().map(TextSource::to_string).collect();
            let started = (!started.is_empty()).then(|| started.join(", "));
            return Err(SpecError::ResumeMismatch { name: "data", started }.into());
        }
        // A run without a maximum norm does not clip, whatever the default of a new run is.
        let started = Recipe {
            max_grad_norm: spec.recipe.max_grad_norm.or(Some(f64::INFINITY)),
            ..spec.recipe.clone()
        };
        for ((name, requested), (_, started)) in
            self.recipe.options().into_iter().zip(started.options())
        {
            check_same(name, requested.as_ref(), started)?;
        }
        Ok(())
    }
}

#[cfg(feature = "clap")]
fn source_parser() -> impl clap::builder::TypedValueParser<Value = TextSource> {
    use clap::builder::{OsStringValueParser, TypedValueParser as _};

    OsStringValueParser::new().try_map(TextSource::parse)
}

fn to_text(value: Option<impl ToString>) -> Option<String> {
    value.map(|value| value.to_string())
}

/// Rejects a requested value of an option that differs from the value that the run started with.
fn check_same(
    name: &'static str,
    requested: Option<&String>,
    started: Option<String>,
) -> Result<()> {
    if requested.is_none() || requested == started.as_ref() {
        return Ok(());
    }
    Err(SpecError::ResumeMismatch { name, started }.into())
}
