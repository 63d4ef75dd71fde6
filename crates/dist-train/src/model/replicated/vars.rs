//! The variables of a model on the devices of a mesh, and their assignment to slots for updates and
//! checkpoints.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, Var, bail};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use pmap_mesh::DeviceMesh;

use crate::{
    device::move_to_device,
    grad::divide,
    model::config::Sharing,
    precision::Precision,
    step::{
        inventory::Inventory,
        roles::{Role, Roles},
    },
};

/// One copy of a model's variables, and the slots of this process that use it.
#[derive(Debug)]
pub(super) struct VarSet {
    /// The variables, in the order of names.
    pub(super) vars: Vec<Var>,
    pub(super) slots: Vec<usize>,
}

/// The duties of one slot of this process for the variables of its set. Lists have indices of
/// variables.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SlotDuties {
    pub(super) slot: usize,
    /// The index of the slot's set in this process.
    pub(super) set: usize,
    /// The variables that the slot updates.
    pub(super) owned: Vec<usize>,
    /// The variables that the slot writes to checkpoints; each variable is written by one slot of
    /// the whole mesh.
    pub(super) saved: Vec<usize>,
    /// The variables that the slot reads from checkpoints. Each set reads each variable once,
    /// except for buffers, which each slot reads.
    pub(super) loaded: Vec<usize>,
}

/// Returns the sets of variables in this process, in the order of their first slots. The first set
/// contains `vars` themselves, and each other set contains copies.
pub(super) fn sets(mesh: &DeviceMesh, vars: Vec<Var>, sharing: Sharing) -> Result<Vec<VarSet>> {
    let mut sets = vec![VarSet { vars, slots: vec![0] }];
    for (slot, device) in mesh.devices().iter().enumerate().skip(1) {
        let shared = sets.iter_mut().find(|set| {
            sharing == Sharing::PerDevice && mesh.devices()[set.slots[0]].same_device(device)
        });
        if let Some(set) = shared {
            set.slots.push(slot);
        } else {
            let copies = sets[0].vars.iter().map(|var| copy_to(var, device));
            sets.push(VarSet { vars: copies.collect::<Result<_>>()?, slots: vec![slot] });
        }
    }
    Ok(sets)
}

impl VarSet {
    /// Returns the variables of one of the set's slots. Every slot except the first has its own
    /// copies of the buffers, because the slots' forward passes change buffers at the same time.
    pub(super) fn slot_vars(&self, slot: usize, roles: &Roles) -> Result<Vec<Var>> {
        let mut vars = Vec::with_capacity(self.vars.len());
        for (var, &role) in self.vars.iter().zip(&roles.by_variable) {
            vars.push(match role {
                Role::Buffer if slot != self.slots[0] => copy_to(var, var.device())?,
                _ => var.clone(),
            });
        }
        Ok(vars)
    }

    /// Returns a copy of each variable in the compute dtype, or `None` for a
    /// variable that is stored in this dtype, and for a buffer.
    pub(super) fn rounded_copies(
        &self,
        roles: &Roles,
        precision: Precision,
    ) -> Result<Vec<Option<Var>>> {
        let mut copies = Vec::with_capacity(self.vars.len());
        for (var, &role) in self.vars.iter().zip(&roles.by_variable) {
            let dtype = precision.compute_dtype(var.dtype());
            copies.push(if role == Role::Buffer || dtype == var.dtype() {
                None
            } else {
                Some(Var::from_tensor(&var.as_detached_tensor().to_dtype(dtype)?)?)
            });
        }
        Ok(copies)
    }
}

/// Copies a variable's value into a new variable on a device.
fn copy_to(var: &Var, device: &Device) -> Result<Var> {
    Var::from_tensor(&move_to_device(&var.as_detached_tensor(), device)?)
}

/// The use of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelUse {
    Training,
    /// No operations are recorded, so nothing is stored for a backward pass.
    Evaluation,
}

/// Returns a builder that contains the variables `vars` of one slot, and creates no variables.
pub(super) fn builder(
    inventory: &Inventory,
    vars: &[Var],
    model_use: ModelUse,
    dtype: DType,
    device: &Device,
) -> VarBuilder<'static> {
    let mut tensors = BTreeMap::new();
    for (((name, _), var), role) in
        inventory.parameters.iter().zip(vars).zip(&inventory.roles.by_variable)
    {
        let tensor = match role {
            // Layers set buffers, and so need the variable itself.
            Role::Buffer => var.as_tensor().clone(),
            Role::Trained(_) if model_use == ModelUse::Training => var.as_tensor().clone(),
            Role::Trained(_) | Role::Frozen => var.as_detached_tensor(),
        };
        tensors.insert(name.clone(), tensor);
    }
    VarBuilder::from_backend(Box::new(VariableBackend(tensors)), dtype, device.clone())
}

struct VariableBackend(BTreeMap<String, Tensor>);

