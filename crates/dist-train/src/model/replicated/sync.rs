//! Equality of replicated variables: initial broadcast and later checks.

use candle_core::Var;
use pmap_mesh::{ALL, DeviceMesh};

use crate::{
    error::{Doing, Result},
    model::{
        replicated::vars::VarSet,
        settings::{self, value_fingerprint},
    },
    step::inventory::Inventory,
};

/// Sets the variables of all slots to the values of the first slot, on a mesh of several processes.
///
/// # Errors
///
/// Returns [`Error::Mesh`] if a process does not respond.
pub(super) fn broadcast_vars(
    mesh: &DeviceMesh,
    inventory: &Inventory,
    sets: &[VarSet],
) -> Result<()> {
    if !mesh.spans_processes() {
        return Ok(());
    }
    let vars_by_slot: Vec<Vec<Var>> = slot_sets(mesh, sets).map(|set| set.vars.clone()).collect();
    let broadcast = mesh.pmap(move |ctx, ()| {
        for var in &vars_by_slot[ctx.local_index()] {
            let value = ctx.broadcast(&var.as_detached_tensor(), 0, ALL)?;
            // Slots on one device set the same variable to the same value. The barrier ensures that
            // all slots have sent their values before any variable changes.
            ctx.barrier(ALL)?;
            var.set(&value.copy()?)?;
        }
        Ok(())
    });
    broadcast.call(())?;
    let vars_by_slot: Vec<&[Var]> = slot_sets(mesh, sets).map(|set| &set.vars[..]).collect();
    check(mesh, inventory, &slot_fingerprints(&vars_by_slot)?)
}

/// Iterates over this process's slots, and returns the set of each slot.
fn slot_sets<'a>(mesh: &DeviceMesh, sets: &'a [VarSet]) -> impl Iterator<Item = &'a VarSet> {
    (0..mesh.devices().len())
        .filter_map(|slot| sets.iter().find(move |set| set.slots.contains(&slot)))
}

/// Checks that the variables of all slots are the same to the bit, given the
/// [fingerprints](slot_fingerprints) of this process's slots.
pub(super) fn check(
    mesh: &DeviceMesh,
    inventory: &Inventory,
    fingerprints: &[Vec<u64>],
) -> Result<()> {
    // Every slot has every variable.
    let periods = vec![Some(1); inventory.parameters.len()];
    settings::check_values(mesh, inventory, fingerprints, &periods)
}

/// Returns fingerprints of the bits of each slot's variables; shared variables are read once.
pub(super) fn slot_fingerprints(slots: &[&[Var]]) -> Result<Vec<Vec<u64>>> {
    let mut by_slot: Vec<Vec<u64>> = Vec::new();
    for vars in slots {
        let mut fingerprints = Vec::new();
        for (n, var) in vars.iter().enumerate() {
            // An earlier slot with the same variable; `by_slot` has only earlier slots.
            let shared = slots.iter().zip(&by_slot).find(|(other, _)| other[n].id() == var.id());
            fingerprints.push(match shared {
                Some((_, earlier)) => earlier[n],
                None => value_fingerprint(var).doing("comparing variables")?,
            });
        }
        by_slot.push(fingerprints);
    }
    Ok(by_slot)
}
