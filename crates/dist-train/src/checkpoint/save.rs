//! Writing a checkpoint.

use std::{
    fs,
    path::{Path, PathBuf},
};

use pmap_mesh::DeviceMesh;
use serde::Serialize;
use serde_json::Value;

use crate::{
    checkpoint::{
        Checkpoints,
        checksum::Checksum,
        claim::Claim,
        disk::{At, remove, sync_folder},
        fault::Fault,
        folder,
        index::{INDEX, Index, Listed, json_error},
        is_first, json,
        shard::{
            self, Origin,
            write::{Written, write},
        },
        state_dict::StateDict,
    },
    error::{Result, checkpoint::CheckpointError},
    processes::{agreed, find_other, gather_numbers},
};

/// A checkpoint that is being written.
pub(super) struct Save<'a> {
    checkpoints: &'a Checkpoints,
    mesh: &'a DeviceMesh,
    claim: &'a Claim,
    step: u64,
    /// Its folder when it is whole.
    whole: PathBuf,
    /// Its folder until then.
    partial: PathBuf,
}

impl<'a> Save<'a> {
    pub(super) fn new(
        checkpoints: &'a Checkpoints,
        mesh: &'a DeviceMesh,
        claim: &'a Claim,
        step: u64,
    ) -> Self {
        let whole = checkpoints.folder.join(folder::name(step));
        let partial = checkpoints.folder.join(folder::partial_name(step, claim.incarnation));
        Self { checkpoints, mesh, claim, step, whole, partial }
    }

    /// Writes it: all processes what their slots keep, and the first one the rest.
    pub(super) fn write(&self, tensors: &StateDict, state: &impl Serialize) -> Result<()> {
        self.check_others()?;
        let begun = agreed(self.mesh, self.begin(tensors, state));
        let written = begun.and_then(|state| self.write_files(tensors, state));
        if written.is_err() && is_first(self.mesh) {
            // What cannot be removed now is removed when the next checkpoint is written.
            drop(fs::remove_dir_all(&self.partial));
        }
        written
    }

    /// Checks that all processes write the same checkpoint.
    fn check_others(&self) -> Result<()> {
        let run = self.checkpoints.run.as_deref().map(str::as_bytes);
        let run = run.map_or(0, |name| 1 + u64::from(Checksum::of(name).get()));
        if let Some((_, other)) = find_other(self.mesh, self.step)? {
            return Err(CheckpointError::other_step(&self.whole, self.step, other).into());
        }
        match find_other(self.mesh, run)? {
            None => Ok(()),
            Some((slot, _)) => {
                Err(CheckpointError::RunsDiffer { path: self.whole.clone(), slot }.into())
            }
        }
    }

    /// Makes the folder, in the first process, and the JSON of the run's state.
    fn begin(&self, tensors: &StateDict, state: &impl Serialize) -> Result<Value> {
        let found = tensors.slots.len();
        let expected = self.mesh.devices().len();
        if found != expected {
            return Err(CheckpointError::Slots { found, expected }.into());
        }
        let state =
            json::to_value(state).map_err(|cause| json_error(&self.whole.join(INDEX), cause))?;
        if is_first(self.mesh) {
            self.remove_partial()?;
            self.make_room()?;
            fs::create_dir_all(&self.partial).at(&self.partial)?;
        }
        Ok(state)
    }

    /// Removes what interrupted groups of processes have left. What cannot be removed stays, and
    /// harms nobody.
    fn remove_partial(&self) -> Result<()> {
        for partial in folder::partial(&self.checkpoints.folder)? {
            if !self.claim.is_over(partial.incarnation) {
                continue;
            }
            if let Err(error) = self.retire(partial.step, &partial.path) {
                let stays = format_args!("what an interrupted run has left stays: {error}");
                self.claim.warn_once(&partial.path, stays);
            }
        }
        Ok(())
    }

    /// Removes a damaged checkpoint in the place of the new one. One that is not proven to be
    /// damaged is moved, whatever is wrong with it: somebody may miss it.
    fn make_room(&self) -> Result<()> {
        let path = &self.whole;
        if !path.is_dir() {
            return Ok(());
        }
        match self.checkpoints.open_whole(path) {
            Ok(_) => Err(CheckpointError::Exists { path: path.clone(), step: self.step }.into()),
            Err(error) if Fault::of(&error) == Fault::Damage => {
                tracing::warn!("{} is written again: {error}", path.display());
                remove(path)
            }
            Err(error) => {
                let name = folder::moved_name(self.step, self.claim.incarnation);
                tracing::warn!("{} is renamed to {name}: {error}", path.display());
                fs::rename(path, path.with_file_name(name)).at(path)
            }
        }
    }

