//! Writes a checkpoint.

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
        index::{INDEX, Index, IndexedFile, json_error},
        json,
        lock::WriterLock,
        names,
        severity::Severity,
        shard::{self, FileOrigin, write},
        state_dict::StateDict,
    },
    safetensors::{checksum::Checksum, tensor_file::WrittenFile},
};

/// A checkpoint that is being written.
pub(super) struct CheckpointWriter<'a> {
    checkpoints: &'a Checkpoints,
    mesh: &'a DeviceMesh,
    lock: &'a WriterLock,
    step: u64,
    /// The folder of the complete checkpoint.
    final_path: PathBuf,
    /// The folder until the checkpoint is complete.
    partial_path: PathBuf,
}

impl<'a> CheckpointWriter<'a> {
    pub(super) fn new(
        checkpoints: &'a Checkpoints,
        mesh: &'a DeviceMesh,
        lock: &'a WriterLock,
        step: u64,
    ) -> Self {
        let final_path = checkpoints.folder.join(names::complete_name(step));
        let partial_path = checkpoints.folder.join(names::partial_name(step, lock.writer_id));
        Self { checkpoints, mesh, lock, step, final_path, partial_path }
    }

    /// Writes the checkpoint: all processes write their slots, and the first process writes the
    /// index.
    pub(super) fn write(&self, tensors: &StateDict, state: &impl Serialize) -> Result<()> {
        self.check_agreement()?;
        let result = self
            .mesh
            .all_ok(self.prepare(tensors, state))
            .and_then(|state| self.write_files(tensors, state));
        if result.is_err() && self.mesh.is_first_process() {
            // If this fails, the next save removes the folder.
            drop(fs::remove_dir_all(&self.partial_path));
        }
        result
    }

    /// Checks that all processes write the same checkpoint.
    fn check_agreement(&self) -> Result<()> {
        // Processes compare the name of the run by its checksum; 0 means that it has no name.
        let run_number = match &self.checkpoints.run {
            Some(name) => 1 + u64::from(Checksum::compute(name.as_bytes()).get()),
            None => 0,
        };
        if let Some((_, other)) = self.mesh.find_mismatch(self.step)? {
            return Err(Error::step_mismatch(&self.final_path, self.step, other));
        }
        match self.mesh.find_mismatch(run_number)? {
            None => Ok(()),
            Some((slot, _)) => {
                let path = self.final_path.clone();
                let reason =
                    format!("the process of slot {slot} saves a checkpoint of another run");
                Err(Error::ProcessesDiffer { path, reason })
            }
        }
    }

    /// Converts the run's state to JSON, and creates the folder in the first process.
    fn prepare(&self, tensors: &StateDict, state: &impl Serialize) -> Result<Value> {
        let found = tensors.slots.len();
        let expected = self.mesh.devices().len();
        if found != expected {
            return Err(Error::Slots { found, expected });
        }
        let state_json = json::to_value(state)
            .map_err(|cause| json_error(&self.final_path.join(INDEX), cause))?;
        if self.mesh.is_first_process() {
            self.remove_partial()?;
            self.clear_target()?;
            create_folder(&self.partial_path)?;
        }
        Ok(state_json)
    }

    /// Removes partial checkpoints of interrupted runs. A partial checkpoint that cannot be removed
    /// is harmless.
    fn remove_partial(&self) -> Result<()> {
        for partial in names::find_partial(&self.checkpoints.folder)? {
            if !self.lock.has_ended(partial.writer_id) {
                continue;
            }
            if let Err(error) = self.retire(partial.step, &partial.path) {
                let warning = format_args!(
                    "a partial checkpoint of an interrupted run cannot be removed: {error}"
                );
                self.lock.warn_once(&partial.path, warning);
            }
        }
        Ok(())
    }

    /// Removes a damaged checkpoint of the same step. A checkpoint that may be intact is renamed
    /// instead, since another run may need it.
    fn clear_target(&self) -> Result<()> {
        let path = &self.final_path;
        if !path.is_dir() {
            return Ok(());
        }
        match self.checkpoints.open_verified(path) {
            Ok(_) => Err(Error::Exists { path: path.clone(), step: self.step }),
            Err(error) if Severity::from_error(&error) == Severity::Damage => {
                tracing::warn!("replacing the damaged checkpoint {}: {error}", path.display());
                remove_folder(path)
            }
            Err(error) => {
                let name = names::moved_name(self.step, self.lock.writer_id);
                tracing::warn!("renaming the checkpoint {} to {name}: {error}", path.display());
                rename(path, &path.with_file_name(name))
            }
        }
    }

