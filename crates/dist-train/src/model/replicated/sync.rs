//! Whether all slots have the same variables, and how those of several processes begin alike.

use candle_core::Var;
use pmap_mesh::{ALL, DeviceMesh};

use crate::{
    error::{Doing, Result},
    model::{
        replicated::vars::VarSet,
        settings::{self, of_value},
    },
    step::inventory::Inventory,
};

/// Gives the variables of all processes the values that they have in the first.
///
/// # Errors
///
/// [`Error::Mesh`] if a process does not answer.
pub(super) fn begin_alike(mesh: &DeviceMesh, inventory: &Inventory, sets: &[VarSet]) -> Result<()> {
    if !mesh.spans_processes() {
        return Ok(());
    }
    let vars: Vec<Vec<Var>> = slot_sets(mesh, sets).map(|set| set.vars.clone()).collect();
    let broadcast = mesh.pmap(move |ctx, ()| {
        for var in &vars[ctx.local_index()] {
            let value = ctx.broadcast(&var.as_detached_tensor(), 0, ALL)?;
            // Slots of one device set the same variable, to the same value, after all have sent.
            ctx.barrier(ALL)?;
            var.set(&value.copy()?)?;
        }
        Ok(())
    });
    broadcast.call(())?;
    let vars: Vec<&[Var]> = slot_sets(mesh, sets).map(|set| &set.vars[..]).collect();
    check(mesh, inventory, of_slots(&vars)?)
}

/// The set of each slot of this process.
fn slot_sets<'a>(mesh: &DeviceMesh, sets: &'a [VarSet]) -> impl Iterator<Item = &'a VarSet> {
    let of_slot = |slot| sets.iter().find(move |set| set.slots.contains(&slot));
    (0..mesh.devices().len()).filter_map(of_slot)
}

/// Checks that the variables of all slots are the same to the bit, given the
/// [fingerprints](of_slots) of those of this process.
pub(super) fn check(mesh: &DeviceMesh, inventory: &Inventory, here: Vec<Vec<u64>>) -> Result<()> {
    settings::check_values(mesh, inventory, here, &vec![Some(1); inventory.parameters.len()])
}

/// Fingerprints of the bits of each slot's variables; what slots share is read once.
pub(super) fn of_slots(slots: &[&[Var]]) -> Result<Vec<Vec<u64>>> {
    let mut known: Vec<Vec<u64>> = Vec::new();
    for vars in slots {
        let mut numbers = Vec::new();
        for (n, var) in vars.iter().enumerate() {
            let shared = slots.iter().zip(&known).find(|(other, _)| other[n].id() == var.id());
            numbers.push(match shared {
                Some((_, known)) => known[n],
                None => of_value(var).doing("comparing variables")?,
            });
        }
        known.push(numbers);
    }
    Ok(known)
}
