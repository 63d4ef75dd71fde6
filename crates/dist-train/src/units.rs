//! A model that is made a unit at a time, where its parts are used.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;
use pmap_mesh::TensorTree;

use crate::parameters::declare::declare;

/// The variables of a model whose layers are made where a loss uses them: in a
/// [`DataParallel`](crate::DataParallel) the whole variables of a slot.
///
/// A *unit* is a part of the model with a name: the variables `blocks.3.*` are those of the unit
/// `blocks.3`. Whoever keeps variables in parts can put together those of one unit at a time, so a
/// loss that is written by units does not depend on who keeps what. (What
/// `fully_shard(module)` marks in PyTorch.)
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Module, Optimizer, VarBuilder, linear};
/// use dist_train::{DataParallel, Sgd, Units};
/// use pmap_mesh::{DeviceMesh, Replica};
///
/// let layers = |vb: VarBuilder<'_>| {
///     for n in 0..3 {
///         linear(4, 4, vb.pp(n))?;
///     }
///     Ok(())
/// };
/// let loss = |_: &Replica, model: &Units, x: Tensor| {
///     let mut x = x;
///     for n in 0..3 {
///         x = model.unit(&n.to_string(), &x, |vb, x| linear(4, 4, vb)?.forward(x)?.tanh())?;
///     }
///     x.sqr()?.mean_all()
/// };
/// let mesh = DeviceMesh::cpu(2)?;
/// let mut model = DataParallel::builder(&mesh, Units::of(layers))
///     .build(|group| Sgd::new(group.vars, Default::default()))?;
/// let x = Tensor::randn(0_f32, 1., (8, 4), &Device::Cpu)?;
/// let first = model.step(x.clone(), loss)?.loss;
/// assert!(model.step(x, loss)?.loss < first);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Units {
    variables: BTreeMap<String, Tensor>,
    dtype: DType,
    device: Device,
}

impl Units {
    /// Returns a constructor for [`DataParallel::builder`](crate::DataParallel::builder), of the
    /// variables that `build`, a constructor as for plain candle, asks for.
    pub fn of<M>(
        build: impl Fn(VarBuilder<'_>) -> Result<M>,
    ) -> impl Fn(VarBuilder<'_>) -> Result<Self> {
        move |vb| {
            let mut variables = BTreeMap::new();
            for declared in declare(&build, vb.dtype(), vb.device())? {
                let vb = vb.to_dtype(declared.dtype);
                let variable = vb.get_with_hints(declared.shape, &declared.name, declared.init)?;
                variables.insert(declared.name, variable);
            }
            Ok(Self { variables, dtype: vb.dtype(), device: vb.device().clone() })
        }
    }

    /// What `f` computes from `x` by the layers that it makes of a unit's variables: its builder
    /// has those whose names begin with `name.`, without that.
    ///
    /// `f` owns what it captures, since it may be run again for the backward pass by who keeps
    /// variables in parts.
    ///
    /// # Errors
    ///
    /// If there is no such unit, and what `f` returns.
    pub fn unit<X, F>(&self, name: &str, x: &X, f: F) -> Result<Tensor>
    where
        X: TensorTree,
        F: Fn(VarBuilder<'_>, &X) -> Result<Tensor> + Send + Sync + 'static,
    {
        let prefix = format!("{name}.");
        let of_unit = self.variables.iter().filter_map(|(variable, tensor)| {
            Some((variable.strip_prefix(&prefix)?.to_owned(), tensor.clone()))
        });
        let variables: Vec<(String, Tensor)> = of_unit.collect();
        if variables.is_empty() {
            return Err(Error::CannotFindTensor { path: prefix }.bt());
        }
        f(VarBuilder::from_tensors(variables.into_iter().collect(), self.dtype, &self.device), x)
    }
}
