//! Comparison of options and models between the processes of a mesh.

use std::fmt;

use candle_core::{DType, Var};
use core_types::Fingerprint;
use pmap_mesh::DeviceMesh;

use crate::{
    error::{Error, Result, training::TrainingError},
    model::config::{ModelConfig, Sharing},
    step::{inventory::Inventory, options::StepOptions, roles::Role},
};

/// Options that must be equal in all processes, each with a fingerprint of its value, in the order
/// of comparison.
pub(crate) type Settings<const N: usize> = [(&'static str, u64); N];

/// Checks that all processes build the same model with the same options.
///
/// # Errors
///
/// Returns [`TrainingError::OptionMismatch`] with the first difference, and [`Error::Mesh`](crate::Error::Mesh) if a process does not respond.
pub(crate) fn check<const N: usize>(mesh: &DeviceMesh, settings: &Settings<N>) -> Result<()> {
    if !mesh.spans_processes() {
        return Ok(());
    }
    let fingerprints = settings.map(|(_, fingerprint)| fingerprint);
    let by_slot = mesh.gather_numbers(&vec![fingerprints; mesh.devices().len()])?;
    for (n, &(option, _)) in settings.iter().enumerate() {
        let different = by_slot.iter().position(|fingerprints| fingerprints[n] != by_slot[0][n]);
        if let Some(replica) = different {
            return Err(TrainingError::OptionMismatch { option, replica }.into());
        }
    }
    Ok(())
}

/// Returns the settings of a model that all processes must have in common. Without this comparison,
/// replicas would deadlock if they train different variables, for example.
pub(crate) fn model_settings(
    inventory: &Inventory,
    dtypes: impl IntoIterator<Item = DType>,
    config: &ModelConfig,
    is_sharded: bool,
) -> Settings<16> {
    let StepOptions { in_axes, uneven, local_batches, max_norm, schedule, allow_non_finite } =
        &config.step_options;
    let Inventory { roles, .. } = inventory;
    let in_role = |is_role: fn(Role) -> u64| {
        number_fingerprint(roles.by_variable.iter().map(|&role| is_role(role)))
    };
    // A value that is not the bits of a finite norm.
    let absent = u64::MAX;
    [
        // Compared first, because models of different layouts would wait for each other's
        // collectives.
        ("fully_shard", is_sharded.into()),
        ("variables", declaration_fingerprint(inventory, dtypes)),
        ("freeze", in_role(|role| (role == Role::Frozen).into())),
        ("train_only", roles.leaves_out_frozen.into()),
        ("buffers", in_role(|role| (role == Role::Buffer).into())),
        ("group", group_fingerprint(inventory)),
        (
            "allow_unused",
            number_fingerprint(roles.may_be_unused.iter().map(|&unused| unused.into())),
        ),
        ("mixed_precision", debug_fingerprint(&config.precision)),
        ("replicated", (config.sharing == Sharing::PerSlot).into()),
        ("in_axes", debug_fingerprint(in_axes)),
        ("uneven", debug_fingerprint(uneven)),
        ("local_batches", (*local_batches).into()),
        ("clip_grad_norm", max_norm.map_or(absent, f64::to_bits)),
        ("schedule", debug_fingerprint(schedule)),
        ("allow_non_finite", (*allow_non_finite).into()),
        ("seed", config.rng_seed.as_u64()),
    ]
}

/// Checks that slots with the same items of a parameter have the same bits. `fingerprints` has for
/// each slot of this process the fingerprint of each parameter. `periods` has a period for each
/// parameter: slots `s` and `s % period` have the same items, or all slots have different items if
/// it is `None`.
///
/// # Errors
///
/// Returns [`Error::Diverged`] with the first parameter that differs, and [`Error::Mesh`] if a
/// process does not answer.
pub(crate) fn check_values(
    mesh: &DeviceMesh,
    inventory: &Inventory,
    fingerprints: &[Vec<u64>],
    periods: &[Option<usize>],
) -> Result<()> {
    let by_slot = mesh.gather_numbers(fingerprints)?;
    for (param, &period) in periods.iter().enumerate() {
        let Some(period) = period else { continue };
        let different =
            (0..by_slot.len()).find(|&slot| by_slot[slot][param] != by_slot[slot % period][param]);
        if let Some(replica) = different {
            return Err(Error::Diverged { name: inventory.name(param).to_owned(), replica });
        }
    }
    Ok(())
}

/// Returns a fingerprint of a variable's bits; bits make NaN equal to itself and distinguish 0 from
/// -0.
pub(crate) fn value_fingerprint(var: &Var) -> candle_core::Result<u64> {
    let mut bytes = Vec::new();
    var.as_detached_tensor().force_contiguous()?.write_bytes(&mut bytes)?;
    Ok(Fingerprint::new().write_bytes(&bytes).finish())
}

/// Returns a fingerprint of names, shapes and dtypes.
fn declaration_fingerprint(inventory: &Inventory, dtypes: impl IntoIterator<Item = DType>) -> u64 {
    let mut fingerprint = Fingerprint::new();
    for ((name, shape), dtype) in inventory.parameters.iter().zip(dtypes) {
        fingerprint.write_bytes(name.as_bytes()).write_bytes(dtype.as_str().as_bytes());
        fingerprint.extend([shape.len() as u64]);
        fingerprint.extend(shape.iter().map(|&size| size as u64));
    }
    fingerprint.finish()
}

/// Returns a fingerprint of the groups and their variables.
fn group_fingerprint(inventory: &Inventory) -> u64 {
    let mut fingerprint = Fingerprint::new();
    for group in &inventory.roles.groups {
        fingerprint.write_bytes(group.as_bytes());
    }
    fingerprint.extend(inventory.roles.by_variable.iter().map(|&role| match role {
        Role::Trained(group) => group as u64,
        Role::Frozen | Role::Buffer => u64::MAX,
    }));
    fingerprint.finish()
}

/// Returns a fingerprint of a value's `Debug` form.
pub(crate) fn debug_fingerprint(value: &impl fmt::Debug) -> u64 {
    Fingerprint::new().write_bytes(format!("{value:?}").as_bytes()).finish()
}

/// Returns a fingerprint of numbers in order.
pub(crate) fn number_fingerprint(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().collect::<Fingerprint>().finish()
}

#[cfg(test)]
mod tests {
    use core_types::Seed;
    use pmap_mesh::Uneven;

    use super::*;
    use crate::step::roles::RolePatterns;

    /// Returns the names of the options that differ between this configuration and the default.
    fn differing(config: &ModelConfig, is_sharded: bool) -> Vec<&'static str> {
        let names = ["a", "b"];
        let settings = |config: &ModelConfig, is_sharded| {
            let roles = config.role_patterns.roles(&names).unwrap();
            let parameters = names.map(|name| (name.to_owned(), vec![3])).to_vec();
            model_settings(&Inventory { parameters, roles }, [DType::F32; 2], config, is_sharded)
        };
        let here = settings(config, is_sharded);
        let usual = settings(&ModelConfig::default(), false);
        let pairs = here.into_iter().zip(usual);
        pairs.filter(|(here, usual)| here.1 != usual.1).map(|(here, _)| here.0).collect()
    }

    #[test]
    fn every_option_is_compared_by_its_name() {
        let b = || vec!["b".to_owned()];
        let usual = ModelConfig::default;
        let of_patterns =
            |role_patterns| differing(&ModelConfig { role_patterns, ..usual() }, false);
        let patterns = RolePatterns::default;
        assert_eq!(of_patterns(patterns()), [""; 0]);
        assert_eq!(of_patterns(RolePatterns { frozen: b(), ..patterns() })[0], "freeze");
        assert_eq!(of_patterns(RolePatterns { buffers: b(), ..patterns() })[0], "buffers");
        assert_eq!(of_patterns(RolePatterns { unused: b(), ..patterns() }), ["allow_unused"]);
        let groups = vec![("x".to_owned(), b())];
        assert_eq!(of_patterns(RolePatterns { groups, ..patterns() }), ["group"]);
        let of = |step_options| differing(&ModelConfig { step_options, ..usual() }, false);
        let options = StepOptions::default;
        assert_eq!(of(StepOptions { in_axes: None.into(), ..options() }), ["in_axes"]);
        assert_eq!(of(StepOptions { uneven: Uneven::Pad, ..options() }), ["uneven"]);
        assert_eq!(of(StepOptions { local_batches: true, ..options() }), ["local_batches"]);
        assert_eq!(of(StepOptions { max_norm: Some(0.0), ..options() }), ["clip_grad_norm"]);
        assert_eq!(of(StepOptions { allow_non_finite: true, ..options() }), ["allow_non_finite"]);
        let sharing = Sharing::PerSlot;
        assert_eq!(differing(&ModelConfig { sharing, ..usual() }, false), ["replicated"]);
        let rng_seed = Seed::new(1);
        assert_eq!(differing(&ModelConfig { rng_seed, ..usual() }, false), ["seed"]);
        assert_eq!(differing(&usual(), true), ["fully_shard"]);
    }
}