    fn write_files(&self, tensors: &StateDict, state: Value) -> Result<()> {
        let here = agreed(self.mesh, self.write_shards(tensors))?;
        let files = self.listed(&here)?;
        let whole = if is_first(self.mesh) { self.finish(tensors, files, state) } else { Ok(()) };
        agreed(self.mesh, whole)
    }

    /// Writes the files of this process's slots. A slot that keeps nothing has none.
    fn write_shards(&self, tensors: &StateDict) -> Result<Vec<Option<Written>>> {
        if !self.partial.is_dir() {
            return Err(CheckpointError::NotShared { path: self.partial.clone() }.into());
        }
        let mut written = Vec::new();
        for (slot, entries) in self.mesh.local_slots().zip(&tensors.slots) {
            let file = shard::name(slot, self.mesh.len());
            let path = self.partial.join(&file);
            let origin = Origin { run: self.checkpoints.run.clone(), step: self.step, file };
            written.push(if entries.is_empty() {
                None
            } else {
                Some(write(&path, &origin, entries, self.checkpoints.values)?)
            });
        }
        Ok(written)
    }

    /// The files of all slots, given those of this process's slots.
    fn listed(&self, here: &[Option<Written>]) -> Result<Vec<Listed>> {
        let numbers: Vec<_> = here.iter().copied().map(to_numbers).collect();
        let all = gather_numbers(self.mesh, &numbers)?;
        let written = all.into_iter().map(of_numbers).enumerate();
        let name = |slot| shard::name(slot, self.mesh.len());
        Ok(written.filter_map(|(slot, file)| Some(Listed::new(name(slot), file?))).collect())
    }

    /// Writes the index, and gives the checkpoint its name.
    fn finish(&self, tensors: &StateDict, files: Vec<Listed>, state: Value) -> Result<()> {
        let StateDict { parameters, trainer, .. } = tensors.clone();
        let run = self.checkpoints.run.clone();
        let index = Index::new(run, self.step, parameters, files, trainer, state);
        index.write(&self.partial.join(INDEX))?;
        sync_folder(&self.partial)?;
        fs::rename(&self.partial, &self.whole).at(&self.whole)?;
        sync_folder(&self.checkpoints.folder)?;
        self.remove_old();
        Ok(())
    }

    /// Removes the checkpoints before this one that have enough newer ones which are whole, and
    /// those that are damaged. What cannot be opened for any other reason is not ours to remove: it
    /// may be of another run. What cannot be removed stays, too, with a warning in the log: the new
    /// one is whole all the same.
    fn remove_old(&self) {
        let complete = match folder::complete(&self.checkpoints.folder) {
            Ok(complete) => complete,
            Err(error) => return tracing::warn!("old checkpoints stay: {error}"),
        };
        let mut n_newer = 1;
        for (&step, path) in complete.range(..self.step).rev() {
            match self.checkpoints.open(path) {
                Ok(_) if n_newer < self.checkpoints.keep => {
                    n_newer += 1;
                    continue;
                }
                Err(error) if Fault::of(&error) != Fault::Damage => {
                    self.claim.warn_once(path, format_args!("an old checkpoint stays: {error}"));
                    continue;
                }
                Ok(_) => {}
                Err(error) => tracing::warn!("a damaged checkpoint is removed: {error}"),
            }
            if let Err(error) = self.retire(step, path) {
                self.claim.warn_once(path, format_args!("an old checkpoint stays: {error}"));
            }
        }
    }

    /// Removes a checkpoint, which loses its name first: what is half removed is not taken for
    /// whole, and a process that outlives its group finds nothing to write into.
    fn retire(&self, step: u64, path: &Path) -> Result<()> {
        let name = folder::partial_name(step, self.claim.incarnation);
        let partial = self.checkpoints.folder.join(name);
        fs::rename(path, &partial).at(path)?;
        remove(&partial)
    }
}

/// What the processes tell each other of a file: a length of 0 if there is none.
fn to_numbers(written: Option<Written>) -> [u64; 2] {
    written.map_or([0; 2], |Written { bytes, header }| [bytes, header.get().into()])
}

fn of_numbers([bytes, header]: [u64; 2]) -> Option<Written> {
    #[expect(clippy::expect_used, reason = "it is the number of a checksum")]
    let header = u32::try_from(header).expect("a checksum has 32 bits");
    (bytes > 0).then_some(Written { bytes, header: header.into() })
}
