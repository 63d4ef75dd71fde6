//! Lists the parameters of a model by running its constructor.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use dist_checkpoint::TensorInfo;

/// A parameter requested by a model's constructor; returned by [`declare`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Declared {
    /// The dotted name.
    pub name: String,
    /// The shape.
    pub shape: Shape,
    /// The dtype.
    pub dtype: DType,
    /// The initializer chosen by the constructor.
    pub init: Init,
}

impl Declared {
    /// Returns the name, shape and dtype as in a file's header.
    pub(crate) fn info(&self) -> TensorInfo {
        let Self { name, shape, dtype, .. } = self;
        TensorInfo { name: name.clone(), shape: shape.dims().to_vec(), dtype: *dtype }
    }
}

/// Lists the parameters that `build` requests, in order of first request.
///
/// `build` is the constructor for plain candle. Every parameter it gets has the requested shape and
/// dtype, but all its items are one zero, so declaring a model of any size takes a few hundred
/// bytes per parameter. The returned model has no values and is dropped. A parameter requested
/// several times, because layers share it, is listed once.
///
/// In PyTorch, a model on the device `meta` serves this purpose.
///
/// # Errors
///
/// Returns the errors of `build`, and an error if it requests a parameter without a shape, or the
/// same name with different shapes or dtypes.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::linear;
///
/// let parameters = dist_train::declare(|vb| linear(4096, 1024, vb.pp("up")), DType::F32, &Device::Cpu)?;
/// assert_eq!(parameters[0].name, "up.weight");
/// assert_eq!(parameters[0].shape.dims(), [1024, 4096]);
/// assert_eq!(parameters.len(), 2);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn declare<M>(
    build: impl FnOnce(VarBuilder<'_>) -> Result<M>,
    dtype: DType,
    device: &Device,
) -> Result<Vec<Declared>> {
    let register = ParameterRegister::default();
    build(VarBuilder::from_backend(Box::new(&register), dtype, device.clone()))?;
    Ok(register.into_declared())
}

/// A variable builder that returns parameters without memory and records them.
#[derive(Default)]
struct ParameterRegister {
    /// The parameters in order of declaration, and the position of each name. One lock guards both,
    /// because a constructor may use several threads.
    entries: Mutex<(Vec<Declared>, BTreeMap<String, usize>)>,
}

impl ParameterRegister {
    fn into_declared(self) -> Vec<Declared> {
        // Nothing panics between the two changes under the lock, so poisoning is ignored.
        self.entries.into_inner().unwrap_or_else(PoisonError::into_inner).0
    }

    /// Records a parameter, or checks that it equals the earlier parameter of this name.
    fn record(&self, parameter: Declared) -> Result<()> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let (declared, positions) = &mut *entries;
        if let Some(&position) = positions.get(&parameter.name) {
            return check_same(&declared[position], &parameter);
        }
        positions.insert(parameter.name.clone(), declared.len());
        declared.push(parameter);
        Ok(())
    }
}

/// Rejects a name with two different shapes or dtypes.
fn check_same(first: &Declared, second: &Declared) -> Result<()> {
    if first.shape == second.shape && first.dtype == second.dtype {
        return Ok(());
    }
    bail!(
        "parameter {} is requested as {:?} of {:?} and as {:?} of {:?}",
        first.name,
        first.shape.dims(),
        first.dtype,
        second.shape.dims(),
        second.dtype
    )
}

impl SimpleBackend for &ParameterRegister {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        self.record(Declared { name: name.to_owned(), shape: shape.clone(), dtype, init })?;
        // The tensor has a single item, broadcast to the shape.
        Tensor::zeros((), dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("parameter {name} is requested without a shape, so it cannot be declared")
    }

    /// Returns true if the parameter was requested before, like the variables of a `VarMap`.
    fn contains_tensor(&self, name: &str) -> bool {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).1.contains_key(name)
    }
}

#[cfg(test)]
mod tests {
    use candle_nn::{embedding, layer_norm, linear};

    use super::*;

    fn declared<M>(build: impl FnOnce(VarBuilder<'_>) -> Result<M>) -> Result<Vec<Declared>> {
        declare(build, DType::F32, &Device::Cpu)
    }

    #[test]
    fn parameters_are_listed_in_order_of_first_use() {
        let found = declared(|vb| {
            let tokens = embedding(10, 4, vb.pp("tokens"))?;
            let blocks: Vec<_> =
                (0..11).map(|block| linear(4, 4, vb.pp(block))).collect::<Result<_>>()?;
            let head = embedding(10, 4, vb.pp("tokens"))?;
            Ok((tokens, blocks, layer_norm(4, 1e-5, vb.pp("norm"))?, head))
        })
        .unwrap();
        let names: Vec<_> = found.iter().map(|declared| declared.name.as_str()).collect();
        assert_eq!(names[..3], ["tokens.weight", "0.weight", "0.bias"]);
        assert_eq!(names[21..], ["10.weight", "10.bias", "norm.weight", "norm.bias"]);
        assert_eq!(found[0].shape.dims(), [10, 4]);
        assert!(matches!(found[23].init, Init::Const(1.0)), "{:?}", found[23].init);
    }

    #[test]
    fn conflicting_declarations_are_rejected() {
        for other in [
            |vb: VarBuilder<'_>| vb.get((2, 4), "w"),
            |vb: VarBuilder<'_>| vb.to_dtype(DType::F64).get((4, 2), "w"),
        ] {
            let error = declared(|vb| Ok((vb.get((4, 2), "w")?, other(vb)?))).unwrap_err();
            assert!(error.to_string().contains("parameter w is requested as"), "{error}");
        }
    }

    #[test]
    fn missing_shapes_are_rejected() {
        let error = declared(|vb| vb.pp("a").get_unchecked("b")).unwrap_err();
        assert!(error.to_string().contains("a.b"), "{error}");
    }

    #[test]
    fn contains_tensor_finds_requested_parameters() {
        let contains = |vb: VarBuilder<'_>| {
            assert!(!vb.contains_tensor("w"));
            vb.get(2, "w")?;
            Ok(vb.contains_tensor("w"))
        };
        let mut found = false;
        declared(|vb| contains(vb).map(|contains| found = contains)).unwrap();
        assert!(found);
    }
}
