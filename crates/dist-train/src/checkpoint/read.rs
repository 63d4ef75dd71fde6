//! A checkpoint that is read.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};

use candle_core::{Device, Tensor};
use pmap_mesh::DeviceMesh;
use serde::de::DeserializeOwned;

use crate::{
    checkpoint::{
        checksum::Checksum,
        finite::Values,
        folder,
        index::{INDEX, Index, json_error},
        key::{Owner, TensorKey},
        shard::{self, read::Piece},
        state_dict::failed,
    },
    error::{
        Doing, Error, Result,
        checkpoint::{CheckpointError, PassedOver},
        parameter::ParameterError,
    },
    optim::StatefulOptimizer,
    processes::{agreed, find_other},
    progress::TrainerState,
};

/// One checkpoint that is whole, to be read under any number of slots and any plan.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    index: Index,
    /// The checksum of the index, and so of all that is in the checkpoint.
    checksum: Checksum,
    /// What there is of each kind and parameter, by first items.
    pieces: BTreeMap<Owner, Vec<Piece>>,
    values: Values,
    passed_over: Vec<PassedOver>,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path`, and checks its index and the headers of its
    /// files. Tensors are checked when they are read, or by [`verify`](Self::verify).
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] with what is missing, damaged, of another step or run, or not of this
    /// format; [`ParameterError::UnknownDtype`] for tensors that candle cannot hold.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let (index, checksum) = Index::read(&path.join(INDEX))?;
        folder::check_step(&path, index.step)?;
        let mut pieces: BTreeMap<Owner, Vec<Piece>> = BTreeMap::new();
        for listed in &index.files {
            let path = path.join(&listed.name);
            for (owner, piece) in shard::read::open(&path, &index.expected(listed))? {
                pieces.entry(owner).or_default().push(piece);
            }
        }
        for pieces in pieces.values_mut() {
            pieces.sort_by_key(|piece| piece.items().start);
        }
        let values = Values::default();
        Ok(Self { path, index, checksum, pieces, values, passed_over: Vec::new() })
    }

    /// Takes values that are infinite or not a number for what they are; else tensors that have
    /// some are refused when they are read.
    #[must_use]
    pub fn allow_non_finite(self) -> Self {
        self.with_values(Values::Any)
    }

    pub(super) fn with_values(self, values: Values) -> Self {
        Self { values, ..self }
    }

    /// The same, taken in the place of others.
    pub(super) fn after(self, passed_over: Vec<PassedOver>) -> Self {
        Self { passed_over, ..self }
    }

    /// Reads all tensors, and keeps none of them.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Checksum`] and [`CheckpointError::NotFinite`] with the first file and
    /// tensor that is damaged, [`CheckpointError::Io`] if a file cannot be read.
    pub fn verify(&self) -> Result<()> {
        self.pieces.values().flatten().try_for_each(|piece| piece.verify(self.values))
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many steps had been taken.
    pub fn step(&self) -> u64 {
        self.index.step
    }

    /// What the run is called that wrote it, if it has a name: [`Checkpoints::run`].
    ///
    /// [`Checkpoints::run`]: crate::Checkpoints::run
    pub fn run(&self) -> Option<&str> {
        self.index.run.as_deref()
    }

    /// Whether it has checksums, by which damage is noticed: format version 1 has none.
    pub fn has_checksums(&self) -> bool {
        self.index.has_checksums()
    }

    /// The newer checkpoints that could not be used, the newest first.
    pub fn passed_over(&self) -> &[PassedOver] {
        &self.passed_over
    }

    /// How far training was, if a trainer wrote it.
    pub(crate) fn trainer(&self) -> Option<&TrainerState> {
        self.index.trainer.as_ref()
    }

    /// The state that it was saved with.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Json`] if it is not a `T`.
    pub fn state<T: DeserializeOwned>(&self) -> Result<T> {
        T::deserialize(&self.index.state)
            .map_err(|cause| json_error(&self.path.join(INDEX), cause).into())
    }

    /// The names of the model's parameters.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.index.parameters.keys().map(String::as_str)
    }

    /// Checks that the model has these parameters, of these shapes, and no others, and that all
    /// processes of the mesh read the same checkpoint.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`], [`ParameterError::Missing`], [`ParameterError::Shape`];
    /// [`CheckpointError::OtherStep`] or [`CheckpointError::OtherContent`] if another process reads
    /// another one, and [`Error::OtherProcess`] if it fails.
    pub(crate) fn check_fits(
        &self,
        mesh: &DeviceMesh,
        model: &BTreeMap<String, Vec<usize>>,
    ) -> Result<()> {
        agreed(mesh, self.check_parameters(model).map_err(Error::from))?;
        if let Some((_, other)) = find_other(mesh, self.step())? {
            return Err(CheckpointError::other_step(&self.path, self.step(), other).into());
        }
        match find_other(mesh, self.checksum.get().into())? {
            None => Ok(()),
            Some((slot, _)) => {
                Err(CheckpointError::OtherContent { path: self.path.clone(), slot }.into())
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

    /// Items `range` of what `kind` keeps for a parameter: one dimension, on the processor.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Incomplete`] if one of them is nowhere, [`CheckpointError::Checksum`],
    /// [`CheckpointError::NotFinite`] or [`CheckpointError::Io`] if they cannot be read.
    pub(crate) fn items(&self, kind: &str, parameter: &str, range: Range<usize>) -> Result<Tensor> {
        let from = TensorKey { kind, parameter, start: range.start };
        let pieces = self.pieces_of(from)?;
        if range.is_empty() {
            return pieces[0].read(pieces[0].items().start..pieces[0].items().start, self.values);
        }
        let mut reached = range.start;
        let mut parts = Vec::new();
        for piece in pieces {
            let items = piece.items();
            let end = items.end.min(range.end);
            if items.start <= reached && reached < end {
                parts.push(piece.read(reached..end, self.values)?);
                reached = end;
            }
        }
        if reached < range.end {
            return Err(incomplete(TensorKey { start: reached, ..from }));
        }
        match &parts[..] {
            [only] => Ok(only.clone()),
            parts => Tensor::cat(parts, 0).doing("joining the pieces of a parameter"),
        }
    }

    /// What a checkpoint has for a place that keeps something like `like`: the items from the key's
    /// first one on, or the parameter's scalar.
    pub(crate) fn like(&self, key: TensorKey<'_>, like: &Tensor) -> Result<Tensor> {
        if like.elem_count() == 0 {
            return Tensor::zeros(like.dims(), like.dtype(), &Device::Cpu).doing(LOADING);
        }
        if like.rank() == 0 {
            return self.scalar(key);
        }
        let range = key.start..key.start + like.elem_count();
        self.items(key.kind, key.parameter, range)?.reshape(like.dims()).doing(LOADING)
    }

    /// What `kind` keeps for a whole parameter, once. Every slot with a part of the parameter has
    /// written it, and all have the same.
    fn scalar(&self, key: TensorKey<'_>) -> Result<Tensor> {
        let first = &self.pieces_of(key)?[0];
        first.read(first.items(), self.values)?.reshape(()).doing(LOADING)
    }

    /// Gives an optimizer what there is for its variable number `var`, which is the run `model` of
    /// a parameter.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`] if it refuses, and those of [`items`](Self::items).
    pub(crate) fn load_optimizer(
        &self,
        model: TensorKey<'_>,
        optimizer: &mut impl StatefulOptimizer,
        var: usize,
    ) -> Result<()> {
        for (kind, like) in optimizer.state(var).map_err(|cause| failed(model, cause))? {
            let value = self.like(TensorKey { kind, ..model }, &like)?;
            optimizer.load_state(var, kind, &value).map_err(|cause| failed(model, cause))?;
        }
        Ok(())
    }

    /// The pieces of what a key is the beginning of; at least one.
    fn pieces_of(&self, key: TensorKey<'_>) -> Result<&[Piece]> {
        self.pieces.get(&key.owner()).map(Vec::as_slice).ok_or_else(|| incomplete(key))
    }
}

const LOADING: &str = "loading a tensor of a checkpoint";

/// The error if the first item of a key is missing.
fn incomplete(key: TensorKey<'_>) -> Error {
    Error::Parameter(ParameterError::Incomplete {
        name: key.parameter.to_owned(),
        kind: key.kind.to_owned(),
        item: key.start,
    })
}