impl SimpleBackend for VariableBackend {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, dev)?;
        if tensor.shape() != &shape {
            bail!("variable {name} has the shape {:?}, not {shape:?}", tensor.shape())
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        let tensor = self.0.get(name).cloned();
        tensor.ok_or_else(|| Error::CannotFindTensor { path: name.to_owned() }.bt())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

/// Divides the variables among the slots of each set, and returns the duties of each slot of this
/// process, in the order of slots.
///
/// Every set updates all trained variables. Each variable is saved by one set of the mesh. The mesh
/// has `n_sets` sets, and the sets of this process begin at the index `first_set`.
pub(super) fn assign_duties(
    sets: &[VarSet],
    inventory: &Inventory,
    n_sets: usize,
    first_set: usize,
) -> Vec<SlotDuties> {
    let sizes = inventory.sizes();
    let trained = inventory.roles.trained();
    let trained_sizes: Vec<u64> = trained.iter().map(|&var| sizes[var]).collect();
    let saved_by_set = divide(&sizes, n_sets);
    let mut duties = Vec::new();
    for (set_index, set) in sets.iter().enumerate() {
        let saved_by_this_set = &saved_by_set[first_set + set_index];
        let owned_by_slot = divide(&trained_sizes, set.slots.len());
        for (&slot, positions) in set.slots.iter().zip(owned_by_slot) {
            let owned: Vec<usize> =
                positions.into_iter().map(|position| trained[position]).collect();
            // A trained variable belongs to the slot that updates it, and any other variable to the
            // first slot of the set.
            let belongs_to_slot = |var: &usize| match inventory.roles.by_variable[*var] {
                Role::Trained(_) => owned.contains(var),
                Role::Frozen | Role::Buffer => {
                    slot == set.slots[0] && inventory.roles.is_saved(*var)
                }
            };
            let saved = saved_by_this_set.iter().copied().filter(belongs_to_slot).collect();
            let loaded = (0..sizes.len())
                .filter(|var| {
                    belongs_to_slot(var) || inventory.roles.by_variable[*var] == Role::Buffer
                })
                .collect();
            duties.push(SlotDuties { slot, set: set_index, owned, saved, loaded });
        }
    }
    duties.sort_by_key(|duties| duties.slot);
    duties
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::step::roles::RolePatterns;

    fn set(slots: &[usize]) -> VarSet {
        VarSet { vars: Vec::new(), slots: slots.to_vec() }
    }

    fn inventory(sizes: &[usize]) -> Inventory {
        let names = ["a", "b", "c", "d.running_mean", "e", "f", "g"];
        let parameters =
            names.iter().zip(sizes).map(|(name, &size)| (String::from(*name), vec![size]));
        let patterns = RolePatterns { frozen: vec!["e".to_owned()], ..RolePatterns::default() };
        let roles = patterns.roles(&names).unwrap();
        Inventory { parameters: parameters.collect(), roles }
    }

    fn sorted(vars: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut vars: Vec<usize> = vars.collect();
        vars.sort_unstable();
        vars
    }

    /// Two processes, each with slots 0 and 2 on one device and slot 1 on another.
    #[test]
    fn every_set_updates_every_trained_variable_and_one_slot_of_all_saves_it() {
        let inventory = inventory(&[5, 1, 9, 3, 3, 1, 0]);
        let (buffer, frozen) = (3, 4);
        let trained = [0, 1, 2, 5, 6];
        let mut saved = Vec::new();
        for first_set in [0, 2] {
            let duties = assign_duties(&[set(&[0, 2]), set(&[1])], &inventory, 4, first_set);
            let slots: Vec<_> = duties.iter().map(|duties| (duties.slot, duties.set)).collect();
            assert_eq!(slots, [(0, 0), (1, 1), (2, 0)]);
            for set in [0, 1] {
                let of_set = || duties.iter().filter(|duties| duties.set == set);
                assert_eq!(sorted(of_set().flat_map(|duties| duties.owned.clone())), trained);
                let loaded = sorted(of_set().flat_map(|duties| duties.loaded.clone()));
                assert!(of_set().all(|duties| duties.loaded.contains(&buffer)), "{loaded:?}");
                assert_eq!(loaded.iter().filter(|&&var| var == frozen).count(), 1);
            }
            saved.extend(duties.into_iter().flat_map(|duties| duties.saved));
        }
        assert_eq!(sorted(saved.into_iter()), [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn slots_of_one_device_share_variables_if_they_are_to() {
        let mesh = DeviceMesh::cpu(3).unwrap();
        let slots = |sharing| {
            let sets = sets(&mesh, Vec::new(), sharing).unwrap();
            sets.into_iter().map(|set| set.slots).collect::<BTreeSet<_>>()
        };
        assert_eq!(slots(Sharing::PerDevice), [vec![0, 1, 2]].into());
        assert_eq!(slots(Sharing::PerSlot), [vec![0], vec![1], vec![2]].into());
    }
}
