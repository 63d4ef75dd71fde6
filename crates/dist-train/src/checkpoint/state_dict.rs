//! The tensors that are saved.

use std::collections::{BTreeMap, btree_map::Entry};

use candle_core::Tensor;
use pmap_mesh::DeviceMesh;

use crate::{
    checkpoint::key::{MODEL, TensorKey},
    error::{Error, Result, checkpoint::CheckpointError},
    optim::StatefulOptimizer,
    progress::TrainerState,
};

/// The tensors that the slots of this process contribute to a checkpoint.
///
/// A tensor is a run of a parameter's items, or of something that an optimizer keeps for each of
/// them, or a scalar that it keeps for the parameter. Made by
/// [`DataParallel::state_dict`](crate::DataParallel::state_dict) and
/// [`ShardedVars::state_dict`](crate::ShardedVars::state_dict).
///
/// It shares the memory of the variables: save it before they change.
#[derive(Clone, Debug)]
pub struct StateDict {
    /// The shapes of all parameters of the model, in whatever process they are kept.
    pub(super) parameters: BTreeMap<String, Vec<usize>>,
    /// For each slot of this process, its tensors by their names in the file.
    pub(super) slots: Vec<BTreeMap<String, Tensor>>,
    /// How far training is, if a trainer knows.
    pub(super) trainer: Option<TrainerState>,
}

impl StateDict {
    /// Nothing yet, of a model with parameters of these shapes.
    pub(crate) fn new(mesh: &DeviceMesh, parameters: BTreeMap<String, Vec<usize>>) -> Self {
        Self { parameters, slots: vec![BTreeMap::new(); mesh.devices().len()], trainer: None }
    }

    /// The same, with what a trainer must know to resume.
    pub(crate) fn with_trainer(self, trainer: TrainerState) -> Self {
        Self { trainer: Some(trainer), ..self }
    }

    /// Adds a tensor that the n-th slot of this process keeps.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Kind`] if its name would not be read as it is written, or is there.
    pub(crate) fn add(
        &mut self,
        local_slot: usize,
        key: TensorKey<'_>,
        items: Tensor,
    ) -> Result<()> {
        let name = key.to_string();
        let is_readable = TensorKey::parse(&name) == Some(key);
        match self.slots[local_slot].entry(name) {
            Entry::Vacant(free) if is_readable => {
                free.insert(items);
                Ok(())
            }
            taken => {
                let key_text = taken.key().clone();
                Err(CheckpointError::Kind { kind: key.kind.to_owned(), key: key_text }.into())
            }
        }
    }

    /// Adds what an optimizer keeps for its variable number `var`, which is the run `model` of a
    /// parameter.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`] if it cannot tell, and those of [`add`](Self::add).
    pub(crate) fn add_optimizer(
        &mut self,
        local_slot: usize,
        model: TensorKey<'_>,
        optimizer: &impl StatefulOptimizer,
        var: usize,
    ) -> Result<()> {
        debug_assert_eq!(model.kind, MODEL);
        for (kind, items) in optimizer.state(var).map_err(|cause| failed(model, cause))? {
            self.add(local_slot, TensorKey { kind, ..model }, items)?;
        }
        Ok(())
    }
}

/// The error of an optimizer, about its variable `model`.
pub(super) fn failed(model: TensorKey<'_>, cause: candle_core::Error) -> Error {
    Error::Optimizer { parameter: model.parameter.to_owned(), cause }
}
