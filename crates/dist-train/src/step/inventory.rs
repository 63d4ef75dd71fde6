//! The variables of a model and their roles.

use std::collections::BTreeMap;

use crate::step::roles::Roles;

/// The variables of a model, the same on every slot.
#[derive(Debug)]
pub(crate) struct Inventory {
    /// Names and shapes of the variables, in the order of names.
    pub(crate) parameters: Vec<(String, Vec<usize>)>,
    pub(crate) roles: Roles,
}

impl Inventory {
    pub(crate) fn name(&self, var: usize) -> &str {
        &self.parameters[var].0
    }

    /// Returns the shapes of the variables in checkpoints, by name.
    pub(crate) fn saved_shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let all = self.parameters.iter().enumerate();
        let saved = all.filter(|&(var, _)| self.roles.is_saved(var));
        saved.map(|(_, parameter)| parameter.clone()).collect()
    }

    pub(crate) fn sizes(&self) -> Vec<u64> {
        self.parameters.iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).collect()
    }
}
