//! The state of a run on disk: a folder for each checkpoint, with a file of tensors for each slot and
//! an index.

pub(crate) mod checkpoint;
mod footer;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod index;
mod json;
pub(crate) mod key;
#[cfg(test)]
pub(crate) mod kills;
mod lock;
mod names;
mod severity;
mod shard;
pub(crate) mod state_dict;
mod writer;

use std::path::{Path, PathBuf};

use pmap_mesh::DeviceMesh;
use serde::Serialize;

use self::{
    checkpoint::Checkpoint, lock::SharedLock, severity::Severity, state_dict::StateDict,
    writer::CheckpointWriter,
};
use crate::{
    error::{Error, Result, skipped::SkippedCheckpoint},
    safetensors::finite::Values,
};

/// A folder with the checkpoints of one run.
///
/// # Files
///
/// `step-0000000120/` holds `shard-00001-of-00004.safetensors` and so on, one for each slot that
/// stores something, and `index.json`. The name of a tensor is `{kind}/{parameter}@{first item}`: a
/// [`TensorKey`](crate::TensorKey). Beside these folders lie `lock` and, during a run,
/// `holder.json`.
///
/// A checkpoint is written into a folder of another name, synced, and renamed when all slots are
/// done, so a folder with the final name is whole, wherever the program was stopped.
///
/// Every byte is covered by a checksum: the index has its own and those of the headers of its
/// files, and each header has those of its tensors. The header also names the step, run and slot of
/// the file. So a damaged file, or one of another checkpoint, is noticed when it is read.
///
/// # One group of processes
///
/// The first [`save`](Self::save), or [`lock`](Self::lock), locks the folder for the processes of
/// the mesh until the last clone of this value is dropped or the first process ends: no other
/// group may write there meanwhile. Readers need no lock.
///
/// # Examples
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{Device, Tensor};
/// use dist_checkpoint::{Checkpoints, Result, StateDict, TensorKey};
/// use pmap_mesh::DeviceMesh;
///
/// # let folder = tempfile::tempdir()?;
/// let mesh = DeviceMesh::cpu(2)?;
/// let shapes = BTreeMap::from([("bias".to_owned(), vec![3])]);
/// let key = TensorKey::model("bias", 0);
/// let checkpoints = Checkpoints::new(folder.path());
///
/// let mut bias = Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu)?;
/// let mut first = 0;
/// if let Some((checkpoint, loaded)) = checkpoints.load_latest(&mesh, |c| c.items(key, 3))? {
///     (first, bias) = (checkpoint.step(), loaded);
/// }
/// for step in first..10 {
///     bias = (bias + step as f64)?;
/// }
/// let mut state = StateDict::new(&mesh, shapes);
/// state.add(0, key, bias)?;
/// checkpoints.save(&mesh, 10, &state, &"whatever else a run must know")?;
/// # assert_eq!(checkpoints.steps()?, [10]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    run: Option<String>,
    values: Values,
    lock: SharedLock,
}

