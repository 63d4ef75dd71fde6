//! What a model consists of.

use std::collections::BTreeMap;

use crate::step::roles::Roles;

/// What a model consists of: the same on every slot.
#[derive(Debug)]
pub(crate) struct Inventory {
    /// The names and shapes of the variables, in the order of names.
    pub(crate) parameters: Vec<(String, Vec<usize>)>,
    pub(crate) roles: Roles,
}

impl Inventory {
    pub(crate) fn name(&self, var: usize) -> &str {
        &self.parameters[var].0
    }

    /// The shapes of the variables that checkpoints have, by name.
    pub(crate) fn saved_shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let all = self.parameters.iter().enumerate();
        let saved = all.filter(|&(var, _)| self.roles.is_saved(var));
        saved.map(|(_, parameter)| parameter.clone()).collect()
    }

    pub(crate) fn sizes(&self) -> Vec<u64> {
        let numel = |shape: &[usize]| shape.iter().product::<usize>() as u64;
        self.parameters.iter().map(|(_, shape)| numel(shape)).collect()
    }
}
