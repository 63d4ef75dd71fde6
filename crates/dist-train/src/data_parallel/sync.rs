//! Whether all slots have the same variables, and how those of several processes begin alike.

use candle_core::{Device, Tensor, Var};
use core_types::Fingerprint;
use pmap_mesh::{ALL, DeviceMesh};

use crate::{
    data_parallel::vars::VarSet,
    error::{Doing, Error, Result, training::TrainingError},
    step::{inventory::Inventory, roles::Role},
};

/// Gives the variables of all processes the values that they have in the first.
///
/// # Errors
///
/// [`TrainingError::OtherModel`] if they are not the same variables in the
/// same roles, [`Error::Mesh`] if a process
/// does not answer.
pub(super) fn begin_alike(mesh: &DeviceMesh, inventory: &Inventory, sets: &[VarSet]) -> Result<()> {
    if mesh.local_slots().len() == mesh.len() {
        return Ok(());
    }
    let form = of_form(inventory, &sets[0].vars);
    let forms = gathered(mesh, vec![vec![form]; mesh.devices().len()])?;
    if let Some(replica) = forms.iter().position(|other| *other != forms[0]) {
        return Err(TrainingError::OtherModel { replica }.into());
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
    let values = slot_sets(mesh, sets).map(|set| of_values(&set.vars));
    check(mesh, inventory, values.collect::<Result<_>>()?)
}

/// The set of each slot of this process.
fn slot_sets<'a>(mesh: &DeviceMesh, sets: &'a [VarSet]) -> impl Iterator<Item = &'a VarSet> {
    let of_slot = |slot| sets.iter().find(move |set| set.slots.contains(&slot));
    (0..mesh.devices().len()).filter_map(of_slot)
}

/// Checks that the variables of all slots are the same to the bit, given the
/// [fingerprints](of_values) of those of this process.
pub(super) fn check(mesh: &DeviceMesh, inventory: &Inventory, here: Vec<Vec<u64>>) -> Result<()> {
    let slots = gathered(mesh, here)?;
    for (replica, vars) in slots.iter().enumerate() {
        if let Some(var) = (0..vars.len()).find(|&var| vars[var] != slots[0][var]) {
            return Err(Error::Diverged { name: inventory.name(var).to_owned(), replica });
        }
    }
    Ok(())
}

/// A fingerprint of the bits of each variable.
pub(super) fn of_values(vars: &[Var]) -> Result<Vec<u64>> {
    vars.iter().map(|var| of_value(var).doing("comparing variables")).collect()
}

/// The fingerprint of a variable's bits: NaN equals itself, and zeros of two signs differ.
pub(super) fn of_value(var: &Var) -> candle_core::Result<u64> {
    let mut bytes = Vec::new();
    var.as_detached_tensor().force_contiguous()?.write_bytes(&mut bytes)?;
    Ok(Fingerprint::new().bytes(&bytes).finish())
}

/// A fingerprint of names, shapes and types, and of what becomes of each variable: replicas that
/// train other variables would wait for each other's gradients.
fn of_form(inventory: &Inventory, vars: &[Var]) -> u64 {
    let Inventory { parameters, roles } = inventory;
    let mut form = Fingerprint::new();
    for (position, ((name, shape), var)) in parameters.iter().zip(vars).enumerate() {
        form.bytes(name.as_bytes()).bytes(var.dtype().as_str().as_bytes());
        form.extend([shape.len() as u64]);
        form.extend(shape.iter().map(|&size| size as u64));
        form.extend([number(roles.of[position]), roles.may_be_unused[position].into()]);
    }
    for group in &roles.groups {
        form.bytes(group.as_bytes());
    }
    form.finish()
}

/// A number of its own for each role.
fn number(role: Role) -> u64 {
    match role {
        Role::Frozen => 0,
        Role::Buffer => 1,
        Role::Trained(group) => 2 + group as u64,
    }
}

/// The numbers of all slots, given those of this process's slots.
fn gathered(mesh: &DeviceMesh, here: Vec<Vec<u64>>) -> Result<Vec<Vec<u64>>> {
    // Tensors have no unsigned numbers of 64 bits: the same bits travel as signed ones.
    let sent = here.into_iter().map(|numbers| {
        let signed: Vec<i64> = numbers.into_iter().map(u64::cast_signed).collect();
        Ok(vec![Tensor::new(signed, &Device::Cpu)?])
    });
    let sent: candle_core::Result<_> = sent.collect();
    let all = mesh.process_allgather(sent.doing("sending fingerprints")?)?;
    let numbers = |tensor: &Tensor| {
        Ok(tensor.to_vec1::<i64>()?.into_iter().map(i64::cast_unsigned).collect())
    };
    let all: candle_core::Result<_> = all.iter().flatten().map(numbers).collect();
    all.doing("receiving fingerprints")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use candle_core::DType;

    use super::*;
    use crate::step::roles::Choices;

    #[test]
    fn models_of_one_form_have_the_same_variables_in_the_same_roles() {
        let names = ["a", "b"];
        let vars = names.map(|_| Var::zeros(3, DType::F32, &Device::Cpu).unwrap());
        let form = |choices: Choices| {
            let roles = choices.roles(&names).unwrap();
            let parameters = names.map(|name| (name.to_owned(), vec![3])).to_vec();
            of_form(&Inventory { parameters, roles }, &vars)
        };
        let b = || vec!["b".to_owned()];
        let group = |name: &str| vec![(name.to_owned(), b())];
        let all = [
            Choices::default(),
            Choices { frozen: b(), ..Choices::default() },
            Choices { buffers: b(), ..Choices::default() },
            Choices { unused: b(), ..Choices::default() },
            Choices { groups: group("x"), ..Choices::default() },
            Choices { groups: group("y"), ..Choices::default() },
        ];
        let forms: BTreeSet<u64> = all.iter().cloned().map(form).collect();
        assert_eq!(forms.len(), all.len());
        assert_eq!(form(Choices::default()), form(Choices::default()));
    }
}
