//! The state of a run on disk: a folder for each checkpoint, with a file of tensors for each slot
//! and an index.

pub(crate) mod checkpoint;
pub(crate) mod footer;
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
    safetensors::finite::AllowedValues,
};

/// A folder with the checkpoints of one run.
///
/// # Files
///
/// `step-0000000120/` contains `index.json` and a file `shard-00001-of-00004.safetensors` for each
/// slot that stores something. The name of a tensor is `{kind}/{parameter}@{first item}`: a
/// [`TensorKey`](crate::TensorKey). The parent folder also contains `lock` and, during a run,
/// `holder.json`.
///
/// A checkpoint is written to a folder with a temporary name, synced, and renamed after all slots
/// are done. So a folder with the final name is complete, wherever the program stopped.
///
/// Checksums cover every byte: the index contains a checksum of its text and the checksums of its
/// files' headers, and each header contains the checksums of its tensors. A header also names the
/// step, run and slot of its file. So reading detects a damaged file and a file of another
/// checkpoint.
///
/// # One group of processes
///
/// The first [`save`](Self::save) or [`lock`](Self::lock) locks the folder for the processes of the
/// mesh, until the last clone of this value is dropped or the first process ends. No other group
/// can write there meanwhile. Readers need no lock.
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
    values: AllowedValues,
    lock: SharedLock,
}

