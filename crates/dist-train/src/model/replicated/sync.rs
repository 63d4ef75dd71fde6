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

/// Broadcasts the variables of the first slot to all processes.
///
/// # Errors
///
/// Returns [`Error::Mesh`] if a process does not respond.
pub(super) fn begin_alike(mesh: &DeviceMesh, inventory: &Inventory, sets: &[VarSet]) -> Result<()> {
    if !mesh.spans_processes() {
        return Ok(());
    }
    let vars: Vec<Vec<Var>> = slot_sets(mesh, sets).map(|set| set.vars.clone()).collect();
    let broadcast = mesh.pmap(move |ctx, ()| {
        for var in &vars[ctx.local_index()] {
            let value = ctx.broadcast(&var.as_detached_tensor(), 0, ALL)?;
            // Slots on one device set the same variable to the same value. The barrier ensures that
            // all slots have sent their values before any variable changes.
            ctx.barrier(ALL)?;
            var.set(&value.copy()?)?;
        }
        Ok(())
    });
    broadcast.call(())?;
    let vars: Vec<&[Var]> = slot_sets(mesh, sets).map(|set| &set.vars[..]).collect();
    check(mesh, inventory, slot_fingerprints(&vars)?)
}

/// Iterates over the sets of this process's slots.
fn slot_sets<'a>(mesh: &DeviceMesh, sets: &'a [VarSet]) -> impl Iterator<Item = &'a VarSet> {
    (0..mesh.devices().len())
        .filter_map(|slot| sets.iter().find(move |set| set.slots.contains(&slot)))
}

/// Checks that the variables of all slots are the same to the bit, given the
/// [fingerprints](slot_fingerprints) of this process's slots.
pub(super) fn check(mesh: &DeviceMesh, inventory: &Inventory, here: Vec<Vec<u64>>) -> Result<()> {
    settings::check_values(mesh, inventory, here, &vec![Some(1); inventory.parameters.len()])
}

/// Returns fingerprints of the bits of each slot's variables; shared variables are read once.
pub(super) fn slot_fingerprints(slots: &[&[Var]]) -> Result<Vec<Vec<u64>>> {
    let mut known: Vec<Vec<u64>> = Vec::new();
    for vars in slots {
        let mut numbers = Vec::new();
        for (n, var) in vars.iter().enumerate() {
            let shared = slots.iter().zip(&known).find(|(other, _)| other[n].id() == var.id());
            numbers.push(match shared {
                Some((_, known)) => known[n],
                None => value_fingerprint(var).doing("comparing variables")?,
            });
        }
        known.push(numbers);
    }
    Ok(known)
}
