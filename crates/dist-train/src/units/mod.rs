//! Models built one unit at a time inside the loss.

pub(crate) mod accumulation;
pub(crate) mod backward;
pub(crate) mod freed_params;
pub(crate) mod keep_rules;
pub(crate) mod model;
pub(crate) mod outside_use;
pub(crate) mod prefetch;
pub(crate) mod rules;
pub(crate) mod session;
pub(crate) mod swap_storage;
pub(crate) mod unit_operation;

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use candle_nn::VarBuilder;
use dist_checkpoint::support::Listed;
use pmap_mesh::TensorTree;

use self::rules::{Member, UnitRules};
use crate::{
    parameters::declare::declare,
    units::{session::Session, unit_operation::enter},
};

/// The variables of a model that builds its layers inside the loss. A loss borrows `Units` if its
/// model was built [by units](crate::ModelBuilder::by_units). A [sharded](crate::FullyShard) model
/// gathers the variables of one unit at a time; a [replicated](crate::DataParallel) model always
/// has all variables.
///
/// A *unit* is a named part of the model: the unit `blocks.3` consists of the variables
/// `blocks.3.*`, and [`UnitRules`] define other units. A loss written by units runs with both
/// layouts and gives the same bits. (PyTorch marks units with `fully_shard(module)`.)
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
pub struct Units(UnitSource);

#[derive(Debug)]
enum UnitSource {
    Replicated(ReplicatedUnits),
    Sharded(Arc<Session>),
}

/// All variables of a replicated model.
#[derive(Debug)]
struct ReplicatedUnits {
    rules: UnitRules,
    variables: BTreeMap<String, Tensor>,
    dtype: DType,
    device: Device,
}

impl Units {
    /// Returns a constructor of `Units` for use without training, for example with loaded weights.
    /// The constructor reads the variables that `build` requests from the `VarBuilder` with which
    /// it is called; `build` is the model's constructor for plain candle. A unit has the variables
    /// under its name, unless the rules define it.
    pub fn constructor<M>(
        rules: UnitRules,
        build: impl Fn(VarBuilder<'_>) -> Result<M>,
    ) -> impl Fn(VarBuilder<'_>) -> Result<Self> {
        move |vb| {
            let dtype = vb.dtype();
            Self::replicated(&rules, &build, dtype, &vb)
        }
    }

    /// Creates the units of a replicated model. `build` is called with `dtype`, in which the
    /// variables are stored; the model computes in the dtype of `vb`.
    pub(crate) fn replicated<M>(
        rules: &UnitRules,
        build: impl Fn(VarBuilder<'_>) -> Result<M>,
        dtype: DType,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let mut variables = BTreeMap::new();
        for declared in declare(build, dtype, vb.device())? {
            let vb = vb.to_dtype(declared.dtype);
            let variable = vb.get_with_hints(declared.shape, &declared.name, declared.init)?;
            variables.insert(declared.name, variable);
        }
        Ok(Self(UnitSource::Replicated(ReplicatedUnits {
            rules: rules.clone(),
            variables,
            dtype: vb.dtype(),
            device: vb.device().clone(),
        })))
    }

    pub(crate) fn sharded(session: Arc<Session>) -> Self {
        Self(UnitSource::Sharded(session))
    }

    /// Applies `f` to `x` with layers built from a unit's variables. The builder passed to `f`
    /// contains the variables with names that begin with `name.`, without this prefix, or the variables
    /// defined by the [rules](UnitRules::unit). Inputs and results are tensors of any dtypes or
    /// [trees](TensorTree) of tensors; integers among them have no gradient.
    ///
    /// A sharded model runs `f` again in the backward pass, so `f` must own its captures and give
    /// the same result both times: derive random numbers from a key made before the unit
    /// ([`Replica::batch_keys`](pmap_mesh::Replica::batch_keys)). Pass tensors that need a gradient
    /// through `x`, several of them as a tuple; captured tensors get no gradient. Units cannot be
    /// nested, because a loss only borrows the model:
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
    /// Returns an error if there is no such unit, and the errors of `f`. A sharded model also
    /// returns [`TrainingError::Captured`](crate::TrainingError::Captured) if `f` captures a tensor
    /// that needs a gradient,
    /// [`TrainingError::ParameterOutsideUnit`](crate::TrainingError::ParameterOutsideUnit) if this
    /// tensor is a parameter of another unit, and the errors of
    /// [`Replica::gather_runs`](pmap_mesh::Replica::gather_runs): all replicas must enter the same
    /// units in the same order.
    pub fn unit<X, R, F>(&self, name: &str, x: &X, f: F) -> Result<R>
    where
        X: TensorTree,
        R: TensorTree,
        F: Fn(VarBuilder<'_>, &X) -> Result<R> + Send + Sync + 'static,
    {
        let result = match &self.0 {
            UnitSource::Replicated(units) => f(units.builder(name)?, x),
            UnitSource::Sharded(session) => enter(session, name, x, f),
        };
        result.map_err(|error| self.explain_missing(error, name))
    }

    /// Adds the names in a unit to the error of a parameter that its function does not find.
    fn explain_missing(&self, error: Error, unit: &str) -> Error {
        if !is_missing_tensor(&error) {
            return error;
        }
        let names = match &self.0 {
            UnitSource::Replicated(units) => units.members(unit),
            UnitSource::Sharded(session) => session.members(unit),
        };
        let names: Vec<String> = names.into_iter().map(|member| member.inner_name).collect();
        error.context(format!("unit {unit} has the parameters {}", Listed(&names)))
    }
}

/// Returns true if the cause of an error is a parameter that a variable builder does not have.
fn is_missing_tensor(error: &Error) -> bool {
    match error {
        Error::CannotFindTensor { .. } => true,
        Error::Context { inner, .. } | Error::WithBacktrace { inner, .. } => {
            is_missing_tensor(inner)
        }
        _ => false,
    }
}

impl ReplicatedUnits {
    fn members(&self, unit: &str) -> Vec<Member> {
        self.rules.members(unit, self.variables.keys().map(String::as_str))
    }

    fn builder(&self, unit: &str) -> Result<VarBuilder<'static>> {
        let members = self.members(unit);
        if members.is_empty() {
            let names: Vec<&str> = self.variables.keys().map(String::as_str).collect();
            bail!("no parameter is in unit {unit:?}; the model has {}", Listed(&names))
        }
        let variables = members
            .into_iter()
            .map(|Member { name, inner_name }| (inner_name, self.variables[&name].clone()))
            .collect();
        Ok(VarBuilder::from_tensors(variables, self.dtype, &self.device))
    }
}
