//! The state of a training run on disk: a folder for each checkpoint, with a file of tensors for
//! each slot and an index.

mod checksum;
mod claim;
pub(crate) mod disk;
mod fault;
pub(crate) mod finite;
mod folder;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod index;
mod json;
pub(crate) mod key;
pub(crate) mod read;
mod save;
mod seal;
mod shard;
pub(crate) mod state_dict;

use std::path::{Path, PathBuf};

use pmap_mesh::DeviceMesh;
use serde::Serialize;

use self::{
    claim::Claims, fault::Fault, finite::Values, read::Checkpoint, save::Save,
    state_dict::StateDict,
};
use crate::{
    error::{
        Error, Result,
        checkpoint::{CheckpointError, PassedOver},
    },
    processes::{agreed, gather_numbers},
};

/// A folder with the checkpoints of one run.
///
/// # Files
///
/// `step-0000000120/` holds `shard-00001-of-00004.safetensors` and so on, one for each slot that
/// keeps something, and `index.json`. A tensor's name is `{kind}/{parameter}@{first item}`; the
/// kinds are `model` and those of the optimizer, as in
/// [`StatefulOptimizer::state`](crate::StatefulOptimizer::state). Beside these folders lie `lock`
/// and, while a run is under way, `holder.json`.
///
/// A checkpoint is written into a folder of another name, brought to disk, and renamed when all
/// slots are done: what has the final name is whole, wherever the writing was stopped.
///
/// Every byte is covered by a checksum: the index has its own and those of the headers of its
/// files, and each header has those of its tensors. The header also says to which step, run and
/// slot the file belongs. So a file that was damaged, or that belongs to another checkpoint, is
/// noticed when it is read. Checkpoints of format version 1, which had no checksums, are read as
/// well, with a warning in the log.
///
/// # One group of processes
///
/// The first [`save`](Self::save), or [`lock`](Self::lock), claims the folder for the processes of
/// the mesh until the last clone of this value is dropped or the first process ends: no other
/// group may write there meanwhile. Readers claim nothing.
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
///     if let Some((checkpoint, ())) = checkpoints.load_latest(&mesh, |checkpoint| model.load(checkpoint))? {
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
    run: Option<String>,
    values: Values,
    claims: Claims,
}

