//! The errors with which a run of `train` ends, and the command that resumes it.

use candle_distributed::{
    finetune::{self, RunError, Trainer},
    train::{self, CheckpointError},
};

use crate::{
    commands::train::Args,
    devices::ProcessPlace,
    error::{Error, ErrorKind},
    hint,
};

impl Args {
    /// Returns the error for a run that a signal stopped after `done` steps.
    pub(super) fn stop_error(&self, done: u64, trainer: &Trainer, process: ProcessPlace) -> Error {
        let path = hint::in_shell(trainer.path().display());
        let options = self.option_string();
        let hint = format!("to resume: candle-distributed train --out {path} --resume{options}");
        let kind = ErrorKind::Stopped { done, steps: trainer.run().spec.steps };
        Error::from(kind).with_hint(hint).on_first(process.is_first())
    }

    /// Adds a hint to an error of training. An error that every process has is only reported by the
    /// first process.
    pub(super) fn explain(&self, error: finetune::Error, process: ProcessPlace) -> Error {
        match &error {
            finetune::Error::Run(RunError::Diverged { checkpoint, .. }) => {
                let last = match checkpoint {
                    Some(step) => format!("the last checkpoint was written after step {step}"),
                    None => "there is no checkpoint yet".into(),
                };
                let options = self.option_string();
                let hint = format!(
                    "{last}; repeated steps end the same way: check the gradients with \
                     --resume{options} --check, try another --seed, or continue with \
                     --resume{options} --allow-non-finite"
                );
                Error::from(error).with_hint(hint).on_first(process.is_first())
            }
            finetune::Error::Run(
                RunError::ChangedWhileRead { .. } | RunError::NotShared { .. },
            ) => Error::from(error).on_first(process.is_first()),
            _ => error.into(),
        }
    }

    /// Returns the options to repeat when the run is resumed, each after a space.
    fn option_string(&self) -> String {
        let limit = self.memory_limit.map(|bytes| format!(" --memory-limit {bytes}"));
        let every = self.run.checkpoint_every.map(|every| format!(" --checkpoint-every {every}"));
        let options = [
            Some(self.devices.option_string()),
            Some(self.sharding.option_string()),
            every,
            limit,
            Some(self.writing.option_string()),
        ];
        options.into_iter().flatten().collect()
    }
}

/// Adds a hint if the latest checkpoint cannot be read although it may be intact. A checkpoint known
/// to be damaged does not get this hint: the one before it is used, if there is one.
pub(super) fn hint_if_unreadable(error: finetune::Error) -> Error {
    let error = Error::from(error);
    match &*error.kind {
        ErrorKind::Training(train::Error::Checkpoint(
            CheckpointError::Io { .. } | CheckpointError::Header { .. },
        )) => error.with_hint(hint::UNREADABLE),
        _ => error,
    }
}