impl Checkpoints {
    /// Returns the checkpoints in `folder`, which need not exist yet. The newest two are kept.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            keep: 2,
            run: None,
            values: Values::default(),
            lock: SharedLock::default(),
        }
    }

    /// Sets the number of checkpoints that are kept when a new one has been written, which always is
    /// one of them.
    #[must_use]
    pub fn keep(self, count: usize) -> Self {
        Self { keep: count.max(1), ..self }
    }

    /// Names the run, by a fingerprint of whatever makes it this run, such as its data, seed and
    /// learning rates. It is written into every file, and checkpoints of a run of another name are
    /// errors. Checkpoints without a name are accepted.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::collections::BTreeMap;
    /// # use dist_checkpoint::{Checkpoints, StateDict};
    /// # use pmap_mesh::DeviceMesh;
    /// # let mesh = DeviceMesh::cpu(1)?;
    /// # let state = StateDict::new(&mesh, BTreeMap::new());
    /// # let folder = tempfile::tempdir()?;
    /// let long = Checkpoints::new(folder.path()).run("400 steps");
    /// long.save(&mesh, 8, &state, &())?;
    ///
    /// let short = Checkpoints::new(folder.path()).run("12 steps");
    /// let error = short.latest().unwrap_err().to_string();
    /// assert!(error.ends_with("this is a checkpoint of run 400 steps, not of 12 steps"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn run(self, name: impl Into<String>) -> Self {
        Self { run: Some(name.into()), ..self }
    }

    /// Writes and reads values that are infinite or not a number as they are. Without this they are
    /// refused: a model that has one is lost, and an older checkpoint is better.
    #[must_use]
    pub fn allow_non_finite(self) -> Self {
        Self { values: Values::Any, ..self }
    }

    /// Returns the newest checkpoint that is whole; `None` if none was ever written.
    ///
    /// One that is damaged, or is of another run, is skipped, with a warning in the log and in
    /// [`Checkpoint::skipped`], if there is an earlier one. All of its bytes are read for this.
    /// [`load_latest`](Self::load_latest) reads them once, when they are loaded, and sees to it
    /// that all processes of a mesh load the same checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::NoUsableCheckpoint`] if there are checkpoints and none can be used, with the
    /// reason for each; [`Error::Io`] or [`Error::Header`] if the folder or a
    /// file that is there cannot be read: the checkpoint may be whole, and steps would be lost with
    /// it.
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        let mut skipped = Vec::new();
        for path in names::complete(&self.folder)?.into_values().rev() {
            match self.open_whole(&path) {
                Ok(checkpoint) => return Ok(Some(checkpoint.after(skipped))),
                Err(error) if Severity::of(&error) == Severity::Passing => return Err(error),
                Err(error) => skip(&mut skipped, path, error),
            }
        }
        self.check_usable(skipped).map(|()| None)
    }

    /// Loads the newest checkpoint that `load` can read to its end: returns the checkpoint, and the
    /// value of `load`; `None` if none was ever written.
    ///
    /// Every process of the mesh calls this, and all load the same checkpoint. One that any of them
    /// finds damaged or cannot load is skipped by all, as by [`latest`](Self::latest).
    ///
    /// Every process must call the same collectives: an operation that may fail on one process alone,
    /// such as reading a file of its own, belongs before this call or after it, not into `load` ahead
    /// of a collective, where the others would wait for it.
    ///
    /// # Errors
    ///
    /// [`Error::NoUsableCheckpoint`] if there are checkpoints and none can be used, with the reason for
    /// each: then `load` may have changed something. [`Error::Io`] or [`Error::Header`] if the folder
    /// or an existing file cannot be read, and [`Error::OtherProcess`] in the other processes;
    /// [`Error::Mesh`] if a process does not answer.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::collections::BTreeMap;
    /// # use candle_core::{Device, Tensor};
    /// # use dist_checkpoint::{Checkpoints, StateDict, TensorKey};
    /// # use pmap_mesh::DeviceMesh;
    /// # let mesh = DeviceMesh::cpu(1)?;
    /// # let key = TensorKey::model("weight", 0);
    /// # let mut state = StateDict::new(&mesh, BTreeMap::from([("weight".to_owned(), vec![1])]));
    /// # state.add(0, key, Tensor::new(&[1_f32], &Device::Cpu)?)?;
    /// # let folder = tempfile::tempdir()?;
    /// let checkpoints = Checkpoints::new(folder.path());
    /// for step in [4, 8] {
    ///     checkpoints.save(&mesh, step, &state, &())?;
    /// }
    /// // A bit of a tensor changes on the disk.
    /// let file = folder.path().join("step-0000000008/shard-00001-of-00001.safetensors");
    /// let mut bytes = std::fs::read(&file)?;
    /// *bytes.last_mut().ok_or("empty")? ^= 0x40;
    /// std::fs::write(&file, bytes)?;
    ///
    /// let loaded = checkpoints.load_latest(&mesh, |checkpoint| checkpoint.items(key, 1))?;
    /// let (checkpoint, _) = loaded.ok_or("no checkpoint")?;
    /// assert_eq!(checkpoint.step(), 4);
    /// let skipped = checkpoint.skipped()[0].to_string();
    /// assert!(skipped.contains("tensor model/weight@0 is damaged"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn load_latest<T, E: Into<Error>>(
        &self,
        mesh: &DeviceMesh,
        mut load: impl FnMut(&Checkpoint) -> Result<T, E>,
    ) -> Result<Option<(Checkpoint, T)>> {
        let mut skipped = Vec::new();
        let mut below = None;
        while let Some(step) = self.newest_below(mesh, below)? {
            let path = self.folder.join(names::name(step));
            let loaded = mesh.all_ok(self.open(&path)).and_then(|checkpoint| {
                let loaded = mesh.all_ok(load(&checkpoint).map_err(E::into))?;
                Ok((checkpoint, loaded))
            });
            match loaded {
                Ok((checkpoint, loaded)) => {
                    return Ok(Some((checkpoint.after(skipped), loaded)));
                }
                // Nothing is wrong with the checkpoint, and the others are not there to agree.
                Err(error @ Error::Mesh(_)) => return Err(error),
                Err(error) if is_passing_anywhere(mesh, &error)? => return Err(error),
                Err(error) => skip(&mut skipped, path, error),
            }
            below = Some(step);
        }
        self.check_usable(skipped).map(|()| None)
    }

    /// Returns the step of the newest checkpoint that the first process sees, of a step below `below`.
    fn newest_below(&self, mesh: &DeviceMesh, below: Option<u64>) -> Result<Option<u64>> {
        let complete = mesh.all_ok(names::complete(&self.folder))?;
        let newest =
            complete.into_keys().rev().find(|step| below.is_none_or(|below| *step < below));
        let here = newest.map_or([0, 0], |step| [1, step]);
        let steps = mesh.gather_numbers(&vec![here; mesh.local_slots().len()])?;
        let [is_there, step] = steps[0];
        Ok((is_there == 1).then_some(step))
    }

    /// Returns the steps after which checkpoints were written, oldest first. Those that lack a file, or
    /// whose index or headers are damaged, do not count; tensors are not read.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let complete = names::complete(&self.folder)?;
        let whole = complete.into_iter().filter(|(_, path)| self.open(path).is_ok());
        Ok(whole.map(|(step, _)| step).collect())
    }

    /// Locks the folder for the processes of this mesh, as [`save`](Self::save) does, before
    /// anything else of the run is written. Every process of the mesh calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`] if another process writes there, [`Error::Lost`] if it
    /// was claimed here, and then removed or taken over; [`Error::Io`] if the folder
    /// cannot be made.
    pub fn lock(&self, mesh: &DeviceMesh) -> Result<()> {
        self.lock.take(mesh, &self.folder).map(drop)
    }

    /// Writes a checkpoint after `step` steps: the tensors of all slots, and a `state` that serde
    /// can write. Returns when it is whole.
    ///
    /// Every process of the mesh calls this, with the same folder, which all of them must reach.
    /// Each writes the files of its own slots, and the first one the index; then the first removes
    /// what is not to be kept. If one process fails, all return an error.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if there is a whole checkpoint of this step,
    /// [`Error::NotFinite`] if a tensor has a number that is not finite,
    /// [`Error::Slots`] if `tensors` are those of another mesh, [`Error::Json`]
    /// if `state` cannot be written, or would not be read again as JSON has no infinite numbers,
    /// those of [`lock`](Self::lock), [`Error::StepMismatch`],
    /// [`Error::RunsDiffer`] or [`Error::NotShared`] if processes do not write
    /// the same checkpoint, [`Error::Io`] with the path and what the system says.
    /// Earlier checkpoints are untouched.
    pub fn save(
        &self,
        mesh: &DeviceMesh,
        step: u64,
        tensors: &StateDict,
        state: &impl Serialize,
    ) -> Result<()> {
        let lock = self.lock.take(mesh, &self.folder)?;
        CheckpointWriter::new(self, mesh, &lock, step).write(tensors, state)
    }

    /// Opens a checkpoint, which must be of this run.
    fn open(&self, path: &Path) -> Result<Checkpoint> {
        let checkpoint = Checkpoint::open(path)?.with_values(self.values);
        match (&self.run, checkpoint.run()) {
            (Some(expected), Some(found)) if found != expected => {
                let (found, expected) = (found.to_owned(), expected.clone());
                Err(Error::RunMismatch { path: path.to_owned(), found, expected })
            }
            _ => Ok(checkpoint),
        }
    }

    /// Opens a checkpoint of this run that is whole.
    fn open_whole(&self, path: &Path) -> Result<Checkpoint> {
        let checkpoint = self.open(path)?;
        checkpoint.verify()?;
        Ok(checkpoint)
    }

    /// Checks that no checkpoint was skipped.
    fn check_usable(&self, skipped: Vec<SkippedCheckpoint>) -> Result<()> {
        if skipped.is_empty() {
            return Ok(());
        }
        Err(Error::NoUsableCheckpoint { path: self.folder.clone(), skipped })
    }
}

fn skip(skipped: &mut Vec<SkippedCheckpoint>, path: PathBuf, error: Error) {
    let passed = SkippedCheckpoint { path, error };
    tracing::warn!("a checkpoint is skipped: {passed}");
    skipped.push(passed);
}

/// Returns true if the system failed to read in any process: the others only know that one failed.
fn is_passing_anywhere(mesh: &DeviceMesh, error: &Error) -> Result<bool> {
    let here = u64::from(Severity::of(error) == Severity::Passing);
    let all = mesh.gather_numbers(&vec![[here]; mesh.local_slots().len()])?;
    Ok(all.contains(&[1]))
}
