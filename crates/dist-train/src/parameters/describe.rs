//! Descriptions of candle's tensors for a planner.

use candle_core::{DType, Tensor};
use dist_checkpoint::{
    ParameterError,
    support::{elem_of, natural_order},
};
use fsdp_plan::{ElemType, ParameterInfo};

use crate::{
    error::Result,
    parameters::declare::Declared,
    step::roles::{Role, Roles},
};

/// Describes named tensors to a planner, such as the variables of a `VarMap` or the tensors of a
/// checkpoint.
///
/// Tensors are sorted by name, with numbers in names compared by value (`h.2.w` before `h.10.w`),
/// so that every rank plans the same list from any map. A tensor with several names is described
/// once; its other names are tied to the first. Layers and units are derived from names by
/// [`ParameterInfo`].
///
/// # Errors
///
/// Returns [`ParameterError::UnknownDtype`] if the planner does not know a tensor's dtype, and
/// [`Error::Plan`](crate::Error::Plan) if it rejects a tensor, such as an `F4` tensor with a
/// partial byte.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap, linear};
///
/// let map = VarMap::new();
/// let builder = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
/// for block in [10, 2] {
///     linear(4, 3, builder.pp(format!("h.{block}")))?;
/// }
/// let vars = map.data().lock().unwrap();
/// let parameters = dist_train::parameter_infos(vars.iter().map(|(name, var)| (name, var.as_tensor())))?;
/// let names: Vec<_> = parameters.iter().map(|info| info.name()).collect();
/// assert_eq!(names, ["h.2.bias", "h.2.weight", "h.10.bias", "h.10.weight"]);
/// assert_eq!((parameters[1].shape(), parameters[1].unit()), (&[3, 4][..], "h.2"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn parameter_infos<'a>(
    tensors: impl IntoIterator<Item = (impl AsRef<str>, &'a Tensor)>,
) -> Result<Vec<ParameterInfo>> {
    let mut tensors: Vec<_> =
        tensors.into_iter().map(|(name, tensor)| (name.as_ref().to_owned(), tensor)).collect();
    tensors.sort_by(|(left, _), (right, _)| natural_order(left, right));
    #[expect(
        clippy::disallowed_types,
        reason = "ids are unordered, and nothing iterates over the map"
    )]
    let mut first_names = std::collections::HashMap::new();
    let mut infos = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let shape: Vec<u64> = tensor.dims().iter().map(|&dim| dim as u64).collect();
        let info = ParameterInfo::new(name.as_str(), shape, elem_type(&name, tensor.dtype())?)?;
        let first_name = first_names.entry(tensor.id()).or_insert_with(|| name.clone());
        let is_first = *first_name == name;
        infos.push(if is_first { info } else { info.with_tied_to(first_name.as_str()) });
    }
    Ok(infos)
}

/// Describes declared parameters to a planner, sorted like in [`parameter_infos`].
pub(crate) fn declared_infos(declared: &[Declared], roles: &Roles) -> Result<Vec<ParameterInfo>> {
    let mut infos = Vec::with_capacity(declared.len());
    for (declared, role) in declared.iter().zip(&roles.by_variable) {
        let shape: Vec<u64> = declared.shape.dims().iter().map(|&dim| dim as u64).collect();
        let dtype = elem_type(&declared.name, declared.dtype)?;
        let info = ParameterInfo::new(declared.name.as_str(), shape, dtype)?;
        infos.push(info.with_requires_grad(matches!(role, Role::Trained(_))));
    }
    infos.sort_by(|left, right| natural_order(left.name(), right.name()));
    Ok(infos)
}

fn elem_type(name: &str, dtype: DType) -> Result<ElemType, ParameterError> {
    elem_of(dtype).ok_or_else(|| ParameterError::UnknownDtype {
        name: name.to_owned(),
        dtype: dtype.as_str().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn tensors_with_two_names_are_tied() {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let infos =
            parameter_infos([("wte.weight", &tensor), ("lm_head.weight", &tensor)]).unwrap();
        let ties: Vec<_> = infos.iter().map(|info| (info.name(), info.tied_to())).collect();
        assert_eq!(ties, [("lm_head.weight", None), ("wte.weight", Some("lm_head.weight"))]);
    }
}
