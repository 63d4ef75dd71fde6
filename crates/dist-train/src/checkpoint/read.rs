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
        agreement::gather_numbers,
        file::{self, Owner, Piece, TensorKey},
        index::{INDEX, Index, json_error},
        state_dict::failed,
    },
    error::{Doing, Error, Result, checkpoint::CheckpointError, parameter::ParameterError},
    optim::StatefulOptimizer,
    progress::TrainerState,
};

/// One checkpoint that is whole, to be read under any number of slots and any plan.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    index: Index,
    /// What there is of each kind and parameter, by first items.
    pieces: BTreeMap<Owner, Vec<Piece>>,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path`, and reads the headers of its files.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] with what is missing, of another size than the index says, or not of
    /// this format; [`ParameterError::UnknownDtype`] for tensors that candle cannot hold.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let index = Index::read(&path.join(INDEX))?;
        let mut pieces: BTreeMap<Owner, Vec<Piece>> = BTreeMap::new();
        for listed in &index.files {
            for (owner, piece) in file::pieces(&path.join(&listed.name), listed.bytes)? {
                pieces.entry(owner).or_default().push(piece);
            }
        }
        for pieces in pieces.values_mut() {
            pieces.sort_by_key(|piece| piece.items().start);
        }
        Ok(Self { path, index, pieces })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many steps had been taken.
    pub fn step(&self) -> u64 {
        self.index.step
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
    /// processes of the mesh read the checkpoint of one step.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`], [`ParameterError::Missing`], [`ParameterError::Shape`];
    /// [`CheckpointError::OtherStep`] if another process reads another one.
    pub(crate) fn check_fits(
        &self,
        mesh: &DeviceMesh,
        model: &BTreeMap<String, Vec<usize>>,
    ) -> Result<()> {
        self.check_parameters(model)?;
        let here = vec![self.step(); mesh.local_slots().len()];
        match gather_numbers(mesh, &here)?.into_iter().find(|&step| step != self.step()) {
            None => Ok(()),
            Some(other) => Err(CheckpointError::OtherStep {
                path: self.path.clone(),
                step: self.step(),
                other,
            }
            .into()),
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
    /// [`ParameterError::Incomplete`] if one of them is nowhere, [`CheckpointError::Io`] if a file
    /// cannot be read.
    pub(crate) fn items(&self, kind: &str, parameter: &str, range: Range<usize>) -> Result<Tensor> {
        let from = TensorKey { kind, parameter, start: range.start };
        let pieces = self.pieces_of(from)?;
        if range.is_empty() {
            return pieces[0].read(pieces[0].items().start..pieces[0].items().start);
        }
        let mut reached = range.start;
        let mut parts = Vec::new();
        for piece in pieces {
            let items = piece.items();
            let end = items.end.min(range.end);
            if items.start <= reached && reached < end {
                parts.push(piece.read(reached..end)?);
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
        first.read(first.items())?.reshape(()).doing(LOADING)
    }

    /// Gives an optimizer what there is for its variable number `var`, which is the run `model` of a
    /// parameter.
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
        let owner = (key.kind.to_owned(), key.parameter.to_owned());
        self.pieces.get(&owner).map(Vec::as_slice).ok_or_else(|| incomplete(key))
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