impl Checkpoints {
    /// The checkpoints in `folder`, which need not exist yet. The newest two are kept.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            keep: 2,
            run: None,
            values: Values::default(),
            claims: Claims::default(),
        }
    }

    /// Sets how many are kept when a new one has been written: the new one always is, so 0 means 1.
    #[must_use]
    pub fn keep(self, count: usize) -> Self {
        Self { keep: count.max(1), ..self }
    }

    /// Names the run: a fingerprint of whatever makes it this run and no other, such as its data,
    /// seed and learning rates. It is written into every file, and checkpoints of a run of another
    /// name are refused. Those that have no name are taken.
    ///
    /// # Examples
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{Optimizer, linear};
    /// # use dist_train::{Checkpoints, DataParallel, ParamsSgd, Sgd};
    /// # use pmap_mesh::DeviceMesh;
    /// # let mesh = DeviceMesh::cpu(1)?;
    /// # let model = DataParallel::builder(&mesh, |vb| linear(3, 1, vb))
    /// #     .build(|group| Sgd::new(group.vars, ParamsSgd::default()))?;
    /// # let folder = tempfile::tempdir()?;
    /// let long = Checkpoints::new(folder.path()).run("400 steps");
    /// long.save(&mesh, 8, &model.state_dict()?, &())?;
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

    /// The newest checkpoint that is whole; `None` if none was ever written.
    ///
    /// One that is damaged, or is of another run, is passed over, with a warning in the log and in
    /// [`Checkpoint::passed_over`], if there is an earlier one. All of its bytes are read for this.
    /// [`load_latest`](Self::load_latest) reads them once, when they are loaded, and sees to it
    /// that all processes of a mesh load the same checkpoint.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoneLeft`] if there are checkpoints and none can be used, with what is
    /// wrong with each; [`CheckpointError::Io`] or [`CheckpointError::Header`] if the folder or a
    /// file that is there cannot be read: the checkpoint may be whole, and steps would be lost with
    /// it.
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        let mut passed_over = Vec::new();
        for path in folder::complete(&self.folder)?.into_values().rev() {
            match self.open_whole(&path) {
                Ok(checkpoint) => return Ok(Some(taken(checkpoint, passed_over))),
                Err(error) if Fault::of(&error) == Fault::Passing => return Err(error),
                Err(error) => pass_over(&mut passed_over, path, error),
            }
        }
        self.none_left(passed_over).map(|()| None)
    }

    /// Loads the newest checkpoint that `load` can read to its end: the checkpoint, and what `load`
    /// returned; `None` if none was ever written.
    ///
    /// Every process of the mesh calls this, and all load the same checkpoint. One that any of them
    /// finds damaged or cannot load is passed over by all, as by [`latest`](Self::latest).
    ///
    /// Every process must come to the same collectives: what may fail on one process alone, such as
    /// reading a file of its own, belongs before this call or after it, not into `load` ahead of
    /// the model's own `load`, where the others would wait for it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoneLeft`] if there are checkpoints and none can be used, with what is
    /// wrong with each: then some variables may be changed. [`CheckpointError::Io`] or
    /// [`CheckpointError::Header`] if the folder or a file that is there cannot be read, and
    /// [`Error::OtherProcess`] in the other processes; [`Error::Mesh`] if a process does not
    /// answer.
    ///
    /// # Examples
    ///
    /// ```
    /// # use candle_nn::{Optimizer, linear};
    /// # use dist_train::{Checkpoints, DataParallel, ParamsSgd, Sgd};
    /// # use pmap_mesh::DeviceMesh;
    /// # let mesh = DeviceMesh::cpu(1)?;
    /// # let mut model = DataParallel::builder(&mesh, |vb| linear(3, 1, vb))
    /// #     .build(|group| Sgd::new(group.vars, ParamsSgd::default()))?;
    /// # let folder = tempfile::tempdir()?;
    /// let checkpoints = Checkpoints::new(folder.path());
    /// for step in [4, 8] {
    ///     checkpoints.save(&mesh, step, &model.state_dict()?, &())?;
    /// }
    /// // A bit of a tensor changes on the disk.
    /// let file = folder.path().join("step-0000000008/shard-00001-of-00001.safetensors");
    /// let mut bytes = std::fs::read(&file)?;
    /// *bytes.last_mut().ok_or("empty")? ^= 0x40;
    /// std::fs::write(&file, bytes)?;
    ///
    /// let loaded = checkpoints.load_latest(&mesh, |checkpoint| model.load(checkpoint))?;
    /// let (checkpoint, ()) = loaded.ok_or("no checkpoint")?;
    /// assert_eq!(checkpoint.step(), 4);
    /// let passed_over = checkpoint.passed_over()[0].to_string();
    /// assert!(passed_over.contains("tensor model/weight@0 is damaged"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn load_latest<T>(
        &self,
        mesh: &DeviceMesh,
        mut load: impl FnMut(&Checkpoint) -> Result<T>,
    ) -> Result<Option<(Checkpoint, T)>> {
        let mut passed_over = Vec::new();
        let mut below = None;
        while let Some(step) = self.newest_below(mesh, below)? {
            let path = self.folder.join(folder::name(step));
            let loaded = agreed(mesh, self.open(&path)).and_then(|checkpoint| {
                let loaded = agreed(mesh, load(&checkpoint))?;
                Ok((checkpoint, loaded))
            });
            match loaded {
                Ok((checkpoint, loaded)) => {
                    return Ok(Some((taken(checkpoint, passed_over), loaded)));
                }
                // Nothing is wrong with the checkpoint, and the others are not there to agree.
                Err(error @ Error::Mesh(_)) => return Err(error),
                Err(error) if is_passing_anywhere(mesh, &error)? => return Err(error),
                Err(error) => pass_over(&mut passed_over, path, error),
            }
            below = Some(step);
        }
        self.none_left(passed_over).map(|()| None)
    }

    /// The newest checkpoint that the first process sees, of a step below `below`.
    fn newest_below(&self, mesh: &DeviceMesh, below: Option<u64>) -> Result<Option<u64>> {
        let complete = agreed(mesh, folder::complete(&self.folder))?;
        let newest =
            complete.into_keys().rev().find(|step| below.is_none_or(|below| *step < below));
        let here = newest.map_or([0, 0], |step| [1, step]);
        let steps = gather_numbers(mesh, &vec![here; mesh.local_slots().len()])?;
        let [is_there, step] = steps[0];
        Ok((is_there == 1).then_some(step))
    }

    /// The steps after which checkpoints were written, oldest first. Those that lack a file, or
    /// whose index or headers are damaged, do not count; tensors are not read.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let complete = folder::complete(&self.folder)?;
        let whole = complete.into_iter().filter(|(_, path)| self.open(path).is_ok());
        Ok(whole.map(|(step, _)| step).collect())
    }

    /// Claims the folder for the processes of this mesh, as [`save`](Self::save) does, before
    /// anything else of the run is written. Every process of the mesh calls it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`] if another process writes there, [`CheckpointError::Lost`] if it
    /// was claimed here, and then removed or taken over; [`CheckpointError::Io`] if the folder
    /// cannot be made.
    pub fn lock(&self, mesh: &DeviceMesh) -> Result<()> {
        self.claims.take(mesh, &self.folder).map(drop)
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
    /// [`CheckpointError::Exists`] if there is a whole checkpoint of this step,
    /// [`CheckpointError::NotFinite`] if a tensor has a number that is not finite,
    /// [`CheckpointError::Slots`] if `tensors` are those of another mesh, [`CheckpointError::Json`]
    /// if `state` cannot be written, or would not be read again as JSON has no infinite numbers,
    /// those of [`lock`](Self::lock), [`CheckpointError::OtherStep`],
    /// [`CheckpointError::RunsDiffer`] or [`CheckpointError::NotShared`] if processes do not write
    /// the same checkpoint, [`CheckpointError::Io`] with the path and what the system says.
    /// Earlier checkpoints are untouched.
    pub fn save(
        &self,
        mesh: &DeviceMesh,
        step: u64,
        tensors: &StateDict,
        state: &impl Serialize,
    ) -> Result<()> {
        let claim = self.claims.take(mesh, &self.folder)?;
        Save::new(self, mesh, &claim, step).write(tensors, state)
    }

    /// Opens a checkpoint, which must be of this run.
    fn open(&self, path: &Path) -> Result<Checkpoint> {
        let checkpoint = Checkpoint::open(path)?.with_values(self.values);
        match (&self.run, checkpoint.run()) {
            (Some(expected), Some(found)) if found != expected => {
                let (found, expected) = (found.to_owned(), expected.clone());
                Err(CheckpointError::OtherRun { path: path.to_owned(), found, expected }.into())
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

    /// Says what is wrong with all checkpoints, if there are any.
    fn none_left(&self, passed_over: Vec<PassedOver>) -> Result<()> {
        if passed_over.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::NoneLeft { path: self.folder.clone(), passed_over }.into())
    }
}

fn pass_over(passed_over: &mut Vec<PassedOver>, path: PathBuf, error: Error) {
    let passed = PassedOver { path, error };
    tracing::warn!("a checkpoint is passed over: {passed}");
    passed_over.push(passed);
}

/// Whether the system failed to read, in any process: the others only know that one has failed.
fn is_passing_anywhere(mesh: &DeviceMesh, error: &Error) -> Result<bool> {
    let here = u64::from(Fault::of(error) == Fault::Passing);
    let all = gather_numbers(mesh, &vec![[here]; mesh.local_slots().len()])?;
    Ok(all.contains(&[1]))
}

/// A checkpoint that is used in the place of others.
fn taken(checkpoint: Checkpoint, passed_over: Vec<PassedOver>) -> Checkpoint {
    if !checkpoint.has_checksums() {
        let path = checkpoint.path().display();
        tracing::warn!("{path} has no checksums, so damage of it would not be noticed");
    }
    checkpoint.after(passed_over)
}

/// Whether this is the process of a mesh that does what is done once.
fn is_first(mesh: &DeviceMesh) -> bool {
    mesh.local_slots().start == 0
}