impl Checkpoints {
    /// Returns the checkpoints in `folder`, which need not exist yet. By default the newest two are
    /// kept.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            keep: 2,
            run: None,
            values: AllowedValues::default(),
            lock: SharedLock::default(),
        }
    }

    /// Sets the number of checkpoints to keep after each save, including the new one.
    #[must_use]
    pub fn keep(self, count: usize) -> Self {
        Self { keep: count.max(1), ..self }
    }

    /// Names the run by a fingerprint of its settings, such as data, seed and learning rates. The
    /// name is written to every file, and loading a checkpoint of another name is an error.
    /// Checkpoints without a name are accepted.
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

    /// Accepts infinite numbers and NaN. By default they are rejected: a model with such a number
    /// is unusable, and an older checkpoint is better.
    #[must_use]
    pub fn allow_non_finite(self) -> Self {
        Self { values: AllowedValues::Any, ..self }
    }

    /// Returns the newest complete checkpoint, or `None` if no checkpoint was ever written.
    ///
    /// A checkpoint that is damaged or of another run is skipped if there is an earlier one; the
    /// log and [`Checkpoint::skipped`] contain a warning. This reads all bytes of the checkpoint.
    /// [`load_latest`](Self::load_latest) reads them only once, while loading, and ensures that all
    /// processes of a mesh load the same checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::NoUsableCheckpoint`], with the reasons, if there are checkpoints but none can be
    /// used; [`Error::Io`] or [`Error::Header`] if the folder or an existing file cannot be read,
    /// because skipping a possibly intact checkpoint would lose steps.
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        let mut skipped = Vec::new();
        for path in names::find_complete(&self.folder)?.into_values().rev() {
            match self.open_verified(&path) {
                Ok(checkpoint) => return Ok(Some(checkpoint.with_skipped(skipped))),
                Err(error) if Severity::from_error(&error) == Severity::Transient => {
                    return Err(error);
                }
                Err(error) => skip(&mut skipped, path, error),
            }
        }
        self.check_usable(skipped).map(|()| None)
    }

    /// Loads the newest checkpoint that `load` can read. Returns the checkpoint and the value of
    /// `load`, or `None` if no checkpoint was ever written.
    ///
    /// Every process of the mesh calls this, and all load the same checkpoint. If any process finds
    /// it damaged or cannot load it, all skip it, as in [`latest`](Self::latest).
    ///
    /// Every process must call the same collectives. So in `load`, an operation that may fail on
    /// one process alone, such as reading a private file, must not precede a collective: if it
    /// fails, the other processes wait forever in the collective. Run such an operation before or
    /// after this call.
    ///
    /// # Errors
    ///
    /// [`Error::NoUsableCheckpoint`], with the reasons, if there are checkpoints but none can be
    /// used; `load` may then have changed something. [`Error::Io`] or [`Error::Header`] if the
    /// folder or an existing file cannot be read, and [`Error::OtherProcess`] in the other
    /// processes; [`Error::Mesh`] if a process does not answer.
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
        let mut before_step = None;
        while let Some(step) = self.newest_before(mesh, before_step)? {
            let path = self.folder.join(names::complete_name(step));
            let result = mesh.all_ok(self.open(&path)).and_then(|checkpoint| {
                let value = mesh.all_ok(load(&checkpoint).map_err(E::into))?;
                Ok((checkpoint, value))
            });
            match result {
                Ok((checkpoint, value)) => {
                    return Ok(Some((checkpoint.with_skipped(skipped), value)));
                }
                // The mesh failed, not the checkpoint, so the processes cannot agree on another
                // checkpoint.
                Err(error @ Error::Mesh(_)) => return Err(error),
                Err(error) if is_transient_anywhere(mesh, &error)? => return Err(error),
                Err(error) => skip(&mut skipped, path, error),
            }
            before_step = Some(step);
        }
        self.check_usable(skipped).map(|()| None)
    }

    /// Returns the newest step before `before_step` with a checkpoint that the first process sees.
    fn newest_before(&self, mesh: &DeviceMesh, before_step: Option<u64>) -> Result<Option<u64>> {
        let complete = mesh.all_ok(names::find_complete(&self.folder))?;
        let newest = complete
            .into_keys()
            .rev()
            .find(|step| before_step.is_none_or(|before_step| *step < before_step));
        let local_numbers = newest.map_or([0, 0], |step| [1, step]);
        let numbers = mesh.gather_numbers(&vec![local_numbers; mesh.local_slots().len()])?;
        // The numbers of the first slot are those of the first process.
        let [exists, step] = numbers[0];
        Ok((exists == 1).then_some(step))
    }

    /// Returns the steps of the checkpoints, oldest first, without checkpoints that lack a file or
    /// have a damaged index or header. This does not read tensors.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let complete = names::find_complete(&self.folder)?;
        let usable = complete.into_iter().filter(|(_, path)| self.open(path).is_ok());
        Ok(usable.map(|(step, _)| step).collect())
    }

    /// Locks the folder for the processes of this mesh, as [`save`](Self::save) does. Use it to
    /// lock before the run writes other files. Every process of the mesh calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`] if another process writes there, [`Error::Lost`] if this process had the
    /// lock and the folder was removed or taken over; [`Error::Io`] if the folder cannot be
    /// created.
    pub fn lock(&self, mesh: &DeviceMesh) -> Result<()> {
        self.lock.take(mesh, &self.folder).map(drop)
    }

    /// Writes a checkpoint after `step` steps: the tensors of all slots, and a serializable
    /// `state`. Returns when it is complete.
    ///
    /// Every process of the mesh calls this, with the same folder, which all processes must see.
    /// Each process writes the files of its slots, and the first process writes the index and
    /// removes old checkpoints. If one process fails, all processes return an error.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if there is a complete checkpoint of this step, [`Error::NotFinite`] if a
    /// tensor has an infinite number or NaN, [`Error::Slots`] if `tensors` belong to another mesh,
    /// [`Error::Json`] if JSON cannot represent `state`, the errors of [`lock`](Self::lock),
    /// [`Error::ProcessesDiffer`] or [`Error::NotShared`] if processes do not
    /// write the same checkpoint, [`Error::Io`] with the path and the system's error. Earlier
    /// checkpoints stay unchanged.
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
                let reason = format!("this is a checkpoint of run {found}, not of {expected}");
                Err(Error::unsuitable(path, reason))
            }
            _ => Ok(checkpoint),
        }
    }

    /// Opens a complete checkpoint of this run, and checks its tensors.
    fn open_verified(&self, path: &Path) -> Result<Checkpoint> {
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
    let checkpoint = SkippedCheckpoint { path, error };
    tracing::warn!("a checkpoint is skipped: {checkpoint}");
    skipped.push(checkpoint);
}

/// Returns true if the system failed to read in any process. The processes exchange this, because
/// the error of the other processes only says that one process failed.
fn is_transient_anywhere(mesh: &DeviceMesh, error: &Error) -> Result<bool> {
    let local_number = u64::from(Severity::from_error(error) == Severity::Transient);
    let all = mesh.gather_numbers(&vec![[local_number]; mesh.local_slots().len()])?;
    Ok(all.contains(&[1]))
}
