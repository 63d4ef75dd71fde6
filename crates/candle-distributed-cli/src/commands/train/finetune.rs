//! The options of `train` that say which model learns from which examples.

use std::path::{Path, PathBuf};

use candle_distributed::finetune::{
    Folder, Overlong,
    data::Rows,
    run::model_folder,
    spec::{RunInputs, Spec, Validation},
};

use crate::{
    error::{Error, Result},
    help::typed,
    train::built_in::{self, Sizes},
};

/// Which model learns, and how its texts become batches.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "The model and its texts")]
pub(super) struct FinetuneArgs {
    /// Fine-tune the model in this folder of Hugging Face's form (Llama, Qwen 2, Mistral), or of a run
    /// that has ended, on --data [default: a small new one]
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["n_layers", "hidden", "n_heads"])]
    pub(super) model: Option<PathBuf>,
    /// Begin with random weights of this seed, for which a config.json is enough [default: the weights
    /// of --model; without one, --seed]
    #[arg(long, value_name = "SEED")]
    init: Option<u64>,
    /// How sequences lie in the rows of a batch [default: padded]
    #[arg(long, value_enum)]
    rows: Option<Rows>,
    /// Number of sequences in a step of all devices, or of packed rows [default: as many as
    /// --max-tokens has room for]
    #[arg(long, value_name = "N", conflicts_with = "max_tokens")]
    batch_size: Option<u64>,
    /// What becomes of texts that are longer than --context [default: split; with --model error]
    #[arg(long, value_enum)]
    overlong: Option<Overlong>,
    /// Fraction of the examples that nothing is learnt from: the loss on them is in
    /// validation.jsonl, and what did best on them in the folder `best`
    #[arg(long, value_name = "FRACTION")]
    validation: Option<f64>,
    /// Number of steps from one validation to the next [default: 50]
    #[arg(long, value_name = "N", requires = "validation")]
    validate_every: Option<u64>,
    /// Write the model with the effect of its adapters beside these; --init does so by itself, as
    /// nobody else has its random weights
    #[arg(long, requires = "lora")]
    merge: bool,
}

impl FinetuneArgs {
    /// Returns the folder of the model that is trained, and how it is; `known` are the settings of a
    /// run that is resumed.
    pub(super) fn asked(
        &self,
        known: Option<&Spec>,
        inputs: &Inputs<'_>,
    ) -> Result<(Folder, RunInputs)> {
        if let Some(known) = known {
            return self.again(&known.finetune);
        }
        if self.batch_size == Some(0) {
            return Err(Error::usage("--batch-size is 0, must be at least 1"));
        }
        match &self.model {
            Some(model) => self.of_folder(model, inputs),
            None => self.of_program(inputs),
        }
    }

    fn of_folder(&self, model: &Path, inputs: &Inputs<'_>) -> Result<(Folder, RunInputs)> {
        if model.to_str().is_none() {
            return Err(Error::usage(format!(
                "--model {} is not UTF-8, and run.json cannot name it",
                model.display()
            )));
        }
        let path = model_folder(model)?;
        let folder = Folder::open(&path)?;
        let weights = match self.init {
            Some(_) => None,
            None => Some(folder.weights_fingerprint()?),
        };
        let context = checked_context(&folder, inputs.context)?;
        let finetune = RunInputs {
            folder: Some(path),
            weights,
            init: self.init,
            merge: self.merge || self.init.is_some(),
            ..self.new_run(&folder, context, Overlong::Error)?
        };
        Ok((folder, finetune))
    }

    /// The model of this program, with random weights.
    fn of_program(&self, inputs: &Inputs<'_>) -> Result<(Folder, RunInputs)> {
        let config = built_in::config(inputs.sizes, inputs.context)?;
        let folder = Folder::from_config(config.to_string())?;
        let context = checked_context(&folder, inputs.context)?;
        let finetune = RunInputs {
            init: Some(self.init.unwrap_or(inputs.seed)),
            merge: true,
            ..self.new_run(&folder, context, Overlong::Split)?
        };
        Ok((folder, finetune))
    }