    /// Writes the files of all slots, and then the index.
    fn write_files(&self, tensors: &StateDict, state: Value) -> Result<()> {
        let local_files = self.mesh.all_ok(self.write_shards(tensors))?;
        let files = self.gather_files(&local_files)?;
        let result =
            if self.mesh.is_first_process() { self.finish(tensors, files, state) } else { Ok(()) };
        self.mesh.all_ok(result)
    }

    /// Writes the files of this process's slots. An empty slot has no file.
    fn write_shards(&self, tensors: &StateDict) -> Result<Vec<Option<WrittenFile>>> {
        if !self.partial_path.is_dir() {
            return Err(Error::NotShared { path: self.partial_path.clone() });
        }
        let mut files = Vec::new();
        for (slot, entries) in self.mesh.local_slots().zip(&tensors.slots) {
            let file = shard::name(slot, self.mesh.len());
            let path = self.partial_path.join(&file);
            let origin = FileOrigin { run: self.checkpoints.run.clone(), step: self.step, file };
            files.push(if entries.is_empty() {
                None
            } else {
                Some(write(&path, &origin, entries, self.checkpoints.values)?)
            });
        }
        Ok(files)
    }

    /// Gathers the files of all slots. `local_files` are the files of this process's slots.
    fn gather_files(&self, local_files: &[Option<WrittenFile>]) -> Result<Vec<IndexedFile>> {
        let local_numbers: Vec<_> = local_files.iter().copied().map(to_numbers).collect();
        let all_numbers = self.mesh.gather_numbers(&local_numbers)?;
        let mut files = Vec::new();
        for (slot, numbers) in all_numbers.into_iter().enumerate() {
            if let Some(written) = from_numbers(numbers) {
                files.push(IndexedFile::new(shard::name(slot, self.mesh.len()), written));
            }
        }
        Ok(files)
    }

    /// Writes the index, and renames the checkpoint to its final name.
    fn finish(&self, tensors: &StateDict, files: Vec<IndexedFile>, state: Value) -> Result<()> {
        let StateDict { parameters, trainer, .. } = tensors.clone();
        let run = self.checkpoints.run.clone();
        let index = Index::new(run, self.step, parameters, files, trainer, state);
        index.write(&self.partial_path.join(INDEX))?;
        sync_folder(&self.partial_path)?;
        rename(&self.partial_path, &self.final_path)?;
        self.remove_old();
        Ok(())
    }

    /// Removes damaged checkpoints, and checkpoints beyond the number to keep.
    ///
    /// A checkpoint that cannot be opened for another reason than damage stays, because it may
    /// belong to another run. A checkpoint that cannot be removed stays with a warning in the log;
    /// the new checkpoint is complete in any case.
    fn remove_old(&self) {
        let complete = match names::find_complete(&self.checkpoints.folder) {
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
                Ok(_) => {}
                Err(error) if Severity::from_error(&error) != Severity::Damage => {
                    self.lock.warn_once(path, format_args!("an old checkpoint stays: {error}"));
                    continue;
                }
                Err(error) => tracing::warn!("removing a damaged checkpoint: {error}"),
            }
            if let Err(error) = self.retire(step, path) {
                self.lock.warn_once(path, format_args!("an old checkpoint stays: {error}"));
            }
        }
    }

    /// Removes a checkpoint. It is renamed first, so that a half-removed checkpoint never looks
    /// complete, and a process that outlives its group cannot write to it.
    fn retire(&self, step: u64, path: &Path) -> Result<()> {
        let name = names::partial_name(step, self.lock.writer_id);
        let partial = self.checkpoints.folder.join(name);
        rename(path, &partial)?;
        remove_folder(&partial)
    }
}

/// Encodes a file's length and checksum to exchange them; the length is 0 if there is no file.
fn to_numbers(written: Option<WrittenFile>) -> [u64; 2] {
    written.map_or([0; 2], |WrittenFile { bytes, header }| [bytes, header.get().into()])
}

/// Decodes the numbers of [`to_numbers`].
fn from_numbers([bytes, header]: [u64; 2]) -> Option<WrittenFile> {
    #[expect(clippy::expect_used, reason = "`to_numbers` encodes a checksum of 32 bits")]
    let header = u32::try_from(header).expect("a checksum has 32 bits");
    (bytes > 0).then_some(WrittenFile { bytes, header: header.into() })
}
