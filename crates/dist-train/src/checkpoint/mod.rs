//! The state of a training run on disk: a folder for each checkpoint, with a file of tensors for
//! each slot and an index.

mod agreement;
pub(crate) mod disk;
pub(crate) mod file;
mod index;
pub(crate) mod read;
pub(crate) mod state_dict;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use pmap_mesh::DeviceMesh;
use serde::Serialize;

use self::{
    agreement::{gather_numbers, wait_for_all},
    disk::{At, remove, sync_folder},
    file::shard_name,
    index::{INDEX, Index, Listed, json_error},
    read::Checkpoint,
    state_dict::StateDict,
};
use crate::error::{Result, checkpoint::CheckpointError};

/// The extension of a checkpoint's folder while it is written.
const PARTIAL: &str = "partial";

/// A folder with the checkpoints of one run.
///
/// # Files
///
/// `step-0000000120/` holds `shard-00001-of-00004.safetensors` and so on, one for each slot that
/// keeps something, and `index.json`. A tensor's name is `{kind}/{parameter}@{first item}`; the
/// kinds are `model` and those of the optimizer, as in
/// [`StatefulOptimizer::state`](crate::StatefulOptimizer::state).
///
/// A checkpoint is written into `step-0000000120.partial/`, brought to disk, and renamed when all
/// slots are done: what has the final name is whole, wherever the writing was stopped.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Module, Optimizer, ParamsAdamW, linear, loss::mse};
/// use dist_train::{AdamW, Checkpoints, DataParallel};
/// use pmap_mesh::DeviceMesh;
///
/// let train = |slots: usize, folder: &std::path::Path, steps: u64| -> Result<f64, Box<dyn std::error::Error>> {
///     let mesh = DeviceMesh::cpu(slots)?;
///     let params = ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() };
///     let mut model = DataParallel::builder(&mesh, |vb| linear(3, 1, vb))
///         .build(|group| AdamW::new(group.vars, params.clone()))?;
///
///     let checkpoints = Checkpoints::new(folder);
///     let mut first = 0;
///     if let Some(checkpoint) = checkpoints.latest()? {
///         model.load(&checkpoint)?;
///         first = checkpoint.step();
///     }
///     let mut loss = f64::NAN;
///     for step in first..steps {
///         let x = Tensor::arange(0_f32, 24., &Device::Cpu)?.reshape((8, 3))?.affine(0.1, -(step as f64))?;
///         let y = x.sum_keepdim(1)?;
///         let of = |_: &_, model: &candle_nn::Linear, (x, y): (Tensor, Tensor)| mse(&model.forward(&x)?, &y);
///         loss = model.step((x, y), of)?.loss;
///     }
///     checkpoints.save(&mesh, steps, &model.state_dict()?, &"whatever else a run must know")?;
///     Ok(loss)
/// };
/// let folder = tempfile::tempdir()?;
/// train(2, folder.path(), 10)?;
/// let loss = train(4, folder.path(), 20)?; // resumes from step 10, on twice as many devices
/// # assert!(loss.is_finite());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

