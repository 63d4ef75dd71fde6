//! Writing a checkpoint.

use std::{
    fs,
    path::{Path, PathBuf},
};

use pmap_mesh::DeviceMesh;
use serde::Serialize;
use serde_json::Value;

use crate::{
    disk::{create_folder, remove_folder, rename, sync_folder},
    error::{Error, Result},
    run::{
        Checkpoints,
        index::{INDEX, Index, Listed, json_error},
        json,
        lock::WriterLock,
        names,
        severity::Severity,
        shard::{self, Origin, write},
        state_dict::StateDict,
    },
    safetensors::{checksum::Checksum, tensor_file::Written},
};

/// A checkpoint that is being written.
pub(super) struct CheckpointWriter<'a> {
    checkpoints: &'a Checkpoints,
    mesh: &'a DeviceMesh,
    lock: &'a WriterLock,
    step: u64,
    /// Its folder when it is whole.
    whole: PathBuf,
    /// Its folder until then.
    partial: PathBuf,
}

impl<'a> CheckpointWriter<'a> {
    pub(super) fn new(
        checkpoints: &'a Checkpoints,
        mesh: &'a DeviceMesh,
        lock: &'a WriterLock,
        step: u64,
    ) -> Self {
        let whole = checkpoints.folder.join(names::name(step));
        let partial = checkpoints.folder.join(names::partial_name(step, lock.writer_id));
        Self { checkpoints, mesh, lock, step, whole, partial }
    }

    /// Writes it: all processes what their slots keep, and the first one the rest.
    pub(super) fn write(&self, tensors: &StateDict, state: &impl Serialize) -> Result<()> {
        self.check_others()?;
        let begun = self.mesh.all_ok(self.begin(tensors, state));
        let written = begun.and_then(|state| self.write_files(tensors, state));
        if written.is_err() && self.mesh.is_first_process() {
            // What cannot be removed now is removed when the next checkpoint is written.
            drop(fs::remove_dir_all(&self.partial));
        }
        written
    }

    /// Checks that all processes write the same checkpoint.
    fn check_others(&self) -> Result<()> {
        let run = self.checkpoints.run.as_deref().map(str::as_bytes);
        let run = run.map_or(0, |name| 1 + u64::from(Checksum::of(name).get()));
        if let Some((_, other)) = self.mesh.find_mismatch(self.step)? {
            return Err(Error::step_mismatch(&self.whole, self.step, other));
        }
        match self.mesh.find_mismatch(run)? {
            None => Ok(()),
            Some((slot, _)) => Err(Error::RunsDiffer { path: self.whole.clone(), slot }),
        }
    }

    /// Makes the folder, in the first process, and the JSON of the run's state.
    fn begin(&self, tensors: &StateDict, state: &impl Serialize) -> Result<Value> {
        let found = tensors.slots.len();
        let expected = self.mesh.devices().len();
        if found != expected {
            return Err(Error::Slots { found, expected });
        }
        let state =
            json::to_value(state).map_err(|cause| json_error(&self.whole.join(INDEX), cause))?;
        if self.mesh.is_first_process() {
            self.remove_partial()?;
            self.clear_target()?;
            create_folder(&self.partial)?;
        }
        Ok(state)
    }

    /// Removes what interrupted groups of processes have left. What cannot be removed stays, and
    /// harms nobody.
    fn remove_partial(&self) -> Result<()> {
        for partial in names::partial(&self.checkpoints.folder)? {
            if !self.lock.is_over(partial.writer_id) {
                continue;
            }
            if let Err(error) = self.retire(partial.step, &partial.path) {
                let stays = format_args!("what an interrupted run has left stays: {error}");
                self.lock.warn_once(&partial.path, stays);
            }
        }
        Ok(())
    }

    /// Removes a damaged checkpoint in the place of the new one. One that is not proven to be
    /// damaged is moved, whatever is wrong with it: somebody may miss it.
    fn clear_target(&self) -> Result<()> {
        let path = &self.whole;
        if !path.is_dir() {
            return Ok(());
        }
        match self.checkpoints.open_whole(path) {
            Ok(_) => Err(Error::Exists { path: path.clone(), step: self.step }),
            Err(error) if Severity::of(&error) == Severity::Damage => {
                tracing::warn!("{} is written again: {error}", path.display());
                remove_folder(path)
            }
            Err(error) => {
                let name = names::moved_name(self.step, self.lock.writer_id);
                tracing::warn!("{} is renamed to {name}: {error}", path.display());
                rename(path, &path.with_file_name(name))
            }
        }
    }

    fn write_files(&self, tensors: &StateDict, state: Value) -> Result<()> {
        let local = self.mesh.all_ok(self.write_shards(tensors))?;
        let files = self.listed(&local)?;
        let whole =
            if self.mesh.is_first_process() { self.finish(tensors, files, state) } else { Ok(()) };
        self.mesh.all_ok(whole)
    }

    /// Writes the files of this process's slots. A slot that keeps nothing has none.
    fn write_shards(&self, tensors: &StateDict) -> Result<Vec<Option<Written>>> {
        if !self.partial.is_dir() {
            return Err(Error::NotShared { path: self.partial.clone() });
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
    fn listed(&self, local: &[Option<Written>]) -> Result<Vec<Listed>> {
        let numbers: Vec<_> = local.iter().copied().map(to_numbers).collect();
        let all = self.mesh.gather_numbers(&numbers)?;
        let written = all.into_iter().map(from_numbers).enumerate();
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
        rename(&self.partial, &self.whole)?;
        self.remove_old();
        Ok(())
    }

    /// Removes the checkpoints before this one that have enough newer ones which are whole, and
    /// those that are damaged. What cannot be opened for any other reason is not ours to remove: it
    /// may be of another run. What cannot be removed stays, too, with a warning in the log: the new
    /// one is whole all the same.
    fn remove_old(&self) {
        let complete = match names::complete(&self.checkpoints.folder) {
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
                Err(error) if Severity::of(&error) != Severity::Damage => {
                    self.lock.warn_once(path, format_args!("an old checkpoint stays: {error}"));
                    continue;
                }
                Ok(_) => {}
                Err(error) => tracing::warn!("a damaged checkpoint is removed: {error}"),
            }
            if let Err(error) = self.retire(step, path) {
                self.lock.warn_once(path, format_args!("an old checkpoint stays: {error}"));
            }
        }
    }

    /// Removes a checkpoint, which loses its name first: what is half removed is not taken for
    /// whole, and a process that outlives its group finds nothing to write into.
    fn retire(&self, step: u64, path: &Path) -> Result<()> {
        let name = names::partial_name(step, self.lock.writer_id);
        let partial = self.checkpoints.folder.join(name);
        rename(path, &partial)?;
        remove_folder(&partial)
    }
}

/// What the processes tell each other of a file: a length of 0 if there is none.
fn to_numbers(written: Option<Written>) -> [u64; 2] {
    written.map_or([0; 2], |Written { bytes, header }| [bytes, header.get().into()])
}

fn from_numbers([bytes, header]: [u64; 2]) -> Option<Written> {
    #[expect(clippy::expect_used, reason = "it is the number of a checksum")]
    let header = u32::try_from(header).expect("a checksum has 32 bits");
    (bytes > 0).then_some(Written { bytes, header: header.into() })
}
