//! The checkpoint that a run resumes from.

use candle_distributed::{
    batch::BatchState,
    train::{Checkpoint, CheckpointError, Checkpoints},
};

use crate::{
    error::{Error, Result},
    hint,
};

/// The checkpoint that a run resumes from.
#[derive(Debug)]
pub(crate) struct Resumed {
    pub(crate) checkpoint: Checkpoint,
    /// Where the run was in its batches.
    pub(crate) batches: BatchState,
}

impl Resumed {
    /// The latest of `checkpoints`, if there is one; it must be of a run of this many steps.
    pub(crate) fn latest(checkpoints: &Checkpoints, steps: u64) -> Result<Option<Self>> {
        let latest = checkpoints.latest().map_err(refused)?;
        let Some(checkpoint) = latest else { return Ok(None) };
        let step = checkpoint.step();
        if step > steps {
            let name = checkpoint.path().display();
            let later =
                format!("{name} was written after step {step}, but the run has {steps} steps");
            return Err(Error::usage(later).hinted(hint::OTHER_RUN));
        }
        Ok(Some(Self { batches: checkpoint.state()?, checkpoint }))
    }
}

/// The error if no checkpoint is taken.
fn refused(error: CheckpointError) -> Error {
    use CheckpointError::{Header, Io};

    // One that is damaged is passed over, so this one cannot be read at all.
    let is_unreadable = matches!(error, Io { .. } | Header { .. });
    let error = Error::from(error);
    if is_unreadable { error.hinted(hint::UNREADABLE) } else { error }
}
