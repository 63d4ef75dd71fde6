//! A model that is made a unit at a time, where its parts are used.

pub(crate) mod accumulation;
pub(crate) mod backward;
pub(crate) mod freed;
pub(crate) mod keep;
pub(crate) mod model;
pub(crate) mod operation;
pub(crate) mod outside;
pub(crate) mod prefetch;
pub(crate) mod rules;
pub(crate) mod session;
pub(crate) mod swap_storage;

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;
use pmap_mesh::TensorTree;

use self::rules::{Member, UnitRules};
use crate::{
    parameters::declare::declare,
    units::{operation::enter, session::Session},
};

/// The variables of a model whose layers are made where a loss uses them: what a loss is lent by a
/// model [by units](crate::ModelBuilder::by_units). One that is [sharded](crate::FullyShard) gathers
/// those of one unit at a time, one that is [not](crate::DataParallel) has all of them.
///
/// A *unit* is a part of the model with a name: the variables `blocks.3.*` are those of the unit
/// `blocks.3`, and [`UnitRules`] say of what others consist. One loss that is written by units runs
/// with either, and has the same bits. (What `fully_shard(module)` marks in PyTorch.)
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Module, Optimizer, VarBuilder, linear};
/// use dist_train::{DataParallel, Sgd, UnitRules, Units};
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
/// let mut model = DataParallel::builder(&mesh, layers)
///     .by_units(UnitRules::new())
///     .build(|group| Sgd::new(group.vars, Default::default()))?;
/// let x = Tensor::randn(0_f32, 1., (8, 4), &Device::Cpu)?;
/// let first = model.step(x.clone(), loss)?.loss;
/// assert!(model.step(x, loss)?.loss < first);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Units(Source);

#[derive(Debug)]
enum Source {
    Whole(Whole),
    Sharded(Arc<Session>),
}

/// All variables of a model.
#[derive(Debug)]
struct Whole {
    rules: UnitRules,
    variables: BTreeMap<String, Tensor>,
    dtype: DType,
    device: Device,
}

impl Units {
    /// Returns a constructor of all units, of the variables that `build`, a constructor as for plain
    /// candle, asks for: for a model that is not trained, and has its variables from a `VarBuilder`
    /// of its own. A unit has the variables under its own name, or those that the rules say.
    pub fn by<M>(
        rules: UnitRules,
        build: impl Fn(VarBuilder<'_>) -> Result<M>,
    ) -> impl Fn(VarBuilder<'_>) -> Result<Self> {
        move |vb| {
            let mut variables = BTreeMap::new();
            for declared in declare(&build, vb.dtype(), vb.device())? {
                let vb = vb.to_dtype(declared.dtype);
                let variable = vb.get_with_hints(declared.shape, &declared.name, declared.init)?;
                variables.insert(declared.name, variable);
            }
            Ok(Self(Source::Whole(Whole {
                rules: rules.clone(),
                variables,
                dtype: vb.dtype(),
                device: vb.device().clone(),
            })))
        }
    }

    pub(crate) fn sharded(session: Arc<Session>) -> Self {
        Self(Source::Sharded(session))
    }

    /// What `f` computes from `x` by the layers that it makes of a unit's variables: its builder
    /// has those whose names begin with `name.`, without that, or those that the
    /// [rules](UnitRules::unit) say. Inputs and results are tensors of any types or
    /// [trees](TensorTree) of them; integers among them have no gradient.
    ///
    /// A model that is sharded runs `f` again in the backward pass, so `f` owns what it captures,
    /// and has the same result both times: what is random in it follows from a key that was made
    /// before ([`Replica::batch_keys`](pmap_mesh::Replica::batch_keys)). What is differentiated
    /// reaches `f` by `x`, several tensors as a tuple; what is captured has no gradient. And no
    /// unit can be entered inside another, since the model is only lent to a loss:
    ///
    /// ```compile_fail,E0521
    /// # use candle_core::{Result, Tensor};
    /// # use dist_train::Units;
    /// fn nested(model: &Units, x: &Tensor) -> Result<Tensor> {
    ///     model.unit("outer", x, |_, x| model.unit("inner", x, |_, x| x.sqr()))
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no such unit, and what `f` returns. In a sharded model
    /// [`TrainingError::Captured`](crate::TrainingError::Captured) if `f` captures what is
    /// differentiated, [`TrainingError::ParameterOutsideUnit`](crate::TrainingError::ParameterOutsideUnit)
    /// if that is a parameter of another unit, and those of [`Replica::gather_runs`](pmap_mesh::Replica::gather_runs): all
    /// replicas enter the same units in the same order.
    pub fn unit<X, R, F>(&self, name: &str, x: &X, f: F) -> Result<R>
    where
        X: TensorTree,
        R: TensorTree,
        F: Fn(VarBuilder<'_>, &X) -> Result<R> + Send + Sync + 'static,
    {
        match &self.0 {
            Source::Whole(whole) => f(whole.builder(name)?, x),
            Source::Sharded(session) => enter(session, name, x, f),
        }
    }
}

impl Whole {
    fn builder(&self, unit: &str) -> Result<VarBuilder<'static>> {
        let members = self.rules.members(unit, self.variables.keys().map(String::as_str));
        if members.is_empty() {
            return Err(Error::CannotFindTensor { path: format!("{unit}.") }.bt());
        }
        let inner =
            |Member { name, inner_name }: Member| (inner_name, self.variables[&name].clone());
        let variables = members.into_iter().map(inner).collect();
        Ok(VarBuilder::from_tensors(variables, self.dtype, &self.device))
    }
}
