//! The tensors of a checkpoint before they are saved.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::Path,
};

use candle_core::Tensor;
use pmap_mesh::DeviceMesh;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::{
    error::{Error, Result},
    run::{
        index::{INDEX, json_error},
        json,
        key::TensorKey,
    },
};

/// The tensors of this process's slots for a checkpoint.
///
/// It shares the memory of the tensors: save it before they change.
///
/// # Examples
///
/// Two slots keep half of a parameter each.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{Device, Tensor};
/// use dist_checkpoint::{Checkpoints, StateDict, TensorKey};
/// use pmap_mesh::DeviceMesh;
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let shapes = BTreeMap::from([("weight".to_owned(), vec![2, 3])]);
/// let mut state = StateDict::new(&mesh, shapes.clone());
/// for slot in 0..2 {
///     let start = 3 * slot;
///     let items = Tensor::arange(start as f32, start as f32 + 3.0, &Device::Cpu)?;
///     state.add(slot, TensorKey::model("weight", start), items)?;
/// }
/// # let folder = tempfile::tempdir()?;
/// let checkpoints = Checkpoints::new(folder.path());
/// checkpoints.save(&mesh, 8, &state, &"seed 7")?;
///
/// let checkpoint = checkpoints.latest()?.ok_or("no checkpoint")?;
/// checkpoint.check_fits(&mesh, &shapes)?;
/// let items = checkpoint.items(TensorKey::model("weight", 1), 4)?; // of both slots
/// assert_eq!(items.to_vec1::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
/// assert_eq!(checkpoint.state::<String>()?, "seed 7");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct StateDict {
    /// The shapes of all parameters of the model, including parameters of other processes.
    pub(super) parameters: BTreeMap<String, Vec<usize>>,
    /// The tensors of each slot in this process, by their names in the file.
    pub(super) slots: Vec<BTreeMap<String, Tensor>>,
    /// The JSON of the trainer's state, as in the index.
    pub(super) trainer: Option<Box<RawValue>>,
}

impl StateDict {
    /// Returns an empty state of a model with parameters of these shapes, for the slots of this
    /// process.
    pub fn new(mesh: &DeviceMesh, parameters: BTreeMap<String, Vec<usize>>) -> Self {
        Self { parameters, slots: vec![BTreeMap::new(); mesh.devices().len()], trainer: None }
    }

    /// Adds the state that a trainer needs to resume, for [`Checkpoint::trainer`].
    ///
    /// # Errors
    ///
    /// [`Error::Json`] if JSON cannot represent it.
    ///
    /// [`Checkpoint::trainer`]: crate::Checkpoint::trainer
    pub fn with_trainer(self, trainer: &impl Serialize) -> Result<Self> {
        let raw = json::to_raw(trainer).map_err(|cause| json_error(Path::new(INDEX), cause))?;
        Ok(Self { trainer: Some(raw), ..self })
    }

    /// Adds a tensor of this process's slot number `local_slot`: items of at least one dimension,
    /// or a scalar.
    ///
    /// # Errors
    ///
    /// [`Error::Kind`] if its name is ambiguous or exists already.
    ///
    /// # Panics
    ///
    /// If this process has fewer slots.
    pub fn add(&mut self, local_slot: usize, key: TensorKey<'_>, items: Tensor) -> Result<()> {
        let name = key.to_string();
        let is_readable = TensorKey::parse(&name) == Some(key);
        match self.slots[local_slot].entry(name) {
            Entry::Vacant(free) if is_readable => {
                free.insert(items);
                Ok(())
            }
            taken => {
                let key_text = taken.key().clone();
                Err(Error::Kind { kind: key.kind.to_owned(), key: key_text })
            }
        }
    }
}
