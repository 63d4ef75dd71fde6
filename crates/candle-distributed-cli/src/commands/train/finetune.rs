//! The options of `train` for a model from a Hugging Face folder.

use std::path::{Path, PathBuf};

use crate::{
    commands::train::start::agrees,
    error::{Error, Result},
    help::typed,
    hf::{examples::Overlong, folder::Folder},
    hint,
    train::{
        finetune::{
            Finetune, Rows, Validation, config_of, tokenizer_fingerprint, weights_fingerprint,
        },
        settings::Settings,
    },
};

/// How a model of a folder is fine-tuned, if one is.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "A model from a folder")]
pub(super) struct FinetuneArgs {
    /// Fine-tune the model in this folder of Hugging Face's form (Llama, Qwen 2, Mistral) on --data
    #[arg(
        long,
        value_name = "FOLDER",
        conflicts_with_all = ["weights", "n_layers", "hidden", "n_heads"]
    )]
    pub(super) model: Option<PathBuf>,
    /// Begin with random weights of this seed, for which a config.json is enough
    #[arg(long, value_name = "SEED")]
    init: Option<u64>,
    /// How sequences lie in the rows of a batch [default: padded]
    #[arg(long, value_enum)]
    rows: Option<Rows>,
    /// Number of sequences in a step of all devices, or of packed rows [default: as many as
    /// --max-tokens has room for]
    #[arg(long, value_name = "N", conflicts_with = "max_tokens")]
    batch_size: Option<u64>,
    /// What becomes of texts that are longer than --context [default: error]
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
    /// The folder of the model that is fine-tuned, and how; `known` is what a resumed run started
    /// with.
    pub(super) fn asked(
        &self,
        known: Option<&Settings>,
        context: Option<usize>,
    ) -> Result<Option<(Folder, Finetune)>> {
        match (known.map(|known| known.finetune.as_ref()), &self.model) {
            (None, Some(model)) => self.new_run(model, context).map(Some),
            (Some(Some(known)), _) => self.again(known, context).map(Some),
            (Some(None), Some(model)) => {
                agrees("model", Some(&model.to_string_lossy()), None)?;
                Ok(None)
            }
            (None | Some(None), None) => {
                match self.option_of_folders() {
                    Some(option) => Err(Error::usage(format!("{option} needs a --model"))
                        .hinted(hint::MODEL_OPTION)),
                    None => Ok(None),
                }
            }
        }
    }

    fn new_run(&self, model: &Path, context: Option<usize>) -> Result<(Folder, Finetune)> {
        if model.to_str().is_none() {
            return Err(Error::usage(format!(
                "--model {} is not UTF-8, and run.json cannot name it",
                model.display()
            )));
        }
        let folder = Folder::open(model)?;
        let weights = match self.init {
            Some(_) => None,
            None => weights_fingerprint(&folder)?,
        };
        if self.batch_size == Some(0) {
            return Err(Error::usage("--batch-size is 0, must be at least 1"));
        }
        let finetune = Finetune {
            config: config_of(&folder)?,
            weights,
            init: self.init,
            tokenizer: tokenizer_fingerprint(&folder),
            context: checked_context(&folder, context)?,
            rows: self.rows.unwrap_or_default(),
            overlong: self.overlong.unwrap_or_default(),
            batch_size: self.batch_size,
            validation: self.validation()?,
            merge: self.merge || self.init.is_some(),
            folder: model.to_owned(),
        };
        Ok((folder, finetune))
    }

    /// The same of a run that is resumed, where its folder is now.
    fn again(&self, known: &Finetune, context: Option<usize>) -> Result<(Folder, Finetune)> {
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
            ("context", words(context.map(|n| n as u64)), words(Some(known.context as u64))),
        ] {
            agrees(name, asked.as_deref(), known.as_deref())?;
        }
        let path = self.model.as_ref().unwrap_or(&known.folder);
        let folder = Folder::open(path)?;
        known.check_folder(&folder)?;
        Ok((folder, Finetune { folder: path.clone(), ..known.clone() }))
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

    /// An option that has no meaning without a folder, if one is given.
    fn option_of_folders(&self) -> Option<&'static str> {
        let options = [
            ("--init", self.init.is_some()),
            ("--rows", self.rows.is_some()),
            ("--batch-size", self.batch_size.is_some()),
            ("--overlong", self.overlong.is_some()),
            ("--validation", self.validation.is_some()),
            ("--merge", self.merge),
        ];
        options.into_iter().find_map(|(option, is_given)| is_given.then_some(option))
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
