//! Descriptions of parameters for a planner.

use dist_checkpoint::{
    ParameterError,
    support::{elem_of, natural_order},
};
use fsdp_plan::ParameterInfo;

use crate::{
    error::Result,
    parameters::declare::Declared,
    step::roles::{Role, Roles},
};

/// Describes declared parameters to a planner, sorted by name, with numbers in names compared by
/// value (`h.2.w` before `h.10.w`).
///
/// # Errors
///
/// Returns [`ParameterError::UnknownDtype`], and the errors of [`ParameterInfo::new`].
pub(crate) fn declared_infos(declared: &[Declared], roles: &Roles) -> Result<Vec<ParameterInfo>> {
    let mut infos = Vec::with_capacity(declared.len());
    for (Declared { name, shape, dtype, .. }, role) in declared.iter().zip(&roles.by_variable) {
        let elem = elem_of(*dtype).ok_or_else(|| ParameterError::UnknownDtype {
            name: name.clone(),
            dtype: dtype.as_str().to_owned(),
        })?;
        let shape: Vec<u64> = shape.dims().iter().map(|&dim| dim as u64).collect();
        let info = ParameterInfo::new(name.as_str(), shape, elem)?;
        infos.push(info.with_requires_grad(matches!(role, Role::Trained(_))));
    }
    infos.sort_by(|left, right| natural_order(left.name(), right.name()));
    Ok(infos)
}
