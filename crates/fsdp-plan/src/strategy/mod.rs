//! Strategies that assign parameters to ranks.

mod balance;
mod full;
mod hsdp;
mod hybrid;
mod layer_wise;
mod layout;
mod whole_tensor;

use core_types::WorldSize;

pub(crate) use self::layer_wise::LayerBalance;
pub use self::{
    full::Full,
    hsdp::Hsdp,
    hybrid::{Choice, Hybrid, Matches},
    layer_wise::{LayerSharing, LayerWise},
    layout::Layout,
    whole_tensor::WholeTensor,
};
use crate::{
    cut::Cut,
    error::Result,
    param::ParameterInfo,
    plan::{PlannedParameter, ShardingPlan},
};

/// A strategy to divide parameters over ranks.
///
/// To write a strategy, choose a [`Cut`] for each parameter; [`ShardingPlan::new`] checks the plan.
///
/// # Determinism
///
/// Every rank makes its own plan, so a plan must depend on nothing but the arguments.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     Cut, ElemType, ParameterInfo, PlannedParameter, Result, ShardingPlan,
///     strategy::ShardingStrategy,
/// };
///
/// /// Plain data parallelism: a copy of every parameter on every rank.
/// struct Ddp;
///
/// impl ShardingStrategy for Ddp {
///     fn name(&self) -> &str {
///         "ddp"
///     }
///
///     fn plan(
///         &self,
///         parameters: &[ParameterInfo],
///         world_size: WorldSize,
///     ) -> Result<ShardingPlan> {
///         let copy = |info: &ParameterInfo| PlannedParameter::new(info.clone(), Cut::Replicated);
///         ShardingPlan::new(self.name(), world_size, parameters.iter().map(copy).collect())
///     }
/// }
///
/// let plan = Ddp.plan(&[ParameterInfo::new("w", [3], ElemType::F32)?], WorldSize::new(2)?)?;
/// assert_eq!(plan.parameters()[0].cut(), Cut::Replicated);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
pub trait ShardingStrategy {
    /// Returns the name of the strategy, as stored in plans.
    fn name(&self) -> &str;

    /// Plans `parameters` for a world of `world_size` ranks.
    ///
    /// # Errors
    ///
    /// The errors of [`ShardingPlan::new`] and of the strategy.
    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan>;
}

impl<S: ShardingStrategy + ?Sized> ShardingStrategy for Box<S> {
    fn name(&self) -> &str {
        self.as_ref().name()
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        self.as_ref().plan(parameters, world_size)
    }
}

/// Builds a plan from the cuts of the [`divisible`] parameters, in their order.
///
/// This function alone handles the other parameters, so no strategy can lose one.
fn assemble(
    name: &str,
    world_size: WorldSize,
    parameters: &[ParameterInfo],
    cuts: Vec<Cut>,
) -> Result<ShardingPlan> {
    let mut cuts = cuts.into_iter();
    let mut planned = Vec::with_capacity(parameters.len());
    for info in parameters {
        let cut = if info.tied_to().is_some() {
            Cut::Tied
        } else if info.always_gather() {
            Cut::Replicated
        } else {
            #[expect(clippy::expect_used, reason = "strategies cut every divisible parameter")]
            cuts.next().expect("a cut for each divisible parameter")
        };
        planned.push(PlannedParameter::new(info.clone(), cut));
    }
    ShardingPlan::new(name, world_size, planned)
}

/// Returns the parameters that a strategy cuts: neither always gathered nor tied.
fn divisible(parameters: &[ParameterInfo]) -> Vec<&ParameterInfo> {
    parameters.iter().filter(|info| !info.always_gather() && info.tied_to().is_none()).collect()
}
