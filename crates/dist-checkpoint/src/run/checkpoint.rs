//! Reading of a checkpoint.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor};
use pmap_mesh::DeviceMesh;
use serde::de::DeserializeOwned;

use crate::{
    error::{Doing, Error, Result, parameter::ParameterError, skipped::SkippedCheckpoint},
    run::{
        index::{INDEX, Index, json_error},
        key::{ParameterAndKind, TensorKey},
        names,
        shard::{self, read::TensorPiece},
    },
    safetensors::{checksum::Checksum, finite::AllowedValues},
};

/// A complete checkpoint, which can be read with any number of slots and any plan.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    index: Index,
    /// The checksum of the index, which covers everything in the checkpoint.
    checksum: Checksum,
    /// The pieces of each parameter and kind, sorted by first item.
    pieces: BTreeMap<ParameterAndKind, Vec<TensorPiece>>,
    values: AllowedValues,
    skipped: Vec<SkippedCheckpoint>,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path`, and checks its index and the headers of its
    /// files. Tensors are checked when they are read.
    ///
    /// # Errors
    ///
    /// An [`Error`] that names the file if it is missing, damaged, or belongs to another step, run
    /// or format; [`ParameterError::UnknownDtype`] for tensors that candle cannot hold.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let (index, checksum) = Index::read(&path.join(INDEX))?;
        names::check_step(&path, index.step)?;
        let mut pieces: BTreeMap<ParameterAndKind, Vec<TensorPiece>> = BTreeMap::new();
        for file in &index.files {
            let file_path = path.join(&file.name);
            let expected = index.expected_file(file);
            for (parameter_and_kind, piece) in shard::read::open(&file_path, &expected)? {
                pieces.entry(parameter_and_kind).or_default().push(piece);
            }
        }
        for parameter_pieces in pieces.values_mut() {
            parameter_pieces.sort_by_key(|piece| piece.items().start);
        }
        let values = AllowedValues::default();
        Ok(Self { path, index, checksum, pieces, values, skipped: Vec::new() })
    }

    /// Sets the numbers that are accepted; by default finite ones only.
    pub(super) fn with_values(self, values: AllowedValues) -> Self {
        Self { values, ..self }
    }

    /// Sets the newer checkpoints that were skipped.
    pub(super) fn with_skipped(self, skipped: Vec<SkippedCheckpoint>) -> Self {
        Self { skipped, ..self }
    }

    /// Reads and checks all tensors.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] or [`Error::NotFinite`] for the first damaged tensor, [`Error::Io`] if a
    /// file cannot be read.
    pub(super) fn verify(&self) -> Result<()> {
        self.pieces.values().flatten().try_for_each(|piece| piece.verify(self.values))
    }

    /// Returns the checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of completed steps.
    pub fn step(&self) -> u64 {
        self.index.step
    }

    /// Returns the name of the run that wrote the checkpoint, if the run has a name: see
    /// [`Checkpoints::run`].
    ///
    /// [`Checkpoints::run`]: crate::Checkpoints::run
    pub(super) fn run(&self) -> Option<&str> {
        self.index.run.as_deref()
    }

    /// Returns the newer checkpoints that could not be used, the newest first.
    pub fn skipped(&self) -> &[SkippedCheckpoint] {
        &self.skipped
    }

    /// Returns the state of the trainer that wrote the checkpoint, if it contains one.
    ///
    /// # Errors
    ///
    /// [`Error::Json`] if the state is not a `T`.
    pub fn trainer<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        let Some(trainer) = &self.index.trainer else { return Ok(None) };
        match serde_json::from_str(trainer.get()) {
            Ok(trainer) => Ok(Some(trainer)),
            Err(cause) => Err(json_error(&self.path.join(INDEX), cause)),
        }
    }

    /// Returns the state of the run.
    ///
    /// # Errors
    ///
    /// [`Error::Json`] if the state is not a `T`.
    pub fn state<T: DeserializeOwned>(&self) -> Result<T> {
        T::deserialize(&self.index.state).map_err(|cause| json_error(&self.path.join(INDEX), cause))
    }

    /// Returns the names of the model's parameters.
    fn parameters(&self) -> impl Iterator<Item = &str> {
        self.index.parameters.keys().map(String::as_str)
    }

    /// Returns the kinds of tensors of a parameter, sorted.
    pub fn kinds<'a>(&'a self, parameter: &'a str) -> impl Iterator<Item = &'a str> {
        let first = (parameter.to_owned(), String::new());
        let keys = self.pieces.range(first..).map(|(key, _)| key);
        keys.take_while(move |(other, _)| other == parameter).map(|(_, kind)| kind.as_str())
    }

    /// Returns the dtype of the tensors of a kind and parameter.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Incomplete`] if there are none.
    pub fn dtype(&self, key: TensorKey<'_>) -> Result<DType> {
        Ok(self.pieces(key)?[0].dtype())
    }

    /// Checks that the model has exactly these parameters, with these shapes, and that all
    /// processes of the mesh read the same checkpoint.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`], [`ParameterError::Missing`], [`ParameterError::Shape`];
    /// [`Error::ProcessesDiffer`] if another process reads a different
    /// checkpoint, and [`Error::OtherProcess`] if it fails.
    pub fn check_fits(
        &self,
        mesh: &DeviceMesh,
        model: &BTreeMap<String, Vec<usize>>,
    ) -> Result<()> {
        mesh.all_ok(self.check_parameters(model).map_err(Error::from))?;
        if let Some((_, other)) = mesh.find_mismatch(self.step())? {
            return Err(Error::step_mismatch(&self.path, self.step(), other));
        }
        match mesh.find_mismatch(self.checksum.get().into())? {
            None => Ok(()),
            Some((slot, _)) => {
                let path = self.path.clone();
                let reason =
                    format!("the process of slot {slot} loads a different checkpoint of this step");
                Err(Error::ProcessesDiffer { path, reason })
            }
        }
    }

    fn check_parameters(&self, model: &BTreeMap<String, Vec<usize>>) -> Result<(), ParameterError> {
        if let Some(unknown) = self.parameters().find(|name| !model.contains_key(*name)) {
            return Err(ParameterError::Unknown { name: unknown.to_owned() });
        }
        for (name, expected) in model {
            let Some(found) = self.index.parameters.get(name) else {
                return Err(ParameterError::Missing { name: name.clone() });
            };
            ParameterError::check_shape(name, found, expected)?;
        }
        Ok(())
    }

    /// Reads `len` items, beginning with the first item of `key`, as one dimension on the
    /// processor.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Incomplete`] if an item is missing, [`Error::Damaged`],
    /// [`Error::NotFinite`] or [`Error::Io`] if the items cannot be read.
    pub fn items(&self, key: TensorKey<'_>, len: usize) -> Result<Tensor> {
        let pieces = self.pieces(key)?;
        let end = key.start.checked_add(len).ok_or_else(|| incomplete_error(key))?;
        let range = key.start..end;
        if range.is_empty() {
            // Read an empty range of a piece to get a tensor of the right dtype.
            let start = pieces[0].items().start;
            return pieces[0].read(start..start, self.values);
        }
        let mut next_item = range.start;
        let mut parts = Vec::new();
        for piece in pieces {
            let items = piece.items();
            let end = items.end.min(range.end);
            if items.start <= next_item && next_item < end {
                parts.push(piece.read(next_item..end, self.values)?);
                next_item = end;
            }
        }
        if next_item < range.end {
            return Err(incomplete_error(TensorKey { start: next_item, ..key }));
        }
        match &parts[..] {
            [only] => Ok(only.clone()),
            parts => Tensor::cat(parts, 0).doing("joining the pieces of a parameter"),
        }
    }

    /// Reads a tensor of the shape of `like`: the items from the first item of `key` on, or the
    /// scalar of the parameter if `like` is a scalar.
    ///
    /// # Errors
    ///
    /// The errors of [`items`](Self::items).
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::collections::BTreeMap;
    /// # use candle_core::{DType, Device, Tensor};
    /// # use dist_checkpoint::{Checkpoints, StateDict, TensorKey};
    /// # use pmap_mesh::DeviceMesh;
    /// # let mesh = DeviceMesh::cpu(1)?;
    /// # let folder = tempfile::tempdir()?;
    /// let mut state = StateDict::new(&mesh, BTreeMap::from([("bias".to_owned(), vec![2])]));
    /// let count = TensorKey { kind: "step", parameter: "bias", start: 0 };
    /// state.add(0, count, Tensor::new(7_i64, &Device::Cpu)?)?;
    /// # let checkpoints = Checkpoints::new(folder.path());
    /// checkpoints.save(&mesh, 8, &state, &())?;
    /// let checkpoint = checkpoints.latest()?.ok_or("no checkpoint")?;
    /// let zero = Tensor::new(0_i64, &Device::Cpu)?;
    /// assert_eq!(checkpoint.like(count, &zero)?.to_scalar::<i64>()?, 7);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn like(&self, key: TensorKey<'_>, like: &Tensor) -> Result<Tensor> {
        // A slot without items of a parameter writes no scalar for the parameter, so a parameter of
        // size 0 has no scalar.
        if like.elem_count() == 0 || self.has_no_items(key.parameter) {
            return Tensor::zeros(like.dims(), like.dtype(), &Device::Cpu).doing(LOADING);
        }
        if like.rank() == 0 {
            return self.scalar(key);
        }
        self.items(key, like.elem_count())?.reshape(like.dims()).doing(LOADING)
    }

    /// Returns true if the model has a parameter of this name with no items.
    fn has_no_items(&self, parameter: &str) -> bool {
        self.index.parameters.get(parameter).is_some_and(|shape| shape.contains(&0))
    }

    /// Reads the scalar of a parameter. Every slot with items of the parameter has written the same
    /// scalar.
    fn scalar(&self, key: TensorKey<'_>) -> Result<Tensor> {
        let first = &self.pieces(key)?[0];
        first.read(first.items(), self.values)?.reshape(()).doing(LOADING)
    }

    /// Returns the pieces of the parameter and kind of a key; there is at least one.
    fn pieces(&self, key: TensorKey<'_>) -> Result<&[TensorPiece]> {
        self.pieces
            .get(&key.parameter_and_kind())
            .map(Vec::as_slice)
            .ok_or_else(|| incomplete_error(key))
    }
}

const LOADING: &str = "loading a tensor of a checkpoint";

/// Returns the error for a missing first item of a key.
fn incomplete_error(key: TensorKey<'_>) -> Error {
    Error::Parameter(ParameterError::Incomplete {
        name: key.parameter.to_owned(),
        kind: key.kind.to_owned(),
        item: key.start,
    })
}