impl Checkpoints {
    /// The checkpoints in `folder`, which need not exist yet. The newest two are kept.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), keep: 2 }
    }

    /// Sets how many are kept when a new one has been written: the new one always is, so 0 means 1.
    #[must_use]
    pub fn keep(self, count: usize) -> Self {
        Self { keep: count.max(1), ..self }
    }

    /// The newest checkpoint that is whole; `None` if none was ever written.
    ///
    /// One that lacks a file, or has one of another size than the index says, is passed over with a
    /// warning in the log if there is an earlier one. On a mesh of several processes all of them must
    /// find the same one.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the folder cannot be read; if all checkpoints in it are damaged,
    /// what the newest lacks.
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        let mut damaged = Ok(None);
        for path in self.complete()?.values().rev() {
            match Checkpoint::open(path) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(error) => {
                    tracing::warn!("{} is passed over: {error}", path.display());
                    damaged = damaged.and(Err(error));
                }
            }
        }
        damaged
    }

    /// The steps after which the checkpoints that are whole were written, oldest first.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps = Vec::new();
        for (step, path) in self.complete()? {
            if Checkpoint::open(path).is_ok() {
                steps.push(step);
            }
        }
        Ok(steps)
    }

    /// Writes a checkpoint after `step` steps: the tensors of all slots, and a `state` that serde
    /// can write. Returns when it is whole.
    ///
    /// Every process of the mesh calls this, with the same folder, which all of them must reach.
    /// Each writes the files of its own slots, and the first one the index; then the first removes
    /// what is not to be kept.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Exists`] if there is a whole checkpoint of this step,
    /// [`CheckpointError::Slots`] if `tensors` are those of another mesh, [`CheckpointError::Json`]
    /// if `state` cannot be written, [`CheckpointError::Io`] with the path and what the system says.
    /// Earlier checkpoints are untouched. On a mesh of several processes, one that fails leaves the
    /// others waiting, and must end.
    pub fn save(
        &self,
        mesh: &DeviceMesh,
        step: u64,
        tensors: &StateDict,
        state: &impl Serialize,
    ) -> Result<()> {
        let whole = self.folder.join(folder_name(step));
        let partial = whole.with_extension(PARTIAL);
        let found = tensors.slots.len();
        let expected = mesh.devices().len();
        if found != expected {
            return Err(CheckpointError::Slots { found, expected }.into());
        }
        let state =
            serde_json::to_value(state).map_err(|cause| json_error(&whole.join(INDEX), cause))?;
        let is_first = mesh.local_slots().start == 0;
        if is_first {
            self.make_room(step, &whole)?;
            fs::create_dir_all(&partial).at(&partial)?;
        }
        wait_for_all(mesh)?;
        let files = write_shards(mesh, &partial, tensors)?;
        if is_first {
            let index =
                Index::new(step, tensors.parameters.clone(), files, tensors.trainer.clone(), state);
            index.write(&partial.join(INDEX))?;
            sync_folder(&partial)?;
            fs::rename(&partial, &whole).at(&whole)?;
            sync_folder(&self.folder)?;
            self.remove_old(step);
        }
        wait_for_all(mesh)
    }

    /// The folders that have a final name, by step; others are not ours.
    fn complete(&self) -> Result<BTreeMap<u64, PathBuf>> {
        let mut complete = BTreeMap::new();
        for path in self.folders()? {
            if let Some(step) = name_of(&path).and_then(step_of) {
                complete.insert(step, path);
            }
        }
        Ok(complete)
    }

    fn folders(&self) -> Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.at(&self.folder)?,
        };
        let mut folders = Vec::new();
        for entry in entries {
            let path = entry.at(&self.folder)?.path();
            if path.is_dir() {
                folders.push(path);
            }
        }
        Ok(folders)
    }

    /// Removes what an interrupted run has left, and a damaged checkpoint in the place of the new
    /// one.
    fn make_room(&self, step: u64, whole: &Path) -> Result<()> {
        for path in self.folders()? {
            if name_of(&path).and_then(partial_step_of).is_some() {
                remove(&path)?;
            }
        }
        if !whole.is_dir() {
            return Ok(());
        }
        match Checkpoint::open(whole) {
            Ok(_) => Err(CheckpointError::Exists { path: whole.to_owned(), step }.into()),
            Err(_) => remove(whole),
        }
    }

    /// Removes the checkpoints before `step` that have enough newer ones which are whole. What
    /// cannot be removed stays, with a warning in the log: the new one is whole all the same.
    fn remove_old(&self, step: u64) {
        let complete = match self.complete() {
            Ok(complete) => complete,
            Err(error) => return tracing::warn!("old checkpoints stay: {error}"),
        };
        let mut n_newer = 1;
        for (_, path) in complete.range(..step).rev() {
            if n_newer < self.keep && Checkpoint::open(path).is_ok() {
                n_newer += 1;
            } else if let Err(error) = retire(path) {
                tracing::warn!("an old checkpoint stays: {error}");
            }
        }
    }
}

/// Writes the files of this process's slots; returns those of all slots. A slot that keeps nothing
/// has none.
fn write_shards(mesh: &DeviceMesh, folder: &Path, tensors: &StateDict) -> Result<Vec<Listed>> {
    let mut lens = Vec::new();
    for (slot, entries) in mesh.local_slots().zip(&tensors.slots) {
        let path = folder.join(shard_name(slot, mesh.len()));
        lens.push(if entries.is_empty() { 0 } else { file::write(&path, entries)? });
    }
    let lens = gather_numbers(mesh, &lens)?;
    let written = lens.into_iter().enumerate().filter(|&(_, bytes)| bytes > 0);
    Ok(written.map(|(slot, bytes)| Listed { name: shard_name(slot, mesh.len()), bytes }).collect())
}

/// Removes a checkpoint, which loses its name first: what is half removed is not taken for whole.
fn retire(path: &Path) -> Result<()> {
    let partial = path.with_extension(PARTIAL);
    fs::rename(path, &partial).at(path)?;
    remove(&partial)
}

fn folder_name(step: u64) -> String {
    format!("step-{step:010}")
}

/// The name of a folder, if it is text, as ours are.
fn name_of(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// The step in the name of a checkpoint's folder.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// The step in the name of a folder of which the writing or removing was interrupted.
fn partial_step_of(name: &str) -> Option<u64> {
    step_of(name.strip_suffix(PARTIAL)?.strip_suffix('.')?)
}
