//! What a sharding plan must know of candle's tensors.

use std::cmp::Ordering;

use candle_core::{DType, Tensor};
use fsdp_plan::{ElemType, ParameterError, ParameterInfo};

use crate::error::Result;

/// Describes named tensors to a planner: the variables of a `VarMap`, the tensors of a checkpoint.
///
/// They are sorted by name, numbers in names by their value (`h.2.w` before `h.10.w`), so that
/// every rank plans the same list, whatever map the tensors come from. A tensor that occurs under
/// several names is described once, and tied to itself under the others. Layers and units are found
/// from names, as [`ParameterInfo`] says.
///
/// # Errors
///
/// [`Error::Plan`](crate::Error::Plan) if a tensor has a dtype that the planner does not know.
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
    #[allow(
        clippy::disallowed_types,
        reason = "ids have no order, and nothing walks over this map"
    )]
    let mut first_names = std::collections::HashMap::new();
    let infos = tensors.into_iter().map(|(name, tensor)| {
        let shape: Vec<u64> = tensor.dims().iter().map(|&dim| dim as u64).collect();
        let info = ParameterInfo::new(name.as_str(), shape, elem_type(&name, tensor.dtype())?)?;
        let first_name = first_names.entry(tensor.id()).or_insert_with(|| info.name().to_owned());
        Ok(if first_name == info.name() { info } else { info.with_tied_to(first_name.as_str()) })
    });
    infos.collect()
}

/// Compares names component by component, numbers by value.
fn natural_order(left: &str, right: &str) -> Ordering {
    left.split('.').map(component_key).cmp(right.split('.').map(component_key))
}

/// Numbers before words, by their value.
fn component_key(component: &str) -> ((u8, u64), &str) {
    (component.parse().map_or((1, 0), |number| (0, number)), component)
}

fn elem_type(name: &str, dtype: DType) -> fsdp_plan::Result<ElemType> {
    let unknown =
        || ParameterError::UnknownDtype { name: name.to_owned(), dtype: dtype.as_str().to_owned() };
    Ok(elem_of(dtype).ok_or_else(unknown)?)
}

/// The planner's word for a dtype of candle.
fn elem_of(dtype: DType) -> Option<ElemType> {
    let as_in_files = match dtype {
        DType::F8E4M3 => String::from("F8_E4M3"),
        DType::F8E8M0 => String::from("F8_E8M0"),
        DType::F6E2M3 => String::from("F6_E2M3"),
        DType::F6E3M2 => String::from("F6_E3M2"),
        other => other.as_str().to_uppercase(),
    };
    ElemType::from_name(&as_in_files)
}

/// A size as candle counts it; a plan's that is larger than any tensor becomes one that no tensor
/// has.
pub(crate) fn index(size: u64) -> usize {
    usize::try_from(size).unwrap_or(usize::MAX)
}

/// The dtype of candle in which a planned parameter's items are held, one by one.
pub(crate) fn dtype_of(elem: ElemType) -> Option<DType> {
    use DType::{BF16, F8E4M3, F16, F32, F64, I16, I32, I64, U8, U32};
    [U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3]
        .into_iter()
        .find(|&dtype| elem_of(dtype) == Some(elem))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn every_dtype_of_candle_is_known() {
        for dtype in [
            DType::U8,
            DType::U32,
            DType::I16,
            DType::I32,
            DType::I64,
            DType::BF16,
            DType::F16,
            DType::F32,
            DType::F64,
            DType::F8E4M3,
            DType::F6E2M3,
            DType::F6E3M2,
            DType::F4,
            DType::F8E8M0,
        ] {
            elem_type("a", dtype).unwrap();
        }
    }

    #[test]
    fn a_tensor_of_two_names_is_tied() {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let infos =
            parameter_infos([("wte.weight", &tensor), ("lm_head.weight", &tensor)]).unwrap();
        let ties: Vec<_> = infos.iter().map(|info| (info.name(), info.tied_to())).collect();
        assert_eq!(ties, [("lm_head.weight", None), ("wte.weight", Some("lm_head.weight"))]);
    }
}
