//! The variables of a model on the devices of a mesh, and which slot updates and saves which.

use candle_core::{DType, Device, Result, Var, bail};
use candle_nn::VarMap;
use pmap_mesh::DeviceMesh;

use crate::ownership;

/// Whether slots on one device use the same variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    /// They do: each device has one set.
    PerDevice,
    /// They do not: each slot has a set of its own.
    PerSlot,
}

/// The variables of a model, and the slots of this process that use them.
pub(super) struct VarSet {
    pub(super) map: VarMap,
    pub(super) slots: Vec<usize>,
}

/// What one slot of this process does for the variables of its set.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) slot: usize,
    /// The number of its set among those of this process.
    pub(super) set: usize,
    /// The variables that it updates.
    pub(super) owned: Vec<usize>,
    /// The positions in `owned` of the variables that it saves.
    pub(super) saved: Vec<usize>,
}

/// The variables of a map with their names, in the order of names.
pub(super) fn named(vars: &VarMap) -> Result<Vec<(String, Var)>> {
    let Ok(vars) = vars.data().lock() else {
        bail!("the variables are locked by a thread that panicked")
    };
    let mut named: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    named.sort_by(|(left, _), (right, _)| left.cmp(right));
    Ok(named)
}

/// The type of the variables that are there, or of new ones; all must lie on the device `home`.
pub(super) fn dtype(vars: &VarMap, home: &Device) -> Result<DType> {
    let known = named(vars)?;
    if let Some((name, var)) = known.iter().find(|(_, var)| !var.device().same_device(home)) {
        bail!("variable {name} lies on {:?}, the first slot is on {home:?}", var.device())
    }
    // candle-nn makes new variables in single precision as well.
    Ok(known.first().map_or(DType::F32, |(_, var)| var.dtype()))
}

/// The sets of variables in this process, in the order of their first slots; the first has `vars`
/// themselves, the others copies.
pub(super) fn sets(mesh: &DeviceMesh, vars: &VarMap, sharing: Sharing) -> Result<Vec<VarSet>> {
    let mut sets = vec![VarSet { map: vars.clone(), slots: vec![0] }];
    for (slot, device) in mesh.devices().iter().enumerate().skip(1) {
        let shared = sets.iter_mut().find(|set| {
            sharing == Sharing::PerDevice && mesh.devices()[set.slots[0]].same_device(device)
        });
        match shared {
            Some(set) => set.slots.push(slot),
            None => sets.push(VarSet { map: copied(vars, device)?, slots: vec![slot] }),
        }
    }
    Ok(sets)
}

/// The same variables on another device.
fn copied(vars: &VarMap, device: &Device) -> Result<VarMap> {
    let copies = VarMap::new();
    for (name, var) in named(vars)? {
        let copy = Var::from_tensor(&var.as_detached_tensor().to_device(device)?)?;
        #[expect(clippy::expect_used, reason = "no other thread knows the map yet")]
        copies.data().lock().expect("no thread has panicked with the lock").insert(name, copy);
    }
    Ok(copies)
}

/// Divides the variables, of these sizes, among the slots of each set: all of them are updated in
/// every set. Saved they are once on the whole mesh, whose `n_sets` sets begin here with
/// `first_set`.
///
/// Returns a part for each slot of this process, in their order.
pub(super) fn parts(sets: &[VarSet], sizes: &[u64], n_sets: usize, first_set: usize) -> Vec<Part> {
    let saved_by_set = ownership::divide(sizes, n_sets);
    let mut parts = Vec::new();
    for (set, VarSet { slots, .. }) in sets.iter().enumerate() {
        let saved_here = &saved_by_set[first_set + set];
        for (&slot, owned) in slots.iter().zip(ownership::divide(sizes, slots.len())) {
            let is_saved = |position: &usize| saved_here.contains(&owned[*position]);
            let saved = (0..owned.len()).filter(is_saved).collect();
            parts.push(Part { slot, set, owned, saved });
        }
    }
    parts.sort_by_key(|part| part.slot);
    parts
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn set(slots: &[usize]) -> VarSet {
        VarSet { map: VarMap::new(), slots: slots.to_vec() }
    }

    /// Two processes, each with slots 0 and 2 on one device and slot 1 on another.
    #[test]
    fn every_set_updates_every_variable_and_one_slot_of_all_saves_it() {
        let sizes = [5, 1, 9, 3, 3, 1, 0];
        let all: Vec<usize> = (0..sizes.len()).collect();
        let mut saved = Vec::new();
        for first_set in [0, 2] {
            let parts = parts(&[set(&[0, 2]), set(&[1])], &sizes, 4, first_set);
            let slots: Vec<_> = parts.iter().map(|part| (part.slot, part.set)).collect();
            assert_eq!(slots, [(0, 0), (1, 1), (2, 0)]);
            for set in [0, 1] {
                let of_set = parts.iter().filter(|part| part.set == set);
                let mut owned: Vec<_> = of_set.flat_map(|part| part.owned.clone()).collect();
                owned.sort_unstable();
                assert_eq!(owned, all, "set {set}");
            }
            for part in &parts {
                saved.extend(part.saved.iter().map(|&position| part.owned[position]));
            }
        }
        saved.sort_unstable();
        assert_eq!(saved, all);
    }

    #[test]
    fn slots_of_one_device_share_variables_if_they_are_to() {
        let mesh = DeviceMesh::cpu(3).unwrap();
        let slots = |sharing| {
            let sets = sets(&mesh, &VarMap::new(), sharing).unwrap();
            sets.into_iter().map(|set| set.slots).collect::<BTreeSet<_>>()
        };
        assert_eq!(slots(Sharing::PerDevice), [vec![0, 1, 2]].into());
        assert_eq!(slots(Sharing::PerSlot), [vec![0], vec![1], vec![2]].into());
    }
}
