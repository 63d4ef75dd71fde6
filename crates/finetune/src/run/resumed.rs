//! The checkpoint that a run resumes from.

use dist_checkpoint::{Checkpoint, Checkpoints};
use dyn_batch::BatchState;

use crate::error::{Result, run::RunError};

/// The checkpoint that a run resumes from, with its position in the batches.
#[derive(Debug)]
pub(crate) struct ResumePoint {
    /// Checkpoint.
    pub(crate) checkpoint: Checkpoint,
    /// Position after the last batch.
    pub(crate) batch_state: BatchState,
}

impl ResumePoint {
    /// Opens the latest checkpoint of a run of `steps` steps, if there is one.
    ///
    /// # Errors
    ///
    /// [`RunError::CheckpointAhead`] if it has more steps, or an error of [`Checkpoints::latest`].
    pub(crate) fn latest(checkpoints: &Checkpoints, steps: u64) -> Result<Option<Self>> {
        let Some(checkpoint) = checkpoints.latest()? else { return Ok(None) };
        let step = checkpoint.step();
        if step > steps {
            let path = checkpoint.path().to_owned();
            return Err(RunError::CheckpointAhead { path, step, steps }.into());
        }
        Ok(Some(Self { batch_state: checkpoint.state()?, checkpoint }))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use dist_checkpoint::StateDict;
    use pmap_mesh::DeviceMesh;

    use super::*;

    #[test]
    fn checkpoints_of_later_steps_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        assert!(ResumePoint::latest(&checkpoints, 8).unwrap().is_none());
        checkpoints.save(&mesh, 9, &StateDict::new(&mesh, BTreeMap::new()), &()).unwrap();
        let error = ResumePoint::latest(&checkpoints, 8).unwrap_err();
        assert!(error.to_string().contains("step 9"), "{error}");
    }
}
