//! Whether all slots have the same variables and options, and how those of several processes begin
//! alike.

use std::fmt;

use candle_core::{DType, Var};
use core_types::{Fingerprint, Seed};
use pmap_mesh::{ALL, DeviceMesh};

use crate::{
    data_parallel::vars::{Sharing, VarSet},
    error::{Doing, Error, Result, training::TrainingError},
    step::{inventory::Inventory, options::Options, roles::Role},
};

/// What all processes must say alike, in the order in which it is compared: with each option a
/// fingerprint of its value.
pub(crate) type Settings<const N: usize> = [(&'static str, u64); N];

/// Checks that all processes build the same model with the same options.
///
/// # Errors
///
/// [`TrainingError::OtherModel`] and [`TrainingError::OtherOption`] with the first difference,
/// [`Error::Mesh`] if a process does not answer.
pub(crate) fn check_settings<const N: usize>(mesh: &DeviceMesh, here: &Settings<N>) -> Result<()> {
    if !mesh.spans_processes() {
        return Ok(());
    }
    let numbers = here.map(|(_, number)| number);
    let all = mesh.gather_numbers(&vec![numbers; mesh.devices().len()])?;
    for (n, (option, _)) in here.iter().enumerate() {
        if let Some(replica) = all.iter().position(|numbers| numbers[n] != all[0][n]) {
            let error = match *option {
                VARIABLES => TrainingError::OtherModel { replica },
                option => TrainingError::OtherOption { option, replica },
            };
            return Err(error.into());
        }
    }
    Ok(())
}

const VARIABLES: &str = "variables";

/// What a model consists of, and how it is trained. Replicas that train other variables, say, would
/// wait for each other's gradients.
pub(crate) fn settings(
    inventory: &Inventory,
    dtypes: impl IntoIterator<Item = DType>,
    options: &Options,
    sharing: Sharing,
    seed: Seed,
) -> Settings<14> {
    let Options { in_axes, uneven, max_norm, schedule, allow_non_finite, check_every } = options;
    let Inventory { roles, .. } = inventory;
    let in_role = |role: fn(Role) -> u64| of_numbers(roles.of.iter().map(|&of| role(of)));
    // Neither the bits of a norm, which is a number, nor a number of steps that are ever made.
    let absent = u64::MAX;
    [
        (VARIABLES, of_form(inventory, dtypes)),
        ("freeze", in_role(|role| (role == Role::Frozen).into())),
        ("train_only", roles.leaves_out_frozen.into()),
        ("buffers", in_role(|role| (role == Role::Buffer).into())),
        ("group", of_groups(inventory)),
        ("allow_unused", of_numbers(roles.may_be_unused.iter().map(|&unused| unused.into()))),
        ("replicated", (sharing == Sharing::PerSlot).into()),
        ("in_axes", of_debug(in_axes)),
        ("uneven", of_debug(uneven)),
        ("clip_grad_norm", max_norm.map_or(absent, f64::to_bits)),
        ("schedule", of_debug(schedule)),
        ("allow_non_finite", (*allow_non_finite).into()),
        ("check_in_sync_every", check_every.unwrap_or(absent)),
        ("seed", seed.as_u64()),
    ]
}

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
    let slots = mesh.gather_number_lists(here)?;
    for (replica, vars) in slots.iter().enumerate() {
        if let Some(var) = (0..vars.len()).find(|&var| vars[var] != slots[0][var]) {
            return Err(Error::Diverged { name: inventory.name(var).to_owned(), replica });
        }
    }
    Ok(())
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

/// The fingerprint of a variable's bits: NaN equals itself, and zeros of two signs differ.
pub(crate) fn of_value(var: &Var) -> candle_core::Result<u64> {
    let mut bytes = Vec::new();
    var.as_detached_tensor().force_contiguous()?.write_bytes(&mut bytes)?;
    Ok(Fingerprint::new().write_bytes(&bytes).finish())
}

/// A fingerprint of names, shapes and types.
fn of_form(inventory: &Inventory, dtypes: impl IntoIterator<Item = DType>) -> u64 {
    let mut form = Fingerprint::new();
    for ((name, shape), dtype) in inventory.parameters.iter().zip(dtypes) {
        form.write_bytes(name.as_bytes()).write_bytes(dtype.as_str().as_bytes());
        form.extend([shape.len() as u64]);
        form.extend(shape.iter().map(|&size| size as u64));
    }
    form.finish()
}

/// A fingerprint of the groups, and of which trained variable is in which.
fn of_groups(inventory: &Inventory) -> u64 {
    let mut groups = Fingerprint::new();
    for group in &inventory.roles.groups {
        groups.write_bytes(group.as_bytes());
    }
    groups.extend(inventory.roles.of.iter().map(|&role| match role {
        Role::Trained(group) => group as u64,
        Role::Frozen | Role::Buffer => u64::MAX,
    }));
    groups.finish()
}

/// A fingerprint of what has no numbers of its own.
pub(crate) fn of_debug(value: &impl fmt::Debug) -> u64 {
    Fingerprint::new().write_bytes(format!("{value:?}").as_bytes()).finish()
}

/// A fingerprint of numbers, in their order.
pub(crate) fn of_numbers(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().collect::<Fingerprint>().finish()
}

#[cfg(test)]
mod tests {
    use pmap_mesh::Uneven;

    use super::*;
    use crate::step::roles::Choices;

    /// The options whose values differ between a builder of these and one of defaults.
    fn differing(
        choices: Choices,
        options: &Options,
        sharing: Sharing,
        seed: u64,
    ) -> Vec<&'static str> {
        let names = ["a", "b"];
        let settings = |choices: Choices, options: &Options, sharing, seed| {
            let roles = choices.roles(&names).unwrap();
            let parameters = names.map(|name| (name.to_owned(), vec![3])).to_vec();
            super::settings(
                &Inventory { parameters, roles },
                [DType::F32; 2],
                options,
                sharing,
                Seed::new(seed),
            )
        };
        let here = settings(choices, options, sharing, seed);
        let usual = settings(Choices::default(), &Options::default(), Sharing::default(), 0);
        let pairs = here.into_iter().zip(usual);
        pairs.filter(|(here, usual)| here.1 != usual.1).map(|(here, _)| here.0).collect()
    }

    #[test]
    fn every_option_is_compared_by_its_name() {
        let b = || vec!["b".to_owned()];
        let of_choices = |choices| differing(choices, &Options::default(), Sharing::default(), 0);
        let usual = Choices::default;
        assert_eq!(of_choices(usual()), [""; 0]);
        assert_eq!(of_choices(Choices { frozen: b(), ..usual() })[0], "freeze");
        assert_eq!(of_choices(Choices { buffers: b(), ..usual() })[0], "buffers");
        assert_eq!(of_choices(Choices { unused: b(), ..usual() }), ["allow_unused"]);
        let groups = vec![("x".to_owned(), b())];
        assert_eq!(of_choices(Choices { groups, ..usual() }), ["group"]);
        let of = |options| differing(usual(), &options, Sharing::default(), 0);
        let options = Options::default;
        assert_eq!(of(Options { in_axes: None.into(), ..options() }), ["in_axes"]);
        assert_eq!(of(Options { uneven: Uneven::Pad, ..options() }), ["uneven"]);
        assert_eq!(of(Options { max_norm: Some(0.0), ..options() }), ["clip_grad_norm"]);
        assert_eq!(of(Options { allow_non_finite: true, ..options() }), ["allow_non_finite"]);
        assert_eq!(of(Options { check_every: Some(1), ..options() }), ["check_in_sync_every"]);
        assert_eq!(differing(usual(), &options(), Sharing::PerSlot, 0), ["replicated"]);
        assert_eq!(differing(usual(), &options(), Sharing::default(), 1), ["seed"]);
    }
}
