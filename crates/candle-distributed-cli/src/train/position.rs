//! Where a run was when it wrote a checkpoint, and the checkpoint that it resumes from.

use candle_distributed::{
    batch::BatchState,
    train::{Checkpoint, Checkpoints},
};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    hint, output,
    train::settings::Settings,
};

/// What a checkpoint of a run says beside its tensors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Position {
    /// The [identity](Settings::identity) of the run.
    pub(crate) run: String,
    /// Where it was in its batches.
    pub(crate) batches: BatchState,
}

/// What a checkpoint says, of this version or of an early one.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Written {
    Now(Position),
    Early(BatchState),
}

/// The checkpoint that a run resumes from.
#[derive(Debug)]
pub(crate) struct Resumed {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) batches: BatchState,
    /// Whether it says that it is of this run; one of an early version says nothing.
    pub(crate) is_known: bool,
}

impl Resumed {
    /// The latest of `checkpoints`, if there is one; it must be of the run with these settings.
    pub(crate) fn latest(checkpoints: &Checkpoints, settings: &Settings) -> Result<Option<Self>> {
        let Some(checkpoint) = checkpoints.latest()? else { return Ok(None) };
        let name = checkpoint.path().display();
        let step = checkpoint.step();
        if step > settings.steps {
            return Err(Error::usage(format!(
                "{name} was written after step {step}, but the run has {} steps",
                settings.steps
            ))
            .hinted(hint::OTHER_RUN));
        }
        let (is_known, batches) = match checkpoint.state()? {
            Written::Now(Position { run, batches }) if run == settings.identity() => {
                (true, batches)
            }
            Written::Now(_) => {
                let other = Error::usage(format!("{name} is a checkpoint of another run"));
                return Err(other.hinted(hint::OTHER_RUN));
            }
            Written::Early(batches) => {
                output::warning(format_args!(
                    "an early version wrote {name}, which does not say of which run it is"
                ));
                (false, batches)
            }
        };
        Ok(Some(Self { checkpoint, batches, is_known }))
    }
}