    /// What does not depend on where the model comes from.
    fn new_run(&self, folder: &Folder, context: usize, overlong: Overlong) -> Result<RunInputs> {
        Ok(RunInputs {
            folder: None,
            config: folder.config()?,
            weights: None,
            init: None,
            tokenizer: folder.tokenizer().fingerprint(),
            context,
            rows: self.rows.unwrap_or(Rows::Padded),
            overlong: self.overlong.unwrap_or(overlong),
            batch_size: self.batch_size,
            validation: self.validation()?,
            merge: false,
        })
    }

    /// The same of a run that is resumed, where its folder is now.
    fn again(&self, known: &RunInputs) -> Result<(Folder, RunInputs)> {
        let words = |asked: Option<u64>| asked.map(|asked| asked.to_string());
        let fraction = |validation: Option<Validation>| {
            validation.map(|validation| validation.fraction.to_string())
        };
        let every = known.validation.map(|validation| validation.every);
        let merge = |merge: bool| merge.then(String::new);
        for (name, asked, known) in [
            ("init", words(self.init), words(known.init)),
            ("rows", self.rows.map(typed), Some(typed(known.rows))),
            ("batch-size", words(self.batch_size), words(known.batch_size)),
            ("overlong", self.overlong.map(typed), Some(typed(known.overlong))),
            ("validation", self.validation.map(|all| all.to_string()), fraction(known.validation)),
            ("validate-every", words(self.validate_every), words(every)),
            ("merge", merge(self.merge), merge(known.merge)),
        ] {
            agrees(name, asked.as_deref(), known.as_deref())?;
        }
        let mut known = known.clone();
        match (&self.model, &known.folder) {
            (Some(model), None) => agrees("model", Some(&model.to_string_lossy()), None)?,
            (Some(model), Some(_)) => known.folder = Some(model_folder(model)?),
            (None, _) => {}
        }
        let folder = known.open_folder()?;
        known.check_folder(&folder)?;
        Ok((folder, known))
    }

    fn validation(&self) -> Result<Option<Validation>> {
        /// As often as checkpoints are written.
        const EVERY: u64 = 50;
        if self.validate_every == Some(0) {
            return Err(Error::usage("--validate-every is 0, must be at least 1"));
        }
        let every = self.validate_every.unwrap_or(EVERY);
        Ok(self.validation.map(|fraction| Validation { fraction, every }))
    }
}

/// Arguments of other groups that decide about the model.
pub(super) struct Inputs<'a> {
    pub(super) sizes: &'a Sizes,
    pub(super) context: Option<usize>,
    pub(super) seed: u64,
}

impl Inputs<'_> {
    /// Checks that the sizes are those of a run that is resumed.
    pub(super) fn agree_with(&self, known: &RunInputs) -> Result<()> {
        let context = self.context.map(|context| context.to_string());
        agrees("context", context.as_deref(), Some(&known.context.to_string()))?;
        let own = known.folder.is_none().then_some(&known.config);
        for (name, asked, field) in [
            ("n-layers", self.sizes.n_layers, "num_hidden_layers"),
            ("hidden", self.sizes.hidden, "hidden_size"),
            ("n-heads", self.sizes.n_heads, "num_attention_heads"),
        ] {
            let asked = asked.map(|asked| asked.to_string());
            let known = own.map(|config| config[field].to_string());
            agrees(name, asked.as_deref(), known.as_deref())?;
        }
        Ok(())
    }
}

/// The most tokens of a sequence: all that the model has positions for, unless fewer are asked for.
fn checked_context(folder: &Folder, asked: Option<usize>) -> Result<usize> {
    let most = folder.llama().config().max_position_embeddings;
    let context = asked.unwrap_or(most);
    if (2..=most).contains(&context) {
        return Ok(context);
    }
    Err(Error::usage(format!(
        "--context is {context}, must be 2 to {most}, the positions of the model"
    )))
}

/// Checks that an option of a run that is resumed is not given another value than it started with.
pub(super) fn agrees(name: &str, asked: Option<&str>, known: Option<&str>) -> Result<()> {
    if asked.is_none() || asked == known {
        return Ok(());
    }
    let with = match known {
        Some("") => format!("with --{name}"),
        Some(known) => format!("with --{name} {known}"),
        None => format!("without --{name}"),
    };
    let other =
        Error::usage(format!("the run started {with}, and can only be resumed with the same"));
    Err(other.hinted("another value needs a new run, in another folder"))
}
