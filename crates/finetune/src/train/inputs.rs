//! Reads the model that the options of a run name, and returns the inputs of the run.

use std::path::Path;

use crate::{
    error::{Result, spec::SpecError},
    folder::Folder,
    run::model::model_folder,
    spec::{MixtureWeights, RunInputs, Spec, Validation},
    text::examples::Overlong,
    train::{built_in, options::RunOptions},
};

impl RunOptions {
    /// Returns the folder of the model, and the inputs of the run. `resumed` is the description of a
    /// resumed run, and `seed` the seed of the run.
    pub(super) fn inputs(&self, resumed: Option<&Spec>, seed: u64) -> Result<(Folder, RunInputs)> {
        match (resumed, &self.model) {
            (Some(spec), _) => self.resumed_inputs(&spec.finetune),
            (None, Some(model)) => self.folder_inputs(model),
            (None, None) => self.built_in_inputs(seed),
        }
    }

    /// Returns the inputs for the model of a folder.
    fn folder_inputs(&self, model: &Path) -> Result<(Folder, RunInputs)> {
        let path = model_folder(model)?;
        let folder = Folder::open(&path)?;
        let weights = if self.init.is_some() {
            None
        } else {
            folder.check_tied_head(&folder.weights()?)?;
            Some(folder.weights_fingerprint()?)
        };
        let inputs = RunInputs {
            folder: Some(path),
            weights,
            init: self.init,
            // Random weights exist nowhere else, so their adapters alone would be useless.
            merge: self.merge || self.init.is_some(),
            ..self.new_inputs(&folder, Overlong::Error)?
        };
        Ok((folder, inputs))
    }

    /// Returns the inputs for the built-in model with random weights.
    fn built_in_inputs(&self, seed: u64) -> Result<(Folder, RunInputs)> {
        let folder = Folder::from_config(built_in::config(self)?.to_string())?;
        let inputs = RunInputs {
            init: Some(self.init.unwrap_or(seed)),
            merge: true,
            ..self.new_inputs(&folder, Overlong::Split)?
        };
        Ok((folder, inputs))
    }

    /// Returns the inputs of a new run, without the fields that depend on the source of the model.
    fn new_inputs(&self, folder: &Folder, default_overlong: Overlong) -> Result<RunInputs> {
        /// The default number of steps between checkpoints, too.
        const VALIDATE_EVERY: u64 = 50;
        let every = self.validate_every.unwrap_or(VALIDATE_EVERY);
        Ok(RunInputs {
            folder: None,
            config: folder.config()?,
            weights: None,
            init: None,
            tokenizer: folder.tokenizer().fingerprint(),
            context: self.checked_context(folder)?,
            rows: self.rows.unwrap_or_default(),
            overlong: self.overlong.unwrap_or(default_overlong),
            batch_size: self.batch_size,
            accumulate: self.accumulate,
            max_tokens_per_batch: self.max_tokens_per_batch,
            validation: self.validation.map(|fraction| Validation { fraction, every }),
            merge: false,
            mixture: self.new_mixture(),
        })
    }

    /// Returns the weights of several texts in a new run.
    fn new_mixture(&self) -> Vec<MixtureWeights> {
        if self.data.len() < 2 {
            return Vec::new();
        }
        let weights = self.data.iter().map(|source| source.weight.unwrap_or(1)).collect();
        vec![MixtureWeights { from_epoch: 0, from_step: 0, weights }]
    }

    /// Returns the inputs of a resumed run. The folder of the model may have moved.
    fn resumed_inputs(&self, recorded: &RunInputs) -> Result<(Folder, RunInputs)> {
        let mut inputs = recorded.clone();
        if let Some(model) = &self.model {
            inputs.folder = Some(model_folder(model)?);
        }
        let folder = inputs.open_folder()?;
        inputs.check_folder(&folder)?;
        Ok((folder, inputs))
    }

    /// Returns the maximum number of tokens of a sequence: by default, the positions of the model.
    fn checked_context(&self, folder: &Folder) -> Result<usize> {
        let n_positions = folder.decoder().config().max_position_embeddings;
        let context = self.context.unwrap_or(n_positions);
        if (2..=n_positions).contains(&context) {
            return Ok(context);
        }
        let expected = format!("2 to {n_positions}, the positions of the model");
        Err(SpecError::setting("context", &context, expected).into())
    }
}
