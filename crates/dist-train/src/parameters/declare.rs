//! What parameters a model has, read off its constructor.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use dist_checkpoint::TensorInfo;

/// A parameter that a model's constructor asks for; made by [`declare`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Declared {
    /// Its dotted name.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// The type of its items.
    pub dtype: DType,
    /// How the constructor wants it to be initialized.
    pub init: Init,
}

impl Declared {
    /// Returns the facts about it that files state.
    pub(crate) fn info(&self) -> TensorInfo {
        let Self { name, shape, dtype, .. } = self;
        TensorInfo { name: name.clone(), shape: shape.dims().to_vec(), dtype: *dtype }
    }
}

/// Lists the parameters that `build` asks for, in the order in which it first does.
///
/// It is the constructor as for plain candle: every parameter it gets has the shape and type that it
/// asks for, but all items of one are the same zero, so that a model which no machine can hold is
/// declared within a few hundred bytes per parameter. The model it returns has no values and is
/// dropped. A parameter that is asked for again, since two layers share it, is listed once.
///
/// In PyTorch this is what a model on the device `meta` is for.
///
/// # Errors
///
/// What `build` returns; and if it asks for a parameter without saying its shape, or for one name
/// with two shapes or types.
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
    let register = Register::default();
    build(VarBuilder::from_backend(Box::new(&register), dtype, device.clone()))?;
    Ok(register.into_declared())
}

/// Hands out parameters without memory, and writes down which.
#[derive(Default)]
struct Register {
    /// In the order of declaration, and the positions of the names. The lock guards both together: a
    /// constructor may ask from several threads.
    entries: Mutex<(Vec<Declared>, BTreeMap<String, usize>)>,
}

impl Register {
    fn into_declared(self) -> Vec<Declared> {
        // Whoever panicked with the lock had not changed anything yet.
        self.entries.into_inner().unwrap_or_else(PoisonError::into_inner).0
    }

    /// Writes a parameter down, unless it is there already and the same.
    fn enter(&self, parameter: Declared) -> Result<()> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let (declared, positions) = &mut *entries;
        if let Some(&position) = positions.get(&parameter.name) {
            return same(&declared[position], &parameter);
        }
        positions.insert(parameter.name.clone(), declared.len());
        declared.push(parameter);
        Ok(())
    }
}

/// Refuses a name that stands for two different parameters.
fn same(first: &Declared, again: &Declared) -> Result<()> {
    if (&first.shape, first.dtype) == (&again.shape, again.dtype) {
        return Ok(());
    }
    bail!(
        "parameter {} is asked for as {:?} of {:?} and as {:?} of {:?}",
        first.name,
        first.shape.dims(),
        first.dtype,
        again.shape.dims(),
        again.dtype
    )
}

impl SimpleBackend for &Register {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        self.enter(Declared { name: name.to_owned(), shape: shape.clone(), dtype, init })?;
        // One item, seen from every place.
        Tensor::zeros((), dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("parameter {name} is asked for without its shape, so it cannot be declared")
    }

    /// As for the variables of a `VarMap`: whether it was asked for before.
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
    fn parameters_are_listed_once_in_the_order_of_their_first_use() {
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
    fn one_name_for_two_parameters_is_refused() {
        for other in [
            |vb: VarBuilder<'_>| vb.get((2, 4), "w"),
            |vb: VarBuilder<'_>| vb.to_dtype(DType::F64).get((4, 2), "w"),
        ] {
            let error = declared(|vb| Ok((vb.get((4, 2), "w")?, other(vb)?))).unwrap_err();
            assert!(error.to_string().contains("parameter w is asked for as"), "{error}");
        }
    }

    #[test]
    fn a_parameter_without_a_shape_is_refused() {
        let error = declared(|vb| vb.pp("a").get_unchecked("b")).unwrap_err();
        assert!(error.to_string().contains("a.b"), "{error}");
    }

    #[test]
    fn layers_may_ask_whether_a_parameter_is_there() {
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
